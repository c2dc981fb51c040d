"""The memory of chunks and single tensors: addresses, typed views, allocation, bytes to bytes; no piece belongs here.

Slots and chunks are contiguous 1-d uint8 tensors on any device, starting at a multiple of 64 bytes. Bytes in host
memory go by ``memmove``: for a small tensor it costs a third of a torch copy, for a large one it is faster, and it
releases the lock.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from transportkit.errors import TensorError, UsageError
from transportkit.manifest import dtype_of, nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from transportkit.wire import TensorSpec

#: Bounce buffer for elements that lie across the alignment of a chunk, in bytes.
BOUNCE_BYTES = 1 << 16

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
