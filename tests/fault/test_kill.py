"""``kill -9`` of either side at every step: the survivor raises within a second, and the same address serves again."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
from promptness import PROMPT
from session_ends import BACKENDS, Child, Talk, caught, model, zeros

import transportkit as tk
from transportkit import wire
from transportkit.session.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

#: Small chunks, so that an update has many of them.
SIZES: dict[str, Any] = {"chunk_bytes": 4096, "slots": 2, "timeout": 20}

RECEIVER_DEATHS = {
    "proposed": ("transportkit.session.joining:verify", "before"),
    "joined": ("transportkit.session.joining:Joining._join", "after"),
    "connecting": ("transportkit.session.joining:Joining._prove", "before"),
    "trial": ("transportkit.session.joining:check_digest", "before"),
    "proven": ("transportkit.session.joining:Joining._prove", "after"),
    "begin": ("transportkit.session.receiving:Receiving.accept", "before"),
    "accepted": ("transportkit.session.receiving:Receiving.accept", "after"),
    "first chunk": ("transportkit.session.receiving:check_digest", "before", 1),
    "middle chunk": ("transportkit.session.receiving:check_digest", "after", 5),
    "commit": ("transportkit.session.receiving:Receiving.applied", "before"),
    "second commit": ("transportkit.session.receiving:Receiving.applied", "before", 2),
    "applied": ("transportkit.session.receiving:Receiving.applied", "after"),
}

SENDER_DEATHS = {
    "arrival": ("transportkit.session.gathering:Gathering._hosts", "before"),
    "greeted": ("transportkit.session.gathering:Gathering._hosts", "after"),
    "proposing": ("transportkit.session.opening:Opening._make", "before"),
    "proposed": ("transportkit.session.opening:Opening._wait_for", "before"),
    "meeting": ("transportkit.session.opening:Opening._meet", "before"),
    "met": ("transportkit.session.opening:Opening._meet", "after"),
    "trial": ("transportkit.session.lane:Lane.emit", "before"),
    "proven": ("transportkit.session.opening:Opening._try", "after"),
    "begin": ("transportkit.session.sending:Sending._begin", "before"),
    "accepted": ("transportkit.session.sending:Sending._begin", "after"),
    "first chunk": ("transportkit.session.lane:Lane.emit", "after", 2),
    "middle chunk": ("transportkit.session.lane:Lane.emit", "before", 6),
    "commit": ("transportkit.session.sending:Sending._commit", "before"),
    "committed": ("transportkit.session.peers:Peers.wait", "before", 1, "word that it is applied"),
    "second begin": ("transportkit.session.sending:Sending._begin", "before", 2),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- the two sides ----------------------------------------------------------------------------------------------------


def send_for_ever(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    with tk.serve(address, **keywords) as sender:
        for version in range(1, 1000):
            sender.send(model(), version=version)


def receive_for_ever(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    target = zeros()
    with tk.connect(address, **keywords) as receiver:
        while True:
            receiver.load_into(target)


def survive(talk: Talk, side: str, address: str, keywords: dict[str, Any]) -> tuple[tk.TransportKitError, float]:
    return caught({"send": send_for_ever, "receive": receive_for_ever}[side], talk, address, keywords)


def noticed(survivor: Child, victim: Child) -> tk.TransportKitError:
    """How the survivor of a killed victim ended, and that it took no longer than it may."""
    assert victim.join() == -signal.SIGKILL
    error, moment = survivor.result()
    assert moment - victim.died_at < PROMPT, f"{error!r} came {moment - victim.died_at:.1f} s after the death"
    assert survivor.join() == 0
    assert isinstance(error, tk.TransportKitError)
    return error


def swept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- the receiver dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", RECEIVER_DEATHS)
def test_the_sender_survives_its_receiver(folder: Path, backend: str, step: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with (
        Child(survive, "send", address, keywords) as sender,
        Child(receive_for_ever, address, keywords, die=RECEIVER_DEATHS[step]) as receiver,
    ):
        error = noticed(sender, receiver)
    assert isinstance(error, tk.PeerLostError)
    assert f"pid {receiver.pid}" in str(error)
    assert str(receiver.pid) in error.peer
    assert swept(folder) == []
    assert ends.session_works(address, backends=[backend]) == backend


def test_a_death_that_is_seen_with_the_last_word_is_told_to_the_next_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update has reached the receiver, so it succeeds; the loss is not forgotten for that."""
    take = Roster.take

    def and_gone(self: Roster, peer: Any, message: Any) -> bool:
        progress = take(self, peer, message)
        if isinstance(message, wire.Applied):
            peer.gone = tk.PeerLostError(f"{peer.name} hung up", peer=peer.name)
        return progress

    monkeypatch.setattr(Roster, "take", and_gone)
    address = f"unix:{folder}/s"
    with Child(receive_for_ever, address, SIZES) as receiver, tk.serve(address, **SIZES) as sender:
        assert sender.send(model()).lost == {}
        for _ in range(2):
            error, _ = caught(sender.send, model())
            assert isinstance(error, tk.PeerLostError)
            assert f"pid {receiver.pid}" in error.peer
            assert "no receiver is left; open a new session" in str(error)
        receiver.end()


@pytest.mark.parametrize(
    "die",
    [
        ("transportkit.session.ends:Receiver.over", "before"),
        ("transportkit.session.inlet:Inlet.send", "before"),
        ("transportkit.dial:_pass", "before"),
    ],
    ids=["preamble passed", "before its hello", "before the preamble"],
)
def test_a_receiver_that_dies_before_its_hello_costs_only_itself(
    folder: Path, backend: str, die: tuple[str, str]
) -> None:
    address = f"unix:{folder}/s"
    keywords: dict[str, Any] = {"backends": [backend]}
    with Child(ends.serve_one, address, keywords) as sender:
        with Child(receive_for_ever, address, keywords, die=die) as victim:
            assert victim.join() == -signal.SIGKILL
        with Child(ends.one_update, address, keywords) as receiver:
            assert receiver.result() == backend
            assert sender.result() == {0: backend}


