"""One call at a time on an end of a mailbox: others wait for their turn, each within its own deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from transportkit.errors import DeadlineError

if TYPE_CHECKING:
    from transportkit.deadline import Deadline


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Turn:
    """Around one call; a class, since a generator would cost a message two microseconds.

    Args:
        lock: of the end.
        deadline: bounds waiting for it.
        end: what is waited for, in words.

    Raises:
        DeadlineError: another thread had it for all of that time.
    """

    __slots__ = ("_deadline", "_end", "_lock")

    def __init__(self, lock: _Lock, deadline: Deadline, end: str) -> None:
        self._lock, self._deadline, self._end = lock, deadline, end

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        left = self._deadline.remaining(threading.TIMEOUT_MAX) or 0.0
        if not self._lock.acquire(timeout=left):
            raise DeadlineError(
                f"another thread was in this {self._end} for all of {self._deadline.seconds or 0:g} s "
                f"(raise `{self._deadline.keyword}=` where that is too short)"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
