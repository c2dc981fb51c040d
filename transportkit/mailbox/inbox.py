"""`Inbox`: the receiving end of a mailbox, which any number of outboxes put messages into."""

from __future__ import annotations

import logging
import multiprocessing.context
import os
import weakref
from typing import TYPE_CHECKING, Any, Self

from transportkit.address import parse
from transportkit.deadline import Deadline
from transportkit.errors import (
    ClosedError,
    DeadlineError,
    ForkedError,
    MessageError,
    PeerClosedError,
    ProtocolError,
    TransportKitError,
    UsageError,
)
from transportkit.inheritance import bequeath, give_up
from transportkit.link import pair_sockets
from transportkit.link.base import close_in_child
from transportkit.mailbox.admission import GRACE, Admission, Seat
from transportkit.mailbox.counts import InboxCounts
from transportkit.mailbox.decoding import Decoder
from transportkit.mailbox.intake import Intake
from transportkit.mailbox.mail import Mail, Postmark
from transportkit.mailbox.seats import SeatOutbox
from transportkit.mailbox.settings import seconds, settings
from transportkit.mailbox.turns import Turn, Turns
from transportkit.registry import choose
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import BaseContext
    from types import TracebackType

    from transportkit.mailbox.counts import InboxStats
    from transportkit.mailbox.incoming import Incoming
    from transportkit.mailbox.outbox import Outbox
    from transportkit.mailbox.producer import Producer
    from transportkit.wire import Agreement

_log = logging.getLogger("transportkit")


