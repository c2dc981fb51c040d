"""Where `load_into` writes: the tensors of a module or mapping, matched to a manifest before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from transportkit.errors import TargetError, UsageError
from transportkit.manifest import module_tensors
from transportkit.packing import Writer

if TYPE_CHECKING:
    from transportkit.wire import TensorSpec


def tensors_of(target: object) -> dict[str, Tensor]:
    """The tensors of a module (its `state_dict` names) or a mapping, by name. Raises `UsageError` for anything else."""
    pairs: Iterable[tuple[str, Tensor]]
    if isinstance(target, nn.Module):
        pairs = module_tensors(target)
    elif isinstance(target, Mapping):
        pairs = target.items()
    else:
        raise UsageError(f"a target is a module or a mapping of names to tensors, not {type(target).__name__}")
    return dict(pairs)


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
        self._written: dict[tuple[object, int], str] = {}
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
        targets = [self._find(spec) for spec in specs]
        self._check_apart(specs)
        self._writer = Writer(specs, targets, cast=self._cast)
        self._matched = [spec.name for spec in specs if spec.name in self._tensors]
        self._note_casts(specs)
        self.complete()
        self._whole = True

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Match further specs of a manifest that comes with the chunks.

        Raises:
            TargetError: one of them does not suit; nothing of it is written.
        """
        self._check_apart(specs)
        for spec in specs:
            self._writer.append(spec, self._find(spec))
            self._specs.append(spec)
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
        if not self._whole or not same:
            return False
        self._tensors = tensors
        return self._writer.resume([tensors[name] for name in self._matched])

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
        """Refuse two tensors with bytes of their own that the target keeps in one memory: one of them would be lost."""
        for spec in specs:
            tensor = self._tensors.get(spec.name)
            if tensor is None or spec.same_as is not None or not tensor.numel():
                continue
            other = self._written.setdefault((tensor.device, tensor.data_ptr()), spec.name)
            if other != spec.name:
                raise TargetError(
                    f"{spec.name}: the same memory as {other} in the target, but sent apart from it; tie the two "
                    "at the sender, send one of them only, or untie them here",
                    tensor=spec.name,
                )

    def _note_casts(self, specs: Sequence[TensorSpec]) -> None:
        if self._cast:
            for spec in specs:
                target = self._tensors.get(spec.name)
                if target is not None and str(target.dtype) != f"torch.{spec.dtype}":
                    self.cast.append(spec.name)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
