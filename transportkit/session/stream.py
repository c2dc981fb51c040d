"""One update on one lane at its sender: which slot is being filled, and what the next header will tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit.chunk import Cutter, used

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit.session.lane import Lane
    from transportkit.wire import Piece, TensorSpec


class Stream:
    """The chunks of one update on one lane.

    Args:
        lane: carries them.
        update: number of the update.
        known_plan: the receivers know the pieces of each chunk already.
    """

    def __init__(self, lane: Lane, update: int, *, known_plan: bool) -> None:
        self.lane = lane
        self.cutter = Cutter(lane.terms.chunk_bytes)
        self.seq = 0
        self.nbytes = 0
        self.pieces: list[Piece] = []
        self._update = update
        self._known_plan = known_plan
        self._specs: list[TensorSpec] = []
        self._slot: int | None = None

    @property
    def slot(self) -> Tensor:
        assert self._slot is not None
        return self.lane.slots[self._slot]

    def take_slot(self) -> bool:
        """Acquire a slot unless one is at hand; False when none is free."""
        if self._slot is None:
            self._slot = self.lane.pool.acquire()
        return self._slot is not None

    def introduce(self, spec: TensorSpec) -> None:
        """The next chunk to be sent tells the receiver of this tensor."""
        self._specs.append(spec)

    def packing(self) -> AbstractContextManager[object]:
        assert self._slot is not None
        return self.lane.packing(self._slot)

    def emit(self, pieces: tuple[Piece, ...], *, last: bool) -> None:
        """Send the slot at hand."""
        assert self._slot is not None
        slot, self._slot = self._slot, None
        specs = tuple(self._specs)
        self._specs.clear()
        told = None if self._known_plan else pieces
        self.lane.emit(slot, self._update, self.seq, used(pieces), last=last, pieces=told, specs=specs)
        self.seq += 1

    def abandon(self) -> None:
        """Give the slot at hand back."""
        if self._slot is not None:
            self.lane.pool.abandon(self._slot)
            self._slot = None
