"""Whether anybody still has an exporter's memory mapped, whichever way processes end; no CUDA belongs here.

Freeing device memory that another process has mapped is undefined, and CUDA counts nothing. So each lane has a small
memory file, the tether, on which every importer holds a shared lock (`flock`) for as long as its mapping lives. The
kernel drops the lock of a process that dies. The exporter takes the exclusive lock before it frees; where it cannot,
or where the GPU does not finish what is queued on it, the memory is parked, with a thread that waits for either.

A process that dies may lose the lock a moment before the driver is through with it. So each importer also writes into
the tether that it holds, and that it has let go; one that has not said so is waited for until its process is gone.

An importer opens the exporter's descriptor by `/proc/PID/fd`, which needs what CUDA IPC needs as well: one host and one
pid namespace, and one user. Before it maps, it holds the lock and finds the tether open: then the memory stays.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, ResourceError
from transportkit_cuda_ipc import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("transportkit.cuda_ipc")

#: What the file holds: whether the memory is there, then the proof that the file is the one of this session.
OPEN, SHUT = b"tk-cuda/1 open ", b"tk-cuda/1 shut "
PROOF_BYTES = 32
#: Then a byte for each receiver of the lane, in order.
MARKS = len(OPEN) + PROOF_BYTES
HOLDS, LET_GO = b"\x01", b"\x02"

#: How long a process that is about to be gone is waited for, in seconds, and how often it is looked at.
GOING_SECONDS, LOOK = 10.0, 0.01

#: How long the end of a lane waits for memory that nobody has mapped to be freed, in seconds.
FREE_SECONDS = 5.0

LABEL = "transportkit-cuda-ipc"

_parked: set[Anchor] = set()


def parked() -> int:
    """How many lanes' memory this process keeps, since an importer has it mapped still, or its GPU is not through."""
    return len(_parked)


def prove(token: bytes, lane: int) -> bytes:
    """What the tether of a lane holds: only the two ends know the session's token."""
    return hmac.digest(token, f"{LABEL} {lane}".encode(), "sha256")


class Anchor:
    """The exporter's end of a tether.

    Args:
        token: the session's.
        lane: the lane's number.

    Raises:
        ResourceError: no descriptor or memory is left.
    """

    def __init__(self, token: bytes, lane: int) -> None:
        try:
            self._file = os.memfd_create(LABEL, os.MFD_CLOEXEC)
            os.pwrite(self._file, OPEN + prove(token, lane), 0)
        except OSError as error:
            raise ResourceError(f"no memory file could be made: {error.strerror}", backend=NAME) from error
        self._pids: dict[int, int] = {}
        self._awaited = False
        self._error: Exception | None = None

    @property
    def fileno(self) -> int:
        return self._file

    def know(self, index: int, pid: int) -> None:
        """The process of the receiver that is this one in the lane's order."""
        self._pids[index] = pid

    def release(self, free: Callable[[], None]) -> None:
        """No importer can map from now on. ``free`` is called once, in a thread, as soon as none has it mapped.

        Where none has, that is now, and is waited for; but a GPU that does not finish holds nobody up for long. Raises
        what ``free`` raises meanwhile.
        """
        os.pwrite(self._file, SHUT, 0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._awaited = not self._going()
        except OSError:
            self._awaited = False
        thread = threading.Thread(target=self._wait, args=(free,), name="transportkit-cuda-ipc-parked", daemon=True)
        _parked.add(self)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and what this process has goes with it
            _parked.discard(self)
            return
        if self._awaited:
            thread.join(FREE_SECONDS)
            self._awaited = False
            if self._error is not None:
                raise self._error

    def _wait(self, free: Callable[[], None]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            end = time.monotonic() + GOING_SECONDS
            while self._going() and time.monotonic() < end:
                time.sleep(LOOK)
            free()
        except Exception as error:
            if self._awaited:
                self._error = error
            else:  # nobody is left who could be told
                _log.warning("cuda-ipc: parked device memory could not be freed: %s", error)
        finally:
            _parked.discard(self)
            os.close(self._file)

    def _going(self) -> bool:
        """Whether a process that held on, and never said that it let go, is not quite gone."""
        return any(os.pread(self._file, 1, MARKS + index) == HOLDS and _lives(pid) for index, pid in self._pids.items())


class Tether:
    """An importer's end.

    Args:
        pid, fileno: the exporter's process, and the descriptor there.
        index: which receiver of the lane this is.
        proof: what the file must hold.

    Raises:
        BackendError: the exporter cannot be reached that way, or the file is not its tether.
    """

    def __init__(self, pid: int, fileno: int, index: int, proof: bytes) -> None:
        self._lock = threading.Lock()
        self._mark = MARKS + index
        path = f"/proc/{pid}/fd/{fileno}"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise BackendError(
                f"process {pid} of the sender cannot be reached from here ({error.strerror}); the two must share the "
                "pid namespace and the user",
                backend=NAME,
            ) from error
        self._held = False
        try:
            self._proof = proof
            self._check_file()
            self._hold()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise `BackendError` where the sender has closed, so that its memory may be gone."""
        with self._lock:
            held = self._file >= 0 and os.pread(self._file, len(OPEN), 0) == OPEN
        if not held:
            raise BackendError("the sender has closed its memory, or this end was stopped", backend=NAME)

    def release(self) -> None:
        """Nothing is mapped here any more. Idempotent, from any thread."""
        with self._lock:
            if self._file >= 0:
                if self._held:
                    os.pwrite(self._file, LET_GO, self._mark)
                try:  # a forked child may hold a copy of the descriptor, which would keep the lock
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                finally:
                    os.close(self._file)
                    self._file = -1

    def _check_file(self) -> None:
        status = os.fstat(self._file)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        content = os.pread(self._file, len(OPEN) + PROOF_BYTES, 0) if ours else b""
        if not hmac.compare_digest(content[len(OPEN) :], self._proof):
            raise BackendError("what came in the invitation is not the sender's memory file", backend=NAME)

    def _hold(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise BackendError("the sender has closed its memory", backend=NAME) from error
        os.pwrite(self._file, HOLDS, self._mark)
        self._held = True
        self.check()


def _lives(pid: int) -> bool:
    """Whether a process still has what it had open: it is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def _disown() -> None:
    """In a forked child: what the parent has parked is the parent's."""
    _parked.clear()


os.register_at_fork(after_in_child=_disown)
