"""Round trips of one message and its answer: through mailboxes and through torch.multiprocessing queues."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as torch_processes

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Rounds in which the queue and the mailboxes alternate, and trips of each in a round.
ROUNDS, TRIPS = 5, 100


def one() -> list[torch.Tensor]:
    """One tensor of 600 KB, made anew: a queue moves the caller's own into shared memory."""
    return [_large.clone()]


def fifty() -> list[torch.Tensor]:
    """50 tensors of 2 KB."""
    return [tensor.clone() for tensor in _small]


_large = torch.randn(150_000)
_small = [torch.randn(512) for _ in range(50)]


class Mailboxes:
    """A mailbox to another process and one back."""

    def __init__(self, *, copy: bool = True, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tk-")
        there, back = (f"unix:{self._folder.name}/{name}" for name in ("there", "back"))
        self._inbox = tk.Inbox(back, **options)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_answer_mail, args=(there, back, copy, options), daemon=True)
        self._process.start()
        self._outbox = tk.Outbox(there, wait=60, **options)

    def trip(self, tensors: list[torch.Tensor]) -> float:
        began = time.perf_counter()
        self._outbox.put({"id": 1, "tensors": tensors})
        self._inbox.get(timeout=60)
        return time.perf_counter() - began

    def close(self) -> None:
        self._outbox.put({"id": 0})
        self._outbox.close()
        self._process.join(10)
        self._inbox.close()
        self._folder.cleanup()


def _answer_mail(there: str, back: str, copy: bool, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with tk.Inbox(there, **options) as inbox, tk.Outbox(back, **options) as outbox:
        while True:
            came = inbox.get(copy=copy)
            message = came if copy else came.value
            if not message["id"]:
                return
            outbox.put({"id": message["id"]})
            del message, came  # a leased message is released with it


class Queues:
    """The same through two queues."""

    def __init__(self) -> None:
        context = torch_processes.get_context("spawn")
        self._there, self._back = context.Queue(), context.Queue()
        self._process = context.Process(target=_answer_queue, args=(self._there, self._back), daemon=True)
        self._process.start()

    def trip(self, tensors: list[torch.Tensor]) -> float:
        began = time.perf_counter()
        self._there.put({"id": 1, "tensors": tensors})
        self._back.get()
        return time.perf_counter() - began

    def close(self) -> None:
        self._there.put({"id": 0})
        self._process.join(10)


def _answer_queue(there: Any, back: Any) -> None:
    torch.set_num_threads(1)
    while True:
        message = there.get()
        if not message["id"]:
            return
        back.put({"id": message["id"]})
        del message


def rows() -> Iterator[str]:
    """A row for each way of waiting and of taking; the ratios are medians of those of the rounds."""
    queues = Queues()
    boxes = {
        "polling before it blocks": Mailboxes(),
        "blocking only": Mailboxes(spin=0),
        "polling, leased": Mailboxes(copy=False),
        "polling, no checksum": Mailboxes(checksum=False),
    }
    for kind, (make, words) in enumerate(((one, "one tensor of 600 KB"), (fifty, "50 tensors of 2 KB"))):
        taken: dict[str, list[float]] = {name: [] for name in ("queue", *boxes)}
        for _ in range(ROUNDS):
            taken["queue"].append(_trips(queues.trip, make))
            for name, box in boxes.items():
                taken[name].append(_trips(box.trip, make))
        theirs = statistics.median(taken["queue"])
        for name in boxes:
            ratio = statistics.median(q / ours for q, ours in zip(taken["queue"], taken[name], strict=True))
            ours = statistics.median(taken[name])
            target = 10 if kind else 2.5 if name == "blocking only" else 5
            yield (
                f"| mailbox there and back, {words}, {name}; torch queues | >= {target} | "
                f"{ratio:.2f} | {ours * 1e6:.0f} us | {theirs * 1e6:.0f} us |"
            )
    for ends in (queues, *boxes.values()):
        ends.close()


def _trips(trip: Callable[[list[torch.Tensor]], float], make: Callable[[], list[torch.Tensor]]) -> float:
    return statistics.median(trip(make()) for _ in range(TRIPS))
