"""A sender's receivers: their links, what they last said, and waiting for them; what is said is decided elsewhere."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    DeadlineError,
    PeerClosedError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    ProtocolError,
    TransportKitError,
)
from transportkit.handshake import peer_text
from transportkit.link import wait as wait_links
from transportkit.link.base import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from transportkit.conversation import Conversation
    from transportkit.link import Link

MESSAGES_AT_ONCE = 1000
"""Most messages of one peer that are taken in before the others, and the deadlines, get their turn."""


BEATS = 4
"""How often a side that waits says so within the shorter of both sides' timeouts."""

SHORTEST_BEAT = 0.005
"""Least time between two such words, in seconds, however short a timeout the other side claims."""


class Peer:
    """One receiver of a sender.

    Args:
        number: its number in the session.
        link: the link to it.
        hello: what it said of itself; None while that is still to come.
        conversation: the handshake on the link so far.
    """

    def __init__(self, number: int, link: Link, hello: wire.Hello | None, conversation: Conversation) -> None:
        self.number = number
        self.link = link
        self._hello: wire.Hello | None = None
        self.conversation = conversation
        self.heard = time.monotonic()
        self.waited = 0.0
        link.control_limit = wire.HANDSHAKE_FRAME_LIMIT
        self.ready = False
        """Whether it has said that it waits for an update, and none was begun since."""
        self.away = False
        """Whether it has taken that word back."""
        self.gone: TransportKitError | None = None
        """Why nothing more comes from it: it said goodbye, was lost, was silent, or cannot be understood."""
        self.stranded: wire.Stranded | None = None
        """What it said when the backend of its lane failed in mid-update; None once it is on another lane."""
        self.agreeing = False
        """Whether a handshake is under way with it: until that is over it hears nothing else, but for its end."""
        self.manifest_id = ""
        """Digest of the manifest of the last update that it applied, whose plan it knows."""
        if hello is not None:
            self.greet(hello)

    def greet(self, hello: wire.Hello) -> None:
        """Its hello has come."""
        self._hello = hello
        self.link.peer = self.name

    @property
    def greeted(self) -> bool:
        return self._hello is not None

    @property
    def hello(self) -> wire.Hello:
        assert self._hello is not None
        return self._hello

    @property
    def name(self) -> str:
        return f"receiver {self.number} ({self.link.peer if self._hello is None else peer_text(self._hello)})"


