"""The backend `sketch`: chunks through a unix socket of its own."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from typing import TYPE_CHECKING, ClassVar

from msgspec import Raw, Struct

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, ProtocolError
from transportkit.lifecycle import Landing, host_slots, memory_of
from transportkit.transport import Exporter, Importer, Match, Mismatch, Offer, Reach, Side, Site, Transport, Wiring
from transportkit.wire import EMPTY, Chunk, Terms, decode_as, raw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ADDRESS = b"\0transportkit-sketch-"  # of an abstract socket: no file, gone with its process
PREFIX = struct.Struct("!qqq")  # what goes before a chunk's bytes: its update, its number, its length


class Invitation(Struct, frozen=True):
    address: bytes


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
        if not here.boot_id or here.boot_id != there.boot_id:
            return Mismatch("on another host")
        if here.uid != there.uid:
            return Mismatch(f"another user: the sender has uid {here.uid}, the receiver uid {there.uid}")
        if here.namespaces.get("net") != there.namespaces.get("net"):
            return Mismatch("its socket is not reachable from another network namespace")
        return Match(Reach.HOST_NETWORK, note="a unix socket of its own")

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        return SketchExporter(terms, wiring)

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        return SketchImporter(terms, wiring)


class _End:
    """What both ends share: a socket that never blocks; each wait for it watches the links, too, for a dead peer."""

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        self._terms, self._wiring, self._stopped = terms, wiring, False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

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
            deadline.renew()  # it bounds the lack of progress

    def _lost(self, text: str) -> BackendError:
        self._check()
        return self._wiring.lost(BackendError(f"its socket: {text}", backend=SketchTransport.name))

    def _check(self) -> None:
        if self._stopped:
            raise BackendError("this end of the socket was stopped", backend=SketchTransport.name)

    def abort(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up

    def close(self) -> None:
        self._stopped = True
        self._socket.close()


class SketchExporter(_End, Exporter):
    """Slots in ordinary memory, written to the socket."""

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        self._slots = host_slots(terms.slots, terms.chunk_bytes)
        self._address = ADDRESS + secrets.token_hex(16).encode()
        super().__init__(terms, wiring)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(self._address)
        self._listener.listen()

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def invite(self, receiver: int) -> Raw:
        return raw(Invitation(self._address))

    def connect(self, deadline: Deadline) -> None:
        """Go on with the visitor that knows the token: any process may find the socket."""
        told = bytearray(len(self._terms.token))
        while not hmac.compare_digest(told, self._terms.token):
            self._check()
            self._wiring.wait_readable(self._listener.fileno(), deadline)
            self._socket.close()
            self._socket = self._listener.accept()[0]
            self._socket.setblocking(False)
            with contextlib.suppress(BackendError, DeadlineError):
                self._read(memoryview(told), Deadline(2.0, "token from a visitor"))
        self._listener.close()

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        try:
            self._write(PREFIX.pack(header.update, header.seq, header.nbytes), deadline)
            self._write(memory_of(self._slots[slot])[: header.nbytes], deadline)
        except BaseException:
            self.abort()  # half a chunk may be on its way, and nothing can follow it
            raise

    def close(self) -> None:
        super().close()
        self._listener.close()


class SketchImporter(_End, Importer):
    """Landing slots in ordinary memory, filled from the socket."""

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        self._landing = Landing(terms.slots, terms.chunk_bytes)
        super().__init__(terms, wiring)

    def join(self, invitation: Raw) -> Raw:
        self._address = decode_as(Invitation, invitation).address
        if not self._address.startswith(ADDRESS):
            raise ProtocolError("the invitation names no socket of this backend")
        return EMPTY

    def connect(self, deadline: Deadline) -> None:
        self._check()
        self._socket.connect(self._address)
        self._write(self._terms.token, deadline)

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        """Land the chunk; one that an update left behind when it failed is read over."""
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
            self._landing.give(header)
            self.abort()  # the rest of the chunk may still come, and would be taken for the next
            raise

    def release(self, header: Chunk) -> None:
        self._landing.give(header)
