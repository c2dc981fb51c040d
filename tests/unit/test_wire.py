"""The encoding of messages: what may be added, what is refused, and that nothing hostile gets through or costs much."""

from __future__ import annotations

import resource

import msgspec
import pytest
from hellos import hello
from hypothesis import given
from hypothesis import strategies as st

from transportkit import wire
from transportkit.errors import ProtocolError, TransportKitError, VersionError

pytestmark = pytest.mark.timeout(60)

SAMPLES: list[wire.Message] = [
    hello("sender", "shm"),
    wire.Refusal("NegotiationError", "why"),
    wire.Begin(1, 17),
    wire.Manifest(
        1, "id", (wire.TensorSpec("a", "bfloat16", (2, 3)), wire.TensorSpec("b", "bfloat16", (2, 3), "a")), 12
    ),
    wire.Chunk(1, 0, 0, True, 12, (1 << 64) - 1, wire.Location(1, 64), (wire.Piece(0, 0, 12, 0),)),
    wire.Ack(1, 0, 0),
    wire.Signal(1, 0, wire.raw([1, "x"])),
    wire.Commit(1, 1, 12, 2, "id"),
    wire.Failed(1, 0, "TargetError", "text", torn=True),
    wire.Waiting(),
    wire.Bye("ValueError", "boom"),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def fields(message: wire.Message) -> dict[str, object]:
    decoded: dict[str, object] = msgspec.msgpack.decode(wire.encode(message))
    return decoded


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_unknown_fields_are_ignored(message: wire.Message) -> None:
    later = fields(message) | {"of_a_later_minor_version": [1, {"x": 2}]}
    assert wire.decode(msgspec.msgpack.encode(later)) == message


def test_missing_fields_with_defaults_take_them() -> None:
    assert wire.decode(msgspec.msgpack.encode({"type": "bye"})) == wire.Bye()


@pytest.mark.parametrize("versions", [(2, 2), (2, 9), (0, 0)])
def test_a_hello_of_another_major_version_is_refused_with_both(versions: tuple[int, int]) -> None:
    changed = fields(hello("sender", "shm")) | dict(zip(("protocol_oldest", "protocol_newest"), versions, strict=True))
    for frame in (changed, {k: v for k, v in changed.items() if k.startswith(("type", "protocol"))}):
        with pytest.raises(VersionError) as caught:
            wire.decode(msgspec.msgpack.encode(frame))
        assert f"protocol {versions[0]}" in str(caught.value)
        assert "this side 1" in str(caught.value)


def test_a_hello_whose_range_overlaps_ours_is_read() -> None:
    wide = fields(hello("sender", "shm")) | {"protocol_newest": 7}
    assert isinstance(wire.decode(msgspec.msgpack.encode(wide)), wire.Hello)


@pytest.mark.parametrize(
    "change",
    [
        {"dtypes": 3},
        {"protocol_oldest": "1"},
        {"limits": {"chunk_bytes": 0, "slots": 1}},
        {"limits": {"chunk_bytes": 5, "slots": -1}},
        {"limits": {}},
        {"role": "spy"},
        {"offers": [{"type": "offer"}]},
        {"offers": [{"type": "gift", "backend": "shm"}]},
        {"timeout": 0},
    ],
    ids=str,
)
def test_a_malformed_hello_is_refused_with_the_versions(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=r"protocol 1") as caught:
        wire.decode(msgspec.msgpack.encode(fields(hello("sender", "shm")) | change))
    assert "protocol_oldest" in change or "malformed hello message (peer speaks protocol 1" in str(caught.value)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa4type" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa5begin\xa6update\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "nobody knows"}),
        msgspec.msgpack.encode(["begin", 1]),
        msgspec.msgpack.encode({"type": "begin", "update": 1.5, "version": 1}),
        msgspec.msgpack.encode({"type": "begin", "update": True, "version": 1}),
        msgspec.msgpack.encode({"type": "begin"}),
        msgspec.msgpack.encode({"type": "begin", "update": 1, "version": 1}) + b"trailing",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95cposix\nsystem\n",
    ],
)
def test_what_is_no_message_is_one_error_and_costs_nothing(frame: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError):
        wire.decode(frame)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024


@given(st.binary(max_size=200), st.sampled_from(SAMPLES), st.integers(0, 10_000))
def test_mutated_messages_raise_nothing_but_our_errors(noise: bytes, message: wire.Message, where: int) -> None:
    frame = bytearray(wire.encode(message))
    where %= len(frame) + 1
    frame[where : where + len(noise) // 2] = noise
    try:
        wire.decode(bytes(frame))
    except TransportKitError:
        pass


def test_what_cannot_be_encoded_is_our_error() -> None:
    with pytest.raises(ProtocolError, match="cannot encode Begin"):
        wire.encode(wire.Begin(1 << 70, 1))


def test_a_backends_own_parameters_are_decoded_by_it_alone() -> None:
    class Own(msgspec.Struct):
        number: int

    assert wire.decode_as(Own, wire.raw(Own(3))).number == 3
    for odd in (wire.raw({"number": "x"}), wire.EMPTY, msgspec.Raw(b"\x91" * 100_000)):
        with pytest.raises(ProtocolError, match="cannot decode Own"):
            wire.decode_as(Own, odd)
