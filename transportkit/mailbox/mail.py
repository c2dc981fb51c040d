"""`Mail`: a message whose tensors are read in place; and the postmark that every message has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import attrs

from transportkit.errors import LeaseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.lifecycle import Imported


@attrs.frozen
class Postmark:
    """Where a message came from.

    Args:
        producer: identity of the outbox that put it.
        number: its number there, from 1.
    """

    producer: str
    number: int


class Token:
    """Lives for as long as a lease; whoever has to know its end holds a weak reference."""

    __slots__ = ("__weakref__",)


class Mail:
    """What `Inbox.get` returns with ``copy=False``: a message whose tensors are leased.

    The tensors are for reading, and valid until `release` or the end of the ``with`` block. One that is kept beyond
    that stays valid on the CPU, but withholds its slot from the producer until it is dropped.

    Attributes:
        producer: identity of the outbox that put it.
        number: its number there, from 1.
    """

    def __init__(self, value: Any, mark: Postmark, chunk: Imported | None, settle: Callable[[], None]) -> None:
        self.producer = mark.producer
        self.number = mark.number
        self._value = value
        self._chunk = chunk
        self._settle = settle
        self._token: Token | None = Token()

    @property
    def token(self) -> Token:
        """What lives for as long as the lease."""
        assert self._token is not None
        return self._token

    @property
    def value(self) -> Any:
        """The message. Raises `LeaseError` once it is released."""
        if self._token is None:
            raise LeaseError("this mail is released; copy its tensors (`tensor.clone()`) before that")
        return self._value

    def release(self) -> None:
        """End the lease, so that the producer may use the slot again. Idempotent; from any thread.

        Raises:
            LeaseError: a tensor of it is still alive somewhere; the slot is free as soon as that is dropped.
        """
        chunk = self._chunk
        self.end()
        if chunk is not None and chunk.viewed:
            self._chunk = chunk
            raise LeaseError(
                f"message {self.number} of {self.producer} is still viewed by a tensor that came from it; drop or copy "
                "that tensor, and its slot is free"
            )

    def end(self) -> None:
        """End the lease; its slot is held back while a tensor of it is alive. Idempotent."""
        self._value = self._chunk = None
        if self._token is not None:
            self._token = None
            self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
