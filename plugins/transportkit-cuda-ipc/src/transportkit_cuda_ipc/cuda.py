"""All that touches CUDA: memory by the runtime's own calls, streams and events by torch's. No decision belongs here.

Memory comes from `cudaMalloc`, past torch's allocator, whose settings therefore do not matter; its handle is mapped
once and unmapped once. The runtime counts nothing: the tether (`transportkit_cuda_ipc.tether`) knows who has it.

An exporter packs on a stream of its own, which waits for the caller's current one first and is waited for afterwards.
An importer's copies run on the caller's, to whose memory pool the tensors that it makes belong. Between two GPUs torch
copies on the source's current stream, and has the target's wait for it.
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
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice(Device):
    """One GPU through torch and the CUDA runtime."""

    def __init__(self, uuid: str, slots: int = 0, *, interprocess: bool = False) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found = {plain_uuid(str(torch.cuda.get_device_properties(n).uuid)): n for n in range(torch.cuda.device_count())}
        if plain_uuid(uuid) not in found:
            raise BackendError(
                f"GPU {uuid} is not visible here, only {', '.join(sorted(found)) or 'none'}; "
                "see CUDA_VISIBLE_DEVICES of both processes",
                backend=NAME,
            )
        self._device = torch.device("cuda", found[plain_uuid(uuid)])
        self._events = [torch.cuda.Event(interprocess=interprocess) for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(self._device) if slots else None  # type: ignore[no-untyped-call]
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
            try:
                return self._tensor(Owner(int(address), rounded))
            except BaseException:
                call("freeing device memory", "cudaFree", address)
                raise

    def export(self, whole: Tensor) -> bytes:
        with self._current():
            handle = call("exporting device memory", "cudaIpcGetMemHandle", whole.data_ptr())
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def free(self, whole: Tensor) -> None:
        with self._current():
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
        ending = weakref.finalize(owner, self._unmap, address, os.getpid(), unmapped)
        ending.atexit = False
        try:
            return self._tensor(owner)
        except BaseException:
            ending()
            raise

    def _unmap(self, address: int, pid: int, unmapped: Callable[[], None]) -> None:
        if os.getpid() != pid:
            return  # a forked child has no part in it
        try:
            done, end = self.idle(), time.monotonic() + DRAIN_SECONDS
            while not done():
                if time.monotonic() > end:
                    raise BackendError("reads of the sender's device memory do not end", backend=NAME)
                time.sleep(0.001)
            with self._current():
                call("unmapping the sender's device memory", "cudaIpcCloseMemHandle", address)
        except Exception as error:  # nobody is left who could be told
            _log.warning("cuda-ipc: %s; the sender keeps it until this process ends", error)
        else:
            unmapped()

    def _tensor(self, owner: Owner) -> Tensor:
        tensor = torch.as_tensor(owner, device=self._device)
        if tensor.data_ptr() != owner.address:
            raise BackendError("torch copied device memory that it was to view", backend=NAME)
        return tensor

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """This GPU is the current one of torch and of the runtime, which the bindings bring along once more."""
        with torch.cuda.device(self._device):
            call("choosing the device", "cudaSetDevice", self._device.index)
            yield

    # -- order --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def packing(self, slot: int) -> Iterator[None]:
        caller, own = torch.cuda.current_stream(self._device), self._stream
        assert own is not None
        own.wait_stream(caller)
        try:
            # Its GPU has to be the current one: leaving a stream would make a context on any other.
            with torch.cuda.device(self._device), torch.cuda.stream(own):
                yield
        finally:  # also where a copy failed: what is queued must end before the memory does, the source's too
            self._events[slot].record(own)
            caller.wait_stream(own)

    def packed(self, slot: int) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._events[slot].query())  # type: ignore[no-untyped-call]

    def events(self) -> tuple[bytes, ...]:
        with torch.cuda.device(self._device):  # where those that were never recorded are made
            return tuple(bytes(event.ipc_handle()) for event in self._events)  # type: ignore[no-untyped-call]

    def follow(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._theirs[slot])

    def idle(self) -> Callable[[], bool]:
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))

        def done() -> bool:
            with torch.cuda.device(self._device):
                return all(event.query() for event in (mark, *self._events))  # type: ignore[no-untyped-call]

        return done

    def close(self) -> None:
        self._theirs = []


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
