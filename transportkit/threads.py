"""Starting a thread, or saying why not; what the threads do belongs to those who need them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from transportkit.errors import ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that runs. Raises `ResourceError` where the system gives no further one."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ResourceError(
            f"the thread {name} cannot be started ({error}); raise the limit of processes (`ulimit -u`) or of memory"
        ) from error
    return thread
