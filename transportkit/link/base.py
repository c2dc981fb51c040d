"""The frame, the contract of a link, and waiting for several links; nothing that knows sockets belongs here.

A frame is a kind (1 byte: 0 control, 1 payload), the length of its body in bytes (8, big-endian) and the body.
"""

from __future__ import annotations

import abc
import math
import os
import select
import struct
import weakref
from typing import TYPE_CHECKING, Protocol, Self

from transportkit.deadline import Deadline
from transportkit.errors import TransportKitError
from transportkit.wire import CONTROL_FRAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["CONTROL", "HEAD", "PAYLOAD", "Link", "close_in_child", "milliseconds", "wait"]

#: A frame's head: kind, and length of the body in bytes.
HEAD = struct.Struct("!BQ")
CONTROL = 0
PAYLOAD = 1

#: Longest single wait in the kernel, in seconds; longer ones are waited in turns.
_TURN = 3600.0


class Link(abc.ABC):
    """The control channel between two processes: ordered frames, both ways.

    One thread uses a link at a time; only `abort` may come from another one. A link in a forked child raises
    `ForkedError`. Every method but `abort` and `close` raises:

    - `ClosedError`: closed or aborted on this side, or unusable since an error in the middle of a frame;
    - `PeerLostError`: the peer is gone; complete frames that it sent before are delivered first;
    - `ForkedError`: the link belongs to the parent process.

    After a `ProtocolError`, or an error in the middle of a frame, the link is unusable: nobody knows where the next
    frame begins.
    """

    kind: str
    """``unix``, ``tcp``, ``pair`` or ``custom``."""
    path: str
    """The absolute path of the link's unix socket; empty where there is none."""
    local_host: str = ""
    """The numeric address of this end of a tcp link; empty for the others."""
    peer: str
    """Who is at the other end, in words; whoever learns more may set it."""
    control_limit: int = CONTROL_FRAME_LIMIT
    """Longest control frame that may come, in bytes; smaller while nothing is agreed."""
    renew_on_progress: bool = False
    """Whether every byte moved renews the deadline, which then bounds the lack of progress; else it bounds the call."""

    @abc.abstractmethod
    def send(self, body: bytes, deadline: Deadline) -> None:
        """Send one control frame. Raises `DeadlineError`; the link stays usable if nothing of the frame had left."""

    @abc.abstractmethod
    def send_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send one payload frame, the concatenation of ``parts`` (contiguous, of any item size). Raises as `send`."""

    def begin(self, body: bytes, deadline: Deadline) -> None:
        """As `send`, but a link that can keeps what finds no room and returns; `push` writes it.

        What is sent afterwards waits for it.
        """
        self.send(body, deadline)

    def begin_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """As `send_payload`, in the manner of `begin`: the memory of ``parts`` must stay as it is until it is read."""
        self.send_payload(parts, deadline)

    @property
    def backlog(self) -> int:
        """How many bytes of what was begun are still to be written."""
        return 0

    def push(self, events: int) -> None:
        """Write what was begun as far as there is room, and read what is there, as ``events`` say; never waits.

        Args:
            events: what `select.poll` has told of `fileno`, 0 where it was not asked.

        Raises what `try_send` raises.
        """

    def push_events(self) -> int:
        """The `select.poll` events of `fileno` after which `push` should be called."""
        return select.POLLOUT

    @abc.abstractmethod
    def try_send(self, body: bytes) -> bool:
        """Send one control frame if it can go now; never waits. False if it was skipped."""

    @abc.abstractmethod
    def recv(self, deadline: Deadline, limit: int = CONTROL_FRAME_LIMIT) -> bytes:
        """The next frame, which must be a control frame of at most ``limit`` bytes.

        Raises:
            DeadlineError: it did not come; the link stays usable if nothing of it had.
            ProtocolError: it is of another kind, or longer.
        """

    @abc.abstractmethod
    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        """The next frame, which must be a payload frame of at most ``limit`` bytes. Raises as `recv`."""

    @abc.abstractmethod
    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        """Read the next frame into a contiguous, writable view; it must be a payload just as long. Raises as `recv`."""

    @abc.abstractmethod
    def poll(self) -> bool:
        """Read what is there without waiting: is something at hand for a call of `recv` or `recv_payload`?

        True for a complete control frame, the head of a payload frame, what `recv` will refuse, and as much of a
        control frame as is read ahead at most (`recv` then waits for its rest). `PeerLostError` only when nothing of
        this is left.
        """

    @abc.abstractmethod
    def kind_at_hand(self) -> int | None:
        """The kind of the next frame, `CONTROL` or `PAYLOAD`, where `poll` was true; else None."""

    def take(self) -> bytes | None:
        """The body of the next frame where that is a control frame, allowed and there in whole; else None. Never waits.

        Raises as `poll`; what is wrong with a frame that is not taken, `recv` says.
        """
        if self.poll() and self.kind_at_hand() == CONTROL:
            return self.recv(Deadline(0, "rest of a frame that is there"), self.control_limit)
        return None

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `poll` should be called."""

    def events(self) -> int:
        """The `select.poll` events of `fileno` after which `poll` should be called."""
        return select.POLLIN

    @abc.abstractmethod
    def abort(self) -> None:
        """Make a running or later call raise `ClosedError`. From any thread; never blocks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the link. Idempotent; never waits for the peer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait(links: Iterable[Link], deadline: Deadline, filenos: Iterable[int] = ()) -> None:
    """Return as soon as one link's `poll` is true or would raise, or a descriptor of ``filenos`` is readable.

    Raises:
        DeadlineError: none of this happened in time.
    """
    links = list(links)
    others = set(filenos)
    poller = select.poll()
    for fileno in others:
        poller.register(fileno, select.POLLIN)
    last = False
    while True:
        for link in links:
            try:
                if link.poll():
                    return
                poller.register(link.fileno(), link.events())
            except TransportKitError:
                return  # it is the link's state: its next use raises it again
        if last:
            raise deadline.error()
        last = deadline.expired()
        ready = poller.poll(0 if last else milliseconds(deadline.remaining()))
        if any(fileno in others for fileno, _ in ready):
            return


def milliseconds(seconds: float | None) -> int:
    """A timeout for `select.poll`, rounded up and at most an hour: callers look at their deadline again."""
    return math.ceil(min(_TURN, _TURN if seconds is None else seconds) * 1000)


class Inherited(Protocol):
    """What holds descriptors that a forked child must not keep."""

    def lose(self) -> None:
        """In the child: close the descriptors, touch nothing that is the parent's, raise `ForkedError` from now on."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_child(owner: Inherited) -> None:
    """Have ``owner.lose()`` called in every child that is forked while ``owner`` lives."""
    _inherited.add(owner)


def _lose_all() -> None:
    for owner in list(_inherited):
        owner.lose()
    _inherited.clear()


os.register_at_fork(after_in_child=_lose_all)
