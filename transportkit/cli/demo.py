"""`transportkit demo`: starts the two processes, shows what they tell, and sees them gone at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any

import attrs

from transportkit.cli import CommandError, require, signals
from transportkit.cli.demo_ends import COPY_BYTES, Assignment, receiving, sending
from transportkit.cli.terminal import Tick, bar, count, rate, say, size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@attrs.define(eq=False)
class _End:
    """One of the two processes."""

    role: str
    process: BaseProcess
    pipe: connection.Connection
    done: bool = False


@attrs.define
class _Story:
    """What the two ends have told so far."""

    nbytes: int = 0
    digest: str = ""
    landed: list[str] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)
    copies: list[float] = attrs.field(factory=list)


def run(file: Path | None, size: int, updates: int, keywords: dict[str, Any], *, quiet: bool) -> None:
    """Move a model between two processes and print how that went.

    Raises:
        CommandError: one of the two failed, or what arrived differs from what was sent.
    """
    require("safetensors", "numpy", "rich")
    if file is not None and not file.is_file():
        raise CommandError(
            f"cannot read {file}: {'it is no regular file' if file.exists() else 'No such file or directory'}"
        )
    watched = not quiet and sys.stderr is not None and sys.stderr.isatty()
    with _short_folder() as folder:
        assignment = Assignment(f"unix:{folder}/demo.sock", file, size, updates, keywords, watched)
        with _started(assignment) as (sender, receiver):
            _follow(sender, receiver, assignment, quiet=quiet)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """A directory whose path leaves room for that of a unix socket (107 bytes), as that of ``TMPDIR`` may not."""
    usual = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(prefix="transportkit-", dir=usual if len(os.fsencode(usual)) <= 60 else "/tmp")


@contextlib.contextmanager
def _started(assignment: Assignment) -> Iterator[list[_End]]:
    """The two processes, which are gone afterwards, whatever happens."""
    context = multiprocessing.get_context("spawn")
    ends: list[_End] = []
    resource_tracker.ensure_running()  # its start unblocks signals
    try:
        with signals.deferred():
            # Both inherit the mask: a Ctrl-C of the terminal comes to all three, and this process is to end the others.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                for role, target in (("sending", sending), ("receiving", receiving)):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=target, args=(theirs, assignment), name=f"transportkit: {role}")
                    process.start()
                    theirs.close()
                    ends.append(_End(role, process, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield ends
    finally:
        for end in ends:
            if not end.done:
                end.process.kill()
            end.pipe.close()
        for end in ends:
            end.process.join()
            end.process.close()


def _follow(sender: _End, receiver: _End, assignment: Assignment, *, quiet: bool) -> None:
    story = _Story()
    with bar("moving", quiet=quiet, speed=False) as tick:
        sender.pipe.send("go")
        while not (sender.done and receiver.done):
            open_ends = [end for end in (sender, receiver) if not end.done]
            ready = connection.wait([end.pipe for end in open_ends])
            for end in open_ends:
                if end.pipe in ready:
                    _hear(end, sender, receiver, assignment, story, tick, quiet=quiet)
    _conclude(story, quiet=quiet)


def _hear(
    end: _End, sender: _End, receiver: _End, assignment: Assignment, story: _Story, tick: Tick, *, quiet: bool
) -> None:
    """Take in one message of one end."""
    try:
        message = end.pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        end.process.join(5)
        raise CommandError(f"the {end.role} process died: {_fate(end.process.exitcode)}") from error
    tell = (lambda _text: None) if quiet else say
    match message:
        case ("model", tensors, nbytes, digest):
            story.nbytes, story.digest = nbytes, digest
            tell(f"model: {_title(assignment)}, {count(tensors, 'tensor')}, {size(nbytes)}")
        case ("agreement", text):
            tell(f"process {sender.process.pid} sends, process {receiver.process.pid} receives; they agreed:")
            tell(text)
        case ("progress", done, total):
            tick(done, total)
        case ("sent", seconds, _, copy):
            story.seconds.append(seconds)
            story.copies.append(copy)
            note = "  (cold: the receiver's memory is new)" if len(story.seconds) == 1 else ""
            tell(f"update {len(story.seconds)}: {seconds:.3f} s, {rate(story.nbytes, seconds)}{note}")
            if len(story.seconds) == assignment.updates:
                receiver.pipe.send("end")
        case ("landed", digest):
            story.landed.append(digest)
        case ("ready",):
            if len(story.landed) < assignment.updates:
                sender.pipe.send("go")
        case ("failed", text):
            raise CommandError(f"the {end.role} process failed: {text}")
        case ("done",):
            end.done = True


def _title(assignment: Assignment) -> str:
    if assignment.file is None:
        return "synthetic (random bfloat16; name a FILE.safetensors to move a real one)"
    return str(assignment.file)


def _conclude(story: _Story, *, quiet: bool) -> None:
    wrong = [n for n, digest in enumerate(story.landed, 1) if digest != story.digest]
    if wrong:
        raise CommandError(f"what arrived differs from what was sent: update {', '.join(map(str, wrong))}")
    if quiet:
        return
    warm = story.seconds[1:] or story.seconds
    seconds, copy = statistics.median(warm), statistics.median(story.copies)
    part = f", on its first {size(COPY_BYTES)}" if story.nbytes > COPY_BYTES else ""
    ratio = story.nbytes / max(seconds, 1e-9) / copy if copy else 0.0
    say(
        f"{'warm' if len(story.seconds) > 1 else 'cold'}: {rate(story.nbytes, seconds)}; a plain warm copy in memory "
        f"(one thread, dst.copy_(src) per tensor{part}): {rate(copy, 1)}; ratio {ratio:.2f}"
    )
    say(f"identical: all {count(len(story.landed), 'update')} arrived byte for byte (xxh3-128 {story.digest})")


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name
    return f"exit code {code}"
