"""One rank of a group, as the session's thread sees it: waits with a deadline, and what happens when it gives up.

The exporter and every importer have one. What is moved, and when, is theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from transportkit.errors import BackendError, ProtocolError, ResourceError
from transportkit_collective.runner import Bell, Runner, parked
from transportkit_collective.store import LinkStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.deadline import Deadline
    from transportkit.transport import Wiring
    from transportkit_collective.planes import Plane
    from transportkit_collective.runner import Job
T = TypeVar("T")

#: How long `close` waits for a group that is at rest, or was severed, to go; it takes a few milliseconds. In seconds.
CLOSING = 0.5

#: Slack of the bound that a group has of its own, in seconds: our deadlines are to be the first.
SLACK = 2.0


class Member:
    """One rank.

    Args:
        plane: the group's.
        wiring: the end's.
        backend: its name, for errors.
        ranks: how many the group has.
    """

    def __init__(self, plane: Plane, wiring: Wiring, backend: str, ranks: int) -> None:
        self.plane = plane
        self.bell = Bell()
        self.store = LinkStore(ranks, self.bell.ring)
        self._ranks = ranks
        self._wiring = wiring
        self._backend = backend
        self._runner: Runner | None = None
        self._ended = ""

    def form(self, rank: int, host: str, deadline: Deadline) -> Job[None]:
        """Begin to meet the other ranks; what the store has to tell is to be passed on meanwhile."""
        self.check()
        seconds = self.store.seconds = (deadline.remaining(cap=3600.0) or 0.0) + SLACK
        self._runner = Runner(self.plane, self.bell, f"transportkit-{self._backend}-{rank}")
        plane, store, ranks = self.plane, self.store, self._ranks
        return self._runner.submit(lambda: lambda: plane.form(store, rank, ranks, host, seconds))

    def begin(self, start: Callable[[], Callable[[], T]]) -> Job[T]:
        """Have the group do something, as `Runner.submit`. Raises `BackendError` where it has ended or never began."""
        self.check()
        if self._runner is None:
            raise BackendError(f"this end of {self._backend} is not connected", backend=self._backend)
        try:
            return self._runner.submit(start)
        except BaseException as error:  # nobody knows whether it has begun, and the ranks count
            self.end(f"the beginning of a broadcast was interrupted by {type(error).__name__}")
            raise

    def turn(self, deadline: Deadline) -> None:
        """Wait until the bell rings: a job is done, a word was heard, or this end was stopped.

        Raises what `Wiring.check` raises, and `DeadlineError`. The group has ended then.
        """
        try:
            self.check()
            self._wiring.wait_readable(self.bell.fileno(), deadline)
            self.bell.quiet()
            self.check()
        except BaseException as error:
            self.end(str(error))
            raise

    def result(self, job: Job[T], deadline: Deadline) -> T:
        """What a job returns, waiting for it. Its failure ends the group.

        Raises:
            BackendError: the group failed.
            PeerError: it failed because a peer is gone.
            DeadlineError: nothing came in time.
        """
        while not job.done:
            self.turn(deadline)
        if job.error is not None:
            raise self._failure(job.error) from job.error
        return job.value()

    def look(self, jobs: list[Job[None]]) -> list[Job[None]]:
        """Those that are still at work. Raises as `result` for one that has failed."""
        for job in jobs:
            if job.done and job.error is not None:
                raise self._failure(job.error) from job.error
        return [job for job in jobs if not job.done]

    def check(self) -> None:
        """Raise `BackendError` where the group has ended."""
        if self._ended:
            raise BackendError(
                f"the {self._backend} group of this lane has ended: {self._ended}", backend=self._backend
            )

    def end(self, reason: str) -> None:
        """Give the group up: what runs fails soon, what comes is refused. From any thread; does not block."""
        self._ended = self._ended or reason
        self.store.end(reason)
        if self._runner is not None:
            self._runner.stop()
        self.bell.ring()

    def close(self) -> None:
        """End it, and let go of the group; one that is still at work is parked. Idempotent."""
        self.end("it was closed")
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.join(CLOSING)
            parked()  # forgets it, unless it is
        self.bell.close()

    def _failure(self, error: BaseException) -> BaseException:
        """What to raise for a failed job: why a peer left, where the links know; else the error's own text."""
        self.end(f"{error}")
        if isinstance(error, ProtocolError | ResourceError):
            return error
        text = str(error).partition("\n")[0]
        return self._wiring.lost(BackendError(f"the {self._backend} group failed: {text}", backend=self._backend))
