"""The two ends of a mailbox: opening, closing, threads, forks, inherited seats, and who is turned away."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections import Counter
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from mailbox_ends import WAYS, Way, address_in, produce, reach, value
from promptness import PROMPT
from session_ends import Child, Talk

import transportkit as tk
from transportkit.lifecycle import Imports
from transportkit.mailbox.admission import Admission
from transportkit.testing import Call

if TYPE_CHECKING:
    from pathlib import Path

    from transportkit.transport import Exporter


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path)


def in_thread(function: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    """Run on a thread; what it returned or raised comes into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# -- opening ----------------------------------------------------------------------------------------------------------


def test_the_sides_start_in_any_order(address: str) -> None:
    thread, outcome = in_thread(lambda: tk.Outbox(address, wait=10))
    time.sleep(0.2)
    with tk.Inbox(address) as inbox:
        thread.join(20)
        with outcome[0] as outbox:
            outbox.put("hello")
            assert inbox.get(timeout=20) == "hello"
            assert str(outbox.agreement).startswith("receiver 0 (pid ")
            assert list(inbox.producers) == [outbox.identity]
            assert inbox.producers[outbox.identity].backend() == outbox.agreement.backend()
    with pytest.raises(tk.AddressError, match="nobody listens"):
        tk.Outbox(address, wait=0.1)


def test_tcp_with_a_key(tmp_path: Path) -> None:
    with tk.Inbox("tcp://127.0.0.1:0", authkey="secret", timeout=10) as inbox:
        with pytest.raises(tk.AuthenticationError):
            tk.Outbox(inbox.address, authkey="wrong", timeout=20)
        with tk.Outbox(inbox.address, authkey="secret", timeout=10, backends=["pickle"]) as outbox:
            outbox.put({"t": torch.ones(1000)})
            assert torch.equal(inbox.get(timeout=20)["t"], torch.ones(1000))
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.1)
        assert (inbox.stats.closed, inbox.stats.failures) == (1, 1)


def test_a_producer_that_stalls_in_its_handshake_delays_nobody(address: str) -> None:
    with tk.Inbox(address, timeout=20) as inbox:
        from transportkit.dial import dial
        from transportkit.mailbox.settings import settings
        from transportkit.registry import choose
        from transportkit.site import read_site
        from transportkit.wire import Mailbox, encode

        wanted = settings({})
        hello = wanted.hello("sender", choose(read_site("unix"), None), "unix", Mailbox(1, "stalled"))
        stalled = [dial(inbox.address, authkey=None, timeout=20) for _ in range(4)]
        for link in stalled[:2]:
            assert link.try_send(encode(hello))  # and then says nothing more
        began = time.monotonic()
        with tk.Outbox(address) as outbox:
            outbox.put(1)
            assert inbox.get(timeout=20) == 1
        assert time.monotonic() - began < PROMPT
        for link in stalled:
            link.close()


def test_the_wrong_ends_are_told_what_to_do(address: str) -> None:
    with tk.Inbox(address, timeout=20) as inbox:
        with pytest.raises(tk.PeerFailedError, match=r"an Inbox listens here, .* open `transportkit\.Outbox"):
            tk.connect(address, timeout=20)
        assert inbox.stats.failures == 1
        answer = tk.inspect(address, timeout=20)
        assert answer.agreement is not None
        assert "an Inbox" in answer.text
        assert inbox.stats.failures == 1


def test_an_outbox_at_a_sessions_address_is_told_what_to_do(address: str) -> None:
    sender = tk.serve(address, timeout=20)
    try:
        with pytest.raises(tk.PeerFailedError, match="takes no messages: open an `Inbox`"):
            tk.Outbox(address, timeout=20)
        assert sender.failures == 1
    finally:
        sender.close()


def test_what_cannot_be_agreed_is_refused(address: str) -> None:
    with tk.Inbox(address, timeout=20, backends=["pickle"]) as inbox:
        with pytest.raises(tk.NegotiationError, match="shm: not taken: not in the receiver's list"):
            tk.Outbox(address, timeout=20, backends=["shm"])
        assert wait_for(lambda: inbox.stats.failures == 1)


