"""A `gloo` group that is lost in mid-update, all members being well: they go on over the next backend, and meet anew.

A receiver that is asked how far it is before it has noticed anything has nothing against `gloo`, and goes on over
another group.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gloo_ends as ends
import pytest

import transportkit as tk
from transportkit.testing import Call, bulk, in_process, prints
from transportkit_collective.exporter import CollectiveExporter
from transportkit_collective.importer import CollectiveImporter

if TYPE_CHECKING:
    from transportkit.session import Receiver

pytestmark = pytest.mark.timeout(90)

#: Which broadcast of the first update finds the connections of one rank shut down; its trial has one, and it 21.
SEVERED = 7


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """The fork server and its descriptors are there before anybody counts."""
    in_process(int, method="forkserver")


def severing(cls: Any, method: str, patch: Any = setattr) -> None:
    """Have one rank of this process lose its connections to the group, once, in mid-update."""
    original = getattr(cls, method)
    calls = iter(range(1, 1 << 30))

    def patched(self: Any, *args: Any) -> Any:
        if next(calls) == 1 + SEVERED:
            self._member.plane.sever()
        return original(self, *args)

    patch(cls, method, patched)


def take_severed(receiver: Receiver, updates: int) -> list[Any]:
    severing(CollectiveImporter, "open")
    return ends.take(receiver, updates)


@pytest.mark.parametrize(
    ("rank", "count", "following"),
    [("sender", 2, "pickle"), ("sender", 3, "shm"), ("receiver", 2, "shm"), ("receiver", 3, "pickle")],
)
def test_the_group_is_lost_in_mid_update(
    rank: str, count: int, following: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ends.address()
    keywords = {**ends.KEYWORDS, "backends": ("gloo", following)}
    updates = [bulk(1 << 20, seed) for seed in range(3)]
    takes = ends.take if rank == "sender" else take_severed
    if rank == "sender":
        severing(CollectiveExporter, "publish", monkeypatch.setattr)
    with (
        ends.receivers(where, count - 1, ends.take, len(updates) + 1, **keywords) as others,
        ends.receivers(where, 1, takes, len(updates) + 1, **keywords) as (one,),
        tk.serve(where, receivers=count, **keywords) as sender,
    ):
        assert {(each.backend, each.lane) for each in sender.agreement.assignments} == {("gloo", 0)}
        report = Call(sender.send, updates[0]).result(40)
        assert {following} <= set(report.backends.values()) <= {following, "gloo"}
        assert report.lost == {}
        moved = [re.match(r"receiver (\d): gloo to (\w+) from chunk (\d+): ", line) for line in report.reroutes]
        assert {int(line[1]): line[2] for line in moved if line} == report.backends
        assert all(0 < int(line[3]) < report.chunks[0] for line in moved if line), report.reroutes
        for tensors in updates[1:]:
            report = Call(sender.send, tensors).result(40)
            assert report.backends == dict.fromkeys(range(count), "gloo")
            assert report.reroutes == ()
            assert len({each.lane for each in sender.agreement.assignments}) == 1
        Call(sender.send, ends.LAST).result(40)
        for child in (*others, one):
            assert child.result(20) == [prints(tensors) for tensors in (*updates, ends.LAST)]


def test_a_group_is_lost_again_and_again() -> None:
    """In one update after the other, by another rank; each time it meets anew."""
    where = ends.address()
    keywords = {**ends.KEYWORDS, "backends": ("gloo", "shm", "pickle")}
    updates = [bulk(1 << 20, seed) for seed in range(4)]
    with (
        ends.receivers(where, 1, take_severed_from, 1, len(updates) + 1, **keywords) as (one,),
        ends.receivers(where, 1, take_severed_from, 2, len(updates) + 1, **keywords) as (two,),
        tk.serve(where, receivers=2, **keywords) as sender,
    ):
        reports = [Call(sender.send, tensors).result(40) for tensors in updates]
        assert [bool(report.reroutes) for report in reports] == [True, True, False, False]
        assert all({"shm"} <= set(report.backends.values()) <= {"shm", "gloo"} for report in reports[:2])
        assert [set(report.backends.values()) for report in reports[2:]] == [{"gloo"}, {"gloo"}]
        Call(sender.send, ends.LAST).result(40)
        for child in (one, two):
            assert child.result(20) == [prints(tensors) for tensors in (*updates, ends.LAST)]


def take_severed_from(receiver: Receiver, update: int, updates: int) -> list[Any]:
    """Lose the connections in the fifth chunk of this update."""
    original = CollectiveImporter.open

    def patched(self: Any, header: Any, *args: Any) -> Any:
        if (header.update, header.seq) == (update, 4):
            self._member.plane.sever()
        return original(self, header, *args)

    CollectiveImporter.open = patched  # type: ignore[method-assign]
    return ends.take(receiver, updates)
