"""One update at its sender: begin, chunks, commit, applied."""

from __future__ import annotations

import functools
import itertools
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    CallbackError,
    DeadlineError,
    PeerClosedError,
    PeerFailedError,
    TensorError,
    TransportKitError,
    UnsupportedTensorError,
    UpdateError,
)
from transportkit.manifest import manifest_id, nbytes
from transportkit.packing import Packer, pack_piece
from transportkit.session.convoy import Convoy
from transportkit.session.opening import Opening
from transportkit.session.rerouting import Rerouting, agree
from transportkit.session.results import Report
from transportkit.session.roster import Roster
from transportkit.session.sources import Static, Streamed
from transportkit.session.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from transportkit.session.lane import Lane
    from transportkit.session.opening import Ground
    from transportkit.session.options import Progress
    from transportkit.session.plans import Plans
    from transportkit.wire import Agreement, TensorSpec

#: How long a sender waits for the text of the exception that made a receiver leave its loop, in seconds.
LAST_WORDS = 0.5


class Sending:
    """One update on its way to every receiver.

    Args:
        number: of the update in the session.
        version: of the update, the user's.
        source: what is sent.
        lanes: the agreed lanes; changed in place by losses and reroutes.
        ground: the receivers, and what handshakes with them stand on.
        plans: kept by the session.
        metadata: travels with it.
        progress: called after each chunk.
        deadline: bounds waiting for the receivers to begin.
        forgiving: whether it goes on for the others where one receiver is lost or fails.
        again: the receivers whose lanes were for the last update only.
        agreed: called with each new agreement.
    """

    def __init__(
        self,
        number: int,
        version: int,
        source: Static | Streamed,
        lanes: list[Lane],
        ground: Ground,
        plans: Plans,
        metadata: Mapping[str, str],
        progress: Progress | None,
        deadline: Deadline,
        *,
        forgiving: bool,
        again: Iterable[int],
        agreed: Callable[[Agreement], None],
    ) -> None:
        self._number = number
        self._version = version
        self._source = source
        self._lanes = lanes
        self._ground = ground
        self._peers = ground.peers
        self._plans = plans
        self._metadata = dict(metadata)
        self._progress = progress
        self._deadline = deadline
        self._again = frozenset(again)
        self._agreed = agreed
        self._roster = Roster(number, self._peers, lanes, forgiving=forgiving)
        self._rerouting = Rerouting(number, ground, lanes, self._roster, agreed)
        self._convoy = Convoy(number, self._peers, self._roster, self._rerouting, self._report_progress)
        self._total: int | None = None
        self._start = 0.0
        self.began = False
        """Whether every receiver is in it; before that it can be taken back."""

    def run(self) -> Report:
        """Carry the update out. Raises whatever ended it; the receivers know nothing of that yet, see `abort`."""
        self._peers.on_message, self._peers.minded = self._roster.take, frozenset()
        try:
            return self._run()
        finally:
            self._peers.minded = None

    def _run(self) -> Report:
        if not self._peers:
            raise PeerClosedError("every receiver has left the session")
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
            self._send_static(self._source)
            sent = self._source.manifest.specs
        else:
            sent = self._send_streamed(identity, self._source)
        identity = identity or manifest_id(sent)
        self._commit(sent, identity)
        applied = self._roster.applied
        return Report(
            version=self._version,
            nbytes=self._convoy.sent,
            seconds=time.monotonic() - self._start,
            chunks={n: chunks for n, (chunks, _) in self._roster.totals.items() if n in applied},
            backends={n: backend for n, backend in self._convoy.backends.items() if n in applied},
            tensors=len(sent),
            reroutes=tuple(self._rerouting.told),
            waited_for=self._roster.waited | {peer.number: peer.waited for peer in self._peers},
            lost=self._roster.losses(),
        )

    @property
    def again(self) -> frozenset[int]:
        """The receivers whose lanes were for this update only."""
        return self._peers.numbers & (self._rerouting.again if self.began else self._again)

    def abort(self, error: BaseException) -> None:
        """Tell every receiver to which it was announced that this update ends here."""
        self._convoy.abandon()
        for lane in self._lanes:
            if not lane.exporter.lasting:
                self._rerouting.again.update(lane.receivers)
        for peer in self._peers:
            peer.manifest_id = ""
        self._convoy.dismiss(self._roster.begun, error, withdrawn=not self.began)

    def settled(self, error: BaseException) -> bool:
        """Whether the links can carry another update after this error."""
        if isinstance(error, PeerFailedError):
            return bool(self._roster.failed)
        if not isinstance(error, Exception) or (self._roster.failed and not self._roster.forgiving):
            return False
        if isinstance(error, DeadlineError):
            return not self.began and not error.silent
        return isinstance(error, UpdateError | TensorError)

    def last_words(self) -> PeerFailedError | None:
        """What a receiver that left its loop says of the reason, if it says anything soon."""
        left = [number for number, failed in self._roster.failed.items() if failed.code == "LoopLeft"]
        try:
            if left:
                self._peers.wait(lambda: False, lambda: left, "last words", deadline=Deadline(LAST_WORDS, "last words"))
        except PeerFailedError as error:
            return error
        except TransportKitError:
            pass
        finally:
            self._rerouting.forget_stranded()  # whoever said so only now
        return None

    @property
    def torn(self) -> tuple[str, ...]:
        """The receivers that said that their target is half written."""
        return self._roster.torn

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _begin(self, specs: tuple[TensorSpec, ...] | None, identity: str) -> None:
        roster, deadline = self._roster, self._deadline
        self._convoy.wait(
            lambda: all(peer.ready for peer in self._peers),
            lambda: [peer.number for peer in self._peers if not peer.ready],
            "word",
            deadline=deadline,
        )
        self._renegotiate()
        self._start = time.monotonic()
        for peer in self._peers:
            peer.ready = False
            roster.begun.add(peer.number)
        self._peers.begin(self._peers, wire.Begin(self._number, self._version))
        self._convoy.wait(
            lambda: roster.members <= roster.present,
            lambda: roster.members - roster.present,
            "word that it is there",
            deadline=deadline,
            prompt=lambda: [n for n in roster.members - roster.present if not self._peers[n].away],
        )
        self.began = True
        ignorant = {peer.number for peer in self._peers if not identity or peer.manifest_id != identity}
        planned = {n for lane in self._lanes if ignorant.isdisjoint(lane.receivers) for n in lane.receivers}
        for told, known in itertools.product((False, True), repeat=2):  # each in one copy, however many get it
            message = wire.Manifest(
                update=self._number,
                manifest_id=identity,
                specs=specs if told else None,
                nbytes=-1 if self._total is None else self._total,
                known_plan=known,
                metadata=self._metadata,
            )
            alike = [p for p in self._peers if (p.number in ignorant, p.number in planned) == (told, known)]
            self._peers.begin(alike, message)
        for lane in self._lanes:  # from its word on, a receiver may need another lane
            chunks = self._plans.chunks(lane.terms.chunk_bytes) if isinstance(self._source, Static) else None
            known = planned.issuperset(lane.receivers)
            self._convoy.streams.append(Stream(lane, self._number, known_plan=known, chunks=chunks))
        self._convoy.wait(
            lambda: roster.members <= roster.accepted,
            lambda: roster.members - roster.accepted,
            "answer to the manifest",
        )
        self._convoy.prune()

    def _renegotiate(self) -> None:
        """Agree anew with those whose lanes were for the last update only, and with those who shared these lanes."""
        numbers = set(self._again | self._roster.stranded_late) & self._peers.numbers
        if not numbers:
            return
        bounds: dict[int, int] = {}
        for lane in [lane for lane in self._lanes if numbers.intersection(lane.receivers)]:
            numbers.update(lane.receivers)
            bounds |= dict.fromkeys(lane.receivers, lane.terms.chunk_bytes)
            self._lanes.remove(lane)
            lane.close()
        first = 1 + max((lane.terms.lane for lane in self._lanes), default=-1)
        forgiving = self._roster.forgiving
        agreed = agree(
            self._roster, numbers, lambda left: Opening(self._ground, left, first_lane=first, forgiving=forgiving)
        )
        self._again = frozenset()
        if agreed is None:
            return
        agreement, lanes = agreed
        for lane in lanes:
            for number in lane.receivers:
                if lane.terms.chunk_bytes != bounds.get(number):
                    self._peers[number].manifest_id = ""  # the plan that it knows is of other chunks
        self._lanes += lanes
        self._agreed(agreement)

    def _send_static(self, source: Static) -> None:
        convoy = self._convoy
        packer = Packer(source.manifest.tensors, source.manifest.layout.addresses)
        while True:
            convoy.poll()
            pending = [stream for stream in convoy.streams if stream.seq < len(stream.chunks)]
            if not pending:
                return
            moved = False
            for stream in pending:
                if stream.take_slots():
                    moved = True
                    pieces, payload = stream.chunks[stream.seq]
                    convoy.pack(stream, functools.partial(packer.pack, pieces))
                    convoy.emit(stream, pieces, payload, last=stream.seq == len(stream.chunks) - 1)
            self._peers.flush()
            if not moved:
                convoy.wait_for_slots(pending)

    def _send_streamed(self, identity: str, source: Streamed) -> tuple[TensorSpec, ...]:
        convoy = self._convoy
        sent: list[TensorSpec] = []
        for spec, tensor in source.pairs:
            if not identity:
                self._check_dtypes((spec,))
            cuts = {stream: stream.cutter.cut(len(sent), nbytes(spec)) for stream in convoy.streams}
            sent.append(spec)
            turns = max(map(len, cuts.values()), default=0)
            for turn in range(turns):  # a chunk for each stream, so that all of them have what to do
                pieces = {stream: cut[turn] for stream, cut in cuts.items() if turn < len(cut)}
                full = [stream for stream, (fresh, _) in pieces.items() if fresh]
                if full:
                    for stream in full:
                        convoy.flush(stream, last=False)
                    self._peers.flush()
                    convoy.take_slots(full)
                for stream, (_, piece) in pieces.items():
                    if not identity and piece.start == 0:
                        stream.introduce(spec)
                    convoy.pack(stream, functools.partial(pack_piece, tensor, piece))
                    stream.pieces.append(piece)
            convoy.poll()
        for stream in list(convoy.streams):
            convoy.flush(stream, last=True)
        return tuple(sent)

    def _commit(self, sent: tuple[TensorSpec, ...], identity: str) -> None:
        roster = self._roster
        self._convoy.commit(len(sent), identity)
        self._convoy.wait(
            lambda: roster.members <= roster.applied, lambda: roster.members - roster.applied, "word that it is applied"
        )
        for peer in self._peers:
            peer.manifest_id = identity if peer.number in roster.applied else ""
        if roster.failed:
            self._convoy.dismiss(roster.failed, UpdateError("it failed there, and has ended for the others"))

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
