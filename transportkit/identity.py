"""Who is at the other end of a fresh socket, as far as the kernel tells; no keys and no messages belong here."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

__all__ = ["describe", "same_user"]

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def same_user(sock: socket.socket) -> bool:
    """Whether the peer of a connected socket runs as this user; true for tcp, where the kernel does not know.

    The overflow uid stands for every user that has no number in our user namespace, so it equals nobody, not even
    itself.
    """
    if sock.family != socket.AF_UNIX:
        return True
    _, uid, _ = _credentials(sock)
    return uid == os.geteuid() and uid != _overflow_uid()


def describe(sock: socket.socket) -> str:
    """The peer of an accepted socket, in words."""
    try:
        if sock.family == socket.AF_UNIX:
            pid, uid, _ = _credentials(sock)
            return f"pid {pid} of uid {uid}" if uid != os.geteuid() else f"pid {pid}"
        name: Any = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    return f"tcp://[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp://{name[0]}:{name[1]}"


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _overflow_uid() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534
