"""`transportkit serve`, `fetch`, `demo` and `doctor`, as a user runs them: real processes, real files."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cli_commands import Command, commands, real_model, sha256
from safetensors.torch import load_file, save_file

import transportkit as tk
from transportkit.cli import CommandError, doctor, fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Command]

pytestmark = pytest.mark.timeout(60)

DTYPES = "bool uint8 int8 uint16 int16 float16 bfloat16 uint32 int32 float32 uint64 int64 float64 complex64"
FLOAT8 = "float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e5m2fnuz float8_e4m3fnuz"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with commands(tmp_path) as starting:
        yield starting


def raw_file(path: Path, header: dict[str, Any], data: bytes, *, indent: int | None = None, pad: int = 0) -> None:
    """A file as some other tool may write it."""
    text = json.dumps(header, indent=indent).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def zoo(path: Path) -> None:
    """A file with every dtype that torch and the format share, 0-d and empty tensors, and unicode."""
    tensors = {}
    for name in (*DTYPES.split(), *FLOAT8.split()):
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (105 * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).view(3, 5, 7)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.int16)
    tensors["ünï/☃.weight"] = torch.arange(11)
    save_file(tensors, path, metadata={"format": "pt", "schlüssel": 'wert ☃ \n "quoted"', "empty": ""})


# -- identical files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_a_real_model_arrives_as_an_identical_file(start: Start, tmp_path: Path, backend: str) -> None:
    model = real_model()
    options = [] if backend == "shm" else ["--backend", "pickle"]
    fetched = start("fetch", "unix:w.sock", "out.safetensors")  # the two may be started in any order
    serve = start("serve", model, "unix:w.sock", *options)

    assert f"{backend}: taken" in fetched.works()
    assert f"{backend}: taken" in serve.works()
    assert sha256(tmp_path / "out.safetensors") == sha256(model)
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors"]


def test_a_file_of_every_dtype_arrives_identical_in_chunks_of_1000_bytes(start: Start, tmp_path: Path) -> None:
    zoo(tmp_path / "in.safetensors")
    serve = start("serve", "in.safetensors", "unix:w.sock", "--chunk-bytes", 1000, "--slots", 2)
    fetched = start("fetch", "unix:w.sock", "out.safetensors")

    assert "2 slots of 1000 bytes" in fetched.works()
    serve.works()
    assert sha256(tmp_path / "out.safetensors") == sha256(tmp_path / "in.safetensors")


def test_files_of_other_writers_arrive_identical_at_two_receivers(start: Start, tmp_path: Path) -> None:
    header = {
        "z": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"data_offsets": [11, 15], "dtype": "F4", "shape": [2, 4]},
        "__metadata__": {"b": "2", "a": "1"},
        "odd": {"dtype": "F64", "shape": [1], "data_offsets": [3, 11]},  # not aligned to anything
    }
    raw_file(tmp_path / "in", header, bytes(range(15)), indent=1, pad=3)
    serve = start("serve", "in", "unix:w.sock", "--receivers", 2, "--backend", "pickle", "--backend", "shm")
    fetches = [start("fetch", "unix:w.sock", f"out{n}") for n in range(2)]

    for one in fetches:
        one.works()
    assert "to 2 receivers" in serve.works()
    assert (tmp_path / "out0").read_bytes() == (tmp_path / "out1").read_bytes() == (tmp_path / "in").read_bytes()


def test_a_file_without_tensors_arrives_identical(start: Start, tmp_path: Path) -> None:
    raw_file(tmp_path / "in", {"__metadata__": {"only": "this"}}, b"")
    serve, fetched = start("serve", "in", "unix:w.sock", "--quiet"), start("fetch", "unix:w.sock", "out", "-q")
    assert (serve.works(), fetched.works()) == ("", "")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_tcp_with_a_key(start: Start, tmp_path: Path) -> None:
    zoo(tmp_path / "in")
    (tmp_path / "key").write_text("a secret\n")
    (tmp_path / "same").write_bytes(b"a secret")
    serve = start("serve", "in", "tcp://127.0.0.1:0", "--authkey-file", "key")
    assert serve.process.stdout is not None
    address = serve.process.stdout.readline().split()[-1]
    with pytest.raises(tk.AuthenticationError, match="key"):
        fetch.run(address, tmp_path / "out", {"authkey": b"another secret"}, quiet=True)
    assert not (tmp_path / "out").exists()

    start("fetch", address, "out", "--authkey-file", "same").works()
    assert serve.end() == 0
    assert "came to nothing" in serve.error  # the one with the wrong key
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


# -- fetch, from senders that are no files ----------------------------------------------------------------------------


@pytest.fixture
def fetching(tmp_path: Path) -> Iterator[Future[None]]:
    """What `transportkit fetch unix:w.sock out` does, on a thread: a process would cost a start of torch."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fetch.run, f"unix:{tmp_path}/w.sock", tmp_path / "out", {"chunk_bytes": 4000}, quiet=True)


