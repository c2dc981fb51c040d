"""A small backend for the threads of one process, and what can be wrong with one, for the test of the suite."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from transportkit.backends.pickle import PickleTransport
from transportkit.errors import BackendError, ProtocolError
from transportkit.lifecycle import host_slots
from transportkit.testing import altered, faulty, in_update
from transportkit.transport import (
    API_VERSION,
    Exporter,
    Importer,
    Location,
    Match,
    Mismatch,
    Offer,
    Reach,
    Transport,
)
from transportkit.wire import decode_as, raw

if TYPE_CHECKING:
    from msgspec import Raw

_exports: dict[int, torch.Tensor] = {}
_numbers = itertools.count(1)


class LocalExporter(Exporter):
    def __init__(self, terms, wiring) -> None:
        self._slots = host_slots(terms.slots, terms.chunk_bytes)
        self._ids = [next(_numbers) for _ in self._slots]
        _exports.update(zip(self._ids, self._slots, strict=True))

    @property
    def slots(self):
        return self._slots

    def locate(self, slot, receiver):
        return Location(self._ids[slot], 0, raw(self._ids[slot]))

    def close(self) -> None:
        for number in self._ids:
            _exports.pop(number, None)


class LocalImporter(Importer):
    def attach(self, handle: Raw):
        number = decode_as(int, handle)
        if number not in _exports:
            raise BackendError(f"there is no export {number}")
        return _exports[number]

    def open(self, header, attached, deadline):
        if attached is None:
            raise BackendError("the header names no export")
        start, end = header.location.offset, header.location.offset + header.nbytes
        if not 0 <= start <= end <= attached.numel():
            raise BackendError(f"bytes {start} to {end} of an export of {attached.numel()}")
        return attached[start:end]


class LocalTransport(Transport):
    """Slots that the importer finds by number, which works within one process only."""

    name: ClassVar[str] = "local"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = True
    exporter_class: ClassVar[type] = LocalExporter
    importer_class: ClassVar[type] = LocalImporter

    @classmethod
    def probe(cls, site):
        return Offer(cls.name, cls.api_version)

    @classmethod
    def match(cls, sender, receiver, lane):
        if (sender.site.boot_id, sender.site.pid) != (receiver.site.boot_id, receiver.site.pid):
            return Mismatch("in another process")
        return Match(Reach.HOST_MEMORY)

    @classmethod
    def exporter(cls, terms, wiring):
        return cls.exporter_class(terms, wiring)

    @classmethod
    def importer(cls, terms, wiring):
        return cls.importer_class()


def broken(exporter: type = LocalExporter, importer: type = LocalImporter, **attributes: Any) -> type[Transport]:
    fields = {"name": "broken", "exporter_class": exporter, "importer_class": importer, **attributes}
    return type("BrokenTransport", (LocalTransport,), fields)


# -- bytes ------------------------------------------------------------------------------------------------------------


def _drop_the_last_byte(call, header, *_):
    chunk = call().clone()
    chunk[-1:] ^= 0xFF
    return chunk


DroppedBytes = altered(PickleTransport, at="open", change=_drop_the_last_byte, when=in_update, name="broken")


class _WrongOffset(LocalExporter):
    def locate(self, slot, receiver):
        number = self._ids[0]
        return Location(number, 0, raw(number))


WrongOffset = broken(_WrongOffset)


class _OneBuffer(LocalImporter):
    """Lands every chunk in the same memory."""

    memory = None

    def open(self, header, attached, deadline):
        chunk = super().open(header, attached, deadline)
        if self.memory is None:
            self.memory = torch.empty(1 << 20, dtype=torch.uint8)
        self.memory[: header.nbytes] = chunk
        return self.memory[: header.nbytes]


ChangedUnderALease = broken(importer=_OneBuffer)


def _do_nothing(call, *_):
    return None


NoPublish = altered(PickleTransport, at="publish", change=_do_nothing, name="broken")

# -- lifecycle --------------------------------------------------------------------------------------------------------


class _ExportsAgain(LocalExporter):
    """Makes a new export for every chunk."""

    def locate(self, slot, receiver):
        number = next(_numbers)
        _exports[number] = self._slots[slot]
        self._ids.append(number)
        return Location(number, 0, raw(number))


AttachedAgain = broken(_ExportsAgain)
NoRelease = altered(PickleTransport, at="release", change=_do_nothing, name="broken")


class _Leaking(LocalExporter):
    def __init__(self, terms, wiring) -> None:
        super().__init__(terms, wiring)
        self.descriptor = os.eventfd(0)


Leaking = broken(_Leaking)


class _Unmapped(LocalImporter):
    """Frees what is still viewed."""

    def attach(self, handle):
        self.memory = super().attach(handle)
        return self.memory

    def close(self) -> None:
        if hasattr(self, "memory"):
            self.memory.fill_(0xDD)


Unmapped = broken(importer=_Unmapped)

# -- waits and errors -------------------------------------------------------------------------------------------------

HangsInOpen = faulty(PickleTransport, at="open", when=in_update, seconds=6, name="broken")


class _Deaf(LocalImporter):
    """Waits without looking at its deadline or its links, and cannot be aborted."""

    def connect(self, deadline) -> None:
        time.sleep(2.5)


Deaf = broken(importer=_Deaf)


class _BlocksInAbort(LocalExporter):
    def abort(self) -> None:
        time.sleep(2)


BlocksInAbort = broken(_BlocksInAbort)


class _ReadsElsewhere(LocalImporter):
    """Believes what a header says of the place of its bytes."""

    def open(self, header, attached, deadline):
        return attached.as_strided((header.nbytes,), (1,), header.location.offset % max(1, attached.numel() // 2))


ReadsElsewhere = broken(importer=_ReadsElsewhere)


def _native(call, *_):
    try:
        return call()
    except (ProtocolError, BackendError) as error:
        raise IndexError("native") from error


NativeError = altered(LocalTransport, at="open", change=_native, name="broken")


def _hear_anything(call, *args):
    return args[-1][1000]


BelievesSignals = altered(LocalTransport, at="exporter.hear", change=_hear_anything, name="broken")


class _CloseTwice(LocalExporter):
    def close(self) -> None:
        for number in self._ids:
            del _exports[number]


CloseTwice = broken(_CloseTwice)


# -- updates that fail, and bytes that come late ----------------------------------------------------------------------


class _CountsOn(LocalImporter):
    """Expects chunk after chunk, and knows no update that ends early."""

    due = 0

    def open(self, header, attached, deadline):
        if header.update > 0:
            if header.seq != self.due:
                raise ProtocolError(f"chunk {header.seq} came where chunk {self.due} was due")
            self.due = 0 if header.last else header.seq + 1
        return super().open(header, attached, deadline)


CountsOn = broken(importer=_CountsOn)


# -- what it says of itself -------------------------------------------------------------------------------------------

_left: list[int] = []


def _leave_a_descriptor(call, site):
    _left.append(os.eventfd(0))
    return call()


LeavesAfterProbe = altered(LocalTransport, at="probe", change=_leave_a_descriptor, name="broken")


def _slow(call, site):
    time.sleep(0.25)
    return call()


SlowProbe = altered(LocalTransport, at="probe", change=_slow, name="broken")


def _without_reason(call, *_):
    verdict = call()
    return Mismatch("") if isinstance(verdict, Mismatch) else verdict


NoReason = altered(LocalTransport, at="match", change=_without_reason, name="broken")


def _of_a_mood(call, *_):
    return Match(Reach.HOST_MEMORY, note=str(next(_numbers)))


Moody = altered(LocalTransport, at="match", change=_of_a_mood, name="broken")


class _Misaligned(LocalExporter):
    def __init__(self, terms, wiring) -> None:
        super().__init__(terms, wiring)
        memory = torch.empty(terms.slots * terms.chunk_bytes + 64, dtype=torch.uint8)[1:]
        self._slots = tuple(memory[i * terms.chunk_bytes :][: terms.chunk_bytes] for i in range(terms.slots))
        _exports.update(zip(self._ids, self._slots, strict=True))


Misaligned = broken(_Misaligned)


class _Overlapping(LocalExporter):
    def __init__(self, terms, wiring) -> None:
        super().__init__(terms, wiring)
        self._slots = tuple(self._slots[0][:] for _ in self._slots)
        _exports.update(zip(self._ids, self._slots, strict=True))


Overlapping = broken(_Overlapping)
