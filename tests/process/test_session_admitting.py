"""Receivers that come late and die, stop or leave while they are admitted: the sender and the others go on."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from session_ends import Child, Remote, Talk, differing, load, model, short_folder
from threaded_ends import SMALL, loaded

import transportkit as tk
from transportkit.session.joining import Joining
from transportkit.testing import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

JOINING = "transportkit.session.joining:Joining."
RECEIVING = "transportkit.session.receiving:Receiving."

#: Where one that comes late dies or stops, and whether it is admitted before that.
STEPS: dict[str, tuple[str, str, bool]] = {
    "proposed": (JOINING + "_join", "before", False),
    "joined": (JOINING + "_join", "after", False),
    "in the trial": (JOINING + "_prove", "before", False),
    "proven": (JOINING + "_prove", "after", True),
    "agreed": (JOINING + "run", "after", True),
    "in its first update": (RECEIVING + "accept", "after", True),
}


@pytest.fixture
def address() -> Iterator[str]:
    with short_folder() as folder:
        yield f"unix:{folder}/s"


def come_late(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    with tk.connect(address, **keywords) as receiver:
        while True:
            load(receiver)


def held(sender: tk.Sender, count: int) -> None:
    limit = time.monotonic() + 20
    while sender.late < count:
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_late_ones_are_killed_and_those_who_are_there_have_every_update(backend: str, address: str) -> None:
    keywords = SMALL | {"backends": (backend,)}
    with Remote("receive", address, **keywords) as first, tk.serve(address, late=True, **keywords) as sender:
        for step, (place, when, in_time) in STEPS.items():
            with Child(come_late, address, keywords, die=(place, when)) as victim:
                held(sender, 1)
                admitted = sender.admit()
                assert bool(admitted) <= in_time, step
                first.start(load)
                report = sender.send(model(), on_loss="continue")
                assert first.answer()[0] == [], step
                assert victim.join() == -signal.SIGKILL, step
                assert 0 in report.backends, step
                assert set(report.lost) <= set(admitted), step
                if step == "in its first update":
                    assert set(report.lost) == set(admitted) != set()
        with Remote("receive", address, **keywords) as last:
            (number,) = sender.admit(wait=20)
            for each in (first, last):
                each.start(load)
            assert set(sender.send(model()).backends) == {0, number}
            for each in (first, last):
                assert each.answer()[0] == []
                each.finish()


def test_late_ones_are_stopped_in_their_handshake_and_another_is_admitted(address: str) -> None:
    """Those who owe the same word cost one timeout together; the one who is there is not lost by the wait."""
    limits = SMALL | {"backends": ("shm", "pickle"), "timeout": 4.0}
    with Remote("receive", address, **limits) as first, tk.serve(address, late=True, **limits) as sender:
        first.start(load)
        sender.send(model())
        assert first.answer()[0] == []
        first.start(load)
        victims = [
            Child(come_late, address, limits, die=(place, when, 1, "", signal.SIGSTOP))
            for place, when, _ in (STEPS["joined"], STEPS["in the trial"])
            for _ in range(2)
        ]
        try:
            with Remote("receive", address, **limits) as good:
                held(sender, len(victims) + 1)
                began = time.monotonic()
                admitted = sender.admit()
                assert time.monotonic() - began < 3.5 * limits["timeout"]  # there are four
                good.start(load)
                assert set(sender.send(model()).backends) == {0, *admitted}
                assert len(admitted) == 1
                assert first.answer()[0] == good.answer()[0] == []
                for each in (good, first):
                    each.finish()
        finally:
            for victim in victims:
                victim.end()


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_the_one_who_is_there_leaves_while_another_is_admitted(
    backend: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = Joining._prove
    keywords = SMALL | {"backends": (backend,)}
    leaving: list[tk.Receiver] = []

    def prove_late(self: Joining, *args: Any) -> None:
        while leaving:
            leaving.pop().close()
        prove(self, *args)

    monkeypatch.setattr(Joining, "_prove", prove_late)
    joining = Call(tk.connect, address, **keywords)
    with tk.serve(address, late=True, **keywords) as sender:
        there = joining.result(20)
        for number in range(3):
            taking = Call(loaded, there)
            report = sender.send(model())
            assert set(report.backends) == {number}
            assert report.lost == {}
            assert differing(taking.result(20), model()) == []
            leaving.append(there)
            joining = Call(tk.connect, address, **keywords)
            assert sender.admit(wait=20) == (number + 1,)
            there = joining.result(20)
        there.close()
