"""The outbox's side of a handshake: says hello over a fresh link, and agrees with the inbox as a sender does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.conversation import Conversation
from transportkit.errors import ProtocolError, TransportKitError
from transportkit.handshake import judge, peer_text
from transportkit.mailbox.posting import INBOX, Posting
from transportkit.session.joining import refused
from transportkit.session.opening import Ground, Opening
from transportkit.session.peers import Peer, Peers, unexpected
from transportkit.transport import Match, Reach

if TYPE_CHECKING:
    from transportkit.link import SocketLink
    from transportkit.mailbox.counts import OutboxCounts
    from transportkit.mailbox.settings import Settings
    from transportkit.registry import Choice


class Consumer(Peer):
    """The inbox, as the handshake of its outbox sees it."""

    @property
    def name(self) -> str:
        return self.link.peer if not self.greeted else f"the inbox ({peer_text(self.hello)})"


def call(
    link: SocketLink,
    settings: Settings,
    choice: Choice,
    mailbox: wire.Mailbox,
    inherited: dict[str, object],
    counts: OutboxCounts,
    bound: float,
) -> Posting:
    """Agree with the inbox at the other end of a link, which is closed where that fails.

    Args:
        mailbox: what the outbox says of itself.
        inherited: per backend, what `Transport.inherit` made.
        bound: on the lack of progress in the handshake, in seconds.

    Raises:
        NegotiationError: no backend serves this pair; the text says why for each.
        PeerError: it is no inbox, or it was lost.
        DeadlineError: it was silent.
    """
    peers = Peers(bound)
    greeting = settings.hello("sender", choice, link.kind, mailbox)
    peer = Consumer(INBOX, link, None, Conversation("sender"))
    peers.add(peer)
    peers.on_message = _greet
    try:
        peer.conversation.sent(greeting)
        peers.send(peer, greeting)
        peers.wait(lambda: peer.greeted, lambda: [INBOX], "hello")
        theirs = peer.hello.mailbox
        if theirs is None:
            raise ProtocolError(f"{peer.name} is no inbox; open an `Inbox` there, or use `connect` for a session")
        agreement, lanes = Opening(Ground(peers, greeting, choice, inherited), [INBOX]).run()
        try:
            _wait_admitted(peers)
        except BaseException:
            lanes[0].close()
            raise
        peers.timeout = settings.session.timeout
        return Posting(
            link,
            peers,
            lanes[0],
            agreement,
            min(mailbox.capacity, theirs.capacity),
            counts,
            carried=down_the_link(choice, agreement.backend(), greeting, peer.hello),
        )
    except BaseException as error:
        if isinstance(error, TransportKitError):
            peers.tell(wire.Bye(type(error).__name__, wire.plain(str(error))))
        link.close()
        raise


def down_the_link(choice: Choice, backend: str, sender: wire.Hello, receiver: wire.Hello) -> bool:
    """Whether a backend moves bytes in payload frames of the link itself."""
    match = judge(choice.transports.get(backend), backend, sender, receiver)
    return isinstance(match, Match) and match.reach is Reach.LINK


def _wait_admitted(peers: Peers) -> None:
    """Wait until the inbox knows of this outbox, so that what is put now can be got now."""
    admitted: list[wire.Message] = []

    def take(peer: Peer, message: wire.Message) -> None:
        if not isinstance(message, wire.Admitted) or admitted:
            raise unexpected(message, peer.name)
        admitted.append(message)

    peers.on_message = take
    peers.wait(lambda: bool(admitted), lambda: [INBOX], "admission")


def _greet(peer: Peer, message: wire.Message) -> None:
    peer.conversation.received(message)
    if isinstance(message, wire.Refusal):
        raise refused(message, peer.name)
    if not isinstance(message, wire.Hello):
        raise ProtocolError(f"{peer.name} sent {type(message).__name__.lower()} before its hello")
    peer.greet(message)
