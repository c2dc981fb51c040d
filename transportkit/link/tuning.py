"""How the sockets of links are made and set; no byte of a frame belongs here."""

from __future__ import annotations

import socket

#: Send buffer of a unix socket in bytes, which the kernel doubles. Of 100 to 4000 KB this was best: beyond it the bytes
#: leave the cache on their way. It is within the usual net.core.wmem_max.
_UNIX_BUFFER = 212992


def tune(sock: socket.socket, user_timeout: float) -> None:
    """Set a connected unix or tcp socket to what a link asks of it: non-blocking, and never inherited.

    Args:
        user_timeout: seconds after which tcp gives up a peer that acknowledges nothing (``TCP_USER_TIMEOUT``).
    """
    sock.setblocking(False)
    sock.set_inheritable(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    idle = max(1, int(user_timeout / 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle // 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(user_timeout * 1000)))


def pair_sockets() -> tuple[socket.socket, socket.socket]:
    """Two connected unix stream sockets, close-on-exec: the ends of a link that a child process inherits."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
