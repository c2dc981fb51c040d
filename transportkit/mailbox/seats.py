"""Outboxes that a child process inherits: one end of a socket pair, and what backends hand on; listens to nothing."""

from __future__ import annotations

import multiprocessing.context
import os
import weakref
from typing import TYPE_CHECKING, Any

from transportkit.errors import ClosedError, UsageError
from transportkit.inheritance import give_up
from transportkit.link import SocketLink
from transportkit.mailbox.outbox import Outbox

if TYPE_CHECKING:
    import socket

    from transportkit.deadline import Deadline
    from transportkit.mailbox.posting import Posting
    from transportkit.mailbox.settings import Settings

_unused: weakref.WeakSet[SeatOutbox] = weakref.WeakSet()
"""Every seat that this process has, or had from its parent, and has not used."""


class SeatOutbox(Outbox):
    """An outbox that connects at its first use; can be inherited until then."""

    def __init__(self, sock: socket.socket, wanted: Settings, inherited: dict[str, object]) -> None:
        self.made_by = os.getpid()
        """The process that has the inbox."""
        self._sock: socket.socket | None = sock
        self._prepare(wanted, "pair", reconnect=False)
        self._inherited = inherited
        _unused.add(self)

    def release(self) -> None:
        """The child that has inherited it has come: close this process's copy, unless it was used right here."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
            self._closed = self._closed or "it was given to a child process"
        _unused.discard(self)

    def close(self, timeout: float | None = None) -> None:
        if self._sock is not None:  # unused
            self.release()
        super().close(timeout)

    def _check(self) -> None:
        if self._sock is not None:
            self._pid = os.getpid()  # a forked child may be the first to use it
        super()._check()

    def _link(self, deadline: Deadline, bound: float) -> SocketLink:
        sock, self._sock = self._sock, None
        if sock is None:
            raise ClosedError(f"this Outbox is closed: {self._closed or 'its inherited link is used up'}")
        _unused.discard(self)
        for seat in list(_unused):
            if seat.made_by != os.getpid():  # those of other children of one parent, which hold their links open
                seat.release()
        return SocketLink.over(
            sock, "pair", f"the inbox of process {self.made_by}", user_timeout=self._settings.session.timeout
        )

    def _connect(self, deadline: Deadline) -> Posting:
        if self.made_by != os.getpid():
            give_up(self._inherited, "receiver")
        self._opening = True  # there is no second link to try it on
        try:
            return super()._connect(deadline)
        finally:
            self._opening = False

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            multiprocessing.context.assert_spawning(self)
        except RuntimeError as error:
            raise UsageError("an inherited Outbox goes to a process as an argument while that is started") from error
        if self._sock is None:
            raise UsageError("this Outbox is in use; hand it to the child before its first use")
        return _inherit, (self._sock, self._settings, self._inherited, self.made_by)


def _inherit(sock: socket.socket, wanted: Settings, inherited: dict[str, object], made_by: int) -> SeatOutbox:
    outbox = SeatOutbox(sock, wanted, inherited)
    outbox.made_by = made_by
    return outbox