@pytest.mark.parametrize("streamed", [False, True], ids=["mapping", "iterator"])
def test_what_the_api_sends_becomes_the_file_that_safetensors_writes(
    fetching: Future[None], tmp_path: Path, streamed: bool
) -> None:
    tensors = {"b": torch.arange(3), "a": torch.rand(70, 50), "h": torch.rand(3).half(), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "expected", metadata={"step": "17"})
    with tk.serve(f"unix:{tmp_path}/w.sock", wait=30) as sender:
        sender.send(iter(tensors.items()) if streamed else tensors, metadata={"step": "17"})
        fetching.result(30)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["expected", "out"]


def test_tied_tensors_of_a_module_are_written_under_both_names(fetching: Future[None], tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    module[1].weight = module[0].weight
    with tk.serve(f"unix:{tmp_path}/w.sock", wait=30) as sender:
        sender.send(module)
        fetching.result(30)
    written = load_file(tmp_path / "out")
    assert written.keys() == module.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("streamed", [False, True], ids=["mapping", "iterator"])
def test_what_the_format_cannot_hold_is_refused_and_the_sender_told(
    fetching: Future[None], tmp_path: Path, streamed: bool
) -> None:
    tensors = {"fine": torch.rand(4), "odd": torch.rand(3).to(torch.complex128)}
    with tk.serve(f"unix:{tmp_path}/w.sock", wait=30) as sender:
        with pytest.raises(tk.PeerFailedError, match="no dtype complex128"):
            sender.send(iter(tensors.items()) if streamed else tensors)
    with pytest.raises(CommandError, match="'odd'"):
        fetching.result(30)
    assert os.listdir(tmp_path) == []


# -- doctor and demo --------------------------------------------------------------------------------------------------


def test_doctor_says_what_would_be_agreed_or_why_nothing_and_takes_no_place(start: Start, tmp_path: Path) -> None:
    zoo(tmp_path / "in")
    serve = start("serve", "in", "unix:w.sock", "--backend", "shm", "--quiet")
    assert "shm: taken" in start("doctor", "unix:w.sock").works()
    with pytest.raises(CommandError, match=r"(?s)pickle: not taken.*shm: not taken"):
        doctor.run(f"unix:{tmp_path}/w.sock", {"backends": ("pickle",)})
    assert serve.process.poll() is None
    serve.kill()


def test_the_demo_says_what_it_moved_how_fast_and_that_it_is_identical(start: Start, tmp_path: Path) -> None:
    told = start("demo", "--size", "20MB", "--updates", 3, TMPDIR=str(tmp_path)).works()
    assert "synthetic" in told
    assert ": taken: " in told
    assert re.search(r"warm: \d+\.\d+ GB/s; a plain warm copy .*: \d+\.\d+ GB/s; ratio \d", told)
    assert "identical: all 3 updates" in told
    assert os.listdir(tmp_path) == []


def test_the_demo_moves_a_file(start: Start, tmp_path: Path) -> None:
    zoo(tmp_path / "in.safetensors")
    far = tmp_path / ("x" * 100)  # no path of a socket has room for it
    far.mkdir()
    command = ("demo", "in.safetensors", "--updates", 1, "--backend", "pickle", "--chunk-bytes", 100)
    told = start(*command, TMPDIR=str(far)).works()
    assert "in.safetensors, 22 tensors" in told
    assert "identical: all 1 update " in told
