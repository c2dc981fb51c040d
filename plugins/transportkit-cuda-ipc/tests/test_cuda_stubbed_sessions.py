"""Whole sessions between processes through every line of the thin module, over a runtime that is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda_ends
import pytest

from transportkit.session import connect, serve
from transportkit.testing import Child, bulk, in_process, prints
from transportkit.testing import ends as given

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)

WITHIN = 20.0


def options(**more: Any) -> dict[str, Any]:
    return {"backends": ("cuda-stub",), "timeout": WITHIN, "wait": WITHIN, "chunk_bytes": 7000, "slots": 2, **more}


@pytest.mark.parametrize("handover", ["host", "event"])
def test_what_is_asked_of_cuda_in_a_session(handover: str, tmp_path: Path) -> None:
    in_process(int, method="forkserver")
    order: tuple[Any, ...] = (cuda_ends.serve_over_stubs, f"unix:{tmp_path}/s", options(), 3)
    if handover == "event":
        order = (cuda_ends.by_event, *order)
    with Child(*order, method="forkserver") as sender:
        took = (cuda_ends.connect_over_stubs, f"unix:{tmp_path}/s", options())
        with Child(*took, method="forkserver") as one, Child(*took, method="forkserver") as other:
            for child in (one, other):
                came, journal = child.result(WITHIN)
                assert came == [prints(bulk(60_000, seed)) for seed in range(3)]
                assert journal == ["open", "close"]
            assert sender.result(WITHIN) == ["malloc", "export", "export", "free"]


@pytest.mark.parametrize("killed", ["sender", "receiver"])
def test_whoever_is_killed_leaves_nothing_mapped_or_kept(killed: str, tmp_path: Path) -> None:
    in_process(int, method="forkserver")
    at = f"unix:{tmp_path}/s", options()
    sending: tuple[Any, ...] = (cuda_ends.one_end, serve, *at)
    taking: tuple[Any, ...] = (cuda_ends.one_end, connect, *at)
    if killed == "sender":
        dying, staying = (*sending, cuda_ends.endless), (*taking, cuda_ends.until_lost)
    else:
        dying, staying = (*taking, given.first_chunk), (*sending, cuda_ends.until_lost)
    with Child(*staying, method="forkserver") as left, Child(*dying, method="forkserver") as child:
        assert child.heard(WITHIN) == "mid-update"
        child.kill()
        journal = left.result(WITHIN)
    assert journal == (["open", "close"] if killed == "sender" else ["malloc", "export", "free"])


def test_a_process_does_not_map_its_own_memory(tmp_path: Path) -> None:
    in_process(int, method="forkserver")
    with Child(cuda_ends.within_one_process, f"unix:{tmp_path}/s", options(), method="forkserver") as child:
        told, journal = child.result(WITHIN)
    assert "cudaError201" in told[0]
    assert "two processes that share the pid and ipc namespaces" in told[0]
    assert journal == ["malloc", "export", "free"]
