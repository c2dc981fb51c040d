"""Frames that were begun on a link: what finds no room is kept where it lies, in order, and written by `push`.

And what a link holds when it is lost and closed.
"""

from __future__ import annotations

import gc
import select
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from transportkit.deadline import Deadline
from transportkit.errors import ClosedError, DeadlineError, PeerLostError
from transportkit.link import SocketLink, pair_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 3_000_000


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, "frame")


@pytest.fixture
def ends() -> Iterator[tuple[SocketLink, SocketLink]]:
    one, two = (SocketLink.over(sock) for sock in pair_sockets())
    yield one, two
    one.close()
    two.close()


def push_all(link: SocketLink) -> None:
    events = 0
    while link.backlog:
        link.push(events)
        poller = select.poll()
        poller.register(link.fileno(), link.push_events())
        events = sum(event for _, event in poller.poll(100))


def test_what_is_begun_goes_in_order_before_what_is_sent(ends: tuple[SocketLink, SocketLink]) -> None:
    one, two = ends
    payload = bytearray(b"a" * LONG)
    one.begin(b"head", soon())
    one.begin_payload([b"", memoryview(payload), b"tail"], soon())
    one.begin(b"next", soon())
    assert 0 < one.backlog < LONG + 100
    assert not one.try_send(b"skipped")
    payload[-1:] = b"z"  # it lies where it lay: nothing was copied
    sending = threading.Thread(target=one.send, args=(b"last", soon()))
    sending.start()
    assert two.recv(soon()) == b"head"
    assert two.recv_payload(LONG + 4, soon()) == b"a" * (LONG - 1) + b"ztail"
    assert [two.recv(soon()), two.recv(soon())] == [b"next", b"last"]
    sending.join(10)
    assert one.backlog == 0


def test_push_never_waits_and_reads_what_the_other_side_has_begun(ends: tuple[SocketLink, SocketLink]) -> None:
    one, two = ends
    for link in ends:
        link.begin_payload([bytes(LONG)], soon())
    before = one.backlog
    one.push(0)
    assert one.backlog == before
    taking = threading.Thread(target=two.recv_payload, args=(LONG, soon()))
    taking.start()
    push_all(one)
    taking.join(10)
    assert one.backlog == 0
    taking = threading.Thread(target=one.recv_payload, args=(LONG, soon()))
    taking.start()
    push_all(two)
    taking.join(10)
    assert two.backlog == 0


def test_one_that_reads_nothing_costs_a_deadline_and_the_frame_stays_whole(ends: tuple[SocketLink, SocketLink]) -> None:
    one, two = ends
    one.begin_payload([bytes(LONG)], soon())
    with pytest.raises(DeadlineError):
        one.send(b"after", soon(0.05))
    taking = threading.Thread(target=two.recv_payload, args=(LONG, soon()))
    taking.start()
    push_all(one)
    taking.join(10)
    one.send(b"again", soon())
    assert two.recv(soon()) == b"again"


def test_a_loss_ends_what_was_begun(ends: tuple[SocketLink, SocketLink]) -> None:
    one, two = ends
    one.begin_payload([bytes(LONG)], soon())
    two.close()
    with pytest.raises(PeerLostError):
        push_all(one)
    assert one.backlog == 0
    one.close()
    with pytest.raises(ClosedError):
        one.begin(b"late", soon())


def test_a_closed_link_holds_nothing_that_was_in_use_when_it_was_lost(ends: tuple[SocketLink, SocketLink]) -> None:
    one, two = ends
    held = {"something"}  # in whose stead a chunk's memory may be
    seen = weakref.ref(held)

    def lose(held: set[str]) -> None:
        one.send(b"never read", soon())
        two.close()
        with pytest.raises(PeerLostError) as caught:
            one.poll()
        assert isinstance(caught.value.__cause__, ConnectionResetError)

    lose(held)
    del held
    one.close()
    gc.collect()
    assert seen() is None
