"""From what travelled back to a message: the body's values, with their tensors rebuilt; nothing is received here."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from transportkit.errors import MessageError, ProtocolError, TransportKitError, UsageError
from transportkit.kinds import dtype_of
from transportkit.mailbox.encoding import NUMPY_NAMES
from transportkit.mailbox.marks import FROZENSET, INLINE, REF, SET, TUPLE, Inline, Kind, Ref
from transportkit.memory import allocate, memmove
from transportkit.wire import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable


M = TypeVar("M", Ref, Inline)


class Tensors(Protocol):
    """The tensors of one message that travelled out of band."""

    def tensor(self, ref: Ref, device: torch.device) -> Tensor:
        """The tensor that is meant. Raises `ProtocolError` where there is none, or it was given out already."""


class Decoder:
    """Decodes one message after another.

    Args:
        kind: what a message must be; `Any` takes all there is, and gives builtins, tensors and arrays.
        device: where tensors that were on a device come to.

    Raises:
        UsageError: nothing can be decoded as this type.
    """

    def __init__(self, kind: Any, device: str) -> None:
        self.typed = kind is not Any
        self._device = torch.device(device)
        self._host = torch.device("cpu")
        self._tensors: Tensors | None = None
        self.inline_bytes = 0
        """Bytes of the tensors that were in the body of the last message."""
        try:
            _check_type(kind)
            self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind, ext_hook=self._extension).decode
        except (TypeError, ValueError, NameError, RecursionError) as error:
            raise UsageError(f"no message can be decoded as {kind!r}: {error}") from error
        self._inner: Callable[[bytes | memoryview], Any] = msgspec.msgpack.Decoder(ext_hook=self._extension).decode

    def decode(self, body: bytes, tensors: Tensors) -> Any:
        """Decode one message.

        Raises:
            MessageError: it is not of the type.
            ProtocolError: it is no message at all, or its tensors are not those that came with it.
            TensorError: there is no memory for a tensor.
        """
        self._tensors = tensors
        self.inline_bytes = 0
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            found = re.search(r"`(\$[^`]*)`\Z", str(error))
            raise MessageError(f"it is not of the inbox's type: {error}", path=found[1] if found else "$") from error
        except TransportKitError:
            raise
        except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(f"the body is no message: {type(error).__name__}: {error}") from error
        finally:
            self._tensors = None

    # -- called by msgspec ------------------------------------------------------------------------------------------

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == REF:
            ref = _as_mark(_ref, data)
            assert self._tensors is not None
            if ref.kind == Kind.TENSOR:
                return self._tensors.tensor(ref, self._host)
            return self._as(ref.kind, self._tensors.tensor(ref, self._target(ref)))
        if code == INLINE:
            inline = _as_mark(_inline, data)
            return self._as(inline.kind, self._inline(inline))
        if code == TUPLE:
            return tuple(self._items(data))
        if code in (SET, FROZENSET):
            items = self._items(data)
            try:
                return set(items) if code == SET else frozenset(items)
            except TypeError as error:
                raise MessageError(
                    f"a set in it cannot be rebuilt without a type ({error}): give the inbox a `type=`, or send a list"
                ) from error
        return Ext(code, bytes(data))

    def _items(self, data: memoryview) -> list[Any]:
        items = self._inner(data)
        if not isinstance(items, list):
            raise ProtocolError("a marked sequence holds no items")
        return items

    def _target(self, ref: Ref | Inline) -> torch.device:
        return self._device if ref.kind == Kind.DEVICE_TENSOR else self._host

    def _inline(self, inline: Inline) -> Tensor:
        spec, size = spec_of(inline)
        if size != len(inline.data):
            raise ProtocolError(f"a {inline.dtype} tensor of shape {inline.shape} came with {len(inline.data)} bytes")
        tensor = allocate(spec, "cpu")
        self.inline_bytes += len(inline.data)
        if inline.data:
            memmove(tensor.data_ptr(), inline.data, len(inline.data))
        return tensor if inline.kind != Kind.DEVICE_TENSOR else tensor.to(self._device)

    def _as(self, kind: Kind, tensor: Tensor) -> Any:
        if kind <= Kind.DEVICE_TENSOR:
            return tensor
        try:
            import numpy  # noqa: F401
        except ImportError as error:
            raise MessageError("a numpy array came, and numpy is not installed here: install it") from error
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in NUMPY_NAMES:
            raise ProtocolError(f"a numpy array came with the dtype {name}, which numpy does not have")
        array = tensor.numpy()
        return array[()] if kind == Kind.SCALAR else array


_ref = msgspec.msgpack.Decoder(Ref)
_inline = msgspec.msgpack.Decoder(Inline)


def _as_mark(decoder: msgspec.msgpack.Decoder[M], data: memoryview) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
        raise ProtocolError(f"a tensor's description is malformed: {error}") from error


def spec_of(ref: Ref | Inline) -> tuple[TensorSpec, int]:
    """The spec of a tensor that is described by a peer, and its size in bytes.

    Raises:
        ProtocolError: there cannot be such a tensor.
        MessageError: this torch does not have its dtype.
    """
    try:
        dtype = dtype_of(ref.dtype)
    except KeyError as error:
        raise MessageError(
            f"a tensor has the dtype {ref.dtype[:64]!r}, which torch {torch.__version__} here does not have"
        ) from error
    strided = dtype.itemsize  # torch counts the strides of empty tensors, too
    for extent in ref.shape:
        strided *= extent or 1
    if strided >= 1 << 63:
        raise ProtocolError(f"a tensor came with the shape {ref.shape}, more bytes than a 64-bit integer counts")
    return TensorSpec("tensor", ref.dtype, ref.shape), 0 if 0 in ref.shape else strided


def _check_type(kind: Any) -> None:
    """Raise `TypeError` for a class whose fields msgspec would leave out without a word."""
    seen: set[int] = set()
    todo = [msgspec.inspect.type_info(kind)]
    while todo:
        info = todo.pop()
        if id(info) in seen:
            continue
        seen.add(id(info))
        if isinstance(info, msgspec.inspect.DataclassType) and isinstance(info.cls, type):
            _check_class(info.cls)
        for value in (getattr(info, name) for name in info.__struct_fields__):
            values = value if isinstance(value, tuple) else (value,)
            for part in values:
                if isinstance(part, msgspec.inspect.Field):
                    todo.append(part.type)
                elif isinstance(part, msgspec.inspect.Type):
                    todo.append(part)


def _check_class(cls: type) -> None:
    fields: list[Any] = []
    if attrs.has(cls):
        fields = list(attrs.fields(cls))
    elif dataclasses.is_dataclass(cls):
        fields = list(dataclasses.fields(cls))
    for field in fields:
        if field.name.startswith("_") or not field.init:
            why = "begins with an underscore" if field.name.startswith("_") else "is not an argument of its constructor"
            raise TypeError(f"the field {field.name!r} of {cls.__qualname__} {why}, so its value would be lost")