@pytest.mark.parametrize("way", ["apply", "receive", "chunks"])
def test_a_receiver_that_dies_in_its_own_code(folder: Path, backend: str, way: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with Child(survive, "send", address, keywords) as sender, Child(die_taking, address, keywords, way) as receiver:
        assert isinstance(noticed(sender, receiver), tk.PeerLostError)
    assert ends.session_works(address, backends=[backend]) == backend


def die_taking(talk: Talk, address: str, keywords: dict[str, Any], way: str) -> None:
    with tk.connect(address, **keywords) as receiver:
        if way == "apply":
            receiver.apply(lambda pairs: ends.suicide() if any(name == "last" for name, _ in pairs) else None)
        elif way == "receive":
            for name, _ in receiver.receive():
                if name == "half":
                    ends.suicide()
        else:
            for count, lease in enumerate(receiver.chunks()):
                list(lease)
                if count == 4:
                    ends.suicide()


def test_one_of_two_receivers_dies(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with (
        Child(survive, "send", address, keywords | {"receivers": 2}) as sender,
        Child(survive, "receive", address, keywords) as other,
        Child(receive_for_ever, address, keywords, die=RECEIVER_DEATHS["middle chunk"]) as victim,
    ):
        assert isinstance(noticed(sender, victim), tk.PeerLostError)
        error, moment = other.result()
        assert moment - victim.died_at < PROMPT
        assert isinstance(error, tk.PeerError)
        assert str(victim.pid) in str(error)
    assert ends.session_works(address, backends=[backend]) == backend


# -- the sender dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", SENDER_DEATHS)
def test_the_receiver_survives_its_sender(folder: Path, backend: str, step: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with (
        Child(send_for_ever, address, keywords, die=SENDER_DEATHS[step]) as sender,
        Child(survive, "receive", address, keywords) as receiver,
    ):
        error = noticed(receiver, sender)
    assert isinstance(error, tk.PeerLostError)
    if step != "arrival":
        assert f"pid {sender.pid}" in str(error)
    assert ends.session_works(address, backends=[backend]) == backend
    assert swept(folder) == []


def test_a_sender_that_dies_between_a_header_and_its_payload(folder: Path) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": ["pickle"]}
    die = ("transportkit.backends.pickle:PickleExporter.publish", "before", 4)
    with (
        Child(send_for_ever, address, keywords, die=die) as sender,
        Child(survive, "receive", address, keywords) as receiver,
    ):
        error = noticed(receiver, sender)
    assert isinstance(error, tk.PeerLostError)
    assert error.torn == ("target",)


def test_a_sender_that_dies_in_its_source(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with Child(die_sending, address, keywords) as sender, Child(torn_target, address, keywords) as receiver:
        error, moment, version = receiver.result()
        assert sender.join() == -signal.SIGKILL
        assert moment - sender.died_at < PROMPT
        assert isinstance(error, tk.PeerLostError)
        assert error.torn == ("target",)
        assert "torn" in str(error)
        assert version is None


def die_sending(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    def post(pair: tuple[str, Any]) -> Any:
        if pair[0] == "last":
            ends.suicide()
        return pair[1]

    with tk.serve(address, **keywords) as sender:
        sender.send(model(), version=1)
        sender.send(model(), version=2, post=post)


def torn_target(talk: Talk, address: str, keywords: dict[str, Any]) -> tuple[tk.TransportKitError, float, int | None]:
    with tk.connect(address, **keywords) as receiver:
        receiver.load_into(zeros())
        assert receiver.version == 1
        error, moment = caught(receiver.load_into, zeros())
        return error, moment, receiver.version


# -- nothing is left --------------------------------------------------------------------------------------------------


def test_an_owner_that_is_killed_again_and_again_leaves_no_shared_memory(folder: Path) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": ["shm"]}
    before, _ = shared()
    for _ in range(3):
        with (
            Child(send_for_ever, address, keywords, die=SENDER_DEATHS["middle chunk"]) as sender,
            Child(survive, "receive", address, keywords) as receiver,
        ):
            noticed(receiver, sender)
        limit = time.monotonic() + 20  # other tests, which run beside this one, use shared memory too
        while shared() != (before, False) and time.monotonic() < limit:
            time.sleep(0.1)
        assert shared() == (before, False)
    assert ends.session_works(address) == "shm"
    assert swept(folder) == []


def shared() -> tuple[set[str], bool]:
    """The names in /dev/shm, and whether more shared memory is in use than a little."""
    return ends.shared_names(), _shmem() > _SHMEM + (64 << 20)


def _shmem() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


_SHMEM = _shmem()


def test_a_pair_whose_child_dies(backend: str) -> None:
    context = multiprocessing.get_context("forkserver")
    sender, receiver = tk.pair(context, backends=[backend], **SIZES)
    child = context.Process(target=killed_pair, args=(receiver,))
    child.start()
    receiver.close()  # this process's unused copy only
    try:
        error, moment = caught(lambda: [sender.send(model()) for _ in range(1000)])
        child.join(10)
        assert child.exitcode == -signal.SIGKILL
        assert time.monotonic() - moment < PROMPT
        assert isinstance(error, tk.PeerLostError)
    finally:
        sender.close()
        if child.exitcode is None:
            child.kill()
            child.join(20)
        child.close()


def killed_pair(receiver: tk.Receiver) -> None:
    receiver.load_into(zeros())
    receiver.apply(lambda pairs: ends.suicide())
