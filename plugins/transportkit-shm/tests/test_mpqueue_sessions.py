"""The backend `mpqueue` between processes: pairs under every start method, seats, and who is killed when."""

from __future__ import annotations

import gc
import os
import socket
import warnings
from typing import TYPE_CHECKING, Any

import mpqueue_ends as ends
import pytest
import shm_ends

import transportkit as tk
from transportkit.errors import NegotiationError, PeerClosedError, PeerLostError
from transportkit.link import SocketLink
from transportkit.session import Receiver
from transportkit.session.options import options
from transportkit.testing import Call, Child, Holdings, bulk, in_process, prints, resident
from transportkit.testing.processes import context_of
from transportkit_shm import unnamed
from transportkit_shm.descriptor_queue import DescriptorQueue
from transportkit_shm.mpqueue import MpqueueTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METHODS = [pytest.param("spawn", marks=pytest.mark.slow), "forkserver", "fork"]


@pytest.fixture(autouse=True)
def nothing_shared() -> Iterator[None]:
    """No test may leave an end of a queue, shared memory or a name in `/dev/shm` with this process."""
    in_process(int, method="forkserver")
    gc.collect()
    before = ends.queue_ends(), ends.shared_files(), ends.names()
    yield
    gc.collect()
    assert (ends.queue_ends(), ends.shared_files(), ends.names()) == before


def child(function: Any, *args: Any, method: str = "forkserver") -> Child:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
        return Child(function, *args, method=method)


# -- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_whose_receiver_goes_to_a_child(method: str) -> None:
    sender, receiver = tk.pair(context_of(method), **ends.KEYWORDS)
    assert ends.queue_ends() == 2
    with child(ends.load_all, receiver, 2, method=method) as other:
        with sender:
            assert ends.queue_ends() == 1, "the copy of the other end was not closed"
            assert ends.in_a_program() == 0
            for seed in range(2):
                sender.send(bulk(ends.NBYTES, seed))
            held, inherited, shared, agreement = other.heard(20)
            assert held == [2, 1, 0]
            assert inherited == 0
            assert shared == []
            assert agreement == str(sender.agreement)
            assert "mpqueue: taken: ends inherited from one parent" in agreement
        assert ends.queue_ends() == 0, "ends stay open after close()"
        assert other.result(20) == [prints(bulk(ends.NBYTES, seed)) for seed in range(2)]


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_whose_sender_goes_to_a_child(method: str) -> None:
    sender, receiver = tk.pair(context_of(method), **ends.KEYWORDS)
    with child(ends.send_all, sender, 2, method=method) as other:
        with receiver:
            for seed in range(2):
                assert prints(receiver.receive()) == prints(bulk(ends.NBYTES, seed))
        assert ends.queue_ends() == 0
        assert other.result(20) == "mpqueue"


def test_both_ends_may_go_to_children() -> None:
    sender, receiver = tk.pair(context_of("forkserver"), **ends.KEYWORDS)
    with child(ends.load_all, receiver, 1) as taking, child(ends.send_all, sender, 1) as sending:
        sender.close()
        receiver.close()
        assert ends.queue_ends() == 0
        assert sending.result(20) == "mpqueue"
        assert taking.result(20) == [prints(bulk(ends.NBYTES, 0))]


def test_a_pair_that_nobody_used_leaves_nothing() -> None:
    for leave in (lambda end: end.close(), lambda end: end.abort()):
        for end in tk.pair(**ends.KEYWORDS):
            leave(end)
            leave(end)
        assert ends.queue_ends() == 0
    kept = DescriptorQueue.new()
    assert ends.queue_ends() == 2
    del kept
    assert ends.queue_ends() == 0


