"""What a link has accepted and not written yet; waiting for room, reading and errors are the link's."""

from __future__ import annotations

import collections
import itertools
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Most buffers of one `sendmsg` (Linux takes 1024).
VECTOR = 512


class Outgoing:
    """Bytes on their way into a non-blocking socket, in two parts of which the first is written first.

    Control frames are copied, since their senders do not wait. What was begun is not: it stays in its owner's memory.

    Args:
        sock: a stream socket.

    Attributes:
        backlog: bytes of what was begun that are still to be written.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._left = bytearray()
        self._held = 0  # bytes of it when `hold` took the last frame
        self._begun: collections.deque[memoryview] = collections.deque()
        self.backlog = 0

    def __bool__(self) -> bool:
        """Whether anything is still to be written."""
        return bool(self._left or self._begun)

    def write(self) -> bool:
        """Write as far as there is room; whether nothing is left. Raises `OSError`."""
        if not self._left and not self._begun:
            return True
        try:
            while self._left:
                sent = self._sock.send(self._left, socket.MSG_NOSIGNAL)
                del self._left[:sent]
            while self._begun:
                sent = self._sock.sendmsg(list(itertools.islice(self._begun, VECTOR)), (), socket.MSG_NOSIGNAL)
                self._written(sent)
        except BlockingIOError:
            return False
        return True

    def _written(self, sent: int) -> None:
        self.backlog -= sent
        while sent:
            view = self._begun.popleft()
            if sent < view.nbytes:
                self._begun.appendleft(view[sent:])
                break
            sent -= view.nbytes

    def add(self, rest: bytes) -> None:
        """The rest of a control frame, or a whole one; nothing that was begun may be left."""
        self._left += rest

    def hold(self, frame: bytes) -> None:
        """A control frame that `withdraw` may take back; nothing may be left but control frames."""
        self._left += frame
        self._held = len(self._left)

    def begin(self, views: Iterable[memoryview]) -> None:
        """Parts of a frame, each contiguous, of bytes and not empty."""
        for view in views:
            self._begun.append(view)
            self.backlog += view.nbytes

    def withdraw(self, end: bytes) -> bool:
        """Take back the frame that `hold` took: True where nothing of it had left, else its rest ends with ``end``."""
        if len(self._left) == self._held:
            self._left.clear()
            return True
        self._left[-len(end) :] = end
        return False

    def clear(self) -> None:
        """Forget all of it."""
        self._left.clear()
        self._begun.clear()
        self.backlog = 0
