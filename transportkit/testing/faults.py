"""`faulty`: a backend that fails, or hangs, at a chosen call; and `altered`, one whose answer there is another."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from transportkit.errors import BackendError
from transportkit.testing.wrapping import Wrapped, qualified, wrapper

if TYPE_CHECKING:
    from transportkit.transport import Transport
    from transportkit.wire import Chunk

When = Callable[..., bool]


def in_update(*args: Any) -> bool:
    """For ``when``: only calls that carry a header, and not those of the trial."""
    headers: list[Chunk] = [arg for arg in args if hasattr(arg, "seq")]
    return bool(headers) and headers[0].update > 0


class _Chosen(Wrapped):
    """Counts the calls of one method, and does something else at some of them."""

    at: ClassVar[str]
    first: ClassVar[int]
    last: ClassVar[int | None]
    when: ClassVar[Callable[..., bool] | None]
    counter: ClassVar[Iterator[int]]

    @classmethod
    def chosen(cls, method: str, args: tuple[Any, ...]) -> bool:
        if method != cls.at or (cls.when is not None and not cls.when(*args)):
            return False
        count = next(cls.counter)
        return count >= cls.first and (cls.last is None or count <= cls.last)


class _Faulty(_Chosen):
    error: ClassVar[BaseException | type[BaseException] | None]
    seconds: ClassVar[float]
    freed: ClassVar[threading.Event]

    @classmethod
    def through(cls, end: object | None, method: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if method.endswith((".abort", ".close")):
            cls.freed.set()
        if not cls.chosen(method, args):
            return call()
        if cls.error is not None:
            raise copy.copy(cls.error) if isinstance(cls.error, BaseException) else cls.error
        cls.freed.clear()
        if cls.freed.wait(cls.seconds):
            raise BackendError(f"{method} hung and was aborted", backend=cls.name)
        return call()


def faulty(
    transport: type[Transport],
    *,
    at: str,
    nth: int = 1,
    times: int | None = None,
    error: BaseException | type[BaseException] | None = None,
    seconds: float = 30.0,
    when: When | None = None,
    name: str = "",
) -> type[Transport]:
    """A backend around another one, of which one method fails at its ``nth`` call in this process.

    Args:
        transport: the backend that does the work.
        at: the method: ``"publish"``, ``"importer.connect"``, ``"probe"``. One that both ends have needs its prefix.
        nth: the first call that fails, from 1; all ends of this class count together.
        times: how many calls fail, from that one on; None for all.
        error: what it raises; None makes it hang until the end is aborted or closed, or ``seconds`` are over. (Then the
            call is made after all.) It knows no deadline: that is what is wrong with it.
        seconds: the longest hang.
        when: counts only calls for which this is true of their arguments: `in_update`, say. A module-level function.
        name: of the backend that is made; by default ``faulty-`` and the other one's.
    """
    keywords = {"at": at, "nth": nth, "times": times, "error": error, "seconds": seconds, "when": when, "name": name}
    attributes = {
        **_choice(at, nth, times, when),
        "error": error,
        "seconds": seconds,
        "freed": threading.Event(),
    }
    made: type[Transport] = wrapper(
        transport, name or f"faulty-{transport.name}", _Faulty, (faulty, (transport,), keywords), attributes
    )
    return made


class _Altered(_Chosen):
    change: ClassVar[Callable[..., Any]]

    @classmethod
    def through(cls, end: object | None, method: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        return cls.change(call, *args) if cls.chosen(method, args) else call()


def altered(
    transport: type[Transport],
    *,
    at: str,
    change: Callable[..., Any],
    nth: int = 1,
    times: int | None = None,
    when: When | None = None,
    name: str = "",
) -> type[Transport]:
    """A backend around another one, of which one method does something else from its ``nth`` call on.

    Args:
        transport, at, nth, times, when: as for `faulty`.
        change: called instead, with a function that makes the call, and the call's arguments; a module-level function
            where the class is to be pickled.
        name: of the backend that is made; by default ``altered-`` and the other one's.
    """
    keywords = {"at": at, "change": change, "nth": nth, "times": times, "when": when, "name": name}
    attributes = {**_choice(at, nth, times, when), "change": staticmethod(change)}
    made: type[Transport] = wrapper(
        transport, name or f"altered-{transport.name}", _Altered, (altered, (transport,), keywords), attributes
    )
    return made


def _choice(at: str, nth: int, times: int | None, when: When | None) -> dict[str, Any]:
    return {
        "at": qualified(at),
        "first": nth,
        "last": None if times is None else nth + times - 1,
        "when": None if when is None else staticmethod(when),
        "counter": itertools.count(1),
    }
