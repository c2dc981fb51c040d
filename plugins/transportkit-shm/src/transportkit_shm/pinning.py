"""Pinning the exporter's arena for copies from a GPU; nothing is copied here.

A copy from a GPU into memory that CUDA does not know goes through a buffer of the driver's, and takes a processor; into
pinned memory it goes at the speed of the bus. The arena is a mapping that others share, so it is registered as it
stands (`torch.Tensor.pin_memory` would make a copy of it).

The importer's mapping is not pinned: its user may have leases in it, and a copy to a GPU with ``non_blocking=True``
would then still read a slot after its release, which it does not from memory that is not pinned.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_log = logging.getLogger("transportkit.shm")

#: ``cudaHostRegisterPortable``: pinned for every GPU of the process.
PORTABLE = 1


def pin(memory: Tensor, device: str) -> Callable[[], None]:
    """Pin host memory, where the tensors that are copied into it are on a GPU. Where that fails, nothing is changed.

    Args:
        memory: contiguous uint8 in host memory.
        device: where the tensors are.

    Returns:
        Takes it back; to be called before the memory is unmapped, when no copy into it is under way.
    """
    if not device.startswith("cuda"):
        return _nothing
    import torch

    try:
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
    except (RuntimeError, AssertionError, AttributeError) as error:
        _log.info("shared memory is not pinned, so copies from %s are slower: %s", device, error)
        return _nothing
    if code:
        _forget_error(device)
        _log.info("shared memory is not pinned, so copies from %s are slower: CUDA error %d", device, code)
        return _nothing
    return functools.partial(_unpin, runtime, memory.data_ptr(), device)


def _unpin(runtime: Any, address: int, device: str) -> None:
    try:
        code = int(runtime.cudaHostUnregister(address))
    except RuntimeError as error:
        _log.warning("pinned memory could not be given back: %s", error)
        return
    if code:
        _forget_error(device)
        _log.warning("pinned memory could not be given back: CUDA error %d", code)


def _forget_error(device: str) -> None:
    """CUDA keeps the last error of a thread, and torch would raise it at the user's next kernel: have it do so here."""
    import torch

    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device=device)


def _nothing() -> None:
    return
