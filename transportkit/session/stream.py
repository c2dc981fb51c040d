"""One update's run of chunks at its sender: which slots are being filled, and what the next header will tell.

A run has one lane. Where that is rerouted in mid-update, it may go on over several, which carry the same chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit.chunk import Cutter, used

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from transportkit.session.lane import Lane
    from transportkit.wire import Piece, TensorSpec


class Stream:
    """The chunks of one update on one lane.

    Args:
        lane: carries them.
        update: number of the update.
        known_plan: the receivers know the pieces of each chunk already.
        chunks: the pieces of each chunk and the sum of their bytes, where the whole plan is known.
    """

    def __init__(
        self,
        lane: Lane,
        update: int,
        *,
        known_plan: bool,
        chunks: list[tuple[tuple[Piece, ...], int]] | None = None,
    ) -> None:
        self.cutter = Cutter(lane.terms.chunk_bytes)
        self.chunks = chunks or []
        self.seq = 0
        """How many chunks were sealed."""
        self.nbytes = 0
        self.pieces: list[Piece] = []
        """What the slots at hand hold so far."""
        self._slots: dict[Lane, int | None] = {lane: None}
        self._update = update
        self._known_plan = known_plan
        self._specs: list[TensorSpec] = []

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._slots)

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(number for lane in self._slots for number in lane.receivers)

    def take_slots(self) -> bool:
        """Acquire a slot of every lane that has none at hand; False where one has none free."""
        for lane, slot in self._slots.items():
            if slot is None:
                self._slots[lane] = lane.pool.acquire()
        return None not in self._slots.values()

    def free(self) -> bool:
        """Whether `take_slots` would have them all."""
        return all(slot is not None or lane.pool.free for lane, slot in self._slots.items())

    def debtors(self) -> frozenset[int]:
        """The receivers whose word for a chunk frees a slot that is lacking."""
        lacking = [lane for lane, slot in self._slots.items() if slot is None and not lane.pool.free]
        return frozenset().union(*(lane.pool.debtors() for lane in lacking))

    def at_hand(self, lane: Lane) -> Tensor | None:
        """What the lane's slot at hand holds so far, uint8; None where it has no slot at hand."""
        slot = self._slots[lane]
        return None if slot is None else lane.slots[slot][: used(self.pieces)]

    def introduce(self, spec: TensorSpec) -> None:
        """The next chunk to be sealed tells the receiver of this tensor."""
        self._specs.append(spec)

    def pack(self, lane: Lane, copy: Callable[[Tensor], object]) -> None:
        """Have ``copy`` fill the lane's slot at hand, or go on filling it."""
        slot = self._slots[lane]
        assert slot is not None
        with lane.packing(slot):
            copy(lane.slots[slot])

    def seal(self, pieces: tuple[Piece, ...]) -> tuple[int, tuple[Piece, ...] | None, tuple[TensorSpec, ...]]:
        """The slots at hand hold a whole chunk: its number, and the pieces and specs for its headers."""
        specs = tuple(self._specs)
        self._specs.clear()
        self.seq += 1
        return self.seq - 1, None if self._known_plan else pieces, specs

    def emit(
        self,
        lane: Lane,
        seq: int,
        nbytes: int,
        *,
        last: bool,
        pieces: tuple[Piece, ...] | None,
        specs: tuple[TensorSpec, ...],
    ) -> None:
        """Send the sealed chunk over one lane."""
        slot, self._slots[lane] = self._slots[lane], None
        assert slot is not None
        lane.emit(slot, self._update, seq, nbytes, last=last, pieces=pieces, specs=specs)

    def add(self, lane: Lane) -> None:
        """From here on the chunks go over this lane, too."""
        self._slots[lane] = None

    def give(self, lane: Lane, slot: int) -> None:
        """A slot of the lane is at hand now."""
        self._slots[lane] = slot

    def remove(self, lane: Lane) -> None:
        """From here on nothing goes over this lane; the slot at hand is given back."""
        slot = self._slots.pop(lane)
        if slot is not None:
            lane.pool.abandon(slot)

    def prune(self) -> bool:
        """Part with the lanes whose receivers are all lost; whether any lane is left."""
        for lane in [lane for lane in self._slots if not lane.receivers]:
            self.remove(lane)
        return bool(self._slots)

    def abandon(self) -> None:
        """Give the slots at hand back."""
        for lane in self.lanes:
            self.remove(lane)
