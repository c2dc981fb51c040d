"""Many small copies between one flat memory and tensors on the same device, made together; no piece belongs here.

On a GPU each copy is a launch of its own, and 20 000 of them cost more than their bytes. `torch._foreach_copy_` makes
hundreds with one launch, if all are of one dtype and each pair has equal sizes. So byte ranges are taken as the widest
integers that their addresses and lengths allow: as integers, since a copy of floating-point numbers rewrites NaNs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transportkit.strided import flat_bytes

if TYPE_CHECKING:
    from torch import Tensor

#: Larger ranges are copied one by one, which costs no more, in bytes.
SMALL_BYTES = 1 << 20

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Batch:
    """Copies into or out of a flat memory that are made together. Expects `torch.inference_mode`.

    Args:
        flat: a slot or a chunk, contiguous uint8 on any device.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._device = flat.device
        self._marks = flat.data_ptr() | int(flat.storage_offset())
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """For each width of word, where the ranges lie in the flat memory: offset and length, in words."""
        self._tensors: dict[int, list[Tensor]] = {}
        """For each width, the tensors' own ranges, 1-d integers of that width."""

    def add(self, tensor: Tensor, start: int, nbytes: int, offset: int) -> bool:
        """Note one copy; False where it has to be made alone.

        Args:
            tensor: whose bytes from ``start`` on, ``nbytes`` of them, lie at ``offset`` of the flat memory. Offsets
                do not descend from one call to the next.
        """
        if not 0 < nbytes <= SMALL_BYTES or tensor.device != self._device:
            return False
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
        marks = tensor.data_ptr() + start | int(tensor.storage_offset()) * tensor.itemsize + start | nbytes | offset
        marks |= self._marks
        width = min(marks & -marks, 8)
        ranges = self._ranges.setdefault(width, [])
        if ranges and offset // width < sum(ranges[-1]):  # a second tensor for the same bytes
            return False
        ranges.append((offset // width, nbytes // width))
        if nbytes == tensor.nbytes:  # `Tensor.view` would keep the odd stride of a dimension of size 1
            ours = tensor.as_strided((tensor.numel(),), (1,))
        else:
            ours = flat_bytes(tensor)[start : start + nbytes]
        self._tensors.setdefault(width, []).append(ours.view(_WORDS[width]))
        return True

    def pack(self) -> None:
        """Copy what was noted into the flat memory."""
        for width, tensors in self._tensors.items():
            torch._foreach_copy_(self._words(width), tensors)

    def unpack(self) -> None:
        """Copy what was noted out of the flat memory."""
        for width, tensors in self._tensors.items():
            torch._foreach_copy_(tensors, self._words(width))

    def _words(self, width: int) -> list[Tensor]:
        """The ranges of the flat memory, which one call cuts out of it, with the gaps between them."""
        whole = self._flat[: self._flat.numel() // width * width].view(_WORDS[width])
        sizes, end = [], 0
        for offset, count in self._ranges[width]:
            sizes += [offset - end, count]
            end = offset + count
        return list(torch.split(whole, [*sizes, whole.numel() - end])[1::2])
