"""Whole sessions over the double of a GPU, in processes of their own: counts, faults, deaths, early ends."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import cuda_double
import cuda_ends
import pytest
import torch
from cuda_double import DoubleTransport

from transportkit.errors import (
    BackendUnavailableError,
    DeadlineError,
    NegotiationError,
    PeerError,
    PeerLostError,
    TransportKitError,
)
from transportkit.session import connect, pair, serve
from transportkit.site import read_site
from transportkit.testing import Call, Child, Session, bulk, in_process, installed, prints
from transportkit.testing import ends as given
from transportkit.testing.processes import context_of
from transportkit.wire import Offer
from transportkit_cuda_ipc import ends
from transportkit_cuda_ipc.tether import parked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transportkit.transport import Transport

pytestmark = pytest.mark.timeout(120)

WITHIN = 20.0


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    cuda_double.journal.clear()
    in_process(int, method="forkserver")
    with installed(*cuda_double.ALL):
        yield
    gc.collect()
    end = time.monotonic() + 5
    while parked() and time.monotonic() < end:
        time.sleep(0.01)
    assert parked() == 0
    assert cuda_double.journal.count("allocate") == cuda_double.journal.count("free")


def over(transport: type[Transport], **keywords: Any) -> Session:
    return Session(transport, process=True, within=WITHIN, **keywords)


def options(**more: Any) -> dict[str, Any]:
    return {"backends": (DoubleTransport.name,), "timeout": WITHIN, "wait": WITHIN, **more}


# -- counts ------------------------------------------------------------------------------------------------------------


def test_five_chunks_of_one_export_are_one_mapping() -> None:
    with over(DoubleTransport, chunk_bytes=1000, slots=2) as session:
        for seed in range(3):
            tensors = bulk(5000, seed)
            assert session.carry(tensors, given.receive, {}) == prints(tensors)
        assert session.receive(cuda_ends.journal).result(WITHIN) == ["map"]
        assert cuda_double.journal == ["allocate", "export"], "it is exported once, at the trial"
    assert cuda_double.journal[:2] == ["allocate", "export"]


def test_nothing_is_made_before_the_agreement() -> None:
    both = (DoubleTransport.name, "pickle")
    with Session(DoubleTransport, backends=both, receiver={"backends": ("pickle",)}) as session:
        assert session.sender.agreement.backend(0) == "pickle"
    assert cuda_double.journal == []


@pytest.mark.parametrize("handover", ["host", "event"])
def test_both_ways_of_handing_over(handover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "HANDOVER", handover)
    tensors = bulk(60_000)
    expected = prints(tensors)
    with over(DoubleTransport, chunk_bytes=7000, slots=3) as session:
        for way in given.WAYS:
            assert session.carry(tensors, given.WAYS[way], expected) == expected, way


def test_two_receivers_read_one_pack(tmp_path: Path) -> None:
    expected = [prints(bulk(100_000, seed)) for seed in range(3)]
    sender = serve(f"unix:{tmp_path}/s", receivers=2, chunk_bytes=9000, slots=2, **options())
    order = (cuda_ends.connect_and_repeat, sender.address, options(), 3, cuda_ends.slowly)
    with (
        Child(*order, 0.0, backends=cuda_double.ALL, method="forkserver") as fast,
        Child(*order, 0.02, backends=cuda_double.ALL, method="forkserver") as slow,
    ):
        with sender:
            for seed in range(3):
                report = Call(sender.send, bulk(100_000, seed)).result(WITHIN)
                assert set(report.backends.values()) == {DoubleTransport.name}
            assert len({a.lane for a in sender.agreement.assignments}) == 1
            for child in (fast, slow):
                came, journal = child.result(WITHIN)
                assert came == expected
                assert journal == ["map", "unmap"]
    assert cuda_double.journal == ["allocate", "export", "export", "free"]


def test_two_sessions_in_turn_share_nothing() -> None:
    with over(DoubleTransport, chunk_bytes=3000) as one, over(DoubleTransport, chunk_bytes=500) as other:
        for seed in range(3):
            for session in (one, other):
                tensors = bulk(20_000, seed)
                assert session.carry(tensors, given.load, prints(tensors)) == prints(tensors)


def test_a_kept_lease_keeps_its_bytes() -> None:
    tensors = {f"t{n}": torch.full((500,), n, dtype=torch.uint8) for n in range(9)}
    with over(DoubleTransport, chunk_bytes=500, slots=3) as session:
        assert session.carry(tensors, cuda_ends.lease_and_keep) == [0, 0, 0, 0]


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (cuda_double.MapFailsTransport, "Operation not permitted"),
        (cuda_double.ExportFailsTransport, "cudaErrorNotSupported"),
        (cuda_double.NoMemoryTransport, "out of memory"),
        (cuda_double.TwiceMappedTransport, "second mapping drives the counter"),
        (cuda_double.UnwaitedTransport, "other bytes arrived"),
    ],
)
def test_what_fails_in_the_trial_leaves_the_next_backend_its_chance(transport: type[Transport], words: str) -> None:
    with over(transport, backends=(transport.name, "pickle")) as session:
        assert session.sender.agreement.backend(0) == "pickle"
        assert words in str(session.sender.agreement)
        assert session.carry({"x": torch.ones(5)}, given.count, 1) == 20


def test_an_export_that_nobody_opened_is_reclaimed() -> None:
    with over(cuda_double.MapFailsTransport, backends=(cuda_double.MapFailsTransport.name, "pickle")):
        assert cuda_double.journal == ["allocate", "export", "free"]


def test_a_gpu_that_never_finishes_the_pack_ends_at_the_deadline() -> None:
    transport = cuda_double.NeverFiresTransport
    with over(transport, timeout=2.0) as session:
        receiving = session.receive(given.receive, {})
        error = session.send(bulk(5000)).error(WITHIN)
        # Both sides wait equally long, the one for its GPU, the other for a chunk: whoever is first tells the other.
        assert isinstance(error, DeadlineError | PeerError), repr(error)
        assert "DeadlineError" in repr(error)
        assert isinstance(receiving.error(WITHIN), TransportKitError)


def test_a_receiver_whose_gpu_does_not_finish_is_told_from_one_that_is_slow() -> None:
    with pytest.raises((NegotiationError, PeerError, DeadlineError)):
        over(cuda_double.NeverIdleTransport, timeout=1.0)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_memory_is_freed_only_when_nobody_has_it_mapped(tmp_path: Path) -> None:
    sender = serve(f"unix:{tmp_path}/s", chunk_bytes=4000, **options())
    order = (cuda_ends.take_one_and_hold, sender.address, options(chunk_bytes=4000))
    with Child(*order, backends=cuda_double.ALL, method="forkserver") as child:
        with sender:
            Call(sender.send, {"x": torch.full((3000,), 7, dtype=torch.uint8)}).result(WITHIN)
            assert child.heard(WITHIN) == "taken"
            sender.close()
            assert parked() == 1, "its memory is mapped elsewhere"
            assert "free" not in cuda_double.journal
            child.tell("close your session")
            assert child.heard(WITHIN) == 7, "a tensor that outlives both sessions keeps its bytes"
            assert parked() == 1
            child.tell("let go")
            assert child.result(WITHIN) == ["map", "unmap"]
            end = time.monotonic() + 5
            while parked() and time.monotonic() < end:
                time.sleep(0.01)
            assert (parked(), cuda_double.journal[-1]) == (0, "free")


def test_a_killed_receiver_holds_nothing() -> None:
    sender, theirs, child = started(given.first_chunk)
    with child:
        del theirs
        sending = Call(sender.send, bulk(300_000))
        assert child.heard(WITHIN) == "mid-update"
        child.kill()
        assert isinstance(sending.error(WITHIN), PeerLostError)
        sender.close()
        end = time.monotonic() + 5
        while parked() and time.monotonic() < end:
            time.sleep(0.01)
        assert cuda_double.journal[-1] == "free"


def started(work: Any) -> tuple[Any, Any, Child]:
    sender, theirs = pair(context_of("forkserver"), **options(wait=None, chunk_bytes=20_000, slots=2))
    return sender, theirs, Child(work, theirs, backends=cuda_double.ALL, method="forkserver")


def test_a_killed_sender_is_noticed_and_its_memory_unmapped() -> None:
    theirs, receiver = pair(context_of("forkserver"), **options(wait=None, chunk_bytes=20_000, slots=2))
    with Child(given.endless, theirs, 300_000, backends=cuda_double.ALL, method="forkserver") as child:
        del theirs
        receiving = Call(given.receive, receiver, {})
        assert child.heard(WITHIN) == "mid-update"
        child.kill()
        assert isinstance(receiving.error(WITHIN), PeerLostError)
        receiver.close()
    del receiving, receiver
    end = time.monotonic() + WITHIN
    while cuda_double.journal != ["map", "unmap"] and time.monotonic() < end:
        gc.collect()  # the thread that received may hold its last frames for a moment
        time.sleep(0.01)
    assert cuda_double.journal == ["map", "unmap"]


def test_sessions_one_after_another_leave_no_memory_behind(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    for _ in range(3):
        order = (cuda_ends.serve_and_count, address, options(chunk_bytes=9000), 2)
        with Child(*order, backends=cuda_double.ALL, method="forkserver") as child:
            with connect(address, **options(chunk_bytes=9000)) as receiver:
                for seed in range(2):
                    assert Call(given.receive, receiver, {}).result(WITHIN) == prints(bulk(100_000, seed))
            del receiver
            journal, left = child.result(WITHIN)
            assert journal == ["allocate", "export", "free"]
            assert left == 0
    cuda_double.journal.clear()


# -- a machine without CUDA --------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu() -> None:
    from transportkit_cuda_ipc.cuda_ipc import CudaIpcTransport

    if isinstance(CudaIpcTransport.probe(read_site("pair")), Offer):
        pytest.skip("this machine has what it takes")


@pytest.mark.usefixtures("no_gpu")
def test_without_cuda_it_is_left_out(tmp_path: Path) -> None:
    sender = serve(f"unix:{tmp_path}/s", wait=WITHIN)
    with Child(cuda_ends.connect_and_repeat, sender.address, {"wait": WITHIN}, 1, given.receive, {}) as child:
        with sender:
            Call(sender.send, {"x": torch.ones(3)}).result(WITHIN)
            assert sender.agreement.backend(0) != "cuda-ipc"
            told = str(sender.agreement)
            assert "cuda-ipc: not taken: unavailable at the sender: " in told
            assert "CUDA" in told
            child.result(WITHIN)


@pytest.mark.usefixtures("no_gpu")
def test_without_cuda_asking_for_it_is_refused_on_both_sides(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"cuda-ipc.* cannot be used here"):
        serve(f"unix:{tmp_path}/s", backends=("cuda-ipc",))
    sender = serve(f"unix:{tmp_path}/t")
    try:
        with pytest.raises(BackendUnavailableError, match=r"cuda-ipc.* cannot be used here"):
            connect(sender.address, backends=("cuda-ipc",), wait=WITHIN)
    finally:
        sender.close()
