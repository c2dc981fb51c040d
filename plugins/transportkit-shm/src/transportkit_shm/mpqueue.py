"""The backend `mpqueue`: slots in shared memory, for processes that inherited a queue; only the contract is here.

It is for systems without memfd, or where the two processes can reach no common socket: all it needs is `/dev/shm` and
the queue that `pair` handed to the child. The memory is handed over once; after that nothing goes through the queue,
and a header says which slot to look at. What its ends have in common with those of `shm` is in `mapped`.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, ClassVar

from msgspec import Raw, Struct

from transportkit.errors import BackendError
from transportkit.transport import (
    API_VERSION,
    Match,
    Mismatch,
    Offer,
    Reach,
    Side,
    Site,
    Terms,
    Transport,
    Unavailable,
    Wiring,
)
from transportkit.wire import EMPTY, decode_as, raw
from transportkit_shm import __version__
from transportkit_shm.descriptor_queue import DescriptorQueue
from transportkit_shm.mapped import MappedExporter, MappedImporter, stopped
from transportkit_shm.queue_ends import Awaited, Parcel

if TYPE_CHECKING:
    from transportkit.deadline import Deadline

#: What to do where an end has inherited nothing.
REMEDY = "make both ends with `pair(ctx)` and hand one to a child process while it is started"


class Invitation(Struct, frozen=True):
    """Through which queue the memory comes.

    Args:
        queue: the mark of the queue that the exporter has inherited.
    """

    queue: str


class MpqueueTransport(Transport):
    """Shared memory between two processes that inherited their ends from one parent; needs neither memfd nor a path."""

    name: ClassVar[str] = "mpqueue"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = False
    rank: ClassVar[int] = 20
    device_slots: ClassVar[bool] = False

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """Try what it takes: a nameless file in shared memory and a socket pair."""
        if reason := _missing():
            return Unavailable(backend=cls.name, reason=reason)
        from transportkit_shm.unnamed import FOLDER, open_file

        try:
            os.close(open_file())
        except OSError as error:
            reason = f"no shared memory can be made in {FOLDER}: {error.strerror or error}"
            return Unavailable(backend=cls.name, reason=reason)
        try:
            for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
                end.close()
        except OSError as error:
            reason = f"the system refuses socket pairs that keep message boundaries: {error.strerror or error}"
            return Unavailable(backend=cls.name, reason=reason)
        return Offer(cls.name, cls.api_version, __version__)

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """Both ends were inherited; that theirs is the same queue is told by the invitation."""
        ours, theirs = sender.site, receiver.site
        if ours.boot_id != theirs.boot_id:
            return Mismatch("on another host")
        for role, site in (("sender", ours), ("receiver", theirs)):
            if site.link != "pair":
                return Mismatch(f"the {role} has not inherited its end: {REMEDY}")
        return Match(reach=Reach.HOST_MEMORY, note="ends inherited from one parent")

    @classmethod
    def inherit(cls, ctx: object) -> DescriptorQueue:
        """A queue for one pair of ends, whatever starts the child."""
        return DescriptorQueue.new()

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> MpqueueExporter:
        return MpqueueExporter(terms, wiring)

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> MpqueueImporter:
        return MpqueueImporter(terms, wiring)


class MpqueueExporter(MappedExporter):
    """Slots in an arena of its own.

    Raises:
        ResourceError: no memory, space or descriptor is left for it.
        BackendError: no queue was inherited, or the system refused the memory otherwise.
    """

    backend: ClassVar[str] = MpqueueTransport.name

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        from transportkit_shm import arena
        from transportkit_shm.unnamed import open_file

        queue = _inherited(wiring)
        queue.use("sender")
        layout = arena.Layout(terms.slots, terms.chunk_bytes)
        memory = arena.furnish(layout, open_file, backend=self.backend)
        try:
            super().__init__(arena.map_whole(memory, layout, self.backend), layout, terms.sender_device)
        except BaseException:
            os.close(memory)
            raise
        self._wiring = wiring
        self._invitation = raw(Invitation(queue.mark))
        (receiver,) = terms.receivers
        self._parcel = Parcel(queue, terms.token, receiver, memory, layout.nbytes)

    def invite(self, receiver: int) -> Raw:
        return self._invitation

    def connect(self, deadline: Deadline) -> None:
        """Put the arena's descriptor on the queue, then close it."""
        self._parcel.put(self._wiring, deadline)

    def abort(self) -> None:
        super().abort()
        self._parcel.abort()

    def close(self) -> None:
        super().close()
        self._parcel.close()


class MpqueueImporter(MappedImporter):
    """A mapping of the exporter's arena, whose descriptor comes through the queue.

    Raises:
        BackendError: no queue was inherited.
    """

    backend: ClassVar[str] = MpqueueTransport.name

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        super().__init__(terms)
        self._wiring = wiring
        self._queue = _inherited(wiring)
        self._awaited: Awaited | None = None

    def join(self, invitation: Raw) -> Raw:
        """Expect the memory; from now on it may come.

        Raises:
            ProtocolError: the invitation names no queue.
            BackendError: the exporter has inherited another queue, or this process has given its end up.
        """
        if decode_as(Invitation, invitation).queue != self._queue.mark:
            raise BackendError(
                f"the two ends have inherited different queues, those of different pairs: {REMEDY}",
                backend=self.backend,
            )
        if self._awaited is not None:
            self._awaited.close()
        self._awaited = Awaited(self._queue, self._terms.token, self._terms.receiver)
        return EMPTY

    def connect(self, deadline: Deadline) -> None:
        """Take the arena's descriptor off the queue, check the memory behind it, map it and close the descriptor.

        Raises:
            ResourceError: no descriptor or address space is left.
            BackendError: it did not come, or is no shared memory of the agreed size.
        """
        from transportkit_shm import arena, unnamed

        if self._aborted or self._awaited is None:
            raise stopped(self.backend)
        memory, nbytes = self._awaited.fetch(self._wiring, deadline)
        try:
            if nbytes != self._layout.nbytes:
                raise BackendError(
                    f"shared memory of {nbytes} bytes was announced, {self._layout.nbytes} were agreed",
                    backend=self.backend,
                )
            unnamed.check(memory, self._layout)
            self._whole = arena.map_whole(memory, self._layout, self.backend)
        finally:
            os.close(memory)

    def abort(self) -> None:
        super().abort()
        if self._awaited is not None:
            self._awaited.abort()

    def close(self) -> None:
        super().close()
        if self._awaited is not None:
            self._awaited.close()


def _missing() -> str:
    """What this platform lacks, in words; empty where nothing is."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SCM_RIGHTS"):
        return "this Python cannot send descriptors (SCM_RIGHTS)"
    return ""


def _inherited(wiring: Wiring) -> DescriptorQueue:
    if not isinstance(wiring.inherited, DescriptorQueue):
        raise BackendError(f"this end has inherited no queue: {REMEDY}", backend=MpqueueTransport.name)
    return wiring.inherited
