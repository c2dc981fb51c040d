"""How the descriptor of an arena gets from the exporter to its importers: what `giver` and `taker` have in common.

The socket keeps message boundaries (``SOCK_SEQPACKET``) and each connection carries three messages of fixed size::

    exporter                                         importer
    magic, nonce E                            -->
                     <--  receiver number, nonce I, HMAC(token, "importer", receiver, E, I)
    HMAC(token, "exporter", receiver, E, I), the descriptor  -->

so each side proves that it knows the session's token and shows it to nobody. Before that each looks at the other's user
id as the kernel has it. Whoever connects and says nothing, or something else, has one connection that waits beside the
others.
"""

from __future__ import annotations

import abc
import functools
import hmac
import os
import socket
import struct
import threading
import weakref

from msgspec import Struct

#: Longest path of a unix socket, in bytes.
PATH_LIMIT = 107

#: How every abstract name of ours begins.
ABSTRACT = b"transportkit-shm-"

MAGIC = b"tk-shm/1"
NONCE = 32
GREETING = len(MAGIC) + NONCE
CLAIM = struct.Struct(f"<I{NONCE}s32s")
PROOF = 32

_CREDENTIALS = struct.Struct("iII")


class Invitation(Struct, frozen=True):
    """Where the importer finds the exporter's socket.

    Args:
        path: the socket file as the exporter names it, absolute; empty for an abstract name.
        abstract: the abstract name without its leading zero byte; empty for a file.
    """

    path: bytes = b""
    abstract: bytes = b""


@functools.cache
def overflow_uid() -> int:
    """The user id that stands for every user the namespace does not know; read once, later calls open no file."""
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 65534


def prove(token: bytes, role: bytes, receiver: int, exporter_nonce: bytes, importer_nonce: bytes) -> bytes:
    message = b"\0".join((b"transportkit-shm", role, receiver.to_bytes(4, "little"))) + exporter_nonce + importer_nonce
    return hmac.digest(token, message, "sha256")


def refusal(connection: socket.socket) -> str:
    """Why the process at the other end is not to be trusted by its user id; empty where it is. Raises `OSError`."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    own = os.geteuid()
    if uid == overflow_uid():
        return f"its user id {uid} stands for users that this namespace does not know"
    return "" if uid == own else f"its user id is {uid}, this process has {own}"


def shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected yet, or no longer


def remove(path: bytes) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


class Holder(abc.ABC):
    """One that holds descriptors for a while: a forked child closes its copies of them."""

    def __init__(self) -> None:
        self._aborted = False
        self._lock = threading.RLock()  # reentrant, since `abort` may come from a signal handler
        _holders.add(self)

    @abc.abstractmethod
    def _close_descriptors(self) -> None:
        """Close what is held. Idempotent; waits for no lock."""

    def disown(self) -> None:
        """In a forked child: close what was inherited, and be stopped."""
        self._lock = threading.RLock()
        self._aborted = True
        self._close_descriptors()


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def _disown_all() -> None:
    for holder in list(_holders):
        holder.disown()


os.register_at_fork(after_in_child=_disown_all)
