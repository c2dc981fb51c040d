"""A gloo group in a process that may hardly open a descriptor: refused before torch has opened any."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any, cast

import pytest

import transportkit as tk
from transportkit_collective.planes import GLOO_DESCRIPTORS, gloo_group

if TYPE_CHECKING:
    from collections.abc import Iterator


def opened() -> dict[str, str]:
    folder = "/proc/self/fd"
    return {name: os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}


@pytest.fixture(params=range(GLOO_DESCRIPTORS + 2))
def room(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many descriptors this process may open; two too few at most, for a group of three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filling: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
        try:
            while True:
                filling.append(os.dup(0))
        except OSError:
            pass
        for _ in range(request.param):
            os.close(filling.pop())
        yield request.param
    finally:
        for one in filling:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_group_without_descriptors_is_refused_and_leaks_none(room: int) -> None:
    with pytest.raises(tk.ResourceError, match=f"takes 7 descriptors, and after {room} the system said") as caught:
        gloo_group(cast("Any", None), 0, 3, "127.0.0.1", 5.0)
    assert caught.value.backend == "gloo"


def test_what_torch_itself_takes_is_no_more_than_that() -> None:
    import torch.distributed as dist

    before = opened()
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    taken = opened().items() - before.items()
    del device
    assert 0 < len(taken) < GLOO_DESCRIPTORS
