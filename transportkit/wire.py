"""The messages that cross a link, and their encoding; no I/O and no decisions belong here.

Every message is one tagged msgspec struct in MessagePack, in one frame. Unknown fields are ignored and missing ones
take their defaults, so fields may be added within a major version; an unknown tag or another major version is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from transportkit.errors import ProtocolError, VersionError

#: Major versions of the protocol that this library speaks, oldest and newest.
PROTOCOL_OLDEST = 1
PROTOCOL_NEWEST = 1

#: Longest control frame before the two sides have agreed, and after, in bytes.
HANDSHAKE_FRAME_LIMIT = 1 << 20
CONTROL_FRAME_LIMIT = 1 << 28

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
    """

    export: int | None = None
    offset: int = 0
    handle: Raw = EMPTY


# -- the site and the offers ------------------------------------------------------------------------------------------


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


class Hello(Struct, frozen=True, tag="hello"):
    """The first message of either side."""

    protocol_oldest: int
    protocol_newest: int
    role: Role
    library: str
    torch: str
    dtypes: tuple[str, ...]
    site: Site
    offers: tuple[Offer | Unavailable, ...]
    limits: Limits
    wishes: Wishes
    intent: Literal["transfer", "inspect"] = "transfer"
    byteorder: Literal["little", "big"] = "little"
    """Of the elements in memory; tensors travel as they lie there."""
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    """How long this side waits without progress, in seconds; the other says more often than that that it is alive."""


# -- the agreement ----------------------------------------------------------------------------------------------------


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


# -- the handshake's messages -----------------------------------------------------------------------------------------


class Refusal(Struct, frozen=True, tag="refusal"):
    """No agreement, and why; the sender of it hangs up."""

    code: str
    text: str
    protocol_oldest: int = PROTOCOL_OLDEST
    protocol_newest: int = PROTOCOL_NEWEST
    agreement: Agreement | None = None


class Proposal(Struct, frozen=True, tag="proposal"):
    """Sender to receiver: use this backend on these terms, invited by these parameters.

    The receiver repeats `Transport.match` for itself. ``attempt`` counts the proposals of a handshake from 1; answers
    carry it, and those to an earlier proposal are stale.
    """

    attempt: int
    terms: Terms
    agreement: Agreement
    invitation: Raw = EMPTY


class Joined(Struct, frozen=True, tag="joined"):
    """Receiver to sender: the importer is made."""

    attempt: int
    receiver: int
    reply: Raw = EMPTY


class Declined(Struct, frozen=True, tag="declined"):
    """Receiver to sender: this backend does not work here; propose another."""

    attempt: int
    receiver: int
    backend: str
    reason: str


class Connect(Struct, frozen=True, tag="connect"):
    """Sender to receiver: every reply is in; connect now, the trial's chunks follow (as update ``-attempt``)."""

    attempt: int
    receiver: int


class Proof(Struct, frozen=True, tag="proof"):
    """Receiver to sender: the trial's 16 bytes as they were read."""

    attempt: int
    receiver: int
    read: bytes


class Agreed(Struct, frozen=True, tag="agreed"):
    """Sender to receiver: the trial held, for every receiver; updates may follow."""

    agreement: Agreement


class Inspected(Struct, frozen=True, tag="inspected"):
    """Sender to an inspecting peer: what would have been agreed."""

    agreement: Agreement | None
    text: str = ""


# -- the updates' messages --------------------------------------------------------------------------------------------


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
        last: no chunk follows.
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


class Waiting(Struct, frozen=True, tag="waiting"):
    """Either side: alive, waiting for the other or for others."""


class Bye(Struct, frozen=True, tag="bye"):
    """Either side: the session ends; an empty text says in order."""

    code: str = ""
    text: str = ""


HandshakeMessage = (
    Hello | Refusal | Proposal | Joined | Declined | Connect | Proof | Agreed | Inspected | Chunk | Ack | Waiting | Bye
)
UpdateMessage = (
    Ready | Begin | Present | Manifest | Accept | Chunk | Ack | Commit | Applied | Failed | Aborted | Waiting | Bye
)
Message = (
    Hello
    | Refusal
    | Proposal
    | Joined
    | Declined
    | Connect
    | Proof
    | Agreed
    | Inspected
    | Ready
    | Begin
    | Present
    | Manifest
    | Accept
    | Chunk
    | Ack
    | Commit
    | Applied
    | Failed
    | Aborted
    | Waiting
    | Bye
)


class _Envelope(Struct, frozen=True):
    type: str = ""
    protocol_oldest: int | None = None
    protocol_newest: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_envelope = msgspec.msgpack.Decoder(_Envelope)

T = TypeVar("T")


def encode(message: Struct) -> bytes:
    """Encode one message. Raises `ProtocolError` for what msgspec cannot encode (an int beyond 64 bits, say)."""
    try:
        return _encoder.encode(message)
    except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """Decode one control frame.

    Raises:
        VersionError: it is a hello or a refusal of another major version; the text shows both.
        ProtocolError: anything else that is not one message of ours.
    """
    try:
        message = _decoder.decode(frame)
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
        _explain(frame, error)
    if isinstance(message, Hello):
        check_versions(message.protocol_oldest, message.protocol_newest)
    return message


def decode_as(type_: type[T], raw: Raw | bytes) -> T:
    """Decode a backend's own parameters. Raises `ProtocolError`."""
    try:
        return msgspec.msgpack.decode(raw, type=type_)
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
        raise ProtocolError(f"cannot decode {type_.__name__}: {error}") from error


def raw(value: Any) -> Raw:
    """Encode a backend's own parameters."""
    return Raw(_encoder.encode(value))


def check_versions(oldest: int, newest: int) -> None:
    """Raise `VersionError` unless the peer's range of major versions and ours overlap."""
    if oldest > PROTOCOL_NEWEST or newest < PROTOCOL_OLDEST:
        raise VersionError(
            f"the peer speaks protocol {_range(oldest, newest)}, this side {_range(PROTOCOL_OLDEST, PROTOCOL_NEWEST)}; "
            "install the same major version of transportkit on both sides"
        )


def _range(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"


def _explain(frame: bytes | bytearray | memoryview, error: Exception) -> NoReturn:
    try:
        head = _envelope.decode(frame)
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError):
        ours = _range(PROTOCOL_OLDEST, PROTOCOL_NEWEST)
        raise ProtocolError(f"the peer sent no message of protocol {ours}, which this side speaks: {error}") from error
    if head.protocol_oldest is not None and head.protocol_newest is not None:
        check_versions(head.protocol_oldest, head.protocol_newest)
        versions = f" (peer speaks protocol {_range(head.protocol_oldest, head.protocol_newest)}, "
        versions += f"this side {_range(PROTOCOL_OLDEST, PROTOCOL_NEWEST)})"
    else:
        versions = f" (this side speaks protocol {_range(PROTOCOL_OLDEST, PROTOCOL_NEWEST)})"
    raise ProtocolError(f"the peer sent a malformed {head.type or 'untyped'} message{versions}: {error}") from error
