"""A store for the rendezvous of a group, which is filled over the links: no server, no port. No message is known here.

What a rank sets goes to the exporter, which tells the others. Each rank keeps all of it, and a `get` waits for the
rest.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined]

from transportkit.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

#: What one group may put into its store. gloo sets one key for each rank, of 178 bytes and 8 more for each pair of
#: ranks; NCCL sets one key.
KEY_LIMIT = 256
VALUE_LIMIT = 1 << 16
KEYS_PER_RANK = 8


class LinkStore(Store):
    """One rank's copy. All methods may be called from any thread.

    Args:
        ranks: how many ranks the group has.
        on_set: called after each `set` of this rank, on its thread.
    """

    def __init__(self, ranks: int, on_set: Callable[[], None]) -> None:
        super().__init__()
        self.seconds = 300.0
        """How long a `get` waits."""
        self._limit = KEYS_PER_RANK * (ranks + 1)
        self._on_set = on_set
        self._entries: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._untold: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._ended = ""

    # -- what the links do ---------------------------------------------------------------------------------------------

    def take_untold(self) -> dict[str, bytes]:
        """What this rank has set and was not told to the others yet."""
        with self._changed:
            untold, self._untold = self._untold, {}
        return untold

    def put(self, entries: dict[str, bytes]) -> None:
        """What other ranks have set. Raises `ProtocolError` for more than a group can need, or for a key set twice."""
        with self._changed:
            for key, value in entries.items():
                if len(key) > KEY_LIMIT or len(value) > VALUE_LIMIT or len(self._entries) >= self._limit:
                    raise ProtocolError("a rank of the group put more into its store than a group needs")
                if self._entries.setdefault(key, value) != value:
                    raise ProtocolError(f"two ranks of the group put something else under {key!r} into its store")
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Make each running and later call raise."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def entries(self) -> tuple[list[bytes], list[bytes]]:
        """What this rank has set, and what all others have."""
        with self._changed:
            return list(self._own.values()), [v for k, v in self._entries.items() if k not in self._own]

    # -- what torch calls ----------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        value = bytes(value)
        with self._changed:
            self._entries[key] = self._own[key] = self._untold[key] = value
            self._changed.notify_all()
        self._on_set()

    def get(self, key: str) -> bytes:
        self._await([key], self.seconds)
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self.seconds if timeout is None else min(timeout.total_seconds(), self.seconds))

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def _await(self, keys: Sequence[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not all(key in self._entries for key in keys):
                if self._ended:
                    raise RuntimeError(self._ended)
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise RuntimeError(f"another rank of the group told nothing within {seconds:g} s")
