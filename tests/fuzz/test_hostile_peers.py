"""Peers that say what they may not: the other side raises its own error within its deadline, and tells the peer."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hostile_ends import (
    BODY,
    PIECES,
    SPECS,
    TENSORS,
    TIMEOUT,
    Flat,
    Hostile,
    HostileReceiver,
    HostileSender,
    Meeting,
    greeting,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promptness import PROMPT

import transportkit as tk
from transportkit import wire
from transportkit.backends.pickle import PickleTransport
from transportkit.chunk import digest
from transportkit.handshake import Outcome, negotiate
from transportkit.manifest import manifest_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    """Imports and first uses are not what these tests time."""
    for kind in (HostileReceiver, HostileSender):
        Meeting(kind(None, lambda _: None))


def test_the_hostile_peers_are_honest_until_they_are_told() -> None:
    for kind in (HostileReceiver, HostileSender):
        meeting = Meeting(kind(None, lambda _: None))
        assert meeting.error is None
        assert meeting.hostile.error is None or isinstance(meeting.hostile.error, OSError)  # its goodbye came too late
    assert {name: t.tolist() for name, t in meeting.target.items()} == {name: t.tolist() for name, t in TENSORS.items()}


def check(meeting: Meeting, *, limit: float = PROMPT) -> None:
    """Whatever came, it ended in time and with an error of ours, or it was harmless."""
    assert meeting.error is None or isinstance(meeting.error, tk.TransportKitError), repr(meeting.error)
    assert meeting.seconds < limit
    assert not isinstance(meeting.hostile.error, AssertionError)


def proposal(attempt: int) -> wire.Proposal:
    hellos = greeting("sender"), {0: greeting("receiver")}
    outcome = negotiate(*hellos, {"pickle": PickleTransport}, session="5e55", token=bytes(32))
    assert isinstance(outcome, Outcome)
    return wire.Proposal(attempt, outcome.lanes[0].importers[0], outcome.agreement)


# -- the wrong message, at every step ---------------------------------------------------------------------------------

ZOO: dict[str, Callable[[], Any]] = {
    "hello of a receiver": lambda: greeting("receiver"),
    "hello of a sender": lambda: greeting("sender"),
    "hello that inspects": lambda: greeting("receiver", intent="inspect"),
    "refusal": lambda: wire.Refusal("Nonsense", "said the peer"),
    "joined": lambda: wire.Joined(1, 0),
    "joined of the past": lambda: wire.Joined(0, 0),
    "joined of the future": lambda: wire.Joined(7, 0),
    "declined": lambda: wire.Declined(1, 0, "pickle", "said the peer"),
    "declined another backend": lambda: wire.Declined(1, 5, "nothing", ""),
    "connect": lambda: wire.Connect(1, 0),
    "signal": lambda: wire.Signal(1, 0, wire.raw("x")),
    "signal of the past": lambda: wire.Signal(0, 0, wire.raw("x")),
    "signal of the future": lambda: wire.Signal(7, 0, wire.raw("x")),
    "signal of another": lambda: wire.Signal(1, 5, wire.raw("x")),
    "signal that is too long": lambda: wire.Signal(1, 0, wire.raw("x" * wire.SIGNAL_LIMIT)),
    "proof": lambda: wire.Proof(1, 0, b"x" * 16),
    "proof of nothing": lambda: wire.Proof(1, 0, b""),
    "agreed": lambda: wire.Agreed(wire.Agreement("s", "me", ())),
    "inspected": lambda: wire.Inspected(None, "said the peer"),
    "ready": wire.Ready,
    "not ready": lambda: wire.Ready(waits=False),
    "begin": lambda: wire.Begin(1, 1),
    "begin of the past": lambda: wire.Begin(-1, -1),
    "present": lambda: wire.Present(1, 0),
    "present elsewhere": lambda: wire.Present(2, 7),
    "manifest": lambda: wire.Manifest(1, manifest_id(SPECS), SPECS, 32),
    "manifest of the future": lambda: wire.Manifest(2, manifest_id(SPECS), SPECS, 32),
    "manifest that is known": lambda: wire.Manifest(1, "", None, 32, known_plan=True),
    "accept": lambda: wire.Accept(1, 0),
    "chunk": lambda: wire.Chunk(1, 0, 0, True, len(BODY), digest(BODY), wire.Location(), PIECES),
    "chunk of the trial": lambda: wire.Chunk(-1, 0, 0, True, 16, 0, wire.Location(), ()),
    "ack": lambda: wire.Ack(1, 0, 0),
    "ack of the trial": lambda: wire.Ack(-1, 0, 0),
    "ack for another": lambda: wire.Ack(1, 1, 0),
    "ack of the future": lambda: wire.Ack(1, 0, 9),
    "commit": lambda: wire.Commit(1, 1, 32, 2, manifest_id(SPECS)),
    "applied": lambda: wire.Applied(1, 0, 1, 32),
    "applied less": lambda: wire.Applied(1, 0, 0, 0),
    "failed": lambda: wire.Failed(1, 0, "Nonsense", "said the peer", True),
    "failed of the future": lambda: wire.Failed(9, 0, "Nonsense", "said the peer"),
    "aborted": lambda: wire.Aborted(1, "Nonsense", "said the peer"),
    "aborted and withdrawn": lambda: wire.Aborted(1, "Nonsense", "said the peer", True),
    "reroute": lambda: wire.Reroute(1),
    "reroute of the past": lambda: wire.Reroute(0),
    "reroute of the future": lambda: wire.Reroute(9),
    "stranded": lambda: wire.Stranded(1, 0, 0, "said the peer"),
    "stranded before the first": lambda: wire.Stranded(1, 0, -5, "said the peer"),
    "stranded beyond the last": lambda: wire.Stranded(1, 0, 2**62),
    "stranded in the past": lambda: wire.Stranded(0, 0, 0, "said the peer"),
    "stranded as another": lambda: wire.Stranded(1, 7, 0, "said the peer"),
    "another proposal": lambda: proposal(2),
    "the same proposal": lambda: proposal(1),
    "waiting": wire.Waiting,
    "bye": wire.Bye,
    "bye with a reason": lambda: wire.Bye("Nonsense", "said the peer"),
    "no type": lambda: {"update": 1},
    "unknown type": lambda: {"type": "nonsense"},
    "type of another kind": lambda: {"type": 7},
    "not a map": lambda: [1, 2, 3],
    "nil": lambda: None,
    "wrong field": lambda: {"type": "ack", "update": "1", "receiver": 0, "seq": 0},
    "missing field": lambda: {"type": "ack", "update": 1},
    "bool for a number": lambda: {"type": "ack", "update": True, "receiver": 0, "seq": 0},
    "huge number": lambda: {"type": "ack", "update": 2**64 - 1, "receiver": 0, "seq": 0},
}


@pytest.mark.parametrize("step", HostileReceiver.steps)
def test_a_receiver_that_says_the_wrong_thing(step: str) -> None:
    for name, make in ZOO.items():
        meeting = Meeting(HostileReceiver(step, lambda peer, make=make: peer.say(make())))
        try:
            check(meeting)
            harmless = step in ("applied", "again") or (step, name) == ("ack", "applied")  # its slot stays withheld
            assert harmless or meeting.error is not None
        except AssertionError as error:
            error.add_note(f"after {name!r}: {meeting.error!r} in {meeting.seconds:.2f} s")
            raise


@pytest.mark.parametrize("step", HostileSender.steps)
def test_a_sender_that_says_the_wrong_thing(step: str) -> None:
    for name, make in ZOO.items():
        meeting = Meeting(HostileSender(step, lambda peer, make=make: peer.say(make())))
        try:
            check(meeting)
            if step not in ("commit", "again"):
                assert meeting.error is not None
                assert meeting.version is None
            if step not in ("payload", "commit", "again"):
                assert meeting.untouched
        except AssertionError as error:
            error.add_note(f"after {name!r}: {meeting.error!r} in {meeting.seconds:.2f} s")
            raise


# -- frames that are none ---------------------------------------------------------------------------------------------


def nested(depth: int = 100_000) -> bytes:
    return b"\x91" * depth + b"\xc0"


FRAMES: dict[str, Callable[[Hostile], object]] = {
    "garbage": lambda peer: peer.raw(b"\xff" * 100),
    "empty": lambda peer: peer.raw(b""),
    "text": lambda peer: peer.sock.send(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"),
    "deep": lambda peer: peer.raw(nested()),
    "deep in a field": lambda peer: peer.raw(b"\x82\xa4type\xa3bye\xa4more" + nested()),
    "4 GiB": lambda peer: peer.raw(b"", length=1 << 32),
    "16 EiB": lambda peer: peer.raw(b"x" * 100, length=(1 << 64) - 1),
    "array of 2^32": lambda peer: peer.raw(b"\xdd\xff\xff\xff\xff"),
    "map of 2^32": lambda peer: peer.raw(b"\xdf\xff\xff\xff\xff"),
    "bytes of 2^32": lambda peer: peer.raw(b"\xc6\xff\xff\xff\xff"),
    "names of 2^32": lambda peer: peer.raw(b"\x82\xa4type\xa5hello\xa6dtypes\xdd\xff\xff\xff\xff"),
    "payload": lambda peer: peer.raw(b"x" * 10, kind=1),
    "kind 7": lambda peer: peer.raw(b"x", kind=7),
    "half a head": lambda peer: peer.sock.send(b"\x00\x00\x00"),
    "half a frame": lambda peer: peer.raw(b"x" * 10, length=100),
    "a pickle": lambda peer: peer.raw(pickle.dumps(print)),
    "nothing": lambda peer: None,
}


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (HostileReceiver, "hello"),
        (HostileReceiver, "joined"),
        (HostileReceiver, "ready"),
        (HostileReceiver, "ack"),
        (HostileSender, "hello"),
        (HostileSender, "connect"),
        (HostileSender, "begin"),
        (HostileSender, "chunk"),
        (HostileSender, "payload"),
    ],
)
def test_frames_that_are_none(kind: type[Hostile], step: str) -> None:
    for name, deed in FRAMES.items():
        with Flat() as flat:
            meeting = Meeting(kind(step, deed))
        try:
            check(meeting)
            assert meeting.error is not None
            assert flat.peak < 4 << 20
        except AssertionError as error:
            error.add_note(f"after {name!r}: {meeting.error!r} in {meeting.seconds:.2f} s, {flat.peak} bytes")
            raise


SILENCES = [
    (HostileReceiver, "joined", "nothing"),
    (HostileReceiver, "joined", "waiting"),
    (HostileReceiver, "proof", "nothing"),
    (HostileReceiver, "present", "half a frame"),
    (HostileReceiver, "present", "waiting"),
    (HostileReceiver, "ack", "waiting"),
    (HostileReceiver, "applied", "nothing"),
    # A sender that says that it waits for others is waited for.
    (HostileSender, "connect", "nothing"),
    (HostileSender, "manifest", "half a frame"),
    (HostileSender, "payload", "nothing"),
    (HostileSender, "commit", "nothing"),
]


def test_a_peer_that_says_nothing_more() -> None:
    with ThreadPoolExecutor(len(SILENCES)) as pool:
        outcomes = list(pool.map(lambda silence: silent(*silence), SILENCES))
    for silence, meeting in zip(SILENCES, outcomes, strict=True):
        assert isinstance(meeting.error, tk.DeadlineError), f"{silence}: {meeting.error!r}"
        assert TIMEOUT * 0.45 < meeting.seconds < TIMEOUT + PROMPT, silence  # a trial may take half of the timeout


def silent(kind: type[Hostile], step: str, deed: str) -> Meeting:
    def act(peer: Hostile) -> None:
        if deed != "waiting":
            FRAMES[deed](peer)
            time.sleep(2 * TIMEOUT)
            return
        end = time.monotonic() + 2 * TIMEOUT
        while time.monotonic() < end:
            peer.say(wire.Waiting())
            time.sleep(0.01)

    return Meeting(kind(step, act))


def test_a_flood_of_messages_keeps_nobody_from_the_deadline() -> None:
    def flood(peer: Hostile) -> None:
        frame = wire.encode(wire.Waiting())
        block = (b"\x00" + len(frame).to_bytes(8, "big") + frame) * 2000
        peer.sock.settimeout(2 * TIMEOUT)
        end = time.monotonic() + 2 * TIMEOUT
        try:
            while time.monotonic() < end:
                peer.sock.sendall(block)
        except OSError:
            pass
        finally:
            peer.sock.setblocking(False)

    for step in ("joined", "present", "ack"):
        with Flat() as flat:
            meeting = Meeting(HostileReceiver(step, flood))
        assert isinstance(meeting.error, tk.TransportKitError)
        assert meeting.seconds < 2 * TIMEOUT + PROMPT
        assert flat.peak < 8 << 20


DRIPS: dict[str, tuple[str, Callable[[], wire.Message]]] = {
    "ready": ("ack", wire.Ready),
    "ready before it accepts": ("accept", wire.Ready),
    "present": ("ack", lambda: wire.Present(1, 0)),
    "present in an earlier update": ("ack", lambda: wire.Present(0, 0)),
    "accept": ("applied", lambda: wire.Accept(1, 0)),
    "applied an earlier update": ("applied", lambda: wire.Applied(0, 0, 1, 1)),
}


def drip(name: str) -> Meeting:
    step, make = DRIPS[name]

    def deed(peer: Hostile) -> None:
        end = time.monotonic() + 3 * TIMEOUT
        with contextlib.suppress(tk.TransportKitError, OSError):
            while time.monotonic() < end:
                peer.say(make())
                time.sleep(TIMEOUT / 20)

    return Meeting(HostileReceiver(step, deed))


def test_what_is_no_progress_keeps_nobody_from_the_deadline() -> None:
    with ThreadPoolExecutor(len(DRIPS)) as pool:
        meetings = dict(zip(DRIPS, pool.map(drip, DRIPS), strict=True))
    for name, meeting in meetings.items():
        assert isinstance(meeting.error, tk.DeadlineError | tk.ProtocolError), name
        assert meeting.seconds < TIMEOUT + PROMPT, name


def test_a_receiver_that_declines_what_was_not_proposed() -> None:
    """Each would be worth another proposal."""

    def deed(peer: Hostile) -> None:
        peer.say(wire.Declined(1, 0, "invented-1", "no"))
        with contextlib.suppress(tk.TransportKitError):
            for attempt in range(2, 100):
                peer.say(wire.Declined(peer.hear(wire.Proposal).attempt, 0, f"invented-{attempt}", "no"))

    hostile = HostileReceiver("joined", deed)
    meeting = Meeting(hostile)
    assert isinstance(meeting.error, tk.ProtocolError)
    assert sum(isinstance(message, wire.Proposal) for message in hostile.got) == 1


def test_a_sender_that_announces_a_reroute_and_sends_chunks_for_ever() -> None:
    def deed(peer: Hostile) -> None:
        peer.say(wire.Reroute(1))
        end = time.monotonic() + 3 * TIMEOUT
        with contextlib.suppress(tk.TransportKitError, OSError):
            for seq in itertools.count():
                peer.say(wire.Chunk(1, 0, seq, False, len(BODY), digest(BODY), wire.Location(), PIECES))
                time.sleep(TIMEOUT / 20)
                if time.monotonic() > end:
                    break

    meeting = Meeting(HostileSender("chunk", deed))
    assert isinstance(meeting.error, tk.ProtocolError)
    assert meeting.seconds < TIMEOUT + PROMPT
    assert meeting.untouched


def test_a_peer_that_claims_a_tiny_timeout_makes_nobody_spin() -> None:
    for kind in (HostileReceiver, HostileSender):
        role: wire.Role = "receiver" if kind is HostileReceiver else "sender"

        def deed(peer: Hostile, role: wire.Role = role) -> None:
            peer.say(hello_fields(role, timeout=1e-12))
            time.sleep(TIMEOUT / 2)

        began = time.process_time()
        meeting = Meeting(kind("hello", deed))
        assert meeting.error is not None
        told = sum(isinstance(message, wire.Waiting) for message in meeting.hostile.got)
        assert told < 1 + 2 * TIMEOUT / 0.005
        assert time.process_time() - began < max(0.5, TIMEOUT / 2)


# -- hellos -----------------------------------------------------------------------------------------------------------


def hello_fields(role: wire.Role, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(wire.encode(greeting(role)))
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("kind", [HostileReceiver, HostileSender])
def test_another_major_version(kind: type[Hostile], newer: bool) -> None:
    """Both sides learn of both versions, whatever else that version's hello looks like."""
    role: wire.Role = "receiver" if kind is HostileReceiver else "sender"
    span = {"protocol_oldest": 2, "protocol_newest": 3} if newer else {"protocol_oldest": 0, "protocol_newest": 0}
    for fields in (hello_fields(role, **span), {"type": "hello", **span, "everything": "else is new"}):
        meeting = Meeting(kind("hello", lambda peer, fields=fields: peer.say(fields)))
        assert isinstance(meeting.error, tk.VersionError), repr(meeting.error)
        told = meeting.hostile.last_words()
        assert told
        for text in (str(meeting.error), told[-1].text):  # type: ignore[union-attr]
            assert ("2 to 3" if newer else "protocol 0") in text
            assert f"this side {wire.PROTOCOL_NEWEST}" in text
        assert meeting.seconds < PROMPT


