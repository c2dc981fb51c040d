"""The backend `pickle`: chunks go down the link, so it works wherever there is one; nothing else belongs here.

Each chunk is two payload frames: a pickle (protocol 5) of the builtin tuple ``(seq, nbytes, buffer)`` with the buffer
out of band, then the buffer's bytes, sent from the slot and received into a landing slot without a copy in between.

Bytes from a link are never trusted to be that pickle. Its opcodes are first held against the few that such a tuple
needs (none of them can name a global, build an object, fill the memo out of order or claim a length beyond the
frame), then it is read by an unpickler that refuses every global and persistent id, then the result is compared with
the chunk's header.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, ClassVar, NoReturn

from transportkit import __version__
from transportkit.errors import BackendError, ProtocolError, ResourceError
from transportkit.transport import (
    API_VERSION,
    Exporter,
    Importer,
    Match,
    Mismatch,
    Offer,
    Reach,
    Side,
    Site,
    Terms,
    Transport,
    Unavailable,
    Wiring,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.wire import Chunk

#: Longest pickle stream that is read, in bytes; an honest one has about 40.
STREAM_LIMIT = 1024

#: The opcodes of an honest stream and how many bytes of argument follow each (-1: one byte that says how many).
_ARGUMENT_BYTES = {
    pickle.PROTO: 1,
    pickle.FRAME: 8,
    pickle.BININT1: 1,
    pickle.BININT2: 2,
    pickle.BININT: 4,
    pickle.LONG1: -1,
    pickle.NEXT_BUFFER: 0,
    pickle.TUPLE3: 0,
    pickle.MEMOIZE: 0,
    pickle.STOP: 0,
}


class PickleTransport(Transport):
    """The fallback: always usable, one receiver per lane."""

    name: ClassVar[str] = "pickle"
    api_version: ClassVar[int] = API_VERSION
    fan_out: ClassVar[bool] = False
    rank: ClassVar[int] = 90
    device_slots: ClassVar[bool] = False

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        return Offer(cls.name, cls.api_version, __version__)

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        return Match(reach=Reach.LINK, note="down the link itself")

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> PickleExporter:
        return PickleExporter(terms, wiring)

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> PickleImporter:
        return PickleImporter(terms, wiring)


class PickleExporter(Exporter):
    """Slots in ordinary memory, written down the link. Raises `ResourceError` where there is no memory for them."""

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        from transportkit.lifecycle import host_slots, memory_of

        self._wiring = wiring
        self._aborted = False
        try:
            self._slots: tuple[Tensor, ...] = host_slots(terms.slots, terms.chunk_bytes)
        except (MemoryError, RuntimeError) as error:
            raise _no_memory(terms, "slots") from error
        self._views = [memory_of(slot) for slot in self._slots]

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._slots

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        """Send the slot's first ``header.nbytes`` bytes. Raises what `Wiring.post_payload` raises."""
        if self._aborted:
            raise _stopped()
        view = self._views[slot][: header.nbytes]
        # No PickleBuffer may outlive this line: in a reference cycle (a traceback's, say) with its memoryview, the
        # garbage collector clears the memoryview first and then crashes the process (seen in CPython 3.11).
        stream = pickle.dumps((header.seq, header.nbytes, pickle.PickleBuffer(view)), 5, buffer_callback=lambda _: None)
        self._wiring.post_payload(header.receiver, [stream], deadline)
        self._wiring.post_payload(header.receiver, [view], deadline)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._views.clear()
        self._slots = ()


class PickleImporter(Importer):
    """Landing slots in ordinary memory, filled from the link. Raises `ResourceError` where there is no memory."""

    def __init__(self, terms: Terms, wiring: Wiring) -> None:
        from transportkit.lifecycle import Landing

        self._wiring = wiring
        self._chunk_bytes = terms.chunk_bytes
        self._aborted = False
        try:
            self._landing: Landing | None = Landing(terms.slots, terms.chunk_bytes)
        except (MemoryError, RuntimeError) as error:
            raise _no_memory(terms, "landing slots") from error

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        """Land the chunk: a uint8 tensor of shape ``(header.nbytes,)``, in place until `release`.

        Raises:
            ProtocolError: the stream is not the pickle of this chunk's tuple.
            LeaseError: every landing slot is held by a lease.
        """
        from transportkit.lifecycle import memory_of

        if self._aborted or self._landing is None:
            raise _stopped()
        if not 0 <= header.nbytes <= self._chunk_bytes:
            raise ProtocolError(
                f"chunk {header.seq} claims {header.nbytes} bytes, the agreed limit is {self._chunk_bytes}"
            )
        slot = self._landing.take(header)
        try:
            stream = self._wiring.recv_payload(STREAM_LIMIT, deadline)
            check_stream(stream)
            landed = slot[: header.nbytes]
            view = memory_of(landed)
            self._wiring.recv_payload_into(view, deadline)
            _check_value(load(stream, view), header, view)
        except BaseException:
            self._landing.give(header)
            raise
        return landed

    def release(self, header: Chunk) -> None:
        if self._landing is not None:
            self._landing.give(header)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._landing = None


class _Unpickler(pickle.Unpickler):
    """Refuses whatever is not a builtin that the opcodes alone can build."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ProtocolError(f"the peer's pickle names the global {module}.{name}; none is allowed")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ProtocolError("the peer's pickle holds a persistent id; none is allowed")


def check_stream(stream: bytes) -> None:
    """Raise `ProtocolError` unless every opcode is one of an honest stream's and nothing follows the end."""
    position = 0
    while position < len(stream):
        opcode = stream[position : position + 1]
        position += 1
        length = _ARGUMENT_BYTES.get(opcode)
        if length is None:
            raise ProtocolError(f"the peer's pickle holds the opcode {opcode!r}, which no chunk needs")
        if length < 0:
            length = 1 + (stream[position] if position < len(stream) else 0)
        if opcode == pickle.STOP:
            break
        position += length
    else:
        raise ProtocolError("the peer's pickle is cut short")
    if position != len(stream):
        raise ProtocolError(f"{len(stream) - position} bytes follow the end of the peer's pickle")


def load(stream: bytes, view: memoryview) -> object:
    """Unpickle a checked stream whose one out-of-band buffer is ``view``. Raises `ProtocolError` for anything unfit."""
    try:
        return _Unpickler(io.BytesIO(stream), buffers=[view]).load()
    except ProtocolError:
        raise
    except Exception as error:  # an unpickler raises anything at all
        raise ProtocolError(f"the peer's pickle cannot be read: {error!r}") from error


def _check_value(value: object, header: Chunk, view: memoryview) -> None:
    if type(value) is not tuple or len(value) != 3:
        raise ProtocolError("the peer's pickle is not the tuple of a chunk")
    seq, nbytes, buffer = value
    if type(seq) is not int or type(nbytes) is not int or buffer is not view:
        raise ProtocolError("the peer's pickle is a tuple, but not that of a chunk")
    if (seq, nbytes) != (header.seq, header.nbytes):
        raise ProtocolError(
            f"the header says chunk {header.seq} of {header.nbytes} bytes, the pickle chunk {seq} of {nbytes}"
        )


def _no_memory(terms: Terms, what: str) -> ResourceError:
    return ResourceError(
        f"no memory for {terms.slots} {what} of {terms.chunk_bytes} bytes; give a smaller `chunk_bytes=` or `slots=`",
        backend=PickleTransport.name,
    )


def _stopped() -> BackendError:
    return BackendError("this end of the pickle backend was stopped", backend=PickleTransport.name)
