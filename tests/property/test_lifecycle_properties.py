"""Any interleaving of export, open, read, release, supersede, fail, lose and close, with one to three receivers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, ProtocolError
from transportkit.lifecycle import Exports, Imported, Imports, SlotPool
from transportkit.transport import Importer
from transportkit.wire import Chunk, Location, decode_as, raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Raw
    from torch import Tensor

pytestmark = pytest.mark.timeout(120)

SLOTS, NBYTES = 3, 64
POISON = 255


def rarely(*what: str) -> st.SearchStrategy[str]:
    """Mostly nothing: what ends a receiver too often leaves nothing to interleave."""
    return st.integers(0, 60).map(lambda n: what[n - 50] if 50 <= n < 50 + len(what) else "")


class Mapping(Importer):
    """One receiver's importer over memories that all share; it enforces what a device would."""

    def __init__(self, memories: dict[int, Tensor]) -> None:
        self.memories = memories
        self.mapped: set[int] = set()
        self.attached: list[int] = []
        self.detached: list[int] = []
        self.opened: set[int] = set()
        self.released: set[int] = set()
        self.failing = ""
        self.closed = 0

    def fail(self, method: str) -> None:
        if self.failing == method:
            self.failing = ""
            raise OSError(5, f"{method} was made to fail")

    def attach(self, handle: Raw) -> Tensor:
        self.fail("attach")
        export = decode_as(int, handle)
        assert export not in self.attached, "opened twice"
        assert export in self.memories, "its memory is gone"
        self.attached.append(export)
        self.mapped.add(export)
        return self.memories[export]

    def detach(self, export: int) -> None:
        assert export in self.mapped, "released twice, or never opened"
        self.mapped.remove(export)
        self.detached.append(export)
        self.fail("detach")

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        self.fail("open")
        assert header.location.export in self.mapped
        memory = super().open(header, attached, deadline)
        assert header.seq not in self.opened
        self.opened.add(header.seq)
        return memory

    def release(self, header: Chunk) -> None:
        assert header.seq not in self.released
        assert header.location.export in self.mapped, "it was unmapped under an open chunk"
        self.released.add(header.seq)
        self.fail("release")

    def close(self) -> None:
        assert not self.mapped or self.detached, "closed before it was detached"
        self.closed += 1


@attrs.define(eq=False)
class Reader:
    """One receiver: its importer, what is on its way to it, what it has open, and the views that its user keeps."""

    importer: Mapping
    imports: Imports
    coming: list[tuple[Chunk, int]] = attrs.field(factory=list)
    open: list[tuple[Imported, int]] = attrs.field(factory=list)
    kept: list[tuple[Tensor, int]] = attrs.field(factory=list)
    gone: bool = False


