"""Too few descriptors, too little memory or space: the value arrives, over another backend maybe, or a typed error."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
import torch
from promptness import PROMPT
from session_ends import BACKENDS, Child, Talk, caught, differing, model, zeros

import transportkit as tk
import transportkit.site

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


# -- descriptors ------------------------------------------------------------------------------------------------------


def many(count: int = 300) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.full((n % 7 + 1,), float(n)) for n in range(count)}


def keep_many(talk: Talk, address: str, keywords: dict[str, Any]) -> tuple[int, int, list[str]]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    with tk.connect(address, **keywords) as receiver:
        _ = receiver.agreement
        before = len(ends.descriptors())
        kept: list[tuple[str, torch.Tensor]] = []
        most = before
        for pair in receiver.receive():
            kept.append(pair)
            if len(kept) % 50 == 0:
                most = max(most, len(ends.descriptors()))
        return before, most, differing(kept, many())


def send_many(talk: Talk, address: str, keywords: dict[str, Any]) -> tuple[int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    counts: list[int] = []
    with tk.serve(address, **keywords) as sender:
        before = len(ends.descriptors())
        sender.send(many(), version=1, progress=lambda done, total: counts.append(len(ends.descriptors())))
        return before, max(counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_bytes", [64, 16 << 20])
def test_descriptors_do_not_grow_with_the_number_of_tensors(folder: Path, backend: str, chunk_bytes: int) -> None:
    address = f"unix:{folder}/s"
    keywords: dict[str, Any] = {"backends": [backend], "chunk_bytes": chunk_bytes, "wait": 10}
    with Child(send_many, address, keywords) as sender, Child(keep_many, address, keywords) as receiver:
        before, most, wrong = receiver.result()
        assert wrong == []
        assert most <= before
        before, most = sender.result()
        assert most <= before


def starved(talk: Talk, room: int, side: str, address: str, keywords: dict[str, Any]) -> Any:
    """A side that may open so many more descriptors."""
    model()  # torch looks at the processor once, and takes another path where it cannot
    used = max(ends.descriptors()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, used + 60))
    filling = [os.dup(0) for _ in range(60 - room)]
    try:
        run = {"send": ends.serve_one, "receive": ends.one_update}[side]
        return run(None, address, keywords)
    except tk.TransportKitError as error:
        return type(error).__name__, str(error)
    finally:
        for number in filling:
            os.close(number)


@pytest.mark.parametrize("room", range(8))
@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_side_with_hardly_any_descriptor_left(folder: Path, side: str, room: int) -> None:
    address = f"unix:{folder}/s"
    keywords = {"wait": 1.5, "timeout": 1.5}
    other = {"send": ends.one_update, "receive": ends.serve_one}[side]
    with Child(starved, room, side, address, keywords) as poor, Child(other, address, keywords) as rich:
        outcome = poor.result()
        if isinstance(outcome, tuple):  # an error of ours, and the other side ends as well
            assert outcome[0] in dir(tk), outcome
            assert isinstance(caught(rich.result)[0], tk.TransportKitError)
        else:
            rich.result()


# -- memory and space -------------------------------------------------------------------------------------------------


def poor_sender(talk: Talk, limit: str, address: str, keywords: dict[str, Any]) -> str:
    impoverish(limit)
    with tk.serve(address, **keywords, backends=("shm", "pickle")) as sender:
        text = str(sender.agreement)
        sender.send(model(), version=1)
        return text


def impoverish(limit: str) -> None:
    if limit == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    elif limit == "memory":
        transportkit.site.free_memory = lambda: 20 << 20  # type: ignore[assignment]
    elif limit == "space":

        def no_space(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = no_space
    elif limit == "locked":
        from transportkit_shm import arena

        def refused(*_: Any) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return int(arena._MAP_FAILED or 0)

        arena._libc = type("Libc", (), {"mmap": staticmethod(refused), "munmap": arena._libc.munmap})()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("file size", "too large"),
        ("memory", "does not fit"),
        ("space", "No space left"),
        ("locked", "Cannot allocate memory"),
    ],
)
def test_without_room_for_shared_memory_the_agreement_is_pickle_and_says_why(
    folder: Path, limit: str, words: str
) -> None:
    address = f"unix:{folder}/s"
    with Child(poor_sender, limit, address, {"wait": 10}) as sender, Child(ends.one_update, address, {}) as receiver:
        assert receiver.result() == "pickle"
        text = sender.result()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("shm:")]
    assert "not taken" in line
    assert words.lower() in line.lower()


@pytest.mark.parametrize("limit", ["memory", "locked"])
def test_a_receiver_without_room_declines(folder: Path, limit: str) -> None:
    address = f"unix:{folder}/s"
    with (
        Child(poor_sender, "", address, {"wait": 10}) as sender,
        Child(poor_receiver, limit, address, {"timeout": 5}) as receiver,
    ):
        backend = receiver.result()
        text = sender.result()
    if limit == "locked":
        assert backend == "pickle"
        assert "Cannot allocate memory" in text
    else:  # it maps what the sender has allocated
        assert backend == "shm"


def poor_receiver(talk: Talk, limit: str, address: str, keywords: dict[str, Any]) -> str:
    impoverish(limit)
    return ends.one_update(talk, address, keywords)


@pytest.mark.parametrize("side", ["send", "receive"])
def test_without_memory_for_any_backend_both_sides_get_a_typed_error(folder: Path, side: str) -> None:
    address = f"unix:{folder}/s"
    roomy: dict[str, Any] = {"wait": 10, "timeout": 5, "chunk_bytes": 512 << 20, "slots": 4}
    other = {"send": ends.one_update, "receive": ends.serve_one}[side]
    with Child(cramped, side, address, roomy) as poor, Child(other, address, roomy) as rich:
        error = poor.result()
        assert isinstance(error, tk.NegotiationError), repr(error)
        assert "no memory" in str(error)
        other_error, _ = caught(rich.result)
        assert isinstance(other_error, tk.NegotiationError)
        assert "no memory" in str(other_error)


def cramped(talk: Talk, side: str, address: str, keywords: dict[str, Any]) -> tk.TransportKitError:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
    run = {"send": ends.serve_one, "receive": ends.one_update}[side]
    error, _ = caught(run, None, address, keywords)
    return error


BOTH_SIDES = """
import subprocess, sys, threading
import torch
import transportkit as tk
torch.manual_seed(1)
big = {"big": torch.randn(4 << 20), "small": torch.ones(3)}
address = "unix:" + sys.argv[1] + "/s"
if sys.argv[2] == "receive":
    target = {name: torch.zeros_like(t) for name, t in big.items()}
    with tk.connect(address, wait=20) as receiver:
        print(receiver.load_into(target).backend, all(torch.equal(target[n], big[n]) for n in big))
