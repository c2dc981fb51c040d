"""Backends as if they were installed: `installed` registers classes for as long as a test takes; no wrapper belongs here.

The registry is not bypassed: a distribution with an entry point for each class stands on ``sys.path`` meanwhile, and what
it names is found in this module, by `__getattr__`.
"""

from __future__ import annotations

import contextlib
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
    entries = {f"backend_{id(transport):x}": transport for transport in missing}
    with tempfile.TemporaryDirectory(prefix="transportkit-testing-") as folder:
        info = Path(folder, f"transportkit_testing_{id(entries):x}-0.0.0.dist-info")
        info.mkdir()
        Path(info, "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: transportkit-testing-{id(entries):x}\nVersion: 0.0.0\n", encoding="utf-8"
        )
        lines = [f"{transport.name} = {__name__}:{attribute}" for attribute, transport in entries.items()]
        Path(info, "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]), encoding="utf-8")
        _classes.update(entries)
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            for attribute in entries:
                del _classes[attribute]


def _is_installed(transport: type[Transport]) -> bool:
    own = f"{transport.__module__}:{transport.__qualname__}"
    return any(found.name == transport.name and found.value == own for found in discover())
