"""What the two ends ask of a GPU: the seam between them and CUDA; nothing here touches one.

`transportkit_cuda_ipc.cuda.CudaDevice` is the real one. The tests have a double over shared memory, which enforces what
a GPU would: no mapping in the process that allocated, one mapping of a handle in a process, as many unmappings as
mappings, no memory freed under a mapping, and bytes that are not there before somebody has waited for them.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


class Device(abc.ABC):
    """One GPU as one end of a lane uses it; all but `free` on the session's thread.

    No method but `free` waits for the GPU: what tells whether something has ended is asked again.

    Args:
        uuid: which GPU.
        slots: number of the lane's slots, at its exporter.
        interprocess: whether `events` will be asked for.

    Raises:
        BackendError: this process cannot use that GPU; the text says why and names those that it can.
    """

    @abc.abstractmethod
    def __init__(self, uuid: str, slots: int = 0, *, interprocess: bool = False) -> None: ...

    # -- the exporter's memory ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Tensor:
        """A new uint8 tensor of at least so many bytes that can be exported. Raises `ResourceError`."""

    @abc.abstractmethod
    def export(self, whole: Tensor) -> bytes:
        """A handle by which another process can map it; each call is one export."""

    @abc.abstractmethod
    def free(self, whole: Tensor) -> None:
        """Give it back, once, when nobody has it mapped; from any thread. May wait for all that is queued there."""

    # -- the exporter's order -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def packing(self, slot: int) -> AbstractContextManager[None]:
        """Around copies into a slot, which come after what the caller has queued and before what it queues next.

        Also where they fail, `packed` and `idle` tell when what was queued is done.
        """

    @abc.abstractmethod
    def packed(self, slot: int) -> bool:
        """Whether the copies of the slot's last `packing` are done."""

    @abc.abstractmethod
    def events(self) -> tuple[bytes, ...]:
        """For each slot a handle by which another process can wait for its last `packing`."""

    # -- the importer -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def map(self, handle: bytes, nbytes: int, events: Sequence[bytes], unmapped: Callable[[], None]) -> Tensor:
        """Map another process's memory: a uint8 tensor of so many bytes.

        Args:
            handle, nbytes, events: as the other process had them.
            unmapped: called when the last view has died and the memory is unmapped, from whichever thread that is.
        """

    @abc.abstractmethod
    def follow(self, slot: int) -> None:
        """What the caller queues from now on comes after the last `packing` of that slot, by its event."""

    @abc.abstractmethod
    def idle(self) -> Callable[[], bool]:
        """Asks whether all that the caller has queued by now, and every `packing`, is done."""

    def close(self) -> None:
        """Let go of the events of `map`. Idempotent; what is mapped or allocated stays."""
