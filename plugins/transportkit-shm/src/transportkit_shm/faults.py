"""How the operating system's refusals become this library's errors; nothing else belongs here."""

from __future__ import annotations

import contextlib
import errno
import resource
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "shm"

_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})
_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT, errno.ENOBUFS})


def fault(doing: str, error: OSError) -> BackendError:
    """The error for a system call that failed while ``doing`` something; the caller raises it ``from`` its cause."""
    reason = error.strerror or str(error)
    if error.errno in _DESCRIPTORS:
        return no_descriptors(f"{doing}: {reason}")
    if error.errno in _SPACE:
        return ResourceError(
            f"{doing}: {reason}; give a smaller `chunk_bytes=` or `slots=`, or raise the limit on memory or file size",
            backend=NAME,
        )
    return BackendError(f"{doing}: {reason}", backend=NAME)


def no_descriptors(what: str) -> ResourceError:
    """The error for a process that may open no further descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"{what}; the descriptor limit of this process is {soft} (`ulimit -n`): raise it, or close files", backend=NAME
    )


@contextlib.contextmanager
def native(doing: str) -> Iterator[None]:
    """Around system calls only: a wait that raises one of this library's own `OSError` kin must stay outside."""
    try:
        yield
    except OSError as error:
        raise fault(doing, error) from error
