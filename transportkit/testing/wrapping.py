"""Backends around backends: what `faulty` and `recording` have in common; what becomes of a call does not belong here.

A wrapped backend is a class like any other: it can be `installed`, agreed on in a session, wrapped again, and pickled
to a child process. It has a name of its own; the ends it makes pass every call on.
"""

from __future__ import annotations

import abc
import copyreg
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from transportkit.transport import Exporter, Importer, Match, Mismatch, Offer, Side, Site, Terms, Transport, Wiring
from transportkit.wire import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from msgspec import Raw
    from torch import Tensor

    from transportkit.deadline import Deadline
    from transportkit.wire import Chunk, Location

#: The methods that a wrapped backend passes on.
TRANSPORT_METHODS = ("probe", "match", "inherit", "exporter", "importer")
EXPORTER_METHODS = (
    "slots", "invite", "admit", "hear", "connect", "locate", "packing", "ready", "publish", "drop", "reclaim", "abort",
    "close",
)  # fmt: skip
IMPORTER_METHODS = ("join", "hear", "connect", "attach", "detach", "open", "reading", "release", "abort", "close")


def qualified(method: str) -> str:
    """The full name of a method: ``"open"`` is ``"importer.open"``. Raises `ValueError` for two, or none."""
    known = [f"transport.{name}" for name in TRANSPORT_METHODS]
    known += [f"exporter.{name}" for name in EXPORTER_METHODS] + [f"importer.{name}" for name in IMPORTER_METHODS]
    found = [name for name in known if method in (name, name.partition(".")[2])]
    if len(found) != 1:
        raise ValueError(
            f"{method!r} is {' or '.join(found) or 'no method of a backend; those are ' + ', '.join(known)}"
        )
    return found[0]


class WrapperType(abc.ABCMeta):
    """The class of wrapped backends, which are made at run time and pickled by how they were made."""


def _reduce(wrapper: WrapperType) -> tuple[Any, ...] | str:
    recipe = wrapper.__dict__.get("recipe")
    return wrapper.__qualname__ if recipe is None else (_again, recipe)


def _again(make: Callable[..., type[Transport]], args: tuple[Any, ...], keywords: dict[str, Any]) -> type[Transport]:
    return make(*args, **keywords)


copyreg.pickle(WrapperType, _reduce)


