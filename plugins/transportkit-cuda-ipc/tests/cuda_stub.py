"""The real thin module over a CUDA runtime and a `torch.cuda` that are none: memory files, and events that take time.

Where `cuda_double` stands in for the whole of a GPU, here every line of `transportkit_cuda_ipc.cuda` runs, in whole
sessions between processes. The runtime refuses what CUDA refuses: a handle in the process that made it, and what is
unmapped or freed twice. Freeing what is mapped elsewhere is undefined there, and an error here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from cuda_double import DoubleTransport

from transportkit_cuda_ipc import cuda
from transportkit_cuda_ipc.cuda import HANDLE_BYTES, CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit_cuda_ipc.devices import Device

INVALID_VALUE, UNINITIALISED, STILL_MAPPED = 1, 201, 999
HANDLE = struct.Struct("<qqq40x")  # pid, descriptor, size

journal: list[str] = []
"""What was asked of the runtime in this process, less what is asked each time."""


class Handle:
    """`cudaIpcMemHandle_t`, as cuda-bindings have it from 13.5 on: nothing but `getPtr`."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint8 * HANDLE_BYTES)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


class Runtime(types.ModuleType):
    """As much of `cuda.bindings.runtime` as is asked for."""

    cudaIpcMemHandle_t = Handle
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.own: dict[int, tuple[int, mmap.mmap, Any]] = {}
        self.theirs: dict[int, tuple[int, mmap.mmap, Any]] = {}

    @staticmethod
    def _map(file: int, nbytes: int) -> tuple[int, tuple[int, mmap.mmap, Any]]:
        memory = mmap.mmap(file, nbytes)
        held = (ctypes.c_uint8 * nbytes).from_buffer(memory)
        return ctypes.addressof(held), (file, memory, held)

    @staticmethod
    def _end(kept: dict[int, tuple[int, mmap.mmap, Any]], address: int) -> None:
        file, memory, held = kept.pop(address)
        del held
        memory.close()
        os.close(file)

    def cudaSetDevice(self, number: int) -> tuple[int]:
        return (0 if number == 0 else 101,)

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        file = os.memfd_create("cuda-stub", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        address, kept = self._map(file, nbytes)
        self.own[address] = kept
        journal.append("malloc")
        return 0, address

    def cudaFree(self, address: int) -> tuple[int]:
        if address not in self.own:
            return (INVALID_VALUE,)
        again = os.open(f"/proc/self/fd/{self.own[address][0]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            journal.append("freed while mapped")
            return (STILL_MAPPED,)
        finally:
            os.close(again)
        self._end(self.own, address)
        journal.append("free")
        return (0,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, Handle | None]:
        if address not in self.own:
            return INVALID_VALUE, None
        file, memory, _ = self.own[address]
        handle = Handle()
        handle.memory[:] = HANDLE.pack(os.getpid(), file, len(memory))
        journal.append("export")
        return 0, handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int | None]:
        pid, number, nbytes = HANDLE.unpack(bytes(handle.memory))
        if pid == os.getpid() or flags != 1:
            return UNINITIALISED, None
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return INVALID_VALUE, None
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        address, kept = self._map(file, nbytes)
        self.theirs[address] = kept
        journal.append("open")
        return 0, address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:
        if address not in self.theirs:
            return (INVALID_VALUE,)
        self._end(self.theirs, address)
        journal.append("close")
        return (0,)

    def cudaGetErrorName(self, error: int) -> tuple[int, bytes]:
        return 0, f"cudaError{error}".encode()

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, b"it is so"


class Event:
    """An event that is reached when it has been asked for three times."""

    def __init__(self, *, interprocess: bool = False) -> None:
        self.left = 0

    def record(self, stream: Event) -> None:
        self.left = 2

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def ipc_handle(self) -> bytes:
        return b"e" * HANDLE_BYTES

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()

    def wait_event(self, event: Event) -> None: ...  # as a stream

    def wait_stream(self, stream: Event) -> None: ...


@contextlib.contextmanager
def _device(device: torch.device) -> Iterator[None]:
    assert device == torch.device("cuda", 0)
    yield


def _as_tensor(owner: cuda.Owner, *, device: torch.device) -> torch.Tensor:
    told = owner.__cuda_array_interface__
    array = (ctypes.c_uint8 * told["shape"][0]).from_address(told["data"][0])  # type: ignore[index]
    array.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


_CUDA = types.SimpleNamespace(
    init=lambda: None,
    device_count=lambda: 1,
    get_device_properties=lambda number: types.SimpleNamespace(uuid="double-0"),
    device=_device,
    Event=Event,
    current_stream=lambda device: Event(),
    Stream=lambda device: Event(),
    stream=contextlib.nullcontext,
    empty_cache=lambda: None,
)


class StubbedDevice(CudaDevice):
    """The real one, in a process that has the stubs from its first one on."""

    def __init__(self, uuid: str, slots: int = 0, *, interprocess: bool = False) -> None:
        if not isinstance(sys.modules.get("cuda.bindings.runtime"), Runtime):
            package, bindings, runtime = types.ModuleType("cuda"), types.ModuleType("cuda.bindings"), Runtime()
            bindings.runtime = runtime  # type: ignore[attr-defined]
            sys.modules |= {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime}
            cuda.torch = types.SimpleNamespace(  # type: ignore[assignment]
                cuda=_CUDA, device=torch.device, as_tensor=_as_tensor
            )
        super().__init__(uuid, slots, interprocess=interprocess)


class StubbedTransport(DoubleTransport):
    """`cuda-ipc` over the stubs."""

    name: ClassVar[str] = "cuda-stub"

    @classmethod
    def device(cls) -> type[Device]:
        return StubbedDevice
