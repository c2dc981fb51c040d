"""The receiver's side of a handshake: checks each proposal, joins, reads the trial and proves it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, NoReturn

import attrs

from transportkit import wire
from transportkit.chunk import digest
from transportkit.conversation import Conversation, State
from transportkit.deadline import Deadline
from transportkit.errors import (
    AuthenticationError,
    BackendError,
    DeadlineError,
    IntegrityError,
    NegotiationError,
    PeerFailedError,
    ProtocolError,
    VersionError,
)
from transportkit.handshake import peer_text, verify
from transportkit.lifecycle import Imported, Imports, memory_of, translated
from transportkit.session.peers import BEATS, SHORTEST_BEAT
from transportkit.session.wiring import LinkWiring

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.registry import Choice
    from transportkit.session.inlet import Inlet

_log = logging.getLogger("transportkit")

STRAY_BYTES = 1 << 16
"""What a backend may have sent down the link beside a chunk, before it heard that its proposal was declined."""


@attrs.frozen
class Joined:
    """What a receiver works by after its handshake."""

    agreement: wire.Agreement
    terms: wire.Terms
    imports: Imports
    sender: wire.Hello


def check_digest(terms: wire.Terms, chunk: Imported) -> None:
    """Raise `IntegrityError` unless the chunk's bytes are those that its header describes."""
    header = chunk.header
    if terms.digest == "none" or chunk.memory is None:
        return
    if digest(memory_of(chunk.memory) if chunk.buffer is None else chunk.buffer) != header.digest:
        raise IntegrityError(
            f"chunk {header.seq} of update {header.update} arrived over {terms.backend} with other bytes than were sent"
        )


