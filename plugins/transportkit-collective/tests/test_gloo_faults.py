"""What becomes of a `gloo` group and its survivors when one rank is killed, stopped, or takes too long."""

from __future__ import annotations

import os
import signal
import threading
import time

import gloo_ends as ends
import pytest
from promptness import PROMPT

import transportkit as tk
from transportkit.testing import Call, Child, bulk, in_process, nothing_left, prints
from transportkit_collective import runner

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """The fork server and its descriptors are there before anybody counts."""
    in_process(int, method="forkserver")


#: Where a process dies: a method of the plugin, and at which call.
STEPS = {
    "joining": ("importer:CollectiveImporter.join", 1),
    "meeting": ("importer:CollectiveImporter.connect", 1),
    "trial": ("importer:CollectiveImporter.open", 1),
    "first chunk": ("importer:CollectiveImporter.open", 2),
    "middle": ("importer:CollectiveImporter.open", 9),
}
SENDER_STEPS = {
    "admitting": ("exporter:CollectiveExporter.admit", 2),
    "meeting": ("exporter:CollectiveExporter.connect", 1),
    "trial": ("exporter:CollectiveExporter.publish", 1),
    "middle": ("exporter:CollectiveExporter.publish", 9),
    "ready": ("exporter:CollectiveExporter.ready", 7),
}


def dying(step: tuple[str, int], work: object, *args: object) -> object:
    """Do something, and be killed at a step of it."""
    import importlib

    where, nth = step
    module, _, path = where.partition(":")
    name, _, method = path.partition(".")
    cls = getattr(importlib.import_module(f"transportkit_collective.{module}"), name)
    original = getattr(cls, method)
    calls = iter(range(1, 1 << 30))

    def patched(*args: object) -> object:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(cls, method, patched)
    return work(*args)  # type: ignore[operator]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_receiver_is_killed(step: str, count: int) -> None:
    where = ends.address()
    options = {**ends.KEYWORDS, "wait": 20.0}
    with nothing_left(grace=10):
        sender = tk.serve(where, receivers=count, **ends.KEYWORDS)
        with (
            Child(
                dying, STEPS[step], ends.connected, where, ends.take_for_ever, (), options, method="forkserver"
            ) as victim,
            ends.receivers(where, count - 1, ends.outcome) as others,
        ):
            sending = Call(send_until_it_fails, sender)
            error, moment = sending.result(40)
            victim._process.join(20)
            assert isinstance(error, tk.PeerLostError), repr(error)
            assert f"pid {victim.pid}" in str(error)
            sender.close()
            for other in others:
                name, text, when = told(other)
                assert name in ("PeerFailedError", "PeerLostError", "PeerClosedError"), text
                assert abs(when - moment) < PROMPT
                assert name == "PeerClosedError" or str(victim.pid) in text, text
        del sending, error


def told(child: Child) -> tuple[str, str, float]:
    """How a receiver ended: what its update raised, or what its handshake did."""
    try:
        return child.result(20)  # type: ignore[no-any-return]
    except tk.TransportKitError as error:
        return type(error).__name__, str(error), time.time()


def send_until_it_fails(sender: tk.Sender) -> tuple[tk.TransportKitError, float]:
    try:
        tensors = bulk(1 << 20)
        while True:
            sender.send(tensors)
    except tk.TransportKitError as error:
        return error, time.time()


@pytest.mark.parametrize("step", SENDER_STEPS)
def test_the_sender_is_killed(step: str) -> None:
    where = ends.address()
    with (
        Child(
            dying, SENDER_STEPS[step], ends.send_for_ever, where, 2, 1 << 20, ends.KEYWORDS, method="forkserver"
        ) as victim,
        ends.receivers(where, 2, ends.outcome) as others,
    ):
        victim._process.join(30)
        died = time.time()
        assert victim._process.exitcode == -signal.SIGKILL
        for other in others:
            name, text, when = told(other)
            assert name == "PeerLostError", text
            assert f"pid {victim.pid}" in text
            assert when - died < PROMPT


def test_the_others_go_on_where_a_receiver_is_lost_and_the_caller_says_so() -> None:
    where = ends.address()
    keywords = {**ends.KEYWORDS, "backends": ("gloo", "pickle")}
    with (
        ends.receivers(where, 2, ends.take, 3, **keywords) as others,
        ends.receivers(where, 1, ends.stuck_after, 3, **keywords) as (victim,),
        tk.serve(where, receivers=3, **keywords) as sender,
    ):
        tensors = bulk(1 << 20)
        sending = Call(sender.send, tensors, on_loss="continue")
        assert victim.heard(20) == "agreed"
        assert victim.heard(20) == "stuck"
        victim.kill()
        report = sending.result(20)
        assert list(report.lost), report
        for _ in range(2):
            assert not Call(sender.send, tensors).result(20).lost
        for other in others:
            assert other.result(20) == [prints(tensors)] * 3


def test_a_stopped_receiver_ends_in_a_deadline_for_all() -> None:
    where = ends.address()
    keywords = {**ends.KEYWORDS, "timeout": 2.0}
    with (
        ends.receivers(where, 2, ends.outcome, timeout=2.0) as others,
        ends.receivers(where, 1, ends.stuck_after, 3, timeout=2.0) as (victim,),
        tk.serve(where, receivers=3, **keywords) as sender,
    ):
        sending = Call(sender.send, bulk(1 << 20))
        assert victim.heard(20) == "agreed"
        assert victim.heard(20) == "stuck"
        victim.stop()
        error = sending.error(2.0 + PROMPT)
        assert isinstance(error, tk.DeadlineError | tk.PeerFailedError), repr(error)
        sender.close()
        for other in others:
            name, text, _ = told(other)
            assert name in ("DeadlineError", "PeerFailedError", "PeerClosedError"), text


def test_what_is_given_up_in_the_middle_of_a_transfer_is_parked_and_freed() -> None:
    """gloo cannot be made to let go of bytes on their way: the call raises in time, the rest ends by its own bound."""
    where = ends.address()
    keywords = {**ends.KEYWORDS, "chunk_bytes": 512 << 20, "slots": 1, "timeout": 3.0, "checksum": False}
    with nothing_left(grace=10.0):
        with (
            ends.receivers(where, 1, ends.stopped_in_a_transfer, **keywords) as (victim,),
            tk.serve(where, **keywords) as sender,
        ):
            assert victim.heard(20) == "agreed"
            sending = Call(sender.send, ends.big(512 << 20))
            error = sending.error(5.0 + PROMPT)
            assert isinstance(error, tk.DeadlineError), repr(error)
            sender.close()
            assert runner.parked() == 1, "close waits for the group"
            assert "transportkit-gloo-0" in [thread.name for thread in threading.enumerate()]
            victim.kill()
            end = time.monotonic() + 15
            while runner.parked() and time.monotonic() < end:
                time.sleep(0.1)
            assert runner.parked() == 0
        del sending, error
