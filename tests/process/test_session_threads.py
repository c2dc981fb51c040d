"""Wrong use of a session: two calls at once, a call inside a callback, after its end, in a forked child."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
from promptness import PROMPT
from session_ends import BACKENDS, Child, Remote, Talk, caught, load, model, zeros

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def session(folder: Path, backend: str, **keywords: Any) -> Iterator[tuple[tk.Sender, Remote]]:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        keywords = {"backends": [backend], "chunk_bytes": 4096, "slots": 2, "wait": 20, "timeout": 20} | keywords
        with tk.serve(address, **keywords) as sender:
            yield sender, remote


def in_thread(call: Callable[[], object]) -> BaseException | object:
    outcome: list[BaseException | object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return outcome[0] if outcome else "still running"


def test_a_second_call_from_another_thread(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        outcomes: list[Any] = []

        def post(pair: tuple[str, torch.Tensor]) -> torch.Tensor:
            if pair[0] == "half":
                outcomes.extend(in_thread(call) for call in (lambda: sender.send(model()), sender.wait, sender.close))
            return pair[1]

        remote.start(load)
        sender.send(model(), post=post)
        assert remote.answer()[0] == []
        assert [type(outcome) for outcome in outcomes] == [tk.UsageError] * 3
        assert "send() is still running in another thread" in str(outcomes[0])
        remote.finish()


def overlapping(receiver: tk.Receiver) -> list[tuple[str, str]]:
    outcomes: list[Any] = []

    def function(pairs: list[tuple[str, torch.Tensor]]) -> None:
        if any(name == "half" for name, _ in pairs):
            calls: list[Callable[[], object]] = [
                lambda: receiver.load_into(zeros()),
                lambda: list(receiver.receive()),
                lambda: list(receiver.chunks()),
                receiver.join,
            ]
            for call in calls:
                outcomes.append(in_thread(call))
                with contextlib.suppress(tk.TransportKitError):
                    call()
                    outcomes.append("no error inside the callback")
            outcomes.append(in_thread(receiver.close))

    receiver.apply(function)
    loop = receiver.receive()
    next(loop)
    try:
        receiver.load_into(zeros())
    except tk.UsageError as error:
        outcomes.append(error)
    for _ in loop:
        pass
    return [(type(outcome).__name__, str(outcome)) for outcome in outcomes]


def test_calls_inside_a_call_of_the_receiver(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(overlapping)
        sender.send(model())
        sender.send(model())
        outcomes = remote.answer()
        assert {kind for kind, _ in outcomes} == {"UsageError"}
        assert len(outcomes) == 6
        remote.finish()


def test_a_call_inside_the_source(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        inner: list[tk.TransportKitError] = []

        def source() -> Any:
            for name, tensor in model().items():
                inner.append(caught(sender.send, model())[0])
                yield name, tensor

        remote.start(load)
        sender.send(source())
        assert remote.answer()[0] == []
        assert all(isinstance(error, tk.UsageError) for error in inner)
        assert "inside itself" in str(inner[0])
        remote.finish()


def test_calls_from_several_threads_one_after_the_other(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        for _ in range(3):
            remote.start(load)
            report = in_thread(lambda: sender.send(model()))
            assert isinstance(report, tk.Report), report
            assert remote.answer()[0] == []
        remote.finish()


# -- abort ------------------------------------------------------------------------------------------------------------


def later(call: Callable[[], object], seconds: float = 0.3) -> None:
    threading.Timer(seconds, call).start()


def test_abort_ends_waiting_for_receivers(folder: Path) -> None:
    sender = tk.serve(f"unix:{folder}/s")
    later(sender.abort)
    began = time.monotonic()
    error, moment = caught(sender.wait)
    assert isinstance(error, tk.ClosedError)
    assert 0.2 < moment - began < PROMPT
    error, _ = caught(sender.wait)
    assert isinstance(error, tk.ClosedError)
    sender.close()


def test_abort_ends_waiting_although_a_receiver_is_there(folder: Path) -> None:
    address = f"unix:{folder}/s"
    sender = tk.serve(address, receivers=2)
    with Child(refused, address) as receiver:
        threading.Thread(target=abort_when_somebody_is_there, args=(sender,)).start()
        error, _ = caught(sender.wait)
        assert isinstance(error, tk.ClosedError)
        sender.close()
        assert isinstance(receiver.result(), tk.PeerError)


def abort_when_somebody_is_there(sender: tk.Sender) -> None:
    end = time.monotonic() + 60
    while not len(sender._peers) and time.monotonic() < end:
        time.sleep(0.01)
    sender.abort()


def refused(talk: Talk, address: str) -> tk.TransportKitError:
    return caught(tk.connect, address, wait=20)[0]


def aborted(receiver: tk.Receiver) -> tuple[tk.TransportKitError, float]:
    later(receiver.abort)
    began = time.monotonic()
    error, moment = caught(receiver.load_into, zeros())
    return error, moment - began


def test_abort_ends_a_call_of_either_side(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(aborted)
        error, seconds = remote.answer()
        assert isinstance(error, tk.ClosedError)
        assert 0.2 < seconds < PROMPT
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerError)
        remote.finish()
    with session(folder, backend) as (sender, remote):
        later(sender.abort)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.ClosedError)
        theirs = remote.start(sees_end).answer()
        assert isinstance(theirs, tk.PeerError)
        remote.finish()


def sees_end(receiver: tk.Receiver) -> tk.TransportKitError:
    return caught(receiver.load_into, zeros())[0]


# -- after the end ----------------------------------------------------------------------------------------------------


def test_calls_after_the_end(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.finish()
        sender.close()
        sender.close()
        for call in (lambda: sender.send(model()), sender.wait, sender.__enter__):
            error, _ = caught(call)
            assert isinstance(error, tk.ClosedError)
    receiver_calls = Child(closed_receiver, f"unix:{folder}/t")
    with receiver_calls, tk.serve(f"unix:{folder}/t", wait=20):
        assert receiver_calls.result() == ["ClosedError"] * 5


def closed_receiver(talk: Talk, address: str) -> list[str]:
    receiver = tk.connect(address, wait=20)
    receiver.close()
    receiver.close()
    calls: list[Callable[[], object]] = [
        lambda: receiver.load_into(zeros()),
        lambda: receiver.apply(print),
        receiver.receive,
        receiver.chunks,
        receiver.join,
    ]
    return [type(caught(call)[0]).__name__ for call in calls]


# -- forked children --------------------------------------------------------------------------------------------------


def in_fork(check: Callable[[], object]) -> str:
    """What a check says in a forked child: its text, or the error's name."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
        pid = os.fork()
    if not pid:
        try:
            text = str(check())
        except BaseException as error:
            text = type(error).__name__
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


