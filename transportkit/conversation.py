"""The order of messages in a handshake: which may follow which on one link; no I/O and no choice belongs here.

The conversation between a sender (S) and one receiver (R)::

    START --hello of one, hello of the other--> GREETED
    GREETED     S proposal --> PROPOSED      S refusal --> ENDED      S inspected --> ENDED
    PROPOSED    R joined --> JOINED          R declined --> GREETED
    JOINED      S connect --> CONNECTING     S proposal --> PROPOSED  (another receiver of the lane declined)
    CONNECTING  S chunk, R ack, signal of either --> CONNECTING   R proof --> PROVEN    R declined --> GREETED
    PROVEN      S agreed --> AGREED          S proposal --> PROPOSED  (another receiver's trial failed)
    AGREED      R stranded --> GREETED       S proposal --> PROPOSED  (the lane of a rerouted update, tried anew)
    any         waiting --> same state       S refusal, bye of either --> ENDED

A sender that gives a trial up sends the next proposal at once, so answers to the old one may still arrive; likewise
what it sent before it heard that its proposal was declined. Each carries the number of its proposal (``attempt``),
and stale ones are dropped before they reach the table.
"""

from __future__ import annotations

import enum

from transportkit.errors import ProtocolError
from transportkit.wire import (
    SIGNAL_LIMIT,
    SIGNALS_LIMIT,
    Ack,
    Agreed,
    Bye,
    Chunk,
    Connect,
    Declined,
    Hello,
    Inspected,
    Joined,
    Message,
    Proof,
    Proposal,
    Refusal,
    Role,
    Signal,
    Stranded,
    Waiting,
)


class State(enum.Enum):
    """Where the conversation on one link stands."""

    START = "start"
    SENDER_CAME = "sender came"
    RECEIVER_CAME = "receiver came"
    GREETED = "greeted"
    PROPOSED = "proposed"
    JOINED = "joined"
    CONNECTING = "connecting"
    PROVEN = "proven"
    AGREED = "agreed"
    ENDED = "ended"


TRANSITIONS: dict[tuple[State, Role, type], State] = {
    (State.START, "sender", Hello): State.SENDER_CAME,
    (State.START, "receiver", Hello): State.RECEIVER_CAME,
    (State.SENDER_CAME, "receiver", Hello): State.GREETED,
    (State.RECEIVER_CAME, "sender", Hello): State.GREETED,
    (State.GREETED, "sender", Proposal): State.PROPOSED,
    (State.GREETED, "sender", Inspected): State.ENDED,
    (State.PROPOSED, "receiver", Joined): State.JOINED,
    (State.PROPOSED, "receiver", Declined): State.GREETED,
    (State.PROPOSED, "sender", Proposal): State.PROPOSED,
    (State.JOINED, "sender", Connect): State.CONNECTING,
    (State.JOINED, "sender", Proposal): State.PROPOSED,
    (State.JOINED, "receiver", Declined): State.GREETED,
    (State.CONNECTING, "sender", Signal): State.CONNECTING,
    (State.CONNECTING, "receiver", Signal): State.CONNECTING,
    (State.CONNECTING, "sender", Chunk): State.CONNECTING,
    (State.CONNECTING, "receiver", Ack): State.CONNECTING,
    (State.CONNECTING, "receiver", Proof): State.PROVEN,
    (State.CONNECTING, "receiver", Declined): State.GREETED,
    (State.CONNECTING, "sender", Proposal): State.PROPOSED,
    (State.PROVEN, "sender", Agreed): State.AGREED,
    (State.PROVEN, "sender", Proposal): State.PROPOSED,
    (State.AGREED, "receiver", Stranded): State.GREETED,
    (State.AGREED, "sender", Proposal): State.PROPOSED,
}
for _state in State:
    if _state not in (State.AGREED, State.ENDED):
        for _role in ("sender", "receiver"):
            TRANSITIONS[_state, _role, Waiting] = _state
            TRANSITIONS[_state, _role, Bye] = State.ENDED
            TRANSITIONS[_state, _role, Refusal] = State.ENDED


class Conversation:
    """The handshake on one link, seen from either side.

    Args:
        me: this side's role.
    """

    def __init__(self, me: Role) -> None:
        self.me: Role = me
        self.peer: Role = "receiver" if me == "sender" else "sender"
        self.state = State.START
        self.attempt = 0
        self._signals = 0  # of the peer, in this attempt

    def sent(self, message: Message) -> None:
        """This side sent it. Raises `ProtocolError` if it may not, which is a fault of ours."""
        self._step(self.me, message)

    def received(self, message: Message) -> bool:
        """The peer sent it; False when it answers an earlier proposal and is to be dropped.

        Raises `ProtocolError` when it may not come now.
        """
        if self._stale(message):
            return False
        self._step(self.peer, message)
        return True

    def _stale(self, message: Message) -> bool:
        match message:
            case Connect():
                return message.attempt < self.attempt + self._declined
            case Signal():
                return message.attempt < self.attempt + (self._declined and self.me == "receiver")
            case Chunk():
                return message.update < 0 and -message.update < self.attempt + self._declined
            case Joined() | Declined() | Proof():
                return message.attempt < self.attempt
            case Ack():
                return message.update < 0 and -message.update < self.attempt
            case _:
                return False

    @property
    def _declined(self) -> bool:
        """Whether the last proposal was: what the sender sent before it heard of that may still arrive."""
        return self.state is State.GREETED and self.attempt > 0

    def _step(self, role: Role, message: Message) -> None:
        following = TRANSITIONS.get((self.state, role, type(message)))
        if following is None:
            raise ProtocolError(
                f"the {role} sent {type(message).__name__.lower()} where the handshake is {self.state.value}"
            )
        if isinstance(message, Proposal):
            if message.attempt <= self.attempt:
                raise ProtocolError(f"proposal {message.attempt} came after proposal {self.attempt}")
            self.attempt = message.attempt
            self._signals = 0
        elif isinstance(message, Joined | Declined | Connect | Signal | Proof) and message.attempt != self.attempt:
            raise ProtocolError(f"an answer to proposal {message.attempt} came, but only {self.attempt} were made")
        elif isinstance(message, Hello) and message.role != role:
            raise ProtocolError(f"both ends are {message.role}s; connect a receiver (`connect`) to a sender (`serve`)")
        elif isinstance(message, Signal):
            self._bound(role, message)
        self.state = following

    def _bound(self, role: Role, message: Signal) -> None:
        if len(message.data) > SIGNAL_LIMIT:
            raise ProtocolError(f"the {role} sent a signal of {len(message.data)} bytes, {SIGNAL_LIMIT} are allowed")
        self._signals += role == self.peer
        if role == self.peer and self._signals > SIGNALS_LIMIT:
            raise ProtocolError(f"the {role} sent more than {SIGNALS_LIMIT} signals for one proposal")
