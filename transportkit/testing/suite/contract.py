"""Tests of the contract of exporter and importer, without a session: slots, chunks, exports, views."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from transportkit.errors import BackendError
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.suite.subject import Subject

#: (chunk_bytes, slots)
SIZES = [(1, 1), (3, 2), (100, 3), (1000, 7), (4097, 2)]


def noise(nbytes: int, seed: int) -> bytes:
    """Bytes that differ for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).tolist())


class Contract(Subject):
    """Slots, chunks, exports, views."""

    @pytest.mark.parametrize(("chunk_bytes", "slots"), SIZES)
    def test_slots_are_as_the_terms_say(self, chunk_bytes: int, slots: int) -> None:
        with self.lane(chunk_bytes=chunk_bytes, slots=slots) as lane:
            first, again = list(lane.exporter.slots), list(lane.exporter.slots)
            assert len(first) == slots
            assert all(a is b for a, b in zip(first, again, strict=True)), "slots are the same objects every time"
            for slot in first:
                assert (slot.dtype, tuple(slot.shape)) == (torch.uint8, (chunk_bytes,))
                assert slot.is_contiguous()
                assert slot.data_ptr() % 64 == 0, "slots begin at multiples of 64"
            starts = sorted(slot.data_ptr() for slot in first)
            assert all(b - a >= chunk_bytes for a, b in itertools.pairwise(starts)), "slots overlap"
            if not self.subject().device_slots:
                for number, slot in enumerate(first):
                    slot.fill_(number + 1)
                assert [int(slot[-1]) for slot in first] == list(range(1, slots + 1))

    @pytest.mark.parametrize(("chunk_bytes", "slots"), SIZES)
    def test_every_slot_carries_every_length(self, chunk_bytes: int, slots: int) -> None:
        with self.lane(chunk_bytes=chunk_bytes, slots=slots) as lane:
            lane.connect()
            for turn, length in enumerate([chunk_bytes, 1, chunk_bytes // 2, 0, chunk_bytes]):
                for slot in range(slots):
                    data = noise(length, seed=100 * turn + slot)
                    (chunk,) = lane.move(slot, data)
                    assert chunk.memory is not None
                    assert (chunk.memory.dtype, tuple(chunk.memory.shape)) == (torch.uint8, (length,))
                    assert lane.read(0, chunk) == data, f"{length} bytes through slot {slot}"
                    lane.release([chunk])

    def test_all_slots_can_be_out_at_once(self) -> None:
        with self.lane(chunk_bytes=500, slots=3) as lane:
            lane.connect()
            for turn in range(3):
                data = [noise(500, seed=10 * turn + slot) for slot in range(3)]
                chunks = [lane.move(slot, data[slot])[0] for slot in range(3)]
                assert [lane.read(0, chunk) for chunk in chunks] == data
                for chunk in (chunks[1], chunks[2], chunks[0]):
                    lane.release([chunk])
            assert [header.seq for header in lane.acknowledged[:3]] == [1, 2, 0]

    def test_an_open_chunk_keeps_its_bytes(self) -> None:
        with self.lane(chunk_bytes=300, slots=3) as lane:
            lane.connect()
            kept_data = noise(300, seed=1)
            (kept,) = lane.move(0, kept_data)
            for turn in range(6):
                assert lane.carry(1 + turn % 2, noise(300, seed=10 + turn)) == [noise(300, seed=10 + turn)]
                assert lane.read(0, kept) == kept_data, "bytes changed under an open lease"
            lane.release([kept])
            assert lane.carry(0, noise(300, seed=2)) == [noise(300, seed=2)]

    def test_an_export_is_attached_once(self) -> None:
        with self.lane(chunk_bytes=200, slots=3) as lane:
            lane.connect()
            locations = [lane.exporter.locate(slot, 0) for slot in range(3)]
            exports = {location.export for location in locations} - {None}
            for turn in range(8):
                assert lane.carry(turn % 3, noise(200, seed=turn)) == [noise(200, seed=turn)]
                again = lane.exporter.locate(turn % 3, 0)
                assert again.export in (None, *exports), "a slot is exported once, not once per chunk"
            assert len(exports) <= 3

    def test_every_receiver_reads_the_same(self) -> None:
        if not self.fan_out:
            pytest.skip("one exporter of this backend serves one importer")
        with self.lane(chunk_bytes=400, slots=2, receivers=3) as lane:
            lane.connect()
            for turn in range(4):
                assert lane.carry(turn % 2, noise(400, seed=turn)) == [noise(400, seed=turn)] * 3

    def test_the_others_go_on_without_a_dropped_receiver(self) -> None:
        if not self.fan_out:
            pytest.skip("one exporter of this backend serves one importer")
        with self.lane(chunk_bytes=400, slots=2, receivers=2) as lane:
            lane.connect()
            lane.carry(0, noise(400, seed=1))
            lane.exporter.drop(1)
            lane.imports.pop().close()
            lane.importers.pop()
            try:
                lane.exporter.ready(0, lane.deadline("slot"))
            except BackendError:
                return  # before any header has left: the core moves the others to another backend
            for turn in range(4):
                assert lane.carry(turn % 2, noise(400, seed=turn)) == [noise(400, seed=turn)]

    def test_views_stay_readable_when_all_is_closed(self) -> None:
        with nothing_left():
            lane = self.lane(chunk_bytes=5000, slots=2)
            lane.connect()
            data = [noise(5000, seed=slot) for slot in range(2)]
            views = [lane.move(slot, data[slot])[0].view()[1:] for slot in range(2)]
            lane.close()
            del lane
            gc.collect()
            spoil = [torch.full((5000,), 255, dtype=torch.uint8) for _ in range(50)]
            seen = [bytes(view.cpu().tolist()) for view in views]
            assert seen == [part[1:] for part in data], "`close` or `detach` freed memory that is still viewed"
            del views, spoil

    def test_slots_are_readable_between_abort_and_close(self) -> None:
        with self.lane(chunk_bytes=100, slots=2) as lane:
            lane.connect()
            lane.exporter.slots[1].fill_(9)
            lane.exporter.abort()
            assert lane.exporter.slots[1].cpu().tolist() == [9] * 100
