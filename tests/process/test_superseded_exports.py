"""Whole sessions over a backend that gives its chunks other memory all the time: each is mapped and given back once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from transportkit.errors import TransportKitError
from transportkit.lifecycle import host_slots
from transportkit.testing import Session, bulk, ends, installed, prints
from transportkit.transport import Exporter, Importer, Location, Match, Offer, Reach, Transport
from transportkit.wire import decode_as, raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msgspec import Raw
    from torch import Tensor

    from transportkit.session import Receiver
    from transportkit.wire import Terms

pytestmark = pytest.mark.timeout(60)

ids = itertools.count(1)
memories: dict[int, Tensor] = {}
calls: list[tuple[str, int]] = []


class MovingExporter(Exporter):
    """Copies each slot into the newest export, and makes another one after every few chunks."""

    def __init__(self, terms: Terms) -> None:
        self._slots = host_slots(terms.slots, terms.chunk_bytes)
        self._terms = terms
        self._chunks = 0
        self._old: int | None = None
        self._export = self._allocate()

    def _allocate(self) -> int:
        export = next(ids)
        memories[export] = torch.zeros(self._terms.slots * self._terms.chunk_bytes, dtype=torch.uint8)
        return export

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def ready(self, slot: int, deadline: Any) -> None:
        self._chunks += 1
        if self._chunks % MovingTransport.every == 0:
            self._old, self._export = self._export, self._allocate()
        start = slot * self._terms.chunk_bytes
        memories[self._export][start : start + self._terms.chunk_bytes] = self._slots[slot]

    def locate(self, slot: int, receiver: int) -> Location:
        return Location(self._export, slot * self._terms.chunk_bytes, raw(self._export), self._old)

    def reclaim(self, receiver: int, export: int, opened: bool) -> None:
        calls.append(("reclaim" if opened else "reclaim unopened", export))
        memories.pop(export).fill_(255)


class MovingImporter(Importer):
    def attach(self, handle: Raw) -> Tensor:
        export = decode_as(int, handle)
        calls.append(("attach", export))
        return memories[export]

    def detach(self, export: int) -> None:
        calls.append(("detach", export))


class MovingTransport(Transport):
    name: ClassVar[str] = "moving"
    api_version: ClassVar[int] = 1
    every: ClassVar[int] = 1

    @classmethod
    def probe(cls, site: Any) -> Offer:
        return Offer(cls.name)

    @classmethod
    def match(cls, sender: Any, receiver: Any, lane: frozenset[str]) -> Match:
        return Match(Reach.HOST_MEMORY)

    @classmethod
    def exporter(cls, terms: Terms, wiring: Any) -> MovingExporter:
        return MovingExporter(terms)

    @classmethod
    def importer(cls, terms: Terms, wiring: Any) -> MovingImporter:
        return MovingImporter()


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    memories.clear()
    calls.clear()
    with installed(MovingTransport):
        yield


def exports(what: str) -> list[int]:
    return [export for call, export in calls if call == what]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("way", ends.WAYS)
def test_each_export_is_mapped_once_and_given_back_once(every: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovingTransport, "every", every)
    with Session(MovingTransport, chunk_bytes=700, slots=3) as session:
        for seed in range(3):
            tensors = bulk(6000, seed)
            assert session.carry(tensors, ends.WAYS[way], prints(tensors)) == prints(tensors)
        assert len(memories) <= 1 + 3, "what is superseded and read is given back while the session runs"
    used = exports("attach")
    assert len(used) == len(set(used)) > 3
    assert sorted(exports("detach")) == sorted(used)
    assert sorted(exports("reclaim")) == sorted(used)
    assert exports("reclaim unopened") == []
    for export in used[:-1]:
        assert calls.index(("detach", export)) < calls.index(("reclaim", export)), "given back while it was mapped"


def test_a_kept_lease_keeps_its_export() -> None:
    tensors = {f"t{n}": torch.full((500,), n, dtype=torch.uint8) for n in range(8)}

    def keep_the_first(receiver: Receiver) -> list[int]:
        kept: list[Tensor] = []
        for lease in receiver.chunks():
            for _, _, tensor in lease:
                if not kept:
                    kept.append(tensor)
                    export = calls[-1][1]
                del tensor
        assert ("detach", export) not in calls, "unmapped under a lease"
        return [int(kept[0][0]), int(kept[0][-1])]

    with Session(MovingTransport, chunk_bytes=500, slots=3) as session:
        assert session.carry(tensors, keep_the_first) == [0, 0]
        session.carry({"x": torch.ones(5)}, ends.count, 1)
    assert sorted(exports("attach")) == sorted(exports("detach")) == sorted(exports("reclaim"))


def test_an_export_whose_receiver_failed_is_given_back() -> None:
    def fail(receiver: Receiver) -> None:
        for number, _ in enumerate(receiver.receive()):
            if number == 2:
                raise ValueError("enough")

    with Session(MovingTransport, chunk_bytes=300, slots=2) as session:
        receiving = session.receive(fail)
        assert isinstance(session.send(bulk(5000)).error(20), TransportKitError)
        assert isinstance(receiving.error(20), ValueError)
    named = exports("reclaim") + exports("reclaim unopened")
    assert sorted(exports("attach")) == sorted(exports("detach"))
    assert len(named) == len(set(named)) >= len(exports("attach"))
    assert set(memories) <= {max([*memories, 0])}, "at most the one that was never located is left to close()"
