"""Move a small model between two unrelated processes, and see which backend served; run by the nox session `plugin`.

Usage: ``python installed_transfer.py BACKEND``. It ends with 0 where that backend was agreed and every byte arrived.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import transportkit as tk


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        "weight": torch.randn(300, 70),
        "bias": torch.randn(70).to(torch.bfloat16),
        "steps": torch.tensor(11),
        "empty": torch.empty(0, 3),
    }


def receive(address: str) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    with tk.connect(address, wait=60) as receiver:
        receiver.load_into(target)
    for name, tensor in model().items():
        assert torch.equal(target[name], tensor), name


def main() -> None:
    if sys.argv[1] == "--receive":
        receive(sys.argv[2])
        return
    (expected,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder, 'model.sock')}"
        receiver = subprocess.Popen([sys.executable, __file__, "--receive", address])
        try:
            with tk.serve(address, wait=60) as sender:
                print(sender.agreement)
                assert sender.agreement.backend(0) == expected, f"{expected} was not chosen"
                sender.send(model(), version=1)
            assert receiver.wait(timeout=60) == 0, "the receiver failed"
        finally:
            receiver.kill()
            receiver.wait()
    print(f"moved over {expected} of {Path(tk.__file__).parent}")


if __name__ == "__main__":
    main()
