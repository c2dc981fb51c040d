"""Who may share a group, as far as both backends have it in common: versions, places, plain text. Pure; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit.transport import Mismatch

if TYPE_CHECKING:
    from transportkit.transport import Side, Site

#: Claims on a lane: a receiver for whom bytes may not leave the host, and one that is elsewhere.
STAYS = "loopback only"
LEAVES = "beyond loopback"


def together(one: Site, other: Site) -> bool:
    """Whether the loopback interface of one is that of the other: the same kernel and the same network namespace."""
    network = one.namespaces.get("net")
    return (
        bool(one.boot_id) and one.boot_id == other.boot_id and bool(network) and network == other.namespaces.get("net")
    )


def placed(sender: Side, receiver: Side, lane: frozenset[str]) -> tuple[frozenset[str], str] | Mismatch:
    """The claims of this receiver and the note of the agreement, or why the two must not meet.

    Args:
        sender, receiver: the two ends.
        lane: the claims of the lane's other receivers.
    """
    if minor(sender.torch) is None or minor(sender.torch) != minor(receiver.torch):
        return Mismatch(
            f"needs the same torch minor version on both sides, the sender has {sender.torch or 'an unknown one'}, "
            f"the receiver {receiver.torch or 'an unknown one'}"
        )
    forbidding = [end for end, side in (("sender", sender), ("receiver", receiver)) if not side.allow_plaintext]
    if together(sender.site, receiver.site):
        if not forbidding:
            return frozenset(), "over loopback, or the network where its lane leaves the host"
        if LEAVES in lane:
            return Mismatch("its lane leaves this host unencrypted; `allow_plaintext=True` on both sides allows that")
        return frozenset({STAYS}), "over loopback"
    if receiver.site.link != "tcp":
        return Mismatch(
            f"in another network namespace or on another host, where a {receiver.site.link or 'unknown'} link has no "
            "address to meet at; use a `tcp://` address"
        )
    if forbidding:
        return Mismatch(
            f"its bytes would cross the network unencrypted, which the {' and the '.join(forbidding)} did not allow; "
            "give `allow_plaintext=True` on both sides where you trust that network"
        )
    if STAYS in lane:
        return Mismatch("another receiver of its lane, without `allow_plaintext=True`, keeps the lane on loopback")
    return frozenset({LEAVES}), "over the network, unencrypted"


def minor(version: str) -> str | None:
    """``"2.13"`` of ``"2.13.0+cpu"``; None for what is no version, which equals no other."""
    parts = version.split(".")
    return ".".join(parts[:2]) if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit() else None
