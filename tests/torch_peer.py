"""One end of a transfer between two interpreters, whose torch may differ; run by `test_two_torches`, by either of them.

Usage: ``python torch_peer.py ORDER``, where ORDER is a JSON object. It prints one JSON object, and imports nothing but
what an installed transportkit brings.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

import transportkit as tk
from transportkit.kinds import dtype_names, dtype_of
from transportkit.testing.samples import as_module, empty_like, prints, samples


def told(pairs: Any) -> dict[str, list[Any]]:
    """What identifies each tensor's value, for JSON."""
    found = prints(pairs)
    return {
        name: [dtype, list(shape), hashlib.sha256(data).hexdigest()] for name, (dtype, shape, data) in found.items()
    }


def chosen(dtypes: list[str]) -> dict[str, torch.Tensor]:
    """The samples of these dtypes, which both sides know."""
    known = {dtype_of(name) for name in dtypes}
    return {name: tensor for name, tensor in samples().items() if tensor.dtype in known}


def describe() -> dict[str, Any]:
    return {"torch": torch.__version__, "dtypes": dtype_names()}


def send(address: str, backend: str, dtypes: list[str]) -> dict[str, Any]:
    tensors = chosen(dtypes)
    with tk.serve(address, backends=(backend,), wait=60, chunk_bytes=1000) as sender:
        sender.send(tensors, version=1)
        sender.send(as_module(tensors), version=2)
        sender.send(iter(tensors.items()), version=3)
        return {"backend": sender.agreement.backend(0), "values": told(tensors)}


def receive(address: str) -> dict[str, Any]:
    with tk.connect(address, wait=60) as receiver:
        first = dict(receiver.receive())
        values = [told(first)]
        module = as_module(empty_like(prints(first)))
        receiver.load_into(module)
        values.append(told(module.state_dict()))
        values.append({})
        receiver.apply(lambda pairs: values[2].update(told(pairs)))
        return {"backend": receiver.agreement.backend(), "values": values}


def send_one(address: str, backend: str, dtype: str) -> dict[str, Any]:
    """Send a tensor of a dtype that the other side does not have, and then one that it has."""
    odd = torch.zeros(64, dtype=torch.uint8).view(dtype_of(dtype))
    with tk.serve(address, backends=(backend,), wait=60) as sender:
        try:
            sender.send({"plain": torch.zeros(3), "odd": odd})
        except tk.TransportKitError as error:
            failure = [type(error).__name__, str(error)]
        else:
            failure = []
        sender.send({"plain": torch.ones(3)})
    return {"failure": failure}


def receive_one(address: str) -> dict[str, Any]:
    target = torch.zeros(3)
    with tk.connect(address, wait=60) as receiver:
        receiver.load_into({"plain": target})
    return {"plain": target.tolist()}


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    acts = {"describe": describe, "send": send, "receive": receive, "send_one": send_one, "receive_one": receive_one}
    print(json.dumps(acts[order.pop("act")](**order)))
