"""A trainer and two workers as Ray actors: ``python ray_actors.py``. The address goes from actor to actor."""

from __future__ import annotations

import ray
import torch

import transportkit as tk


@ray.remote
class Trainer:
    """Holds the weights and serves them."""

    def __init__(self, workers: int) -> None:
        self.model = torch.nn.Linear(64, 64)
        # Between hosts: `ray.util.get_node_ip_address()` instead, with `authkey=` and `allow_plaintext=True`.
        self.sender = tk.serve("tcp://127.0.0.1:0", receivers=workers)

    def address(self) -> str:
        return self.sender.address

    def step(self, version: int) -> str:
        """Train, then send; the first call waits for the workers."""
        with torch.no_grad():
            self.model.weight.add_(1)
        self.sender.send(self.model, version=version)
        return str(self.sender.agreement)

    def total(self) -> float:
        return float(self.model.weight.double().sum())


@ray.remote
class Worker:
    """Connects when it is told where, and takes an update whenever it is asked to."""

    def __init__(self, address: str) -> None:
        self.model = torch.nn.Linear(64, 64)
        self.address = address
        self.receiver = None

    def update(self) -> int:
        if self.receiver is None:  # not in __init__, where it would wait for the trainer's first step
            self.receiver = tk.connect(self.address)
        return self.receiver.load_into(self.model).version

    def total(self) -> float:
        return float(self.model.weight.double().sum())


def main() -> None:
    ray.init(num_cpus=3)
    trainer = Trainer.remote(workers=2)
    address = ray.get(trainer.address.remote())
    workers = [Worker.remote(address) for _ in range(2)]
    for version in range(3):
        updates = [worker.update.remote() for worker in workers]
        agreement = ray.get(trainer.step.remote(version))
        assert ray.get(updates) == [version, version]
    print(agreement)
    totals = ray.get([actor.total.remote() for actor in (trainer, *workers)])
    print(f"the same weights everywhere: {len(set(totals)) == 1}")
    ray.shutdown()


if __name__ == "__main__":
    main()
