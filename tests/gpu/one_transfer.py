"""Move tensors between two unrelated processes over one backend; run by the tests, under settings of their own.

Usage: ``python one_transfer.py BACKEND DEVICE``. It ends with 0 where that backend was agreed and every byte arrived.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import transportkit as tk

UPDATES = 5


def model(device: str, version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    sizes = [(700, 4001), (3, 5), (1 << 20,), ()]
    return {f"w{n}": torch.randn(size).to(torch.bfloat16).to(device) for n, size in enumerate(sizes)}


def receive(address: str, device: str) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in model(device, 0).items()}
    with tk.connect(address, wait=60, device=device) as receiver:
        for version in range(1, UPDATES + 1):
            receiver.load_into(target)
            for name, tensor in model(device, version).items():
                assert torch.equal(target[name].cpu().view(torch.int16), tensor.cpu().view(torch.int16)), name


def main() -> None:
    if sys.argv[1] == "--receive":
        receive(*sys.argv[2:])
        return
    backend, device = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder, 'link.sock')}"
        receiver = subprocess.Popen([sys.executable, __file__, "--receive", address, device])
        try:
            with tk.serve(address, wait=60, device=device, backends=(backend,), chunk_bytes=1 << 20) as sender:
                print(sender.agreement)
                for version in range(1, UPDATES + 1):
                    sender.send(model(device, version), version=version)
            assert receiver.wait(timeout=60) == 0, "the receiver failed"
        finally:
            receiver.kill()
            receiver.wait()


if __name__ == "__main__":
    main()
