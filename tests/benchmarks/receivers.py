"""The measured sessions: a sender here, a receiver in a spawned process."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

MIB = 1 << 20


def resident(field: str = "VmHWM") -> int:
    """The peak (or, as ``VmRSS``, present) resident memory of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def forget_peak() -> None:
    """Let the peak be what is resident now."""
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


def receive(
    address: str, how: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any], pipe: Connection
) -> None:
    """Take update after update in one way until the sender closes; then tell the growth of the peak."""
    torch.set_num_threads(1)
    target = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()} if how == "load" else {}
    forget_peak()
    before = resident("VmRSS")
    with tk.connect(address, **options) as receiver:
        pipe.send("ready")
        try:
            while True:
                if how == "load":
                    receiver.load_into(target)
                else:
                    read_in_place(receiver)
        except tk.PeerClosedError:
            pipe.send(resident() - before)


def read_in_place(receiver: tk.Receiver) -> None:
    for lease in receiver.chunks():
        for _, _, tensor in lease:
            xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy())
            del tensor


class Session:
    """A sender here and receivers in spawned processes."""

    def __init__(self, source: dict[str, Tensor], how: str, receivers: int = 1, **options: Any) -> None:
        ctx = multiprocessing.get_context("spawn")
        self.source = source
        self._folder = tempfile.TemporaryDirectory()
        self.sender = tk.serve(f"unix:{self._folder.name}/link", receivers=receivers, **options)
        shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
        self._pipes, self._children = [], []
        for _ in range(receivers):
            ours, theirs = ctx.Pipe()
            child = ctx.Process(target=receive, args=(self.sender.address, how, shapes, options, theirs))
            child.start()
            self._pipes.append(ours)
            self._children.append(child)
        self.sender.wait()
        for pipe in self._pipes:
            pipe.recv()

    def send(self) -> float:
        """One update, in seconds: the whole call, while the receiver asks for it in a loop."""
        start = time.perf_counter()
        self.sender.send(self.source)
        return time.perf_counter() - start

    def work(self) -> float:
        """Processor time of this process for one update, in seconds."""
        start = time.process_time()
        self.sender.send(self.source)
        return time.process_time() - start

    def send_fresh(self) -> float:
        """The same with tensors that are made during the call, each on its own."""
        start = time.perf_counter()
        self.sender.send((name, tensor.clone()) for name, tensor in self.source.items())
        return time.perf_counter() - start

    def close(self) -> int:
        """End all; returns the largest growth of a receiver's peak memory, in bytes."""
        self.sender.close()
        grown = [int(pipe.recv()) for pipe in self._pipes]
        for child in self._children:
            child.join()
        self._folder.cleanup()
        return max(grown)


def send_for_ever(address: str, source: dict[str, Tensor], backend: str) -> None:
    with tk.serve(address, backends=[backend]) as sender:
        while True:
            sender.send(source)


def notice(backend: str, times: int) -> Iterator[float]:
    """Seconds from the SIGKILL of a sender in mid-update until its receiver raises."""
    source = {f"w{i}": torch.ones(4 * MIB) for i in range(16)}
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            yield _notice(f"unix:{folder}/link", source, backend, 0.05 + 0.01 * number)


def _notice(address: str, source: dict[str, Tensor], backend: str, pause: float) -> float:
    child = multiprocessing.get_context("spawn").Process(target=send_for_ever, args=(address, source, backend))
    child.start()
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        killed = time.perf_counter()
        child.kill()

    with tk.connect(address, wait=60, backends=[backend]) as receiver:
        receiver.load_into(target)
        timer = threading.Timer(pause, kill)
        timer.start()
        try:
            while True:
                receiver.load_into(target)
        except tk.PeerLostError:
            seconds = time.perf_counter() - killed
        timer.join()
    child.join()
    return seconds


def grow(backend: str, *, strided: bool) -> tuple[int, int]:
    """How far 4 GiB through 3 slots of 16 MiB raise the peak memory of the sender and the receiver, in bytes."""
    count, size = 64, 64 * MIB
    shape = (8192, size // 8192 // 2)
    source = {f"w{i}": torch.ones(shape, dtype=torch.bfloat16) for i in range(count)}
    if strided:
        source = {name: tensor.t() for name, tensor in source.items()}
    session = Session(source, "load", backends=[backend], slots=3, chunk_bytes=16 * MIB)
    forget_peak()
    before = resident("VmRSS")
    session.send()
    session.send()
    mine = resident() - before
    return mine, session.close()


def handshake(times: int) -> list[float]:
    """Seconds from the receiver's first byte to the agreement, in one process, waiting for peers excluded."""
    return list(_handshakes(times))


def _handshakes(times: int) -> Iterator[float]:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(times + 1):
            sender = tk.serve(f"unix:{folder}/link{number}")
            waiting = threading.Thread(target=sender.wait)
            waiting.start()
            start = time.perf_counter()
            receiver = tk.connect(sender.address)
            taken = time.perf_counter() - start
            waiting.join()
            receiver.close()
            sender.close()
            if number:
                yield taken
