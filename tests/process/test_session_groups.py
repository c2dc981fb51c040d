"""One sender and several receivers: what the loss of one means for the others, who comes late, who leaves."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from promptness import PROMPT
from session_ends import BACKENDS, Child, Remote, Talk, caught, differing, load, model, short_folder, zeros
from threaded_ends import SMALL, SOURCES, Ends, loaded, received

import transportkit as tk
from transportkit.conversation import State
from transportkit.session.peers import Peer, Peers
from transportkit.testing import installed, recording
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def address(folder: Path) -> str:
    return f"unix:{folder}/s"


def fails(receiver: tk.Receiver) -> str:
    def function(pairs: list[tuple[str, torch.Tensor]]) -> None:
        raise ValueError("no room on the engine")

    return str(caught(receiver.apply, function)[0])


def refuses(receiver: tk.Receiver) -> str:
    return str(caught(receiver.load_into, {"other": torch.zeros(3)})[0])


# -- one of several fails or is lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("takes", "text"), [(fails, "no room on the engine"), (refuses, "other")])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_update_goes_on_for_the_others(culprit: int, takes: Any, text: str, backend: str) -> None:
    with Ends(3, backend) as ends:
        good = {n: ends.pool.submit(loaded, r) for n, r in enumerate(ends.receivers) if n != culprit}
        bad = ends.pool.submit(takes, ends.receivers[culprit])
        report = ends.pool.submit(ends.sender.send, model(), version=5, on_loss="continue").result(30)
        assert text in bad.result(30)
        assert text in report.lost[culprit]
        assert set(report.lost) == {culprit}
        assert set(report.backends) == set(report.chunks) == set(good)
        for one in good.values():
            assert differing(one.result(30), model()) == []
        assert [r.version for n, r in enumerate(ends.receivers) if n != culprit] == [5, 5]
        assert ends.receivers[culprit].version is None
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], [], []]
        assert report.lost == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_it_the_update_fails_for_all(backend: str) -> None:
    with Ends(3, backend) as ends:
        good = [ends.pool.submit(caught, received, r) for r in ends.receivers[1:]]
        bad = ends.pool.submit(fails, ends.receivers[0])
        error, _ = ends.pool.submit(caught, ends.sender.send, model()).result(30)
        assert isinstance(error, tk.PeerFailedError)
        assert "receiver 0" in error.peer
        assert "no room on the engine" in str(error)
        assert "no room on the engine" in bad.result(30)
        for one in good:
            told, _ = one.result(30)
            assert isinstance(told, tk.PeerFailedError)
            assert "no room on the engine" in str(told)
        _, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], [], []]


def test_when_all_fail_the_call_fails() -> None:
    with Ends(2, "shm") as ends:
        bad = [ends.pool.submit(fails, receiver) for receiver in ends.receivers]
        error, _ = ends.pool.submit(caught, ends.sender.send, model(), on_loss="continue").result(30)
        assert isinstance(error, tk.PeerFailedError)
        assert all("no room on the engine" in one.result(30) for one in bad)
        _, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]


def test_on_loss_is_checked() -> None:
    with Ends(1, "pickle") as ends:
        error, _ = caught(ends.sender.send, model(), on_loss="ignore")
        assert isinstance(error, tk.UsageError)
        assert "continue" in str(error)


def one_of_three(talk: Talk, address: str, backend: str) -> list[str]:
    with tk.connect(address, **SMALL, backends=(backend,)) as receiver:
        talk.say(None)
        return [*load(receiver)[0], *load(receiver)[0]]


DEATHS = {
    "before the update": ("transportkit.session.receiving:Receiving.accept", "before"),
    "accepted": ("transportkit.session.receiving:Receiving.accept", "after"),
    "first chunk": ("transportkit.session.receiving:check_digest", "before", 1),
    "middle chunk": ("transportkit.session.receiving:check_digest", "after", 5),
    "committing": ("transportkit.session.receiving:Receiving.applied", "before"),
    "second update": ("transportkit.session.receiving:Receiving.applied", "before", 2),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("death", DEATHS)
def test_one_is_killed_and_the_others_have_both_updates(death: str, backend: str, address: str) -> None:
    with (
        Child(one_of_three, address, backend) as one,
        Child(one_of_three, address, backend, die=DEATHS[death]) as victim,
        Child(one_of_three, address, backend) as two,
        tk.serve(address, receivers=3, **SMALL, backends=(backend,)) as sender,
    ):
        pids = {each.receiver: each.peer for each in sender.agreement.assignments}
        lost: dict[int, str] = {}
        for _ in range(2):
            report = sender.send(model(), on_loss="continue")
            lost |= report.lost
        assert one.result() == []
        assert two.result() == []
        assert victim.join() == -signal.SIGKILL
        assert [pids[number] for number in lost] == [f"pid {victim.pid} on host {os.uname().nodename}"]
        assert len(report.backends) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_is_stopped_and_the_others_go_on(backend: str, address: str) -> None:
    limits = SMALL | {"timeout": 2.0}
    with (
        Remote("receive", address, **limits, backends=(backend,)) as one,
        Remote("receive", address, **limits, backends=(backend,)) as stopped,
        tk.serve(address, receivers=2, **limits, backends=(backend,)) as sender,
    ):
        one.start(load)
        stopped.start(load)
        sender.send(model())
        assert one.answer()[0] == stopped.answer()[0] == []
        one.start(load)
        stopped.start(load)
        time.sleep(0.2)
        stopped.signal(signal.SIGSTOP)
        stopped.stopped()
        began = time.monotonic()
        report = sender.send(model(), on_loss="continue")
        assert time.monotonic() - began < limits["timeout"] + PROMPT
        assert one.answer()[0] == []
        (reason,) = report.lost.values()
        assert f"pid {stopped.pid}" in reason
        assert "within 2 s" in reason
        one.start(load)
        assert len(sender.send(model()).backends) == 1
        assert one.answer()[0] == []
        one.finish()


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_are_stopped_at_once_and_cost_one_timeout(backend: str, address: str) -> None:
    limits = SMALL | {"timeout": 5.0, "backends": (backend,)}
    remotes = [Remote("receive", address, **limits) for _ in range(4)]
    try:
        with tk.serve(address, receivers=4, **limits) as sender:
            for remote in remotes:
                remote.start(load)
            sender.send(model())
            for remote in remotes:
                assert remote.answer()[0] == []
                remote.start(load)
            time.sleep(0.2)
            for stopped in remotes[1:]:
                stopped.signal(signal.SIGSTOP)
                stopped.stopped()
            began = time.monotonic()
            report = sender.send(model(), on_loss="continue")
            assert time.monotonic() - began < 2.5 * limits["timeout"]  # there are three
            assert len(report.lost) == 3
            assert remotes[0].answer()[0] == []
            remotes[0].finish()
    finally:
        for remote in remotes:
            remote.end()


def take_large(talk: Talk, address: str, keywords: dict[str, Any]) -> list[str]:
    with tk.connect(address, **keywords) as receiver:
        return differing(received(receiver), model(scale=LARGE))


#: So that a chunk is far longer than what a link takes at once.
LARGE = 40


@pytest.mark.parametrize("source", SOURCES)
def test_four_stop_before_long_chunks_on_the_link_and_cost_one_timeout(source: str, address: str) -> None:
    limits = SMALL | {"timeout": 5.0, "backends": ("pickle",), "chunk_bytes": 1 << 20}
    stopping = ("transportkit.session.receiving:Receiving.accept", "after", 1, "", signal.SIGSTOP)
    stopped = [Child(take_large, address, limits, die=stopping) for _ in range(4)]
    try:
        with Child(take_large, address, limits) as good, tk.serve(address, receivers=5, **limits) as sender:
            tensors = model(scale=LARGE)
            given: Any = tensors if source == "mapping" else iter(tensors.items())
            began = time.monotonic()
            report = sender.send(given, on_loss="continue")
            assert time.monotonic() - began < 3.5 * limits["timeout"]  # there are four
            assert len(report.lost) == 4
            assert len(report.backends) == 1
            assert good.result() == []
    finally:
        for child in stopped:
            child.end()


# -- leaving between updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_may_leave_between_updates(backend: str) -> None:
    with Ends(3, backend) as ends:
        ends.update(model(), loaded)
        ends.receivers.pop(1).close()
        report, taken = ends.update(model(), loaded)
        assert [differing(one, model()) for one in taken] == [[], []]
        assert set(report.backends) == {0, 2}
        assert report.lost == {}
        for receiver in ends.receivers:
            receiver.close()
        error, _ = caught(ends.sender.send, model())
        assert isinstance(error, tk.PeerClosedError)


def test_an_update_does_not_arrive_where_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Peers.drain

    def drain_late(self: Peers, peer: Peer) -> None:
        if peer.manifest_id == "" and peer.conversation.state is State.AGREED:
            time.sleep(0.05)  # so that the goodbyes come with the words for the update
        drain(self, peer)

    def takes_and_goes(receiver: tk.Receiver) -> None:
        with receiver:
            loaded(receiver)

    monkeypatch.setattr(Peers, "drain", drain_late)
    with Ends(2, "shm") as ends:
        report, _ = ends.update(model(), takes_and_goes)
        assert set(report.backends) == {0, 1}
        error, _ = caught(ends.sender.send, model())
        assert isinstance(error, tk.PeerClosedError)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crash_between_updates_is_no_leave(backend: str, address: str) -> None:
    with (
        Remote("receive", address, **SMALL, backends=(backend,)) as one,
        Remote("receive", address, **SMALL, backends=(backend,)) as two,
        tk.serve(address, receivers=2, **SMALL, backends=(backend,)) as sender,
    ):
        one.start(load)
        two.start(load)
        sender.send(model())
        assert one.answer()[0] == two.answer()[0] == []
        two.signal(signal.SIGKILL)
        two.join()
        one.start(load)
        report = sender.send(model(), on_loss="continue")
        assert len(report.lost) == 1
        assert one.answer()[0] == []
        one.finish()


# -- coming late ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_that_comes_late_is_held_and_admitted(backend: str, address: str) -> None:
    keywords = SMALL | {"backends": (backend,)}
    with Remote("receive", address, **keywords) as first, tk.serve(address, late=True, **keywords) as sender:
        first.start(load)
        sender.send(model())
        assert first.answer()[0] == []
        assert sender.late == 0
        assert sender.admit() == ()
        with Remote("receive", address, **keywords) as second, Remote("receive", address, **keywords) as third:
            assert set(sender.admit(wait=20)) <= {1, 2}
            while len(sender.agreement.assignments) < 3:
                sender.admit(wait=20)
            for _ in range(2):
                for each in (first, second, third):
                    each.start(load)
                report = sender.send(model())
                assert report.backends == dict.fromkeys(range(3), backend)
                for each in (first, second, third):
                    assert each.answer()[0] == []
            lanes = {each.lane for each in sender.agreement.assignments}
            assert len(lanes) == (1 if backend == "shm" else 3)
            for each in (second, third, first):
                each.finish()


def test_when_all_have_left_others_may_still_come_late(address: str) -> None:
    with Remote("receive", address, **SMALL) as first, tk.serve(address, late=True, **SMALL) as sender:
        first.start(load)
        sender.send(model())
        assert first.answer()[0] == []
        first.finish()
        for _ in range(2):
            error, _ = caught(sender.send, model())
            assert isinstance(error, tk.PeerClosedError)
            assert sender.closed is None
        with Remote("receive", address, **SMALL) as second:
            assert sender.admit(wait=20) == (1,)
            assert [each.receiver for each in sender.agreement.assignments] == [1]
            second.start(load)
            assert set(sender.send(model()).backends) == {1}
            assert second.answer()[0] == []
            second.finish()


def test_one_that_comes_late_is_refused_at_once_without_it(address: str) -> None:
    with Remote("receive", address, **SMALL) as first, tk.serve(address, **SMALL) as sender:
        error, _ = caught(tk.connect, address, **SMALL)
        assert "all 1 places" in str(error)
        assert sender.late == 0
        first.start(load)
        sender.send(model())
        assert first.answer()[0] == []
        first.finish()


def test_one_that_left_before_it_was_admitted_costs_nothing(address: str) -> None:
    with Remote("receive", address, **SMALL) as first, tk.serve(address, late=True, **SMALL) as sender:
        with Remote("receive", address, **SMALL) as gone:
            while not sender.late:
                time.sleep(0.01)
            gone.signal(signal.SIGKILL)
            gone.join()
        assert sender.admit() == ()
        first.start(load)
        assert set(sender.send(model()).backends) == {0}
        assert first.answer()[0] == []
        first.finish()


def test_one_that_cannot_be_served_is_refused_and_the_session_goes_on(address: str) -> None:
    keywords = SMALL | {"backends": ("pickle",)}
    with Remote("receive", address, **keywords) as first, tk.serve(address, late=True, **keywords) as sender:
        with Child(refused, address, SMALL | {"backends": ("shm",)}) as other:
            error, _ = caught(sender.admit, wait=20)
            assert isinstance(error, tk.NegotiationError)
            assert isinstance(other.result(), tk.NegotiationError)
        first.start(load)
        assert set(sender.send(model()).backends) == {0}
        assert first.answer()[0] == []
        first.finish()


def refused(talk: Talk, address: str, keywords: dict[str, Any]) -> tk.TransportKitError:
    return caught(tk.connect, address, **keywords)[0]


# -- one pack a lane --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_chunk_is_packed_once_a_lane(count: int) -> None:
    backend = recording(ShmTransport, name="counted")
    with (
        installed(backend),
        Ends(count, "counted", "pickle", only={count - 1: ("pickle",)} if count > 1 else None) as ends,
    ):
        report, taken = ends.update(model(), loaded, version=1)
        assert [differing(one, model()) for one in taken] == [[] for _ in range(count)]
        assert len({each.lane for each in ends.sender.agreement.assignments}) == min(count, 2)
        trial = 1
        assert backend.journal.count("packing") == report.chunks[0] + trial
        located = list(backend.journal.of("locate"))
        assert len(located) == (report.chunks[0] + trial) * max(1, count - 1)


def test_receivers_that_differ(address: str) -> None:
    """In chunk size, slots, order of names, strictness and way of taking: agreed at the handshake, equal values."""
    wishes: list[dict[str, Any]] = [
        {"chunk_bytes": 5000, "slots": 1},
        {"chunk_bytes": 100_000, "backends": ("pickle",)},
        {"chunk_bytes": 777, "slots": 7, "backends": ("shm",)},
    ]
    calls: list[Any] = [(load,), (load_reversed,), (load_some,)]
    remotes = [Remote("receive", address, **keywords) for keywords in wishes]
    with tk.serve(address, receivers=3, timeout=20, wait=20) as sender:
        try:
            for remote, call in zip(remotes, calls, strict=True):
                remote.start(*call)
            report = sender.send(model(), version=9)
            assert [remote.answer()[0] for remote in remotes] == [[], [], []]
            assert len(report.backends) == 3
            sizes = {each.chunk_bytes for each in sender.agreement.assignments}
            assert sizes == {777, 100_000}
            for remote in remotes:
                remote.finish()
        finally:
            for remote in remotes:
                remote.end()


def load_reversed(receiver: tk.Receiver) -> tuple[list[str], tk.Update]:
    target = dict(reversed(zeros().items()))
    update = receiver.load_into(target)
    return differing(target, model()), update


def load_some(receiver: tk.Receiver) -> tuple[list[str], tk.Update]:
    target = {"scalar": torch.tensor(0), "half": zeros()["half"], "elsewhere": torch.zeros(2)}
    update = receiver.load_into(target, strict=False)
    assert update.missing == ("elsewhere",)
    del target["elsewhere"]
    return differing(target, {name: model()[name] for name in target}), update
