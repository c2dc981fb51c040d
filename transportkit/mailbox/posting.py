"""An outbox's way to one inbox, once they are agreed: credit, slots and frames of one message after another.

A message is sent whole or taken back; there is no third way, whatever ends `Posting.post`:

- Nothing of its first frame had left: the frame is dropped, and the inbox never hears of it.
- A frame is half written: its last byte, which still has to leave, says "taken back" instead of "whole".
- The frame that failed had not begun, but earlier ones are there: `Withdrawn` follows them.

A chunk of a backend that exports nothing is moved only when the inbox says that it reads (`Go`). From then on what is
on its way is finished, bound by the session's ``timeout`` without progress. Where it does not come down the link, the
inbox begins to wait for it only at `Moved`, since it can read nothing else meanwhile, a withdrawal say.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import digest, plan, used
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    ClosedError,
    DeadlineError,
    PeerError,
    PeerLostError,
    ProtocolError,
    TensorError,
    TransportKitError,
)
from transportkit.lifecycle import memory_of
from transportkit.link import wait as wait_links
from transportkit.mailbox.settings import BODY_FRAME, FRAME_LIMIT
from transportkit.session.peers import code_of, farewell, unexpected
from transportkit.transport import Exporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from transportkit.link import SocketLink
    from transportkit.mailbox.counts import OutboxCounts
    from transportkit.mailbox.encoding import Encoded
    from transportkit.packing import Packer
    from transportkit.session.lane import Lane
    from transportkit.session.peers import Peer, Peers
    from transportkit.wire import Agreement, Piece

_log = logging.getLogger("transportkit")

#: For frames that `Link.poll` has read whole, as it does with all of a mailbox.
AT_HAND = Deadline(0, "rest of a frame that is there")

#: The one receiver of an outbox's lane.
INBOX = 0


class Posting:
    """One inbox, agreed with.

    Args:
        link: the link to it.
        peers: of the handshake; the inbox is the only one.
        lane: carries the chunks.
        agreement: what the handshake came to.
        capacity: most messages that may be under way.
        counts: the outbox's counters.
        carried: whether the backend moves bytes down the link itself.
    """

    def __init__(
        self,
        link: SocketLink,
        peers: Peers,
        lane: Lane,
        agreement: Agreement,
        capacity: int,
        counts: OutboxCounts,
        *,
        carried: bool,
    ) -> None:
        self.carried = carried
        self.agreement = agreement
        self.lane = lane
        self.link = link
        self._peers = peers
        self._peer = peers[INBOX]
        mailbox = self._peer.hello.mailbox
        self.typed = mailbox is not None and mailbox.typed
        """Whether the inbox rebuilds a type of its own."""
        self._capacity = capacity
        self._counts = counts
        self._in_flight: collections.deque[int] = collections.deque()
        self._go: tuple[int, int] | None = None
        self.begun = False
        self._bound = Deadline(peers.timeout, f"progress over {lane.backend} at {self.name}")
        self._host = all(slot.is_cpu for slot in lane.slots)
        self._unguarded = type(lane.exporter).packing is Exporter.packing  # most have none, and it is not free
        self._memory = [memory_of(slot) for slot in lane.slots] if lane.terms.digest != "none" else []
        lane.pool.newest_first = True
        peers.on_message = self._heard
        link.control_limit = FRAME_LIMIT
        link.renew_on_progress = True

    @property
    def name(self) -> str:
        return self._peer.name

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The messages that are put and not taken, as far as is known without looking."""
        return tuple(self._in_flight)

    @property
    def slots_in_use(self) -> int:
        return self.lane.pool.count - self.lane.pool.free

    def take_in(self) -> None:
        """Take in what the inbox has said, without waiting. Raises `PeerError` where it is gone."""
        peer, link = self._peer, self.link
        try:
            while peer.gone is None:
                frame = link.take()
                if frame is None:
                    if link.kind_at_hand() is None or not link.poll():
                        break
                    frame = link.recv(AT_HAND, FRAME_LIMIT)  # it is refused
                message = wire.decode(frame)
                match message:
                    case wire.Taken():
                        self._taken(message)
                    case wire.Bye():
                        peer.gone = farewell(message, self.name)
                    case wire.Waiting():
                        continue
                    case _:
                        self._heard(peer, message)
        except PeerLostError as error:
            peer.gone = error
        if peer.gone is not None:
            raise peer.gone

    # -- one message --------------------------------------------------------------------------------------------------

    def post(self, number: int, encoded: Encoded, deadline: Deadline) -> None:
        """Send one message.

        Raises:
            DeadlineError: there was no room for it in time; it is not delivered.
            BackendError: the backend failed; it is not delivered.
            PeerError: the inbox is gone; what became of the message, where it had begun, is not known.

        After any of them `begun` tells whether its number is used up, and `usable` whether another may follow.
        """
        self.begun = self._told = self._broken = False
        self._slot: int | None = None
        self._unmoved: int | None = None
        if self._peer.gone is not None or not self.link.at_rest():
            self.take_in()
            self._tidy(deadline)
        if len(self._in_flight) >= self._capacity:
            self._wait(lambda: len(self._in_flight) < self._capacity, deadline, "room in the inbox")
        try:
            self._send(number, encoded, deadline)
        except BaseException as error:
            self._take_back(number, error)
            raise
        self._in_flight.append(number)
        with contextlib.suppress(PeerError):  # this message has left, so it is the next call's
            self.take_in()  # now, while the inbox is busy with the message: it waits for nothing here

    @property
    def usable(self) -> bool:
        """Whether the link can carry another message."""
        try:
            return self._peer.gone is None and self.link.fileno() >= 0
        except TransportKitError:
            return False

    def _send(self, number: int, encoded: Encoded, deadline: Deadline) -> None:
        body, rest = encoded.body[:BODY_FRAME], encoded.body[BODY_FRAME:]
        parts = [rest[at : at + BODY_FRAME] for at in range(0, len(rest), BODY_FRAME)]
        chunks = plan(encoded.sizes, self.lane.terms.chunk_bytes) if encoded.sizes else ()
        packer = encoded.packer(host=self._host) if chunks else None
        if parts or packer is None:
            self._frame(wire.Letter(number, body, encoded.sizes, len(parts), len(chunks)), deadline)
        for part in parts:
            self._frame(wire.Fragment(number, part), deadline)
        for seq, pieces in enumerate(chunks):
            assert packer is not None
            header = self._pack(number, seq, pieces, packer, deadline)
            if seq or parts:
                self._frame(wire.Enclosure(number, header), deadline)
            else:
                self._frame(wire.Letter(number, body, encoded.sizes, 0, len(chunks), header), deadline)
            self._move(header)
            if header.location.export is None:
                self._deliver(header, deadline)

    def _pack(self, number: int, seq: int, pieces: tuple[Piece, ...], packer: Packer, deadline: Deadline) -> wire.Chunk:
        """Take a slot and pack the chunk into it; its header.

        That calls every chunk the last one: the next may be taken back, so no backend is to wait for it beforehand.
        """
        lane = self.lane
        if not lane.pool.free:
            self._wait(lambda: lane.pool.free > 0, deadline, "free slot")
        slot = self._slot = lane.pool.acquire()
        assert slot is not None
        size = used(pieces)
        if self._unguarded:
            _fill(lane.slots[slot], packer, pieces)
        else:
            with lane.packing(slot):
                _fill(lane.slots[slot], packer, pieces)
        value = digest(self._memory[slot][:size]) if self._memory else 0
        with lane.translated():
            lane.exporter.ready(slot, self._patience())
        location = lane.locate(slot, INBOX, number, seq)
        return wire.Chunk(number, INBOX, seq, True, size, value, location, pieces)

    def _move(self, header: wire.Chunk) -> None:
        """The header has left, so the inbox owes its word for the slot."""
        slot, self._slot = self._slot, None
        assert slot is not None
        self.lane.pool.publish(slot, header.update, header.seq, [INBOX])
        if header.location.export is None:
            self._unmoved = slot
        else:
            with self.lane.translated():
                self.lane.exporter.publish(slot, header, self._patience())

    def _deliver(self, header: wire.Chunk, deadline: Deadline) -> None:
        """Move the bytes of a backend that exports nothing, as soon as the inbox reads them."""
        number, seq, slot = header.update, header.seq, self._unmoved
        assert slot is not None
        try:
            self._wait(lambda: self._go == (number, seq), deadline, "reader for the message")
        except BaseException:
            with contextlib.suppress(ProtocolError):  # no byte of it moved, so the inbox will never say that it is read
                self.lane.pool.acknowledge(number, seq, INBOX)
            raise
        self._unmoved = None
        if not self.carried:
            self._say_moved(number, seq)
            self._broken = True
        with self.lane.translated():
            self.lane.exporter.publish(slot, header, self._patience())
        self._broken = False
        if self.carried:
            self._say_moved(number, seq)

    def _say_moved(self, number: int, seq: int) -> None:
        self.link.post(wire.encode(wire.Moved(number, seq)), self._patience())

    # -- frames -------------------------------------------------------------------------------------------------------

    def _frame(self, message: wire.Letter | wire.Fragment | wire.Enclosure, deadline: Deadline) -> None:
        """Write one frame of a message, or none of it that counts."""
        frame = wire.encode(message)
        try:
            self.link.post(frame, deadline)
        except PeerError:
            self.begun = True  # for all that is known here
            raise
        except BaseException as error:
            self._spoil()
            if isinstance(error, DeadlineError):
                raise self._full("room on the link", deadline) from error
            raise
        self.begun = True

    def _spoil(self) -> None:
        """Take back the frame that could not be written."""
        try:
            dropped = self.link.withdraw(wire.SPOILED)
        except ClosedError:
            dropped = False
        if not dropped:
            self.begun = self._told = True

    def _take_back(self, number: int, error: BaseException) -> None:
        """The message does not come to its end."""
        if self._slot is not None:
            self.lane.pool.abandon(self._slot)
            self._slot = None
        if not self.begun or isinstance(error, PeerError):
            return
        self._counts.withdrawn += 1
        _log.info("message %d to %s is withdrawn: %s", number, self.name, error)
        if not self._told:
            with contextlib.suppress(TransportKitError):
                self.link.post(
                    wire.encode(wire.Withdrawn(number, self._broken)), Deadline(0, "room for the withdrawal")
                )

    def _tidy(self, deadline: Deadline) -> None:
        """Write what an earlier message has left over."""
        try:
            self.link.flush(deadline)
        except DeadlineError as error:
            raise self._full("room on the link", deadline) from error

    # -- what the inbox says ------------------------------------------------------------------------------------------

    def wait_taken(self, deadline: Deadline) -> None:
        """Wait until everything that was put has been handed out. Raises `DeadlineError`, `PeerError`."""
        self.take_in()
        self._tidy(deadline)
        self._wait(lambda: not self._in_flight, deadline, "word that all was taken")

    def _wait(self, until: Callable[[], bool], deadline: Deadline, what: str) -> None:
        if until():
            return
        self.take_in()
        began = time.monotonic()
        try:
            while not until():
                if deadline.expired():
                    raise self._full(what, deadline)
                with contextlib.suppress(DeadlineError):
                    wait_links([self.link], deadline)
                self.take_in()
        finally:
            self._counts.waits += 1
            self._counts.wait_seconds += time.monotonic() - began

    def _full(self, what: str, deadline: Deadline) -> DeadlineError:
        return DeadlineError(
            f"no {what} within {deadline.seconds or 0:g} s: {self.name} has {len(self._in_flight)} messages of this "
            f"outbox to take, and {self.slots_in_use} of its {self.lane.pool.count} slots are unread (raise "
            f"`{deadline.keyword}=`, `capacity=` or `slots=`, or let the inbox take messages faster)"
        )

    def _patience(self) -> Deadline:
        """Of the backend's own steps and of a payload on its way, afresh."""
        self._bound.renew()
        return self._bound

    def _heard(self, _: Peer, message: wire.Message) -> None:
        match message:
            case wire.Taken():
                self._taken(message)
            case wire.Ack():
                self.lane.pool.acknowledge(message.update, message.seq, INBOX)
            case wire.Go():
                self._go = message.number, message.seq
            case _:
                raise unexpected(message, self.name)

    def _taken(self, message: wire.Taken) -> None:
        if message.number not in self._in_flight:
            raise ProtocolError(f"{self.name} has taken message {message.number}, which it does not have")
        while self._in_flight[0] < message.number:
            self._in_flight.popleft()
        self._in_flight.popleft()
        for seq in message.seqs:
            self.lane.pool.acknowledge(message.number, seq, INBOX)
        if message.refused:
            self._counts.refused += 1
            _log.warning("%s dropped message %d: %s", self.name, message.number, message.refused)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Hang up; the inbox learns why. Never waits."""
        with contextlib.suppress(TransportKitError):
            bye = wire.Bye() if error is None else wire.Bye(code_of(error), wire.plain(str(error)))
            self.link.try_send(wire.encode(bye))
        self._memory = []
        try:
            self.lane.close()
        except BackendError as failure:
            _log.warning("closing backend %s failed: %s", self.lane.backend, failure)
        self.link.close()

    def abort(self) -> None:
        """Make a running call raise. From any thread; never blocks."""
        self.link.abort()
        self.lane.exporter.abort()


def _fill(slot: Tensor, packer: Packer, pieces: tuple[Piece, ...]) -> None:
    try:
        packer.pack(pieces, slot)
    except RuntimeError as error:
        raise TensorError(f"a tensor of the message cannot be copied by torch: {error}") from error
