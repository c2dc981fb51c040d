"""A link over an object of the user's, so that the protocol can ride on a channel that exists; no socket belongs here.

One message is one frame: a byte for the kind, then the body. Where the object has a descriptor it is read by calls
only; where it has none, one daemon thread reads it into a bounded queue and signals an eventfd.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import select
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from transportkit.deadline import Deadline
from transportkit.errors import (
    ClosedError,
    DeadlineError,
    ForkedError,
    PeerLostError,
    ProtocolError,
    TransportKitError,
    UsageError,
)
from transportkit.link.base import CONTROL, PAYLOAD, Link, close_in_child, milliseconds
from transportkit.wire import CONTROL_FRAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CustomLink", "UserLink", "as_link"]

#: The reader thread stops reading while this many bytes wait to be asked for.
_QUEUE_BYTES = 1 << 20
#: How long the reader thread asks at a time, and so how soon it ends after `close`, in seconds.
_TURN = 0.25

#: What says "not in time"; a queue's own errors too, since many such objects wrap queues.
_TIMED_OUT = (TimeoutError, queue.Empty, queue.Full)


class UserLink(Protocol):
    """What a user's object must do.

    ``send`` and ``recv`` move whole messages, in order; an error means that nothing was moved. They raise
    `TimeoutError` when the time is over (0 does not wait, None waits for ever) and `EOFError` or `OSError` when the
    channel is closed. They are called from two threads at once unless the object also has ``fileno() -> int``, a
    descriptor that is readable whenever ``recv(0)`` would return something. ``close`` may come from any thread and
    should end a running ``send``.
    """

    def send(self, data: bytes, timeout: float | None) -> object: ...
    def recv(self, timeout: float | None) -> bytes: ...
    def close(self) -> object: ...


class CustomLink(Link):
    """A link over a `UserLink`, which it owns and closes."""

    kind = "custom"
    path = ""

    def __init__(self, user: UserLink, peer: str = "the peer") -> None:
        self.peer = peer
        self._user = user
        self._inbox = _Inbox()
        self._unusable: ClosedError | ForkedError | None = None
        self._closing = threading.Lock()
        self._user_closed = False
        self._poller = select.epoll()
        self._poller.register(self._inbox.wake, select.EPOLLIN)
        self._has_fileno = callable(getattr(user, "fileno", None))
        if self._has_fileno:
            try:
                self._poller.register(user.fileno(), select.EPOLLIN)  # type: ignore[attr-defined]
            except (OSError, ValueError, TypeError) as error:
                self._release()
                raise PeerLostError(
                    f"the custom link to {peer} has no usable descriptor: {error}", peer=peer
                ) from error
        else:
            threading.Thread(
                target=_read_on, args=(user, self._inbox), name="transportkit-link-reader", daemon=True
            ).start()
        weakref.finalize(self, self._inbox.free).atexit = False
        close_in_child(self)

    def send(self, body: bytes, deadline: Deadline) -> None:
        self._send(b"\x00" + body, deadline)

    def send_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        self._send(b"".join([b"\x01", *parts]), deadline)

    def _send(self, message: bytes, deadline: Deadline) -> None:
        self._check()
        try:
            self._user.send(message, deadline.remaining())
        except _TIMED_OUT as error:
            self._check()
            raise deadline.error() from error
        except Exception as error:
            self._raise_lost(error)
        self._check()
        if self.renew_on_progress:
            deadline.renew()

    def try_send(self, body: bytes) -> bool:
        try:
            self._send(b"\x00" + body, Deadline(0, "room in the link"))
        except DeadlineError:
            return False
        return True

    def recv(self, deadline: Deadline, limit: int = CONTROL_FRAME_LIMIT) -> bytes:
        return self._receive(CONTROL, limit, deadline)

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        return self._receive(PAYLOAD, limit, deadline)

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        body = self._receive(PAYLOAD, view.nbytes, deadline)
        if len(body) != view.nbytes:
            error = ProtocolError(f"{self.peer} sent a payload of {len(body)} bytes where {view.nbytes} were agreed")
            self._break(error)
            raise error
        if body:
            view.cast("B")[:] = body

    def _receive(self, kind: int, limit: int, deadline: Deadline) -> bytes:
        while not self.poll():
            if deadline.expired():
                raise deadline.error()
            self._poller_wait(deadline)
        message = self._inbox.take()
        if self.renew_on_progress:
            deadline.renew()
        try:
            return _body(message, kind, limit, self.peer)
        except ProtocolError as error:
            self._break(error)
            raise

    def _poller_wait(self, deadline: Deadline) -> None:
        ready = self._poller.poll(milliseconds(deadline.remaining()) / 1000)
        self._check()
        if self._has_fileno and ready and not self._take_turn(0.0):
            # Readable, yet no whole message: let the object wait for its rest, so that this does not spin.
            self._take_turn(min(0.02, deadline.remaining(0.02) or 0.0))

    def poll(self) -> bool:
        self._check()
        if not self._inbox.messages and self._has_fileno and self._inbox.end is None and self._poller.poll(0):
            self._take_turn(0.0)
        if self._inbox.messages:
            return True
        if self._inbox.end is not None:
            self._raise_lost(self._inbox.end)
        return False

    def _take_turn(self, timeout: float) -> bool:
        if self._inbox.end is None:
            self._inbox.turn(self._user, timeout)
        return bool(self._inbox.messages) or self._inbox.end is not None

    def kind_at_hand(self) -> int | None:
        return self._inbox.messages[0][0] if self._inbox.messages and self._inbox.messages[0] else None

    def fileno(self) -> int:
        self._check()
        return self._poller.fileno()

    def abort(self) -> None:
        if self._unusable is None:
            self._unusable = ClosedError(f"the link to {self.peer} was aborted")
        if not self._inbox.stopped:
            self._inbox.stop()
            # The user's close may wait, and this must not.
            threading.Thread(target=self._close_user, name="transportkit-link-abort", daemon=True).start()

    def close(self) -> None:
        with self._closing:
            if self._poller.closed:
                return
            self._unusable = ClosedError(f"the link to {self.peer} is closed")
            self._release()
        self._close_user()

    def lose(self) -> None:
        """In a forked child: close our descriptors; the user's object stays as it is."""
        self._unusable = ForkedError(f"the link to {self.peer} is the parent process's; make a new one after the fork")
        self._closing = threading.Lock()
        self._inbox.lock = threading.Condition()
        self._release()

    def _release(self) -> None:
        self._inbox.free()
        self._poller.close()

    def _close_user(self) -> None:
        with self._closing:
            if self._user_closed:
                return
            self._user_closed = True
        with contextlib.suppress(Exception):  # whatever it is, the channel is of no more use
            self._user.close()

    def _check(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))

    def _break(self, error: TransportKitError) -> None:
        self._unusable = ClosedError(f"the link to {self.peer} is unusable since an earlier error: {error}")

    def _raise_lost(self, error: BaseException) -> NoReturn:
        self._check()
        if isinstance(error, TransportKitError):
            self._break(error)
            raise error
        text = "hung up" if isinstance(error, (EOFError, OSError)) else "cannot be reached: the link's object raised"
        detail = str(error) or type(error).__name__
        raise PeerLostError(f"{self.peer} {text} ({detail}); look there for why it ended", peer=self.peer) from error


