"""The backend `nccl`: broadcasts between GPUs; what it can do, and with whom. Nothing here makes a CUDA context."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

from transportkit.errors import ProtocolError
from transportkit.transport import API_VERSION, Match, Mismatch, Offer, Reach, Transport, Unavailable
from transportkit.wire import decode_as, raw
from transportkit_collective import __version__
from transportkit_collective.matching import placed

if TYPE_CHECKING:
    from transportkit.transport import Exporter, Importer, Side, Site, Terms, Wiring

#: A variable that must be the same on all ranks, or they never find each other.
MUST_AGREE = "NCCL_CUMEM_ENABLE"


class NcclOffer(Struct, frozen=True):
    """What one side tells of itself.

    Args:
        runtime: version of the NCCL that is loaded, ``"2.28.9"``.
        devices: the UUID of each GPU that torch numbers here, in its order; empty texts where they are not known.
        settings: its environment variables that begin with ``NCCL_``.
    """

    runtime: str = ""
    devices: tuple[str, ...] = ()
    settings: dict[str, str] = {}


class NcclTransport(Transport):
    """One NCCL communicator for each lane, of the sender and all its receivers, each with a GPU of its own."""

    name: ClassVar[str] = "nccl"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = True
    rank: ClassVar[int] = 30
    device_slots: ClassVar[bool] = True

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        """Whether this torch has NCCL and the driver sees a GPU."""
        try:
            import torch
            import torch.distributed as dist

            if torch.version.cuda is None or not dist.is_available() or not dist.is_nccl_available():
                return Unavailable(cls.name, "this torch was built without CUDA and NCCL; install a CUDA build")
            count = torch.cuda.device_count()  # asks the driver's management library, and makes no context
            if count == 0:
                return Unavailable(cls.name, "torch sees no CUDA device; are a GPU and its driver here and visible?")
            runtime = _text(dist.ProcessGroupNCCL.get_runtime_nccl_version())  # type: ignore[call-arg]  # static
            settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
            offer = NcclOffer(runtime, _uuids(count), settings)
        except Exception as error:  # of a driver, a library that is not there, or a torch of another kind
            return Unavailable(cls.name, f"asking torch for NCCL failed: {error}")
        return Offer(cls.name, cls.api_version, __version__, params=raw(offer))

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        """The same torch and NCCL, tensors on CUDA devices, and no two ranks on one GPU."""
        verdict = placed(sender, receiver, lane)
        if isinstance(verdict, Mismatch):
            return verdict
        claims, note = verdict
        try:
            ours, theirs = (decode_as(NcclOffer, side.offer.params) for side in (sender, receiver))
        except ProtocolError as error:
            return Mismatch(f"an offer that is none: {str(error).splitlines()[0]}")
        if not ours.runtime or ours.runtime != theirs.runtime:
            return Mismatch(
                f"needs the same NCCL on both sides, the sender has {ours.runtime or 'an unknown one'}, "
                f"the receiver {theirs.runtime or 'an unknown one'}"
            )
        for end, side in (("sender", sender), ("receiver", receiver)):
            if not side.device.startswith("cuda"):
                return Mismatch(f"the {end}'s tensors are on {side.device}; give it `device=` where they are not")
        if ours.settings.get(MUST_AGREE) != theirs.settings.get(MUST_AGREE):
            return Mismatch(f"{MUST_AGREE} is not the same on both sides")
        mine, other = gpu(sender, ours), gpu(receiver, theirs)
        if mine == other:
            return Mismatch("both ends are on one GPU, of which NCCL allows one rank only")
        if other in lane:
            return Mismatch("another receiver of its lane is on the same GPU, of which NCCL allows one rank only")
        odd = sorted(
            name
            for name in ours.settings.keys() | theirs.settings.keys()
            if ours.settings.get(name) != theirs.settings.get(name)
        )
        if odd:
            note += f"; not the same on both sides: {', '.join(odd[:5])}"
        return Match(reach=Reach.DEVICE_NETWORK, claims=claims | {other}, note=note)

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        from transportkit_collective.exporter import CollectiveExporter
        from transportkit_collective.planes import NcclPlane

        return CollectiveExporter(terms, wiring, NcclPlane(terms.sender_device))

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        from transportkit_collective.importer import CollectiveImporter
        from transportkit_collective.planes import NcclPlane

        return CollectiveImporter(terms, wiring, NcclPlane(terms.receiver_device))


def gpu(side: Side, offer: NcclOffer) -> str:
    """The claim on one GPU: its UUID, or else its host and number."""
    _, _, number = side.device.partition(":")
    index = int(number) if number.isdigit() else 0
    uuid = offer.devices[index] if index < len(offer.devices) else ""
    return f"GPU {uuid or index} of {side.site.boot_id or side.site.host}"


def _text(version: object) -> str:
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _uuids(count: int) -> tuple[str, ...]:
    """The UUIDs in torch's order, by its own way of asking without a context; empty texts where that has changed."""
    import torch

    try:
        known = torch.cuda._raw_device_uuid_nvml() or []
        named = {str(uuid): str(uuid) for uuid in known} | {str(index): str(uuid) for index, uuid in enumerate(known)}
        visible = [str(one) for one in torch.cuda._parse_visible_devices()]
        full = [named.get(one) or next((uuid for uuid in known if uuid.startswith(one)), "") for one in visible]
        return (*full, *[""] * count)[:count]
    except Exception:  # private functions, which may change
        pass
    return ("",) * count
