"""`transportkit serve`: one file, sent to those who fetch it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from transportkit.cli import require
from transportkit.cli.terminal import bar, count, rate, say, size

if TYPE_CHECKING:
    from pathlib import Path


def run(path: Path, address: str, receivers: int, keywords: dict[str, Any], *, quiet: bool) -> None:
    """Listen, wait for the receivers, send the file to all of them.

    Raises:
        TransportKitError: it did not reach all of them; the text says why.
    """
    require("safetensors", "numpy", "rich")
    from transportkit.cli.files import HEADER_KEY, open_model
    from transportkit.session import serve

    tell = (lambda _text: None) if quiet else say
    with open_model(path) as model, contextlib.closing(serve(address, receivers=receivers, **keywords)) as sender:
        logger = logging.getLogger("transportkit")
        if not quiet and logger.level > logging.INFO:
            logger.setLevel(logging.INFO)  # who came and was turned away, and why
        what = f"{count(len(model.specs), 'tensor')}, {size(model.nbytes)}"
        tell(f"{path}: {what}; waiting for {count(receivers, 'receiver')} on {sender.address}")
        # What ends the session under `with` is told to the receivers.
        with sender, bar("sending", quiet=quiet) as tick:
            tell(str(sender.agreement))
            metadata = {**model.metadata, HEADER_KEY: model.header}
            report = sender.send(model.source(), metadata=metadata, progress=tick)
        tell(
            f"sent {what} to {count(receivers, 'receiver')} in {report.seconds:.2f} s "
            f"({rate(report.nbytes, report.seconds)}) over {', '.join(sorted(set(report.backends.values())))}"
        )
        for reroute in report.reroutes:
            tell(f"rerouted: {reroute}")
