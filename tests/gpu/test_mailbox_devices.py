"""Messages with tensors on a CUDA device, from another process, through whichever backend is agreed, or one by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import Request, address_in

import transportkit as tk
from transportkit.testing import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: The agreed one, those that stage, and the one that does not, where it is installed.
WAYS = [None, "shm", "pickle", *(name for name in entry_points(group="transportkit.backends").names if "cuda" in name)]


@pytest.fixture(params=WAYS)
def keywords(request: pytest.FixtureRequest) -> dict[str, Any]:
    named = {} if request.param is None else {"backends": [request.param]}
    return {"device": "cuda", "timeout": 60, "chunk_bytes": 1 << 20, **named}


# -- in the producer's process -----------------------------------------------------------------------------------------


def put(address: str, keywords: dict[str, Any], make: Callable[..., Iterator[Any]], *args: Any) -> None:
    with tk.Outbox(address, **keywords) as outbox:
        for message in make(*args):
            outbox.put(message)


def request_of(size: int) -> Iterator[Request]:
    pixels = torch.arange(float(size), device="cuda")
    yield Request("1", pixels, {"host": torch.ones(size), "strided": pixels[::2]})


def computed_late(count: int) -> Iterator[dict[str, Any]]:
    stream = torch.cuda.Stream()
    for number in range(count):
        tensor = torch.zeros(200_000, device="cuda")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            tensor.fill_(number)
        torch.cuda.current_stream().wait_stream(stream)
        yield {"n": number, "t": tensor}


def the_same(count: int) -> Iterator[torch.Tensor]:
    pixels = torch.ones(500_000, device="cuda")
    for _ in range(count):
        yield pixels


# -- in this one -------------------------------------------------------------------------------------------------------


def carry(tmp_path: Path, keywords: dict[str, Any], kind: Any, make: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """What comes of these messages, put by another process, one by one."""
    with tk.Inbox(address_in(tmp_path), type=kind, wait=60, producers=1, **keywords) as inbox:
        with Child(put, inbox.address, keywords, make, *args) as child:
            yield from inbox
            child.result(60)


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000], ids=["inline", "one chunk", "several chunks"])
def test_a_tensors_device_is_kept(tmp_path: Path, keywords: dict[str, Any], size: int) -> None:
    (came,) = carry(tmp_path, keywords, Request, request_of, size)
    assert came.pixels.device.type == came.more["strided"].device.type == "cuda"
    assert came.more["host"].device.type == "cpu"
    pixels = torch.arange(float(size), device="cuda")
    assert torch.equal(came.pixels, pixels)
    assert torch.equal(came.more["strided"], pixels[::2])
    came.pixels.add_(1)
    assert torch.equal(came.pixels, pixels + 1)
    assert torch.equal(came.more["strided"], pixels[::2])


def test_device_tensors_come_to_the_host_where_the_inbox_is_there(tmp_path: Path) -> None:
    with tk.Inbox(address_in(tmp_path), wait=60) as inbox, tk.Outbox(inbox.address, device="cuda") as outbox:
        outbox.put([torch.ones(50_000, device="cuda")])
        (came,) = inbox.get()
        assert came.device.type == "cpu"
        assert came.sum() == 50_000


def test_what_a_stream_still_computes_is_waited_for(tmp_path: Path, keywords: dict[str, Any]) -> None:
    came = list(carry(tmp_path, keywords, Any, computed_late, 3))
    assert [message["n"] for message in came] == [0, 1, 2]
    assert all(bool((message["t"] == message["n"]).all()) for message in came)


def test_device_memory_stays_flat(tmp_path: Path, keywords: dict[str, Any]) -> None:
    messages = carry(tmp_path, keywords, Any, the_same, 30)
    assert next(messages).sum() == 500_000
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for message in messages:
        assert message.sum() == 500_000
        del message
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1 << 20