@pytest.mark.parametrize("kind", [HostileReceiver, HostileSender])
@pytest.mark.parametrize(
    "changes",
    [
        {"site": ...},
        {"limits": ...},
        {"offers": ...},
        {"limits": {"chunk_bytes": 0, "slots": 1}},
        {"limits": {"chunk_bytes": -5, "slots": 1}},
        {"limits": {"chunk_bytes": "1", "slots": 1}},
        {"timeout": -1.0},
        {"timeout": "soon"},
        {"offers": [{"type": "gift", "backend": "pickle"}]},
        {"offers": 7},
        {"dtypes": {"a": 1}},
        {"wishes": {"backends": [1]}},
        {"protocol_oldest": "1"},
        {"protocol_newest": ...},
        {"intent": "conquer"},
    ],
    ids=str,
)
def test_a_malformed_hello_is_refused_on_both_sides(kind: type[Hostile], changes: dict[str, Any]) -> None:
    role: wire.Role = "receiver" if kind is HostileReceiver else "sender"
    meeting = Meeting(kind("hello", lambda peer: peer.say(hello_fields(role, **changes))))
    assert isinstance(meeting.error, tk.TransportKitError)
    assert meeting.seconds < PROMPT
    told = meeting.hostile.last_words()
    assert told
    if isinstance(meeting.error, tk.ProtocolError):
        assert "this side" in str(meeting.error)
        assert f"protocol {wire.PROTOCOL_NEWEST}" in str(meeting.error)


