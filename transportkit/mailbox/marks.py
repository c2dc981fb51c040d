"""The extension values of a message's body: tensors, arrays and what MessagePack has no type for; no message is here.

A tensor in a body is either a `Ref` to one that travels out of band, or an `Inline` one. Both say all that is needed
to rebuild it. A tuple or set is its items, marked.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

#: The codes of our extension values. Others are the user's own: they travel as `msgspec.msgpack.Ext`.
REF, INLINE, TUPLE, SET, FROZENSET = 110, 111, 112, 113, 114

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Kind(enum.IntEnum):
    """What the bytes are rebuilt as."""

    TENSOR = 0
    """A tensor that was in host memory."""
    DEVICE_TENSOR = 1
    """A tensor that was on a device; it comes to the inbox's."""
    ARRAY = 2
    """A numpy array."""
    SCALAR = 3
    """A numpy scalar."""


class Ref(Struct, frozen=True, array_like=True):
    """A tensor that travels out of band: the ``index``-th of its message."""

    index: Size
    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    kind: Kind


class Inline(Struct, frozen=True, array_like=True):
    """A tensor whose bytes are here."""

    data: bytes
    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    kind: Kind
