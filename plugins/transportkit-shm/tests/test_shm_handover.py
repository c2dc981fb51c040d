"""The descriptor's way from process to process: strangers, squatters, stale files, silent and dead peers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import shm_ends as ends
from promptness import PROMPT
from session_ends import shared_names

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, PeerLostError
from transportkit.wire import decode_as
from transportkit_shm import giver, handover
from transportkit_shm.giver import sweep
from transportkit_shm.handover import CLAIM, GREETING, MAGIC, Invitation, prove
from transportkit_shm.shm import ShmExporter, ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def link(tmp_path: Path) -> str:
    return str(tmp_path / "link.sock")


def where(exporter: ShmExporter) -> Invitation:
    return decode_as(Invitation, exporter.invite(0))


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_file_is_private_and_goes_when_all_have_connected(link: str, tmp_path: Path) -> None:
    exporter = ends.export(link)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("link.sock.shm0-")
    status = path.lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert os.fsencode(path) == where(exporter).path
    ends.connects(exporter, link)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["abort", "close"])
def test_the_file_goes_at_the_end(link: str, tmp_path: Path, end: str) -> None:
    exporter = ends.export(link)
    getattr(exporter, end)()
    assert list(tmp_path.iterdir()) == []
    exporter.close()


def test_a_path_that_would_be_too_long_becomes_abstract(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * (100 - len(str(tmp_path)))))
    exporter = ends.export(long)
    assert where(exporter).abstract
    assert list(tmp_path.iterdir()) == []
    ends.connects(exporter, long)


def test_a_folder_that_takes_no_file_makes_it_abstract(tmp_path: Path) -> None:
    exporter = ends.export(str(tmp_path / "gone" / "link.sock"))
    assert where(exporter).abstract
    ends.connects(exporter)


def test_the_importer_may_see_the_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "alias.sock").symlink_to(tmp_path / "there" / "link.sock")
    for own in ("here/link.sock", "alias.sock", "nowhere/link.sock"):
        exporter = ends.export(str(tmp_path / "there" / "link.sock"))
        (tmp_path / "there" / "link.sock").touch()
        ends.connects(exporter, str(tmp_path / own))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    link = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.sock")
    ends.connects(ends.export(link), link)


# -- stale files ------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys, signal, shm_ends as ends
keep = ends.ShmTransport.exporter(ends.terms(), ends.PollWiring(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(code: str, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)  # type: ignore[call-overload]


def test_what_a_killed_exporter_leaves_is_swept(link: str, tmp_path: Path) -> None:
    killed = start(KILLED, link)
    assert killed.wait(20) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    exporter = ends.export(link)
    assert [os.fsencode(path) for path in tmp_path.iterdir()] == [where(exporter).path]
    exporter.close()


def test_the_sweep_spares_what_is_not_provably_dead(link: str, tmp_path: Path) -> None:
    base = tmp_path / "link.sock"
    with ends.bound(tmp_path / "link.sock.shm0-00000001", listening=True), ends.bound(base, listening=True):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.bind(f"{base}.shm0-00000002")
            stream.listen()
            (tmp_path / "link.sock.shm0-00000003").write_text("a file")
            (tmp_path / "link.sock.shm0-00000004").mkdir()
            (tmp_path / "link.sock.shm0-00000005").symlink_to(base)
            ends.bound(tmp_path / "link.sock.shm0-6", listening=False).close()
            ends.bound(tmp_path / "other.sock.shm0-00000007", listening=False).close()
            ends.bound(tmp_path / "link.sock.new0-00000008", listening=False).close()
            spared = set(tmp_path.iterdir())
            ends.bound(tmp_path / "link.sock.shm0-00000009", listening=False).close()
            ends.bound(tmp_path / "link.sock.shm12-0000000a", listening=False).close()
            old = tmp_path / "link.sock.new0-0000000b"
            ends.bound(old, listening=False).close()
            os.utime(old, (1, 1))
            sweep(os.fsencode(link))
            assert set(tmp_path.iterdir()) == spared


def test_a_sweep_does_not_disturb_a_live_exporter(link: str) -> None:
    exporter = ends.export(link)
    for _ in range(100):
        sweep(os.fsencode(link))
    ends.connects(exporter, link)


def test_two_exporters_beside_one_link(link: str) -> None:
    first, second = ends.export(link), ends.export(link)
    ends.connects(first, link)
    ends.connects(second, link)


# -- strangers at the exporter ----------------------------------------------------------------------------------------


def claim(greeting: bytes, token: bytes, receiver: int) -> bytes:
    nonce = greeting[len(MAGIC) :]
    return CLAIM.pack(receiver, bytes(32), prove(token, b"importer", receiver, nonce, bytes(32)))


STRANGERS: dict[str, Callable[[socket.socket, bytes], object]] = {
    "silent": lambda stranger, greeting: None,
    "gone": lambda stranger, greeting: stranger.close(),
    "wrong token": lambda stranger, greeting: stranger.send(claim(greeting, bytes(32), 0)),
    "wrong receiver": lambda stranger, greeting: stranger.send(claim(greeting, ends.TOKEN, 1)),
    "reflected": lambda stranger, greeting: stranger.send(greeting),
    "too long": lambda stranger, greeting: stranger.send(claim(greeting, ends.TOKEN, 0) + b"x"),
    "flood": lambda stranger, greeting: stranger.send(bytes(100_000)),
    "descriptors": lambda stranger, greeting: socket.send_fds(stranger, [b"x"], [0, 1, 2]),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_costs_only_itself(kind: str, link: str) -> None:
    before = len(ends.descriptors())
    exporter = ends.export(link)
    with ends.dial(where(exporter)) as stranger:
        serving = ends.Background(exporter.connect, ends.limit())
        greeting = stranger.recv(1000)
        assert len(greeting) == GREETING
        STRANGERS[kind](stranger, greeting)
        if kind not in {"silent", "gone"}:
            data, ancillary, _, _ = stranger.recvmsg(100, 100)
            assert (data, ancillary) == (b"", [])
        importer = ends.importer_for(exporter, link)
        importer.connect(ends.limit())
        assert serving.outcome() is None
    exporter.close()
    importer.close()
    assert len(ends.descriptors()) == before


def test_an_old_claim_is_worthless(link: str) -> None:
    exporter = ends.export(link)
    with ends.dial(where(exporter)) as first, ends.dial(where(exporter)) as second:
        serving = ends.Background(exporter.connect, ends.limit())
        overheard = claim(first.recv(1000), ends.TOKEN, 0)
        second.recv(1000)
        second.send(overheard)
        assert second.recvmsg(100, 100)[:2] == (b"", [])
        ends.importer_for(exporter, link).connect(ends.limit())
        assert serving.outcome() is None


def test_a_receiver_is_served_once(link: str) -> None:
    exporter = ends.export(link, receivers=2)
    serving = ends.Background(exporter.connect, ends.limit())
    ends.importer_for(exporter, link, 0, receivers=2).connect(ends.limit())
    with pytest.raises(BackendError, match="no descriptor came: the sender hung up"):
        ends.importer_for(exporter, link, 0, receivers=2).connect(ends.limit())
    ends.importer_for(exporter, link, 1, receivers=2).connect(ends.limit())
    assert serving.outcome() is None


def test_a_crowd_of_silent_strangers(link: str) -> None:
    exporter = ends.export(link)
    serving = ends.Background(exporter.connect, ends.limit())
    crowd = []
    for _ in range(3 * giver.STRANGERS):
        crowd.append(ends.dial(where(exporter)))
        crowd[-1].recv(1000)
    assert len(exporter._giver._visitors) <= giver.STRANGERS + 1
    ends.importer_for(exporter, link).connect(ends.limit())
    assert serving.outcome() is None
    for stranger in crowd:
        stranger.close()


def test_another_user_is_refused(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = ends.export(link)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        serving = ends.Background(exporter.connect, ends.limit(0.3))
        with ends.dial(where(exporter)) as stranger:
            assert stranger.recv(100) == b""
        assert isinstance(serving.outcome(), DeadlineError)
    exporter = ends.export(link)
    monkeypatch.setattr(handover, "overflow_uid", os.geteuid)
    with pytest.raises(BackendError, match="namespace"):
        ends.importer_for(exporter, link).connect(ends.limit())
    exporter.close()


# -- waits ------------------------------------------------------------------------------------------------------------


def test_nobody_listens(link: str) -> None:
    exporter = ends.export(link)
    importer = ends.importer_for(exporter, link)
    exporter.close()
    with pytest.raises(BackendError, match="cannot be reached: No such file"):
        importer.connect(ends.limit())
    exporter = ends.export()
    importer = ends.importer_for(exporter)
    exporter.close()
    with pytest.raises(BackendError, match="cannot be reached: Connection refused"):
        importer.connect(ends.limit())


def test_the_exporter_waits_no_longer_than_its_deadline(link: str, tmp_path: Path) -> None:
    exporter = ends.export(link)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="descriptor"):
        exporter.connect(Deadline(0.2, "descriptor"))
    assert time.monotonic() - started < PROMPT
    assert list(tmp_path.iterdir()) == []


def test_the_importer_waits_no_longer_than_its_deadline(link: str) -> None:
    exporter = ends.export(link)  # listens, but does not serve
    with pytest.raises(DeadlineError):
        ends.importer_for(exporter, link).connect(ends.limit(0.2))
    exporter.close()


def test_a_full_backlog_is_waited_for(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver, "STRANGERS", 0)
    exporter = ends.export(link)
    crowd = [ends.dial(where(exporter)) for _ in range(2)]
    with pytest.raises(DeadlineError):
        ends.importer_for(exporter, link).connect(ends.limit(0.2))
    importing = ends.Background(ends.importer_for(exporter, link).connect, ends.limit())
    time.sleep(0.05)
    for stranger in crowd:
        stranger.close()
    assert ends.Background(exporter.connect, ends.limit()).outcome() is None
    assert importing.outcome() is None


def test_abort_ends_a_wait_of_the_exporter(link: str) -> None:
    exporter = ends.export(link)
    serving = ends.Background(exporter.connect, ends.limit(20))
    time.sleep(0.1)
    exporter.abort()
    error = serving.outcome()
    assert isinstance(error, BackendError)
    with pytest.raises(BackendError):
        exporter.connect(ends.limit())


def test_abort_ends_a_wait_of_the_importer(link: str) -> None:
    exporter = ends.export(link)
    importer = ends.importer_for(exporter, link)
    waiting = ends.Background(importer.connect, ends.limit(20))
    time.sleep(0.1)
    importer.abort()
    assert isinstance(waiting.outcome(), BackendError)
    with pytest.raises(BackendError):
        importer.connect(ends.limit())
    exporter.close()


def test_a_dropped_receiver_is_not_waited_for(link: str) -> None:
    exporter = ends.export(link, receivers=2)
    exporter.drop(1)
    importing = ends.Background(ends.importer_for(exporter, link, 0, receivers=2).connect, ends.limit())
    exporter.connect(ends.limit())
    assert importing.outcome() is None


@pytest.mark.parametrize("side", ["exporter", "importer"])
def test_the_peers_death_is_noticed_at_once(side: str, link: str) -> None:
    read, write = os.pipe()
    exporter = ShmTransport.exporter(ends.terms(), ends.PollWiring(link, read))
    importer = ShmTransport.importer(ends.terms(0), ends.PollWiring(link, read))
    importer.join(exporter.invite(0))
    waiting = ends.Background((exporter if side == "exporter" else importer).connect, ends.limit(20))
    time.sleep(0.1)
    os.close(write)
    assert isinstance(waiting.outcome(), PeerLostError)
    os.close(read)
    exporter.close()


# -- other processes --------------------------------------------------------------------------------------------------

IMPORTER = """
import sys, time, shm_ends as ends
from msgspec import Raw
importer = ends.ShmTransport.importer(ends.terms(0, chunk_bytes=100_000), ends.PollWiring(sys.argv[1]))
importer.join(Raw(bytes.fromhex(sys.argv[2])))
importer.connect(ends.limit())
whole = importer.attach(Raw(bytes.fromhex(sys.argv[3])))
print(len([p for p in ends.descriptors().values() if "memfd" in p or "socket" in p]), flush=True)
sys.stdin.readline()
print(int(whole[:100_000].sum()), flush=True)
"""


def test_an_unrelated_process_reads_on_after_the_exporter_is_gone(link: str) -> None:
    before = shared_names()
    gc.collect()
    mapped = ends.mappings()
    exporter = ShmTransport.exporter(ends.terms(chunk_bytes=100_000), ends.PollWiring(link))
    told = [bytes(part).hex() for part in (exporter.invite(0), exporter.locate(0, 0).handle)]
    reader = start(IMPORTER, link, *told, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader:
        exporter.connect(ends.limit(20))
        exporter.slots[0].fill_(7)
        assert reader.stdout.readline() == b"0\n"
        exporter.close()
        del exporter
        assert ends.mappings() == mapped
        reader.stdin.write(b"go\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == b"700000\n"
    assert reader.returncode == 0
    assert shared_names() <= before


def _receive(link: str, invitation: bytes, handle: bytes, number: int, answers: object) -> None:
    from msgspec import Raw

    importer = ShmTransport.importer(ends.terms(number, receivers=2), ends.PollWiring(link))
    importer.join(Raw(invitation))
    importer.connect(ends.limit())
    answers.send(importer.attach(Raw(handle))[:5].tolist())  # type: ignore[attr-defined]


def test_a_spawned_receiver() -> None:
    ctx = multiprocessing.get_context("spawn")
    exporter = ends.export(receivers=2)
    exporter.slots[0].fill_(8)
    exporter.drop(0)
    ours, theirs = ctx.Pipe(duplex=False)
    told = bytes(exporter.invite(1)), bytes(exporter.locate(0, 1).handle)
    child = ctx.Process(target=_receive, args=("", *told, 1, theirs))
    child.start()
    theirs.close()
    exporter.connect(ends.limit(20))
    assert ours.recv() == [8] * 5
    child.join(10)
    assert child.exitcode == 0
    ours.close()
    child.close()
    exporter.close()
