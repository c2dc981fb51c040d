"""Every test starts with no group of an earlier one at work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from transportkit_collective.runner import parked

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds in which a group that was given up has ended: the time limits of the tests' sessions, and their slack.
PARKED = 25.0


@pytest.fixture(autouse=True)
def groups_at_rest() -> Iterator[None]:
    """A group that was given up in the middle of a transfer ends by its own time limit, which may be after its test."""
    yield
    limit = time.monotonic() + PARKED
    while parked():
        assert time.monotonic() < limit, f"{parked()} groups are still at work"
        time.sleep(0.02)
