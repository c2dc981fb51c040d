"""A backend's native errors, turned into the library's own; what to do about them does not belong here."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, TransportKitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class translated:  # noqa: N801 - it is used as a function is
    """Turns any native exception of a backend into `BackendError`, cause kept. Holds no state: one serves for ever.

    A class, since it is entered several times for each chunk, where a generator would cost twice as much.
    """

    __slots__ = ("_backend",)

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        if isinstance(error, Exception) and not isinstance(error, TransportKitError):
            raise BackendError(f"backend {self._backend} failed: {error!r}", backend=self._backend) from error


@contextlib.contextmanager
def around(backend: str, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context manager of a backend: what it raises itself is translated, what its block raises is not."""
    with translated(backend):
        manager = make()
        manager.__enter__()
    try:
        yield
    except BaseException as error:
        with translated(backend):
            suppressed = manager.__exit__(type(error), error, error.__traceback__)
        if not suppressed:
            raise
    else:
        with translated(backend):
            manager.__exit__(None, None, None)
