"""Which of the installed backends load, and which are usable here: `load`, `probe`, `survey`; and `choose`.

Each stage takes what the stage before it returned (`discover` is the first), and returns what went wrong as a `Failure`
beside what went well: one broken plugin costs only itself. Only `choose`, which knows what the user asked for by name,
raises. What a *pair* of processes can use is none of this module's business; see `transportkit.handshake`.

Loading goes through stevedore's `DriverManager`, one name at a time and with its entry point handed in: stevedore's
other managers import every plugin, and its cache on disk serves stale lists after a reinstall.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from msgspec import Raw
from stevedore.driver import DriverManager

from transportkit.discovery import GROUP, Found, article, discover, log_once, origin, say, tidy
from transportkit.errors import (
    BackendError,
    BackendUnavailableError,
    DuplicateBackendError,
    UnknownBackendError,
    UsageError,
)
from transportkit.transport import API_VERSION, Transport
from transportkit.wire import Offer, Unavailable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from transportkit.wire import Site

__all__ = ["Choice", "Failure", "Found", "Loaded", "Usable", "choose", "discover", "load", "probe", "survey"]

ALLOW_VARIABLE = "TRANSPORTKIT_BACKENDS"
DISABLE_VARIABLE = "TRANSPORTKIT_DISABLE"

#: An import that takes longer than this many seconds is logged.
SLOW_IMPORT = 2.0

#: Longest parameters of an offer, in bytes, so that no plugin can make the hello larger than a frame.
_PARAMS_LIMIT = 1 << 16


@attrs.frozen
class Loaded:
    """A backend that was imported and keeps the contract as far as a look at the class can tell.

    Args:
        seconds: how long the import took, torch's own not counted.
    """

    found: Found
    transport: type[Transport]
    seconds: float


@attrs.frozen
class Usable:
    """A loaded backend that offers itself at this site."""

    loaded: Loaded
    offer: Offer


@attrs.frozen
class Failure:
    """Why an installed backend got no further than it did.

    Args:
        reason: one clause.
        broken: whether something is wrong with the plugin; else it said in order that it cannot be used here.
        cause: the exception behind it, where there was one.
    """

    found: Found
    reason: str
    broken: bool = True
    cause: BaseException | None = attrs.field(default=None, eq=False)

    def __str__(self) -> str:
        return f"{self.found.name} ({origin(self.found)}): {self.reason}"

    def error(self) -> BackendError:
        """The error for one who asked for this backend by name."""
        name = self.found.name
        if self.found.conflict:
            return DuplicateBackendError(self.reason, backend=name)
        error = BackendUnavailableError(
            f"backend {name!r} (from {origin(self.found)}) cannot be used here: {self.reason}", backend=name
        )
        error.__cause__ = self.cause
        return error


@attrs.frozen
class Choice:
    """What a session works with.

    Args:
        transports: the usable backends.
        offers: one for every installed backend that the user and the environment admit; in their order, where they gave
            one, else by name.
        allowed: the names that were asked for, in order, less those that are disabled; None when there was no list.
        disabled: the names in ``TRANSPORTKIT_DISABLE``.
    """

    transports: dict[str, type[Transport]]
    offers: tuple[Offer | Unavailable, ...]
    allowed: tuple[str, ...] | None
    disabled: tuple[str, ...]


# -- loaded -----------------------------------------------------------------------------------------------------------


class _Driver(DriverManager[Any]):
    """stevedore's loader of one plugin, given that plugin's entry point instead of a cached list of all."""

    def __init__(self, found: Found) -> None:
        self._found = found
        super().__init__(GROUP, found.name)

    def list_entry_points(self) -> list[EntryPoint]:
        return [importlib.metadata.EntryPoint(self._found.name, self._found.value, GROUP)]


def load(backend: Found | str) -> Loaded | Failure:
    """Import one backend and check that it is one.

    Args:
        backend: what `discover` returned, or a name.

    Raises:
        UnknownBackendError: no installed backend has that name.
    """
    found = _select(backend, discover(), "asked for") if isinstance(backend, str) else backend
    if found.conflict:
        return Failure(found, found.conflict)
    if not re.fullmatch(r"[\w.-]+", found.name):
        return Failure(found, "its name has characters that no backend's name may have")
    if (problem := _torch_problem()) is not None:
        return Failure(found, f"torch cannot be imported: {say(problem)}", cause=problem)
    started = time.monotonic()
    try:
        plugin: Any = _Driver(found).driver
        objections = list(_objections(plugin, found))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit of a script, a panic of a Rust extension: it costs only this plugin
        return Failure(found, f"{found.value} could not be imported: {say(error)}", cause=error)
    seconds = time.monotonic() - started
    if seconds > SLOW_IMPORT:
        log_once(logging.INFO, "backend %s (%s) took %.1f s to import", found.name, origin(found), seconds)
    return Failure(found, tidy("; ".join(objections))) if objections else Loaded(found, plugin, seconds)


@functools.cache
def _torch_problem() -> Exception | None:
    """Import torch: every backend needs it, it takes seconds, and that is not the backend's doing.

    Once only: a second try after a failed one brings the interpreter down at its end (torch 2.14).
    """
    try:
        importlib.import_module("torch")
    except Exception as error:
        return error
    return None


def _objections(plugin: Any, found: Found) -> Iterable[str]:
    """What keeps a plugin from being a backend."""
    if not isinstance(plugin, type):
        yield f"{found.value} is not a class, but {article(type(plugin).__name__)}"
        return
    if not issubclass(plugin, Transport):
        yield f"{found.value} is not a subclass of transportkit.transport.Transport"
        return
    version = getattr(plugin, "api_version", None)
    if version is None:
        yield "it has no api_version"
    elif type(version) is not int or version != API_VERSION:
        yield f"it is written for version {version!r} of the backend contract, this library has {API_VERSION}"
    if inspect.isabstract(plugin):
        yield f"it is abstract: {', '.join(sorted(plugin.__abstractmethods__))} not implemented"
    name = getattr(plugin, "name", None)
    if name != found.name:
        yield f"its entry point is named {found.name!r}, its class says {name!r}"
    for attribute, kind in (("fan_out", bool), ("rank", int), ("device_slots", bool)):
        value = getattr(plugin, attribute, None)
        if type(value) is not kind:
            yield f"its {attribute} is {value!r}, not {article(kind.__name__)}"


# -- usable -----------------------------------------------------------------------------------------------------------


def probe(loaded: Loaded, site: Site) -> Usable | Failure:
    """Ask a backend what it can do at this site."""
    found = loaded.found
    try:
        answer: object = loaded.transport.probe(site)
        if isinstance(answer, Unavailable):
            return Failure(found, tidy(answer.reason) or "it does not say why", broken=False)
        if not isinstance(answer, Offer):
            return Failure(found, f"probe() returned {tidy(repr(answer))}, neither an Offer nor Unavailable")
        problem = _offer_problem(answer, found)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return Failure(found, f"probe() raised {say(error)}", cause=error)
    if problem:
        return Failure(found, f"probe() returned an offer {problem}")
    return Usable(loaded, msgspec.structs.replace(answer, version=answer.version or found.version))


def _offer_problem(offer: Offer, found: Found) -> str:
    if offer.backend != found.name:
        return f"of backend {offer.backend!r}"
    if offer.api_version != API_VERSION:
        return f"with api_version {offer.api_version!r} instead of {API_VERSION}"
    fields: tuple[object, object] = (offer.version, offer.params)
    if not isinstance(fields[0], str) or not isinstance(fields[1], Raw):
        return "whose version is not a str or whose params are not a msgspec.Raw"
    if len(bytes(offer.params)) > _PARAMS_LIMIT:
        return f"whose params are {len(bytes(offer.params))} bytes long; {_PARAMS_LIMIT} are the limit"
    try:
        msgspec.msgpack.decode(bytes(offer.params))
        offer.version.encode()
    except (ValueError, RecursionError) as error:
        return f"that cannot be encoded: {say(error)}"
    return ""


def survey(site: Site, backends: Iterable[Found] | None = None) -> tuple[Usable | Failure, ...]:
    """Load and probe backends, by default every one that is found; a name in conflict comes up once for each claim."""
    results: list[Usable | Failure] = []
    for found in discover() if backends is None else backends:
        loaded = load(found)
        results.append(probe(loaded, site) if isinstance(loaded, Loaded) else loaded)
    return tuple(results)


# -- chosen -----------------------------------------------------------------------------------------------------------


def choose(site: Site, backends: Sequence[str] | None) -> Choice:
    """What a session at this site may offer to its peer.

    Args:
        backends: the names that the user allows, best first; None for all that are installed.

    Raises:
        UsageError: ``backends`` is not a sequence of names.
        UnknownBackendError: a name in ``backends`` or in one of the two environment variables is not installed.
        DuplicateBackendError: two distributions register the name that was asked for.
        BackendUnavailableError: a backend that was asked for cannot be used here, or no backend is left.
    """
    installed = discover()
    asked = None if backends is None else _checked(backends, installed)
    listed = _from_environment(ALLOW_VARIABLE, installed)
    disabled = _from_environment(DISABLE_VARIABLE, installed) or ()
    wanted = listed if asked is None else asked
    if asked is not None and listed is not None:
        wanted = tuple(name for name in asked if name in listed)
    allowed = None if wanted is None else tuple(name for name in wanted if name not in disabled)
    names = tuple(dict.fromkeys(one.name for one in installed)) if allowed is None else allowed
    admitted = [_select(name, installed, "asked for") for name in names if name not in disabled]
    if not admitted:
        raise BackendUnavailableError(_nothing_left(asked, listed, disabled, installed))

    transports: dict[str, type[Transport]] = {}
    offers: list[Offer | Unavailable] = []
    for result in survey(site, admitted):
        if isinstance(result, Usable):
            transports[result.offer.backend] = result.loaded.transport
            offers.append(result.offer)
        elif allowed is not None:
            raise result.error()
        else:
            source = f" (from {origin(result.found)})" if result.broken and not result.found.conflict else ""
            offers.append(Unavailable(result.found.name, result.reason + source))
            log_once(logging.WARNING if result.broken else logging.DEBUG, "backend %s is skipped", str(result))
    return Choice(transports, tuple(offers), allowed, disabled)


def _checked(backends: object, installed: Sequence[Found]) -> tuple[str, ...]:
    if isinstance(backends, str):
        raise UsageError(f"backends= takes a sequence of names, not a string: write backends=({backends!r},)")
    if not isinstance(backends, Sequence) or not all(isinstance(name, str) for name in backends):
        raise UsageError(f"backends= takes a sequence of names in the order of preference, not {backends!r}")
    if not backends:
        raise UsageError("backends= is empty, so nothing could be used: name at least one, or leave it out for all")
    for name in backends:
        _select(name, installed, "in backends=")
    return tuple(dict.fromkeys(backends))


def _from_environment(variable: str, installed: Sequence[Found]) -> tuple[str, ...] | None:
    """The names in a variable, checked; None when it is unset or empty."""
    advice = "Take the name out of the variable, or correct it" if variable == DISABLE_VARIABLE else _INSTALL
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in os.environ.get(variable, "").split(",")))))
    for name in names:
        _select(name, installed, f"in the environment variable {variable}", advice)
    return names or None


_INSTALL = "Others are plugins: install the distribution that has it"


def _select(name: str, installed: Sequence[Found], where: str, advice: str = _INSTALL) -> Found:
    for found in installed:
        if found.name == name:
            return found
    names = ", ".join(dict.fromkeys(found.name for found in installed))
    raise UnknownBackendError(
        f"no backend {name!r} ({where}) is installed; installed are: {names}. {advice}",
        backend=name,
    )


def _nothing_left(
    asked: tuple[str, ...] | None,
    listed: tuple[str, ...] | None,
    disabled: tuple[str, ...],
    installed: Sequence[Found],
) -> str:
    causes = [
        f"backends= allows {', '.join(asked)}" if asked else "",
        f"{ALLOW_VARIABLE} allows {', '.join(listed)}" if listed else "",
        f"{DISABLE_VARIABLE} takes away {', '.join(disabled)}" if disabled else "",
    ]
    names = ", ".join(dict.fromkeys(found.name for found in installed))
    return f"no backend is left: {'; '.join(filter(None, causes))}; installed are: {names}"
