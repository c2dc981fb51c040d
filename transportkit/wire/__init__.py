"""The messages that cross a link, and their encoding; no I/O and no decisions belong here.

Every message is one tagged msgspec struct in MessagePack, in one frame. Unknown fields are ignored and missing ones
take their defaults, so fields may be added within a major version; an unknown tag or another major version is refused.

`terms` has what messages are made of, `greetings` those of a handshake, `updates` those of an update, `letters` those
of a mailbox.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Raw, Struct

from transportkit.errors import ProtocolError, VersionError
from transportkit.wire.greetings import (
    Agreed,
    Connect,
    Declined,
    Hello,
    Inspected,
    Joined,
    Proof,
    Proposal,
    Refusal,
    Signal,
)
from transportkit.wire.letters import (
    SPOILED,
    Admitted,
    Enclosure,
    Fragment,
    Go,
    Letter,
    Mailbox,
    Moved,
    Taken,
    Withdrawn,
)
from transportkit.wire.terms import (
    EMPTY,
    PROTOCOL_NEWEST,
    PROTOCOL_OLDEST,
    Agreement,
    Assignment,
    Digest,
    Limits,
    Location,
    Offer,
    Piece,
    Role,
    Site,
    TensorSpec,
    Terms,
    Unavailable,
    Verdict,
    Wishes,
)
from transportkit.wire.updates import (
    Aborted,
    Accept,
    Ack,
    Applied,
    Begin,
    Bye,
    Chunk,
    Commit,
    Failed,
    Manifest,
    Present,
    Ready,
    Reroute,
    Stranded,
    Waiting,
)

__all__ = [
    "CONTROL_FRAME_LIMIT",
    "EMPTY",
    "HANDSHAKE_FRAME_LIMIT",
    "PROTOCOL_NEWEST",
    "PROTOCOL_OLDEST",
    "SIGNALS_LIMIT",
    "SIGNAL_LIMIT",
    "SPOILED",
    "Aborted",
    "Accept",
    "Ack",
    "Admitted",
    "Agreed",
    "Agreement",
    "Applied",
    "Assignment",
    "Begin",
    "Bye",
    "Chunk",
    "Commit",
    "Connect",
    "Declined",
    "Digest",
    "Enclosure",
    "Failed",
    "Fragment",
    "Go",
    "HandshakeMessage",
    "Hello",
    "Inspected",
    "Joined",
    "Letter",
    "Limits",
    "Location",
    "MailMessage",
    "Mailbox",
    "Manifest",
    "Message",
    "Moved",
    "Offer",
    "Piece",
    "Present",
    "Proof",
    "Proposal",
    "Ready",
    "Refusal",
    "Reroute",
    "Role",
    "Signal",
    "Site",
    "Stranded",
    "Taken",
    "TensorSpec",
    "Terms",
    "Unavailable",
    "UpdateMessage",
    "Verdict",
    "Waiting",
    "Wishes",
    "Withdrawn",
    "check_versions",
    "decode",
    "decode_as",
    "encode",
    "plain",
    "raw",
]

#: Longest control frame before the two sides have agreed, and after, in bytes.
HANDSHAKE_FRAME_LIMIT = 1 << 20
CONTROL_FRAME_LIMIT = 1 << 28

#: Longest signal of a backend, in bytes, and most of them from one side in one attempt of a handshake.
SIGNAL_LIMIT = 1 << 17
SIGNALS_LIMIT = 1 << 12

#: Longest text of an error, in characters.
TEXT_LIMIT = 1 << 14

HandshakeMessage = (
    Hello
    | Refusal
    | Proposal
    | Joined
    | Declined
    | Connect
    | Signal
    | Proof
    | Agreed
    | Inspected
    | Chunk
    | Ack
    | Waiting
    | Bye
)
UpdateMessage = (
    Ready
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
    | Reroute
    | Stranded
    | Waiting
    | Bye
)
MailMessage = Admitted | Letter | Fragment | Enclosure | Withdrawn | Go | Moved | Taken | Ack | Waiting | Bye
Message = (
    Hello
    | Refusal
    | Proposal
    | Joined
    | Declined
    | Connect
    | Signal
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
    | Reroute
    | Stranded
    | Admitted
    | Letter
    | Fragment
    | Enclosure
    | Withdrawn
    | Go
    | Moved
    | Taken
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


def plain(text: str) -> str:
    """A text as it can travel: bounded, and without what UTF-8 cannot hold."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}... ({len(text)} characters)"


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
