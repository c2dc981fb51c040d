"""The command `transportkit`: its entry point, and what becomes of errors and signals. The rest is beside.

Exit codes: 0 done; 1 failed, with one line on stderr that says why (``--debug`` shows the traceback); 2 wrong usage;
130, 143 and 129 ended by SIGINT, SIGTERM and SIGHUP, with one line, after everything was put away. Importing this
module, and `transportkit backends`, import neither torch nor a plugin; a command imports what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transportkit.errors import TransportKitError, UsageError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["CommandError", "main"]

Job = Callable[[], None]
"""What a command line, once parsed, asks for."""

_INSTALL = "install it: pip install 'transportkit[cli]'"


class CommandError(TransportKitError):
    """A command cannot go on for a reason of its own: a file, a child process, a missing package."""


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. Only a `KeyboardInterrupt` passes everything that catches exceptions."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and jobs of a shell in the background
                signal.signal(number, _stop)
        _logging(debug)
        return _run(given)
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        _complain(error, str(stopped), debug)
        return 128 + stopped.number
    except UsageError as error:
        _complain(error, str(error), debug)
        return 2 if type(error) is UsageError else 1
    except TransportKitError as error:
        _complain(error, str(error), debug)
    except MemoryError as error:
        _complain(error, f"out of memory: {error}", debug)
    except Exception as error:
        hint = "" if debug else "; --debug shows where"
        _complain(error, f"{type(error).__name__}: {error}{hint}", debug)
    finally:
        _flush()
    return 1


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


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def _logging(debug: bool) -> None:
    """What the library logs goes to stderr, a line each."""

    class Lines(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"transportkit: {record.levelname.lower()}: {' '.join(record.getMessage().split())}"

    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logger = logging.getLogger("transportkit")
    logger.handlers[:] = [handler]
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
