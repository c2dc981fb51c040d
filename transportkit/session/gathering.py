"""A sender that waits for its receivers: who arrives, who is turned away, and who only asks."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.conversation import Conversation
from transportkit.deadline import Deadline
from transportkit.errors import ClosedError, DeadlineError, ProtocolError, TransportKitError
from transportkit.handshake import negotiate, peer_text
from transportkit.link import wait as wait_links
from transportkit.link.base import close_in_child
from transportkit.listener import Listener
from transportkit.session.peers import Peer, code_of, unexpected

if TYPE_CHECKING:
    from transportkit.link import Link
    from transportkit.registry import Choice
    from transportkit.session.peers import Peers

_log = logging.getLogger("transportkit")

LATE_LIMIT = 1024
"""Most receivers that are held until they are admitted."""


class Gathering:
    """The places of a sender, and the listener that fills them.

    Args:
        peers: filled with the receivers.
        places: how many receivers are waited for.
        hello: the sender's hello.
        choice: the sender's backends, for those who only inspect.
        late: hold surplus receivers until they are admitted, instead of refusing them.
    """

    def __init__(self, peers: Peers, places: int, hello: wire.Hello, choice: Choice, *, late: bool = False) -> None:
        self._peers = peers
        self._places = places
        self._hello = hello
        self._choice = choice
        self._arrived: collections.deque[tuple[Link, wire.Hello]] = collections.deque()
        self._late: collections.deque[tuple[Link, wire.Hello]] | None = collections.deque() if late else None
        self._next = places
        self._taken = 0
        self._lost = 0
        self._lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener: Listener | None = None
        self._aborted = False
        close_in_child(self)

    def listen(self, address: str, authkey: bytes | None, timeout: float) -> str:
        """Bind and start to listen; returns the address, with the port that was chosen."""
        self._listener = Listener(
            address, authkey=authkey, timeout=timeout, on_arrival=self._arrive, user_timeout=timeout
        )
        self._listener.start()
        return self._listener.address

    @property
    def failures(self) -> int:
        """How many connections came to nothing before they were agreed."""
        return self._lost + (0 if self._listener is None else self._listener.failures)

    @property
    def short(self) -> bool:
        """Whether a receiver is missing who cannot come: the links were brought along, and one of them is lost."""
        return self._listener is None and len(self._peers) < self._places

    def seat(self, link: Link) -> None:
        """Take in a receiver over a link that exists already; its hello is still to come."""
        self._hosts(link, None)

    def wait(self, deadline: Deadline) -> None:
        """Wait until every place is taken and every hello has come. A receiver that is lost meanwhile gives its place
        back.

        Raises:
            DeadlineError: not in time; those who came stay.
            ClosedError: `abort` was called.
            TransportKitError: a receiver on a link that was brought along failed: nobody can take its place.
        """
        while True:
            self._check()
            self._take_in()
            for peer in list(self._peers):
                try:
                    self._peers.drain(peer)
                    if peer.gone is not None:
                        raise peer.gone
                except TransportKitError as error:
                    self._check()
                    self._lose(peer, error)
            if len(self._peers) == self._places and all(p.greeted for p in self._peers):
                return
            if deadline.expired():
                raise self._too_few(deadline)
            self._peers.keep_alive()
            pause = Deadline(deadline.remaining(cap=self._peers.beat), deadline.what)
            with contextlib.suppress(DeadlineError):
                wait_links([peer.link for peer in self._peers], pause, [self._wake])
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)

    def _too_few(self, deadline: Deadline) -> DeadlineError:
        came = f"{len(self._peers)} of {self._places} receivers" if len(self._peers) else "no receiver"
        where = "" if self._listener is None else f" to {self._listener.address}"
        failed = (
            f"; {self.failures} connections came to nothing (`failures`; the log says why)" if self.failures else ""
        )
        return DeadlineError(
            f"{came} came{where} within {deadline.seconds or 0:g} s{failed}; "
            f"start the others, or raise `{deadline.keyword}=`"
        )

    @property
    def holds(self) -> bool:
        """Whether surplus receivers are held."""
        return self._late is not None

    @property
    def late(self) -> int:
        """How many receivers are held until they are admitted."""
        with self._lock:
            return len(self._late or ())

    def admit(self, deadline: Deadline) -> list[Peer]:
        """Take in the receivers that are held; waits for one until the deadline, and returns none if none comes.

        Raises:
            ClosedError: `abort` was called.
        """
        while True:
            self._check()
            admitted: list[Peer] = []
            while (arrival := self._next_late()) is not None:
                number, self._next = self._next, self._next + 1
                self._hosts(*arrival, number)
                peer = self._peers.find(number)
                if peer is not None:
                    admitted.append(peer)
            if admitted or deadline.expired():
                return admitted
            self._peers.keep_alive()
            with contextlib.suppress(DeadlineError):
                wait_links([], Deadline(deadline.remaining(cap=self._peers.beat), deadline.what), [self._wake])
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)

    def _next_late(self) -> tuple[Link, wire.Hello] | None:
        """The next receiver that is held and still there."""
        with self._lock:
            while self._late:
                arrival = self._late.popleft()
                if self._is_there(*arrival):
                    return arrival
        return None

    def dismiss(self, error: BaseException) -> None:
        """Let every receiver go, with the reason; their places are free again."""
        message = wire.Bye(code_of(error), wire.plain(str(error)))
        self._peers.tell(message)
        for peer in list(self._peers):
            self._peers.remove(peer)
        with self._lock:
            self._taken = len(self._arrived)

    def abort(self) -> None:
        """Make `wait` raise `ClosedError`, now or later. From any thread; never blocks."""
        with self._lock:
            self._aborted = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop listening, hang up on those who wait. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for waiting in (self._arrived, self._late or ()):
            for link, _ in waiting:
                link.close()
        self._arrived.clear()
        if self._late is not None:
            self._late.clear()
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def lose(self) -> None:
        """In a forked child: close the descriptor."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # -- on the thread of the call ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._aborted:
            raise ClosedError("this Sender was aborted")

    def _take_in(self) -> None:
        while True:
            with self._lock:
                if not self._arrived:
                    return
                link, hello = self._arrived.popleft()
            self._hosts(link, hello)

    def _hosts(self, link: Link, hello: wire.Hello | None, number: int | None = None) -> None:
        if number is None:
            number = next(n for n in range(self._places + 1) if n not in self._peers.numbers)
        peer = Peer(number, link, hello, Conversation("sender"))
        self._peers.add(peer)
        self._peers.on_message = self._greet
        if hello is not None:
            peer.conversation.received(hello)
        try:
            peer.conversation.sent(self._hello)
            self._peers.send(peer, self._hello)
        except TransportKitError as error:
            self._lose(peer, error)

    def _greet(self, peer: Peer, message: wire.Message) -> None:
        peer.conversation.received(message)
        if not isinstance(message, wire.Hello):
            raise ProtocolError(f"{peer.name} sent {type(message).__name__.lower()} before its hello")
        peer.greet(message)

    def _lose(self, peer: Peer, error: TransportKitError) -> None:
        _log.info("%s left before anything was agreed: %s", peer.name, error)
        with self._lock:
            self._lost += self._listener is not None
        with contextlib.suppress(TransportKitError):
            peer.link.try_send(wire.encode(wire.Refusal(code_of(error), wire.plain(str(error)))))
        self._peers.remove(peer)
        if self._listener is None:
            raise error
        with self._lock:
            if peer.number < self._places:
                self._taken -= 1
                self._move_up()

    def _move_up(self) -> None:
        """Give the places that are free to those who are held."""
        while self._late and self._taken < self._places:
            self._taken += 1
            self._arrived.append(self._late.popleft())

    # -- on the listener's thread -------------------------------------------------------------------------------------

    def _arrive(self, link: Link, frame: bytes) -> None:
        try:
            hello = wire.decode(frame)
            if not isinstance(hello, wire.Hello):
                raise ProtocolError(f"it sent {type(hello).__name__.lower()} before its hello")
            if hello.intent == "mail":
                raise ProtocolError(
                    "a session's sender (`serve`) listens here, and takes no messages: "
                    "open an `Inbox` for an `Outbox`, or `connect` to this address"
                )
            if hello.role != "receiver":
                raise ProtocolError("both ends are senders; connect a receiver (`connect`) to a sender (`serve`)")
        except TransportKitError as error:
            self._refuse(link, error)
            return
        if hello.intent == "inspect":
            self._inspect(link, hello)
            return
        with self._lock:
            if self._taken >= self._places:
                self._sweep()
            room = self._taken < self._places
            if room:
                self._taken += 1
                self._arrived.append((link, hello))
            elif self._late is not None:
                room = len(self._late) < LATE_LIMIT
                if room:
                    self._late.append((link, hello))
            if room and self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if not room:
            told = f"all {self._places} places of this sender are taken (`receivers=`)"
            if self._late is not None:
                told += f", and {LATE_LIMIT} receivers wait to be admitted"
            self._refuse(link, ProtocolError(told))

    def _sweep(self) -> None:
        """Give the places back of those who left again before anybody looked at them."""
        for arrival in list(self._arrived):
            if not self._is_there(*arrival):
                self._arrived.remove(arrival)
                self._taken -= 1
        for arrival in list(self._late or ()):
            if self._late is not None and not self._is_there(*arrival):
                self._late.remove(arrival)
        self._move_up()

    @staticmethod
    def _is_there(link: Link, _: wire.Hello) -> bool:
        """Whether one who waits is still there; hangs up where it is not."""
        try:
            while link.poll():
                message = wire.decode(link.recv(Deadline(0, "message that is there")))
                if not isinstance(message, wire.Waiting):
                    raise unexpected(message, link.peer)
        except TransportKitError as error:
            _log.info("%s left before anything was agreed: %s", link.peer, error)
            link.close()
            return False
        return True

    def _inspect(self, link: Link, hello: wire.Hello) -> None:
        outcome = negotiate(
            self._hello, {0: hello}, self._choice.transports, session=os.urandom(8).hex(), token=bytes(32)
        )
        if isinstance(outcome, wire.Refusal):
            answer = wire.Inspected(outcome.agreement, outcome.text)
        else:
            answer = wire.Inspected(outcome.agreement, f"agreed with {peer_text(hello)}, not tried")
        link.try_send(wire.encode(self._hello))
        link.try_send(wire.encode(answer))
        link.close()

    def _refuse(self, link: Link, error: TransportKitError) -> None:
        """Turn somebody away who has never been a peer; counted before they learn it."""
        with self._lock:
            self._lost += 1
        _log.info("%s came to nothing: %s", link.peer, error)
        with contextlib.suppress(TransportKitError):
            link.try_send(wire.encode(wire.Refusal(code_of(error), wire.plain(str(error)))))
        link.close()
