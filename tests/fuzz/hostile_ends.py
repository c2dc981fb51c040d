"""Peers that speak the protocol up to a point and then do as they like; no assertion belongs here.

A hostile peer runs on a thread, at one end of a socket pair, and the session under test at the other. Each knows the
honest conversation step by step, over the backend `pickle`, and can be stopped before any of its own steps.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

import transportkit as tk
from transportkit import wire
from transportkit.chunk import digest
from transportkit.deadline import Deadline
from transportkit.handshake import Outcome, negotiate
from transportkit.link import SocketLink
from transportkit.manifest import manifest_id
from transportkit.registry import choose
from transportkit.session.options import hello, options
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Callable

#: What either side's own deadline is in these tests, in seconds.
TIMEOUT = 1.0

TENSORS = {"a": torch.arange(16, dtype=torch.uint8), "b": torch.arange(4.0)}
SPECS = (wire.TensorSpec("a", "uint8", (16,)), wire.TensorSpec("b", "float32", (4,)))
PIECES = (wire.Piece(0, 0, 16, 0), wire.Piece(1, 0, 16, 64))
BODY = bytes(range(16)) + bytes(48) + TENSORS["b"].numpy().tobytes()

_wanted = options({"backends": ["pickle"], "timeout": TIMEOUT, "chunk_bytes": 4096, "slots": 2})
_choice = choose(read_site("pair"), ["pickle"])


def greeting(role: wire.Role, **changes: Any) -> wire.Hello:
    return msgspec.structs.replace(hello(role, _wanted, _choice, "pair"), **changes)


class Stop(Exception):
    """The hostile peer has done what it came for."""


class Hostile:
    """One end of a link in the hands of a test.

    Args:
        before: the step of its own before which it does what `deed` says; None to be honest to the end.
        deed: what it does then.
    """

    steps: tuple[str, ...] = ()

    def __init__(self, before: str | None, deed: Callable[[Hostile], object]) -> None:
        ours, theirs = socket.socketpair()
        self.sock = ours
        self.theirs = SocketLink.over(theirs, "pair", "the hostile peer")
        self.link = SocketLink.over(ours, "pair", "the tested side")
        self.before, self.deed = before, deed
        self.got: list[wire.Message] = []
        self.error: BaseException | None = None
        self.linger = 0.0

    def say(self, message: Any) -> None:
        self.raw(wire.encode(message) if isinstance(message, msgspec.Struct) else msgspec.msgpack.encode(message))

    def raw(self, body: bytes, kind: int = 0, length: int | None = None) -> None:
        """A frame, with any kind and any length in its head."""
        head = kind.to_bytes(1, "big") + (len(body) if length is None else length).to_bytes(8, "big")
        self.sock.setblocking(True)
        self.sock.settimeout(5)
        try:
            self.sock.sendall(head + body)
        finally:
            self.sock.setblocking(False)

    def hear(self, *kinds: type) -> Any:
        """The next message of one of these kinds; keeps the others."""
        while True:
            message = wire.decode(self.link.recv(Deadline(20, "message of the tested side")))
            self.got.append(message)
            if isinstance(message, kinds):
                return message

    def payload(self, body: bytes, seq: int, stream: bytes | None = None) -> None:
        """What the backend pickle sends after a header."""
        if stream is None:
            stream = pickle.dumps(
                (seq, len(body), pickle.PickleBuffer(bytearray(body))), 5, buffer_callback=lambda _: None
            )
        self.raw(stream, kind=1)
        self.raw(body, kind=1)

    def take_payload(self, header: wire.Chunk) -> bytes:
        self.link.recv_payload(4096, Deadline(20, "payload"))
        body = bytearray(header.nbytes)
        self.link.recv_payload_into(memoryview(body), Deadline(20, "payload"))
        return bytes(body)

    def step(self, name: str) -> None:
        if name == self.before:
            self.deed(self)
            raise Stop

    def talk(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.talk()
        except Stop:
            pass
        except BaseException as error:
            self.error = error
        time.sleep(self.linger)
        # What the tested side said last is read, then this side goes.
        with contextlib.suppress(Exception):
            self.sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(tk.TransportKitError, OSError):
            while True:
                self.got.append(wire.decode(self.link.recv(Deadline(2 * TIMEOUT, "last words"))))
        self.link.close()

    def last_words(self) -> list[wire.Message]:
        """What the tested side said of its error."""
        return [m for m in self.got if isinstance(m, wire.Bye | wire.Failed | wire.Refusal | wire.Aborted) and m.text]


class HostileReceiver(Hostile):
    """Meets a sender that sends `TENSORS`."""

    steps = ("hello", "joined", "ack of the trial", "proof", "ready", "present", "accept", "ack", "applied", "again")

    def talk(self) -> None:
        self.step("hello")
        self.say(greeting("receiver"))
        proposal = self.hear(wire.Proposal)
        self.step("joined")
        self.say(wire.Joined(proposal.attempt, 0))
        self.hear(wire.Connect)
        header = self.hear(wire.Chunk)
        read = self.take_payload(header)
        self.step("ack of the trial")
        self.say(wire.Ack(header.update, 0, header.seq))
        self.step("proof")
        self.say(wire.Proof(proposal.attempt, 0, read))
        self.hear(wire.Agreed)
        self.step("ready")
        self.say(wire.Ready())
        begin = self.hear(wire.Begin)
        self.step("present")
        self.say(wire.Present(begin.update, 0))
        self.hear(wire.Manifest)
        self.step("accept")
        self.say(wire.Accept(begin.update, 0))
        header = self.hear(wire.Chunk)
        self.take_payload(header)
        self.step("ack")
        self.say(wire.Ack(header.update, 0, header.seq))
        commit = self.hear(wire.Commit)
        self.step("applied")
        self.say(wire.Applied(begin.update, 0, commit.chunks, commit.nbytes))
        self.step("again")
        self.say(wire.Bye())


class HostileSender(Hostile):
    """Meets a receiver that loads into zeros."""

    steps = ("hello", "proposal", "connect", "trial", "payload of the trial", "agreed", "begin", "manifest", "chunk")
    steps += ("payload", "commit", "again")

    def __init__(self, before: str | None, deed: Callable[[Hostile], object], streamed: bool = False) -> None:
        super().__init__(before, deed)
        self.streamed = streamed

    def talk(self) -> None:
        self.step("hello")
        mine = greeting("sender")
        theirs = self.hear(wire.Hello)
        self.say(mine)
        outcome = negotiate(mine, {0: theirs}, _choice.transports, session="5e55", token=bytes(32))
        assert isinstance(outcome, Outcome)
        self.proposal = wire.Proposal(1, outcome.lanes[0].importers[0], outcome.agreement)
        self.step("proposal")
        self.say(self.proposal)
        self.hear(wire.Joined)
        self.step("connect")
        self.say(wire.Connect(1, 0))
        self.step("trial")
        secret = os.urandom(16)
        self.say(wire.Chunk(-1, 0, 0, True, 16, digest(secret), wire.Location(), ()))
        self.step("payload of the trial")
        self.payload(secret, 0)
        assert self.hear(wire.Proof).read == secret
        self.step("agreed")
        self.say(wire.Agreed(outcome.agreement))
        self.hear(wire.Ready)
        self.step("begin")
        self.say(wire.Begin(1, 5))
        self.hear(wire.Present)
        self.step("manifest")
        if self.streamed:
            self.say(wire.Manifest(1))
        else:
            self.say(wire.Manifest(1, manifest_id(SPECS), SPECS, 32))
        self.hear(wire.Accept)
        self.step("chunk")
        specs = SPECS if self.streamed else ()
        self.say(wire.Chunk(1, 0, 0, True, len(BODY), digest(BODY), wire.Location(), PIECES, specs))
        self.step("payload")
        self.payload(BODY, 0)
        self.hear(wire.Ack)
        self.step("commit")
        self.say(wire.Commit(1, 1, 32, 2, manifest_id(SPECS)))
        self.hear(wire.Applied)
        self.step("again")
        self.say(wire.Bye())


class Meeting:
    """How the tested side fared: ``error`` is None where its call returned."""

    def __init__(self, hostile: Hostile, *, twice: bool = False) -> None:
        self.hostile = hostile
        self.error: BaseException | None = None
        self.target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        thread = threading.Thread(target=hostile.run, name="hostile", daemon=True)
        began = time.monotonic()
        session: tk.Sender | tk.Receiver
        if isinstance(hostile, HostileReceiver):
            session = tk.Sender(links=[hostile.theirs], backends=["pickle"], timeout=TIMEOUT, wait=3 * TIMEOUT)
        else:
            session = tk.Receiver(link=hostile.theirs, backends=["pickle"], timeout=TIMEOUT, wait=3 * TIMEOUT)
        self.version: int | None = None
        thread.start()
        try:
            for _ in range(1 + twice):
                if isinstance(session, tk.Sender):
                    session.send(TENSORS)
                else:
                    session.load_into(self.target)
        except Exception as error:
            self.error = error
        finally:
            self.seconds = time.monotonic() - began
            if isinstance(session, tk.Receiver):
                self.version = session.version
            session.close()
        thread.join(10)
        assert not thread.is_alive()

    @property
    def untouched(self) -> bool:
        return not any(bool(tensor.any()) for tensor in self.target.values())


class Flat:
    """Watches the memory of Python objects: ``with Flat() as flat: ...``, then ``flat.peak`` in bytes."""

    peak = 0

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
