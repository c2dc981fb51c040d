"""The descriptor's way from process to process: strangers, squatters, stale files, silent and dead peers."""

from __future__ import annotations

import array
import gc
import multiprocessing
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shm_ends as ends

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, PeerLostError, ResourceError
from transportkit.wire import decode_as, raw
from transportkit_shm import arena, giver, handover
from transportkit_shm.giver import Giver, sweep
from transportkit_shm.handover import CLAIM, GREETING, MAGIC, Invitation, prove
from transportkit_shm.shm import ShmExporter, ShmTransport
from transportkit_shm.taker import Taker

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def link(tmp_path: Path) -> str:
    return str(tmp_path / "link.sock")


def export(link: str = "", receivers: int = 1) -> ShmExporter:
    return ShmTransport.exporter(ends.terms(receivers=receivers), ends.PollWiring(link))


def where(exporter: ShmExporter) -> Invitation:
    return decode_as(Invitation, exporter.invite(0))


def dial(invitation: Invitation) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(5)
    stranger.connect(invitation.path or b"\0" + invitation.abstract)
    return stranger


def connects(exporter: ShmExporter, link: str = "") -> None:
    """The exporter still serves its importer."""
    serving = ends.Background(exporter.connect, ends.limit())
    importer = ends.importer_for(exporter, link)
    importer.connect(ends.limit())
    assert serving.outcome() is None
    exporter.slots[0].fill_(4)
    assert importer.attach(exporter.locate(0, 0).handle)[:2].tolist() == [4, 4]
    exporter.close()


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_file_is_private_and_goes_when_all_have_connected(link: str, tmp_path: Path) -> None:
    exporter = export(link)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("link.sock.shm0-")
    status = path.lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert os.fsencode(path) == where(exporter).path
    connects(exporter, link)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["abort", "close"])
def test_the_file_goes_at_the_end(link: str, tmp_path: Path, end: str) -> None:
    exporter = export(link)
    getattr(exporter, end)()
    assert list(tmp_path.iterdir()) == []
    exporter.close()


def test_a_path_that_would_be_too_long_becomes_abstract(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * (100 - len(str(tmp_path)))))
    exporter = export(long)
    assert where(exporter).abstract
    assert list(tmp_path.iterdir()) == []
    connects(exporter, long)


def test_a_folder_that_takes_no_file_makes_it_abstract(tmp_path: Path) -> None:
    exporter = export(str(tmp_path / "gone" / "link.sock"))
    assert where(exporter).abstract
    connects(exporter)


def test_the_importer_may_see_the_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "alias.sock").symlink_to(tmp_path / "there" / "link.sock")
    for own in ("here/link.sock", "alias.sock", "nowhere/link.sock"):
        exporter = export(str(tmp_path / "there" / "link.sock"))
        (tmp_path / "there" / "link.sock").touch()
        connects(exporter, str(tmp_path / own))


def test_names_that_are_no_text(tmp_path: Path) -> None:
    link = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.sock")
    connects(export(link), link)


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
    exporter = export(link)
    assert [os.fsencode(path) for path in tmp_path.iterdir()] == [where(exporter).path]
    exporter.close()


def bound(path: Path, *, listening: bool) -> socket.socket:
    live = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    live.bind(str(path))
    if listening:
        live.listen(0)
    return live


def test_the_sweep_spares_what_is_not_provably_dead(link: str, tmp_path: Path) -> None:
    base = tmp_path / "link.sock"
    with bound(tmp_path / "link.sock.shm0-00000001", listening=True), bound(base, listening=True):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.bind(f"{base}.shm0-00000002")
            stream.listen()
            (tmp_path / "link.sock.shm0-00000003").write_text("a file")
            (tmp_path / "link.sock.shm0-00000004").mkdir()
            (tmp_path / "link.sock.shm0-00000005").symlink_to(base)
            bound(tmp_path / "link.sock.shm0-6", listening=False).close()
            bound(tmp_path / "other.sock.shm0-00000007", listening=False).close()
            bound(tmp_path / "link.sock.new0-00000008", listening=False).close()
            spared = set(tmp_path.iterdir())
            bound(tmp_path / "link.sock.shm0-00000009", listening=False).close()
            bound(tmp_path / "link.sock.shm12-0000000a", listening=False).close()
            old = tmp_path / "link.sock.new0-0000000b"
            bound(old, listening=False).close()
            os.utime(old, (1, 1))
            sweep(os.fsencode(link))
            assert set(tmp_path.iterdir()) == spared


def test_a_sweep_does_not_disturb_a_live_exporter(link: str) -> None:
    exporter = export(link)
    for _ in range(100):
        sweep(os.fsencode(link))
    connects(exporter, link)


def test_two_exporters_beside_one_link(link: str) -> None:
    first, second = export(link), export(link)
    connects(first, link)
    connects(second, link)


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
    exporter = export(link)
    with dial(where(exporter)) as stranger:
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
    exporter = export(link)
    with dial(where(exporter)) as first, dial(where(exporter)) as second:
        serving = ends.Background(exporter.connect, ends.limit())
        overheard = claim(first.recv(1000), ends.TOKEN, 0)
        second.recv(1000)
        second.send(overheard)
        assert second.recvmsg(100, 100)[:2] == (b"", [])
        ends.importer_for(exporter, link).connect(ends.limit())
        assert serving.outcome() is None


