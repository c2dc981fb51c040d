"""Which dtypes and kinds of tensor travel, and why the others do not; nothing else belongs here.

A tensor travels when it is a plain strided `torch.Tensor` (or `torch.nn.Parameter`) with memory of its own and a dtype
that can be viewed as bytes. Everything else is refused, with what to do instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

#: No size in bytes or elements may exceed this: torch counts in 64-bit integers.
MAX_BYTES = (1 << 63) - 1

#: Most dimensions of a tensor.
MAX_DIMENSIONS = 64

#: Complex numbers of two bfloat16, which torch has from 2.14 on, but can neither fill nor conjugate; else None.
BCOMPLEX32: torch.dtype | None = getattr(torch, "bcomplex32", None)

#: The types of tensor that are nothing but their bytes; `torch.nn.Buffer` makes the first.
PLAIN_TYPES = frozenset({Tensor, nn.Parameter})


# -- dtypes -----------------------------------------------------------------------------------------------------------


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    """The dtypes of the installed torch that can be viewed as bytes, by their canonical name, found by trying.

    Quantised ones (``q...``) can be viewed too, but mean nothing without their scales.
    """
    found = {}
    probe = torch.zeros(64, dtype=torch.uint8)
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        if name.startswith("q"):
            continue
        try:
            whole = probe.view(dtype).view(torch.uint8).numel() == 64
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        if whole and getattr(torch, name, None) is dtype:
            found[name] = dtype
    return dict(sorted(found.items()))


@functools.cache
def names_by_dtype() -> dict[torch.dtype, str]:
    """The canonical name of each dtype that travels."""
    return {dtype: name for name, dtype in _dtypes().items()}


def dtype_names() -> tuple[str, ...]:
    """The names of all dtypes that travel, as the installed torch has them, sorted: ``"float32"``, not ``"float"``."""
    return tuple(_dtypes())


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a dtype. Raises `KeyError` for one that does not travel."""
    return names_by_dtype()[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a canonical name. Raises `KeyError` for one that the installed torch does not have."""
    return _dtypes()[name]


def itemsize(name: str) -> int:
    """The bytes of one element. Raises `KeyError` for a dtype that the installed torch does not have."""
    return _dtypes()[name].itemsize


# -- what does not travel ---------------------------------------------------------------------------------------------


def _unsupported_type(value: object) -> str:
    kind = type(value)
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__}
    if "numpy.ndarray" in names:
        return "is a numpy array: send torch.from_numpy(array)"
    if not isinstance(value, Tensor):
        return f"is not a tensor but {'None' if value is None else f'of type {kind.__qualname__}'}: only tensors travel"
    if "torch.DTensor" in names:
        return "is a DTensor: gather it first: tensor.full_tensor()"
    if "torch.FakeTensor" in names:
        return "is a FakeTensor, which holds no bytes: send the real tensor"
    if "torch.NestedTensor" in names:
        return "is a nested tensor: send tensor.values() and tensor.offsets() under names of their own"
    if "torch.UninitializedTensorMixin" in names:
        return f"is an {kind.__name__} of a lazy module: run the module once first"
    return (
        f"is of the tensor subclass {kind.__module__}.{kind.__qualname__}, whose meaning its bytes may not hold: "
        "send the plain tensors it is made of, or tensor.as_subclass(torch.Tensor) where its bytes are all"
    )


def unsupported(tensor: object) -> str | None:
    """Why this cannot travel, or be a target, as a clause that follows its name; None if it can."""
    if type(tensor) not in PLAIN_TYPES or not isinstance(tensor, Tensor):
        return _unsupported_type(tensor)
    if tensor.is_nested:
        return "is a nested tensor: send tensor.unbind() under names of their own"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return f"has the layout {layout}: send tensor.to_dense(), or its component tensors under names of their own"
    if tensor.dtype not in names_by_dtype():
        kind = "quantised, as " if tensor.is_quantized else "of the dtype "
        remedy = "tensor.dequantize(), or tensor.int_repr() and its scales" if tensor.is_quantized else "a cast of it"
        return f"is {kind}{str(tensor.dtype).removeprefix('torch.')}: send {remedy}"
    if tensor.is_meta:
        return "is on the meta device, where tensors have no bytes: materialise it first"
    if tensor.dim() > MAX_DIMENSIONS:
        return f"has {tensor.dim()} dimensions: at most {MAX_DIMENSIONS} travel"
    elements = tensor.numel()
    if max(elements, prod(size or 1 for size in tensor.shape)) * tensor.itemsize > MAX_BYTES:
        return f"has the shape {tuple(tensor.shape)}, more bytes than a 64-bit integer counts"
    if elements == 0:
        return None
    try:
        address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        end = storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):
        address = end = 0
    if address == 0:
        return "has no memory of its own (lazy, functional or freed): materialise it, by tensor.clone() perhaps"
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if address + extent * tensor.itemsize > end:
        return "reaches beyond its storage, which was resized: restore the storage first"
    return None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Around a look at very many tensors: it allocates tens of thousands of small objects and drops them again.

    Python's collector would run dozens of times meanwhile, a full pass of some 100 ms among them now and then.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
