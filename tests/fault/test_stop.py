"""``SIGSTOP`` of either side: the other raises a typed timeout on time, and the stopped one learns of it when it goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
from session_ends import BACKENDS, Child, Talk, caught, model, zeros

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

TIMEOUT = 2.0
STOP = signal.SIGSTOP

SIZES: dict[str, Any] = {"chunk_bytes": 4096, "slots": 2, "timeout": TIMEOUT}

RECEIVER_STOPS = {
    "joining": ("transportkit.session.joining:Joining._join", "before", 1, "", STOP),
    "trial": ("transportkit.session.joining:check_digest", "before", 1, "", STOP),
    "middle chunk": ("transportkit.session.receiving:check_digest", "after", 5, "", STOP),
    "commit": ("transportkit.session.receiving:Receiving.applied", "before", 1, "", STOP),
}

SENDER_STOPS = {
    "proposed": ("transportkit.session.opening:Opening._wait_for", "before", 1, "", STOP),
    "trial": ("transportkit.session.lane:Lane.emit", "before", 1, "", STOP),
    "accepted": ("transportkit.session.sending:Sending._begin", "after", 1, "", STOP),
    "middle chunk": ("transportkit.session.lane:Lane.emit", "before", 6, "", STOP),
    "commit": ("transportkit.session.sending:Sending._commit", "before", 1, "", STOP),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


def send_twice(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    with tk.serve(address, **keywords) as sender:
        sender.send(model(), version=1)
        sender.send(model(), version=2)


def receive_twice(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    target = zeros()
    with tk.connect(address, **keywords) as receiver:
        receiver.load_into(target)
        receiver.load_into(target)


SIDES = {"send": send_twice, "receive": receive_twice}


def endure(talk: Talk, side: str, address: str, keywords: dict[str, Any]) -> tuple[tk.TransportKitError, float]:
    return caught(SIDES[side], talk, address, keywords)


def check(waiting: Child, stopped: Child) -> tuple[tk.TransportKitError, tk.TransportKitError]:
    """The error of the side that waited, on time, and that of the other after it went on."""
    began = stopped.stopped()
    error, moment = waiting.result()
    assert isinstance(error, tk.DeadlineError), repr(error)
    assert TIMEOUT - 0.1 <= moment - began < 2 * TIMEOUT, f"{error!r} came after {moment - began:.1f} s"
    stopped.signal(signal.SIGCONT)
    late, _ = stopped.result()
    assert stopped.join() == 0
    return error, late


# Both backends wait in the same code of the core; each step is tried over one, and one step over both.
@pytest.mark.parametrize(
    ("step", "backend"),
    [("joining", "shm"), ("trial", "pickle"), ("middle chunk", "pickle"), ("middle chunk", "shm"), ("commit", "shm")],
)
def test_a_stopped_receiver(folder: Path, step: str, backend: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with (
        Child(endure, "send", address, keywords) as sender,
        Child(endure, "receive", address, keywords, die=RECEIVER_STOPS[step]) as receiver,
    ):
        error, late = check(sender, receiver)
    assert f"pid {receiver.pid}" in str(error)
    assert "timeout=" in str(error)
    assert isinstance(late, tk.PeerError)
    assert "DeadlineError" in str(late) or "within 2 s" in str(late)
    assert ends.session_works(address, backends=[backend]) == backend


@pytest.mark.parametrize(
    ("step", "backend"),
    [
        ("proposed", "pickle"),
        ("trial", "shm"),
        ("accepted", "pickle"),
        ("middle chunk", "pickle"),
        ("middle chunk", "shm"),
        ("commit", "shm"),
    ],
)
def test_a_stopped_sender(folder: Path, step: str, backend: str) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": [backend]}
    with (
        Child(endure, "send", address, keywords, die=SENDER_STOPS[step]) as sender,
        Child(endure, "receive", address, keywords) as receiver,
    ):
        error, late = check(receiver, sender)
    assert f"pid {sender.pid}" in str(error)
    assert isinstance(late, tk.PeerError)
    assert "DeadlineError" in str(late)
    assert ends.session_works(address, backends=[backend]) == backend


def test_a_sender_that_is_stopped_in_the_middle_of_a_payload(folder: Path) -> None:
    address = f"unix:{folder}/s"
    keywords = SIZES | {"backends": ["pickle"]}
    stop = ("transportkit.backends.pickle:PickleExporter.publish", "before", 4, "", STOP)
    with (
        Child(endure, "send", address, keywords, die=stop) as sender,
        Child(endure, "receive", address, keywords) as receiver,
    ):
        error, _ = check(receiver, sender)
    assert error.torn == ("target",)


def test_a_sender_that_is_stopped_before_it_answers(folder: Path) -> None:
    address = f"unix:{folder}/s"
    with Child(stopped_server, address) as sender:
        assert sender.heard() == "bound"
        sender.signal(STOP)
        began = sender.stopped()
        error, moment = caught(tk.connect, address, timeout=TIMEOUT)
        assert isinstance(error, tk.DeadlineError)
        assert TIMEOUT - 0.1 <= moment - began < 2 * TIMEOUT
        sender.signal(signal.SIGCONT)
        with Child(ends.one_update, address, {}) as receiver:
            receiver.result()
        sender.result()


def stopped_server(talk: Talk, address: str) -> None:
    sender = tk.serve(address, wait=15)
    talk.say("bound")
    with sender:
        sender.send(model())


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_for_an_update_of_a_stopped_sender_ends_with_wait(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Child(idle_sender, address, backend) as sender:
        with tk.connect(address, backends=[backend], timeout=30) as receiver:
            receiver.load_into(zeros())
            sender.signal(STOP)
            began = sender.stopped()
            error, moment = caught(receiver.load_into, zeros(), wait=TIMEOUT)
            assert isinstance(error, tk.DeadlineError)
            assert "wait=" in str(error)
            assert TIMEOUT - 0.1 <= moment - began < 2 * TIMEOUT
            sender.signal(signal.SIGCONT)
            sender.tell("go on")
            assert receiver.load_into(zeros()).version == 2  # the session is as it was
            assert receiver.version == 2
        sender.result()


def idle_sender(talk: Talk, address: str, backend: str) -> None:
    with tk.serve(address, backends=[backend], timeout=30) as sender:
        sender.send(model(), version=1)
        talk.hear()
        sender.send(model(), version=2)
