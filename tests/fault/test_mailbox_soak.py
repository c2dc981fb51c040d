"""The soak, scaled down: nothing lost from the living, nothing corrupt, memory and descriptors flat."""

from __future__ import annotations

import pytest
from mailbox_ends import WAYS
from mailbox_soak import soak


@pytest.mark.slow
@pytest.mark.parametrize("backend", WAYS)
def test_producers_that_are_killed_and_started_again(backend: str) -> None:
    outcome = soak(backend, messages=250 if backend == "shm" else 60, producers=4, kill_every=0.3, kills=4)
    assert outcome["killed"] >= 1
    assert outcome["memory growth"] < 64 << 20
    assert outcome["descriptors"][-1] < outcome["descriptors"][0] + 40
