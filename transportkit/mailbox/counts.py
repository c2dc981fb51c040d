"""What a mailbox has counted; nothing is decided here."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class OutboxStats:
    """A look at an outbox's counters.

    Args:
        messages: that were put.
        bytes_inline: of tensors that travelled in their messages' bodies.
        bytes_out_of_band: of tensors that travelled in chunks.
        waits: how often `Outbox.put` had to wait for the inbox ...
        wait_seconds: ... and for how long, all together.
        withdrawn: messages of which a part had left when `Outbox.put` gave up; none of them is delivered.
        refused: messages that the inbox dropped, because they were not of its type, say.
        lost: messages that had not been taken when their inbox was lost; nobody knows what became of them.
        inline_fallbacks: tensors that travelled in the body because the backend failed.
        in_flight: messages that are put and not taken yet.
        slots_in_use: slots that hold a chunk which has not been read yet.
        connections: how many inboxes were agreed with, one after another.
    """

    messages: int = 0
    bytes_inline: int = 0
    bytes_out_of_band: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    withdrawn: int = 0
    refused: int = 0
    lost: int = 0
    inline_fallbacks: int = 0
    in_flight: int = 0
    slots_in_use: int = 0
    connections: int = 0


@attrs.frozen(kw_only=True)
class InboxStats:
    """A look at an inbox's counters.

    Args:
        messages: that were handed out.
        bytes_inline: of tensors that travelled in their messages' bodies.
        bytes_out_of_band: of tensors that travelled in chunks.
        waits: how often `Inbox.get` had to wait ...
        wait_seconds: ... and for how long, all together.
        dropped: messages that were not handed out, by the reason: ``"producer lost"``, ``"withdrawn"``, ``"refused"``
            (not of the type), ``"corrupt"``, ``"closed"`` (complete when this inbox was closed).
        connected: producers that were agreed with ...
        closed: ... that left in order ...
        lost: ... and that died, failed or broke the protocol.
        failures: connections that came to nothing before they were agreed.
        producers: that are there now.
        slots_in_use: chunks that are open or leased now.
    """

    messages: int = 0
    bytes_inline: int = 0
    bytes_out_of_band: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    dropped: dict[str, int] = attrs.field(factory=dict)
    connected: int = 0
    closed: int = 0
    lost: int = 0
    failures: int = 0
    producers: int = 0
    slots_in_use: int = 0


@attrs.define
class OutboxCounts:
    """The counters of an outbox as they grow."""

    messages: int = 0
    bytes_inline: int = 0
    bytes_out_of_band: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    withdrawn: int = 0
    refused: int = 0
    lost: int = 0
    inline_fallbacks: int = 0
    connections: int = 0

    def snapshot(self, *, in_flight: int, slots_in_use: int) -> OutboxStats:
        return OutboxStats(**attrs.asdict(self), in_flight=in_flight, slots_in_use=slots_in_use)


@attrs.define
class InboxCounts:
    """The counters of an inbox as they grow."""

    messages: int = 0
    bytes_inline: int = 0
    bytes_out_of_band: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    dropped: dict[str, int] = attrs.field(factory=dict)
    connected: int = 0
    closed: int = 0
    lost: int = 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def snapshot(self, *, failures: int, producers: int, slots_in_use: int) -> InboxStats:
        counts = attrs.asdict(self, recurse=False) | {"dropped": dict(self.dropped)}  # it may grow meanwhile
        return InboxStats(**counts, failures=failures, producers=producers, slots_in_use=slots_in_use)
