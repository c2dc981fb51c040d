"""Which backends are installed: the first stage of the registry, which imports nothing of any plugin.

Here belong reading what the installed distributions register, and the words in which the registry speaks of a plugin.
Nothing is remembered from call to call except what has been logged: `importlib.metadata` is read anew each time,
because what is installed may change while a notebook runs.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import TYPE_CHECKING

import attrs

from transportkit import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution, EntryPoint

GROUP = "transportkit.backends"

#: Longest text that is taken over from a plugin, so that no plugin can make the hello larger than a frame.
_TEXT_LIMIT = 500

_logged: set[tuple[str, ...]] = set()


@attrs.frozen
class Found:
    """A backend that some installed distribution registers; nothing of it has been imported.

    Args:
        name: the entry point's name.
        value: the entry point's target, ``"module:attribute"``.
        distribution: the name of the distribution that registers it.
        version: that distribution's version.
        conflict: why it cannot be loaded under this name, or empty: another distribution registers something else.
    """

    name: str
    value: str
    distribution: str
    version: str
    conflict: str = ""


def discover() -> tuple[Found, ...]:
    """Every registered backend, by name; imports nothing of them.

    The fallback is among them even in a bare checkout, where there are no entry points at all. A name that two
    distributions register for different targets comes up once for each, with `Found.conflict` telling of both.
    """
    built_in = Found("pickle", "transportkit.backends.pickle:PickleTransport", "transportkit", __version__)
    found = {(built_in.name, built_in.value): built_in}
    for distribution, entry_point in _registrations():
        value = re.sub(r"\s", "", entry_point.value)
        one = Found(entry_point.name, value, distribution.name, distribution.version or "unknown")
        found.setdefault((one.name, one.value), one)
    return tuple(
        attrs.evolve(one, conflict=_conflict([other for other in found.values() if other.name == one.name]))
        for one in sorted(found.values(), key=lambda one: (one.name, one.distribution, one.value))
    )


def _registrations() -> Iterator[tuple[Distribution, EntryPoint]]:
    """The entry points of our group.

    `importlib.metadata.entry_points` would do, but one damaged file of any distribution makes it raise, and it parses
    those of all. Where a distribution is on the path twice (a checkout and its wheel), the one that imports see counts.
    """
    names: dict[str, None] = {}
    for distribution in importlib.metadata.distributions():
        try:
            if GROUP in (distribution.read_text("entry_points.txt") or ""):
                names[distribution.name] = None
        except Exception as error:
            log_once(logging.WARNING, "an installed distribution is skipped: its metadata is damaged: %s", say(error))
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
            for entry_point in distribution.entry_points.select(group=GROUP):
                yield distribution, entry_point
        except Exception as error:
            log_once(logging.WARNING, "the backends of %s are skipped: its metadata is damaged: %s", name, say(error))


def _conflict(claims: list[Found]) -> str:
    if len(claims) == 1:
        return ""
    who = " and ".join(sorted(f"{origin(one)} (as {one.value})" for one in claims))
    return f"backend {claims[0].name!r} is registered by {who}; uninstall all of them but one"


# -- words ------------------------------------------------------------------------------------------------------------


def origin(found: Found) -> str:
    """The distribution that a backend comes from: ``"transportkit-shm 0.1.0"``."""
    return f"{found.distribution} {found.version}"


def article(noun: str) -> str:
    """``"an int"``, ``"a bool"``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def say(error: BaseException) -> str:
    """An exception in one line; a plugin's exception may fail to say anything."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return tidy(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def tidy(text: object) -> str:
    """A plugin's text on one line, bounded, and such that it can be encoded."""
    line = " ".join(str(text).split()).encode("utf-8", "replace").decode()
    return line if len(line) <= _TEXT_LIMIT else f"{line[: _TEXT_LIMIT - 3]}..."


def log_once(level: int, message: str, *arguments: object) -> None:
    """Log what was not logged before in this process."""
    key = (message, *map(str, arguments))
    if key not in _logged:
        _logged.add(key)
        logging.getLogger("transportkit").log(level, message, *arguments)
