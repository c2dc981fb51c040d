"""From a message to what travels: a body in MessagePack, and the tensors that go out of band; nothing is sent here."""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from transportkit.errors import MessageError, UnsupportedTensorError
from transportkit.kinds import MAX_DIMENSIONS, PLAIN_TYPES, names_by_dtype, unsupported
from transportkit.lifecycle import host_slots
from transportkit.mailbox.marks import FROZENSET, INLINE, REF, SET, TUPLE, Inline, Kind, Ref
from transportkit.mailbox.paths import path_of, unwritable
from transportkit.memory import plain_address
from transportkit.packing import Packer, pack_piece
from transportkit.wire import Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import ndarray

#: Most tensors of one message that travel out of band; bounds a letter.
MAX_TENSORS = 1 << 16

#: Longest body of one message, in bytes.
BODY_LIMIT = 1 << 30


@attrs.define(eq=False)  # frozen, it would take twice as long to make
class Encoded:
    """A message as it travels.

    Attributes:
        body: MessagePack.
        sizes: of each tensor that travels out of band, its bytes.
        inline: bytes of the tensors that are in the body.
        fallbacks: how many of those would have travelled out of band.
    """

    body: bytes
    sizes: tuple[int, ...]
    inline: int
    fallbacks: int
    _tensors: list[Any]
    _addresses: list[int]

    def packer(self, *, host: bool) -> Packer:
        """What packs its tensors into slots.

        Args:
            host: whether the slots are host memory.
        """
        if host:
            return Packer(self._tensors, self._addresses)
        return Packer([each if isinstance(each, Tensor) else torch.from_numpy(each) for each in self._tensors])


class _UnfitError(Exception):
    """This value, somewhere in the message, cannot travel."""

    def __init__(self, value: object, error: type[MessageError | UnsupportedTensorError], reason: str) -> None:
        super().__init__(reason)
        self.value, self.error, self.reason = value, error, reason


class _Marked:
    """A tuple or set on its way to an inbox that has no type to tell it from a list; no attrs class, which would be
    encoded as it is.
    """

    __slots__ = ("code", "items")

    def __init__(self, code: int, items: list[Any]) -> None:
        self.code, self.items = code, items


