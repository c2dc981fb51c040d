"""After an update over `gloo` that ended early: the next one comes over a group of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gloo_ends as ends
import pytest

import transportkit as tk
from transportkit.testing import Call, bulk, prints
from transportkit.testing.processes import report

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from transportkit.session import Receiver, Sender

pytestmark = pytest.mark.timeout(90)


def take_after_a_failure(receiver: Receiver, leaves: bool, updates: int) -> list[Any]:
    """Take a part of one update, then all of so many."""
    try:
        for number, _ in enumerate(receiver.receive()):
            if leaves and number == 3:
                break
    except tk.PeerFailedError:
        assert not leaves
    report("cut")
    return ends.take(receiver, updates)


def cut(tensors: list[tuple[str, torch.Tensor]], source_fails: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for number, each in enumerate(tensors):
        if source_fails and number == len(tensors) // 2:
            raise ValueError("no more")
        yield each


def time_out(sender: Sender) -> None:
    """What becomes of the sender's groups when nobody uses the session for longer than their time limit."""
    for lane in sender._lanes:
        lane.exporter._member.plane.sever()  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("culprit", ["source", "receiver"])
def test_a_group_that_ended_after_an_update_that_ended_early_is_made_anew(culprit: str, count: int) -> None:
    where = ends.address()
    leaves = culprit == "receiver"
    updates = [list(bulk(1 << 20, seed).items()) for seed in range(3)]
    with (
        ends.receivers(where, 1, take_after_a_failure, leaves, 3) as one,
        ends.receivers(where, count - 1, take_after_a_failure, False, 3) as others,
        tk.serve(where, receivers=count, **ends.KEYWORDS) as sender,
    ):
        assert sender.agreement is not None
        used = [list(sender._lanes)]
        failing = Call(sender.send, cut(updates[0], source_fails=not leaves))
        assert isinstance(failing.error(30), tk.PeerFailedError if leaves else tk.SourceError)
        for child in (*one, *others):
            assert (child.heard(20), child.heard(20)) == ("agreed", "cut")
        time_out(sender)
        for tensors in updates[1:]:
            told = Call(sender.send, iter(tensors)).result(40)
            assert told.backends == dict.fromkeys(range(count), "gloo")
            assert (told.reroutes, told.lost) == ((), {})
            used.append(list(sender._lanes))
        assert [len(lanes) for lanes in used] == [1, 1, 1]
        assert used[0] != used[1] == used[2], "the group that ended was used again, or a good one was not"
        Call(sender.send, ends.LAST).result(40)
        for child in (*one, *others):
            assert child.result(20) == [prints(tensors) for tensors in (*updates[1:], ends.LAST)]


def test_a_group_lasts_from_one_whole_update_to_the_next() -> None:
    where = ends.address()
    with ends.receivers(where, 1, ends.take, 3), tk.serve(where, **ends.KEYWORDS) as sender:
        used = []
        for seed in range(3):
            Call(sender.send, bulk(100_000, seed)).result(30)
            used.append(list(sender._lanes))  # as above
        assert used[0] == used[1] != []
