"""Where `load_into` writes: the tensors of a module or mapping, matched to a manifest before anything is written."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from transportkit.errors import TargetError, UsageError
from transportkit.manifest import module_tensors
from transportkit.packing import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.wire import TensorSpec


def check_target(target: object) -> None:
    """Raise `UsageError` unless this can be a target at all."""
    if not isinstance(target, nn.Module | Mapping):
        raise UsageError(f"a target is a module or a mapping of names to tensors, not {type(target).__name__}")


def tensors_of(target: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module (its `state_dict` names) or a mapping, by name."""
    return dict(module_tensors(target) if isinstance(target, nn.Module) else target.items())


def check_own(target: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise `TargetError` for what is no tensor, and for what a module makes anew, so that writing to it is in vain."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TargetError(
                f"{name}: the target holds a {type(tensor).__name__} here, no tensor; give a torch tensor to write to "
                "(`torch.from_numpy` makes one over an array)",
                tensor=str(name),
            )
    if not isinstance(target, nn.Module):
        return
    own = {0, *map(_storage, target.parameters()), *map(_storage, target.buffers())}
    for name, tensor in tensors.items():
        if _storage(tensor) not in own:
            raise TargetError(
                f"{name}: the module's state_dict() makes this tensor anew (extra state, or a hook), so writing to it "
                "would be lost; load into a mapping of the parameters and buffers, or take the update with receive() "
                "and give it to load_state_dict()",
                tensor=name,
            )


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none, and what kind it is is looked at elsewhere."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):
        return 0


