"""A function in a process of its own, with a timeout: `in_process`, and `Child` for those that are talked to or killed.

What a child runs must be importable there: a module-level function. A process is only ever ended by its own id.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from transportkit.testing.calls import HungError
from transportkit.testing.installing import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from transportkit.transport import Transport

#: What a fork server imports, so that a child of it starts in a tenth of a second instead of two.
PRELOAD = ["transportkit.session", "transportkit.testing.processes", "transportkit.testing.ends"]


class ChildDiedError(AssertionError):
    """A child ended without an answer.

    Attributes:
        exitcode: as in `multiprocessing.Process.exitcode`: minus the number of the signal that ended it.
    """

    def __init__(self, message: str, exitcode: int | None) -> None:
        super().__init__(message)
        self.exitcode = exitcode


class Child:
    """A process that runs one function; a context manager at whose end it is gone.

    Inside, the function may use `report` to say something before it ends, and `hear` for what it is told meanwhile.

    Args:
        function: a module-level function.
        args: for it; they are pickled.
        backends: backends that are not installed, to be `installed` there; classes that can be pickled.
        method: ``"spawn"``, or ``"forkserver"``, which is no relation of this process either, and faster.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        backends: Sequence[type[Transport]] = (),
        method: str = "spawn",
    ) -> None:
        self._what = getattr(function, "__qualname__", repr(function))
        self._final: tuple[str, Any] | None = None
        context = context_of(method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_main, args=(theirs, function, args, tuple(backends)), daemon=True
        )
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def tell(self, value: object) -> None:
        """Say something to the child, which gets it from `hear`."""
        self._pipe.send(value)

    def heard(self, within: float) -> Any:
        """What the child said next by `report`.

        Raises:
            HungError: nothing within so many seconds.
            ChildDiedError: it ended first. If it raised, that exception is raised instead.
        """
        kind, value = self._next(within)
        if kind == "word":
            return value
        self._final = kind, value
        if kind == "raised":
            raise value
        raise ChildDiedError(f"{self._what} returned {value!r} where a word of it was due", 0)

    def result(self, within: float) -> Any:
        """What the function returned, reports being passed over. Raises as `heard`."""
        end = time.monotonic() + within
        while self._final is None:
            kind, value = self._next(max(0.0, end - time.monotonic()))
            if kind != "word":
                self._final = kind, value
        kind, value = self._final
        if kind == "raised":
            raise value
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._process.join(10)

    def stop(self) -> None:
        """SIGSTOP: it keeps everything and does nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive and self._final is not None:
            self._process.join(5)
        if self.alive:
            self.kill()
        self._process.join(5)
        self._pipe.close()
        self._process.close()

    def _signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _next(self, within: float) -> tuple[str, Any]:
        if not self._pipe.poll(within):
            raise HungError(f"{self._what} in process {self.pid} said nothing within {within:g} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(5)
            code = self._process.exitcode
            raise ChildDiedError(f"process {self.pid} ended with {code} before {self._what} did", code) from error
        return kind, value


def in_process(
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backends: Sequence[type[Transport]] = (),
    method: str = "spawn",
) -> Any:
    """What a module-level function returns in a process of its own.

    Args:
        function: what to run; arguments and result are pickled.
        timeout: seconds after which the process is killed.
        backends: backends that are not installed, to be `installed` there.
        method: see `Child`.

    Raises:
        HungError: it was not over in time.
        ChildDiedError: it ended without an answer.

    and whatever the function raised, with the child's traceback as a note.
    """
    with Child(function, *args, backends=backends, method=method) as child:
        return child.result(timeout)


def context_of(method: str) -> BaseContext:
    """The `multiprocessing` context of a start method."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


# -- in the child -----------------------------------------------------------------------------------------------------

_parent: Connection | None = None


def report(value: object = None) -> None:
    """In a child: say something to the parent, which gets it from `Child.heard`."""
    assert _parent is not None, "report() is for the function of a Child"
    _parent.send(("word", value))


def hear(within: float = 60.0) -> Any:
    """In a child: what the parent tells by `Child.tell`.

    Raises:
        HungError: nothing within so many seconds.
        EOFError: the parent is gone.
    """
    assert _parent is not None, "hear() is for the function of a Child"
    if not _parent.poll(within):
        raise HungError(f"the parent said nothing within {within:g} s")
    return _parent.recv()


def _main(
    pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...], backends: tuple[type[Transport], ...]
) -> None:
    global _parent  # noqa: PLW0603 - one function per process
    _parent = pipe
    try:
        with installed(*backends):
            answer = "returned", function(*args)
    except BaseException as error:
        answer = "raised", _portable(error)
    with contextlib.suppress(ConnectionError):  # the parent is gone, or has seen enough
        pipe.send(answer)
    pipe.close()


def _portable(error: BaseException) -> BaseException:
    """The exception, if it survives pickling, else one that says what it was."""
    text = "".join(traceback.format_exception(error))
    try:
        error.__traceback__ = None
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    if type(again) is not type(error):
        return AssertionError(f"the child raised what cannot be pickled:\n{text}")
    error.add_note(f"in the child:\n{text}")
    return error
