"""The baselines of `gloo`: what torch.distributed alone takes to broadcast the same bytes to the same processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor


def _group(path: str, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _receiver(path: str, sizes: list[int], pipe: Connection) -> None:
    torch.set_num_threads(1)
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    group = _group(path, 1)
    while pipe.recv():
        for tensor in tensors:
            _broadcast(group, tensor)
        pipe.send(None)


class Broadcasts:
    """A process that takes broadcasts of tensors of these sizes, in bytes, and a group with it."""

    def __init__(self, sizes: list[int]) -> None:
        ctx = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "store")
        self._pipe, theirs = ctx.Pipe()
        self._child = ctx.Process(target=_receiver, args=(path, sizes, theirs))
        self._child.start()
        self._tensors = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        self._group = _group(path, 0)

    def seconds(self) -> float:
        """One round, from the order to the receiver's word that it has all."""
        start = time.perf_counter()
        self._pipe.send(True)
        for tensor in self._tensors:
            _broadcast(self._group, tensor)
        self._pipe.recv()
        return time.perf_counter() - start

    def close(self) -> None:
        self._pipe.send(False)
        self._child.join()
        self._folder.cleanup()
