"""Messages with tensors on a CUDA device, through whichever backend is agreed, or through one in particular."""

from __future__ import annotations

import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import Request, address_in

import transportkit as tk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: The agreed one, those that stage, and the one that does not, where it is installed.
WAYS = [None, "shm", "pickle", *(name for name in entry_points(group="transportkit.backends").names if "cuda" in name)]


@pytest.fixture(params=WAYS)
def keywords(request: pytest.FixtureRequest) -> dict[str, Any]:
    named = {} if request.param is None else {"backends": [request.param]}
    return {"device": "cuda", "timeout": 60, "chunk_bytes": 1 << 20, **named}


def carry(tmp_path: Path, keywords: dict[str, Any], messages: list[Any], kind: Any = Any) -> list[Any]:
    """What comes of these messages, put by a thread."""
    with tk.Inbox(address_in(tmp_path), type=kind, wait=60, producers=1, **keywords) as inbox:

        def put() -> None:
            with tk.Outbox(inbox.address, **keywords) as outbox:
                for message in messages:
                    outbox.put(message)

        thread = threading.Thread(target=put)
        thread.start()
        came = list(inbox)
        thread.join(60)
        return came


@pytest.mark.parametrize("size", [10, 100_000, 1_000_000], ids=["inline", "one chunk", "several chunks"])
def test_a_tensors_device_is_kept(tmp_path: Path, keywords: dict[str, Any], size: int) -> None:
    pixels = torch.arange(float(size), device="cuda")
    (came,) = carry(
        tmp_path, keywords, [Request("1", pixels, {"host": torch.ones(size), "strided": pixels[::2]})], Request
    )
    assert came.pixels.device.type == came.more["strided"].device.type == "cuda"
    assert came.more["host"].device.type == "cpu"
    assert torch.equal(came.pixels, pixels)
    assert torch.equal(came.more["strided"], pixels[::2])
    came.pixels.add_(1)
    assert torch.equal(pixels, torch.arange(float(size), device="cuda"))


def test_device_tensors_come_to_the_host_where_the_inbox_is_there(tmp_path: Path) -> None:
    with tk.Inbox(address_in(tmp_path), wait=60) as inbox, tk.Outbox(inbox.address, device="cuda") as outbox:
        outbox.put([torch.ones(50_000, device="cuda")])
        (came,) = inbox.get()
        assert came.device.type == "cpu"
        assert came.sum() == 50_000


def test_what_a_stream_still_computes_is_waited_for(tmp_path: Path, keywords: dict[str, Any]) -> None:
    stream = torch.cuda.Stream()
    tensors = []
    for number in range(3):
        tensor = torch.zeros(200_000, device="cuda")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            tensor.fill_(number)
        torch.cuda.current_stream().wait_stream(stream)
        tensors.append(tensor)
    came = carry(tmp_path, keywords, [{"n": number, "t": tensor} for number, tensor in enumerate(tensors)])
    assert all(bool((message["t"] == message["n"]).all()) for message in came)


def test_device_memory_stays_flat(tmp_path: Path, keywords: dict[str, Any]) -> None:
    pixels = torch.ones(500_000, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with tk.Inbox(address_in(tmp_path), wait=60, **keywords) as inbox:

        def put() -> None:
            with tk.Outbox(inbox.address, **keywords) as outbox:
                for _ in range(30):
                    outbox.put(pixels)

        thread = threading.Thread(target=put)
        thread.start()
        for _ in range(30):
            assert inbox.get().sum() == 500_000
        thread.join(60)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1 << 20
