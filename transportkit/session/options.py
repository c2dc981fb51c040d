"""The keywords that both sides take, checked once, and the hello made of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from transportkit.errors import UsageError
from transportkit.manifest import dtype_names
from transportkit.site import library_version, read_site, torch_version
from transportkit.wire import PROTOCOL_NEWEST, PROTOCOL_OLDEST, Hello, Limits, Role, Wishes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transportkit.registry import Choice

Progress = Callable[[int, "int | None"], Any]
"""Called with (bytes done, bytes in all); the latter is None where the source does not tell."""

DEFAULT_CHUNK_BYTES = 16 << 20
DEFAULT_SLOTS = 3
DEFAULT_TIMEOUT = 60.0


@attrs.frozen(kw_only=True)
class Options:
    """What the user of one side asked for; see `serve` for the meaning of each."""

    backends: Sequence[str] | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    slots: int = DEFAULT_SLOTS
    checksum: bool | None = None
    authkey: bytes | None = None
    allow_plaintext: bool = False
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT
    wait: float | None = None
    progress: Progress | None = None


#: The keywords that `options` knows.
KEYWORDS = frozenset(field.name for field in attrs.fields(Options))


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UsageError` for a keyword that is none of those."""
    known = set(known)
    for name in given:
        if name not in known:
            raise UsageError(f"unknown keyword {name!r}; the keywords are {', '.join(sorted(known))}")


def options(given: dict[str, Any], *others: str) -> Options:
    """Check keywords.

    Args:
        given: what was passed in.
        others: keywords of the same call that are not among these, for the text.

    Raises:
        UsageError: one is wrong; the text names it and what it may be.
    """
    check_names(given, KEYWORDS | set(others))
    for name in ("chunk_bytes", "slots"):
        if name in given and (not _is_int(given[name]) or given[name] < 1 or given[name] >= 1 << 62):
            raise UsageError(f"{name} must be a positive integer, not {given[name]!r}")
    for name in ("timeout", "wait"):
        value = given.get(name)
        if value is None and name == "wait":
            continue
        if name in given and (
            not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0
        ):
            raise UsageError(f"{name} must be a positive number of seconds, not {value!r}")
    if given.get("checksum") not in (None, True, False):
        raise UsageError(f"checksum must be True, False or None, not {given['checksum']!r}")
    if not isinstance(given.get("allow_plaintext", False), bool):
        raise UsageError(f"allow_plaintext must be True or False, not {given['allow_plaintext']!r}")
    if given.get("progress") is not None and not callable(given["progress"]):
        raise UsageError(f"progress must be callable, not {given['progress']!r}")
    given = dict(given)
    given["authkey"] = _authkey(given.get("authkey"))
    given["device"] = _device(given.get("device", "cpu"))
    return Options(**given)


def per_call(wait: object, progress: object) -> None:
    """Check the keywords of a single call. Raises `UsageError`."""
    options({"wait": wait, "progress": progress})


def texts(given: Mapping[str, str] | None) -> dict[str, str]:
    """Check the metadata of an update. Raises `UsageError`."""
    if not isinstance(given, Mapping | None):
        raise UsageError(f"metadata must be a mapping of text to text, not {given!r}")
    data = dict(given or {})
    for entry in data.items():
        if not all(isinstance(text, str) for text in entry):
            raise UsageError(f"metadata must map text to text, not {entry[0]!r} to {entry[1]!r}; convert with `str`")
        try:
            for text in entry:
                str.encode(text)
        except UnicodeEncodeError as error:
            raise UsageError(f"metadata must map text to text, not {entry[0]!r} to {entry[1]!r}: {error}") from error
    return data


def hello(
    role: Role,
    wanted: Options,
    choice: Choice,
    link_kind: str,
    intent: Literal["transfer", "inspect", "mail"] = "transfer",
) -> Hello:
    """This side's first message on a link of this kind."""
    return Hello(
        protocol_oldest=PROTOCOL_OLDEST,
        protocol_newest=PROTOCOL_NEWEST,
        role=role,
        library=library_version(),
        torch=torch_version(),
        dtypes=dtype_names(),
        site=read_site(link_kind),
        offers=choice.offers,
        limits=Limits(wanted.chunk_bytes, wanted.slots),
        wishes=Wishes(
            backends=choice.allowed,
            disabled=choice.disabled,
            checksum=wanted.checksum,
            device=wanted.device,
            allow_plaintext=wanted.allow_plaintext,
        ),
        intent=intent,
        byteorder=sys.byteorder,
        timeout=wanted.timeout,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _authkey(value: object) -> bytes | None:
    if isinstance(value, str):
        value = value.encode()
    if value is not None and (not isinstance(value, bytes | bytearray) or not value):
        raise UsageError("authkey must be a non-empty bytes or str")
    return None if value is None else bytes(value)


def _device(value: object) -> str:
    try:
        device = torch.device(value)  # type: ignore[call-overload]
        if device.type != "meta":
            torch.empty(0, device=device)
            return str(device)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {value!r} is no torch device that can be used here: {error}") from error
    raise UsageError("device 'meta' has no memory that tensors could be in")
