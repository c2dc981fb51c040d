"""The two ends step by step, and the tether between them: who waits for what, and what is refused unmapped."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import cuda_double
import msgspec
import pytest
from cuda_double import AloneDevice, AloneTransport

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, PeerLostError, ProtocolError
from transportkit.testing import Call, DirectLane
from transportkit.wire import raw
from transportkit_cuda_ipc import ends, tether
from transportkit_cuda_ipc.ends import ArenaHandle, Invitation
from transportkit_cuda_ipc.tether import Anchor, Tether, parked, prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transportkit.wire import Chunk

pytestmark = pytest.mark.timeout(60)

PROOF = prove(b"token", 0)


@pytest.fixture
def lane() -> Iterator[DirectLane]:
    cuda_double.journal.clear()
    with DirectLane(AloneTransport, chunk_bytes=100, slots=2) as made:
        yield made.connect()
    settle()


def settle() -> None:
    end = time.monotonic() + 5
    while parked() and time.monotonic() < end:
        gc.collect()  # an exception may keep a frame, and that a chunk
        time.sleep(0.005)
    assert parked() == 0


def answers(monkeypatch: pytest.MonkeyPatch, *given: bool) -> list[bool]:
    """What the GPU says when it is asked whether it is through; those that are left."""
    left = list(given)
    monkeypatch.setattr(AloneDevice, "idle", lambda self: lambda: left.pop(0) if left else True)
    return left


# -- the importer ------------------------------------------------------------------------------------------------------


def test_reads_are_done_when_reading_ends_and_before_a_chunk_is_acknowledged(
    lane: DirectLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = lane.move(0, b"x" * 100)
    left = answers(monkeypatch, False, False, True)
    with lane.importers[0].reading(chunk.header):
        assert len(left) == 3
    assert left == []
    left = answers(monkeypatch, False, True)
    with pytest.raises(KeyError), lane.importers[0].reading(chunk.header):
        raise KeyError
    assert left == [], "also where a copy failed, what is queued is waited for"
    left = answers(monkeypatch, False, False, True)
    lane.imports[0].release(chunk)
    assert left == []
    assert lane.acknowledged == [chunk.header]


def test_a_chunk_whose_reads_do_not_end_is_not_acknowledged(lane: DirectLane, monkeypatch: pytest.MonkeyPatch) -> None:
    (chunk,) = lane.move(0, b"x" * 100)
    monkeypatch.setattr(ends, "READ_SECONDS", 0.1)
    monkeypatch.setattr(AloneDevice, "idle", lambda self: lambda: False)
    with pytest.raises(BackendError, match="the GPU does not finish"), lane.importers[0].reading(chunk.header):
        pass
    with pytest.raises(BackendError, match="the GPU does not finish"):
        lane.imports[0].release(chunk)
    assert lane.acknowledged == []
    monkeypatch.undo()


def test_a_read_that_does_not_end_is_stopped_by_abort(lane: DirectLane, monkeypatch: pytest.MonkeyPatch) -> None:
    (chunk,) = lane.move(0, b"x" * 100)
    monkeypatch.setattr(AloneDevice, "idle", lambda self: lambda: False)

    def read() -> None:
        with lane.importers[0].reading(chunk.header):
            pass

    reading = Call(read)
    time.sleep(0.05)
    lane.importers[0].abort()
    assert isinstance(reading.error(20), BackendError)
    monkeypatch.undo()


def lost() -> None:
    raise PeerLostError("gone", peer="the other end")


def test_the_links_are_looked_at_while_the_gpu_is_waited_for(lane: DirectLane, monkeypatch: pytest.MonkeyPatch) -> None:
    (chunk,) = lane.move(0, b"x" * 100)
    monkeypatch.setattr(AloneDevice, "stuck", True)
    monkeypatch.setattr(lane.loopback.importers[0], "check", lost)
    with pytest.raises(PeerLostError), lane.importers[0].reading(chunk.header):
        pass
    monkeypatch.setattr(lane.loopback.exporter, "check", lost)
    with lane.exporter.packing(1):
        pass
    with pytest.raises(PeerLostError):
        lane.exporter.ready(1, lane.deadline())
    monkeypatch.undo()


def hostile(**changes: Any) -> Callable[[ArenaHandle], ArenaHandle]:
    return lambda handle: msgspec.structs.replace(handle, **changes)


@pytest.mark.parametrize(
    "change",
    [
        hostile(nbytes=1 << 62),
        hostile(nbytes=-1),
        hostile(nbytes=512),
        hostile(events=(b"e" * 64,)),
        hostile(events=(b"e" * 64,) * 3),
        hostile(memory=b"x" * 5000),
        hostile(events=(b"x" * 5000,) * 2),
    ],
)
def test_a_handle_that_does_not_hold_is_refused_before_anything_is_mapped(
    lane: DirectLane, change: Callable[[ArenaHandle], ArenaHandle]
) -> None:
    handle = msgspec.msgpack.decode(lane.exporter.locate(0, 0).handle, type=ArenaHandle)
    with pytest.raises(ProtocolError):
        lane.importers[0].attach(raw(change(handle)))
    assert "map" not in cuda_double.journal
    assert lane.carry(0, b"right") == [b"right"]


def test_an_arena_is_mapped_once(lane: DirectLane) -> None:
    assert lane.carry(0, b"right") == [b"right"]
    with pytest.raises(BackendError, match="stopped"):
        lane.importers[0].attach(lane.exporter.locate(0, 0).handle)
    assert cuda_double.journal.count("map") == 1


def test_nothing_is_mapped_that_the_sender_has_closed(lane: DirectLane) -> None:
    handle = lane.exporter.locate(0, 0).handle
    lane.exporter.close()
    with pytest.raises(BackendError, match="the sender has closed its memory"):
        lane.importers[0].attach(handle)
    assert "map" not in cuda_double.journal


def moved(header: Chunk, offset: int, nbytes: int) -> Chunk:
    location = msgspec.structs.replace(header.location, offset=offset)
    return msgspec.structs.replace(header, location=location, nbytes=nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(64, 36), (100, 10), (511, 1), (1024, 0), (0, 101), (0, 512), (-512, 10), (0, -1), (1 << 63, 1), (512, 1 << 62)],
)
def test_only_a_slot_can_be_pointed_at(lane: DirectLane, offset: int, nbytes: int) -> None:
    (header,) = lane.pack(1, b"y" * 100)
    assert lane.imports[0].open(header, lane.deadline()).memory is not None
    with pytest.raises(ProtocolError, match="2 slots of 100 bytes, 512 apart"):
        lane.imports[0].open(moved(header, offset, nbytes), lane.deadline())


# -- the exporter ------------------------------------------------------------------------------------------------------


def test_no_header_goes_out_before_its_slot_is_packed(lane: DirectLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AloneDevice, "packed", lambda self, slot: False)
    with lane.exporter.packing(0):
        pass
    with pytest.raises(DeadlineError):
        lane.exporter.ready(0, Deadline(0.05, "slot"))
    waiting = Call(lane.exporter.ready, 0, lane.deadline())
    time.sleep(0.05)
    lane.exporter.abort()
    assert isinstance(waiting.error(20), BackendError)


def test_a_gpu_that_does_not_finish_holds_no_close_up(lane: DirectLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tether, "FREE_SECONDS", 0.1)
    monkeypatch.setattr(AloneDevice, "stuck", True)
    lane.imports[0].close()
    Call(lane.exporter.close).result(20)
    assert parked() == 1
    assert "free" not in cuda_double.journal, "it may be read or written still"
    monkeypatch.undo()
    settle()
    assert cuda_double.journal[-1] == "free"


def test_a_gpu_that_has_failed_says_so_when_its_memory_is_freed(
    lane: DirectLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(self: AloneDevice) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(AloneDevice, "idle", failed)
    lane.imports[0].close()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lane.exporter.close()
    assert parked() == 0
    assert cuda_double.journal[-1] == "free"


def test_memory_is_kept_until_a_receiver_that_is_being_killed_is_gone(
    lane: DirectLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lane.importers[0]._tether  # type: ignore[attr-defined]
    os.close(held._file)
    held._file = -1
    monkeypatch.setattr(tether, "_lives", lambda pid: pid == os.getpid())
    Call(lane.exporter.close).result(20)
    time.sleep(0.05)
    assert parked() == 1
    monkeypatch.undo()
    monkeypatch.setattr(tether, "_lives", lambda pid: False)
    settle()


# -- the tether --------------------------------------------------------------------------------------------------------


@pytest.fixture
def anchor() -> Iterator[tuple[Anchor, list[str]]]:
    made, freed = Anchor(b"token", 0), []  # type: ignore[var-annotated]
    made.know(0, os.getpid())
    yield made, freed
    if not freed:
        made.release(lambda: freed.append("free"))
    settle()
    assert freed == ["free"]


def hold(anchor: Anchor) -> Tether:
    return Tether(os.getpid(), anchor.fileno, 0, PROOF)


def test_memory_is_freed_at_once_where_nobody_holds_it(anchor: tuple[Anchor, list[str]]) -> None:
    hold(anchor[0]).release()
    anchor[0].release(lambda: anchor[1].append("free"))
    assert anchor[1] == ["free"]


def test_memory_is_kept_while_somebody_holds_it(anchor: tuple[Anchor, list[str]]) -> None:
    held, other = hold(anchor[0]), hold(anchor[0])
    Call(anchor[0].release, lambda: anchor[1].append("free")).result(20)
    with pytest.raises(BackendError, match="closed its memory"):
        hold(anchor[0])
    with pytest.raises(BackendError, match="closed its memory"):
        held.check()
    for each in (held, held, other):
        assert (parked(), anchor[1]) == (1, [])
        each.release()
    settle()


def test_a_copy_of_the_descriptor_in_a_forked_child_holds_nothing(anchor: tuple[Anchor, list[str]]) -> None:
    held = hold(anchor[0])
    copy = os.dup(held._file)  # as a fork has it: the same open file
    held.release()
    anchor[0].release(lambda: anchor[1].append("free"))
    assert anchor[1] == ["free"]
    os.close(copy)


def test_a_process_that_lost_its_lock_is_waited_for_until_it_is_gone(
    anchor: tuple[Anchor, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = [True]
    monkeypatch.setattr(tether, "_lives", lambda pid: alive[0])
    held = hold(anchor[0])
    os.close(held._file)  # as the kernel does for a process that is being killed
    held._file = -1
    Call(anchor[0].release, lambda: anchor[1].append("free")).result(20)
    time.sleep(0.05)
    assert (parked(), anchor[1]) == (1, [])
    alive[0] = False
    settle()


def test_what_freeing_raises_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise BackendError("cudaFree failed")

    with pytest.raises(BackendError, match="cudaFree"):
        Anchor(b"token", 0).release(fail)
    assert parked() == 0


def test_at_the_end_of_the_interpreter_no_thread_is_needed(
    anchor: tuple[Anchor, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    anchor[0].release(lambda: anchor[1].append("free"))
    assert parked() == 0
    monkeypatch.undo()


@pytest.mark.parametrize("what", ["another_file", "a_pipe", "a_device", "nothing", "no_process", "another_session"])
def test_what_is_no_tether_is_refused(what: str, tmp_path: Any) -> None:
    pid, opened, proof = os.getpid(), [], PROOF
    made = Anchor(b"token", 0)
    number = made.fileno
    if what == "another_file":
        (tmp_path / "f").write_bytes(b"x" * 100)
        opened = [os.open(tmp_path / "f", os.O_RDWR)]
    elif what == "a_pipe":
        opened = list(os.pipe())
    elif what == "a_device":
        opened = [os.open("/dev/null", os.O_RDWR)]
    elif what == "no_process":
        pid = (1 << 30) - 1
    elif what == "another_session":
        proof = prove(b"token", 1)
    number = opened[0] if opened else (1 << 20) if what == "nothing" else number
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BackendError, match=r"cannot be reached|not the sender's memory file"):
        Tether(pid, number, 0, proof)
    assert len(os.listdir("/proc/self/fd")) == before
    for each in opened:
        os.close(each)
    made.release(lambda: None)
    settle()


@pytest.mark.parametrize("fields", [{"pid": 0, "tether": 3}, {"pid": 1, "tether": -1}, {"pid": "1", "tether": 3}, {}])
def test_an_invitation_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with DirectLane(AloneTransport) as lane, pytest.raises(ProtocolError):
        lane.importers[0].join(raw(fields))
    assert Invitation.__struct_fields__ == ("pid", "tether")
    settle()
