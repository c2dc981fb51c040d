"""All that differs between gloo and NCCL: how a group is made and ended, where slots are, streams, one broadcast.

A plane is one rank's part in one group. `form`, `dispose`, and what `give` and `take` return, run on the group's runner
and may block; `give` and `take` themselves, and the other methods, do not, except where they say so. So the next
broadcast begins while the last one is on its way, where the plane's group can do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from transportkit.errors import ResourceError
from transportkit.lifecycle import host_slots
from transportkit_collective.head import HEAD, TAIL, Head, forget, read
from transportkit_collective.runner import IN_FLIGHT
from transportkit_collective.severing import Address, let_go, listening, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit_collective.store import LinkStore

#: Longest message that begins an update over gloo, in bytes. A message is received into memory that may be larger, and
#: a rank in the middle of the tree passes all of that on: so what may be short has memory of its own size.
FIRST_BYTES = 1 << 15

#: Descriptors of a gloo group, beside one for each connection: two of a pipe, an epoll, a listening socket, one more
#: while it looks for its address.
GLOO_DESCRIPTORS = 5


class Plane:
    """What the two planes have in common: one group, owned, and dropped at most once."""

    ahead: ClassVar[bool]
    """Whether an importer may ask for a chunk before its header has come."""

    def __init__(self) -> None:
        self._group: Any = None
        self._using = threading.Lock()  # nobody but the runner may be the last one to have the group
        self.ends_by = 0.0

    def form(self, store: LinkStore, rank: int, size: int, host: str, seconds: float) -> None:
        """Meet the other ranks; ``host`` is the numeric address to listen on."""
        raise NotImplementedError

    def slots(self, count: int, nbytes: int) -> Sequence[Tensor]:
        """``count`` uint8 tensors of shape ``(HEAD + nbytes + TAIL,)``."""
        raise NotImplementedError

    def give(self, slot: Tensor, head: Head, *, first: bool) -> Callable[[], None]:
        """Broadcast one chunk from this rank, which is 0.

        Args:
            slot: the chunk's.
            head: what it carries.
            first: the chunk before it was its update's last one, or there was none.

        Returns:
            Waits until the slot is read.
        """
        raise NotImplementedError

    def take(self, slot: Tensor, *, first: bool) -> Callable[[], Head]:
        """Receive the next chunk from rank 0 into a slot.

        Args:
            first: as for `give`. Nothing may follow a first one before that is there.

        Returns:
            Waits for the chunk. Raises `ProtocolError` where it does not hold.
        """
        raise NotImplementedError

    def packing(self, index: int) -> AbstractContextManager[object]:
        """Around the core's copies into the slot of this index."""
        return contextlib.nullcontext()

    def reading(self) -> AbstractContextManager[object]:
        """Around the core's copies out of a slot; at its exit they are done."""
        return contextlib.nullcontext()

    def sever(self) -> None:
        """Make what runs fail soon. From any thread; does not block."""

    def dispose(self) -> None:
        """Drop the group."""
        with self._using:
            self._group = None

    def disown(self) -> None:
        """Leak the group: whoever drops it would wait for threads that are busy, or are not there."""
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def forked(self) -> None:
        """In a forked child: close the copies of the group's descriptors."""

    def _begin(self, tensor: Tensor, seconds: float) -> Any:
        """Begin a broadcast; the work that can be waited for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=seconds)
        with self._using:
            if self._group is None:
                raise RuntimeError("the group was dropped")
            self.ends_by = time.monotonic() + seconds
            return self._group.broadcast([tensor], options)

    def _finish(self, work: Any) -> None:
        work.wait()

    def _broadcast(self, tensor: Tensor, seconds: float) -> None:
        self._finish(self._begin(tensor, seconds))


# -- gloo -------------------------------------------------------------------------------------------------------------


def gloo_group(store: LinkStore, rank: int, size: int, host: str, seconds: float) -> Any:
    """A gloo group that listens on this address only; no default group is made, used or needed.

    Raises:
        ResourceError: this process may not open as many descriptors as that takes.
    """
    _check_descriptors(GLOO_DESCRIPTORS + size - 1)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    options._threads = IN_FLIGHT
    return dist.ProcessGroupGloo(store, rank, size, options)


def _check_descriptors(count: int) -> None:
    """Raise `ResourceError` unless so many can be opened: gloo that fails for want of them leaks some (torch 2.14)."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))  # noqa: PERF401 - what was opened must be known in any case
    except OSError as error:
        raise ResourceError(
            f"a gloo group takes {count} descriptors, and after {len(opened)} the system said: {error.strerror}; "
            "raise the limit (`ulimit -n`), or close some",
            backend="gloo",
        ) from error
    finally:
        for one in opened:
            os.close(one)


