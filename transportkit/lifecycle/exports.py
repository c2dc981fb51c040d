"""The exporter's side: who still reads which slot, and who still has which export; the states are in the package."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from transportkit.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transportkit.wire import Location


class Exports:
    """What an exporter has shared with each receiver, until it may be taken back.

    Args:
        reclaim: called once for each export that was named to a receiver, as `Exporter.reclaim` is.
    """

    def __init__(self, reclaim: Callable[[int, int, bool], None]) -> None:
        self._reclaim = reclaim
        self._opened: dict[tuple[int, int], bool] = {}
        """For each live (receiver, export), whether that receiver is known to have opened it."""
        self._first: dict[tuple[int, int, int], set[int]] = {}
        """The exports that the word for a chunk, (receiver, update, seq), proves to be opened."""
        self._fading: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """For each superseded (receiver, export), the chunks whose words are still owed."""

    def name(
        self, receiver: int, location: Location, update: int, seq: int, owed: Iterable[tuple[int, int]] = ()
    ) -> None:
        """A header that locates chunk ``seq`` of ``update`` is about to go to a receiver.

        Args:
            owed: the chunks, as (update, seq), for which this receiver owes its word.

        Raises:
            ProtocolError: the exporter names an export that it has superseded, which its importer would refuse.
        """
        export = location.export
        if export is None:
            return
        key = receiver, export
        if key in self._fading:
            raise ProtocolError(f"export {export} is superseded, nothing may be located in it for receiver {receiver}")
        if not self._opened.setdefault(key, False):
            self._first.setdefault((receiver, update, seq), set()).add(export)
        old = location.supersedes
        if old is not None and old != export and (receiver, old) in self._opened:
            self._fading.setdefault((receiver, old), {*owed, (update, seq)})

    def acknowledge(self, receiver: int, update: int, seq: int) -> None:
        """A receiver has released a chunk."""
        if self._first:
            for export in self._first.pop((receiver, update, seq), ()):
                if (receiver, export) in self._opened:
                    self._opened[receiver, export] = True
        if self._fading:
            for key, owed in list(self._fading.items()):
                if key[0] == receiver:
                    owed.discard((update, seq))
                    if not owed:
                        self._take_back(key)

    def drop(self, receiver: int) -> None:
        """The receiver is gone: nothing of it is waited for."""
        for key in [key for key in self._opened if key[0] == receiver]:
            self._take_back(key)
        for chunk in [chunk for chunk in self._first if chunk[0] == receiver]:
            del self._first[chunk]

    def close(self) -> None:
        """The lane is at its end."""
        for receiver in {receiver for receiver, _ in self._opened}:
            self.drop(receiver)

    @property
    def live(self) -> frozenset[tuple[int, int]]:
        """The (receiver, export) that were named and are not reclaimed."""
        return frozenset(self._opened)

    def _take_back(self, key: tuple[int, int]) -> None:
        self._fading.pop(key, None)
        receiver, export = key
        self._reclaim(receiver, export, self._opened.pop(key))


class SlotPool:
    """The states of an exporter's slots.

    Args:
        count: number of slots.
        exports: hears of each reader's word, and of each that is not waited for any more.

    Attributes:
        newest_first: hand out the slot that came free last, which the cache still holds; else each in turn.
    """

    def __init__(self, count: int, exports: Exports | None = None) -> None:
        self.count = count
        self._exports = exports
        self.newest_first = False
        self._free = collections.deque(range(count))
        self._packing: set[int] = set()
        self._reading: dict[tuple[int, int], tuple[int, set[int]]] = {}

    @property
    def free(self) -> int:
        """Number of slots that `acquire` can hand out now."""
        return len(self._free)

    def acquire(self) -> int | None:
        """Take a free slot for packing; None when all are in use."""
        if not self._free:
            return None
        slot = self._free.pop() if self.newest_first else self._free.popleft()
        self._packing.add(slot)
        return slot

    def abandon(self, slot: int) -> None:
        """Give back a slot that was never published."""
        self._packing.remove(slot)
        self._free.append(slot)

    def publish(self, slot: int, update: int, seq: int, readers: Iterable[int]) -> None:
        """The slot holds chunk ``seq`` of ``update`` and each of ``readers`` owes an acknowledgement."""
        self._packing.remove(slot)
        self._reading[update, seq] = (slot, set(readers))

    def acknowledge(self, update: int, seq: int, receiver: int) -> None:
        """One reader's word. Raises `ProtocolError` when it was not owed."""
        slot, readers = self._reading.get((update, seq), (-1, set()))
        if receiver not in readers:
            raise ProtocolError(
                f"receiver {receiver} acknowledged chunk {seq} of update {update}, which it does not hold"
            )
        self._settle(update, seq, slot, readers, receiver)
        if self._exports is not None:
            self._exports.acknowledge(receiver, update, seq)

    def drop(self, receiver: int) -> None:
        """The receiver is gone: its word is no longer waited for."""
        for (update, seq), (slot, readers) in list(self._reading.items()):
            if receiver in readers:
                self._settle(update, seq, slot, readers, receiver)
        if self._exports is not None:
            self._exports.drop(receiver)

    def reading(self, update: int) -> dict[int, int]:
        """The slots of an update's chunks that wait for a reader's word, by the chunks' numbers."""
        return {seq: slot for (number, seq), (slot, _) in self._reading.items() if number == update}

    def owed(self, receiver: int) -> list[tuple[int, int]]:
        """The chunks, as (update, seq), for which this receiver owes its word."""
        return [chunk for chunk, (_, readers) in self._reading.items() if receiver in readers]

    def debtors(self) -> frozenset[int]:
        """The receivers that owe an acknowledgement."""
        return frozenset().union(*(readers for _, readers in self._reading.values()))

    def _settle(self, update: int, seq: int, slot: int, readers: set[int], receiver: int) -> None:
        readers.remove(receiver)
        if not readers:
            del self._reading[update, seq]
            self._free.append(slot)
