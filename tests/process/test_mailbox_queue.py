"""A mailbox as a queue, over each backend, with producers in processes of their own."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import pytest
import torch
from mailbox_ends import WAYS, Request, Way, address_in, produce, put_and_return, reach, value
from promptness import PROMPT
from session_ends import Child, Talk

import transportkit as tk

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return Way(request.param, address_in(tmp_path))


# -- one message ------------------------------------------------------------------------------------------------------


def test_a_typed_message_is_rebuilt_and_owned(way: Way) -> None:
    source = torch.arange(200_000.0)
    request = Request("1", source, {"strided": source[::2], "small": torch.ones(3, dtype=torch.bfloat16)})
    with way.both({"type": Request}) as (inbox, outbox), Taking(inbox) as taking:
        shared = source.is_shared()
        assert outbox.put(request) == 1
        source += 1  # it may change from here on
        came = taking.next()
        assert isinstance(came, Request)
        for tensor in (came.pixels, *came.more.values()):
            tensor.add_(1)
        assert torch.equal(came.pixels, source)
        assert torch.equal(came.more["strided"], source[::2])
        assert torch.equal(source, torch.arange(200_000.0) + 1)
        assert source.is_shared() is shared is False
        assert inbox.last == tk.Postmark(outbox.identity, 1)
        del taking.taken[:]
    came.pixels.resize_(300_000).fill_(2)  # its memory outlives the mailbox, and is its own
    assert came.pixels.untyped_storage().nbytes() == 1_200_000


class Taking:
    """Takes messages on a thread, for ends in one process: a large message of some backends needs a reader."""

    def __init__(self, inbox: tk.Inbox, **keywords: Any) -> None:
        self.inbox, self.keywords = inbox, keywords
        self.taken: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._news = threading.Semaphore(0)

    def _run(self) -> None:
        while True:
            try:
                self.taken.append(self.inbox.get(timeout=20, **self.keywords))
            except tk.TransportKitError as error:
                if isinstance(error, tk.ClosedError):
                    return
                self.taken.append(error)
            self._news.release()

    def next(self) -> Any:
        assert self._news.acquire(timeout=20)
        return self.taken[-1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.close()
        self._thread.join(20)


def test_messages_larger_than_all_slots_arrive_whole(way: Way) -> None:
    tensors = {
        "large": torch.arange(100_000.0),
        "strided": torch.randn(300, 100).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "array": np.arange(50_000, dtype=np.int16)[::-1],
        "half": torch.randn(70_000).to(torch.bfloat16),
    }
    body = {"text": "x" * 300_000, "t": tensors}
    with way.both({"chunk_bytes": 9_999, "slots": 2}, inline=100) as (inbox, outbox), Taking(inbox) as taking:
        for _ in range(2):
            outbox.put(body)
            came = taking.next()
            assert came["text"] == body["text"]
            came["t"]["large"].add_(1).resize_(200_000).resize_(100_000).sub_(1)  # it is the only owner of its memory
            for name, tensor in tensors.items():
                assert np.array_equal(
                    np.asarray(came["t"][name].float() if name == "half" else came["t"][name]),
                    np.asarray(tensor.float() if name == "half" else tensor),
                )
        outbox.flush(10)
        assert outbox.stats.slots_in_use == inbox.stats.slots_in_use == 0


@pytest.mark.parametrize("slots", [1, 3])
def test_any_chunk_size_is_legal(way: Way, slots: int) -> None:
    with way.both({"chunk_bytes": 1, "slots": slots}, inline=0) as (inbox, outbox), Taking(inbox) as taking:
        outbox.put([torch.arange(5, dtype=torch.int16), torch.tensor(7)])
        first, second = taking.next()
        assert first.tolist() == [0, 1, 2, 3, 4]
        assert second.item() == 7


def test_twenty_thousand_small_tensors_in_one_message(way: Way) -> None:
    with way.both() as (inbox, outbox), Taking(inbox) as taking:
        outbox.put([torch.full((7,), float(number)) for number in range(20_000)], timeout=30)
        came = taking.next()
        assert len(came) == 20_000
        assert torch.equal(torch.stack(came)[:, 3], torch.arange(20_000.0))


def test_put_then_get_in_one_thread(way: Way) -> None:
    with way.both() as (inbox, outbox):
        for number in range(3):
            assert outbox.put({"n": number, "t": torch.full((9_000,), number)}, timeout=20) == number + 1
        assert [inbox.get_nowait()["n"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(tk.DeadlineError, match="no message within 0 s; 1 producer is there"):
            inbox.get_nowait()
        assert not inbox.poll()
        outbox.put(None)
        assert inbox.poll(5)
        assert inbox.poll()
        assert inbox.get(timeout=20) is None


def test_small_tensors_go_inline_and_large_ones_out_of_band(way: Way) -> None:
    with way.both({"slots": 2}, inline=4096) as (inbox, outbox), Taking(inbox) as taking:
        outbox.put([torch.zeros(4096, dtype=torch.uint8), torch.zeros(4097, dtype=torch.uint8)])
        taking.next()
        outbox.flush(10)
        assert (outbox.stats.bytes_inline, outbox.stats.bytes_out_of_band) == (4096, 4097)
        assert (inbox.stats.bytes_inline, inbox.stats.bytes_out_of_band) == (4096, 4097)
        assert (outbox.stats.messages, inbox.stats.messages) == (1, 1)
        assert outbox.stats.in_flight == 0


# -- leases -----------------------------------------------------------------------------------------------------------


def test_leased_tensors_are_read_in_place_and_a_slot_is_never_reused_under_them(way: Way) -> None:
    with (
        way.both({"slots": 2, "chunk_bytes": 1 << 16}, inline=0) as (inbox, outbox),
        Taking(inbox, copy=False) as taking,
    ):
        held = []
        for number in range(2):
            outbox.put(torch.full((1000,), float(number)))
            held.append(taking.next())
        mails = list(taking.taken)
        taking.taken.clear()
        held.clear()
        assert [mail.number for mail in mails] == [1, 2]
        assert all(mail.producer == outbox.identity for mail in mails)
        assert inbox.stats.slots_in_use == 2
        with pytest.raises(tk.DeadlineError, match="no free slot"):
            outbox.put(torch.full((1000,), 9.0), timeout=0.3)
        kept = mails[0].value
        with pytest.raises(tk.LeaseError, match="still viewed"):
            mails[0].release()
        with pytest.raises(tk.LeaseError, match="released"):
            _ = mails[0].value
        assert torch.equal(kept, torch.zeros(1000))
        with pytest.raises(tk.DeadlineError):
            outbox.put(torch.full((1000,), 9.0), timeout=0.3)
        del kept
        outbox.put(torch.full((1000,), 2.0), timeout=20)  # as soon as the last view is dead
        with mails[1] as mail:
            assert torch.equal(mail.value, torch.ones(1000))
        mails[1].release()  # idempotent
        outbox.put(torch.full((1000,), 3.0), timeout=20)
        for _ in range(2):
            taking.next()
        assert [mail.value[0].item() for mail in taking.taken] == [2.0, 3.0]
        del mail


def test_dropping_a_mail_frees_its_slot(way: Way) -> None:
    with way.both({"slots": 1}, inline=0) as (inbox, outbox), Taking(inbox, copy=False) as taking:
        for number in range(20):
            outbox.put(torch.full((1000,), float(number)), timeout=10)
            assert taking.next().value[0] == number
            taking.taken.clear()


# -- many producers ---------------------------------------------------------------------------------------------------


def test_producers_are_interleaved_and_each_stays_in_order(way: Way) -> None:
    with way.inbox(producers=4) as inbox:
        with Child(produce, way.where(inbox), 0, 3, 2) as a, Child(produce, way.where(inbox), 1, 3, 2) as b:
            with (
                Child(produce, way.where(inbox), 2, 3, 2) as c,
                Child(produce, way.where(inbox), 3, 3, 2, 100_000) as d,
            ):
                marks: dict[str, list[int]] = {}
                messages: dict[int, list[int]] = {}
                for message in inbox:
                    assert inbox.last is not None
                    marks.setdefault(inbox.last.producer, []).append(inbox.last.number)
                    producer, number = message["producer"], message["message"]
                    messages.setdefault(producer, []).append(number)
                    for index, tensor in enumerate(message["t"]):
                        assert torch.equal(tensor, value(producer, number, index, tensor.numel()))
                assert messages == {producer: [0, 1, 2] for producer in range(4)}
                assert marks == {child.result(): [1, 2, 3] for child in (a, b, c, d)}
        stats = inbox.stats
        assert (stats.messages, stats.connected, stats.closed, stats.lost, stats.dropped) == (12, 4, 4, 0, {})
        assert inbox.producers == {}


UNRELATED = """
import sys, numpy, transportkit as tk, torch
with tk.Outbox(sys.argv[1], wait=20) as outbox:
    outbox.put({"n": 1, "t": torch.arange(50000), "a": numpy.arange(3)})
    outbox.put({"n": 2, "backend": outbox.agreement.backend()})
