"""`nccl` on real GPUs: one rank on one of them, and sessions where there are two. Skipped elsewhere, with the reason.

``nox -s gpu -- tests/gpu/test_nccl_device.py`` runs it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from promptness import PROMPT

from transportkit.testing import Child, Session, bulk, prints, report

pytest.importorskip("transportkit_collective")

from transportkit_collective.head import HEAD, Head
from transportkit_collective.nccl import NcclTransport
from transportkit_collective.planes import NcclPlane
from transportkit_collective.store import LinkStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.session import Receiver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL allows one rank on each")


def alone(count: int = 2, nbytes: int = 1 << 20) -> tuple[NcclPlane, Any]:
    """A group of one rank, whose broadcasts go nowhere, and its slots."""
    plane = NcclPlane("cuda:0")
    slots = plane.slots(count, nbytes)
    plane.form(LinkStore(1, lambda: None), 0, 1, "", 30.0)
    return plane, slots


def test_a_group_of_one_rank_gives_what_was_packed_and_leaves_no_thread() -> None:
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    plane, slots = alone()
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    for turn in range(4):
        with plane.packing(turn % 2):
            slots[turn % 2][HEAD : HEAD + 1000].fill_(turn + 1)
        plane.give(slots[turn % 2], Head(False, 1, turn, 1000), first=False)
        assert slots[turn % 2][HEAD : HEAD + 1000].eq(turn + 1).all()
    began = time.monotonic()
    plane.dispose()
    assert time.monotonic() - began < PROMPT
    assert not [thread for thread in threading.enumerate() if "nccl" in thread.name]


def test_packing_waits_for_what_the_caller_has_queued() -> None:
    plane, slots = alone()
    source = torch.zeros(1000, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    source.fill_(7)  # behind the long kernel
    with plane.packing(0):
        slots[0][HEAD : HEAD + 1000].copy_(source)
    source.fill_(9)  # behind the copy
    plane.give(slots[0], Head(True, 1, 0, 1000), first=True)
    assert slots[0][HEAD : HEAD + 1000].eq(7).all()
    plane.dispose()


def test_an_abort_ends_no_process() -> None:
    with Child(aborted) as child:
        assert child.heard(60) == "aborted"
        assert child.result(60) == "alive"


def aborted() -> str:
    plane, slots = alone()
    plane.sever()
    report("aborted")
    time.sleep(20)  # longer than a watchdog needs
    del slots
    return "alive"


# -- two GPUs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(
        NcclTransport,
        receiver={"device": "cuda:1"},
        device="cuda:0",
        chunk_bytes=1 << 20,
        allow_plaintext=True,
        within=60,
    ) as made:
        yield made


def take(receiver: Receiver, expected: dict[str, Any]) -> dict[str, Any]:
    return prints(list(receiver.receive()))


@two_gpus
def test_values_arrive_on_the_other_gpu(session: Session) -> None:
    assert session.sender.agreement.backend(0) == "nccl"
    assert session.sender.agreement.assignments[0].digest == "none"
    for seed in range(3):
        tensors = {name: tensor.to("cuda:0") for name, tensor in bulk(8 << 20, seed).items()}
        assert session.carry(tensors, take, {}) == prints(tensors)


@two_gpus
def test_a_long_kernel_on_the_callers_stream_is_waited_for(session: Session) -> None:
    source = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    source.fill_(5)
    seen = session.carry({"w": source}, take, {})
    assert seen == prints({"w": torch.full((4 << 20,), 5, dtype=torch.uint8)})


@two_gpus
def test_memory_is_flat_over_twenty_updates(session: Session) -> None:
    tensors = {name: tensor.to("cuda:0") for name, tensor in bulk(16 << 20).items()}
    session.carry(tensors, take, {})
    torch.cuda.synchronize()
    before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    for _ in range(20):
        session.carry(tensors, take, {})
    torch.cuda.synchronize()
    after = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    assert all(old - new < 64 << 20 for old, new in zip(before, after, strict=True))
