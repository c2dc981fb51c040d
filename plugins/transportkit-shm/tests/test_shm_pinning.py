"""The arena is pinned where the sender's tensors are on a GPU, as far as that can be told without one."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from transportkit.testing.lanes import DirectLane
from transportkit_shm import pinning
from transportkit_shm.mpqueue import MpqueueTransport
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.transport import Transport

BACKENDS = pytest.mark.parametrize("transport", [ShmTransport, MpqueueTransport])


class Runtime:
    """What this process asks of CUDA's runtime, which knows no more than which memory is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.flags: list[int] = []
        self.refuses = 0
        self.devices: list[str] = []
        self.cleared: list[str] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            assert mapped(address, nbytes), "memory is pinned that is not there"
            assert address not in self.registered
            self.registered[address] = nbytes
            self.flags.append(flags)
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        nbytes = self.registered.pop(address)
        assert mapped(address, nbytes), "memory was unmapped while it was pinned"
        return self.refuses


def mapped(address: int, nbytes: int) -> bool:
    """Whether all of this memory is mapped in this process."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        ranges = [tuple(int(end, 16) for end in line.split(" ", 1)[0].split("-")) for line in lines]
    return any(start <= address and address + nbytes <= stop for start, stop in ranges)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()

    @contextlib.contextmanager
    def on(device: str) -> Iterator[None]:
        fake.devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(pinning, "_forget_error", fake.cleared.append)
    return fake


@BACKENDS
def test_the_arena_is_pinned_until_the_exporter_closes(transport: type[Transport], runtime: Runtime) -> None:
    with DirectLane(transport, chunk_bytes=5000, slots=2, device="cuda:0") as lane:
        ((address, nbytes),) = runtime.registered.items()
        assert address == lane.exporter.slots[0].data_ptr()
        assert nbytes >= 2 * 5000
        assert runtime.flags == [pinning.PORTABLE]
        assert runtime.devices == ["cuda:0"]
        lane.connect()
        assert lane.carry(1, b"x" * 5000) == [b"x" * 5000]
        assert list(runtime.registered) == [address], "the importer's mapping is its user's, too"
        slot = lane.exporter.slots[0]
        lane.exporter.close()
        assert runtime.registered == {}
        lane.exporter.close()
        del slot
    assert runtime.cleared == []


def test_an_exporter_that_nobody_closes_is_unpinned_before_it_is_unmapped(runtime: Runtime) -> None:
    with DirectLane(ShmTransport, device="cuda:0") as lane:
        (ours,) = runtime.registered
        exporter: Any = ShmTransport.exporter(lane.terms, lane.loopback.exporter)
        assert len(runtime.registered) == 2
        exporter._giver.close()
        del exporter
        gc.collect()
        assert list(runtime.registered) == [ours]


@BACKENDS
def test_memory_for_tensors_on_the_cpu_is_not_pinned(transport: type[Transport], runtime: Runtime) -> None:
    with DirectLane(transport) as lane:
        lane.connect()
        assert lane.carry(0, b"x") == [b"x"]
    assert (runtime.registered, runtime.devices) == ({}, [])


@BACKENDS
def test_what_cuda_refuses_is_forgotten_and_the_lane_works(
    transport: type[Transport], runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "transportkit.shm")
    runtime.refuses = 2
    with DirectLane(transport, device="cuda:0") as lane:
        assert runtime.cleared == ["cuda:0"]
        assert "not pinned" in caplog.text
        lane.connect()
        assert lane.carry(0, b"x" * 100) == [b"x" * 100]
    assert runtime.cleared == ["cuda:0"]


def test_a_refused_return_is_told_and_forgotten(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    with DirectLane(ShmTransport, device="cuda:0"):
        runtime.refuses = 713
    assert runtime.cleared == ["cuda:0"]
    assert "CUDA error 713" in caplog.text


@BACKENDS
def test_without_a_gpu_a_lane_for_one_works(transport: type[Transport], caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    caplog.set_level(logging.INFO, "transportkit.shm")
    with DirectLane(transport, device="cuda:0") as lane:
        assert "not pinned" in caplog.text
        lane.connect()
        assert lane.carry(0, b"x" * 100) == [b"x" * 100]
