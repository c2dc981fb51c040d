"""A backend that fails in mid-update: the update goes on over the next one, whole, and the report says so."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from session_ends import Child, Talk, caught, differing, model, short_folder
from threaded_ends import SMALL, SOURCES, WAYS, Ends, loaded, received

import transportkit as tk
from transportkit import wire
from transportkit.backends.pickle import PickleTransport
from transportkit.errors import DeadlineError, PeerLostError, ResourceError
from transportkit.session.opening import Opening
from transportkit.session.receiving import Receiving
from transportkit.testing import altered, faulty, in_update, installed
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transportkit.session.peers import Peer
    from transportkit.transport import Transport

NAME = "faulty-shm"

SENDERS = ("packing", "exporter.ready", "locate", "publish")
RECEIVERS = ("importer.open", "importer.reading", "importer.release")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def broken(at: str, nth: int, **keywords: Any) -> type[Transport]:
    # Calls of `packing` carry no header: the trial's is the first.
    when = in_update if at not in ("packing", "exporter.ready", "locate") else None
    return faulty(ShmTransport, at=at, nth=nth + (when is None), when=when, error=ResourceError("no room"), **keywords)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("at", [*SENDERS, *RECEIVERS])
def test_the_update_arrives_whole(at: str, nth: int, source: str, way: str) -> None:
    if (at, way) == ("importer.reading", "chunks"):
        pytest.skip("leases are read in place, by the user")
    backend = broken(at, nth)
    with installed(backend), Ends(1, NAME, "pickle") as ends:
        report, taken = ends.update(SOURCES[source](), WAYS[way], version=3)
        assert differing(taken[0], model()) == []
        assert report.backends == {0: "pickle"}
        assert len(report.reroutes) == 1
        assert f"receiver 0: {NAME} to pickle from chunk" in report.reroutes[0]
        assert "no room" in report.reroutes[0]
        assert ends.sender.agreement.backend(0) == ends.receivers[0].agreement.backend() == "pickle"
        for agreement in (ends.sender.agreement, ends.receivers[0].agreement):
            assert f"{NAME}: not taken: failed in update 1: " in str(agreement)
        assert ends.receivers[0].version == 3


@pytest.mark.parametrize("at", [*SENDERS, *RECEIVERS])
def test_the_next_update_tries_the_better_backend_again(at: str) -> None:
    backend = broken(at, 3, times=1)
    with installed(backend), Ends(2, NAME, "pickle") as ends:
        report, taken = ends.update(model(), loaded)
        assert report.reroutes
        for _ in range(2):
            report, taken = ends.update(model(), loaded)
            assert [differing(one, model()) for one in taken] == [[], []]
            assert report.backends == {0: NAME, 1: NAME}
            assert report.reroutes == ()
            lanes = {each.lane for each in ends.sender.agreement.assignments}
            assert len(lanes) == 1
        assert NAME in ends.receivers[0].agreement.backend()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("at", RECEIVERS)
def test_what_fails_at_one_receiver_is_no_fault_at_the_others(at: str, source: str) -> None:
    backend = broken(at, 5, times=1)
    with installed(backend), Ends(3, NAME, "pickle") as ends:
        report, taken = ends.update(SOURCES[source](), received)
        assert [differing(one, model()) for one in taken] == [[], [], []]
        assert sorted(report.backends.values()) == sorted([NAME, NAME, "pickle"])
        assert len(report.reroutes) == 3


@pytest.mark.parametrize("source", SOURCES)
def test_a_lane_beside_it_goes_on_as_it_was(source: str) -> None:
    backend = broken("importer.open", 4)
    with installed(backend), Ends(2, NAME, "pickle", only={1: ("pickle",)}) as ends:
        report, taken = ends.update(SOURCES[source](), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert report.backends == {0: "pickle", 1: "pickle"}
        assert len(report.reroutes) == 1


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("second", [*SENDERS, *RECEIVERS])
def test_a_second_failure_leads_to_a_third_backend(second: str, source: str) -> None:
    once = broken("importer.open", 4)
    when = None if second in ("packing", "exporter.ready", "locate") else in_update
    twice = faulty(
        ShmTransport, at=second, nth=3, when=when, error=ResourceError("none here either"), name="faulty-too"
    )
    with installed(once, twice), Ends(2, NAME, "faulty-too", "pickle") as ends:
        report, taken = ends.update(SOURCES[source](), received)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert set(report.backends.values()) <= {NAME, "faulty-too", "pickle"}
        assert len(report.reroutes) >= 2


@pytest.mark.parametrize("at", ["importer.open", "publish"])
def test_a_tensor_that_is_kept_from_a_lease_outlives_its_lane(at: str) -> None:
    kept: list[tuple[str, torch.Tensor]] = []

    def keeps_one(receiver: tk.Receiver) -> list[str]:
        wrong = []
        for number, lease in enumerate(receiver.chunks()):
            for spec, offset, tensor in lease:
                start = model()[spec.name].contiguous().reshape(-1).view(torch.uint8)[offset:]
                part = tensor.reshape(-1).view(torch.uint8)
                if not torch.equal(part, start[: part.numel()]):
                    wrong.append(spec.name)
                if number == 0 and offset == 0 and spec.name == "weight":
                    kept.append((spec.name, part))
                del tensor, part
        return wrong

    backend = broken(at, 5, times=1)
    with installed(backend), Ends(2, NAME, "pickle", slots=3) as ends:
        for _ in range(4):
            report, taken = ends.update(model(), keeps_one)
            assert taken == [[], []]
            assert len(report.backends) == 2
            for name, part in kept:
                whole = model()[name].contiguous().reshape(-1).view(torch.uint8)
                assert torch.equal(part, whole[: part.numel()])
            del kept[:2]


def test_one_byte_chunks() -> None:
    tensors = {"a": torch.arange(300, dtype=torch.uint8), "b": torch.tensor(1.5), "c": torch.empty(0)}
    backend = broken("importer.open", 100)
    with installed(backend), Ends(1, NAME, "pickle", chunk_bytes=1) as ends:
        report, taken = ends.update(tensors, received)
        assert differing(taken[0], tensors) == []
        assert report.backends == {0: "pickle"}


@pytest.mark.parametrize("at", [*SENDERS, *RECEIVERS])
def test_with_no_other_backend_both_sides_say_what_failed(at: str) -> None:
    backend = broken(at, 2)
    with installed(backend), Ends(1, NAME) as ends:
        taking = ends.pool.submit(caught, loaded, ends.receivers[0])
        error, _ = ends.pool.submit(caught, ends.sender.send, model()).result(30)
        assert isinstance(error, tk.BackendError | tk.PeerFailedError)
        assert "no room" in str(error)
        told, _ = taking.result(30)
        assert "no room" in str(told)
        assert ends.receivers[0].version is None


def test_a_source_that_raises_after_a_reroute_leaves_the_session_right() -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(model().items()):
            if number == 6:
                raise ValueError("out of shards")
            yield pair

    backend = broken("importer.open", 2, times=1)
    with installed(backend), Ends(1, NAME, "pickle") as ends:
        taking = ends.pool.submit(caught, received, ends.receivers[0])
        error, _ = ends.pool.submit(caught, ends.sender.send, source()).result(30)
        assert isinstance(error, tk.SourceError)
        assert "out of shards" in str(taking.result(30)[0])
        report, taken = ends.update(model(), loaded)
        assert differing(taken[0], model()) == []
        assert report.backends == {0: NAME}


def test_a_receiver_that_fails_while_its_lane_is_rerouted() -> None:
    backend = broken("publish", 9)

    def gives_up(receiver: tk.Receiver) -> str:
        count = 0

        def function(pairs: list[tuple[str, torch.Tensor]]) -> None:
            nonlocal count
            count += 1
            if count == 2:
                raise ValueError("no more")

        return str(caught(receiver.apply, function)[0])

    with installed(backend), Ends(2, NAME, "pickle") as ends:
        bad = ends.pool.submit(gives_up, ends.receivers[0])
        good = ends.pool.submit(loaded, ends.receivers[1])
        report = ends.pool.submit(ends.sender.send, model(), on_loss="continue").result(30)
        assert "no more" in bad.result(30)
        assert differing(good.result(30), model()) == []
        assert report.backends == {1: "pickle"}
        assert "no more" in report.lost[0]
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]


def receive_over(talk: Talk, address: str, backend: type[Transport]) -> str:
    with installed(backend), tk.connect(address, **SMALL, backends=(NAME, "pickle")) as receiver:
        for _ in range(2):
            wrong = differing(received(receiver), model())
            assert wrong == [], wrong
        return receiver.agreement.backend()


@pytest.mark.parametrize("at", ["importer.open", "publish"])
def test_between_processes(at: str, folder: Path) -> None:
    backend = broken(at, 3, times=1)
    address = f"unix:{folder}/s"
    with installed(backend):
        with Child(receive_over, address, backend) as one, Child(receive_over, address, backend) as two:
            with tk.serve(address, receivers=2, **SMALL, backends=(NAME, "pickle")) as sender:
                first = sender.send(model())
                assert first.reroutes
                second = sender.send(model())
                # In a receiver's process the fault is counted anew, so the second update may meet the other's.
                assert set(second.backends.values()) <= {NAME, "pickle"}
            assert one.result() in (NAME, "pickle")
            assert two.result() in (NAME, "pickle")
    assert threading.active_count() < 20


# -- two things at once -----------------------------------------------------------------------------------------------


def test_what_was_packed_already_survives_a_second_failure() -> None:
    tensors = {f"t{n}": torch.full((100,), n, dtype=torch.uint8) for n in range(1, 10)}
    first = broken("packing", 5)
    second = faulty(ShmTransport, at="packing", nth=2, error=ResourceError("none here either"), name="faulty-too")
    with installed(first, second), Ends(1, NAME, "faulty-too", "pickle") as ends:
        report, taken = ends.update(iter(tensors.items()), received)
        assert len(report.reroutes) == 2
        assert differing(taken[0], tensors) == []


def spoil(call: Callable[[], torch.Tensor], *_: object) -> torch.Tensor:
    spoilt = call().clone()
    spoilt[0] ^= 1
    return spoilt


def test_a_chunk_of_wrong_bytes_does_not_pass_for_taken_when_its_release_fails() -> None:
    spoilt = altered(ShmTransport, at="importer.open", nth=3, times=1, when=in_update, change=spoil, name="spoilt")
    backend = faulty(
        spoilt, at="importer.release", nth=3, when=in_update, error=ResourceError("no room"), name="faulty-shm"
    )
    with installed(spoilt, backend), Ends(1, NAME, "pickle") as ends:
        taking = ends.pool.submit(caught, loaded, ends.receivers[0])
        error, _ = ends.pool.submit(caught, ends.sender.send, model()).result(30)
        assert isinstance(taking.result(30)[0], tk.IntegrityError)
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "IntegrityError"


@pytest.mark.parametrize("seed", [7, 8])
def test_chunks_may_grow_between_updates(seed: int) -> None:
    """The one who wanted small chunks has left, and the lane is agreed anew: plan and bounds are others."""
    other = {name: torch.cat([tensor.flatten(), tensor.flatten()]) for name, tensor in model(seed).items()}
    tensors = model() if seed == 7 else other
    backend = broken("importer.open", 3, times=1)
    with installed(backend), Ends(2, NAME, "pickle", apart={1: {"chunk_bytes": 700}}) as ends:
        report, _ = ends.update(model(), loaded)
        assert report.reroutes
        small_chunks = report.chunks[0]
        ends.receivers.pop(1).close()
        for _ in range(2):
            report, taken = ends.update(tensors, received)
            assert differing(taken[0], tensors) == []
            assert report.chunks[0] < small_chunks


def test_those_who_shared_the_lane_of_one_who_said_too_late_that_it_is_stranded() -> None:
    failed = threading.Event()

    def fail(_: object, header: wire.Chunk, *__: object) -> None:
        failed.set()
        time.sleep(0.1)
        raise ResourceError("no room")

    def at_the_first(header: wire.Chunk, *_: object) -> bool:
        return (header.update, header.receiver, header.seq) == (1, 0, 1)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield f"t{number}", torch.ones(4096, dtype=torch.uint8)
        assert failed.wait(10)
        raise ValueError("out of shards")

    backend = altered(ShmTransport, at="importer.open", when=at_the_first, change=fail, name=NAME)
    with installed(backend), Ends(2, NAME, "pickle") as ends:
        taking = [ends.pool.submit(caught, received, each) for each in ends.receivers]
        error, _ = ends.pool.submit(caught, ends.sender.send, source()).result(30)
        assert isinstance(error, tk.SourceError)
        for one in taking:
            one.result(30)
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert report.backends == {0: NAME, 1: NAME}


def test_one_is_stranded_before_the_other_has_seen_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it kept of the last update ends at the wrong time: the slot's release fails when nothing is under way."""
    kept: list[torch.Tensor] = []
    accept = Receiving.accept

    def accept_late(self: Receiving) -> None:
        if self._terms.receiver == 1:
            time.sleep(0.3)
        accept(self)
        if self._terms.receiver == 0:
            kept.clear()

    def of_the_kept(header: wire.Chunk) -> bool:
        return (header.update, header.receiver, header.seq) == (1, 0, 0)

    def keeps(receiver: tk.Receiver) -> None:
        for lease in receiver.chunks():
            for spec, _, tensor in lease:
                if receiver is ends.receivers[0] and not kept and spec.name == "weight":
                    kept.append(tensor)
                del tensor

    backend = faulty(ShmTransport, at="importer.release", when=of_the_kept, error=ResourceError("no room"), name=NAME)
    monkeypatch.setattr(Receiving, "accept", accept_late)
    with installed(backend), Ends(2, NAME, "pickle", slots=3) as ends:
        ends.pool.submit(ends.sender.send, model())
        for one in [ends.pool.submit(keeps, each) for each in ends.receivers]:
            one.result(30)
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert report.backends[0] == "pickle"


