"""The preamble that every connection begins with, before anything is decoded; a state machine, no I/O belongs here.

::

    dialler                                     listener
    preamble  (44 bytes)            ------->
                                    <-------    preamble  (44 bytes)
    only if both have a key:
    proof     (32 bytes)            ------->
                                    <-------    verdict   (1 byte) and proof (32 bytes, zeros after a refusal)

A preamble is magic (8), version (1), flags (1), role (1), refusal (1) and a nonce (32); these 44 bytes keep their
meaning in every later version. A proof is HMAC-SHA-256, under the key, of a label, the prover's role, both preambles
and the listening end's address as the kernel reports it at either end. So a proof is worth nothing in the other role
(reflection), on another connection (replay) or passed on to another listener (relay). The last means that a connection
with a key cannot go through address translation, port forwarding or a proxy.

The dialler proves first, and the listener proves itself only to one who knows the key: whoever merely connects gets
nothing to try keys against. A refusal is told before hanging up, so that the other side learns why. Nothing of this
outlives the preamble, and the frames that follow are neither encrypted nor authenticated.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct

from transportkit.errors import AuthenticationError, ProtocolError, TransportKitError, UsageError, VersionError

__all__ = ["PREAMBLE_VERSION", "Preamble", "Role", "check_authkey"]

#: Version of the preamble; not that of the protocol, which the hellos settle.
PREAMBLE_VERSION = 1

_MAGIC = b"tptkit\r\n"
_HEAD = struct.Struct("!8sBBBB32s")
_HAS_KEY = 1
_REFUSED_USER = 1
_PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
_LABEL = b"transportkit preamble proof\0"


class Role(enum.IntEnum):
    """Which end of a connection this is."""

    DIALLER = 1
    LISTENER = 2


class _Awaiting(enum.Enum):
    PREAMBLE = enum.auto()
    PROOF = enum.auto()
    VERDICT = enum.auto()
    NOTHING = enum.auto()


def check_authkey(authkey: object) -> None:
    """Raise `UsageError` unless it is None or bytes that can be a key."""
    if authkey is not None and (not isinstance(authkey, bytes) or not authkey):
        raise UsageError("`authkey` must be non-empty bytes (32 random ones, say) or None")


class Preamble:
    """One end's part of one preamble.

    The owner sends what `outgoing` returns, feeds what arrives, and stops at `done`. An error from `feed` may leave a
    last word for the peer in `outgoing`: send it, then hang up.

    Args:
        role: which end this is.
        authkey: the shared key, or None.
        address: the listening end's, from `transportkit.address.reported`.
        refuse_user: tell the peer that its user is not ours; the machine then raises at the first `feed`.
        peer: who, in words, for the errors' texts.
    """

    def __init__(
        self, role: Role, authkey: bytes | None, address: bytes, *, refuse_user: bool = False, peer: str = "the peer"
    ) -> None:
        check_authkey(authkey)
        self._role = Role(role)
        self._key = authkey
        self._address = address
        self._refuse_user = refuse_user
        self._peer = peer
        flags = 0 if authkey is None else _HAS_KEY
        refusal = _REFUSED_USER if refuse_user else 0
        self._own = _HEAD.pack(_MAGIC, PREAMBLE_VERSION, flags, role, refusal, secrets.token_bytes(32))
        self._theirs = b""
        self._in = bytearray()
        self._out = bytearray(self._own if role is Role.DIALLER else b"")
        self._awaiting = _Awaiting.PREAMBLE

    @property
    def done(self) -> bool:
        """The peer is who it should be; frames may follow once `outgoing` is sent."""
        return self._awaiting is _Awaiting.NOTHING

    @property
    def heard(self) -> bool:
        """Whether any byte came from the peer."""
        return bool(self._theirs or self._in)

    @property
    def wanted(self) -> int:
        """How many bytes the next step lacks; reading no more leaves the frames where they are."""
        return self._needed() - len(self._in) if not self.done else 0

    @property
    def rest(self) -> bytes:
        """What was fed beyond the preamble, once `done`: the beginning of the frames."""
        return bytes(self._in) if self.done else b""

    def outgoing(self) -> bytes:
        """Take the bytes that are to be sent now."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived, in pieces of any size.

        Raises:
            ProtocolError: the peer speaks something else, or plays our own role.
            VersionError: it speaks another version of the preamble.
            AuthenticationError: a key or user was refused, on either side, or only one side has a key.
        """
        self._in += data
        while not self.done:
            if self._awaiting is _Awaiting.PREAMBLE and not _MAGIC.startswith(self._in[: len(_MAGIC)]):
                raise ProtocolError(
                    f"{self._peer} speaks something else than transportkit (it began with {bytes(self._in[:16])!r}); "
                    "check the address"
                )
            needed = self._needed()
            if len(self._in) < needed:
                return
            step = bytes(self._in[:needed])
            del self._in[:needed]
            if self._awaiting is _Awaiting.PREAMBLE:
                self._meet(step)
            elif self._awaiting is _Awaiting.PROOF:
                self._judge(step)
            else:
                self._accept(step)

    def _needed(self) -> int:
        return {_Awaiting.PREAMBLE: _HEAD.size, _Awaiting.PROOF: _PROOF_BYTES}.get(self._awaiting, 1 + _PROOF_BYTES)

    def _meet(self, theirs: bytes) -> None:
        _, version, flags, role, refusal, _ = _HEAD.unpack(theirs)
        self._theirs = theirs
        if self._role is Role.LISTENER:
            self._out += self._own  # also where it is refused below: it tells the dialler why
        error = self._objection(version, flags, role, refusal)
        if error is not None:
            raise error
        if self._key is None:
            self._awaiting = _Awaiting.NOTHING
        elif self._role is Role.DIALLER:
            self._out += self._proof(Role.DIALLER)
            self._awaiting = _Awaiting.VERDICT
        else:
            self._awaiting = _Awaiting.PROOF

    def _objection(self, version: int, flags: int, role: int, refusal: int) -> TransportKitError | None:
        peer, same_key = self._peer, "pass the same `authkey=` on both sides"
        if version != PREAMBLE_VERSION:
            return VersionError(
                f"{peer} speaks version {version} of the preamble, this side {PREAMBLE_VERSION}; "
                "install the same major version of transportkit on both sides"
            )
        if role != (Role.LISTENER if self._role is Role.DIALLER else Role.DIALLER):
            return ProtocolError(f"{peer} plays the role {role} towards a {self._role.name.lower()}; check the address")
        if self._refuse_user:
            return AuthenticationError(f"{peer} runs as another user than this side and was refused")
        if refusal:
            return AuthenticationError(f"{peer} runs as another user and refused ours; run both sides as one user")
        if self._key is not None and not flags & _HAS_KEY:
            return AuthenticationError(f"this side has a key and {peer} has none; {same_key}")
        if self._key is None and flags & _HAS_KEY:
            return AuthenticationError(f"{peer} has a key and this side has none; {same_key}")
        return None

    def _judge(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(Role.DIALLER)):
            self._out += _REFUSED + bytes(_PROOF_BYTES)
            raise AuthenticationError(f"the key of {self._peer} is not ours; pass the same `authkey=` on both sides")
        self._out += _ACCEPTED + self._proof(Role.LISTENER)
        self._awaiting = _Awaiting.NOTHING

    def _accept(self, answer: bytes) -> None:
        if answer[:1] != _ACCEPTED:
            raise AuthenticationError(
                f"{self._peer} refused our key; pass the same `authkey=` on both sides, and connect without port "
                "forwarding, proxy or address translation in between"
            )
        if not hmac.compare_digest(answer[1:], self._proof(Role.LISTENER)):
            raise AuthenticationError(f"{self._peer} does not know our key; something else answers there")
        self._awaiting = _Awaiting.NOTHING

    def _proof(self, prover: Role) -> bytes:
        assert self._key is not None
        both = self._own + self._theirs if self._role is Role.DIALLER else self._theirs + self._own
        # All but the address is of fixed length, so no two inputs run together.
        return hmac.new(self._key, _LABEL + bytes([prover]) + both + self._address, hashlib.sha256).digest()