def test_a_receiver_is_served_once(link: str) -> None:
    exporter = export(link, receivers=2)
    serving = ends.Background(exporter.connect, ends.limit())
    ends.importer_for(exporter, link, 0, receivers=2).connect(ends.limit())
    with pytest.raises(BackendError, match="no descriptor came: the sender hung up"):
        ends.importer_for(exporter, link, 0, receivers=2).connect(ends.limit())
    ends.importer_for(exporter, link, 1, receivers=2).connect(ends.limit())
    assert serving.outcome() is None


def test_a_crowd_of_silent_strangers(link: str) -> None:
    exporter = export(link)
    serving = ends.Background(exporter.connect, ends.limit())
    crowd = []
    for _ in range(3 * giver.STRANGERS):
        crowd.append(dial(where(exporter)))
        crowd[-1].recv(1000)
    assert len(exporter._giver._visitors) <= giver.STRANGERS + 1
    ends.importer_for(exporter, link).connect(ends.limit())
    assert serving.outcome() is None
    for stranger in crowd:
        stranger.close()


def test_another_user_is_refused(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = export(link)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        serving = ends.Background(exporter.connect, ends.limit(0.3))
        with dial(where(exporter)) as stranger:
            assert stranger.recv(100) == b""
        assert isinstance(serving.outcome(), DeadlineError)
    exporter = export(link)
    monkeypatch.setattr(handover, "overflow_uid", os.geteuid)
    with pytest.raises(BackendError, match="namespace"):
        ends.importer_for(exporter, link).connect(ends.limit())
    exporter.close()


# -- squatters before the importer ------------------------------------------------------------------------------------

Squatter = Callable[[socket.socket], object]
Ancillary = list[tuple[int, int, bytes]]


def answer(
    *descriptors: int, token: bytes = ends.TOKEN, ancillary: list[tuple[int, int, bytes]] | None = None
) -> Squatter:
    def squat(guest: socket.socket) -> None:
        nonce = bytes(32)
        guest.send(MAGIC + nonce)
        _, its_nonce, _ = CLAIM.unpack(guest.recv(CLAIM.size))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        guest.sendmsg([prove(token, b"exporter", 0, nonce, its_nonce)], ancillary or rights)

    return squat


@pytest.fixture
def squatted(tmp_path: Path) -> Iterator[Callable[[Squatter], Taker]]:
    """A taker whose invitation leads to somebody who behaves as told."""
    with bound(tmp_path / "squatter", listening=True) as listener:
        threads = []

        def squat(behaviour: Squatter) -> Taker:
            def serve() -> None:
                select.select([listener], [], [], 10)  # a waiting accept has taken its descriptor already
                with listener.accept()[0] as guest:
                    behaviour(guest)
                    select.select([guest], [], [], 5)

            threads.append(ends.Background(serve))
            return Taker(Invitation(path=os.fsencode(tmp_path / "squatter")), ends.TOKEN, 0, "")

        yield squat
        for thread in threads:
            thread.outcome()


PIPE = os.pipe()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (lambda guest: guest.shutdown(socket.SHUT_RDWR), "hung up"),
        (lambda guest: guest.send(b"x" * 5000), "instead"),
        (lambda guest: guest.send(b"x"), "instead"),
        (lambda guest: guest.send(b"x" * GREETING), "no exporter"),
        (lambda guest: (guest.send(MAGIC + bytes(32)), guest.recv(100), guest.shutdown(socket.SHUT_RDWR)), "hung up"),
        (answer(0, token=bytes(32)), "does not know the session's token"),
        (answer(), "no descriptor came"),
        (answer(0, 1), "no descriptor came"),
        (answer(*[0] * 100), "no descriptor came"),
    ],
)
def test_squatters_are_found_out(squatted: Callable[[Squatter], Taker], behaviour: Squatter, reason: str) -> None:
    taker = squatted(behaviour)
    before = sorted(ends.descriptors())
    with pytest.raises(BackendError, match=reason) as caught:
        taker.fetch(ends.PollWiring(), ends.limit())
    assert caught.value.backend == "shm"
    assert len(set(ends.descriptors()) - set(before)) <= 1  # the squatter's own end


def test_credentials_instead_of_a_descriptor(squatted: Callable[[Squatter], Taker]) -> None:
    mine = array.array("i", [os.getpid(), os.getuid(), os.getgid()]).tobytes()
    taker = squatted(answer(ancillary=[(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)]))
    with pytest.raises(BackendError, match="no descriptor came"):
        taker.fetch(ends.PollWiring(), ends.limit())


def test_a_silent_squatter_costs_no_more_than_the_deadline(squatted: Callable[[Squatter], Taker]) -> None:
    taker = squatted(lambda guest: None)
    with pytest.raises(DeadlineError):
        taker.fetch(ends.PollWiring(), ends.limit(0.2))


