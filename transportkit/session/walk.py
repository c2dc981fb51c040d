"""The chunks of an update at its receiver, one by one; each is released and acknowledged when it has been looked at."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from transportkit.errors import BackendError, TransportKitError

if TYPE_CHECKING:
    from collections.abc import Generator

    from transportkit.lifecycle import Imported
    from transportkit.session.receiving import Receiving
    from transportkit.session.sinks import Sink
    from transportkit.wire import Piece


def walk(receiving: Receiving, sink: Sink) -> Generator[tuple[Imported, tuple[Piece, ...]], None, None]:
    """Each chunk of the update; it is released and acknowledged at the next step."""
    while (came := receiving.next()) is not None:
        chunk, pieces, appended = came
        imports = receiving.imports
        try:
            if appended:
                sink.extend(receiving.specs[-appended:])
            yield chunk, pieces
        except BaseException:
            with contextlib.suppress(TransportKitError):  # what ended the walk says more
                imports.retire(chunk)
            raise
        try:
            imports.retire(chunk)
        except BackendError as error:  # the chunk is taken, but none can follow over this backend
            receiving.reroute(error)
        receiving.report()


def write(receiving: Receiving, sink: Sink, chunk: Imported, pieces: tuple[Piece, ...]) -> None:
    """Let the sink copy a chunk; where its bytes cannot be read, it will come again over another backend."""
    began = False
    try:
        with receiving.imports.reading(chunk):
            began = True
            sink.write(chunk, pieces)
    except BackendError as error:
        if began:
            raise
        receiving.give_back(pieces, error)
