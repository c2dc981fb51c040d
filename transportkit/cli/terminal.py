"""What is printed, and the progress bar; no command's logic belongs here."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator

from transportkit.cli import CommandError

Tick = Callable[[int, "int | None"], None]
"""Takes (bytes done, bytes in all), as `progress=` of a session does."""

#: Shortest pause between two redrawings that a bar is asked for, in seconds; chunks may be tiny.
_PAUSE = 0.05


def say(text: str = "") -> None:
    """Print lines on stdout. Whether somebody reads them does not matter to a transfer: a broken pipe is quiet."""
    out = sys.stdout
    if out is None:
        return
    try:
        out.write(_encodable(text, out.encoding) + "\n")
        out.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise CommandError(f"cannot write to stdout: {error.strerror}") from error
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def size(nbytes: float) -> str:
    """Bytes for people: ``"90.9 MB"``."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= power:
            return f"{nbytes / power:.1f} {unit}" if nbytes < 100 * power else f"{nbytes / power:.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def rate(nbytes: float, seconds: float) -> str:
    """Bytes a second for people, in units of 10**9: ``"6.93 GB/s"``."""
    value = nbytes / max(seconds, 1e-9) / 1e9
    return f"{value:.2f} GB/s" if value >= 0.1 else f"{value:.4f} GB/s"


def count(number: int, noun: str) -> str:
    """``"1 tensor"``, ``"104 tensors"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def bar(label: str, *, quiet: bool, speed: bool = True) -> Iterator[Tick]:
    """A progress bar on stderr, where that is a terminal; gone at the end. ``speed`` shows bytes a second, too."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        *([TransferSpeedColumn()] if speed else []),
    ]
    # What is said meanwhile is to appear above the bar, but would go to stderr with it; right only where both are one.
    together = sys.stdout is not None and sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=together) as progress:
        task = progress.add_task(label, total=None)
        next_time = 0.0

        def tick(done: int, total: int | None) -> None:
            nonlocal next_time
            now = time.monotonic()
            if now >= next_time or done == total:
                next_time = now + _PAUSE
                progress.update(task, completed=done, total=total)

        yield tick


def _ignore(_done: int, _total: int | None) -> None:
    pass


def _encodable(text: str, encoding: str | None) -> str:
    """The text with what the stream cannot encode written as escapes: a tensor's name may hold anything."""
    encoding = encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
