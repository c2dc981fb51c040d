"""What a process holds: descriptors, threads, children, shared memory; taken twice, it tells what was left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Threads and descriptors that come with the first child, and stay: of no backend's doing.
_HELPERS = ("multiprocessing", "resource_tracker", "QueueFeederThread")

#: Begins the names of what the driver of a GPU opens and maps as it likes, and leaves where a process is killed.
_DRIVERS = ("/dev/nvidia", "/dev/shm/cuda.shm.", "/memfd:/.nvidia")

#: Seconds that things have to go away after a test; on a busy machine a thread may need some to end.
GRACE = 10.0


@attrs.frozen
class Holdings:
    """What this process holds now.

    Attributes:
        descriptors: how many lead to each kind of thing: ``"socket"``, ``"pipe"``, ``"/memfd:name"``, or a path.
        threads: how many there are of each name.
        mappings: how many mapped ranges there are of memory files and of ``/dev/shm``.
        shared: the names in ``/dev/shm``.
    """

    descriptors: Counter[str]
    threads: Counter[str]
    mappings: Counter[str]
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            _descriptors(),
            Counter(t.name for t in threading.enumerate() if not t.name.startswith(_HELPERS)),
            _mappings(),
            frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset(),
        )

    def beyond(self, earlier: Holdings) -> list[str]:
        """In words, what is held now and was not held then."""
        told = [f"{n} more descriptors of {kind}" for kind, n in (self.descriptors - earlier.descriptors).items()]
        told += [f"{n} more threads named {name!r}" for name, n in (self.threads - earlier.threads).items()]
        told += [f"{n} more mappings of {name}" for name, n in (self.mappings - earlier.mappings).items()]
        shared = sorted(self.shared - earlier.shared)
        paths = {f"/dev/shm/{name}" for name in shared if not _maybe_of_another_worker(name) and not _of_others(name)}
        told += sorted(path for path in paths if not path.startswith(_DRIVERS))
        return told


@contextlib.contextmanager
def nothing_left(*folders: Path, grace: float | None = None, hint: str = "") -> Iterator[None]:
    """Fail, with what it is, where this block leaves something behind.

    Args:
        folders: directories that must hold afterwards what they held before.
        grace: seconds that things have to go away; by default `GRACE`.
        hint: what to say in addition.
    """
    before = Holdings.now()
    files = {folder: set(os.listdir(folder)) for folder in folders}
    yield
    end = time.monotonic() + (GRACE if grace is None else grace)
    while True:
        left = Holdings.now().beyond(before)
        left += [str(folder / name) for folder in folders for name in sorted(set(os.listdir(folder)) - files[folder])]
        if not left or time.monotonic() > end:
            break
        gc.collect()
        time.sleep(0.02)
    assert not left, f"left behind: {'; '.join(left)}{hint and f'; {hint}'}"


def _maybe_of_another_worker(name: str) -> bool:
    """Whether this is a semaphore that, in a parallel run of the tests, another worker's processes may have left."""
    return name.startswith("sem.mp-") and "PYTEST_XDIST_WORKER" in os.environ


def _of_others(name: str) -> bool:
    """Whether another process has this shared memory mapped: then it is not this one's to clean up."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if f"/dev/shm/{name}" in maps.read_text(encoding="utf-8", errors="replace"):
                    return True
    return False


def resident() -> int:
    """Bytes of this process that are in memory, less what is garbage and what the allocator merely keeps."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
        if not target.startswith(_DRIVERS):
            kinds[target.partition(":")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    return kinds


def _mappings() -> Counter[str]:
    names: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith(("/memfd:", "/dev/shm/")) and not path[0].startswith(_DRIVERS):
            names[path[0]] += 1
    return names
