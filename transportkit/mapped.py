"""The two ends of a backend whose slots lie in one memory that importers map; how they come by it does not belong here.

Nothing moves after the handshake: a header says which slot of the arena to look at, and the slot is read in place. An
arena is one export, made for each receiver when a header first locates it there, which is in that receiver's trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from transportkit.errors import BackendError, ProtocolError
from transportkit.transport import Exporter, Importer
from transportkit.wire import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw
    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.wire import Chunk

#: The id of the one export of a lane: its arena.
EXPORT = 1


@attrs.frozen
class Layout:
    """Where the slots of an arena lie; both sides derive it from the terms.

    Args:
        slots: number of slots.
        chunk_bytes: size of a slot, in bytes.
        alignment: of each slot in the arena, in bytes; a multiple of 64.
    """

    slots: int
    chunk_bytes: int
    alignment: int = 64

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.chunk_bytes // self.alignment) * self.alignment

    @property
    def nbytes(self) -> int:
        """Size of the arena, in bytes."""
        return self.slots * self.stride


class MappedExporter(Exporter):
    """Slots in an arena.

    Args:
        whole: the arena, a uint8 tensor of at least ``layout.nbytes`` bytes.
        layout: where its slots lie.
    """

    backend: ClassVar[str]

    def __init__(self, whole: Tensor, layout: Layout) -> None:
        self._aborted = False
        self._starts = range(0, layout.nbytes, layout.stride)
        self._slots: tuple[Tensor, ...] = tuple(whole[start : start + layout.chunk_bytes] for start in self._starts)
        self._located: dict[int, list[Location]] = {}

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def share(self, receiver: int) -> Raw:
        """The arena's handle for a receiver, from which its importer maps it. Called once for each receiver."""
        raise NotImplementedError

    def locate(self, slot: int, receiver: int) -> Location:
        located = self._located.get(receiver)
        if located is None:
            handle = self.share(receiver)
            located = [Location(export=EXPORT, offset=start, handle=handle) for start in self._starts]
            self._located[receiver] = located
        return located[slot]

    def ready(self, slot: int, deadline: Deadline) -> None:
        if self._aborted:
            raise stopped(self.backend)

    def reclaim(self, receiver: int, export: int, opened: bool) -> None:
        self._located.pop(receiver, None)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Let go of the arena."""
        self._aborted = True
        self._slots = ()
        self._located.clear()


class MappedImporter(Importer):
    """Reads chunks in place, in a mapping of the exporter's arena.

    Args:
        layout: where the arena's slots lie.
    """

    backend: ClassVar[str]

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._aborted = False
        self._opened: dict[int, tuple[int, Tensor]] = {}
        """For each slot, what its last chunk was and how long: a tensor costs a message more than all else here."""

    def detach(self, export: int) -> None:
        """Let go of the mapping; it goes with its last view, never before it."""
        self._opened.clear()

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        """The chunk in place. Raises `ProtocolError` where the header points at anything but a slot of the arena."""
        if self._aborted:
            raise stopped(self.backend)
        start, nbytes, layout = header.location.offset, header.nbytes, self._layout
        if attached is None or header.location.export != EXPORT:
            raise ProtocolError(f"the header names export {header.location.export}, the arena is export {EXPORT}")
        slot, within = divmod(start, layout.stride)
        if within or not 0 <= slot < layout.slots or not 0 <= nbytes <= layout.chunk_bytes:
            raise ProtocolError(
                f"the header points at {nbytes} bytes from {start} on, the arena has {layout.slots} slots of "
                f"{layout.chunk_bytes} bytes, {layout.stride} apart"
            )
        length, chunk = self._opened.get(slot, (-1, attached))
        if length != nbytes:
            chunk = attached[start : start + nbytes]
            self._opened[slot] = nbytes, chunk
        return chunk

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Let go of the arena; it is unmapped when nothing views it any more."""
        self._aborted = True
        self._opened.clear()


def stopped(backend: str) -> BackendError:
    """The error of an end that was aborted or closed, or that has met nobody yet."""
    return BackendError(f"this end of {backend} was stopped", backend=backend)
