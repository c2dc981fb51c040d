"""Taking in receivers that arrived late: a handshake with them alone, which disturbs nobody who is there already."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.errors import DeadlineError, NegotiationError, PeerError, TransportKitError
from transportkit.session.opening import Ground, Opening
from transportkit.session.peers import code_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transportkit.session.lane import Lane
    from transportkit.session.peers import Peer

_log = logging.getLogger("transportkit")


def admit(ground: Ground, newcomers: Iterable[Peer], first_lane: int) -> tuple[wire.Agreement, list[Lane]] | None:
    """Agree with receivers that arrived late; those that are lost meanwhile cost only themselves.

    Args:
        newcomers: whose hellos have come.
        first_lane: number of their first lane.

    Returns:
        Their agreement and lanes; None when all of them were lost.

    Raises:
        NegotiationError: no backend serves any of them. One of several that cannot be served is dismissed and logged.
    """
    numbers = {peer.number for peer in newcomers}
    refused: NegotiationError | None = None
    for number in sorted(numbers):
        outcome = Opening(ground, [number]).negotiate()
        if isinstance(outcome, wire.Refusal):
            _log.warning("%s is not admitted: %s", ground.peers[number].name, outcome.text)
            refused = NegotiationError(outcome.text, agreement=outcome.agreement)
            _dismiss(ground, {number}, refused)
            numbers.discard(number)
    while numbers:
        try:
            agreed = Opening(ground, numbers, first_lane=first_lane, forgiving=True).run()
            for number in numbers - {each.receiver for each in agreed[0].assignments}:
                error = ground.peers[number].gone
                assert error is not None
                _log.warning("%s is not admitted: %s", ground.peers[number].name, error)
                _dismiss(ground, {number}, error)
            return agreed
        except BaseException as error:
            gone = {n for n in numbers if (peer := ground.peers.find(n)) is not None and peer.gone is not None}
            if not gone or not isinstance(error, PeerError | DeadlineError):
                _dismiss(ground, numbers, error)
                raise
            _log.warning("a receiver was lost before it was admitted: %s", error)
            _dismiss(ground, gone, error)
            numbers -= gone
    if refused is not None:
        raise refused
    return None


def _dismiss(ground: Ground, numbers: Iterable[int], error: BaseException) -> None:
    for number in numbers:
        peer = ground.peers.find(number)
        if peer is not None:
            try:
                peer.link.try_send(wire.encode(wire.Refusal(code_of(error), wire.plain(str(error)))))
            except TransportKitError:
                pass
            ground.peers.remove(peer)
