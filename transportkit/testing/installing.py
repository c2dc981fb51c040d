"""Backends as if they were installed: `installed` registers classes for as long as a test takes.

The registry is not bypassed: a distribution with an entry point for each class can be found meanwhile, as any installed
one is, and what it names is found in this module, by `__getattr__`. It exists in memory only, so that a process that is
killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import re
import sys
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import TYPE_CHECKING

from transportkit.discovery import GROUP, discover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.transport import Transport

_classes: dict[str, type[Transport]] = {}


def __getattr__(name: str) -> type[Transport]:
    try:
        return _classes[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


@contextlib.contextmanager
def installed(*transports: type[Transport]) -> Iterator[None]:
    """Have backends found by the registry of this process, under their names, within this block.

    A name that is registered already is an error of the registry, as it would be for two distributions. A class that is
    really installed is left as it is.
    """
    missing = [transport for transport in transports if not _is_installed(transport)]
    if not missing:
        yield
        return
    entries = {f"backend_{re.sub(r'[^a-zA-Z0-9]', '_', transport.name)}": transport for transport in missing}
    for attribute, transport in entries.items():
        other = _classes.get(attribute, transport)
        assert other is transport, f"{other} is installed under the name {transport.name!r}; give one of them another"
    finder = _Finder(entries)
    outer = {attribute: _classes[attribute] for attribute in entries if attribute in _classes}
    _classes.update(entries)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for attribute in entries.keys() - outer.keys():
            del _classes[attribute]


class _InMemory(Distribution):
    """The metadata of a distribution that registers these classes."""

    def __init__(self, entries: dict[str, type[Transport]]) -> None:
        lines = [f"{transport.name} = {__name__}:{attribute}" for attribute, transport in entries.items()]
        title = "transportkit-testing-" + "-".join(sorted(entries))
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {title}\nVersion: 0.0.0\n",
            "entry_points.txt": "\n".join([f"[{GROUP}]", *lines, ""]),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


class _Finder(DistributionFinder):
    """Finds one distribution, and no module."""

    def __init__(self, entries: dict[str, type[Transport]]) -> None:
        self._distribution = _InMemory(entries)

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, self._distribution.name):
            yield self._distribution


def _is_installed(transport: type[Transport]) -> bool:
    own = f"{transport.__module__}:{transport.__qualname__}"
    return any(found.name == transport.name and found.value == own for found in discover())
