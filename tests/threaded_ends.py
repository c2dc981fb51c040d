"""A sender and several receivers in one process, each on its own thread, for tests that need many quick sessions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import torch
from session_ends import model, zeros

import transportkit as tk
from transportkit.link import SocketLink, pair_sockets
from transportkit.session.options import options

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL: dict[str, Any] = {"chunk_bytes": 4096, "timeout": 20.0, "wait": 20.0}


class Ends:
    """A sender and its receivers in this process, each on a thread of its own.

    Args:
        only: the backends of single receivers.
        apart: other keywords of single receivers.
    """

    def __init__(
        self,
        count: int,
        *backends: str,
        only: dict[int, tuple[str, ...]] | None = None,
        apart: dict[int, dict[str, Any]] | None = None,
        **keywords: Any,
    ) -> None:
        common = SMALL | {"backends": backends} | keywords
        wanted = options(common)
        sockets = [pair_sockets() for _ in range(count)]
        self.sender = tk.Sender.over([SocketLink.over(left) for left, _ in sockets], wanted, {})
        own = [{"backends": (only or {}).get(n, backends)} | (apart or {}).get(n, {}) for n in range(count)]
        theirs = [options(common | one) for one in own]
        self.receivers = [tk.Receiver.over(SocketLink.over(s[1]), w, {}) for s, w in zip(sockets, theirs, strict=True)]
        self.pool = ThreadPoolExecutor(count + 1)

    def update(self, source: Any, takes: Callable[[tk.Receiver], Any], **keywords: Any) -> tuple[tk.Report, list[Any]]:
        """One update: the sender's report, and what each receiver has taken."""
        taken = [self.pool.submit(takes, receiver) for receiver in self.receivers]
        report = self.pool.submit(self.sender.send, source, **keywords).result(60)
        return report, [one.result(60) for one in taken]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self.sender, *self.receivers):
            end.abort()
        self.pool.shutdown(wait=True)
        for end in (self.sender, *self.receivers):
            end.close()


def loaded(receiver: tk.Receiver) -> dict[str, torch.Tensor]:
    target = zeros()
    receiver.load_into(target)
    return target


def received(receiver: tk.Receiver) -> dict[str, torch.Tensor]:
    return dict(receiver.receive())


def applied(receiver: tk.Receiver) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    receiver.apply(lambda pairs: got.update((name, tensor.clone()) for name, tensor in pairs))
    return got


def leased(receiver: tk.Receiver) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    shapes = {}
    for lease in receiver.chunks():
        for spec, _, tensor in lease:
            shapes[spec.name] = (getattr(torch, spec.dtype), spec.shape)
            parts.setdefault(spec.name, []).append(tensor.reshape(-1).view(torch.uint8).clone())
            del tensor
    return {name: torch.cat(parts[name]).view(dtype).reshape(shape) for name, (dtype, shape) in shapes.items()}


WAYS = {"load_into": loaded, "receive": received, "apply": applied, "chunks": leased}
SOURCES: dict[str, Callable[[], Any]] = {"mapping": model, "iterator": lambda: iter(model().items())}
