"""The messages of a handshake, from the first hello to the agreement; which may follow which is not told here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from transportkit.wire.letters import Mailbox
from transportkit.wire.terms import (
    EMPTY,
    PROTOCOL_NEWEST,
    PROTOCOL_OLDEST,
    Agreement,
    Limits,
    Offer,
    Role,
    Site,
    Terms,
    Unavailable,
    Wishes,
)


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
    intent: Literal["transfer", "inspect", "mail"] = "transfer"
    byteorder: Literal["little", "big"] = "little"
    """Of the elements in memory; tensors travel as they lie there."""
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    """How long this side waits without progress, in seconds; the other says more often than that that it is alive."""
    mailbox: Mailbox | None = None
    """Of an outbox or inbox; None in a session."""


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


class Signal(Struct, frozen=True, tag="signal"):
    """Either way, while the backend's two ends connect: a word of the backend's own, which needs no port for it."""

    attempt: int
    receiver: int
    data: Raw = EMPTY


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
