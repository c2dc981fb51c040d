"""A lane without a session: an exporter and its importers in this process, driven step by step by the contract."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import secrets
from typing import TYPE_CHECKING, Self

import torch

from transportkit.deadline import Deadline
from transportkit.inheritance import bequeath, give_up
from transportkit.lifecycle import Imported, Imports
from transportkit.site import read_site, torch_version
from transportkit.testing.calls import Call
from transportkit.testing.wirings import Loopback
from transportkit.transport import Match, Offer, Side
from transportkit.wire import Chunk, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw
    from torch import Tensor

    from transportkit.transport import Exporter, Importer, Transport
    from transportkit.wire import Site


def side_of(transport: type[Transport], site: Site, *, device: str = "cpu", torch: str = "") -> Side:
    """This process as one end of a possible pair. Raises `AssertionError` where the backend is unavailable here."""
    offer = transport.probe(site)
    assert isinstance(offer, Offer), f"{transport.name} is unavailable here: {offer}"
    return Side(site, offer, device, torch or torch_version(), allow_plaintext=True)


class DirectLane:
    """One exporter and its importers, made and invited but not connected; a context manager.

    Args:
        transport: the backend.
        chunk_bytes: size of a slot, in bytes.
        slots: number of slots.
        receivers: number of importers.
        device: where both ends' tensors are.
        address: the path of a unix link's socket; empty for none.
        within: seconds that any single step may take.
        capacity: bytes that a link takes in before its reader reads.

    Attributes:
        exporter: the sending end.
        importers: the receiving ends.
        imports: the core's record of what each importer has attached and opened.
        acknowledged: the headers of the released chunks, in order.
    """

    def __init__(
        self,
        transport: type[Transport],
        *,
        chunk_bytes: int = 1000,
        slots: int = 3,
        receivers: int = 1,
        device: str = "cpu",
        address: str = "",
        within: float = 10.0,
        capacity: int = 1 << 18,
    ) -> None:
        kind = "unix" if address else "pair"
        here = side_of(transport, read_site(kind), device=device)
        verdict = transport.match(here, here, frozenset())
        assert isinstance(verdict, Match), f"{transport.name} does not match this process with itself: {verdict}"
        self._inherited = {} if address else bequeath({transport.name: transport}, multiprocessing.get_context("spawn"))
        inherited = self._inherited.get(transport.name)
        self.transport = transport
        self.within = within
        self.acknowledged: list[Chunk] = []
        self._seq = 0
        numbers = tuple(range(receivers))
        self.loopback = Loopback(numbers, kind=kind, address=address, inherited=inherited, capacity=capacity)
        token = secrets.token_bytes(32)

        def terms(number: int) -> Terms:
            return Terms(
                "testing",
                token,
                transport.name,
                0,
                numbers,
                number,
                chunk_bytes,
                slots,
                "none",
                device,
                device,
                verdict.params,
            )

        self.terms = terms(-1)
        self.importers: list[Importer] = []
        self.imports: list[Imports] = []
        with contextlib.ExitStack() as undo:
            undo.callback(give_up, self._inherited, "sender", "receiver")
            undo.callback(self.loopback.close)
            self.exporter: Exporter = transport.exporter(self.terms, self.loopback.exporter)
            undo.callback(self.exporter.close)
            self.loopback.exporter.hear = self.exporter.hear
            for number in numbers:
                importer = transport.importer(terms(number), self.loopback.importers[number])
                undo.callback(importer.close)
                self.importers.append(importer)
                self.loopback.importers[number].hear = functools.partial(_hear, importer)
                self.imports.append(Imports(importer, transport.name, slots, self.acknowledged.append))
            undo.pop_all()

    @property
    def ends(self) -> list[Exporter | Importer]:
        """The exporter and the importers."""
        return [self.exporter, *self.importers]

    def deadline(self, what: str = "step", seconds: float | None = None) -> Deadline:
        return Deadline(self.within if seconds is None else seconds, what)

    def invite(self) -> Self:
        """Let every importer join, and the exporter admit each."""
        for number, importer in enumerate(self.importers):
            self.exporter.admit(number, importer.join(self.exporter.invite(number)))
        return self

    def connect(self) -> Self:
        """Invite, then let all ends meet, each on a thread of its own."""
        self.invite()
        calls = [Call(end.connect, self.deadline("connection")) for end in self.ends]
        for call in calls:
            call.result(self.within + 2)
        return self

    def pack(self, slot: int, data: bytes, *, update: int = 1) -> list[Chunk]:
        """Put bytes into a slot as the core does; the header for each receiver."""
        with self.exporter.packing(slot):
            if data:
                source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                self.exporter.slots[slot][: len(data)].copy_(source)
        self.exporter.ready(slot, self.deadline("slot"))
        seq, self._seq = self._seq, self._seq + 1
        return [
            Chunk(update, number, seq, False, len(data), 0, self.exporter.locate(slot, number), ())
            for number in range(len(self.importers))
        ]

    def move(self, slot: int, data: bytes) -> list[Imported]:
        """Carry one chunk to every receiver, `Exporter.publish` and the opening side by side."""
        headers = self.pack(slot, data)
        publishing = Call(self.exporter.publish, slot, headers[0], self.deadline("room for the chunk"))
        opening = [
            Call(imports.open, header, self.deadline("chunk"))
            for imports, header in zip(self.imports, headers, strict=True)
        ]
        chunks = [call.result(self.within + 2) for call in opening]
        publishing.result(self.within + 2)
        return chunks

    def read(self, number: int, chunk: Imported) -> bytes:
        """The bytes of an opened chunk, as the core copies them out."""
        assert chunk.memory is not None
        with self.importers[number].reading(chunk.header):
            return bytes(_host(chunk.memory).tolist())

    def release(self, chunks: Sequence[Imported]) -> None:
        """Let every receiver release its copy of a chunk."""
        for imports, chunk in zip(self.imports, chunks, strict=True):
            imports.release(chunk)

    def carry(self, slot: int, data: bytes) -> list[bytes]:
        """`move`, `read` at every receiver and `release`."""
        chunks = self.move(slot, data)
        seen = [self.read(number, chunk) for number, chunk in enumerate(chunks)]
        self.release(chunks)
        return seen

    def close(self) -> None:
        """Detach and close everything. Idempotent."""
        for imports in self.imports:
            imports.close()
        self.exporter.close()
        give_up(self._inherited, "sender", "receiver")
        self.loopback.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hear(importer: Importer, receiver: int, data: Raw) -> None:
    importer.hear(data)


def _host(memory: Tensor) -> Tensor:
    return memory.cpu()
