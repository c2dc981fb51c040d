"""Host memory that slots are made of, and memory seen as bytes; who may touch it when does not belong here."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from transportkit.errors import ResourceError, UsageError
from transportkit.site import free_memory

if TYPE_CHECKING:
    from torch import Tensor


def host_slots(count: int, nbytes: int) -> tuple[Tensor, ...]:
    """``count`` uint8 tensors of shape ``(nbytes,)`` in ordinary memory, at addresses that are multiples of 64.

    Raises:
        ResourceError: there is not as much free memory.
    """
    stride = -(-nbytes // 64) * 64
    free = free_memory()
    if free is not None and count * stride > free:
        raise ResourceError(
            f"{count} slots of {nbytes} bytes do not fit into the {free} bytes of memory that are free; "
            "lower `slots=` or `chunk_bytes=`"
        )
    memory = torch.empty(count * stride + 63, dtype=torch.uint8, device="cpu")
    first = -memory.data_ptr() % 64
    return tuple(memory[at : at + nbytes] for at in range(first, first + count * stride, stride))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, writable, without numpy. The caller keeps the tensor alive."""
    if not tensor.is_cpu:
        raise UsageError(f"only host memory can be seen as bytes, this tensor is on {tensor.device}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    array = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
