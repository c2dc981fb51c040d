"""Where in a message a value is, for errors; only ever looked for when something is wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How deep a message is searched.
DEPTH = 64


def path_of(message: object, wanted: Callable[[Any], bool]) -> str:
    """The path of the first value that is wanted, as msgspec writes paths: ``"$.images[0]"``; empty where none is."""
    return next(_search(message, wanted, "$", DEPTH, set()), "")


def unwritable(value: object) -> bool:
    """Whether MessagePack cannot hold this builtin value: an integer beyond 64 bits, a text that is no unicode."""
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 64
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
    return False


def _search(value: object, wanted: Callable[[Any], bool], path: str, depth: int, seen: set[int]) -> Iterator[str]:
    if wanted(value):
        yield path
        return
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    for step, part in _parts(value):
        yield from _search(part, wanted, path + step, depth - 1, seen)
    seen.discard(id(value))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{str(key)[:64]!r}]", item
            yield "[...] (a key)", key
        return
    if isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield f"[{index}]", item
        return
    names: tuple[str, ...] = ()
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif attrs.has(type(value)):
        names = tuple(field.name for field in attrs.fields(type(value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
    for name in names:
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)
