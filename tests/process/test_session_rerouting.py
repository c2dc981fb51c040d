"""A backend that fails in mid-update: the update goes on over the next one, whole, and the report says so."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from session_ends import Child, Talk, caught, differing, model, short_folder
from threaded_ends import SMALL, SOURCES, WAYS, Ends, loaded, received

import transportkit as tk
from transportkit.errors import ResourceError
from transportkit.testing import faulty, in_update, installed
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
