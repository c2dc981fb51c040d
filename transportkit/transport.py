"""The backend contract: what a plugin implements and what it is given; no decisions and no I/O belong here.

A backend is a subclass of `Transport`, registered under its name in the entry-point group ``transportkit.backends``.
It makes an `Exporter` on the sending side and an `Importer` on the receiving side. The core does all that is common:
it plans and packs chunks into the exporter's slots, sends a header for each down the link, checks digests, unpacks,
acknowledges and recycles.

The order of calls on one lane::

    sender                                    receiver
    exporter(terms, wiring)
    invite(receiver)          -- invitation -->  importer(terms, wiring), join(invitation)
    admit(receiver, reply)    <-- reply --
    connect(deadline)          both at once      connect(deadline)
    the trial, then each update, chunk by chunk:
    packing(slot), ready(slot), locate(slot, receiver)
                              -- header -->      attach(handle) where the export is new
    publish(slot, header)                        open(header, attached)
                                                 reading(header), release(header)
                              <-- ack --
    close()                                      detach(export), close()

All methods are called on the thread that uses the session, except `abort`, which may come from any thread. They may
raise `BackendError` and its subclasses (the text says what was wrong and what to do), `ProtocolError` where the other
end sent what it may not, and whatever `Wiring` and `Deadline` raise; any other exception is turned into a
`BackendError` by the core.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import select
from typing import TYPE_CHECKING, ClassVar

import attrs

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, ProtocolError
from transportkit.wire import EMPTY, Chunk, Location, Offer, Site, Terms, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from msgspec import Raw
    from torch import Tensor

__all__ = [
    "API_VERSION",
    "Exporter",
    "Importer",
    "Location",
    "Match",
    "Mismatch",
    "Offer",
    "Reach",
    "Side",
    "Site",
    "Terms",
    "Transport",
    "Unavailable",
    "Wiring",
]

#: The version of this contract. A backend declares the one it was written for.
API_VERSION = 1

#: How long `Wiring.lost` waits for the links to say why, in seconds.
NEWS_SECONDS = 1.0


class Reach(enum.IntEnum):
    """How near the two ends are for a backend; the nearer one costs less."""

    SAME_DEVICE = 0
    HOST_MEMORY = 1
    DEVICE_NETWORK = 2
    HOST_NETWORK = 3
    LINK = 4


@attrs.frozen
class Side:
    """One end of a possible pair, as its hello described it."""

    site: Site
    offer: Offer
    device: str
    torch: str
    allow_plaintext: bool = False


@attrs.frozen
class Match:
    """The backend can probably serve this pair; the trial will tell.

    Args:
        reach: how near the ends are.
        params: travels in `Terms.params` to the exporter and the importer.
        claims: what this receiver occupies on its lane; no two receivers of a lane may share a claim.
        note: one clause for the agreement, ``"same host and user"``.
    """

    reach: Reach
    params: Raw = EMPTY
    claims: frozenset[str] = frozenset()
    note: str = ""


@attrs.frozen
class Mismatch:
    """The backend cannot serve this pair, and why."""

    reason: str


class Wiring(abc.ABC):
    """What the core hands to an exporter or importer: its surroundings and the payload frames of the links."""

    site: Site
    """This side's own site."""
    inherited: object | None
    """What `Transport.inherit` returned in the parent, where the ends came from `pair`."""
    address: str
    """The path of the link's unix socket; empty where there is none."""
    allow_plaintext: bool = False
    """Whether this side's user allows bytes to cross a network unencrypted."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `PeerError` if a peer of this lane is gone, `BackendError` if it gave this backend up. Never blocks."""

    @abc.abstractmethod
    def wait_readable(self, fileno: int, deadline: Deadline) -> None:
        """Wait until a descriptor of the backend is readable, watching the links meanwhile.

        Raises what `check` raises, and `DeadlineError`.
        """

    def wait_writable(self, fileno: int, deadline: Deadline) -> None:
        """Wait until a descriptor of the backend takes bytes, as `wait_readable` does for the other direction."""
        with select.epoll() as poll:  # an epoll is readable itself once what it watches is ready
            poll.register(fileno, select.EPOLLOUT)
            self.wait_readable(poll.fileno(), deadline)

    def lost(self, error: BackendError) -> BackendError:
        """What to raise where the other end hung up on the backend's own channel: ``raise wiring.lost(error)``.

        Why it did comes down the link, perhaps a moment later. This waits that moment and raises what `check` raises;
        where the links have nothing to say, it returns ``error``.
        """
        try:
            with select.epoll() as nothing:
                self.wait_readable(nothing.fileno(), Deadline(NEWS_SECONDS, "reason from the peer"))
        except DeadlineError:
            pass
        return error

    def local_host(self, receiver: int) -> str:
        """The numeric address of this end of the link to that receiver (at an importer: of its own link).

        Empty for a link that is no TCP connection.
        """
        return ""

    def signal(self, receiver: int, data: Raw, deadline: Deadline) -> None:
        """Say a word to the other end: the exporter to the importer of ``receiver``, an importer to the exporter.

        Only while `Exporter.connect` or `Importer.connect` runs. It arrives in order, as `Exporter.hear` or
        `Importer.hear` at the other end, whose `connect` may not have begun. At most 128 KiB, 4096 in one direction.
        """
        raise BackendError("this wiring carries no signals")

    @abc.abstractmethod
    def send_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send one payload frame, the concatenation of ``parts``, down the link to ``receiver``."""

    def post_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """As `send_payload`, but it may return while a part has still to be written, so that several receivers are
        written to side by side. The memory of ``parts`` must stay as it is until the receiver's word for the chunk.
        """
        self.send_payload(receiver, parts, deadline)

    @abc.abstractmethod
    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        """The next payload frame on this receiver's link, at most ``limit`` bytes, else `ProtocolError`."""

    @abc.abstractmethod
    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        """Read the next payload frame, which must be exactly as long as ``view``, into it."""


