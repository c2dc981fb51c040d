"""Packing tensors into the memory of chunks, and the way back; which bytes lie where is `transportkit.chunk`'s.

Contiguous host memory goes by ``memmove``; all else through `transportkit.strided`, slice by slice. What moves is the
logical value bit by bit: conj and neg bits are resolved, NaN payloads and odd bools stay. The way back is
`transportkit.unpacking`, what both share is `transportkit.memory`; their public names are also names of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transportkit.batching import Batch
from transportkit.chunk import used
from transportkit.errors import UsageError
from transportkit.memory import BOUNCE_BYTES, allocate, copy_bytes, memmove, plain_address, typed_view
from transportkit.strided import flat_bytes, read
from transportkit.unpacking import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transportkit.wire import Piece

__all__ = ["Packer", "Writer", "allocate", "copy_bytes", "pack_piece", "typed_view"]


class Packer:
    """Packs tensors that all exist for the whole update.

    Args:
        tensors: one per spec of the manifest; those that are the same as earlier ones are not looked at.
        addresses: `Layout.addresses` where it is known.
    """

    def __init__(self, tensors: Sequence[Tensor], addresses: Sequence[int] | None = None) -> None:
        self._tensors = tensors
        self._addresses = list(map(plain_address, tensors)) if addresses is None else addresses

    def pack(self, pieces: Sequence[Piece], slot: Tensor) -> None:
        """Copy these pieces of the tensors to their offsets in a slot."""
        _check_room(pieces, slot)
        if not slot.is_cpu:
            self._pack_on_device(pieces, slot)
            return
        base = slot.data_ptr()
        addresses = self._addresses
        for piece in pieces:
            address = addresses[piece.tensor]
            if address:
                memmove(base + piece.offset, address + piece.start, piece.nbytes)
            elif piece.nbytes:
                _pack_slowly(self._tensors[piece.tensor], piece, slot)

    @torch.inference_mode()
    def _pack_on_device(self, pieces: Sequence[Piece], slot: Tensor) -> None:
        batch = Batch(slot)
        for piece in pieces:
            tensor = self._tensors[piece.tensor]
            if not batch.add(tensor, piece.start, piece.nbytes, piece.offset) and piece.nbytes:
                _pack_slowly(tensor, piece, slot)
        batch.pack()


def pack_piece(tensor: Tensor, piece: Piece, slot: Tensor) -> None:
    """Copy one piece of a tensor to its offset in a slot; for sources that make one tensor after another."""
    _check_room((piece,), slot)
    if piece.nbytes:
        address = plain_address(tensor)
        if address and slot.is_cpu:
            memmove(slot.data_ptr() + piece.offset, address + piece.start, piece.nbytes)
        else:
            _pack_slowly(tensor, piece, slot)
            if tensor.is_cuda and slot.is_cuda:
                # Its owner may let go of it at once; its memory is not used again before this stream has read it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _check_room(pieces: Sequence[Piece], slot: Tensor) -> None:
    if used(pieces) > slot.numel():
        raise UsageError(f"pieces of {used(pieces)} bytes do not fit into a slot of {slot.numel()}")


@torch.inference_mode()
def _pack_slowly(tensor: Tensor, piece: Piece, slot: Tensor) -> None:
    """Pack a piece of a tensor that is strided, conjugate, negated or elsewhere, or into a slot elsewhere."""
    tensor = tensor.detach()
    start, stop, item = piece.start, piece.start + piece.nbytes, tensor.itemsize
    target = slot[piece.offset : piece.offset + piece.nbytes]
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        target.copy_(flat_bytes(tensor)[start:stop])
        return
    done = start
    if start % item == 0 and target.storage_offset() % item == 0:
        done = stop // item * item
        read(tensor, start // item, done // item, target[: done - start].view(tensor.dtype))
    while done < stop:  # the element that the piece ends in; or all, of a piece that begins within an element
        first = done // item
        last = min(first + BOUNCE_BYTES // item, -(-stop // item))
        bounce = torch.empty((last - first) * item, dtype=torch.uint8, device=slot.device)
        read(tensor, first, last, bounce.view(tensor.dtype))
        end = min(last * item, stop)
        target[done - start : end - start].copy_(bounce[done - first * item : end - first * item])
        done = end
