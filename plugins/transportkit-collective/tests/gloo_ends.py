"""What the processes of the tests of `gloo` do, and how they are started; asserts nothing."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

import transportkit as tk
from transportkit.testing import bulk, prints
from transportkit.testing.processes import Child, report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.session import Receiver

#: The backend alone, and small chunks, so that an update has many of them.
KEYWORDS: dict[str, Any] = {"backends": ("gloo",), "chunk_bytes": 50_000, "slots": 3, "timeout": 15.0}


def address() -> str:
    """A unix address that nobody else has."""
    folder = tempfile.mkdtemp(prefix="tk-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"unix:{folder}/s"


@contextlib.contextmanager
def receivers(where: str, count: int, work: Any, *args: Any, **keywords: Any) -> Iterator[list[Child]]:
    """So many processes that each connect and do something with their receiver."""
    options = {**KEYWORDS, "wait": 20.0, **keywords}
    with contextlib.ExitStack() as undo:
        yield [
            undo.enter_context(Child(connected, where, work, args, options, method="forkserver")) for _ in range(count)
        ]


def connected(where: str, work: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    with tk.connect(where, **options) as receiver:
        report("agreed")
        return work(receiver, *args)


def take(receiver: Receiver, updates: int) -> list[Any]:
    """What each of so many updates brought."""
    return [prints(list(receiver.receive())) for _ in range(updates)]


#: What is sent when a test has seen what it wants. Until then every receiver stays: the first one that leaves ends the
#: group, perhaps before another one has read the last chunk, which that one then gets over the next group.
LAST = {"last": torch.ones(3)}


def take_for_ever(receiver: Receiver) -> None:
    while True:
        for _ in receiver.receive():
            pass


def outcome(receiver: Receiver) -> tuple[str, str, float]:
    """Take updates until one fails: the error's class and text, and when it came."""
    try:
        take_for_ever(receiver)
    except tk.TransportKitError as error:
        return type(error).__name__, str(error), time.time()
    raise AssertionError("endless")


def stuck_after(receiver: Receiver, chunks: int) -> None:
    """Take so many chunks, say so, and do nothing more."""
    for count, lease in enumerate(receiver.chunks(), 1):
        lease.release()
        if count == chunks:
            report("stuck")
            time.sleep(600)


def stopped_in_a_transfer(receiver: Receiver) -> None:
    """Take an update, and stop while the first large broadcast is on its way."""
    from transportkit_collective.planes import Plane

    original = Plane._begin

    def patched(plane: Plane, tensor: torch.Tensor, seconds: float) -> Any:
        if tensor.numel() > 1 << 20:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return original(plane, tensor, seconds)

    Plane._begin = patched  # type: ignore[method-assign]
    take_for_ever(receiver)


def send_for_ever(where: str, count: int, nbytes: int, options: dict[str, Any]) -> None:
    with tk.serve(where, receivers=count, **options) as sender:
        report("agreed")
        tensors = bulk(nbytes)
        while True:
            sender.send(tensors)


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens for TCP, as the kernel writes them: hexadecimal host and port."""
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
            rows = [line.split() for line in list(lines)[1:]]
        found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return found


def asleep(seconds: float = 0.5, within: float = 30.0) -> None:
    """Wait until no thread of Python's but the calling one has run for so many seconds."""
    limit = time.monotonic() + within
    before, since = _switches(), time.monotonic()
    while time.monotonic() < since + seconds:
        assert time.monotonic() < limit, "the other threads do not come to rest"
        time.sleep(0.02)
        if (now := _switches()) != before:
            before, since = now, time.monotonic()


def _switches() -> dict[str, str]:
    """How often each thread of Python's but the calling one has given up its processor, as the kernel writes it."""
    told = {}
    for task in {str(each.native_id) for each in threading.enumerate()} - {str(threading.get_native_id())}:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/status", encoding="ascii") as status:
            told[task] = "".join(line for line in status if line.startswith(("State", "voluntary", "nonvoluntary")))
    return told


def big(nbytes: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(nbytes, dtype=torch.uint8)}
