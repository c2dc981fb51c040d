"""How a group forms over the links: who says what to whom, and on which address everybody listens.

    exporter                                  importer
    invitation: where it is        ------->   the same place, or elsewhere?
                                   <-------   reply
    word: listen here              ------->   (elsewhere: on its own end of the link)
    words: what a rank has set     <------>   the exporter passes on what one says
                                   <-------   word: formed

All ranks must reach each other. So where one receiver is elsewhere, those beside the exporter listen where it does;
else everybody is on loopback. What is said is checked here; threads and waiting are the `member`'s.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from msgspec import Struct

from transportkit.errors import BackendError, ProtocolError
from transportkit.wire import decode_as
from transportkit_collective.matching import together

if TYPE_CHECKING:
    from msgspec import Raw

    from transportkit.transport import Site, Wiring

LOOPBACK = "127.0.0.1"


class Invitation(Struct, frozen=True):
    """Where the exporter is, as `transportkit.transport.Site` has it."""

    boot_id: str
    network: str

    @classmethod
    def of(cls, site: Site) -> Invitation:
        return cls(site.boot_id, site.namespaces.get("net", ""))


class Reply(Struct, frozen=True):
    """Whether the importer shares the exporter's loopback interface."""

    beside: bool


class Word(Struct, frozen=True, omit_defaults=True):
    """One signal, either way. Each field may be empty.

    Args:
        host: the numeric address to listen on, for an importer beside the exporter; for others it only means: begin.
        entries: what ranks have put into the store.
        formed: the importer's part is done.
    """

    host: str = ""
    entries: dict[str, bytes] = {}
    formed: bool = False


def answer(invitation: Raw, site: Site) -> Reply:
    """The importer's reply. Raises `ProtocolError` for what is no invitation."""
    came = decode_as(Invitation, invitation)
    theirs = {"net": came.network} if came.network else {}
    return Reply(together(site, type(site)(boot_id=came.boot_id, namespaces=theirs)))


def exporter_host(beside: dict[int, bool], wiring: Wiring, backend: str) -> str:
    """The address on which rank 0 listens, by where each receiver is.

    Raises:
        BackendError: it would be one that the user did not allow, or there is none.
    """
    away = [receiver for receiver, near in beside.items() if not near]
    return LOOPBACK if not away else _end_of_link(wiring, away[0], backend)


def importer_host(beside: bool, told: str, wiring: Wiring, receiver: int, backend: str) -> str:
    """The address on which this importer listens.

    Raises:
        ProtocolError: the exporter names what is no address to listen on.
        BackendError: it would be one that the user did not allow, or there is none.
    """
    if not beside:
        return _end_of_link(wiring, receiver, backend)
    try:
        address = ipaddress.ip_address(told.partition("%")[0])
    except ValueError as error:
        raise ProtocolError(f"the sender names {told!r} as the address of the group") from error
    if address.is_unspecified or address.is_multicast:
        raise ProtocolError(f"the sender names {told} as the address of the group")
    if not address.is_loopback:
        _allowed(wiring, backend)
    return told


def _end_of_link(wiring: Wiring, receiver: int, backend: str) -> str:
    _allowed(wiring, backend)
    host = wiring.local_host(receiver)
    if not host:
        raise BackendError("the link has no address that the group could meet at; use `tcp://`", backend=backend)
    return host


def _allowed(wiring: Wiring, backend: str) -> None:
    if not wiring.allow_plaintext:
        raise BackendError(
            "the group would leave this host unencrypted, which needs `allow_plaintext=True` here", backend=backend
        )
