"""A file that takes its name only when it is whole; what is in it is decided elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self

from transportkit.cli import CommandError
from transportkit.cli.terminal import size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Unfinished:
    """Bytes on their way to a path, in a temporary file beside it, which is removed unless `finish` is reached.

    Args:
        path: a file that is there is replaced by `finish`, and keeps its mode.

    Raises:
        CommandError: nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._directory = self._target.parent
        self._temporary: Path | None = None
        self._descriptor = -1
        self._check()

    def _check(self) -> None:
        if not self._directory.is_dir():
            raise CommandError(f"cannot write {self.path}: there is no directory {self._directory}")
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise CommandError(f"cannot write {self.path}: no permission to make files in {self._directory}")
        if os.path.lexists(self._target) and not self._target.is_file():
            raise CommandError(f"cannot write {self.path}: what is there is no regular file")

    def begin(self, nbytes: int) -> None:
        """Make the temporary file. Raises `CommandError`, also where the disk plainly has no room for ``nbytes``."""
        with self._errors():
            disk = os.statvfs(self._directory)
            free = disk.f_bavail * disk.f_frsize
            if nbytes > free > 0:  # some file systems say 0 for "I do not know"
                raise CommandError(
                    f"cannot write {self.path}: it will be {size(nbytes)}, and {self._directory} has {size(free)} free"
                )
            stem = os.fsdecode(os.fsencode(self._target.name)[:100])  # names are bound in bytes
            name = f".{stem}.{secrets.token_hex(4)}.partial"
            self._temporary = self._directory / name
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(self._descriptor, stat.S_IMODE(self._target.stat().st_mode))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at a byte offset of the file. Raises `CommandError`."""
        view = memoryview(data)
        with self._errors():
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def copy(self, source: int, start: int, offset: int, nbytes: int) -> None:
        """Write ``nbytes`` of an open file, from its byte ``start``, at an offset of this. Raises `CommandError`."""
        with self._errors():
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            while nbytes:
                count = os.sendfile(self._descriptor, source, start, nbytes)
                if not count:
                    raise CommandError(f"cannot write {self.path}: what was written before is gone")
                start, nbytes = start + count, nbytes - count

    def finish(self) -> None:
        """See the bytes to the disk and give the file its name. Raises `CommandError`."""
        assert self._temporary is not None
        with self._errors():
            os.fsync(self._descriptor)
            os.replace(self._temporary, self._target)
            self._temporary = None

    def close(self) -> None:
        """Remove the temporary file unless it has become the real one. Idempotent."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        return self._directory

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "; make room, or write elsewhere" if error.errno in _FULL else ""
            raise CommandError(f"cannot write {self.path}: {error.strerror or error}{hint}") from error