def test_a_received_descriptor_is_closed_on_exec(squatted: Callable[[Squatter], Taker]) -> None:
    descriptor = squatted(answer(PIPE[0])).fetch(ends.PollWiring(), ends.limit())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["pipe", "unsealed", "small"])
def test_wrong_memory_is_not_mapped(kind: str) -> None:
    gc.collect()
    mapped = ends.mappings()
    memory = {
        "pipe": lambda: os.dup(PIPE[0]),
        "unsealed": lambda: os.memfd_create("x"),
        "small": lambda: arena.create(arena.Layout(2, 1000)),
    }[kind]()
    before = len(ends.descriptors()) - 1
    impostor = Giver(memory, ends.TOKEN, [0], 0, "")
    importer = ShmTransport.importer(ends.terms(0), ends.PollWiring())
    importer.join(raw(impostor.invitation))
    serving = ends.Background(impostor.serve, ends.PollWiring(), ends.limit())
    with pytest.raises(BackendError, match=r"no memory file|not sealed|8192 bytes, the terms need 12288"):
        importer.connect(ends.limit())
    assert serving.outcome() is None
    assert len(ends.descriptors()) == before
    assert ends.mappings() == mapped


def test_nobody_listens(link: str) -> None:
    exporter = export(link)
    importer = ends.importer_for(exporter, link)
    exporter.close()
    with pytest.raises(BackendError, match="cannot be reached: No such file"):
        importer.connect(ends.limit())
    exporter = export()
    importer = ends.importer_for(exporter)
    exporter.close()
    with pytest.raises(BackendError, match="cannot be reached: Connection refused"):
        importer.connect(ends.limit())


def test_the_importers_descriptor_limit(squatted: Callable[[Squatter], Taker]) -> None:
    taker = squatted(answer(PIPE[0]))
    handover.overflow_uid()  # opens a file the first time
    # The other end lives in this process too: it takes one for the connection, the importer one for its socket.
    with ends.room_for(2), pytest.raises(ResourceError, match=r"no descriptor came.*descriptor limit"):
        taker.fetch(ends.PollWiring(), ends.limit())


def test_no_descriptor_is_left_for_a_socket() -> None:
    taker = Taker(Invitation(path=b"/nowhere"), ends.TOKEN, 0, "")
    with ends.room_for(0), pytest.raises(ResourceError, match="descriptor limit"):
        taker.fetch(ends.PollWiring(), ends.limit())


# -- waits ------------------------------------------------------------------------------------------------------------


def test_the_exporter_waits_no_longer_than_its_deadline(link: str, tmp_path: Path) -> None:
    exporter = export(link)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="descriptor"):
        exporter.connect(Deadline(0.2, "descriptor"))
    assert time.monotonic() - started < 2
    assert list(tmp_path.iterdir()) == []


def test_the_importer_waits_no_longer_than_its_deadline(link: str) -> None:
    exporter = export(link)  # listens, but does not serve
    with pytest.raises(DeadlineError):
        ends.importer_for(exporter, link).connect(ends.limit(0.2))
    exporter.close()


def test_a_full_backlog_is_waited_for(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver, "STRANGERS", 0)
    exporter = export(link)
    crowd = [dial(where(exporter)) for _ in range(2)]
    with pytest.raises(DeadlineError):
        ends.importer_for(exporter, link).connect(ends.limit(0.2))
    importing = ends.Background(ends.importer_for(exporter, link).connect, ends.limit())
    time.sleep(0.05)
    for stranger in crowd:
        stranger.close()
    assert ends.Background(exporter.connect, ends.limit()).outcome() is None
    assert importing.outcome() is None


def test_abort_ends_a_wait_of_the_exporter(link: str) -> None:
    exporter = export(link)
    serving = ends.Background(exporter.connect, ends.limit(20))
    time.sleep(0.1)
    exporter.abort()
    error = serving.outcome()
    assert isinstance(error, BackendError)
    with pytest.raises(BackendError):
        exporter.connect(ends.limit())


def test_abort_ends_a_wait_of_the_importer(link: str) -> None:
    exporter = export(link)
    importer = ends.importer_for(exporter, link)
    waiting = ends.Background(importer.connect, ends.limit(20))
    time.sleep(0.1)
    importer.abort()
    assert isinstance(waiting.outcome(), BackendError)
    with pytest.raises(BackendError):
        importer.connect(ends.limit())
    exporter.close()


def test_a_dropped_receiver_is_not_waited_for(link: str) -> None:
    exporter = export(link, receivers=2)
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
    before = set(os.listdir("/dev/shm"))
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
    assert set(os.listdir("/dev/shm")) <= before


def _receive(link: str, invitation: bytes, handle: bytes, number: int, answers: object) -> None:
    from msgspec import Raw

    importer = ShmTransport.importer(ends.terms(number, receivers=2), ends.PollWiring(link))
    importer.join(Raw(invitation))
    importer.connect(ends.limit())
    answers.send(importer.attach(Raw(handle))[:5].tolist())  # type: ignore[attr-defined]


def test_a_spawned_receiver() -> None:
    ctx = multiprocessing.get_context("spawn")
    exporter = export(receivers=2)
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
