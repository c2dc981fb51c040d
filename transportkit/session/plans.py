"""What a sender keeps from one update to the next, for a manifest that comes again; pure, no I/O belongs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit.chunk import plan
from transportkit.manifest import manifest_id, wire_nbytes

if TYPE_CHECKING:
    from transportkit.wire import Piece, TensorSpec


class Plans:
    """What may be kept from one update to the next: digests, plans and addresses of a manifest that came again."""

    def __init__(self) -> None:
        self._specs: tuple[TensorSpec, ...] | None = None
        self._id = ""
        self._sizes: list[int | None] = []
        self._nbytes = 0
        self._chunks: dict[int, list[tuple[tuple[Piece, ...], int]]] = {}

    def take(self, specs: tuple[TensorSpec, ...]) -> tuple[str, int]:
        """The digest of a manifest, and the sum of its bytes."""
        if self._specs is not specs and self._specs != specs:
            self._chunks.clear()
            self._id = manifest_id(specs)
            self._sizes = [wire_nbytes(spec) for spec in specs]
            self._nbytes = sum(size or 0 for size in self._sizes)
        self._specs = specs
        return self._id, self._nbytes

    def chunks(self, chunk_bytes: int) -> list[tuple[tuple[Piece, ...], int]]:
        """The plan of the manifest taken last: the pieces of each chunk, and the sum of their bytes."""
        if chunk_bytes not in self._chunks:
            chunks = plan(self._sizes, chunk_bytes)
            self._chunks[chunk_bytes] = [(pieces, sum(piece.nbytes for piece in pieces)) for pieces in chunks]
        return self._chunks[chunk_bytes]
