"""A thread on which the calls of a group wait, and which can be left behind; what is called there does not belong here.

A collective may block for as long as a peer is silent, and so does dropping its group. So the group lives on a thread
of its own, from its making to its end, and the session's thread waits for it through a descriptor, with a deadline and
an eye on the links. A job begins in turn, which does not block, on whichever thread finds room for it: `IN_FLIGHT` of
them may be under way together. Its end is waited for on the runner's thread.

Whoever gives up stops the runner. What runs has a moment to come to its end, then the group is severed, which ends what
waits for a peer, but not a transfer that has begun. Until that runs into its own time limit the runner is *parked*:
thread, group and memory stay as they are, counted by `parked`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from transportkit.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: How many jobs may be under way: while one broadcast waits for its peer, or for its turn on a processor, the next one
#: moves. Where it is given up, all run into their time limits together.
IN_FLIGHT = 3

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
    """Something that the group does.

    Args:
        start: begins it, without blocking, and returns what waits for its end and gives its value.
    """

    def __init__(self, start: Callable[[], Callable[[], T]]) -> None:
        self._start: Callable[[], Callable[[], T]] | None = start
        self._finish: Callable[[], T] | None = None
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.done = False

    def begin(self) -> None:
        start, self._start = self._start, None
        assert start is not None
        try:
            self._finish = start()
        except Exception as error:
            self.error = error.with_traceback(None)  # whose frames hold parts of the group, see `finish`
        except BaseException as error:  # of the session's thread, a Ctrl-C say: it is the caller's
            self.error = RuntimeError(f"interrupted by {type(error).__name__} while a broadcast began")
            raise

    def finish(self) -> None:
        finish, self._finish = self._finish, None
        try:
            if finish is not None:
                self._value.append(finish())
        except BaseException as error:
            # Its frames hold parts of the group, which must die on the runner's thread.
            self.error = error.with_traceback(None)
        self.done = True

    def forget(self) -> None:
        """It will not be finished: let go of what it holds of the group, whoever still has the job."""
        self._start = self._finish = None

    def value(self) -> T:
        assert self.error is None
        return self._value[0]


class Jobs:
    """Jobs in their order: some under way, the others waiting for that. For two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job[Any]] = collections.deque()
        self._begun: collections.deque[Job[Any]] = collections.deque()
        self._ended = False

    def add(self, job: Job[Any]) -> None:
        """Begin it when there is room; here, where the runner's thread waits for another one. Nothing begins after
        the end.
        """
        with self._changed:
            self._waiting.append(job)
            if self._begun:
                self._begin()
            self._changed.notify_all()

    def first(self) -> Job[Any] | None:
        """The oldest job that is under way, waiting for one; None at the end."""
        with self._changed:
            while not self._waiting and not self._begun and not self._ended:
                self._changed.wait()
            self._begin()
            return None if self._ended else self._begun[0]

    def over(self) -> None:
        """The oldest has come to its end."""
        with self._changed:
            self._begun.popleft()

    def end(self) -> None:
        """Begin nothing any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def forget(self) -> None:
        """After the end: let go of all that has not come to its own."""
        with self._changed:
            for job in (*self._begun, *self._waiting):
                job.forget()
            self._begun.clear()
            self._waiting.clear()

    def _begin(self) -> None:
        # After a job that failed, none begins: the ranks count their operations, so it would be taken for that one.
        while (
            self._waiting
            and len(self._begun) < IN_FLIGHT
            and not self._ended
            and all(job.error is None for job in self._begun)
        ):
            job = self._waiting.popleft()
            self._begun.append(job)
            job.begin()


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
        self._jobs = Jobs()
        self._stopped = threading.Event()
        self._severing: threading.Thread | None = None
        self._pid = os.getpid()
        work = (group, self._jobs, bell)
        self._thread = threading.Thread(target=_run, args=work, name=name, daemon=True)
        _runners.add(self)
        self._thread.start()

    def submit(self, start: Callable[[], Callable[[], T]]) -> Job[T]:
        """Have something done, after all earlier jobs have begun. Raises `BackendError` once stopped.

        Args:
            start: as for `Job`; called here, or on the runner's thread.
        """
        if self._stopped.is_set():
            raise BackendError("the group of this lane has ended")
        job = Job(start)
        self._jobs.add(job)
        return job

    def stop(self) -> None:
        """Take no more jobs, make the running one fail soon, then drop the group. From any thread; does not block."""
        with _lock:
            if self._stopped.is_set() or self._pid != os.getpid():
                return
            self._stopped.set()
            _leaving[:] = [runner for runner in _leaving if runner.alive] + [self]
        self._jobs.end()
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


def _run(group: Group, jobs: Jobs, bell: Bell) -> None:
    while (job := jobs.first()) is not None:
        job.finish()
        if job.error is not None:
            jobs.end()  # whatever follows would be taken for the rest of what failed: the ranks count their operations
        jobs.over()
        del job
        bell.ring()
    jobs.forget()
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
