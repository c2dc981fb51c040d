"""What the other process does in these tests; module-level functions, so that they can be handed over."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import cuda_double

from transportkit.errors import PeerLostError
from transportkit.session import Receiver, connect, serve
from transportkit.testing import ends as given
from transportkit.testing import hear, installed, prints, report
from transportkit.testing.samples import bulk
from transportkit_cuda_ipc import ends
from transportkit_cuda_ipc.tether import parked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from transportkit.session import Sender


def journal(receiver: Receiver) -> list[str]:
    """What the device of the receiver's process did."""
    return list(cuda_double.journal)


def slowly(receiver: Receiver, seconds: float) -> dict[str, Any]:
    """Take an update a chunk at a time, keeping every tensor to the end."""
    kept = []
    for name, tensor in receiver.receive():
        time.sleep(seconds)
        kept.append((name, tensor))
    return prints(kept)


def lease_and_keep(receiver: Receiver) -> list[int]:
    """Keep the tensors of the first chunk while the others go by; what they hold at the end."""
    kept: list[Tensor] = []
    for lease in receiver.chunks():
        for _, _, tensor in lease:
            if not kept:
                kept.append(tensor)
            del tensor
    return [int(value) for value in kept[0][:4]]


def connect_and_repeat(
    address: str, options: dict[str, Any], updates: int, work: Callable[..., Any], *args: Any
) -> Any:
    """Connect, take so many updates, close; what came and what the device did."""
    with connect(address, **options) as receiver:
        came = [work(receiver, *args) for _ in range(updates)]
    return came, list(cuda_double.journal)


def take_one_and_hold(address: str, options: dict[str, Any]) -> list[str]:
    """Take one update by leases, keep a tensor beyond the session until told, then let go."""
    kept: list[Tensor] = []
    with connect(address, **options) as receiver:
        for lease in receiver.chunks():
            for _, _, tensor in lease:
                kept.append(tensor)
                break
            del lease, tensor
        report("taken")
        hear()
    del receiver
    report(int(kept[0][0]))
    hear()
    kept.clear()
    return list(cuda_double.journal)


def serve_and_count(address: str, options: dict[str, Any], updates: int) -> tuple[list[str], int]:
    """Serve and send; what the device did, and how much is parked, half a second after the end."""
    with serve(address, **options) as sender:
        for seed in range(updates):
            sender.send(bulk(100_000, seed))
    end = time.monotonic() + 5
    while parked() and time.monotonic() < end:
        time.sleep(0.02)
    return list(cuda_double.journal), parked()


def by_event(function: Callable[..., Any], *args: Any) -> Any:
    """Do something in a process whose exporters hand over by events."""
    ends.HANDOVER = "event"
    return function(*args)


# -- over the stubs of a runtime; what was asked of it is the answer ---------------------------------------------------


def over_stubs(function: Callable[..., Any], *args: Any) -> Any:
    """Do something with the backend over the stubs; what was asked of the runtime, when all has come to rest."""
    import cuda_stub

    with installed(cuda_stub.StubbedTransport):
        function(*args)
    end = time.monotonic() + 5
    while (parked() or cuda_stub.journal[-1:] == ["open"]) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return list(cuda_stub.journal)


def serve_over_stubs(address: str, options: dict[str, Any], updates: int) -> Any:
    def work() -> None:
        with serve(address, receivers=2, **options) as sender:
            for seed in range(updates):
                sender.send(bulk(60_000, seed))

    return over_stubs(work)


def connect_over_stubs(address: str, options: dict[str, Any]) -> Any:
    came: list[Any] = []

    def work() -> None:
        with connect(address, **options) as receiver:
            came.extend(prints(receiver.receive()) for _ in range(3))

    return came, over_stubs(work)


def one_end(make: Callable[..., Any], address: str, options: dict[str, Any], work: Callable[..., Any]) -> Any:
    """Serve or connect, and do something with that end."""

    def with_end() -> None:
        with make(address, **options) as end:
            work(end)

    return over_stubs(with_end)


def endless(sender: Sender) -> None:
    given.endless(sender, 300_000)


def until_lost(end: Sender | Receiver) -> None:
    """Send or receive until the other end is gone."""
    try:
        list(end.receive()) if isinstance(end, Receiver) else end.send(bulk(3_000_000))
    except PeerLostError:
        return
    raise AssertionError("nobody was lost")


def within_one_process(address: str, options: dict[str, Any]) -> Any:
    told: list[str] = []
    options = {**options, "backends": (*options["backends"], "pickle")}

    def work() -> None:
        with serve(address, **options) as sender:
            told.append(str(sender.agreement))

    def take() -> None:
        with connect(address, **options):
            pass

    def both() -> None:
        taking = threading.Thread(target=take)
        taking.start()
        work()
        taking.join()

    return told, over_stubs(both)
