"""What the core hands to exporters and importers: payload frames and a watch on the links."""

from __future__ import annotations

import contextlib
import select
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, DeadlineError, PeerLostError
from transportkit.link import CONTROL
from transportkit.link import wait as wait_links
from transportkit.transport import Wiring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from msgspec import Raw

    from transportkit.deadline import Deadline
    from transportkit.link import Link
    from transportkit.wire import Site


class NoPayloadError(BackendError):
    """The sender said something else where the bytes of a chunk were due; what that is explains it."""


class LinkWiring(Wiring):
    """Wiring over the links of one lane.

    Args:
        site: this side's site.
        links: the link of each receiver of the lane; an importer has one.
        inherited: what `Transport.inherit` made before the process started, or None.
        check: takes in what has come on the links and raises where the lane cannot go on.
        signal: sends a signal of the handshake that is under way to a receiver, or, from one, to the sender.
        side_by_side: whether there are receivers that a write to one of them would hold up.
        allow_plaintext: what this side's user said.
    """

    def __init__(
        self,
        site: Site,
        links: dict[int, Link],
        inherited: object | None,
        check: Callable[[], None],
        signal: Callable[[int, Raw], None] | None = None,
        *,
        side_by_side: Callable[[], bool] = lambda: False,
        allow_plaintext: bool = False,
    ) -> None:
        self.site = site
        self.allow_plaintext = allow_plaintext
        self._signal = signal
        self._side_by_side = side_by_side
        self.inherited = inherited
        self.address = next((link.path for link in links.values() if link.path), "")
        self._links = links
        self._check = check

    def check(self) -> None:
        self._check()

    def wait_readable(self, fileno: int, deadline: Deadline) -> None:
        poller = select.poll()
        poller.register(fileno, select.POLLIN)
        while True:
            self._check()
            if poller.poll(0):
                return
            wait_links(list(self._links.values()), deadline, [fileno])

    def local_host(self, receiver: int) -> str:
        return self._links[receiver].local_host

    def signal(self, receiver: int, data: Raw, deadline: Deadline) -> None:
        if self._signal is None:
            raise BackendError("signals travel in the handshake only")
        self._signal(receiver, data)

    def send_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        with self._writing():
            self._links[receiver].send_payload(parts, deadline)

    def post_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        link = self._links[receiver]
        with self._writing():
            (link.begin_payload if self._side_by_side() else link.send_payload)(parts, deadline)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as error:  # half a payload may be out: the link is what failed, no other backend helps
            raise DeadlineError(str(error), silent=True) from error
        except PeerLostError:
            self._check()  # it takes nothing more, yet what it said before it went may say why
            raise

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        return self._payload_link(deadline).recv_payload(limit, deadline)

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        self._payload_link(deadline).recv_payload_into(view, deadline)

    def _payload_link(self, deadline: Deadline) -> Link:
        """The link, with its next frame at hand; what the sender says instead of a payload is raised."""
        (link,) = self._links.values()
        while not link.poll():
            wait_links([link], deadline)
        if link.kind_at_hand() == CONTROL:
            self._check()
            raise NoPayloadError("the sender sent another message where the bytes of a chunk were due")
        return link
