"""`Outbox`: the sending end of a mailbox, one of any number that an inbox may have."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, Self

from transportkit import wire
from transportkit.address import parse
from transportkit.deadline import Deadline
from transportkit.dial import dial
from transportkit.errors import (
    BackendError,
    ClosedError,
    DeadlineError,
    ForkedError,
    MessageError,
    PeerError,
    TensorError,
    TransportKitError,
    UsageError,
)
from transportkit.mailbox.calling import call
from transportkit.mailbox.counts import OutboxCounts
from transportkit.mailbox.encoding import Encoder
from transportkit.mailbox.settings import DEFAULT_INLINE, INLINE_TOGETHER, LINK_INLINE, seconds, settings
from transportkit.mailbox.turns import Turn, Turns
from transportkit.registry import choose
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from transportkit.link import SocketLink
    from transportkit.mailbox.counts import OutboxStats
    from transportkit.mailbox.encoding import Encoded
    from transportkit.mailbox.posting import Posting
    from transportkit.mailbox.settings import Settings
    from transportkit.wire import Agreement

_log = logging.getLogger("transportkit")

#: How long a step of a handshake may take where a `put` that has less time dials again, in seconds.
HANDSHAKE = 1.0

#: Errors of one call, after which the link carries the next message, if it is not broken.
_PASSING = (DeadlineError, BackendError, MessageError, TensorError)


class Outbox:
    """Puts messages into an `Inbox`, with their tensors out of band.

    May be used from several threads: calls take turns, each within its own timeout. `abort` may come at any time.
    """

    def __init__(self, address: str, *, reconnect: bool = False, **keywords: Any) -> None:
        """Connect to an inbox and agree with it; waits until somebody listens, but never for the inbox's `get`.

        Args:
            address: ``unix:PATH`` or ``tcp://HOST:PORT``.
            reconnect: when the inbox is lost, let the next `put` dial again; also makes the outbox usable in a forked
                child, under an identity of its own. What had been put and not taken is in `unacknowledged`.
            capacity: most messages that may be put and not taken; default 64. The smaller of both sides' is agreed.
            inline: tensors of at most so many bytes travel in the message's body; by default 4096, and more where the
                backend moves bytes down the link anyway.
            **keywords: as for `serve`; ``chunk_bytes`` is 4 MiB and ``slots`` 8 by default. ``wait`` bounds waiting for
                somebody to listen (else ``timeout`` does).

        Raises:
            AddressError: nobody listened in time, or the address is malformed or not permitted.
            AuthenticationError: the key or the user is refused.
            NegotiationError: no backend serves this pair; the text says why for each.
            PeerError, DeadlineError: the inbox was lost, or silent, or it is no inbox.
        """
        wanted = settings(keywords, "reconnect")
        parse(address)
        if not isinstance(reconnect, bool):
            raise UsageError(f"reconnect must be True or False, not {reconnect!r}")
        self._prepare(wanted, address, reconnect=reconnect)
        self._opening = True
        try:
            self._connect(Deadline(wanted.session.timeout, "inbox"))
        finally:
            self._opening = False

    def _prepare(self, wanted: Settings, address: str, *, reconnect: bool) -> None:
        self._settings = wanted
        self._address = address
        self._reconnect = reconnect
        self._inherited: dict[str, object] = {}
        self._choice = choose(read_site(address.partition(":")[0]), wanted.session.backends)
        self._closed: str | None = None
        self._aborted = self._opening = False
        self._begin()

    def _begin(self) -> None:
        """Start as nobody else: a new identity, which has put nothing."""
        self._identity = os.urandom(8).hex()
        self._pid = os.getpid()
        self._turns = Turns("Outbox")
        self._number = 0
        self._orphans: list[int] = []
        self._counts = OutboxCounts()
        self._posting: Posting | None = None
        self._dialled: SocketLink | None = None
        self._encoder = Encoder(DEFAULT_INLINE, INLINE_TOGETHER)
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "an Outbox does not go to another process: make it there (`Outbox(address)`), or hand over one that can be "
            "inherited (`inbox.outbox(ctx)`)"
        )

    @property
    def identity(self) -> str:
        """By which the inbox knows this outbox, hex; another one in a forked child."""
        self._check()
        return self._identity

    # -- putting ------------------------------------------------------------------------------------------------------

    def put(self, message: Any, *, timeout: float | None = None) -> int:
        """Put one message; returns when it is on its way. From then on its tensors may change.

        Args:
            message: a tree of dicts, lists, tuples, msgspec Structs, dataclasses or attrs classes, with torch tensors
                on any device, numpy arrays, and what MessagePack can hold. It is not changed.
            timeout: bounds waiting for room, in seconds; by default the session's. 0 tries once.

        Returns:
            The message's number: 1 for the first, ascending.

        Raises:
            UnsupportedTensorError: a tensor cannot travel; the text says where in the message it is. Nothing was sent.
            MessageError: something else in it cannot. Nothing was sent.
            DeadlineError: there was no room in time. The message is not delivered, now or later.
            PeerError: the inbox is gone; `unacknowledged` tells what it had not taken.
        """
        deadline = self._deadline(timeout, "turn to put")
        with self._turn(deadline):
            while True:
                posting = self._open(deadline)
                try:
                    return self._put(posting, message, deadline)
                except BaseException as error:
                    if not self._failed(posting, error):
                        raise

    def _put(self, posting: Posting, message: Any, deadline: Deadline) -> int:
        posting.begun = False
        encoded = self._encoder.encode(message, marked=not posting.typed)
        number = self._number + 1
        try:
            posting.post(number, encoded, deadline)
        except BackendError as error:
            if self._aborted:  # it came from what the backend waited for
                raise ClosedError("this Outbox is closed: it was aborted") from error
            if not posting.usable:
                raise
            if posting.begun:
                self._number = number
            posting.begun = False  # it is accounted for
            number = self._number + 1
            encoded = self._put_inline(posting, number, message, deadline, error)
        self._number = number
        self._counts.messages += 1
        self._counts.bytes_inline += encoded.inline
        self._counts.bytes_out_of_band += sum(encoded.sizes)
        self._counts.inline_fallbacks += encoded.fallbacks
        return number

    def _put_inline(
        self, posting: Posting, number: int, message: Any, deadline: Deadline, error: BackendError
    ) -> Encoded:
        """Put a message whose tensors the backend does not carry."""
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, "backend %s failed, so tensors go inline to %s: %s", posting.lane.backend, posting.name, error)
        encoded = self._encoder.encode(message, marked=not posting.typed, all_inline=True)
        posting.post(number, encoded, deadline)
        return encoded

    def _failed(self, posting: Posting, error: BaseException) -> bool:
        """A call has failed; whether it may be tried again over a new link."""
        begun = posting.begun
        self._number += begun
        if posting.usable and (not isinstance(error, TransportKitError) or isinstance(error, _PASSING)):
            return False
        lost = list(posting.in_flight) + ([self._number] if begun and isinstance(error, PeerError) else [])
        self._lose_inbox(posting, error, lost)
        return self._reconnect and not begun and isinstance(error, PeerError) and self._closed is None

    def _lose_inbox(self, posting: Posting, error: BaseException, lost: list[int]) -> None:
        posting.close(None if isinstance(error, PeerError) else error)
        self._posting = None
        self._orphans += lost
        self._counts.lost += len(lost)
        if lost:
            _log.warning("%d messages were put and not taken when %s was lost: %s", len(lost), posting.name, error)
            if error.args:
                error.args = (f"{error.args[0]}; put and not taken: {_numbers(lost)}", *error.args[1:])
        if not self._reconnect and self._closed is None:
            self._closed = str(error)

    def reserve(self) -> int:
        """Have this thread alone put messages until `unreserve`; the number that its next one will have."""
        deadline = self._deadline(None, "turn to put")
        with self._turn(deadline):
            self._open(deadline)
            self._turns.keep()
            return self._number + 1

    def unreserve(self) -> None:
        """Let other threads put again."""
        self._turns.give_up()

    # -- what became of it --------------------------------------------------------------------------------------------

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        """The messages that were put and not taken, as far as is known; those of a lost inbox until `forget`."""
        posting = self._posting
        return (*self._orphans, *(posting.in_flight if posting is not None else ()))

    def forget(self) -> tuple[int, ...]:
        """The messages that were lost with earlier inboxes; they leave `unacknowledged`."""
        with self._turn(self._deadline(None, "turn to forget")):
            lost, self._orphans = tuple(self._orphans), []
            return lost

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was put has been taken.

        Raises:
            DeadlineError: it was not, within ``timeout`` (by default the session's); it still may be.
            PeerError: the inbox is gone; `unacknowledged` tells what it had not taken.
        """
        deadline = self._deadline(timeout, "turn to flush")
        with self._turn(deadline):
            posting = self._posting
            if posting is None:
                self._check()
                return
            try:
                posting.begun = False
                posting.wait_taken(deadline)
            except TransportKitError as error:
                self._failed(posting, error)
                raise

    @property
    def agreement(self) -> Agreement:
        """Which backend is used, and why not another one; print it. Raises `UsageError` while nothing is agreed."""
        if self._posting is None:
            self._check()
            raise UsageError("no inbox is agreed with now; the next put() dials again")
        return self._posting.agreement

    @property
    def stats(self) -> OutboxStats:
        """A look at the counters."""
        posting = self._posting
        return self._counts.snapshot(
            in_flight=0 if posting is None else len(posting.in_flight),
            slots_in_use=0 if posting is None else posting.slots_in_use,
        )

    @property
    def closed(self) -> str | None:
        """Why nothing more can be put; None while it can."""
        return self._closed

    # -- beginning and end --------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything that was put has been taken, and leave in order. Idempotent.

        Raises:
            DeadlineError: not everything was taken within ``timeout`` (by default the session's); it is closed all the
                same, and what is complete at the inbox can still be taken. A call of another thread that lasted as long
                is ended, as by `abort`.
            UsageError: it interrupts a call of the same thread, from a signal handler say; `abort` may do that.
            PeerError: the inbox was gone before it had taken everything.
            ClosedError: it was aborted before that.
        """
        if self._pid != os.getpid():
            self._closed = self._closed or "inherited by a forked child"
            return
        deadline = self._deadline(timeout, "turn to close")
        with self._last_turn(deadline):
            posting = self._posting
            if self._closed is not None and posting is None:
                return
            self._closed = self._closed or "it was closed"
            self._posting = None
            if posting is None:
                return
            try:
                posting.take_in()
                posting.wait_taken(deadline)
            except TransportKitError as error:
                left = posting.in_flight
                self._orphans += left
                self._counts.lost += len(left)
                if left:
                    raise self._left_over(error, left, posting.name) from error
            finally:
                posting.close()

    def abort(self) -> None:
        """End it at once, from any thread: a running call raises `ClosedError`. Never blocks; waits for nothing."""
        if self._closed is None:
            self._closed = "it was aborted"
        self._aborted = True
        posting, dialled = self._posting, self._dialled
        if posting is not None:
            posting.abort()
        if dialled is not None:
            dialled.abort()

    def __enter__(self) -> Self:
        deadline = self._deadline(None, "inbox")
        with self._turn(deadline):
            self._open(deadline)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(TransportKitError), self._last_turn(self._deadline(0, "turn to close")):
            posting, self._posting = self._posting, None
            self._closed = self._closed or str(error) or type(error).__name__
            if posting is not None:
                self._orphans += posting.in_flight
                self._counts.lost += len(posting.in_flight)
                posting.close(error)

    def _left_over(self, error: TransportKitError, left: tuple[int, ...], name: str) -> TransportKitError:
        text = f"{len(left)} messages were put and not taken by {name}: {_numbers(list(left))}; {error}"
        if isinstance(error, PeerError):
            return type(error)(text, **vars(error))
        return ClosedError(text) if isinstance(error, ClosedError) else DeadlineError(text)

    def _open(self, deadline: Deadline) -> Posting:
        if self._closed is not None:  # by another thread, while this one waited for its turn
            self._check()
        if self._posting is None:
            return self._connect(deadline)
        return self._posting

    def _connect(self, deadline: Deadline) -> Posting:
        # Whoever puts has less time than whoever opens, but enough for a handshake.
        bound = self._settings.session.timeout
        if not self._opening:
            bound = min(bound, max(deadline.remaining() or 0.0, HANDSHAKE))
        posting = self._agree(self._link(deadline, bound), bound)
        wanted, together = self._settings.inline, LINK_INLINE if posting.carried else INLINE_TOGETHER
        if wanted is None:
            wanted = LINK_INLINE if posting.carried else DEFAULT_INLINE
        self._encoder = Encoder(wanted, max(together, wanted))
        self._posting = posting
        self._counts.connections += 1
        return posting

    def _link(self, deadline: Deadline, bound: float) -> SocketLink:
        session = self._settings.session
        return dial(
            self._address,
            authkey=session.authkey,
            timeout=bound,
            wait=session.wait if self._opening else deadline.remaining(),
            user_timeout=session.timeout,
        )

    def _agree(self, link: SocketLink, bound: float) -> Posting:
        self._dialled = link
        try:
            if self._closed is not None:
                link.abort()
            mailbox = wire.Mailbox(self._settings.capacity, self._identity, self._number + 1)
            return call(link, self._settings, self._choice, mailbox, self._inherited, self._counts, bound)
        finally:
            self._dialled = None

    def _check(self) -> None:
        if self._pid != os.getpid():
            if not self._reconnect:
                raise ForkedError(
                    f"this Outbox belongs to process {self._pid}; open another one in the forked child, or pass "
                    "reconnect=True to have it open a link of its own there"
                )
            self._begin()  # what it had in the parent, the lock too, is the parent's
        if self._closed is not None:
            raise ClosedError(f"this Outbox is closed: {self._closed}")

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        bound = seconds(timeout)
        return Deadline(self._settings.session.timeout if bound is None else bound, what)

    def _turn(self, deadline: Deadline) -> Turn:
        self._check()
        return Turn(self._turns, deadline)

    @contextlib.contextmanager
    def _last_turn(self, deadline: Deadline) -> Iterator[None]:
        """The turn of whoever ends it: a call of another thread that does not let go in time is ended as by `abort`."""
        turn = Turn(self._turns, deadline)
        try:
            turn.__enter__()
        except DeadlineError:
            self.abort()
            raise
        try:
            yield
        finally:
            turn.__exit__()


def _numbers(numbers: list[int]) -> str:
    """Message numbers in words, ranges shortened."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
