"""One call at a time: what keeps a session from being used twice at once, after its end, or in a forked child."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transportkit.errors import ClosedError, ForkedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The calls that return an iterator, within which they are still running.
_ITERATORS = ("receive", "chunks")


class Guard:
    """The lock of a session.

    Args:
        what: the session's class, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._running = ""
        self._thread: int | None = None
        self.closed: str | None = None
        """Why the session is closed; None while it is open."""

    def check(self) -> None:
        """Raise `ForkedError` or `ClosedError` where no call may be made."""
        if self._pid != os.getpid():
            raise ForkedError(f"this {self._what} belongs to process {self._pid}; open another one in the forked child")
        if self.closed is not None:
            raise ClosedError(f"this {self._what} is closed: {self.closed}")

    def acquire(self, call: str) -> None:
        """Begin a call. Raises what `check` raises, and `UsageError` while another call runs."""
        self.check()
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"{self._what}.{call}() was called while {self._still()}")
        self._running, self._thread = call, threading.get_ident()

    def release(self) -> None:
        self._running, self._thread = "", None
        self._lock.release()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around one call."""
        self.acquire(name)
        try:
            yield
        finally:
            self.release()

    def may_end(self, *within: str) -> bool:
        """Whether the session is to be ended now: False where it has ended, or is a forked child's copy of it.

        Args:
            within: the calls within which it cannot be ended.

        Raises:
            UsageError: one of them is running, or any call in another thread.
        """
        if self.closed is not None:
            return False
        if self.forked:
            self.closed = "inherited by a forked child"
            return False
        if self.elsewhere:
            raise UsageError(f"close() was called while {self._still()}")
        if self.running in within:
            raise UsageError(f"close() was called within {self.running}(); raise an exception to end it")
        return True

    def _still(self) -> str:
        """What is still running, and what to do about it."""
        if self._running in _ITERATORS:
            return (
                f"the iterator of {self._running}() is not at its end; take the rest, or close it where it is "
                "(`iterator.close()`), which fails its update"
            )
        where = "in another thread" if self.elsewhere else "inside itself or its callback"
        return f"{self._running}() is still running {where}; one call at a time (`abort()` ends it from any thread)"

    @property
    def running(self) -> str:
        """The name of the call that is running, or empty."""
        return self._running

    @property
    def elsewhere(self) -> bool:
        """Whether a call is running in another thread."""
        return self._thread is not None and self._thread != threading.get_ident()

    @property
    def forked(self) -> bool:
        return self._pid != os.getpid()
