"""A call on a thread of its own, waited for within bounds, so that what hangs fails; no process belongs here."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class HungError(AssertionError):
    """Something did not end in time; the text says where it stands."""


class Call(Generic[T]):
    """Run ``function(*args, **keywords)`` on a daemon thread.

    Args:
        function: what to call.

    Attributes:
        seconds: how long the call took; what it has taken so far while it runs.
    """

    def __init__(self, function: Callable[..., T], *args: Any, **keywords: Any) -> None:
        self._what = getattr(function, "__qualname__", repr(function))
        self._began = time.monotonic()
        self._ended: float | None = None
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=([function, args, keywords],), name=f"call of {self._what}", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    def wait(self, within: float) -> bool:
        """Whether the call has ended, waiting for that up to so many seconds."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def result(self, within: float) -> T:
        """What the call returned. Raises what it raised, and `HungError` if it is not over within so many seconds."""
        error = self.error(within)
        if error is not None:
            raise error
        return self._value[0]

    def error(self, within: float) -> BaseException | None:
        """What the call raised, None if it returned. Raises `HungError` if it is not over within so many seconds."""
        if not self.wait(within):
            raise HungError(f"{self._what} did not end within {within:g} s; it stands at\n{self._where()}")
        return self._error

    def _run(self, work: list[Any]) -> None:
        function, args, keywords = work
        work.clear()  # nothing that was passed in is kept alive by the thread
        try:
            self._value.append(function(*args, **keywords))
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.monotonic()

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "its end"


def bounded(within: float, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function that must return or raise within so many seconds; else `HungError`."""
    return Call(function, *args, **keywords).result(within)
