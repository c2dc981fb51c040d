"""What a link has read and nobody has asked for yet: where its frames begin and end; reading is the link's."""

from __future__ import annotations

from transportkit.errors import ProtocolError
from transportkit.link.base import CONTROL, HEAD, PAYLOAD
from transportkit.wire import HANDSHAKE_FRAME_LIMIT

#: Most that is read before somebody asks for it, in bytes; any frame of the handshake fits.
READ_AHEAD = HANDSHAKE_FRAME_LIMIT + 4096


class Ahead(bytearray):
    """Bytes that begin with the head of a frame."""

    __slots__ = ()

    @property
    def kind(self) -> int | None:
        """The kind of the first frame; None where its head has not come."""
        return self[0] if len(self) >= HEAD.size else None

    @property
    def full(self) -> bool:
        return len(self) >= READ_AHEAD

    def length(self, kind: int, limit: int, peer: str) -> int | None:
        """The length of the first frame's body; None where its head has not come.

        Raises `ProtocolError` where it is of another kind, or longer than ``limit`` bytes.
        """
        if len(self) < HEAD.size:
            return None
        found: int
        length: int
        found, length = HEAD.unpack_from(self)
        if found != kind:
            names = {CONTROL: "a control frame", PAYLOAD: "a payload frame"}
            what = names.get(found, f"a frame of kind {found}")
            raise ProtocolError(f"{peer} sent {what} instead of {names[kind]}")
        if length > limit:
            raise ProtocolError(f"{peer} announced a frame of {length} bytes where at most {limit} are allowed")
        return length

    def control(self, limit: int) -> bytes | None:
        """Take the first frame's body, if it is a control frame of at most ``limit`` bytes, and whole."""
        if len(self) < HEAD.size:
            return None
        kind, length = HEAD.unpack_from(self)
        end = HEAD.size + length
        if kind != CONTROL or length > limit or len(self) < end:
            return None
        body = bytes(memoryview(self)[HEAD.size : end])
        del self[:end]
        return body

    def ready(self, limit: int) -> bool:
        """Whether the first frame need not be read on: it is whole, as much as fits, a payload, or longer than that."""
        if len(self) < HEAD.size:
            return False
        kind: int
        length: int
        kind, length = HEAD.unpack_from(self)
        return kind != CONTROL or length > limit or len(self) >= min(HEAD.size + length, READ_AHEAD)

    def past_payloads(self, limit: int, peer: str) -> bool:
        """Whether all payload frames that come first are here, and the head of what follows them.

        Raises `ProtocolError` for payloads of more than ``limit`` bytes together.
        """
        at = 0
        while len(self) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(self, at)
            if kind != PAYLOAD:
                return True
            at += HEAD.size + length
            if at > limit:
                raise ProtocolError(f"{peer} sends payloads of {at} bytes where at most {limit} are allowed")
        return False
