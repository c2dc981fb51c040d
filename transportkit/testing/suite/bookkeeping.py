"""Tests of the balance of a session's calls, read off a journal: attach and detach, open and release, the trial."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from transportkit.errors import NegotiationError, PeerError, TransportKitError
from transportkit.testing import ends
from transportkit.testing.faults import altered, faulty
from transportkit.testing.installing import installed
from transportkit.testing.journals import recording
from transportkit.testing.leftovers import nothing_left, resident
from transportkit.testing.samples import bulk, prints
from transportkit.testing.suite.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.testing.journals import Entry
    from transportkit.transport import Transport
    from transportkit.wire import Chunk


AGREED = "it was agreed"


def header_of(entry: Entry) -> Chunk:
    found: Chunk = next(arg for arg in entry.args if hasattr(arg, "seq"))
    return found


def other_bytes(call: Callable[[], torch.Tensor], header: Chunk, *_: Any) -> torch.Tensor:
    """What a backend would show that carries nothing."""
    call()
    return torch.zeros(header.nbytes, dtype=torch.uint8)


class Bookkeeping(Subject):
    """Attach and detach, open and release, bounds, the trial, steady state."""

    @pytest.mark.parametrize("slots", [1, 3])
    def test_every_call_has_its_counterpart(self, slots: int) -> None:
        self.in_one_process()
        transport = recording(self.subject())
        journal = transport.journal
        with installed(transport):
            with self.session(transport, chunk_bytes=700, slots=slots) as session:
                for seed, way in enumerate(ends.WAYS):
                    tensors = bulk(8000, seed)
                    session.carry(tensors, ends.WAYS[way], prints(tensors))
            session.close()
        assert [e for e in journal.entries if e.error is not None] == []
        opened = [header_of(e) for e in journal.of("open")]
        released = [header_of(e) for e in journal.of("release")]
        published = [header_of(e) for e in journal.of("publish")]
        chunks = [(h.update, h.seq) for h in opened]
        assert len(set(chunks)) == len(chunks), "a chunk was opened twice"
        assert Counter(chunks) == Counter((h.update, h.seq) for h in released), "open and release do not balance"
        assert chunks == [(h.update, h.seq) for h in published]
        assert max(h.nbytes for h in opened) <= 700, "a chunk is above the agreed bound"
        assert journal.count("ready") == len(opened)
        assert opened[0].update < 0, "no trial was carried"
        assert {h.update for h in opened} >= {1, 2, 3, 4}
        for end in ("exporter.close", "importer.close", "exporter.connect", "importer.connect"):
            assert journal.count(end) == 1, end

        exports = {h.location.export for h in opened} - {None}
        assert journal.count("attach") == len(exports) <= slots, "an export is attached once, and made once per slot"
        assert sorted(e.args[0] for e in journal.of("detach")) == sorted(exports)  # type: ignore[type-var]
        reclaimed = [e.args[:2] for e in journal.of("reclaim")]
        assert sorted(reclaimed) == sorted((0, export) for export in exports), "an export is reclaimed once"
        methods = [e.method for e in journal.entries]
        if exports:
            assert methods.index("importer.attach") < methods.index("importer.open")
            assert methods.index("importer.detach") > max(i for i, m in enumerate(methods) if m == "importer.release")

    def test_a_slot_is_packed_again_only_after_its_release(self) -> None:
        self.in_one_process()
        transport = recording(self.subject())
        with installed(transport), self.session(transport, chunk_bytes=200, slots=2) as session:
            transport.journal.clear()
            session.carry(bulk(9000), ends.receive, {})
            entries = list(transport.journal.entries)
        holds: dict[int, tuple[int, int]] = {}
        released: set[tuple[int, int]] = set()
        for entry in entries:
            if entry.method == "importer.release":
                released.add((header_of(entry).update, header_of(entry).seq))
            elif entry.method == "exporter.packing":
                assert holds.get(entry.args[0]) is None or holds[entry.args[0]] in released, "packed under a reader"
            elif entry.method == "exporter.publish":
                holds[entry.args[0]] = (header_of(entry).update, header_of(entry).seq)
        assert len(released) > 20

    def refusal(self, transport: type[Transport], **keywords: Any) -> str:
        """The text with which a session over this backend is refused."""
        try:
            session = self.session(transport, **keywords)
        except (NegotiationError, PeerError) as error:
            return str(error)
        session.close()
        return AGREED

    @pytest.mark.parametrize("checksum", [None, False])
    def test_the_trial_is_really_carried(self, checksum: bool | None) -> None:
        self.in_one_process()
        transport = altered(self.subject(), at="open", change=other_bytes)
        with installed(transport), nothing_left():
            assert "trial failed" in self.refusal(transport, checksum=checksum)

    @pytest.mark.parametrize(
        "at",
        ["transport.exporter", "transport.importer", "invite", "join", "admit", "exporter.connect", "importer.connect",
         "slots", "packing", "ready", "locate", "publish", "open", "reading", "release"],
    )  # fmt: skip
    def test_a_backend_that_fails_at_the_start_is_struck(self, at: str) -> None:
        self.in_one_process()
        transport = faulty(self.subject(), at=at, error=OSError(5, "made to fail"))
        with installed(transport), nothing_left():
            told = self.refusal(transport)
            assert told != AGREED
            # A trial whose bytes go down the link may leave some of them there, and then there is nobody to tell.
            assert at in ("importer.connect", "open", "reading", "release") or "made to fail" in told, told

    @pytest.mark.parametrize("at", ["exporter.connect", "importer.connect", "publish", "open", "release"])
    @pytest.mark.parametrize("chunk_bytes", [1, 1000])
    def test_a_failed_trial_leaves_the_next_backend_its_chance(self, at: str, chunk_bytes: int) -> None:
        self.in_one_process()
        if self.subject().name == "pickle":
            pytest.skip("nothing comes after the fallback")
        transport = faulty(self.subject(), at=at, error=OSError(5, "made to fail"))
        with installed(transport), nothing_left():
            with self.session(transport, backends=(transport.name, "pickle"), chunk_bytes=chunk_bytes) as session:
                assert session.sender.agreement.backend(0) == "pickle"
                assert "made to fail" in str(session.sender.agreement)
                assert session.carry({"x": torch.ones(5, device=self.device)}, ends.count, 1) == 20
            del session

    @pytest.mark.parametrize("at", ["packing", "ready", "locate", "publish", "open", "reading", "release"])
    def test_a_backend_that_fails_in_an_update_fails_it_on_both_sides(self, at: str) -> None:
        self.in_one_process()
        # The trial makes one call of each, so the fifth one is in the first update.
        transport = faulty(self.subject(), at=at, nth=5, error=OSError(5, "made to fail"))
        with installed(transport), nothing_left():
            with self.session(transport, chunk_bytes=300, slots=2) as session:
                receiving = session.receive(ends.receive, {})
                sending = session.send(bulk(8000))
                errors = [receiving.error(self.patience), sending.error(self.patience)]
                assert all(isinstance(error, TransportKitError) for error in errors), errors
                own, other = errors if at in ("open", "reading", "release") else errors[::-1]
                assert "made to fail" in str(own)
                # Where the bytes go down the link, the receiver is in the middle of a payload when the sender fails.
                assert at == "publish" or "made to fail" in str(other), f"the reason is not told to the peer: {other}"
            del session, receiving, sending, errors, own, other

    def test_many_updates_leave_nothing(self) -> None:
        with self.session(chunk_bytes=1 << 18, slots=3) as session:
            tensors = {name: tensor.to(self.device) for name, tensor in bulk(4 << 20).items()}

            def once() -> None:
                assert session.carry(tensors, ends.count, 1) == sum(t.numel() for t in tensors.values())

            once()
            once()
            gc.collect()
            before = resident()
            with nothing_left():
                for _ in range(20):
                    once()
            gc.collect()
            assert resident() - before <= self.memory_slack, f"memory grew by {resident() - before} bytes in 20 updates"

    def test_many_sessions_leave_nothing(self) -> None:
        with self.session():
            pass
        with nothing_left():
            for _ in range(5):
                with self.session() as session:
                    assert session.carry({"x": torch.ones(5, device=self.device)}, ends.count, 1) == 20
                del session
