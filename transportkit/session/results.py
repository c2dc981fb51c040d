"""What a finished update tells its two sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transportkit.wire import TensorSpec


@attrs.frozen(kw_only=True)
class Report:
    """What `Sender.send` returns: every receiver that is not named in `lost` has applied the update.

    Args:
        version: the update's version.
        nbytes: sum of the tensors' own bytes; tied tensors count once.
        seconds: from the first message of the update to the last receiver's word.
        chunks: per receiver, how many chunks carried it.
        backends: per receiver, the name of the backend that carried it.
        tensors: number of names.
        reroutes: in words, what was rerouted to another backend on the way; empty when nothing was.
        waited_for: per receiver, seconds that this side spent waiting for it.
        lost: per receiver that the update did not reach, why; empty unless ``on_loss="continue"`` was given.
    """

    version: int
    nbytes: int
    seconds: float
    chunks: Mapping[int, int]
    backends: Mapping[int, str]
    tensors: int
    reroutes: tuple[str, ...] = ()
    waited_for: Mapping[int, float] = attrs.field(factory=dict)
    lost: Mapping[int, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Incoming:
    """What a receiver knows of an update while it comes; see `Receiver.incoming`.

    Args:
        version: the update's version.
        specs: its tensors in order; None where each spec comes with its first bytes.
        nbytes: sum of the tensors' own bytes, tied tensors counted once; None where the sender does not know.
        metadata: what the sender gave with it.
    """

    version: int
    specs: tuple[TensorSpec, ...] | None
    nbytes: int | None
    metadata: Mapping[str, str]


@attrs.frozen(kw_only=True)
class Update:
    """What the receiving calls return: one update has landed.

    Args:
        version: the update's version.
        nbytes: sum of the tensors' own bytes; tied tensors count once.
        seconds: from the sender's first message of the update to the end.
        chunks: how many chunks carried it.
        tensors: number of names.
        backend: the name of the backend that carried it.
        metadata: what the sender gave with it.
        skipped: names that came but are not in the target (``strict=False``).
        missing: names of the target that did not come (``strict=False``).
        cast: names that were converted to the target's dtype (``cast=True``).
    """

    version: int
    nbytes: int
    seconds: float
    chunks: int
    tensors: int
    backend: str
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
