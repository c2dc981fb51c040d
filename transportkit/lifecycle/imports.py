"""The importer's side: exports that are mapped, chunks that are open, who views them; the states are in the package."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils import dlpack

from transportkit.errors import LeaseError, ProtocolError
from transportkit.lifecycle.faults import around, translated
from transportkit.lifecycle.memory import host_slots, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.transport import Importer
    from transportkit.wire import Chunk, Location


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
        if self.memory.numel() == 0:
            return self.memory
        if not self.memory.is_cpu:
            return self._aliased(self.memory)
        owner = (ctypes.c_uint8 * self.memory.numel()).from_address(self.memory.data_ptr())
        owner.memory = self.memory  # type: ignore[attr-defined]
        self._owners.append(weakref.ref(owner))
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _aliased(self, memory: Tensor) -> Tensor:
        """The same memory under a storage of its own, whose deleter is what keeps the owner alive; on any device."""
        owner = memory[:]
        self._owners.append(weakref.ref(owner))
        return dlpack.from_dlpack(dlpack.to_dlpack(owner))  # type: ignore[attr-defined]

    @property
    def viewed(self) -> bool:
        """Whether a tensor that came from `view` is still alive somewhere."""
        return bool(self._owners) and any(owner() is not None for owner in self._owners)


class Imported(Watched):
    """One imported chunk: its header and its bytes, a uint8 tensor of shape ``(header.nbytes,)``.

    Attributes:
        buffer: the same bytes where they are in host memory; None where they are not, and after the release.
    """

    def __init__(self, header: Chunk, memory: Tensor, buffer: memoryview | None) -> None:
        super().__init__(memory)
        self.header = header
        self.buffer = buffer


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
        self._translated = translated(backend)
        self._slots = slots
        self._acknowledge = acknowledge
        self._attached: dict[int, Tensor] = {}
        self._superseded: set[int] = set()
        self._gone: set[int] = set()
        self._chunks_in: collections.Counter[int] = collections.Counter()
        """For each export, how many chunks in it are open or held."""
        self._held: list[Imported] = []
        self._known: dict[int, tuple[Tensor, memoryview | None]] = {}
        """By its offset, memory that was opened before and was as it should be, and its buffer."""
        self._closed = False

    @property
    def importer(self) -> Importer:
        return self._importer

    @property
    def backend(self) -> str:
        return self._backend

    def report_to(self, acknowledge: Callable[[Chunk], None]) -> None:
        """From now on this is called with the header of each chunk after its release."""
        self._acknowledge = acknowledge

    def open(self, header: Chunk, deadline: Deadline) -> Imported:
        """Import one chunk. Raises `BackendError`, and `ProtocolError` for a wrong length or an export that is gone."""
        with self._translated:
            attached = self._attach(header.location)
            memory = self._importer.open(header, attached, deadline)
        known, buffer = self._known.get(header.location.offset, (None, None))
        if known is not memory or buffer is None or len(buffer) != header.nbytes:
            if memory.dtype != torch.uint8 or memory.shape != (header.nbytes,):
                raise ProtocolError(
                    f"chunk {header.seq} is {header.nbytes} bytes long, backend {self._backend} "
                    f"opened {memory.dtype} of shape {tuple(memory.shape)}"
                )
            buffer = memory_of(memory) if memory.is_cpu else None
            if attached is not None:
                self._known[header.location.offset] = memory, buffer
        if header.location.export is not None:
            self._chunks_in[header.location.export] += 1
        return Imported(header, memory, buffer)

    def _attach(self, location: Location) -> Tensor | None:
        """What the location's export is mapped as; one that it supersedes is unmapped, now or with its last chunk."""
        export, old = location.export, location.supersedes
        if export is None:
            return None
        if export in self._gone or export in self._superseded or export == old:
            raise ProtocolError(f"the header names export {export}, which was superseded")
        if old is not None and old not in self._gone:
            self._superseded.add(old)
            self._fade(old)
        if export not in self._attached:
            self._attached[export] = self._importer.attach(location.handle)
        return self._attached[export]

    def _fade(self, export: int) -> None:
        """Detach a superseded export in which no chunk is open or held any more."""
        if export in self._superseded and not self._chunks_in[export]:
            self._superseded.remove(export)
            self._gone.add(export)
            self._detach(export)

    def _detach(self, export: int) -> None:
        del self._chunks_in[export]
        self._known.clear()
        if self._attached.pop(export, None) is not None:
            self._importer.detach(export)

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
        """Detach every export and close the importer, whichever of that fails; then raises what failed.

        Memory that is still viewed stays mapped until its views die.
        """
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        self._known.clear()
        with contextlib.ExitStack() as stack:  # the last one first; an exception is passed on to the end
            stack.enter_context(self._translated)
            stack.callback(self._importer.close)
            for export in reversed(list(self._attached)):
                stack.callback(self._detach, export)

    def _sweep(self) -> None:
        for chunk in [c for c in self._held if not c.viewed]:
            self._held.remove(chunk)
            self._release(chunk)

    def _release(self, chunk: Imported) -> None:
        chunk.memory = chunk.buffer = None
        if self._closed:
            return
        export = chunk.header.location.export
        with self._translated:
            try:
                self._importer.release(chunk.header)
            finally:
                if export is not None and self._chunks_in[export]:
                    self._chunks_in[export] -= 1
            if export is not None:
                self._fade(export)
        self._acknowledge(chunk.header)
