"""The importer's side of the handover: find the exporter's socket, prove the token, take one descriptor."""

from __future__ import annotations

import array
import hmac
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, ProtocolError
from transportkit_shm.faults import NAME, native, no_descriptors
from transportkit_shm.handover import (
    ABSTRACT,
    CLAIM,
    GREETING,
    MAGIC,
    NONCE,
    PATH_LIMIT,
    PROOF,
    Holder,
    Invitation,
    prove,
    refusal,
    shut,
)

if TYPE_CHECKING:
    from transportkit.deadline import Deadline
    from transportkit.transport import Wiring

#: How long to wait before another try at a socket whose backlog is full, in seconds.
RETRY_SECONDS = 0.005


class Taker(Holder):
    """Fetches the descriptor from a giver.

    Args:
        invitation: where the giver listens.
        token: the session's token.
        receiver: this importer's number.
        link: path of the link's socket as this side names it; empty where there is none.

    Raises:
        ProtocolError: the invitation names no socket of ours.
    """

    def __init__(self, invitation: Invitation, token: bytes, receiver: int, link: str) -> None:
        self._token = token
        self._receiver = receiver
        self._addresses = _addresses(invitation, link)
        self._socket: socket.socket | None = None
        super().__init__()

    def fetch(self, wiring: Wiring, deadline: Deadline) -> int:
        """The descriptor, closed on exec; the caller closes it.

        Raises:
            ResourceError: this process may open no further descriptor.
            BackendError: nobody listens, the listener is not the exporter, or no descriptor came.

        and what `Wiring.wait_readable` raises.
        """
        try:
            connection = self._dial(wiring, deadline)
            greeting = self._read(connection, GREETING, wiring, deadline)
            if greeting[: len(MAGIC)] != MAGIC:
                raise BackendError(
                    "what listens on the descriptor socket is no exporter of shared memory", backend=NAME
                )
            nonce, own = greeting[len(MAGIC) :], secrets.token_bytes(NONCE)
            claim = CLAIM.pack(self._receiver, own, prove(self._token, b"importer", self._receiver, nonce, own))
            with native("asking for the shared memory's descriptor"):
                connection.send(claim, socket.MSG_NOSIGNAL)
            self._wait(connection, wiring, deadline)
            return self._collect(connection, prove(self._token, b"exporter", self._receiver, nonce, own), wiring)
        finally:
            self.close()

    def abort(self) -> None:
        """Make `fetch` raise, now or later. From any thread, never blocks."""
        self._aborted = True
        with self._lock:
            if self._socket is not None:
                shut(self._socket)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._aborted = True
        self._hang_up()

    def _close_descriptors(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _check(self) -> None:
        if self._aborted:
            raise BackendError("fetching the shared memory was stopped", backend=NAME)

    def _dial(self, wiring: Wiring, deadline: Deadline) -> socket.socket:
        failure: OSError | None = None
        for address in self._addresses:
            with native("opening a socket for the shared memory's descriptor"):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with self._lock:
                self._socket = connection
            connection.setblocking(False)
            while True:
                self._check()
                try:
                    connection.connect(address)
                except BlockingIOError:  # its backlog is full, and such a socket gives nothing to wait for
                    wiring.check()
                    deadline.check()
                    time.sleep(RETRY_SECONDS)
                except OSError as error:
                    failure = failure or error
                    self._hang_up()
                    break
                else:
                    if reason := refusal(connection):
                        raise BackendError(f"the descriptor socket is not the sender's: {reason}", backend=NAME)
                    return connection
        wiring.check()  # a sender that died says so better
        raise BackendError(
            f"the sender's descriptor socket {os.fsdecode(self._addresses[0])!r} cannot be reached: "
            f"{failure.strerror or failure if failure else 'no path'}",
            backend=NAME,
        ) from failure

    def _hang_up(self) -> None:
        with self._lock:
            self._close_descriptors()

    def _wait(self, connection: socket.socket, wiring: Wiring, deadline: Deadline) -> None:
        self._check()
        wiring.wait_readable(connection.fileno(), deadline)
        self._check()

    def _read(self, connection: socket.socket, size: int, wiring: Wiring, deadline: Deadline) -> bytes:
        self._wait(connection, wiring, deadline)
        with native("reading from the descriptor socket"):
            message = connection.recv(size + 1)
        if len(message) != size:
            wiring.check()
            raise BackendError(
                "no descriptor came: "
                + ("the sender hung up" if not message else f"a message of {len(message)} bytes came instead"),
                backend=NAME,
            )
        return message

    def _collect(self, connection: socket.socket, proof: bytes, wiring: Wiring) -> int:
        # `socket.recv_fds` drops its flags on the way to the system (Python 3.11), and with them close-on-exec.
        with native("receiving the shared memory's descriptor"):
            message, ancillary, flags, _ = connection.recvmsg(
                PROOF + 1, socket.CMSG_SPACE(4 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            if not message:
                wiring.check()
                raise BackendError("no descriptor came: the sender hung up", backend=NAME)
            if not hmac.compare_digest(message, proof):
                raise BackendError(
                    "no descriptor came: what listens on the descriptor socket does not know the session's token",
                    backend=NAME,
                )
            if flags & socket.MSG_CTRUNC and not descriptors:  # the system had one and could not install it
                raise no_descriptors("no descriptor came: this process may open no further one")
            if len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
                raise BackendError(f"no descriptor came: {len(descriptors)} came where one was due", backend=NAME)
            return descriptors.pop()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _addresses(invitation: Invitation, link: str) -> list[bytes]:
    """Where to dial: beside the link as this side sees it, which may not be where the sender sees it, then as told."""
    if invitation.abstract:
        if not invitation.abstract.startswith(ABSTRACT) or len(invitation.abstract) >= PATH_LIMIT:
            raise ProtocolError("the invitation names no descriptor socket of ours")
        return [b"\0" + invitation.abstract]
    name = os.path.basename(invitation.path)
    if not os.path.isabs(invitation.path) or b"\0" in invitation.path or not name:
        raise ProtocolError("the invitation names no descriptor socket")
    own = [os.path.dirname(os.path.abspath(os.fsencode(link))), os.path.dirname(os.path.realpath(os.fsencode(link)))]
    paths = [os.path.join(folder, name) for folder in own if link] + [invitation.path]
    fitting = [path for path in dict.fromkeys(paths) if len(path) <= PATH_LIMIT]
    if not fitting:
        raise ProtocolError("the invitation names a descriptor socket whose path is too long")
    return fitting
