"""What goes ahead of a chunk's bytes on the data plane, and behind them, so that both ends know what came.

A receiver that has failed an update may have left a chunk unopened: the next one that it opens is then not the next one
that comes. gloo ends the process of a receiver whose buffer is smaller than what is sent, and leaves the rest of a
larger one as it was, without a word. So no length is taken from the link alone, and what has come has the same words at
its end.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from transportkit.errors import ProtocolError
from transportkit.lifecycle import memory_of

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes before the chunk's own in each slot, a multiple of the slots' alignment, and behind them.
HEAD = 64
TAIL = 32

_MAGIC = 0x746B6331
_FIELDS = struct.Struct("<IIqqQ")


class Head(NamedTuple):
    """Which chunk a broadcast carries, whether it is its update's last one, and how many bytes it has."""

    last: bool
    update: int
    seq: int
    nbytes: int

    @property
    def chunk(self) -> tuple[int, int]:
        """Chunks come in this order; the trial's update is negative."""
        return self.update, self.seq

    def write(self, slot: Tensor) -> None:
        """Put it into the first bytes of a slot in host memory."""
        memory_of(slot)[: _FIELDS.size] = _FIELDS.pack(_MAGIC, *self)

    def write_tail(self, slot: Tensor) -> None:
        """Put it behind the chunk's bytes."""
        start = HEAD + self.nbytes
        memory_of(slot)[start : start + _FIELDS.size] = _FIELDS.pack(_MAGIC, *self)

    def check_tail(self, slot: Tensor) -> None:
        """Raise `ProtocolError` unless the same words are behind the chunk's bytes."""
        start = HEAD + self.nbytes
        if memory_of(slot)[start : start + _FIELDS.size] != _FIELDS.pack(_MAGIC, *self):
            raise ProtocolError(f"a broadcast of the group did not carry all of chunk {self.seq}")


def read(slot: Tensor, capacity: int) -> Head:
    """The head in the first bytes of a slot in host memory.

    Raises:
        ProtocolError: there is none, so the broadcast carried nothing, or it announces more than ``capacity`` bytes.
    """
    magic, last, update, seq, nbytes = _FIELDS.unpack(memory_of(slot)[: _FIELDS.size])
    if magic != _MAGIC:
        raise ProtocolError("a broadcast of the group carried something else than a chunk, or nothing at all")
    if nbytes > capacity:
        raise ProtocolError(f"a broadcast of the group announces {nbytes} bytes, the agreed limit is {capacity}")
    return Head(bool(last), update, seq, nbytes)


def forget(slot: Tensor) -> None:
    """Take the head out of a slot in host memory, lest one that nothing was written to is read again."""
    memory_of(slot)[: _FIELDS.size] = bytes(_FIELDS.size)
