"""Mailbox calls out of signal handlers, in forked children, beside calls of other threads, and without threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import Way, address_in
from promptness import PROMPT
from session_ends import Child, Talk

import transportkit as tk
from transportkit.testing import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path)


@pytest.fixture(params=["shm", "pickle"])
def way(request: pytest.FixtureRequest, address: str) -> Way:
    return Way(request.param, address)


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], object], float], list[Any]]]:
    """Calls something out of a signal handler after a while; the list has what came of it."""
    before = signal.getsignal(signal.SIGALRM)

    def arrange(call: Callable[[], object], seconds: float) -> list[Any]:
        outcome: list[Any] = []

        def handler(*_: object) -> None:
            try:
                outcome.append(call())
            except tk.TransportKitError as error:
                outcome.append(error)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return outcome

    yield arrange
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# -- signal handlers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda inbox: inbox.get(20), lambda inbox: inbox.poll(20), list])
def test_an_inbox_that_a_handler_closes_ends_the_call_that_it_interrupts(call: Any, address: str, alarm: Any) -> None:
    inbox = tk.Inbox(address)
    outcome = alarm(inbox.close, 0.2)
    began = time.monotonic()
    if call is list:
        assert call(inbox) == []
    else:
        with pytest.raises(tk.ClosedError, match="it was closed"):
            call(inbox)
    assert time.monotonic() - began < PROMPT
    assert outcome == [None]
    tk.Inbox(address).close()  # nothing listens there any more


def test_calls_of_a_handler_are_refused_within_a_call_of_the_same_end(way: Way, alarm: Any) -> None:
    with way.both({"capacity": 1}, capacity=1) as (inbox, outbox):
        refused = alarm(lambda: inbox.get(0), 0.1)
        with pytest.raises(tk.DeadlineError):
            inbox.get(0.3)
        outbox.put(1)
        outcomes = [alarm(call, 0.1) for call in (lambda: outbox.put("from the handler"), outbox.close, outbox.flush)]
        for call in (lambda: outbox.put("from the handler"), outbox.close, outbox.flush):
            outcomes.append(alarm(call, 0.1))
            with pytest.raises(tk.DeadlineError):
                outbox.put("late", timeout=0.3)
        for (error,) in (refused, *outcomes[3:]):
            assert isinstance(error, tk.UsageError)
            assert "signal handler" in str(error)
        assert inbox.get(20) == 1
        outbox.put({"t": torch.ones(10_000)})
        assert inbox.get(20)["t"].sum() == 10_000


def test_a_handler_may_abort(address: str, alarm: Any) -> None:
    with tk.Inbox(address, capacity=1):
        outbox = tk.Outbox(address)
        outbox.put(1)
        outcome = alarm(outbox.abort, 0.1)
        with pytest.raises(tk.ClosedError, match="aborted"):
            outbox.put(2)
        assert outcome == [None]


# -- other threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "with"])
def test_an_outbox_is_closed_although_another_thread_puts(ending: str, address: str) -> None:
    with tk.Inbox(address, capacity=1) as inbox:
        outbox = tk.Outbox(address)
        outbox.put(1)
        outbox.__enter__()
        putting = Call(outbox.put, 2)
        assert not putting.wait(0.2)
        if ending == "close":
            with pytest.raises(tk.DeadlineError, match="another thread was in this Outbox"):
                outbox.close(0.2)
        else:
            outbox.__exit__(KeyError, KeyError(), None)
        assert isinstance(putting.error(20), tk.ClosedError)
        assert outbox.closed is not None
        assert inbox.get(20) == 1
        with pytest.raises(tk.DeadlineError):
            inbox.get(0.2)


def test_several_threads_wait_for_their_tensors_side_by_side(address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        number = outbox.put([torch.ones(3)])
        hooks = tk.OutOfBand(inbox, timeout=1.0)
        began = time.monotonic()
        missing = [Call(hooks.fetch, outbox.identity, number + 1 + each, 0) for each in range(12)]
        assert hooks.fetch(outbox.identity, number, 0).sum() == 3
        assert all(isinstance(call.error(20), tk.DeadlineError) for call in missing)
        assert time.monotonic() - began < PROMPT  # one after the other they would take 12 seconds


# -- forks and short timeouts -----------------------------------------------------------------------------------------


@pytest.mark.leaves_children
def test_hooks_of_a_forked_child_do_not_wait_for_a_thread_that_is_not_there(address: str) -> None:
    with tk.Inbox(address, capacity=100) as inbox, tk.Outbox(address, reconnect=True, capacity=100) as outbox:
        hooks = tk.OutOfBand(outbox, inline=0)
        within, out = threading.Event(), threading.Event()

        def batch() -> None:
            with hooks:
                within.set()
                out.wait(20)

        thread = threading.Thread(target=batch)
        thread.start()
        within.wait(20)
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                hooks.enc_hook(torch.ones(10))
                outbox.close(10)
            finally:
                os._exit(0)
        out.set()
        thread.join(20)
        assert inbox.get(20)[0].sum() == 10
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def take_one(talk: Talk, address: str) -> None:
    with tk.Inbox(address) as inbox:
        talk.say("open")
        talk.say(inbox.get(20))
        talk.hear(40)


def open_only(talk: Talk, address: str) -> None:
    with tk.Inbox(address):
        talk.say("open")
        talk.hear(40)


def test_a_put_that_dials_again_keeps_to_its_timeout(address: str) -> None:
    with Child(open_only, address) as first:
        assert first.heard() == "open"
        outbox = tk.Outbox(address, reconnect=True, timeout=40)
        first.signal(signal.SIGKILL)
        first.join()
    began = time.monotonic()
    with pytest.raises(tk.AddressError):
        outbox.put(1, timeout=0.2)
    with Child(take_one, address) as second:
        assert second.heard() == "open"
        second.signal(signal.SIGSTOP)
        second.stopped()
        for timeout in (0.2, 0):
            with pytest.raises(tk.DeadlineError):
                outbox.put(2, timeout=timeout)
        assert time.monotonic() - began < PROMPT
        second.signal(signal.SIGCONT)
        outbox.put(3, timeout=20)
        assert second.heard() == 3
        outbox.close(20)
        second.tell("end")


# -- what is not to be had --------------------------------------------------------------------------------------------


def test_an_inbox_outlives_a_time_without_threads(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("transportkit-handshake", "transportkit-seats"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with tk.Inbox(address) as inbox:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(20):
            with pytest.raises(tk.TransportKitError, match="cannot be started"):
                tk.Outbox(address, timeout=20)
        with pytest.raises(tk.ResourceError, match="transportkit-seats cannot be started"):
            inbox.outbox()
        monkeypatch.undo()
        with tk.Outbox(address) as outbox:
            outbox.put("served")
            assert inbox.get(20) == "served"
        seat = inbox.outbox()
        seat.put("from a seat")
        assert inbox.get(20) == "from a seat"
        seat.close()


@pytest.mark.parametrize("make", [tk.serve, tk.Inbox])
def test_whoever_cannot_start_to_listen_leaves_nothing(
    make: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(tk.ResourceError, match="transportkit-listener cannot be started"):
            make(address)
    with monkeypatch.context() as patch:
        patch.setattr("selectors.DefaultSelector", lambda: os.open(f"{tmp_path}/none", os.O_RDONLY))
        with pytest.raises(tk.ResourceError, match="no descriptor to listen"):
            make(address)
    assert list(tmp_path.iterdir()) == []
    make(address).close()


def test_serve_goes_on_although_nobody_reads_what_it_says_of_strangers(tmp_path: Path) -> None:
    code = """