"""


def test_an_unrelated_process_may_be_the_producer(tmp_path: Path) -> None:
    with tk.Inbox(address_in(tmp_path), wait=60, producers=1) as inbox:
        process = subprocess.Popen([sys.executable, "-c", UNRELATED, inbox.address])
        try:
            first, second = inbox
        finally:
            assert process.wait(30) == 0
        assert torch.equal(first["t"], torch.arange(50_000))
        assert first["a"].tolist() == [0, 1, 2]
        assert second["n"] == 2


def flood(talk: Talk, where: Any) -> int:
    outbox = reach(where)
    number = 0
    try:
        while True:
            outbox.put({"flood": number})
            number += 1
    except tk.PeerClosedError:
        return number


def test_a_flood_starves_nobody_and_a_get_keeps_its_deadline(way: Way) -> None:
    with way.inbox() as inbox, Child(flood, way.where(inbox)) as child:
        inbox.get()
        quiet = way.outbox(inbox)
        quiet.put("quiet")
        taken = [inbox.get(timeout=20) for _ in range(20)]
        assert "quiet" in taken
        quiet.close()
        inbox.close()
        child.result()


def few_descriptors(talk: Talk, where: Any, count: int) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    with reach(where) as outbox:
        for number in range(3):
            outbox.put([torch.full((600,), float(number * count + index)) for index in range(count // 3)])
    return count


def test_descriptors_do_not_grow_with_the_number_of_tensors(way: Way) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with way.inbox(producers=1) as inbox, Child(few_descriptors, way.where(inbox), 300) as child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            kept = list(inbox)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [len(tensors) for tensors in kept] == [100, 100, 100]
        assert kept[2][99][0] == 699
        assert child.result() == 300


def test_what_was_put_outlives_its_producer(way: Way) -> None:
    with way.inbox() as inbox, Child(put_and_return, way.where(inbox), 5, 20_000) as child:
        assert child.heard() == "put"
        assert child.join() == 0
        time.sleep(1)
        for number in range(5):
            assert torch.equal(inbox.get(timeout=20)["t"], value(0, number, 0, 20_000))
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.1)
        assert (inbox.stats.lost, inbox.stats.closed, inbox.stats.dropped) == (1, 0, {})


def cross(talk: Talk, mine: str, other: str) -> Any:
    with tk.Inbox(mine, timeout=20) as inbox:
        talk.say("listening")
        talk.hear()
        with tk.Outbox(other, timeout=20) as outbox:
            outbox.put({"from": mine, "t": torch.ones(50_000)})
            message = inbox.get(timeout=20)
            outbox.flush(20)
            talk.say("flushed")
            talk.hear()
        return message["from"]


def test_two_processes_that_open_an_inbox_and_then_an_outbox_to_the_other(tmp_path: Path) -> None:
    a, b = address_in(tmp_path, "a"), address_in(tmp_path, "b")
    with Child(cross, a, b) as one, Child(cross, b, a) as other:
        for child in (one, other):
            assert child.heard() == "listening"
        for child in (one, other):
            child.tell("go")
        for child in (one, other):
            assert child.heard() == "flushed"
        for child in (one, other):
            child.tell("leave")
        assert (one.result(), other.result()) == (b, a)


# -- the type and its failures ----------------------------------------------------------------------------------------


def test_a_message_of_another_type_costs_only_itself(way: Way) -> None:
    with way.both({"type": Request, "slots": 1}) as (inbox, outbox):
        outbox.put({"id": 3, "pixels": torch.ones(3000)})
        with pytest.raises(tk.MessageError, match=rf"message 1 of producer {outbox.identity} .*`\$\.id`") as caught:
            inbox.get(timeout=20)
        assert (caught.value.producer, caught.value.number, caught.value.path) == (outbox.identity, 1, "$.id")
        outbox.put(Request("2", torch.ones(3000)), timeout=20)
        assert inbox.get(timeout=20).id == "2"
        outbox.flush(5)
        assert (inbox.stats.dropped, outbox.stats.refused) == ({"refused": 1}, 1)
        assert outbox.stats.slots_in_use == 0


def test_what_does_not_travel_raises_in_put_and_sends_nothing(way: Way) -> None:
    with way.both() as (inbox, outbox):
        for bad in ({"f": lambda: 1}, {"t": torch.ones(3000), "meta": [object()]}):
            with pytest.raises(tk.MessageError, match=r"^\$\."):
                outbox.put(bad)
        with pytest.raises(tk.UnsupportedTensorError, match=r"^\$\.t has the layout sparse_coo"):
            outbox.put({"t": torch.eye(3).to_sparse()})
        assert outbox.put({"none": None}) == 1
        assert inbox.get(timeout=20) == {"none": None}
        assert outbox.stats.slots_in_use == outbox.stats.withdrawn == 0


# -- back-pressure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_full_inbox_makes_put_wait_and_then_raise(way: Way, capacity: int) -> None:
    with way.both({"capacity": capacity}, capacity=capacity + 1) as (inbox, outbox):
        for number in range(capacity):
            outbox.put(number, timeout=20)
        started = time.monotonic()
        with pytest.raises(tk.DeadlineError, match=f"has {capacity} messages of this outbox to take"):
            outbox.put("late", timeout=0.2)
        assert 0.15 < time.monotonic() - started < PROMPT
        assert outbox.unacknowledged == tuple(range(1, capacity + 1))
        with pytest.raises(tk.DeadlineError):
            outbox.flush(0.1)
        assert [inbox.get(timeout=20) for _ in range(capacity)] == list(range(capacity))
        outbox.flush(5)
        assert outbox.put("next", timeout=20) == capacity + 1
        assert inbox.get(timeout=20) == "next"
        assert outbox.stats.waits >= 2
        assert outbox.stats.wait_seconds > 0.2


def puts_with_little_patience(talk: Talk, where: Any, seed: int) -> list[tuple[int, int]]:
    """What was reported as put: (own count, number)."""
    generator = torch.Generator().manual_seed(seed)
    reported = []
    with reach(where) as outbox:
        for count in range(120):
            draw = torch.rand(3, generator=generator).tolist()
            tensors = [torch.full((int(draw[0] ** 3 * 40_000) + 1,), count) for _ in range(1 + int(draw[1] * 3))]
            try:
                reported.append(
                    (count, outbox.put({"c": count, "t": tensors, "s": "x" * 500}, timeout=draw[2] * 0.004))
                )
            except tk.DeadlineError:
                pass
        outbox.put({"c": -1, "t": [], "s": ""}, timeout=20)
    return reported


def test_a_message_is_delivered_if_and_only_if_put_returned(way: Way) -> None:
    """Whatever the moment at which patience ends: before a frame, within one, between the chunks of a message."""
    keywords = {"chunk_bytes": 50_000, "slots": 2, "capacity": 3}
    with way.inbox(producers=1, **keywords) as inbox, Child(puts_with_little_patience, way.where(inbox), 7) as child:
        delivered = []
        for message in inbox:
            assert inbox.last is not None
            delivered.append((message["c"], inbox.last.number))
            assert all(bool((tensor == message["c"]).all()) for tensor in message["t"])
            if len(delivered) % 3 == 0:
                time.sleep(0.003)
        last = delivered.pop()
        assert last[0] == -1
        assert delivered == child.result()
        assert len(delivered) < 120 or inbox.stats.dropped == {}
        assert Counter(inbox.stats.dropped) == Counter({"withdrawn": last[1] - 1 - len(delivered)}) or (
            last[1] - 1 == len(delivered)
        )


def test_types_with_default_values_and_tags_cross(tmp_path: Path) -> None:
    class Ping(msgspec.Struct, tag=True):
        n: int = 1

    class Pong(msgspec.Struct, tag=True):
        t: torch.Tensor

    with Way("pickle", address_in(tmp_path)).both({"type": Ping | Pong}) as (inbox, outbox):
        outbox.put(Ping())
        outbox.put(Pong(torch.ones(1)))
        assert inbox.get(timeout=20) == Ping(1)
        assert isinstance(inbox.get(timeout=20), Pong)


def put_and_hang(talk: Talk, where: Any) -> None:
    """Puts one message, which is taken; then does nothing until it is killed."""
    outbox = reach(where)
    outbox.put("put")
    outbox.flush(20)
    talk.say(outbox.identity)
    time.sleep(600)


def test_taking_ends_with_an_error_when_all_are_gone_and_one_was_lost(way: Way) -> None:
    with way.inbox(producers=2) as inbox, Child(put_and_hang, way.where(inbox)) as child:
        assert inbox.get(timeout=20) == "put"
        child.heard()
        child.signal(signal.SIGKILL)
        with pytest.raises(tk.DeadlineError):  # one more is expected
            inbox.get(timeout=0.3)
        with way.outbox(inbox):  # comes and leaves
            pass
        with pytest.raises(tk.PeerLostError, match="of 2 producers 1 have left in order, 1 were lost"):
            list(inbox)
        with pytest.raises(tk.DeadlineError):  # that was said; somebody may start it again
            inbox.get(timeout=0.1)
        with way.outbox(inbox) as again:
            again.put("again")
            again.put("and again")
            assert inbox.get(timeout=20) == "again"
            assert inbox.get(timeout=20) == "and again"
        assert list(inbox) == []


def test_a_tensor_of_a_producer_that_is_gone_is_not_waited_for(way: Way) -> None:
    with way.inbox() as inbox, Child(put_and_hang, way.where(inbox)) as child, way.outbox(inbox) as other:
        taking = tk.OutOfBand(inbox)  # for as long as the inbox's timeout
        assert inbox.get(timeout=20) == "put"
        gone = child.heard()
        other.put([torch.arange(3)])
        killer = threading.Timer(0.3, child.signal, [signal.SIGKILL])
        killer.start()
        with pytest.raises(tk.PeerLostError, match="message 2 of it did not come") as caught:
            taking.fetch(gone, 2, 0)
        killer.join()
        assert caught.value.peer == gone
        assert taking.fetch(other.identity, 1, 0).tolist() == [0, 1, 2]  # came meanwhile, and is kept