def test_one_is_stranded_when_another_has_left_its_loop() -> None:
    left = threading.Event()

    def leaves(receiver: tk.Receiver) -> None:
        loop = receiver.receive()
        next(iter(loop))
        left.set()
        loop.close()  # type: ignore[attr-defined]

    def fail(*_: object) -> None:
        assert left.wait(10)
        time.sleep(0.2)
        raise ResourceError("no room")

    def at_the_other(header: wire.Chunk, *_: object) -> bool:
        return (header.update, header.receiver, header.seq) == (1, 1, 4)

    backend = altered(ShmTransport, at="importer.open", when=at_the_other, change=fail, name=NAME)
    with installed(backend), Ends(2, NAME, "pickle") as ends:
        leaving = ends.pool.submit(leaves, ends.receivers[0])
        other = ends.pool.submit(caught, received, ends.receivers[1])
        error, _ = ends.pool.submit(caught, ends.sender.send, model()).result(30)
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "LoopLeft"
        leaving.result(30)
        other.result(30)
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert report.backends == {0: NAME, 1: NAME}


# -- losses in the middle of it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("nth", [1, 4])
def test_another_one_is_lost_while_a_lane_is_rerouted_once_more(nth: int, source: str) -> None:
    """With its lane still to be filled again (1), or with a chunk at hand for it (4)."""

    def fail(*_: object) -> None:
        ends.receivers[1].abort()
        time.sleep(0.05)
        raise ResourceError("none here either")

    first = broken("importer.open", 2)
    second = altered(ShmTransport, at="publish", nth=nth, when=in_update, change=fail, name="faulty-too")
    with (
        installed(first, second),
        Ends(2, NAME, "faulty-too", "pickle", only={1: (NAME, "pickle")}) as ends,
    ):
        victim = ends.pool.submit(caught, received, ends.receivers[1])
        good = ends.pool.submit(received, ends.receivers[0])
        report = ends.pool.submit(ends.sender.send, SOURCES[source](), on_loss="continue").result(30)
        assert differing(good.result(30), model()) == []
        victim.result(30)
        assert set(report.lost) == {1}
        assert report.backends == {0: "pickle"}


