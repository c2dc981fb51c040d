"""Copies made together give the same bytes as copies made one by one, in either direction."""

from __future__ import annotations

import ctypes

import pytest
import torch

from transportkit import unpacking
from transportkit.batching import SMALL_BYTES, Batch
from transportkit.chunk import plan, used
from transportkit.manifest import static_manifest, wire_nbytes
from transportkit.packing import Packer, Writer, pack_piece
from transportkit.testing.samples import bulk, empty_like, placed, prints, samples
from transportkit.wire import Piece

pytestmark = pytest.mark.timeout(60)


def everything() -> dict[str, torch.Tensor]:
    return {**samples(), **bulk(30_000), "large": torch.arange(SMALL_BYTES + 8, dtype=torch.int64).to(torch.uint8)}


@pytest.mark.parametrize("chunk_bytes", [100, 1000, 4097, 1 << 22])
def test_batches_hold_the_same_bytes(chunk_bytes: int) -> None:
    manifest = static_manifest(everything().items())
    packer = Packer(manifest.tensors)
    writer = Writer(manifest.specs, [[target] for target in empty_like(prints(everything())).values()])
    batched = 0
    for pieces in plan(list(map(wire_nbytes, manifest.specs)), chunk_bytes):
        one_by_one, together = (torch.full((chunk_bytes + 64,), 9, dtype=torch.uint8)[: used(pieces)] for _ in range(2))
        packer.pack(pieces, one_by_one)
        packer._pack_on_device(pieces, together)
        for piece in pieces:
            assert torch.equal(*(slot[piece.offset : piece.offset + piece.nbytes] for slot in (one_by_one, together)))
        batch = Batch(together)
        batched += sum(batch.add(manifest.tensors[p.tensor], p.start, p.nbytes, p.offset) for p in pieces)
        writer._unpack_on_device(pieces, together)
    writer.finish()
    assert batched > 50


@pytest.mark.parametrize("chunk_bytes", [77, 5000])
def test_batches_write_the_same_bytes(chunk_bytes: int) -> None:
    tensors = everything()
    manifest = static_manifest(tensors.items())
    expected = prints(tensors)
    targets, copies = empty_like(expected), empty_like(expected)
    writer = Writer(manifest.specs, [[targets[name], copies[name]] for name in tensors])
    versions = {name: target._version for name, target in targets.items() if target.numel()}
    complete: list[int] = []
    packer = Packer(manifest.tensors)
    for pieces in plan(list(map(wire_nbytes, manifest.specs)), chunk_bytes):
        slot = torch.empty(chunk_bytes, dtype=torch.uint8)[: used(pieces)]
        packer._pack_on_device(pieces, slot)
        complete += writer._unpack_on_device(pieces, slot)
    writer.finish()
    assert prints(targets) == prints(copies) == expected
    assert complete == [index for index, spec in enumerate(manifest.specs) if spec.same_as is None]
    for name, version in versions.items():
        assert targets[name]._version > version, "autograd was not told"


def test_what_does_not_suit_is_left_to_a_copy_of_its_own() -> None:
    batch = Batch(torch.zeros(1 << 21, dtype=torch.uint8))
    grid = torch.arange(12.0).view(3, 4)
    for tensor in (grid.t(), torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2).to("meta"), torch.empty(0)):
        assert not batch.add(tensor, 0, tensor.numel() * tensor.itemsize, 0)
    assert not batch.add(torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8), 0, SMALL_BYTES + 1, 0)
    assert batch.add(grid, 0, 48, 0)
    assert not batch.add(grid.clone(), 0, 48, 0), "a second tensor for the same bytes"


@pytest.mark.parametrize(("first", "offset"), [(8, 4), (4, 8), (8, 6), (8, 1), (3, 8), (8, 8)])
def test_what_is_aligned_to_less_is_copied_in_smaller_words(first: int, offset: int) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    source, slot = memory[first : first + 16], torch.zeros(32, dtype=torch.uint8)
    with torch.inference_mode():
        batch = Batch(slot)
        assert batch.add(source, 0, 16, offset)
        batch.pack()
    assert slot[offset : offset + 16].tolist() == source.tolist()
    assert not slot[:offset].any()
    assert not slot[offset + 16 :].any()