class Sharing(RuleBasedStateMachine):
    """A lane whose slots lie in one export, whose place another one may take at any chunk, while older ones are out."""

    @initialize(receivers=st.integers(1, 3))
    def begin(self, receivers: int) -> None:
        self.ids = itertools.count(1)
        self.memories: dict[int, Tensor] = {}
        self.reclaimed: list[tuple[int, int]] = []
        self.named: set[tuple[int, int]] = set()
        self.proven: set[tuple[int, int]] = set()
        self.exports = Exports(self.reclaim)
        self.pool = SlotPool(SLOTS, self.exports)
        self.current = self.allocate()
        self.superseded: int | None = None
        self.retired: set[int] = set()
        self.seq = 0
        self.readers: dict[int, Reader] = {}
        for number in range(receivers):
            importer = Mapping(self.memories)
            self.readers[number] = Reader(importer, Imports(importer, "double", SLOTS, self.acknowledge))

    def allocate(self) -> int:
        export = next(self.ids)
        self.memories[export] = torch.zeros(SLOTS * NBYTES, dtype=torch.uint8)
        return export

    def acknowledge(self, header: Chunk) -> None:
        if not self.readers[header.receiver].gone:
            self.proven.add((header.receiver, header.location.export or 0))
            self.pool.acknowledge(1, header.seq, header.receiver)

    def reclaim(self, receiver: int, export: int, opened: bool) -> None:
        key = receiver, export
        assert key in self.named
        assert key not in self.reclaimed, "reclaimed twice"
        assert opened == (key in self.proven)
        self.reclaimed.append(key)
        reader = self.readers[receiver]
        if not reader.gone:
            assert export not in reader.importer.mapped, "reclaimed while its importer has it mapped"
        everybody = [(number, export) for number in self.readers if (number, export) in self.named]
        if export in self.retired and set(everybody) <= set(self.reclaimed):
            # A lost receiver's process may still have it mapped: then it is the backend that keeps it.
            if not any(self.readers[number].gone for number, _ in everybody):
                self.memories[export].fill_(POISON)
            del self.memories[export]

    @property
    def live(self) -> list[int]:
        return [number for number, reader in self.readers.items() if not reader.gone]

    # -- the exporter -------------------------------------------------------------------------------------------------

    @rule(replace=st.booleans())
    def publish(self, replace: bool) -> None:
        slot = self.pool.acquire() if self.live else None
        if slot is None:
            return
        if replace:
            self.superseded = self.current
            self.retired.add(self.current)
            self.current = self.allocate()
        export, start, value = self.current, slot * NBYTES, self.seq % 251
        self.memories[export][start : start + NBYTES] = value
        self.pool.publish(slot, 1, self.seq, self.live)
        for number in self.live:
            location = Location(export, start, raw(export), self.superseded)
            self.exports.name(number, location, 1, self.seq, self.pool.owed(number))
            self.named.add((number, export))
            self.readers[number].coming.append((Chunk(1, number, self.seq, False, NBYTES, 0, location), value))
        self.seq += 1

    @rule(data=st.data(), happens=rarely("yes", "yes", "yes"))
    def lose(self, data: st.DataObject, happens: str) -> None:
        """The link to a receiver is lost; its process goes on holding what it has."""
        if not happens or len(self.live) < 2:
            return
        number = data.draw(st.sampled_from(self.live))
        self.readers[number].gone = True
        self.pool.drop(number)

    # -- the importers ------------------------------------------------------------------------------------------------

    def failed(self, reader: Reader) -> None:
        number = next(n for n, r in self.readers.items() if r is reader)
        if not reader.gone:
            reader.gone = True
            self.pool.drop(number)
        self.close(reader)

    def close(self, reader: Reader) -> None:
        reader.coming.clear()
        try:
            reader.imports.close()
        except BackendError:
            assert reader.importer.closed == 1
        for chunk, _ in reader.open:
            reader.imports.retire(chunk)
        reader.open.clear()

    def one(self, data: st.DataObject, having: Callable[[Reader], object]) -> Reader | None:
        able = [reader for reader in self.readers.values() if having(reader)]
        return data.draw(st.sampled_from(able)) if able else None

    @rule(data=st.data(), failing=rarely("attach", "open", "detach"))
    def take(self, data: st.DataObject, failing: str) -> None:
        reader = self.one(data, lambda reader: reader.coming)
        if reader is not None:
            self.open_next(reader, failing)

    def open_next(self, reader: Reader, failing: str = "") -> None:
        header, value = reader.coming.pop(0)
        if reader.gone and header.location.export not in self.memories:
            return  # what a lost receiver has not mapped may be gone: that is the backend's to find out
        reader.importer.failing = failing
        try:
            chunk = reader.imports.open(header, Deadline(20, "test"))
        except BackendError:
            assert failing
            self.failed(reader)
            return
        finally:
            reader.importer.failing = ""
        reader.open.append((chunk, value))

    @rule(data=st.data(), keep=st.booleans(), failing=rarely("release", "detach"))
    def read(self, data: st.DataObject, keep: bool, failing: str) -> None:
        reader = self.one(data, lambda reader: reader.open)
        if reader is not None:
            self.read_one(reader, data.draw(st.integers(0, len(reader.open) - 1)), keep=keep, failing=failing)

    def read_one(self, reader: Reader, index: int, *, keep: bool = False, failing: str = "") -> None:
        chunk, value = reader.open.pop(index)
        view = chunk.view()
        assert reader.gone or bool((view == value).all())
        if keep:
            reader.kept.append((view[3:9], value))
        del view
        reader.importer.failing = failing
        try:
            reader.imports.retire(chunk)
        except BackendError:
            assert failing
            self.failed(reader)
        reader.importer.failing = ""

    @rule()
    def catch_up(self) -> None:
        """Every receiver takes and reads what is on its way to it."""
        for reader in self.readers.values():
            while reader.coming:
                self.open_next(reader)
            while reader.open:
                self.read_one(reader, 0)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        reader = self.one(data, lambda reader: reader.kept)
        if reader is not None:
            reader.kept.pop(data.draw(st.integers(0, len(reader.kept) - 1)))

    @rule()
    def settle(self) -> None:
        for reader in self.readers.values():
            reader.imports.settle()

    @rule(data=st.data(), happens=rarely("yes", "yes"))
    def leave(self, data: st.DataObject, happens: str) -> None:
        """A receiver closes in order, whatever its user still looks at."""
        if not happens:
            return
        reader = self.readers[data.draw(st.sampled_from(sorted(self.readers)))]
        self.failed(reader)

    # -- what holds at all times --------------------------------------------------------------------------------------

    @invariant()
    def no_lease_reads_another_chunk(self) -> None:
        for reader in self.readers.values() if hasattr(self, "readers") else ():
            if not reader.gone:
                for view, value in reader.kept:
                    assert bool((view == value).all()), "the slot was recycled, or its memory given back, under a lease"

    @invariant()
    def nothing_is_shared_that_is_reclaimed(self) -> None:
        if hasattr(self, "exports"):
            assert self.exports.live == self.named - set(self.reclaimed)

    def teardown(self) -> None:
        if not hasattr(self, "readers"):
            return
        for number, reader in self.readers.items():
            reader.importer.failing = ""
            if not reader.gone:  # what is on its way is taken, and every word said: all slots are free
                for header, _ in reader.coming:
                    reader.open.append((reader.imports.open(header, Deadline(20, "test")), 0))
                reader.kept.clear()
                for chunk, _ in reader.open:
                    reader.imports.retire(chunk)
                reader.open.clear()
                reader.imports.settle()
                assert self.pool.owed(number) == []
                live = {export for receiver, export in self.exports.live if receiver == number}
                assert live <= {self.current}, "superseded, not reclaimed"
                assert reader.importer.opened == reader.importer.released
            reader.kept.clear()
            reader.imports.settle()
            self.close(reader)
            assert reader.importer.mapped == set()
            assert sorted(reader.importer.attached) == sorted(reader.importer.detached)
            assert reader.importer.closed == 1
        assert self.pool.free == SLOTS
        self.exports.close()
        assert self.exports.live == frozenset()
        assert sorted(self.reclaimed) == sorted(self.named)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_an_export_that_was_never_opened_is_reclaimed() -> None:
    told: list[tuple[int, int, bool]] = []
    exports = Exports(lambda *key: told.append(key))
    pool = SlotPool(2, exports)
    for seq in range(2):
        slot = pool.acquire()
        assert slot is not None
        pool.publish(slot, 1, seq, [0, 1])
        for receiver in (0, 1):
            exports.name(receiver, Location(7, 0), 1, seq)
    pool.acknowledge(1, 0, 0)
    pool.drop(1)
    assert told == [(1, 7, False)]
    exports.close()
    exports.close()
    assert told == [(1, 7, False), (0, 7, True)]
    assert exports.live == frozenset()