def wait_for(condition: Any, seconds: float = 5) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    "keywords",
    [
        {"capacity": 0},
        {"capacity": 1.5},
        {"capacity": True},
        {"inline": -1},
        {"spin": float("nan")},
        {"spin": -1},
        {"progress": print},
        {"nonsense": 1},
        {"slots": 0},
        {"producers": 0},
        {"producers": "two"},
        {"type": torch.Tensor | int},
    ],
    ids=str,
)
def test_wrong_keywords_are_refused(address: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(tk.UsageError):
        tk.Inbox(address, **keywords)


def test_wrong_timeouts_are_refused(address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        for wrong in (-1, "1", True, float("nan")):
            with pytest.raises(tk.UsageError, match="timeout must be"):
                inbox.get(wrong)  # type: ignore[arg-type]
            with pytest.raises(tk.UsageError, match="timeout must be"):
                outbox.put(1, timeout=wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(
    "gloo" not in entry_points(group="transportkit.backends").names, reason="the backend gloo is not installed"
)
def test_a_collective_backend_carries_messages_too(address: str) -> None:
    keywords: dict[str, Any] = {"backends": ["gloo"], "timeout": 20, "chunk_bytes": 100_000}
    with tk.Inbox(address, **keywords) as inbox:
        outbox = tk.Outbox(address, **keywords)
        thread, outcome = in_thread(lambda: [inbox.get(timeout=20) for _ in range(2)])
        for number in range(2):
            outbox.put({"n": number, "t": torch.full((60_000,), number)}, timeout=20)
        thread.join(30)
        assert [int(message["t"].sum()) for message in outcome[0]] == [0, 60_000]
        outbox.close(10)


# -- closing ----------------------------------------------------------------------------------------------------------


def test_closing_an_outbox_waits_until_all_is_taken(address: str) -> None:
    with tk.Inbox(address) as inbox:
        outbox = tk.Outbox(address)
        for number in range(5):
            outbox.put(number)
        with pytest.raises(tk.DeadlineError, match=r"5 messages were put and not taken by the inbox .*: 1 to 5;"):
            outbox.close(timeout=0.1)
        assert outbox.unacknowledged == (1, 2, 3, 4, 5)
        outbox.close()
        assert [inbox.get(timeout=20) for _ in range(5)] == [0, 1, 2, 3, 4]  # they can be taken all the same
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.1)
        assert (inbox.stats.closed, inbox.stats.lost) == (1, 0)
        with pytest.raises(tk.ClosedError, match="it was closed"):
            outbox.put(1)


def test_an_inbox_that_closes_tells_those_who_have_only_just_come(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shake = Admission._shake

    def lingering(admission: Admission, *args: Any) -> None:
        shake(admission, *args)
        time.sleep(0.5)  # the thread of the handshake is slow to end

    monkeypatch.setattr(Admission, "_shake", lingering)
    inbox = tk.Inbox(address)
    outbox = tk.Outbox(address)
    outbox.put(1)
    inbox.close()
    with pytest.raises(tk.PeerClosedError, match="closed the session; put and not taken: 1"):
        outbox.put(2)


def test_an_inbox_that_closes_tells_its_producers(address: str) -> None:
    inbox = tk.Inbox(address)
    outbox = tk.Outbox(address)
    outbox.put(1)
    outbox.put(2)
    assert inbox.get(timeout=20) == 1
    inbox.close()
    inbox.close()
    with pytest.raises(tk.PeerClosedError, match=r"the inbox .* closed the session; put and not taken: 2"):
        outbox.put(3)
    assert outbox.unacknowledged == (2,)
    assert (outbox.stats.lost, outbox.stats.in_flight) == (1, 0)
    with pytest.raises(tk.ClosedError):
        outbox.put(4)
    outbox.close()
    with pytest.raises(tk.ClosedError):
        inbox.get()


def test_an_exception_that_passes_through_an_outbox_is_a_loss_with_its_text(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tk.Inbox(address) as inbox:
        outbox = tk.Outbox(address)
        outbox.put("before")
        with pytest.raises(KeyError), outbox:
            raise KeyError("the reason")
        assert inbox.get(timeout=20) == "before"
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.2)
        assert (inbox.stats.closed, inbox.stats.lost) == (0, 1)
    assert "KeyError" in caplog.text
    assert "the reason" in caplog.text


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_an_inbox_that_is_closed_elsewhere_ends_a_get_and_a_loop(address: str, ending: str) -> None:
    for wait in (lambda inbox: inbox.get(), list):
        inbox = tk.Inbox(address)
        thread, outcome = in_thread(wait, inbox)
        time.sleep(0.1)
        began = time.monotonic()
        getattr(inbox, ending)()
        thread.join(20)
        assert time.monotonic() - began < PROMPT
        if wait is list:
            assert outcome == [[]]
        else:
            assert isinstance(outcome[0], tk.ClosedError)
        inbox.close()


def test_aborting_an_outbox_ends_a_put_that_waits(address: str) -> None:
    with tk.Inbox(address, capacity=1):
        outbox = tk.Outbox(address)
        outbox.put(1)
        thread, outcome = in_thread(outbox.put, 2)
        time.sleep(0.1)
        outbox.abort()
        thread.join(20)
        assert isinstance(outcome[0], tk.ClosedError)
        outbox.close()


def test_aborting_an_outbox_is_no_failure_of_the_backend_that_put_waits_for(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(self: Exporter, slot: int, header: Any, deadline: Any) -> None:
        outbox.abort()
        raise tk.BackendError("the transfer did not end")

    with tk.Inbox(address, backends=["shm"]), tk.Outbox(address) as outbox:
        monkeypatch.setattr(type(outbox._posting.lane.exporter), "publish", publish)  # type: ignore[union-attr]
        with pytest.raises(tk.ClosedError, match="it was aborted"):
            outbox.put(torch.ones(10_000))
        with pytest.raises(tk.ClosedError, match="it was aborted"):
            outbox.put(1)


def test_iterating_ends_when_the_expected_producers_have_left(address: str) -> None:
    with tk.Inbox(address, producers=2, wait=20) as inbox:
        outboxes = [tk.Outbox(address) for _ in range(2)]
        for number, outbox in enumerate(outboxes):
            outbox.put(number)
        threads = [in_thread(outbox.close)[0] for outbox in outboxes]
        assert sorted(inbox) == [0, 1]
        with pytest.raises(tk.PeerClosedError, match="all 2 producers have left"):
            inbox.get()
        for thread in threads:
            thread.join(20)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_threads_may_share_both_ends(address: str, backend: str) -> None:
    way = Way(backend, address)
    with way.inbox() as inbox:
        outbox = way.outbox(inbox)
        numbers: list[int] = []

        def put(thread: int) -> None:
            for count in range(20):
                number = outbox.put((thread, count, torch.full((2000 * thread + 1,), count)), timeout=20)
                numbers.append(number)

        def take() -> list[Any]:
            return [inbox.get(timeout=20) for _ in range(30)]

        puts = [in_thread(put, thread) for thread in range(3)]
        takes = [in_thread(take) for _ in range(2)]
        for thread, outcome in puts + takes:
            thread.join(30)
            assert not isinstance(outcome[0], BaseException), outcome
        messages = [message for _, outcome in takes for message in outcome[0]]
        assert Counter(message[0] for message in messages) == {0: 20, 1: 20, 2: 20}
        assert all(bool((tensor == count).all()) for _, count, tensor in messages)
        assert sorted(numbers) == list(range(1, 61))
        outbox.close(5)


def test_a_call_waits_for_its_turn_no_longer_than_its_timeout(address: str) -> None:
    with tk.Inbox(address, capacity=1) as inbox:
        outbox = tk.Outbox(address)
        thread, outcome = in_thread(inbox.get, 5)
        time.sleep(0.1)
        with pytest.raises(tk.DeadlineError, match="another thread was in this Inbox"):
            inbox.get(timeout=0.1)
        outbox.put(1)
        thread.join(20)
        assert outcome == [1]
        outbox.put(2)
        thread, outcome = in_thread(lambda: outbox.put(3, timeout=20))
        time.sleep(0.1)
        with pytest.raises(tk.DeadlineError, match="another thread was in this Outbox"):
            outbox.put(4, timeout=0.1)
        assert [inbox.get(timeout=20) for _ in range(2)] == [2, 3]
        thread.join(20)
        assert outcome == [3]
        outbox.close()


# -- forks and seats --------------------------------------------------------------------------------------------------


def forked(function: Any) -> Any:
    """What a function returns in a forked child; an error comes back as its text."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer: Any = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(theirs, pickle.dumps(answer))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_an_identity_of_its_own_or_none(address: str) -> None:
    with tk.Inbox(address, timeout=20) as inbox:
        plain, again = tk.Outbox(address), tk.Outbox(address, reconnect=True)
        again.put("parent")

        def both() -> list[str]:
            again.put({"child": torch.ones(5000)})
            again.close(10)
            return [again.identity] if again.closed is None else []

        for call in (lambda: plain.put(1), lambda: inbox.get(timeout=1), lambda: plain.identity):
            assert forked(call).startswith("ForkedError: this ")
        waiting, outcome = in_thread(forked, both)
        first, mark = inbox.get(timeout=10), inbox.last
        second, other = inbox.get(timeout=10), inbox.last
        waiting.join(10)
        assert outcome == [[]]
        assert first == "parent"
        assert torch.equal(second["child"], torch.ones(5000))
        assert mark == tk.Postmark(again.identity, 1)
        assert other is not None
        assert other.number == 1
        assert other.producer not in (plain.identity, again.identity)
        assert again.put("still here") == 2
        assert inbox.get(timeout=20) == "still here"
        plain.close()
        again.close()


@pytest.mark.parametrize("backend", WAYS)
def test_seats_are_used_again_under_another_identity(address: str, backend: str) -> None:
    with tk.Inbox(backends=[backend], timeout=20, wait=20) as inbox:
        assert inbox.address == ""
        seen = set()
        for producer in range(3):
            with Child(produce, inbox.outbox(), producer, 1, 2) as child:
                message = inbox.get()
                assert torch.equal(message["t"][1], value(producer, 0, 1))
                seen.add(child.result())
                assert wait_for(lambda: inbox.poll() or inbox.producers == {})
        assert len(seen) == 3
        assert (inbox.stats.connected, inbox.stats.closed, inbox.stats.lost) == (3, 3, 0)


def spawned(outbox: tk.Outbox, count: int) -> None:
    with outbox:
        for number in range(count):
            outbox.put({"n": number, "t": torch.full((3000,), number)})


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_inherited_outbox_goes_to_a_child(address: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    with tk.Inbox(timeout=20, wait=30, producers=2) as inbox:
        unused = inbox.outbox(context)
        children = [context.Process(target=spawned, args=(inbox.outbox(context), 2)) for _ in range(2)]  # type: ignore[attr-defined]
        for child in children:
            child.start()
        assert sorted(int(message["t"][0]) for message in inbox) == [0, 0, 1, 1]
        for child in children:
            child.join(10)
            assert child.exitcode == 0
        with pytest.raises(tk.UsageError, match="while that is started"):
            pickle.dumps(unused)
        unused.close()
        with pytest.raises(tk.ClosedError):
            unused.put(1)


def test_an_inherited_outbox_may_be_used_right_here(address: str) -> None:
    with tk.Inbox(timeout=20) as inbox, inbox.outbox() as outbox:
        outbox.put({"t": torch.ones(9000)})
        assert torch.equal(inbox.get(timeout=20)["t"], torch.ones(9000))
        with pytest.raises(tk.UsageError, match="takes a context"):
            inbox.outbox("spawn")  # type: ignore[arg-type]


# -- hooks for an encoder of one's own --------------------------------------------------------------------------------


class Own(msgspec.Struct):
    id: int
    images: list[torch.Tensor]
    mask: np.ndarray[Any, Any] | None = None


def test_tensors_of_ones_own_encoder_go_out_of_band_in_any_order(address: str) -> None:
    with tk.Inbox(address, slots=3) as inbox, tk.Outbox(address) as outbox:
        sending, taking = tk.OutOfBand(outbox), tk.OutOfBand(inbox, timeout=20)
        encoder = msgspec.msgpack.Encoder(enc_hook=sending.enc_hook)
        decoder = msgspec.msgpack.Decoder(Own, dec_hook=taking.dec_hook, ext_hook=taking.ext_hook)
        bodies = []
        for number in range(3):
            with sending:
                own = Own(number, [torch.full((3000,), number), torch.ones(3)], np.full(9000, number))
                bodies.append(encoder.encode(own))
        assert max(map(len, bodies)) < 400
        for number in (2, 0, 1):
            came = decoder.decode(bodies[number])
            assert came.id == number
            assert torch.equal(came.images[0], torch.full((3000,), number))
            assert came.images[1].tolist() == [1, 1, 1]
            assert (came.mask == number).all()
        assert taking.stats == tk.OutOfBandStats(out_of_band=6, waiting=0)
        assert sending.stats == tk.OutOfBandStats(out_of_band=6, inline=3)
        with pytest.raises(tk.DeadlineError):
            tk.OutOfBand(inbox, timeout=0.1).fetch(outbox.identity, 1, 0)


def test_without_a_batch_each_tensor_goes_alone_and_inline_where_there_is_no_room(address: str) -> None:
    with tk.Inbox(address, slots=2) as inbox, tk.Outbox(address) as outbox:
        sending, taking = tk.OutOfBand(outbox), tk.OutOfBand(inbox, timeout=20)
        own = Own(1, [torch.full((3000,), number) for number in range(5)])
        body = msgspec.msgpack.Encoder(enc_hook=sending.enc_hook).encode(own)
        assert sending.stats == tk.OutOfBandStats(out_of_band=2, inline_fallbacks=3)
        came = msgspec.msgpack.Decoder(Own, ext_hook=taking.ext_hook).decode(body)
        assert [int(image[0]) for image in came.images] == [0, 1, 2, 3, 4]
        assert inbox.stats.slots_in_use == 0
        outbox.flush(5)
        assert outbox.stats.slots_in_use == 0


def test_dropped_messages_leave_nothing_in_a_buffer(address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        sending, taking = tk.OutOfBand(outbox), tk.OutOfBand(inbox, timeout=20)
        encoder = msgspec.msgpack.Encoder(enc_hook=sending.enc_hook)
        decoder = msgspec.msgpack.Decoder(ext_hook=taking.ext_hook)
        bodies = [encoder.encode({"t": torch.full((3000,), number)}) for number in range(4)]
        taking.drop(outbox.identity, 1)  # still to come
        assert decoder.decode(bodies[2])["t"][0] == 2
        assert taking.stats.waiting == 1
        taking.drop(outbox.identity, 2)  # has come
        assert decoder.decode(bodies[3])["t"][0] == 3
        assert taking.stats == tk.OutOfBandStats(out_of_band=2, waiting=0)
        outbox.flush(5)
        assert outbox.stats.slots_in_use == 0


def test_hooks_refuse_what_is_not_theirs(address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        sending, taking = tk.OutOfBand(outbox), tk.OutOfBand(inbox, timeout=0.1)
        with pytest.raises(NotImplementedError):
            msgspec.msgpack.Encoder(enc_hook=sending.enc_hook).encode({1: object()})
        with pytest.raises(tk.UnsupportedTensorError):
            sending.enc_hook(torch.eye(2).to_sparse())
        with pytest.raises(tk.UsageError):
            sending.ext_hook(115, memoryview(msgspec.msgpack.encode(["x", 1, 0])))
        with pytest.raises(tk.UsageError):
            taking.enc_hook(torch.ones(1))
        with pytest.raises(tk.UsageError, match="takes an Outbox or an Inbox"):
            tk.OutOfBand("unix:x")  # type: ignore[arg-type]
        assert taking.ext_hook(7, memoryview(b"x")) == msgspec.msgpack.Ext(7, b"x")
        for code, data in ((115, b"\xc1"), (115, b"\x93\x01\x01\x01"), (116, b"\xc1")):
            with pytest.raises(tk.ProtocolError):
                taking.ext_hook(code, memoryview(data))
        with pytest.raises(tk.MessageError), sending:
            outbox.put([sending.enc_hook(torch.ones(5000)), object()])
        assert outbox.stats.messages == 0
    with tk.Inbox(address, type=Own) as typed, pytest.raises(tk.UsageError, match="without a type"):
        tk.OutOfBand(typed)


def lonely(talk: Talk, where: Any) -> None:
    """Puts nothing and leaves in order."""
    reach(where).close()


def test_a_producer_that_puts_nothing_leaves_nothing(address: str) -> None:
    way = Way("shm", address)
    with way.inbox(producers=1) as inbox, Child(lonely, way.where(inbox)) as child:
        assert list(inbox) == []
        child.result()


def test_nothing_is_put_into_an_inbox_that_has_said_goodbye(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory takes a while to be given back, before it hangs up."""
    closing, go = threading.Event(), threading.Event()
    original = Imports.close

    def close(imports: Imports) -> None:
        closing.set()
        assert go.wait(20)
        original(imports)

    inbox = tk.Inbox(address, timeout=20)
    outbox = tk.Outbox(address, timeout=20)
    outbox.put("taken")
    assert inbox.get(5) == "taken"
    outbox.flush()
    monkeypatch.setattr(Imports, "close", close)
    ending = Call(inbox.close)
    assert closing.wait(20)
    with pytest.raises(tk.PeerClosedError):
        outbox.put("too late")
    assert outbox.unacknowledged == ()
    go.set()
    ending.result(20)
