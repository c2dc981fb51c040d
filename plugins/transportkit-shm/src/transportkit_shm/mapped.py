"""What the ends of `shm` and `mpqueue` have in common, whichever way the arena's descriptor is handed over.

How slots are located in an arena and read there is `transportkit.mapped`'s.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from msgspec import Raw, Struct

from transportkit import mapped
from transportkit.errors import ProtocolError
from transportkit.mapped import EXPORT, stopped
from transportkit.wire import decode_as, raw
from transportkit_shm.pinning import pin

if TYPE_CHECKING:
    from torch import Tensor

    from transportkit.wire import Terms
    from transportkit_shm.arena import Layout

__all__ = ["EXPORT", "ArenaHandle", "MappedExporter", "MappedImporter", "stopped"]


class ArenaHandle(Struct, frozen=True):
    """The export: the size of the arena, in bytes."""

    nbytes: int


class MappedExporter(mapped.MappedExporter):
    """Slots in an arena; it is unmapped when nothing views a slot any more.

    Args:
        whole: the arena, a uint8 tensor of shape ``(layout.nbytes,)``.
        layout: where its slots lie.
        device: where the tensors are that come into the slots.
    """

    def __init__(self, whole: Tensor, layout: Layout, device: str) -> None:
        super().__init__(whole, layout)
        self._handle = raw(ArenaHandle(nbytes=layout.nbytes))
        self._unpin = weakref.finalize(self, pin(whole, device))  # whatever becomes of this exporter, and once
        self._unpin.atexit = False

    def share(self, receiver: int) -> Raw:
        return self._handle

    def close(self) -> None:
        self._unpin()
        super().close()


class MappedImporter(mapped.MappedImporter):
    """A mapping of the exporter's arena.

    Args:
        terms: the importer's own.
    """

    _layout: Layout

    def __init__(self, terms: Terms) -> None:
        from transportkit_shm.arena import Layout

        super().__init__(Layout(terms.slots, terms.chunk_bytes))
        self._terms = terms
        self._whole: Tensor | None = None

    def attach(self, handle: Raw) -> Tensor:
        """The arena, a uint8 tensor of shape ``(slots * stride,)``, mapped until the last view of it dies."""
        nbytes = decode_as(ArenaHandle, handle).nbytes
        whole, self._whole = self._whole, None
        if whole is None or self._aborted:
            raise stopped(self.backend)
        if nbytes != whole.numel():
            raise ProtocolError(f"the header names an arena of {nbytes} bytes, {whole.numel()} were agreed")
        return whole

    def close(self) -> None:
        super().close()
        self._whole = None
