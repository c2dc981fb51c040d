"""Mailboxes: messages with tensors out of band, from any number of producers to one consumer.

The path of a message: `outbox` -> `encoding` -> `posting` -> (backend) -> `producer` -> `incoming` -> `decoding` ->
`inbox`, whose `intake` watches all producers. The way to an agreement: `calling` on the outbox's side, `admission` on
the inbox's, both over the session's handshake. How links, lanes and chunks work is not said here: they are those of
sessions.
"""

from __future__ import annotations

from transportkit.mailbox.counts import InboxStats, OutboxStats
from transportkit.mailbox.inbox import Inbox
from transportkit.mailbox.mail import Mail, Postmark
from transportkit.mailbox.outbox import Outbox
from transportkit.mailbox.outofband import OutOfBand, OutOfBandStats

__all__ = ["Inbox", "InboxStats", "Mail", "OutOfBand", "OutOfBandStats", "Outbox", "OutboxStats", "Postmark"]