class Peers:
    """All receivers of a sender.

    Args:
        timeout: bound on the lack of progress, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._peers: dict[int, Peer] = {}
        self._beaten = time.monotonic()
        self.on_message: Callable[[Peer, wire.Message], bool | None] = self._nothing_due
        """Takes what a peer says; returns False for what is no progress."""
        self.last: TransportKitError | None = None
        """What made the receiver go that was removed last."""
        self.minded: frozenset[int] | None = None
        """The receivers whose loss is raised; that of others is only noted (`Peer.gone`). None for all."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def __getitem__(self, number: int) -> Peer:
        return self._peers[number]

    def find(self, number: int) -> Peer | None:
        """The peer of this number, unless it is gone for good."""
        return self._peers.get(number)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(self._peers)

    @property
    def beat(self) -> float:
        """How often, at least, a wait tells the peers that this side is alive, in seconds."""
        return max(SHORTEST_BEAT, min([self.timeout, *(peer.hello.timeout for peer in self if peer.greeted)]) / BEATS)

    def add(self, peer: Peer) -> None:
        self._peers[peer.number] = peer

    def remove(self, peer: Peer) -> None:
        """Hang up on a peer and forget it."""
        del self._peers[peer.number]
        self.last = peer.gone
        peer.link.close()

    def send(self, peer: Peer, message: wire.Message) -> None:
        """Send one message, within `timeout` without progress."""
        try:
            peer.link.send(wire.encode(message), self._room(peer))
        except TransportKitError as error:
            self._lose(peer, self._explained(peer, error))

    def begin(self, peers: Iterable[Peer], message: wire.Message) -> None:
        """Send one message to several, as far as there is room: `flush` and every `wait` write the rest, to all of
        them side by side.
        """
        data = wire.encode(message)
        for peer in peers:
            try:
                peer.link.begin(data, self._room(peer))
            except TransportKitError as error:
                self._lose(peer, self._explained(peer, error))

    def flush(self) -> None:
        """Write what was begun. Each peer has `timeout` without progress for it, and all of them have it at once.

        Raises what a peer that is `minded` is lost by.
        """
        behind = [peer for peer in self if peer.link.backlog and peer.gone is None]
        rooms = {peer: self._room(peer) for peer in behind}
        events: dict[int, int] = {}
        while behind:
            poller = select.poll()
            lost: dict[Peer, TransportKitError] = {}
            for peer in behind:
                try:
                    fileno, before = peer.link.fileno(), peer.link.backlog
                    peer.link.push(events.get(fileno, 0))
                    if peer.link.backlog < before:
                        rooms[peer].renew()
                        peer.heard = time.monotonic()  # it reads, so what it owes is not overdue yet
                    rooms[peer].check()
                    poller.register(fileno, peer.link.push_events())
                except TransportKitError as error:
                    lost[peer] = self._explained(peer, error)
            self._lose_all(lost)
            events.clear()
            before, behind = len(behind), [peer for peer in behind if peer.link.backlog and peer.gone is None]
            if len(behind) == before:
                self.keep_alive()
                left = min(rooms[peer].remaining(self.beat) or 0.0 for peer in behind)
                events.update(poller.poll(milliseconds(left)))

    def _room(self, peer: Peer) -> Deadline:
        return Deadline(self.timeout, f"room on the link to {peer.name}")

    def _explained(self, peer: Peer, error: TransportKitError) -> TransportKitError:
        """What an error of writing to a peer stands for."""
        if isinstance(error, DeadlineError):
            told: TransportKitError = DeadlineError(str(error), silent=True)
            told.__cause__ = error
            return told
        if isinstance(error, PeerLostError):
            # It takes nothing more, yet what it said before it went may say why.
            self.drain(peer)
            if isinstance(peer.gone, PeerFailedError | PeerClosedError):
                peer.gone.__cause__ = error
                return peer.gone
        return error

    def _lose(self, peer: Peer, error: TransportKitError) -> None:
        """Nothing more can be had of this peer. Raises the error where it is `minded`."""
        self._lose_all({peer: error})

    def _lose_all(self, lost: dict[Peer, TransportKitError]) -> None:
        """As `_lose`; all of them are noted before anything is raised, lest each costs the others another `timeout`."""
        for peer, error in lost.items():
            peer.gone = peer.gone or error
        for peer, error in lost.items():
            if self._minds(peer):
                raise error

    def _minds(self, peer: Peer) -> bool:
        return self.minded is None or peer.number in self.minded

    def tell(self, message: wire.Message) -> None:
        """Send a message to every peer as far as that goes without waiting; losses are found elsewhere."""
        for peer in self:
            try:
                peer.link.try_send(wire.encode(message))
            except (TransportKitError, OSError):
                continue

    def poll(self) -> None:
        """Take in every message that is there, without waiting.

        Raises what `on_message` raises, and `PeerError` where a peer is gone.
        """
        self._take_in()
        self._check_present(self)

    def wait(
        self,
        until: Callable[[], bool],
        debtors: Callable[[], Iterable[int]],
        what: str,
        *,
        deadline: Deadline | None = None,
        prompt: Callable[[], Iterable[int]] = tuple,
        began: float | None = None,
    ) -> None:
        """Wait until ``until()`` holds, taking messages in and telling everybody that this side is alive.

        Args:
            until: looked at after every message, and not before all that was begun is written.
            debtors: the receivers that are waited for; each must be heard of within `timeout`, and be there. One that
                has given its word may leave.
            what: what is waited for, in words.
            deadline: bounds the whole wait instead, whoever is heard of.
            prompt: the receivers that must be heard of within `timeout` all the same.
            began: since when this is waited for, by the monotonic clock; by default from now on.

        Raises:
            DeadlineError: naming who was silent.
        """
        began = time.monotonic() if began is None else began
        while True:
            self.flush()
            self._take_in()
            if until():
                return
            now = time.monotonic()
            owing = [self._peers[n] for n in debtors() if n in self._peers]
            self._check_present(owing)
            owing = [peer for peer in owing if peer.gone is None]
            pause = self.beat
            if deadline is not None:
                deadline.check()
                pause = deadline.remaining(pause) or 0.0
            silent = owing or list(self) if deadline is None else [self._peers[n] for n in prompt()]
            silent = [peer for peer in silent if peer.gone is None]
            if silent:
                left = {peer: max(began, peer.heard) + self.timeout - now for peer in silent}
                overdue = sorted((peer for peer in silent if left[peer] <= 0), key=lambda peer: peer.heard)
                told = f"sent no {what} within {self.timeout:g} s (raise `timeout=` where that is too short)"
                self._lose_all({peer: DeadlineError(f"{peer.name} {told}", silent=True) for peer in overdue})
                if overdue:
                    continue
                pause = min(pause, *left.values())
            self.keep_alive()
            try:
                wait_links([peer.link for peer in self if peer.gone is None], Deadline(pause, what))
            except DeadlineError:
                pass
            for peer in owing:
                peer.waited += time.monotonic() - now

    def keep_alive(self) -> None:
        """Tell everybody that this side is alive, where that is due."""
        now = time.monotonic()
        if now - self._beaten >= self.beat:
            self._beaten = now
            self.tell(wire.Waiting())

    def drain(self, peer: Peer) -> None:
        """Take in every message of one peer that is there, without waiting; notes when it is gone."""
        for _ in range(MESSAGES_AT_ONCE):  # one that never stops talking must not keep this side from its deadlines
            if peer.gone is not None:
                return
            try:
                if not peer.link.poll():
                    return
            except PeerLostError as error:
                peer.gone = error
                return
            deadline = Deadline(self.timeout, f"rest of a message from {peer.name}")
            frame = peer.link.recv(deadline, peer.link.control_limit)
            message = wire.decode(frame)
            if isinstance(message, wire.Waiting):
                continue  # being alive is no progress: what it owes, it owes
            if isinstance(message, wire.Bye):
                peer.gone = farewell(message, peer.name)
                return
            if isinstance(message, wire.Ready):
                peer.ready, peer.away = message.waits, not message.waits
            elif self.on_message(peer, message) is not False:
                peer.heard = time.monotonic()

    def _take_in(self) -> None:
        for peer in list(self):
            try:
                self.drain(peer)
            except TransportKitError as error:
                self._lose(peer, error)

    def _check_present(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            if peer.gone is not None and self._minds(peer):
                raise peer.gone

    def _nothing_due(self, peer: Peer, message: wire.Message) -> None:
        raise unexpected(message, peer.name)


def code_of(error: BaseException) -> str:
    """The name by which the other side learns what kind of error this is: that of its documented class."""
    return next(
        (c.__name__ for c in type(error).__mro__ if c.__module__ == "transportkit.errors"), type(error).__name__
    )


def farewell(message: wire.Bye, name: str) -> PeerError:
    """The error that a peer's last message stands for."""
    if message.code:
        return PeerFailedError(
            f"{name} ended the session: {message.code}: {message.text}", peer=name, code=message.code, text=message.text
        )
    return PeerClosedError(f"{name} closed the session", peer=name)


def unexpected(message: wire.Message, name: str) -> ProtocolError:
    """The error for a message that may not come now."""
    return ProtocolError(f"{name} sent {type(message).__name__.lower()}, which may not come now")
