"""One call at a time on an end of a mailbox: others wait for their turn, each within its own deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from transportkit.errors import DeadlineError, UsageError

if TYPE_CHECKING:
    from transportkit.deadline import Deadline


class Turns:
    """The lock of an end, which knows who has it.

    Args:
        end: what is waited for, in words.
    """

    __slots__ = ("_depth", "end", "inside", "keeper", "lock")

    def __init__(self, end: str) -> None:
        self.end = end
        self.lock = threading.Lock()
        self.inside: int | None = None
        self.keeper: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether a call of this very thread is running: a signal handler or a finaliser has interrupted it."""
        return self.inside == threading.get_ident()

    def leave(self) -> None:
        """End a call."""
        self.inside = None
        if self.keeper is None:
            self.lock.release()

    def try_enter(self, seconds: float = 0.0) -> bool:
        """Begin a call if that can be within so many seconds, which it cannot within one of this thread."""
        if self.mine or not self.lock.acquire(timeout=seconds):
            return False
        self.inside = threading.get_ident()
        return True

    def keep(self) -> None:
        """Within a call: let no other thread have a turn after it, until `give_up`. May be nested."""
        self.keeper = self.inside
        self._depth += 1

    def give_up(self) -> None:
        """Undo one `keep` of this thread."""
        self._depth -= 1
        if not self._depth:
            self.keeper = None
            self.lock.release()


class Turn:
    """Around one call; a class, since a generator would cost a message two microseconds.

    Raises:
        DeadlineError: other threads' calls took all of the time.
        UsageError: it is called within a call of the same thread.
    """

    __slots__ = ("_deadline", "_turns")

    def __init__(self, turns: Turns, deadline: Deadline) -> None:
        self._turns, self._deadline = turns, deadline

    def __enter__(self) -> None:
        turns, me = self._turns, threading.get_ident()
        if turns.inside == me:
            raise UsageError(
                f"this {turns.end} is in the middle of a call that this one interrupts, from a signal handler say; "
                "only abort() may come at any time"
            )
        if turns.keeper != me and not turns.lock.acquire(blocking=False):
            left = self._deadline.remaining(threading.TIMEOUT_MAX) or 0.0
            if not turns.lock.acquire(timeout=left):
                raise DeadlineError(
                    f"another thread was in this {turns.end} for all of {self._deadline.seconds or 0:g} s "
                    f"(raise `{self._deadline.keyword}=` where that is too short)"
                )
        turns.inside = me

    def __exit__(self, *_: object) -> None:
        self._turns.leave()
