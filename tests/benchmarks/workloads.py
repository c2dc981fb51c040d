"""What is measured with: models of a given shape, and the baselines that every row is compared to."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def large() -> dict[str, Tensor]:
    """81 bf16 tensors, 1.1 GB: one embedding of 256 MB, the rest in the sizes of a transformer's layers."""
    sizes = [(65536, 2048)] + [(2048, 2048), (2048, 5504), (2048, 2048), (2048,)] * 20
    return {f"layers.{i}.weight": random(size) for i, size in enumerate(sizes)}


def small() -> dict[str, Tensor]:
    """20 000 bf16 tensors of 50 KB, 1 GB."""
    return {f"experts.{i}.weight": random((25, 1000)) for i in range(20_000)}


def random(size: tuple[int, ...]) -> Tensor:
    """A bf16 tensor of any bits."""
    return torch.randint(-(1 << 15), 1 << 15, size, dtype=torch.int16).view(torch.bfloat16)


def nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def median(function: Callable[[], object], times: int) -> float:
    """The median of so many runs, in seconds, after one that is not counted."""
    function()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copy_seconds(source: dict[str, Tensor], times: int) -> float:
    """One warm copy in this process, ``dst.copy_(src)`` a tensor, on one thread."""
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    return median(copy, times)


def socket_seconds(total: int, chunk: int, times: int) -> float:
    """``sendall`` from a child into ``recv_into`` here over a unix socket pair, the same bytes in chunks."""
    here, there = socket.socketpair()
    go, gone = multiprocessing.get_context("fork").Pipe()
    child = os.fork()
    if child == 0:
        here.close()
        block = bytes(chunk)
        try:
            while gone.recv():
                for _ in range(total // chunk):
                    there.sendall(block)
        finally:
            os._exit(0)
    there.close()
    buffer = memoryview(bytearray(chunk))

    def transfer() -> None:
        go.send(True)
        for _ in range(total // chunk):
            got = 0
            while got < chunk:
                got += here.recv_into(buffer[got:])

    taken = median(transfer, times)
    go.send(False)
    os.waitpid(child, 0)
    here.close()
    return taken


def _pipe_reader(pipe: Any) -> None:
    torch.set_num_threads(1)
    while (count := pipe.recv()) is not None:
        for _ in range(count):
            pickle.loads(pipe.recv_bytes())
        pipe.send(None)


def pipe_seconds(source: dict[str, Tensor], times: int) -> float:
    """Each tensor pickled through a `multiprocessing.Pipe`."""
    ctx = multiprocessing.get_context("spawn")
    here, there = ctx.Pipe()
    child = ctx.Process(target=_pipe_reader, args=(there,))
    child.start()

    def transfer() -> None:
        here.send(len(source))
        for pair in source.items():
            here.send_bytes(pickle.dumps(pair, protocol=5))
        here.recv()

    taken = median(transfer, times)
    here.send(None)
    child.join()
    return taken


def _queue_reader(queue: Any, answers: Any, target: dict[str, tuple[int, ...]]) -> None:
    torch.set_num_threads(1)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in target.items()}
    while (count := queue.get()) is not None:
        for _ in range(count):
            name, tensor = queue.get()
            tensors[name].copy_(tensor)
        answers.put(None)


def queue_seconds(source: dict[str, Tensor], times: int) -> float:
    """Tensors made anew each time, put on a `torch.multiprocessing` queue, and copied into targets at the other end."""
    ctx = torch.multiprocessing.get_context("spawn")
    queue, answers = ctx.Queue(), ctx.Queue()
    child = ctx.Process(target=_queue_reader, args=(queue, answers, {n: tuple(t.shape) for n, t in source.items()}))
    child.start()

    def transfer() -> None:
        queue.put(len(source))
        for name, tensor in source.items():
            queue.put((name, tensor.clone()))
        answers.get()

    taken = median(transfer, times)
    queue.put(None)
    child.join()
    return taken


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
