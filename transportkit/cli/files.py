"""Reading what the user names: safetensors files, tensor by tensor, and the file of a key. Nothing is written here.

A safetensors file is 8 bytes (the header's length, little-endian), the header (JSON, padded with spaces by most
writers), and the tensors' bytes without gaps; see https://github.com/huggingface/safetensors#format. Writers differ in
the order of the header's entries (that of ``__metadata__`` is even random) and in its padding, so the text
travels as it is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from transportkit.cli import CommandError
from transportkit.errors import TensorError
from transportkit.manifest import dtype_names, nbytes, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from transportkit.session import Source
    from transportkit.wire import TensorSpec

HEADER_KEY = "transportkit.safetensors.header"
"""Key of an update's metadata under which the text of a file's header travels."""

#: Each dtype of the format and torch's name for it, in the order by which the format's own library sorts tensors
#: (largest first). F6 has no counterpart in torch.
DTYPES: dict[str, str | None] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "F6_E2M3": None,
    "F6_E3M2": None,
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


@attrs.frozen
class Entry:
    """A tensor as a file's header describes it; offsets in bytes, from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@attrs.frozen
class ModelFile:
    """An open safetensors file.

    Args:
        header: the text of its header, padding included.
        specs: its tensors, in the order of their bytes.
        metadata: its ``__metadata__``.
        nbytes: sum of the tensors' bytes.
    """

    path: Path
    header: str
    specs: tuple[TensorSpec, ...]
    metadata: dict[str, str]
    nbytes: int
    _opened: Any
    _descriptor: int
    _length: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each (name, tensor), in the order of ``specs``; its memory is the mapped file's, which is read when it is."""
        for spec in self.specs:
            # To read a page that a mapped file has no longer is fatal, so as far as possible that is not tried.
            if os.fstat(self._descriptor).st_size < self._length:
                raise CommandError(f"{self.path} has become shorter while it was read")
            yield spec.name, self._opened.get_tensor(spec.name)

    def source(self) -> Source:
        """What `Sender.send` takes; may be asked for again for another update."""
        from transportkit.session import Source

        return Source(self.specs, self.tensors())


@contextlib.contextmanager
def open_model(path: Path) -> Iterator[ModelFile]:
    """Open a safetensors file and check all of its header.

    Raises:
        CommandError: there is no such file, it is not one, or one of its tensors cannot travel.
    """
    import safetensors

    descriptor = _open(path)
    try:
        length = os.fstat(descriptor).st_size
        try:
            opened = safetensors.safe_open(path, framework="pt")  # checks all that the format demands
        except (safetensors.SafetensorError, OSError) as error:
            raise CommandError(f"{path} is not a whole safetensors file: {_why(descriptor, error)}") from error
        with opened:
            header = _header(descriptor)
            entries, metadata = parse_header(header)
            specs = tuple(_spec(path, opened, entry) for entry in sorted(entries, key=lambda e: (e.start, e.end)))
            total = sum(nbytes(spec) for spec in specs)
            yield ModelFile(path, header, specs, metadata, total, opened, descriptor, length)
    finally:
        os.close(descriptor)


def parse_header(text: str) -> tuple[list[Entry], dict[str, str]]:
    """The tensors and the metadata of a header. Raises `CommandError` for what is none."""
    try:
        content = msgspec.json.decode(text.encode(), type=dict[str, dict[str, Any]])
        metadata = msgspec.convert(content.pop("__metadata__", {}), type=dict[str, str])
        rows = {name: (e["dtype"], e["shape"], *e["data_offsets"]) for name, e in content.items()}
        checked = msgspec.convert(rows, dict[str, tuple[str, tuple[int, ...], int, int]])
        return [Entry(name, *row) for name, row in checked.items()], metadata
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError, KeyError, TypeError) as error:
        raise CommandError(f"this is no header of a safetensors file: {error}") from error


def read_key(path: Path) -> bytes:
    """The secret in a file, without the line end that an editor puts after it. Raises `CommandError`."""
    descriptor = _open(path)
    with open(descriptor, "rb") as file:
        key = file.read(1 << 16).rstrip(b"\r\n")
    if not key:
        raise CommandError(f"the key file {path} is empty; write a secret into it, the same on both sides")
    return key


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo would block
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CommandError(f"cannot read {path}: it is no regular file")
    return descriptor


def _why(descriptor: int, error: Exception) -> str:
    if os.pread(descriptor, 64, 0).startswith(b"version https://git-lfs"):
        return "it is the pointer of a file in Git LFS; `git lfs pull` gets the file itself"
    return str(error).removeprefix("Error while deserializing header: ")


def _header(descriptor: int) -> str:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    return os.pread(descriptor, length, 8).decode()


def _spec(path: Path, opened: Any, entry: Entry) -> TensorSpec:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or dtype not in dtype_names():
        raise CommandError(
            f"{path}: the tensor {entry.name!r} is of dtype {entry.dtype}, which the installed torch does not have; "
            "such a file cannot be sent"
        )
    try:
        return spec_of(entry.name, opened.get_tensor(entry.name))
    except TensorError as error:
        raise CommandError(f"{path}: {error}") from error
