"""The two ends: slots in device memory that every importer maps, and who waits for whom; no CUDA call is made here.

The copies into a slot run on a stream of the exporter's, after what the caller has queued. How the receiver knows that
they are done is the `Handover`: by default the sender waits on the host before the header leaves, watching links and
deadline meanwhile. With events the header leaves at once, and the receiver's stream waits on the device.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, ProtocolError
from transportkit.mapped import Layout, MappedExporter, MappedImporter, stopped
from transportkit.wire import decode_as, raw
from transportkit_cuda_ipc import NAME
from transportkit_cuda_ipc.matching import CudaTerms
from transportkit_cuda_ipc.tether import Anchor, Tether, prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from transportkit.transport import Terms, Wiring
    from transportkit.wire import Chunk
    from transportkit_cuda_ipc.devices import Device

Handover = Literal["host", "event"]

#: How the receiver learns that a slot is packed. A host that waits costs some tens of microseconds a chunk, little
#: beside the copy of a large one, and needs nothing of the driver; an interprocess event saves that wait and depends on
#: more. Which is faster is for a device to say: `tests/gpu` measures both.
HANDOVER: Handover = "host"

#: Alignment of slots, that of CUDA's own allocations.
ALIGNMENT = 512

#: How long a wait for the GPU spins before it sleeps in between, and how long it sleeps then, in seconds.
SPIN, PAUSE = 200e-6, 50e-6

#: How often a wait looks at the links, and one that nobody waits for at the GPU, in seconds.
LOOK = 0.01

#: How long copies out of a slot, and what the caller has queued before them, may take on the GPU, in seconds.
READ_SECONDS = 60.0

Handle = Annotated[bytes, Meta(max_length=4096)]


class Invitation(Struct, frozen=True):
    """Where the tether is: the exporter's process, and its descriptor there."""

    pid: Annotated[int, Meta(ge=1, le=1 << 30)]
    tether: Annotated[int, Meta(ge=0, le=1 << 30)]


class Reply(Struct, frozen=True):
    """The importer's process."""

    pid: Annotated[int, Meta(ge=1, le=1 << 30)]


class ArenaHandle(Struct, frozen=True):
    """The export.

    Args:
        memory: CUDA's handle of the arena.
        nbytes: its size, in bytes.
        events: CUDA's handle of each slot's event; empty where the exporter waits on the host.
    """

    memory: Handle
    nbytes: int
    events: Annotated[tuple[Handle, ...], Meta(max_length=65536)] = ()


class CudaIpcExporter(MappedExporter):
    """Slots in device memory of its own.

    Args:
        terms: the exporter's.
        wiring: the links.
        make: the class of the GPU.

    Raises:
        ResourceError: no device memory is left.
        BackendError: the GPU cannot be used here.
    """

    backend: ClassVar[str] = NAME

    def __init__(self, terms: Terms, wiring: Wiring, make: type[Device]) -> None:
        layout = Layout(terms.slots, terms.chunk_bytes, ALIGNMENT)
        self._wiring = wiring
        self._handover = HANDOVER
        device = make(decode_as(CudaTerms, terms.params).uuid, terms.slots, interprocess=HANDOVER == "event")
        whole = device.allocate(layout.nbytes)
        try:
            self._anchor = Anchor(terms.token, terms.lane)
        except BaseException:
            device.free(whole)
            raise
        self._device, self._layout, self._receivers = device, layout, terms.receivers
        self._whole: Tensor | None = whole
        super().__init__(whole, layout)

    def invite(self, receiver: int) -> Raw:
        return raw(Invitation(os.getpid(), self._anchor.fileno))

    def admit(self, receiver: int, reply: Raw) -> None:
        self._anchor.know(self._receivers.index(receiver), decode_as(Reply, reply).pid)

    def share(self, receiver: int) -> Raw:
        assert self._whole is not None
        events = self._device.events() if self._handover == "event" else ()
        return raw(ArenaHandle(self._device.export(self._whole), self._layout.nbytes, events))

    def packing(self, slot: int) -> AbstractContextManager[object]:
        return self._device.packing(slot)

    def ready(self, slot: int, deadline: Deadline) -> None:
        """Wait until the slot is packed, unless the importers wait for its event."""
        super().ready(slot, deadline)
        if self._handover == "host":
            self._wait(lambda: self._device.packed(slot), deadline)

    def _wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        look = 0.0
        for now in _polls(done):
            if self._aborted:
                raise stopped(self.backend)
            deadline.check()
            if now >= look:
                look = now + LOOK
                self._wiring.check()

    def close(self) -> None:
        """Free the device memory: now, or as soon as nobody has it mapped and what is queued on it has ended."""
        whole, self._whole = self._whole, None
        super().close()
        if whole is None:
            return
        device = self._device
        done: Callable[[], bool] = lambda: True  # noqa: E731 - of a GPU that has failed, which freeing will say again

        def free() -> None:
            while not done():
                time.sleep(LOOK)
            device.free(whole)

        try:
            done = device.idle()
        finally:
            self._anchor.release(free)


