"""The backend `shm`: slots in sealed memory that every importer fetches; only the contract's classes belong here.

What its ends have in common with those of `mpqueue` is in `mapped`.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, ClassVar

from msgspec import Raw, Struct

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
from transportkit_shm.mapped import MappedExporter, MappedImporter, stopped

if TYPE_CHECKING:
    from transportkit.deadline import Deadline
    from transportkit_shm.taker import Taker


class ShmOffer(Struct, frozen=True):
    """What one side tells of itself.

    Args:
        overflow_uid: the user id that stands for unknown users there.
    """

    overflow_uid: int = 65534


class ShmTransport(Transport):
    """Shared memory between processes of one user on one Linux host; one arena serves any number of receivers."""

    name: ClassVar[str] = "shm"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = True
    rank: ClassVar[int] = 10
    device_slots: ClassVar[bool] = False

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """Try what it takes: a sealed memory file and descriptors through a unix socket."""
        if reason := _missing():
            return Unavailable(backend=cls.name, reason=reason)
        import fcntl

        from transportkit_shm.arena import SEALS, open_memory
        from transportkit_shm.handover import overflow_uid

        try:
            memory = open_memory()
            try:
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            finally:
                os.close(memory)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET):
                pass
        except OSError as error:
            reason = f"the system refuses sealed memory files or unix sockets: {error.strerror or error}"
            return Unavailable(backend=cls.name, reason=reason)
        return Offer(cls.name, cls.api_version, __version__, params=raw(ShmOffer(overflow_uid=overflow_uid())))

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """Same boot, same user, and a descriptor socket that both can reach; anything subtler is left to the trial."""
        ours, theirs = sender.site, receiver.site
        if not ours.boot_id or ours.boot_id != theirs.boot_id:
            return Mismatch("on another host")
        if ours.uid != theirs.uid:
            return Mismatch(f"another user: the sender has uid {ours.uid}, the receiver uid {theirs.uid}")
        if ours.uid < 0 or ours.uid in {_offer(sender).overflow_uid, _offer(receiver).overflow_uid}:
            return Mismatch(
                f"uid {ours.uid} on both sides stands for unknown users, so it cannot be told whether they are one"
            )
        files = ours.link == theirs.link == "unix"
        if not files and ours.namespaces.get("net") != theirs.namespaces.get("net"):
            return Mismatch("its descriptor socket is not reachable from another network namespace")
        return Match(reach=Reach.HOST_MEMORY, note="same host and user")

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> ShmExporter:
        return ShmExporter(terms, wiring)

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> ShmImporter:
        return ShmImporter(terms, wiring)


class ShmExporter(MappedExporter):
    """Slots in an arena of its own.

    Raises:
        ResourceError: no memory, space or descriptor is left for it.
        BackendError: the system refused it otherwise.
    """

    backend: ClassVar[str] = ShmTransport.name

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        from transportkit_shm import arena
        from transportkit_shm.giver import Giver

        self._wiring = wiring
        layout = arena.Layout(terms.slots, terms.chunk_bytes)
        memory = arena.create(layout)
        try:
            super().__init__(arena.map_whole(memory, layout), layout, terms.sender_device)
        except BaseException:
            os.close(memory)
            raise
        self._giver = Giver(memory, terms.token, terms.receivers, terms.lane, wiring.address)
        self._invitation = raw(self._giver.invitation)

    def invite(self, receiver: int) -> Raw:
        return self._invitation

    def connect(self, deadline: Deadline) -> None:
        """Hand the arena's descriptor to every importer, then close it."""
        self._giver.serve(self._wiring, deadline)

    def drop(self, receiver: int) -> None:
        self._giver.drop(receiver)

    def abort(self) -> None:
        super().abort()
        self._giver.abort()

    def close(self) -> None:
        super().close()
        self._giver.close()


class ShmImporter(MappedImporter):
    """A mapping of the exporter's arena, whose descriptor it fetches."""

    backend: ClassVar[str] = ShmTransport.name

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        super().__init__(terms)
        self._wiring = wiring
        self._taker: Taker | None = None

    def join(self, invitation: Raw) -> Raw:
        """Raises `ProtocolError` for an invitation that names no socket."""
        from transportkit_shm.handover import Invitation
        from transportkit_shm.taker import Taker

        where = decode_as(Invitation, invitation)
        self._taker = Taker(where, self._terms.token, self._terms.receiver, self._wiring.address)
        return EMPTY

    def connect(self, deadline: Deadline) -> None:
        """Fetch the arena's descriptor, check the memory behind it, map it and close the descriptor.

        Raises:
            ResourceError: no descriptor or address space is left.
            BackendError: nobody listens, no descriptor came, or it is not a sealed memory file of the agreed size.
        """
        from transportkit_shm import arena

        if self._aborted or self._taker is None:
            raise stopped(self.backend)
        memory = self._taker.fetch(self._wiring, deadline)
        try:
            arena.check(memory, self._layout)
            self._whole = arena.map_whole(memory, self._layout)
        finally:
            os.close(memory)

    def abort(self) -> None:
        super().abort()
        if self._taker is not None:
            self._taker.abort()

    def close(self) -> None:
        super().close()
        if self._taker is not None:
            self._taker.close()


def _missing() -> str:
    """What this platform lacks, in words; empty where nothing is."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "this Python has no sealed memory files (memfd_create)"
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SCM_RIGHTS"):
        return "this Python cannot send descriptors (SCM_RIGHTS)"
    return ""


def _offer(side: Side) -> ShmOffer:
    return ShmOffer() if side.offer.params in (EMPTY, b"") else decode_as(ShmOffer, side.offer.params)
