"""Ends of a mailbox that send what they may not, after an honest handshake: each costs only itself, and no memory."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from mailbox_ends import Way, address_in
from session_ends import caught

import transportkit as tk
from transportkit import wire
from transportkit.chunk import digest
from transportkit.deadline import Deadline
from transportkit.dial import dial
from transportkit.lifecycle import memory_of
from transportkit.mailbox.calling import call
from transportkit.mailbox.counts import OutboxCounts
from transportkit.mailbox.marks import REF, Kind, Ref
from transportkit.mailbox.settings import settings
from transportkit.registry import choose
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transportkit.mailbox.posting import Posting

pytestmark = pytest.mark.timeout(60)

SIZES: dict[str, Any] = {"chunk_bytes": 4096, "slots": 2, "timeout": 2}
EMPTY_BODY = msgspec.msgpack.encode(None)


@contextlib.contextmanager
def producer(way: Way) -> Iterator[Posting]:
    """A producer in the hands of a test, agreed with in order."""
    wanted = settings(SIZES | {"backends": [way.backend]})
    choice = choose(read_site("unix"), [way.backend])
    link = dial(way.address, authkey=None, timeout=20)
    posting = call(link, wanted, choice, wire.Mailbox(8, "hostile"), {}, OutboxCounts(), 20.0)
    try:
        yield posting
    finally:
        posting.close()


@pytest.fixture(params=["shm", "pickle"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return Way(request.param, address_in(tmp_path))


def body_of(*refs: tuple[int, tuple[int, ...]]) -> bytes:
    """The body of a list of uint8 tensors that are said to be out of band."""
    marks = [msgspec.msgpack.Ext(REF, msgspec.msgpack.encode(Ref(i, "uint8", s, Kind.TENSOR))) for i, s in refs]
    return msgspec.msgpack.encode(marks)


def letter(posting: Posting, **changes: Any) -> wire.Letter:
    """A letter with one tensor of 100 bytes in the first slot, and what is changed of it."""
    header = {name: changes.pop(name) for name in list(changes) if name in wire.Chunk.__struct_fields__}
    slot = posting.lane.slots[0]
    slot[:100] = 7
    chunk = wire.Chunk(
        1,
        0,
        0,
        True,
        100,
        digest(memory_of(slot[:100])),
        posting.lane.exporter.locate(0, 0),
        (wire.Piece(0, 0, 100, 0),),
    )
    whole = wire.Letter(1, body_of((0, (100,))), (100,), 0, 1, msgspec.structs.replace(chunk, **header))
    return msgspec.structs.replace(whole, **changes)


def say(*messages: Any) -> Callable[[Posting], None]:
    def deed(posting: Posting) -> None:
        for message in messages:
            message = message(posting) if callable(message) else message
            posting.link.try_send(message if isinstance(message, bytes) else wire.encode(message))

    return deed


def raw(data: bytes) -> Callable[[Posting], None]:
    return lambda posting: posting.link._sock.send(data) and None


def piece(*numbers: int) -> tuple[wire.Piece, ...]:
    return (wire.Piece(*numbers),)


#: What ends a producer: nothing that it says can be believed after it.
BREACHES: dict[str, Callable[[Posting], None]] = {
    "number 0": say(wire.Letter(0, EMPTY_BODY)),
    "number 2 first": say(wire.Letter(2, EMPTY_BODY)),
    "a number twice": say(wire.Letter(1, EMPTY_BODY), wire.Letter(1, EMPTY_BODY)),
    "a letter in a letter": say(wire.Letter(1, EMPTY_BODY, fragments=1), wire.Letter(2, EMPTY_BODY)),
    "a fragment of nothing": say(wire.Fragment(1, b"")),
    "a fragment of another": say(wire.Letter(1, EMPTY_BODY, fragments=1), wire.Fragment(2, b"")),
    "more fragments": say(wire.Letter(1, EMPTY_BODY, (10,), 0, 1), wire.Fragment(1, b"")),
    "chunks without tensors": say(wire.Letter(1, EMPTY_BODY, chunks=1)),
    "tensors without chunks": say(wire.Letter(1, EMPTY_BODY, (10,))),
    "tensors larger than their chunks": say(wire.Letter(1, EMPTY_BODY, (1 << 62,), 0, 1)),
    "sizes beyond 64 bits": say(wire.Letter(1, EMPTY_BODY, (1 << 62,) * 8, 0, 1 << 62)),
    "a withdrawal of nothing": say(wire.Withdrawn(1)),
    "moved nothing": say(wire.Moved(1, 0)),
    "an enclosure of nothing": say(lambda posting: wire.Enclosure(1, letter(posting).header)),
    "a header of another message": say(lambda posting: letter(posting, update=2)),
    "a header of chunk 1": say(lambda posting: letter(posting, seq=1)),
    "a header for another": say(lambda posting: letter(posting, receiver=1)),
    "a header that is not the last": say(lambda posting: letter(posting, last=False)),
    "a header without pieces": say(lambda posting: letter(posting, pieces=None)),
    "a header with specs": say(lambda posting: letter(posting, specs=(wire.TensorSpec("a", "uint8", (1,)),))),
    "a piece of no tensor": say(lambda posting: letter(posting, pieces=piece(1, 0, 100, 0))),
    "a piece too short": say(lambda posting: letter(posting, pieces=piece(0, 0, 99, 0), nbytes=99)),
    "a piece too long": say(lambda posting: letter(posting, pieces=piece(0, 0, 101, 0), nbytes=101)),
    "a piece from its middle": say(lambda posting: letter(posting, pieces=piece(0, 1, 99, 0), nbytes=99)),
    "a piece misaligned": say(lambda posting: letter(posting, pieces=piece(0, 0, 100, 1), nbytes=101)),
    "a piece at a negative offset": say(lambda posting: letter(posting, pieces=piece(0, 0, 100, -64), nbytes=36)),
    "a chunk larger than agreed": say(lambda posting: letter(posting, sizes=(5000,), chunks=2, nbytes=5000)),
    "a chunk of minus one byte": say(lambda posting: letter(posting, nbytes=-1)),
    "an update's message": say(wire.Begin(1, 1)),
    "a hello": say(lambda posting: posting._peer.hello),
    "an inbox's word": say(wire.Taken(1)),
    "no message": say(b"\xc1"),
    "an empty frame": say(b""),
    "an unknown tag": say(msgspec.msgpack.encode({"type": "parcel"})),
    "an array of 2**32-1": say(b"\xdd\xff\xff\xff\xff"),
    "deep nesting": say(b"\x91" * 100_000),
    "a frame of 2**40 bytes": raw(b"\x00" + (1 << 40).to_bytes(8, "big")),
    "a frame of an unknown kind": raw(b"\x07" + (1).to_bytes(8, "big") + b"x"),
    "a payload that nobody asked for": raw(b"\x01" + (4).to_bytes(8, "big") + b"xxxx"),
    "half a frame, and gone": lambda posting: (raw(b"\x00" + (10).to_bytes(8, "big") + b"x")(posting), posting.close())[
        0
    ],
}

#: What costs one message: the rest of what it says is sound.
SPOILT: dict[str, tuple[Callable[[Posting], None], str]] = {
    "no body": (say(wire.Letter(1, b"")), "corrupt"),
    "half a body": (say(wire.Letter(1, b"\x92\x01")), "corrupt"),
    "a deep body": (say(wire.Letter(1, b"\x91" * 60_000)), "corrupt"),
    "a tensor that did not come": (say(wire.Letter(1, body_of((0, (1,))))), "corrupt"),
}
SPOILT_SHM: dict[str, tuple[Callable[[Posting], None], str]] = {
    "a digest of other bytes": (say(lambda posting: letter(posting, digest=1)), "corrupt"),
    "a tensor of another size": (say(lambda posting: letter(posting, body=body_of((0, (99,))))), "corrupt"),
    "a tensor twice": (say(lambda posting: letter(posting, body=body_of((0, (100,)), (0, (100,))))), "refused"),
    "a tensor of index 1": (say(lambda posting: letter(posting, body=body_of((1, (100,))))), "corrupt"),
    "a tensor of huge shape": (say(lambda posting: letter(posting, body=body_of((0, (1 << 40, 1 << 40))))), "corrupt"),
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("backend", "breach"),
    [("shm", breach) for breach in BREACHES]
    + [("pickle", breach) for breach in BREACHES if "header" in breach or "moved" in breach or "payload" in breach],
)
def test_a_producer_that_breaks_the_protocol_costs_only_itself(tmp_path: Path, backend: str, breach: str) -> None:
    way, before = Way(backend, address_in(tmp_path)), peak()
    with way.inbox(**SIZES) as inbox, way.outbox(inbox, **SIZES) as honest, producer(way) as posting:
        BREACHES[breach](posting)
        honest.put("honest")
        began = time.monotonic()
        taken = []
        while inbox.stats.lost == 0 and time.monotonic() < began + 5:
            with contextlib.suppress(tk.DeadlineError):
                taken.append(inbox.get(timeout=0.01))
        assert time.monotonic() < began + 2
        honest.put("still")
        while "still" not in taken:
            taken.append(inbox.get(timeout=20))
        assert [each for each in taken if each is not None] == ["honest", "still"]
        assert list(inbox.producers) == [honest.identity]
        assert inbox.stats.slots_in_use == 0
    assert peak() - before < 64 << 10  # KiB


def test_a_producer_that_breaks_the_protocol_is_told(way: Way) -> None:
    with way.inbox(**SIZES) as inbox, producer(way) as posting:
        posting.link.try_send(wire.encode(wire.Letter(7, EMPTY_BODY)))
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.2)
        error, _ = caught(posting.take_in)
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "ProtocolError"
        assert "began message 7 where message 1 was due" in error.text


@pytest.mark.parametrize("what", [*SPOILT, *SPOILT_SHM])
def test_a_message_that_makes_no_sense_costs_only_itself(tmp_path: Path, what: str) -> None:
    way = Way("shm", address_in(tmp_path))
    deed, reason = (SPOILT | SPOILT_SHM)[what]
    with way.inbox(**SIZES) as inbox, producer(way) as posting:
        deed(posting)
        with pytest.raises(
            (tk.ProtocolError, tk.MessageError), match=r"^message 1 of producer hostile .* is dropped: "
        ):
            inbox.get(timeout=20)
        assert inbox.stats.dropped == {reason: 1}
        posting.link.try_send(wire.encode(wire.Letter(2, EMPTY_BODY)))
        assert inbox.get(timeout=20) is None
        assert inbox.stats.slots_in_use == 0


def test_claims_take_no_memory(tmp_path: Path) -> None:
    way = Way("shm", address_in(tmp_path))
    with way.inbox(**SIZES) as inbox, producer(way) as posting:
        before = peak()
        claim = wire.Letter(1, EMPTY_BODY, (1 << 40,) * 50_000, 1 << 20, 50_000 << 28)
        posting.link.hold(wire.encode(claim))
        for _ in range(10):
            with pytest.raises(tk.DeadlineError):
                inbox.get(timeout=0.02)
            posting.link._flush()
        posting.link.try_send(wire.encode(wire.Fragment(1, b"x")))
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.1)
        assert inbox.stats.lost == 0
        assert peak() - before < 64 << 10


HELLOS: dict[str, dict[str, Any]] = {
    "a receiver": {"role": "receiver"},
    "a session's sender": {"intent": "transfer", "mailbox": None},
    "no mailbox": {"mailbox": None},
    "no identity": {"mailbox": wire.Mailbox(1)},
}


@pytest.mark.parametrize("what", HELLOS)
def test_hellos_that_do_not_fit_are_refused(way: Way, what: str) -> None:
    wanted = settings(SIZES | {"backends": [way.backend]})
    greeting = wanted.hello("sender", choose(read_site("unix"), [way.backend]), "unix", wire.Mailbox(1, "x"))
    with way.inbox(**SIZES) as inbox, dial(way.address, authkey=None, timeout=20) as link:
        link.try_send(wire.encode(msgspec.structs.replace(greeting, **HELLOS[what])))
        answer = wire.decode(link.recv(Deadline(20, "answer")))
        assert isinstance(answer, wire.Refusal)
        assert "an Inbox listens here" in answer.text
        assert inbox.stats.failures == 1


@pytest.mark.parametrize(
    "data",
    [
        {"capacity": 0, "producer": "x"},
        {"capacity": 1, "producer": "x" * 65},
        {"capacity": 1, "producer": "x", "first": 0},
        {"capacity": "1", "producer": "x"},
    ],
    ids=str,
)
def test_mailboxes_out_of_bounds_are_refused(way: Way, data: dict[str, Any]) -> None:
    wanted = settings(SIZES | {"backends": [way.backend]})
    greeting = wanted.hello("sender", choose(read_site("unix"), [way.backend]), "unix", wire.Mailbox(1, "x"))
    tree = msgspec.msgpack.decode(wire.encode(greeting))
    tree["mailbox"] = data
    with way.inbox(**SIZES) as inbox, dial(way.address, authkey=None, timeout=20) as link:
        link.try_send(msgspec.msgpack.encode(tree))
        answer = wire.decode(link.recv(Deadline(20, "answer")))
        assert isinstance(answer, wire.Refusal)
        assert answer.code == "ProtocolError"
        assert inbox.stats.failures == 1


#: What an inbox may not say.
WORDS: dict[str, Any] = {
    "taken what was not put": wire.Taken(99),
    "taken twice": [wire.Taken(1), wire.Taken(1)],
    "an ack of nothing": wire.Ack(1, 0, 5),
    "taken with chunks of nothing": wire.Taken(1, (5,)),
    "a letter": wire.Letter(1, EMPTY_BODY),
    "no message": b"\xc1",
    "an update's message": wire.Ready(),
}


@pytest.mark.parametrize("what", WORDS)
def test_an_inbox_that_breaks_the_protocol_is_left(way: Way, what: str) -> None:
    with way.inbox(**SIZES) as inbox:
        outbox = way.outbox(inbox, **SIZES)
        outbox.put("one")
        assert inbox.poll(5)
        (theirs,) = inbox._intake.producers
        words = WORDS[what] if isinstance(WORDS[what], list) else [WORDS[what]]
        for word in words:
            assert theirs.link.try_send(word if isinstance(word, bytes) else wire.encode(word))
        error, _ = caught(outbox.put, "two", timeout=20)
        assert isinstance(error, tk.ProtocolError)
        assert isinstance(caught(outbox.put, "three")[0], tk.ClosedError)
        outbox.close()


def test_a_stale_go_is_passed_over(tmp_path: Path) -> None:
    """A message that was withdrawn while the inbox said that it reads it; the next one is right."""
    way = Way("pickle", address_in(tmp_path))
    with way.both({"capacity": 8, "chunk_bytes": 1 << 20}, inline=0) as (inbox, outbox):
        with pytest.raises(tk.DeadlineError, match="no reader"):
            outbox.put(torch.ones(50_000), timeout=0.1)
        (theirs,) = [*inbox._intake.producers]
        theirs.link.try_send(wire.encode(wire.Go(1, 0)))
        with pytest.raises(tk.DeadlineError):
            inbox.get(timeout=0.1)
        assert inbox.stats.dropped == {"withdrawn": 1}
        assert outbox.put("next") == 2
        assert inbox.get(timeout=20) == "next"
        assert outbox.stats.withdrawn == 1
        assert outbox.stats.slots_in_use == 0


def test_descriptors_do_not_grow_with_strangers(way: Way) -> None:
    with way.inbox(**SIZES) as inbox:
        for _ in range(3):
            with producer(way):
                inbox.poll(0.2)
        assert wait_until(lambda: inbox.poll() or inbox.producers == {})
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with producer(way):
                inbox.poll(0.2)
            assert wait_until(lambda: inbox.poll() or inbox.producers == {})
        assert len(os.listdir("/proc/self/fd")) <= before


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
