"""What the tests of `mpqueue` share: ends over one queue in this process, and what children do with theirs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import shm_ends

from transportkit.link import SocketLink
from transportkit.session import Receiver, Sender
from transportkit.session.options import options
from transportkit.testing import bulk, hear, prints, report
from transportkit_shm import arena
from transportkit_shm.descriptor_queue import DescriptorQueue
from transportkit_shm.mpqueue import MpqueueExporter, MpqueueImporter, MpqueueTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transportkit.testing.samples import Print
    from transportkit.transport import Terms

#: Bytes of an update in which somebody dies.
NBYTES = 300_000

KEYWORDS: dict[str, Any] = {"backends": ["mpqueue"], "chunk_bytes": 20_000, "slots": 2, "timeout": 20}

# -- in this process --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_queue() -> Iterator[DescriptorQueue]:
    """A queue, at whose end this process must hold nothing of it and no shared memory."""
    gc.collect()
    before = queue_ends(), shared_files()
    made = DescriptorQueue.new()
    yield made
    made.close("sender")
    made.close("receiver")
    gc.collect()
    assert (queue_ends(), shared_files()) == before


def wiring(queue: object) -> shm_ends.PollWiring:
    made = shm_ends.PollWiring()
    made.inherited = queue  # type: ignore[assignment]
    return made


def terms(receiver: int = -1, *, token: bytes = shm_ends.TOKEN, **sizes: int) -> Terms:
    return msgspec.structs.replace(shm_ends.terms(receiver, **sizes), backend="mpqueue", token=token)


def exporter(queue: object, token: bytes = shm_ends.TOKEN, **sizes: int) -> MpqueueExporter:
    return MpqueueTransport.exporter(terms(token=token, **sizes), wiring(queue))


def importer(queue: DescriptorQueue, token: bytes = shm_ends.TOKEN, **sizes: int) -> MpqueueImporter:
    """One that has joined."""
    made = MpqueueTransport.importer(terms(0, token=token, **sizes), wiring(queue))
    made.join(msgspec.Raw(msgspec.msgpack.encode({"queue": queue.mark})))
    return made


def first_bytes(end: MpqueueImporter, sent: MpqueueExporter) -> list[int]:
    """Attach, and read the first three bytes of the first slot."""
    return [int(byte) for byte in end.attach(sent.locate(0, 0).handle)[:3]]


def queue_ends() -> int:
    """How many descriptors of this process are ends of queues."""
    found = 0
    for number, target in shm_ends.descriptors().items():
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as copy:
                found += copy.type == socket.SOCK_SEQPACKET
    return found


def shared_files() -> list[str]:
    """What this process holds of `/dev/shm`: descriptors and mappings."""
    held = [target for target in shm_ends.descriptors().values() if target.startswith("/dev/shm/")]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        held += [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
    return held


def names() -> set[str]:
    """What is in `/dev/shm` that this library or torch could have left."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "transportkit", "tk", "psm_"))}


#: A program that does as `queue_ends`.
COUNT = """
import os, socket
found = 0
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        found += socket.socket(fileno=os.dup(number)).type == socket.SOCK_SEQPACKET
    except OSError:
        pass
print(found)
"""

# -- dying at a chosen moment -----------------------------------------------------------------------------------------

#: The steps of a handover at either end: what is called there, and whether the process dies before or after.
STEPS: dict[str, tuple[Any, str, str]] = {
    "sender made": (arena, "furnish", "after"),
    "sender before put": (DescriptorQueue, "put", "before"),
    "sender after put": (DescriptorQueue, "put", "after"),
    "receiver before expect": (DescriptorQueue, "expect", "before"),
    "receiver before collect": (DescriptorQueue, "collect", "before"),
    "receiver after message": (DescriptorQueue, "_receive", "after"),
    "receiver mapped": (arena, "map_whole", "after"),
}


def die_at(step: str) -> None:
    """From now on this process is killed at that step."""
    home, name, when = STEPS[step]
    original: Callable[..., Any] = getattr(home, name)

    @functools.wraps(original)
    def deadly(*args: Any, **keywords: Any) -> Any:
        value = original(*args, **keywords) if when == "after" else None
        if value is False:  # nothing had come yet
            return value
        os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(home, name, deadly)


# -- in children ------------------------------------------------------------------------------------------------------


def load_all(receiver: Receiver, updates: int, step: str = "") -> list[dict[str, Print]]:
    """Take updates, after having said how many ends of queues this process has: before, during and after."""
    held = [queue_ends()]
    if step:
        die_at(step)
    with receiver:
        held.append(queue_ends())
        inherited = in_a_program()
        taken = [prints(receiver.receive()) for _ in range(updates)]
    held.append(queue_ends())
    report((held, inherited, shared_files(), str(receiver.agreement)))
    return taken


def send_all(sender: Sender, updates: int, step: str = "") -> str:
    if step:
        die_at(step)
    with sender:
        for seed in range(updates):
            sender.send(bulk(NBYTES, seed))
        return sender.agreement.backend(0)


def in_a_program() -> int:
    """How many ends of queues a program gets that this process starts."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", COUNT], capture_output=True, text=True, close_fds=False, timeout=60, check=True
    )
    return int(done.stdout)


def without_memfd(receiver: Receiver) -> tuple[str, str]:
    """Take one update in a process whose system knows no memfd."""
    del os.memfd_create
    with receiver:
        taken = prints(receiver.receive())
        return str(receiver.agreement), str(taken == prints(bulk(NBYTES, 0)))


def in_another_network(receiver: Receiver) -> bool:
    """Take one update in a network namespace of one's own; says first whether the system allows one."""
    allowed = ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0  # CLONE_NEWNET
    report(allowed)
    with receiver:
        return prints(receiver.receive()) == prints(bulk(NBYTES, 0))


def sit_on(queue: DescriptorQueue, link: socket.socket, updates: int, step: str = "") -> str:
    """Take a seat as its producer: send so many updates, and be killed at a step of the handover or half-way."""
    if step and step != "mid-update":
        die_at(step)
    with Sender.over([SocketLink.over(link)], options(KEYWORDS), {"mpqueue": queue}) as sender:
        for seed in range(updates):
            sender.send(bulk(NBYTES, seed))
        if step == "mid-update":
            sender.send(_half_way())
    return sender.agreement.backend(0)


def _half_way() -> Any:
    yield from bulk(NBYTES, 0).items()
    report("mid-update")
    time.sleep(600)


def wait_for_word(*kept: object) -> None:
    """Hold what was inherited, and do nothing, until told."""
    report(queue_ends())
    hear(60)
