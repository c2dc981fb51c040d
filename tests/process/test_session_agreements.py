"""Who finds whom, which backend serves, and what the agreement says of the others; in real processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
from promptness import PROMPT
from session_ends import Child, Remote, Talk, caught, load, model

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


# -- which backend ----------------------------------------------------------------------------------------------------


def show_only(*plugins: str) -> None:
    """Have this process see no plugins of ours but these."""
    everything = importlib.metadata.distributions

    def seen(name: str) -> bool:
        return not name.startswith("transportkit-") or name in plugins

    def those(*args: Any, **keywords: Any) -> Any:
        return (found for found in everything(*args, **keywords) if seen(found.name))

    importlib.metadata.distributions = those


def agreed(talk: Talk, side: str, address: str, hidden: str, keywords: dict[str, Any]) -> str:
    show_only(*({SHM} - {hidden}))
    opened: Any = tk.connect(address, wait=15) if side == "receive" else tk.serve(address, wait=15, **keywords)
    with opened as session:
        if side == "receive":
            load(session)
        else:
            session.send(model())
        return str(session.agreement)


SHM = "transportkit-shm"


@pytest.mark.parametrize(
    ("at_sender", "at_receiver", "backend", "line"),
    [
        ("", "", "shm", "pickle: not taken: costs more than shm here"),
        ("", SHM, "pickle", "shm: not taken: not installed at the receiver"),
        (SHM, "", "pickle", "shm: not taken: not installed at the sender"),
        (SHM, SHM, "pickle", "pickle is the only backend installed on either side; others are plugins"),
    ],
)
def test_both_sides_say_why(folder: Path, at_sender: str, at_receiver: str, backend: str, line: str) -> None:
    address = f"unix:{folder}/s"
    with (
        Child(agreed, "send", address, at_sender, {}) as sender,
        Child(agreed, "receive", address, at_receiver, {}) as receiver,
    ):
        text = sender.result()
        assert line in text
        assert f"{backend}: taken" in text
        assert f"pid {receiver.pid}" in text
        assert receiver.result() == text


def environment(talk: Talk, address: str, keywords: dict[str, Any]) -> str:
    show_only(SHM)
    with tk.serve(address, wait=15, **keywords) as sender:
        sender.send(model())
        return str(sender.agreement)


def environed_receiver(talk: Talk, address: str, keywords: dict[str, Any]) -> str:
    show_only(SHM)
    return ends.one_update(talk, address, keywords)


@pytest.mark.parametrize(
    ("at_sender", "at_receiver", "sender_asks", "receiver_asks", "backend", "line"),
    [
        ({"TRANSPORTKIT_BACKENDS": "pickle"}, {}, None, None, "pickle", "shm: not taken: not in the sender's list"),
        ({}, {"TRANSPORTKIT_BACKENDS": "pickle,"}, None, None, "pickle", "shm: not taken: not in the receiver's list"),
        ({"TRANSPORTKIT_BACKENDS": " pickle , shm"}, {}, None, None, "pickle", "shm: not taken: costs more"),
        ({"TRANSPORTKIT_DISABLE": "shm"}, {}, None, None, "pickle", "shm: not taken: disabled at the sender"),
        ({}, {"TRANSPORTKIT_DISABLE": "shm"}, None, None, "pickle", "shm: not taken: disabled at the receiver"),
        ({}, {}, ["pickle", "shm"], None, "pickle", "shm: not taken: costs more"),
        ({}, {}, None, ["pickle", "shm"], "shm", "pickle: not taken: costs more"),  # the receiver's list only filters
        (
            {"TRANSPORTKIT_BACKENDS": "shm"},
            {},
            ["pickle", "shm"],
            None,
            "shm",
            "pickle: not taken: not in the sender's",
        ),
    ],
)
def test_what_the_environment_and_the_keyword_allow(
    folder: Path,
    at_sender: dict[str, str | None],
    at_receiver: dict[str, str | None],
    sender_asks: list[str] | None,
    receiver_asks: list[str] | None,
    backend: str,
    line: str,
) -> None:
    address = f"unix:{folder}/s"
    with (
        Child(environment, address, {"backends": sender_asks}, env=at_sender) as sender,
        Child(environed_receiver, address, {"backends": receiver_asks}, env=at_receiver) as receiver,
    ):
        assert receiver.result() == backend
        assert line in sender.result()


def test_no_common_backend_is_an_error_on_both_sides(folder: Path) -> None:
    address = f"unix:{folder}/s"
    with (
        Child(ends.serve_one, address, {"backends": ["shm"]}) as sender,
        Child(ends.one_update, address, {"backends": ["pickle"]}) as receiver,
    ):
        for side in (sender, receiver):
            error, _ = caught(side.result)
            assert isinstance(error, tk.NegotiationError), error
            assert "shm: not taken: not in the receiver's list" in str(error)
            assert "pickle: not taken: not in the sender's list" in str(error)
    assert ends.session_works(address) == "shm"


@pytest.mark.parametrize("name", ["rdma", "nothing"])
def test_a_backend_that_is_not_installed_is_an_error_at_the_call(folder: Path, name: str) -> None:
    for opening in (tk.serve, tk.connect):
        error, _ = caught(opening, f"unix:{folder}/s", backends=[name])
        assert isinstance(error, tk.UnknownBackendError)
        assert "pickle" in str(error)
        assert "shm" in str(error)
    assert list(folder.iterdir()) == []


def test_the_smaller_sizes_are_agreed_and_digests_unless_both_say_no(folder: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[int, int, str]]] = [
        ({"chunk_bytes": 1000, "slots": 5}, {"chunk_bytes": 500, "slots": 7}, (500, 5, "xxh3-64")),
        ({"checksum": False}, {}, (16 << 20, 3, "xxh3-64")),
        ({}, {"checksum": False}, (16 << 20, 3, "xxh3-64")),
        ({"checksum": False}, {"checksum": False}, (16 << 20, 3, "none")),
        ({"checksum": True}, {"checksum": False}, (16 << 20, 3, "xxh3-64")),
    ]
    for number, (ours, theirs, due) in enumerate(cases):
        address = f"unix:{folder}/{number}"
        with Remote("receive", address, **theirs) as remote:
            with tk.serve(address, wait=10, **ours) as sender:
                (assignment,) = sender.agreement.assignments
                assert (assignment.chunk_bytes, assignment.slots, assignment.digest) == due
                remote.start(load)
                sender.send(model())
                assert remote.answer()[0] == []
                remote.finish()


# -- who finds whom ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_either_side_may_start_first(folder: Path, first: str) -> None:
    address = f"unix:{folder}/s"
    order = [(ends.serve_one, {}), (ends.one_update, {})]
    if first == "receiver":
        order.reverse()
    with Child(order[0][0], address, {}) as one:
        time.sleep(0.5)
        with Child(order[1][0], address, {}) as two:
            one.result()
            two.result()


def test_nobody_listens(folder: Path) -> None:
    address = f"unix:{folder}/s"
    began = time.monotonic()
    error, moment = caught(tk.connect, address, wait=0.5)
    assert isinstance(error, tk.AddressError)
    assert address in str(error)
    assert 0.4 < moment - began < PROMPT


def test_a_socket_file_that_nobody_listens_on_is_taken_over(folder: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{folder}/s")
    left.close()
    assert (folder / "s").exists()
    assert ends.session_works(f"unix:{folder}/s") == "shm"


def test_an_address_in_use(folder: Path) -> None:
    with Child(listen_only, f"unix:{folder}/s") as other:
        other.heard()
        before = ends.descriptors()
        error, _ = caught(tk.serve, f"unix:{folder}/s", timeout=2)
        assert isinstance(error, tk.AddressError)
        assert f"{folder}/s" in str(error)
        for path in ("x" * 200, "no/such/folder"):
            error, _ = caught(tk.serve, f"unix:{folder}/{path}")
            assert isinstance(error, tk.AddressError)
        assert ends.leftovers(before) == []
        other.tell("enough")
        other.result()


def listen_only(talk: Talk, address: str) -> None:
    sender = tk.serve(address)
    talk.say("bound")
    talk.hear()
    sender.close()


@pytest.mark.parametrize("authkey", [None, b"a secret"])
def test_tcp_on_loopback_agrees_on_shared_memory(authkey: bytes | None) -> None:
    sender = tk.serve("tcp://127.0.0.1:0", authkey=authkey, wait=20)
    assert not sender.address.endswith(":0")
    with Remote("receive", sender.address, authkey=authkey) as remote:
        with sender:
            assert sender.agreement.backend() == "shm"
            for _ in range(2):
                remote.start(load)
                sender.send(model())
                assert remote.answer()[0] == []
            remote.finish()


@pytest.mark.parametrize("backend", ends.BACKENDS)
def test_tcp_carries_every_backend(backend: str) -> None:
    sender = tk.serve("tcp://localhost:0", wait=20, backends=[backend], chunk_bytes=1000)
    with Remote("receive", sender.address) as remote:
        with sender:
            remote.start(load)
            assert sender.send(model()).backends == {0: backend}
            assert remote.answer()[0] == []
            remote.finish()


def test_keys_that_differ_cost_only_that_connection() -> None:
    with Child(keyed_sender) as sender:
        address = sender.heard()
        for key in (b"wrong", None, "a secret "):
            error, _ = caught(tk.connect, address, authkey=key, timeout=20)
            assert isinstance(error, tk.AuthenticationError), error
        with tk.connect(address, authkey="a secret", wait=10) as receiver:  # text is its UTF-8
            assert load(receiver)[0] == []
        assert sender.result() == 3


def test_strangers_cost_only_themselves(folder: Path) -> None:
    """A port scan, another protocol, a client that says nothing: waiting goes on."""
    for sender in (tk.serve(f"unix:{folder}/s", timeout=1, wait=20), tk.serve("tcp://127.0.0.1:0", timeout=1, wait=20)):
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", None, b"\x16\x03\x01\x02\x00", b"tptkit\r\n", os.urandom(4000)):
            stranger = socket.socket(socket.AF_UNIX if sender.address.startswith("unix") else socket.AF_INET)
            if stranger.family == socket.AF_UNIX:
                stranger.connect(sender.address.removeprefix("unix:"))
            else:
                stranger.connect(("127.0.0.1", int(sender.address.rpartition(":")[2])))
            if said is None:
                stranger.close()
            else:
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                strangers.append(stranger)
        with Remote("receive", sender.address) as remote:
            with sender:
                remote.start(load)
                sender.send(model())
                assert remote.answer()[0] == []
                limit = time.monotonic() + 5
                while sender.failures < 6 and time.monotonic() < limit:
                    time.sleep(0.05)
                assert sender.failures == 6
                remote.finish()
        for stranger in strangers:
            stranger.close()


def keyed_sender(talk: Talk) -> int:
    sender = tk.serve("tcp://127.0.0.1:0", authkey=b"a secret", wait=20)
    talk.say(sender.address)
    with sender:
        sender.send(model())
        return sender.failures


def test_tcp_beyond_loopback_needs_a_key() -> None:
    for opening in (tk.serve, tk.connect):
        error, _ = caught(opening, "tcp://0.0.0.0:5000", timeout=2)
        assert isinstance(error, tk.AuthenticationError | tk.AddressError)
    error, _ = caught(tk.serve, "tcp://0.0.0.0:0")
    assert isinstance(error, tk.AuthenticationError)
    assert "authkey" in str(error)


def listening() -> set[str]:
    """The TCP ports on which this process listens, as the kernel tells them."""
    inodes = {to for to in ends.descriptors().values() if to.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def test_nothing_listens_beyond_what_was_asked_for(folder: Path) -> None:
    sender = tk.serve("tcp://127.0.0.1:0", wait=20)
    with Remote("receive", sender.address) as remote, sender:
        assert listening() == {"0100007F"}
        remote.start(load)
        sender.send(model())
        remote.answer()
        remote.finish()
    with contextlib.closing(tk.serve(f"unix:{folder}/s")):
        assert listening() == set()
        assert (folder / "s").stat().st_mode & 0o077 == 0


# -- unrelated processes ----------------------------------------------------------------------------------------------

UNRELATED = """
import sys
import torch
import transportkit as tk
torch.manual_seed(5)
weights = {"a": torch.randn(300, 70), "b": torch.randn(70).to(torch.bfloat16), "c": torch.tensor(11)}
if sys.argv[1] == "send":
    with tk.serve(sys.argv[2], wait=30) as sender:
        print(sender.agreement)
        sender.send(weights, version=4)