class Encoder:
    """Encodes one message after another.

    Args:
        inline: tensors of at most so many bytes travel in the body ...
        together: ... as long as those of one message have at most so many bytes together.
    """

    def __init__(self, inline: int, together: int) -> None:
        self.inline = inline
        self.together = together
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._names = names_by_dtype()
        self._plain = msgspec.msgpack.Encoder()
        self._inner: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=self._hook).encode
        self._begin(all_inline=False)

    def _begin(self, *, all_inline: bool) -> None:
        self._tensors: list[Any] = []
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._inline_bytes = self._small_bytes = self._fallbacks = 0
        self._all_inline = all_inline

    def encode(self, message: object, *, marked: bool = False, all_inline: bool = False) -> Encoded:
        """Encode one message. Nothing of it may change until its tensors are packed.

        Args:
            message: a tree of builtins, msgspec Structs, dataclasses, attrs classes, tensors and numpy arrays.
            marked: whether tuples and sets are told from lists, for an inbox without a type.
            all_inline: whether every tensor travels in the body.

        Raises:
            UnsupportedTensorError: a tensor or array does not travel; the text says where it is and what to do.
            MessageError: something else does not, or the body is too long.
        """
        self._begin(all_inline=all_inline)
        try:
            tree = _mark(message) if marked else message
            body = self._encoder.encode(tree)
        except _UnfitError as unfit:
            path = path_of(message, functools.partial(operator.is_, unfit.value))
            attributes = {"tensor": path} if unfit.error is UnsupportedTensorError else {"path": path}
            raise unfit.error(f"{path or 'a part of the message'} {unfit.reason}", **attributes) from None
        except RecursionError as error:
            raise MessageError("the message is nested too deeply, or contains itself") from error
        except (msgspec.MsgspecError, OverflowError, TypeError, ValueError, AttributeError) as error:
            path = path_of(message, unwritable)
            raise MessageError(f"{path or 'the message'} cannot be encoded: {error}", path=path) from error
        if len(body) > BODY_LIMIT:
            raise MessageError(
                f"the message has a body of {len(body)} bytes, where {BODY_LIMIT} may be: send what is large in it as "
                "tensors, or several messages"
            )
        tensors, addresses = self._tensors, self._addresses
        self._tensors, self._addresses = [], []  # they are the caller's, and not to be kept
        return Encoded(body, tuple(self._sizes), self._inline_bytes, self._fallbacks, tensors, addresses)

    # -- called by msgspec ------------------------------------------------------------------------------------------

    def _hook(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self._names.get(value.dtype)
            size = value.numel() * value.itemsize
            if size and name is not None and (address := _surely_plain(value, size)):
                return self._place(value, address, size, name, tuple(value.shape), Kind.TENSOR)
            reason = unsupported(value)
            if reason is not None:
                raise _UnfitError(value, UnsupportedTensorError, reason)
            kind = Kind.TENSOR if value.is_cpu else Kind.DEVICE_TENSOR
            name = self._names[value.dtype]
            return self._place(value, plain_address(value), size, name, tuple(value.shape), kind)
        if type(value) is _Marked:
            return Ext(value.code, self._inner(value.items))
        its_kind = numpy_kind(value)
        if its_kind is not None:
            return self._array(value, its_kind)
        raise _UnfitError(
            value,
            MessageError,
            f"is of type {type(value).__module__}.{type(value).__qualname__}, which does not travel: "
            "send tensors, numpy arrays, builtins, msgspec Structs, dataclasses or attrs classes",
        )

    def _array(self, value: Any, kind: Kind) -> Ext:
        import numpy as np

        array: ndarray[Any, Any] = np.asarray(value)
        if type(value) is not np.ndarray and kind is Kind.ARRAY:
            raise _UnfitError(
                value,
                UnsupportedTensorError,
                f"is a {type(value).__qualname__}, not a plain numpy array: send its parts",
            )
        name = array.dtype.name
        if array.dtype.kind not in "biufc" or name not in NUMPY_NAMES:
            raise _UnfitError(
                value, UnsupportedTensorError, f"is a numpy array of the dtype {array.dtype}: send numbers or bools"
            )
        shape = array.shape
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return self._place(array, array.ctypes.data, array.nbytes, name, shape, kind)

    def _place(self, value: Any, address: int, size: int, dtype: str, shape: tuple[int, ...], kind: Kind) -> Ext:
        small = size <= self.inline and self._small_bytes + size <= self.together
        if small or self._all_inline:
            self._inline_bytes += size
            if small:
                self._small_bytes += size
            else:
                self._fallbacks += 1
            try:
                data = ctypes.string_at(address, size) if address and size else _bytes_of(value, size)
            except RuntimeError as error:
                reason = f"cannot be copied by torch as it lies ({error}): send tensor.contiguous()"
                raise _UnfitError(value, UnsupportedTensorError, reason) from error
            return Ext(INLINE, self._plain.encode(Inline(data, dtype, shape, kind)))
        index = len(self._sizes)
        if index >= MAX_TENSORS:
            raise _UnfitError(value, MessageError, f"is tensor {index + 1} of the message: send at most {MAX_TENSORS}")
        self._tensors.append(value)
        self._addresses.append(address)
        self._sizes.append(size)
        return Ext(REF, self._plain.encode(Ref(index, dtype, shape, kind)))


#: The numpy dtypes that travel; torch names them alike.
NUMPY_NAMES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)


def numpy_kind(value: object) -> Kind | None:
    """Whether it is a numpy array or scalar; found without numpy, which may not be installed."""
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(value).__mro__}
    if "numpy.ndarray" in names:
        return Kind.ARRAY
    return Kind.SCALAR if "numpy.generic" in names else None


def is_numeric(value: object) -> bool:
    """Whether it is a tensor, a numpy array or a numpy scalar."""
    return isinstance(value, Tensor) or numpy_kind(value) is not None


def _surely_plain(tensor: Tensor, size: int) -> int:
    """Its `plain_address` if `unsupported` has nothing against it beyond doubt, else 0; a third of the cost of both."""
    if (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.dim() <= MAX_DIMENSIONS
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.storage_offset() * tensor.itemsize + size <= tensor.untyped_storage().nbytes()
    ):
        return tensor.data_ptr()
    return 0


def _bytes_of(tensor: Tensor, size: int) -> bytes:
    """The bytes of a tensor that is strided, conjugate or on a device."""
    if not size:
        return b""
    slot = host_slots(1, size)[0]
    pack_piece(tensor, Piece(0, 0, size, 0), slot)
    return ctypes.string_at(slot.data_ptr(), size)


def _has_set(key: object) -> bool:
    """Whether a key of a dict is a frozenset, or a tuple with one in it."""
    return isinstance(key, frozenset) or (isinstance(key, tuple) and any(map(_has_set, key)))


def _mark(value: Any) -> Any:
    """The tree with its tuples and sets marked; what holds none stays as it is."""
    kind = type(value)
    if kind is str or kind is int or kind is Tensor:
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str and _has_set(key):
                raise _UnfitError(
                    key,
                    MessageError,
                    f"{key!r} is a key and is, or holds, a frozenset, for which MessagePack has only tuples: send "
                    "pairs, or give the inbox a `type=`",
                )
        return {key: _mark(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    if isinstance(value, tuple):
        return _Marked(TUPLE, [_mark(item) for item in value])
    if isinstance(value, (frozenset, set)):  # a union would be made anew for each value
        return _Marked(FROZENSET if isinstance(value, frozenset) else SET, [_mark(item) for item in value])
    return value
