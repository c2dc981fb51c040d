"""What becomes of a chunk's bytes: one class for each way of taking an update."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transportkit import wire
from transportkit.errors import CallbackError, TensorError, UpdateError
from transportkit.lifecycle import Watched
from transportkit.manifest import nbytes
from transportkit.memory import allocate
from transportkit.packing import Writer, copy_bytes, typed_view
from transportkit.session.peers import code_of
from transportkit.session.targets import Binding, check_own, check_target, tensors_of
from transportkit.wire import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transportkit.errors import TransportKitError
    from transportkit.lifecycle import Imported
    from transportkit.wire import Piece

Pair = tuple[str, Tensor]


class Sink(abc.ABC):
    """Takes one update, chunk by chunk.

    Attributes:
        torn: whether something of the user's is half written.
    """

    torn = False
    skipped: Sequence[str] = ()
    missing: Sequence[str] = ()
    cast: Sequence[str] = ()

    def begin_streamed(self) -> None:
        """The manifest comes with the chunks."""

    @abc.abstractmethod
    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Further specs of a manifest that comes with the chunks; raise to refuse them before they are written."""

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """The whole manifest, where it goes first; raise to refuse the update before anything is written."""
        self.extend(specs)

    @abc.abstractmethod
    def write(self, chunk: Imported, pieces: Sequence[Piece]) -> None:
        """Take the bytes of one chunk."""

    def finish(self) -> None:
        """Every chunk has come."""

    def rest(self) -> None:
        """The update is over, however it ended: let go of what is the user's."""


class IntoTarget(Sink):
    """Writes into the tensors of a target.

    Args:
        target: a module or a mapping of names to tensors.
        strict: refuse an update whose names are not exactly the target's.
        cast: convert where dtypes differ.
        last: the binding of the last update, which is taken over where target and manifest are the same.
    """

    def __init__(
        self, target: nn.Module | Mapping[str, Tensor], *, strict: bool, cast: bool, last: Binding | None
    ) -> None:
        check_target(target)
        self._target = target
        self._strict = strict
        self._cast = cast
        # Renewed now, while there is time; whether it still holds is looked at when the update begins.
        self._last = last if last is not None and last.renew(tensors_of(target), strict=strict, cast=cast) else None
        self._streamed = True
        self.binding = Binding({}, strict=strict, cast=cast)

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        self._streamed = False
        # Asked for again: the target may have been given other memory while the call waited.
        tensors, last = tensors_of(self._target), self._last
        if last is not None and last.matches(specs) and last.unmoved(tensors):
            self.binding = last
            return
        self._bind(tensors)
        self.binding.match(specs)

    def begin_streamed(self) -> None:
        self._bind(tensors_of(self._target))

    def _bind(self, tensors: dict[str, Tensor]) -> None:
        check_own(self._target, tensors)
        self.binding = Binding(tensors, strict=self._strict, cast=self._cast)

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        self.binding.extend(specs)

    def write(self, chunk: Imported, pieces: Sequence[Piece]) -> None:
        assert chunk.memory is not None
        self.torn = True
        self.binding.writer.unpack(pieces, chunk.memory)

    def rest(self) -> None:
        self.binding.rest()
        if self._last is not None:
            self._last.rest()

    def finish(self) -> None:
        self.binding.writer.finish()
        if self._streamed:
            self.binding.complete()
        self.skipped, self.missing, self.cast = self.binding.skipped, self.binding.missing, self.binding.cast


