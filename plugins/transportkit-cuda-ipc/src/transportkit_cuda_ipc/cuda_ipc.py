"""The backend `cuda-ipc`: slots in device memory that every importer maps; only the contract's class is here.

Its ends are in `ends`, what a probe reads in `survey`, on which GPU two sides meet in `matching`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transportkit.transport import Mismatch, Offer, Transport, Unavailable
from transportkit.wire import raw
from transportkit_cuda_ipc import NAME, __version__
from transportkit_cuda_ipc.matching import meet
from transportkit_cuda_ipc.survey import survey

if TYPE_CHECKING:
    from transportkit.transport import Exporter, Importer, Match, Side, Site, Terms, Wiring
    from transportkit_cuda_ipc.devices import Device


class CudaIpcTransport(Transport):
    """Device memory between processes of one user that see the same GPU; one lane for all of its receivers there."""

    name: ClassVar[str] = NAME
    api_version: ClassVar[int] = 1
    fan_out: ClassVar[bool] = True
    rank: ClassVar[int] = 20
    device_slots: ClassVar[bool] = True

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """What the driver and the settings tell; makes no CUDA context."""
        found = survey()
        if isinstance(found, str):
            return Unavailable(cls.name, found)
        return Offer(cls.name, cls.api_version, __version__, params=raw(found))

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """One host, user and pid namespace, and a GPU that both see."""
        return meet(sender, receiver, lane)

    @classmethod
    def device(cls) -> type[Device]:
        """The class of the GPU; the one place where CUDA comes in."""
        from transportkit_cuda_ipc.cuda import CudaDevice

        return CudaDevice

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        from transportkit_cuda_ipc.ends import CudaIpcExporter

        return CudaIpcExporter(terms, wiring, cls.device())

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        from transportkit_cuda_ipc.ends import CudaIpcImporter

        return CudaIpcImporter(terms, wiring, cls.device())
