"""What moving a model costs beside the model: no more than the slots and a constant, on either side.

``TRANSPORTKIT_TEST_GIB`` scales the model, in GiB; it is small here, and the claim is made for 4 and more.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest
import session_ends as ends
import torch
from session_ends import BACKENDS, Child, Talk

import transportkit as tk

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

GIB = float(os.environ.get("TRANSPORTKIT_TEST_GIB", "0.5"))
CHUNK_BYTES = 16 << 20
SLOTS = 3
ALLOWED = SLOTS * CHUNK_BYTES + (64 << 20)


class Peak:
    """The most memory that this process holds in between, in bytes, above what it held at the beginning.

    Pages of files and of shared memory count as well: ``VmRSS`` is the sum.
    """

    def __enter__(self) -> Self:
        # The kernel's own high-water mark can be reset; where it cannot, a thread looks often enough.
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._exact = True
        except OSError:
            self._exact = False
        self._start = self._most = rss()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._exact:
            self._most = max(self._most, status("VmHWM"))

    @property
    def above(self) -> int:
        return self._most - self._start

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._most = max(self._most, rss())


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def weights(layout: str) -> dict[str, torch.Tensor]:
    """Touched tensors of `GIB` in all, each of 64 MiB but the last, which is a quarter of it all."""
    total = int(GIB * (1 << 30))
    large = total // 4
    count = (total - large) // (64 << 20)
    tensors = {f"layer.{n}": torch.full((4096, 4096), float(n)) for n in range(count)}
    tensors["embedding"] = torch.full((large // 4096 // 4, 4096), 7.0)
    if layout == "strided":
        return {name: tensor.t() for name, tensor in tensors.items()}
    return tensors


def targets(layout: str) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, -1.0) for name, tensor in weights(layout).items()}


def sending(talk: Talk, address: str, keywords: dict[str, Any], layout: str, source: str) -> int:
    tensors = weights(layout)
    with Peak() as peak, tk.serve(address, **keywords) as sender:
        for _ in range(2):
            sender.send(tensors if source == "mapping" else iter(tensors.items()))
    return peak.above


def taking(talk: Talk, address: str, keywords: dict[str, Any], layout: str, way: str) -> int:
    if way != "load_into":
        return consuming(address, keywords, way)
    target = targets(layout)
    with Peak() as peak, tk.connect(address, **keywords) as receiver:
        for _ in range(2):
            receiver.load_into(target)
    for name, tensor in target.items():
        assert bool((tensor == (7.0 if name == "embedding" else float(name.split(".")[1]))).all()), name
    return peak.above


def consuming(address: str, keywords: dict[str, Any], way: str) -> int:
    """Look at everything and keep nothing."""
    with Peak() as peak, tk.connect(address, **keywords) as receiver:
        for _ in range(2):
            if way == "chunks":
                for lease in receiver.chunks():
                    for _, _, tensor in lease:
                        tensor.view(torch.uint8).view(-1)[::4096].sum()
                    del tensor
            elif way == "receive":
                for _, tensor in receiver.receive():
                    del tensor
            else:
                receiver.apply(lambda pairs: None)
    return peak.above


@pytest.mark.parametrize(
    ("backend", "layout", "source", "way"),
    [
        *((backend, "plain", "mapping", "load_into") for backend in BACKENDS),
        *((backend, "strided", "mapping", "load_into") for backend in BACKENDS),
        ("shm", "strided", "iterator", "load_into"),
        *((backend, "plain", "mapping", "chunks") for backend in BACKENDS),
        ("shm", "plain", "mapping", "apply"),
        ("pickle", "plain", "iterator", "receive"),
    ],
)
def test_what_a_transfer_costs_beside_the_model(backend: str, layout: str, source: str, way: str) -> None:
    largest = int(GIB * (1 << 30)) // 4
    allowed = {"apply": ALLOWED + largest, "receive": ALLOWED + 2 * largest}.get(way, ALLOWED)
    keywords = {"backends": [backend], "chunk_bytes": CHUNK_BYTES, "slots": SLOTS, "wait": 60, "timeout": 60}
    with ends.short_folder() as folder:
        address = f"unix:{folder}/s"
        began = time.monotonic()
        with (
            Child(sending, address, keywords, layout, source) as sender,
            Child(taking, address, keywords, layout, way) as receiver,
        ):
            theirs = receiver.result(250)
            ours = sender.result(60)
    print(
        f"\n{GIB:g} GiB over {backend}, {layout} {source} into {way}: the sender {ours / (1 << 20):.0f} MiB, "
        f"the receiver {theirs / (1 << 20):.0f} MiB above the tensors; {allowed >> 20} MiB are allowed "
        f"({time.monotonic() - began:.1f} s)"
    )
    assert ours <= ALLOWED
    assert theirs <= allowed
