"""Both planes over groups that are none: what a communicator that does nothing comes to, and NCCL without a GPU."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from transportkit.errors import BackendError, DeadlineError, NegotiationError, PeerError
from transportkit.testing import Call, Session, bulk, ends, prints
from transportkit.testing.installing import installed
from transportkit.testing.lanes import DirectLane
from transportkit.transport import Match, Offer, Reach
from transportkit_collective import planes, runner
from transportkit_collective.exporter import CollectiveExporter
from transportkit_collective.gloo import GlooTransport
from transportkit_collective.head import HEAD
from transportkit_collective.importer import CollectiveImporter
from transportkit_collective.nccl import NcclTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)


class Done:
    """A work that is done."""

    def wait(self) -> None:
        return None


class Silent:
    """A group whose broadcasts do nothing."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        return Done()


class HeadsOnly:
    """A group that carries the first bytes of whatever it is given, and nothing else."""

    def __init__(self, rank: int, lane: queue.Queue[torch.Tensor]) -> None:
        self._rank, self._lane = rank, lane

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> HeadsOnly:
        self._tensor = tensors[0]
        return self

    def wait(self) -> None:
        if self._rank == 0:
            self._lane.put(self._tensor[:HEAD].clone())
        else:
            self._tensor[:HEAD].copy_(self._lane.get(timeout=10))


@pytest.mark.parametrize("kind", ["silent", "heads only"])
@pytest.mark.parametrize("checksum", [None, False])
def test_the_trial_catches_a_communicator_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, checksum: bool | None
) -> None:
    lane: queue.Queue[torch.Tensor] = queue.Queue()

    def form(store: Any, rank: int, size: int, host: str, seconds: float) -> Any:
        return Silent() if kind == "silent" else HeadsOnly(rank, lane)

    monkeypatch.setattr(planes, "gloo_group", form)
    with pytest.raises((NegotiationError, PeerError), match=r"gloo: not taken: trial failed: .*(carr|bytes)"):
        Session(GlooTransport, checksum=checksum, within=5)
    with Session(GlooTransport, checksum=checksum, within=5, backends=("gloo", "pickle")) as session:
        assert session.sender.agreement.backend(0) == "pickle"
        assert session.carry({"x": torch.ones(5)}, ends.count, 1) == 20


# -- NCCL, on memory of the CPU ---------------------------------------------------------------------------------------


class FakeNccl:
    """What `ProcessGroupNCCL` does, between the threads of one process: whole tensors, equal sizes, errors on abort.

    It was made after the behaviour that is documented for the real one, which was not at hand.
    """

    lanes: dict[int, list[queue.Queue[torch.Tensor]]] = {}

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.aborted = rank, size, threading.Event()
        if rank == 0:
            key = id(self)
            FakeNccl.lanes[key] = [queue.Queue() for _ in range(size)]
            store.set("id", str(key).encode())
        else:
            key = int(store.get("id"))
        self._lanes = FakeNccl.lanes[key]

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeNccl:
        self.tensor, self.seconds = tensors[0], options.timeout.total_seconds()
        return self

    def wait(self) -> None:
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank 0")
        if self.rank == 0:
            for lane in self._lanes[1:]:
                lane.put(self.tensor.clone())
            return
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not self.aborted.is_set():
            with contextlib.suppress(queue.Empty):
                came = self._lanes[self.rank].get(timeout=0.01)
                assert came.shape == self.tensor.shape, "NCCL hangs or worse where sizes differ"
                self.tensor.copy_(came)
                return
        raise RuntimeError("NCCL communicator was aborted, or timed out")

    def abort(self) -> None:
        self.aborted.set()


