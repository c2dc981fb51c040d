"""All streams of an update at its sender: filled and sent side by side, and kept going where one loses its lane."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import used
from transportkit.errors import TransportKitError, UpdateError
from transportkit.session.peers import code_of
from transportkit.session.rerouting import FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.session.lane import Lane
    from transportkit.session.peers import Peers
    from transportkit.session.rerouting import Rerouting
    from transportkit.session.roster import Roster
    from transportkit.session.stream import Stream
    from transportkit.wire import Piece


class Convoy:
    """The streams of one update.

    Args:
        update: number of the update in the session.
        peers: the receivers.
        roster: who is in the update.
        rerouting: gives a stream another lane.
        progress: called with the bytes that have gone over the slowest stream.
    """

    def __init__(
        self, update: int, peers: Peers, roster: Roster, rerouting: Rerouting, progress: Callable[[int], object]
    ) -> None:
        self._update = update
        self._peers = peers
        self._roster = roster
        self._rerouting = rerouting
        self._progress = progress
        self._end: tuple[int, str] | None = None
        self.streams: list[Stream] = []
        self.sent = 0
        """Bytes that have gone over the slowest stream."""
        self.backends: dict[int, str] = {}
        """The backend that carried the last chunk to each receiver."""

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(
        self,
        until: Callable[[], bool],
        debtors: Callable[[], Iterable[int]],
        what: str,
        *,
        deadline: Deadline | None = None,
        prompt: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """As `Peers.wait`; whoever is lost and whatever fails meanwhile is dealt with."""
        began = time.monotonic()
        while True:
            self.settle()
            self._peers.wait(
                lambda: self._roster.troubled or until(), debtors, what, deadline=deadline, prompt=prompt, began=began
            )
            if not self._roster.troubled:
                return

    def wait_for_slots(self, streams: Iterable[Stream]) -> None:
        """Wait until one of these streams can take the slots that it lacks."""
        streams = list(streams)
        self.wait(
            lambda: any(stream.free() for stream in streams),
            lambda: frozenset().union(*(stream.debtors() for stream in streams)),
            "word for a chunk",
        )

    def take_slots(self, streams: Sequence[Stream]) -> None:
        """Wait until each of these streams has the slots that it lacks at hand."""
        self.wait(
            lambda: all(stream.take_slots() for stream in streams),
            lambda: frozenset().union(*(stream.debtors() for stream in streams)),
            "word for a chunk",
        )

    def poll(self) -> None:
        """Take in what has come, without waiting, and deal with it."""
        self._peers.poll()
        self.settle()

    def settle(self) -> None:
        """Deal with losses, and reroute the lanes whose backend failed at a receiver."""
        if not self._roster.troubled:
            return
        self._roster.settle()
        self.prune()
        for stream in list(self.streams):
            for lane in stream.lanes:
                if lane in stream.lanes and self._rerouting.stranded(lane):
                    fresh = self._rerouting.run(stream, lane, None)
                    self.prune()
                    if self._end is not None:
                        self._tell_end(stream, fresh)
        self._rerouting.forget_stranded(self.streams)

    def prune(self) -> None:
        """Part with the lanes that have nobody left who wants the update."""
        failed = self._roster.failed
        for stream in self.streams:
            for lane in stream.lanes:
                if lane.receivers and failed.keys() >= set(lane.receivers):
                    stream.remove(lane)
                    self.dismiss(lane.receivers, UpdateError("it failed there"))
        self.streams = [stream for stream in self.streams if stream.prune()]

    # -- chunks -------------------------------------------------------------------------------------------------------

    def pack(self, stream: Stream, copy: Callable[[Tensor], object]) -> None:
        """Have ``copy`` fill the stream's slots at hand, or go on filling them."""
        todo = collections.deque(stream.lanes)
        while todo:
            lane = todo.popleft()
            try:
                if lane in stream.lanes:  # it may have been lost while another was rerouted
                    stream.pack(lane, copy)
            except FAILURES as error:
                todo += self._go_on(stream, lane, error)

    def emit(self, stream: Stream, pieces: tuple[Piece, ...], payload: int, *, last: bool) -> None:
        """Send the slots at hand.

        Args:
            payload: sum of the pieces' bytes.
        """
        seq, told, specs = stream.seal(pieces)
        for lane in stream.lanes:
            try:
                if lane in stream.lanes:
                    stream.emit(lane, seq, used(pieces), last=last, pieces=told, specs=specs)
            except FAILURES as error:
                self._go_on(stream, lane, error)
        stream.nbytes += payload
        slowest = min((each.nbytes for each in self.streams), default=0)
        if slowest > self.sent:
            self.sent = slowest
            self._progress(slowest)

    def flush(self, stream: Stream, *, last: bool) -> None:
        """Send what the slots at hand hold, if that is anything."""
        if stream.pieces:
            pieces = tuple(stream.pieces)
            self.emit(stream, pieces, sum(piece.nbytes for piece in pieces), last=last)
            stream.pieces.clear()

    def commit(self, tensors: int, identity: str) -> None:
        """All is sent: tell the totals."""
        self._end = tensors, identity
        self.sent = max((stream.nbytes for stream in self.streams), default=self.sent)
        for stream in self.streams:
            self._tell_end(stream, stream.lanes)

    def _tell_end(self, stream: Stream, lanes: Iterable[Lane]) -> None:
        assert self._end is not None
        commit = wire.Commit(self._update, stream.seq, stream.nbytes, *self._end)
        for lane in lanes:
            for number in lane.receivers:
                self.backends[number] = lane.backend
                self._roster.totals[number] = (commit.chunks, commit.nbytes)
            self._peers.begin([self._peers[number] for number in lane.receivers], commit)

    def _go_on(self, stream: Stream, lane: Lane, error: TransportKitError) -> list[Lane]:
        """A call of a lane's exporter failed; returns the lanes that go on instead."""
        nobodys = self._rerouting.part_with_lost(lane, error)
        self.prune()
        if lane not in stream.lanes:
            return []
        if nobodys:
            raise error
        fresh = self._rerouting.run(stream, lane, error)
        self.prune()
        return fresh

    # -- the end ------------------------------------------------------------------------------------------------------

    def dismiss(self, numbers: Iterable[int], error: BaseException, *, withdrawn: bool = False) -> None:
        """Tell these receivers that the update has ended for them.

        One with whom another backend is being agreed on is left out: the session's end is what it hears.
        """
        message = wire.Aborted(self._update, code_of(error), wire.plain(str(error)), withdrawn=withdrawn)
        for peer in [peer for n in numbers if (peer := self._peers.find(n)) is not None and peer.gone is None]:
            if not peer.agreeing:
                with contextlib.suppress(TransportKitError):
                    self._peers.send(peer, message)

    def abandon(self) -> None:
        """The update ends early: give every slot at hand back."""
        for stream in self.streams:
            stream.abandon()
        self._rerouting.forget_stranded()