def test_it_is_the_choice_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = tk.pair(context_of("forkserver"), timeout=20)
    with child(ends.load_all, receiver, 1) as other, sender:
        sender.send(bulk(ends.NBYTES, 0))
        assert sender.agreement.backend() == "shm"
        other.result(20)
        assert "mpqueue: not taken: costs more than shm here" in str(sender.agreement)

    monkeypatch.delattr(os, "memfd_create")
    sender, receiver = tk.pair(context_of("forkserver"), timeout=20)
    with child(ends.without_memfd, receiver) as other, sender:
        sender.send(bulk(ends.NBYTES, 0))
        assert sender.agreement.backend() == "mpqueue"
        assert "shm: not taken: unavailable at the sender: this Python has no" in str(sender.agreement)
        assert other.result(20) == (str(sender.agreement), "True")


def test_it_is_the_choice_where_no_socket_can_be_reached() -> None:
    sender, receiver = tk.pair(context_of("forkserver"), timeout=20)
    with child(ends.in_another_network, receiver) as other:
        if not other.heard(20):
            sender.close()
            pytest.skip("this process may make no network namespace")
        with sender:
            sender.send(bulk(ends.NBYTES, 0))
            assert sender.agreement.backend() == "mpqueue"
            assert "shm: not taken: its descriptor socket is not reachable" in str(sender.agreement)
            assert other.result(20) is True


def test_it_is_not_taken_over_an_address(tmp_path: Path) -> None:
    address, why = f"unix:{tmp_path}/s", "the sender has not inherited its end: make both ends with"
    sender = tk.serve(address, backends=["mpqueue"], timeout=20)
    waiting = Call(sender.wait)
    with pytest.raises(NegotiationError, match=why):
        tk.connect(address, backends=["mpqueue"], timeout=20)
    assert why in str(waiting.error(10))
    sender.close()

    sender = tk.serve(address, timeout=20)
    waiting = Call(sender.wait)
    with tk.connect(address, timeout=20) as receiver:
        waiting.result(10)
        assert f"mpqueue: not taken: {why}" in str(receiver.agreement)
        sender.close()


