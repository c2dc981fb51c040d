"""The arena: one anonymous memory file that holds all slots, and its mapping as a tensor.

It has a descriptor only until it is mapped and handed over, and no name anywhere. That of `shm` is made and sealed
here, that of `mpqueue` in `unnamed`. How it is handed over does not belong here.

A mapping lives exactly as long as the tensors that view it. `torch.frombuffer` keeps the Python object it was given
alive and nothing more, so that object is a ctypes array whose death unmaps; there is no call that unmaps under a live
view. The mapping is made by the C library's `mmap`, because `mmap.mmap` keeps a duplicate descriptor for as long as
it lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import attrs

from transportkit import mapped, site
from transportkit.errors import BackendError, ResourceError
from transportkit_shm.faults import NAME, fault, native

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: The name that `/proc/PID/maps` shows.
LABEL = "transportkit-shm"

#: Free memory that is left to the process and the page tables, in bytes.
RESERVE = 16 << 20

#: Space is taken in steps of this many bytes, since on older kernels a signal undoes the step that it interrupts.
STEP = 4 << 20

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MFD_NOEXEC_SEAL = 8
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@attrs.frozen
class Layout(mapped.Layout):
    """Where the slots of an arena lie; both sides derive it from the terms. Each begins a page."""

    alignment: int = mmap.PAGESIZE


def open_memory() -> int:
    """A new empty memory file that can be sealed and is closed on exec. Raises `OSError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(LABEL, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3 does not know the flag; a strict one demands it
            raise
    return os.memfd_create(LABEL, flags)


def create(layout: Layout) -> int:
    """Make an arena with all its memory and seal it; the caller closes the descriptor. Raises as `furnish`."""
    return furnish(layout, open_memory, SEALS)


def furnish(layout: Layout, open_file: Callable[[], int], seals: int = 0, backend: str = NAME) -> int:
    """Make an arena of a new file with all its memory; the caller closes the descriptor.

    Args:
        layout: what it must hold.
        open_file: makes the empty file; may raise `OSError`.
        seals: put on it at last, where that is a memory file.
        backend: named in errors.

    Raises:
        ResourceError: there is not enough memory, space or descriptors; the text says what was wanted.
        BackendError: the system refused it otherwise.
    """
    wanted = f"shared memory for {layout.slots} slots of {layout.chunk_bytes} bytes ({layout.nbytes} bytes)"
    free = site.free_memory()
    # Beyond the limit of a memory cgroup the kernel kills; it does not refuse.
    if free is not None and layout.nbytes + RESERVE > free:
        raise ResourceError(
            f"{wanted} does not fit: {free} bytes are free and {RESERVE} of them are left alone; "
            "give a smaller `chunk_bytes=` or `slots=`",
            backend=backend,
        )
    with native(wanted, backend):
        memory = open_file()
        try:
            for offset in range(0, layout.nbytes, STEP):
                os.posix_fallocate(memory, offset, min(STEP, layout.nbytes - offset))
            if seals:
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(memory)
            raise
    return memory


def check(memory: int, layout: Layout) -> None:
    """Raise `BackendError` unless the descriptor is a memory file that is sealed against shrinking and large enough."""
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BackendError("the descriptor that came is no memory file", backend=NAME) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BackendError(
            "the shared memory that came is not sealed against shrinking, so it is not read", backend=NAME
        )
    with native("looking at the shared memory that came"):
        size = os.fstat(memory).st_size
    if size < layout.nbytes:
        raise BackendError(
            f"the shared memory that came has {size} bytes, the terms need {layout.nbytes}", backend=NAME
        )


def map_whole(memory: int, layout: Layout, backend: str = NAME) -> Tensor:
    """Map a checked arena: a uint8 tensor of shape ``(layout.nbytes,)``, unmapped when its last view dies.

    The pages are left to the first touch: filling the page tables here costs more than it saves later, and the
    handshake would pay. The descriptor may be closed afterwards.
    """
    import torch

    address = _libc.mmap(None, layout.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, memory, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise fault(f"mapping {layout.nbytes} bytes of shared memory", OSError(code, os.strerror(code)), backend)
    owner = (ctypes.c_uint8 * layout.nbytes).from_address(address)
    # Not at exit: daemon threads may still read then, and the kernel unmaps.
    weakref.finalize(owner, _libc.munmap, address, layout.nbytes).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)
