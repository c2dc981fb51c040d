"""Tensors of every kind that travels, and their bytes, by which they are compared; no backend belongs here."""

from __future__ import annotations

import ctypes
import itertools
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from transportkit.kinds import BCOMPLEX32
from transportkit.manifest import dtype_name, dtype_names, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: A tensor's dtype, shape and bytes: what must arrive.
Print = tuple[str, tuple[int, ...], bytes]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor's logical value, row-major; the only fair comparison: NaN differs from itself."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is called experimental
        tensor = resolved(tensor.detach().cpu())
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize) if tensor.numel() else b""


def resolved(tensor: Tensor) -> Tensor:
    """The tensor without lazy bits, also where torch (2.15, bcomplex32) makes a conjugate that it cannot resolve."""
    if tensor.dtype is BCOMPLEX32 and tensor.is_conj():
        value = tensor.conj().clone(memory_format=torch.contiguous_format)
        value.view(-1).view(torch.int16)[1::2].bitwise_xor_(-0x8000)
        return value
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def placed(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same values on a device, in the same layout, lazy bits included; what is there already comes as it is."""
    if tensor.device == torch.device(device):
        return tensor
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(device)
    typed = memory[: memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    typed = typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    typed = typed.conj() if tensor.is_conj() else typed
    return torch._neg_view(typed) if tensor.is_neg() else typed


def print_of(tensor: Tensor) -> Print:
    """What identifies a tensor's value; it can be pickled, and compared with ``==``."""
    return dtype_name(tensor.dtype), tuple(tensor.shape), bytes_of(tensor)


def prints(pairs: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Print]:
    """`print_of` each, by name, in order."""
    items = pairs.items() if hasattr(pairs, "items") else pairs
    return {name: print_of(tensor) for name, tensor in items}


def _random(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """``count`` elements of any bits that the dtype allows, its NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    return torch.randint(0, top, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def every_dtype() -> dict[str, Tensor]:
    """One tensor of each dtype that travels, of an odd number of elements, and a scalar of each."""
    found = {}
    for seed, name in enumerate(dtype_names()):
        found[f"dtype_{name}"] = _random(dtype_of(name), 1 + 2 * (seed % 3), seed)
        found[f"scalar_{name}"] = _random(dtype_of(name), 1, seed + 1000).reshape(())
    return found


def every_layout() -> dict[str, Tensor]:
    """Tensors whose bytes are not simply one after another, and empty ones in between."""
    grid = torch.arange(12, dtype=torch.float32).view(3, 4)
    bits = _random(torch.bfloat16, 24, 7).view(2, 3, 4)
    waves = torch.view_as_complex(torch.arange(12, dtype=torch.float32).view(3, 2, 2))
    return {
        "scalar": torch.tensor(1.5),
        "transposed": grid.t(),
        "empty": torch.empty(0),
        "strided": torch.arange(12, dtype=torch.int64)[::2],
        "empty_rows": torch.empty(0, 3, dtype=torch.float16),
        "expanded": torch.arange(3, dtype=torch.int16).view(3, 1).expand(3, 4),
        "empty_columns": torch.empty(3, 0, dtype=torch.uint8),
        "fused_middle": bits[:, 1],
        "permuted": bits.permute(2, 0, 1),
        "conjugate": waves.conj(),
        "negative": waves.conj().imag,
        "conjugate_transposed": waves.conj().t(),
        "odd_offset": _random(torch.uint8, 9, 8)[1:],
        "odd_size": _random(torch.uint8, 7, 9),
        "wide_after_odd": _random(torch.complex128, 1, 10),
        "one_bool": torch.tensor([True]),
        "parameter": nn.Parameter(torch.tensor([[0.5, -2.0]])),
        "channels_last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "diagonal": torch.arange(9, dtype=torch.int8).view(3, 3).diagonal(),
        "not_a_number": torch.tensor([float("nan"), float("-inf"), -0.0], dtype=torch.float16),
    }


def samples() -> dict[str, Tensor]:
    """Every dtype and every layout, and one tensor under two names: about 1.5 KB in all."""
    found = {**every_layout(), **every_dtype()}
    found["tied"] = torch.arange(5, dtype=torch.int32)
    found["tied_again"] = found["tied"]
    return found


def bulk(nbytes: int, seed: int = 0) -> dict[str, Tensor]:
    """A few large and some small tensors of random bytes, ``nbytes`` in all, one of them strided."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    sizes = [nbytes // 2, nbytes // 5, 1, nbytes // 10 | 1, 63, 64, 65]
    cuts = list(itertools.accumulate(sizes, initial=0))
    found = {f"bulk_{index}": memory[start:end] for index, (start, end) in enumerate(itertools.pairwise(cuts))}
    rest = memory[cuts[-1] :]
    found["bulk_strided"] = rest[: rest.numel() // 2 * 2].view(2, -1).t()
    return found


def as_module(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module whose `state_dict` holds these tensors as they are, in this order."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def empty_like(expected: Mapping[str, Print]) -> dict[str, Tensor]:
    """Targets for these values, filled with other bytes."""
    targets = {}
    for name, (dtype, shape, data) in expected.items():
        memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        targets[name] = (memory ^ (1 if dtype == "bool" else 0x5A)).view(dtype_of(dtype)).view(shape)
    return targets


def one_at_a_time(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """An iterator over copies, each gone before the next is made, so that addresses come back."""
    for name, tensor in tensors.items():
        if tensor.numel() and not _copies(tensor.dtype):
            yield name, tensor
        else:
            yield name, tensor.detach().clone(memory_format=torch.preserve_format)


def _copies(dtype: torch.dtype) -> bool:
    """Whether torch itself can copy this dtype; it cannot copy integers below a byte."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).clone()
        except NotImplementedError:
            return False
    return True
