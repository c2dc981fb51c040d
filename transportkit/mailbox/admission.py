"""Who comes to an inbox: listens, shakes hands, and hands agreed producers over; reads no message.

Each handshake has a short-lived thread of its own, a bounded number at once. So a producer that stalls in it delays
nobody, and opening an `Outbox` never waits for the consumer's next `get`. Inherited seats are waited for by one more
thread, which exists once there are any.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
from typing import TYPE_CHECKING

import msgspec

from transportkit import threads, wire
from transportkit.deadline import Deadline
from transportkit.errors import ClosedError, ProtocolError, ResourceError, TransportKitError
from transportkit.handshake import negotiate, peer_text
from transportkit.inheritance import give_up
from transportkit.link import SocketLink
from transportkit.link.base import close_in_child
from transportkit.listener import Listener
from transportkit.mailbox.calling import down_the_link
from transportkit.mailbox.producer import Producer
from transportkit.mailbox.settings import DEFAULT_CHUNK_BYTES, DEFAULT_SLOTS
from transportkit.session.inlet import Inlet
from transportkit.session.joining import Joining
from transportkit.session.options import DEFAULT_CHUNK_BYTES as SESSION_CHUNK_BYTES
from transportkit.session.options import DEFAULT_SLOTS as SESSION_SLOTS
from transportkit.session.peers import code_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from transportkit.mailbox.counts import InboxCounts
    from transportkit.mailbox.settings import Settings
    from transportkit.registry import Choice

_log = logging.getLogger("transportkit")

#: Most handshakes at once, and most that wait for their turn.
HANDSHAKES, QUEUED = 16, 256

#: How long `close` waits for a handshake's thread to notice, in seconds.
GRACE = 5.0


class Seat:
    """The inbox's end of a socket pair whose other end a child process inherits.

    Args:
        sock: this end.
        inherited: per backend, what `Transport.inherit` made.
        release: gives this process's copy of the child's end up; called when the child has said hello.
    """

    def __init__(self, sock: socket.socket, inherited: dict[str, object], release: Callable[[], None]) -> None:
        self.sock = sock
        self.inherited = inherited
        self.release = release


class Admission:
    """The door of an inbox.

    Args:
        settings: the inbox's.
        choice: its backends.
        typed: whether it rebuilds a type of its own.
        counts: its counters, for the producers.
        arrived: takes each producer that is agreed with; from any thread, does not wait.
        left: takes what a seat's producer had inherited, when that has left in order.
    """

    def __init__(
        self,
        settings: Settings,
        choice: Choice,
        *,
        typed: bool,
        counts: InboxCounts,
        arrived: Callable[[Producer], None],
    ) -> None:
        self._settings = settings
        self._choice = choice
        self._mailbox = wire.Mailbox(settings.capacity, typed=typed)
        self._counts = counts
        self._arrived = arrived
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._workers: set[threading.Thread] = set()
        self._links: set[SocketLink] = set()
        self._seats: dict[int, Seat] = {}
        self._poller: select.epoll | None = None
        self._wake = -1
        self._waiter: threading.Thread | None = None
        self._closed = False
        self._failures = 0
        close_in_child(self)

    def listen(self, address: str) -> str:
        """Bind and start to listen; returns the address, with the port that was chosen."""
        session = self._settings.session
        self._listener = Listener(
            address,
            authkey=session.authkey,
            timeout=session.timeout,
            on_arrival=self._arrive,
            user_timeout=session.timeout,
        )
        self._listener.start()
        return self._listener.address

    @property
    def failures(self) -> int:
        """How many connections came to nothing before they were agreed."""
        return self._failures + (0 if self._listener is None else self._listener.failures)

    def expect(self, seat: Seat) -> None:
        """Shake hands with the child that has inherited this seat, when it comes."""
        with self._lock:
            if self._closed:
                raise ClosedError("this Inbox is closed")
            if self._poller is None:
                try:
                    self._poller = select.epoll()
                    self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                except OSError as error:
                    raise ResourceError(f"no descriptor for an inherited seat: {error.strerror}") from error
                self._poller.register(self._wake, select.EPOLLIN)
            if self._waiter is None:
                self._waiter = threads.start(self._await_seats, "transportkit-seats")
            self._seats[seat.sock.fileno()] = seat
            self._poller.register(seat.sock, select.EPOLLIN)

    def abort(self) -> None:
        """End every handshake. From any thread; never blocks for long."""
        with self._lock:
            self._closed = True
            links = list(self._links)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        for link in links:
            link.abort()

    def close(self) -> None:
        """Stop listening, end every handshake, close unused seats. Idempotent."""
        self.abort()
        if self._listener is not None:
            self._listener.close()
        waiter = self._waiter
        for thread in [*self._workers, *([] if waiter is None else [waiter])]:
            if thread is not threading.current_thread():
                thread.join(GRACE)
        with self._lock:
            self._close_seats()

    def lose(self) -> None:
        """In a forked child: close the descriptors; seats are the parent's."""
        self._lock = threading.Lock()
        self._closed = True
        self._listener = None
        for seat in self._seats.values():
            seat.sock.close()
        self._seats.clear()
        self._close_seats()

    def _close_seats(self) -> None:
        for seat in self._seats.values():
            seat.sock.close()
            seat.release()
            give_up(seat.inherited, "sender", "receiver")
        self._seats.clear()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # -- on the thread that waits for seats ---------------------------------------------------------------------------

    def _await_seats(self) -> None:
        while True:
            poller = self._poller
            if poller is None:
                return
            for fileno, _ in poller.poll():
                if self._closed:
                    return
                if fileno == self._wake:
                    continue
                with self._lock:
                    seat = self._seats.pop(fileno)
                    poller.unregister(fileno)
                self._sit(seat)

    def _sit(self, seat: Seat) -> None:
        link = SocketLink.over(seat.sock, "pair", "a child process", user_timeout=self._settings.session.timeout)
        seat.release()

        def job() -> None:
            frame = link.recv(self._deadline("hello"), wire.HANDSHAKE_FRAME_LIMIT)
            self._shake(link, _hello(frame), seat.inherited)

        self._start(link, job)

    # -- on the listener's thread -------------------------------------------------------------------------------------

    def _arrive(self, link: SocketLink, frame: bytes) -> None:
        self._start(link, lambda: self._shake(link, _hello(frame), {}))

    def _start(self, link: SocketLink, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except Exception as error:  # whatever one producer brings about, the others are served
                self._failed(link, error)
            finally:
                with self._lock:
                    self._links.discard(link)

        with self._lock:
            if self._closed or len(self._jobs) >= QUEUED:
                why = "this Inbox is closed" if self._closed else f"{QUEUED} producers wait for their handshake already"
                refused: TransportKitError = ClosedError(why)
            else:
                self._links.add(link)
                self._jobs.append(guarded)
                try:
                    if len(self._workers) < HANDSHAKES:
                        self._workers.add(threads.start(self._work, "transportkit-handshake"))
                    return
                except ResourceError as error:
                    if self._workers:  # one of those will come to it
                        return
                    self._jobs.pop()
                    self._links.discard(link)
                    refused = error
        self._failed(link, refused)

    # -- on the threads of handshakes ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._workers.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            job()

    def _failed(self, link: SocketLink, error: Exception) -> None:
        with self._lock:
            self._failures += 1
        _log.info("a producer (%s) came to nothing before it was agreed with: %s", link.peer, error)
        with contextlib.suppress(TransportKitError):
            link.try_send(wire.encode(wire.Refusal(code_of(error), wire.plain(str(error)))))
        link.close()

    def _shake(self, link: SocketLink, theirs: wire.Hello, inherited: dict[str, object]) -> None:
        ours = self._settings.hello("receiver", self._choice, link.kind, self._mailbox)
        if theirs.intent == "inspect":
            self._inspect(link, ours, theirs)
            return
        mailbox = theirs.mailbox
        if theirs.role != "sender" or theirs.intent != "mail" or mailbox is None or not mailbox.producer:
            raise ProtocolError(
                "an Inbox listens here, which takes messages of an Outbox: open `transportkit.Outbox(address)`, or "
                "have `transportkit.serve` listen for a session"
            )
        inlet = Inlet(link, self._settings.session.timeout, [theirs])
        joined = Joining(inlet, ours, self._choice, inherited).run(self._deadline("proposal"))
        link.peer = f"producer {mailbox.producer} ({peer_text(theirs)})"
        producer = Producer(
            link,
            inlet,
            joined,
            mailbox,
            carried=down_the_link(self._choice, joined.terms.backend, theirs, ours),
            capacity=min(mailbox.capacity, self._settings.capacity),
            counts=self._counts,
            inherited=inherited,
        )
        with self._lock:
            if not self._closed:
                self._links.discard(link)  # from now on it is the inbox that ends it, in order
                self._arrived(producer)
                producer.admit()  # only now may it send anything, so nobody else uses the link meanwhile
                return
        producer.close(ClosedError("this Inbox is closed"))

    def _inspect(self, link: SocketLink, ours: wire.Hello, theirs: wire.Hello) -> None:
        if theirs.limits == wire.Limits(SESSION_CHUNK_BYTES, SESSION_SLOTS):
            # An Outbox that is told no sizes would ask for these.
            theirs = msgspec.structs.replace(theirs, limits=wire.Limits(DEFAULT_CHUNK_BYTES, DEFAULT_SLOTS))
        outcome = negotiate(
            msgspec.structs.replace(theirs, role="sender"),
            {0: ours},
            self._choice.transports,
            session=os.urandom(8).hex(),
            token=bytes(32),
        )
        text = (
            outcome.text
            if isinstance(outcome, wire.Refusal)
            else f"an Inbox; agreed with {peer_text(theirs)}, not tried"
        )
        link.try_send(wire.encode(ours))
        link.try_send(wire.encode(wire.Inspected(outcome.agreement, text)))
        link.close()

    def _deadline(self, what: str) -> Deadline:
        return Deadline(self._settings.session.timeout, f"{what} from a producer")


def _hello(frame: bytes) -> wire.Hello:
    hello = wire.decode(frame)
    if not isinstance(hello, wire.Hello):
        raise ProtocolError(f"it sent {type(hello).__name__.lower()} before its hello")
    return hello