@pytest.mark.parametrize("refused", ["queue", "memory"])
def test_it_falls_back_where_something_is_refused(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if refused == "queue":
        monkeypatch.setattr(MpqueueTransport, "inherit", refuse)
    sender, receiver = tk.pair(context_of("forkserver"), **{**ends.KEYWORDS, "backends": ["mpqueue", "pickle"]})
    with child(ends.load_all, receiver, 1) as other:
        assert sender.address == "", "the first use; it has probed now"
        monkeypatch.setattr(unnamed, "open_file", refuse)
        with sender:
            sender.send(bulk(ends.NBYTES, 0))
            assert sender.agreement.backend() == "pickle"
            why = {"queue": "this end has inherited no queue", "memory": r"shared memory for 2 slots of 20000 bytes"}
            assert f"mpqueue: not taken: trial failed: {why[refused]}" in str(sender.agreement)
            assert other.result(20) == [prints(bulk(ends.NBYTES, 0))]
    told = [record.message for record in caplog.records if "made nothing for a child" in record.message]
    assert bool(told) == (refused == "queue")


# -- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [step for step in ends.STEPS if step.startswith("receiver")])
def test_a_receiver_killed_in_the_handover_is_noticed(step: str) -> None:
    sender, receiver = tk.pair(context_of("forkserver"), **ends.KEYWORDS)
    with child(ends.load_all, receiver, 1, step):
        error = Call(sender.send, bulk(ends.NBYTES, 0)).error(10)
        assert isinstance(error, PeerLostError), repr(error)
        sender.close()
        assert ends.queue_ends() == 0
    del error, sender, receiver


@pytest.mark.parametrize("step", [step for step in ends.STEPS if step.startswith("sender")])
def test_a_sender_killed_in_the_handover_is_noticed(step: str) -> None:
    sender, receiver = tk.pair(context_of("forkserver"), **ends.KEYWORDS)
    with child(ends.send_all, sender, 1, step):
        error = Call(receiver.join).error(10)
        assert isinstance(error, PeerLostError), repr(error)
        receiver.close()
        assert ends.queue_ends() == 0
    del error, sender, receiver


# -- seats ------------------------------------------------------------------------------------------------------------


def take_seat(queue: DescriptorQueue, updates: int, step: str = "") -> tuple[Child, Receiver]:
    """A new producer on an inherited queue, over a link of its own, and this side's end of it."""
    ours, theirs = socket.socketpair()
    producer = child(ends.sit_on, queue, theirs, updates, step)
    theirs.close()
    return producer, Receiver.over(SocketLink.over(ours), options(ends.KEYWORDS), {"mpqueue": queue})


@pytest.fixture
def seat() -> Iterator[DescriptorQueue]:
    queue = DescriptorQueue.new()
    yield queue
    queue.close("sender")
    queue.close("receiver")


def test_a_seat_is_taken_again_after_its_producer_died(seat: DescriptorQueue) -> None:
    """At every step of the handover and in mid-update; what the dead leave is dropped."""
    expected = prints(bulk(ends.NBYTES, 0))
    for step in ("sender made", "sender before put", "sender after put", "mid-update"):
        producer, receiver = take_seat(seat, 0, step)
        with producer:
            receiving = Call(receiver.join)
            if step == "mid-update":
                receiving.result(10)
                receiving = Call(drain, receiver)
                producer.heard(10)
                producer.kill()
            error = receiving.error(10)
            assert isinstance(error, PeerLostError), (step, repr(error))
            receiver.close()
        del receiver, receiving, error

        producer, receiver = take_seat(seat, 1)
        with producer, receiver:
            assert prints(receiver.receive()) == expected, step
            assert producer.result(10) == "mpqueue"
    assert ends.queue_ends() == 2, "the seat itself stays"


def test_a_seat_serves_one_producer_whatever_others_left(seat: DescriptorQueue) -> None:
    """Both sides of a session give up, again and again, with the descriptor on its way."""
    for _ in range(5):
        sent, _received = ends.exporter(seat, os.urandom(32)), ends.importer(seat, os.urandom(32))
        sent.connect(shm_ends.limit())
        sent.close()
        del _received
    producer, receiver = take_seat(seat, 2)
    with producer, receiver:
        for seed in range(2):
            assert prints(receiver.receive()) == prints(bulk(ends.NBYTES, seed))
        assert producer.result(10) == "mpqueue"
    assert seat.stale == 5


def test_a_producer_killed_on_one_seat_leaves_the_others_alone() -> None:
    queues = [DescriptorQueue.new() for _ in range(2)]
    (dying, broken), (living, whole) = take_seat(queues[0], 0, "mid-update"), take_seat(queues[1], 2)
    with dying, living:
        broken.join()
        whole.join()
        receiving = Call(drain, broken)
        dying.heard(10)
        dying.kill()
        for seed in range(2):
            assert prints(whole.receive()) == prints(bulk(ends.NBYTES, seed))
        assert living.result(10) == "mpqueue"
        assert isinstance(receiving.error(10), PeerLostError)
        with pytest.raises(PeerClosedError):
            drain(whole)
    for receiver in (broken, whole):
        receiver.close()
    for queue in queues:
        queue.close("sender")
        queue.close("receiver")
    del receiving, broken, whole, receiver


def drain(receiver: Receiver) -> int:
    """Take one update."""
    return len(list(receiver.receive()))


# -- many -------------------------------------------------------------------------------------------------------------


def test_twenty_sessions_leave_nothing() -> None:
    def once() -> None:
        sender, receiver = tk.pair(context_of("forkserver"), **{**ends.KEYWORDS, "chunk_bytes": 1 << 20})
        with child(ends.send_all, sender, 1) as other, receiver:
            sender.close()
            assert len(list(receiver.receive())) == len(bulk(ends.NBYTES, 0))
            assert other.result(20) == "mpqueue"

    once()
    gc.collect()
    before, size = Holdings.now(), resident()
    for _ in range(20):
        once()
    gc.collect()
    assert Holdings.now().beyond(before) == []
    assert resident() - size < 16 << 20
