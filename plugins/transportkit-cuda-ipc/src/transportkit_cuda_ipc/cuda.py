"""All that touches CUDA: memory by the runtime's own calls, streams and events by torch's. No decision belongs here.

Memory comes from `cudaMalloc`, past torch's allocator, whose settings therefore do not matter; its handle is mapped
once and unmapped once. The runtime counts nothing: the tether (`transportkit_cuda_ipc.tether`) knows who has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from transportkit.errors import BackendError, ResourceError
from transportkit_cuda_ipc import NAME
from transportkit_cuda_ipc.devices import Device
from transportkit_cuda_ipc.matching import plain_uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_log = logging.getLogger("transportkit.cuda_ipc")

HANDLE_BYTES = 64
#: Smaller allocations may share a block with others, which a mapping would show whole.
GRANULE = 2 << 20
WHAT_MAPPING = "mapping the sender's device memory (it takes two processes that share the pid and ipc namespaces)"
#: `cudaErrorMemoryAllocation`.
NO_MEMORY = 2
#: How long unmapping waits for reads that are queued, in seconds; then the memory stays mapped.
DRAIN_SECONDS = 60.0


def call(what: str, function: str, *args: object) -> Any:
    """A call of the CUDA runtime. Raises `BackendError` with its text."""
    from cuda.bindings import runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    error, *values = getattr(runtime, function)(*args)
    if int(error):
        name = runtime.cudaGetErrorName(error)[-1]
        text = runtime.cudaGetErrorString(error)[-1]
        message = f"{what} failed: {_text(name)} ({int(error)}): {_text(text)}"
        raise (ResourceError if int(error) == NO_MEMORY else BackendError)(message, backend=NAME)
    return values[0] if values else None


class Owner:
    """Device memory as torch takes it over; alive for as long as a tensor views it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice(Device):
    """One GPU through torch and the CUDA runtime."""

    def __init__(self, uuid: str, slots: int, *, interprocess: bool = False) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found = {plain_uuid(str(torch.cuda.get_device_properties(n).uuid)): n for n in range(torch.cuda.device_count())}
        if plain_uuid(uuid) not in found:
            raise BackendError(
                f"GPU {uuid} is not visible here, only {', '.join(sorted(found)) or 'none'}; "
                "see CUDA_VISIBLE_DEVICES of both processes",
                backend=NAME,
            )
        self._device = torch.device("cuda", found[plain_uuid(uuid)])
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._events = [torch.cuda.Event(interprocess=interprocess) for _ in range(slots)]  # type: ignore[no-untyped-call]
            for event in self._events:  # it is on this device from its first record on
                event.record(self._stream)
        self._theirs: list[torch.cuda.Event] = []

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        rounded = -(-nbytes // GRANULE) * GRANULE
        what = f"allocating {rounded} bytes on {self._device} (lower `slots=` or `chunk_bytes=`)"
        with self._current():
            try:
                address = call(what, "cudaMalloc", rounded)
            except ResourceError:
                gc.collect()
                torch.cuda.empty_cache()  # torch's allocator keeps what nobody uses
                address = call(what, "cudaMalloc", rounded)
        return self._tensor(Owner(int(address), rounded))

    def export(self, whole: Tensor) -> bytes:
        with self._current():
            handle = call("exporting device memory", "cudaIpcGetMemHandle", whole.data_ptr())
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def free(self, whole: Tensor) -> None:
        with self._current():
            self._stream.synchronize()
            call("freeing device memory", "cudaFree", whole.data_ptr())

    def map(self, handle: bytes, nbytes: int, events: Sequence[bytes], unmapped: Callable[[], None]) -> Tensor:
        from cuda.bindings import runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]

        if len(handle) != HANDLE_BYTES or any(len(event) != HANDLE_BYTES for event in events):
            raise BackendError("what came is no handle of CUDA's", backend=NAME)
        theirs = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, HANDLE_BYTES)
        with self._current():
            self._theirs = [
                torch.cuda.Event.from_ipc_handle(self._device, event)  # type: ignore[no-untyped-call]
                for event in events
            ]
            flag = runtime.cudaIpcMemLazyEnablePeerAccess
            address = int(call(WHAT_MAPPING, "cudaIpcOpenMemHandle", theirs, flag))
        owner = Owner(address, nbytes)
        weakref.finalize(owner, self._unmap, address, os.getpid(), unmapped).atexit = False
        return self._tensor(owner)

    def _unmap(self, address: int, pid: int, unmapped: Callable[[], None]) -> None:
        if os.getpid() != pid:
            return  # a forked child has no part in it
        done, end = self.idle(), time.monotonic() + DRAIN_SECONDS
        while not done():
            if time.monotonic() > end:
                _log.warning(
                    "cuda-ipc: reads of the sender's memory do not end; it stays mapped until this process does"
                )
                return
            time.sleep(0.001)
        try:
            with self._current():
                call("unmapping the sender's device memory", "cudaIpcCloseMemHandle", address)
        except BackendError as error:  # nobody is left who could be told
            _log.warning("cuda-ipc: %s; the sender keeps it until this process ends", error)
            return
        unmapped()

    def _tensor(self, owner: Owner) -> Tensor:
        return torch.as_tensor(owner, device=self._device)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """This GPU is the current one of torch and of the runtime, which the bindings bring along once more."""
        with torch.cuda.device(self._device):
            call("choosing the device", "cudaSetDevice", self._device.index)
            yield

    # -- order --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def packing(self, slot: int) -> Iterator[None]:
        with self._between():
            yield
            self._events[slot].record(self._stream)

    def packed(self, slot: int) -> bool:
        return bool(self._events[slot].query())  # type: ignore[no-untyped-call]

    def events(self) -> tuple[bytes, ...]:
        return tuple(bytes(event.ipc_handle()) for event in self._events)  # type: ignore[no-untyped-call]

    def follow(self, slot: int) -> None:
        if self._theirs:
            self._stream.wait_event(self._theirs[slot])
            torch.cuda.current_stream(self._device).wait_event(self._theirs[slot])

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._between():
            yield

    @contextlib.contextmanager
    def _between(self) -> Iterator[None]:
        """What is queued inside goes to our stream: after what the caller's has, before what it gets next.

        Between two GPUs torch copies on the source's current stream, and has the target's wait for it.
        """
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also where a copy failed: memory that the caller frees is not used again under one that is queued
            caller.wait_stream(self._stream)

    def idle(self) -> Callable[[], bool]:
        with torch.cuda.device(self._device):
            marks = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
            marks[0].record(self._stream)
            marks[1].record(torch.cuda.current_stream(self._device))
        return lambda: all(mark.query() for mark in marks)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._theirs = []


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
