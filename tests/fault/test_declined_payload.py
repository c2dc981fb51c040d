"""A backend whose trial fails at the receiver while its bytes are still on the link."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import transportkit as tk
from transportkit.backends.pickle import PickleTransport
from transportkit.testing import faulty, installed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("chunk_bytes", [1, 5, 1000])
def test_a_declined_fallback_ends_in_a_refusal_with_its_reason(tmp_path: Path, chunk_bytes: int) -> None:
    broken = faulty(PickleTransport, at="reading", error=OSError(5, "cosmic ray"))
    options: dict[str, Any] = {"backends": (broken.name,), "chunk_bytes": chunk_bytes, "timeout": 10}
    raised: list[BaseException] = []

    def wait(sender: tk.Sender) -> None:
        try:
            sender.wait()
        except tk.NegotiationError as error:
            raised.append(error)

    with installed(broken):
        sender = tk.serve(f"unix:{tmp_path}/link", **options)
        waiting = threading.Thread(target=wait, args=(sender,))
        waiting.start()
        with pytest.raises(tk.NegotiationError, match="cosmic ray"):
            tk.connect(sender.address, **options)
        waiting.join()
        sender.close()
    assert "cosmic ray" in str(raised[0])
