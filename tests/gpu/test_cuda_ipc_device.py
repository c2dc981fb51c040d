"""`cuda-ipc` between two processes on one GPU; what the double can stand in for runs there, too."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import grounds
import pytest
import torch
from grounds import BOTH, GPU, MIB, Ground

from transportkit.errors import PeerLostError
from transportkit.session import connect, pair, serve
from transportkit.testing import Call, Child, TransportConformance, in_process, installed, prints
from transportkit.testing.processes import context_of
from transportkit_cuda_ipc import ends
from transportkit_cuda_ipc.tether import parked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _nothing_parked() -> Iterator[None]:
    in_process(int, method="forkserver")
    with installed(*grounds.by_double()):
        yield
    gc.collect()
    assert grounds.settles(lambda: parked() == 0), "device memory is kept, though nobody should have it mapped"


@pytest.mark.gpu
class TestCudaIpcOnTheDevice(TransportConformance):
    """The conformance suite, on a GPU."""

    backend: ClassVar[str] = "cuda-ipc"
    same_process: ClassVar[bool] = False
    device: ClassVar[str] = "cuda"
    patience: ClassVar[float] = 60.0
    notice: ClassVar[float] = 5.0
    memory_slack: ClassVar[int] = 128 << 20


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handover", ["host", "event"])
@pytest.mark.parametrize("ground", BOTH)
def test_values_arrive_in_every_way(ground: Ground, handover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "HANDOVER", handover)
    tensors = ground.bulk(24 * MIB)
    tensors |= {"on_the_cpu": torch.arange(1000, dtype=torch.int32), "strided": tensors["layers.0.weight"].t()}
    expected = prints(tensors)
    wanted = grounds.shapes(tensors)
    with ground.session(chunk_bytes=2 * MIB // ground.scale + 13, slots=2) as session:
        assert session.sender.agreement.backend(0) == ground.transport.name
        for _ in range(3):
            assert session.carry(tensors, grounds.load_and_tell, wanted, ground.device) == expected
            assert session.carry(tensors, grounds.load_and_tell, wanted, "cpu") == expected, "into targets on the CPU"
            assert session.carry(iter(tensors.items()), grounds.receive_on, ground.device) == expected
            assert session.carry(tensors, grounds.apply_and_copy) == expected
            assert session.carry(tensors, grounds.lease_and_copy) == expected


@pytest.mark.parametrize("ground", BOTH)
def test_many_small_tensors(ground: Ground) -> None:
    tensors = ground.bulk(20 * MIB, count=2000)
    tensors |= {f"odd.{n}": torch.full((n,), n, dtype=torch.uint8, device=ground.device) for n in range(1, 200)}
    with ground.session(chunk_bytes=8 * MIB // ground.scale) as session:
        came = session.carry(tensors, grounds.load_and_tell, grounds.shapes(tensors), ground.device)
        assert came == prints(tensors)


@pytest.mark.gpu
def test_a_long_kernel_is_waited_for() -> None:
    side = torch.cuda.Stream()
    weights = torch.zeros(4 * MIB, dtype=torch.bfloat16, device="cuda")
    with GPU.session(chunk_bytes=2 * MIB) as session:
        for value in range(1, 6):
            with torch.cuda.stream(side):
                torch.cuda._sleep(300_000_000)  # some tenths of a second
                weights.fill_(value)
            torch.cuda.current_stream().wait_stream(side)  # what a caller owes who made them on a stream of its own
            came = session.carry({"w": weights}, grounds.load_and_tell, grounds.shapes({"w": weights}), "cuda")
            assert came == prints({"w": torch.full_like(weights, value)}), "old bytes were packed"


@pytest.mark.gpu
def test_a_source_that_lets_go_of_its_tensors_at_once() -> None:
    def source(value: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(30):
            torch.cuda._sleep(5_000_000)
            yield f"t{number}", torch.full((1 << 20,), value + number, dtype=torch.int32, device="cuda")

    with GPU.session(chunk_bytes=8 * MIB) as session:
        for value in (100, 200):
            expected = {f"t{n}": torch.full((1 << 20,), value + n, dtype=torch.int32) for n in range(30)}
            assert session.carry(source(value), grounds.receive_on, "cuda") == prints(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
@pytest.mark.parametrize("backend", ["cuda-ipc", "shm"])
def test_the_allocators_settings_do_not_matter(settings: str, backend: str) -> None:
    env = grounds.environment(**{"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {})
    script = str(Path(__file__).with_name("one_transfer.py"))
    done = subprocess.run(
        [sys.executable, script, backend, "cuda"], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{backend}, lane 0" in done.stdout


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ground", BOTH)
def test_twenty_updates_leave_memory_flat_on_both_sides(ground: Ground) -> None:
    tensors = ground.bulk(256 * MIB)
    wanted = grounds.shapes(tensors)
    with ground.session(chunk_bytes=32 * MIB // ground.scale, slots=2) as session:
        for _ in range(2):
            session.carry(tensors, grounds.load, wanted, ground.device)
        here, there = grounds.memory(), session.receive(grounds.memory_there).result(ground.within)
        for _ in range(20):
            session.carry(tensors, grounds.load, wanted, ground.device)
        assert grounds.grown(here, grounds.memory()) == {}
        assert grounds.grown(there, session.receive(grounds.memory_there).result(ground.within)) == {}


@pytest.mark.parametrize("ground", BOTH)
def test_sessions_that_end_give_their_memory_back(ground: Ground) -> None:
    tensors = ground.bulk(16 * MIB)
    before = None
    for _ in range(4):
        with ground.session(chunk_bytes=128 * MIB // ground.scale, slots=2) as session:
            session.carry(tensors, grounds.load, grounds.shapes(tensors), ground.device)
        assert grounds.settles(lambda: parked() == 0)
        before = before or grounds.memory()  # after the first one, which brings the context along
    assert grounds.grown(before or {}, grounds.memory()) == {}


@pytest.mark.parametrize("ground", BOTH)
def test_an_export_that_nobody_opened_is_reclaimed(ground: Ground) -> None:
    transport = ground.failing("attach", OSError(1, "Operation not permitted"))
    with installed(transport):
        before = None
        for _ in range(3):
            keywords = {"backends": (transport.name, "pickle"), "chunk_bytes": 128 * MIB // ground.scale, "slots": 2}
            with ground.session(transport, **keywords) as session:
                assert session.sender.agreement.backend(0) == "pickle"
                assert "Operation not permitted" in str(session.sender.agreement)
                assert grounds.settles(lambda: parked() == 0)
                before = before or grounds.memory()
        assert grounds.grown(before or {}, grounds.memory()) == {}


@pytest.mark.parametrize("ground", BOTH)
def test_an_early_close_of_either_side(ground: Ground) -> None:
    tensors = ground.bulk(16 * MIB)
    for first in ("sender", "receiver"):
        session = ground.session(chunk_bytes=MIB // ground.scale)
        session.carry(tensors, grounds.load, grounds.shapes(tensors), ground.device)
        if first == "sender":
            session.sender.close()
        else:
            assert session.child is not None
            session.child.tell(None)
            session.child.result(ground.within)
        session.close()
        assert grounds.settles(lambda: parked() == 0), f"{first} closed first"


# -- several -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ground", BOTH)
def test_two_receivers_share_one_pack(ground: Ground, tmp_path: Path) -> None:
    tensors = ground.bulk(64 * MIB)
    options = ground.options(chunk_bytes=8 * MIB // ground.scale)
    sender = serve(f"unix:{tmp_path}/s", receivers=2, **options)
    order = (grounds.connect_and_take, sender.address, options, 6, grounds.shapes(tensors), ground.device)
    children = [Child(*order, backends=grounds.by_double(), method="forkserver") for _ in range(2)]
    with children[0], children[1]:
        with sender:
            assert len({assignment.lane for assignment in sender.agreement.assignments}) == 1
            for _ in range(6):
                Call(sender.send, tensors).result(ground.within)
            for child in children:
                came, more = child.result(ground.within)
                assert came == prints(tensors)
                assert more == {}


@pytest.mark.parametrize("ground", BOTH)
def test_two_sessions_in_turn(ground: Ground) -> None:
    chunk_bytes = 4 * MIB // ground.scale
    with ground.session(chunk_bytes=chunk_bytes) as one, ground.session(chunk_bytes=chunk_bytes // 3) as other:
        for seed in range(4):
            for session in (one, other):
                tensors = ground.bulk(32 * MIB, seed)
                came = session.carry(tensors, grounds.load_and_tell, grounds.shapes(tensors), ground.device)
                assert came == prints(tensors)


# -- death -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ground", BOTH)
def test_a_killed_receiver_frees_the_senders_memory(ground: Ground) -> None:
    options = ground.options(wait=None, chunk_bytes=64 * MIB // ground.scale, slots=2)
    before = None
    for _ in range(3):
        sender, theirs = pair(context_of("forkserver"), **options)
        with Child(grounds.hold_and_wait, theirs, backends=grounds.by_double(), method="forkserver") as child:
            del theirs
            sending = Call(sender.send, ground.bulk(512 * MIB))
            assert child.heard(ground.within) == "mid-update"
            child.kill()
            assert isinstance(sending.error(ground.within), PeerLostError)
            sender.close()
        del sending, sender
        assert grounds.settles(lambda: parked() == 0)
        before = before or grounds.memory()
    assert grounds.grown(before or {}, grounds.memory()) == {}


@pytest.mark.parametrize("ground", BOTH)
def test_a_killed_sender_ends_in_an_error_and_the_next_one_serves(ground: Ground, tmp_path: Path) -> None:
    address, options = f"unix:{tmp_path}/s", ground.options(chunk_bytes=8 * MIB // ground.scale)
    for _ in range(2):
        order = (grounds.serve_until_told, address, options, 256 * MIB, ground.name)
        with Child(*order, backends=grounds.by_double(), method="forkserver") as child:
            with connect(address, **options) as receiver:
                receiving = Call(list, receiver.receive())
                assert child.heard(ground.within) == "mid-update"
                child.kill()
                assert isinstance(receiving.error(ground.within), PeerLostError)
            del receiver, receiving
    grounds.synchronise()  # the context is still sound
    tensors = ground.bulk(4 * MIB)
    with ground.session() as session:
        assert session.carry(tensors, grounds.receive_on, ground.device) == prints(tensors)
