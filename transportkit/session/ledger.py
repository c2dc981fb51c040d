"""What a receiver knows of an update and what it has had of it: manifest, plan, totals; pure, no I/O belongs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import Cursor, used
from transportkit.errors import ProtocolError
from transportkit.manifest import check_specs, manifest_id, wire_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.wire import Piece, TensorSpec


class Memory:
    """What a receiver keeps from one update to the next: the manifest and plan that it applied last."""

    def __init__(self) -> None:
        self.manifest_id = ""
        self.specs: list[TensorSpec] = []
        self.sizes: list[int | None] = []
        self.plan: list[tuple[tuple[Piece, ...], int]] = []
        """The pieces of each chunk, and the sum of their bytes."""
        self.announced = False
        """Whether the sender has been told that a call waits, and has begun no update since."""


class Ledger:
    """One update's manifest, and how much of it has come.

    Args:
        memory: of the last update that was applied.
        dtypes: names that this side's torch knows.
        chunk_bytes: the agreed bound of a chunk, in bytes.
    """

    def __init__(self, memory: Memory, dtypes: Sequence[str], chunk_bytes: int) -> None:
        self._memory = memory
        self._dtypes = dtypes
        self.manifest = wire.Manifest(0)
        self.specs: list[TensorSpec] = []
        """The manifest so far; grows with the chunks where `streamed`."""
        self._sizes: list[int | None] = []
        self._by_name: dict[str, TensorSpec] = {}
        self._cursor = Cursor(chunk_bytes)
        self._plan: list[tuple[tuple[Piece, ...], int]] = []
        self.seq = 0
        """How many chunks were admitted."""
        self.nbytes = 0
        """Sum of their pieces, in bytes."""
        self.last = False
        """Whether no chunk follows."""

    @property
    def streamed(self) -> bool:
        """Whether the specs come with the chunks."""
        return not self.manifest.manifest_id

    def take(self, manifest: wire.Manifest, name: str) -> None:
        """Take in the manifest that the sender, of this name, has sent. Raises `ProtocolError`, `TensorError`."""
        self.manifest = manifest
        if manifest.specs is not None:
            check_specs(manifest.specs, self._dtypes)
            if manifest_id(manifest.specs) != manifest.manifest_id:
                raise ProtocolError(f"{name} sent a manifest that has another digest than it says")
            self._grow(manifest.specs)
        elif manifest.manifest_id or manifest.known_plan:
            if not manifest.manifest_id or manifest.manifest_id != self._memory.manifest_id:
                raise ProtocolError(f"{name} refers to a manifest that this side does not hold")
            self.specs, self._sizes = self._memory.specs, self._memory.sizes

    def admit(self, header: wire.Chunk) -> tuple[tuple[Piece, ...], int]:
        """Check the next chunk's header and move on past it; its pieces, and how many specs it appended."""
        if header.seq != self.seq:
            raise ProtocolError(f"chunk {header.seq} of update {header.update} came, where chunk {self.seq} was due")
        if header.specs:
            if not self.streamed:
                raise ProtocolError(f"chunk {header.seq} brings tensors that are not in the manifest")
            check_specs(header.specs, self._dtypes, earlier=self._by_name)
            self._grow(header.specs)
        pieces = header.pieces
        if self.manifest.known_plan:
            plan = self._memory.plan
            if pieces is not None or self.seq >= len(plan) or header.nbytes != used(plan[self.seq][0]):
                raise ProtocolError(f"chunk {header.seq} does not follow the plan that both sides know")
            pieces, nbytes = plan[self.seq]
        else:
            if pieces is None:
                raise ProtocolError(f"chunk {header.seq} comes without its pieces")
            self._cursor.advance(pieces, header.nbytes, self._sizes)
            nbytes = sum(piece.nbytes for piece in pieces)
            self._plan.append((pieces, nbytes))
        self.seq += 1
        self.last = header.last
        self.nbytes += nbytes
        return pieces, len(header.specs)

    def check_totals(self, update: int, commit: wire.Commit) -> None:
        """Raise `ProtocolError` unless all has come that was sent."""
        if not self.manifest.known_plan:
            self._cursor.finish(self._sizes)
        elif self.seq != len(self._memory.plan):
            raise ProtocolError(f"the update ended after {self.seq} of the {len(self._memory.plan)} chunks of its plan")
        have = (update, self.seq, self.nbytes, len(self.specs))
        said = (commit.update, commit.chunks, commit.nbytes, commit.tensors)
        if have != said:
            raise ProtocolError(
                f"the sender committed (update, chunks, bytes, tensors) {said}, but {have} arrived here"
            )
        if self.streamed and commit.manifest_id != manifest_id(self.specs):
            raise ProtocolError("the tensors that arrived have another manifest than the sender committed")

    def remember(self) -> None:
        """The update is applied: the next one may refer to its manifest and plan."""
        if not self.manifest.known_plan:
            self._memory.specs, self._memory.sizes, self._memory.plan = self.specs, self._sizes, self._plan
            self._memory.manifest_id = self.manifest.manifest_id or manifest_id(self.specs)

    def _grow(self, specs: Sequence[TensorSpec]) -> None:
        self.specs += specs
        if self.streamed:
            self._by_name.update((spec.name, spec) for spec in specs)
        self._sizes += [wire_nbytes(spec) for spec in specs]
