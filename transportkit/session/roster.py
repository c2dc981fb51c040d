"""Who is in an update, as its sender sees it: what the receivers have said of it, and what their loss means."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.errors import PeerClosedError, PeerFailedError, ProtocolError, TransportKitError
from transportkit.session.lane import acknowledge
from transportkit.session.peers import code_of

if TYPE_CHECKING:
    from transportkit.session.lane import Lane
    from transportkit.session.peers import Peer, Peers

_log = logging.getLogger("transportkit")


class Roster:
    """The receivers of one update.

    Args:
        update: number of the update in the session.
        peers: the receivers; those that are lost are removed from it.
        lanes: the session's lanes; one that loses its last receiver is closed and removed from it.
        forgiving: whether the update goes on for the others where one receiver is lost or fails.
    """

    def __init__(self, update: int, peers: Peers, lanes: list[Lane], *, forgiving: bool) -> None:
        self._update = update
        self._peers = peers
        self._lanes = lanes
        self.forgiving = forgiving
        self.begun: set[int] = set()
        """To whom the update was announced."""
        self.present: set[int] = set()
        self.accepted: set[int] = set()
        self.applied: set[int] = set()
        self.failed: dict[int, wire.Failed] = {}
        self.lost: dict[int, str] = {}
        """Who is no more in the session, and why."""
        self.waited: dict[int, float] = {}
        """Seconds spent waiting for each that is no more in the session."""
        self.totals: dict[int, tuple[int, int]] = {}
        """To whom the end was announced, and after how many chunks and bytes."""
        self.stranded_late: set[int] = set()
        """Whose backend failed when the last update was over already."""
        self._error: TransportKitError | None = None

    @property
    def members(self) -> frozenset[int]:
        """The receivers that the update is still meant for."""
        return self._peers.numbers - self.failed.keys()

    def here(self, number: int) -> bool:
        """Whether this receiver is not lost."""
        return self._peers.find(number) is not None

    @property
    def troubled(self) -> bool:
        """Whether `settle`, or a reroute, is due before anything else is waited for."""
        if self.failed and (not self.forgiving or self._deserted):
            return True
        return any(peer.gone is not None or peer.stranded is not None for peer in self._peers)

    @property
    def _deserted(self) -> bool:
        """Whether the update reaches nobody."""
        return not self.members and not self.applied

    def settle(self) -> None:
        """Part with those that are gone.

        Raises what made one of them go, or fail, unless the update is to go on for the others and there are some.
        """
        for peer in [peer for peer in self._peers if peer.gone is not None]:
            error = peer.gone
            assert error is not None
            between = peer.number not in self.begun and isinstance(error, PeerClosedError)
            if not (self.forgiving or between or peer.number in self.applied):
                raise error
            self._error = self._error or error
            if between or peer.number in self.applied:
                _log.debug("%s has left: %s", peer.name, error)
            else:
                _log.warning("update %s goes on without %s: %s", self._update, peer.name, error)
                self.lost[peer.number] = str(error)
            self._part(peer, error)
        if self.failed and (not self.forgiving or self._deserted):
            raise self._failure(*next(iter(self.failed.items())))
        if self._deserted:
            assert self._error is not None
            raise self._error

    def take(self, peer: Peer, message: wire.Message) -> bool:
        """What a receiver says during the update; whether that is progress."""
        number = peer.number
        match message:
            case wire.Ack():
                acknowledge(self._lanes, message, number)
            case wire.Present() if message.update == self._update and number not in self.present:
                self.present.add(number)
                peer.ready = False  # it may have said so once more before it saw the update
            case wire.Accept() if message.update == self._update and number not in self.accepted:
                self.accepted.add(number)
            case wire.Stranded() if message.update == self._update and self._may_strand(peer):
                peer.conversation.received(message)
                peer.stranded = message
            case wire.Applied() if message.update == self._update and number in self.totals.keys() - self.failed:
                if (message.chunks, message.nbytes) != self.totals[number]:
                    raise ProtocolError(
                        f"{peer.name} applied {message.chunks} chunks and {message.nbytes} bytes of update "
                        f"{self._update}, {' and '.join(map(str, self.totals[number]))} were sent"
                    )
                self.applied.add(number)
            case wire.Failed() if message.update == self._update and number not in self.failed:
                if self.forgiving:
                    _log.warning("update %s goes on, but not for %s: %s", self._update, peer.name, message.text)
                self.failed[number] = message
            case wire.Present() | wire.Accept() | wire.Applied() | wire.Failed() if message.update < self._update:
                return False
            case wire.Stranded() if message.update < self._update:
                peer.conversation.received(message)
                self.stranded_late.add(number)
            case _:
                raise ProtocolError(f"{peer.name} sent {type(message).__name__.lower()}, which may not come now")
        return True

    def _may_strand(self, peer: Peer) -> bool:
        """Whether chunks are under way to a receiver, or passed over by it."""
        taking = peer.number in self.accepted or peer.number in self.failed
        return taking and peer.number not in self.applied and peer.stranded is None

    @property
    def torn(self) -> tuple[str, ...]:
        """The receivers that said that their target is half written."""
        names = {n: peer.name for n in self.failed if (peer := self._peers.find(n)) is not None}
        return tuple(names.get(n, f"receiver {n}") for n, failed in self.failed.items() if failed.torn)

    def losses(self) -> dict[int, str]:
        """Why the update did not reach each receiver that it did not reach."""
        return self.lost | {n: f"{failed.code}: {failed.text}" for n, failed in self.failed.items()}

    def _failure(self, number: int, failed: wire.Failed) -> PeerFailedError:
        peer = self._peers.find(number)
        name = f"receiver {number}" if peer is None else peer.name
        return PeerFailedError(
            f"{name} failed: {failed.code}: {failed.text}", peer=name, code=failed.code, text=failed.text
        )

    def _part(self, peer: Peer, error: TransportKitError) -> None:
        try:
            peer.link.try_send(wire.encode(wire.Bye(code_of(error), wire.plain(str(error)))))
        except TransportKitError:
            pass
        self.waited[peer.number] = peer.waited
        self._peers.remove(peer)
        for lane in [lane for lane in self._lanes if peer.number in lane.receivers]:
            try:
                lane.drop(peer.number)
            except TransportKitError as failure:
                _log.warning("backend %s, parting with %s: %s", lane.backend, peer.name, failure)
            if not lane.receivers:
                self._lanes.remove(lane)
                lane.close()
