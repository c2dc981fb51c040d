"""Writing chunks into targets: which targets suit, and the copies into them. Layout is `transportkit.chunk`'s."""

from __future__ import annotations

import functools
from itertools import chain, islice
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from transportkit.batching import Batch
from transportkit.chunk import used
from transportkit.errors import ProtocolError, TargetError
from transportkit.kinds import PLAIN_TYPES, dtype_of, uncollected, unsupported
from transportkit.manifest import wire_nbytes
from transportkit.memory import BOUNCE_BYTES, allocate, layout_prints, memmove, plain_address
from transportkit.strided import flat_bytes, overlaps_itself, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.wire import Piece, TensorSpec

_SHAPE = attrgetter("shape")


@functools.cache
def castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch converts elements of one dtype to another, found by trying; complex to real would lose a part."""
    if source == target:
        return True
    if source.is_complex and not target.is_complex:
        return False
    try:
        one, other = (torch.zeros(64, dtype=torch.uint8, device="cpu").view(dtype)[:1] for dtype in (source, target))
        other.copy_(one)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _refusal(spec: TensorSpec, target: Tensor, *, cast: bool) -> str | None:
    """Why the tensor cannot be written into the target, as a clause that follows "the target of ..."."""
    reason = unsupported(target)
    if reason is not None:
        return f"{reason.partition(': ')[0]}: nothing can be written into it"
    if tuple(target.shape) != spec.shape:
        return f"has the shape {tuple(target.shape)}, but {spec.shape} is sent"
    dtype = dtype_of(spec.dtype)
    if target.dtype != dtype:
        names = f"has the dtype {str(target.dtype).removeprefix('torch.')}, but {spec.dtype} is sent"
        if not cast:
            return f"{names}: pass cast=True to convert"
        if not castable(dtype, target.dtype):
            return f"{names}, which torch does not convert to it"
    if overlaps_itself(target):
        return f"has elements that lie in the same memory (strides {target.stride()}): pass target.clone()"
    return None


def _surely_plain(spec: TensorSpec, target: Tensor) -> bool:
    """Whether the target suits beyond doubt and is written by memmove; a quarter of the cost of `_refusal`."""
    if type(target) not in PLAIN_TYPES or target.layout is not torch.strided or target.is_nested:
        return False
    if target.dtype != dtype_of(spec.dtype) or target.shape != spec.shape or target.storage_offset():
        return False
    return plain_address(target) != 0 and target.untyped_storage().nbytes() >= target.numel() * target.itemsize


class Writer:
    """Writes the pieces of updates into targets.

    Args:
        specs: the manifest, or the part of it that is known.
        targets: for each spec the tensors that its bytes go to, none or several. The targets of a spec that is the same
            as an earlier one are written with that one's.
        cast: whether a target may have another dtype than its spec.

    Raises:
        TargetError: a target does not suit; named; nothing is written.
    """

    def __init__(
        self, specs: Sequence[TensorSpec] = (), targets: Sequence[Sequence[Tensor]] = (), *, cast: bool = False
    ) -> None:
        self._cast = cast
        self._specs: list[TensorSpec] = []
        self._indices: dict[str, int] = {}
        self._sizes: list[int | None] = []
        self._aliases: list[tuple[int, int]] = []
        """Index of each spec that is the same as an earlier one, and the index of that."""
        self._addresses: list[tuple[int, ...]] = []
        """Of the targets that are written by memmove."""
        self._others: list[tuple[Tensor, ...]] = []
        """The targets that are not."""
        self._plain: list[tuple[Tensor, ...]] = []
        """The targets that are."""
        self._kept: list[tuple[torch.UntypedStorage, ...]] = []
        """The memory at these addresses, should a target be given another one meanwhile."""
        self._versioned: list[tuple[Tensor, ...]] = []
        """The targets of which autograd counts the versions: all but inference tensors."""
        self._carry = b""
        """The first bytes of an element that the last piece ended in."""
        self._lengths: list[int] | None = None
        for spec, its_targets in zip(specs, targets, strict=True):
            self.append(spec, its_targets)
        self._lengths = list(map(len, targets))
        self._prints = layout_prints(list(chain.from_iterable(targets)))
        self._simple: bool | None = None
        """Whether `resume` can serve: all targets are contiguous and of their specs' dtypes, and were given to the
        constructor; known on release."""
        self._elsewhere = False
        """Whether some of those are not in host memory; known on release."""
        self._storages: list[torch.UntypedStorage] = []
        self._resumed: list[Tensor] | None = None
        """The targets of `resume`; autograd learns of the writes to all of them at the first."""
        self._counted: list[Tensor] = []

    def append(self, spec: TensorSpec, targets: Sequence[Tensor]) -> None:
        """Add the next tensor of the manifest; before any byte of the one that it is the same as is written.

        Raises:
            TargetError: a target does not suit; named; it is not added.
        """
        self._lengths = None
        if spec.same_as is None:
            self._add(spec, *self._sorted(spec, targets))
            return
        index = self._indices[spec.same_as]
        self._sorted(spec, targets)
        if targets:
            before = self._plain[index] + self._others[index]
            self._set(index, *self._sorted(self._specs[index], (*before, *targets)))
        self._aliases.append((len(self._specs), index))
        self._add(spec, (), ())

    def _sorted(self, spec: TensorSpec, targets: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The targets that memmove can write and those that it cannot, each memory once."""
        if len(targets) == 1 and _surely_plain(spec, targets[0]):
            return tuple(targets), ()
        distinct: dict[object, Tensor] = {}
        for target in targets:
            reason = _refusal(spec, target, cast=self._cast)
            if reason is not None:
                raise TargetError(f"the target of {spec.name!r} {reason}", tensor=spec.name)
            memory = (
                target.device,
                target.data_ptr(),
                target.stride(),
                target.dtype,
                target.is_conj(),
                target.is_neg(),
            )
            distinct.setdefault(memory, target)
        dtype = dtype_of(spec.dtype)
        plain: list[Tensor] = []
        others: list[Tensor] = []
        for target in distinct.values():
            if target.numel():
                is_plain = target.dtype == dtype and plain_address(target)
                (plain if is_plain else others).append(target)
        return tuple(plain), tuple(others)

    def append_owned(self, spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a target for the next tensor of the manifest, and return it.

        Raises:
            TensorError: there is no memory for it; named.
        """
        target = allocate(spec, device)
        if target.is_cpu:
            self._add(spec, (target,), ())
        else:
            self._add(spec, (), (target,))
        return target

    def _add(self, spec: TensorSpec, plain: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        index = self._indices[spec.name] = len(self._specs)
        self._specs.append(spec)
        self._sizes.append(wire_nbytes(spec))
        self._kept.append(())
        for column in (self._addresses, self._plain, self._others, self._versioned):
            column.append(())
        self._set(index, plain, others)

    def _set(self, index: int, plain: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        self._addresses[index] = tuple(target.data_ptr() for target in plain)
        self._plain[index] = plain
        self._kept[index] = tuple(target.untyped_storage() for target in plain)
        self._others[index] = others
        self._versioned[index] = tuple(target for target in plain + others if not target.is_inference())

    def forget(self, index: int) -> None:
        """Drop the references to a tensor's targets: it is complete."""
        self._kept[index] = ()
        self._addresses[index] = self._plain[index] = self._others[index] = self._versioned[index] = ()

    def release(self) -> None:
        """Let go of every target, until `resume`; only addresses and layouts are kept."""
        if self._simple is None:
            self._elsewhere = any(self._others)
            self._simple = self._lengths is not None and all(map(self._flat, self._specs, self._others))
        self._resumed = None
        self._counted = []
        self._storages = []
        self._kept = [()] * len(self._specs)
        self._plain = [()] * len(self._specs)
        self._others = list(self._plain)
        self._versioned = list(self._plain)

    @staticmethod
    def _flat(spec: TensorSpec, targets: tuple[Tensor, ...]) -> bool:
        """Whether these take the spec's bytes as they come."""
        dtype = dtype_of(spec.dtype) if targets else None
        return all(t.dtype == dtype and t.is_contiguous() and not t.is_neg() and not t.is_conj() for t in targets)

    @uncollected()
    def resume(self, flat: list[Tensor]) -> bool:
        """After `release`, take targets for another update as the constructor does, for a fraction of its cost.

        Args:
            flat: the targets of every spec in order.

        Returns:
            False, with nothing taken, unless they are contiguous, at the same addresses and in the same layout as those
            given to the constructor.
        """
        if not self._simple or self._lengths is None:
            return False
        try:
            if not PLAIN_TYPES.issuperset(map(type, flat)) or layout_prints(flat) != self._prints:
                return False
        except (RuntimeError, NotImplementedError):  # one has no memory any more
            return False
        self._resumed = flat
        # Should a target be given other memory meanwhile (``p.data = ...``), what is written stays ours to write to.
        self._storages = list(map(Tensor.untyped_storage, flat))
        self._counted = [target for target in flat if not target.is_inference()]
        self._carry = b""
        return True

    @uncollected()
    def unmoved(self, flat: list[Tensor]) -> bool:
        """Whether these are the targets of `resume`, still where they were then; much cheaper than to resume again.

        Their memory was kept alive since, so what is at the same address is the same memory.
        """
        if self._resumed is None or not all(map(is_, flat, self._resumed)):
            return False
        try:
            return list(map(Tensor.data_ptr, flat)) == self._prints[1] and list(map(_SHAPE, flat)) == self._prints[2]
        except (RuntimeError, NotImplementedError):
            return False

    def _spread(self) -> None:
        """Give every spec its resumed targets, where chunks or targets are not in host memory."""
        assert self._resumed is not None
        assert self._lengths is not None
        rest = iter(self._resumed)
        each = [tuple(islice(rest, length)) for length in self._lengths]
        for index, first in self._aliases:
            each[first] += each[index]
        if self._elsewhere:
            self._plain = [tuple(filter(plain_address, targets)) for targets in each]
            self._others = [tuple(t for t in targets if not plain_address(t) and t.numel()) for targets in each]
        else:
            self._plain = each
        self._versioned = [tuple(target for target in targets if not target.is_inference()) for targets in each]
        self._resumed = None

    def reset(self) -> None:
        """Begin an update, the last one having ended anyhow."""
        self._carry = b""

    def unpack(self, pieces: Sequence[Piece], chunk: Tensor) -> list[int]:
        """Write a chunk's pieces.

        Args:
            pieces: which `chunk.Cursor` has accepted: they are not checked again.
            chunk: its bytes, contiguous uint8 of shape (nbytes,), on any device.

        Returns:
            The indices of the tensors that are complete now.
        """
        if used(pieces) > chunk.numel():
            raise ProtocolError(f"a chunk of {chunk.numel()} bytes came, its pieces have {used(pieces)}")
        base = chunk.data_ptr() if chunk.is_cpu else 0
        if self._resumed is not None:
            if base and not self._elsewhere:
                return self._unpack_resumed(pieces, base)
            self._spread()
        if not base:
            return self._unpack_on_device(pieces, chunk)
        sizes, addresses, others, versioned = self._sizes, self._addresses, self._others, self._versioned
        complete: list[int] = []
        written: list[Tensor] = []
        try:
            for piece in pieces:
                tensor, start, count = piece.tensor, piece.start, piece.nbytes
                written += versioned[tensor]
                for address in addresses[tensor]:
                    memmove(address + start, base + piece.offset, count)
                if others[tensor]:
                    self._write(piece, chunk, others[tensor])
                if start + count == sizes[tensor]:
                    complete.append(tensor)
        finally:
            if written:  # autograd must refuse a backward that saved what was there before
                increment_version(written)
        return complete

    def _unpack_on_device(self, pieces: Sequence[Piece], chunk: Tensor) -> list[int]:
        """`unpack` for a chunk that is not in host memory: what is small and lies beside it is written together."""
        batch = Batch(chunk)
        complete: list[int] = []
        written: list[Tensor] = []
        try:
            with torch.inference_mode():
                for piece in pieces:
                    tensor, start, count = piece.tensor, piece.start, piece.nbytes
                    written += self._versioned[tensor]
                    dtype = dtype_of(self._specs[tensor].dtype)
                    targets = self._plain[tensor] + self._others[tensor] if count else ()
                    alone = [t for t in targets if t.dtype != dtype or not batch.add(t, start, count, piece.offset)]
                    if alone:
                        self._write(piece, chunk, tuple(alone))
                    if start + count == self._sizes[tensor]:
                        complete.append(tensor)
                batch.unpack()
        finally:
            if written:
                increment_version(written)
        return complete

    def _unpack_resumed(self, pieces: Sequence[Piece], base: int) -> list[int]:
        if self._counted:
            increment_version(self._counted)
            self._counted = []
        sizes, addresses = self._sizes, self._addresses
        complete: list[int] = []
        for piece in pieces:
            tensor, start, count = piece.tensor, piece.start, piece.nbytes
            for address in addresses[tensor]:
                memmove(address + start, base + piece.offset, count)
            if start + count == sizes[tensor]:
                complete.append(tensor)
        return complete

    @torch.inference_mode()
    def _write(self, piece: Piece, chunk: Tensor, targets: tuple[Tensor, ...]) -> None:
        """Write one piece into targets that memmove cannot serve."""
        dtype = dtype_of(self._specs[piece.tensor].dtype)
        source = chunk[piece.offset : piece.offset + piece.nbytes]
        by_element = []
        for target in targets:
            lazy = target.is_conj() or target.is_neg()
            if target.dtype == dtype and target.is_contiguous() and not lazy:
                flat_bytes(target)[piece.start : piece.start + piece.nbytes].copy_(source)
            else:
                by_element.append(target)
        if by_element:
            self._write_elements(piece.start, source, dtype, by_element)

    def _write_elements(self, start: int, source: Tensor, dtype: torch.dtype, targets: list[Tensor]) -> None:
        """Write the elements that this range completes; keep the bytes of one that it only begins."""
        item, done, count = dtype.itemsize, 0, source.numel()
        if start % item:
            done = min(item - start % item, count)
            self._carry += bytes(source[:done].tolist())
            if len(self._carry) == item:
                element = torch.tensor(list(self._carry), dtype=torch.uint8, device=source.device)
                _write_to(targets, start // item, element.view(dtype))
                self._carry = b""
        whole = (count - done) // item * item
        aligned = (source.storage_offset() + done) % item == 0
        step = max(whole, 1) if aligned else BOUNCE_BYTES // item * item
        for at in range(done, done + whole, step):
            block = source[at : min(at + step, done + whole)]
            _write_to(targets, (start + at) // item, (block if aligned else block.clone()).view(dtype))
        if done + whole < count:
            self._carry = bytes(source[done + whole :].tolist())

    def finish(self) -> None:
        """The update ends here.

        Raises:
            ProtocolError: it ends within an element.
        """
        carry, self._carry = self._carry, b""
        if carry:
            raise ProtocolError(f"the update ended {len(carry)} bytes into an element")


def _write_to(targets: list[Tensor], first: int, flat: Tensor) -> None:
    for target in targets:
        write(target, first, first + flat.numel(), flat)
