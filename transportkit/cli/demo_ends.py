"""The two processes of `transportkit demo`: one sends, one receives, both tell the third; nothing is printed here.

Each is told when to go on, and tells what it did, through a pipe of its own, as a tuple that begins with a word.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs

from transportkit.errors import TransportKitError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from torch import Tensor

#: The plain copy is measured on at most so much of the model, so that a large one is not in memory three times.
COPY_BYTES = 1 << 30

#: How long one end waits for the other, which imports torch and reads the model meanwhile, in seconds.
_PATIENCE = 600.0

_PAUSE = 0.05


@attrs.frozen
class Assignment:
    """What both ends must know.

    Args:
        address: where they meet.
        file: the model's file, or None for a synthetic one.
        size: of the synthetic one, in bytes.
        updates: how often it is moved.
        keywords: for `serve` and `connect`.
        watched: whether somebody looks at the progress.
    """

    address: str
    file: Path | None
    size: int
    updates: int
    keywords: dict[str, Any]
    watched: bool


def sending(pipe: Connection, assignment: Assignment) -> None:
    """Tells ``model``, ``agreement``, ``progress``, and ``sent`` for each update, with the rate of a plain copy."""
    _run(pipe, lambda: _send(pipe, assignment))


def receiving(pipe: Connection, assignment: Assignment) -> None:
    """Tells ``landed`` with the digest of each update, then ``ready`` for the next."""
    _run(pipe, lambda: _receive(pipe, assignment))


def _run(pipe: Connection, work: Callable[[], None]) -> None:
    import torch

    # The copy beside which the rates stand is one thread's; this also keeps the two ends from fighting for cores.
    torch.set_num_threads(1)
    try:
        work()
        pipe.send(("done",))
    except (EOFError, BrokenPipeError):
        pass  # who started this has gone
    except TransportKitError as error:
        pipe.send(("failed", str(error)))
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _send(pipe: Connection, assignment: Assignment) -> None:
    from transportkit.session import serve

    model = _model(assignment)
    pipe.send(("model", len(model), sum(tensor.nbytes for tensor in model.values()), digest(model)))
    with serve(assignment.address, wait=_PATIENCE, **assignment.keywords) as sender:
        pipe.send(("agreement", str(sender.agreement)))
        copied = _Copy(model)
        for version in range(1, assignment.updates + 1):
            pipe.recv()
            seconds = copied.seconds()
            report = sender.send(model, version=version, progress=_teller(pipe) if assignment.watched else None)
            pipe.send(("sent", report.seconds, report.nbytes, copied.nbytes / max(seconds, 1e-9)))


def _receive(pipe: Connection, assignment: Assignment) -> None:
    import torch

    from transportkit.session import connect

    with connect(assignment.address, wait=_PATIENCE, **assignment.keywords) as receiver:
        model = dict(receiver.receive())
        for version in range(1, assignment.updates + 1):
            if version > 1:
                receiver.load_into(model)
            pipe.send(("landed", digest(model)))
            for tensor in model.values():  # so that nothing of this update can pass for the next
                tensor.reshape(-1).view(torch.uint8).bitwise_not_()
            pipe.send(("ready",))
        pipe.recv()  # closing first would end the sender's session before it has heard of the last update


def digest(model: Mapping[str, Tensor]) -> str:
    """The xxh3-128 of all names, dtypes, shapes and bytes, in order."""
    import torch
    import xxhash

    whole = xxhash.xxh3_128()
    for name, tensor in model.items():
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return whole.hexdigest()


class _Copy:
    """A warm copy of the model, or of its beginning, within this process: ``dst.copy_(src)`` for each tensor."""

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.nbytes = 0
        for tensor in model.values():
            if not self._pairs or self.nbytes + tensor.nbytes <= COPY_BYTES:
                self._pairs.append((tensor.clone(), tensor))
                self.nbytes += tensor.nbytes

    def seconds(self) -> float:
        """The median of three."""
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for target, source in self._pairs:
                target.copy_(source)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def _model(assignment: Assignment) -> dict[str, Tensor]:
    """The model in memory of this process's own, as a trainer has it."""
    if assignment.file is None:
        from transportkit.cli.synthetic import synthetic_model

        return dict(synthetic_model(assignment.size))
    from transportkit.cli.files import open_model

    with open_model(assignment.file) as model:
        return {name: tensor.clone() for name, tensor in model.tensors()}


def _teller(pipe: Connection) -> Callable[[int, int | None], None]:
    next_time = 0.0

    def tell(done: int, total: int | None) -> None:
        nonlocal next_time
        now = time.monotonic()
        if now >= next_time or done == total:
            next_time = now + _PAUSE
            pipe.send(("progress", done, total))

    return tell