else:
    other = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1], "receive"])
    with tk.serve(address, wait=20) as sender:
        sender.send(big)
    sys.exit(other.wait(20))
"""


def test_a_tiny_dev_shm_kills_nobody(folder: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("user and mount namespaces may not be made here")
    script = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" "$@"'
    done = subprocess.run(
        [unshare, "-Urm", "sh", "-c", script, sys.executable, "-c", BOTH_SIDES, str(folder), "send", BOTH_SIDES],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # in particular not -7, which is SIGBUS
    assert done.stdout.split() == ["shm", "True"]


# -- programs end -----------------------------------------------------------------------------------------------------

EXITING = """
import sys
import torch
import transportkit as tk
with tk.serve("unix:" + sys.argv[1] + "/s", timeout=3, wait=20, chunk_bytes=4096, backends=[sys.argv[2]]) as sender:
    print("ready", flush=True)
    try:
        sender.send({str(n): torch.full((100,), n) for n in range(1000)})
    except tk.TransportKitError as error:
        print(isinstance(error, tk.DeadlineError), isinstance(error, tk.PeerLostError), flush=True)
"""


@pytest.mark.parametrize(("backend", "fate"), [("shm", "SIGKILL"), ("pickle", "SIGSTOP")])
def test_a_sender_exits_although_its_receiver_read_nothing(folder: Path, backend: str, fate: str) -> None:
    sender = ends.python(EXITING, str(folder), backend)
    try:
        assert sender.stdout is not None
        with Child(sit, f"unix:{folder}/s", backend, getattr(signal, fate)) as receiver:
            assert sender.stdout.readline() == "ready\n"
            receiver.heard()
            began = time.monotonic()
            assert sender.wait(20) == 0
            assert time.monotonic() - began < PROMPT  # 3 of them its own
            assert sender.stdout.read().split() == [str(fate == "SIGSTOP"), str(fate == "SIGKILL")]
    finally:
        sender.kill()
        sender.communicate()


def sit(talk: Talk, address: str, backend: str, number: int) -> None:
    """A receiver that takes two chunks, then dies or stops."""
    with tk.connect(address, backends=[backend], wait=20, timeout=3) as receiver:
        for count, lease in enumerate(receiver.chunks()):
            del lease
            if count == 1:
                talk.say("now")
                ends.suicide(number)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_that_comes_late_gets_everything(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Child(ends.serve_one, address, {"backends": [backend]}) as sender:
        time.sleep(1)
        target = zeros()
        with tk.connect(address, backends=[backend], wait=10) as receiver:
            receiver.load_into(target)
        assert differing(target, model()) == []
        assert sender.result() == {0: backend}


def test_what_a_lease_gave_outlives_the_sender(folder: Path) -> None:
    address = f"unix:{folder}/s"
    keywords: dict[str, Any] = {"backends": ["shm"], "chunk_bytes": 4096, "slots": 200}
    kept: list[tuple[str, torch.Tensor]] = []
    with Child(ends.serve_one, address, keywords) as sender:
        with tk.connect(address, wait=10, **keywords) as receiver:
            for lease in receiver.chunks():
                for spec, _, tensor in lease:
                    if tensor.dtype != torch.uint8 and tensor.numel():
                        kept.append((spec.name, tensor))
                del tensor
            assert receiver.held > 0
        sender.result()
        assert sender.join() == 0
    wanted = model()
    assert len(kept) > 5
    assert [name for name, tensor in kept if ends.raw(tensor) != ends.raw(wanted[name])] == []
