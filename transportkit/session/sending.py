"""One update at its sender: begin, chunks, commit, applied."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import plan
from transportkit.deadline import Deadline
from transportkit.errors import (
    CallbackError,
    DeadlineError,
    PeerFailedError,
    ProtocolError,
    TensorError,
    TransportKitError,
    UnsupportedTensorError,
    UpdateError,
)
from transportkit.manifest import manifest_id, nbytes, wire_nbytes
from transportkit.packing import Packer, pack_piece
from transportkit.session.lane import Lane, acknowledge
from transportkit.session.peers import code_of
from transportkit.session.results import Report
from transportkit.session.sources import Static, Streamed
from transportkit.session.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transportkit.lifecycle import SlotPool
    from transportkit.session.options import Progress
    from transportkit.session.peers import Peer, Peers
    from transportkit.wire import Piece, TensorSpec

#: How long a sender waits for the text of the exception that made a receiver leave its loop, in seconds.
LAST_WORDS = 0.5


class Plans:
    """What may be kept from one update to the next: digests, plans and addresses of a manifest that came again."""

    def __init__(self) -> None:
        self._specs: tuple[TensorSpec, ...] | None = None
        self._id = ""
        self._sizes: list[int | None] = []
        self._nbytes = 0
        self._chunks: dict[int, list[tuple[tuple[Piece, ...], int]]] = {}

    def take(self, specs: tuple[TensorSpec, ...]) -> tuple[str, int]:
        """The digest of a manifest, and the sum of its bytes."""
        if self._specs is not specs and self._specs != specs:
            self._chunks.clear()
            self._id = manifest_id(specs)
            self._sizes = [wire_nbytes(spec) for spec in specs]
            self._nbytes = sum(size or 0 for size in self._sizes)
        self._specs = specs
        return self._id, self._nbytes

    def chunks(self, chunk_bytes: int) -> list[tuple[tuple[Piece, ...], int]]:
        """The plan of the manifest taken last: the pieces of each chunk, and the sum of their bytes."""
        if chunk_bytes not in self._chunks:
            chunks = plan(self._sizes, chunk_bytes)
            self._chunks[chunk_bytes] = [(pieces, sum(piece.nbytes for piece in pieces)) for pieces in chunks]
        return self._chunks[chunk_bytes]


class Sending:
    """One update on its way to every receiver.

    Args:
        number: of the update in the session.
        version: of the update, the user's.
        source: what is sent.
        lanes: the agreed lanes.
        peers: the receivers.
        plans: kept by the session.
        metadata: travels with it.
        progress: called after each chunk.
        deadline: bounds waiting for the receivers to begin.
    """

    def __init__(
        self,
        number: int,
        version: int,
        source: Static | Streamed,
        lanes: Sequence[Lane],
        peers: Peers,
        plans: Plans,
        metadata: Mapping[str, str],
        progress: Progress | None,
        deadline: Deadline,
    ) -> None:
        self._number = number
        self._version = version
        self._source = source
        self._lanes = lanes
        self._peers = peers
        self._plans = plans
        self._metadata = dict(metadata)
        self._progress = progress
        self._deadline = deadline
        self._begun: set[int] = set()
        self._present: set[int] = set()
        self._accepted: set[int] = set()
        self._committed = False
        self._applied: set[int] = set()
        self._failed: dict[int, wire.Failed] = {}
        self._streams: list[Stream] = []
        self._total: int | None = None
        self._sent = 0
        self._start = 0.0
        self.began = False
        """Whether every receiver is in it; before that it can be taken back."""

    def run(self) -> Report:
        """Carry the update out. Raises whatever ended it; the receivers know nothing of that yet, see `abort`."""
        self._peers.on_message = self._take
        for peer in self._peers:
            peer.waited = 0.0
        specs = self._source.manifest.specs if isinstance(self._source, Static) else self._source.specs
        identity = ""
        if specs is not None:
            self._check_dtypes(specs)
            identity, self._total = self._plans.take(specs)
        self._begin(specs, identity)
        self._report_progress(0)
        if isinstance(self._source, Static):
            self._send_static(identity)
            sent = self._source.manifest.specs
        else:
            sent = self._send_streamed(identity, self._source)
        identity = identity or manifest_id(sent)
        self._commit(sent, identity)
        return Report(
            version=self._version,
            nbytes=self._sent,
            seconds=time.monotonic() - self._start,
            chunks={n: s.seq for s in self._streams for n in s.lane.receivers},
            backends={n: lane.backend for lane in self._lanes for n in lane.receivers},
            tensors=len(sent),
            waited_for={peer.number: peer.waited for peer in self._peers},
        )

    def abort(self, error: BaseException) -> None:
        """Tell every receiver to which it was announced that this update ends here."""
        for stream in self._streams:
            stream.abandon()
        for peer in self._peers:
            peer.manifest_id = ""
        message = wire.Aborted(self._number, code_of(error), wire.plain(str(error)), withdrawn=not self.began)
        for peer in [peer for peer in self._peers if peer.number in self._begun]:
            with contextlib.suppress(TransportKitError):
                self._peers.send(peer, message)

    def settled(self, error: BaseException) -> bool:
        """Whether the links can carry another update after this error."""
        if self._failed or not isinstance(error, Exception):
            return bool(self._failed) and isinstance(error, PeerFailedError)
        if isinstance(error, DeadlineError):
            return not self.began and not error.silent
        return isinstance(error, UpdateError | TensorError)

    def last_words(self) -> PeerFailedError | None:
        """What a receiver that left its loop says of the reason, if it says anything soon."""
        left = [number for number, failed in self._failed.items() if failed.code == "LoopLeft"]
        try:
            if left:
                self._peers.wait(lambda: False, lambda: left, "last words", deadline=Deadline(LAST_WORDS, "last words"))
        except PeerFailedError as error:
            return error
        except TransportKitError:
            pass
        return None

    @property
    def torn(self) -> tuple[str, ...]:
        """The receivers that said that their target is half written."""
        return tuple(self._peers[n].name for n, failed in self._failed.items() if failed.torn)

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _begin(self, specs: tuple[TensorSpec, ...] | None, identity: str) -> None:
        deadline = self._deadline
        self._peers.wait(
            lambda: all(peer.ready for peer in self._peers),
            lambda: [peer.number for peer in self._peers if not peer.ready],
            "word",
            deadline=deadline,
        )
        self._start = time.monotonic()
        for peer in self._peers:
            peer.ready = False
            self._begun.add(peer.number)
            self._peers.send(peer, wire.Begin(self._number, self._version))
        everyone = self._peers.numbers
        self._peers.wait(
            lambda: self._present == everyone,
            lambda: everyone - self._present,
            "word that it is there",
            deadline=deadline,
            prompt=lambda: [n for n in everyone - self._present if not self._peers[n].away],
        )
        self.began = True
        ignorant = {peer.number for peer in self._peers if not identity or peer.manifest_id != identity}
        planned = {n for lane in self._lanes if ignorant.isdisjoint(lane.receivers) for n in lane.receivers}
        for peer in self._peers:
            message = wire.Manifest(
                update=self._number,
                manifest_id=identity,
                specs=specs if peer.number in ignorant else None,
                nbytes=-1 if self._total is None else self._total,
                known_plan=peer.number in planned,
                metadata=self._metadata,
            )
            self._peers.send(peer, message)
        self._peers.wait(
            lambda: self._accepted == everyone, lambda: everyone - self._accepted, "answer to the manifest"
        )
        self._streams = [Stream(x, self._number, known_plan=planned.issuperset(x.receivers)) for x in self._lanes]

    def _send_static(self, identity: str) -> None:
        assert isinstance(self._source, Static)
        manifest = self._source.manifest
        packer = Packer(manifest.tensors, manifest.layout.addresses)
        pending = [
            (stream, chunks)
            for stream in self._streams
            if (chunks := self._plans.chunks(stream.lane.terms.chunk_bytes))
        ]
        while pending:
            self._peers.poll()
            moved = False
            for stream, chunks in pending:
                if stream.take_slot():
                    moved = True
                    pieces, payload = chunks[stream.seq]
                    with stream.packing():
                        packer.pack(pieces, stream.slot)
                    stream.emit(pieces, last=stream.seq == len(chunks) - 1)
                    self._count(stream, payload)
            pending = [(stream, chunks) for stream, chunks in pending if stream.seq < len(chunks)]
            if pending and not moved:
                pools = [stream.lane.pool for stream, _ in pending]
                self._peers.wait(
                    functools.partial(_any_free, pools), functools.partial(_all_debtors, pools), "word for a chunk"
                )

    def _send_streamed(self, identity: str, source: Streamed) -> tuple[TensorSpec, ...]:
        sent: list[TensorSpec] = []
        for spec, tensor in source.pairs:
            if not identity:
                self._check_dtypes((spec,))
            index = len(sent)
            sent.append(spec)
            for stream in self._streams:
                for fresh, piece in stream.cutter.cut(index, nbytes(spec)):
                    if fresh:
                        self._flush(stream, last=False)
                        self._need_slot(stream)
                    if not identity and piece.start == 0:
                        stream.introduce(spec)
                    with stream.packing():
                        pack_piece(tensor, piece, stream.slot)
                    stream.pieces.append(piece)
            self._peers.poll()
        for stream in self._streams:
            self._flush(stream, last=True)
        return tuple(sent)

    def _commit(self, sent: tuple[TensorSpec, ...], identity: str) -> None:
        self._committed = True
        for stream in self._streams:
            for number in stream.lane.receivers:
                message = wire.Commit(self._number, stream.seq, self._sent, len(sent), identity)
                self._peers.send(self._peers[number], message)
        everyone = self._peers.numbers
        self._peers.wait(lambda: self._applied == everyone, lambda: everyone - self._applied, "word that it is applied")
        for peer in self._peers:
            peer.manifest_id = identity

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _flush(self, stream: Stream, *, last: bool) -> None:
        if stream.pieces:
            pieces = tuple(stream.pieces)
            stream.pieces.clear()
            stream.emit(pieces, last=last)
            self._count(stream, sum(piece.nbytes for piece in pieces))

    def _need_slot(self, stream: Stream) -> None:
        while not stream.take_slot():
            self._peers.wait(lambda: stream.lane.pool.free > 0, stream.lane.pool.debtors, "word for a chunk")

    def _count(self, stream: Stream, payload: int) -> None:
        stream.nbytes += payload
        slowest = min(s.nbytes for s in self._streams)
        if slowest > self._sent:
            self._sent = slowest
            self._report_progress(slowest)

    def _report_progress(self, done: int) -> None:
        if self._progress is not None:
            try:
                self._progress(done, self._total)
            except Exception as error:
                raise CallbackError(f"progress raised {type(error).__name__}: {error}") from error

    def _check_dtypes(self, specs: Sequence[TensorSpec]) -> None:
        wanted = {spec.dtype: spec.name for spec in reversed(specs)}
        for peer in self._peers:
            for dtype, name in wanted.items():
                if dtype not in peer.hello.dtypes:
                    raise UnsupportedTensorError(
                        f"{name}: dtype {dtype} is unknown to torch {peer.hello.torch} of {peer.name}; "
                        "cast it with `post=`, or install a newer torch there",
                        tensor=name,
                    )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: wire.Message) -> None:
        number = peer.number
        match message:
            case wire.Ack():
                acknowledge(self._lanes, message, number)
            case wire.Present() if message.update == self._number:
                self._present.add(number)
                peer.ready = False  # it may have said so once more before it saw the update
            case wire.Accept() if message.update == self._number:
                self._accepted.add(number)
            case wire.Applied() if message.update == self._number and self._committed:
                stream = next(s for s in self._streams if number in s.lane.receivers)
                if (message.chunks, message.nbytes) != (stream.seq, self._sent):
                    raise ProtocolError(
                        f"{peer.name} applied {message.chunks} chunks and {message.nbytes} bytes "
                        f"of update {self._number}, {stream.seq} and {self._sent} were sent"
                    )
                self._applied.add(number)
            case wire.Failed() if message.update == self._number:
                self._failed[number] = message
                raise PeerFailedError(
                    f"{peer.name} failed: {message.code}: {message.text}",
                    peer=peer.name,
                    code=message.code,
                    text=message.text,
                )
            case wire.Present() | wire.Accept() | wire.Applied() | wire.Failed() if message.update < self._number:
                pass
            case _:
                raise ProtocolError(f"{peer.name} sent {type(message).__name__.lower()}, which may not come now")


def _any_free(pools: Sequence[SlotPool]) -> bool:
    return any(pool.free for pool in pools)


def _all_debtors(pools: Sequence[SlotPool]) -> frozenset[int]:
    return frozenset().union(*(pool.debtors() for pool in pools))