class Binding:
    """The tensors of a target, matched to the specs of an update.

    Between updates it keeps addresses but no tensor alive; `renew` takes the tensors of the next update's target, for a
    fraction of the cost of matching them anew, where they are the same memory in the same layout.

    Args:
        tensors: the target's, by name; they are written in place.
        strict: refuse a manifest whose names are not exactly the target's.
        cast: convert where dtypes differ, instead of refusing.
    """

    def __init__(self, tensors: dict[str, Tensor], *, strict: bool, cast: bool) -> None:
        self._tensors = tensors
        self._names = tuple(tensors)
        self._strict = strict
        self._cast = cast
        self._specs: list[TensorSpec] = []
        self._writer = Writer(cast=cast)
        self._matched: list[str] = []
        self._places = _Places()
        self._whole = False
        self.skipped: list[str] = []
        self.missing: list[str] = []
        self.cast: list[str] = []

    @property
    def writer(self) -> Writer:
        """Writes what was matched."""
        return self._writer

    def match(self, specs: Sequence[TensorSpec]) -> None:
        """Match the whole manifest.

        Raises:
            TargetError: it does not suit; nothing is written.
        """
        self._specs = specs if isinstance(specs, list) else list(specs)
        self._compare_names(specs)
        targets = [self._find(spec) for spec in specs]
        self._writer = Writer(specs, targets, cast=self._cast)
        self._check_apart(specs)
        self._matched = [spec.name for spec in specs if spec.name in self._tensors]
        self._note_casts(specs)
        self.complete()
        self._whole = True

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Match further specs of a manifest that comes with the chunks.

        Raises:
            TargetError: one of them does not suit; nothing of it is written.
        """
        for spec in specs:
            self._writer.append(spec, self._find(spec))
            self._specs.append(spec)
        self._check_apart(specs)
        self._note_casts(specs)

    def complete(self) -> None:
        """The manifest is complete.

        Raises:
            TargetError: names of the target are missing in it, and the target is strict.
        """
        sent = {spec.name for spec in self._specs}
        absent = [name for name in self._names if name not in sent]
        if absent:
            written = {_place(self._tensors[name]) for name in self._names if name in sent}
            absent = [n for n in absent if not self._tensors[n].numel() or _place(self._tensors[n]) not in written]
        if absent and self._strict:
            raise TargetError(
                f"{_listed(absent)}: in the target, but not sent; send them, or receive with strict=False",
                tensor=absent[0],
            )
        self.missing = absent

    def rest(self) -> None:
        """Let go of the tensors until `renew`."""
        self._tensors = {}
        self._writer.release()

    def matches(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether this is the manifest that was matched."""
        return self._specs == specs

    def renew(self, tensors: dict[str, Tensor], *, strict: bool, cast: bool) -> bool:
        """Take these tensors for another update of the same manifest; False where they must be matched anew."""
        same = (strict, cast) == (self._strict, self._cast) and tuple(tensors) == self._names
        if not self._whole or not same or len(tensors) != len(self._matched):
            return False
        self._tensors = tensors
        return self._writer.resume([tensors[name] for name in self._matched])

    def unmoved(self, tensors: dict[str, Tensor]) -> bool:
        """Whether these are the tensors of `renew`, still where they were then."""
        return tuple(tensors) == self._names and self._writer.unmoved([tensors[name] for name in self._matched])

    def _compare_names(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse a whole manifest whose names are not the target's, with both sides of the difference."""
        sent = {spec.name for spec in specs}
        unknown = [spec.name for spec in specs if spec.name not in self._tensors]
        if not unknown or (not self._strict and len(unknown) < len(specs)):
            return
        unsent = [name for name in self._names if name not in sent]
        text = f"{_listed(unknown)}: sent, but not in the target"
        if unsent:
            text += f"; {_listed(unsent)}: in the target, but not sent"
        for more, fewer, whose in ((unknown, unsent, "sender"), (unsent, unknown, "target")):
            prefix = next((long.removesuffix(name) for long in more[:1] for name in fewer if long.endswith(name)), "")
            if prefix:
                text += f" (the {whose}'s names begin with {prefix!r})"
        if self._strict:
            text += "; give both sides the same names, or receive with strict=False"
        else:
            text += "; no name is the same on both sides, so nothing would be written"
        raise TargetError(text, tensor=unknown[0])

    def _find(self, spec: TensorSpec) -> list[Tensor]:
        tensor = self._tensors.get(spec.name)
        if tensor is not None:
            return [tensor]
        if self._strict:
            raise TargetError(
                f"{spec.name}: sent, but not in the target; add it there, or receive with strict=False",
                tensor=spec.name,
            )
        self.skipped.append(spec.name)
        return []

    def _check_apart(self, specs: Sequence[TensorSpec]) -> None:
        for spec in specs:
            if (tensor := self._tensors.get(spec.name)) is not None:
                self._places.take(spec, tensor)

    def _note_casts(self, specs: Sequence[TensorSpec]) -> None:
        if self._cast:
            for spec in specs:
                target = self._tensors.get(spec.name)
                if target is not None and str(target.dtype) != f"torch.{spec.dtype}":
                    self.cast.append(spec.name)


class _Places:
    """Which memory of a target belongs to which tensor that is sent: a second one there would overwrite the first."""

    def __init__(self) -> None:
        self._views: dict[tuple[object, int], tuple[object, str, str]] = {}
        self._starts: dict[object, list[int]] = {}
        self._ends: dict[tuple[object, int], tuple[int, str]] = {}

    def take(self, spec: TensorSpec, tensor: Tensor) -> None:
        """The tensor takes its bytes. Raises `TargetError` where another one has them, or some of them."""
        if not tensor.numel():
            return
        device, start = tensor.device, tensor.data_ptr()
        view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        root = spec.same_as or spec.name
        known, owner, name = self._views.setdefault((device, start), (view, root, spec.name))
        if (known, owner) != (view, root):
            raise _shared(spec, name)
        if name != spec.name or not tensor.is_contiguous():
            return
        starts = self._starts.setdefault(device, [])
        at = bisect.bisect(starts, start)
        end = start + tensor.numel() * tensor.itemsize
        if at and self._ends[device, starts[at - 1]][0] > start:
            raise _shared(spec, self._ends[device, starts[at - 1]][1])
        if at < len(starts) and starts[at] < end:
            raise _shared(spec, self._ends[device, starts[at]][1])
        starts.insert(at, start)
        self._ends[device, start] = (end, spec.name)


def _shared(spec: TensorSpec, other: str) -> TargetError:
    return TargetError(
        f"{spec.name}: shares memory with {other} in the target, but the two are sent apart, so one would overwrite "
        "the other; tie the two at the sender, send one of them only, or untie them here",
        tensor=spec.name,
    )


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
