"""A lane at its sender: one exporter, its slots, and the receivers that it serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from transportkit import wire
from transportkit.chunk import digest
from transportkit.deadline import Deadline
from transportkit.errors import BackendError, ProtocolError, TransportKitError
from transportkit.lifecycle import Exports, SlotPool, around, memory_of, translated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit.session.peers import Peers
    from transportkit.transport import Exporter
    from transportkit.wire import Location, Piece, TensorSpec, Terms

_log = logging.getLogger("transportkit")


@attrs.frozen
class Sent:
    """A chunk whose header is out.

    Args:
        memory: its bytes in the slot, uint8 of shape (nbytes,).
        digest: of these bytes, 0 where none was taken.
        pieces, specs: as its header has them.
    """

    seq: int
    memory: Tensor
    last: bool
    digest: int
    pieces: tuple[Piece, ...] | None
    specs: tuple[TensorSpec, ...]


class Lane:
    """One exporter and the receivers that it serves.

    Args:
        terms: the exporter's terms.
        exporter: the backend's sending end.
        peers: all receivers of the sender; those of ``terms.receivers`` are the lane's.
    """

    def __init__(self, terms: Terms, exporter: Exporter, peers: Peers) -> None:
        self.terms = terms
        self.exporter = exporter
        self.receivers = list(terms.receivers)
        self._translated = translated(terms.backend)
        self._peers = peers
        names = [peers[number].name for number in self.receivers[:3]]
        self._where = f"at {', '.join(names)}{' and others' if len(self.receivers) > 3 else ''}"
        with self.translated():
            self.slots: Sequence[Tensor] = exporter.slots
            self._check_slots()
        self._memory = [memory_of(slot) for slot in self.slots] if terms.digest != "none" else []
        self._exports = Exports(self._reclaim)
        self.pool = SlotPool(len(self.slots), self._exports)
        self.bereft = False
        """Whether a receiver was lost from it: what then fails is no fault of the backend's."""
        self._sent: dict[int, Sent] = {}

    @property
    def backend(self) -> str:
        return self.terms.backend

    def translated(self) -> AbstractContextManager[None]:
        """Turns any native exception of this lane's backend into `BackendError`."""
        return self._translated

    def emit(
        self,
        slot: int,
        update: int,
        seq: int,
        nbytes: int,
        *,
        last: bool,
        pieces: tuple[Piece, ...] | None = None,
        specs: tuple[TensorSpec, ...] = (),
        known: int = 0,
    ) -> None:
        """Begin to send one packed slot to every receiver of the lane. The pool knows it as read from then on.

        What finds no room on a link at once is written by `Peers.flush`.

        Args:
            known: its digest, where that was taken already.
        """
        deadline = Deadline(self._peers.timeout, f"room for chunk {seq} over {self.backend} {self._where}")
        value = known or digest(self._memory[slot][:nbytes]) if self._memory else 0
        self.pool.publish(slot, update, seq, self.receivers)
        self._sent[slot] = Sent(seq, self.slots[slot][:nbytes], last, value, pieces, specs)
        with self.translated():
            self.exporter.ready(slot, deadline)
        first = None
        for number in self.receivers:
            location = self.locate(slot, number, update, seq)
            header = wire.Chunk(update, number, seq, last, nbytes, value, location, pieces, specs)
            self._peers.begin([self._peers[number]], header)
            first = first or header
        if first is not None:
            with self.translated():
                self.exporter.publish(slot, first, deadline)

    def locate(self, slot: int, receiver: int, update: int, seq: int) -> Location:
        """Where a receiver finds the chunk that a slot holds; its header must follow."""
        with self.translated():
            location = self.exporter.locate(slot, receiver)
            owed = () if location.supersedes is None else self.pool.owed(receiver)
            self._exports.name(receiver, location, update, seq, owed)
        return location

    def outstanding(self, update: int) -> dict[int, Sent]:
        """The chunks of an update that some receiver may not have taken yet, by their numbers."""
        return {seq: self._sent[slot] for seq, slot in self.pool.reading(update).items()}

    def drop(self, receiver: int) -> None:
        """A receiver is gone, or has another lane now: nothing of it is waited for."""
        self.bereft = True
        self.receivers.remove(receiver)
        try:
            with self.translated():
                self.exporter.drop(receiver)
        finally:
            self.pool.drop(receiver)

    def packing(self, slot: int) -> AbstractContextManager[None]:
        """Around copies into a slot. What the backend's own part raises is a `BackendError`."""
        return around(self.backend, lambda: self.exporter.packing(slot))

    def close(self) -> None:
        """Close the exporter and let go of its memory, whoever still holds the lane. Idempotent.

        What fails in that is logged: nobody needs the lane any more.
        """
        self._memory, self.slots = [], ()
        self._sent.clear()
        try:
            self._exports.close()
            with self.translated():
                self.exporter.close()
        except TransportKitError as error:
            _log.warning("closing backend %s failed: %s", self.backend, error)

    def _reclaim(self, receiver: int, export: int, opened: bool) -> None:
        """Let the exporter give an export back. What fails in that leaves memory behind, and harms no update."""
        try:
            with self.translated():
                self.exporter.reclaim(receiver, export, opened)
        except TransportKitError as error:
            _log.warning("backend %s could not take export %s back: %s", self.backend, export, error)

    def _check_slots(self) -> None:
        wanted = self.terms.slots, self.terms.chunk_bytes
        shapes = {(str(slot.dtype), tuple(slot.shape), slot.is_contiguous()) for slot in self.slots}
        if len(self.slots) != wanted[0] or shapes != {("torch.uint8", (wanted[1],), True)}:
            raise BackendError(
                f"backend {self.backend} made {len(self.slots)} slots of {sorted(shapes)}, "
                f"not {wanted[0]} contiguous uint8 slots of {wanted[1]} bytes",
                backend=self.backend,
            )
        if self.terms.chunk_bytes and any(slot.data_ptr() % 64 for slot in self.slots):
            raise BackendError(
                f"backend {self.backend} made slots that are not aligned to 64 bytes", backend=self.backend
            )


def acknowledge(lanes: Sequence[Lane], message: wire.Ack, receiver: int) -> None:
    """Take a receiver's word for a chunk. Raises `ProtocolError` when it speaks for another or was not asked."""
    if message.receiver != receiver:
        raise ProtocolError(f"receiver {receiver} acknowledged a chunk as receiver {message.receiver}")
    for lane in lanes:
        if receiver in lane.receivers:
            lane.pool.acknowledge(message.update, message.seq, receiver)
            return
