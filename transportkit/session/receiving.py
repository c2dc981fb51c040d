"""One update at its receiver: begin, chunks in order, commit; what becomes of the bytes is decided elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.chunk import Cursor, used
from transportkit.deadline import Deadline
from transportkit.errors import (
    CallbackError,
    PeerFailedError,
    ProtocolError,
    TransportKitError,
)
from transportkit.manifest import check_specs, manifest_id, wire_nbytes
from transportkit.session.inlet import ended
from transportkit.session.joining import check_digest
from transportkit.session.results import Incoming, Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.lifecycle import Imported, Imports
    from transportkit.session.inlet import Inlet
    from transportkit.session.options import Progress
    from transportkit.wire import Piece, TensorSpec, Terms


class Memory:
    """What a receiver keeps from one update to the next: the manifest and plan that it applied last."""

    def __init__(self) -> None:
        self.manifest_id = ""
        self.specs: list[TensorSpec] = []
        self.sizes: list[int | None] = []
        self.plan: list[tuple[tuple[Piece, ...], int]] = []
        """The pieces of each chunk, and the sum of their bytes."""
        self.announced = False
        """Whether the sender has been told that a call waits, and has begun no update since."""


class Receiving:
    """One update.

    Args:
        inlet: the link.
        imports: the importer's chunks.
        terms: what was agreed.
        memory: kept by the session.
        dtypes: names that this side's torch knows.
        progress: called after each chunk.
    """

    def __init__(
        self,
        inlet: Inlet,
        imports: Imports,
        terms: Terms,
        memory: Memory,
        dtypes: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self._inlet = inlet
        self._imports = imports
        self._terms = terms
        self._memory = memory
        self._dtypes = dtypes
        self._progress = progress
        self._header: wire.Begin | None = None
        self._manifest = wire.Manifest(0)
        self._sizes: list[int | None] = []
        self._by_name: dict[str, TensorSpec] = {}
        self._cursor = Cursor(terms.chunk_bytes)
        self._plan: list[tuple[tuple[Piece, ...], int]] = []
        self._seq = 0
        self._last = False
        self._nbytes = 0
        self._start = 0.0
        self.specs: list[TensorSpec] = []
        """The manifest so far; grows with the chunks where `streamed`."""
        self.over = False
        """Whether the sender and this side are both done with the update."""

    # -- the steps ----------------------------------------------------------------------------------------------------

    def wait(self, deadline: Deadline) -> None:
        """Wait for the next update and take in its manifest. Raises `DeadlineError`; then nothing has changed.

        Call `accept` when the manifest suits.
        """
        while True:
            self._imports.settle()
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
                case wire.Aborted():
                    pass  # of an update that failed here
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
                self._manifest = message
            case _:
                raise self._unexpected(message)
        if message.specs is not None:
            check_specs(message.specs, self._dtypes)
            if manifest_id(message.specs) != message.manifest_id:
                raise ProtocolError(f"{self._inlet.name} sent a manifest that has another digest than it says")
            self._grow(message.specs)
        elif message.manifest_id or message.known_plan:
            if not message.manifest_id or message.manifest_id != self._memory.manifest_id:
                raise ProtocolError(f"{self._inlet.name} refers to a manifest that this side does not hold")
            self.specs, self._sizes = self._memory.specs, self._memory.sizes
        return True

    def accept(self) -> None:
        """Say that the chunks may come. Raises `LeaseError` where no slot is left for them."""
        assert self._header is not None
        self._imports.settle(need=True)
        self._inlet.send(wire.Accept(self._header.update, self._terms.receiver))

    def next(self) -> tuple[Imported, tuple[Piece, ...], int] | None:
        """The next chunk, its pieces, and how many specs it appended; None when all have come.

        The chunk's digest is right and its pieces are valid. `Imports.retire` must follow.

        Raises:
            PeerFailedError: the sender ended it.
        """
        header = self._header
        assert header is not None
        message = self._await("chunk")
        match message:
            case wire.Chunk():
                return self._open(header, message)
            case wire.Commit():
                self._check_totals(header, message)
                return None
            case wire.Aborted():
                raise self._ended(message)
            case _:
                raise self._unexpected(message)

    def report(self) -> None:
        """Report progress to the user's callable."""
        if self._progress is not None and self._header is not None:
            total = self._manifest.nbytes
            try:
                self._progress(self._nbytes, None if total < 0 else total)
            except Exception as error:
                raise CallbackError(f"progress raised {type(error).__name__}: {error}") from error

    def applied(self, *, skipped: Sequence[str] = (), missing: Sequence[str] = (), cast: Sequence[str] = ()) -> Update:
        """Tell the sender that the whole update has landed, and remember its plan."""
        header = self._header
        assert header is not None
        if not self._manifest.known_plan:
            self._memory.specs, self._memory.sizes, self._memory.plan = self.specs, self._sizes, self._plan
            self._memory.manifest_id = self._manifest.manifest_id or manifest_id(self.specs)
        self._inlet.send(wire.Applied(header.update, self._terms.receiver, self._seq, self._nbytes))
        self.over = True
        return Update(
            version=header.version,
            nbytes=self._nbytes,
            seconds=time.monotonic() - self._start,
            chunks=self._seq,
            tensors=len(self.specs),
            backend=self._terms.backend,
            metadata=self._manifest.metadata,
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
            match message:
                case wire.Chunk():
                    self._discard(message)
                case wire.Aborted() if message.update == header.update:
                    self.over = True
                case wire.Commit() | wire.Aborted():
                    continue
                case _:
                    raise self._unexpected(message)

    @property
    def began(self) -> bool:
        """Whether an update has begun that the sender still believes in."""
        return self._header is not None and not self.over

    @property
    def incoming(self) -> Incoming | None:
        """What is known of the update from its beginning on."""
        if self._header is None:
            return None
        told = self._manifest
        return Incoming(
            version=self._header.version,
            specs=None if self.streamed else tuple(self.specs),
            nbytes=None if told.nbytes < 0 else told.nbytes,
            metadata=told.metadata,
        )

    @property
    def streamed(self) -> bool:
        """Whether the specs come with the chunks."""
        return not self._manifest.manifest_id

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _open(self, begin: wire.Begin, header: wire.Chunk) -> tuple[Imported, tuple[Piece, ...], int]:
        if (header.update, header.receiver, header.seq) != (begin.update, self._terms.receiver, self._seq):
            raise ProtocolError(
                f"chunk {header.seq} of update {header.update} for receiver {header.receiver} came, where chunk "
                f"{self._seq} of update {begin.update} for receiver {self._terms.receiver} was due"
            )
        if header.specs:
            if not self.streamed:
                raise ProtocolError(f"chunk {header.seq} brings tensors that are not in the manifest")
            check_specs(header.specs, self._dtypes, earlier=self._by_name)
            self._grow(header.specs)
        pieces = header.pieces
        if self._manifest.known_plan:
            plan = self._memory.plan
            if pieces is not None or self._seq >= len(plan) or header.nbytes != used(plan[self._seq][0]):
                raise ProtocolError(f"chunk {header.seq} does not follow the plan that both sides know")
            pieces, nbytes = plan[self._seq]
        else:
            if pieces is None:
                raise ProtocolError(f"chunk {header.seq} comes without its pieces")
            self._cursor.advance(pieces, header.nbytes, self._sizes)
            nbytes = sum(piece.nbytes for piece in pieces)
            self._plan.append((pieces, nbytes))
        self._seq += 1
        self._last = header.last
        deadline = Deadline(
            self._inlet.timeout, f"chunk {header.seq} over {self._terms.backend} from {self._inlet.name}"
        )
        chunk = self._imports.open(header, deadline)
        try:
            check_digest(self._terms, chunk)
        except TransportKitError:
            self._imports.retire(chunk)
            raise
        self._nbytes += nbytes
        return chunk, pieces, len(header.specs)

    def _discard(self, header: wire.Chunk) -> None:
        """Pass over a chunk of an update that failed here; its slot goes back to the sender."""
        deadline = Deadline(
            self._inlet.timeout, f"chunk {header.seq} over {self._terms.backend} from {self._inlet.name}"
        )
        self._imports.settle()
        self._imports.release(self._imports.open(header, deadline))

    def _grow(self, specs: Sequence[TensorSpec]) -> None:
        self.specs += specs
        if self.streamed:
            self._by_name.update((spec.name, spec) for spec in specs)
        self._sizes += [wire_nbytes(spec) for spec in specs]

    def _check_totals(self, begin: wire.Begin, commit: wire.Commit) -> None:
        if not self._manifest.known_plan:
            self._cursor.finish(self._sizes)
        elif self._seq != len(self._memory.plan):
            raise ProtocolError(
                f"the update ended after {self._seq} of the {len(self._memory.plan)} chunks of its plan"
            )
        have = (begin.update, self._seq, self._nbytes, len(self.specs))
        said = (commit.update, commit.chunks, commit.nbytes, commit.tensors)
        if have != said:
            raise ProtocolError(
                f"the sender committed (update, chunks, bytes, tensors) {said}, but {have} arrived here"
            )
        if self.streamed and commit.manifest_id != manifest_id(self.specs):
            raise ProtocolError("the tensors that arrived have another manifest than the sender committed")

    def _await(self, what: str) -> wire.Message:
        self._imports.settle(need=what == "chunk" and not self._last)
        deadline = Deadline(self._inlet.timeout, f"{what} from {self._inlet.name}")
        return self._inlet.next(deadline, idle=self._imports.settle if self._imports.held else None)

    def _ended(self, message: wire.Aborted) -> PeerFailedError:
        self.over = True
        return ended(message, self._inlet.name)

    def _unexpected(self, message: wire.Message) -> ProtocolError:
        return ProtocolError(f"{self._inlet.name} sent {type(message).__name__.lower()}, which may not come now")
