"""Links over stream sockets: unix, tcp and inherited ones; no listening, dialling or authentication belongs here.

Sockets are non-blocking, and a call waits in `select.poll`, so descriptor numbers may be above 1024. While a call waits
to write it also reads, into a bounded read-ahead: so two sides that write at once do not stop each other over
acknowledgements, and the death of a peer is noticed at once.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from typing import TYPE_CHECKING, NoReturn

from transportkit.errors import ClosedError, DeadlineError, ForkedError, PeerLostError, ProtocolError
from transportkit.link.ahead import Ahead
from transportkit.link.base import CONTROL, HEAD, PAYLOAD, Link, close_in_child, milliseconds
from transportkit.link.outgoing import VECTOR, Outgoing
from transportkit.link.tuning import tune
from transportkit.wire import CONTROL_FRAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.deadline import Deadline

#: Bytes per read: small, so that little of a payload passes through the read-ahead; large, for bodies that have begun.
_SMALL, _LARGE = 1 << 15, 1 << 18


class SocketLink(Link):
    """A link over a connected stream socket, which it owns; made by `over`."""

    def __init__(self, sock: socket.socket, kind: str, peer: str, path: str, ahead: bytes) -> None:
        self.kind = kind
        self.path = path
        self.peer = peer
        self._sock = sock
        self._poller = select.poll()
        self._waited = select.POLLIN
        self._poller.register(sock, self._waited)
        self._ending = select.poll()
        self._ending.register(sock, select.POLLRDHUP)
        self._ahead = Ahead(ahead)
        self._out = Outgoing(sock)
        self._unusable: ClosedError | ForkedError | None = None
        self._lost = False  # nothing more can be read
        self._deaf = False  # nothing more can be written
        self._cause: OSError | None = None  # of either
        self._lock = threading.RLock()  # abort() must not meet a descriptor that close() gave back
        close_in_child(self)

    @classmethod
    def over(
        cls,
        sock: socket.socket,
        kind: str = "pair",
        peer: str = "the peer",
        *,
        path: str = "",
        ahead: bytes = b"",
        user_timeout: float = 60.0,
    ) -> SocketLink:
        """A link over a connected unix or tcp stream socket.

        Args:
            sock: owned by the link from now on.
            peer: who is at the other end, in words.
            path: the unix socket's absolute path; empty for others.
            ahead: bytes that were read from the socket already and belong to the frames.
            user_timeout: seconds after which tcp gives up a peer that acknowledges nothing (``TCP_USER_TIMEOUT``).
        """
        tune(sock, user_timeout)
        link = cls(sock, kind, peer, path, ahead)
        if sock.family != socket.AF_UNIX:
            link.local_host = str(sock.getsockname()[0])
        return link

    # -- writing ------------------------------------------------------------------------------------------------------

    def send(self, body: bytes, deadline: Deadline) -> None:
        self._send([HEAD.pack(CONTROL, len(body)), body], deadline)

    def send_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        views = [memoryview(part) for part in parts]
        self._send([HEAD.pack(PAYLOAD, sum(view.nbytes for view in views)), *views], deadline)

    def _send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        self._check()
        todo = _views(parts)
        before = self._out.backlog
        while not self._flush():
            if self.renew_on_progress and self._out.backlog < before:
                before = self._out.backlog
                deadline.renew()
            self._await_writable(deadline)
        first, begun = 0, False
        try:
            while first < len(todo):
                try:
                    sent = self._sock.sendmsg(todo[first : first + VECTOR], (), socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._await_writable(deadline)
                    continue
                except OSError as error:
                    self._raise_deaf(error)
                begun = True
                if self.renew_on_progress:
                    deadline.renew()
                while sent:
                    here = todo[first].nbytes
                    if sent < here:
                        todo[first] = todo[first][sent:]
                        break
                    sent -= here
                    first += 1
        except BaseException as error:
            if begun and not isinstance(error, PeerLostError):  # nothing follows that could be taken for the rest
                self._break(error)
            raise

    def try_send(self, body: bytes) -> bool:
        self._check()
        if not self._flush():
            return False
        frame = HEAD.pack(CONTROL, len(body)) + body
        try:
            sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            self._raise_deaf(error)
        self._out.add(frame[sent:])
        return True

    def _flush(self) -> bool:
        """Write what was accepted before, without waiting; whether all of it is written."""
        if self._lost:
            self._raise_lost()
        if self._deaf:
            assert self._cause is not None
            self._raise_deaf(self._cause)  # what came before the end is still to be read
        try:
            return self._out.write()
        except OSError as error:
            self._raise_deaf(error)

    def begin(self, body: bytes, deadline: Deadline) -> None:
        self._begin([HEAD.pack(CONTROL, len(body)), body])

    def begin_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        views = [memoryview(part) for part in parts]
        self._begin([HEAD.pack(PAYLOAD, sum(view.nbytes for view in views)), *views])

    def _begin(self, parts: Sequence[bytes | memoryview]) -> None:
        self._check()
        self._out.begin(_views(parts))
        self._flush()

    @property
    def backlog(self) -> int:
        return self._out.backlog

    def push(self, events: int) -> None:
        self._check()
        if not self._flush() and events & ~select.POLLOUT:
            self._read_meanwhile()

    def push_events(self) -> int:
        return select.POLLOUT | (select.POLLIN if not self._lost and not self._ahead.full else 0)

    def hold(self, body: bytes) -> None:
        """Take over one control frame, to be written by `flush`; what was left over must be written."""
        self._check()
        self._out.hold(HEAD.pack(CONTROL, len(body)) + body)

    def flush(self, deadline: Deadline) -> None:
        """Write what `hold` and `try_send` left over; read meanwhile. Raises as `send`; the link stays usable."""
        self._check()
        while not self._flush():
            self._await_writable(deadline)

    def post(self, body: bytes, deadline: Deadline) -> None:
        """`hold` and `flush`."""
        self.hold(body)
        self.flush(deadline)

    def withdraw(self, end: bytes) -> bool:
        """Give up the frame that `hold` took and `flush` could not write: True where nothing of it had left.

        Else its rest, which is still to be written, ends with ``end`` instead. Raises `ClosedError`, and the link has
        ended, where nothing is left to be written, so that nobody can tell any more.
        """
        if not self._out:
            self.abort()
            raise ClosedError(f"the link to {self.peer} ended with an interrupted call")
        return self._out.withdraw(end)

    def _await_writable(self, deadline: Deadline) -> None:
        """Wait until more can be written; read meanwhile."""
        if self._wait(self.push_events(), deadline) & ~select.POLLOUT:
            self._read_meanwhile()
        if self._lost:
            self._raise_lost()

    def _read_meanwhile(self) -> None:
        """Take into the bounded read-ahead what is there."""
        if not self._lost and not self._ahead.full:
            self._ahead += self._now(_LARGE) or b""
        if self._lost:
            self._raise_lost()

    # -- reading ------------------------------------------------------------------------------------------------------

    def recv(self, deadline: Deadline, limit: int = CONTROL_FRAME_LIMIT) -> bytes:
        return self._receive(CONTROL, limit, deadline, None)

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        return self._receive(PAYLOAD, limit, deadline, None)

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        self._receive(PAYLOAD, view.nbytes, deadline, view.cast("B") if view.nbytes else view)

    def _receive(self, kind: int, limit: int, deadline: Deadline, view: memoryview | None) -> bytes:
        self._check()
        headless = False
        try:
            length = self._head(kind, limit, deadline)
            if view is not None and length != view.nbytes:
                raise ProtocolError(f"{self.peer} sent a payload of {length} bytes where {view.nbytes} were agreed")
            if kind == CONTROL:
                return self._control(length, deadline)
            del self._ahead[: HEAD.size]
            headless = True
            body = b""
            if view is not None:
                self._fill(view, deadline)
            else:
                body = self._collect(length, deadline)
            if self.renew_on_progress:
                deadline.renew()
            return body
        except BaseException as error:
            if headless or isinstance(error, ProtocolError) or (isinstance(error, DeadlineError) and self._ahead):
                self._break(error)
            raise

    def _head(self, kind: int, limit: int, deadline: Deadline) -> int:
        """The length of the next frame's body; its head stays in the read-ahead."""
        while (length := self._ahead.length(kind, limit, self.peer)) is None:
            self._ahead += self._some(_SMALL, deadline)
        return length

    def _control(self, length: int, deadline: Deadline) -> bytes:
        """The body of a control frame, kept whole in the read-ahead until it is complete."""
        end = HEAD.size + length
        while (missing := end - len(self._ahead)) > 0:
            # Memory grows with what came, not with what was claimed.
            self._ahead += self._some(min(_LARGE, max(_SMALL, missing)), deadline)
        body = self._ahead.control(length)
        assert body is not None
        if self.renew_on_progress:
            deadline.renew()
        return body

    def _fill(self, view: memoryview, deadline: Deadline) -> None:
        have = min(len(self._ahead), view.nbytes)
        if have:
            view[:have] = self._ahead[:have]
            del self._ahead[:have]
        while have < view.nbytes:
            try:
                got = self._sock.recv_into(view[have:])
            except BlockingIOError:
                self._await_readable(deadline)
                continue
            except OSError as error:
                self._raise_lost(error)
            if not got:
                self._raise_lost()
            have += got
            if self.renew_on_progress:
                deadline.renew()

    def _collect(self, length: int, deadline: Deadline) -> bytes:
        parts = [bytes(memoryview(self._ahead)[:length])]
        del self._ahead[:length]
        missing = length - len(parts[0])
        while missing:
            parts.append(self._some(min(_LARGE, missing), deadline))
            missing -= len(parts[-1])
        return b"".join(parts)

    def _some(self, size: int, deadline: Deadline) -> bytes:
        """At least one byte and at most ``size``, waiting for it."""
        while (data := self._now(size)) is None:
            self._await_readable(deadline)
        if not data:
            self._raise_lost()
        if self.renew_on_progress:
            deadline.renew()
        return data

    def _now(self, size: int) -> bytes | None:
        """What is there, at most ``size`` bytes, without waiting: None for nothing yet, empty when the peer is gone."""
        if self._lost:
            return b""
        try:
            data = self._sock.recv(size)
        except BlockingIOError:
            return None
        except OSError as error:
            data, self._cause = b"", error
        if not data:
            self._check()  # an abort ends the stream as well
            self._lost = True
        return data

    def _more(self, size: int) -> bool:
        """Read ahead, at most ``size`` bytes, without waiting; whether something was there."""
        data = self._now(size)
        if data is None:
            return False
        if not data:
            self._raise_lost()
        self._ahead += data
        return True

    def _await_readable(self, deadline: Deadline) -> None:
        self._wait(self.events(), deadline)
        if self._out:
            self._flush_quietly()

    def _flush_quietly(self) -> None:
        with contextlib.suppress(PeerLostError):  # what came before the end is still to be read
            self._flush()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        self._check()
        if self._out:
            self._flush_quietly()
        while not self._ahead.ready(self.control_limit):
            if not self._more(_SMALL):
                return False
        return True

    def take(self) -> bytes | None:
        self._check()
        if self._out:
            self._flush_quietly()
        while True:
            body = self._ahead.control(self.control_limit)
            if body is not None or self._ahead.ready(self.control_limit):
                return body
            if not self._more(_SMALL):
                return None

    def poll_past_payloads(self, limit: int) -> bool:
        """Read what is there without waiting: have all payload frames come, and the head of what follows them?

        Raises as `poll`, and `ProtocolError` for payloads of more than ``limit`` bytes together.
        """
        self._check()
        while not self._ahead.past_payloads(limit, self.peer):
            if not self._more(_LARGE):
                return False
        return True

    def kind_at_hand(self) -> int | None:
        return self._ahead.kind

    def at_rest(self) -> bool:
        """Whether nothing is left to be written, and the peer, as far as is known without reading, still there."""
        self._check()
        return not (self._lost or self._deaf or self._ending.poll(0) or self._out)

    def fileno(self) -> int:
        self._check()
        return self._sock.fileno()

    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def _wait(self, events: int, deadline: Deadline) -> int:
        if deadline.expired():  # also for a peer that moves a byte now and then
            raise deadline.error()
        if events != self._waited:
            self._poller.modify(self._sock, events)
            self._waited = events
        got = self._poller.poll(milliseconds(deadline.remaining()))
        self._check()
        return got[0][1] if got else 0

    # -- endings ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))

    def _break(self, error: BaseException) -> None:
        if self._unusable is None:
            why = str(error) or type(error).__name__
            self._unusable = ClosedError(f"the link to {self.peer} is unusable since an earlier error: {why}")

    def _raise_lost(self, cause: OSError | None = None) -> NoReturn:
        self._check()
        self._lost = True
        self._cause = cause = cause or self._cause
        usual = cause is None or cause.errno in (errno.ECONNRESET, errno.EPIPE)
        how = "hung up" if usual else f"was lost ({cause and cause.strerror})"
        where = " in the middle of a frame" if self._ahead else ""
        raise PeerLostError(f"{self.peer} {how}{where}; look there for why it ended", peer=self.peer) from cause

    def _raise_deaf(self, cause: OSError) -> NoReturn:
        self._check()
        self._deaf, self._cause = True, cause
        self._out.clear()
        raise PeerLostError(
            f"{self.peer} takes nothing more ({cause.strerror}); look there for why it ended", peer=self.peer
        ) from cause

    def abort(self) -> None:
        with self._lock:
            if self._unusable is None:
                self._unusable = ClosedError(f"the link to {self.peer} was aborted")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits on it

    def end_writing(self) -> None:
        """Let the peer know that nothing more follows, where all is written. Can still be read."""
        with self._lock:
            if self._unusable is None and not self._out:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            if self._sock.fileno() < 0:
                return
            if self._unusable is None:
                with contextlib.suppress(OSError):
                    self._out.write()
            self._unusable = ClosedError(f"the link to {self.peer} is closed")
            self._cause = None  # its frames hold what was in use when it came: a chunk's memory, say
            self._out.clear()
            with contextlib.suppress(OSError):
                # Shut down as well: a process forked without our hook may hold the descriptor still.
                self._sock.shutdown(socket.SHUT_WR)
                # Unread bytes would turn the end of a tcp stream into a reset, which loses our last frames.
                for _ in range(64 if self.kind == "tcp" else 0):
                    if not self._sock.recv(_LARGE):
                        break
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def lose(self) -> None:
        """In a forked child: close the descriptor, without shutting the parent's connection down."""
        self._unusable = ForkedError(f"the link to {self.peer} is the parent process's; make a new one after the fork")
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._out.clear()
        self._sock.close()


def _views(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Those that are not empty, as bytes."""
    return [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
