"""`Lease`: an imported chunk, read in place by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit.errors import BackendError, LeaseError, TransportKitError
from transportkit.manifest import nbytes
from transportkit.packing import typed_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from transportkit.lifecycle import Imported, Imports
    from transportkit.wire import Piece, TensorSpec


class Lease:
    """The right to read one chunk in place, until `release` or the next step of the loop that gave it.

    Iterates as (spec, byte offset, tensor): the typed tensor, byte offset 0, where it lies whole in the chunk; else a
    uint8 view of the tensor's bytes from that offset on. The tensors are for reading. A tensor that is kept beyond
    the lease stays valid, but withholds its slot from the sender until it is dropped.
    """

    def __init__(
        self,
        chunk: Imported,
        pieces: Sequence[Piece],
        specs: Sequence[TensorSpec],
        tied: dict[str, list[TensorSpec]],
        imports: Imports,
        reroute: Callable[[BackendError], object],
    ) -> None:
        self._chunk = chunk
        self._pieces = pieces
        self._specs = specs
        self._tied = tied
        self._imports = imports
        self._reroute = reroute
        self._base: Tensor | None = chunk.view()

    @property
    def nbytes(self) -> int:
        """Length of the chunk in bytes, padding included."""
        return self._chunk.header.nbytes

    def __iter__(self) -> Iterator[tuple[TensorSpec, int, Tensor]]:
        for piece in self._pieces:
            base = self._base
            if base is None:
                raise LeaseError("this lease has ended; copy tensors (`tensor.clone()`) within the step of the loop")
            spec = self._specs[piece.tensor]
            whole = piece.nbytes == nbytes(spec)
            view = base[piece.offset : piece.offset + piece.nbytes]
            del base
            for name in (spec, *self._tied.get(spec.name, ())):
                yield name, piece.start, typed_view(view, 0, name) if whole else view
            del view

    def release(self) -> None:
        """End the lease now, so that the sender may use the slot. Raises `LeaseError` while a tensor of it is alive."""
        ended, self._base = self._base is None, None
        try:
            self._imports.release(self._chunk)
        except LeaseError:
            self._base = None if ended else self._chunk.view()
            raise
        except BackendError as error:  # the chunk was read; what follows comes another way
            self._reroute(error)

    def end(self, *, leaving: bool = False) -> None:
        """End the lease; its slot is held back while a tensor of it is alive.

        Args:
            leaving: no further chunk is wanted, so what fails here matters no more.
        """
        self._base = None
        try:
            self._imports.retire(self._chunk)
        except TransportKitError as error:
            if leaving:
                return
            if not isinstance(error, BackendError):
                raise
            self._reroute(error)
