"""How long a wait may last; nothing but clock arithmetic belongs here."""

from __future__ import annotations

import time

from transportkit.errors import DeadlineError


class Deadline:
    """A bound on a wait, in seconds of the monotonic clock.

    Args:
        seconds: the bound; None never expires.
        what: what is waited for, in words; the error's text is built from it.
        keyword: the argument with which a caller raises the bound (``timeout`` or ``wait``).
    """

    __slots__ = ("_end", "keyword", "seconds", "what")

    def __init__(self, seconds: float | None, what: str, keyword: str = "timeout") -> None:
        self.seconds = seconds
        self.what = what
        self.keyword = keyword
        self._end = None if seconds is None else time.monotonic() + seconds

    def renew(self) -> None:
        """Start anew: there was progress."""
        if self.seconds is not None:
            self._end = time.monotonic() + self.seconds

    def remaining(self, cap: float | None = None) -> float | None:
        """Seconds left, never below 0 and never above ``cap``; None when unbounded."""
        if self._end is None:
            return cap
        left = max(0.0, self._end - time.monotonic())
        return left if cap is None else min(left, cap)

    def expired(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def check(self) -> None:
        """Raise `DeadlineError` when expired."""
        if self.expired():
            raise self.error()

    def error(self) -> DeadlineError:
        return DeadlineError(
            f"no {self.what} within {self.seconds:g} s (raise `{self.keyword}=` where that is too short)"
        )
