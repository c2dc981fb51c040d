"""Hellos and backends for tests of the pure handshake: nothing here touches a process, a socket or a file."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from transportkit.transport import API_VERSION, Exporter, Importer, Match, Mismatch, Reach, Side, Transport, Wiring
from transportkit.wire import Hello, Limits, Offer, Site, Terms, Unavailable, Wishes


def backend(
    name: str,
    *,
    reach: Reach = Reach.HOST_MEMORY,
    rank: int = 50,
    fan_out: bool = True,
    device_slots: bool = False,
    same_host: bool = False,
    exclusive: bool = False,
    fault: Exception | None = None,
) -> type[Transport]:
    """A backend that can be matched and nothing else.

    Args:
        same_host: it refuses a pair on two hosts.
        exclusive: it claims the receiver's uid, so that a lane holds one receiver of each.
        fault: `match` raises it.
    """

    class Fake(Transport):
        @classmethod
        def probe(cls, site: Site) -> Offer | Unavailable:
            return Offer(name)

        @classmethod
        def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
            if fault is not None:
                raise fault
            if same_host and sender.site.host != receiver.site.host:
                return Mismatch("on another host")
            claims = frozenset({f"uid {receiver.site.uid}"}) if exclusive else frozenset()
            if claims & lane:
                return Mismatch(f"{next(iter(claims))} is on the lane already")
            return Match(reach, claims=claims, note=f"{name} suits")

        @classmethod
        def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
            raise NotImplementedError

        @classmethod
        def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
            raise NotImplementedError

    Fake.name = name
    Fake.api_version = API_VERSION
    Fake.fan_out = fan_out
    Fake.rank = rank
    Fake.device_slots = device_slots
    return Fake


def hello(role: Any, *offers: str | Unavailable, host: str = "h", **changes: Any) -> Hello:
    """A hello that offers these backends."""
    wishes = {k: changes.pop(k) for k in ("backends", "disabled", "checksum", "device") if k in changes}
    limits = Limits(changes.pop("chunk_bytes", 1000), changes.pop("slots", 3))
    fields: dict[str, Any] = {
        "protocol_oldest": 1,
        "protocol_newest": 1,
        "role": role,
        "library": "0.1.0",
        "torch": "2.13.0",
        "dtypes": ("float32",),
        "site": Site(host=host, pid=changes.pop("pid", 7), uid=changes.pop("uid", 1)),
        "offers": tuple(Offer(o, params=Raw(b"\xc0")) if isinstance(o, str) else o for o in offers),
        "limits": limits,
        "wishes": Wishes(**wishes),
    }
    return Hello(**fields | changes)
