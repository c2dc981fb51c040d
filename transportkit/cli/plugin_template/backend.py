"""The backend `sketch`: chunks through a unix socket of its own."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from typing import TYPE_CHECKING, ClassVar

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, ProtocolError
from transportkit.lifecycle import Landing, host_slots, memory_of
from transportkit.transport import Exporter, Importer, Match, Mismatch, Offer, Reach, Side, Site, Transport, Wiring
from transportkit.wire import EMPTY, Chunk, Terms, decode_as, raw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw
    from torch import Tensor

ADDRESS = b"\0transportkit-sketch-"  # of an abstract socket: no file, gone with its process
PREFIX = struct.Struct("!qqq")  # what goes before a chunk's bytes: its update, its number, its length


class SketchTransport(Transport):
    """Chunks through a unix socket, between two processes of one user on one host; one receiver per lane."""

    name: ClassVar[str] = "sketch"
    api_version: ClassVar[int] = 1

    @classmethod
    def probe(cls, site: Site) -> Offer:
        return Offer(cls.name, cls.api_version)  # or `Unavailable(cls.name, reason)`

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        here, there = sender.site, receiver.site
        homes = [(site.boot_id, site.namespaces.get("net")) for site in (here, there)]
        if not here.boot_id or homes[0] != homes[1]:
            return Mismatch("its socket cannot be reached from another host or network namespace")
        if here.uid != there.uid:
            return Mismatch(f"another user: the sender has uid {here.uid}, the receiver uid {there.uid}")
        return Match(Reach.HOST_NETWORK, note="a unix socket of its own")

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        return SketchExporter(terms, wiring)

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        return SketchImporter(terms, wiring)


# What both ends share: a socket that never blocks; each wait for it watches the links, too, for a dead peer.
class _End:
    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        self._terms, self._wiring, self._met, self._stopped = terms, wiring, False, False
        self._socket = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def _meet(self, mine: bytes, other: bytes, deadline: Deadline) -> bool:
        # Each end proves that it has the session's token, and shows it to nobody; whether the other one has it.
        nonce, told = secrets.token_bytes(32), bytearray(64)
        self._write(nonce, deadline)
        self._read(memoryview(told)[:32], deadline)
        theirs, proof = bytes(told[:32]), memoryview(told)[32:]
        self._write(hmac.digest(self._terms.token, mine + nonce + theirs, "sha256"), deadline)
        self._read(proof, deadline)
        wanted = hmac.digest(self._terms.token, other + theirs + nonce, "sha256")
        self._met = hmac.compare_digest(proof, wanted)
        return self._met

    def _read(self, view: memoryview, deadline: Deadline) -> None:
        self._move(view, deadline, reading=True)

    def _write(self, data: bytes | memoryview, deadline: Deadline) -> None:
        self._move(memoryview(data), deadline, reading=False)

    def _move(self, view: memoryview, deadline: Deadline, *, reading: bool) -> None:
        while view:
            self._check()
            try:
                count = self._socket.recv_into(view) if reading else self._socket.send(view)
            except BlockingIOError:
                wait = self._wiring.wait_readable if reading else self._wiring.wait_writable
                wait(self._socket.fileno(), deadline)
                continue
            except OSError as error:
                raise self._lost(str(error)) from error
            if not count:
                raise self._lost("the other end hung up")
            view = view[count:]
            if self._met:  # what a stranger says is no progress
                deadline.renew()

    def _lost(self, text: str) -> BackendError:
        self._check()
        return self._wiring.lost(BackendError(f"its socket: {text}", backend=SketchTransport.name))

    def _check(self) -> None:
        if self._stopped:
            raise BackendError("this end of the socket was stopped", backend=SketchTransport.name)

    def abort(self) -> None:
        self._stopped = True
        for each in (self._socket, self._listener):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up

    def close(self) -> None:
        self._stopped = True
        self._socket.close()
        self._listener.close()


class SketchExporter(_End, Exporter):
    """Slots in ordinary memory, written to the socket."""

    slots: Sequence[Tensor] = ()

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        self.slots = host_slots(terms.slots, terms.chunk_bytes)
        self._address = ADDRESS + secrets.token_hex(16).encode()
        super().__init__(terms, wiring)
        self._listener.bind(self._address)
        self._listener.listen()

    def invite(self, receiver: int) -> Raw:
        return raw(self._address)

    def connect(self, deadline: Deadline) -> None:
        # Go on with the visitor that has the token: any process may find the socket.
        while True:
            deadline.check()
            self._wiring.wait_readable(self._listener.fileno(), deadline)
            self._check()
            self._socket = self._listener.accept()[0]
            self._socket.setblocking(False)
            with contextlib.suppress(BackendError, DeadlineError):
                if self._meet(b"exporter", b"importer", Deadline(deadline.remaining(2.0), "proof from a visitor")):
                    return self._listener.close()
            self._socket.close()

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        try:
            self._write(PREFIX.pack(header.update, header.seq, header.nbytes), deadline)
            self._write(memory_of(self.slots[slot])[: header.nbytes], deadline)
        except BaseException:
            self.abort()  # half a chunk may be on its way, and nothing can follow it
            raise


class SketchImporter(_End, Importer):
    """Landing slots in ordinary memory, filled from the socket."""

    def join(self, invitation: Raw) -> Raw:
        self._landing = Landing(self._terms.slots, self._terms.chunk_bytes)
        self._address = decode_as(bytes, invitation)
        if not self._address.startswith(ADDRESS):
            raise ProtocolError("the invitation names no socket of this backend")
        return EMPTY

    def connect(self, deadline: Deadline) -> None:
        self._check()
        self._socket.connect(self._address)
        if not self._meet(b"importer", b"exporter", deadline):
            raise ProtocolError("whoever listens at the sender's address does not have this session's token")

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        # Land the chunk; one that an update left behind when it failed is read over.
        landed = self._landing.take(header)
        try:
            wanted, prefix = (header.update, header.seq, header.nbytes), bytearray(PREFIX.size)
            while True:
                self._read(memoryview(prefix), deadline)
                came = PREFIX.unpack(prefix)
                if came[:2] > wanted[:2] or not 0 <= came[2] <= self._terms.chunk_bytes:
                    raise ProtocolError(f"the chunk {wanted} was announced, {came} came")
                self._read(memory_of(landed)[: came[2]], deadline)
                if came == wanted:
                    return landed[: header.nbytes]
        except BaseException:
            self.abort()  # the rest of the chunk may still come, and would be taken for the next
            raise

    def release(self, header: Chunk) -> None:
        self._landing.give(header)