def _body(message: bytes, kind: int, limit: int, peer: str) -> bytes:
    names = {CONTROL: "a control frame", PAYLOAD: "a payload frame"}
    found = message[0] if message else None
    if found != kind:
        what = "an empty message" if found is None else names.get(found, f"a frame of kind {found}")
        raise ProtocolError(f"{peer} sent {what} instead of {names[kind]}")
    if len(message) - 1 > limit:
        raise ProtocolError(f"{peer} sent a frame of {len(message) - 1} bytes where at most {limit} are allowed")
    return message[1:]


class _Inbox:
    """What was read from a user's object and not asked for yet, and a descriptor that is readable while there is
    some."""

    def __init__(self) -> None:
        self.messages: collections.deque[bytes] = collections.deque()
        self.end: BaseException | None = None
        self.stopped = False
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.lock = threading.Condition()
        self._bytes = 0

    def turn(self, user: UserLink, timeout: float | None) -> None:
        """Read at most one message."""
        try:
            message = user.recv(timeout)
            if not isinstance(message, (bytes, bytearray, memoryview)):
                raise ProtocolError(f"the link's object returned {type(message).__name__} from recv, not bytes")
        except _TIMED_OUT:
            return
        except BaseException as error:  # of a foreign object; told at the next use of the link
            self._put(None, error)
        else:
            self._put(bytes(message), None)

    def _put(self, message: bytes | None, end: BaseException | None) -> None:
        with self.lock:
            if self.stopped:
                return
            if message is None:
                self.end = end
            else:
                self.messages.append(message)
                self._bytes += len(message)
            os.eventfd_write(self.wake, 1)

    def take(self) -> bytes:
        with self.lock:
            message = self.messages.popleft()
            self._bytes -= len(message)
            if not self.messages and self.end is None and not self.stopped:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake)
            self.lock.notify()
            return message

    def has_room(self) -> bool:
        """Wait a turn for room; whether there is some."""
        with self.lock:
            return self.lock.wait_for(lambda: self.stopped or self._bytes < _QUEUE_BYTES, _TURN)

    def stop(self) -> None:
        with self.lock:
            if not self.stopped:
                self.stopped = True
                os.eventfd_write(self.wake, 1)
                self.lock.notify()

    def free(self) -> None:
        """Give the descriptor back; not in `stop`, since a call that waits for it would not be woken."""
        self.stop()
        with self.lock:
            wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)


def _read_on(user: UserLink, inbox: _Inbox) -> None:
    """The reader thread; it holds no reference to the link, so a link that is dropped ends it."""
    while not inbox.stopped and inbox.end is None:
        if inbox.has_room():
            inbox.turn(user, _TURN)


def as_link(link: Any) -> Link:
    """One of our links, or an adapter around an object of the user's."""
    if isinstance(link, Link):
        return link
    for method in ("send", "recv", "close"):
        if not callable(getattr(link, method, None)):
            raise UsageError(f"a link needs send(data, timeout), recv(timeout) and close(); {link!r} has no {method}()")
    return CustomLink(link)
