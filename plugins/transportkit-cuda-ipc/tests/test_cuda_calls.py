"""Which CUDA calls the thin module makes, in which order, over a faked runtime; no GPU, and none of torch's CUDA."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cuda_stub import Handle

from transportkit.errors import BackendError, ResourceError
from transportkit_cuda_ipc import cuda
from transportkit_cuda_ipc.cuda import GRANULE, HANDLE_BYTES, CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

ADDRESS = 0x7F00_0000_0000


class Runtime(types.ModuleType):
    """`cuda.bindings.runtime`: calls return a tuple that begins with an error, and never raise."""

    cudaIpcMemHandle_t = Handle
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.calls: list[tuple[str, Any]] = []
        self.failing: dict[str, list[int]] = {}

    def _answer(self, name: str, args: tuple[Any, ...], *values: Any) -> tuple[Any, ...]:
        self.calls.append((name, args))
        errors = self.failing.get(name, [])
        error = errors.pop(0) if errors else 0
        return (error, *values)

    def cudaSetDevice(self, number: int) -> Any:
        return self._answer("cudaSetDevice", (number,))

    def cudaMalloc(self, nbytes: int) -> Any:
        return self._answer("cudaMalloc", (nbytes,), ADDRESS)

    def cudaFree(self, address: int) -> Any:
        return self._answer("cudaFree", (address,))

    def cudaIpcGetMemHandle(self, address: int) -> Any:
        handle = Handle()
        handle.memory[:] = bytes(range(HANDLE_BYTES))
        return self._answer("cudaIpcGetMemHandle", (address,), handle)

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> Any:
        return self._answer("cudaIpcOpenMemHandle", (bytes(handle.memory), flags), ADDRESS)

    def cudaIpcCloseMemHandle(self, address: int) -> Any:
        return self._answer("cudaIpcCloseMemHandle", (address,))

    def cudaGetErrorName(self, error: int) -> Any:
        return 0, f"cudaError{error}".encode()

    def cudaGetErrorString(self, error: int) -> Any:
        return 0, b"it is so"

    def made(self, name: str) -> list[Any]:
        return [args for call, args in self.calls if call == name]


class Stream:
    """A stream of a GPU: how much was queued on it, and how much of that is done."""

    def __init__(self, device: int) -> None:
        self.device, self.queued, self.done = device, 0, 0
        self.waits: list[Event] = []
        self.after: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.after.append(stream)

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)


class Event:
    """An event, which may only be touched while its GPU is the current one: else another would get a context."""

    def __init__(self, *, interprocess: bool = False) -> None:
        self.interprocess = interprocess
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:  # torch makes the stream's GPU the current one itself
        self.at = stream, stream.queued

    def query(self) -> bool:
        assert Gpus.current == OURS
        return self.at is None or self.at[0].done >= self.at[1]

    def ipc_handle(self) -> bytes:
        assert Gpus.current == OURS
        assert self.interprocess
        return b"e" * HANDLE_BYTES

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        assert device.index == OURS
        return cls()


#: The GPU that the tests use has this number; the current one is another.
OURS = 1


class Gpus:
    """`torch.cuda` with two GPUs."""

    current = 0

    def __init__(self) -> None:
        self.streams = [Stream(0), Stream(1)]
        self.made: list[Stream] = []

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, Gpus.current = Gpus.current, device.index
        try:
            yield
        finally:
            Gpus.current = before

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams[device.index]

    def make(self, device: torch.device) -> Stream:
        self.made.append(Stream(device.index))
        return self.made[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert Gpus.current == stream.device, "leaving it would make a context on the other one"
        before, self.streams[stream.device] = self.streams[stream.device], stream
        try:
            yield
        finally:
            self.streams[stream.device] = before


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> Iterator[Runtime]:
    made = Runtime()
    bindings, package = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    bindings.runtime = made  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.runtime", made)):
        monkeypatch.setitem(sys.modules, name, module)
    properties = [types.SimpleNamespace(uuid=uuid) for uuid in ("0000-FF", "AAAA-00")]
    for name, value in {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_properties": properties.__getitem__,
        "device": gpus.device,
        "Event": Event,
        "current_stream": gpus.current_stream,
        "Stream": gpus.make,
        "stream": gpus.stream,
        "empty_cache": lambda: made.calls.append(("empty_cache", ())),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def as_tensor(self: CudaDevice, owner: cuda.Owner) -> torch.Tensor:
        if made.failing.get("as_tensor"):
            raise RuntimeError("Numpy is not available")
        shape = owner.__cuda_array_interface__["shape"]
        memory = torch.zeros(shape, dtype=torch.uint8)
        memory.owner = owner  # type: ignore[attr-defined]
        return memory

    monkeypatch.setattr(CudaDevice, "_tensor", as_tensor)
    yield made
    gc.collect()


def test_memory_is_allocated_exported_and_freed_once(runtime: Runtime) -> None:
    device = CudaDevice("GPU-aaaa-00", 2)
    whole = device.allocate(100)
    assert whole.numel() == GRANULE, "smaller allocations may share a block with others"
    assert device.export(whole) == device.export(whole) == bytes(range(HANDLE_BYTES))
    device.free(whole)
    assert [len(runtime.made(name)) for name in ("cudaMalloc", "cudaIpcGetMemHandle", "cudaFree")] == [1, 2, 1]
    assert set(runtime.made("cudaSetDevice")) == {(OURS,)}
    assert Gpus.current == 0


def test_what_torch_keeps_is_asked_for_before_memory_is_refused(runtime: Runtime) -> None:
    runtime.failing["cudaMalloc"] = [2]
    CudaDevice("aaaa-00", 1).allocate(1)
    assert [name for name, _ in runtime.calls if name in ("cudaMalloc", "empty_cache")] == [
        "cudaMalloc",
        "empty_cache",
        "cudaMalloc",
    ]
    runtime.failing["cudaMalloc"] = [2, 2]
    with pytest.raises(ResourceError, match=r"chunk_bytes.*cudaError2 \(2\): it is so"):
        CudaDevice("aaaa-00", 1).allocate(1)


def test_a_mapping_ends_once_when_its_last_view_dies(runtime: Runtime) -> None:
    told: list[str] = []
    events = [b"e" * HANDLE_BYTES]
    device = CudaDevice("aaaa-00", 1)
    whole = device.map(b"h" * HANDLE_BYTES, 1000, events, lambda: told.append("unmapped"))
    assert runtime.made("cudaIpcOpenMemHandle") == [(b"h" * HANDLE_BYTES, 1)]
    device.follow(0)
    device.close()
    assert told == []
    del whole
    gc.collect()
    assert runtime.made("cudaIpcCloseMemHandle") == [(ADDRESS,)]
    assert told == ["unmapped"]


def test_a_mapping_that_does_not_end_keeps_the_tether(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    runtime.failing["cudaIpcCloseMemHandle"] = [1]
    whole = CudaDevice("aaaa-00", 1).map(b"h" * HANDLE_BYTES, 1000, (), lambda: told.append("unmapped"))
    del whole
    gc.collect()
    assert told == []
    assert "the sender keeps it until this process ends" in caplog.text


@pytest.mark.parametrize(("handle", "events"), [(b"short", []), (b"h" * HANDLE_BYTES, [b"short"])])
def test_what_is_no_handle_never_reaches_cuda(runtime: Runtime, handle: bytes, events: list[bytes]) -> None:
    with pytest.raises(BackendError, match="no handle"):
        CudaDevice("aaaa-00", 1).map(handle, 10, events, lambda: None)
    assert runtime.made("cudaIpcOpenMemHandle") == []


def test_a_refused_mapping_is_one_of_our_errors(runtime: Runtime) -> None:
    runtime.failing["cudaIpcOpenMemHandle"] = [201]
    with pytest.raises(BackendError, match=r"two processes.*cudaError201"):
        CudaDevice("aaaa-00", 1).map(b"h" * HANDLE_BYTES, 10, (), lambda: None)
    assert runtime.made("cudaIpcCloseMemHandle") == []


def test_a_gpu_that_is_not_visible_is_named_with_those_that_are(runtime: Runtime) -> None:
    with pytest.raises(BackendError, match="GPU bbbb-00 is not visible here, only 0000-ff, aaaa-00"):
        CudaDevice("bbbb-00", 1)


def test_memory_that_torch_does_not_take_over_is_given_back(runtime: Runtime) -> None:
    told: list[str] = []
    runtime.failing["as_tensor"] = [1]
    device = CudaDevice("aaaa-00", 1)
    with pytest.raises(RuntimeError, match="Numpy"):
        device.allocate(1)
    assert runtime.made("cudaFree") == [(ADDRESS,)]
    with pytest.raises(RuntimeError, match="Numpy") as caught:
        device.map(b"h" * HANDLE_BYTES, 10, (), lambda: told.append("unmapped"))
    assert runtime.made("cudaIpcCloseMemHandle") == [(ADDRESS,)], "at once, whoever keeps the exception"
    assert told == ["unmapped"]
    del caught
    gc.collect()
    assert told == ["unmapped"]


def test_copies_into_a_slot_come_after_what_the_caller_has_queued_and_before_what_follows(
    runtime: Runtime, gpus: Gpus
) -> None:
    devices = CudaDevice("aaaa-00", 1), CudaDevice("aaaa-00", 1)
    caller, (first, second) = gpus.streams[OURS], gpus.made
    with devices[0].packing(0):
        assert gpus.streams == [gpus.streams[0], first]
        assert first.after == [caller]
        assert caller.after == []
    assert caller.after == [first]
    assert gpus.streams[OURS] is caller
    with pytest.raises(KeyError), devices[1].packing(0):
        raise KeyError
    assert second.after == [caller]
    assert caller.after == [first, second]
    CudaDevice("aaaa-00")
    assert len(gpus.made) == 2, "an importer has none"


def test_a_slot_is_packed_when_its_stream_has_come_that_far(runtime: Runtime, gpus: Gpus) -> None:
    device, ours = CudaDevice("aaaa-00", 2), gpus.made[-1]
    ours.queued = 3
    with device.packing(1):
        ours.queued = 5
    assert not device.packed(1)
    assert device.packed(0), "nothing was packed into it"
    ours.done = 4
    assert not device.packed(1)
    with device.packing(0):
        ours.queued = 6
    ours.done = 5
    assert device.packed(1)
    assert not device.packed(0)


def test_copies_that_failed_are_waited_for_before_memory_is_freed(runtime: Runtime, gpus: Gpus) -> None:
    device, ours = CudaDevice("aaaa-00", 1), gpus.made[-1]
    ours.queued = 1
    with pytest.raises(KeyError), device.packing(0):
        raise KeyError
    gpus.streams[OURS] = Stream(OURS)  # that of another thread, say
    idle = device.idle()
    assert not idle()
    ours.done = 1
    assert idle()


def test_reads_are_over_when_the_callers_stream_has_come_that_far(runtime: Runtime, gpus: Gpus) -> None:
    device, ours = CudaDevice("aaaa-00"), gpus.streams[OURS]
    ours.queued = 7
    idle = device.idle()
    ours.queued = 9
    assert not idle()
    ours.done = 7
    assert idle(), "what was queued later is not waited for"


def test_memory_is_unmapped_after_the_reads_that_are_queued(
    runtime: Runtime, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    device, ours = CudaDevice("aaaa-00"), gpus.streams[OURS]
    for waited in (True, False):
        whole = device.map(b"h" * HANDLE_BYTES, 10, (), lambda: told.append("unmapped"))
        ours.queued += 1

        def pause(_: float, waited: bool = waited) -> None:
            assert runtime.made("cudaIpcCloseMemHandle") == [(ADDRESS,)] * (not waited)
            ours.done += waited

        monkeypatch.setattr(cuda.time, "sleep", pause)
        monkeypatch.setattr(cuda, "DRAIN_SECONDS", 30.0 if waited else 0.05)
        del whole
        gc.collect()
        assert runtime.made("cudaIpcCloseMemHandle") == [(ADDRESS,)]
        assert told == ["unmapped"]
    assert "do not end; the sender keeps it until this process ends" in caplog.text


def test_a_gpu_that_has_failed_ends_no_mapping_and_raises_nowhere(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    whole = CudaDevice("aaaa-00").map(b"h" * HANDLE_BYTES, 10, (), lambda: told.append("unmapped"))

    def record(self: Event, stream: Stream) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "record", record)
    del whole
    gc.collect()
    assert told == []
    assert "illegal memory access" in caplog.text


def test_events_are_shared_and_followed_on_the_callers_stream(runtime: Runtime, gpus: Gpus) -> None:
    device = CudaDevice("aaaa-00", 2, interprocess=True)
    assert device.events() == (b"e" * HANDLE_BYTES,) * 2
    importer = CudaDevice("aaaa-00")
    whole = importer.map(b"h" * HANDLE_BYTES, 10, device.events(), lambda: None)
    importer.follow(1)
    assert len(gpus.streams[OURS].waits) == 1
    assert gpus.streams[0].waits == []
    importer.close()
    del whole