import logging, os, sys
from transportkit.cli import main
os.close(2); read, write = os.pipe(); os.close(read)
sys.stderr = os.fdopen(write, "w", buffering=1)
os._exit(main(sys.argv[1:]))  # the interpreter would complain of stderr once more
"""
    (tmp_path / "in").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    place = [str(tmp_path / "in"), f"unix:{tmp_path}/w", "--wait", "20", "--debug", "-q"]
    serve = subprocess.Popen([sys.executable, "-c", code, "serve", *place])
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "w").exists() and time.monotonic() < end:
            time.sleep(0.02)
        with pytest.raises(tk.TransportKitError):
            tk.connect(f"unix:{tmp_path}/w", authkey="a key that nobody has there", timeout=20)
        receiver = tk.connect(f"unix:{tmp_path}/w", timeout=20)
        assert list(receiver.receive()) == []
        receiver.close()
        assert serve.wait(20) == 0
    finally:
        serve.kill()
        serve.wait()


# -- keys that hold sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [frozenset([1]), (1, frozenset([2]))])
def test_a_key_that_would_come_back_as_another_one_does_not_travel(key: Any, address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        with pytest.raises(tk.MessageError, match=r"frozenset.*`type=`"):
            outbox.put({"a": {(1,): "kept", key: "lost"}})
        outbox.put({"a": {(1, (2, 3)): "kept"}})
        assert inbox.get(20) == {"a": {(1, (2, 3)): "kept"}}


def test_with_a_type_such_a_key_travels(address: str) -> None:
    with tk.Inbox(address, type=dict[frozenset[int], str]) as inbox, tk.Outbox(address) as outbox:
        outbox.put({frozenset([1]): "b"})
        assert inbox.get(20) == {frozenset([1]): "b"}