class HostStreams:
    """Streams of a device that runs everything at once; notes the order of what was asked."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _around(self, what: str) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self.told.append(what)
            yield
            self.told.append(f"/{what}")

        return around()

    def packing(self, index: int) -> contextlib.AbstractContextManager[None]:
        return self._around(f"packing {index}")

    def moving(self, index: int | None) -> contextlib.AbstractContextManager[None]:
        return self._around(f"moving {index}")

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return self._around("reading")

    def head_of(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[:HEAD].clone()

    def put_head(self, slot: torch.Tensor, head: torch.Tensor) -> None:
        slot[:HEAD].copy_(head)

    def drain(self) -> None:
        self.told.append("drain")


made: list[HostStreams] = []


class CpuNccl(NcclTransport):
    """The backend `nccl` as it is, on memory of the CPU and over the fake group."""

    name = "cpu-nccl"
    device_slots = False

    @classmethod
    def probe(cls, site: Any) -> Any:
        return Offer(cls.name)

    @classmethod
    def match(cls, sender: Any, receiver: Any, lane: Any) -> Any:
        return Match(Reach.DEVICE_NETWORK)

    @classmethod
    def exporter(cls, terms: Any, wiring: Any) -> Any:
        return CollectiveExporter(terms, wiring, cls.plane())

    @classmethod
    def importer(cls, terms: Any, wiring: Any) -> Any:
        return CollectiveImporter(terms, wiring, cls.plane())

    @staticmethod
    def plane() -> planes.NcclPlane:
        made.append(HostStreams())
        return planes.NcclPlane("cpu", made[-1])  # type: ignore[arg-type]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made.clear()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(planes, "nccl_group", lambda store, rank, size, device, seconds: FakeNccl(store, rank, size))
    with installed(CpuNccl):
        yield
    FakeNccl.lanes.clear()


def test_values_and_streams_over_the_nccl_plane(fake: None) -> None:
    tensors = bulk(20_000)
    with Session(CpuNccl, chunk_bytes=3000, slots=2) as session:
        assert session.sender.agreement.backend(0) == "cpu-nccl"
        for way in ends.WAYS.values():
            assert session.carry(tensors, way, prints(tensors)) == prints(tensors)
    sender, receiver = made
    moves = [what for what in sender.told if what.startswith("moving")]
    assert len(moves) > 20
    for index in ("0", "1"):  # each broadcast follows the packing of its slot
        order = [what for what in sender.told if what in (f"/packing {index}", f"moving {index}")]
        assert order == [f"/packing {index}", f"moving {index}"] * (len(order) // 2)
    assert "reading" in receiver.told
    assert sender.told[-1] == receiver.told[-1] == "drain"


def test_three_receivers_over_the_nccl_plane(fake: None) -> None:
    with DirectLane(CpuNccl, chunk_bytes=400, slots=2, receivers=3) as lane:
        lane.connect()
        for turn in range(4):
            data = bytes([turn]) * 300
            assert lane.carry(turn % 2, data) == [data] * 3


def test_a_deadline_over_the_nccl_plane_ends_at_once_and_nothing_stays(fake: None) -> None:
    with DirectLane(CpuNccl, chunk_bytes=400, slots=2) as lane:
        lane.connect()
        (header,) = lane.pack(0, b"x" * 300)
        call = Call(lane.imports[0].open, header, lane.deadline("chunk", 0.3))
        assert isinstance(call.error(3), DeadlineError)
        with pytest.raises(BackendError, match="has ended"):
            lane.imports[0].open(header, lane.deadline())
    end = time.monotonic() + 3
    while runner.parked() and time.monotonic() < end:
        time.sleep(0.02)
    assert runner.parked() == 0


def test_the_environment_is_changed_around_the_constructor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Group:
        def __init__(self, *args: Any) -> None:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

        def eager_connect_single_device(self, device: Any) -> None:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    class Options:
        _timeout: Any = None

    Group.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(planes.dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    planes.nccl_group(None, 0, 1, torch.device("cuda:0"), 5.0)  # type: ignore[arg-type]
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    planes.nccl_group(None, 0, 1, torch.device("cuda:0"), 5.0)  # type: ignore[arg-type]
    assert seen == ["1", None, "1", "0"]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
