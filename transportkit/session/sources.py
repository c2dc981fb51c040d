"""What may be sent: a module, a mapping, a `Source` or an iterable of pairs, brought into one of two forms.

A *static* source has all its tensors at hand, so its chunks are planned ahead and packed in batches. A *streamed* one
makes them one at a time; each is packed before the next is asked for.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import attrs
from torch import Tensor, nn

from transportkit.errors import DuplicateNameError, SourceError, TensorError, UsageError
from transportkit.manifest import (
    Layout,
    Manifest,
    check_specs,
    checked_name,
    dtype_names,
    module_tensors,
    spec_of,
    static_manifest,
)
from transportkit.wire import TensorSpec

Pair = tuple[str, Tensor]
Post = Callable[[Pair], Tensor]


@attrs.frozen(init=False)
class Source:
    """Tensors that are made one at a time, and the manifest of what they will be.

    Args:
        manifest: a `TensorSpec` or a (name, dtype, shape) for each tensor, in order; dtypes are torch's or their names.
        iterator: yields a (name, tensor) for each of them, in the same order, once.

    Raises:
        TensorError: the manifest names a dtype that does not travel, or a name twice.
    """

    manifest: tuple[TensorSpec, ...]
    iterator: Iterable[Pair]

    def __init__(
        self, manifest: Iterable[TensorSpec | tuple[str, Any, Iterable[int]]], iterator: Iterable[Pair]
    ) -> None:
        specs = tuple(_spec(entry) for entry in manifest)
        check_specs(specs, dtype_names(), TensorError)
        self.__attrs_init__(specs, iterator)


@attrs.frozen
class Static:
    """A source that is all there."""

    manifest: Manifest


@attrs.frozen
class Streamed:
    """A source that yields its tensors one at a time.

    Args:
        specs: what will come; None when nobody knows.
        pairs: the (spec, tensor) of each, checked against ``specs``.
    """

    specs: tuple[TensorSpec, ...] | None
    pairs: Generator[tuple[TensorSpec, Tensor], None, None]


def resolve(source: object, post: Post | None, previous: Layout | None) -> Static | Streamed:
    """Bring a source into one of the two forms.

    Args:
        source: what `Sender.send` was given.
        post: applied to each (name, tensor); makes every source a streamed one.
        previous: the layout of the last static source, to be reused where nothing changed.

    Raises:
        UsageError: it is no source.
        TensorError: a tensor cannot travel; nothing has moved.
    """
    if post is not None and not callable(post):
        raise UsageError(f"post must be callable, not {post!r}")
    if isinstance(source, Source):
        return Streamed(source.manifest, _checked(source.iterator, post, source.manifest))
    pairs: Iterable[Any]
    if isinstance(source, nn.Module):
        pairs = module_tensors(source)
    elif isinstance(source, Mapping):
        pairs = source.items()
    elif isinstance(source, Iterable) and not isinstance(source, Tensor | str | bytes):
        return Streamed(None, _checked(source, post, None))
    else:
        raise UsageError(
            "a source is a module, a mapping of names to tensors, a Source or an iterable of (name, tensor), "
            f"not {type(source).__name__}"
        )
    if post is not None:
        return Streamed(None, _checked(pairs, post, None))
    return Static(static_manifest(pairs, previous))


def _checked(
    source: Iterable[Any], post: Post | None, manifest: tuple[TensorSpec, ...] | None
) -> Generator[tuple[TensorSpec, Tensor], None, None]:
    seen: set[str] = set()
    count = 0
    for name, tensor in _pulled(source, post):
        spec = spec_of(name, tensor)
        if name in seen:
            raise DuplicateNameError(f"{name}: the source yields this name twice", tensor=name)
        seen.add(name)
        if manifest is not None:
            if count >= len(manifest):
                raise SourceError(f"{name}: the source yields more than the {len(manifest)} tensors of its manifest")
            if spec != manifest[count]:
                raise SourceError(
                    f"{name}: the source yields {_text(spec)}, its manifest has {_text(manifest[count])} here"
                )
        count += 1
        yield spec, tensor
    if manifest is not None and count < len(manifest):
        raise SourceError(
            f"the source ended after {count} of the {len(manifest)} tensors of its manifest; "
            f"{manifest[count].name} is missing"
        )


def _pulled(source: Iterable[Any], post: Post | None) -> Iterator[Pair]:
    """The pairs of a user's iterable; whatever it or ``post`` raises becomes a `SourceError`.

    A generator is closed at the end, however that comes.
    """
    with _blamed("the source"):
        iterator = iter(source)
    try:
        while True:
            with _blamed("the source"):
                pair = next(iterator, _END)
            if pair is _END:
                return
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise SourceError(
                    f"the source yielded {type(pair).__name__}, not a (name, tensor) pair; send the module, a mapping, "
                    "or what named_parameters() gives"
                )
            name, tensor = pair
            if post is not None:
                with _blamed(f"{name}: post"):
                    tensor = post((name, tensor))
            yield name, tensor
    finally:
        if isinstance(iterator, GeneratorType):
            iterator.close()


@contextlib.contextmanager
def _blamed(who: str) -> Iterator[None]:
    """Around a user's code: what it raises, an error of another session included, is the source's."""
    try:
        yield
    except (SourceError, TensorError):
        raise
    except Exception as error:
        raise SourceError(f"{who} raised {type(error).__name__}: {error}") from error


_END: Any = object()


def _spec(entry: Any) -> TensorSpec:
    if isinstance(entry, TensorSpec):
        entry = (entry.name, entry.dtype, entry.shape) if entry.same_as is None else (entry.name, None, ())
    try:
        name, dtype, shape = entry
        sizes = tuple(operator.index(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{entry!r} is neither a TensorSpec nor a (name, dtype, shape)") from error
    if dtype is None:
        raise UsageError(f"{name}: a Source's manifest cannot tie names; give every tensor its own bytes")
    return TensorSpec(checked_name(name), str(dtype).removeprefix("torch."), sizes)


def _text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {tuple(spec.shape)}"
