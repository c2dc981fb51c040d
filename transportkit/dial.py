"""Dialling an address, with patience; no listening and no message belongs here."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from typing import Any

from transportkit.address import Address, parse, reported, require_key, resolve
from transportkit.auth import Preamble, Role, check_authkey
from transportkit.deadline import Deadline
from transportkit.errors import AddressError, AuthenticationError, DeadlineError, TransportKitError
from transportkit.identity import same_user
from transportkit.link.base import milliseconds
from transportkit.link.sockets import SocketLink

__all__ = ["dial"]

#: Pauses between tries, first and longest, and the longest try of one tcp host, in seconds.
_PAUSE, _LONGEST_PAUSE, _ONE_TRY = 0.01, 0.2, 5.0

#: Errors that pass: nobody listens yet, or the way there is not open yet.
_NOT_YET = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOENT,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)


class _NotYetError(Exception):
    """This try failed, the next may not; ``__cause__`` is why, where there is an error."""


def dial(
    address: str, *, authkey: bytes | None, timeout: float | None, wait: float | None = None, user_timeout: float = 60.0
) -> SocketLink:
    """Connect to a listener and pass the preamble; nothing but the preamble has been said on the link that is returned.

    Args:
        address: ``unix:PATH`` or ``tcp://HOST:PORT``.
        authkey: the key that both sides share, or None.
        timeout: bound on one preamble, in seconds.
        wait: for how long an address where nobody listens is tried again, in seconds; None means ``timeout``.
        user_timeout: see `SocketLink.over`.

    Raises:
        AddressError: nobody listened in all that time, or the address cannot be right.
        AuthenticationError: key or user was refused, on either side; or beyond loopback without a key.
        VersionError, ProtocolError: something else, or another version, listens there.
        DeadlineError: the listener accepted, and was silent.
    """
    check_authkey(authkey)
    target = parse(address)
    if target.kind == "tcp" and not target.port:
        raise AddressError(f"cannot connect to {target}: port 0 is for listening; take the listener's `address`")
    require_key(target, authkey)
    keyword = "timeout" if wait is None else "wait"
    patience = Deadline(timeout if wait is None else wait, f"listener on {target}", keyword)
    pause = _PAUSE
    last: _NotYetError | None = None
    while True:
        try:
            return _try(target, authkey, timeout, patience, user_timeout, last)
        except _NotYetError as error:
            last = error
            if patience.expired():
                raise AddressError(
                    f"nobody listens on {target} ({error}) after {patience.seconds:.3g} s; start the other side, check "
                    f"the address, or raise `{keyword}=`"
                ) from error.__cause__
        time.sleep(patience.remaining(pause) or 0.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try(
    target: Address,
    authkey: bytes | None,
    timeout: float | None,
    patience: Deadline,
    user_timeout: float,
    last: _NotYetError | None,
) -> SocketLink:
    try:
        found = resolve(target, patience)
    except AddressError as error:
        raise _NotYetError(f"{error}") from error  # a host may be started, and named, later
    except DeadlineError:
        if last is None:
            raise
        raise last from last.__cause__  # the time is over, and what kept the try before from succeeding says more
    refused: _NotYetError | None = None
    for family, sockaddr in found:
        require_key(target, authkey, sockaddr[0] if target.kind == "tcp" else "")
        try:
            return _try_one(target, family, sockaddr, authkey, timeout, patience, user_timeout)
        except _NotYetError as error:
            refused = error
    assert refused is not None
    raise refused


def _try_one(
    target: Address,
    family: socket.AddressFamily,
    sockaddr: Any,
    authkey: bytes | None,
    timeout: float | None,
    patience: Deadline,
    user_timeout: float,
) -> SocketLink:
    peer = f"the listener on {target}"
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise AddressError(f"cannot connect to {target}: no socket can be made: {error.strerror}") from error
    try:
        _connect(sock, sockaddr, target, patience)
        _pass(sock, authkey, peer, Deadline(timeout, f"answer from {peer}"))
        return SocketLink.over(sock, target.kind, peer, path=target.path, user_timeout=user_timeout)
    except OSError as error:  # also ours that are OSErrors
        sock.close()
        if isinstance(error, TransportKitError):
            raise
        if error.errno in _NOT_YET:
            raise _NotYetError(error.strerror or str(error)) from error
        raise AddressError(
            f"cannot connect to {target}: {error.strerror or error}; check address and rights"
        ) from error
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, sockaddr: Any, target: Address, patience: Deadline) -> None:
    if target.kind == "unix" and not stat.S_ISSOCK(os.stat(target.path).st_mode):
        raise AddressError(f"cannot connect to {target}: what is there is no socket; check the path")
    answer = sock.connect_ex(sockaddr)
    if answer == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        if not poller.poll(milliseconds(patience.remaining(_ONE_TRY))):
            answer = errno.ETIMEDOUT
        else:
            answer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if answer:
        raise OSError(answer, os.strerror(answer))
    if target.kind == "tcp" and sock.getsockname() == sock.getpeername():
        # A port of the ephemeral range on which nobody listens can be given to this very socket, which then meets
        # itself.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _pass(sock: socket.socket, authkey: bytes | None, peer: str, deadline: Deadline) -> None:
    """The dialler's side of the preamble. Raises `ConnectionResetError` when the listener hangs up meanwhile."""
    refuse = not same_user(sock)
    preamble = Preamble(Role.DIALLER, authkey, reported(sock, own=False), refuse_user=refuse, peer=peer)
    poller = select.poll()
    out = preamble.outgoing()
    if refuse:
        with contextlib.suppress(OSError):
            sock.send(out, socket.MSG_NOSIGNAL)
        raise AuthenticationError(f"{peer} runs as another user than this side; run both sides as one user")
    while True:
        try:
            while out:
                out = out[sock.send(out, socket.MSG_NOSIGNAL) :]
            if preamble.done:
                return
            data = sock.recv(preamble.wanted)
        except BlockingIOError:
            deadline.check()
            poller.register(sock, select.POLLOUT if out else select.POLLIN)
            poller.poll(milliseconds(deadline.remaining()))
            continue
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the listener hung up before it answered")
        preamble.feed(data)
        out = preamble.outgoing()
