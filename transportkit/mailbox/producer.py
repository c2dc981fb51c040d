"""One producer at its inbox: takes in frames without waiting, until a message is complete; hands out nothing itself.

The states of the message that is coming in::

    none      --letter-->              begun     --the last part--> complete
    begun     --header of a chunk that has to be moved; go--> awaited   --moved, its bytes--> begun
    begun, awaited  --withdrawn, producer lost--> none, dropped
    complete  --handed out, refused--> none

While a message is complete nothing more is read, so what a producer sends ahead stays on the link: that, its slots and
its credit are the back-pressure.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import BackendError, ClosedError, PeerError, ProtocolError, TransportKitError
from transportkit.link import CONTROL
from transportkit.mailbox.incoming import Incoming
from transportkit.mailbox.settings import FRAME_LIMIT
from transportkit.session.joining import STRAY_BYTES, check_digest
from transportkit.session.peers import code_of, unexpected
from transportkit.transport import Importer

if TYPE_CHECKING:
    import weakref

    from transportkit.lifecycle import Imported
    from transportkit.link import SocketLink
    from transportkit.mailbox.counts import InboxCounts
    from transportkit.session.inlet import Inlet
    from transportkit.session.joining import Joined

_log = logging.getLogger("transportkit")


class Producer:
    """One outbox, agreed with.

    Args:
        link: the link to it.
        inlet: over that link.
        joined: what the handshake came to.
        mailbox: what the outbox said of itself.
        carried: whether the backend moves bytes in payload frames of the link.
        capacity: most messages that may be under way.
        counts: the inbox's counters.
        inherited: per backend, what `Transport.inherit` made for its seat.
    """

    def __init__(
        self,
        link: SocketLink,
        inlet: Inlet,
        joined: Joined,
        mailbox: wire.Mailbox,
        *,
        carried: bool,
        capacity: int,
        counts: InboxCounts,
        inherited: dict[str, object],
    ) -> None:
        self.link = link
        self.inherited = inherited
        self.identity = mailbox.producer
        self.agreement = joined.agreement
        self.terms = joined.terms
        self.imports = joined.imports
        self.fileno = link.fileno()
        self.unguarded = type(joined.imports.importer).reading is Importer.reading
        """Whether the backend has nothing to do around copies out of a chunk."""
        self.watched = 0
        """The events that the inbox waits for at its descriptor."""
        self.complete: Incoming | None = None
        """The message that can be handed out."""
        self.gone: TransportKitError | None = None
        """Why nothing more comes from it."""
        self.leases: list[tuple[weakref.ref[object], Imported]] = []
        self._inlet = inlet
        self._carried = carried
        self._capacity = capacity
        self._counts = counts
        self._next = mailbox.first
        self._current: Incoming | None = None
        self._awaited: wire.Chunk | None = None
        self._owed: collections.deque[bytes] = collections.deque()
        self._patience = Deadline(inlet.timeout, f"chunk over {joined.terms.backend} from {link.peer}")
        self._released: list[int] | None = None
        """Collects the chunks that are released while a message is handed out; else each is acknowledged alone."""
        self.imports.report_to(self._acknowledge)
        link.control_limit = FRAME_LIMIT
        link.renew_on_progress = True

    @property
    def name(self) -> str:
        return self.link.peer

    @property
    def open_chunks(self) -> int:
        """How many chunks are open or leased."""
        current = sum(len(each.open) for each in (self._current, self.complete) if each is not None)
        return current + len(self.leases) + self.imports.held

    def admit(self) -> None:
        """Tell it that its messages may come."""
        self._say(wire.Admitted())

    # -- coming in ----------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take in what is there, without waiting, until a message is complete; whether one is.

        Does not raise: what ends the producer is in `gone`.
        """
        if self.complete is not None:
            return True
        if self.gone is not None:
            return False
        try:
            self._settle()
            self.flush()
            while self._step():
                pass
        except TransportKitError as error:
            self._end(error)
        except BaseException as error:  # perhaps a frame is lost with it, or half a chunk
            self._end(ClosedError(f"the inbox was interrupted ({type(error).__name__}) while it took a message in"))
            raise
        return self.complete is not None

    def _step(self) -> bool:
        """Take in one frame or chunk; False where none is there, or a message is complete."""
        if self.complete is not None:
            return False
        if self._awaited is not None and self._carried:
            if not self.link.poll_past_payloads(self.terms.chunk_bytes + STRAY_BYTES):
                return False
            header, self._awaited = self._awaited, None
            if self.link.kind_at_hand() != CONTROL:
                self._open(header)
                return True
        message = self._inlet.at_once()
        if message is None:
            if self.link.kind_at_hand() not in (None, CONTROL):
                raise ProtocolError(f"{self.name} sent a payload that nobody asked for")
            return False
        match message:
            case wire.Letter():
                self._begin(message)
            case wire.Fragment():
                if self._belongs(message.number, whole=message.whole):
                    self._incoming.add_body(message.body)
            case wire.Enclosure():
                if self._belongs(message.number, whole=message.whole):
                    self._enclosed(message.header)
            case wire.Moved():
                self._belongs(message.number, whole=True)
                if self._awaited is not None and message.seq == self._awaited.seq:
                    header, self._awaited = self._awaited, None
                    self._open(header)
                self._incoming.moved(message.seq)
            case wire.Withdrawn():
                self._belongs(message.number, whole=False)
            case _:
                raise unexpected(message, self.name)
        self._complete_if_whole()
        return True

    @property
    def _incoming(self) -> Incoming:
        assert self._current is not None
        return self._current

    def _begin(self, letter: wire.Letter) -> None:
        if self._current is not None or letter.number != self._next:
            due = f"message {self._next}" if self._current is None else f"the rest of message {self._current.number}"
            raise ProtocolError(f"{self.name} began message {letter.number} where {due} was due")
        self._next += 1
        if not letter.whole:
            self._drop(letter.number, "withdrawn")
            return
        self._current = Incoming(letter, self.terms.chunk_bytes, self.imports)
        if letter.header is not None:
            self._enclosed(letter.header)

    def _belongs(self, number: int, *, whole: bool) -> bool:
        """Check that a frame is of the message that is coming in; False where the frame takes that back."""
        if self._current is None or number != self._current.number:
            raise ProtocolError(f"{self.name} sent a part of message {number}, which is not under way")
        if whole:
            return True
        current, self._current, self._awaited = self._current, None, None
        current.drop()
        self._drop(number, "withdrawn")
        return False

    def _enclosed(self, header: wire.Chunk) -> None:
        self._incoming.expect(header)
        if header.location.export is None:
            self._awaited = header
            self._say(wire.Go(header.update, header.seq))
        else:
            self._open(header)

    def _open(self, header: wire.Chunk) -> None:
        """Import a chunk whose bytes are there, or, over a collective, certainly on their way."""
        self._patience.renew()
        chunk = self.imports.open(header, self._patience)
        try:
            check_digest(self.terms, chunk)
        except ProtocolError as error:
            self._incoming.spoil(chunk, error)
        else:
            self._incoming.add_chunk(chunk)

    def _complete_if_whole(self) -> None:
        if self._current is not None and self._awaited is None and self._current.whole:
            self.complete, self._current = self._current, None

    # -- what it is told ----------------------------------------------------------------------------------------------

    def taken(self, message: Incoming, refused: str = "") -> None:
        """The complete message has been handed out, or refused; its chunks are released where nothing views them."""
        self.complete = None
        self._released = []
        try:
            message.drop()
        finally:
            released, self._released = self._released, None
        self._say(wire.Taken(message.number, tuple(released), wire.plain(refused) if refused else ""))

    def flush(self) -> None:
        """Say what there was no room for, as far as there is now."""
        while self._owed and self.link.try_send(self._owed[0]):
            self._owed.popleft()

    def events(self) -> int:
        """The `select.epoll` events after which `advance` should be called."""
        return self.link.events() | (4 if self._owed else 0)

    def _say(self, message: wire.Message) -> None:
        try:
            frame = wire.encode(message)
            if self._owed or not self.link.try_send(frame):
                self._owed.append(frame)
        except PeerError:
            return  # what it said before it went is still to be read
        if len(self._owed) > 4 * self._capacity + 64:
            raise ProtocolError(f"{self.name} reads nothing of what it is told")

    def _acknowledge(self, header: wire.Chunk) -> None:
        if self._released is not None:
            self._released.append(header.seq)
        else:
            self._say(wire.Ack(header.update, header.receiver, header.seq))

    def _settle(self) -> None:
        """Release the chunks of leases that are over."""
        if self.leases:
            for lease in [each for each in self.leases if each[0]() is None]:
                self.leases.remove(lease)
                self.imports.retire(lease[1])
        if self.imports.held:
            self.imports.settle()

    settle = _settle

    # -- the end ------------------------------------------------------------------------------------------------------

    def _drop(self, number: int, reason: str) -> None:
        self._counts.drop(reason)
        _log.log(
            logging.INFO if reason == "withdrawn" else logging.WARNING,
            "message %d of %s is dropped: %s",
            number,
            self.name,
            reason,
        )

    def _end(self, error: TransportKitError) -> None:
        self.gone = error
        current, self._current = self._current, None
        if current is not None:
            self._drop(current.number, "producer lost")

    def close(self, error: BaseException | None) -> None:
        """Hang up; the producer learns why. Never waits."""
        if not isinstance(self.gone, PeerError):
            bye = wire.Bye() if error is None else wire.Bye(code_of(error), wire.plain(str(error)))
            try:
                self.flush()
                if self.link.try_send(wire.encode(bye)):
                    self.link.end_writing()  # at once: an outbox looks for the end before it puts, and not for words
            except TransportKitError:
                pass
        for each in (self._current, self.complete):
            if each is not None:
                each.forget()
        self._current = self.complete = None
        self.leases.clear()
        try:
            self.imports.close()
        except BackendError as failure:
            _log.warning("closing backend %s failed: %s", self.terms.backend, failure)
        self.link.close()