@pytest.mark.parametrize("error", [PeerLostError("it is gone"), DeadlineError("it reads nothing", silent=True)])
def test_one_is_lost_while_its_new_lane_is_filled(error: tk.TransportKitError) -> None:
    def fail(call: Callable[[], object], slot: int, header: wire.Chunk, *_: object) -> None:
        if header.receiver == 1:
            ends.receivers[1].abort()
            raise error
        call()

    backend = broken("importer.open", 2)
    lossy = altered(PickleTransport, at="publish", when=in_update, change=fail, name="lossy")
    with installed(backend, lossy), Ends(2, NAME, "lossy") as ends:
        victim = ends.pool.submit(caught, received, ends.receivers[1])
        good = ends.pool.submit(received, ends.receivers[0])
        report = ends.pool.submit(ends.sender.send, model(), on_loss="continue").result(30)
        assert differing(good.result(30), model()) == []
        victim.result(30)
        assert set(report.lost) == {1}


def test_one_is_lost_when_the_others_have_heard_that_it_is_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Opening._send

    def send_and_lose(self: Opening, peer: Peer, message: wire.Message) -> None:
        if isinstance(message, wire.Agreed) and self._attempt > 1 and peer.number == 0:
            ends.receivers[1].abort()
            time.sleep(0.05)
        send(self, peer, message)

    monkeypatch.setattr(Opening, "_send", send_and_lose)
    backend = broken("importer.open", 2)
    with installed(backend), Ends(3, NAME, "pickle") as ends:
        victim = ends.pool.submit(caught, received, ends.receivers[1])
        good = [ends.pool.submit(received, ends.receivers[n]) for n in (0, 2)]
        report = ends.pool.submit(ends.sender.send, model(), on_loss="continue").result(30)
        assert [differing(one.result(30), model()) for one in good] == [[], []]
        victim.result(30)
        assert set(report.lost) == {1}


