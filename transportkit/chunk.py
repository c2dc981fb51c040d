"""How tensors lie in chunks: the sender's plan and the receiver's check of it; pure, no tensor and no I/O belongs here.

The rules, which both ends can state without having spoken:

- Tensors lie in manifest order. Every piece starts on a multiple of `ALIGNMENT` bytes of its chunk.
- A tensor that fits into a chunk is never split: where it does not fit into what is left, it begins the next chunk.
- A larger tensor is split. It begins in what is left of the current chunk, be it one byte, and each of its pieces but
  the last fills its chunk to exactly ``chunk_bytes``. Boundaries may lie within an element.
- An empty tensor has one piece of 0 bytes. A tensor that is the same as an earlier one has none.
- A chunk holds at most `MAX_PIECES` pieces and ends where its last piece ends.

Only the sender applies the splitting rules; the receiver accepts any cut that keeps order, alignment and bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from transportkit.errors import ProtocolError
from transportkit.wire import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Every piece starts on a multiple of this many bytes: no dtype is wider, and it is a cache line.
ALIGNMENT = 64

#: Most pieces in one chunk; bounds a header to about 512 KiB.
MAX_PIECES = 16384


class Cutter:
    """Cuts tensors into pieces, one tensor after another.

    Args:
        chunk_bytes: bound of a chunk in bytes, at least 1.
    """

    def __init__(self, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.chunk_bytes = chunk_bytes
        self._end = 0
        self._pieces = 0
        self._begun = False

    def cut(self, tensor: int, nbytes: int) -> list[tuple[bool, Piece]]:
        """The pieces of the next tensor.

        Args:
            tensor: its index in the manifest.
            nbytes: its size in bytes.

        Returns:
            For each piece whether it begins a new chunk, and the piece. The first piece of all begins one.
        """
        limit = self.chunk_bytes
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        fresh = not self._begun or self._pieces >= MAX_PIECES
        if nbytes <= limit:
            fresh = fresh or offset + nbytes > limit
        else:
            fresh = fresh or offset >= limit
        if fresh:
            offset = self._pieces = 0
            self._begun = True
        if offset + nbytes <= limit:
            self._end = offset + nbytes
            self._pieces += 1
            return [(fresh, Piece(tensor, 0, nbytes, offset))]
        cuts = []
        start = 0
        while start < nbytes:
            length = min(limit - offset, nbytes - start)
            cuts.append((fresh, Piece(tensor, start, length, offset)))
            start += length
            self._end = offset + length
            self._pieces = 1 if fresh else self._pieces + 1
            fresh, offset = True, 0
        return cuts


def plan(sizes: Iterable[int | None], chunk_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """All chunks of an update, each as its pieces.

    Args:
        sizes: each tensor's bytes on the wire in manifest order; None for one that is the same as an earlier one.
        chunk_bytes: bound of a chunk in bytes, at least 1.
    """
    cutter = Cutter(chunk_bytes)
    chunks: list[list[Piece]] = []
    for tensor, nbytes in enumerate(sizes):
        if nbytes is not None:
            for fresh, piece in cutter.cut(tensor, nbytes):
                if fresh:
                    chunks.append([])
                chunks[-1].append(piece)
    return tuple(map(tuple, chunks))


def used(pieces: Sequence[Piece]) -> int:
    """How many bytes of the chunk these pieces take, padding between them included."""
    return pieces[-1].offset + pieces[-1].nbytes if pieces else 0


class Cursor:
    """The receiver's place in an update: takes each header's pieces or refuses them whole.

    Args:
        chunk_bytes: the agreed bound of a chunk in bytes.

    Attributes:
        tensor: index of the next tensor due, all before it being complete.
        start: bytes of it that have arrived.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.tensor = 0
        self.start = 0

    def advance(self, pieces: Sequence[Piece], nbytes: int, sizes: Sequence[int | None]) -> None:
        """Take one chunk's pieces.

        Args:
            pieces: from the chunk's header.
            nbytes: the chunk's length, from its header.
            sizes: each known tensor's bytes on the wire, None for one without pieces; may grow from call to call.

        Raises:
            ProtocolError: a piece is out of order, misaligned, too long or overlaps another; nothing is taken.
        """
        if not 0 <= nbytes <= self.chunk_bytes:
            raise ProtocolError(f"a chunk of {nbytes} bytes came, where at most {self.chunk_bytes} are agreed")
        if not 0 < len(pieces) <= MAX_PIECES:
            raise ProtocolError(f"a chunk of {len(pieces)} pieces came; from 1 to {MAX_PIECES} are allowed")
        due, start, end, count = self.tensor, self.start, 0, len(sizes)
        for piece in pieces:
            while due < count and sizes[due] is None:
                due += 1
            size = sizes[due] if due < count else None
            if size is None:
                raise ProtocolError(f"a piece of tensor {piece.tensor} came, but all {count} tensors are complete")
            length, offset = piece.nbytes, piece.offset
            if piece.tensor != due or piece.start != start:
                raise ProtocolError(
                    f"byte {piece.start} of tensor {piece.tensor} came, where byte {start} of tensor {due} was due"
                )
            if length < 0 or start + length > size or (length == 0) != (size == 0):
                raise ProtocolError(f"a piece of {length} bytes at byte {start} of tensor {due} came, which has {size}")
            if offset % ALIGNMENT or offset < end:
                raise ProtocolError(
                    f"a piece at offset {offset} came after one that ends at {end}; "
                    f"offsets ascend, in multiples of {ALIGNMENT}"
                )
            end = offset + length
            start += length
            if start == size:
                due, start = due + 1, 0
        if end != nbytes:
            raise ProtocolError(f"the pieces of a chunk end at byte {end}, but its header says {nbytes}")
        self.tensor, self.start = due, start

    def finish(self, sizes: Sequence[int | None]) -> None:
        """The update ends here.

        Raises:
            ProtocolError: a tensor is missing or incomplete.
        """
        due = self.tensor
        while due < len(sizes) and sizes[due] is None:
            due += 1
        if due < len(sizes):
            wanted = sum(size is not None for size in sizes)
            arrived = sum(size is not None for size in sizes[:due])
            raise ProtocolError(
                f"the update ended early: {wanted} tensors due, {arrived} arrived"
                + (f", {self.start} of {sizes[due]} bytes of the next" if self.start else "")
            )


def digest(view: bytes | bytearray | memoryview) -> int:
    """The xxh3-64 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(view)
