"""`OutOfBand`: for people who encode their messages themselves; sends the tensors in them, and nothing else.

The bytes that their encoder makes travel however they like, and in whatever order. Where a tensor was they hold an
extension value: which tensor of which message of which outbox it is, or the tensor's bytes where it went inline.
"""

from __future__ import annotations

import logging
import os
import threading
import typing
from typing import TYPE_CHECKING, Any, Self

import attrs
import msgspec
from msgspec import Struct
from msgspec.msgpack import Ext

from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    ClosedError,
    DeadlineError,
    MessageError,
    PeerError,
    PeerLostError,
    ProtocolError,
    UsageError,
)
from transportkit.mailbox.decoding import Decoder
from transportkit.mailbox.encoding import Encoder, is_numeric
from transportkit.mailbox.inbox import Inbox
from transportkit.mailbox.mail import Postmark
from transportkit.mailbox.outbox import Outbox
from transportkit.mailbox.settings import DEFAULT_INLINE, seconds
from transportkit.wire import decode_as

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger("transportkit")

#: The codes of the extension values: a tensor that travels through the outbox, and one that is right there.
AWAY, HERE = 115, 116

#: How often a wait for a tensor looks whether its producer is still there, in seconds.
_LOOK_PERIOD = 0.1


class Away(Struct, frozen=True, array_like=True):
    """Which tensor it is."""

    producer: str
    message: int
    tensor: int


@attrs.frozen(kw_only=True)
class OutOfBandStats:
    """A look at the counters of an `OutOfBand`.

    Args:
        out_of_band: tensors that travelled through the outbox, or came from the inbox.
        inline: tensors that travelled in the user's bytes because they are small.
        inline_fallbacks: tensors that did so because the outbox did not take them.
        waiting: at an inbox: messages whose tensors have come and are not all fetched.
    """

    out_of_band: int = 0
    inline: int = 0
    inline_fallbacks: int = 0
    waiting: int = 0


