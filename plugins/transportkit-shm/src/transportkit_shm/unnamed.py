"""The arena's file of the backend `mpqueue`: shared memory without a name and without memfd; no mapping belongs here.

It is a file of the tmpfs at `/dev/shm` that never has a name and cannot be given one. So whoever is killed, at whatever
moment, leaves nothing behind.

Unlike a memfd it cannot be sealed against shrinking. It need not be: its descriptor goes through a queue that only the
two processes of a pair have inherited, both map it at once, and close it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from transportkit.errors import BackendError
from transportkit_shm.faults import native

if TYPE_CHECKING:
    from transportkit_shm.arena import Layout

NAME = "mpqueue"

FOLDER = "/dev/shm"


def open_file() -> int:
    """A new empty file in shared memory, closed on exec. Raises `OSError`."""
    # A Python that was built on an old system does not know the flag, as it does not know memfd.
    nameless = getattr(os, "O_TMPFILE", 0o20000000 | os.O_DIRECTORY)
    return os.open(FOLDER, nameless | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)


def check(memory: int, layout: Layout) -> None:
    """Raise `BackendError` unless the descriptor is a file that can be written and is large enough."""
    with native("looking at the shared memory that came", NAME):
        found = os.fstat(memory)
        access = fcntl.fcntl(memory, fcntl.F_GETFL) & os.O_ACCMODE
    if not stat.S_ISREG(found.st_mode) or access != os.O_RDWR:
        raise BackendError("the descriptor that came is no shared memory", backend=NAME)
    if found.st_size < layout.nbytes:
        raise BackendError(
            f"the shared memory that came has {found.st_size} bytes, the terms need {layout.nbytes}", backend=NAME
        )
