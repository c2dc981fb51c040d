"""The sender's side of a handshake: proposes, lets the backends meet, and puts each agreement to the trial."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

import attrs
import msgspec

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, NegotiationError, PeerError, PeerFailedError, ProtocolError
from transportkit.handshake import LanePlan, Outcome, negotiate
from transportkit.lifecycle import host_slots, memory_of
from transportkit.session.lane import Lane, acknowledge
from transportkit.session.wiring import LinkWiring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transportkit.registry import Choice
    from transportkit.session.peers import Peer, Peers
    from transportkit.transport import Exporter
    from transportkit.wire import Agreement, Hello, Site

_log = logging.getLogger("transportkit")

TRIAL_BYTES = 16


@attrs.frozen
class Ground:
    """What every handshake of a session stands on.

    Args:
        peers: the receivers.
        hello: the sender's hello.
        choice: the sender's backends.
        inherited: per backend, what `Transport.inherit` made.
        session: the session's id, hex.
    """

    peers: Peers
    hello: Hello
    choice: Choice
    inherited: dict[str, object]
    session: str = attrs.field(factory=lambda: os.urandom(8).hex())


class Opening:
    """One handshake of a sender with some of its receivers, whose hellos have come.

    What the others say meanwhile goes where it went before.

    Args:
        ground: what the session's handshakes stand on.
        numbers: the receivers that are to be agreed with.
        strikes: what is out of the question from the start; grows with what is tried in vain.
        first_lane: number of the first lane.
        chunk_bytes: bound of the chunks, besides those of both sides' wishes.
        forgiving: whether one that no backend serves costs only itself (`Peer.gone`), as long as there are others.
    """

    def __init__(
        self,
        ground: Ground,
        numbers: Iterable[int],
        *,
        strikes: dict[tuple[int, str], str] | None = None,
        first_lane: int = 0,
        chunk_bytes: int | None = None,
        forgiving: bool = False,
    ) -> None:
        self._peers = ground.peers
        self._numbers = frozenset(numbers)
        self._hello = ground.hello
        if chunk_bytes is not None:
            limits = wire.Limits(min(chunk_bytes, self._hello.limits.chunk_bytes), self._hello.limits.slots)
            self._hello = msgspec.structs.replace(self._hello, limits=limits)
        self._choice = ground.choice
        self._inherited = ground.inherited
        self._session = ground.session
        self._first_lane = first_lane
        self._forgiving = forgiving
        self._strikes = {} if strikes is None else strikes
        self._attempt = max(peer.conversation.attempt for peer in self._members)
        self._elsewhere = ground.peers.on_message
        self._lanes: list[Lane] = []
        self._proposed: dict[int, str] = {}
        self._replies: dict[int, wire.Joined] = {}
        self._proofs: dict[int, bytes] = {}

    @property
    def _members(self) -> list[Peer]:
        return [self._peers[number] for number in sorted(self._numbers)]

    def negotiate(self, *alone: int) -> Outcome | wire.Refusal:
        """What would be agreed now, with all or only with these, without a word to anybody."""
        return negotiate(
            self._hello,
            {number: self._peers[number].hello for number in alone or sorted(self._numbers)},
            self._choice.transports,
            session=self._session,
            token=os.urandom(32),
            strikes=self._strikes,
            first_lane=self._first_lane,
        )

    def run(self) -> tuple[Agreement, list[Lane]]:
        """Agree with every one of them.

        Returns:
            The agreement and its lanes, each proven by a trial.

        Raises:
            NegotiationError: a receiver is left without a backend; all of them, where this is `forgiving`.
            PeerError: a receiver was lost or gave up.
            DeadlineError: a receiver made no progress.
        """
        self._peers.on_message, minded = self._take, self._peers.minded
        self._peers.minded = self._numbers
        try:
            while True:
                self._attempt += 1
                outcome = self.negotiate()
                if isinstance(outcome, wire.Refusal):
                    self._refuse(outcome)
                    self._peers.minded = self._numbers
                    continue
                if self._attempt_once(outcome):
                    # Whoever is lost from here on is no reason to propose anew to those who have heard of it.
                    self._peers.minded = minded
                    for peer in self._members:
                        self._send(peer, wire.Agreed(outcome.agreement.only(peer.number)))
                    return outcome.agreement, list(self._lanes)
                self._close_lanes()
        except BaseException:
            self._close_lanes()
            raise
        finally:
            self._peers.on_message, self._peers.minded = self._elsewhere, minded

    def _refuse(self, refusal: wire.Refusal) -> None:
        """Part with those that no backend serves. Raises `NegotiationError` where nobody else is left."""
        error = NegotiationError(refusal.text, agreement=refusal.agreement)
        refusals = {n: told for n in sorted(self._numbers) if isinstance(told := self.negotiate(n), wire.Refusal)}
        if not (self._forgiving and refusals):
            refusals = dict.fromkeys(sorted(self._numbers), refusal)
        for number, told in refusals.items():
            peer = self._peers[number]
            self._send(peer, told)
            if self._forgiving:
                peer.gone = peer.gone or NegotiationError(told.text, agreement=told.agreement)
        if self._numbers == refusals.keys():
            raise error
        self._numbers -= refusals.keys()

    # -- one attempt --------------------------------------------------------------------------------------------------

    def _attempt_once(self, outcome: Outcome) -> bool:
        """Propose, meet and try; False when a strike asks for another round."""
        before = len(self._strikes)
        self._replies.clear()
        self._proofs.clear()
        invitations: dict[int, msgspec.Raw] = {}
        exporters = [self._make(plan, invitations) for plan in outcome.lanes]
        if len(self._strikes) > before:
            for exporter in exporters:
                if exporter is not None:
                    exporter.close()
            return False
        for plan, exporter in zip(outcome.lanes, exporters, strict=True):
            assert exporter is not None
            try:
                self._lanes.append(Lane(plan.terms, exporter, self._peers))
            except BackendError as error:
                exporter.close()
                self._strike_lane(plan.terms, str(error))
                return False
        for plan in outcome.lanes:
            for number, terms in plan.importers.items():
                self._proposed[number] = terms.backend
                proposal = wire.Proposal(self._attempt, terms, outcome.agreement.only(number), invitations[number])
                self._send(self._peers[number], proposal)
        self._wait_for(self._replies, before, "answer to the proposal")
        if len(self._strikes) > before:
            return False
        for lane in self._lanes:
            if not self._guarded(lane, functools.partial(self._meet, lane)):
                return False
        secret = os.urandom(TRIAL_BYTES)
        for lane in self._lanes:
            if not self._guarded(lane, functools.partial(self._try, lane, secret)):
                return False
        for number, proof in self._proofs.items():
            if proof != secret:
                backend = outcome.agreement.backend(number)
                self._strike(number, backend, "other bytes arrived than were sent")
        return len(self._strikes) == before

    def _make(self, plan: LanePlan, invitations: dict[int, msgspec.Raw]) -> Exporter | None:
        terms = plan.terms
        links = {number: self._peers[number].link for number in terms.receivers}
        site = self._site(terms.receivers[0])
        wiring = LinkWiring(
            site,
            links,
            self._inherited.get(terms.backend),
            lambda: self._check(terms),
            lambda number, data: self._signal(terms, number, data),
            side_by_side=lambda: len(self._peers) > 1,
            allow_plaintext=self._hello.wishes.allow_plaintext,
        )
        exporter = None
        try:
            exporter = self._choice.transports[terms.backend].exporter(terms, wiring)
            for number in terms.receivers:
                invitations[number] = exporter.invite(number)
        except Exception as error:
            if isinstance(error, PeerError):
                raise
            if exporter is not None:
                exporter.close()
            self._strike_lane(terms, _reason(error))
            return None
        return exporter

    def _meet(self, lane: Lane) -> None:
        for number in lane.receivers:
            with lane.translated():
                lane.exporter.admit(number, self._replies[number].reply)
        for number in lane.receivers:
            self._send(self._peers[number], wire.Connect(self._attempt, number))
        with lane.translated():
            lane.exporter.connect(Deadline(self._peers.timeout / 2, f"connection over {lane.backend}"))

    def _try(self, lane: Lane, secret: bytes) -> None:
        size = min(lane.terms.chunk_bytes, TRIAL_BYTES)
        parts = [secret[at : at + size] for at in range(0, TRIAL_BYTES, size)]
        for seq, part in enumerate(parts):
            self._peers.wait(lambda: lane.pool.free > 0 or self._struck(lane), lane.pool.debtors, "word for the trial")
            self._check(lane.terms)
            slot = lane.pool.acquire()
            assert slot is not None
            with lane.translated(), lane.packing(slot):
                self._write(lane, slot, part)
            last = seq == len(parts) - 1
            lane.emit(slot, -self._attempt, seq, len(part), last=last, pieces=())
        self._peers.wait(
            lambda: all(n in self._proofs for n in lane.receivers) or self._struck(lane),
            lambda: [n for n in lane.receivers if n not in self._proofs],
            "proof of the trial",
        )
        self._check(lane.terms)

    @staticmethod
    def _write(lane: Lane, slot: int, part: bytes) -> None:
        staged = host_slots(1, len(part))[0]
        memory_of(staged)[:] = part
        lane.slots[slot][: len(part)].copy_(staged)

    # -- strikes ------------------------------------------------------------------------------------------------------

    def _guarded(self, lane: Lane, step: Callable[[], None]) -> bool:
        """Run one step of a lane; a failure of its backend is a strike, not an error."""
        try:
            step()
        except (BackendError, DeadlineError) as error:
            if isinstance(error, DeadlineError) and error.silent:
                raise
            if not self._struck(lane):
                self._strike_lane(lane.terms, _reason(error))
            return False
        return True

    def _strike(self, number: int, backend: str, reason: str) -> None:
        _log.info("receiver %s: backend %s failed its trial: %s", number, backend, reason)
        self._strikes[number, backend] = wire.plain(f"trial failed: {reason}")

    def _strike_lane(self, terms: wire.Terms, reason: str) -> None:
        for number in terms.receivers:
            self._strike(number, terms.backend, reason)

    def _struck(self, lane: Lane) -> bool:
        return any((number, lane.backend) in self._strikes for number in lane.receivers)

    def _check(self, terms: wire.Terms) -> None:
        """What backends call while they wait: raises where a receiver of theirs is gone or has given them up."""
        self._peers.poll()
        for number in terms.receivers:
            peer = self._peers.find(number)
            if peer is not None and peer.gone is not None:
                raise peer.gone
            if peer is not None and peer.stranded is not None:
                raise BackendError(peer.stranded.reason or f"{peer.name} gave it up", backend=terms.backend)
            if (number, terms.backend) in self._strikes:
                raise BackendError(self._strikes[number, terms.backend], backend=terms.backend)

    def _signal(self, terms: wire.Terms, number: int, data: msgspec.Raw) -> None:
        """Send a backend's word, unless the lane's receivers have given the backend up meanwhile."""
        self._check(terms)
        self._send(self._peers[number], wire.Signal(self._attempt, number, data))

    def _hear(self, peer: Peer, message: wire.Signal) -> None:
        """Hand a backend's word to its exporter; what that raises speaks against the backend only."""
        if message.receiver != peer.number:
            raise ProtocolError(f"{peer.name} sent a signal as receiver {message.receiver}")
        for lane in self._lanes:
            if peer.number in lane.receivers and not self._struck(lane):
                try:
                    with lane.translated():
                        lane.exporter.hear(peer.number, message.data)
                except (BackendError, ProtocolError) as error:
                    self._strike(peer.number, lane.backend, str(error))

    def _close_lanes(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _wait_for(self, answers: dict[int, wire.Joined], strikes: int, what: str) -> None:
        def missing() -> list[int]:
            return [number for number in self._numbers if number not in answers]

        self._peers.wait(lambda: not missing() or len(self._strikes) > strikes, missing, what)

    def _send(self, peer: Peer, message: wire.Message) -> None:
        peer.conversation.sent(message)
        peer.agreeing = not isinstance(message, wire.Agreed)
        self._peers.send(peer, message)

    def _site(self, number: int) -> Site:
        return msgspec.structs.replace(self._hello.site, link=self._peers[number].link.kind)

    def _take(self, peer: Peer, message: wire.Message) -> bool | None:
        late = isinstance(message, wire.Ack) and message.update > 0  # of a lease that it held, before it saw a proposal
        if peer.number not in self._numbers or late:
            return self._elsewhere(peer, message)
        if not peer.conversation.received(message):
            return False
        match message:
            case wire.Joined():
                self._replies[peer.number] = message
            case wire.Declined() if message.backend == self._proposed.get(peer.number):
                self._strike(peer.number, message.backend, message.reason)
            case wire.Ack():
                acknowledge(self._lanes, message, peer.number)
            case wire.Signal():
                self._hear(peer, message)
            case wire.Proof():
                self._proofs[peer.number] = message.read
            case wire.Refusal():
                raise PeerFailedError(
                    f"{peer.name} refused: {message.text}", peer=peer.name, code=message.code, text=message.text
                )
            case _:
                raise ProtocolError(f"{peer.name} sent {type(message).__name__.lower()} in the handshake")
        return True


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BackendError | DeadlineError) else f"{type(error).__name__}: {error}"
