"""Rerouting at the sender: where a backend fails in mid-update, its receivers go on over the next agreed candidate.

Each receiver names the first chunk that it has not taken. What is to come again still lies in the old lane's slots:
a slot is free only after every reader's word.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from transportkit import wire
from transportkit.errors import (
    BackendError,
    DeadlineError,
    NegotiationError,
    PeerError,
    PeerFailedError,
    ProtocolError,
    TransportKitError,
)
from transportkit.session.opening import Ground, Opening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from transportkit.session.lane import Lane, Sent
    from transportkit.session.roster import Roster
    from transportkit.session.stream import Stream

_log = logging.getLogger("transportkit")

FAILURES = (BackendError, DeadlineError, PeerError)
"""What a call of a lane's exporter may raise that is no fault of the update's own."""


class Rerouting:
    """The reroutes of one update.

    Args:
        update: number of the update in the session.
        ground: what the session's handshakes stand on.
        lanes: the session's lanes, changed in place.
        roster: who is in the update.
        agreed: called with each new agreement.
    """

    def __init__(
        self,
        update: int,
        ground: Ground,
        lanes: list[Lane],
        roster: Roster,
        agreed: Callable[[wire.Agreement], None],
    ) -> None:
        self._update = update
        self._ground = ground
        self._peers = ground.peers
        self._lanes = lanes
        self._roster = roster
        self._agreed = agreed
        self._strikes: dict[tuple[int, str], str] = {}
        self.again: set[int] = set()
        """The receivers whose lanes are for this update only."""
        self.told: list[str] = []
        """Each reroute, in words."""

    def stranded(self, lane: Lane) -> bool:
        """Whether one of the lane's receivers has said that its backend failed there."""
        return any(
            (peer := self._peers.find(number)) is not None and peer.stranded is not None for number in lane.receivers
        )

    def forget_stranded(self, streams: Iterable[Stream] = ()) -> None:
        """Those who are stranded and on none of these streams need no other lane in this update."""
        carried = {number for stream in streams for number in stream.receivers}
        for peer in self._peers:
            if peer.stranded is not None and peer.number not in carried:
                peer.stranded = None
                self.again.add(peer.number)

    def part_with_lost(self, lane: Lane, error: TransportKitError) -> bool:
        """An exporter's call has failed: whoever is lost is parted with, where it was the lane's only receiver by that.

        Returns:
            Whether the error stands for the loss of a receiver, and does not say of which.
        """
        silent = isinstance(error, DeadlineError) and error.silent
        if (silent or isinstance(error, PeerError)) and len(lane.receivers) == 1:
            peer = self._peers[lane.receivers[0]]
            peer.gone = peer.gone or error
        self._roster.settle()
        return silent or (isinstance(error, PeerError) and not lane.bereft)

    def run(self, stream: Stream, lane: Lane, error: TransportKitError | None) -> list[Lane]:
        """Give a lane up and go on over others.

        Args:
            stream: what it carries.
            error: what failed on this side; None where it failed at a receiver, which has said so.

        Returns:
            The new lanes: what was sent and not taken is out over them, and each has a slot at hand that holds what the
            old one's held. None where nobody needs them.

        Raises:
            BackendError, PeerFailedError: there is no other candidate; what failed, here or there.
            PeerError, DeadlineError: a receiver was lost meanwhile.
        """
        # All that is to come again lies here: a lane that fails before it has caught up holds nothing else.
        held, partial = lane.outstanding(self._update), stream.at_hand(lane)
        first: dict[int, int] = {}
        done: list[Lane] = []
        try:
            todo = self._replace(stream, lane, error, held, first)
            while todo:
                new = todo.pop()
                stream.add(new)
                failure = self._catch_up(stream, new, held, first, partial)
                if failure is not None:
                    todo += self._replace(stream, new, failure, held, first)
                    if not new.receivers:
                        new.close()
                elif new.receivers:
                    done.append(new)
                else:
                    stream.remove(new)
        finally:
            if not lane.receivers:
                lane.close()
        return done

    def _replace(
        self,
        stream: Stream,
        lane: Lane,
        error: TransportKitError | None,
        held: dict[int, Sent],
        first: dict[int, int],
    ) -> list[Lane]:
        """Part with a lane that failed; the lanes on which its receivers are now, which have nothing of the stream yet.

        Args:
            held: the chunks that some receiver may not have taken.
            first: for each receiver that moves, the first chunk that it has not taken; filled here.
        """
        moving = [number for number in lane.receivers if number not in self._roster.applied]
        reason = self._strike(lane, error)
        if not moving:
            stream.remove(lane)
            return []
        moving = self._check_candidates(lane, moving, error, reason)
        if not moving:
            self.again.update(lane.receivers)
            stream.remove(lane)
            return []
        _log.warning("update %s: backend %s failed: %s", self._update, lane.backend, reason)
        lane.exporter.abort()
        oldest = stream.seq
        while oldest - 1 in held:
            oldest -= 1
        moved = self._ask(moving, range(oldest, stream.seq + 1))
        first |= moved
        fresh = self._open(lane, moved, reason)
        stream.remove(lane)
        self._part(lane, moved)
        return fresh[::-1]

    def _catch_up(
        self, stream: Stream, new: Lane, held: dict[int, Sent], first: dict[int, int], partial: Tensor | None
    ) -> TransportKitError | None:
        """Bring a new lane to where the old one was; what its backend failed by, where it did."""
        try:
            if new.receivers:  # they may be lost while another lane is brought there
                self._replay(stream, new, held, min(first[number] for number in new.receivers), partial)
        except FAILURES as failure:
            nobodys = self.part_with_lost(new, failure)
            if new.receivers:
                if nobodys:
                    raise
                return failure
        return None

    def _strike(self, lane: Lane, error: TransportKitError | None) -> str:
        """Note whom the backend does not serve any more in this update; returns why, in words."""
        there = {
            number: peer.stranded.reason or "it gave no reason"
            for number in lane.receivers
            if (peer := self._peers.find(number)) is not None
            and peer.stranded is not None
            and (peer.stranded.reason or error is None)
        }
        reason = "; ".join(f"receiver {n}: {text}" for n, text in there.items()) or str(error)
        if lane.bereft:  # of a receiver that was lost, which is nobody else's fault
            return reason
        for number in there or lane.receivers:
            text = there.get(number, reason)
            self._strikes[number, lane.backend] = wire.plain(f"failed in update {self._update}: {text}")
        return reason

    def _opening(self, lane: Lane, moving: Sequence[int]) -> Opening:
        return Opening(
            self._ground,
            moving,
            strikes=self._strikes,
            first_lane=1 + max(each.terms.lane for each in (lane, *self._lanes)),
            chunk_bytes=lane.terms.chunk_bytes,
            forgiving=self._roster.forgiving,
        )

    def _check_candidates(
        self, lane: Lane, moving: list[int], error: TransportKitError | None, reason: str
    ) -> list[int]:
        """Raise what failed where nothing else is left to try, or part with those for whom that is so.

        Returns:
            Those who can go on.
        """
        opening = self._opening(lane, moving)
        if not isinstance(opening.negotiate(), wire.Refusal):
            return moving
        if error is None:
            culprit = next(p for n in moving if (p := self._peers[n]).stranded is not None)
            text = f"{reason}; no other backend is left to go on with"
            error = PeerFailedError(
                f"{culprit.name} failed: BackendError: {text}", peer=culprit.name, code="BackendError", text=text
            )
        unserved = [number for number in moving if isinstance(opening.negotiate(number), wire.Refusal)]
        if not (self._roster.forgiving and unserved):
            raise error
        for number in unserved:
            self._peers[number].gone = self._peers[number].gone or error
        self._roster.settle()
        return [number for number in moving if self._roster.here(number)]

    def _ask(self, moving: Sequence[int], possible: range) -> dict[int, int]:
        """The first chunk that each of them has not taken; without those that are lost meanwhile.

        Args:
            possible: what they may say: the others they have acknowledged, or were never sent.
        """
        there = [peer for peer in map(self._peers.__getitem__, moving) if peer.stranded is None]
        self._peers.begin(there, wire.Reroute(self._update))

        def silent() -> list[int]:
            there = [each for n in moving if (each := self._peers.find(n)) is not None and each.stranded is None]
            return [each.number for each in there if each.number not in self._roster.applied]

        while silent():
            self._peers.wait(lambda: self._gone() or not silent(), silent, "word how far it is")
            self._roster.settle()
        first = {}
        for peer in [each for n in moving if (each := self._peers.find(n)) is not None]:
            if peer.stranded is None:
                continue  # its word that it has applied the update was on its way
            seq, peer.stranded = peer.stranded.seq, None
            if seq in possible:
                first[peer.number] = seq
            else:
                peer.gone = ProtocolError(f"{peer.name} says that it has not taken chunk {seq}, which cannot be")
        self._roster.settle()
        return first

    def _gone(self) -> bool:
        return any(peer.gone is not None for peer in self._peers)

    def _open(self, lane: Lane, first: dict[int, int], reason: str) -> list[Lane]:
        """Agree anew with those of a lane."""
        agreed = agree(self._roster, first, lambda left: self._opening(lane, left))
        if agreed is None:
            return []
        agreement, fresh = agreed
        self._lanes += fresh
        self._agreed(agreement)
        for each in agreement.assignments:
            chunk = first[each.receiver]
            self.told.append(f"receiver {each.receiver}: {lane.backend} to {each.backend} from chunk {chunk}: {reason}")
        if any(each.backend != lane.backend for each in agreement.assignments):
            self.again.update(first)
        return fresh

    def _replay(self, stream: Stream, new: Lane, held: dict[int, Sent], first: int, partial: Tensor | None) -> None:
        """Send again what was not taken, and copy what the slot at hand held."""
        for seq in range(first, stream.seq):
            sent = held[seq]
            slot = self._slot(new)
            if slot is None:
                return
            self._copy(new, slot, sent.memory)
            new.emit(
                slot,
                self._update,
                seq,
                sent.memory.numel(),
                last=sent.last,
                pieces=sent.pieces,
                specs=sent.specs,
                known=sent.digest,
            )
        if partial is not None:
            slot = self._slot(new)
            if slot is not None:
                self._copy(new, slot, partial)
                stream.give(new, slot)  # only now: what is at hand is what the next lane goes on from

    def _slot(self, lane: Lane) -> int | None:
        """A slot of the lane, waited for; None when its last receiver is lost meanwhile."""
        while lane.receivers:
            slot = lane.pool.acquire()
            if slot is not None:
                return slot
            self._peers.wait(
                lambda: lane.pool.free > 0 or self._gone() or self.stranded(lane),
                lane.pool.debtors,
                "word for a chunk",
            )
            if self._gone():
                self._roster.settle()
            if self.stranded(lane):
                raise BackendError(f"backend {lane.backend} failed at a receiver", backend=lane.backend)
        return None

    @staticmethod
    def _copy(lane: Lane, slot: int, memory: Tensor) -> None:
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # the stream that filled it is the old exporter's
        with lane.packing(slot):
            lane.slots[slot][: memory.numel()].copy_(memory)

    def _part(self, lane: Lane, moved: Sequence[int] | dict[int, int]) -> None:
        """These have another lane now; the old one stays only where somebody is still on it, who is through."""
        for number in [number for number in moved if number in lane.receivers]:
            try:
                lane.drop(number)
            except TransportKitError as error:
                _log.info("backend %s: dropping receiver %s failed: %s", lane.backend, number, error)
        if lane.receivers:
            self.again.update(lane.receivers, moved)
        elif lane in self._lanes:
            self._lanes.remove(lane)


def agree(
    roster: Roster, numbers: Iterable[int], opening: Callable[[list[int]], Opening]
) -> tuple[wire.Agreement, list[Lane]] | None:
    """Agree with these receivers in the course of an update, or with those that are not lost meanwhile.

    Raises what `Opening.run` raises, unless it stands for a loss after which the update goes on.
    """
    left = list(numbers)
    while left:
        try:
            return opening(left).run()
        except (PeerError, DeadlineError, NegotiationError):
            roster.settle()
            if left == (left := [number for number in left if roster.here(number)]):
                raise
    return None
