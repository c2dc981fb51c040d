"""Slots, exports and leases: who may touch which memory when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, LeaseError, ProtocolError
from transportkit.lifecycle import Imported, Imports, Landing, SlotPool, Watched, host_slots, memory_of, translated
from transportkit.transport import Importer
from transportkit.wire import Chunk, Location

if TYPE_CHECKING:
    from msgspec import Raw

pytestmark = pytest.mark.timeout(60)


class Arena(Importer):
    """An importer over ordinary memory that notes every call."""

    def __init__(self, slots: int = 3, nbytes: int = 64) -> None:
        self.memory = torch.zeros(slots * nbytes, dtype=torch.uint8)
        self.nbytes = nbytes
        self.calls: list[str] = []

    def attach(self, handle: Raw) -> Tensor:
        self.calls.append("attach")
        return self.memory

    def detach(self, export: int) -> None:
        self.calls.append(f"detach {export}")

    def release(self, header: Chunk) -> None:
        self.calls.append(f"release {header.seq}")

    def close(self) -> None:
        self.calls.append("close")


def header(seq: int, slot: int = 0, export: int = 1, nbytes: int = 64) -> Chunk:
    return Chunk(1, 0, seq, False, nbytes, 0, Location(export, slot * 64))


def soon() -> Deadline:
    return Deadline(20, "test")


def imports(arena: Arena, slots: int = 3) -> tuple[Imports, list[int]]:
    acknowledged: list[int] = []

    def acknowledge(chunk: Chunk) -> None:
        arena.calls.append(f"ack {chunk.seq}")
        acknowledged.append(chunk.seq)

    return Imports(arena, "arena", slots, acknowledge), acknowledged


def test_an_export_is_attached_once_and_detached_once() -> None:
    arena = Arena()
    cache, _ = imports(arena)
    for seq in range(5):
        cache.release(cache.open(header(seq, seq % 3), soon()))
    cache.release(cache.open(header(5, export=2), soon()))
    cache.close()
    cache.close()
    assert arena.calls.count("attach") == 2
    assert sorted(call for call in arena.calls if call.startswith("detach")) == ["detach 1", "detach 2"]
    assert arena.calls[-1] == "close"


def test_a_chunk_is_released_before_it_is_acknowledged() -> None:
    arena = Arena()
    cache, _ = imports(arena)
    cache.release(cache.open(header(0), soon()))
    assert arena.calls == ["attach", "release 0", "ack 0"]


def test_a_chunk_that_is_viewed_is_held_until_the_last_view_dies() -> None:
    arena = Arena()
    cache, acknowledged = imports(arena)
    chunk = cache.open(header(0), soon())
    view = chunk.view()
    part = view[8:16].view(torch.int64)
    with pytest.raises(LeaseError, match="still viewed"):
        cache.release(chunk)
    cache.retire(chunk)
    del view
    cache.settle()
    assert (cache.held, acknowledged) == (1, [])
    del part
    cache.settle()
    assert (cache.held, acknowledged) == (0, [0])


def test_a_view_that_only_the_garbage_collector_can_free_gives_its_slot_back_when_it_is_needed() -> None:
    arena = Arena()
    cache, acknowledged = imports(arena, slots=1)
    chunk = cache.open(header(0), soon())
    cycle: list[object] = [chunk.view()]
    cycle.append(cycle)
    cache.retire(chunk)
    del cycle
    cache.settle(need=True)
    assert acknowledged == [0]


def test_without_a_slot_to_go_on_with_a_lease_error_says_what_to_do() -> None:
    arena = Arena()
    cache, _ = imports(arena, slots=2)
    kept = []
    for seq in range(2):
        chunk = cache.open(header(seq, seq), soon())
        kept.append(chunk.view())
        cache.retire(chunk)
    cache.settle()
    with pytest.raises(LeaseError, match=r"all 2 slots .*clone\(\)"):
        cache.settle(need=True)


def test_a_released_chunk_cannot_be_viewed() -> None:
    cache, _ = imports(Arena())
    chunk = cache.open(header(0), soon())
    cache.release(chunk)
    with pytest.raises(LeaseError, match="released"):
        chunk.view()


def test_views_outlive_a_close_and_no_word_follows_it() -> None:
    arena = Arena()
    cache, acknowledged = imports(arena)
    chunk = cache.open(header(0), soon())
    view = chunk.view()
    cache.close()
    cache.retire(chunk)
    assert view.sum() == 0
    del view
    cache.settle()
    assert acknowledged == []


def test_memory_that_is_not_the_hosts_is_watched_through_a_storage_of_its_own() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    watched = Watched(memory[10:90])
    view = watched._aliased(memory[10:90])
    assert view.data_ptr() == memory[10:].data_ptr()
    part = view[8:16].view(torch.int64)
    del view
    assert watched.viewed, "a view of a view keeps it"
    del part
    assert not watched.viewed


@pytest.mark.parametrize("opened", [torch.zeros(63, dtype=torch.uint8), torch.zeros(64, dtype=torch.int8)])
def test_an_importer_that_opens_something_else_than_its_header_says_is_refused(opened: Tensor) -> None:
    class Odd(Arena):
        def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
            return opened

    cache, _ = imports(Odd())
    with pytest.raises(ProtocolError, match="64 bytes long"):
        cache.open(header(0), soon())


def test_a_native_error_of_a_backend_is_ours_with_its_cause() -> None:
    with pytest.raises(BackendError, match=r"backend x failed: KeyError\('y'\)") as caught, translated("x"):
        raise KeyError("y")
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.backend == "x"
    with pytest.raises(LeaseError), translated("x"):
        raise LeaseError("ours stays")
    with pytest.raises(KeyboardInterrupt), translated("x"):
        raise KeyboardInterrupt


def test_landing_slots_are_reused_and_limited() -> None:
    landing = Landing(2, 100)
    first = landing.take(header(0))
    landing.take(header(1))
    with pytest.raises(LeaseError, match="all 2 landing slots"):
        landing.take(header(2))
    landing.give(header(0))
    landing.give(header(0))
    assert landing.take(header(2)).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000])
def test_host_slots_are_aligned_and_writable_without_numpy(nbytes: int) -> None:
    slots = host_slots(3, nbytes)
    assert len({slot.data_ptr() for slot in slots}) == 3
    for slot in slots:
        assert slot.data_ptr() % 64 == 0
        assert slot.shape == (nbytes,)
        memory_of(slot)[:] = b"\x07" * nbytes
        assert bool((slot == 7).all())
    assert memory_of(torch.empty(0, dtype=torch.uint8)).nbytes == 0


def test_a_slot_is_free_only_after_every_readers_word() -> None:
    pool = SlotPool(1)
    slot = pool.acquire()
    assert slot == 0
    assert pool.acquire() is None
    pool.publish(slot, 1, 0, [4, 5])
    assert pool.debtors() == {4, 5}
    pool.acknowledge(1, 0, 5)
    assert pool.free == 0
    for wrong in ((1, 0, 5), (1, 1, 4), (2, 0, 4), (1, 0, 9)):
        with pytest.raises(ProtocolError, match="does not hold"):
            pool.acknowledge(*wrong)
    pool.acknowledge(1, 0, 4)
    assert pool.free == 1


class Lives(RuleBasedStateMachine):
    """Any order of publishing, reading, keeping, dropping and settling: one sender's pool, one receiver's cache."""

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.SLOTS)
        self.pool = SlotPool(self.SLOTS)
        self.cache = Imports(self.arena, "arena", self.SLOTS, lambda h: self.pool.acknowledge(1, h.seq, 0))
        self.seq = 0
        self.open: list[tuple[Imported, int]] = []
        self.kept: list[tuple[Tensor, int]] = []

    @precondition(lambda self: self.pool.free)
    @rule()
    def publish(self) -> None:
        slot = self.pool.acquire()
        assert slot is not None
        value = self.seq % 251
        self.arena.memory[slot * 64 : slot * 64 + 64] = value
        self.pool.publish(slot, 1, self.seq, [0])
        self.open.append((self.cache.open(header(self.seq, slot), soon()), value))
        self.seq += 1

    @precondition(lambda self: self.open)
    @rule(keep=st.booleans(), data=st.data())
    def read(self, keep: bool, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        chunk, value = self.open.pop(index)
        view = chunk.view()
        assert bool((view == value).all())
        if keep:
            self.kept.append((view[3:9], value))
        del view
        self.cache.retire(chunk)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))

    @rule()
    def settle(self) -> None:
        self.cache.settle()

    @invariant()
    def no_lease_reads_another_chunk(self) -> None:
        for view, value in self.kept:
            assert bool((view == value).all())

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        assert self.pool.free + len(self.open) + self.cache.held == self.SLOTS

    def teardown(self) -> None:
        for chunk, _ in self.open:
            self.cache.retire(chunk)
        self.open.clear()
        self.kept.clear()
        self.cache.settle()
        assert self.pool.free == self.SLOTS
        self.cache.close()
        released = [call for call in self.arena.calls if call.startswith("release")]
        assert len(released) == len(set(released)) == self.seq
        assert self.arena.calls.count("attach") == self.arena.calls.count("detach 1") <= 1


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
