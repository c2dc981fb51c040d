"""When a `get` polls before it waits in the kernel, and when it does not."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How long the inbox polls, a wait that is much shorter than that, and one that is longer, in seconds.
SPIN, SHORT, LONG = 1.0, 0.05, 2.5

#: Looks at the poller, without waiting, of a `get` that does not poll: one before it waits, one after it.
FEW = 3


class Counted:
    """An `select.epoll` that counts how often it is asked without waiting."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller
        self.looks = 0

    def poll(self, timeout: float | None = None) -> Any:
        self.looks += timeout == 0
        return self._poller.poll(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


class Ends:
    """An inbox and an outbox to it."""

    def __init__(self, inbox: tk.Inbox, outbox: tk.Outbox) -> None:
        self.inbox, self._outbox = inbox, outbox
        self._poller = inbox._intake._poller = Counted(inbox._intake._poller)  # type: ignore[assignment]

    def looks(self, pause: float) -> int:
        """How often a `get` looks whose message comes after a while."""
        self._poller.looks = 0
        timer = threading.Timer(pause, self._outbox.put, ("something",))
        timer.start()
        assert self.inbox.get(20) == "something"
        timer.join()
        return self._poller.looks


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    where = f"unix:{tmp_path}/s"
    with tk.Inbox(where, spin=SPIN, backends=("pickle",)) as inbox, tk.Outbox(where, backends=("pickle",)) as outbox:
        outbox.put("first")
        assert inbox.get(20) == "first"
        yield Ends(inbox, outbox)


def test_a_wait_polls_where_polling_nearly_answered_the_last_one(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", int)  # as if nobody else wanted the processor
    ends.looks(SHORT)
    assert ends.looks(SHORT) > FEW
    assert ends.looks(LONG) > FEW  # in vain
    assert ends.looks(SHORT) <= FEW
    assert ends.looks(SHORT) > FEW


def test_a_wait_whose_processor_somebody_else_wants_does_not_poll(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.looks(SHORT)
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(0.001))
    assert ends.looks(SHORT) <= FEW


def test_a_short_timeout_bounds_polling_too(ends: Ends) -> None:
    ends.looks(SHORT)
    began = time.monotonic()
    with pytest.raises(tk.DeadlineError):
        ends.inbox.get(0.01)
    assert time.monotonic() - began < SPIN
