"""The command line's own parts, within this process: what is parsed, refused, laid out and printed."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from transportkit import __version__
from transportkit.cli import CommandError, main, terminal
from transportkit.cli.commands import nbytes, written_address
from transportkit.cli.files import DTYPES, HEADER_KEY, open_model, parse_header, read_key
from transportkit.cli.layout import layout
from transportkit.cli.synthetic import synthetic_model
from transportkit.cli.unfinished import Unfinished
from transportkit.manifest import spec_of
from transportkit.wire import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """`main` is made for a process of its own: put back what it sets."""
    monkeypatch.chdir(tmp_path)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    hook = sys.unraisablehook
    logger = logging.getLogger("transportkit")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    logger.handlers[:], logger.level, logger.propagate = before
    sys.unraisablehook = hook


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# -- exit codes and lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "serve",
        "serve in",
        "serve in nonsense:w",
        "serve in tcp://localhost",
        f"serve in unix:{'x' * 200}",
        "serve in unix:w --receivers 0",
        "serve in unix:w --chunk-bytes 0",
        "serve in unix:w --chunk-bytes much",
        "serve in unix:w --slots -1",
        "serve in unix:w --timeout 0",
        "serve in unix:w --timeout soon",
        "serve in unix:w --wait nan",
        "fetch unix:w",
        "fetch unix:w out more",
        "doctor",
        "demo --updates 0",
        "demo in --size 1MB",
        "backends --yaml",
    ],
)
def test_wrong_usage_is_2(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw_file(tmp_path / "in", {})
    assert main(line.split()) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve nothing unix:w", "cannot read nothing: No such file"),
        ("serve . unix:w", "no regular file"),
        ("serve fifo unix:w", "no regular file"),
        ("serve text unix:w", "text is not a whole safetensors file"),
        ("serve empty unix:w", "empty is not a whole safetensors file"),
        ("serve short unix:w", "short is not a whole safetensors file"),
        ("serve lfs unix:w", "git lfs pull"),
        ("serve f6 unix:w", "the tensor 'a' is of dtype F6_E2M3"),
        ("serve nameless unix:w", "empty name"),
        ("serve in unix:w --backend nope", "no backend 'nope'"),
        ("serve in tcp://0.0.0.0:0", "authkey"),
        ("serve in unix:w --authkey-file nothing", "cannot read nothing"),
        ("serve in unix:w --authkey-file empty", "empty"),
        ("serve in unix:missing/w", "missing"),
        ("serve in unix:text", "text"),
        ("serve in unix:w --wait 0.1", "no receiver"),
        ("fetch unix:w out --wait 0.1", "nobody listens on unix:"),
        ("fetch unix:w missing/out", "there is no directory"),
        ("fetch unix:w .", "no regular file"),
        ("fetch unix:w fifo", "no regular file"),
        ("demo nothing", "cannot read nothing: No such file"),
        ("demo .", "no regular file"),
        ("doctor unix:w --wait 0.1", "nobody listens on unix:"),
    ],
)
def test_a_failure_is_1_and_one_line(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw_file(tmp_path / "in", {})
    raw_file(tmp_path / "short", {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"12345678")
    raw_file(tmp_path / "f6", {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123")
    raw_file(tmp_path / "nameless", {"": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1")
    (tmp_path / "text").write_text("no tensors here, only text")
    (tmp_path / "empty").write_text("")
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n")
    os.mkfifo(tmp_path / "fifo")
    before = sorted(os.listdir(tmp_path))
    assert main(line.split()) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("transportkit: ")
    assert error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_an_address_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transportkit as tk

    raw_file(tmp_path / "in", {})
    sender = tk.serve("tcp://127.0.0.1:0")
    try:
        assert main(["serve", "in", sender.address]) == 1
        assert "in use" in capsys.readouterr().err
    finally:
        sender.close()


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nothing", "unix:w", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"transportkit {__version__}\n"
    assert main(["fetch", "--help"]) == 0
    assert "OUT appears" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("missing", "line"),
    [("click", "backends"), ("rich", "fetch unix:w out"), ("safetensors", "serve in unix:w"), ("numpy", "demo")],
)
def test_a_missing_package_is_one_line(
    missing: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(line.split()) == 1
    error = capsys.readouterr().err
    assert f"package {missing}" in error
    assert "pip install 'transportkit[cli]'" in error
    assert error.count("\n") == 1


def test_a_fault_of_our_own_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise KeyError("oops")

    monkeypatch.setattr("transportkit.cli.backends.discover", broken)
    assert main(["backends"]) == 1
    assert capsys.readouterr().err == "transportkit: KeyError: 'oops'; --debug shows where\n"


def test_a_signal_that_native_code_swallows_still_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallowed() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr("transportkit.cli.backends.discover", swallowed)
    assert main(["backends"]) == 143
    assert capsys.readouterr().err == "transportkit: stopped by SIGTERM\n"


def test_a_signal_that_a_finaliser_swallows_still_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Final:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def swallowed() -> None:
        Final()
        time.sleep(10)

    monkeypatch.setattr("transportkit.cli.backends.discover", swallowed)
    assert main(["backends"]) == 130
    assert capsys.readouterr().err == "transportkit: stopped by SIGINT\n"


# -- backends ---------------------------------------------------------------------------------------------------------


def test_backends_lists_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (row,) = (row for row in rows if row["name"] == "pickle")
    assert row == {
        "name": "pickle",
        "distribution": "transportkit",
        "version": __version__,
        "target": "transportkit.backends.pickle:PickleTransport",
    }
    assert main(["backends"]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["pickle", "transportkit", __version__] in lines


def test_backends_check_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_backend.py").write_text("print('loud')\nimport nothing_of_that_name\n")
    information = tmp_path / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[transportkit.backends]\nbroken = broken_backend:Broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRANSPORTKIT_DISABLE", "pickle")
    assert main(["backends", "--check", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["broken"]["usable"] is False
    assert "nothing_of_that_name" in rows["broken"]["reason"]
    assert rows["pickle"]["reason"] == "disabled by TRANSPORTKIT_DISABLE"
    assert main(["backends", "--check"]) == 0
    assert "no: broken_backend:Broken could not be imported" in capsys.readouterr().out


def test_backends_imports_nothing_heavy() -> None:
    code = "import sys; from transportkit.cli import main; main(['backends']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert modules.isdisjoint({"torch", "numpy", "stevedore", "rich", "safetensors", "transportkit_shm"})


def test_a_broken_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "transportkit", "backends"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=20, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (1, b"transportkit: cannot write to stdout: No space left on device\n")


# -- sizes and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1000", 1000), ("16MiB", 16 << 20), ("1.5 GB", 1_500_000_000), ("2k", 2000), ("3kib", 3072), ("7B", 7)],
)
def test_sizes(text: str, value: int) -> None:
    assert nbytes(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "4TB", "0.5", "MB", "9" * 400, "1\n2", "\u0661"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no positive number of bytes"):
        nbytes(text)


def test_a_tilde_in_an_address_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert written_address("unix:~/w.sock") == "unix:/home/somebody/w.sock"
    assert written_address("unix:./~/w.sock") == "unix:./~/w.sock"
    assert written_address("tcp://localhost:1") == "tcp://localhost:1"


def test_sizes_and_rates_for_people() -> None:
    assert [terminal.size(n) for n in (0, 999, 1000, 90_868_376, 537e6, 2e12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "90.9 MB",
        "537 MB",
        "2000 GB",
    ]
    assert terminal.rate(5e9, 2) == "2.50 GB/s"
    assert terminal.rate(1, 0) == "1.00 GB/s"
    assert terminal.count(1, "tensor") == "1 tensor"


# -- files ------------------------------------------------------------------------------------------------------------


def test_every_dtype_of_the_format_is_known() -> None:
    import safetensors

    for code, name in DTYPES.items():
        nbytes = 64 * {"F4": 4, "F6_": 6}.get(code[:3], 8 * getattr(torch, name or "uint8").itemsize) // 8
        text = json.dumps({"a": {"dtype": code, "shape": [64], "data_offsets": [0, nbytes]}}).encode()
        ((_, entry),) = safetensors.deserialize(len(text).to_bytes(8, "little") + text + bytes(nbytes))
        assert entry["dtype"] == code
        if name is not None:
            assert hasattr(torch, name)


def test_a_file_that_shrinks_is_not_read_on(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(save({"a": torch.rand(100), "b": torch.rand(100)}))
    with open_model(tmp_path / "in") as model:
        tensors = model.tensors()
        next(tensors)
        os.truncate(tmp_path / "in", 200)
        with pytest.raises(CommandError, match="has become shorter"):
            next(tensors)


def test_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"  bytes \xff of any kind \r\n")
    assert read_key(tmp_path / "key") == b"  bytes \xff of any kind "


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from([n for n in DTYPES.values() if n and n != "float4_e2m1fn_x2"]), st.integers(0, 5)),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=1),
)
def test_a_made_header_is_what_safetensors_writes(kinds: dict[str, tuple[str, int]], metadata: dict[str, str]) -> None:
    tensors = {name: torch.zeros(n * 8, dtype=torch.uint8).view(getattr(torch, d)) for name, (d, n) in kinds.items()}
    made = layout([spec_of(name, tensor) for name, tensor in tensors.items()], metadata)
    expected = save(tensors, metadata or None)
    assert made.head == expected[: len(made.head)]
    assert made.nbytes == len(expected)


GOOD = '{"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}, "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]} }'


def test_a_header_that_came_is_taken_as_it_is() -> None:
    specs = [TensorSpec("a", "uint8", (1,)), TensorSpec("b", "float32", (1,))]
    made = layout(specs, {HEADER_KEY: GOOD, "more": "text"})
    assert made.head == len(GOOD).to_bytes(8, "little") + GOOD.encode()
    assert made.places == {"a": len(made.head), "b": len(made.head) + 1}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "[]",
        "{}",
        '{"a":1}',
        '{"a":{}}',
        "[" * 100_000,
        GOOD.replace("[1,5]", "[1]"),
        GOOD.replace("[1,5]", '[1,"5"]'),
        GOOD.replace("[1,5]", "[2,6]"),
        GOOD.replace("[1,5]", "[0,4]"),
        GOOD.replace("[1,5]", "[1,9]"),
        GOOD.replace("[0,1]", "[-1,0]"),
        GOOD.replace("F32", "I32"),
        GOOD.replace("F32", "F128"),
        GOOD.replace('"b"', '"c"'),
        '{"__metadata__":[],' + GOOD[1:],
        '{"c":{"dtype":"U8","shape":[0],"data_offsets":[5,5]},' + GOOD[1:],
        GOOD + "\ud800",
    ],
)
def test_a_header_that_does_not_fit_is_refused(header: str) -> None:
    specs = [TensorSpec("a", "uint8", (1,)), TensorSpec("b", "float32", (1,))]
    with pytest.raises(CommandError, match="header"):
        layout(specs, {HEADER_KEY: header})


def test_what_no_file_can_hold() -> None:
    with pytest.raises(CommandError, match="has no dtype complex128"):
        layout([TensorSpec("a", "complex128", (1,))], {})
    with pytest.raises(CommandError, match="another"):
        layout([TensorSpec("__metadata__", "uint8", (1,))], {})


def test_headers_are_parsed_with_their_metadata() -> None:
    entries, metadata = parse_header('{"__metadata__":{"k":"v"},' + GOOD[1:])
    assert [entry.name for entry in entries] == ["b", "a"]
    assert metadata == {"k": "v"}


# -- the file to be ---------------------------------------------------------------------------------------------------


def test_a_name_as_long_as_names_may_be_has_room_for_its_temporary_one(tmp_path: Path) -> None:
    out = tmp_path / ("\u6a21" * 81 + ".safetensors")  # 255 bytes
    with Unfinished(out) as file:
        file.begin(1)
        file.write(0, b"x")
        file.finish()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_file_appears_only_when_it_is_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Unfinished(out) as file:
        assert os.listdir(tmp_path) == []
        file.begin(6)
        file.write(3, b"def")
        assert not out.exists()
        file.write(0, memoryview(b"abc"))
        file.finish()
        assert os.listdir(tmp_path) == ["out"]
    assert out.read_bytes() == b"abcdef"


def test_a_file_that_was_there_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "out").symlink_to("real")
    with Unfinished(tmp_path / "out") as file:
        file.begin(1)
    assert (tmp_path / "out").read_text() == "before"
    with Unfinished(tmp_path / "out") as file:
        file.begin(1)
        file.write(0, b"x")
        file.finish()
    assert (tmp_path / "real").read_text() == "x"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["out", "real"]


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"has .* free"), Unfinished(tmp_path / "out") as file:
        file.begin(1 << 61)
    assert os.listdir(tmp_path) == []


# -- the synthetic model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 1001, 5000, 100_000_001])
def test_the_synthetic_model_has_the_size_that_was_asked_for(size: int) -> None:
    model: dict[str, Any] = dict(synthetic_model(size))
    assert sum(tensor.nbytes for tensor in model.values()) == max(size // 2 * 2, 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.values())
