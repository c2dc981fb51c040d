"""A pair of which one end has stopped: the maker for tests of deadlines, back-pressure, abort and loss of the peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import attrs

from transportkit.deadline import Deadline
from transportkit.testing.calls import Call
from transportkit.testing.lanes import DirectLane

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.testing.wirings import WiringDouble
    from transportkit.transport import Exporter, Importer, Transport
    from transportkit.wire import Chunk

#: Where a pair can stall: the call that is made, while the other end does nothing more.
Stall = Literal["exporter.connect", "importer.connect", "importer.open", "exporter.publish"]

STALLS: tuple[Stall, ...] = ("exporter.connect", "importer.connect", "importer.open", "exporter.publish")


@attrs.frozen
class Outcome:
    """How a call on a stalled pair ended.

    Args:
        error: what it raised; None where it returned, as the calls of mapped memory do.
        seconds: how long it took.
    """

    error: BaseException | None
    seconds: float


class StalledPair:
    """One exporter and one importer, of which the other one has stopped; a context manager.

    Args:
        transport: the backend.
        at: the call that this end makes, and in which it can get no answer.
        device: where both ends' tensors are.
        chunk_bytes: size of a slot, in bytes; large, so that the peer's failure to read is felt soon.
        address: the path of a unix link's socket; empty for none.
    """

    def __init__(
        self,
        transport: type[Transport],
        at: Stall,
        *,
        device: str = "cpu",
        chunk_bytes: int = 1 << 20,
        address: str = "",
    ) -> None:
        self.at = at
        self.lane = DirectLane(transport, chunk_bytes=chunk_bytes, slots=2, device=device, address=address)
        try:
            if at.endswith("connect"):
                self.lane.invite()
            else:
                self.lane.connect()
        except BaseException:
            self.lane.close()
            raise

    @property
    def end(self) -> Exporter | Importer:
        """The end that still works."""
        return self.lane.exporter if self.at.startswith("exporter") else self.lane.importers[0]

    @property
    def wiring(self) -> WiringDouble:
        """The wiring of the end that still works."""
        return self.lane.loopback.exporter if self.at.startswith("exporter") else self.lane.loopback.importers[0]

    def start(self, seconds: float) -> Call[None]:
        """Make the call, with a deadline of so many seconds, on a thread of its own."""
        return Call(self._work(), Deadline(seconds, f"answer to {self.at}"))

    def run(self, seconds: float, grace: float) -> Outcome:
        """Make the call, and wait for its end. Raises `HungError` when it is not over ``grace`` after its deadline."""
        call = self.start(seconds)
        error = call.error(seconds + grace)
        return Outcome(error, call.seconds)

    def abort(self) -> None:
        """End this end from outside, as a session's ``abort`` does: the link first, then the backend's end."""
        self.wiring.abort()
        self.end.abort()

    def lose(self) -> None:
        """The end that has stopped dies."""
        self.wiring.lose()

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> Callable[[Deadline], None]:
        lane = self.lane
        match self.at:
            case "exporter.connect":
                return lane.exporter.connect
            case "importer.connect":
                return lane.importers[0].connect
            case "importer.open":
                (header,) = lane.pack(0, bytes(100))

                def read(deadline: Deadline) -> None:
                    lane.imports[0].open(header, deadline)

                return read
            case "exporter.publish":

                def write(deadline: Deadline) -> None:
                    for header in self._unread():
                        lane.exporter.publish(0, header, deadline)

                return write

    def _unread(self) -> list[Chunk]:
        """More chunks than any buffer between the two ends holds."""
        return [lane_header for _ in range(16) for lane_header in self.lane.pack(0, bytes(self.lane.terms.chunk_bytes))]
