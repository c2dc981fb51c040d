"""Where `load_into` writes: the tensors of a module or mapping, matched to a manifest before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from transportkit.errors import TargetError, UnsupportedTensorError, UsageError
from transportkit.manifest import dtype_name, module_tensors, unsupported
from transportkit.packing import Writer

if TYPE_CHECKING:
    from transportkit.wire import TensorSpec


class Target:
    """The tensors of a module or mapping, by name.

    Args:
        target: a module (its `state_dict` names) or a mapping of names to tensors; its tensors are written in place.
        strict: refuse a manifest whose names are not exactly the target's.
        cast: convert where dtypes differ, instead of refusing.

    Raises:
        UsageError: it is neither.
        UnsupportedTensorError: one of its tensors cannot be written.
    """

    def __init__(self, target: nn.Module | Mapping[str, Tensor], *, strict: bool, cast: bool) -> None:
        pairs: Iterable[tuple[str, Tensor]]
        if isinstance(target, nn.Module):
            pairs = module_tensors(target)
        elif isinstance(target, Mapping):
            pairs = target.items()
        else:
            raise UsageError(f"a target is a module or a mapping of names to tensors, not {type(target).__name__}")
        self._tensors = dict(pairs)
        self._strict = strict
        self._cast = cast
        self._specs: list[TensorSpec] = []
        self._named: dict[str, int] = {}
        self._writer = Writer(cast=cast)
        self.skipped: list[str] = []
        self.cast: list[str] = []

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Match further specs of the manifest.

        Raises:
            TargetError: one of them does not suit; nothing of it is written.
            UnsupportedTensorError: the target's tensor cannot be written to.
        """
        matched = [self._match(spec) for spec in specs]
        for spec, targets in zip(specs, matched, strict=True):
            self._named[spec.name] = len(self._specs)
            self._specs.append(spec)
            self._writer.append(spec, targets)

    def missing(self) -> list[str]:
        """Names of the target that the manifest, now complete, lacks.

        Raises:
            TargetError: there are some, and the target is strict.
        """
        written = {_place(self._tensors[name]) for name in self._named if name in self._tensors}
        missing = [
            name
            for name, tensor in self._tensors.items()
            if name not in self._named and (not tensor.numel() or _place(tensor) not in written)
        ]
        if missing and self._strict:
            raise TargetError(
                f"{_listed(missing)}: in the target, but not sent; send them, or receive with strict=False",
                tensor=missing[0],
            )
        return missing

    @property
    def writer(self) -> Writer:
        return self._writer

    def _match(self, spec: TensorSpec) -> list[Tensor]:
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            if self._strict:
                raise TargetError(
                    f"{spec.name}: sent, but not in the target; add it there, or receive with strict=False", tensor=spec.name
                )
            self.skipped.append(spec.name)
            return []
        reason = unsupported(tensor)
        if reason is not None:
            raise UnsupportedTensorError(f"{spec.name}: the target's tensor cannot be written: {reason}", tensor=spec.name)
        if tuple(tensor.shape) != tuple(spec.shape):
            raise TargetError(
                f"{spec.name}: sent with shape {tuple(spec.shape)}, the target has {tuple(tensor.shape)}", tensor=spec.name
            )
        if dtype_name(tensor.dtype) != spec.dtype:
            if not self._cast:
                raise TargetError(
                    f"{spec.name}: sent as {spec.dtype}, the target has {dtype_name(tensor.dtype)}; "
                    "receive with cast=True to convert",
                    tensor=spec.name,
                )
            self.cast.append(spec.name)
        return [tensor]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


