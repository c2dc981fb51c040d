"""Strangers at the socket of the backend that `new-backend` writes: they get nothing, and hold up nobody for long."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from promptness import PROMPT

from transportkit.cli.plugin_template.backend import SketchTransport
from transportkit.errors import DeadlineError, ProtocolError
from transportkit.testing import Call, DirectLane, nothing_left
from transportkit.wire import decode_as, raw


def visitor(lane: DirectLane) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.connect(decode_as(bytes, lane.exporter.invite(0)))
    return found


def test_a_visitor_that_drips_costs_no_more_than_the_deadline() -> None:
    with nothing_left(), DirectLane(SketchTransport) as lane, visitor(lane.invite()) as stranger:
        over = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    stranger.send(b"x")

        dripping = Call(drip)
        connecting = Call(lane.exporter.connect, lane.deadline("connection", 0.5))
        error = connecting.error(20)
        over.set()
        assert dripping.error(20) is None
        assert isinstance(error, DeadlineError), repr(error)
        assert connecting.seconds < PROMPT


def test_a_visitor_without_the_token_is_passed_over() -> None:
    with nothing_left(), DirectLane(SketchTransport) as lane, visitor(lane.invite()) as stranger:
        connecting = Call(lane.exporter.connect, lane.deadline("connection"))
        nonce = stranger.recv(32)
        stranger.sendall(nonce)  # as if the exporter's own words were worth something
        proof = stranger.recv(32)
        stranger.sendall(proof)
        assert lane.terms.token not in nonce + proof
        assert stranger.recv(1) == b"", "the stranger is let in"
        lane.importers[0].connect(lane.deadline("connection"))
        assert connecting.error(20) is None
        assert lane.carry(0, b"some bytes") == [b"some bytes"]


def test_a_listener_without_the_token_is_refused() -> None:
    address = b"\0transportkit-sketch-of-a-stranger"
    with nothing_left(), DirectLane(SketchTransport) as lane, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        lane.importers[0].join(raw(address))
        connecting = Call(lane.importers[0].connect, lane.deadline("connection"))
        with listener.accept()[0] as met:
            met.sendall(met.recv(32))
            met.sendall(met.recv(32))
            with pytest.raises(ProtocolError, match="does not have this session's token"):
                connecting.result(20)
