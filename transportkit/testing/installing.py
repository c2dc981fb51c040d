"""Backends as if they were installed: `installed` registers classes for as long as a test takes.

The registry is not bypassed: a distribution with an entry point for each class stands on ``sys.path`` meanwhile, and
what it names is found in this module, by `__getattr__`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
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
    # The names depend on nothing else, so that a child, whose path holds the parent's folder, finds no second backend.
    entries = {f"backend_{re.sub(r'[^a-zA-Z0-9]', '_', transport.name)}": transport for transport in missing}
    for attribute, transport in entries.items():
        other = _classes.get(attribute, transport)
        assert other is transport, f"{other} is installed under the name {transport.name!r}; give one of them another"
    distribution = "transportkit-testing-" + "-".join(sorted(entries))
    with tempfile.TemporaryDirectory(prefix="transportkit-testing-") as folder:
        info = Path(folder, f"{distribution.replace('-', '_')}-0.0.0.dist-info")
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.0.0\n"
        Path(info, "METADATA").write_text(metadata, encoding="utf-8")
        lines = [f"{transport.name} = {__name__}:{attribute}" for attribute, transport in entries.items()]
        Path(info, "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]), encoding="utf-8")
        outer = {attribute: _classes[attribute] for attribute in entries if attribute in _classes}
        _classes.update(entries)
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            for attribute in entries.keys() - outer.keys():
                del _classes[attribute]


def _is_installed(transport: type[Transport]) -> bool:
    own = f"{transport.__module__}:{transport.__qualname__}"
    return any(found.name == transport.name and found.value == own for found in discover())