def test_an_exporter_may_not_go_back_to_what_it_has_superseded() -> None:
    exports = Exports(lambda *key: None)
    exports.name(0, Location(1), 1, 0)
    exports.name(0, Location(2, supersedes=1), 1, 1, [(1, 0)])
    with pytest.raises(ProtocolError, match="superseded"):
        exports.name(0, Location(1), 1, 2)


def test_an_importer_does_not_go_back_to_what_was_superseded() -> None:
    memories = {export: torch.zeros(NBYTES, dtype=torch.uint8) for export in (1, 2)}
    importer = Mapping(memories)
    imports = Imports(importer, "double", SLOTS, lambda header: None)

    def header(seq: int, export: int, supersedes: int | None = None) -> Chunk:
        return Chunk(1, 0, seq, False, NBYTES, 0, Location(export, 0, raw(export), supersedes))

    first = imports.open(header(0, 1), Deadline(20, "test"))
    second = imports.open(header(1, 2, 1), Deadline(20, "test"))
    with pytest.raises(ProtocolError, match="superseded"):
        imports.open(header(2, 1), Deadline(20, "test"))
    imports.release(second)
    assert importer.detached == [], "a chunk lies in it that is still open"
    imports.release(first)
    assert importer.detached == [1]
    with pytest.raises(ProtocolError, match="superseded"):
        imports.open(header(3, 1), Deadline(20, "test"))
    with pytest.raises(ProtocolError, match="superseded"):
        imports.open(header(4, 2, 2), Deadline(20, "test"))
    imports.close()
    assert importer.detached == [1, 2]


def test_every_export_is_detached_though_one_of_them_fails() -> None:
    memories = {export: torch.zeros(NBYTES, dtype=torch.uint8) for export in (1, 2, 3)}
    importer = Mapping(memories)
    imports = Imports(importer, "double", SLOTS, lambda header: None)
    for seq, export in enumerate(memories):
        imports.release(
            imports.open(Chunk(1, 0, seq, False, NBYTES, 0, Location(export, 0, raw(export))), Deadline(20, ""))
        )
    importer.failing = "detach"
    with pytest.raises(BackendError, match="made to fail"):
        imports.close()
    imports.close()
    assert (sorted(importer.detached), importer.closed) == ([1, 2, 3], 1)
