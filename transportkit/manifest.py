"""What an update consists of: specs, the manifest of a module or mapping, the check of a peer's. No bytes move here.

Which tensors travel at all is said in `transportkit.kinds`, whose names are also names of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import torch
import xxhash
from torch import Tensor

from transportkit.errors import (
    DuplicateNameError,
    ProtocolError,
    TensorError,
    TransportKitError,
    UnsupportedTensorError,
)
from transportkit.kinds import (
    MAX_BYTES,
    MAX_DIMENSIONS,
    PLAIN_TYPES,
    dtype_name,
    dtype_names,
    dtype_of,
    itemsize,
    names_by_dtype,
    uncollected,
    unsupported,
)
from transportkit.wire import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

__all__ = [
    "Layout",
    "Manifest",
    "check_specs",
    "dtype_name",
    "dtype_names",
    "dtype_of",
    "itemsize",
    "manifest_id",
    "module_tensors",
    "nbytes",
    "spec_of",
    "static_manifest",
    "unsupported",
    "wire_nbytes",
]


def nbytes(spec: TensorSpec) -> int:
    """The size of a tensor in bytes. Raises `KeyError` for an unknown dtype."""
    return prod(spec.shape) * itemsize(spec.dtype)


def wire_nbytes(spec: TensorSpec) -> int | None:
    """The bytes a tensor takes in chunks; None for one that is the same as an earlier one: it has no piece."""
    return None if spec.same_as is not None else nbytes(spec)


def checked_name(name: object) -> str:
    """The name of a tensor. Raises `TensorError` where it is no text that can travel."""
    if not isinstance(name, str):
        raise TensorError(f"the name {name!r} is not a string but of type {type(name).__qualname__}", tensor=repr(name))
    if not name:
        raise TensorError("a tensor has the empty name; give it one", tensor="")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TensorError(f"the name {name!a} is not valid unicode: {error.reason}", tensor=ascii(name)) from None
    return name if type(name) is str else str.__str__(name)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of one tensor.

    Raises:
        UnsupportedTensorError: it cannot travel; the text names it, says what it is and what to do instead.
        TensorError: its name is not a non-empty string of valid unicode.
    """
    name = checked_name(name)
    reason = unsupported(tensor)
    if reason is not None:
        raise UnsupportedTensorError(f"{name!r} {reason}", tensor=name)
    return TensorSpec(name, names_by_dtype()[tensor.dtype], tuple(tensor.shape))


# -- the manifest of a module or mapping ------------------------------------------------------------------------------


def module_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module's `state_dict` holds: parameters, persistent buffers, tensor extra state, every name of a tied one.

    Raises:
        UnsupportedTensorError: an entry is no tensor, such as the extra state of a module; named.
    """
    pairs: list[tuple[str, Any]] = list(module.state_dict(keep_vars=True).items())
    for name, value in pairs:
        if not isinstance(value, Tensor):
            raise UnsupportedTensorError(
                f"{name!r} in the module's state_dict is not a tensor but of type {type(value).__qualname__}: "
                "send a mapping of the tensors alone",
                tensor=str(name),
            )
    return pairs


@attrs.frozen(eq=False)
class Layout:
    """Where the tensors of a static source were and how they were laid out; holds no tensor.

    Attributes:
        specs: the manifest.
        sizes: each tensor's bytes on the wire; None for one that is the same as an earlier one.
        addresses: the address of each tensor that is contiguous host memory as it stands, else 0.
        names: of the specs.
        prints: by what a change is noticed.
    """

    specs: tuple[TensorSpec, ...]
    sizes: tuple[int | None, ...]
    addresses: list[int]
    names: tuple[str, ...]
    prints: _Prints


@attrs.frozen(eq=False)
class Manifest:
    """A static source, ready to be sent.

    Attributes:
        tensors: one per spec, those that are the same as earlier ones included.
        layout: what to pass as ``previous`` next time; it keeps no tensor alive.
    """

    tensors: tuple[Tensor, ...]
    layout: Layout
    storages: list[torch.UntypedStorage] = attrs.field(factory=list, repr=False)
    """Keep the memory at `Layout.addresses` alive, should a tensor be given another one meanwhile."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The ordered specs."""
        return self.layout.specs


_SHAPE, _DTYPE, _IS_CPU = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_LAYOUT = attrgetter("layout")


