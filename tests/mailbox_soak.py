"""Many producers, killed now and then and started again, for as long as one likes; asserts what must hold throughout.

``python tests/mailbox_soak.py [MESSAGES [PRODUCERS [SECONDS BETWEEN KILLS]]]`` runs it alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from mailbox_ends import Way, address_in, reach
from session_ends import Child, Talk

import transportkit as tk
from transportkit.testing.leftovers import resident


def lively(talk: Talk, where: Any, life: int, messages: int) -> int:
    """Put so many messages of 1 to 5 tensors and leave in order."""
    generator = random.Random(life)
    with reach(where) as outbox:
        for number in range(messages):
            sizes = [int(10 ** generator.uniform(0, 5)) for _ in range(generator.randint(1, 5))]
            outbox.put({"life": life, "n": number, "t": [torch.full((size,), mark(life, number)) for size in sizes]})
    return messages


def mark(life: int, number: int) -> int:
    return life * 100_003 + number


def soak(backend: str, messages: int, producers: int, kill_every: float, kills: int) -> dict[str, Any]:
    """Run until every producer has once put all its messages; what came of it."""
    generator = random.Random(backend)
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        way = Way(backend, address_in(Path(folder)))
        with way.inbox(chunk_bytes=1 << 17, slots=4) as inbox:
            lives: dict[int, Child] = {}
            seen: dict[int, int] = {}
            finished: list[int] = []
            killed: list[int] = []
            held: list[tuple[int, int]] = []
            first = next_kill = next_look = time.monotonic()
            begun = 0

            def start() -> None:
                nonlocal begun
                begun += 1
                lives[begun] = Child(lively, way.where(inbox, timeout=60), begun, messages)

            try:
                for _ in range(producers):
                    start()
                next_kill = time.monotonic() + kill_every
                while lives:
                    now = time.monotonic()
                    if now > next_kill and len(killed) < kills:
                        next_kill = now + kill_every
                        life = generator.choice(list(lives))
                        with contextlib.suppress(ProcessLookupError):  # it has put everything, and has ended
                            lives[life].signal(signal.SIGKILL)
                            lives.pop(life).end()
                            killed.append(life)
                            start()
                    if now > next_look:
                        held.append((resident(), len(os.listdir("/proc/self/fd"))))
                        now, began = time.monotonic(), now  # a look takes long in a process with many objects
                        next_look = now + max(0.5, kill_every, 4 * (now - began))
                    try:
                        message = inbox.get(timeout=0.05)
                    except tk.DeadlineError:
                        for life in [each for each in lives if seen.get(each) == messages]:
                            assert lives[life].result() == messages
                            lives.pop(life).end()
                            finished.append(life)
                        continue
                    life, number = message["life"], message["n"]
                    assert number == seen.get(life, 0), (life, number, seen.get(life))
                    seen[life] = number + 1
                    for tensor in message["t"]:
                        assert bool((tensor == mark(life, number)).all()), (life, number)
                    del message
            finally:
                for child in lives.values():
                    child.end()
            stats = inbox.stats
            assert all(seen[life] == messages for life in finished)
            assert len(finished) == producers
            assert stats.messages == sum(seen.values())
            assert set(stats.dropped) <= {"producer lost"}
            assert stats.dropped.get("producer lost", 0) <= len(killed)
            assert stats.slots_in_use == 0
            growth = held[-1][0] - held[len(held) // 3][0]
            return {
                "messages": stats.messages,
                "seconds": time.monotonic() - first,
                "killed": len(killed),
                "dropped": stats.dropped,
                "memory growth": growth,
                "descriptors": [each[1] for each in held],
            }


def main() -> None:
    messages, producers, kill_every = ([float(each) for each in sys.argv[1:]] + [10_000, 8, 3])[:3]
    for backend in ("shm", "mpqueue", "pickle"):
        outcome = soak(backend, int(messages), int(producers), kill_every, kills=20)
        told = outcome | {"descriptors": (min(outcome["descriptors"]), max(outcome["descriptors"]))}
        print(backend, told, flush=True)
        assert outcome["memory growth"] < 64 << 20
        assert max(outcome["descriptors"]) < min(outcome["descriptors"]) + 8 * int(producers)


if __name__ == "__main__":
    main()
