"""Who puts a descriptor on the inherited queue, and who waits for it; how a message looks does not belong here."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from transportkit.errors import BackendError
from transportkit_shm.descriptor_queue import key_of
from transportkit_shm.faults import native
from transportkit_shm.handover import Holder
from transportkit_shm.unnamed import NAME

if TYPE_CHECKING:
    from transportkit.deadline import Deadline
    from transportkit.transport import Wiring
    from transportkit_shm.descriptor_queue import DescriptorQueue


class _Bell(Holder):
    """A wait for one descriptor that another thread can end.

    Args:
        fileno: the descriptor that is waited for.
        event: `select.EPOLLIN` or `select.EPOLLOUT`.
    """

    def __init__(self, fileno: int, event: int) -> None:
        self._event = -1
        self._poll: select.epoll | None = None
        super().__init__()
        with native("waiting for the inherited queue", NAME):
            try:
                self._poll = select.epoll()
                self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._poll.register(self._event, select.EPOLLIN)
                self._poll.register(fileno, event)
            except BaseException:
                self.close()
                raise

    def wait(self, wiring: Wiring, deadline: Deadline) -> None:
        """Until the descriptor is ready or the bell has rung. Raises what `Wiring.wait_readable` raises."""
        assert self._poll is not None
        wiring.wait_readable(self._poll.fileno(), deadline)
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass

    def ring(self) -> None:
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        with self._lock:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


class Parcel(Holder):
    """A descriptor that is to be put on the queue.

    Args:
        queue: the inherited one.
        token: the session's token.
        receiver: the importer's number.
        memory: the descriptor; owned from here on.
        nbytes: size of the memory behind it.
    """

    def __init__(self, queue: DescriptorQueue, token: bytes, receiver: int, memory: int, nbytes: int) -> None:
        self._memory = memory
        super().__init__()
        self._queue = queue
        self._key = key_of(token, receiver)
        self._nbytes = nbytes
        self._bell: _Bell | None = None

    def put(self, wiring: Wiring, deadline: Deadline) -> None:
        """Put it, and close it. The queue is full only of what earlier sessions left, which the importer removes.

        Raises what `DescriptorQueue.put` and `Wiring.wait_readable` raise, and `BackendError` after `abort`.
        """
        try:
            while True:
                self._check()
                try:
                    if self._queue.put(self._key, self._nbytes, self._memory):
                        return
                except BackendError as error:
                    if isinstance(error.__cause__, ConnectionError):
                        raise wiring.lost(error) from error.__cause__
                    raise
                if self._bell is None:
                    self._bell = _Bell(self._queue.use("sender").fileno(), select.EPOLLOUT)
                    continue  # it may have been aborted before there was a bell to ring
                self._bell.wait(wiring, deadline)
        finally:
            self.close()

    def abort(self) -> None:
        """Make `put` raise, now or later. From any thread, never blocks."""
        self._aborted = True
        if (bell := self._bell) is not None:
            bell.ring()

    def close(self) -> None:
        """Close the descriptor. Idempotent; what is on its way arrives."""
        self._aborted = True
        with self._lock:
            self._close_descriptors()
        if self._bell is not None:
            self._bell.close()

    def _close_descriptors(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _check(self) -> None:
        if self._aborted:
            raise BackendError("the handover of the shared memory was stopped", backend=NAME)


class Awaited(Holder):
    """The place of one importer at the queue: what comes for it is kept here.

    Args:
        queue: the inherited one.
        token: the session's token.
        receiver: the importer's number.

    Raises:
        BackendError: this process has given its end of the queue up.

    Attributes:
        key: by which its message is known.
        served: whether what it awaits has come, or will not come.
    """

    def __init__(self, queue: DescriptorQueue, token: bytes, receiver: int) -> None:
        super().__init__()
        self.key = key_of(token, receiver)
        self.served = False
        self._queue = queue
        self._memory = -1
        self._nbytes = 0
        self._failure: BackendError | None = None
        self._bell: _Bell | None = None
        queue.expect(self)

    def fetch(self, wiring: Wiring, deadline: Deadline) -> tuple[int, int]:
        """The descriptor, closed on exec, which the caller closes, and the size that was told of it.

        Raises what `DescriptorQueue.collect` and `Wiring.wait_readable` raise, and `BackendError` after `abort`.
        """
        try:
            while True:
                self._check()
                self._queue.collect(self)
                if self.served:
                    return self._take()
                deadline.check()  # a queue full of stale messages keeps the wait from ever lasting
                if self._bell is None:
                    self._bell = _Bell(self._queue.use("receiver").fileno(), select.EPOLLIN)
                    continue  # something may have been given, or aborted, before there was a bell to ring
                self._bell.wait(wiring, deadline)
        finally:
            self.close()

    def give(self, memory: int, nbytes: int) -> None:
        """What was awaited has come; the descriptor is owned from here on."""
        self._memory, self._nbytes, self.served = memory, nbytes, True
        self.wake()

    def fail(self, error: BackendError) -> None:
        """What was awaited will not come."""
        self._failure, self.served = error, True
        self.wake()

    def wake(self) -> None:
        """Make a wait look again."""
        if (bell := self._bell) is not None:
            bell.ring()

    def abort(self) -> None:
        """Make `fetch` raise, now or later. From any thread, never blocks."""
        self._aborted = True
        self.wake()

    def close(self) -> None:
        """Expect nothing any more. Idempotent."""
        self._aborted = True
        self._queue.forget(self)
        with self._lock:
            self._close_descriptors()
        if self._bell is not None:
            self._bell.close()

    def _take(self) -> tuple[int, int]:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            memory, self._memory = self._memory, -1
        return memory, self._nbytes

    def _close_descriptors(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _check(self) -> None:
        if self._aborted:
            raise BackendError("fetching the shared memory was stopped", backend=NAME)
