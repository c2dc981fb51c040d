"""Tests of updates that fail at one side: the next one is clean; and of bytes that come late, which is no failure."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest
import torch

from transportkit.errors import CallbackError, PeerError, TransportKitError
from transportkit.testing import ends
from transportkit.testing.calls import Call, HungError
from transportkit.testing.installing import installed
from transportkit.testing.journals import recording
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.samples import prints
from transportkit.testing.suite.contract import noise
from transportkit.testing.suite.subject import Subject
from transportkit.testing.suite.values import differing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from transportkit.session import Receiver
    from transportkit.testing.journals import Entry, Journal
    from transportkit.testing.samples import Print
    from transportkit.testing.sessions import Session

#: Seconds for which the receiver does nothing, so that the sender runs ahead, and into the middle of a chunk; and none,
#: so that the receiver waits for bytes when it hears that their update has failed.
PAUSES = (0.2, 0.0)

#: What the failing side says.
WORDS = "that is enough"

#: Size of a chunk, and how many of them an update has. No buffer of a socket holds one of the large ones.
SIZES = {"small": (500, 30), "large": ((4 << 20) + 13, 5)}


def fail_half_way(receiver: Receiver, pause: float) -> None:
    """Fail in the middle of an update."""
    seen: list[str] = []

    def function(pairs: list[tuple[str, Tensor]]) -> None:
        seen.extend(name for name, _ in pairs)
        if len(seen) >= 2:
            time.sleep(pause)
            raise ValueError(WORDS)

    with contextlib.suppress(CallbackError):
        receiver.apply(function)
        raise AssertionError("the update went through")


def take_slowly(receiver: Receiver, pause: float) -> None:
    """Be busy with the first tensor for so many seconds; the update must fail."""
    with contextlib.suppress(PeerError):
        for number, _ in enumerate(receiver.receive()):
            time.sleep(0 if number else pause)
        raise AssertionError("the update went through")


def broken_off(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A source that raises when it has given three of its tensors."""
    yield from list(tensors.items())[:3]
    raise ValueError(WORDS)


class Failures(Subject):
    """What a failed update leaves, and what may not count as one."""

    @pytest.mark.parametrize("fails", ["receiver", "sender"])
    @pytest.mark.parametrize("size", SIZES)
    def test_a_failed_update_leaves_the_next_one_clean(self, size: str, fails: str) -> None:
        chunk_bytes, count = SIZES[size]
        memory = torch.randint(0, 256, (chunk_bytes,), dtype=torch.uint8).to(self.device)
        tensors = {f"t{number}": memory.roll(number) for number in range(count)}
        expected = prints(tensors)
        transport = recording(self.subject())
        with installed(transport), self.session(transport, chunk_bytes=chunk_bytes, slots=2) as session:
            for pause in PAUSES:
                if fails == "receiver":
                    receiving, sending = session.receive(fail_half_way, pause), session.send(tensors)
                else:
                    receiving, sending = session.receive(take_slowly, pause), session.send(broken_off(tensors))
                told = self.ended(receiving, sending, transport.journal, "the update that fails")
                assert told[0] is None, told[0]
                assert WORDS in str(told[1]), f"the sender raised {told[1]!r}, and not why the update failed"
                self.clean(session, transport.journal, tensors, expected)

    def clean(
        self, session: Session, journal: Journal, tensors: Mapping[str, Tensor], expected: Mapping[str, Print]
    ) -> None:
        """Carry the update that follows a failed one."""
        receiving, sending = session.receive(ends.receive, expected), session.send(tensors)
        what = "the update that follows a failed one"
        told = self.ended(receiving, sending, journal, what)
        if told != [None, None]:
            pytest.fail(f"{what} fails: {blame(journal)}; the receiver raised {told[0]!r}, the sender {told[1]!r}")
        wrong = differing(receiving.result(0), expected)
        assert wrong == [], f"{what} brings other bytes: `open` took for its chunks what the failed one had left"

    def ended(
        self, receiving: Call[object], sending: Call[object], journal: Journal, what: str
    ) -> list[BaseException | None]:
        """What the two sides of an update raised."""
        try:
            return [receiving.error(self.patience + 2), sending.error(self.patience + 2)]
        except HungError as error:
            raise HungError(f"{what} does not end: {blame(journal)}; {_state(sending)}; {error}") from error

    def test_bytes_that_come_late_are_waited_for(self) -> None:
        with nothing_left(), self.lane(chunk_bytes=300, slots=2) as lane:
            lane.connect()
            assert lane.carry(0, noise(300, seed=1)) == [noise(300, seed=1)]
            data, deadline = noise(300, seed=2), lane.deadline("chunk")
            (header,) = lane.pack(1, data)
            opening = Call(lane.imports[0].open, header, deadline)
            for _ in range(3):  # the link has news meanwhile: of the update's end, say, which is not that of its bytes
                opening.wait(0.1)
                lane.loopback.importers[0].wake()
            publishing = Call(lane.exporter.publish, 1, header, lane.deadline("room for the chunk"))
            error = opening.error(self.patience)
            if error is not None:
                pytest.fail(
                    f"`open` raised {error!r} after {opening.seconds:.1f} s of the {lane.within:g} s of its deadline, "
                    "while the chunk was still to be published; let the deadline and `wiring` alone end the wait"
                )
            assert publishing.error(self.patience) is None
            chunk = opening.result(0)
            assert lane.read(0, chunk) == data, "`open` returned before the bytes were there"
            lane.release([chunk])


def blame(journal: Journal) -> str:
    """In words, which call of the backend was the first that raised in an update."""
    raised = next((entry for entry in list(journal.entries) if entry.error is not None and _number(entry)), None)
    if raised is None:
        return "no call of the backend in this process has raised"
    end, _, method = raised.method.partition(".")
    text = f"the {end}'s `{method}` of {_number(raised)} raised {raised.error!r}"
    published = [_number(entry) for entry in journal.of("publish") if entry.error is None]
    if end == "importer" and _number(raised) in published:
        return f"{text}, although the sender had published it"
    return text if isinstance(raised.error, TransportKitError) else f"{text}, which is none of this library's errors"


def _state(sending: Call[object]) -> str:
    """In words, what became of the sender's call."""
    return "the sender still sends" if sending.running else f"the sender raised {sending.error(0)!r}"


def _number(entry: Entry) -> str:
    """Which chunk a call was for; empty for a call without one."""
    return next((f"chunk {arg.seq} of update {arg.update}" for arg in entry.args if hasattr(arg, "seq")), "")
