"""The messages of an update, and the two that may come at any time; which may follow which is not told here."""

from __future__ import annotations

from msgspec import Struct

from transportkit.wire.terms import Location, Piece, TensorSpec


class Ready(Struct, frozen=True, tag="ready"):
    """Receiver to sender: a call waits for an update. Said once for each `Begin`; only then may the next one come.

    Args:
        waits: False takes the word back: the call's ``wait`` has expired, so a `Begin` may stay unanswered for long.
    """

    waits: bool = True


class Begin(Struct, frozen=True, tag="begin"):
    """Sender to receiver: an update is to follow. Short, so that it never fills the link of a receiver that does not
    read.

    Args:
        update: number of the update within the session, from 1; a trial's chunks carry minus its attempt.
        version: the user's number of it.
    """

    update: int
    version: int


class Present(Struct, frozen=True, tag="present"):
    """Receiver to sender: the call still waits; send the manifest."""

    update: int
    receiver: int


class Manifest(Struct, frozen=True, tag="manifest"):
    """Sender to receiver: what the update consists of.

    Args:
        manifest_id: digest of the manifest; empty when the specs come with the chunks.
        specs: the manifest, or None when the receiver holds it since the last update that it applied.
        nbytes: sum of the tensors' bytes; -1 when not known.
        known_plan: chunk headers leave out their pieces, which are those of the last applied update.
        metadata: the user's.
    """

    update: int
    manifest_id: str = ""
    specs: tuple[TensorSpec, ...] | None = None
    nbytes: int = -1
    known_plan: bool = False
    metadata: dict[str, str] = {}


class Accept(Struct, frozen=True, tag="accept"):
    """Receiver to sender: the manifest suits; send the chunks."""

    update: int
    receiver: int


class Chunk(Struct, frozen=True, tag="chunk"):
    """A chunk's header.

    Args:
        seq: number of the chunk within its update, from 0.
        last: no chunk is certain to follow. True in all of a mailbox, where the next one may be taken back.
        nbytes: used length of the slot.
        digest: xxh3-64 of these bytes, 0 when the terms say none.
        pieces: what lies where, in manifest order without gaps; None when the plan is known.
        specs: tensors that this chunk introduces, appended to the manifest; only where `Manifest` had none.
    """

    update: int
    receiver: int
    seq: int
    last: bool
    nbytes: int
    digest: int
    location: Location
    pieces: tuple[Piece, ...] | None = None
    specs: tuple[TensorSpec, ...] = ()


class Ack(Struct, frozen=True, tag="ack"):
    """Receiver to sender: the chunk is read and its slot is no longer looked at."""

    update: int
    receiver: int
    seq: int


class Commit(Struct, frozen=True, tag="commit"):
    """Sender to receiver: all is sent; these are the totals."""

    update: int
    chunks: int
    nbytes: int
    tensors: int
    manifest_id: str


class Applied(Struct, frozen=True, tag="applied"):
    """Receiver to sender: the whole update has landed."""

    update: int
    receiver: int
    chunks: int
    nbytes: int


class Failed(Struct, frozen=True, tag="failed"):
    """Receiver to sender: this update failed here."""

    update: int
    receiver: int
    code: str
    text: str
    torn: bool = False


class Aborted(Struct, frozen=True, tag="aborted"):
    """Sender to receiver: this update ends here; nothing more of it follows."""

    update: int
    code: str
    text: str
    withdrawn: bool = False


class Reroute(Struct, frozen=True, tag="reroute"):
    """Sender to receiver: the lane's backend is given up in mid-update; say how far you are, a proposal follows."""

    update: int


class Stranded(Struct, frozen=True, tag="stranded"):
    """Receiver to sender: nothing more of this update can come over this backend; said unasked, or when asked.

    Args:
        seq: the first chunk that has not been taken.
        reason: what failed here; empty where this only answers `Reroute`.
    """

    update: int
    receiver: int
    seq: int
    reason: str = ""


class Waiting(Struct, frozen=True, tag="waiting"):
    """Either side: alive, waiting for the other or for others."""


class Bye(Struct, frozen=True, tag="bye"):
    """Either side: the session ends; an empty text says in order."""

    code: str = ""
    text: str = ""