@attrs.frozen
class _Prints:
    """All that decides about specs, aliases and addresses, in parallel lists; compared as a whole."""

    addresses: list[int]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    contiguous: list[bool]
    negative: list[bool]
    conjugate: list[bool]
    strides: list[tuple[int, ...] | None]
    devices: list[torch.device]
    held: list[int]
    """Bytes of each tensor's storage."""

    @classmethod
    def take(cls, tensors: tuple[Tensor, ...], storages: list[torch.UntypedStorage]) -> _Prints | None:
        """The prints; None where one is no plain tensor or has no memory. Column by column is the fastest way.

        Args:
            storages: filled with those of the tensors.
        """
        if not PLAIN_TYPES.issuperset(map(type, tensors)):
            return None
        try:
            storages += map(Tensor.untyped_storage, tensors)
            held = list(map(torch.UntypedStorage.nbytes, storages))
            addresses = list(map(Tensor.data_ptr, tensors))
            shapes = list(map(_SHAPE, tensors))
        except (RuntimeError, NotImplementedError):
            return None
        dtypes = list(map(_DTYPE, tensors))
        contiguous = list(map(Tensor.is_contiguous, tensors))
        return cls(
            addresses,
            shapes,
            dtypes,
            contiguous,
            list(map(Tensor.is_neg, tensors)),
            list(map(Tensor.is_conj, tensors)) if any(dtype.is_complex for dtype in set(dtypes)) else [],
            [] if all(contiguous) else [None if c else t.stride() for t, c in zip(tensors, contiguous, strict=True)],
            [] if all(map(_IS_CPU, tensors)) else [tensor.device for tensor in tensors],
            held,
        )

    def plain(self) -> list[int]:
        """The address of each tensor that is contiguous host memory and needs no conversion, else 0."""
        rows = zip(self.addresses, self.contiguous, self.negative, strict=True)
        plain = [address if whole and not negative else 0 for address, whole, negative in rows]
        for index, conjugate in enumerate(self.conjugate):
            plain[index] = 0 if conjugate else plain[index]
        for index, device in enumerate(self.devices):
            plain[index] = plain[index] if device.type == "cpu" else 0
        return plain


@uncollected()
def static_manifest(
    pairs: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor], previous: Layout | Manifest | None = None
) -> Manifest:
    """The manifest of a source whose tensors all exist at once, as a module's or a mapping's do.

    A tensor that is the same memory as an earlier one, read in the same way, becomes ``TensorSpec(..., same_as=...)``.

    Args:
        pairs: (name, tensor), or a mapping.
        previous: the layout of the last update (or its manifest, which keeps the tensors alive); where nothing has
            changed it is taken over, for a third of the cost.

    Returns:
        The manifest. Its layout is ``previous`` itself where nothing at all changed, and its specs are
        ``previous.specs`` itself where the manifest did not.

    Raises:
        UnsupportedTensorError, TensorError: as `spec_of`; nothing has been sent.
        DuplicateNameError: a name comes twice.
    """
    if isinstance(previous, Manifest):
        previous = previous.layout
    if isinstance(pairs, Mapping):
        names, tensors = tuple(pairs), tuple(pairs.values())
    else:
        pairs = list(pairs)
        names, tensors = tuple(name for name, _ in pairs), tuple(tensor for _, tensor in pairs)
    storages: list[torch.UntypedStorage] = []
    prints = _Prints.take(tensors, storages)
    if previous is not None and names == previous.names and prints == previous.prints:
        return Manifest(tensors, previous, storages)
    sizes: list[int] = []
    if prints is not None:
        itemsizes = {dtype: dtype.itemsize for dtype in set(prints.dtypes)}
        sizes = [
            numel * itemsizes[dtype] for numel, dtype in zip(map(Tensor.numel, tensors), prints.dtypes, strict=True)
        ]
    if prints is None or not _sound(names, tensors, prints, sizes):
        _find_fault(names, tensors)
        raise TensorError("the tensors changed while they were looked at: let no other thread touch them meanwhile")
    firsts = _firsts(names, prints, sizes)
    dtypes = names_by_dtype()
    specs = tuple(
        TensorSpec(name, dtypes[dtype], tuple(shape), first)
        for name, dtype, shape, first in zip(names, prints.dtypes, prints.shapes, firsts, strict=True)
    )
    if previous is not None and specs == previous.specs:
        specs = previous.specs
    wire = tuple(size if first is None else None for size, first in zip(sizes, firsts, strict=True))
    layout = Layout(specs, wire, prints.plain(), names, prints)
    return Manifest(tensors, layout, storages)