class OutOfBand:
    """Hooks for a msgspec encoder at an outbox, or for a msgspec decoder at an inbox.

    ``Encoder(enc_hook=hooks.enc_hook)`` sends each tensor above ``inline`` bytes as it meets it; within ``with hooks:``
    all tensors that are met travel together, in one message, when the block ends. ``Decoder(type,
    ext_hook=hooks.ext_hook)`` fetches them, in whatever order bytes are decoded. An inbox that is used by this should
    be used by nothing else.

    Args:
        box: an `Outbox` or an `Inbox` without a type.
        inline: tensors of at most so many bytes stay in the bytes.
        timeout: at an outbox: how long a tensor waits for room before it goes inline, in seconds; by default not at
            all. At an inbox: how long a tensor is waited for; by default the inbox's ``timeout``.
    """

    def __init__(self, box: Outbox | Inbox, *, inline: int = DEFAULT_INLINE, timeout: float | None = None) -> None:
        if not isinstance(box, Outbox | Inbox):
            raise UsageError(f"OutOfBand takes an Outbox or an Inbox, not {type(box).__name__}")
        if isinstance(box, Inbox) and box.typed:
            raise UsageError("OutOfBand takes an Inbox without a type: the type is the decoder's")
        self._box = box
        self._inline = inline
        self._timeout = seconds(timeout)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Of the outbox's side."""
        self._changed = threading.Condition(threading.Lock())
        """Of the inbox's: a message has come, or the thread that takes them has gone."""
        self._taking = False
        """Whether a thread takes messages out of the inbox, for all that wait."""
        self._encoder = Encoder(0, 0)
        self._decoder = Decoder(Any, box.device if isinstance(box, Inbox) else "cpu")
        self._batch: list[Any] | None = None
        self._number = 0
        self._came: dict[tuple[str, int], dict[int, Any]] = {}
        self._dropped: set[tuple[str, int]] = set()
        self._newest: dict[str, int] = {}
        """Of each producer, the message that came last."""
        self._lost = False
        """Whether the outbox's inbox was lost."""
        self._away = self._small = self._fallbacks = 0

    @property
    def stats(self) -> OutOfBandStats:
        return OutOfBandStats(
            out_of_band=self._away, inline=self._small, inline_fallbacks=self._fallbacks, waiting=len(self._came)
        )

    # -- at an outbox -------------------------------------------------------------------------------------------------

    def enc_hook(self, value: Any) -> Any:
        """For `msgspec.msgpack.Encoder`: tensors, numpy arrays and numpy scalars.

        Raises:
            NotImplementedError: it is something else; a hook of your own may call this first.
            UnsupportedTensorError: it does not travel.
        """
        if not is_numeric(value):
            raise NotImplementedError(f"objects of type {type(value).__qualname__} are not for OutOfBand")
        outbox = self._outbox()
        self._check_process()
        with self._lock:
            self._encoder.encode(value)  # raises where it does not travel
            if value.nbytes <= self._inline:
                self._small += 1
                return self._here(value)
            if self._batch is not None:
                self._batch.append(value)
                return Ext(AWAY, msgspec.msgpack.encode(Away(outbox.identity, self._number, len(self._batch) - 1)))
            try:
                number = outbox.put([value], timeout=self._timeout or 0)
            except (DeadlineError, BackendError, PeerError, ClosedError) as error:
                if isinstance(error, ClosedError) and not self._lost:
                    raise  # its user has closed it
                self._lost = self._lost or isinstance(error, PeerError)
                self._fallbacks += 1
                _log.info("a tensor of %d bytes goes inline: %s", value.nbytes, error)
                return self._here(value)
            self._away += 1
            return Ext(AWAY, msgspec.msgpack.encode(Away(outbox.identity, number, 0)))

    def __enter__(self) -> Self:
        """Begin a batch. Other threads that put through this outbox wait until it ends."""
        outbox = self._outbox()
        self._check_process()
        self._lock.acquire()
        try:
            self._number = outbox.reserve()
        except BaseException:
            self._lock.release()
            raise
        self._batch = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Put the batch; raises what `Outbox.put` raises, and then the bytes that were made are worth nothing."""
        outbox = self._outbox()
        batch, self._batch = self._batch, None
        try:
            if error is None and batch:
                number = outbox.put(batch, timeout=self._timeout)
                self._away += len(batch)
                if number != self._number:
                    raise MessageError(
                        f"the tensors went as message {number} instead of {self._number}, since the backend failed "
                        "meanwhile; encode once more"
                    )
        finally:
            outbox.unreserve()
            self._lock.release()

    def _check_process(self) -> None:
        """In a forked child the lock is that of a thread that is not there, and so is its batch."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._batch = None

    def _here(self, value: Any) -> Ext:
        return Ext(HERE, self._encoder.encode(value, all_inline=True).body)

    def _outbox(self) -> Outbox:
        if not isinstance(self._box, Outbox):
            raise UsageError("this OutOfBand is that of an Inbox: it decodes")
        return self._box

    # -- at an inbox --------------------------------------------------------------------------------------------------

    def ext_hook(self, code: int, data: memoryview) -> Any:
        """For `msgspec.msgpack.Decoder`: the tensor that is meant; other codes give `msgspec.msgpack.Ext`.

        Raises:
            DeadlineError: it has not come within ``timeout``.
            PeerLostError: it has not come, and its producer is gone.
            MessageError: it was fetched or dropped already.
            ProtocolError: these are no bytes of an `OutOfBand`.
        """
        if code == HERE:
            return self._decoder.decode(bytes(data), _Nothing())
        if code == AWAY:
            which = decode_as(Away, bytes(data))
            return self.fetch(which.producer, which.message, which.tensor)
        return Ext(code, bytes(data))

    def dec_hook(self, kind: Any, value: Any) -> Any:
        """For decoders that have one: what `ext_hook` gave is what was annotated. Raises `NotImplementedError` else."""
        if isinstance(value, typing.get_origin(kind) or kind):
            return value
        raise NotImplementedError(f"expected {kind}, got {type(value).__qualname__}")

    def fetch(self, producer: str, message: int, tensor: int) -> Any:
        """One tensor, by its numbers; each once."""
        key = producer, message
        with self._changed:
            self._await(key)
            tensors = self._came[key]
            try:
                value = tensors.pop(tensor)
            except KeyError:
                raise MessageError(
                    f"tensor {tensor} of message {message} of {producer} did not come, or was fetched already",
                    producer=producer,
                    number=message,
                ) from None
            if not tensors:
                del self._came[key]
            self._away += 1
            return value

    def drop(self, producer: str, message: int) -> None:
        """Nobody will ask for the tensors of this message: they are dropped, also where they are still to come."""
        with self._changed:
            if self._came.pop((producer, message), None) is None and message > self._newest.get(producer, 0):
                self._dropped.add((producer, message))

    def _await(self, key: tuple[str, int]) -> None:
        inbox = self._box
        if not isinstance(inbox, Inbox):
            raise UsageError("this OutOfBand is that of an Outbox: it encodes")
        deadline = Deadline(inbox.patience if self._timeout is None else self._timeout, "tensor")
        while key not in self._came:
            if self._taking:  # by another thread, which takes whatever comes first
                if deadline.expired():
                    raise deadline.error()
                self._changed.wait(deadline.remaining(_LOOK_PERIOD))
                continue
            here = key[0] in inbox.producers
            if key[1] <= self._newest.get(key[0], 0):
                raise MessageError(
                    f"the tensors of message {key[1]} of {key[0]} were fetched or dropped already",
                    producer=key[0],
                    number=key[1],
                )
            try:
                value = self._take(inbox, deadline.remaining(_LOOK_PERIOD if here else 0.0))
            except DeadlineError:
                if not here:
                    raise PeerLostError(
                        f"producer {key[0]} is not there any more, and message {key[1]} of it did not come", peer=key[0]
                    ) from None
                if deadline.expired():
                    raise deadline.error() from None
                continue
            except MessageError:  # of whichever message came next
                self._note(inbox)
                if inbox.last == Postmark(*key):
                    raise
                continue
            last = self._note(inbox)
            if not isinstance(value, list):
                raise ProtocolError(f"message {last.number} of {last.producer} is not one of an OutOfBand")
            came = last.producer, last.number
            if came in self._dropped:
                self._dropped.discard(came)
                continue
            self._came[came] = dict(enumerate(value))

    def _take(self, inbox: Inbox, seconds: float | None) -> Any:
        """The next message of the inbox; other threads may look for theirs meanwhile."""
        self._taking = True
        self._changed.release()
        try:
            return inbox.get(seconds)
        finally:
            self._changed.acquire()
            self._taking = False
            self._changed.notify_all()

    def _note(self, inbox: Inbox) -> Postmark:
        """Remember how far the producer of the last message is; its postmark."""
        last = inbox.last
        assert last is not None
        if last.producer not in self._newest:
            gone = self._newest.keys() - inbox.producers.keys()
            for producer in gone:
                del self._newest[producer]
            self._dropped = {each for each in self._dropped if each[0] not in gone}
        self._newest[last.producer] = last.number
        return last


class _Nothing:
    """No tensors: those that are inline need none."""

    def tensor(self, ref: object, device: object) -> Any:
        raise ProtocolError("bytes that hold no tensors name one")
