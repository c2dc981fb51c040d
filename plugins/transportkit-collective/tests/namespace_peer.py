"""One side of a transfer between network namespaces: ``python namespace_peer.py serve|connect ADDRESS ALLOW``.

Prints what was agreed, and which addresses it listens on, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from gloo_ends import listening

import transportkit as tk

KEY = b"for this test only"


def main(role: str, address: str, allow: str) -> None:
    keywords = {"authkey": KEY, "allow_plaintext": allow == "allow", "timeout": 15.0, "wait": 30.0}
    tensors = {"w": torch.arange(100_000, dtype=torch.float32)}
    if role == "serve":
        with tk.serve(address, receivers=2, **keywords) as sender:
            agreement, listens = sender.agreement, listening(os.getpid())
            sender.send(tensors)
            told = [[a.backend, {v.backend: v.reason for v in a.verdicts}] for a in agreement.assignments]
    else:
        target = {"w": torch.zeros(100_000)}
        with tk.connect(address, **keywords) as receiver:
            listens = listening(os.getpid())
            receiver.load_into(target)
            assert target["w"].equal(tensors["w"])
            told = [[a.backend, {v.backend: v.reason for v in a.verdicts}] for a in receiver.agreement.assignments]
    print(json.dumps({"agreed": told, "listens": listens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
