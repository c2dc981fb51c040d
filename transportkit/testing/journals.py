"""`recording`: a backend that writes down every call that the core makes of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from transportkit.testing.wrapping import Wrapped, qualified, wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.transport import Transport


@attrs.frozen
class Entry:
    """One call.

    Args:
        end: the exporter or importer that was called, by number in order of their making; 0 for the class.
        method: its qualified name: ``"importer.open"``.
        args: what it was given; a tensor or a deadline is left out.
        error: what it raised, or None.
        thread: the name of the thread that called.
    """

    end: int
    method: str
    args: tuple[Any, ...]
    error: BaseException | None
    thread: str


class Journal:
    """The calls of one recording backend in this process, in the order in which they ended."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._ends: dict[int, tuple[int, object]] = {}
        self._lock = threading.Lock()

    def of(self, *methods: str) -> list[Entry]:
        """The entries of some methods, by their names."""
        wanted = {qualified(method) for method in methods}
        return [entry for entry in list(self.entries) if entry.method in wanted]

    def count(self, method: str) -> int:
        """How often a method was called."""
        return len(self.of(method))

    def clear(self) -> None:
        """Forget the calls so far."""
        self.entries.clear()

    def write(self, end: object | None, method: str, args: tuple[Any, ...], error: BaseException | None) -> None:
        """Add a call."""
        kept = tuple(arg for arg in args if not (hasattr(arg, "data_ptr") or hasattr(arg, "renew")))
        with self._lock:
            number, _ = (0, None) if end is None else self._ends.setdefault(id(end), (len(self._ends) + 1, end))
            self.entries.append(Entry(number, method, kept, error, threading.current_thread().name))


class Recording(Wrapped):
    """A backend that writes every call down in its `journal`."""

    journal: ClassVar[Journal]

    @classmethod
    def through(cls, end: object | None, method: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        try:
            value = call()
        except BaseException as error:
            cls.journal.write(end, method, args, error)
            raise
        cls.journal.write(end, method, args, None)
        return value


def recording(transport: type[Transport], *, name: str = "") -> type[Recording]:
    """A backend around another one, with a `Journal` of every call of it in this process as its ``journal``.

    Args:
        transport: the backend that does the work.
        name: of the backend that is made; by default ``recording-`` and the other one's.
    """
    recipe = (recording, (transport,), {"name": name})
    made: type[Recording] = wrapper(
        transport, name or f"recording-{transport.name}", Recording, recipe, {"journal": Journal()}
    )
    return made
