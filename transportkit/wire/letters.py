"""The messages of a mailbox: letters from an outbox, and an inbox's word on them; which may follow which is not told
here.

A message is a letter, perhaps with fragments of a long body, and a header for each chunk of its tensors: the first in
the letter itself, where there are no fragments. Each frame that a producer may have to take back ends with ``whole``,
which is the last byte of the frame: see `SPOILED`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from transportkit.wire.updates import Chunk

#: The last byte of a frame whose ``whole`` is true, and of one that is taken back while its end has not left yet.
WHOLE, SPOILED = b"\xc3", b"\xc2"

Count = Annotated[int, Meta(ge=0)]


class Mailbox(Struct, frozen=True):
    """What one side of a mailbox says of itself in its hello.

    Args:
        capacity: most messages that may be on their way; the smaller of both sides' is agreed.
        producer: the outbox's identity, hex; empty for an inbox.
        first: number of the first message that is to come over this link.
        typed: the inbox rebuilds a type of its own, so tuples need no mark.
    """

    capacity: Annotated[int, Meta(ge=1)]
    producer: Annotated[str, Meta(max_length=64)] = ""
    first: Annotated[int, Meta(ge=1)] = 1
    typed: bool = False


class Admitted(Struct, frozen=True, tag="admitted"):
    """Inbox to outbox, once, after the agreement: messages may come, and whoever takes them will find them."""


class Letter(Struct, frozen=True, tag="letter"):
    """Outbox to inbox: a message begins, and ends with this frame unless more are announced.

    Args:
        number: of the message, one more than the last, from 1 in each outbox.
        body: the message in MessagePack; its tensors are extension values. The first part, where fragments follow.
        sizes: of each tensor that travels out of band, its bytes.
        fragments: how many more parts of the body follow.
        chunks: how many chunks hold those tensors.
        header: of the first chunk; None where it comes later.
        whole: False takes the message back.
    """

    number: int
    body: bytes
    sizes: tuple[Count, ...] = ()
    fragments: Count = 0
    chunks: Count = 0
    header: Chunk | None = None
    whole: bool = True


class Fragment(Struct, frozen=True, tag="fragment"):
    """Outbox to inbox: the next part of a message's body."""

    number: int
    body: bytes
    whole: bool = True


class Enclosure(Struct, frozen=True, tag="enclosure"):
    """Outbox to inbox: the header of a message's next chunk."""

    number: int
    header: Chunk
    whole: bool = True


class Withdrawn(Struct, frozen=True, tag="withdrawn"):
    """Outbox to inbox: the message that has begun ends here and is not to be delivered.

    Args:
        number: of the message.
        broken: the bytes of a chunk do not come, although `Moved` said so: the backend failed.
    """

    number: int
    broken: bool = False


class Go(Struct, frozen=True, tag="go"):
    """Inbox to outbox: this chunk's bytes may come now, they are read. Only for backends that export nothing."""

    number: int
    seq: int


class Moved(Struct, frozen=True, tag="moved"):
    """Outbox to inbox: this chunk's bytes precede this on the link; or follow at once, where they come otherwise. The
    answer to `Go`."""

    number: int
    seq: int


class Taken(Struct, frozen=True, tag="taken"):
    """Inbox to outbox: this message, and all before it, has been handed out.

    Args:
        seqs: the chunks of this message that are read and whose slots are no longer looked at.
        refused: why it could not be handed out and was dropped; empty where it was not.
    """

    number: int
    seqs: tuple[int, ...] = ()
    refused: str = ""
