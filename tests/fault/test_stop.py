"""``SIGSTOP`` of either side: the other raises a typed timeout on time, and the stopped one learns of it later."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
from promptness import PROMPT
from session_ends import BACKENDS, Child, Remote, Talk, caught, model, zeros

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    "middle payload": ("transportkit.backends.pickle:PickleExporter.publish", "before", 4, "", STOP),
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


def check_all(folder: Path, side: str, stops: dict[str, tuple[Any, ...]], steps: list[tuple[str, str]]) -> None:
    """Stop one side at each of these steps, all at once, since each takes the whole timeout."""
    other = {"send": "receive", "receive": "send"}[side]
    with contextlib.ExitStack() as stack:
        pairs = []
        for number, (step, backend) in enumerate(steps):
            address = f"unix:{folder}/{number}"
            keywords = SIZES | {"backends": [backend]}
            stopped = stack.enter_context(Child(endure, side, address, keywords, die=stops[step]))
            waiting = stack.enter_context(Child(endure, other, address, keywords))
            pairs.append((step, address, backend, waiting, stopped, stopped.stopped()))
        for step, address, backend, waiting, stopped, began in pairs:
            error, moment = waiting.result()
            assert isinstance(error, tk.DeadlineError), f"{step}: {error!r}"
            assert TIMEOUT - 0.1 <= moment - began < TIMEOUT + PROMPT, f"{step}: {error!r} after {moment - began:.1f} s"
            assert f"pid {stopped.pid}" in str(error)
            assert "timeout=" in str(error)
            stopped.signal(signal.SIGCONT)
            late, _ = stopped.result()
            assert stopped.join() == 0
            assert isinstance(late, tk.PeerFailedError), f"{step}: {late!r}"
            assert late.code == "DeadlineError"
            if "middle" in step and side == "send":
                assert error.torn == ("target",)
            assert ends.session_works(address, backends=[backend]) == backend


def test_a_stopped_receiver(folder: Path) -> None:
    steps = [(step, backend) for step in RECEIVER_STOPS for backend in BACKENDS]
    check_all(folder, "receive", RECEIVER_STOPS, steps)


def test_a_stopped_sender(folder: Path) -> None:
    steps = [(step, backend) for step in SENDER_STOPS for backend in BACKENDS]
    steps.remove(("middle payload", "shm"))
    check_all(folder, "send", SENDER_STOPS, steps)


def test_a_sender_that_is_stopped_before_it_answers(folder: Path) -> None:
    address = f"unix:{folder}/s"
    with Child(stopped_server, address) as sender:
        assert sender.heard() == "bound"
        sender.signal(STOP)
        began = sender.stopped()
        error, moment = caught(tk.connect, address, timeout=TIMEOUT)
        assert isinstance(error, tk.DeadlineError)
        assert TIMEOUT - 0.1 <= moment - began < TIMEOUT + PROMPT
        sender.signal(signal.SIGCONT)
        with Child(ends.one_update, address, {}) as receiver:
            receiver.result()
        sender.result()


def stopped_server(talk: Talk, address: str) -> None:
    sender = tk.serve(address, wait=15)
    talk.say("bound")
    with sender:
        sender.send(model())


@pytest.mark.parametrize("backend", ["shm"])
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
            assert TIMEOUT - 0.1 <= moment - began < TIMEOUT + PROMPT
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


@pytest.mark.parametrize("backend", ["pickle"])
def test_a_receiver_that_is_stopped_while_it_waits(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Child(endure, "receive", address, {"backends": [backend]}) as receiver:
        with tk.serve(address, backends=[backend], timeout=TIMEOUT) as sender:
            sender.send(model())
            time.sleep(0.3)
            receiver.signal(STOP)
            began = receiver.stopped()
            error, moment = caught(sender.send, model())
            assert isinstance(error, tk.DeadlineError)
            assert TIMEOUT - 0.1 <= moment - began < TIMEOUT + PROMPT
            receiver.signal(signal.SIGCONT)
            late, _ = receiver.result()
            assert isinstance(late, tk.PeerFailedError)


def give_up(receiver: tk.Receiver) -> None:
    """A call whose wait expires."""
    error, _ = caught(receiver.load_into, zeros(), wait=0.2)
    assert isinstance(error, tk.DeadlineError)


def slow_to_call(receiver: tk.Receiver) -> tuple[list[str], int]:
    """A call that comes long after the sender's timeout."""
    time.sleep(3)
    wrong, update = ends.load(receiver)
    return wrong, update.version


def test_a_receiver_whose_wait_has_expired_may_take_its_time(folder: Path) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with tk.serve(address, timeout=1.5) as sender:
            for version in (1, 2):
                remote.start(give_up).answer()
                remote.start(slow_to_call)
                sender.send(model(), version=version)
                assert remote.answer() == ([], version)
            remote.finish()
