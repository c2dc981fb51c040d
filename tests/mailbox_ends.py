"""Mailboxes for tests: over each backend, and what producers in processes of their own do; asserts nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from session_ends import Talk

#: The backends that a mailbox on one host may be carried by, as far as they are installed.
WAYS = [name for name in ("shm", "mpqueue", "pickle") if name in entry_points(group="transportkit.backends").names]


class Request(msgspec.Struct):
    """What most tests send."""

    id: str
    pixels: torch.Tensor
    more: dict[str, torch.Tensor] = {}


@dataclasses.dataclass
class Way:
    """A backend, and how its producers find the inbox.

    Args:
        backend: its name.
        address: of the inbox.
    """

    backend: str
    address: str

    def inbox(self, **keywords: Any) -> tk.Inbox:
        return tk.Inbox(self.address, **{"backends": [self.backend], "timeout": 20, "wait": 20} | keywords)

    def where(self, inbox: tk.Inbox, **keywords: Any) -> Any:
        """What a producer is given: an address and keywords, or an outbox that it inherits."""
        keywords = {"backends": [self.backend], "timeout": 20} | keywords
        return inbox.outbox(**keywords) if self.backend == "mpqueue" else (self.address, keywords)

    def outbox(self, inbox: tk.Inbox, **keywords: Any) -> tk.Outbox:
        """An outbox in this process."""
        return reach(self.where(inbox, **keywords))

    @contextlib.contextmanager
    def both(self, inbox: dict[str, Any] | None = None, **keywords: Any) -> Iterator[tuple[tk.Inbox, tk.Outbox]]:
        """Both ends in this process; the outbox is left without a word, so that a test may leave messages in it."""
        with self.inbox(**inbox or {}) as box:
            outbox = self.outbox(box, **keywords)
            try:
                yield box, outbox
            finally:
                with contextlib.suppress(tk.TransportKitError):
                    outbox.close(timeout=0)


def reach(where: Any) -> tk.Outbox:
    """The outbox that a producer was told of."""
    if isinstance(where, tk.Outbox):
        return where
    address, keywords = where
    return tk.Outbox(address, **{"wait": 20} | keywords)


def address_in(folder: Path, name: str = "m") -> str:
    return f"unix:{folder}/{name}"


def value(producer: int, message: int, tensor: int, size: int = 3000) -> torch.Tensor:
    """The tensor that this producer puts at this place."""
    return torch.arange(size, dtype=torch.float32) + 1000 * producer + 100 * message + tensor


def produce(talk: Talk, where: Any, producer: int, messages: int, tensors: int, size: int = 3000) -> str:
    """Put so many messages, in order, and leave."""
    with reach(where) as outbox:
        for number in range(messages):
            outbox.put(
                {
                    "producer": producer,
                    "message": number,
                    "t": [value(producer, number, i, size) for i in range(tensors)],
                }
            )
        return outbox.identity


def put_and_return(talk: Talk, where: Any, count: int, size: int) -> None:
    """Put, and end the process without a word to the outbox."""
    outbox = reach(where)
    for number in range(count):
        outbox.put({"message": number, "t": value(0, number, 0, size)})
    talk.say("put")
    os._exit(0)


def put_for_ever(talk: Talk, where: Any, tensors: int, size: int) -> None:
    """Put one message after another until killed; says the number of each that was put."""
    outbox = reach(where)
    talk.say(outbox.identity)
    number = 0
    while True:
        outbox.put({"message": number, "t": [value(0, number, i, size) for i in range(tensors)]})
        number += 1


def consume_for_ever(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    with tk.Inbox(address, **keywords) as inbox:
        talk.say(os.getpid())
        for message in inbox:
            talk.say(message["message"])


def open_and_sleep(talk: Talk, address: str, keywords: dict[str, Any]) -> None:
    """An inbox that nobody takes from."""
    with tk.Inbox(address, **keywords):
        talk.say("open")
        time.sleep(600)
