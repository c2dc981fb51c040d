"""Edges of a mailbox's promises: odd values, interrupted calls, who is told what when it ends, hooks used twice."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest
import torch
from mailbox_ends import Way, address_in
from promptness import PROMPT

import transportkit as tk
from transportkit.deadline import Deadline
from transportkit.link import SocketLink

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


class Point(msgspec.Struct, frozen=True):
    """May be in a set; what it becomes without a type may not."""

    x: int


@pytest.fixture
def way(tmp_path: Path) -> Way:
    return Way("pickle", address_in(tmp_path))


# -- values -----------------------------------------------------------------------------------------------------------


def test_tuples_and_sets_in_subclasses_of_builtins_stay_what_they_are(way: Way) -> None:
    class Several(list[Any]):
        pass

    with way.both() as (inbox, outbox):
        outbox.put(Several([collections.OrderedDict(a=(1, {2})), collections.Counter(b=3)]))
        assert inbox.get() == [{"a": (1, {2})}, {"b": 3}]


def test_a_set_that_cannot_be_rebuilt_is_refused_as_a_message(way: Way) -> None:
    with way.both() as (inbox, outbox):
        outbox.put({"s": {Point(1)}})
        outbox.put("next")
        with pytest.raises(tk.MessageError, match="unhashable") as caught:
            inbox.get()
        assert (caught.value.producer, caught.value.number) == (outbox.identity, 1)
        assert inbox.get() == "next"
        assert inbox.stats.dropped == {"refused": 1}


def test_a_body_that_is_too_long_is_refused_before_anything_is_sent(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transportkit.mailbox.encoding.BODY_LIMIT", 1000)
    with way.both() as (inbox, outbox):
        with pytest.raises(tk.MessageError, match="where 1000 may be"):
            outbox.put(b"x" * 1000)
        assert outbox.put(b"x" * 900) == 1
        assert len(inbox.get()) == 900


# -- the end ----------------------------------------------------------------------------------------------------------


def test_no_room_on_the_link_is_said_so(way: Way) -> None:
    with way.both() as (_, outbox), pytest.raises(tk.DeadlineError, match="no room on the link within"):
        outbox.put("x" * 30_000_000, timeout=0.2)


def test_what_is_lost_when_a_block_fails_is_counted(way: Way) -> None:
    with way.inbox() as inbox:
        outbox = way.outbox(inbox)
        outbox.put(1)
        with pytest.raises(ZeroDivisionError), outbox:
            raise ZeroDivisionError
        assert outbox.unacknowledged == (1,)
        assert outbox.stats.lost == 1


def test_leaving_after_an_abort_is_no_matter_of_time(way: Way) -> None:
    with way.both() as (_, outbox):
        outbox.put(1)
        outbox.abort()
        with pytest.raises(tk.ClosedError, match="1 messages were put and not taken"):
            outbox.close()
        assert outbox.unacknowledged == (1,)


def test_a_seat_has_all_keywords_of_its_inbox() -> None:
    with tk.Inbox(inline=0) as inbox, inbox.outbox() as outbox:
        outbox.put([torch.ones(1)])
        inbox.get(timeout=20)
        assert outbox.stats.bytes_out_of_band == 4


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_was_forgotten_ends_however_busy_other_producers_are(tmp_path: Path) -> None:
    way = Way("shm", address_in(tmp_path))
    with way.both(slots=1) as (inbox, lender):
        busy = way.outbox(inbox)
        lender.put(torch.ones(10_000))
        mail = inbox.get(copy=False)
        assert mail.value.sum() == 10_000
        for number in range(60):
            busy.put(number)
        thread = threading.Thread(target=lender.put, args=(torch.ones(10_000),), kwargs={"timeout": 10})
        thread.start()
        time.sleep(0.1)  # it waits for its slot
        assert inbox.get(timeout=20) == 0  # looks at the lender, too, for the last time
        del mail  # without a word
        taken: list[Any] = []
        while thread.is_alive() and len(taken) < 50:
            taken.append(inbox.get(timeout=20))
            time.sleep(0.02)
        assert len(taken) < 50
        thread.join(10)
        with contextlib.suppress(tk.DeadlineError):  # it leaves what nobody took
            busy.close(timeout=0)


# -- interrupted calls ------------------------------------------------------------------------------------------------


def interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_a_get_that_is_interrupted_in_a_frame_ends_that_producer_only(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    with way.both() as (inbox, outbox):
        other = way.outbox(inbox)
        outbox.put(1)
        with monkeypatch.context() as patch:
            patch.setattr("transportkit.mailbox.producer.Incoming", interrupt)
            with pytest.raises(KeyboardInterrupt):
                inbox.get(timeout=20)
        other.put(2)
        assert inbox.get(timeout=20) == 2
        with pytest.raises(tk.PeerError, match="interrupted"):
            outbox.flush(5)
        assert inbox.stats.lost == 1
        other.flush(5)
        other.close()


@pytest.mark.parametrize(
    "step", ["transportkit.mailbox.inbox.Postmark", "transportkit.mailbox.producer.Producer.taken"]
)
def test_a_get_that_is_interrupted_beside_a_message_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with Way("shm", address_in(tmp_path)).both(inline=0) as (inbox, outbox):
        for number in range(3):
            outbox.put([torch.full((10,), number)] * 2)
        with monkeypatch.context() as patch:
            patch.setattr(step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                inbox.get(timeout=20)
        for number in range(3):
            assert [each.tolist() for each in inbox.get(timeout=20)] == [[number] * 10] * 2
        outbox.flush(5)


def test_a_frame_that_left_whole_is_not_taken_back_by_a_stray_byte() -> None:
    links = [SocketLink.over(sock, "pair", "the other") for sock in socket.socketpair()]
    try:
        links[0].hold(b"all")
        links[0].flush(Deadline(20, "room"))
        with pytest.raises(tk.ClosedError, match="interrupted"):
            links[0].withdraw(b"\xc2")
        assert links[1].recv(Deadline(20, "frame")) == b"all"
        with pytest.raises(tk.PeerLostError):
            links[1].recv(Deadline(20, "frame"))
    finally:
        for link in links:
            link.close()


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_bytes_that_are_decoded_twice_are_an_error_at_once(way: Way) -> None:
    with way.both() as (inbox, outbox):
        encoder = msgspec.msgpack.Encoder(enc_hook=tk.OutOfBand(outbox).enc_hook)
        taking = tk.OutOfBand(inbox)
        decoder = msgspec.msgpack.Decoder(ext_hook=taking.ext_hook)
        data = encoder.encode(torch.ones(10_000))
        assert decoder.decode(data).sum() == 10_000
        began = time.monotonic()
        with pytest.raises(tk.MessageError, match="fetched or dropped already"):
            decoder.decode(data)
        assert time.monotonic() - began < PROMPT  # its timeout is 20
        taking.drop(outbox.identity, 1)
        assert not taking._dropped  # nothing is remembered of what is past


def test_tensors_go_inline_for_as_long_as_the_inbox_is_gone(way: Way) -> None:
    with way.both() as (inbox, outbox):
        sending = tk.OutOfBand(outbox)
        encoder = msgspec.msgpack.Encoder(enc_hook=sending.enc_hook)
        inbox.close()
        for _ in range(3):
            assert len(encoder.encode(torch.ones(10_000))) > 40_000
        assert sending.stats.inline_fallbacks == 3
    with way.inbox() as inbox:
        outbox = way.outbox(inbox)
        sending = tk.OutOfBand(outbox)
        outbox.close()
        with pytest.raises(tk.ClosedError):
            msgspec.msgpack.encode(torch.ones(10_000), enc_hook=sending.enc_hook)
