"""The exporter's side of the handover: the socket, its name, and who gets the descriptor.

The socket is a file beside the link's own, so that it can be reached wherever the link can; where that path would be
too long or there is none, it has a random abstract name. A file gets its final name by a rename, when somebody
listens on it already. So a final name that refuses connections belongs to a dead process, and since names are random
and never used twice, removing it cannot hit anybody. Between bind and rename it has a provisional name, which is only
removed when it is old.
"""

from __future__ import annotations

import array
import hmac
import logging
import os
import re
import secrets
import select
import socket
import stat
import time
from typing import TYPE_CHECKING

import attrs

from transportkit.errors import BackendError
from transportkit_shm.faults import NAME, fault, native
from transportkit_shm.handover import (
    ABSTRACT,
    CLAIM,
    MAGIC,
    NONCE,
    PATH_LIMIT,
    Holder,
    Invitation,
    prove,
    refusal,
    remove,
    shut,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transportkit.deadline import Deadline
    from transportkit.transport import Wiring

#: Connections that have not proved themselves and are kept, beyond the receivers; the oldest goes for a new one.
STRANGERS = 32

#: Age in seconds at which a provisional socket file is taken for that of a dead process.
STALE_SECONDS = 60.0

_log = logging.getLogger("transportkit.shm")


@attrs.define(eq=False)
class _Visitor:
    """A connection that has not proved itself."""

    connection: socket.socket
    nonce: bytes


class Giver(Holder):
    """Hands one descriptor to each receiver of a lane, then closes it.

    Args:
        memory: the descriptor; the giver owns it from here on.
        token: the session's token.
        receivers: who may have it, each once.
        lane: number of the lane, for the socket file's name.
        link: path of the link's socket; empty where there is none.

    Raises:
        ResourceError: no descriptor is left.
        BackendError: no socket could be bound.
    """

    def __init__(self, memory: int, token: bytes, receivers: Iterable[int], lane: int, link: str) -> None:
        self._memory = memory
        self._token = token
        self._waiting = set(receivers)
        self._room = len(self._waiting) + STRANGERS
        self._visitors: dict[int, _Visitor] = {}
        self._poll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._path = b""
        self._owner = os.getpid()
        super().__init__()
        try:
            self.invitation = self._listen(link, lane)
        except BaseException:
            self.close()
            raise

    def serve(self, wiring: Wiring, deadline: Deadline) -> None:
        """Hand the descriptor to every receiver, then close everything.

        Raises what `Wiring.wait_readable` raises, and `BackendError` after `abort`.
        """
        try:
            while self._waiting:
                self._check()
                assert self._poll is not None
                wiring.wait_readable(self._poll.fileno(), deadline)
                self._check()
                for fileno, _ in self._poll.poll(0):
                    if fileno in self._visitors:
                        self._hear(fileno)
                    else:
                        self._accept()
                if self._waiting:
                    deadline.check()  # a crowd of strangers keeps the wait from ever lasting
        finally:
            self.close()

    def drop(self, receiver: int) -> None:
        """This receiver is not waited for any more."""
        self._waiting.discard(receiver)

    def abort(self) -> None:
        """Make `serve` raise, now or later. From any thread, never blocks."""
        self._aborted = True
        with self._lock:
            if self._listener is not None:
                shut(self._listener)
            self._unlink()

    def close(self) -> None:
        """Close the descriptor and the socket, remove its file. Idempotent; what is on its way arrives."""
        self._aborted = True
        with self._lock:
            self._unlink()
            self._close_descriptors()

    def disown(self) -> None:
        self._path = b""  # it is the parent's
        super().disown()

    def _check(self) -> None:
        if self._aborted:
            raise BackendError("the handover of the shared memory was stopped", backend=NAME)

    def _close_descriptors(self) -> None:
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._visitors.clear()
        if self._poll is not None:
            self._poll.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _unlink(self) -> None:
        path, self._path = self._path, b""
        if path and os.getpid() == self._owner:
            remove(path)

    def _listen(self, link: str, lane: int) -> Invitation:
        with native("opening a socket for the shared memory's descriptor"):
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.setblocking(False)
            os.fchmod(
                self._listener.fileno(), 0o600
            )  # a bound file takes its mode from the socket, so it is never wider
            self._poll = select.epoll()
        invitation = self._bind_file(self._listener, link, lane) if link else None
        if invitation is None:
            name = ABSTRACT + secrets.token_hex(16).encode()
            with native("binding a socket for the shared memory's descriptor"):
                self._listener.bind(b"\0" + name)
                self._listener.listen(self._room)
            invitation = Invitation(abstract=name)
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        return invitation

    def _bind_file(self, listener: socket.socket, link: str, lane: int) -> Invitation | None:
        path = os.fsencode(os.path.abspath(link))
        tail = f"{lane}-{secrets.token_hex(4)}".encode()
        final, provisional = path + b".shm" + tail, path + b".new" + tail
        if len(final) > PATH_LIMIT:
            return None
        sweep(path)
        try:
            listener.bind(provisional)
        except OSError as error:  # the directory may have become unwritable; an abstract name still does on one network
            _log.info("shm: no descriptor socket beside %s (%s), using an abstract name", link, error)
            return None
        with native(f"naming the descriptor socket beside {link}"):
            self._path = provisional
            listener.listen(self._room)
            os.rename(provisional, final)
            self._path = final
        return Invitation(path=final)

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        assert self._poll is not None
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._check()
            raise fault("accepting an importer of the shared memory", error) from error
        visitor = _Visitor(connection, secrets.token_bytes(NONCE))
        try:
            connection.setblocking(False)
            if reason := refusal(connection):
                _log.warning("shm: refused a connection to the descriptor socket: %s", reason)
                connection.close()
                return
            connection.send(MAGIC + visitor.nonce, socket.MSG_NOSIGNAL)
        except OSError:
            connection.close()
            return
        if len(self._visitors) >= self._room:
            self._dismiss(next(iter(self._visitors)))
        self._visitors[connection.fileno()] = visitor
        with native("watching an importer of the shared memory"):
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, fileno: int) -> None:
        visitor = self._visitors[fileno]
        try:
            claim = visitor.connection.recv(CLAIM.size + 1)
        except BlockingIOError:
            return
        except OSError:
            claim = b""
        receiver = self._recognise(claim, visitor.nonce)
        try:
            if receiver is not None:
                _, nonce, _ = CLAIM.unpack(claim)
                self._give(visitor.connection, prove(self._token, b"exporter", receiver, visitor.nonce, nonce))
                self._waiting.discard(receiver)
            elif claim:
                _log.warning("shm: refused a connection to the descriptor socket: it does not know the session's token")
        except ConnectionError:
            _log.info("shm: receiver %s hung up before the shared memory's descriptor was sent", receiver)
        except OSError as error:
            raise fault("sending the shared memory's descriptor", error) from error
        finally:
            self._dismiss(fileno)

    def _recognise(self, claim: bytes, nonce: bytes) -> int | None:
        """The receiver that this claim proves, if it is still waited for."""
        if len(claim) != CLAIM.size:
            return None
        receiver, its_nonce, proof = CLAIM.unpack(claim)
        if not hmac.compare_digest(proof, prove(self._token, b"importer", receiver, nonce, its_nonce)):
            return None
        return receiver if receiver in self._waiting else None

    def _give(self, connection: socket.socket, proof: bytes) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._memory]))
        connection.sendmsg([proof], [rights], socket.MSG_NOSIGNAL)

    def _dismiss(self, fileno: int) -> None:
        self._visitors.pop(fileno).connection.close()  # which takes it out of the epoll too


def sweep(link: bytes) -> None:
    """Remove the socket files beside the link at this path whose processes are dead. Never raises.

    A file is removed if it has a name of ours, is a socket of this user and refuses connections; with a provisional
    name only if it is old, since there the refusal may come from a process that is just about to listen.
    """
    folder, base = os.path.split(link)
    pattern = re.compile(re.escape(base) + rb"\.(shm|new)\d+-[0-9a-f]{8}\Z")
    try:
        with os.scandir(folder) as entries:
            names = [found for entry in entries if (found := pattern.match(entry.name))]
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name.string)
        try:
            status = os.lstat(path)
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if name[1] == b"new" and time.time() - status.st_mtime < STALE_SECONDS:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.setblocking(False)
                probe.connect(path)
        except ConnectionRefusedError:
            remove(path)
        except OSError:
            continue
