"""Frames in what a link has read ahead, however their bytes came."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transportkit.errors import ProtocolError
from transportkit.link import HEAD
from transportkit.link.ahead import READ_AHEAD, Ahead
from transportkit.link.base import CONTROL, PAYLOAD

LIMIT = 100


def frame(body: bytes, kind: int = CONTROL) -> bytes:
    return HEAD.pack(kind, len(body)) + body


@given(st.lists(st.binary(max_size=LIMIT), max_size=6), st.lists(st.integers(1, 40), max_size=40))
def test_control_frames_come_out_whole_and_in_order(bodies: list[bytes], steps: list[int]) -> None:
    data = b"".join(map(frame, bodies))
    ahead, out = Ahead(), []
    for step in [*steps, len(data)]:
        ahead += data[:step]
        data = data[step:]
        while (body := ahead.control(LIMIT)) is not None:
            out.append(body)
        assert not ahead.ready(LIMIT), "what is ready was taken"
    assert out == bodies
    assert ahead == b""


@pytest.mark.parametrize(
    ("data", "kind", "ready"),
    [
        (b"", None, False),
        (frame(b"x")[: HEAD.size - 1], None, False),
        (frame(b"xy")[:-1], CONTROL, False),
        (frame(b"xy"), CONTROL, True),
        (frame(bytes(LIMIT + 1))[: HEAD.size], CONTROL, True),
        (frame(b"xy", PAYLOAD)[: HEAD.size], PAYLOAD, True),
        (HEAD.pack(7, 1), 7, True),
    ],
)
def test_what_need_not_be_read_on(data: bytes, kind: int | None, ready: bool) -> None:
    ahead = Ahead(data)
    assert (ahead.kind, ahead.ready(LIMIT)) == (kind, ready)
    if data != frame(b"xy"):
        assert ahead.control(LIMIT) is None
        assert ahead == data, "nothing of it is taken"


def test_a_frame_longer_than_all_that_is_read_ahead_is_ready_when_that_is_full() -> None:
    ahead = Ahead(HEAD.pack(CONTROL, 2 * READ_AHEAD))
    assert (ahead.ready(4 * READ_AHEAD), ahead.full) == (False, False)
    ahead += bytes(READ_AHEAD - HEAD.size)
    assert (ahead.ready(4 * READ_AHEAD), ahead.full) == (True, True)
    assert ahead.control(4 * READ_AHEAD) is None


def test_the_head_that_is_due() -> None:
    ahead = Ahead(frame(b"abc"))
    assert ahead.length(CONTROL, 3, "the peer") == 3
    assert Ahead(b"").length(CONTROL, 3, "the peer") is None
    with pytest.raises(ProtocolError, match="the peer announced a frame of 3 bytes where at most 2 are allowed"):
        ahead.length(CONTROL, 2, "the peer")
    with pytest.raises(ProtocolError, match="the peer sent a control frame instead of a payload frame"):
        ahead.length(PAYLOAD, 3, "the peer")
    with pytest.raises(ProtocolError, match="the peer sent a frame of kind 9 instead of a control frame"):
        Ahead(HEAD.pack(9, 0)).length(CONTROL, 3, "the peer")


def test_the_way_past_payloads() -> None:
    ahead = Ahead(frame(b"12345", PAYLOAD) + frame(b"", PAYLOAD))
    assert not ahead.past_payloads(LIMIT, "the peer")
    ahead += frame(b"next")[: HEAD.size]
    assert ahead.past_payloads(LIMIT, "the peer")
    with pytest.raises(ProtocolError, match=r"the peer sends payloads of \d+ bytes where at most 10 are allowed"):
        ahead.past_payloads(10, "the peer")
    assert not Ahead(frame(b"123", PAYLOAD)[:-1] + b"").past_payloads(LIMIT, "the peer")
