"""One update at its receiver: begin, chunks in order, commit; what becomes of the bytes is decided elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import used
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    CallbackError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    ProtocolError,
    TransportKitError,
)
from transportkit.session.inlet import ended
from transportkit.session.joining import check_digest
from transportkit.session.ledger import Ledger
from transportkit.session.results import Incoming, Update
from transportkit.session.wiring import NoPayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transportkit.lifecycle import Imported, Imports
    from transportkit.session.inlet import Inlet
    from transportkit.session.joining import Joined, Joining
    from transportkit.session.ledger import Memory
    from transportkit.session.options import Progress
    from transportkit.wire import Piece, TensorSpec, Terms


class Receiving:
    """One update.

    Args:
        inlet: the link.
        joining: the session's handshake, for where the sender proposes another backend.
        joined: what was agreed.
        on_joined: called with what is agreed instead.
        memory: kept by the session.
        dtypes: names that this side's torch knows.
        progress: called after each chunk.
    """

    def __init__(
        self,
        inlet: Inlet,
        joining: Joining,
        joined: Joined,
        on_joined: Callable[[Joined], object],
        memory: Memory,
        dtypes: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self._inlet = inlet
        self._joining = joining
        self._joined = joined
        self._on_joined = on_joined
        self._memory = memory
        self._dtypes = dtypes
        self._ledger = Ledger(memory, dtypes, joined.terms.chunk_bytes)
        self._progress = progress
        self._header: wire.Begin | None = None
        self._untaken: tuple[tuple[Piece, ...], int] | None = None
        """Pieces of the last chunk, and how many specs it appended, where its bytes could not be had."""
        self._rerouted = False
        self._passed = 0
        """The chunk after the last one that was passed over."""
        self._start = 0.0
        self.over = False
        """Whether the sender and this side are both done with the update."""

    @property
    def imports(self) -> Imports:
        """The importer's chunks; others after a reroute."""
        return self._joined.imports

    @property
    def specs(self) -> list[TensorSpec]:
        """The manifest so far; grows with the chunks where `streamed`."""
        return self._ledger.specs

    @property
    def streamed(self) -> bool:
        """Whether the specs come with the chunks."""
        return self._ledger.streamed

    @property
    def _terms(self) -> Terms:
        return self._joined.terms

    # -- the steps ----------------------------------------------------------------------------------------------------

    def wait(self, deadline: Deadline) -> None:
        """Wait for the next update and take in its manifest. Raises `DeadlineError`; then nothing has changed.

        Call `accept` when the manifest suits.
        """
        while True:
            self.imports.settle()
            self._announce()
            # A sender that has not read for long leaves no room for the word: say it as soon as there is some.
            idle = None if self._memory.announced else self._announce
            message = self._inlet.next(deadline, renew=False, idle=idle)
            match message:
                case wire.Begin():
                    self._memory.announced = False
                    if self._take_manifest(message):
                        return
                case wire.Chunk():
                    self._discard(message)
                case wire.Aborted() | wire.Reroute():
                    pass  # of an update that failed here, or that has landed
                case wire.Proposal():
                    self._rejoin(message)
                    self._ledger = Ledger(self._memory, self._dtypes, self._terms.chunk_bytes)
                case _:
                    raise self._unexpected(message)

    def _announce(self) -> None:
        if not self._memory.announced:
            self._memory.announced = self._inlet.tell(wire.Ready())

    def leave(self) -> None:
        """Tell the sender that nobody waits any more."""
        if self._memory.announced:
            self._memory.announced = False
            self._inlet.tell(wire.Ready(waits=False))

    def _take_manifest(self, begin: wire.Begin) -> bool:
        """Ask for the manifest and take it in; False where the sender takes the update back."""
        self._header, self.over = begin, False
        self._start = time.monotonic()
        self._inlet.send(wire.Present(begin.update, self._terms.receiver))
        message = self._await("manifest")
        match message:
            case wire.Aborted() if message.withdrawn:
                self._header = None
                return False
            case wire.Aborted():
                raise self._ended(message)
            case wire.Manifest() if message.update == begin.update:
                self._ledger.take(message, self._inlet.name)
                return True
            case _:
                raise self._unexpected(message)

    def accept(self) -> None:
        """Say that the chunks may come. Raises `LeaseError` where no slot is left for them."""
        assert self._header is not None
        self.imports.settle(need=True)
        self._inlet.send(wire.Accept(self._header.update, self._terms.receiver))

    def next(self) -> tuple[Imported, tuple[Piece, ...], int] | None:
        """The next chunk, its pieces, and how many specs it appended; None when all have come.

        The chunk's digest is right and its pieces are valid. `Imports.retire` must follow.

        Raises:
            PeerFailedError: the sender ended it.
        """
        header = self._header
        assert header is not None
        while True:
            try:
                message = self._await("chunk")
                match message:
                    case wire.Chunk():
                        came = self._open(header, message)
                        if came is not None:
                            return came
                    case wire.Reroute():
                        self.reroute(None)
                    case wire.Commit():
                        self._ledger.check_totals(header.update, message)
                        return None
                    case wire.Aborted():
                        raise self._ended(message)
                    case _:
                        raise self._unexpected(message)
            except BackendError as error:
                self.reroute(error)

    def give_back(self, pieces: tuple[Piece, ...], error: BackendError) -> None:
        """The bytes of the chunk that `next` returned last could not be read: it is to come again over another backend.

        Raises as `reroute`.
        """
        self._untaken = pieces, 0
        self.reroute(error)

    def reroute(self, error: BackendError | None) -> None:
        """Go on over another backend.

        Args:
            error: what failed here; None where it failed at the sender.

        Raises:
            BackendError, PeerError: there is none, or the update ends meanwhile; the error that was given where there
                was one.
        """
        ended_by = self._strand(error)
        if ended_by is not None:
            told = self._ended(ended_by)
            if error is not None and not isinstance(error, NoPayloadError):
                raise error from told
            raise told from error

    def _strand(self, error: BackendError | None) -> wire.Aborted | None:
        """Say how far this side is and take the next proposal; or return what ended the update instead."""
        header = self._header
        assert header is not None
        due = max(self._due, self._passed)
        self._joining.strand(header.update, self._terms.receiver, due, "" if error is None else str(error))
        under_way = self._terms.slots
        while True:
            deadline = Deadline(self._inlet.timeout, f"another backend from {self._inlet.name}")
            try:
                message = self._inlet.next(deadline)
            except PeerError as lost:
                if error is None or isinstance(lost, PeerLostError) or isinstance(error, NoPayloadError):
                    raise
                raise error from lost
            match message:
                case wire.Proposal():
                    self._rejoin(message)
                    self._rerouted = True
                    return None
                case wire.Aborted() if message.update == header.update:
                    return message
                case wire.Chunk() if under_way:
                    under_way -= 1  # none is acknowledged any more, so a slot each is all that can come
                case wire.Commit() | wire.Reroute() | wire.Aborted():
                    continue  # what was on its way
                case _:
                    raise self._unexpected(message)

    def _rejoin(self, proposal: wire.Proposal) -> None:
        self._joined = self._joining.again(proposal)
        self._on_joined(self._joined)

    def report(self) -> None:
        """Report progress to the user's callable."""
        if self._progress is not None and self._header is not None:
            total = self._ledger.manifest.nbytes
            try:
                self._progress(self._ledger.nbytes, None if total < 0 else total)
            except Exception as error:
                raise CallbackError(f"progress raised {type(error).__name__}: {error}") from error

    def applied(self, *, skipped: Sequence[str] = (), missing: Sequence[str] = (), cast: Sequence[str] = ()) -> Update:
        """Tell the sender that the whole update has landed, and remember its plan."""
        header = self._header
        assert header is not None
        ledger = self._ledger
        ledger.remember()
        self._inlet.send(wire.Applied(header.update, self._terms.receiver, ledger.seq, ledger.nbytes))
        self.over = True
        return Update(
            version=header.version,
            nbytes=ledger.nbytes,
            seconds=time.monotonic() - self._start,
            chunks=ledger.seq,
            tensors=len(ledger.specs),
            backend=self._terms.backend,
            metadata=ledger.manifest.metadata,
            skipped=tuple(skipped),
            missing=tuple(missing),
            cast=tuple(cast),
        )

    def fail(self, code: str, text: str, *, torn: bool) -> None:
        """Tell the sender that the update failed here, and pass over what it still sends until it has heard.

        Raises `PeerError`, `DeadlineError` or `ProtocolError` when the link does not survive that.
        """
        header = self._header
        if header is None or self.over:
            return
        self._memory.manifest_id = ""
        self._inlet.send(wire.Failed(header.update, self._terms.receiver, code, text, torn))
        while not self.over:
            message = self._await("end of the failed update")
            ended_by: wire.Message | None = message
            match message:
                case wire.Chunk():
                    try:
                        self._discard(message)
                        continue
                    except BackendError as error:
                        ended_by = self._strand(error)
                case wire.Reroute():
                    ended_by = self._strand(None)
                case wire.Commit() | wire.Aborted():
                    pass
                case _:
                    raise self._unexpected(message)
            if isinstance(ended_by, wire.Aborted) and ended_by.update == header.update:
                self.over = True

    @property
    def began(self) -> bool:
        """Whether an update has begun that the sender still believes in."""
        return self._header is not None and not self.over

    @property
    def incoming(self) -> Incoming | None:
        """What is known of the update from its beginning on."""
        if self._header is None:
            return None
        told = self._ledger.manifest
        return Incoming(
            version=self._header.version,
            specs=None if self.streamed else tuple(self.specs),
            nbytes=None if told.nbytes < 0 else told.nbytes,
            metadata=told.metadata,
        )

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _open(self, begin: wire.Begin, header: wire.Chunk) -> tuple[Imported, tuple[Piece, ...], int] | None:
        """Import a chunk; None for one that was taken before a reroute already."""
        if (header.update, header.receiver) != (begin.update, self._terms.receiver):
            raise ProtocolError(
                f"a chunk of update {header.update} for receiver {header.receiver} came, where one of update "
                f"{begin.update} for receiver {self._terms.receiver} was due"
            )
        if self._rerouted and 0 <= header.seq < self._due:
            self._discard(header)
            return None
        self._untaken = pieces, appended = self._untaken or self._ledger.admit(header)
        if header.seq != self._due or header.nbytes != used(pieces):
            raise ProtocolError(f"chunk {header.seq} came again with other bytes than before")
        chunk = self.imports.open(header, self._opening(header))
        self._untaken = None
        try:
            check_digest(self._terms, chunk)
        except TransportKitError:
            with contextlib.suppress(BackendError):  # the chunk was not taken, and must not pass for it
                self.imports.retire(chunk)
            raise
        return chunk, pieces, appended

    @property
    def _due(self) -> int:
        """The first chunk that has not been taken."""
        return self._ledger.seq - (self._untaken is not None)

    def _discard(self, header: wire.Chunk) -> None:
        """Pass over a chunk that is not wanted; its slot goes back to the sender."""
        self.imports.settle()
        self.imports.release(self.imports.open(header, self._opening(header)))
        self._passed = max(self._passed, header.seq + 1)

    def _opening(self, header: wire.Chunk) -> Deadline:
        return Deadline(self._inlet.timeout, f"chunk {header.seq} over {self._terms.backend} from {self._inlet.name}")

    def _await(self, what: str) -> wire.Message:
        self.imports.settle(need=what == "chunk" and not self._ledger.last)
        deadline = Deadline(self._inlet.timeout, f"{what} from {self._inlet.name}")
        return self._inlet.next(deadline, idle=self.imports.settle if self.imports.held else None)

    def _ended(self, message: wire.Aborted) -> PeerFailedError:
        self.over = True
        return ended(message, self._inlet.name)

    def _unexpected(self, message: wire.Message) -> ProtocolError:
        return ProtocolError(f"{self._inlet.name} sent {type(message).__name__.lower()}, which may not come now")
