"""What travels through a mailbox, and what it comes back as: bodies, marks, paths; no link and no process is here."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from datetime import UTC, datetime
from typing import Any, Optional

import attrs
import msgspec
import numpy as np
import pytest
import torch

import transportkit as tk
from transportkit.mailbox.decoding import Decoder
from transportkit.mailbox.encoding import MAX_TENSORS, Encoder
from transportkit.mailbox.marks import FROZENSET, INLINE, REF, SET, TUPLE, Inline, Kind, Ref
from transportkit.memory import typed_view
from transportkit.testing.samples import print_of, prints, samples
from transportkit.wire import Piece, TensorSpec


class Held:
    """The tensors of a message, as a slot would hold them."""

    def __init__(self, encoded: Any) -> None:
        self.memory = torch.empty(sum(-(-size // 64) * 64 for size in encoded.sizes), dtype=torch.uint8)
        self.offsets, at = [], 0
        pieces = []
        for index, size in enumerate(encoded.sizes):
            pieces.append(Piece(index, 0, size, at))
            self.offsets.append(at)
            at += -(-size // 64) * 64
        if pieces:
            encoded.packer(host=True).pack(pieces, self.memory)

    def tensor(self, ref: Ref, device: torch.device) -> torch.Tensor:
        if ref.index >= len(self.offsets):
            raise tk.ProtocolError("no such tensor")
        return typed_view(self.memory, self.offsets[ref.index], TensorSpec("t", ref.dtype, ref.shape))


def there_and_back(message: object, kind: Any = Any, inline: int = 0) -> Any:
    encoder = Encoder(inline, 1 << 20)
    decoder = Decoder(kind, "cpu")
    encoded = encoder.encode(message, marked=not decoder.typed)
    return decoder.decode(encoded.body, Held(encoded))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and print_of(one) == print_of(other)
    if isinstance(one, np.ndarray):
        return (
            type(other) is np.ndarray
            and one.dtype == other.dtype
            and one.shape == other.shape
            and (one.tobytes() == other.tobytes())
        )
    return type(one) is type(other) and one == other


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


@attrs.define
class Point:
    at: torch.Tensor
    name: str = "p"


@dataclasses.dataclass
class Frame:
    points: list[Point]
    mask: np.ndarray | None = None


class Request(msgspec.Struct):
    id: str
    pixels: torch.Tensor
    extra: Optional[torch.Tensor] = None  # noqa: UP045 - users write it so
    frames: dict[str, Frame] = {}
    size: tuple[int, int] = (0, 0)


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["out of band", "inline"])
def test_every_dtype_and_layout_travels_bit_by_bit(inline: int) -> None:
    tensors = samples()
    assert prints(there_and_back(tensors, inline=inline)) == prints(tensors)


def test_the_same_layout_comes_back_owned_and_writable() -> None:
    source = torch.arange(6.0).view(2, 3).t()
    came = there_and_back({"t": source}, inline=1 << 20)["t"]
    came.add_(1)
    came.resize_(10)
    assert torch.equal(source, torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["out of band", "inline"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6.0)[::-2],
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.array(3.5, dtype=np.float32),
        np.zeros((0, 3), dtype=bool),
        np.arange(4, dtype=np.complex64),
        np.arange(3, dtype=">u2"),
        np.array([float("nan"), -0.0]),
    ],
    ids=str,
)
def test_numpy_arrays_travel(array: np.ndarray[Any, Any], inline: int) -> None:
    came = there_and_back([array], inline=inline)[0]
    wanted = np.ascontiguousarray(array).reshape(array.shape).astype(array.dtype.newbyteorder("="))
    assert same(wanted, came)
    assert came.flags.writeable


def test_a_read_only_array_travels_without_a_warning() -> None:
    array = np.arange(3000)
    array.flags.writeable = False
    assert same(array, there_and_back(array))


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j)], ids=repr)
def test_numpy_scalars_travel(scalar: np.generic) -> None:
    assert same(there_and_back([scalar])[0], scalar)


def test_a_tree_comes_back_as_it_was() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    tree = {
        "none": None,
        "deep": [1, (2, (3.5, "x")), {"k": {4, 5}, "f": frozenset({6})}],
        3: b"bytes",
        "empty": [(), [], {}, set()],
        "when": moment,
        "big": [(1 << 64) - 1, -(1 << 63)],
    }
    came = there_and_back(tree)
    assert came == tree
    assert type(came["deep"][1]) is tuple
    assert type(came["deep"][1][1]) is tuple
    assert type(came["deep"][2]["f"]) is frozenset


def test_a_tensor_in_a_tuple_in_a_set_of_trees() -> None:
    came = there_and_back((torch.ones(2), {"x": (torch.zeros(1),)}))
    assert same(came[0], torch.ones(2))
    assert same(came[1]["x"][0], torch.zeros(1))


def test_types_are_rebuilt() -> None:
    request = Request(
        "1", torch.ones(3), None, {"a": Frame([Point(torch.zeros(2)), Point(torch.ones(0), "q")], np.arange(3))}, (4, 5)
    )
    for inline in (0, 1 << 20):
        came = there_and_back(request, Request, inline)
        assert isinstance(came, Request)
        assert came.size == (4, 5)
        assert came.extra is None
        frame = came.frames["a"]
        assert isinstance(frame, Frame)
        assert [type(p) for p in frame.points] == [Point, Point]
        assert same(frame.mask, np.arange(3))
        assert same(came.pixels, torch.ones(3))
    assert same(there_and_back([1, torch.ones(1)], list[Any])[1], torch.ones(1))
    assert same(there_and_back({"a": None, "b": torch.ones(1)}, dict[str, torch.Tensor | None])["b"], torch.ones(1))


def test_a_tagged_union_is_rebuilt() -> None:
    class Text(msgspec.Struct, tag=True):
        text: str

    class Image(msgspec.Struct, tag=True):
        pixels: torch.Tensor

    came = there_and_back([Text("x"), Image(torch.ones(1))], list[Text | Image])
    assert came[0] == Text("x")
    assert same(came[1].pixels, torch.ones(1))


def test_a_parameter_comes_back_as_a_tensor() -> None:
    came = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(came) is torch.Tensor
    assert not came.requires_grad


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"pixels": "text", "id": "1"}, "$.pixels"),
        ({"id": 3, "pixels": torch.ones(1)}, "$.id"),
        ({"id": "1", "pixels": np.ones(1)}, "$.pixels"),
        ({"id": "1", "pixels": torch.ones(1), "frames": {"a": {"points": [{"at": 3}]}}}, "$.frames[...].points[0].at"),
        ({"id": "1"}, "$"),
        (3, "$"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_of_the_type_names_the_field(message: Any, path: str) -> None:
    with pytest.raises(tk.MessageError) as caught:
        there_and_back(message, Request)
    assert caught.value.path == path


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("message", "kind", "path"),
    [
        ({"a": [1, lambda: 1]}, tk.MessageError, "$.a[1]"),
        (Request("1", torch.ones(2), frames={"x": Frame([Point(object)])}), tk.MessageError, "$.frames.x.points[0].at"),
        ({"a b": object()}, tk.MessageError, "$['a b']"),
        ([1 << 64], tk.MessageError, "$[0]"),
        (["\ud800"], tk.MessageError, "$[0]"),
        ([torch.float32], tk.MessageError, "$[0]"),
        ({(1, 2): print}, tk.MessageError, "$['(1, 2)']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_travel_is_named(message: Any, kind: type[tk.MessageError], path: str) -> None:
    for marked in (False, True):
        with pytest.raises(kind) as caught:
            Encoder(4096, 1 << 16).encode(message, marked=marked)
        assert caught.value.path == path
        assert path in str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        quantised(),
        np.array(["text"]),
        np.array([None]),
        np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        np.array([1], dtype="datetime64[s]"),
        np.ma.array([1, 2]),
    ],
    ids=["meta", "sparse", "quantised", "text", "object", "record", "time", "masked"],
)
def test_tensors_that_do_not_travel_are_named(tensor: Any) -> None:
    for all_inline in (False, True):
        with pytest.raises(tk.UnsupportedTensorError, match=r"^\$\.images\[1\] ") as caught:
            Encoder(4096, 1 << 16).encode({"images": [torch.ones(1), tensor]}, all_inline=all_inline)
        assert caught.value.tensor == "$.images[1]"


@pytest.mark.parametrize("marked", [False, True])
def test_what_contains_itself_is_refused(marked: bool) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(tk.MessageError, match="contains itself"):
        Encoder(4096, 1 << 16).encode(loop, marked=marked)


def test_after_a_refusal_the_next_message_is_right() -> None:
    encoder = Encoder(0, 0)
    with pytest.raises(tk.MessageError):
        encoder.encode([torch.ones(5), object()])
    assert encoder.encode([torch.ones(3)]).sizes == (12,)


def test_small_tensors_stay_in_the_body_up_to_a_sum() -> None:
    encoder = Encoder(100, 250)
    encoded = encoder.encode([torch.zeros(size, dtype=torch.uint8) for size in (100, 101, 100, 100, 50)])
    assert encoded.sizes == (101, 100)
    assert (encoded.inline, encoded.fallbacks) == (250, 0)
    encoded = encoder.encode([torch.zeros(size, dtype=torch.uint8) for size in (100, 101)], all_inline=True)
    assert (encoded.sizes, encoded.inline, encoded.fallbacks) == ((), 201, 1)


def test_too_many_tensors_are_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(tk.MessageError, match="at most 65536"):
        Encoder(0, 0).encode([one] * (MAX_TENSORS + 1))


@attrs.define
class Private:
    _hidden: int


@dataclasses.dataclass
class Computed:
    value: int
    twice: int = dataclasses.field(init=False, default=0)


@pytest.mark.parametrize(
    "kind", [Private, list[Private], dict[str, Computed], torch.Tensor | int, torch.Tensor | np.ndarray], ids=str
)
def test_types_that_would_lose_something_are_refused(kind: Any) -> None:
    with pytest.raises(tk.UsageError, match="no message can be decoded as"):
        Decoder(kind, "cpu")


def test_an_extension_of_the_users_own_passes_through() -> None:
    mine = msgspec.msgpack.Ext(7, b"mine")
    assert there_and_back({"x": mine}) == {"x": mine}


def plain(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def ext(code: int, value: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, plain(value))


def nested(levels: int) -> bytes:
    body = plain([])
    for _ in range(levels):
        body = plain(msgspec.msgpack.Ext(TUPLE, b"\x91" + body))
    return body


HOSTILE = {
    "no messagepack": b"\xc1",
    "cut short": b"\x92\x01",
    "followed by more": b"\x01\x02",
    "array of 2**32-1": b"\xdd\xff\xff\xff\xff",
    "string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "deep lists": b"\x91" * 100_000,
    "deep marks": nested(2000),
    "inline of no dtype": plain(ext(INLINE, Inline(b"1234", "float3", (1,), Kind.TENSOR))),
    "inline too short": plain(ext(INLINE, Inline(b"123", "float32", (1,), Kind.TENSOR))),
    "inline too long": plain(ext(INLINE, Inline(b"12345", "float32", (1,), Kind.TENSOR))),
    "inline of 2**62 bytes": plain(ext(INLINE, Inline(b"", "float32", (1 << 60,), Kind.TENSOR))),
    "inline beyond 64 bits": plain(ext(INLINE, Inline(b"", "float32", (1 << 40, 1 << 40), Kind.TENSOR))),
    "inline of 65 dimensions": plain(ext(INLINE, [b"", "uint8", [0] * 65, 0])),
    "inline of a negative size": plain(ext(INLINE, [b"", "uint8", [-1], 0])),
    "inline of another kind": plain(ext(INLINE, [b"", "uint8", [0], 9])),
    "inline array of bfloat16": plain(ext(INLINE, Inline(b"12", "bfloat16", (1,), Kind.ARRAY))),
    "inline is no struct": plain(ext(INLINE, 3)),
    "ref is no struct": plain(ext(REF, {"index": 0})),
    "ref of no dtype": plain(ext(REF, Ref(0, "x" * 1000, (1,), Kind.TENSOR))),
    "tuple of no items": plain(ext(TUPLE, 3)),
    "set of what has no hash": plain(ext(SET, [[1]])),
    "frozenset of nothing": plain(msgspec.msgpack.Ext(FROZENSET, b"")),
    "a map with such a key": b"\x81" + plain(ext(SET, [1])) + b"\x01",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("kind", [Any, Request], ids=["any", "typed"])
def test_hostile_bodies_are_refused(what: str, kind: Any) -> None:
    encoded = Encoder(0, 0).encode(None)
    with pytest.raises((tk.ProtocolError, tk.MessageError, tk.TensorError)):
        Decoder(kind, "cpu").decode(HOSTILE[what], Held(encoded))
