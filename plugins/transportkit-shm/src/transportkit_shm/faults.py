"""How the operating system's refusals become this library's errors; nothing else belongs here."""

from __future__ import annotations

import contextlib
import errno
import resource
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The backend that an error is told of, unless another is named.
NAME = "shm"

_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})
_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT, errno.ENOBUFS})


def fault(doing: str, error: OSError, backend: str = NAME) -> BackendError:
    """The error for a system call that failed while ``doing`` something; the caller raises it ``from`` its cause."""
    reason = error.strerror or str(error)
    if error.errno in _DESCRIPTORS:
        return no_descriptors(f"{doing}: {reason}", backend)
    if error.errno in _SPACE:
        return ResourceError(
            f"{doing}: {reason}; give a smaller `chunk_bytes=` or `slots=`, or raise the limit on memory or file size",
            backend=backend,
        )
    return BackendError(f"{doing}: {reason}", backend=backend)


def no_descriptors(what: str, backend: str = NAME) -> ResourceError:
    """The error for a process that may open no further descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"{what}; the descriptor limit of this process is {soft} (`ulimit -n`): raise it, or close files",
        backend=backend,
    )


@contextlib.contextmanager
def native(doing: str, backend: str = NAME) -> Iterator[None]:
    """Around system calls only: a wait that raises one of this library's own `OSError` kin must stay outside."""
    try:
        yield
    except OSError as error:
        raise fault(doing, error, backend) from error