class Joining:
    """One handshake of a receiver.

    Args:
        inlet: the link.
        hello: the receiver's hello.
        choice: the receiver's backends.
        inherited: per backend, what `Transport.inherit` made.
    """

    def __init__(self, inlet: Inlet, hello: wire.Hello, choice: Choice, inherited: dict[str, object]) -> None:
        self._inlet = inlet
        self._hello = hello
        self._choice = choice
        self._inherited = inherited
        self._sender: wire.Hello | None = None
        self._conversation = Conversation("receiver")
        self._imports: Imports | None = None
        self._pending: wire.Proposal | None = None
        self._terms: wire.Terms | None = None

    def strand(self, update: int, receiver: int, seq: int, reason: str) -> None:
        """Tell the sender that the agreed backend can carry nothing more of an update; another proposal follows."""
        self._drop()
        self._inlet.stray_limit = STRAY_BYTES if self._terms is None else max(STRAY_BYTES, self._terms.chunk_bytes)
        self._send(wire.Stranded(update, receiver, seq, wire.plain(reason)))

    def again(self, proposal: wire.Proposal) -> Joined:
        """Agree anew, the sender having proposed another backend. Raises as `run`."""
        if not self._conversation.received(proposal):
            raise ProtocolError(f"{self._inlet.name} repeated a proposal")
        self._pending = proposal
        return self.run(self._deadline("proposal"))

    def run(self, wait: Deadline) -> Joined:
        """Agree with the sender.

        Args:
            wait: bounds waiting for the sender to be ready and for other receivers; when it expires, `run` may be
                called again.

        Raises:
            NegotiationError: it refused; the text says why for each backend.
            PeerError: it was lost.
            DeadlineError: nothing came in time.
        """
        self._inlet.on_signal = self._hear
        try:
            if self._conversation.state is State.START:
                self._send(self._hello)
            if self._sender is None:
                message = self._next(wait)
                if not isinstance(message, wire.Hello):
                    self._unexpected(message)
                self._sender = message
                self._inlet.link.peer = f"sender ({peer_text(message)})"
                self._inlet.beat = max(SHORTEST_BEAT, min(self._inlet.timeout, message.timeout) / BEATS)
            sender = self._sender
            patient = True
            while True:
                message = self._pending or self._next(wait if patient else self._deadline("proposal"))
                self._pending = None
                if not isinstance(message, wire.Proposal):
                    self._unexpected(message)
                patient = False
                agreement = self._attempt(message, sender)
                if agreement is not None:
                    assert self._imports is not None
                    self._terms = message.terms
                    return Joined(agreement, message.terms, self._imports, sender)
        except BaseException:
            self._drop()
            raise
        finally:
            self._inlet.on_signal = None

    def _attempt(self, proposal: wire.Proposal, sender: wire.Hello) -> wire.Agreement | None:
        """Join, connect and prove; None when this proposal came to nothing and the next is due."""
        self._drop()
        terms = proposal.terms
        self._inlet.stray_limit = 0
        reason = verify(proposal, sender, self._hello, self._choice.transports)
        if reason is not None:
            self._decline(proposal, reason)
            return None
        try:
            self._join(proposal)
            while True:
                message = self._next(self._deadline("next step of the handshake"))
                match message:
                    case wire.Connect():
                        assert self._imports is not None
                        with _trying(terms.backend):
                            self._imports.importer.connect(self._trial_deadline(terms))
                        self._prove(proposal)
                    case wire.Agreed():
                        return message.agreement
                    case wire.Proposal():
                        self._pending = message
                        return None
                    case _:
                        self._unexpected(message)
        except (BackendError, DeadlineError, IntegrityError) as error:
            if isinstance(error, DeadlineError) and error.silent:
                raise
            self._decline(proposal, str(error))
            return None

    def _join(self, proposal: wire.Proposal) -> None:
        terms = proposal.terms
        wiring = LinkWiring(
            self._hello.site,
            {terms.receiver: self._inlet.link},
            self._inherited.get(terms.backend),
            self._inlet.check,
            lambda number, data: self._send(wire.Signal(proposal.attempt, number, data)),
            allow_plaintext=self._hello.wishes.allow_plaintext,
        )
        with _trying(terms.backend):
            importer = self._choice.transports[terms.backend].importer(terms, wiring)
            self._imports = Imports(importer, terms.backend, terms.slots, self._acknowledge)
            reply = importer.join(proposal.invitation)
        self._send(wire.Joined(proposal.attempt, terms.receiver, reply))

    def _prove(self, proposal: wire.Proposal) -> None:
        imports = self._imports
        assert imports is not None
        read = bytearray()
        last = False
        seq = 0
        while not last:
            header = self._next(self._deadline("chunk of the trial"))
            if isinstance(header, wire.Proposal):
                self._pending = header
                raise BackendError("the sender gave this backend up")
            if not isinstance(header, wire.Chunk):
                self._unexpected(header)
            if header.seq != seq or not 0 < header.nbytes <= min(proposal.terms.chunk_bytes, 16 - len(read)):
                raise ProtocolError(f"chunk {header.seq} of {header.nbytes} bytes came in the trial, {seq} was due")
            with _trying(proposal.terms.backend):
                chunk = imports.open(header, self._trial_deadline(proposal.terms))
            check_digest(proposal.terms, chunk)
            assert chunk.memory is not None
            with imports.reading(chunk):
                local = chunk.memory.to("cpu") if chunk.memory.device.type != "cpu" else chunk.memory
                read += memory_of(local)
            del local
            imports.release(chunk)
            last = header.last
            seq += 1
        self._send(wire.Proof(proposal.attempt, proposal.terms.receiver, bytes(read)))

    def _decline(self, proposal: wire.Proposal, reason: str) -> None:
        backend = proposal.terms.backend
        _log.info("backend %s declined: %s", backend, reason)
        self._drop()
        self._inlet.stray_limit = max(STRAY_BYTES, proposal.terms.chunk_bytes)
        if self._pending is None:
            self._send(wire.Declined(proposal.attempt, proposal.terms.receiver, backend, wire.plain(reason)))

    def _acknowledge(self, header: wire.Chunk) -> None:
        self._inlet.acknowledge(wire.Ack(header.update, header.receiver, header.seq))

    def _drop(self) -> None:
        imports, self._imports = self._imports, None
        if imports is not None:
            with contextlib.suppress(BackendError):
                imports.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _deadline(self, what: str) -> Deadline:
        return Deadline(self._inlet.timeout, f"{what} from {self._inlet.name}")

    def _trial_deadline(self, terms: wire.Terms) -> Deadline:
        return Deadline(self._inlet.timeout / 2, f"trial of backend {terms.backend}")

    def _send(self, message: wire.Message) -> None:
        self._conversation.sent(message)
        self._inlet.send(message)

    def _next(self, deadline: Deadline) -> wire.Message:
        while True:
            try:
                message = self._inlet.next(deadline, renew=deadline.keyword == "timeout")
            except DeadlineError as error:
                if deadline.keyword == "wait" and deadline.expired():
                    raise
                raise DeadlineError(str(error), silent=True) from error
            if isinstance(message, wire.Signal):
                self._hear(message, due=True)
            elif self._conversation.received(message):
                break
        if isinstance(message, wire.Refusal):
            raise refused(message, self._inlet.name)
        return message

    def _hear(self, message: wire.Signal, *, due: bool = False) -> bool:
        """Hand a backend's word to its importer.

        Args:
            message: the signal.
            due: all that came before it has been taken in. If not, one of a later proposal is left alone.

        Returns:
            Whether it was taken, or belongs to an earlier proposal.
        """
        if not due and message.attempt > self._conversation.attempt:
            return False
        if self._conversation.received(message) and self._imports is not None:
            with _trying(self._imports.backend):
                self._imports.importer.hear(message.data)
        return True

    def _unexpected(self, message: wire.Message) -> NoReturn:
        raise ProtocolError(f"{self._inlet.name} sent {type(message).__name__.lower()} in the handshake")


@contextlib.contextmanager
def _trying(backend: str) -> Iterator[None]:
    """Around a backend's own part of a trial: whatever it raises speaks against that backend only."""
    try:
        with translated(backend):
            yield
    except IntegrityError:
        raise
    except ProtocolError as error:
        raise BackendError(str(error), backend=backend) from error


def refused(refusal: wire.Refusal, name: str) -> Exception:
    text = f"{name} refused: {refusal.text}"
    match refusal.code:
        case "NegotiationError":
            return NegotiationError(text, agreement=refusal.agreement)
        case "VersionError":
            return VersionError(text)
        case "AuthenticationError":
            return AuthenticationError(text)
        case _:
            return PeerFailedError(text, peer=name, code=refusal.code, text=refusal.text)
