"""`TamperedLink`: a link on which messages are changed on their way, for hostile headers in a real session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transportkit import wire
from transportkit.link import Link
from transportkit.wire import CONTROL_FRAME_LIMIT

if TYPE_CHECKING:
    from transportkit.deadline import Deadline

Change = Callable[[wire.Message], "wire.Message | bytes | None"]
"""Called with each message before it leaves; returns what leaves instead, None for nothing."""


class TamperedLink(Link):
    """A link around another one that changes what is sent.

    Args:
        link: carries the frames.
        change: see `Change`. May be set later; until then nothing is changed.
    """

    def __init__(self, link: Link, change: Change | None = None) -> None:
        self._link = link
        self.change = change
        self.kind, self.path = link.kind, link.path
        self.peer, self.local_host = link.peer, link.local_host

    def send(self, body: bytes, deadline: Deadline) -> None:
        changed = self._changed(body)
        if changed is not None:
            self._link.renew_on_progress = self.renew_on_progress
            self._link.send(changed, deadline)

    def send_payload(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        self._link.renew_on_progress = self.renew_on_progress
        self._link.send_payload(parts, deadline)

    def try_send(self, body: bytes) -> bool:
        changed = self._changed(body)
        return True if changed is None else self._link.try_send(changed)

    def recv(self, deadline: Deadline, limit: int = CONTROL_FRAME_LIMIT) -> bytes:
        return self._link.recv(deadline, limit)

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        return self._link.recv_payload(limit, deadline)

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        self._link.recv_payload_into(view, deadline)

    def poll(self) -> bool:
        return self._link.poll()

    def kind_at_hand(self) -> int | None:
        return self._link.kind_at_hand()

    def fileno(self) -> int:
        return self._link.fileno()

    def events(self) -> int:
        return self._link.events()

    def abort(self) -> None:
        self._link.abort()

    def close(self) -> None:
        self._link.close()

    def _changed(self, body: bytes) -> bytes | None:
        if self.change is None:
            return body
        message = self.change(wire.decode(body))
        return message if message is None or isinstance(message, bytes) else wire.encode(message)
