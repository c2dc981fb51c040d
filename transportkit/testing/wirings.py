"""A double of what the core hands to exporters and importers: links in memory, whose peers can be lost at will.

`Loopback` makes one `WiringDouble` for an exporter and one for each of its importers, all in this process. They wait
and raise as the core's own wiring does, and need no session.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING, Self

from transportkit.errors import ClosedError, PeerLostError, ProtocolError, TransportKitError
from transportkit.site import read_site
from transportkit.transport import Wiring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msgspec import Raw

    from transportkit.deadline import Deadline
    from transportkit.wire import Site

#: How often a wait in memory looks whether its peer is still there, in seconds.
_TURN = 0.02


class WiringDouble(Wiring):
    """One end's surroundings.

    Args:
        site: this side's site.
        channels: for each receiver the frames that go there, or, at an importer, those that come.
        address: the path of the link's unix socket, empty where there is none.
        inherited: what `Transport.inherit` returned.
    """

    def __init__(
        self, site: Site, channels: dict[int, _Channel], *, address: str = "", inherited: object | None = None
    ) -> None:
        self.site = site
        self.address = address
        self.inherited = inherited
        self.sent = 0
        """How many payload frames have been sent."""
        self.allow_plaintext = True
        self.hear: Callable[[int, Raw], None] | None = None
        """This end's `Exporter.hear`, or its `Importer.hear` after its number; signals wait until it is set."""
        self.ends: dict[int, WiringDouble] = {}
        """Where signals go, by the number of the receiver."""
        self._signals: collections.deque[tuple[int, Raw]] = collections.deque()
        self._channels = channels
        self._error: TransportKitError | None = None
        self._news = -1
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fail(self, error: TransportKitError) -> None:
        """Every running and later wait of this end raises this. From any thread."""
        self._error = error
        os.eventfd_write(self._news, 1)

    def wake(self) -> None:
        """The link has something to say that ends no wait. From any thread."""
        os.eventfd_write(self._news, 1)

    def lose(self) -> None:
        """This end's peer is gone, as far as the link knows."""
        self.fail(PeerLostError("the peer hung up; look there for why it ended", peer="the peer"))

    def abort(self) -> None:
        """What a session does to its link when it is aborted, before it aborts the backend's end."""
        self.fail(ClosedError("the link was aborted"))

    def close(self) -> None:
        """Free the descriptor. Idempotent."""
        if self._news >= 0:
            os.close(self._news)
            self._news = -1

    def __del__(self) -> None:
        self.close()  # a test that fails may not have come to it

    def check(self) -> None:
        while self.hear is not None and self._signals:
            self.hear(*self._signals.popleft())
        if self._error is not None:
            raise self._error

    def signal(self, receiver: int, data: Raw, deadline: Deadline) -> None:
        self.check()
        end = self.ends[receiver]
        end._signals.append((receiver, data))
        with contextlib.suppress(OSError):  # it is closed, and hears nothing more
            os.eventfd_write(end._news, 1)

    def wait_readable(self, fileno: int, deadline: Deadline) -> None:
        poller = select.poll()
        poller.register(fileno, select.POLLIN)
        poller.register(self._news, select.POLLIN)
        while True:
            self.check()
            left = deadline.remaining()
            ready = dict(poller.poll(None if left is None else left * 1000))
            if self._news in ready and self._error is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news)
            self.check()
            if fileno in ready:
                return
            deadline.check()

    def send_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        self.check()
        self._channels[receiver].put(b"".join(parts), deadline, self)
        self.sent += 1

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        frame = self._next(deadline)
        if len(frame) > limit:
            raise ProtocolError(f"the peer announced a frame of {len(frame)} bytes where at most {limit} are allowed")
        return frame

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        frame = self._next(deadline)
        if len(frame) != view.nbytes:
            raise ProtocolError(f"the peer sent a payload of {len(frame)} bytes where {view.nbytes} were agreed")
        if frame:
            view.cast("B")[:] = frame

    def _next(self, deadline: Deadline) -> bytes:
        (channel,) = self._channels.values()
        return channel.get(deadline, self)


class Loopback:
    """The wirings of one exporter and its importers; a context manager.

    Args:
        receivers: the numbers of the importers.
        kind: what the sites say of the link: ``pair``, ``unix``, ``tcp`` or ``custom``.
        address: the path of the link's unix socket; empty where there is none.
        inherited: what `Transport.inherit` returned, for all ends.
        capacity: bytes that a link takes in before its reader reads.

    Attributes:
        exporter: the exporter's wiring.
        importers: each importer's wiring, by its number.
    """

    def __init__(
        self,
        receivers: Sequence[int] = (0,),
        *,
        kind: str = "pair",
        address: str = "",
        inherited: object | None = None,
        capacity: int = 1 << 18,
    ) -> None:
        site = read_site(kind)
        channels = {number: _Channel(capacity) for number in receivers}
        self.exporter = WiringDouble(site, channels, address=address, inherited=inherited)
        self.importers = {
            number: WiringDouble(site, {number: channel}, address=address, inherited=inherited)
            for number, channel in channels.items()
        }
        self.exporter.ends = self.importers
        for number, wiring in self.importers.items():
            wiring.ends = {number: self.exporter}

    def feed(self, receiver: int, frame: bytes) -> None:
        """Have a payload frame come to an importer that no exporter has sent."""
        self.importers[receiver]._channels[receiver].push(frame)

    def close(self) -> None:
        for wiring in (self.exporter, *self.importers.values()):
            wiring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Channel:
    """Payload frames on their way to one receiver."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: collections.deque[bytes] = collections.deque()
        self._changed = threading.Condition()

    def put(self, frame: bytes, deadline: Deadline, wiring: WiringDouble) -> None:
        with self._changed:
            while self._frames and sum(map(len, self._frames)) + len(frame) > self._capacity:
                deadline.check()
                self._changed.wait(deadline.remaining(cap=_TURN))
                wiring.check()
            self._frames.append(frame)
            self._changed.notify_all()

    def push(self, frame: bytes) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, deadline: Deadline, wiring: WiringDouble) -> bytes:
        with self._changed:
            while not self._frames:  # what came before the peer was lost is still delivered
                wiring.check()
                deadline.check()
                self._changed.wait(deadline.remaining(cap=_TURN))
            self._changed.notify_all()
            return self._frames.popleft()