class Exporter(abc.ABC):
    """The sending end of an agreed backend: owns the slots."""

    lasting: bool = True
    """Whether nothing waits any more, at either end, after an update that ended before its last chunk. Where something
    does, which would run into a time limit while nobody uses the session, the lane is made anew for the next update."""

    @property
    @abc.abstractmethod
    def slots(self) -> Sequence[Tensor]:
        """``terms.slots`` writable contiguous uint8 tensors of shape ``(terms.chunk_bytes,)``.

        The same objects every time, at addresses that are multiples of 64; readable after `abort` until `close`.
        """

    def invite(self, receiver: int) -> Raw:
        """What the importer of ``receiver`` needs to join; does not block."""
        return EMPTY

    def admit(self, receiver: int, reply: Raw) -> None:
        """Take the answer of ``receiver`` to its invitation; does not block."""

    def hear(self, receiver: int, data: Raw) -> None:
        """A word of the importer of ``receiver``, see `Wiring.signal`; does not block, and sends nothing itself.

        Called within the calls of `Wiring` that wait or look, and between the calls of the exporter; also before
        `connect`, but never before that receiver is admitted.
        """
        raise ProtocolError(f"{type(self).__name__} expects no signals")

    def connect(self, deadline: Deadline) -> None:
        """Meet the importers; may block. All invitations are out and all replies are in."""

    def locate(self, slot: int, receiver: int) -> Location:
        """Where the bytes of a slot are, for that receiver's header; cheap, called per chunk and receiver.

        A slot may be given other memory: an export with a new id then ``supersedes`` the old one, which `reclaim` gives
        back when that importer has unmapped it. An id is never used again.
        """
        return Location()

    def packing(self, slot: int) -> AbstractContextManager[object]:
        """Around the core's copies into the slot, to choose streams and the like."""
        return contextlib.nullcontext()

    def ready(self, slot: int, deadline: Deadline) -> None:
        """Return when the slot's bytes are in place; called before its header is sent."""

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        """Move the bytes, after the headers are on the links; nothing to do for mapped memory.

        ``header`` is that of the lane's first receiver; sizes and sequence number are the same for all.
        """

    def drop(self, receiver: int) -> None:
        """The receiver is gone; forget it. Does not block.

        A backend that cannot go on without one raises `BackendError` in `ready` from then on.
        """

    def reclaim(self, receiver: int, export: int, opened: bool) -> None:
        """This export is over for this receiver: what was counted or kept for it may be given back. Does not block.

        Called exactly once for each export that `locate` named to a receiver: when its importer has detached it, as it
        was superseded; after `drop`; or before `close`. In the last two cases the importer's process may have it mapped
        still.

        Args:
            opened: whether that importer is known to have opened it; if not, it may never have heard of it.
        """

    def abort(self) -> None:
        """Make a running or later call of this exporter fail soon. From any thread, never blocks."""

    def close(self) -> None:
        """Free everything. Idempotent; no call follows."""


