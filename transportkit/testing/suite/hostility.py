"""Tests of what a lying peer can do: whatever does not hold ends in one of our own errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from transportkit.errors import TransportKitError
from transportkit.testing import ends
from transportkit.testing.calls import bounded
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.samples import bulk, prints
from transportkit.testing.suite.contract import noise
from transportkit.testing.suite.declaration import GARBAGE
from transportkit.testing.suite.subject import Subject
from transportkit.wire import Chunk, Location, Piece, raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from transportkit import wire

HUGE = (1 << 62) + 7


def _piece(header: Chunk, **changes: int) -> Chunk:
    pieces = list(header.pieces or ())
    pieces[-1] = Piece(**{name: changes.get(name, getattr(pieces[-1], name)) for name in Piece.__struct_fields__})
    return msgspec.structs.replace(header, pieces=tuple(pieces))


def _at(header: Chunk, **changes: Any) -> Chunk:
    return msgspec.structs.replace(header, location=msgspec.structs.replace(header.location, **changes))


def _as(**changes: Any) -> Callable[[Chunk], Chunk]:
    return lambda header: msgspec.structs.replace(header, **changes)


#: Where a header says that the bytes are.
LOCATIONS: dict[str, Callable[[Chunk], Chunk]] = {
    "offset_beyond": lambda h: _at(h, offset=h.location.offset + (1 << 40)),
    "offset_huge": lambda h: _at(h, offset=HUGE),
    "offset_unsigned": lambda h: _at(h, offset=(1 << 64) - 1),
    "offset_negative": lambda h: _at(h, offset=-1),
    "offset_very_negative": lambda h: _at(h, offset=-HUGE),
    "another_export": lambda h: _at(h, export=4711),
    "export_negative": lambda h: _at(h, export=-1),
    "no_export": lambda h: _at(h, export=None),
    "no_location": lambda h: msgspec.structs.replace(h, location=Location()),
    "another_handle": lambda h: _at(h, export=4712, handle=raw({"nbytes": HUGE})),
    "garbage_handle": lambda h: _at(h, export=4713, handle=raw([1, "x"])),
}

#: What else a header says.
HEADERS: dict[str, Callable[[Chunk], Chunk]] = {
    "nbytes_huge": _as(nbytes=HUGE),
    "nbytes_more": lambda h: msgspec.structs.replace(h, nbytes=h.nbytes + 1),
    "nbytes_less": lambda h: msgspec.structs.replace(h, nbytes=h.nbytes - 1),
    "nbytes_negative": _as(nbytes=-1),
    "another_digest": lambda h: msgspec.structs.replace(h, digest=h.digest ^ 1),
    "another_seq": lambda h: msgspec.structs.replace(h, seq=h.seq + 1),
    "seq_again": lambda h: msgspec.structs.replace(h, seq=max(0, h.seq - 1)),
    "seq_negative": _as(seq=-1),
    "another_update": _as(update=99),
    "another_receiver": _as(receiver=7),
    "no_pieces": _as(pieces=None),
    "piece_of_another_tensor": lambda h: _piece(h, tensor=10_000),
    "piece_too_long": lambda h: _piece(h, nbytes=1 << 40),
    "piece_negative": lambda h: _piece(h, nbytes=-5),
    "piece_misaligned": lambda h: _piece(h, offset=3),
    "piece_elsewhere": lambda h: _piece(h, start=1),
}


def _asked(header: Chunk, attached: Tensor | None) -> str:
    """What a header asks for, in words."""
    start, nbytes = header.location.offset, header.nbytes
    if attached is None:
        return f"a header of {nbytes} bytes at {header.location}"
    inside = 0 <= start <= start + nbytes <= attached.numel()
    return f"offset {start} and {nbytes} bytes, {'in' if inside else 'out'}side the attached {attached.numel()} bytes"


class Hostility(Subject):
    """Headers, handles, invitations and replies that do not hold."""

    @pytest.mark.parametrize("kind", [*LOCATIONS, "nbytes_huge", "nbytes_negative", "nbytes_more", "another_seq"])
    def test_a_header_that_does_not_hold_is_refused(self, kind: str) -> None:
        with nothing_left():
            self.open_hostile((LOCATIONS | HEADERS)[kind])

    def open_hostile(self, change: Callable[[Chunk], Chunk]) -> None:
        with self.lane(chunk_bytes=300, slots=2) as lane:
            lane.connect()
            assert lane.carry(0, noise(300, seed=1)) == [noise(300, seed=1)]
            (header,) = lane.pack(1, noise(300, seed=2))
            lane.exporter.publish(1, header, lane.deadline("room"))
            hostile = change(header)
            importer, attached, step = lane.importers[0], None, "open"
            try:
                if hostile.location.export is not None:
                    attached = lane.imports[0]._attached.get(hostile.location.export)
                    if attached is None:
                        step = "attach"
                        attached = importer.attach(hostile.location.handle)
                step = "open"
                got = bounded(self.patience, importer.open, hostile, attached, lane.deadline("chunk", 1.0))
            except (TransportKitError, NotImplementedError):
                return
            except AssertionError:
                raise
            except Exception as error:
                pytest.fail(
                    f"`{step}` raised {error!r} for {_asked(hostile, attached)}; check what the header says before it "
                    "is used, and raise `ProtocolError`"
                )
            if tuple(got.shape) == (hostile.nbytes,):  # else the core refuses it
                seen = bytes(got.cpu().tolist())[:300]
                assert seen in (noise(300, seed=2), noise(300, seed=1)), (
                    f"`open` accepted {_asked(hostile, attached)}, and read something else; raise `ProtocolError`"
                )

    @pytest.mark.parametrize("kind", [*LOCATIONS, *HEADERS])
    def test_a_lie_in_a_session_ends_in_an_error_or_the_right_value(self, kind: str) -> None:
        self.in_one_process()
        change = (LOCATIONS | HEADERS)[kind]
        tensors = bulk(3000)
        expected = prints(tensors)

        def lie(message: wire.Message) -> wire.Message:
            chosen = isinstance(message, Chunk) and message.update == 1 and message.seq == 2
            return change(message) if chosen else message  # type: ignore[arg-type]

        with nothing_left():
            with self.session(chunk_bytes=400, slots=2, timeout=2.0) as session:
                session.outward.change = lie
                receiving = session.receive(ends.receive, expected)
                sending = session.send(tensors)
                error = receiving.error(self.patience)
                if error is None:
                    assert receiving.result(0) == expected
                else:
                    assert isinstance(error, TransportKitError), repr(error)
                    told = sending.error(self.patience)
                    assert isinstance(told, TransportKitError), repr(told)
                    del told
            del session, receiving, sending, error

    def test_invitations_and_replies_of_a_liar(self) -> None:
        for data in GARBAGE:
            with nothing_left(), self.lane() as lane:
                for step, *args in (
                    (lane.exporter.admit, 0, msgspec.Raw(data)),
                    (lane.importers[0].join, msgspec.Raw(data)),
                ):
                    try:
                        bounded(self.patience, step, *args)
                    except TransportKitError:
                        continue

    @pytest.mark.parametrize("steps", ["invited", "connected"])
    def test_signals_of_a_liar(self, steps: str) -> None:
        for data in GARBAGE:
            with nothing_left(), self.lane() as lane:
                lane.connect() if steps == "connected" else lane.invite()
                for step, *args in (
                    (lane.exporter.hear, 0, msgspec.Raw(data)),
                    (lane.importers[0].hear, msgspec.Raw(data)),
                ):
                    try:
                        bounded(self.patience, step, *args)
                    except TransportKitError:
                        continue

    def test_payloads_of_a_liar(self) -> None:
        for data in (b"", b"\x80\x05.", b"x" * 5000, b"cposix\nsystem\n(S'exit 1'\ntR."):
            with nothing_left(), self.lane(chunk_bytes=300, slots=2) as lane:
                lane.connect()
                (header,) = lane.pack(0, noise(300, seed=3))
                for _ in range(4):
                    lane.loopback.feed(0, data)
                try:
                    lane.imports[0].open(header, lane.deadline("chunk", 1.0))
                except TransportKitError:
                    continue
