"""Fixtures that every test shares: nothing may be left behind, and what needs a GPU says so."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds that a test's processes and descriptors have to go away after it.
GRACE = 10.0

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Shared machines stall for longer than hypothesis' 200 ms; the timeout of each test bounds what matters.
hypothesis.settings.register_profile("transportkit", deadline=None)
hypothesis.settings.load_profile("transportkit")

# A shell starts jobs in the background, and nohup all it starts, with these ignored; what is tested obeys them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def _children() -> set[psutil.Process]:
    """Live descendants, less the helpers that multiprocessing keeps until its process ends."""
    alive = set()
    for child in psutil.Process().children(recursive=True):
        command = _command(child)
        if command and not any(helper in command for helper in HELPERS):
            alive.add(child)
    return alive


def _command(process: psutil.Process) -> str:
    """The command line; empty for a process that is gone or a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _descriptors() -> Counter[str]:
    """Kinds of the open descriptors that can be a session's: sockets and shared memory."""
    kinds: Counter[str] = Counter()
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return kinds
    for number in numbers:
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:", "/dev/shm/")):
            kinds[target.partition("[")[0]] += 1
    return kinds


@functools.cache
def _start_cuda() -> None:
    """Have the GPU's driver open what it keeps open: no test leaves that behind. Skipped tests do not come here."""
    import torch

    torch.ones(1, device="cuda").cpu()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process, a socket or shared memory behind.

    Waits `GRACE` seconds first; `pytest.mark.leaves_children` switches the part about processes off.
    """
    if request.node.get_closest_marker("gpu"):
        _start_cuda()
    processes, descriptors = _children(), _descriptors()
    yield
    check_children = request.node.get_closest_marker("leaves_children") is None
    deadline = time.monotonic() + GRACE
    while True:
        orphans = _children() - processes if check_children else set()
        open_still = _descriptors() - descriptors
        if not orphans and not open_still:
            return
        if time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.05)
    for orphan in orphans:
        orphan.kill()
    told = [f"process {orphan.pid}: {_command(orphan) or 'gone by now'}" for orphan in orphans]
    told += [f"{count} descriptors more of {kind}" for kind, count in open_still.items()]
    pytest.fail("the test left behind: " + "; ".join(told))
