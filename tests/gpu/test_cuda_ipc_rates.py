"""How fast `cuda-ipc` is, beside the device copies that it needs and what it replaces; prints a table; asserts none.

The baseline is one pack and one unpack of the same tensors within one process, in batches and with everything prepared:
nothing between two processes can do with less. Beside it stand torch.multiprocessing's own sharing of CUDA tensors, one
handle a tensor, and `shm`, which stages in host memory. Both ways of handing a slot over are measured in one run.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import cuda_double
import grounds
import pytest
import torch
from grounds import BOTH, GPU, MIB, Ground

from transportkit import registry
from transportkit.testing import in_process, installed
from transportkit_cuda_ipc import ends

if TYPE_CHECKING:
    from collections.abc import Callable

    from grounds import Shapes
    from torch import Tensor

pytestmark = [pytest.mark.timeout(600)]

ROUNDS = 5

#: (what, bytes in all, number of tensors)
WORKLOADS = [("81 tensors, 1.1 GB", 1100 * MIB, 81), ("20 000 tensors, 1 GB", 1000 * MIB, 20_000)]


def seconds(work: Callable[[], object], rounds: int = ROUNDS, warm: int = 2) -> float:
    """The median of some rounds, after some that are not counted; what is queued on the device is waited for."""
    taken = []
    for turn in range(warm + rounds):
        grounds.synchronise()
        start = time.perf_counter()
        work()
        grounds.synchronise()
        if turn >= warm:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copies(tensors: dict[str, Tensor], chunk_bytes: int) -> Callable[[], object]:
    """One pack and one unpack of everything, chunk by chunk, on one device, with every view prepared."""
    sources = [t.reshape(-1).view(torch.int64) for t in tensors.values()]  # the widest, which torch copies fastest
    targets = [torch.empty_like(t) for t in sources]
    slot = torch.empty(chunk_bytes // 8, dtype=torch.int64, device=sources[0].device)
    steps: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
    into: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    end = 0
    for source, target in zip(sources, targets, strict=True):
        for start in range(0, source.numel(), slot.numel()):
            piece = slice(start, start + slot.numel())
            count = source[piece].numel()
            if end + count > slot.numel():
                steps.append(into)
                into, end = ([], [], []), 0
            into[0].append(source[piece])
            into[1].append(slot[end : end + count])
            into[2].append(target[piece])
            end += -(-count // 8) * 8
    steps.append(into)

    def run() -> None:
        for source_pieces, slot_pieces, target_pieces in steps:
            torch._foreach_copy_(slot_pieces, source_pieces)
            torch._foreach_copy_(target_pieces, slot_pieces)

    return run


def over_session(ground: Ground, tensors: dict[str, Tensor], transport: Any = None, **keywords: Any) -> float:
    wanted: Shapes = grounds.shapes(tensors)
    with ground.session(transport, within=300.0, **keywords) as session:
        rounds = (ROUNDS, 2) if ground is GPU else (1, 0)
        return seconds(lambda: session.carry(tensors, grounds.load, wanted, ground.device), *rounds)


def take_shared(queue: Any, answers: Any) -> None:
    """torch.multiprocessing's way: a tensor a message, copied into targets that are kept."""
    kept: dict[str, Tensor] = {}
    while (message := queue.get()) is not None:
        for name, tensor in message.items():
            kept.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            del tensor
        message.clear()
        grounds.synchronise()
        answers.put(len(kept))


def over_torch(tensors: dict[str, Tensor]) -> float:
    import torch.multiprocessing as torch_multiprocessing

    context = torch_multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=take_shared, args=(queue, answers), daemon=True)
    child.start()
    try:

        def once() -> None:
            queue.put(tensors)
            assert answers.get(timeout=120) == len(tensors)

        return seconds(once)
    finally:
        queue.put(None)
        child.join(30)
        child.kill()
        child.join()
        child.close()
        for each in (queue, answers):
            each.close()
            each.join_thread()


@pytest.mark.parametrize(("what", "nbytes", "count"), WORKLOADS, ids=["large", "small"])
@pytest.mark.parametrize("ground", BOTH)
def test_rates(
    ground: Ground, what: str, nbytes: int, count: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    in_process(int, method="forkserver")
    on_device = ground is GPU
    tensors = ground.bulk(nbytes if on_device else nbytes // 8, count=count if on_device else max(1, count // 100))
    payload = sum(t.nbytes for t in tensors.values())
    chunk_bytes = 256 * MIB // ground.scale
    rows: list[tuple[str, float]] = [("the device copies it needs, alone", seconds(copies(tensors, chunk_bytes)))]
    with installed(*cuda_double.ALL):
        for handover in ("host", "event"):
            monkeypatch.setattr(ends, "HANDOVER", handover)
            for size in (chunk_bytes, chunk_bytes // 16):
                label = f"cuda-ipc, {handover}, chunks of {size / MIB:g} MiB"
                rows.append((label, over_session(ground, tensors, chunk_bytes=size, slots=2)))
    if on_device:
        shm = registry.load("shm")
        if isinstance(shm, registry.Loaded):
            rows.append(("shm, staged", over_session(ground, tensors, shm.transport, checksum=False)))
        rows.append(("torch.multiprocessing, a handle each", over_torch(tensors)))
    alone = rows[0][1]
    lines = [
        f"  {label:<42} {payload / taken / 1e9:9.2f} GB/s  {alone / taken:6.2f} of the copies" for label, taken in rows
    ]
    assert len(lines) == (7 if on_device else 5)
    if on_device:  # what the double takes means nothing
        with capsys.disabled():
            print(f"\n{what} ({payload / 1e9:.2f} GB) on {torch.cuda.get_device_name()}, torch {torch.__version__}")
            print("\n".join(lines))
