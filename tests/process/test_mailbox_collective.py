"""Mailboxes over a backend that moves chunks by a collective: a message that is taken back costs nobody else's."""

from __future__ import annotations

import random
import threading
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import Way, address_in

import transportkit as tk
from transportkit.mailbox.posting import Posting

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(
        "gloo" not in entry_points(group="transportkit.backends").names,
        reason="transportkit-collective is not installed",
    ),
]


@pytest.fixture
def way(tmp_path: Path) -> Way:
    return Way("gloo", address_in(tmp_path))


class Taking:
    """Takes messages on a thread until the inbox is closed."""

    def __init__(self, inbox: tk.Inbox) -> None:
        self.inbox = inbox
        self.taken: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.taken.extend(inbox))
        self._thread.start()

    def end(self) -> list[Any]:
        """All that came, once nothing more is under way."""
        self.inbox.close()
        self._thread.join(20)
        return self.taken


def test_a_put_that_gives_up_while_the_inbox_waits_costs_only_its_message(way: Way) -> None:
    with way.both() as (inbox, outbox):
        taking, put, errors = Taking(inbox), [], []
        for number in range(20):
            tensor = torch.full((20_000,), float(number))
            try:
                outbox.put(tensor, timeout=None if number % 2 else 0)
            except tk.DeadlineError as error:
                errors.append((number % 2, str(error)))
            else:  # with no time at all it may still meet a reader that is quick
                put.append(number)
        outbox.flush(10)
        assert errors
        assert all(not patient and "no reader" in text for patient, text in errors)
        assert outbox.stats.withdrawn == len(errors)
        assert outbox.stats.slots_in_use == 0
        assert [int(each[0]) for each in taking.end()] == put
        assert inbox.stats.dropped == {"withdrawn": len(errors)}


def test_with_timeouts_at_random_what_is_said_to_be_delivered_is(way: Way) -> None:
    dice = random.Random(4)
    with way.both({"slots": 2, "chunk_bytes": 20_000}, inline=1000) as (inbox, outbox):
        taking, put = Taking(inbox), []
        limit, number = time.monotonic() + 2, 0
        while time.monotonic() < limit:
            number += 1
            tensors = [torch.full((dice.choice([1, 300, 4000, 30_000]),), float(number)) for _ in range(2)]
            try:
                outbox.put(tensors, timeout=dice.choice([0, 0.0005, 0.002, 0.01, 1]))
            except tk.DeadlineError:
                continue
            put.append(number)
        outbox.flush(10)
        taken = taking.end()
    assert [int(each[0][0]) for each in taken] == put
    assert all((tensor == each[0][0]).all() for each in taken for tensor in each)
    assert 0 < len(put) < number


def test_hundreds_of_messages_may_be_put_behind_one_that_is_still_on_its_way(way: Way) -> None:
    with way.both({"capacity": 1000}, capacity=1000) as (inbox, outbox):
        taking = Taking(inbox)
        for _ in range(3):
            outbox.put(torch.ones(500_000))
            for number in range(600):
                outbox.put(number)
        outbox.flush(20)
        taken = taking.end()
        assert [each for each in taken if isinstance(each, int)] == [*range(600)] * 3
        assert len(taken) == 1803


def test_a_message_that_is_taken_back_in_its_middle_leaves_nobody_waiting(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an end of the group waits for without need would run into its limit, and end the group."""
    wait, readers = Posting._wait, iter(range(100))

    def without_reader(self: Posting, until: Any, deadline: Any, what: str) -> None:
        if "reader" in what and next(readers) == 1:
            raise deadline.error()
        wait(self, until, deadline, what)

    monkeypatch.setattr(Posting, "_wait", without_reader)
    with way.both({"chunk_bytes": 20_000, "timeout": 2}, chunk_bytes=20_000, timeout=2) as (inbox, outbox):
        taking = Taking(inbox)
        with pytest.raises(tk.DeadlineError):
            outbox.put(torch.ones(20_000))
        time.sleep(8)  # for a timeout of 2 seconds gloo has a limit of 6
        outbox.put(torch.full((20_000,), 2.0), timeout=20)
        outbox.flush(20)
        assert [int(each.sum()) for each in taking.end()] == [40_000]
        assert inbox.stats.dropped == {"withdrawn": 1}
