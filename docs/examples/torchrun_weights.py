"""Rank 0 trains, the others receive: ``torchrun --nproc-per-node=3 torchrun_weights.py``.

The program's own group is used for nothing but to tell the address, and goes on working beside the updates.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import transportkit as tk

STEPS = 3


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(64, 64)

    if rank == 0:
        # Beyond one host: the address of an interface, and `authkey=` and `allow_plaintext=True` on both sides.
        sender = tk.serve("tcp://127.0.0.1:0", receivers=size - 1)
        dist.broadcast_object_list([sender.address])
        with sender:  # waits for the others
            print(sender.agreement)
            for step in range(STEPS):
                train(model)
                sender.send(model, version=step)
    else:
        where = [None]
        dist.broadcast_object_list(where)
        with tk.connect(where[0]) as receiver:
            for step in range(STEPS):
                update = receiver.load_into(model)
                assert update.version == step

    total = sum(parameter.detach().double().sum() for parameter in model.parameters())
    everywhere = [torch.zeros_like(total) for _ in range(size)]
    dist.all_gather(everywhere, total)
    print(f"rank {rank}: the same weights everywhere: {all(one == total for one in everywhere)}")
    dist.destroy_process_group()


def train(model: torch.nn.Module) -> None:
    """One step, as far as this example goes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


if __name__ == "__main__":
    main()
