"""The driver's management library, by ctypes: GPUs and versions without a CUDA context; nothing is concluded here."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"

_UUID_BYTES = 96
_MIG_ENABLED = 1


class NvmlError(Exception):
    """The library is not there, or says no; the text says which and why."""


@attrs.frozen
class Gpu:
    """One physical GPU, or one MIG instance of it.

    Args:
        uuid: as NVML writes it, ``GPU-...`` or ``MIG-...``.
        number: of the physical GPU, in PCI order.
    """

    uuid: str
    number: int


@attrs.frozen
class Driver:
    """What the driver tells.

    Args:
        cuda: the newest CUDA version that it supports, as (major, minor).
        gpus: in PCI order; a GPU that is divided is its instances.
    """

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def ask() -> Driver:
    """Ask the driver. Raises `NvmlError`."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NvmlError(f"{LIBRARY} cannot be loaded") from error
    try:
        return read(library)
    except AttributeError as error:
        raise NvmlError(f"{LIBRARY} is too old, or a stub: {error}") from error


def read(library: ctypes.CDLL) -> Driver:
    """What a loaded library tells. Raises `NvmlError`."""
    with _initialised(library):
        version = ctypes.c_int()
        _check(library, library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)))
        count = ctypes.c_uint()
        _check(library, library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        gpus: list[Gpu] = []
        failed: NvmlError | None = None
        for number in range(count.value):
            handle = ctypes.c_void_p()
            try:
                _check(library, library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)))
                gpus += [Gpu(uuid, number) for uuid in _instances(library, handle) or [_uuid(library, handle)]]
            except NvmlError as error:  # one that is lost, or not for this process, says nothing of the others
                failed = error
    if failed is not None and not gpus:
        raise failed
    return Driver((version.value // 1000, version.value % 1000 // 10), tuple(gpus))


def _instances(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[str]:
    """The UUIDs of a GPU's MIG instances; none where it is not divided."""
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        if library.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending)):
            return []  # a GPU without MIG
    except AttributeError:  # a driver without it
        return []
    if mode.value != _MIG_ENABLED:
        return []
    most = ctypes.c_uint()
    _check(library, library.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(most)))
    found = []
    for index in range(most.value):
        instance = ctypes.c_void_p()
        if library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(instance)) == 0:
            found.append(_uuid(library, instance))
    return found


def _uuid(library: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_UUID_BYTES)
    _check(library, library.nvmlDeviceGetUUID(handle, text, _UUID_BYTES))
    return text.value.decode("ascii", "replace")


@contextlib.contextmanager
def _initialised(library: ctypes.CDLL) -> Iterator[None]:
    _check(library, library.nvmlInit_v2())
    try:
        yield
    finally:
        library.nvmlShutdown()


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        text = library.nvmlErrorString
        text.restype = ctypes.c_char_p
        raise NvmlError(f"the driver's management library says: {(text(code) or b'unknown error').decode()} ({code})")
