"""Packing and unpacking by example: the reported cases, every dtype, every kind of target, every mode of autograd."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from transportkit import packing
from transportkit.chunk import Cursor, Cutter, plan, used
from transportkit.errors import ProtocolError, TargetError, TensorError, UsageError
from transportkit.manifest import dtype_names, dtype_of, nbytes, spec_of, static_manifest, wire_nbytes
from transportkit.packing import Packer, Writer, allocate, copy_bytes, pack_piece, typed_view
from transportkit.strided import overlaps_itself, rectangles
from transportkit.testing.samples import resolved
from transportkit.wire import Piece, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.timeout(30)

CHUNK_SIZES = (1, 7, 64, 100, 1_000, 100_000)


def slot_of(chunk_bytes: int) -> Tensor:
    """A slot full of rubbish."""
    return torch.full((chunk_bytes,), 0xA5, dtype=torch.uint8)


def raw(tensor: Tensor) -> bytes:
    """The bytes of the logical value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, once, that few operators know complex32
        value = resolved(tensor.detach())
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.itemsize)
    value = value if integer is None else value.view(integer)
    value = torch.empty(value.shape, dtype=value.dtype).copy_(value)
    return bytes(value.view(-1).view(torch.uint8).tolist())


def rubbish(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """A contiguous tensor of random bytes, NaN payloads and odd bools among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def move(
    sources: Sequence[Tensor], targets: Sequence[Sequence[Tensor]], chunk_bytes: int, *, cast: bool = False
) -> None:
    """Pack, check, unpack, chunk by chunk through one reused slot."""
    specs = [spec_of(f"t{index}", source) for index, source in enumerate(sources)]
    sizes = [wire_nbytes(spec) for spec in specs]
    packer, writer, cursor = Packer(sources), Writer(specs, targets, cast=cast), Cursor(chunk_bytes)
    slot = slot_of(chunk_bytes)
    complete: list[int] = []
    for pieces in plan(sizes, chunk_bytes):
        packer.pack(pieces, slot)
        cursor.advance(pieces, used(pieces), sizes)
        complete += writer.unpack(pieces, slot[: used(pieces)])
        slot.fill_(0x5A)
    cursor.finish(sizes)
    writer.finish()
    assert complete == list(range(len(specs)))


def round_trip(sources: Sequence[Tensor], chunk_bytes: int) -> list[Tensor]:
    targets = [allocate(spec_of("t", source)) for source in sources]
    move(sources, [[target] for target in targets], chunk_bytes)
    for source, target in zip(sources, targets, strict=True):
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        assert raw(target) == raw(source)
    return targets


# -- the reported cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_scalars_arrive_with_their_shapes(chunk_bytes: int) -> None:
    targets = round_trip(
        [torch.tensor(1.5), torch.ones(2, 2), torch.tensor(3, dtype=torch.int16), torch.tensor(True)], chunk_bytes
    )
    assert [tuple(target.shape) for target in targets] == [(), (2, 2), (), ()]
    assert targets[0].item() == 1.5
    assert targets[2].item() == 3


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_wide_dtypes_follow_odd_numbers_of_bytes(chunk_bytes: int) -> None:
    kinds = [
        (torch.float16, 3),
        (torch.float32, 2),
        (torch.uint8, 1),
        (torch.float64, 1),
        (torch.complex128, 1),
        (torch.bool, 3),
        (torch.bfloat16, 1),
    ]
    sources = [rubbish(dtype, count) for dtype, count in kinds]
    round_trip(sources, chunk_bytes)
    assert len(plan([source.nbytes for source in sources], 1_000)) == 1


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_strided_sources_arrive_as_their_values(chunk_bytes: int) -> None:
    fused = torch.arange(18 * 4, dtype=torch.float32).view(18, 4)
    round_trip(
        [
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(12.0)[::2],
            fused[6:12],
            fused[:, 1:3],
            fused.view(3, 6, 4)[1].t(),
            torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
            torch.arange(3.0).view(3, 1).expand(3, 5),
            torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            torch.arange(12.0).as_strided((3, 4), (2, 1)),
        ],
        chunk_bytes,
    )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_empty_tensors_keep_their_place(shape: tuple[int, ...], chunk_bytes: int) -> None:
    round_trip([torch.ones(5), torch.empty(shape), torch.full((5,), 2.0)], chunk_bytes)
    round_trip([torch.empty(shape)] * 3, chunk_bytes)
    round_trip([torch.empty(4, 4)[:, 1:1], torch.empty(0, 3, dtype=torch.complex64).conj()], chunk_bytes)


def test_a_tensor_larger_than_a_chunk_is_split() -> None:
    small = [rubbish(torch.bfloat16, 1000 + i, seed=i) for i in range(6)]
    round_trip([*small[:3], rubbish(torch.uint8, 3_355_443), *small[3:]], 1 << 20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_of_a_small_float_arrives(dtype: str) -> None:
    wide = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    source = wide.view(dtype_of(dtype)) if itemsize_of(dtype) == 2 else rubbish(dtype_of(dtype), 1 << 16)
    manifest = static_manifest({"w": source})
    assert sum(size or 0 for size in manifest.layout.sizes) == source.nbytes
    round_trip([source, source.view(256, -1).t()], 4096)


# -- every dtype, every layout ----------------------------------------------------------------------------------------


def itemsize_of(name: str) -> int:
    return dtype_of(name).itemsize


@pytest.mark.parametrize("name", dtype_names())
@pytest.mark.parametrize("chunk_bytes", [1, 24, 10_000])
def test_every_dtype_in_every_layout(name: str, chunk_bytes: int) -> None:
    base = rubbish(dtype_of(name), 4, 6)
    sources = [base, base.t(), base[::2, 1::2], base[0, 0], base[:, :1].expand(4, 3), base[:0]]
    round_trip(sources, chunk_bytes)
    whole = rubbish(dtype_of(name), 8, 12, seed=1)
    target = whole.clone() if itemsize_of(name) == 16 else whole.view(torch.uint8).clone().view(whole.dtype)
    before = raw(target)
    strided = target[1::2, :6:2].t()
    source = rubbish(dtype_of(name), 3, 4, seed=2)
    move([source], [[strided]], chunk_bytes)
    assert raw(strided) == raw(source)
    untouched = torch.ones(8, 12, dtype=torch.bool)
    untouched[1::2, :6:2] = False
    item = itemsize_of(name)
    after = raw(target)
    for index in untouched.flatten().nonzero().flatten().tolist():
        assert after[index * item : index * item + item] == before[index * item : index * item + item]


COMPLEX = [dtype_of(name) for name in dtype_names() if dtype_of(name).is_complex]  # with bcomplex32 from torch 2.14 on


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("chunk_bytes", [1, 24, 10_000])
def test_conjugates_and_negatives(dtype: torch.dtype, chunk_bytes: int) -> None:
    base = rubbish(dtype, 4, 6)
    round_trip([base.conj(), base.t().conj(), base.conj().imag, base.conj()[::2, 1::3], base.conj()[1, 1]], chunk_bytes)
    source = rubbish(dtype, 6, 4, seed=3)
    if dtype.itemsize == 4:
        # Negating through float32 quiets a signalling NaN, in torch as here: compare what has none.
        source = torch.view_as_complex(torch.arange(-24.0, 24.0).view(6, 4, 2)).to(dtype)
    for lazy in (rubbish(dtype, 6, 4).conj(), rubbish(dtype, 4, 6).t().conj()):
        move([source], [[lazy]], chunk_bytes)
        assert raw(lazy) == raw(source)
    part = source.real.contiguous()
    lazy = rubbish(dtype, 6, 4).conj().imag
    assert lazy.is_neg()
    move([part], [[lazy]], chunk_bytes)
    assert raw(lazy) == raw(part)


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_tied_targets_are_all_written_and_each_memory_once(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rubbish(torch.float32, 5, 7)
    one, two, three = torch.zeros(5, 7), torch.zeros(7, 5).t(), torch.zeros(5, 7)
    move([source], [[one, one.view(5, 7), nn.Parameter(one), two, three]], chunk_bytes)
    assert raw(one) == raw(two) == raw(three) == raw(source)
    calls = []
    from transportkit import unpacking

    monkeypatch.setattr(unpacking, "memmove", lambda *arguments: calls.append(arguments))
    move([source], [[one, one.view(5, 7), nn.Parameter(one)]], 1_000)
    assert len(calls) == 1


def test_the_target_of_a_second_name_is_written_with_the_first() -> None:
    source = rubbish(torch.float32, 5)
    one, two = torch.zeros(5), torch.zeros(10)[::2]
    specs = [
        TensorSpec("a", "float32", (5,)),
        TensorSpec("b", "float32", (5,), "a"),
        TensorSpec("c", "float32", (5,), "a"),
    ]
    writer = Writer(specs, [[one], [one], [two]])
    assert writer.unpack([Piece(0, 0, 20, 0)], source.view(torch.uint8)) == [0]
    assert raw(one) == raw(two) == raw(source)
    with pytest.raises(TargetError, match="'b' has the shape"):
        Writer(specs[:2], [[one], [torch.zeros(4)]])
    with pytest.raises(TargetError, match="'b' has the dtype int32"):
        Writer(specs[:2], [[], [torch.zeros(5, dtype=torch.int32)]])


def test_a_spec_without_a_target_is_passed_over() -> None:
    target = torch.zeros(3)
    move([torch.ones(4), torch.ones(3), torch.ones(4).t()], [[], [target], []], 7)
    assert target.tolist() == [1, 1, 1]


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.arange(15.0).view(3, 5), torch.zeros(3, 5, dtype=torch.bfloat16)),
        (torch.arange(15.0).view(5, 3).t(), torch.zeros(5, 3, dtype=torch.float64).t()),
        (torch.arange(15).view(3, 5), torch.zeros(3, 10, dtype=torch.float16)[:, ::2]),
        (torch.tensor([True, False]), torch.zeros(2)),
        (torch.arange(15.0).view(3, 5), torch.zeros(3, 5, dtype=torch.complex64).conj()),
        (torch.arange(5.0).to(torch.complex64), torch.zeros(5, dtype=torch.complex128).conj()),
        (torch.tensor(3), torch.tensor(0.0)),
    ],
)
def test_a_cast_is_asked_for(source: Tensor, target: Tensor, chunk_bytes: int) -> None:
    with pytest.raises(TargetError, match="cast=True"):
        move([source], [[target]], chunk_bytes)
    move([source], [[target]], chunk_bytes, cast=True)
    assert raw(target) == raw(source.to(target.dtype))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: torch.zeros(3, 2), r"has the shape \(3, 2\), but \(2, 3\) is sent"),
    "rank": (lambda: torch.zeros(6), "has the shape"),
    "expanded": (lambda: torch.zeros(1, 3).expand(2, 3), "same memory"),
    "overlapping": (lambda: torch.zeros(4).as_strided((2, 3), (1, 1)), "same memory"),
    "meta": (lambda: torch.zeros(2, 3, device="meta"), "meta device"),
    "sparse": (lambda: torch.zeros(2, 3).to_sparse(), "sparse_coo"),
    "lazy": (nn.UninitializedParameter, "lazy module"),
    "no tensor": (lambda: [1.0], "not a tensor"),
    "complex to real": (lambda: torch.zeros(2, 3, dtype=torch.int8), "does not convert"),
    "to bits": (lambda: torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 3), "does not convert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_does_not_suit_is_refused_before_anything_is_written(case: str) -> None:
    make, text = REFUSED[case]
    dtype = "complex64" if case == "complex to real" else "float32"
    good = torch.zeros(2)
    with pytest.raises(TargetError, match=text) as caught:
        Writer([TensorSpec("a", "float32", (2,)), TensorSpec("w", dtype, (2, 3))], [[good], [make()]], cast=True)
    assert caught.value.tensor == "w"
    assert "'w'" in str(caught.value)


def test_interleaved_targets_that_do_not_overlap_are_written() -> None:
    target = torch.zeros(12).as_strided((2, 3), (3, 2))
    source = rubbish(torch.float32, 2, 3)
    move([source], [[target]], 5)
    assert raw(target) == raw(source)
    assert overlaps_itself(torch.zeros(13).as_strided((3, 3), (4, 2)))


def test_a_writer_goes_on_with_targets_that_are_where_the_last_ones_were() -> None:
    module = nn.Linear(3, 4)
    targets: list[list[Tensor]] = [[module.weight], [module.bias]]
    specs = [spec_of(str(index), target) for index, (target,) in enumerate(targets)]

    def rested() -> Writer:
        writer = Writer(specs, targets)
        writer.release()
        return writer

    flat = [target for (target,) in targets]
    assert rested().resume(flat)
    assert rested().resume(list(module.state_dict().values())), "another object over the same memory"
    assert not rested().resume(flat[:1])
    assert not rested().resume([*flat[:1], torch.zeros(4)])
    writer = rested()
    module.weight.data = module.weight.data.view(3, 4)
    assert not writer.resume(flat)
    module.weight.data = module.weight.data.view(4, 3)
    assert writer.resume(flat)
    module.bias.data = torch.zeros(4)
    writer.release()
    assert not writer.resume(flat)
    strided = Writer(specs[:1], [[torch.zeros(3, 4).t()]])
    strided.release()
    assert not strided.resume([torch.zeros(3, 4).t()]), "a strided target is matched anew"


def test_a_resting_writer_keeps_no_target_alive() -> None:
    target = torch.zeros(4)
    writer = Writer([spec_of("a", target)], [[target]])
    died = weakref.ref(target)
    writer.release()
    del target
    assert died() is None


def test_a_writer_serves_one_update_after_another() -> None:
    target = torch.zeros(3, 4).t()
    spec = spec_of("w", target)
    writer = Writer([spec], [[target]])
    writer.unpack([Piece(0, 0, 7, 0)], slot_of(7))
    with pytest.raises(ProtocolError, match="3 bytes into an element"):
        writer.finish()
    writer.unpack([Piece(0, 0, 6, 0)], slot_of(6))
    writer.reset()
    source = rubbish(torch.float32, 4, 3)
    flat = source.view(-1).view(torch.uint8)
    assert writer.unpack([Piece(0, 0, 5, 0)], flat[:5]) == []
    assert writer.unpack([Piece(0, 5, 43, 0)], flat[5:].clone()) == [0]
    writer.finish()
    assert raw(target) == raw(source)


def test_results_of_ones_own() -> None:
    writer = Writer()
    sources = [rubbish(torch.float32, 3), rubbish(torch.complex32, 2, 2), torch.empty(0, 2)]
    results = [writer.append_owned(spec_of(f"t{index}", source)) for index, source in enumerate(sources)]
    slot = slot_of(1_000)
    pieces = plan([source.nbytes for source in sources], 1_000)[0]
    Packer(sources).pack(pieces, slot)
    assert writer.unpack(pieces, slot) == [0, 1, 2]
    for index in range(3):
        writer.forget(index)
    slot.zero_()
    assert [raw(result) for result in results] == [raw(source) for source in sources]
    results[0].add_(1)


# -- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunk_bytes", [3, 1_000])
def test_every_mode_of_autograd(mode: Callable[[], Any], chunk_bytes: int) -> None:
    with torch.inference_mode():
        frozen = torch.arange(6.0).view(2, 3)
        frozen_targets = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.float64)]
    leaf = torch.arange(6.0).view(2, 3).requires_grad_()
    sources = [frozen, leaf, leaf.t(), leaf * 2, frozen.t()]
    with mode():
        round_trip(sources, chunk_bytes)
        for target in frozen_targets:
            move([frozen], [[target]], chunk_bytes, cast=True)
            assert target.tolist() == frozen.tolist()
        weight = nn.Parameter(torch.zeros(2, 3))
        turned = nn.Parameter(torch.zeros(3, 2).t())
        move([leaf], [[weight, turned]], chunk_bytes)
    assert weight.tolist() == turned.tolist() == leaf.tolist()
    assert weight.grad_fn is None
    assert weight.requires_grad
    assert leaf.grad is None


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_autograd_sees_that_a_target_was_written(strided: bool, part: bool) -> None:
    weight = nn.Parameter(torch.ones(3, 3).t() if strided else torch.ones(3, 3))
    loss = (weight**2).sum()
    nbytes = 8 if part else 36
    Writer([spec_of("w", weight)], [[weight]]).unpack([Piece(0, 0, nbytes, 0)], slot_of(64)[:nbytes])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_sources_are_not_touched() -> None:
    sources = [torch.arange(4.0), torch.arange(4.0).view(2, 2).t(), torch.zeros(2, dtype=torch.complex64).conj()]

    def state() -> list[object]:
        return [(s._version, s.data_ptr(), s.stride(), s.untyped_storage().is_shared()) for s in sources]

    before = state()
    round_trip(sources, 5)
    assert state() == before


# -- memory of chunks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", dtype_names())
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (2, 3)])
def test_typed_views_and_allocations(name: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", name, shape)
    slot = slot_of(1024)[64:]
    view = typed_view(slot, 128, spec)
    assert (view.dtype, tuple(view.shape)) == (dtype_of(name), shape)
    assert view.numel() == 0 or view.data_ptr() == slot.data_ptr() + 128
    assert raw(view) == b"\xa5" * nbytes(spec)
    own = allocate(spec)
    assert (own.dtype, tuple(own.shape), own.is_contiguous()) == (dtype_of(name), shape, True)
    assert own.numel() == 0 or own.data_ptr() % 64 == 0


def test_an_empty_tensor_at_the_end_of_a_full_chunk() -> None:
    assert typed_view(slot_of(64), 64, TensorSpec("w", "float64", (3, 0))).shape == (3, 0)


def test_no_memory_is_an_error_of_ours() -> None:
    with pytest.raises(TensorError, match="no memory on cpu for 'w'") as caught:
        allocate(TensorSpec("w", "float32", (1 << 60,)))
    assert caught.value.tensor == "w"


def test_copy_bytes() -> None:
    source, target = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    copy_bytes(target, 2, source, 5, 3)
    assert target.tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 0, 0]
    for arguments in ((8, 0, 3), (0, 8, 3), (-1, 0, 1), (0, -1, 1), (0, 0, -1)):
        with pytest.raises(UsageError, match="do not fit"):
            copy_bytes(target, arguments[0], source, arguments[1], arguments[2])


def test_nothing_is_written_beyond_a_slot() -> None:
    source = torch.ones(100, dtype=torch.uint8)
    with pytest.raises(UsageError, match="do not fit"):
        Packer([source]).pack([Piece(0, 0, 100, 0)], slot_of(99))
    with pytest.raises(UsageError, match="do not fit"):
        pack_piece(source, Piece(0, 0, 100, 0), slot_of(99))
    with pytest.raises(ProtocolError, match="99 bytes came"):
        Writer([spec_of("w", source)], [[source]]).unpack([Piece(0, 0, 100, 0)], slot_of(99))


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_streamed_packing_is_packing(chunk_bytes: int) -> None:
    sources = [
        rubbish(torch.bfloat16, 5, 7),
        rubbish(torch.bfloat16, 7, 5).t(),
        torch.empty(0),
        rubbish(torch.complex64, 3).conj(),
    ]
    cutter, at_once, one_by_one = Cutter(chunk_bytes), [], []
    slot = slot_of(chunk_bytes)
    for index, source in enumerate(sources):
        for fresh, piece in cutter.cut(index, source.nbytes):
            if fresh:
                one_by_one.append(slot := slot_of(chunk_bytes))
            pack_piece(source, piece, slot)
    for pieces in plan([source.nbytes for source in sources], chunk_bytes):
        at_once.append(slot := slot_of(chunk_bytes))
        Packer(sources).pack(pieces, slot)
    assert [bytes(a.tolist()) for a in at_once] == [bytes(b.tolist()) for b in one_by_one]


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
def test_memory_that_is_not_the_hosts_goes_by_typed_copies(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device tensor takes, on the CPU: no address is plain, no memmove may be called."""
    from transportkit import memory, unpacking

    def refuse(*arguments: object) -> None:
        raise AssertionError("memmove")

    for module in (packing, unpacking, memory):
        monkeypatch.setattr(module, "plain_address", lambda tensor: 0)
        monkeypatch.setattr(module, "memmove", refuse)
    monkeypatch.setattr(unpacking, "_surely_plain", lambda spec, target: False)
    base = rubbish(torch.complex64, 4, 6)
    odd = base[::2, ::5][:1, :1]  # contiguous, for sizes of 1 have any stride
    sources = [base, base.t(), base.conj(), base.real, base[:0], base[0, 0], odd, rubbish(torch.bool, 9)]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    move(sources, [[target] for target in targets], chunk_bytes)
    assert list(map(raw, targets)) == list(map(raw, sources))


def test_a_large_strided_tensor_is_not_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the copies allocate is as large as a chunk; and torch is not asked for a contiguous copy."""
    source = rubbish(torch.int16, 300, 500).t()
    target = torch.zeros(300, 500, dtype=torch.int16).t()
    expected = raw(source)
    for name in ("contiguous", "clone", "reshape"):
        monkeypatch.setattr(Tensor, name, _bounded(getattr(Tensor, name)))
    slot = slot_of(1 << 16)
    packer, writer = Packer([source]), Writer([spec_of("w", source)], [[target]])
    for pieces in plan([source.nbytes], 1 << 16):
        packer.pack(pieces, slot)
        writer.unpack(pieces, slot)
    monkeypatch.undo()
    assert raw(target) == expected


def _bounded(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        assert tensor.nbytes <= 1 << 16
        return method(tensor, *arguments, **keywords)

    return call


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (3, 2, 2), (2, 2, 2, 2)])
def test_rectangles_cover_every_range_once_and_are_few(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            parts = list(rectangles(shape, start, stop))
            assert [n for index, _ in parts for n in numbers[index].flatten().tolist()] == list(range(start, stop))
            assert all(numbers[index].numel() == count for index, count in parts)
            assert len(parts) <= 2 * len(shape) + 1