class CudaIpcImporter(MappedImporter):
    """A mapping of the exporter's device memory."""

    backend: ClassVar[str] = NAME

    def __init__(self, terms: Terms, wiring: Wiring, make: type[Device]) -> None:
        super().__init__(Layout(terms.slots, terms.chunk_bytes, ALIGNMENT))
        self._terms = terms
        self._wiring = wiring
        self._make = make
        self._invitation: Invitation | None = None
        self._tether: Tether | None = None
        self._device: Device | None = None
        self._events = False

    def join(self, invitation: Raw) -> Raw:
        self._invitation = decode_as(Invitation, invitation)
        return raw(Reply(os.getpid()))

    def connect(self, deadline: Deadline) -> None:
        """Find the GPU, and hold on to the exporter's tether.

        Raises:
            BackendError: the GPU cannot be used here, or the exporter's process cannot be reached.
        """
        if self._aborted or self._invitation is None:
            raise stopped(self.backend)
        proof = prove(self._terms.token, self._terms.lane)
        self._device = self._make(decode_as(CudaTerms, self._terms.params).uuid)
        index = self._terms.receivers.index(self._terms.receiver)
        self._tether = Tether(self._invitation.pid, self._invitation.tether, index, proof)

    def attach(self, handle: Raw) -> Tensor:
        """The arena, a uint8 tensor of shape ``(slots * stride,)``, mapped until the last view of it dies."""
        export = decode_as(ArenaHandle, handle)
        device, tether = self._device, self._tether
        if self._aborted or device is None or tether is None:
            raise stopped(self.backend)
        if export.nbytes != self._layout.nbytes:
            raise ProtocolError(
                f"the header names an arena of {export.nbytes} bytes, {self._layout.nbytes} were agreed"
            )
        if len(export.events) not in (0, self._layout.slots):
            raise ProtocolError(f"the header brings {len(export.events)} events for {self._layout.slots} slots")
        tether.check()
        whole = device.map(export.memory, export.nbytes, export.events, tether.release)
        self._events, self._tether = bool(export.events), None  # it is released with the mapping
        return whole

    def open(self, header: Chunk, attached: Tensor | None, deadline: Deadline) -> Tensor:
        memory = super().open(header, attached, deadline)
        if self._events:
            assert self._device is not None
            self._device.follow(header.location.offset // self._layout.stride)
        return memory

    def reading(self, header: Chunk) -> AbstractContextManager[object]:
        return self._reading()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if self._device is None:
            raise stopped(self.backend)
        try:
            yield
        finally:  # also where a copy failed: what is queued still reads
            self._drain(self._device, stoppable=True)

    def release(self, header: Chunk) -> None:
        """Return when what the caller has queued, which may read a lease, is done."""
        if self._device is not None:
            self._drain(self._device)

    def _drain(self, device: Device, *, stoppable: bool = False) -> None:
        deadline, look = Deadline(READ_SECONDS, "end of the copies on the GPU"), 0.0
        try:
            for now in _polls(device.idle()):
                if stoppable and self._aborted:  # what is unmapped waits for it all the same
                    raise stopped(self.backend)
                if stoppable and now >= look:
                    look = now + LOOK
                    self._wiring.check()
                deadline.check()
        except DeadlineError as error:
            raise BackendError(f"the GPU does not finish what is queued: {error}", backend=self.backend) from error

    def close(self) -> None:
        super().close()
        tether, self._tether = self._tether, None
        if tether is not None:
            tether.release()
        if self._device is not None:
            self._device.close()


def _polls(done: Callable[[], bool]) -> Iterator[float]:
    """The time, again and again until ``done``; a short wait spins, a longer one sleeps in between."""
    start = time.monotonic()
    while not done():
        now = time.monotonic()
        yield now
        if now - start > SPIN:
            time.sleep(PAUSE)
