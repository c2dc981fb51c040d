"""The exporter of both backends: rank 0 of the lane's group, from which every chunk is broadcast."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, ProtocolError
from transportkit.transport import Exporter
from transportkit.wire import decode_as, raw
from transportkit_collective.head import HEAD, Head
from transportkit_collective.meeting import Invitation, Reply, Word, exporter_host
from transportkit_collective.member import Member

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from msgspec import Raw
    from torch import Tensor

    from transportkit.transport import Terms, Wiring
    from transportkit.wire import Chunk
    from transportkit_collective.planes import Plane
    from transportkit_collective.runner import Job

#: Most bytes of the store's entries in one signal.
BATCH = 1 << 16


class CollectiveExporter(Exporter):
    """Rank 0. Receiver ``terms.receivers[i]`` is rank ``i + 1``.

    Raises:
        ResourceError: there is no memory for the slots.
    """

    lasting = False  # a broadcast that one side has begun, and the other will not, waits

    def __init__(self, terms: Terms, wiring: Wiring, plane: Plane) -> None:
        self._terms = terms
        self._wiring = wiring
        self._whole = plane.slots(terms.slots, terms.chunk_bytes)
        self._slots = tuple(whole[HEAD : HEAD + terms.chunk_bytes] for whole in self._whole)
        self._member = Member(plane, wiring, terms.backend, len(terms.receivers) + 1)
        self._beside: dict[int, bool] = {}
        self._formed: set[int] = set()
        self._over = True
        """Whether the chunk before was its update's last one."""
        self._words: list[tuple[int, Word]] = []
        self._jobs: list[Job[None]] = []
        self._of_slot: dict[int, Job[None]] = {}

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    # -- the meeting --------------------------------------------------------------------------------------------------

    def invite(self, receiver: int) -> Raw:
        return raw(Invitation.of(self._wiring.site))

    def admit(self, receiver: int, reply: Raw) -> None:
        self._beside[receiver] = decode_as(Reply, reply).beside

    def hear(self, receiver: int, data: Raw) -> None:
        """Pass on to the other importers what this one says."""
        word = decode_as(Word, data)
        if receiver not in self._beside:
            raise ProtocolError(f"receiver {receiver} sent a signal before it was admitted")
        if word.entries:
            self._member.store.put(word.entries)
            self._tell(word.entries, beside=receiver)
        if word.formed:
            self._formed.add(receiver)
        self._member.bell.ring()

    def connect(self, deadline: Deadline) -> None:
        """Form the group with every importer. Raises `BackendError` where one cannot be reached."""
        missing = [number for number in self._terms.receivers if number not in self._beside]
        if missing:
            raise BackendError(f"receivers {missing} were not admitted", backend=self._terms.backend)
        host = exporter_host(self._beside, self._wiring, self._terms.backend)
        forming = self._member.form(0, host, deadline)
        self._words[:0] = [(number, Word(host=host)) for number in self._terms.receivers]
        while True:
            self._tell(self._member.store.take_untold())
            self._flush(deadline)
            if forming.done:
                self._member.result(forming, deadline)
                if self._formed.issuperset(self._terms.receivers):
                    return
            self._member.turn(deadline)

    def _tell(self, entries: dict[str, bytes], beside: int | None = None) -> None:
        if entries:
            others = [number for number in self._terms.receivers if number != beside]
            self._words += [(number, Word(entries=entries)) for number in others]

    def _flush(self, deadline: Deadline) -> None:
        """Send the words that wait; several to one receiver travel together."""
        words, self._words = self._words, []
        merged: dict[int, Word] = {}
        for number, word in words:
            earlier = merged.pop(number, Word())
            size = sum(map(len, earlier.entries.values())) + sum(map(len, word.entries.values()))
            if size > BATCH:
                self._wiring.signal(number, raw(earlier), deadline)
                earlier = Word()
            merged[number] = Word(host=earlier.host or word.host, entries=earlier.entries | word.entries)
        for number, word in merged.items():
            self._wiring.signal(number, raw(word), deadline)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def packing(self, slot: int) -> AbstractContextManager[object]:
        """Waits for a broadcast of this slot that is not over; its readers have acknowledged it, so it nearly is."""
        job = self._of_slot.pop(slot, None)
        if job is not None and not job.done:
            self._member.result(job, Deadline(60.0, f"end of the last broadcast of slot {slot}"))
        return self._member.plane.packing(slot)

    def ready(self, slot: int, deadline: Deadline) -> None:
        """Raise here, before a header leaves, what has become of the group."""
        self._member.check()
        self._jobs = self._member.look(self._jobs)

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        """Begin the broadcast; its failure surfaces at a later call, unless the receivers tell it first.

        The headers are out, so it begins in any case; only then may this wait, for the one before.
        """
        head = Head(header.last, header.update, header.seq, header.nbytes)
        give = functools.partial(self._member.plane.give, self._whole[slot], head, first=self._over)
        self._over = header.last
        job = self._member.begin(give)
        self._jobs.append(job)
        self._of_slot[slot] = job
        while len(self._jobs) > self._terms.slots:
            self._member.result(self._jobs[0], deadline)
            self._jobs = self._member.look(self._jobs)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drop(self, receiver: int) -> None:
        """A group cannot go on without one of its ranks: it ends for all of them."""
        self._member.end(f"receiver {receiver} is gone, and a group does not go on without one of its ranks")

    def abort(self) -> None:
        self._member.end("it was aborted")

    def close(self) -> None:
        self._member.close()
        self._slots, self._whole = (), ()
        self._jobs.clear()
        self._of_slot.clear()
