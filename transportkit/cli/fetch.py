"""`transportkit fetch`: one update, written to a safetensors file as its chunks come."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, Any

from transportkit.cli import CommandError, require
from transportkit.cli.terminal import bar, count, rate, say, size
from transportkit.cli.unfinished import Unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from transportkit.cli.layout import Layout
    from transportkit.cli.terminal import Tick
    from transportkit.session import Receiver, Update
    from transportkit.session.leases import Lease
    from transportkit.wire import TensorSpec


def run(address: str, out: Path, keywords: dict[str, Any], *, quiet: bool) -> None:
    """Connect, take one update, write it.

    Raises:
        TransportKitError: it did not arrive whole, and nothing has changed at ``out``; the text says why.
    """
    require("safetensors", "numpy", "rich")
    file = Unfinished(out)
    from transportkit.session import connect

    tell = (lambda _text: None) if quiet else say
    with file, connect(address, **keywords) as receiver:
        tell(str(receiver.agreement))
        with bar("fetching", quiet=quiet) as tick:
            update = _take(receiver, file, tick)
        file.finish()
    tell(
        f"wrote {out}: {count(update.tensors, 'tensor')}, {size(update.nbytes)} in {update.seconds:.2f} s "
        f"({rate(update.nbytes, update.seconds)}) over {update.backend}"
    )


def _take(receiver: Receiver, file: Unfinished, tick: Tick) -> Update:
    """Write the next update into the file, chunk by chunk."""
    writer: _Placed | _Spooled | None = None
    with contextlib.ExitStack() as stack:
        for lease in receiver.chunks(progress=tick):
            writer = writer or _begin(receiver, file, stack)
            writer.take(lease)
        update = receiver.last
        assert update is not None
        if writer is None:  # an update without a single tensor has no chunk
            writer = _Placed(file, (), update.metadata)
        writer.finish(update)
    return update


def _begin(receiver: Receiver, file: Unfinished, stack: contextlib.ExitStack) -> _Placed | _Spooled:
    incoming = receiver.incoming
    assert incoming is not None
    if incoming.specs is None:
        return _Spooled(file, stack)
    return _Placed(file, incoming.specs, incoming.metadata)


class _Placed:
    """Writes each piece where it belongs: the manifest is known."""

    def __init__(self, file: Unfinished, specs: tuple[TensorSpec, ...], metadata: Mapping[str, str]) -> None:
        from transportkit.cli.layout import layout

        self._file = file
        self._layout: Layout = layout(specs, metadata)
        file.begin(self._layout.nbytes)
        file.write(0, self._layout.head)

    def take(self, lease: Lease) -> None:
        for spec, start, tensor in lease:
            self._file.write(self._layout.places[spec.name] + start, _bytes(tensor))

    def finish(self, _update: Update) -> None:
        pass


class _Spooled:
    """Keeps the bytes in a nameless file first.

    The sender's source tells of each tensor only when it comes to it, and the header of the file stands in front.
    """

    def __init__(self, file: Unfinished, stack: contextlib.ExitStack) -> None:
        self._file = file
        self._spool = stack.enter_context(tempfile.TemporaryFile(dir=file.directory, buffering=0))  # noqa: SIM115 - the stack closes it
        self._starts: dict[str, int] = {}
        self._specs: list[TensorSpec] = []
        self._end = 0

    def take(self, lease: Lease) -> None:
        from transportkit.cli.layout import check
        from transportkit.manifest import nbytes

        for spec, start, tensor in lease:
            if spec.name not in self._starts:
                check((spec,))
                self._specs.append(spec)
                self._starts[spec.name] = self._end
                self._end += nbytes(spec)
            view = _bytes(tensor)
            offset = self._starts[spec.name] + start
            try:
                while view:
                    written = os.pwrite(self._spool.fileno(), view, offset)
                    view, offset = view[written:], offset + written
            except OSError as error:
                raise CommandError(f"cannot write beside {self._file.path}: {error.strerror}") from error

    def finish(self, update: Update) -> None:
        from transportkit.cli.layout import layout
        from transportkit.manifest import nbytes

        whole = layout(self._specs, update.metadata)
        self._file.begin(whole.nbytes)
        self._file.write(0, whole.head)
        for spec in self._specs:
            self._file.copy(self._spool.fileno(), self._starts[spec.name], whole.places[spec.name], nbytes(spec))


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes where they are; contiguous host memory, as leased tensors are."""
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