def sockets() -> list[str]:
    return [to for to in ends.descriptors().values() if to.startswith(("socket:", "anon_inode:[eventfd", "/memfd"))]


def test_a_forked_child_of_the_sender(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        before = [to for to in sockets() if to == ends.descriptors()[remote.channel]]
        assert sockets() != before
        assert in_fork(lambda: sender.send(model())) == "ForkedError"
        assert in_fork(sender.wait) == "ForkedError"
        assert in_fork(sockets) == str(before)
        assert in_fork(sender.close) == "None"  # and the parent's session goes on
        remote.start(load)
        sender.send(model())
        assert remote.answer()[0] == []
        remote.finish()


def forked_receiver(receiver: tk.Receiver) -> list[str]:
    return [
        in_fork(lambda: receiver.load_into(zeros())),
        in_fork(lambda: receiver.apply(print)),
        in_fork(lambda: next(receiver.receive())),
        in_fork(lambda: next(receiver.chunks())),
        in_fork(receiver.close),
        in_fork(lambda: len(sockets()) < 3),
    ]


def test_a_forked_child_of_the_receiver(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        told = remote.start(forked_receiver).answer()
        assert told == ["ForkedError"] * 4 + ["None", "True"]
        remote.start(load)
        sender.send(model())
        assert remote.answer()[0] == []
        remote.finish()


def test_a_forked_worker_does_not_keep_a_dead_session_alive(folder: Path, backend: str) -> None:
    """A killed sender that had forked a worker: its receiver learns of the death, not of the worker's."""
    address = f"unix:{folder}/s"
    with Child(forks_and_dies, address, backend) as sender:
        with tk.connect(address, wait=20, timeout=20) as receiver:
            worker = sender.heard()
            try:
                error, moment = caught(receiver.load_into, zeros())
                sender.join()
                assert isinstance(error, tk.PeerLostError)
                assert moment - sender.died_at < PROMPT
            finally:
                os.kill(worker, 9)


def forks_and_dies(talk: Talk, address: str, backend: str) -> None:
    with tk.serve(address, wait=20, backends=[backend]):
        pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
        talk.say(pid)
        time.sleep(0.2)
        ends.suicide()
