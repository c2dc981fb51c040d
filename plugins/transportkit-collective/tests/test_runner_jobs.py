"""The jobs of a runner: their order, how many are under way, and what becomes of them when one fails."""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from transportkit.errors import BackendError
from transportkit_collective.runner import IN_FLIGHT, Bell, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transportkit_collective.runner import Job


class Group:
    """A group that writes down what happens, and whose jobs end when they are told to."""

    ends_by = 0.0

    def __init__(self) -> None:
        self.told: list[str] = []
        self.disposed = threading.Event()

    def job(self, name: str, go: threading.Event, fails: bool = False) -> Callable[[], Callable[[], str]]:
        def start() -> Callable[[], str]:
            self.told.append(f"{name} begins")
            return finish

        def finish() -> str:
            assert go.wait(10)
            if fails:
                raise RuntimeError(name)
            self.told.append(f"{name} ends")
            return name

        return start

    def sever(self) -> None:
        self.told.append("severed")

    def dispose(self) -> None:
        self.told.append("disposed")
        self.disposed.set()

    def disown(self) -> None:
        raise AssertionError

    def forked(self) -> None:
        raise AssertionError


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def runner(group: Group) -> Iterator[Runner]:
    bell = Bell()
    runner = Runner(group, bell, "a runner under test")
    yield runner
    runner.stop()
    assert runner.join(10)
    bell.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def busy(group: Group, runner: Runner, go: threading.Event) -> Job[str]:
    """A job that has begun, so that its runner waits for the end of it."""
    job = runner.submit(group.job("first", go))
    until(lambda: group.told != [])
    return job


def test_so_many_are_under_way_and_the_others_wait_in_order(group: Group, runner: Runner) -> None:
    goes = [threading.Event() for _ in range(IN_FLIGHT + 2)]
    jobs = []
    for number, go in enumerate(goes):
        jobs.append(runner.submit(group.job(str(number), go)))
        until(lambda: group.told != [])
    assert group.told == [f"{number} begins" for number in range(IN_FLIGHT)]
    goes[1].set()
    time.sleep(0.01)
    assert not any(job.done for job in jobs), "the second one is over before the first"
    goes[0].set()
    until(lambda: jobs[1].done)
    until(lambda: f"{IN_FLIGHT + 1} begins" in group.told)
    begun = [line for line in group.told if line.endswith("begins")]
    assert begun == [f"{number} begins" for number in range(IN_FLIGHT + 2)]
    for go in goes:
        go.set()
    until(lambda: all(job.done for job in jobs))
    assert [job.value() for job in jobs] == [str(number) for number in range(IN_FLIGHT + 2)]


def test_after_one_that_fails_nothing_begins_and_nothing_of_the_group_is_kept(group: Group, runner: Runner) -> None:
    go = threading.Event()
    failing = runner.submit(group.job("failing", go, fails=True))
    until(lambda: group.told != [])
    start = group.job("under way", threading.Event())
    kept = weakref.ref(inspect.getclosurevars(start).nonlocals["finish"])
    others = [runner.submit(start), *(runner.submit(group.job("waiting", go)) for _ in range(IN_FLIGHT))]
    del start
    go.set()
    assert group.disposed.wait(10)
    assert isinstance(failing.error, RuntimeError)
    assert not any(job.done for job in others)
    assert group.told.count("waiting begins") == IN_FLIGHT - 2
    assert group.told[-1] == "disposed"
    assert kept() is None, "a job that nobody will finish keeps what it was to wait for"


def unable() -> Callable[[], None]:
    raise RuntimeError("it cannot begin")


def test_one_that_cannot_begin_fails_in_its_turn(group: Group, runner: Runner) -> None:
    go = threading.Event()
    first = busy(group, runner, go)
    second = runner.submit(unable)
    assert not second.done
    go.set()
    until(lambda: second.done)
    assert first.value() == "first"
    assert str(second.error) == "it cannot begin"
    assert group.disposed.wait(10)


def test_nothing_begins_after_one_that_could_not(group: Group, runner: Runner) -> None:
    """The ranks count: it would be taken for the one that is missing."""
    go = threading.Event()
    first = busy(group, runner, go)
    second = runner.submit(unable)
    third = runner.submit(group.job("third", go))
    go.set()
    assert group.disposed.wait(10)
    assert (first.done, second.done, third.done) == (True, True, False)
    assert "third begins" not in group.told


def test_an_interrupt_while_one_begins_is_the_callers(group: Group, runner: Runner) -> None:
    go = threading.Event()
    busy(group, runner, go)

    def start() -> Callable[[], None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.submit(start)
    later = runner.submit(group.job("later", go))
    go.set()
    assert group.disposed.wait(10)
    assert not later.done
    assert "later begins" not in group.told


def test_a_stopped_runner_takes_nothing_more_and_severs_what_does_not_end(group: Group, runner: Runner) -> None:
    go = threading.Event()
    running = runner.submit(group.job("running", go))
    until(lambda: group.told != [])
    waiting = [runner.submit(group.job("other", go)) for _ in range(IN_FLIGHT)]
    runner.stop()
    with pytest.raises(BackendError, match="has ended"):
        runner.submit(group.job("late", go))
    until(lambda: "severed" in group.told)
    go.set()
    assert group.disposed.wait(10)
    assert running.value() == "running"
    assert not any(job.done for job in waiting)
    assert group.told.count("other begins") == IN_FLIGHT - 1