def for_the_first(*args: Any) -> bool:
    return in_update(*args) and next(arg for arg in args if hasattr(arg, "seq")).receiver == 0


@pytest.mark.parametrize("trial", [False, True])
@pytest.mark.parametrize("at", ["importer.open", "publish"])
def test_one_without_another_backend_costs_only_itself(at: str, trial: bool) -> None:
    """There is none, or it fails its trial."""
    backend = faulty(ShmTransport, at=at, nth=3, times=1, when=for_the_first, error=ResourceError("no room"), name=NAME)
    dead = faulty(ShmTransport, at="importer.join", error=ResourceError("none here either"), name="dead")
    only = {0: (NAME, "dead") if trial else (NAME,)}
    with installed(backend, dead), Ends(3, NAME, "dead", "pickle", only=only) as ends:
        bad = ends.pool.submit(caught, received, ends.receivers[0])
        good = [ends.pool.submit(received, each) for each in ends.receivers[1:]]
        report = ends.pool.submit(ends.sender.send, model(), on_loss="continue").result(30)
        assert isinstance(bad.result(30)[0], tk.TransportKitError)
        assert set(report.lost) == {0}
        assert ("none here either" if trial else "no room") in report.lost[0]
        assert [differing(one.result(30), model()) for one in good] == [[], []]
