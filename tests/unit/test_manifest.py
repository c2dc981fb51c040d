"""Dtypes, specs, refusals, ties, and the check of a peer's manifest."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from transportkit.errors import (
    DuplicateNameError,
    ProtocolError,
    TensorError,
    UnsupportedTensorError,
)
from transportkit.manifest import (
    Manifest,
    check_specs,
    dtype_name,
    dtype_names,
    dtype_of,
    itemsize,
    manifest_id,
    module_tensors,
    nbytes,
    spec_of,
    static_manifest,
    unsupported,
    wire_nbytes,
)
from transportkit.wire import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(30)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def test_every_dtype_that_is_bytes_travels() -> None:
    every = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert set(dtype_names()) == {name for name in every if not name.startswith("q")}
    assert list(dtype_names()) == sorted(dtype_names())
    assert {"float4_e2m1fn_x2", "float8_e8m0fnu", "complex32", "uint64", "bool", "bits1x8", "int4"} <= set(
        dtype_names()
    )


def test_dtype_names_are_canonical() -> None:
    assert dtype_name(torch.float) == "float32"
    assert dtype_name(torch.half) == "float16"
    assert "float" not in dtype_names()
    for name in dtype_names():
        assert dtype_name(dtype_of(name)) == name
        assert itemsize(name) == dtype_of(name).itemsize
    for unknown in ("float", "qint8", "Tensor", "float9"):
        with pytest.raises(KeyError):
            dtype_of(unknown)
    with pytest.raises(KeyError):
        dtype_name(torch.qint8)


# -- specs and refusals -----------------------------------------------------------------------------------------------


def test_spec() -> None:
    assert spec_of("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == TensorSpec("w", "bfloat16", (2, 3))
    assert spec_of("w", nn.Parameter(torch.tensor(1.5))) == TensorSpec("w", "float32", ())
    assert spec_of("w", nn.Buffer(torch.zeros(0, 3))).shape == (0, 3)
    assert spec_of("w", torch.zeros(1).expand(4, 1)).shape == (4, 1)
    assert type(spec_of("w", torch.zeros(2)).shape) is tuple


@pytest.mark.parametrize("name", ["w", "Gewicht.äöü", "重み", "a b\n", "x" * 10_000, "\x00", "🦙"])
def test_any_unicode_is_a_name(name: str) -> None:
    assert spec_of(name, torch.zeros(1)).name == name
    assert static_manifest({name: torch.zeros(1)}).specs[0].name == name


@pytest.mark.parametrize("name", ["", "\ud800", "a\udfff", 3, None, b"w"])
def test_anything_else_is_not(name: Any) -> None:
    with pytest.raises(TensorError, match="name"):
        spec_of(name, torch.zeros(1))
    with pytest.raises(TensorError, match="name"):
        static_manifest([("first", torch.zeros(1)), (name, torch.zeros(1))])


class Tagged(Tensor):
    pass


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _compressed(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        return torch.eye(4).to_sparse(layout=layout, blocksize=blocks)


def _fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def _freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _cut() -> Tensor:
    tensor = torch.ones(300)
    tensor.untyped_storage().resize_(100)
    return tensor


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "None"),
    "lambda": (lambda: lambda: 0, "of type function"),
    "list": (lambda: [1.0], "of type list"),
    "numpy": (lambda: np.zeros(3), "torch.from_numpy"),
    "coo": (lambda: torch.eye(3).to_sparse(), "sparse_coo.*to_dense"),
    "csr": (lambda: _compressed(torch.sparse_csr), "sparse_csr.*to_dense"),
    "csc": (lambda: _compressed(torch.sparse_csc), "sparse_csc.*to_dense"),
    "bsr": (lambda: _compressed(torch.sparse_bsr), "sparse_bsr.*to_dense"),
    "bsc": (lambda: _compressed(torch.sparse_bsc), "sparse_bsc.*to_dense"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "mkldnn.*to_dense"),
    "quantised": (_quantised, "quantised.*dequantize"),
    "nested": (lambda: _nested(torch.strided), "nested.*unbind"),
    "jagged": (lambda: _nested(torch.jagged), "nested.*values"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta device"),
    "empty meta": (lambda: torch.zeros(0, device="meta"), "meta device"),
    "fake": (_fake, "FakeTensor"),
    "subclass": (lambda: torch.zeros(3).as_subclass(Tagged), r"Tagged.*as_subclass\(torch.Tensor\)"),
    "parameter of a subclass": (lambda: nn.Parameter(torch.zeros(3).as_subclass(Tagged)), "Tagged"),
    "lazy parameter": (nn.UninitializedParameter, "run the module once"),
    "lazy buffer": (nn.UninitializedBuffer, "run the module once"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "no memory"),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), "no memory"),
    "freed": (_freed, "no memory"),
    "cut": (_cut, "beyond its storage"),
    "too large": (lambda: torch.zeros(1, dtype=torch.float64).expand(1 << 62), "64-bit"),
    "too many dimensions": (lambda: torch.zeros((1,) * 65), "65 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_travel_is_refused_by_name(case: str) -> None:
    make, text = REFUSED[case]
    value = make()
    assert unsupported(value)
    with pytest.raises(UnsupportedTensorError, match=text) as caught:
        spec_of("layer.odd", value)
    assert caught.value.tensor == "layer.odd"
    assert "layer.odd" in str(caught.value)
    assert ":" in str(caught.value) or "64-bit" in str(caught.value)
    with pytest.raises(UnsupportedTensorError, match=text):
        static_manifest([("good", torch.zeros(3)), ("layer.odd", value)])


def test_a_tensor_inside_vmap_is_refused() -> None:
    reasons = []

    def look(x: Tensor) -> Tensor:
        reasons.append(unsupported(x))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    assert reasons[0]


def test_a_dtensor_is_told_to_be_gathered() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
        with pytest.raises(UnsupportedTensorError, match=r"'w' is a DTensor: gather it first: tensor\.full_tensor\(\)"):
            spec_of("w", tensor)
    finally:
        dist.destroy_process_group()


# -- the manifest of a static source ----------------------------------------------------------------------------------


def test_a_mapping_in_order() -> None:
    tensors = {"b": torch.zeros(2), "a": torch.zeros(3, dtype=torch.int8), "e": torch.zeros(0)}
    manifest = static_manifest(tensors)
    assert manifest.specs == (
        TensorSpec("b", "float32", (2,)),
        TensorSpec("a", "int8", (3,)),
        TensorSpec("e", "float32", (0,)),
    )
    assert all(a is b for a, b in zip(manifest.tensors, tensors.values(), strict=True))
    assert manifest.layout.sizes == (8, 3, 0)
    assert static_manifest({}).specs == ()


def test_tied_tensors_are_sent_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("left", torch.ones(2), persistent=False)

    pairs = module_tensors(Tied())
    assert [name for name, _ in pairs] == ["kept", "embedding.weight", "head.weight"]
    manifest = static_manifest(pairs)
    assert [spec.same_as for spec in manifest.specs] == [None, None, "embedding.weight"]
    assert manifest.layout.sizes == (8, 48, None)
    assert list(map(wire_nbytes, manifest.specs)) == [8, 48, None]
    assert nbytes(manifest.specs[2]) == 48


def test_only_the_same_reading_of_the_same_memory_is_a_tie() -> None:
    base = torch.arange(16, dtype=torch.float32).view(4, 4)
    both = torch.zeros(3, dtype=torch.complex64)
    manifest = static_manifest(
        {
            "base": base,
            "again": base.view(4, 4),
            "flat": base.view(16),
            "turned": base.t(),
            "turned again": base.t(),
            "part": base[:2],
            "bits": base.view(torch.int32),
            "expanded": base[:1].expand(4, 4),
            "parameter": nn.Parameter(base),
            "empty": base[:0],
            "empty too": base[:0],
            "c": both,
            "c conj": both.conj(),
            "c conj again": both.conj(),
            "imag": both.imag,
            "imag neg": both.conj().imag,
        }
    )
    ties = {spec.name: spec.same_as for spec in manifest.specs if spec.same_as is not None}
    assert ties == {
        "again": "base",
        "turned again": "turned",
        "parameter": "base",
        "c conj again": "c conj",
    }


def test_plain_addresses() -> None:
    base = torch.zeros(4, 4)
    values = torch.zeros(3, dtype=torch.complex64)
    manifest = static_manifest({"a": base, "b": base.t(), "c": values, "d": values.conj(), "e": values.conj().imag})
    assert manifest.layout.addresses == [base.data_ptr(), 0, values.data_ptr(), 0, 0]
    contiguous_neg = torch.zeros(4, dtype=torch.complex64).conj().imag[:1]
    assert contiguous_neg.is_contiguous()
    assert static_manifest({"n": contiguous_neg}).layout.addresses == [0]


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match="'w'"):
        static_manifest([("w", torch.zeros(1)), ("v", torch.zeros(1)), ("w", torch.zeros(1))])


def test_the_sum_fits_64_bits() -> None:
    half = torch.zeros(1, dtype=torch.uint8).expand((1 << 62) + 1)
    with pytest.raises(UnsupportedTensorError, match="with 'b' the update has more bytes"):
        static_manifest([("a", half), ("b", torch.zeros(1, dtype=torch.uint8).expand(1 << 62))])


def test_extra_state_that_is_no_tensor_is_refused_by_name() -> None:
    class Extra(nn.Linear):
        state: Any = {"scale": 2}

        def get_extra_state(self) -> Any:
            return self.state

    module = nn.Sequential(Extra(1, 1))
    with pytest.raises(UnsupportedTensorError, match=r"'0\._extra_state'.*dict") as caught:
        module_tensors(module)
    assert caught.value.tensor == "0._extra_state"
    module[0].state = torch.ones(2)
    assert [name for name, _ in module_tensors(module)] == ["0.weight", "0.bias", "0._extra_state"]


def _fresh() -> dict[str, Tensor]:
    values = torch.ones(2, 3, dtype=torch.complex64)
    weight = nn.Parameter(torch.ones(2, 3))
    return {"w": weight, "tied": weight, "c": values, "t": torch.ones(2, 2).t()}


def test_an_unchanged_source_is_taken_over() -> None:
    tensors = _fresh()
    first = static_manifest(tensors)
    again = static_manifest(
        {name: tensor.detach() if name == "c" else tensor for name, tensor in tensors.items()}, first
    )
    assert again.layout is first.layout
    assert again.specs is first.specs
    assert static_manifest(tensors.items(), first.layout).layout is first.layout


CHANGES: dict[str, Any] = {
    "other memory": lambda t: t.update(w=nn.Parameter(torch.ones(2, 3))),
    "data exchanged": lambda t: setattr(t["w"], "data", torch.ones(2, 3)),
    "reshaped in place": lambda t: setattr(t["w"], "data", t["w"].data.view(3, 2)),
    "transposed in place": lambda t: t["t"].t_(),
    "conjugated": lambda t: t.update(c=t["c"].conj()),
    "other dtype": lambda t: t.update(w=t["w"].data.view(torch.int32), tied=t["w"].data.view(torch.int32)),
    "renamed": lambda t: t.update(new=t.pop("w")),
    "dropped": lambda t: t.pop("c"),
    "tied elsewhere": lambda t: t.update(tied=torch.ones(2, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_source_is_not_taken_over(change: str) -> None:
    tensors = _fresh()
    first = static_manifest(tensors)
    CHANGES[change](tensors)
    again = static_manifest(tensors, first.layout)
    expected = static_manifest(tensors)
    assert again.layout is not first.layout
    assert again.specs == expected.specs
    assert again.layout.addresses == expected.layout.addresses
    assert (again.specs is first.specs) == (expected.specs == first.specs)


def test_a_source_that_turned_bad_is_refused_in_spite_of_the_last_one() -> None:
    tensors = _fresh()
    first = static_manifest(tensors)
    tensors["w"] = torch.zeros(2, 3, device="meta")
    with pytest.raises(UnsupportedTensorError, match="'w'"):
        static_manifest(tensors, first.layout)


def test_a_layout_keeps_no_tensor_alive() -> None:
    tensors = _fresh()
    watch = weakref.ref(tensors["c"])
    layout = static_manifest(tensors).layout
    del tensors
    gc.collect()
    assert watch() is None
    assert layout.specs


def test_a_source_is_not_touched() -> None:
    tensor = torch.ones(3, requires_grad=True)
    version, address = tensor._version, tensor.data_ptr()
    assert isinstance(static_manifest({"w": tensor}), Manifest)
    assert (tensor._version, tensor.data_ptr()) == (version, address)
    assert not tensor.untyped_storage().is_shared()


# -- manifests from the other side ------------------------------------------------------------------------------------


def test_a_manifest_has_an_id() -> None:
    specs = (TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (2,), "a"))
    assert manifest_id(specs) == manifest_id(list(specs))
    assert len(manifest_id(specs)) == 32
    others = [specs[:1], specs[::-1], (specs[0], TensorSpec("b", "float32", (2,)))]
    assert len({manifest_id(specs), *map(manifest_id, others)}) == 4


GOOD = TensorSpec("a", "float32", (2, 3))


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([TensorSpec("", "float32", ())], "empty name"),
        ([GOOD, GOOD], "'a' came twice"),
        ([TensorSpec("b", "float32", (-1,))], "not negative"),
        ([TensorSpec("b", "float32", (-1, -1))], "not negative"),
        ([TensorSpec("b", "float32", (1 << 61,))], "64-bit"),
        ([TensorSpec("b", "uint8", ((1 << 64) - 1,))], "64-bit"),
        ([TensorSpec("b", "float32", (0, 1 << 62, 1 << 62))], "64-bit"),
        ([TensorSpec(n, "uint8", (1 << 62,)) for n in "bc"], "with 'c' the manifest"),
        ([TensorSpec("b", "float32", (1,) * 65)], "65 dimensions"),
        ([TensorSpec("b", "float32", (2, 3), "b")], "no earlier tensor"),
        ([TensorSpec("b", "float32", (2, 3), "a"), GOOD], "no earlier tensor"),
        ([GOOD, TensorSpec("b", "float32", (3, 2), "a")], "another dtype or shape"),
        ([GOOD, TensorSpec("b", "int32", (2, 3), "a")], "another dtype or shape"),
        ([GOOD, TensorSpec("b", "float32", (2, 3), "a"), TensorSpec("c", "float32", (2, 3), "b")], "no earlier tensor"),
    ],
)
def test_a_hostile_manifest_is_refused(specs: list[TensorSpec], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        check_specs(specs, dtype_names())
    with pytest.raises(TensorError, match=text):
        check_specs(specs, dtype_names(), TensorError)


def test_an_unknown_dtype_says_what_is_needed() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"'b' has the dtype 'float3'.*torch 2\..*install") as caught:
        check_specs([GOOD, TensorSpec("b", "float3", ())], dtype_names())
    assert caught.value.tensor == "b"
    with pytest.raises(UnsupportedTensorError):
        check_specs([GOOD], ["int8"])


def test_a_manifest_may_come_in_parts() -> None:
    earlier = {"a": GOOD}
    check_specs([TensorSpec("b", "float32", (2, 3), "a")], dtype_names(), earlier=earlier)
    with pytest.raises(ProtocolError, match="twice"):
        check_specs([GOOD], dtype_names(), earlier=earlier)
    assert earlier == {"a": GOOD}


def test_what_is_sent_is_accepted() -> None:
    tensors = {f"{name}.{shape}": torch.zeros(8, dtype=torch.uint8) for name in dtype_names() for shape in ((), (0, 3))}
    check_specs(static_manifest(tensors).specs, dtype_names())
