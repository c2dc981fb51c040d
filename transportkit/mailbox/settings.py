"""The keywords of a mailbox, checked once, and its hello; those that sessions have too are checked over there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from transportkit.errors import UsageError
from transportkit.session.options import KEYWORDS, Options, check_names, hello, options
from transportkit.wire import Hello, Limits, Mailbox

if TYPE_CHECKING:
    from transportkit.registry import Choice
    from transportkit.wire import Role

#: Most messages of one producer that are under way.
DEFAULT_CAPACITY = 64

#: A message's tensors share a slot, so there are more and smaller ones than in a session: 32 MiB for each producer.
DEFAULT_CHUNK_BYTES = 4 << 20
DEFAULT_SLOTS = 8

#: Tensors of at most so many bytes travel in the body, and so many bytes of them together. Measured, see "Counters" in
#: ``docs/mailbox.md``: the largest power of two at which inline is faster for one tensor as well as for ten.
DEFAULT_INLINE = 4096
INLINE_TOGETHER = 1 << 16

#: Where the backend moves bytes down the link anyway, a whole body fits into what a socket buffers.
LINK_INLINE = 1 << 17

#: How long a `get` looks again and again before it waits in the kernel, in seconds: twice what an answer takes to a
#: message with a tensor of 600 KB, see "Counters" in ``docs/mailbox.md``.
DEFAULT_SPIN = 500e-6

#: Longest control frame of a mailbox, in bytes; it is read ahead whole.
FRAME_LIMIT = 1 << 20

#: Longest part of a body in one frame, in bytes.
BODY_FRAME = 1 << 16


@attrs.frozen(kw_only=True)
class Settings:
    """What the user of one side of a mailbox asked for."""

    session: Options
    capacity: int = DEFAULT_CAPACITY
    inline: int | None = None
    spin: float = DEFAULT_SPIN

    def hello(self, role: Role, choice: Choice, link_kind: str, mailbox: Mailbox) -> Hello:
        """This side's first message."""
        greeting = hello(role, self.session, choice, link_kind, "mail")
        limits = Limits(self.session.chunk_bytes, self.session.slots)
        return msgspec.structs.replace(greeting, limits=limits, mailbox=mailbox)


#: The keywords that a mailbox has beside those of a session.
_OURS = ("capacity", "inline", "spin")


def settings(given: dict[str, Any], *others: str) -> Settings:
    """Check keywords; arguments and errors as of `session.options.options`."""
    if "progress" in given:
        raise UsageError("a mailbox reports no progress; leave `progress=` away")
    check_names(given, {*KEYWORDS, *_OURS, *others} - {"progress"})
    given = dict(given)
    ours = {name: given.pop(name) for name in _OURS if name in given}
    for name, value in ours.items():
        if name == "inline" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise UsageError(f"{name} must be a number that is not negative, not {value!r}")
        if name != "spin" and (not isinstance(value, int) or value >= 1 << 62):
            raise UsageError(f"{name} must be an integer, not {value!r}")
    if not ours.get("capacity", 1):
        raise UsageError("capacity must be at least 1: one message has to be under way")
    given.setdefault("chunk_bytes", DEFAULT_CHUNK_BYTES)
    given.setdefault("slots", DEFAULT_SLOTS)
    return Settings(session=options(given), **ours)


def seconds(timeout: object, name: str = "timeout") -> float | None:
    """A bound that a single call is given, in seconds; 0 looks once. Raises `UsageError`."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout) or timeout < 0:
        raise UsageError(f"{name} must be a number of seconds that is not negative, or None, not {timeout!r}")
    return None if math.isinf(timeout) else float(timeout)
