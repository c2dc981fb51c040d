"""The receiver's end of its link: messages one by one, read ahead where a backend asks for news; decides nothing."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    DeadlineError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    ProtocolError,
    TransportKitError,
)
from transportkit.link import PAYLOAD
from transportkit.link import wait as wait_links
from transportkit.session.peers import BEATS, farewell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transportkit.link import Link

IDLE_PERIOD = 0.02
"""How often a wait looks whether a lease has ended, in seconds, where one is outstanding."""

AHEAD_LIMIT = 256
"""Most messages that are read before they are due; an honest sender has a few out."""


AT_HAND = Deadline(0, "rest of a frame that is there")
"""For frames that `Link.poll` has read whole."""


class Inlet:
    """The sender, as its receiver sees it.

    Args:
        link: the link to the sender.
        timeout: bound on the lack of progress, in seconds.
        said: what the sender has said already.
    """

    def __init__(self, link: Link, timeout: float, said: Iterable[wire.Message] = ()) -> None:
        self.link = link
        self.timeout = timeout
        self._ahead: collections.deque[wire.Message] = collections.deque(said)
        link.control_limit = wire.HANDSHAKE_FRAME_LIMIT
        self.on_signal: Callable[[wire.Signal], bool] | None = None
        """In a handshake: takes a signal for the backend; False where it is not due yet."""
        self.stray_limit = 0
        """Longest payload that may still come for a chunk that nobody reads, in bytes; 0 where none may."""
        self.beat = timeout / BEATS
        """How often, at least, a wait tells the sender that this side is alive, in seconds."""
        self._beaten = time.monotonic()

    @property
    def name(self) -> str:
        return self.link.peer

    def send(self, message: wire.Message) -> None:
        try:
            self._send(message)
        except PeerLostError as error:
            told = self._farewell()
            if told is None:
                raise
            raise told from error

    def acknowledge(self, message: wire.Ack) -> None:
        """Send it; a loss is found by the next read, after all that the sender said before it went, which says why."""
        with contextlib.suppress(PeerLostError):
            self._send(message)

    def tell(self, message: wire.Message) -> bool:
        """Send if that goes without waiting; whether it went. A loss is found by the next read."""
        try:
            return self.link.try_send(wire.encode(message))
        except (TransportKitError, OSError):
            return False

    def next(self, deadline: Deadline, *, renew: bool = True, idle: Callable[[], None] | None = None) -> wire.Message:
        """The sender's next message.

        Args:
            deadline: bounds the wait.
            renew: start the deadline anew whenever the sender says that it is alive.
            idle: called every `IDLE_PERIOD` while nothing comes.

        Raises:
            PeerError: the sender is gone or said goodbye.
            DeadlineError: nothing came.
        """
        while True:
            message = self._ahead.popleft() if self._ahead else self._read(deadline, idle)
            match message:
                case wire.Waiting():
                    if renew:
                        deadline.renew()
                case wire.Bye():
                    raise farewell(message, self.name)
                case _:
                    return message

    def at_once(self) -> wire.Message | None:
        """The sender's next message where it is there in whole, without waiting; None where it is not, or a payload is.

        For links whose frames are read ahead whole. Raises `PeerError` as `next`.
        """
        while True:
            if self._ahead:
                message = self._ahead.popleft()
            elif (frame := self.link.take()) is not None:
                message = wire.decode(frame)
            elif self.link.kind_at_hand() in (None, PAYLOAD) or not self.link.poll():
                return None
            else:  # it is refused
                message = wire.decode(self.link.recv(AT_HAND, self.link.control_limit))
            if isinstance(message, wire.Bye):
                raise farewell(message, self.name)
            if not isinstance(message, wire.Waiting):
                return message

    def check(self) -> None:
        """Take in what has come. Raises `BackendError` where the sender gave the backend up, `PeerError` where it is
        gone.
        """
        lost = None
        for message in [message for message in self._ahead if self._signalled(message)]:
            self._ahead.remove(message)
        try:
            while not self._sated() and self.link.poll() and self.link.kind_at_hand() != PAYLOAD:
                message = self._take()
                if not isinstance(message, wire.Waiting) and not self._signalled(message):
                    self._ahead.append(message)
                if len(self._ahead) > AHEAD_LIMIT:
                    raise ProtocolError(f"{self.name} sent {len(self._ahead)} messages where a few may come")
        except PeerLostError as error:
            lost = error  # what the sender said before it went says why
        for message in self._ahead:
            match message:
                case wire.Bye():
                    raise farewell(message, self.name)
                case wire.Withdrawn(broken=True):
                    raise BackendError("the producer took its message back")
                case wire.Proposal() | wire.Refusal() | wire.Reroute():
                    raise BackendError("the sender gave this backend up")
        if lost is not None:
            raise lost

    def _sated(self) -> bool:
        """Whether an outbox has put so much ahead that the rest had better stay on the link."""
        mail = wire.Letter | wire.Fragment | wire.Enclosure | wire.Withdrawn
        return len(self._ahead) >= AHEAD_LIMIT and isinstance(self._ahead[-1], mail)

    def _signalled(self, message: wire.Message) -> bool:
        """Whether this was a signal, and the backend has taken it."""
        return isinstance(message, wire.Signal) and self.on_signal is not None and self.on_signal(message)

    def _send(self, message: wire.Message) -> None:
        self.link.send(wire.encode(message), Deadline(self.timeout, f"room on the link to {self.name}"))

    def _farewell(self) -> PeerError | None:
        """Why the sender takes nothing more, where it has said so."""
        with contextlib.suppress(TransportKitError):
            while self.link.poll():
                self._ahead.append(self._take())
        return next((farewell(m, self.name) for m in self._ahead if isinstance(m, wire.Bye)), None)

    def _read(self, deadline: Deadline, idle: Callable[[], None] | None) -> wire.Message:
        pause = self.beat if idle is None else min(IDLE_PERIOD, self.beat)
        while not self.link.poll() or self._skip_stray():
            deadline.check()
            if idle is not None:
                idle()
            now = time.monotonic()
            if now - self._beaten >= self.beat:
                self._beaten = now
                self.tell(wire.Waiting())
            try:
                wait_links([self.link], Deadline(deadline.remaining(cap=pause), deadline.what))
            except DeadlineError:
                continue
        return self._take()

    def _skip_stray(self) -> bool:
        """Pass over a payload that nobody reads any more; whether there was one."""
        if not self.stray_limit or self.link.kind_at_hand() != PAYLOAD:
            return False
        self.link.recv_payload(self.stray_limit, Deadline(self.timeout, f"rest of a payload from {self.name}"))
        return True

    def _take(self) -> wire.Message:
        deadline = Deadline(self.timeout, f"rest of a message from {self.name}")
        return wire.decode(self.link.recv(deadline, self.link.control_limit))


def ended(message: wire.Aborted, name: str) -> PeerFailedError:
    """The error that the sender's end of an update stands for."""
    return PeerFailedError(
        f"{name} ended the update: {message.code}: {message.text}", peer=name, code=message.code, text=message.text
    )