class IntoFunction(Sink):
    """Calls a function with lists of complete pairs, valid during the call."""

    def __init__(self, function: Callable[[list[Pair]], Any], device: str, chunk_bytes: int) -> None:
        self._function = function
        self._device = torch.device(device)
        self._chunk_bytes = chunk_bytes
        self._specs: list[TensorSpec] = []
        self._tied: dict[str, list[str]] = {}
        self._buffer = Watched(None)
        self._largest = 0

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        self._specs += specs
        for spec in specs:
            if spec.same_as is not None:
                self._tied.setdefault(spec.same_as, []).append(spec.name)
        split = [size for size in map(nbytes, specs) if size > self._chunk_bytes]
        self._largest = max([self._largest, *split])

    def write(self, chunk: Imported, pieces: Sequence[Piece]) -> None:
        base = chunk.view()
        pairs: list[Pair] = []
        for piece in pieces:
            spec = self._specs[piece.tensor]
            size = nbytes(spec)
            if piece.nbytes == size:
                self._add(pairs, spec, typed_view(base, piece.offset, spec))
                continue
            if piece.start == 0 and (
                self._buffer.memory is None or self._buffer.memory.numel() < size or self._buffer.viewed
            ):
                room = TensorSpec(spec.name, "uint8", (max(self._largest, size),))
                self._buffer = Watched(allocate(room, base.device))
            assert self._buffer.memory is not None
            copy_bytes(self._buffer.memory, piece.start, base, piece.offset, piece.nbytes)
            if piece.start + piece.nbytes == size:
                self._add(pairs, spec, typed_view(self._buffer.view()[:size], 0, spec))
                self._call(pairs)
                pairs = []
        del base
        self._call(pairs)

    def _add(self, pairs: list[Pair], spec: TensorSpec, tensor: Tensor) -> None:
        tensor = tensor.to(self._device)
        pairs += [(name, tensor) for name in (spec.name, *self._tied.get(spec.name, ()))]

    def _call(self, pairs: list[Pair]) -> None:
        if not pairs:
            return
        self.torn = True
        try:
            self._function(pairs)
        except Exception as error:
            raise CallbackError(f"apply's function raised {type(error).__name__}: {error}") from error


def _cloned(tensor: Tensor, name: str) -> Tensor:
    try:
        return tensor.clone()
    except RuntimeError as error:
        raise TensorError(f"no memory for {name!r}, {tensor.nbytes} bytes: {error}", tensor=name) from error


class Owned(Sink):
    """Collects tensors of the caller's own, which `ready` hands out in manifest order."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._writer = Writer()
        self._appended = 0
        self._specs: list[TensorSpec] = []
        self._tied: dict[str, list[int]] = {}
        self._building: dict[int, Tensor] = {}
        self._ready: dict[int, Tensor] = {}
        self._next = 0

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        for index, spec in enumerate(specs, len(self._specs)):
            if spec.same_as is not None:
                self._tied.setdefault(spec.same_as, []).append(index)
        self._specs += specs

    def write(self, chunk: Imported, pieces: Sequence[Piece]) -> None:
        assert chunk.memory is not None
        last = pieces[-1].tensor
        while self._appended <= last:
            spec = self._specs[self._appended]
            if spec.same_as is None:
                self._building[self._appended] = self._writer.append_owned(spec, self._device)
            else:
                self._writer.append(spec, ())
            self._appended += 1
        for index in self._writer.unpack(pieces, chunk.memory):
            tensor = self._ready[index] = self._building.pop(index)
            self._writer.forget(index)
            for tied in self._tied.get(self._specs[index].name, ()):
                self._ready[tied] = _cloned(tensor, self._specs[tied].name)

    def ready(self) -> Iterator[Pair]:
        """The pairs that are complete and not handed out yet."""
        while self._next in self._ready:
            tensor = self._ready.pop(self._next)
            self._next += 1
            yield self._specs[self._next - 1].name, tensor
            del tensor


class Leased(Sink):
    """Only keeps the manifest; the chunks go to the user as leases."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.tied: dict[str, list[TensorSpec]] = {}

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        self.specs += specs
        for spec in specs:
            if spec.same_as is not None:
                self.tied.setdefault(spec.same_as, []).append(spec)

    def write(self, chunk: Imported, pieces: Sequence[Piece]) -> None:
        raise NotImplementedError


def told(error: BaseException) -> tuple[str, str]:
    """The code and text by which the peer learns of an error here."""
    if isinstance(error, GeneratorExit):
        return "LoopLeft", "the receiving loop was left before the update was complete"
    return code_of(error), wire.plain(str(error))


def ours(error: Exception) -> TransportKitError:
    """What the user gets for a native error while an update is written."""
    return UpdateError(f"taking the update in failed: {type(error).__name__}: {error}")