else:
    target = {name: torch.zeros_like(t) for name, t in weights.items()}
    with tk.connect(sys.argv[2], wait=30) as receiver:
        update = receiver.load_into(target)
    assert all(torch.equal(target[name], weights[name]) for name in weights)
    print(update.backend, update.version)
"""


@pytest.mark.slow
def test_two_unrelated_processes_and_no_plugin_in_one_of_them(folder: Path) -> None:
    address = f"unix:{folder}/s"
    for hidden in (False, True):
        receiver = ends.python((_HIDING if hidden else "") + UNRELATED, "receive", address)
        sender = ends.python(UNRELATED, "send", address)
        try:
            told, error = receiver.communicate(timeout=40)
            assert receiver.returncode == 0, error
            assert told.split() == ["pickle" if hidden else "shm", "4"]
            told, error = sender.communicate(timeout=20)
            assert sender.returncode == 0, error
            assert ("not installed at the receiver" in told) == hidden
        finally:
            for process in (receiver, sender):
                process.kill()
                process.communicate()


_HIDING = """
import importlib.metadata as m
everything = m.distributions
m.distributions = lambda *a, **k: (d for d in everything(*a, **k) if not d.name.startswith("transportkit-"))
"""


def test_a_session_survives_what_a_child_of_it_does() -> None:
    """Neither sockets nor shared memory go to a process that is started meanwhile."""
    sender = tk.serve("tcp://127.0.0.1:0", wait=20)
    with Remote("receive", sender.address) as remote, sender:
        told = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False
        )
        assert "memfd" not in told.stdout
        assert "socket" not in told.stdout
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        remote.start(load)
        sender.send(model())
        assert remote.answer()[0] == []
        remote.finish()