@pytest.mark.parametrize(
    "changes",
    [
        {"offers": [{"type": "offer", "backend": "shm", "params": "nonsense"}, {"type": "offer", "backend": "pickle"}]},
        {"offers": [{"type": "offer", "backend": "shm", "params": [1, 2]}, {"type": "offer", "backend": "pickle"}]},
        {"offers": [{"type": "offer", "backend": "x" * 1000}] * 500},
        {"offers": [{"type": "offer", "backend": "pickle"}] * 500},
        {"offers": []},
        {"limits": {"chunk_bytes": 1, "slots": 2**62}},
        {"limits": {"chunk_bytes": 2**64 - 1, "slots": 2**64 - 1}},
        {"wishes": {"backends": [], "device": "\x00:\x00"}},
        {"wishes": {"device": "mars:7"}},
        {"site": {}},
        {"site": {"pid": -1, "uid": 2**40, "boot_id": "x" * 10000, "namespaces": {"net": ""}}},
        {"dtypes": []},
        {"protocol_oldest": -(2**63), "protocol_newest": 2**63 - 1},
        {"future": {"deep": [1, {"er": None}]}},
    ],
    ids=lambda changes: str(changes)[:60],
)
@pytest.mark.parametrize("kind", [HostileReceiver, HostileSender])
def test_an_odd_hello_harms_nobody(kind: type[Hostile], changes: dict[str, Any]) -> None:
    role: wire.Role = "receiver" if kind is HostileReceiver else "sender"
    if kind is HostileSender:
        for name in ("offers", "limits"):
            if name in changes:
                pytest.skip("what a sender offers, it proposes itself")
    check(Meeting(kind("hello", lambda peer: peer.say(hello_fields(role, **changes)))))


