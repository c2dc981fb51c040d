"""Listening on an address: many peers pass the preamble and say their first word at once; no message is decoded here.

One thread with one selector serves all of them, each under a deadline of its own, so a peer that is silent, slow or
hostile costs only itself. Dialling is in `transportkit.dial`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Self

import attrs

from transportkit import threads
from transportkit.address import bind, parse, reported
from transportkit.auth import Preamble, Role, check_authkey
from transportkit.deadline import Deadline
from transportkit.dial import dial
from transportkit.errors import ForkedError, PeerLostError, ProtocolError, ResourceError, TransportKitError, UsageError
from transportkit.identity import describe, same_user
from transportkit.link.base import close_in_child
from transportkit.link.sockets import SocketLink
from transportkit.wire import CONTROL_FRAME_LIMIT, HANDSHAKE_FRAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Listener", "dial"]

_log = logging.getLogger("transportkit")

#: How long accepting rests after the process ran out of descriptors or memory, in seconds.
_REST = 0.25
#: Connections accepted in one go before those that came earlier get their turn.
_BATCH = 32


@attrs.define(eq=False)
class _Arrival:
    """One connection on its way: first the preamble, then (``link`` is set) its first frame."""

    sock: socket.socket
    peer: str
    preamble: Preamble
    deadline: Deadline
    out: bytes = b""
    link: SocketLink | None = None


class Listener:
    """Listens on one address, and hands over each peer that passed the preamble, with its first control frame.

    Args:
        address: ``unix:PATH`` or ``tcp://HOST:PORT``; bound at once, port 0 lets the system choose.
        authkey: the key that both sides share, or None.
        timeout: seconds within which a peer must have sent its first frame; also bounds binding.
        on_arrival: called with the link, which is the callee's from then on, and the frame (at most
        `HANDSHAKE_FRAME_LIMIT`
            bytes). On the listener's thread: it must not wait.
        on_failure: called with who, in words, and why, for each connection that came to nothing. On the same thread.
        pending: most connections on their way; the oldest that is not authenticated is dropped for a new one.
        user_timeout: see `SocketLink.over`.

    Raises:
        AddressError, AuthenticationError, DeadlineError: see `transportkit.address.bind`.
        ResourceError: descriptors have run out.
    """

    def __init__(
        self,
        address: str,
        *,
        authkey: bytes | None,
        timeout: float | None,
        on_arrival: Callable[[SocketLink, bytes], object],
        on_failure: Callable[[str, Exception], object] | None = None,
        pending: int = 128,
        user_timeout: float = 60.0,
    ) -> None:
        check_authkey(authkey)
        self.failures = 0
        """How many connections came to nothing."""
        self._authkey = authkey
        self._timeout = timeout
        self._on_arrival = on_arrival
        self._on_failure = on_failure
        self._limit = pending
        self._user_timeout = user_timeout
        self._pending: dict[int, _Arrival] = {}
        self._resting_until: float | None = None
        self._exhausted = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = self._forked = False
        with contextlib.ExitStack() as undo:
            try:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                undo.callback(os.close, self._wake)
                self._selector = undo.enter_context(selectors.DefaultSelector())
            except OSError as error:
                raise ResourceError(f"no descriptor to listen on {address} with: {error.strerror}") from error
            # Last: what is bound leaves a file, and without descriptors that could not be removed.
            self._binding = bind(
                parse(address), authkey=authkey, deadline=Deadline(timeout, f"place to listen on {address}")
            )
            undo.pop_all()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._binding.sock, selectors.EVENT_READ)
        close_in_child(self)

    @property
    def address(self) -> str:
        """Where it listens, with the port that the system chose."""
        return str(self._binding.address)

    def start(self) -> None:
        """Begin to accept; connections that came since the constructor are waiting already.

        Raises:
            ResourceError: there is no thread to be had.
        """
        with self._lock:
            if self._forked:
                raise ForkedError(
                    f"the listener on {self.address} is the parent process's; make a new one after the fork"
                )
            if self._closed or self._thread is not None:
                raise UsageError(f"the listener on {self.address} is {'closed' if self._closed else 'running'} already")
            self._thread = threads.start(self._run, "transportkit-listener")

    def close(self) -> None:
        """Stop listening, remove the socket's file, drop who is on the way. Idempotent; links handed over stay open.

        From a callback it takes effect when the callback returns.
        """
        with self._lock:
            if self._closed or self._forked:
                return
            self._closed = True
            thread = self._thread
            os.eventfd_write(self._wake, 1)  # under the lock, or the thread may have given the descriptor back
        if thread is None:
            self._dispose()
        elif thread is not threading.current_thread():
            thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lose(self) -> None:
        """In a forked child: close the descriptors; the socket's file is the parent's."""
        self._forked = True
        self._lock = threading.Lock()
        if not self._closed:
            os.close(self._wake)
        self._selector.close()
        self._binding.forget()
        for arrival in self._pending.values():
            arrival.sock.close()
        self._pending.clear()

    # -- on the listener's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._patience()):
                    if key.fd == self._binding.sock.fileno():
                        self._accept()
                    elif key.fd in self._pending:
                        self._advance(self._pending[key.fd])
                self._expire()
        finally:
            self._closed = True
            self._dispose()

    def _patience(self) -> float | None:
        waits = [left for a in self._pending.values() if (left := a.deadline.remaining()) is not None]
        if self._resting_until is not None:
            waits.append(max(0.0, self._resting_until - time.monotonic()))
        return min(waits, default=None)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._binding.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue  # that one peer was gone before it was accepted
                self._rest(error)
                return
            self._exhausted = False
            sock.setblocking(False)
            peer = describe(sock)
            try:
                preamble = Preamble(
                    Role.LISTENER, self._authkey, reported(sock, own=True), refuse_user=not same_user(sock), peer=peer
                )
            except OSError as error:
                sock.close()
                self._tell(peer, PeerLostError(f"{peer} hung up: {error.strerror}", peer=peer))
                continue
            if len(self._pending) >= self._limit:
                self._drop_oldest()
            arrival = _Arrival(sock, peer, preamble, Deadline(self._timeout, f"preamble from {peer}"))
            self._pending[sock.fileno()] = arrival
            self._selector.register(sock, selectors.EVENT_READ)

    def _rest(self, error: OSError) -> None:
        """Stop accepting for a while: who waits to be accepted keeps the socket readable, and the loop would spin."""
        if not self._exhausted:
            _log.warning("%s cannot accept: %s; raise the limit of open files", self.address, error.strerror)
        self._exhausted = True
        self._selector.unregister(self._binding.sock)
        self._resting_until = time.monotonic() + _REST

    def _drop_oldest(self) -> None:
        oldest = next((a for a in self._pending.values() if a.link is None), None) or next(iter(self._pending.values()))
        self._fail(oldest, ProtocolError(f"{oldest.peer} was dropped: {self._limit} connections came and said nothing"))

    def _advance(self, arrival: _Arrival) -> None:
        try:
            if arrival.link is None and not self._greet(arrival):
                return
            link = arrival.link
            assert link is not None
            if not link.poll():
                return
            frame = link.recv(arrival.deadline, HANDSHAKE_FRAME_LIMIT)
        except Exception as error:  # whatever a stranger brings about, the others are served
            self._fail(arrival, error)
            return
        self._forget(arrival)
        link.control_limit = CONTROL_FRAME_LIMIT
        try:
            self._on_arrival(link, frame)
        except Exception as error:
            self._tell(arrival.peer, error)
            link.close()

    def _greet(self, arrival: _Arrival) -> bool:
        """Go on with the preamble; whether it is done, and ``arrival.link`` is there."""
        sock, preamble = arrival.sock, arrival.preamble
        try:
            while arrival.out or not preamble.done:
                if not arrival.out:
                    data = sock.recv(preamble.wanted)
                    if not data:
                        raise PeerLostError(
                            f"{arrival.peer} hung up before it was through the preamble", peer=arrival.peer
                        )
                    try:
                        preamble.feed(data)
                    finally:
                        arrival.out = preamble.outgoing()
                arrival.out = arrival.out[sock.send(arrival.out, socket.MSG_NOSIGNAL) if arrival.out else 0 :]
        except BlockingIOError:
            self._selector.modify(sock, selectors.EVENT_WRITE if arrival.out else selectors.EVENT_READ)
            return False
        except OSError as error:
            if isinstance(error, TransportKitError):
                raise
            raise PeerLostError(
                f"{arrival.peer} hung up in the preamble: {error.strerror}", peer=arrival.peer
            ) from error
        self._selector.modify(sock, selectors.EVENT_READ)
        address = self._binding.address
        arrival.link = SocketLink.over(
            sock, address.kind, arrival.peer, path=address.path, ahead=preamble.rest, user_timeout=self._user_timeout
        )
        arrival.link.control_limit = HANDSHAKE_FRAME_LIMIT
        arrival.deadline.what = f"hello from {arrival.peer}"
        return True

    def _expire(self) -> None:
        for arrival in [a for a in self._pending.values() if a.deadline.expired()]:
            self._fail(arrival, arrival.deadline.error())
        if self._resting_until is not None and time.monotonic() >= self._resting_until:
            self._resting_until = None
            self._selector.register(self._binding.sock, selectors.EVENT_READ)

    def _forget(self, arrival: _Arrival) -> None:
        del self._pending[arrival.sock.fileno()]
        self._selector.unregister(arrival.sock)

    def _fail(self, arrival: _Arrival, error: Exception) -> None:
        self._forget(arrival)
        self._tell(arrival.peer, error)
        self._hang_up(arrival)

    def _hang_up(self, arrival: _Arrival) -> None:
        if arrival.link is not None:
            arrival.link.close()
            return
        with contextlib.suppress(OSError):
            if arrival.out:
                arrival.sock.send(arrival.out, socket.MSG_NOSIGNAL)  # why it is refused
            arrival.sock.shutdown(socket.SHUT_RDWR)
        arrival.sock.close()

    def _tell(self, peer: str, error: Exception) -> None:
        self.failures += 1
        with contextlib.suppress(Exception):  # of a handler of the user's, say: it costs nobody else
            _log.info("connection from %s to %s came to nothing: %s", peer, self.address, error)
        if self._on_failure is not None:
            try:
                self._on_failure(peer, error)
            except Exception:
                _log.exception("the callback for failed connections to %s failed", self.address)

    def _dispose(self) -> None:
        for arrival in list(self._pending.values()):
            self._forget(arrival)
            self._hang_up(arrival)
        with self._lock:
            self._selector.close()
            os.close(self._wake)
        self._binding.close()
