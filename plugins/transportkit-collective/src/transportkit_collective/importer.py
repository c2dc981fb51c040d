"""The importer of both backends: one rank of the lane's group, which lands every chunk in a slot of its own."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, LeaseError, ProtocolError
from transportkit.transport import Importer
from transportkit.wire import decode_as, raw
from transportkit_collective.head import HEAD
from transportkit_collective.meeting import Word, answer, importer_host
from transportkit_collective.member import Member

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from msgspec import Raw
    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.transport import Terms, Wiring
    from transportkit.wire import Chunk
    from transportkit_collective.head import Head
    from transportkit_collective.planes import Plane
    from transportkit_collective.runner import Job


class CollectiveImporter(Importer):
    """Rank ``i + 1`` for receiver ``terms.receivers[i]``. Raises `ResourceError` where there is no memory."""

    def __init__(self, terms: Terms, wiring: Wiring, plane: Plane) -> None:
        self._terms = terms
        self._wiring = wiring
        self._free = list(plane.slots(terms.slots, terms.chunk_bytes))
        self._taken: dict[tuple[int, int], Tensor] = {}
        self._ahead: collections.deque[tuple[Job[Head], Tensor]] = collections.deque()
        self._member = Member(plane, wiring, terms.backend, len(terms.receivers) + 1)
        self._over = True
        """Whether the chunk that came last was its update's last one, or none has come."""
        self._due: tuple[int, int] | None = None
        """The chunk that comes next for certain; None where others may come before the next one that is opened."""
        self._beside: bool | None = None
        self._host = ""

    # -- the meeting --------------------------------------------------------------------------------------------------

    def join(self, invitation: Raw) -> Raw:
        """Raises `ProtocolError` for what is no invitation."""
        reply = answer(invitation, self._wiring.site)
        self._beside = reply.beside
        return raw(reply)

    def hear(self, data: Raw) -> None:
        word = decode_as(Word, data)
        self._member.store.put(word.entries)
        self._host = self._host or word.host
        self._member.bell.ring()

    def connect(self, deadline: Deadline) -> None:
        """Form the group with the exporter and the other importers."""
        if self._beside is None:
            raise BackendError("this end was not invited", backend=self._terms.backend)
        receiver = self._terms.receiver
        while not self._host:
            self._member.turn(deadline)
        host = importer_host(self._beside, self._host, self._wiring, receiver, self._terms.backend)
        rank = self._terms.receivers.index(receiver) + 1
        forming = self._member.form(rank, host, deadline)
        store = self._member.store
        while not forming.done:
            self._tell(Word(entries=store.take_untold()), deadline)
            self._member.turn(deadline)
        self._member.result(forming, deadline)
        self._tell(Word(entries=store.take_untold(), formed=True), deadline)

    def _tell(self, word: Word, deadline: Deadline) -> None:
        if word != Word():
            self._wiring.signal(self._terms.receiver, raw(word), deadline)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        """Land the chunk: a uint8 tensor of shape ``(header.nbytes,)``, in place until `release`.

        Chunks that nobody has opened, of an update that failed, are passed over.

        Raises:
            ProtocolError: another chunk came than the header says; the group has ended then.
            LeaseError: every landing slot is held by a lease.
        """
        self._member.check()
        wanted = header.update, header.seq
        if not 0 <= header.nbytes <= self._terms.chunk_bytes:
            raise ProtocolError(
                f"chunk {header.seq} claims {header.nbytes} bytes, the agreed limit is {self._terms.chunk_bytes}"
            )
        following = self._member.plane.ahead and not header.last
        if following and wanted == self._due and len(self._ahead) == 1 and self._free:
            self._ask()  # what comes after this one; this one itself is on its way
        while True:
            if not self._ahead:
                self._ask()
            job, slot = self._ahead[0]
            head = self._member.result(job, deadline)
            self._ahead.popleft()
            self._over = head.last
            if head.chunk >= wanted:
                break
            self._free.append(slot)
        if head.chunk != wanted or head.nbytes != header.nbytes:
            said = f"chunk {header.seq} of update {header.update} with {header.nbytes} bytes"
            came = f"chunk {head.seq} of update {head.update} with {head.nbytes} bytes"
            self._member.end("it carried another chunk than its header said")
            raise ProtocolError(f"the header says {said}, the {self._terms.backend} group carried {came}")
        self._taken[wanted] = slot
        self._due = None
        if following:
            self._due = header.update, header.seq + 1
            if not self._ahead and self._free:
                self._ask()
        return slot[HEAD : HEAD + head.nbytes]

    def reading(self, header: Chunk) -> AbstractContextManager[object]:
        return self._member.plane.reading()

    def release(self, header: Chunk) -> None:
        slot = self._taken.pop((header.update, header.seq), None)
        if slot is not None:
            self._free.append(slot)

    def _ask(self) -> None:
        """Have the next chunk land in a free slot."""
        if not self._free:
            raise LeaseError(
                f"all {self._terms.slots} landing slots are held by leases; release earlier chunks or raise `slots=`"
            )
        slot = self._free.pop()
        take = functools.partial(self._member.plane.take, slot, first=self._over)
        self._ahead.append((self._member.begin(take), slot))

    # -- the end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._member.end("it was aborted")

    def close(self) -> None:
        """Let go of the group; slots that are still viewed stay."""
        self._member.close()
        self._free.clear()
        self._taken.clear()
        self._ahead.clear()
