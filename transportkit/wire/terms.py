"""What messages are made of: tensors and pieces, sites and offers, agreements and terms; no message belongs here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

#: Major versions of the protocol that this library speaks, oldest and newest.
PROTOCOL_OLDEST = 1
PROTOCOL_NEWEST = 1

EMPTY = Raw(b"\xc0")
"""A nil: what a backend sends that has nothing to say."""

Role = Literal["sender", "receiver"]
Digest = Literal["xxh3-64", "none"]


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor of a manifest.

    Args:
        name: unique in its update.
        dtype: torch's name without the prefix, ``"bfloat16"``.
        shape: sizes in elements; ``()`` for a scalar.
        same_as: the earlier name whose bytes this one shares; it has no bytes of its own on the wire.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None


class Piece(Struct, frozen=True, array_like=True):
    """A byte range of one tensor inside a chunk.

    Args:
        tensor: index into the manifest.
        start: first byte of the range in the tensor's contiguous row-major bytes.
        nbytes: length of the range in bytes.
        offset: where it lies in the chunk, in bytes; a multiple of 64.
    """

    tensor: int
    start: int
    nbytes: int
    offset: int


class Location(Struct, frozen=True):
    """Where a chunk's bytes are, for one receiver.

    Args:
        export: id of the exported memory they lie in; None for a backend that exports nothing.
        offset: first byte within that export.
        handle: the backend's own parameters; for an export, what `Importer.attach` is given.
        supersedes: id of an earlier export whose place this one takes: nothing will be located in that one any more.
    """

    export: int | None = None
    offset: int = 0
    handle: Raw = EMPTY
    supersedes: int | None = None


class Site(Struct, frozen=True):
    """What a process knows of where it runs; see `transportkit.site`."""

    host: str = ""
    boot_id: str = ""
    platform: str = ""
    kernel: str = ""
    python: str = ""
    pid: int = 0
    uid: int = -1
    namespaces: dict[str, str] = {}
    link: str = ""
    """The kind of the link: ``unix``, ``tcp``, ``pair`` or ``custom``."""


class Offer(Struct, frozen=True, tag="offer"):
    """What one backend can do at one site."""

    backend: str
    api_version: int = 1
    version: str = ""
    params: Raw = EMPTY


class Unavailable(Struct, frozen=True, tag="unavailable"):
    """Why one installed backend cannot be used at one site."""

    backend: str
    reason: str


class Limits(Struct, frozen=True):
    """The sizes that one side wishes for; the smaller of both is agreed."""

    chunk_bytes: Annotated[int, Meta(ge=1)]
    slots: Annotated[int, Meta(ge=1)]


class Wishes(Struct, frozen=True):
    """What the user of one side asked for."""

    backends: tuple[str, ...] | None = None
    disabled: tuple[str, ...] = ()
    checksum: bool | None = None
    device: str = "cpu"
    allow_plaintext: bool = False


class Verdict(Struct, frozen=True):
    """What became of one backend for one receiver."""

    backend: str
    taken: bool
    reason: str


class Assignment(Struct, frozen=True):
    """One receiver's part of an agreement."""

    receiver: int
    peer: str
    backend: str
    lane: int
    chunk_bytes: int
    slots: int
    digest: Digest
    verdicts: tuple[Verdict, ...]
    note: str = ""


class Agreement(Struct, frozen=True):
    """The outcome of a handshake: who uses which backend, and why not another one.

    ``str(agreement)`` is the explanation, a line per receiver and per backend.
    """

    session: str
    sender: str
    assignments: tuple[Assignment, ...]

    def backend(self, receiver: int | None = None) -> str:
        """The name of the backend that serves this receiver; by default the first one, which a receiver is itself."""
        return next(a.backend for a in self.assignments if receiver is None or a.receiver == receiver)

    def only(self, receiver: int) -> Agreement:
        """The part that concerns one receiver: all that it is told, since a thousand others may be there."""
        return Agreement(self.session, self.sender, tuple(a for a in self.assignments if a.receiver == receiver))

    def __str__(self) -> str:
        lines = []
        for a in self.assignments:
            digest = "no digests" if a.digest == "none" else f"{a.digest} digests"
            lines.append(
                f"receiver {a.receiver} ({a.peer}): {a.backend}, lane {a.lane}, "
                f"{a.slots} slots of {a.chunk_bytes} bytes, {digest}"
            )
            lines += [f"  {v.backend}: {'taken' if v.taken else 'not taken'}: {v.reason}" for v in a.verdicts]
            if a.note:
                lines.append(f"  {a.note}")
        return "\n".join(lines)


class Terms(Struct, frozen=True):
    """What a lane's exporter and each of its importers work by.

    Args:
        session: the session's random id, hex.
        token: 32 random bytes that every data socket of the lane demands.
        receivers: all receivers of the lane.
        receiver: the importer's own number; -1 for the exporter.
        params: what `Transport.match` found, for the backend alone.
    """

    session: str
    token: bytes
    backend: str
    lane: int
    receivers: tuple[int, ...]
    receiver: int
    chunk_bytes: int
    slots: int
    digest: Digest
    sender_device: str = "cpu"
    receiver_device: str = "cpu"
    params: Raw = EMPTY
