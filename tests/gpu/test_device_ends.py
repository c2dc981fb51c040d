"""Tensors on a CUDA device, moved by backends whose slots are host memory: staged there, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from transportkit import registry
from transportkit.testing import Session, bulk, prints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.session import Receiver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20


@pytest.fixture(params=["shm", "pickle"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    loaded = registry.load(request.param)
    assert isinstance(loaded, registry.Loaded), loaded
    with Session(loaded.transport, device="cuda", chunk_bytes=MIB, within=60.0) as session:
        yield session


def load(receiver: Receiver, target: dict[str, torch.Tensor]) -> None:
    receiver.load_into(target)


def receive(receiver: Receiver) -> dict[str, torch.Tensor]:
    return dict(receiver.receive())


def on_device(nbytes: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in bulk(nbytes).items()}


def test_device_tensors_reach_device_targets(session: Session) -> None:
    source = on_device(5 * MIB)
    expected, addresses = prints(source), [tensor.data_ptr() for tensor in source.values()]
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    for _ in range(2):
        session.carry(source, load, target)
        assert prints(target) == expected
    assert prints(source) == expected
    assert [tensor.data_ptr() for tensor in source.values()] == addresses


def test_owned_tensors_come_on_the_device(session: Session) -> None:
    source = on_device(3 * MIB)
    came = session.carry(source, receive)
    assert {tensor.device.type for tensor in came.values()} == {"cuda"}
    assert prints(came) == prints(source)


def test_what_a_stream_still_computes_is_waited_for(session: Session) -> None:
    weights = torch.zeros(MIB, dtype=torch.float32, device="cuda")
    stream = torch.cuda.Stream()
    for value in range(1, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # a kernel that takes about a tenth of a second
            weights.fill_(value)
        torch.cuda.current_stream().wait_stream(stream)  # what a caller owes who made them on a stream of its own
        came = session.carry({"weights": weights}, receive)
        assert torch.equal(came["weights"], torch.full_like(came["weights"], value))


def test_device_memory_stays_flat(session: Session) -> None:
    source = on_device(5 * MIB)
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    session.carry(source, load, target)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        session.carry(source, load, target)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= MIB