def test_a_storage_that_begins_anywhere_is_taken_as_it_is() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    shift = -memory.data_ptr() % 8 + 4
    storage = torch.frombuffer((ctypes.c_uint8 * 40).from_address(memory.data_ptr() + shift), dtype=torch.uint8)
    source, slot = storage[4:20], torch.zeros(16, dtype=torch.uint8)
    assert (source.data_ptr() % 8, source.storage_offset()) == (0, 4), "torch views it by the offset"
    with torch.inference_mode():
        batch = Batch(slot)
        assert batch.add(source, 0, 16, 0)
        batch.pack()
    assert slot.tolist() == source.tolist()


def test_a_batch_rewrites_no_bit() -> None:
    patterns = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        slot = torch.zeros(patterns.numel() * 2, dtype=torch.uint8)
        batch = Batch(slot)
        with torch.inference_mode():
            assert batch.add(patterns.view(dtype), 0, slot.numel(), 0)
            batch.pack()
        assert torch.equal(slot.view(torch.int16), patterns)


@pytest.mark.parametrize("on_device", [False, True], ids=["host_chunks", "device_chunks"])
def test_targets_elsewhere_are_taken_again_for_the_next_update(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = everything()
    manifest = static_manifest(tensors.items())
    expected = prints(tensors)
    targets = empty_like(expected)
    elsewhere = {target.data_ptr() for number, target in enumerate(targets.values()) if number % 2}
    address = unpacking.plain_address
    monkeypatch.setattr(unpacking, "plain_address", lambda t: 0 if t.data_ptr() in elsewhere else address(t))
    writer = Writer(manifest.specs, [[targets[name]] for name in tensors])
    packer = Packer(manifest.tensors)
    for turn in range(3):
        for pieces in plan(list(map(wire_nbytes, manifest.specs)), 3000):
            slot = torch.empty(3000, dtype=torch.uint8)[: used(pieces)]
            packer.pack(pieces, slot)
            if on_device:
                if writer._resumed is not None:
                    writer._spread()
                writer._unpack_on_device(pieces, slot)
            else:
                writer.unpack(pieces, slot)
        writer.finish()
        assert prints(targets) == expected, f"update {turn}"
        writer.release()
        for target in targets.values():
            if target.dim() and target.numel():
                target.view(torch.uint8).zero_()
        assert writer.resume(list(targets.values())), "matched anew, at many times the cost"
    assert not writer.resume(list(empty_like(expected).values())), "other memory"


def test_samples_keep_their_layouts_on_another_device() -> None:
    for name, tensor in samples().items():
        there = placed(tensor, "meta")
        assert there.is_meta
        assert (there.dtype, there.shape, there.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert (there.is_conj(), there.is_neg()) == (tensor.is_conj(), tensor.is_neg()), name
        assert placed(tensor, "cpu") is tensor


class Elsewhere(torch.Tensor):
    """Host memory that says it is a GPU's."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


def test_a_tensor_that_its_source_lets_go_of_is_kept_for_the_stream_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current one of {device}")
    monkeypatch.setattr(
        Elsewhere, "record_stream", lambda self, stream: kept.append((self.data_ptr(), stream)), raising=False
    )
    tensor, slot = (torch.arange(64, dtype=torch.uint8).as_subclass(Elsewhere) for _ in range(2))
    pack_piece(tensor, Piece(0, 0, 16, 8), slot)
    assert kept == [(tensor.data_ptr(), "the current one of cpu")]
    pack_piece(tensor, Piece(0, 0, 0, 8), slot)
    pack_piece(tensor, Piece(0, 0, 16, 8), torch.zeros(64, dtype=torch.uint8))
    assert len(kept) == 1, "a copy to the host is over when it returns"