class Importer(abc.ABC):
    """The receiving end of an agreed backend."""

    def join(self, invitation: Raw) -> Raw:
        """Take the invitation, return the reply; does not block."""
        return EMPTY

    def hear(self, data: Raw) -> None:
        """A word of the exporter, see `Wiring.signal`; does not block, and sends nothing itself.

        Called within the calls of `Wiring` that wait or look, and between the calls of the importer.
        """
        raise ProtocolError(f"{type(self).__name__} expects no signals")

    def connect(self, deadline: Deadline) -> None:
        """Meet the exporter; may block."""

    def attach(self, handle: Raw) -> Tensor:
        """Map an export: a uint8 tensor over all of it. Called exactly once per export id."""
        raise NotImplementedError(f"{type(self).__name__} was located in an export, but does not implement attach()")

    def detach(self, export: int) -> None:
        """Unmap an export. Called exactly once per export id, when nothing reads it any more."""

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        """The chunk's bytes, readable: a uint8 tensor of shape ``(header.nbytes,)``.

        By default the header's range of the attached export. A backend that copies lands the bytes in a slot of its own
        (`transportkit.lifecycle.Landing`) and returns that.
        """
        if attached is None:
            raise NotImplementedError(f"{type(self).__name__} locates no export, so it must implement open()")
        start, nbytes = header.location.offset, header.nbytes
        if not 0 <= start <= attached.numel() - nbytes or nbytes < 0:
            raise ProtocolError(
                f"the header points at {nbytes} bytes from {start} on, the export has {attached.numel()} bytes"
            )
        return attached[start : start + nbytes]

    def reading(self, header: Chunk) -> AbstractContextManager[object]:
        """Around the core's copies out of the chunk; at its exit the reads are done on the host."""
        return contextlib.nullcontext()

    def release(self, header: Chunk) -> None:
        """Nobody looks at the chunk any more; comes before its acknowledgement."""

    def abort(self) -> None:
        """Make a running or later call of this importer fail soon. From any thread, never blocks."""

    def close(self) -> None:
        """Free everything. Idempotent; no call follows."""


class Transport(abc.ABC):
    """An installed way of moving chunks."""

    name: ClassVar[str]
    """Equals the entry-point name."""
    api_version: ClassVar[int]
    """The `API_VERSION` this backend was written for."""
    fan_out: ClassVar[bool] = False
    """Whether one exporter may serve several importers."""
    rank: ClassVar[int] = 50
    """Order among backends of equal cost, lowest first."""
    device_slots: ClassVar[bool] = False
    """Whether slots are device memory; then ends on the CPU are staged and no digests are taken."""

    @classmethod
    @abc.abstractmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """What this backend can do here, or why it cannot. Cheap; leaves nothing behind, initialises no device."""

    @classmethod
    @abc.abstractmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """Whether these two could use the backend, on a lane that holds these claims already. Pure: both sides run
        it.
        """

    @classmethod
    def inherit(cls, ctx: object) -> object | None:
        """What `pair` must hand to a child process before it starts; picklable while a process is being started.

        Both processes have a copy, and either may be the sender. If it has a method ``close(role)``, the core calls
        that with ``"sender"`` or ``"receiver"`` for the end that a process will not use any more; it is idempotent.
        """
        return None

    @classmethod
    @abc.abstractmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        """Make the sending end; does not block. ``terms.receiver`` is -1."""

    @classmethod
    @abc.abstractmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        """Make the receiving end; does not block."""