class Inbox:
    """Takes messages from any number of producers, each an `Outbox`.

    May be used from several threads: calls of `get` take turns, each within its own timeout. `abort` may come at any
    time, and `close` wakes a `get` that waits.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        type: Any = Any,  # noqa: A002
        producers: int | None = None,
        **keywords: Any,
    ) -> None:
        """Bind and listen; producers may come from now on, also while nobody calls `get`.

        Args:
            address: ``unix:PATH`` or ``tcp://HOST:PORT``, port 0 picks one; None where all producers are children that
                inherit their outboxes (`outbox`).
            type: what a message must be: a msgspec Struct, an attrs class, a dataclass, or any other type that msgspec
                decodes, with fields annotated `torch.Tensor` or `numpy.ndarray`. By default anything, as builtins.
            producers: how many are expected: when so many have left in order, iterating ends. When so many have come
                and gone and some of them were lost, it raises instead; once, so that new ones can be waited for.
            capacity: most messages of one producer that may be put and not taken; default 64. The smaller of both
                sides' is agreed.
            spin: how long a `get` looks again and again before it waits in the kernel, in seconds; default 500e-6. It
                does so only after a wait of at most twice that: with messages far apart it costs nothing.
            **keywords: as for `serve`; ``chunk_bytes`` is 4 MiB and ``slots`` 8 by default, for each producer.
                ``device`` is where tensors that were on a device come to. ``wait`` bounds `get` by default.

        Raises:
            AddressError: the address is malformed, in use, too long or not permitted.
            AuthenticationError: TCP beyond loopback without ``authkey``.
            UnknownBackendError, BackendUnavailableError: a backend that was asked for by name.
            UsageError: a keyword is wrong, or nothing can be decoded as ``type``.
        """
        self._settings = settings(keywords, "type", "producers")
        self._keywords = keywords
        if producers is not None and (producers.__class__ is not int or producers < 1):
            raise UsageError(f"producers must be a positive integer, not {producers!r}")
        if address is not None:
            parse(address)
        self._expected = producers
        self._decoder = Decoder(type, self._settings.session.device)
        self._choice = choose(read_site((address or "pair").partition(":")[0]), self._settings.session.backends)
        self._counts = InboxCounts()
        self._last: Postmark | None = None
        self._closed: str | None = None
        self._aborted = False
        self._pid = os.getpid()
        self._turns = Turns("Inbox")
        self._closing = False
        """Whether `close` interrupted a call of its own thread, which has to end first."""
        self._intake = Intake(self._counts, self._settings.spin, producers, self._check)
        close_in_child(self)
        self._admission = Admission(
            self._settings, self._choice, typed=self._decoder.typed, counts=self._counts, arrived=self._intake.arrive
        )
        self._address = ""
        if address is not None:
            try:
                self._address = self._admission.listen(address)
            except BaseException:
                self._admission.close()
                self._intake.close()
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "an Inbox does not go to another process: hand over an outbox of it (`inbox.outbox(ctx)`), or its `address`"
        )

    @property
    def typed(self) -> bool:
        """Whether it rebuilds a type of its own."""
        return self._decoder.typed

    @property
    def device(self) -> str:
        """Where tensors that were on a device come to."""
        return self._settings.session.device

    @property
    def patience(self) -> float:
        """Its ``timeout``, in seconds."""
        return self._settings.session.timeout

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen; empty where it does not."""
        return self._address

    def outbox(self, ctx: BaseContext | None = None, **keywords: Any) -> Outbox:
        """An outbox for a child process, which goes to it as an argument while that is started.

        It connects at its first use, over a socket pair, and so may use what only relatives can, the backend `mpqueue`
        say. Each call makes a seat, or takes one whose outbox has left in order.

        Args:
            ctx: the `multiprocessing` context that starts the child; by default the current one.
            **keywords: as for `Outbox`; by default what this inbox was given.
        """
        self._check()
        if not isinstance(ctx, multiprocessing.context.BaseContext | None):
            raise UsageError(f"outbox() takes a context, as multiprocessing.get_context('spawn') makes it, not {ctx!r}")
        context = ctx if ctx is not None else multiprocessing.get_context()
        wanted = settings(self._keywords | keywords) if keywords else self._settings
        try:
            inherited = self._intake.free_seats.pop()
        except IndexError:
            inherited = bequeath(self._choice.transports, context)
        ours, theirs = pair_sockets()
        outbox = SeatOutbox(theirs, wanted, inherited)
        try:
            self._admission.expect(Seat(ours, inherited, outbox.release))
        except BaseException:
            ours.close()
            outbox.release()
            give_up(inherited, "sender", "receiver")
            raise
        return outbox

    # -- taking -------------------------------------------------------------------------------------------------------

    def get(self, timeout: float | None = None, *, copy: bool = True) -> Any:
        """The next message, of whichever producer has one; those of one producer in order, producers in turns.

        Args:
            timeout: bounds the whole call, in seconds; by default ``wait``. 0 looks once.
            copy: whether the message's tensors are the caller's own. With False a `Mail` is returned, whose tensors
                are read in place until it is released.

        Raises:
            DeadlineError: no message was complete in time.
            MessageError: the next message is not of the inbox's type, or cannot be rebuilt here; its producer, number
                and, where known, the field are named. It is dropped, and the inbox goes on with the next.
            IntegrityError: the next message is not what was sent. It is dropped, and the inbox goes on.
            PeerClosedError: all ``producers`` have left in order, and everything that they had put is taken.
            PeerLostError: so many have come and gone, but some were lost; they are named.
            ClosedError: the inbox is closed, perhaps by another thread meanwhile.
        """
        self._check()
        deadline = self._deadline(timeout)
        try:
            with Turn(self._turns, deadline):
                return self._hand_out(self._intake.next(deadline), lease=not copy)
        except TransportKitError:
            raise
        except BaseException:
            self._intake.look_again()
            raise
        finally:
            if self._intake.unsettled:
                self._settle_soon()
            if self._closing:
                self.close()

    def get_nowait(self, *, copy: bool = True) -> Any:
        """The next message if one is complete now; else raises `DeadlineError`. As ``get(timeout=0)``."""
        return self.get(0, copy=copy)

    def poll(self, timeout: float = 0) -> bool:
        """Whether `get` would return, or raise for a message, at once; waits for that up to ``timeout`` seconds."""
        self._check()
        deadline = self._deadline(timeout)
        try:
            with Turn(self._turns, deadline):
                self._intake.put_back(self._intake.next(deadline))
        except DeadlineError:
            return False
        finally:
            if self._closing:
                self.close()
        return True

    def __iter__(self) -> Iterator[Any]:
        """Messages, as `get` returns them, until this inbox is closed or, with ``producers=``, all have left.

        Raises what `get` raises, but for `PeerClosedError` and, once it is closed, `ClosedError`.
        """
        self._check()
        while True:
            try:
                message = self.get()
            except PeerClosedError:
                return
            except ClosedError:
                if self._closed is None:
                    raise
                return
            yield message
            del message

    @property
    def last(self) -> Postmark | None:
        """Where the message came from that was handed out last."""
        return self._last

    @property
    def producers(self) -> dict[str, Agreement]:
        """Who is there: the identity of each producer, and what was agreed with it."""
        return {each.identity: each.agreement for each in self._intake.producers}

    @property
    def stats(self) -> InboxStats:
        """A look at the counters."""
        here = self._intake.producers
        return self._counts.snapshot(
            failures=self._admission.failures,
            producers=len(here),
            slots_in_use=sum(each.open_chunks for each in here),
        )

    @property
    def closed(self) -> str | None:
        """Why nothing more can be taken; None while it can."""
        return self._closed

    # -- one message --------------------------------------------------------------------------------------------------

    def _hand_out(self, producer: Producer, *, lease: bool) -> Any:
        message = producer.complete
        assert message is not None
        mark = self._last = Postmark(producer.identity, message.number)
        try:
            value = self._rebuild(producer, message, lease=lease)
        except TransportKitError as error:
            self._refuse(producer, message, error)
            raise
        except BaseException as error:
            self._refuse(producer, message, error)
            raise
        self._counts.messages += 1
        self._counts.bytes_inline += self._decoder.inline_bytes
        self._counts.bytes_out_of_band += sum(message.sizes)
        if not lease:
            self._done(producer, message)
            return value
        chunk = message.open.pop() if message.leasable else None
        mail = Mail(value, mark, chunk, self._settle_soon)
        if chunk is not None:
            producer.leases.append((weakref.ref(mail.token), chunk))
        self._done(producer, message)
        return mail

    def _rebuild(self, producer: Producer, message: Incoming, *, lease: bool) -> Any:
        if message.failure is not None:
            raise message.failure
        if not message.open or producer.unguarded:
            return self._decoder.decode(message.body, message.source(lease=lease))
        with producer.imports.reading(message.open[0]):
            return self._decoder.decode(message.body, message.source(lease=lease))

    def _done(self, producer: Producer, message: Incoming, refused: str = "") -> None:
        try:
            producer.taken(message, refused)
        except TransportKitError as error:
            producer.gone = producer.gone or error
        self._intake.done(producer)

    def _refuse(self, producer: Producer, message: Incoming, error: BaseException) -> None:
        """Drop a message that cannot be handed out; its producer is told."""
        reason = "corrupt" if isinstance(error, ProtocolError) else "refused"
        self._counts.drop(reason)
        _log.warning("message %d of %s is dropped: %s", message.number, producer.name, error)
        if isinstance(error, MessageError):
            error.producer, error.number = producer.identity, message.number
        if isinstance(error, TransportKitError) and error.args:
            error.args = (f"message {message.number} of {producer.name} is dropped: {error.args[0]}", *error.args[1:])
        self._done(producer, message, str(error) or type(error).__name__)

    def _settle_soon(self) -> None:
        """A lease has ended: free its slot now, or, where another thread is at it, as soon as that looks."""
        intake = self._intake
        intake.unsettled = True
        while intake.unsettled and self._closed is None and self._turns.try_enter():
            try:
                intake.settle()
            finally:
                self._turns.leave()
        if intake.unsettled:
            intake.ring()

    # -- beginning and end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening and hang up on every producer, in order. Idempotent; wakes a `get` in another thread.

        What producers have put and nobody has taken is dropped, which they learn. From a signal handler it ends the
        call that it interrupts, which then raises `ClosedError`.
        """
        if self._pid != os.getpid():
            self._closed = self._closed or "inherited by a forked child"
            return
        if self._closed is None:
            self._closed = "it was closed"
        self._intake.ring()
        self._admission.close()
        self._closing = self._turns.mine
        if self._closing:
            return
        if not self._turns.try_enter(GRACE):
            self.abort()  # a call is in the middle of a chunk that does not come
            if not self._turns.try_enter(GRACE):
                raise DeadlineError("a call in another thread does not end, so this Inbox cannot be closed")
        try:
            self._intake.close()
        finally:
            self._turns.leave()

    def abort(self) -> None:
        """End it at once, from any thread: a running call raises `ClosedError`. Never blocks."""
        if self._closed is None:
            self._closed = "it was aborted"
        self._aborted = True
        self._intake.ring()
        for producer in self._intake.producers:
            producer.link.abort()
            producer.imports.importer.abort()
        self._admission.abort()

    def lose(self) -> None:
        """In a forked child: close the descriptors; the producers are the parent's."""
        self._turns = Turns("Inbox")
        self._closed = self._closed or "inherited by a forked child"

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"this Inbox belongs to process {self._pid}; open another one in the forked child")
        if self._closed is not None:
            raise ClosedError(f"this Inbox is closed: {self._closed}")

    def _deadline(self, timeout: float | None) -> Deadline:
        bound = seconds(timeout)
        if timeout is None:
            return Deadline(self._settings.session.wait, "message", "wait")
        return Deadline(bound, "message")
