"""How commands end that do not succeed: signals, deaths, full disks; nothing is left of any of them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from cli_commands import Command, commands, until
from promptness import PROMPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Command]

pytestmark = pytest.mark.timeout(60)

INT = signal.SIGINT


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with commands(tmp_path) as starting:
        yield starting


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that takes some ten seconds in small chunks, so that a signal finds the transfer under way."""
    path = tmp_path_factory.mktemp("model") / "in.safetensors"
    length = 50_000_000
    header = f'{{"a":{{"dtype":"U8","shape":[{length}],"data_offsets":[0,{length}]}}}}'.encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + length)
    return path


def under_way(start: Start, tmp_path: Path, model: Path) -> tuple[Command, Command]:
    """A transfer in mid-update."""
    serve = start("serve", model, "unix:w.sock", "--chunk-bytes", 500, "--backend", "pickle", "-q")
    fetch = start("fetch", "unix:w.sock", "out", "-q")
    until(lambda: any(path.stat().st_size > 50_000 for path in tmp_path.glob(".out.*.partial")))
    return serve, fetch


def files(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path))


# -- signals ----------------------------------------------------------------------------------------------------------


def test_serve_is_stopped_while_it_waits(start: Start, tmp_path: Path, model: Path) -> None:
    serve = start("serve", model, "unix:w.sock")
    until((tmp_path / "w.sock").exists)
    serve.signal(signal.SIGTERM)
    serve.fails("stopped by SIGTERM", code=143, timeout=20)
    assert files(tmp_path) == []


def test_fetch_is_stopped_while_nobody_listens(start: Start, tmp_path: Path) -> None:
    fetch = start("fetch", "unix:w.sock", "out")
    time.sleep(2.5)
    fetch.signal(INT)
    fetch.fails("stopped by SIGINT", code=130, timeout=20)
    assert files(tmp_path) == []


def test_serve_is_stopped_in_mid_transfer(start: Start, tmp_path: Path, model: Path) -> None:
    serve, fetch = under_way(start, tmp_path, model)
    serve.signal(INT)
    serve.fails("stopped by SIGINT", code=130, timeout=20)
    fetch.fails("stopped by SIGINT", timeout=20)
    assert files(tmp_path) == []


def test_fetch_is_stopped_in_mid_transfer_and_a_file_that_was_there_stays(
    start: Start, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "out").write_text("what was there before")
    serve, fetch = under_way(start, tmp_path, model)
    fetch.signal(INT)
    fetch.fails("stopped by SIGINT", code=130, timeout=20)
    serve.fails("receiver 0", timeout=20)
    assert files(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "what was there before"


def test_the_demo_is_stopped(start: Start, tmp_path: Path) -> None:
    demo = start("demo", "--size", "1MB", "--updates", 10_000, TMPDIR=str(tmp_path))
    assert demo.process.stdout is not None
    until(lambda: demo.process.stdout.readline().startswith("update 3"))  # type: ignore[union-attr]
    children = psutil.Process(demo.process.pid).children(recursive=True)
    assert len(children) >= 2
    demo.signal(INT)
    demo.fails("stopped by SIGINT", code=130, timeout=20)
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    assert files(tmp_path) == []


def test_a_process_of_the_demo_is_killed(start: Start, tmp_path: Path) -> None:
    demo = start("demo", "--size", "1MB", "--updates", 10_000, TMPDIR=str(tmp_path))
    assert demo.process.stdout is not None
    line = ""
    while not line.startswith("process"):
        line = demo.process.stdout.readline()
    os.kill(int(line.split()[4]), signal.SIGKILL)  # process S sends, process R receives
    demo.fails("process", timeout=20)
    assert files(tmp_path) == []


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_serve_is_killed_in_mid_transfer(start: Start, tmp_path: Path, model: Path) -> None:
    serve, fetch = under_way(start, tmp_path, model)
    killed = time.monotonic()
    serve.kill()
    fetch.process.wait(20)
    assert time.monotonic() - killed < PROMPT
    fetch.fails("sender")
    assert files(tmp_path) == ["w.sock"]  # the next listener takes it over

    serve = start("serve", model, "unix:w.sock", "--wait", 0.1)
    serve.fails("no receiver")
    assert files(tmp_path) == []


def test_fetch_is_killed_in_mid_transfer(start: Start, tmp_path: Path, model: Path) -> None:
    serve, fetch = under_way(start, tmp_path, model)
    fetch.kill()
    serve.fails("receiver 0", timeout=20)
    assert not (tmp_path / "w.sock").exists()
    assert not (tmp_path / "out").exists()


# -- disks and pipes --------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_one_clear_line_on_both_sides(start: Start, tmp_path: Path, model: Path) -> None:
    serve = start("serve", model, "unix:w.sock", "-q")
    fetch = start("fetch", "unix:w.sock", "out", "-q", file_limit=1_000_000)
    fetch.fails("cannot write out", "File too large")
    serve.fails("cannot write out", "File too large")
    assert files(tmp_path) == []
