"""Shared memory of a sender whose tensors are on a GPU: pinned, and no harm done where it cannot be."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_slots_are_pinned_until_the_exporter_closes() -> None:
    from transportkit.testing.lanes import DirectLane
    from transportkit_shm.shm import ShmTransport

    with DirectLane(ShmTransport, chunk_bytes=1 << 20, device="cuda:0") as lane:
        slot = lane.exporter.slots[0]
        assert slot.is_pinned()
        source = torch.arange(1 << 18, dtype=torch.float32, device="cuda").view(torch.uint8)
        with lane.exporter.packing(0):
            slot.copy_(source)
        assert torch.equal(slot, source.cpu())
        lane.exporter.close()
        assert not slot.is_pinned()


def test_what_cuda_refuses_does_not_surface_in_the_next_kernel() -> None:
    from transportkit.lifecycle import host_slots
    from transportkit_shm.pinning import pin

    memory = host_slots(1, 1 << 16)[0]
    unpin = pin(memory, "cuda:0")
    pin(memory, "cuda:0")()  # refused: it is registered already
    assert (torch.ones(3, device="cuda") + 1).sum().item() == 6
    unpin()
    unpin()  # refused: it is not registered any more
    assert (torch.ones(3, device="cuda") + 1).sum().item() == 6
    torch.cuda.synchronize()
