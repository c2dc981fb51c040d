"""Element ranges of tensors of any layout, copied to and from flat tensors; no piece, chunk or target belongs here.

A range of elements in row-major order is taken as a few rectangular slices, so that a tensor of any strides is read and
written where it is: at no time does a contiguous copy of it exist. `read` and `write` expect `torch.inference_mode`: it
lets inference tensors be written, and records nothing.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from transportkit.kinds import BCOMPLEX32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

#: Integer dtypes through which bits are copied untouched, by item size. Typed copies normalise bool, and know no int4.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Largest non-overlap question that is answered by looking at every element, in elements.
_COUNTABLE = 1 << 24

Index = tuple["int | slice", ...]


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Index, int]]:
    """Decompose elements ``start`` to ``stop`` of a row-major shape into rectangular slices, in order.

    Yields:
        At most ``2 * len(shape) + 1`` pairs of an index and the number of elements it selects.
    """
    if start >= stop:
        return
    if not shape:
        yield (), 1
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _within(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (slice(first, last),), (last - first) * row
    if last * row < stop:
        yield from _within(shape, last, 0, stop - last * row)


def _within(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[Index, int]]:
    for index, count in rectangles(shape[1:], start, stop):
        yield (row, *index), count


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its item size, so that copying touches no bit; itself where torch cannot view it so."""
    tensor = tensor.detach()
    integer = _INTEGERS.get(tensor.itemsize)
    return tensor if integer is None or tensor.is_conj() or tensor.is_neg() else tensor.view(integer)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as 1-d uint8. `Tensor.view` cannot tell: it keeps the odd stride of a dimension of size 1."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read(tensor: Tensor, start: int, stop: int, flat: Tensor) -> None:
    """Copy elements ``start`` to ``stop`` of a tensor into a contiguous 1-d one of its dtype and that length."""
    by_hand = tensor.dtype is BCOMPLEX32 and tensor.is_conj()
    tensor = bits(tensor.conj() if by_hand else tensor)
    flat = flat.view(tensor.dtype)
    done = 0
    for index, count in rectangles(tensor.shape, start, stop):
        part = tensor[index]
        flat[done : done + count].view(part.shape).copy_(part)
        done += count
    if by_hand:
        _conjugate(flat)


def write(tensor: Tensor, start: int, stop: int, flat: Tensor) -> None:
    """Copy a contiguous 1-d tensor into elements ``start`` to ``stop`` of another one, cast where its dtype differs."""
    tensor = tensor.detach()
    if tensor.is_conj():
        # Written through the conjugate view itself, torch would make a temporary. A real source becomes complex first:
        # the conjugate of its missing part is -0, but what was sent has +0.
        flat = flat if flat.is_complex() else flat.to(tensor.dtype)
        if tensor.dtype is BCOMPLEX32:
            tensor, flat = tensor.conj(), _conjugate(flat.to(tensor.dtype, copy=True))
        else:
            tensor, flat = tensor.conj(), flat.conj()
    if tensor.dtype == flat.dtype and not flat.is_conj():
        tensor = bits(tensor)
        flat = flat.view(tensor.dtype)
    done = 0
    for index, count in rectangles(tensor.shape, start, stop):
        part = tensor[index]
        part.copy_(flat[done : done + count].view(part.shape))
        done += count


def _conjugate(flat: Tensor) -> Tensor:
    """Conjugate contiguous complex numbers of two bfloat16 in place, which torch cannot (2.15); the same tensor."""
    flat.view(torch.int16)[1::2].bitwise_xor_(-0x8000)
    return flat


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor lie in the same memory, or where that cannot be told with reason."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    dimensions = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dimensions:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if dimensions[0][0] == 0 or tensor.numel() > _COUNTABLE:
        return True
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in dimensions:
        offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device="cpu") * stride
    ordered = offsets.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())