class GlooPlane(Plane):
    """Host memory over TCP. What is sent is always uint8: gloo knows few dtypes, and ignores strides."""

    ahead: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._store: LinkStore | None = None
        self._host = ""
        self._seconds = 0.0

    def form(self, store: LinkStore, rank: int, size: int, host: str, seconds: float) -> None:
        self._store, self._host = store, host
        self.ends_by = time.monotonic() + seconds
        self._seconds = 2 * seconds  # the meeting had half of the session's timeout, which bounds each broadcast
        self._group = gloo_group(store, rank, size, host, seconds)

    def slots(self, count: int, nbytes: int) -> Sequence[Tensor]:
        return host_slots(count, HEAD + nbytes + TAIL)

    def give(self, slot: Tensor, head: Head, *, first: bool) -> Callable[[], None]:
        head.write(slot)
        head.write_tail(slot)
        message = slot[: HEAD + head.nbytes + TAIL]
        parts = [message] if not first or message.numel() <= FIRST_BYTES else [message[:HEAD], message[HEAD:]]
        return functools.partial(self._given, [self._begin(part, self._seconds) for part in parts])

    def _given(self, works: list[Any]) -> None:
        for work in works:
            self._finish(work)

    def take(self, slot: Tensor, *, first: bool) -> Callable[[], Head]:
        forget(slot)
        return functools.partial(
            self._taken, slot, self._begin(slot[:FIRST_BYTES] if first else slot, self._seconds), first=first
        )

    def _taken(self, slot: Tensor, work: Any, *, first: bool) -> Head:
        self._finish(work)
        head = read(slot, slot.numel() - HEAD - TAIL)
        length = HEAD + head.nbytes + TAIL
        if first and length > FIRST_BYTES:
            self._broadcast(slot[HEAD:length], self._seconds)
        head.check_tail(slot)
        return head

    def sever(self) -> None:
        shut_down(self._addresses())

    def dispose(self) -> None:
        self.sever()  # a forked child may hold copies of the connections, which would keep them open
        super().dispose()

    def forked(self) -> None:
        let_go(self._addresses())

    def _addresses(self) -> frozenset[Address]:
        if self._store is None:
            return frozenset()
        own, others = self._store.entries()
        return listening(self._host, own[0], others) if own else frozenset()


# -- NCCL -------------------------------------------------------------------------------------------------------------

_environment = threading.Lock()


