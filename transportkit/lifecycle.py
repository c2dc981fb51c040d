"""Who may touch which memory when: slots, exports, leases and landing slots; no protocol belongs here.

A slot of an exporter::

    FREE     --acquire-->  PACKING   the core copies into it
    PACKING  --publish-->  READING   headers are out; every reader of the lane owes its word
    PACKING  --abandon-->  FREE      the update ended before the chunk was complete
    READING  --acknowledge (the last reader), drop-->  FREE

An export at an importer::

    unknown  --first header that names it-->  attached   `Importer.attach`, once
    attached --close, when no lease is left--> detached  `Importer.detach`, once

A lease of an imported chunk::

    open  --release, nothing views it-->  released   `Importer.release`; then it may be acknowledged
    open  --retire, views still live-->   held       its slot is withheld from the sender
    held  --the last view dies-->         released

A lease's tensors all view one owner object, and Python's reference count of that owner is the truth about who still
reads.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import weakref
from typing import TYPE_CHECKING

import torch

from transportkit.errors import (
    BackendError,
    LeaseError,
    ProtocolError,
    ResourceError,
    TransportKitError,
    UsageError,
)
from transportkit.site import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.transport import Importer
    from transportkit.wire import Chunk


def host_slots(count: int, nbytes: int) -> tuple[Tensor, ...]:
    """``count`` uint8 tensors of shape ``(nbytes,)`` in ordinary memory, at addresses that are multiples of 64.

    Raises:
        ResourceError: there is not as much free memory.
    """
    stride = -(-nbytes // 64) * 64
    free = free_memory()
    if free is not None and count * stride > free:
        raise ResourceError(
            f"{count} slots of {nbytes} bytes do not fit into the {free} bytes of memory that are free; "
            "lower `slots=` or `chunk_bytes=`"
        )
    memory = torch.empty(count * stride + 63, dtype=torch.uint8, device="cpu")
    first = -memory.data_ptr() % 64
    return tuple(memory[at : at + nbytes] for at in range(first, first + count * stride, stride))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, writable, without numpy. The caller keeps the tensor alive."""
    if not tensor.is_cpu:
        raise UsageError(f"only host memory can be seen as bytes, this tensor is on {tensor.device}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    array = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


# -- the exporter's side ----------------------------------------------------------------------------------------------


class SlotPool:
    """The states of an exporter's slots.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = collections.deque(range(count))
        self._packing: set[int] = set()
        self._reading: dict[tuple[int, int], tuple[int, set[int]]] = {}

    @property
    def free(self) -> int:
        """Number of slots that `acquire` can hand out now."""
        return len(self._free)

    def acquire(self) -> int | None:
        """Take a free slot for packing; None when all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._packing.add(slot)
        return slot

    def abandon(self, slot: int) -> None:
        """Give back a slot that was never published."""
        self._packing.remove(slot)
        self._free.append(slot)

    def publish(self, slot: int, update: int, seq: int, readers: Iterable[int]) -> None:
        """The slot holds chunk ``seq`` of ``update`` and each of ``readers`` owes an acknowledgement."""
        self._packing.remove(slot)
        self._reading[update, seq] = (slot, set(readers))

    def acknowledge(self, update: int, seq: int, receiver: int) -> None:
        """One reader's word. Raises `ProtocolError` when it was not owed."""
        slot, readers = self._reading.get((update, seq), (-1, set()))
        if receiver not in readers:
            raise ProtocolError(
                f"receiver {receiver} acknowledged chunk {seq} of update {update}, which it does not hold"
            )
        self._settle(update, seq, slot, readers, receiver)

    def drop(self, receiver: int) -> None:
        """The receiver is gone: its word is no longer waited for."""
        for (update, seq), (slot, readers) in list(self._reading.items()):
            if receiver in readers:
                self._settle(update, seq, slot, readers, receiver)

    def debtors(self) -> frozenset[int]:
        """The receivers that owe an acknowledgement."""
        return frozenset().union(*(readers for _, readers in self._reading.values()))

    def _settle(self, update: int, seq: int, slot: int, readers: set[int], receiver: int) -> None:
        readers.remove(receiver)
        if not readers:
            del self._reading[update, seq]
            self._free.append(slot)


# -- the importer's side ----------------------------------------------------------------------------------------------


class Landing:
    """Reusable host memory of an importer that copies: one slot for each chunk that is open at a time.

    Args:
        slots: number of slots.
        chunk_bytes: size of each, in bytes.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        self._free = list(host_slots(slots, chunk_bytes))
        self._taken: dict[tuple[int, int], Tensor] = {}

    def take(self, header: Chunk) -> Tensor:
        """A free slot for this chunk, uint8 of shape ``(chunk_bytes,)``. Raises `LeaseError` if none is left."""
        if not self._free:
            raise LeaseError(
                f"all {len(self._taken)} landing slots are held by leases; release earlier chunks or raise `slots=`"
            )
        slot = self._taken[header.update, header.seq] = self._free.pop()
        return slot

    def give(self, header: Chunk) -> None:
        """Give the slot of this chunk back; without effect if it has none."""
        if (slot := self._taken.pop((header.update, header.seq), None)) is not None:
            self._free.append(slot)


class Watched:
    """Memory whose views are watched: the reference count of one owner object tells whether any is still alive.

    Args:
        memory: a contiguous uint8 tensor; None when it is given up.
    """

    def __init__(self, memory: Tensor | None) -> None:
        self.memory = memory
        self._owners: list[weakref.ref[object]] = []

    def view(self) -> Tensor:
        """The memory, as a tensor that shares its owner with every view made of it."""
        if self.memory is None:
            raise LeaseError("this chunk is released already")
        if self.memory.numel() == 0 or self.memory.device.type != "cpu":
            return self.memory
        owner = (ctypes.c_uint8 * self.memory.numel()).from_address(self.memory.data_ptr())
        owner.memory = self.memory  # type: ignore[attr-defined]
        self._owners.append(weakref.ref(owner))
        return torch.frombuffer(owner, dtype=torch.uint8)

    @property
    def viewed(self) -> bool:
        """Whether a tensor that came from `view` is still alive somewhere."""
        return any(owner() is not None for owner in self._owners)


class Imported(Watched):
    """One imported chunk: its header and its bytes, a uint8 tensor of shape ``(header.nbytes,)``."""

    def __init__(self, header: Chunk, memory: Tensor) -> None:
        super().__init__(memory)
        self.header = header


class Imports:
    """The importer's cache of exports and the chunks that are open, held or released.

    Args:
        importer: the backend's importing end.
        backend: its name, for errors.
        slots: how many chunks the sender can have out at once.
        acknowledge: called with the header of each chunk after its release.
    """

    def __init__(self, importer: Importer, backend: str, slots: int, acknowledge: Callable[[Chunk], None]) -> None:
        self._importer = importer
        self._backend = backend
        self._slots = slots
        self._acknowledge = acknowledge
        self._attached: dict[int, Tensor] = {}
        self._held: list[Imported] = []
        self._closed = False

    @property
    def importer(self) -> Importer:
        return self._importer

    def open(self, header: Chunk, deadline: Deadline) -> Imported:
        """Import one chunk. Raises `BackendError`, and `ProtocolError` for a wrong length."""
        attached = None
        with translated(self._backend):
            export = header.location.export
            if export is not None:
                if export not in self._attached:
                    self._attached[export] = self._importer.attach(header.location.handle)
                attached = self._attached[export]
            memory = self._importer.open(header, attached, deadline)
        if memory.dtype != torch.uint8 or memory.shape != (header.nbytes,):
            raise ProtocolError(
                f"chunk {header.seq} is {header.nbytes} bytes long, backend {self._backend} "
                f"opened {memory.dtype} of shape {tuple(memory.shape)}"
            )
        return Imported(header, memory)

    def release(self, chunk: Imported) -> None:
        """Release a chunk that nothing views, and acknowledge it. Raises `LeaseError` while something views it."""
        if chunk.memory is None:
            return
        if chunk.viewed:
            raise LeaseError(
                f"chunk {chunk.header.seq} is still viewed by a tensor that came from it; drop or copy that tensor"
            )
        self._release(chunk)

    def retire(self, chunk: Imported) -> None:
        """Release a chunk, or hold it back until the last tensor that views it is dead."""
        if chunk.memory is None or chunk in self._held:
            return
        if chunk.viewed:
            self._held.append(chunk)
        else:
            self._release(chunk)

    def settle(self, *, need: bool = False) -> None:
        """Release every held chunk whose last view has died.

        Args:
            need: another chunk is due, so one slot must be left; collects garbage before it gives up with `LeaseError`.
        """
        self._sweep()
        if need and len(self._held) >= self._slots:
            gc.collect()
            self._sweep()
            if len(self._held) >= self._slots:
                raise LeaseError(
                    f"all {self._slots} slots hold chunks whose tensors are still alive, so none is left for the next "
                    "one; copy what is kept (`tensor.clone()`), or raise `slots=` on both sides"
                )

    def reading(self, chunk: Imported) -> AbstractContextManager[None]:
        """Around copies out of a chunk. What the backend's own part raises is a `BackendError`."""
        return around(self._backend, lambda: self._importer.reading(chunk.header))

    @property
    def held(self) -> int:
        """Number of chunks that are held back because something views them."""
        return len(self._held)

    def close(self) -> None:
        """Detach every export and close the importer; memory that is still viewed stays mapped until its views die."""
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        with translated(self._backend):
            for export in list(self._attached):
                del self._attached[export]
                self._importer.detach(export)
            self._importer.close()

    def _sweep(self) -> None:
        for chunk in [c for c in self._held if not c.viewed]:
            self._held.remove(chunk)
            self._release(chunk)

    def _release(self, chunk: Imported) -> None:
        chunk.memory = None
        if self._closed:
            return
        with translated(self._backend):
            self._importer.release(chunk.header)
        self._acknowledge(chunk.header)


@contextlib.contextmanager
def translated(backend: str) -> Iterator[None]:
    """Turns any native exception of a backend into `BackendError`, cause kept."""
    try:
        yield
    except TransportKitError:
        raise
    except Exception as error:
        raise BackendError(f"backend {backend} failed: {error!r}", backend=backend) from error


@contextlib.contextmanager
def around(backend: str, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context manager of a backend: what it raises itself is translated, what its block raises is not."""
    with translated(backend):
        manager = make()
        manager.__enter__()
    try:
        yield
    except BaseException as error:
        with translated(backend):
            suppressed = manager.__exit__(type(error), error, error.__traceback__)
        if not suppressed:
            raise
    else:
        with translated(backend):
            manager.__exit__(None, None, None)
