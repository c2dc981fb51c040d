"""A thread on which the calls of a group wait, and which can be left behind; what is called there does not belong here.

A collective may block for as long as a peer is silent, and so does dropping its group. So the group lives on a thread
of its own, from its making to its end, and the session's thread waits for it through a descriptor, with a deadline and
an eye on the links. Whoever gives up stops the runner. What runs has a moment to come to its end, then the group is
severed, which ends what waits for a peer, but not a transfer that has begun. Until that runs into its own time limit
the runner is *parked*: thread, group and memory stay as they are, counted by `parked`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from transportkit.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: How long a job that runs at the end of its group may take before the group is severed, in seconds.
GRACE = 0.2

#: How long the end of the interpreter waits for groups that are still at work, in seconds; and how long where an
#: operation would run into its time limit shortly after: a thread that returns from one while the interpreter is being
#: taken apart ends the process by SIGABRT (CPython before 3.14).
AT_EXIT = 1.0
AT_EXIT_MOST = 6.0


class Group(Protocol):
    """What a runner needs of the group that lives on it."""

    ends_by: float
    """When what runs will have ended, whatever happens, on the monotonic clock."""

    def sever(self) -> None:
        """Make what runs fail soon. From any thread; does not block."""

    def dispose(self) -> None:
        """Drop the group. On the runner's thread, when nothing runs there."""

    def disown(self) -> None:
        """Keep the group from being dropped by anybody, ever: its threads are gone, or it is not at rest."""

    def forked(self) -> None:
        """In a forked child: close the copies of the group's descriptors."""


class Bell:
    """A descriptor that is readable after `ring`, from any thread, also when it is closed already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._number

    def ring(self) -> None:
        with self._lock:
            if self._number >= 0:
                os.eventfd_write(self._number, 1)

    def quiet(self) -> None:
        """Not readable until the next `ring`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._number)

    def close(self) -> None:
        with self._lock:
            number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


class Job(Generic[T]):
    """One call on the runner's thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._value.append(work())
        except BaseException as error:
            # Its frames hold parts of the group, which must die on the runner's thread.
            self.error = error.with_traceback(None)
        self.done = True

    def value(self) -> T:
        assert self.error is None
        return self._value[0]


class Runner:
    """The thread of one group.

    Args:
        group: lives on it.
        bell: rung after each job.
        name: of the thread.
    """

    def __init__(self, group: Group, bell: Bell, name: str) -> None:
        self.group = group
        self.bell = bell
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._severing: threading.Thread | None = None
        self._pid = os.getpid()
        work = (group, self._jobs, self._stopped, bell)
        self._thread = threading.Thread(target=_run, args=work, name=name, daemon=True)
        _runners.add(self)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Have it called after all earlier ones. Raises `BackendError` once stopped."""
        if self._stopped.is_set():
            raise BackendError("the group of this lane has ended")
        job = Job(work)
        self._jobs.put(job)
        return job

    def stop(self) -> None:
        """Take no more jobs, make the running one fail soon, then drop the group. From any thread; does not block."""
        with _lock:
            if self._stopped.is_set() or self._pid != os.getpid():
                return
            self._stopped.set()
            _leaving[:] = [runner for runner in _leaving if runner.alive] + [self]
        self._jobs.put(None)
        severing = threading.Thread(
            target=_sever, args=(self._thread, self.group), name="transportkit-sever", daemon=True
        )
        try:
            severing.start()
            self._severing = severing
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            self.group.sever()

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def severed(self, seconds: float) -> bool:
        """Wait until a stopped runner's group is severed, or has no need of that any more; whether it is."""
        if self._severing is not None:
            self._severing.join(seconds)
        return self._severing is None or not self._severing.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait for the end of a stopped runner; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def parked() -> int:
    """How many groups of this process were given up and are still at work."""
    with _lock:
        _leaving[:] = [runner for runner in _leaving if runner.alive]
        return len(_leaving)


_lock = threading.Lock()
_leaving: list[Runner] = []
_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


def _sever(thread: threading.Thread, group: Group) -> None:
    thread.join(GRACE)
    if thread.is_alive():
        group.sever()


def _run(group: Group, jobs: queue.SimpleQueue[Job[Any] | None], stopped: threading.Event, bell: Bell) -> None:
    failed = False
    while not failed and (job := jobs.get()) is not None and not stopped.is_set():
        job.run()
        # Whatever follows would be taken for the rest of what failed: the ranks count their operations.
        failed = job.error is not None
        del job
        bell.ring()
    with contextlib.suppress(Exception):  # there is nobody to tell, and nothing to be done about it
        group.dispose()
    bell.ring()


def _at_exit() -> None:
    """Before the interpreter takes its threads and modules apart, which no group survives in order."""
    runners = [runner for runner in list(_runners) if runner.alive]
    for runner in runners:
        runner.stop()
    # Only from then on does the time count: an operation that fails after it, because a busy machine severed its group
    # late, returns while the interpreter is being taken apart.
    limit = time.monotonic() + AT_EXIT_MOST
    for runner in runners:
        runner.severed(max(0.0, limit - time.monotonic()))
    now = time.monotonic()
    for runner in runners:
        limit = runner.group.ends_by + 0.5 if runner.group.ends_by < now + AT_EXIT_MOST else now + AT_EXIT
        if not runner.join(max(0.0, limit - time.monotonic())):
            runner.group.disown()


def _in_child() -> None:
    """The threads of the groups are not in this process: leave the groups alone for good."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # another thread of the parent may have held it
    _leaving.clear()
    for runner in list(_runners):
        runner.group.disown()
        runner.group.forked()
        runner.bell.close()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