@contextlib.contextmanager
def _set_for_now(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, and restore it. Other threads see it meanwhile."""
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def nccl_group(store: LinkStore, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """An NCCL group that never ends the process: in this mode it has no watchdog, and errors surface in `wait`."""
    with _set_for_now("TORCH_NCCL_BLOCKING_WAIT", "1"):  # read by the constructor, and for this group only
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


class Streams:
    """The CUDA streams and events of one rank, owned by it.

    Args:
        device: the rank's GPU.
        count: number of slots.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._packing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._moving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._packed = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
            self._moved = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def packing(self, index: int) -> Iterator[None]:
        """Copies wait for what the caller has queued; what the caller queues next waits for the copies."""
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            self._packing.wait_stream(caller)
            self._packing.wait_event(self._moved)
            with torch.cuda.stream(self._packing):
                yield
            self._packed[index].record(self._packing)
            caller.wait_stream(self._packing)  # so that the memory of a source may be used again at once

    @contextlib.contextmanager
    def moving(self, index: int | None) -> Iterator[None]:
        """Around a broadcast: it waits for the copies into its slot."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._moving):
            if index is not None:
                self._moving.wait_event(self._packed[index])
            yield
            self._moved.record(self._moving)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            yield
            torch.cuda.current_stream().synchronize()

    def head_of(self, slot: Tensor) -> Tensor:
        """The first bytes of a slot, in host memory."""
        return slot[:HEAD].cpu()

    def put_head(self, slot: Tensor, head: Tensor) -> None:
        slot[:HEAD].copy_(head)

    def drain(self) -> None:
        """Wait until nothing of this rank is queued any more."""
        self._packing.synchronize()
        self._moving.synchronize()


class NcclPlane(Plane):
    """Device memory over NCCL. Whole slots travel, so that the length never has to be agreed on.

    Args:
        device: the rank's GPU.
        streams: its streams; made by `slots` where they are not given.
    """

    ahead: ClassVar[bool] = False  # a broadcast that waits for its sender occupies the GPU

    def __init__(self, device: str, streams: Streams | None = None) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._streams = streams
        self._seconds = 0.0
        self._slots: list[int] = []
        self._heads: Sequence[Tensor] = ()
        self._severed = False

    def form(self, store: LinkStore, rank: int, size: int, host: str, seconds: float) -> None:
        # Where NCCL listens is its own choice (NCCL_SOCKET_IFNAME), for the whole process.
        torch.cuda.set_device(self._device)
        self._seconds = max(seconds, 1.0)
        self.ends_by = time.monotonic() + self._seconds
        self._group = nccl_group(store, rank, size, self._device, self._seconds)
        if self._severed:
            self._abort()

    def slots(self, count: int, nbytes: int) -> Sequence[Tensor]:
        stride = -(-(HEAD + nbytes + TAIL) // 64) * 64
        memory = torch.empty(count * stride, dtype=torch.uint8, device=self._device)
        whole = [memory[at : at + HEAD + nbytes + TAIL] for at in range(0, count * stride, stride)]
        self._slots = [slot.data_ptr() for slot in whole]
        self._heads = host_slots(count, HEAD)
        self._streams = self._streams or Streams(self._device, count)
        return whole

    def give(self, slot: Tensor, head: Head, *, first: bool) -> Callable[[], None]:
        return functools.partial(self._give, slot, head)

    def _give(self, slot: Tensor, head: Head) -> None:
        assert self._streams is not None
        index = self._slots.index(slot.data_ptr())
        head.write(self._heads[index])
        with self._streams.moving(index):
            self._streams.put_head(slot, self._heads[index])
            self._broadcast(slot, self._seconds)

    def take(self, slot: Tensor, *, first: bool) -> Callable[[], Head]:
        return functools.partial(self._take, slot)

    def _take(self, slot: Tensor) -> Head:
        assert self._streams is not None
        staged = self._heads[self._slots.index(slot.data_ptr())]
        forget(staged)
        with self._streams.moving(None):
            self._streams.put_head(slot, staged)
            self._broadcast(slot, self._seconds)
            return read(self._streams.head_of(slot), slot.numel() - HEAD - TAIL)

    def packing(self, index: int) -> AbstractContextManager[object]:
        assert self._streams is not None
        return self._streams.packing(index)

    def reading(self) -> AbstractContextManager[object]:
        assert self._streams is not None
        return self._streams.reading()

    def sever(self) -> None:
        self._severed = True
        if self._group is not None:  # `abort` may wait for the device
            threading.Thread(target=self._abort, name="transportkit-nccl-abort", daemon=True).start()

    def dispose(self) -> None:
        self._abort()
        if self._streams is not None:
            self._streams.drain()
        super().dispose()

    def _abort(self) -> None:
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
