"""A double of a GPU over shared memory, which enforces what a real one would, and the backend over it; no test is here.

The memory file of an allocation has three parts: a page of counters, what the exporter packs into, and what importers
see. The copy from the one to the other happens when somebody waits for the slot's event, in whichever process that is:
nobody sees bytes that nobody has waited for. In detail:

- a handle is not mapped by the process that made it, unless the double says `alone`;
- a handle is mapped once at a time in a process; each mapping ends once;
- memory is not freed while a live process has it mapped;
- an event that was never recorded is no reason to wait; on a device that is `stuck` none fires and nothing ends.

What breaks a rule raises `RuleError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from transportkit.errors import BackendError, ResourceError
from transportkit.transport import Offer, Transport, Unavailable
from transportkit.wire import raw
from transportkit_cuda_ipc.cuda_ipc import CudaIpcTransport
from transportkit_cuda_ipc.devices import Device
from transportkit_cuda_ipc.matching import CudaOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from transportkit.wire import Site

PAGE = mmap.PAGESIZE
HANDLE = struct.Struct("<qq16sq24x")  # pid, descriptor, id, slots
SLOTS = 64
OPENERS = 32
#: In units of eight bytes: exports, openers as (pid, count), events as (recorded, fired).
EXPORTS, FIRST_OPENER, FIRST_EVENT = 0, 8, 8 + 2 * OPENERS


class RuleError(AssertionError):
    """A rule of the device was broken."""


@attrs.define(eq=False)
class Block:
    """One allocation, mapped here.

    Args:
        file: the memory file's descriptor.
        counters: the first page, as 64-bit numbers.
        packed: what the exporter packs into, uint8 of shape (nbytes,).
        seen: what importers see, the same.
    """

    file: int
    identity: bytes
    slots: int
    counters: memoryview
    packed: Tensor
    seen: Tensor

    def fire(self, slot: int) -> None:
        """The device reaches this slot's event: what was packed before it is there."""
        recorded, fired = self.counters[FIRST_EVENT + 2 * slot], self.counters[FIRST_EVENT + 2 * slot + 1]
        if recorded > fired:
            stride = self.packed.numel() // self.slots
            self.seen[slot * stride : (slot + 1) * stride] = self.packed[slot * stride : (slot + 1) * stride]
            self.counters[FIRST_EVENT + 2 * slot + 1] = recorded

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        file = os.open(f"/proc/self/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def count(self, change: int) -> None:
        """This process has the memory mapped once more, or once less."""
        pid = os.getpid()
        with self.locked():
            entries = range(FIRST_OPENER, FIRST_EVENT, 2)
            at = next((i for i in entries if self.counters[i] == pid), None)
            at = next(i for i in entries if not _lives(self.counters[i])) if at is None else at
            if self.counters[at] != pid:
                self.counters[at], self.counters[at + 1] = pid, 0
            self.counters[at + 1] += change
            if self.counters[at + 1] < 0:
                raise RuleError("unmapped more often than mapped: the counter is below zero")

    def mapped_by(self) -> dict[int, int]:
        """The live processes that have it mapped, and how often."""
        entries = {self.counters[i]: self.counters[i + 1] for i in range(FIRST_OPENER, FIRST_EVENT, 2)}
        return {pid: count for pid, count in entries.items() if count and _lives(pid)}


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _view(memory: mmap.mmap, start: int, nbytes: int) -> tuple[Tensor, object]:
    owner = (ctypes.c_uint8 * nbytes).from_buffer(memory, start)
    return torch.frombuffer(owner, dtype=torch.uint8), owner


_own: dict[bytes, Block] = {}
_mapped: set[bytes] = set()
journal: list[str] = []
"""What the devices of this process did with memory, in order."""


class DoubleDevice(Device):
    """A GPU that is none. Subclasses break it in one way each."""

    alone: ClassVar[bool] = False
    stuck: ClassVar[bool] = False
    uuids: ClassVar[tuple[str, ...]] = ("double-0", "double-1")

    def __init__(self, uuid: str, slots: int = 0, *, interprocess: bool = False) -> None:
        if uuid not in self.uuids:
            raise BackendError(f"GPU {uuid} is not visible here, only {', '.join(self.uuids)}", backend="cuda-ipc")
        self._slots = slots
        self._interprocess = interprocess
        self._block: Block | None = None
        self._theirs: Block | None = None
        self._asked: set[int] = set()

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Tensor:
        assert self._slots <= SLOTS
        file = os.memfd_create("cuda-double", os.MFD_CLOEXEC)
        os.ftruncate(file, PAGE + 2 * nbytes)
        block = self._open(file, secrets.token_bytes(16), nbytes, self._slots)[0]
        self._block = _own[block.identity] = block
        journal.append("allocate")
        return block.packed

    @staticmethod
    def _open(file: int, identity: bytes, nbytes: int, slots: int) -> tuple[Block, object]:
        memory = mmap.mmap(file, PAGE + 2 * nbytes)
        packed, _ = _view(memory, PAGE, nbytes)
        seen, owner = _view(memory, PAGE + nbytes, nbytes)
        return Block(file, identity, slots, memoryview(memory)[:PAGE].cast("q"), packed, seen), owner

    def export(self, whole: Tensor) -> bytes:
        block = self._block
        assert block is not None
        assert whole is block.packed
        block.counters[EXPORTS] += 1
        journal.append("export")
        return HANDLE.pack(os.getpid(), block.file, block.identity, block.slots)

    def free(self, whole: Tensor) -> None:
        if self.stuck:
            raise RuleError("freed while something is queued on it, which would hold up whoever frees")
        block = self._block
        if block is None or _own.pop(block.identity, None) is None:
            raise RuleError("freed twice, or what was never allocated")
        if block.mapped_by():
            raise RuleError(f"freed while it is mapped by {block.mapped_by()}")
        self._block = None
        os.close(block.file)
        journal.append("free")

    def map(self, handle: bytes, nbytes: int, events: Sequence[bytes], unmapped: Callable[[], None]) -> Tensor:
        if len(handle) != HANDLE.size:
            raise BackendError("what came is no handle", backend="cuda-ipc")
        pid, descriptor, identity, slots = HANDLE.unpack(handle)
        if pid == os.getpid() and not self.alone:
            raise BackendError("invalid device context: a process does not map its own memory", backend="cuda-ipc")
        if identity in _mapped and not self.alone:
            raise RuleError("this handle is mapped already: a second mapping drives the counter")
        try:
            file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(f"invalid argument: that memory is gone: {error}", backend="cuda-ipc") from error
        if os.fstat(file).st_size != PAGE + 2 * nbytes:
            os.close(file)
            raise BackendError("invalid argument: that memory has another size", backend="cuda-ipc")
        block, owner = self._open(file, identity, nbytes, slots)
        seen = block.seen
        block.count(+1)
        _mapped.add(identity)
        journal.append("map")
        self._theirs = attrs.evolve(
            block, seen=torch.empty(0, dtype=torch.uint8)
        )  # only what the user views keeps the mapping
        self._seen = weakref.ref(owner)
        weakref.finalize(owner, self._unmap, block.counters, file, identity, unmapped).atexit = False
        return seen

    def _unmap(self, counters: memoryview, file: int, identity: bytes, unmapped: Callable[[], None]) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        Block(file, identity, 0, counters, empty, empty).count(-1)
        self._theirs = None
        _mapped.discard(identity)
        os.close(file)
        journal.append("unmap")
        unmapped()

    # -- order --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def packing(self, slot: int) -> Iterator[None]:
        try:
            yield
        finally:
            assert self._block is not None
            self._asked.discard(slot)
            self._block.counters[FIRST_EVENT + 2 * slot] += 1

    def packed(self, slot: int) -> bool:
        if self.stuck or self._block is None:
            return False
        if slot not in self._asked:  # never at once
            self._asked.add(slot)
            return False
        self._block.fire(slot)
        return True

    def events(self) -> tuple[bytes, ...]:
        assert self._interprocess, "the events were not made to be shared"
        return tuple(b"event %d" % slot for slot in range(self._slots))

    def follow(self, slot: int) -> None:
        owner = self._seen()
        if self._theirs is None or owner is None:
            raise RuleError("nothing is mapped")
        seen = torch.frombuffer(owner, dtype=torch.uint8)  # type: ignore[call-overload]
        attrs.evolve(self._theirs, seen=seen).fire(slot)

    def idle(self) -> Callable[[], bool]:
        answers = iter([False, True])
        return lambda: next(answers, True) and not self.stuck


class AloneDevice(DoubleDevice):
    """Lets a process map its own memory, for the tests that have both ends in one."""

    alone = True


class MapFails(DoubleDevice):
    def map(self, handle: bytes, nbytes: int, events: Sequence[bytes], unmapped: Callable[[], None]) -> Tensor:
        raise OSError(1, "Operation not permitted")


class ExportFails(DoubleDevice):
    def export(self, whole: Tensor) -> bytes:
        raise BackendError("exporting device memory failed: cudaErrorNotSupported (801)", backend="cuda-ipc")


class NoMemory(DoubleDevice):
    def allocate(self, nbytes: int) -> Tensor:
        raise ResourceError("allocating device memory failed: out of memory (2)", backend="cuda-ipc")


class NeverFires(DoubleDevice):
    """Events that are recorded and never reached, from the first update on."""

    packings = 0

    def packed(self, slot: int) -> bool:
        return self.packings <= 1 and super().packed(slot)

    @contextlib.contextmanager
    def packing(self, slot: int) -> Iterator[None]:
        with super().packing(slot):
            yield
        self.packings += 1


class NeverIdle(DoubleDevice):
    """A receiver's GPU that does not finish what is queued."""

    def idle(self) -> Callable[[], bool]:
        return super().idle() if self._block is not None else lambda: False


class TwiceMapped(DoubleDevice):
    """What opening per chunk does."""

    def map(self, handle: bytes, nbytes: int, events: Sequence[bytes], unmapped: Callable[[], None]) -> Tensor:
        first = super().map(handle, nbytes, events, unmapped)
        try:
            return super().map(handle, nbytes, events, unmapped)
        finally:
            del first


class Unwaited(DoubleDevice):
    """An exporter that takes its copies for done as soon as they are queued."""

    def packed(self, slot: int) -> bool:
        return True


# -- the backend over them ---------------------------------------------------------------------------------------------


class DoubleTransport(CudaIpcTransport):
    """`cuda-ipc` on the double; ``made`` is its GPU."""

    name = "cuda-double"
    made: ClassVar[type[DoubleDevice]] = DoubleDevice

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        return Offer(cls.name, 1, "0", params=raw(CudaOffer(devices=cls.made.uuids, driver="13.0", runtime="13.0")))

    @classmethod
    def device(cls) -> type[Device]:
        return cls.made


class AloneTransport(DoubleTransport):
    name = "cuda-double-alone"
    made = AloneDevice


class MapFailsTransport(DoubleTransport):
    name = "cuda-double-map-fails"
    made = MapFails


class ExportFailsTransport(DoubleTransport):
    name = "cuda-double-export-fails"
    made = ExportFails


class NoMemoryTransport(DoubleTransport):
    name = "cuda-double-no-memory"
    made = NoMemory


class NeverFiresTransport(DoubleTransport):
    name = "cuda-double-never-fires"
    made = NeverFires


class NeverIdleTransport(DoubleTransport):
    name = "cuda-double-never-idle"
    made = NeverIdle


class TwiceMappedTransport(DoubleTransport):
    name = "cuda-double-twice-mapped"
    made = TwiceMapped


class UnwaitedTransport(DoubleTransport):
    name = "cuda-double-unwaited"
    made = Unwaited


ALL: tuple[type[Transport], ...] = (
    DoubleTransport,
    MapFailsTransport,
    ExportFailsTransport,
    NoMemoryTransport,
    NeverFiresTransport,
    NeverIdleTransport,
    TwiceMappedTransport,
    UnwaitedTransport,
)
