"""What a sender or receiver does in a test: module-level functions, so that it can be done in this process or another.

Each receiving function takes one update and returns what arrived, as `transportkit.testing.samples.prints` does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transportkit.errors import TransportKitError
from transportkit.session import Source
from transportkit.testing.processes import hear, report
from transportkit.testing.samples import Print, as_module, bulk, bytes_of, empty_like, one_at_a_time, print_of, prints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from transportkit.session import Receiver, Sender

# -- four kinds of source ---------------------------------------------------------------------------------------------

#: From named tensors to something that `Sender.send` takes.
SOURCES: dict[str, Callable[[Mapping[str, Tensor]], Any]] = {
    "mapping": dict,
    "module": as_module,
    "source": lambda tensors: Source([(n, t.dtype, t.shape) for n, t in tensors.items()], one_at_a_time(tensors)),
    "iterator": one_at_a_time,
}

# -- four ways to receive ---------------------------------------------------------------------------------------------


def load(receiver: Receiver, expected: Mapping[str, Print]) -> dict[str, Print]:
    """Into existing tensors that hold other bytes."""
    target = empty_like(expected)
    receiver.load_into(target)
    return prints(target)


def apply(receiver: Receiver, expected: Mapping[str, Print]) -> dict[str, Print]:
    """Through a function."""
    seen: dict[str, Print] = {}
    receiver.apply(lambda pairs: seen.update(prints(pairs)))
    return seen


def receive(receiver: Receiver, expected: Mapping[str, Print]) -> dict[str, Print]:
    """As owned tensors, all kept to the end of the update."""
    return prints(list(receiver.receive()))


def chunks(receiver: Receiver, expected: Mapping[str, Print]) -> dict[str, Print]:
    """By leases."""
    gathered: dict[str, bytearray] = {}
    specs = {}
    for lease in receiver.chunks():
        for spec, offset, tensor in lease:
            specs[spec.name] = spec
            data = gathered.setdefault(spec.name, bytearray())
            if len(data) != offset and spec.same_as is None:
                raise AssertionError(f"{spec.name}: byte {offset} came, where byte {len(data)} was due")
            data += bytes_of(tensor)
            del tensor
    return {name: (specs[name].dtype, tuple(specs[name].shape), bytes(data)) for name, data in gathered.items()}


WAYS: dict[str, Callable[[Receiver, Mapping[str, Print]], dict[str, Print]]] = {
    "load_into": load,
    "apply": apply,
    "receive": receive,
    "chunks": chunks,
}


def count(receiver: Receiver, updates: int) -> int:
    """Take so many updates and count their bytes."""
    total = 0
    for _ in range(updates):
        total += sum(tensor.numel() * tensor.itemsize for _, tensor in receiver.receive())
    return total


def first_chunk(receiver: Receiver) -> None:
    """Take one chunk, and be busy with it for ever; reports when it has it."""
    for _ in receiver.chunks():
        report("mid-update")
        time.sleep(600)


# -- whole processes --------------------------------------------------------------------------------------------------


def receiving(receiver: Receiver) -> None:
    """Serve a `Session`: do what the parent says with this receiver, until it says None."""
    with receiver:
        report("joined")
        while (order := hear(600)) is not None:
            work, args = order
            try:
                answer = "returned", work(receiver, *args)
            except TransportKitError as error:
                answer = "raised", error
            report(answer)


def endless(sender: Sender, nbytes: int) -> None:
    """Send one update that gets stuck half-way; reports when half of it is sent."""

    def source() -> Iterator[tuple[str, Tensor]]:
        tensors = bulk(nbytes)
        yield from tensors.items()
        report("mid-update")
        time.sleep(600)
        yield "never", tensors["bulk_0"]

    with sender:
        sender.send(source())


def connect_and(address: str, work: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Connect to an address and do something with the receiver."""
    from transportkit.session import connect

    with connect(address, **options) as receiver:
        return work(receiver, *args)


def serve_and_send(address: str, seed: int, nbytes: int, options: dict[str, Any]) -> str:
    """Serve one receiver, and send it `bulk`; the name of the agreed backend. Reports the address first."""
    from transportkit.session import serve

    with serve(address, **options) as sender:
        sender.send(bulk(nbytes, seed))
        return sender.agreement.backend(0)


def first_tensor(receiver: Receiver) -> Print:
    """Receive one update and identify its first tensor."""
    return next(iter([print_of(tensor) for _, tensor in receiver.receive()]))
