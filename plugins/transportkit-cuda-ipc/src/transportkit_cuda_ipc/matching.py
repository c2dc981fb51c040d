"""On which GPU two sides meet, and whether they can; pure, since both sides run it.

GPUs are known by UUID alone. Their numbers differ from one process to the next, by `CUDA_VISIBLE_DEVICES` and by the
order in which CUDA and the driver list them; where a number is taken for the wrong GPU, the copies cross to another one
and are right all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from transportkit.errors import ProtocolError
from transportkit.transport import Match, Mismatch, Reach
from transportkit.wire import decode_as, raw

if TYPE_CHECKING:
    from transportkit.transport import Side

#: Begins the claim of a lane on the GPU that its memory is on.
CLAIM = "memory on GPU "


class CudaOffer(Struct, frozen=True):
    """What one side tells of itself.

    Args:
        devices: the UUID of each GPU that it sees, in CUDA's order as far as that is known.
        current: which of them ``"cuda"`` without a number means.
        driver: the newest CUDA version that its driver supports, ``"13.0"``.
        runtime: the CUDA version that its torch was built for.
        allocator: torch's allocator settings; they do not matter here, and are told where something fails.
        note: what makes success doubtful there.
    """

    devices: tuple[str, ...] = ()
    current: int = 0
    driver: str = ""
    runtime: str = ""
    allocator: str = ""
    note: str = ""


class CudaTerms(Struct, frozen=True):
    """What is agreed: the GPU that the memory is on."""

    uuid: str


def plain_uuid(uuid: str) -> str:
    """One form of a UUID: NVML and CUDA_VISIBLE_DEVICES write a prefix before it, torch does not."""
    lower = uuid.strip().lower()
    for prefix in ("gpu-", "mig-"):
        lower = lower.removeprefix(prefix)
    return lower


def meet(sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
    """The GPU on which these two can share memory: the receiver's if the sender sees it, else the other way round."""
    apart = _apart(sender, receiver)
    if apart:
        return Mismatch(apart)
    try:
        ours, theirs = (decode_as(CudaOffer, side.offer.params) for side in (sender, receiver))
    except ProtocolError as error:
        return Mismatch(f"an offer that is none: {str(error).splitlines()[0]}")
    ends = []
    for end, side, offer in (("receiver", receiver, theirs), ("sender", sender, ours)):
        try:
            ends.append(_gpu_of(side, offer))
        except ValueError as error:
            return Mismatch(f"the {end}'s `device=` is {side.device!r}, {error}")
    both = [uuid for uuid in ours.devices if uuid in theirs.devices]
    wanted = [*ends, *both]
    taken = next((claim.removeprefix(CLAIM) for claim in sorted(lane) if claim.startswith(CLAIM)), None)
    if taken is not None:
        if taken not in both:
            return Mismatch(f"its lane's memory is on GPU {taken}, which this receiver does not see")
        wanted = [taken]
    uuid = next((uuid for uuid in wanted if uuid in both), None)
    if uuid is None:
        return Mismatch(
            f"no GPU that both see: the sender sees {_listed(ours)}, the receiver {_listed(theirs)}; "
            "look at CUDA_VISIBLE_DEVICES of both"
        )
    near = ends == [uuid, uuid]
    notes = [f"on GPU {uuid}", ours.note, theirs.note]
    return Match(
        reach=Reach.SAME_DEVICE if near else Reach.HOST_MEMORY,  # one end copies across, or from and to the host
        params=raw(CudaTerms(uuid)),
        claims=frozenset({CLAIM + uuid}),
        note="; ".join(dict.fromkeys(note for note in notes if note)),
    )


def _apart(sender: Side, receiver: Side) -> str:
    """What keeps two processes from sharing device memory, as far as their sites tell; empty for nothing."""
    ours, theirs = sender.site, receiver.site
    if not ours.boot_id or ours.boot_id != theirs.boot_id:
        return "on another host"
    if ours.uid < 0 or ours.uid != theirs.uid:
        return f"another user: the sender has uid {ours.uid}, the receiver uid {theirs.uid}; run both as one"
    pids = ours.namespaces.get("pid"), theirs.namespaces.get("pid")
    if None in pids or pids[0] != pids[1]:
        return (
            "in another pid namespace, across which CUDA shares no memory; let the two containers share one "
            "(docker run --pid=..., shareProcessNamespace: true)"
        )
    return ""


def _gpu_of(side: Side, offer: CudaOffer) -> str | None:
    """The UUID of the GPU that a side's tensors are on; None for the CPU. Raises `ValueError` where there is none."""
    kind, _, number = side.device.partition(":")
    if kind != "cuda":
        return None
    index = int(number) if number.isascii() and number.isdigit() else offer.current
    if not 0 <= index < len(offer.devices):
        raise ValueError(f"but it sees {len(offer.devices)} GPUs")
    return offer.devices[index]


def _listed(offer: CudaOffer) -> str:
    shown = ", ".join(offer.devices[:8])
    return f"{shown or 'none'}{' and others' if len(offer.devices) > 8 else ''}"