class Wrapped(Transport, metaclass=WrapperType):
    """A backend that passes every call on to another one, through `through`."""

    name: ClassVar[str]
    inner: ClassVar[type[Transport]]
    recipe: ClassVar[tuple[Any, ...]]
    """Function, positional and keyword arguments that make this class again."""

    @classmethod
    def through(cls, end: object | None, method: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Every call passes here.

        Args:
            end: the `WrappedExporter` or `WrappedImporter`; None for a method of the class.
            method: its qualified name.
            call: passes it on.
            args: what the core gave.
        """
        return call()

    @classmethod
    def probe(cls, site: Site) -> Offer | Unavailable:
        answer = cls.through(None, "transport.probe", lambda: cls.inner.probe(site), (site,))
        known = isinstance(answer, Offer | Unavailable)
        return msgspec.structs.replace(answer, backend=cls.name) if known else answer  # type: ignore[no-any-return]

    @classmethod
    def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
        return cls.through(  # type: ignore[no-any-return]
            None, "transport.match", lambda: cls.inner.match(sender, receiver, lane), (sender, receiver, lane)
        )

    @classmethod
    def inherit(cls, ctx: object) -> object | None:
        return cls.through(None, "transport.inherit", lambda: cls.inner.inherit(ctx), (ctx,))  # type: ignore[no-any-return]

    @classmethod
    def exporter(cls, terms: Terms, wiring: Wiring) -> Exporter:
        inner_terms = msgspec.structs.replace(terms, backend=cls.inner.name)
        make = functools.partial(cls.inner.exporter, inner_terms, wiring)
        return WrappedExporter(cls, cls.through(None, "transport.exporter", make, (terms, wiring)))

    @classmethod
    def importer(cls, terms: Terms, wiring: Wiring) -> Importer:
        inner_terms = msgspec.structs.replace(terms, backend=cls.inner.name)
        make = functools.partial(cls.inner.importer, inner_terms, wiring)
        return WrappedImporter(cls, cls.through(None, "transport.importer", make, (terms, wiring)))


class WrappedExporter(Exporter):
    """Passes every call on to the exporter of the inner backend."""

    def __init__(self, transport: type[Wrapped], inner: Exporter) -> None:
        self.transport = transport
        self.inner = inner
        self.lasting = inner.lasting

    def _pass(self, method: str, *args: Any) -> Any:
        call = functools.partial(getattr(self.inner, method), *args)
        return self.transport.through(self, f"exporter.{method}", call, args)

    @property
    def slots(self) -> Sequence[Tensor]:
        return self.transport.through(self, "exporter.slots", lambda: self.inner.slots, ())  # type: ignore[no-any-return]

    def invite(self, receiver: int) -> Raw:
        return self._pass("invite", receiver)  # type: ignore[no-any-return]

    def admit(self, receiver: int, reply: Raw) -> None:
        self._pass("admit", receiver, reply)

    def hear(self, receiver: int, data: Raw) -> None:
        self._pass("hear", receiver, data)

    def connect(self, deadline: Deadline) -> None:
        self._pass("connect", deadline)

    def locate(self, slot: int, receiver: int) -> Location:
        return self._pass("locate", slot, receiver)  # type: ignore[no-any-return]

    def packing(self, slot: int) -> AbstractContextManager[object]:
        return self._pass("packing", slot)  # type: ignore[no-any-return]

    def ready(self, slot: int, deadline: Deadline) -> None:
        self._pass("ready", slot, deadline)

    def publish(self, slot: int, header: Chunk, deadline: Deadline) -> None:
        self._pass("publish", slot, header, deadline)

    def drop(self, receiver: int) -> None:
        self._pass("drop", receiver)

    def reclaim(self, receiver: int, export: int, opened: bool) -> None:
        self._pass("reclaim", receiver, export, opened)

    def abort(self) -> None:
        self._pass("abort")

    def close(self) -> None:
        self._pass("close")


class WrappedImporter(Importer):
    """Passes every call on to the importer of the inner backend."""

    def __init__(self, transport: type[Wrapped], inner: Importer) -> None:
        self.transport = transport
        self.inner = inner

    def _pass(self, method: str, *args: Any) -> Any:
        call = functools.partial(getattr(self.inner, method), *args)
        return self.transport.through(self, f"importer.{method}", call, args)

    def join(self, invitation: Raw) -> Raw:
        return self._pass("join", invitation)  # type: ignore[no-any-return]

    def hear(self, data: Raw) -> None:
        self._pass("hear", data)

    def connect(self, deadline: Deadline) -> None:
        self._pass("connect", deadline)

    def attach(self, handle: Raw) -> Tensor:
        return self._pass("attach", handle)  # type: ignore[no-any-return]

    def detach(self, export: int) -> None:
        self._pass("detach", export)

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        return self._pass("open", header, attached, deadline)  # type: ignore[no-any-return]

    def reading(self, header: Chunk) -> AbstractContextManager[object]:
        return self._pass("reading", header)  # type: ignore[no-any-return]

    def release(self, header: Chunk) -> None:
        self._pass("release", header)

    def abort(self) -> None:
        self._pass("abort")

    def close(self) -> None:
        self._pass("close")


def wrapper(
    transport: type[Transport],
    name: str,
    base: type[Wrapped],
    recipe: tuple[Any, ...],
    attributes: dict[str, Any] | None = None,
) -> Any:
    """A class that wraps a backend.

    Args:
        transport: the backend.
        name: of the wrapped one.
        base: says in `through` what becomes of the calls.
        recipe: see `Wrapped.recipe`.
        attributes: further class attributes.
    """
    fields = {
        "name": name,
        "api_version": transport.api_version,
        "fan_out": transport.fan_out,
        "rank": transport.rank,
        "device_slots": transport.device_slots,
        "inner": transport,
        "recipe": recipe,
        "__module__": __name__,
        **(attributes or {}),
    }
    return WrapperType(f"{base.__name__}{transport.__name__}", (base,), fields)