# -- a sender that lies -----------------------------------------------------------------------------------------------


def spec(name: str, dtype: str, shape: tuple[int, ...], same_as: str | None = None) -> list[Any]:
    return [name, dtype, list(shape), same_as]


MANIFESTS: dict[str, list[Any]] = {
    "negative": [spec("a", "uint8", (-1,))],
    "negative twice": [spec("a", "uint8", (-4, -4))],
    "huge": [spec("a", "uint8", (2**62, 2**62))],
    "huge beside nothing": [spec("a", "float64", (2**62, 0, 2**62))],
    "huge in all": [spec("a", "uint8", (2**62,)), spec("b", "uint8", (2**62,)), spec("c", "uint8", (2**62,))],
    "beyond 64 bits": [spec("a", "uint8", (2**63,))],
    "many dimensions": [spec("a", "uint8", (1,) * 5000)],
    "twice": [spec("a", "uint8", (1,)), spec("a", "uint8", (1,))],
    "no name": [spec("", "uint8", (1,))],
    "same as itself": [spec("a", "uint8", (1,), "a")],
    "same as each other": [spec("a", "uint8", (1,), "b"), spec("b", "uint8", (1,), "a")],
    "same as a same": [spec("a", "uint8", (1,)), spec("b", "uint8", (1,), "a"), spec("c", "uint8", (1,), "b")],
    "same as nothing": [spec("a", "uint8", (1,), "z")],
    "same but larger": [spec("a", "uint8", (1,)), spec("b", "uint8", (9,), "a")],
    "unknown dtype": [spec("a", "float7", (1,))],
    "code for a dtype": [spec("a", "__class__", (1,))],
    "number for a name": [[7, "uint8", [1], None]],
    "cut short": [["a", "uint8"]],
    "text for a shape": [["a", "uint8", "16", None]],
    "fraction of a shape": [["a", "uint8", [1.5], None]],
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies(name: str, streamed: bool) -> None:
    entries = MANIFESTS[name]

    def deed(peer: Hostile) -> None:
        if streamed:
            fields = msgspec.msgpack.decode(wire.encode(ZOO["chunk"]()))
            peer.say(fields | {"specs": entries})
            peer.payload(BODY, 0)
        else:
            identity = manifest_id(entries)  # type: ignore[arg-type]
            peer.say({"type": "manifest", "update": 1, "manifest_id": identity, "specs": entries, "nbytes": 32})

    with Flat() as flat:
        meeting = Meeting(HostileSender("chunk" if streamed else "manifest", deed, streamed=streamed))
    check(meeting)
    assert isinstance(meeting.error, tk.ProtocolError | tk.TensorError), repr(meeting.error)
    assert meeting.untouched
    assert meeting.version is None
    assert meeting.hostile.last_words()
    assert flat.peak < 4 << 20


def test_a_manifest_with_another_digest() -> None:
    meeting = Meeting(HostileSender("manifest", lambda peer: peer.say(wire.Manifest(1, "0" * 32, SPECS, 32))))
    assert isinstance(meeting.error, tk.ProtocolError)
    assert meeting.untouched


def chunk(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(wire.encode(ZOO["chunk"]()))
    return fields | changes


CHUNKS: dict[str, dict[str, Any]] = {
    "another update": {"update": 2},
    "the trial again": {"update": -1},
    "another receiver": {"receiver": 1},
    "a later chunk": {"seq": 1},
    "a chunk before": {"seq": -1},
    "longer than agreed": {"nbytes": 5000},
    "longer than memory": {"nbytes": 2**62},
    "negative": {"nbytes": -80},
    "shorter than its pieces": {"nbytes": 16},
    "empty": {"nbytes": 0, "pieces": []},
    "wrong digest": {"digest": 1},
    "no pieces": {"pieces": None},
    "overlapping": {"pieces": [[0, 0, 16, 0], [1, 0, 16, 0]]},
    "backwards": {"pieces": [[1, 0, 16, 0], [0, 0, 16, 64]]},
    "twice": {"pieces": [[0, 0, 16, 0], [0, 0, 16, 64]]},
    "a hole": {"pieces": [[0, 0, 8, 0], [0, 9, 7, 64]]},
    "beyond the tensor": {"pieces": [[0, 0, 80, 0]]},
    "beyond the manifest": {"pieces": [[0, 0, 16, 0], [1, 0, 16, 64], [2, 0, 1, 128]], "nbytes": 129},
    "negative start": {"pieces": [[0, -16, 16, 0], [1, 0, 16, 64]]},
    "negative length": {"pieces": [[0, 0, -16, 0], [1, 0, 16, 64]]},
    "negative offset": {"pieces": [[0, 0, 16, -64], [1, 0, 16, 64]]},
    "misaligned": {"pieces": [[0, 0, 16, 0], [1, 0, 16, 32]], "nbytes": 48},
    "beyond the chunk": {"pieces": [[0, 0, 16, 0], [1, 0, 16, 2**40]], "nbytes": 2**40 + 16},
    "of no tensor": {"pieces": [[-1, 0, 16, 0], [1, 0, 16, 64]]},
    "a million pieces": {"pieces": [[0, 0, 0, 0]] * 100_000},
    "new tensors": {"specs": [spec("z", "uint8", (1,))]},
    "an export": {"location": {"export": 7, "offset": -1, "handle": "nonsense"}},
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_that_lies(name: str) -> None:
    def deed(peer: Hostile) -> None:
        peer.say(chunk(**CHUNKS[name]))
        peer.payload(BODY, 0)

    meeting = Meeting(HostileSender("chunk", deed))
    check(meeting)
    if name == "an export":
        return  # the backend pickle does not look at it
    assert isinstance(meeting.error, tk.ProtocolError), repr(meeting.error)
    assert meeting.untouched
    assert meeting.hostile.last_words()


def test_bytes_that_are_not_those_of_the_digest() -> None:
    def deed(peer: Hostile) -> None:
        peer.payload(BODY[:-1] + b"\xff", 0)

    meeting = Meeting(HostileSender("payload", deed))
    assert isinstance(meeting.error, tk.IntegrityError)
    assert meeting.untouched
    (failed,) = meeting.hostile.last_words()[:1]
    assert isinstance(failed, wire.Failed)
    assert failed.code == "IntegrityError"


COMMITS = {
    "more chunks": wire.Commit(1, 2, 32, 2, manifest_id(SPECS)),
    "fewer bytes": wire.Commit(1, 1, 31, 2, manifest_id(SPECS)),
    "more tensors": wire.Commit(1, 1, 32, 3, manifest_id(SPECS)),
    "another update": wire.Commit(2, 1, 32, 2, manifest_id(SPECS)),
}


@pytest.mark.parametrize("name", [*COMMITS, "too early", "another manifest"])
def test_a_commit_that_lies(name: str) -> None:
    if name == "too early":
        hostile = HostileSender("chunk", lambda peer: peer.say(wire.Commit(1, 0, 0, 2, manifest_id(SPECS))))
    elif name == "another manifest":
        hostile = HostileSender("commit", lambda peer: peer.say(wire.Commit(1, 1, 32, 2, "0" * 32)), streamed=True)
    else:
        hostile = HostileSender("commit", lambda peer: peer.say(COMMITS[name]))
    meeting = Meeting(hostile)
    check(meeting)
    assert isinstance(meeting.error, tk.ProtocolError)
    assert meeting.version is None
    assert meeting.error.torn == (() if name == "too early" else ("target",))
    assert meeting.hostile.last_words()


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch " + Boom.path,)

    path = ""


def test_a_pickle_that_runs_code(tmp_path: Any) -> None:
    Boom.path = str(tmp_path / "it ran").replace(" ", "_")
    for step in ("payload of the trial", "payload"):
        for stream in (
            pickle.dumps(Boom()),
            pickle.dumps((0, 16, Boom()), protocol=5),
            pickle.dumps(Boom(), protocol=0),
            b"cos\nsystem\n(S'touch " + Boom.path.encode() + b"'\ntR.",
            b"\x80\x05" + b"(" * 1000 + b".",
            b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
            b"",
        ):
            meeting = Meeting(HostileSender(step, lambda peer, stream=stream: peer.payload(BODY[:16], 0, stream)))
            check(meeting)
            assert isinstance(meeting.error, tk.TransportKitError)
            assert meeting.untouched
    assert list(tmp_path.iterdir()) == []


PROPOSALS: dict[str, dict[str, Any]] = {
    "chunks beyond the limit": {"chunk_bytes": 2**40},
    "no bytes": {"chunk_bytes": 0},
    "slots beyond the limit": {"slots": 2**40},
    "another backend": {"backend": "shm"},
    "no such backend": {"backend": "../../etc"},
    "no digests": {"digest": "none"},
    "for nobody": {"receiver": 3},
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_a_proposal_beyond_what_was_offered_is_declined(name: str) -> None:
    told: list[wire.Message] = []

    def deed(peer: Hostile) -> None:
        assert isinstance(peer, HostileSender)
        terms = msgspec.structs.replace(peer.proposal.terms, **PROPOSALS[name])
        peer.say(msgspec.structs.replace(peer.proposal, terms=terms))
        told.append(peer.hear(wire.Declined))

    meeting = Meeting(HostileSender("proposal", deed))
    check(meeting)
    assert isinstance(meeting.error, tk.TransportKitError)
    (declined,) = told
    assert isinstance(declined, wire.Declined)
    assert declined.reason


# -- mutations --------------------------------------------------------------------------------------------------------

RECEIVER_FRAMES = {
    "hello": lambda: greeting("receiver"),
    "joined": lambda: wire.Joined(1, 0),
    "proof": lambda: wire.Proof(1, 0, bytes(16)),
    "accept": lambda: wire.Accept(1, 0),
    "ack": lambda: wire.Ack(1, 0, 0),
    "applied": lambda: wire.Applied(1, 0, 1, 32),
}
SENDER_FRAMES = {
    "hello": lambda: greeting("sender"),
    "begin": lambda: wire.Begin(1, 1),
    "manifest": lambda: wire.Manifest(1, manifest_id(SPECS), SPECS, 32),
    "chunk": ZOO["chunk"],
    "commit": lambda: wire.Commit(1, 1, 32, 2, manifest_id(SPECS)),
}


@st.composite
def mutated(draw: st.DrawFn, frame: bytes) -> bytes:
    """A frame with a few bytes changed, cut out or put in."""
    body = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["flip", "cut", "insert", "trim"])):
            case "flip" if at < len(body):
                body[at] ^= draw(st.integers(1, 255))
            case "cut":
                del body[at : at + draw(st.integers(1, 8))]
            case "insert":
                body[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                del body[at:]
    return bytes(body)


def cases() -> Iterator[Any]:
    for kind, frames in ((HostileReceiver, RECEIVER_FRAMES), (HostileSender, SENDER_FRAMES)):
        for step in frames:
            yield pytest.param(kind, step, id=f"{kind.__name__}-{step}")


@pytest.mark.parametrize(("kind", "step"), list(cases()))
def test_mutated_frames(kind: type[Hostile], step: str) -> None:
    frames: dict[str, Callable[[], Any]] = RECEIVER_FRAMES if kind is HostileReceiver else SENDER_FRAMES  # type: ignore[assignment]
    honest = wire.encode(frames[step]())

    @settings(max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(body=mutated(honest))
    def mutate(body: bytes) -> None:
        def deed(peer: Hostile) -> None:
            peer.raw(body)
            if step == "chunk":
                peer.payload(BODY, 0)

        check(Meeting(kind(step, deed)), limit=2.0)

    mutate()


# -- the listener -----------------------------------------------------------------------------------------------------


def test_torch_is_not_asked_for_what_a_liar_claims() -> None:
    """A tensor of 1 PiB is announced with its first bytes: an error of ours, and no memory."""
    entries = [spec("a", "uint8", (1 << 50,))]

    def deed(peer: Hostile) -> None:
        identity = manifest_id(entries)  # type: ignore[arg-type]
        peer.say({"type": "manifest", "update": 1, "manifest_id": identity, "specs": entries, "nbytes": 1 << 50})
        peer.hear(wire.Accept, wire.Failed)
        peer.say(chunk(pieces=[[0, 0, 80, 0]], digest=digest(BODY)))
        peer.payload(BODY, 0)

    meeting = Meeting(HostileSender("manifest", deed))
    check(meeting)
    assert isinstance(meeting.error, tk.TransportKitError)
    torch.empty(1)