def _sound(names: tuple[str, ...], tensors: tuple[Tensor, ...], prints: _Prints, sizes: list[int]) -> bool:
    """Whether `spec_of` would refuse none of them, and no name comes twice; a fifth of its cost."""
    try:
        "".join(names).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    unique = set(names)
    if len(unique) < len(names) or "" in unique or not {str}.issuperset(map(type, names)):
        return False
    if not {torch.strided}.issuperset(map(_LAYOUT, tensors)) or not names_by_dtype().keys() >= set(prints.dtypes):
        return False
    if any(device.type == "meta" for device in prints.devices):
        return False
    if max(map(len, prints.shapes), default=0) > MAX_DIMENSIONS or sum(sizes) > MAX_BYTES:
        return False
    offsets = map(Tensor.storage_offset, tensors)
    rows = zip(prints.addresses, sizes, prints.contiguous, prints.held, offsets, prints.dtypes, strict=True)
    for index, (address, size, whole, held, offset, dtype) in enumerate(rows):
        suspect = address == 0 or not whole or size + (offset and offset * dtype.itemsize) > held
        if suspect and unsupported(tensors[index]) is not None:
            return False
    return True


def _find_fault(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> None:
    """Raise for the first name or tensor that is refused."""
    seen = set()
    total = 0
    for name, tensor in zip(names, tensors, strict=True):
        spec = spec_of(name, tensor)
        if name in seen:
            raise DuplicateNameError(f"{name!r} comes twice; every tensor of an update has its own name", tensor=name)
        seen.add(name)
        total += nbytes(spec)
        if total > MAX_BYTES:
            text = f"with {name!r} the update has more bytes than a 64-bit integer counts: send it in parts"
            raise UnsupportedTensorError(text, tensor=name)


def _firsts(names: tuple[str, ...], prints: _Prints, sizes: list[int]) -> list[str | None]:
    """For each tensor the earlier name that is the same memory read in the same way, or None."""
    firsts: list[str | None] = [None] * len(names)
    alone: dict[int, int] = {}
    crowded: dict[int, list[int]] = {}
    columns = (prints.shapes, prints.dtypes, prints.strides, prints.negative, prints.conjugate, prints.devices)
    for index, (address, size) in enumerate(zip(prints.addresses, sizes, strict=True)):
        if size == 0 or alone.setdefault(address, index) == index:
            continue
        others = crowded.setdefault(address, [alone[address]])
        for other in others:
            if all(not column or column[index] == column[other] for column in columns):
                firsts[index] = names[other]
                break
        else:
            others.append(index)
    return firsts


# -- manifests from the other side ------------------------------------------------------------------------------------


def manifest_id(specs: Sequence[TensorSpec]) -> str:
    """The xxh3-128 of the encoded specs, in hex: what both sides call this manifest."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(specs))


def check_specs(
    specs: Sequence[TensorSpec],
    dtypes: Iterable[str],
    error: type[TransportKitError] = ProtocolError,
    earlier: Mapping[str, TensorSpec] | None = None,
) -> None:
    """Validate specs that a peer, or a `Source`, states.

    Args:
        specs: the manifest, or the part of it that arrives now.
        dtypes: names of the dtypes that travel here.
        error: what to raise.
        earlier: specs of the same manifest that were checked before, by name.

    Raises:
        ProtocolError: a name is empty or comes twice, a size is negative or too large, ``same_as`` does not hold.
        UnsupportedTensorError: the dtype is unknown here.
    """
    sizes = {name: itemsize(name) for name in dtypes}
    earlier = earlier or {}
    seen: dict[str, TensorSpec] = {}
    total = 0
    for spec in specs:
        name = spec.name
        if not name:
            raise error("a tensor came with an empty name")
        if name in seen or name in earlier:
            raise error(f"{name!r} came twice in one manifest")
        if len(spec.shape) > MAX_DIMENSIONS:
            raise error(f"{name!r} came with {len(spec.shape)} dimensions; at most {MAX_DIMENSIONS} travel")
        if spec.shape and min(spec.shape) < 0:
            raise error(f"{name!r} came with the shape {spec.shape}; sizes are not negative")
        size = sizes.get(spec.dtype)
        if size is None:
            raise UnsupportedTensorError(
                f"{name!r} has the dtype {spec.dtype[:64]!r}, which torch {torch.__version__} here does not have: "
                "install the torch of the sending side here, or send another dtype",
                tensor=name,
            )
        if prod(extent or 1 for extent in spec.shape) * size > MAX_BYTES:
            raise error(f"{name!r} came with the shape {spec.shape}, more bytes than a 64-bit integer counts")
        if spec.same_as is None:
            total += prod(spec.shape) * size
            if total > MAX_BYTES:
                raise error(f"with {name!r} the manifest has more bytes than a 64-bit integer counts")
        else:
            first = seen.get(spec.same_as) or earlier.get(spec.same_as)
            if first is None or first.same_as is not None:
                raise error(
                    f"{name!r} is said to be the same as {spec.same_as!r}, which is no earlier tensor with bytes"
                )
            if (first.dtype, first.shape) != (spec.dtype, spec.shape):
                raise error(f"{name!r} is said to be the same as {spec.same_as!r}, which has another dtype or shape")
        seen[name] = spec
