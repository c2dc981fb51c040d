"""The backend `gloo`: broadcasts between host memories, over TCP; what it can do, and with whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transportkit.transport import API_VERSION, Match, Mismatch, Offer, Reach, Transport, Unavailable
from transportkit_collective import __version__
from transportkit_collective.matching import placed

if TYPE_CHECKING:
    from transportkit.transport import Exporter, Importer, Side, Site, Terms, Wiring


class GlooTransport(Transport):
    """One group of torch.distributed for each lane, of the sender and all its receivers, on the CPU."""

    name: ClassVar[str] = "gloo"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = True
    rank: ClassVar[int] = 30
    device_slots: ClassVar[bool] = False

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """Whether this torch has gloo."""
        if site.platform not in ("", "linux"):
            return Unavailable(cls.name, f"needs Linux, this is {site.platform}")
        try:
            import torch.distributed as dist

            present = dist.is_available() and dist.is_gloo_available()
        except (ImportError, AttributeError):
            present = False
        if not present:
            return Unavailable(
                cls.name, "this torch was built without torch.distributed and gloo; install another build"
            )
        return Offer(cls.name, cls.api_version, __version__)

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """The same torch, and either one host or a TCP link between two that allow plain text."""
        verdict = placed(sender, receiver, lane)
        if isinstance(verdict, Mismatch):
            return verdict
        claims, note = verdict
        return Match(reach=Reach.HOST_NETWORK, claims=claims, note=note)

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        from transportkit_collective.exporter import CollectiveExporter
        from transportkit_collective.planes import GlooPlane

        return CollectiveExporter(terms, wiring, GlooPlane())

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        from transportkit_collective.importer import CollectiveImporter
        from transportkit_collective.planes import GlooPlane

        return CollectiveImporter(terms, wiring, GlooPlane())
