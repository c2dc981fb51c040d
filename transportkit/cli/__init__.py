"""The command `transportkit`: its entry point, and what becomes of errors and signals. The rest is beside.

Exit codes: 0 done; 1 failed, with one line on stderr that says why (``--debug`` shows the traceback); 2 wrong usage;
130, 143 and 129 ended by SIGINT, SIGTERM and SIGHUP, with one line, after everything was put away. Importing this
module, and `transportkit backends`, import neither torch nor a plugin; a command imports what it needs when it runs.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from transportkit.errors import TransportKitError, UsageError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["CommandError", "main"]

Job = Callable[[], None]
"""What a command line, once parsed, asks for."""

#: The library's keywords, and the options of the same meaning.
_OPTIONS = {
    "authkey": "--authkey-file",
    "backends": "--backend",
    "chunk_bytes": "--chunk-bytes",
    "checksum": "--no-checksum",
    "receivers": "--receivers",
    "slots": "--slots",
    "timeout": "--timeout",
    "wait": "--wait",
    "allow_plaintext": "--allow-plaintext",
}

_INSTALL = "install it: pip install 'transportkit[cli]'"


class CommandError(TransportKitError):
    """A command cannot go on for a reason of its own: a file, a child process, a missing package."""


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. Only a `KeyboardInterrupt` passes everything that catches exceptions."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class _Signals:
    """What has come to this process.

    The exception alone does not do: native code turns it into errors of its own, when it comes while that calls Python.
    """

    def __init__(self) -> None:
        self.first: Stopped | None = None
        self._deferred = False

    def listen(self) -> None:
        self.first = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, and for jobs in the background
                signal.signal(number, self._take)
        sys.unraisablehook = self._unraisable

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Around what must not be left half-done: a signal that comes meanwhile raises at the end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.first is not None:
            raise self.first

    def _take(self, number: int, _frame: FrameType | None) -> None:
        stopped = Stopped(number)
        self.first = self.first or stopped
        if not self._deferred:
            raise stopped

    def _unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """An exception was lost in a finaliser; a signal must not be, so it is sent again when that is over."""
        if isinstance(lost.exc_value, Stopped):
            _thread.start_new_thread(_send_again, (lost.exc_value.number,))
        else:
            sys.__unraisablehook__(lost)


def _send_again(number: int) -> None:
    time.sleep(0.05)
    os.kill(os.getpid(), number)


signals = _Signals()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; by default the process's own.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        signals.listen()
        _logging(debug)
        return _run(given)
    except BaseException as error:
        code, text = _verdict(error, debug)
        _complain(error, text, debug)
        return code
    finally:
        _flush()


def _verdict(error: BaseException, debug: bool) -> tuple[int, str]:
    """The exit code and the line for what ended a command."""
    if isinstance(error, KeyboardInterrupt) or signals.first is not None:
        stopped = signals.first or Stopped(signal.SIGINT)
        return 128 + stopped.number, str(stopped)
    if isinstance(error, TransportKitError):
        return 2 if type(error) is UsageError else 1, _in_options(str(error))
    if isinstance(error, MemoryError):
        return 1, f"out of memory: {error}"
    if not isinstance(error, Exception):
        raise error
    return 1, f"{type(error).__name__}: {error}{'' if debug else '; --debug shows where'}"


def _in_options(text: str) -> str:
    """The library's text with its keywords turned into the options that stand for them here."""
    for keyword, option in _OPTIONS.items():
        text = text.replace(f"`{keyword}=`", f"`{option}`").replace(f"(in {keyword}=)", f"(in {option})")
    return text


def require(*modules: str) -> None:
    """Raise `CommandError` that says what to install, if a module of the extra ``cli`` is missing."""
    import importlib

    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise CommandError(f"this command needs the package {name} ({error}); {_INSTALL}") from error


def _run(arguments: list[str]) -> int:
    try:
        import click
    except ImportError as error:
        raise CommandError(f"the command line needs the package click ({error}); {_INSTALL}") from error
    from transportkit.cli.commands import transportkit

    try:
        # The functions under click only say what is to be done: done under click, signals and errors would be click's.
        job = transportkit.main(arguments, "transportkit", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.Abort as error:
        raise error.__cause__ or KeyboardInterrupt from error
    if callable(job):
        job()
        return 0
    return job if isinstance(job, int) else 0


def _logging(debug: bool) -> None:
    """What the library logs goes to stderr, a line each."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # The stderr of the moment: a progress bar puts lines above itself.
            if sys.stderr is not None:
                text = _in_options(" ".join(record.getMessage().split()))
                with contextlib.suppress(OSError, ValueError):  # whether somebody reads it is no matter to a transfer
                    sys.stderr.write(f"transportkit: {record.levelname.lower()}: {text}\n")

    logger = logging.getLogger("transportkit")
    logger.handlers[:] = [Lines()]
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    logger.propagate = False


def _complain(error: BaseException, text: str, debug: bool) -> None:
    try:
        if debug:
            traceback.print_exception(error)
        line = "; ".join(part.strip() for part in text.splitlines() if part.strip()).replace(":; ", ": ")
        sys.stderr.write(f"transportkit: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is gone, and with it whom to tell


def _flush() -> None:
    """Flush stdout; where its reader is gone, see that the interpreter does not complain of that at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
