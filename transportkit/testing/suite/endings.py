"""Tests of how a backend's ends end, without a session: close, abort, deadlines, loss of the peer, and what is left."""

from __future__ import annotations

import gc

import pytest

from transportkit.errors import DeadlineError, PeerLostError, TransportKitError
from transportkit.testing.calls import HungError, bounded
from transportkit.testing.leftovers import nothing_left, resident
from transportkit.testing.stalls import STALLS, Stall, StalledPair
from transportkit.testing.suite.contract import noise
from transportkit.testing.suite.subject import Subject

#: Seconds that a stalled call is given.
SHORT = 0.4


def ours(error: BaseException | None) -> bool:
    """Whether an error may leave a backend."""
    return isinstance(error, TransportKitError)


class Endings(Subject):
    """Close, abort, deadlines, loss of the peer, and what is left."""

    def stalled(self, at: Stall) -> StalledPair:
        self.in_one_process()
        return StalledPair(self.subject(), at, device=self.device)

    @pytest.mark.parametrize("at", STALLS)
    def test_a_stalled_peer_costs_no_more_than_the_deadline(self, at: Stall) -> None:
        with nothing_left(), self.stalled(at) as pair:
            outcome = pair.run(SHORT, self.notice)
            assert outcome.error is None or isinstance(outcome.error, DeadlineError), repr(outcome.error)
            assert outcome.error is None or outcome.seconds >= SHORT * 0.9, "it gave up before its deadline"

    @pytest.mark.parametrize("at", STALLS)
    def test_abort_frees_a_call_from_another_thread(self, at: Stall) -> None:
        with nothing_left(), self.stalled(at) as pair:
            call = pair.start(self.patience)
            call.wait(0.1)
            bounded(self.notice, pair.abort)
            error = call.error(self.notice)
            assert error is None or ours(error), repr(error)

    @pytest.mark.parametrize("at", ["exporter.connect", "importer.connect"])
    def test_abort_alone_ends_a_wait_in_connect(self, at: Stall) -> None:
        with nothing_left(), self.stalled(at) as pair:
            call = pair.start(self.patience)
            call.wait(0.1)
            bounded(self.notice, pair.end.abort)
            try:
                error = call.error(self.notice)
            except HungError as hung:
                raise HungError(
                    f"`abort` did not end `{at}`: it must wake whatever waits there for the other end, also where "
                    f"nothing is wrong with the links (shut down the socket that is waited for, say); {hung}"
                ) from hung
            assert error is None or ours(error), repr(error)

    @pytest.mark.parametrize("at", STALLS)
    def test_a_lost_peer_is_noticed(self, at: Stall) -> None:
        with nothing_left(), self.stalled(at) as pair:
            call = pair.start(self.patience)
            call.wait(0.1)
            pair.lose()
            error = call.error(self.notice)
            assert error is None or isinstance(error, PeerLostError), repr(error)

    @pytest.mark.parametrize("steps", ["made", "invited", "connected", "used"])
    def test_close_is_idempotent_at_any_time(self, steps: str) -> None:
        with nothing_left():
            lane = self.lane()
            if steps == "invited":
                lane.invite()
            elif steps != "made":
                lane.connect()
            if steps == "used":
                lane.move(0, noise(10, seed=0))
            for _ in range(2):
                for end in lane.ends:
                    end.close()
                    end.abort()
            lane.close()
            lane.close()

    def test_nothing_works_after_an_abort(self) -> None:
        with nothing_left(), self.lane() as lane:
            lane.connect()
            (header,) = lane.pack(0, noise(10, seed=0))
            for end in lane.ends:
                end.abort()
                end.abort()
            for wiring in (lane.loopback.exporter, *lane.loopback.importers.values()):
                wiring.abort()
            for step in (
                lambda: lane.exporter.publish(0, header, lane.deadline()),
                lambda: lane.imports[0].open(header, lane.deadline()),
            ):
                try:
                    bounded(self.notice, step)
                except TransportKitError:
                    continue

    def test_an_abort_before_connect_ends_it(self) -> None:
        for index in range(2):
            with nothing_left(), self.lane() as lane:
                lane.invite()
                end = lane.ends[index]
                end.abort()
                try:
                    bounded(self.notice, end.connect, lane.deadline("connection", SHORT))
                except TransportKitError:
                    continue

    def test_the_ends_may_go_in_any_order(self) -> None:
        for first in ("exporter", "importer"):
            with nothing_left():
                lane = self.lane()
                lane.connect()
                assert lane.carry(0, noise(100, seed=0)) == [noise(100, seed=0)]
                if first == "exporter":
                    lane.exporter.close()
                    lane.imports[0].close()
                else:
                    lane.imports[0].close()
                    lane.exporter.close()
                lane.close()

    def test_twenty_lanes_leave_nothing(self) -> None:
        def once() -> None:
            with self.lane(chunk_bytes=1 << 20, slots=3) as lane:
                lane.connect()
                lane.carry(0, bytes(1 << 20))

        for _ in range(4):  # until the allocator has a pool for each of the threads that take part
            once()
        gc.collect()
        before = resident()
        with nothing_left():
            for _ in range(20):
                once()
        gc.collect()
        assert resident() - before <= self.memory_slack, f"memory grew by {resident() - before} bytes over 20 lanes"
