"""Which CUDA calls the thin module makes, in which order, over a faked runtime; no GPU, and none of torch's CUDA."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from transportkit.errors import BackendError, ResourceError
from transportkit_cuda_ipc.cuda import GRANULE, HANDLE_BYTES, CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit_cuda_ipc import cuda

pytestmark = pytest.mark.timeout(60)

ADDRESS = 0x7F00_0000_0000


class Handle:
    """As cuda-bindings have it from 13.5 on: nothing but `getPtr`."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint8 * HANDLE_BYTES)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


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


class Quiet:
    """A stream or an event on which nothing is queued."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.done = True

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return self.done

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def ipc_handle(self) -> bytes:
        return b"e" * HANDLE_BYTES

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Quiet:
        return cls()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    bindings, package = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    bindings.runtime = made  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.runtime", made)):
        monkeypatch.setitem(sys.modules, name, module)
    properties = types.SimpleNamespace(uuid="AAAA-00")
    for name, value in {
        "init": lambda: None,
        "device_count": lambda: 1,
        "get_device_properties": lambda number: properties,
        "device": Quiet,
        "stream": Quiet,
        "Stream": Quiet,
        "Event": Quiet,
        "current_stream": Quiet,
        "empty_cache": lambda: made.calls.append(("empty_cache", ())),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def as_tensor(self: CudaDevice, owner: cuda.Owner) -> torch.Tensor:
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
    assert set(runtime.made("cudaSetDevice")) == {(0,)}


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
    with pytest.raises(BackendError, match="GPU bbbb-00 is not visible here, only aaaa-00"):
        CudaDevice("bbbb-00", 1)


def test_order(runtime: Runtime) -> None:
    device = CudaDevice("aaaa-00", 2, interprocess=True)
    assert device.events() == (b"e" * HANDLE_BYTES,) * 2
    with device.packing(1):
        pass
    assert device.packed(1)
    with device.reading():
        pass
    assert device.idle()()
