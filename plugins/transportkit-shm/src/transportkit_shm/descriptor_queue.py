"""The queue of the backend `mpqueue`, which two processes inherit: descriptors go through it, one way; no wait is here.

It is a socket pair that keeps message boundaries (``SOCK_SEQPACKET``), not a `multiprocessing.Queue`. A message is a
descriptor and 48 bytes that say for whom it is, put and got by one system call each, in the caller's thread::

    magic "tk-mpq/1", key: HMAC(the session's token, receiver), size of the memory in bytes  + the descriptor

So there is no half message, whenever its writer is killed; no lock in shared memory that a dead process could hold; no
feeder thread that loses errors; no connection back to the sender; and nothing is unpickled.

One queue serves one pair of ends, or one seat, which one producer after another takes. Each session's key differs. An
importer says which key it expects before the exporter can have put anything, since it joins first. So a message whose
key nobody expects is of a session that is over: it is dropped, counted and logged. What somebody else at this end
expects is kept for that one, in whatever order messages come.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import logging
import multiprocessing.context
import os
import secrets
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any

from transportkit.errors import BackendError, UsageError
from transportkit_shm.faults import fault, no_descriptors
from transportkit_shm.handover import Holder
from transportkit_shm.unnamed import NAME

if TYPE_CHECKING:
    from transportkit.wire import Role
    from transportkit_shm.queue_ends import Awaited

MAGIC = b"tk-mpq/1"
MESSAGE = struct.Struct("<8s32sQ")

#: Most messages that are read in one go, so that a caller looks at its deadline now and then.
BATCH = 64

_log = logging.getLogger("transportkit.mpqueue")


def key_of(token: bytes, receiver: int) -> bytes:
    """By which a message is known to be this session's."""
    return hmac.digest(token, b"transportkit-mpqueue\0" + receiver.to_bytes(4, "little"), "sha256")


class DescriptorQueue(Holder):
    """Both ends of the queue, as far as this process has them; made by `new`, in the parent.

    Picklable while a process is being started. A forked child keeps the ends that its parent had not begun to use.

    Attributes:
        mark: by which the two ends find out that theirs is the same queue.
        stale: number of messages that were dropped because nobody expected them any more.
    """

    def __init__(self, mark: str, **ends: socket.socket | None) -> None:
        super().__init__()
        self.mark = mark
        self.stale = 0
        self._ends: dict[str, socket.socket] = {role: end for role, end in ends.items() if end is not None}
        self._used: set[str] = set()
        self._expected: dict[bytes, Awaited] = {}
        for end in self._ends.values():
            end.set_inheritable(False)  # those that a spawned process was started with are not
        weakref.finalize(self, _close_all, self._ends).atexit = False

    @classmethod
    def new(cls) -> DescriptorQueue:
        """A queue of which this process has both ends. Raises `BackendError`."""
        try:
            sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise fault("making a queue for descriptors", error, NAME) from error
        return cls(secrets.token_hex(8), sender=sender, receiver=receiver)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            multiprocessing.context.assert_spawning(self)
        except RuntimeError as error:
            raise UsageError("a queue of descriptors goes to a process as an argument while that is started") from error
        with self._lock:
            return _inherit, (self.mark, self._ends.get("sender"), self._ends.get("receiver"))

    # -- the ends -----------------------------------------------------------------------------------------------------

    def use(self, role: Role) -> socket.socket:
        """One end, which forked children lose from now on.

        Raises:
            BackendError: this process has given it up.
        """
        end = self._ends.get(role)
        if end is None:
            raise BackendError(f"this process has given its {role}'s end of the inherited queue up", backend=NAME)
        self._used.add(role)
        return end

    def close(self, role: Role) -> None:
        """Close this process's copy of one end; whoever waits at it is told. Idempotent."""
        with self._lock:
            end = self._ends.pop(role, None)
            if end is not None:
                end.close()
            if role == "receiver":
                for awaited in self._expected.values():
                    awaited.wake()

    def _close_descriptors(self) -> None:
        for role in self._used & self._ends.keys():
            self._ends.pop(role).close()
        self._expected.clear()

    # -- the exporter's side ------------------------------------------------------------------------------------------

    def put(self, key: bytes, nbytes: int, memory: int) -> bool:
        """Put a descriptor; the caller's stays open. False where the queue is full.

        Raises:
            ResourceError: too many descriptors are on their way, or there is no memory for the message.
            BackendError: nobody has the other end any more.
        """
        message = MESSAGE.pack(MAGIC, key, nbytes)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
        with self._lock:
            try:
                self.use("sender").sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise _hung_up() from error
            except OSError as error:
                raise fault("putting the shared memory's descriptor on the inherited queue", error, NAME) from error
        return True

    # -- the importer's side ------------------------------------------------------------------------------------------

    def expect(self, awaited: Awaited) -> None:
        """From now on the message with this key is kept for this one."""
        with self._lock:
            self.use("receiver")
            self._expected[awaited.key] = awaited

    def collect(self, awaited: Awaited) -> None:
        """Read what has come, without waiting, until this one has what it awaits.

        Raises:
            ResourceError: this process may open no further descriptor.
            BackendError: nobody has the other end any more, or this one is given up.
        """
        with self._lock:
            for _ in range(BATCH):
                if awaited.served or not self._receive():
                    return

    def forget(self, awaited: Awaited) -> None:
        """This one expects nothing any more; drop what has come meanwhile, so that it takes up no memory."""
        with self._lock:
            if self._expected.get(awaited.key) is not awaited:
                return
            del self._expected[awaited.key]
            with contextlib.suppress(BackendError):
                while "receiver" in self._ends and self._receive():
                    pass

    def _receive(self) -> bool:
        """Read one message and see to it; False where there is none. Waits for nothing, except for the lock."""
        # `socket.recv_fds` drops its flags on the way to the system (Python 3.11), and with them close-on-exec.
        try:
            message, ancillary, flags, _ = self.use("receiver").recvmsg(
                MESSAGE.size + 1,
                socket.CMSG_SPACE(4 * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise _hung_up() from error
        except OSError as error:
            raise fault("reading the inherited queue", error, NAME) from error
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not message and not descriptors:
            raise _hung_up()
        try:
            self._hand_on(message, descriptors, truncated=bool(flags & socket.MSG_CTRUNC))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _hand_on(self, message: bytes, descriptors: array.array[int], *, truncated: bool) -> None:
        """Give a message's descriptor to the one that expects it; what is left in ``descriptors`` is for nobody."""
        magic, key, nbytes = MESSAGE.unpack(message) if len(message) == MESSAGE.size else (b"", b"", 0)
        awaited = self._expected.get(key) if magic == MAGIC else None
        if awaited is None or awaited.served:
            self.stale += 1
            _log.info(
                "a descriptor of a session that is over was dropped from an inherited queue (%d so far)", self.stale
            )
        elif truncated and not descriptors:  # the system had one and could not install it
            awaited.fail(no_descriptors("no descriptor came: this process may open no further one", NAME))
        elif len(descriptors) != 1 or truncated:
            awaited.fail(BackendError(f"{len(descriptors)} descriptors came where one was due", backend=NAME))
        else:
            awaited.give(descriptors.pop(), nbytes)


def _inherit(mark: str, sender: socket.socket | None, receiver: socket.socket | None) -> DescriptorQueue:
    return DescriptorQueue(mark, sender=sender, receiver=receiver)


def _close_all(ends: dict[str, socket.socket]) -> None:
    for end in ends.values():
        end.close()


def _hung_up() -> BackendError:
    return BackendError("no process has the other end of the inherited queue any more", backend=NAME)
