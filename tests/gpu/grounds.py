"""What the tests of `cuda-ipc` stand on: a GPU, or its double on the CPU, and what processes do there. No test is here.

On the double the same tests run in every suite, so that their logic is known to hold before they meet a device.
"""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any

import attrs
import cuda_double
import pytest
import torch
from cuda_double import DoubleTransport

from transportkit.testing import Session, faulty, hear, print_of, prints, report, resident
from transportkit_cuda_ipc.cuda_ipc import CudaIpcTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from transportkit.session import Receiver
    from transportkit.testing.samples import Print
    from transportkit.transport import Transport

MIB = 1 << 20

Shapes = dict[str, tuple[tuple[int, ...], str]]


@attrs.frozen
class Ground:
    """Where a test runs.

    Args:
        transport: the backend.
        device: where the tensors are.
        scale: by how much sizes are divided.
        within: seconds that any step may take.
    """

    name: str
    transport: type[Transport]
    device: str
    scale: int
    within: float

    def session(self, transport: type[Transport] | None = None, **keywords: Any) -> Session:
        given = {"process": True, "device": self.device, "within": self.within, **keywords}
        return Session(transport or self.transport, **given)

    def failing(self, at: str, error: Exception) -> type[Transport]:
        return faulty(self.transport, at=at, error=error)  # type: ignore[no-any-return]

    def options(self, **more: Any) -> dict[str, Any]:
        given = {"backends": (self.transport.name,), "device": self.device, "timeout": self.within, "wait": self.within}
        return {**given, **more}

    def bulk(self, nbytes: int, seed: int = 0, count: int = 9) -> dict[str, Tensor]:
        """So many bf16 tensors of any bits, of equal sizes and about ``nbytes / scale`` bytes in all."""
        generator = torch.Generator().manual_seed(seed)
        rows = max(1, nbytes // self.scale // count // 64)
        found = {}
        for number in range(count):
            bits = torch.randint(-(1 << 15), 1 << 15, (rows, 32), dtype=torch.int16, generator=generator)
            found[f"layers.{number}.weight"] = bits.view(torch.bfloat16).to(self.device)
        return found


GPU = Ground("gpu", CudaIpcTransport, "cuda", 1, 60.0)
DOUBLE = Ground("double", DoubleTransport, "cpu", 128, 20.0)

#: For ``pytest.mark.parametrize("ground", BOTH)``.
BOTH = [pytest.param(GPU, id="gpu", marks=pytest.mark.gpu), pytest.param(DOUBLE, id="double")]


def synchronise() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def memory() -> dict[str, int]:
    """Bytes in use: by torch's allocator, and, with what lies beside it, on the GPU as a whole; else in the process."""
    gc.collect()
    synchronise()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "on the device": total - free,
        }
    return {"resident": resident()}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What has grown by more than 32 MiB, and by how much."""
    return {name: after[name] - before[name] for name in before if after[name] - before[name] > 32 * MIB}


def settles(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes so within a while."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """What targets for these tensors are made from in another process."""
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


# -- in the receiver's process -----------------------------------------------------------------------------------------

_targets: dict[str, Tensor] = {}


def targets(wanted: Shapes, device: str) -> dict[str, Tensor]:
    """Tensors on a device, kept from one update to the next."""
    kept = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in _targets.items()}
    if kept != wanted or {t.device.type for t in _targets.values()} != {torch.device(device).type}:
        _targets.clear()
        for name, (shape, dtype) in wanted.items():
            _targets[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    return _targets


def load(receiver: Receiver, wanted: Shapes, device: str) -> None:
    """Take an update into kept targets, and have it done on the device."""
    receiver.load_into(targets(wanted, device))
    synchronise()


def load_and_tell(receiver: Receiver, wanted: Shapes, device: str) -> dict[str, Print]:
    receiver.load_into(targets(wanted, device))
    return prints(_targets)


def receive_on(receiver: Receiver, device: str) -> dict[str, Print]:
    came = list(receiver.receive())
    assert {tensor.device.type for _, tensor in came} == {device}
    return prints(came)


def apply_and_copy(receiver: Receiver) -> dict[str, Print]:
    """Copies that are queued, and not waited for, while the function has the tensors."""
    kept: dict[str, Tensor] = {}

    def keep(pairs: list[tuple[str, Tensor]]) -> None:
        kept.update((name, tensor.clone()) for name, tensor in pairs)

    receiver.apply(keep)
    return prints(kept)


def lease_and_copy(receiver: Receiver) -> dict[str, Print]:
    """The same from leases, of which each ends at once."""
    kept: dict[str, list[Tensor]] = {}
    kinds = {}
    for lease in receiver.chunks():
        for spec, _, tensor in lease:
            kinds[spec.name] = spec
            kept.setdefault(spec.name, []).append(tensor.reshape(-1).view(torch.uint8).clone())
            del tensor
    whole = {}
    for name, parts in kept.items():
        flat = torch.cat(parts).view(getattr(torch, kinds[name].dtype))
        whole[name] = print_of(flat.view(kinds[name].shape))
    return whole


def memory_there(receiver: Receiver) -> dict[str, int]:
    return memory()


def hold_and_wait(receiver: Receiver) -> None:
    """Join, take one chunk, say so, and keep it until told."""
    with receiver:
        for lease in receiver.chunks():
            kept = [tensor for _, _, tensor in lease]
            report("mid-update")
            hear(600)
            del kept


def serve_until_told(address: str, options: dict[str, Any], nbytes: int, ground: str) -> None:
    """Send one update that gets stuck half-way."""
    from transportkit.session import serve

    where = GPU if ground == "gpu" else DOUBLE

    def source() -> Any:
        yield from where.bulk(nbytes).items()
        report("mid-update")
        time.sleep(600)
        yield "never", torch.zeros(1)

    with serve(address, **options) as sender:
        sender.send(source())


def connect_and_take(address: str, options: dict[str, Any], updates: int, wanted: Shapes, device: str) -> Any:
    """Connect, take so many updates; what came last, and whether memory stayed flat after the first."""
    from transportkit.session import connect

    with connect(address, **options) as receiver:
        load(receiver, wanted, device)
        before = memory()
        for _ in range(updates - 1):
            load(receiver, wanted, device)
        return prints(_targets), grown(before, memory())


def by_double() -> tuple[type[Transport], ...]:
    """What a child must have installed."""
    return cuda_double.ALL


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}
