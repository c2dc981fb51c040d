"""Where each byte of a safetensors file goes that is written from an update; pure, no file is touched here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from transportkit.cli import CommandError
from transportkit.cli.files import DTYPES, HEADER_KEY, parse_header
from transportkit.manifest import nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transportkit.wire import TensorSpec

#: Longest header that readers of the format accept, in bytes.
HEADER_LIMIT = 100_000_000

_CODES = {torch: (rank, code) for rank, (code, torch) in enumerate(DTYPES.items()) if torch is not None}


@attrs.frozen
class Layout:
    """A file to be.

    Args:
        head: what it begins with: the header and its length.
        places: where each tensor's bytes begin in the file, by name.
        nbytes: its length.
    """

    head: bytes
    places: Mapping[str, int]
    nbytes: int


def layout(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> Layout:
    """The file for a manifest and the metadata that came with it.

    With the header of a file among the metadata, as `transportkit serve` sends it, the file will be that one. Else it
    is what the format's own library would write.

    Raises:
        CommandError: the format has no such dtype or name, or the header that came is not this manifest's.
    """
    text = metadata.get(HEADER_KEY)
    if text is not None:
        offsets = _restored(text, specs)
    else:
        text, offsets = _made(specs, metadata)
    head = text.encode()
    if len(head) > HEADER_LIMIT:
        raise CommandError(
            f"the header of {len(specs)} tensors has {len(head)} bytes; a safetensors file has at most {HEADER_LIMIT}"
        )
    head = len(head).to_bytes(8, "little") + head
    places = {name: len(head) + start for name, start in offsets.items()}
    return Layout(head, places, len(head) + sum(nbytes(spec) for spec in specs))


def check(specs: Iterable[TensorSpec]) -> None:
    """Raise `CommandError` for a tensor that the format cannot hold."""
    for spec in specs:
        if spec.name == "__metadata__":
            raise CommandError("a safetensors file cannot hold a tensor of the name '__metadata__'; send it as another")
        if spec.dtype not in _CODES:
            raise CommandError(f"a safetensors file cannot hold {spec.name!r}: the format has no dtype {spec.dtype}")


def _restored(text: str, specs: Sequence[TensorSpec]) -> dict[str, int]:
    entries, _ = parse_header(text)
    came = {spec.name: (spec.dtype, nbytes(spec)) for spec in specs}
    if {e.name: (DTYPES.get(e.dtype), e.end - e.start) for e in entries} != came:
        raise CommandError("the sender's header does not describe the tensors that it sends")
    position = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.end)):
        if entry.start != position:
            raise CommandError(f"the sender's header has a gap or an overlap before {entry.name!r}")
        position = entry.end
    return {entry.name: entry.start for entry in entries}


def _made(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    check(specs)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: (-_CODES[spec.dtype][0], spec.name)):
        code = _CODES[spec.dtype][1]
        shape = list(spec.shape)
        if code == "F4" and shape:  # two numbers to torch's element
            shape[-1] *= 2
        end = position + nbytes(spec)
        header[spec.name] = {"dtype": code, "shape": shape, "data_offsets": [position, end]}
        offsets[spec.name], position = position, end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    return text + " " * (-len(text.encode()) % 8), offsets
