"""How a pending gloo operation is ended: by shutting down the group's own connections. Nothing else can (see below).

gloo's `abort` does not free a blocked call, and a group with a pending operation cannot be dropped. Once its
connections are shut down, an operation that waits for a peer fails within a millisecond; one of which bytes are on
their way does not learn of it, and ends with its own time limit. The connections are not handed out by torch, so they
are found: each rank tells the others where it listens, through the store, and a connection of this process to or from
such an address is the group's. A descriptor is duplicated before it is looked at, so that it cannot become another one
in between.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Address = tuple[str, int]

#: In a `sockaddr` of each family: where the address begins, and its length, in bytes. The port is at byte 2 of both.
_FAMILIES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
_SOCKADDR = 128

_libc = ctypes.CDLL(None)


def listening(host: str, own: bytes, others: Iterable[bytes]) -> frozenset[Address]:
    """Where the ranks of a group listen, read from what they wrote into the store.

    Args:
        host: the numeric address on which this rank listens.
        own: what this rank wrote: a structure of gloo's that holds a `sockaddr`, at a place which is the same for all.
        others: what the others wrote.

    Returns:
        Numeric addresses and ports; empty where the structure is another one than is known.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return frozenset()
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    before, size = _FAMILIES[family]
    at = own.find(address.packed)
    while at >= 0:
        start = at - before
        if start >= 0 and _family(own, start) == family:
            found = [_address(entry, start, family, before, size) for entry in (own, *others)]
            return frozenset(one for one in found if one is not None)
        at = own.find(address.packed, at + 1)
    return frozenset()


def shut_down(addresses: frozenset[Address]) -> int:
    """Shut down every connection of this process from or to these addresses; how many there were."""
    # Not the listening one: gloo ends the process where its `accept` fails.
    return sum(
        _libc.shutdown(duplicate, socket.SHUT_RDWR) == 0
        for _, duplicate in _sockets(addresses)
        if _name(_libc.getpeername, duplicate) is not None
    )


def let_go(addresses: frozenset[Address]) -> None:
    """In a forked child: close its copies of these sockets, and leave the parent's connections as they are."""
    for number in [number for number, _ in _sockets(addresses)]:
        os.close(number)


def _sockets(addresses: frozenset[Address]) -> Iterator[tuple[int, int]]:
    """Each descriptor that is a socket of these addresses, with a duplicate of it that lives as long as one turn."""
    if not addresses:
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # that of the listing itself, or closed since
            continue
        try:
            names = {_name(call, duplicate) for call in (_libc.getsockname, _libc.getpeername)}
            if not names.isdisjoint(addresses):
                yield int(name), duplicate
        finally:
            os.close(duplicate)


def _name(call: Callable[..., int], descriptor: int) -> Address | None:
    """An address of an internet socket, as `getsockname` or `getpeername` have it; None for anything else."""
    # By the C library: a `socket.socket` made of somebody's descriptor may change its blocking mode.
    name, length = ctypes.create_string_buffer(_SOCKADDR), ctypes.c_uint32(_SOCKADDR)
    if call(descriptor, name, ctypes.byref(length)) != 0:
        return None
    found = [_address(name.raw, 0, family, before, size) for family, (before, size) in _FAMILIES.items()]
    return next((address for address in found if address is not None), None)


def _family(entry: bytes, start: int) -> int:
    return int.from_bytes(entry[start : start + 2], sys.byteorder)


def _address(entry: bytes, start: int, family: int, before: int, size: int) -> Address | None:
    """The host and port of the `sockaddr` at this place, if it is of that family."""
    if len(entry) < start + before + size or _family(entry, start) != family:
        return None
    host = ipaddress.ip_address(entry[start + before : start + before + size])
    return str(host), int.from_bytes(entry[start + 2 : start + 4], "big")
