"""The memory of chunks and single tensors: addresses, typed views, allocation, bytes to bytes; no piece belongs here.

Slots and chunks are contiguous 1-d uint8 tensors on any device, starting at a multiple of 64 bytes. Bytes in host
memory go by ``memmove``: for a small tensor it costs a third of a torch copy, for a large one it is faster, and it
releases the lock.
"""

from __future__ import annotations

import ctypes
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transportkit.errors import TensorError, UsageError
from transportkit.kinds import BCOMPLEX32
from transportkit.manifest import dtype_of, nbytes

if TYPE_CHECKING:
    from transportkit.wire import TensorSpec

#: Bounce buffer for elements that lie across the alignment of a chunk, in bytes.
BOUNCE_BYTES = 1 << 16

#: The dtypes that the parts of complex tensors have, which alone can be conjugate or negated.
_PARTS = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
    | ({torch.bfloat16, BCOMPLEX32} if BCOMPLEX32 is not None else set())
)

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")

memmove = ctypes.memmove
"""``memmove(target address, source address, bytes)``."""


def plain_address(tensor: Tensor) -> int:
    """The address of a tensor whose bytes are contiguous host memory as they stand, else 0."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor.data_ptr()
    return 0


def typed_view(chunk: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """The tensor that lies whole at an offset of a chunk, without a copy.

    Args:
        chunk: contiguous uint8.
        offset: in bytes, a multiple of 64.
        spec: its dtype and shape.
    """
    return chunk[offset : offset + nbytes(spec)].view(dtype_of(spec.dtype)).view(spec.shape)


def allocate(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised contiguous tensor that owns its memory.

    Raises:
        TensorError: there is no memory for it; named.
    """
    dtype = dtype_of(spec.dtype)
    half_complex = dtype.is_complex and dtype.itemsize == 4  # `torch.empty` warns that few operators know it
    try:
        if not half_complex and not torch.is_inference_mode_enabled():
            return torch.empty(spec.shape, dtype=dtype, device=device)
        with torch.inference_mode(False):  # whoever owns it may write to it outside that mode as well
            if half_complex:
                return torch.empty(nbytes(spec), dtype=torch.uint8, device=device).view(dtype).view(spec.shape)
            return torch.empty(spec.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        text = f"no memory on {device} for {spec.name!r}, {nbytes(spec)} bytes: {error}"
        raise TensorError(text, tensor=spec.name) from error


def copy_bytes(target: Tensor, target_offset: int, source: Tensor, source_offset: int, count: int) -> None:
    """Copy ``count`` bytes between two contiguous uint8 tensors on any devices.

    Raises:
        UsageError: the range is not inside both.
    """
    if min(target_offset, source_offset, count) < 0 or (
        target_offset + count > target.numel() or source_offset + count > source.numel()
    ):
        raise UsageError(
            f"{count} bytes from {source_offset} of {source.numel()} do not fit at {target_offset} of {target.numel()}"
        )
    if target.is_cpu and source.is_cpu:
        memmove(target.data_ptr() + target_offset, source.data_ptr() + source_offset, count)
    else:
        with torch.inference_mode():
            target[target_offset : target_offset + count].copy_(source[source_offset : source_offset + count])


def layout_prints(targets: list[Tensor]) -> tuple[list[Any], ...]:
    """What changes when a tensor object stays but its memory or layout does not, as by ``p.data = ...``."""
    dtypes = list(map(_DTYPE, targets))
    contiguous = list(map(Tensor.is_contiguous, targets))
    held = list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, targets)))
    lazy = not _PARTS.isdisjoint(dtypes)
    return (
        dtypes,
        list(map(Tensor.data_ptr, targets)),
        list(map(_SHAPE, targets)),
        contiguous,
        held,
        [] if all(contiguous) else [target.stride() for target in targets],
        list(map(Tensor.is_neg, targets)) if lazy else [],
        list(map(Tensor.is_conj, targets)) if any(dtype.is_complex for dtype in set(dtypes)) else [],
    )
