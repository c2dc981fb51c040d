"""The backend `pickle` over frames in memory: what it carries, what it refuses, and at what cost."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch

from transportkit.backends.pickle import STREAM_LIMIT, PickleExporter, PickleImporter, PickleTransport, check_stream
from transportkit.deadline import Deadline
from transportkit.errors import BackendError, LeaseError, ProtocolError, ResourceError
from transportkit.transport import API_VERSION, Match, Offer, Reach, Side, Site, Terms, Wiring
from transportkit.wire import Chunk, Location

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


class MemoryWiring(Wiring):
    """Payload frames in a list; keeps what it was given, to tell whether it was copied."""

    def __init__(self) -> None:
        self.site = Site()
        self.inherited = None
        self.address = ""
        self.frames: collections.deque[bytes] = collections.deque()
        self.parts: list[bytes | memoryview] = []

    def check(self) -> None: ...

    def wait_readable(self, fileno: int, deadline: Deadline) -> None:
        raise AssertionError("pickle has no descriptor of its own")

    def send_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        self.parts += parts
        self.frames.append(b"".join(parts))

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        frame = self.frames.popleft()
        if len(frame) > limit:
            raise ProtocolError("frame too long")
        return frame

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        frame = self.frames.popleft()
        if len(frame) != len(view):
            raise ProtocolError("frame of another length")
        view[:] = frame


def terms(chunk_bytes: int = 1000, slots: int = 2, receiver: int = -1) -> Terms:
    return Terms("s", bytes(32), "pickle", 0, (0,), receiver, chunk_bytes, slots, "none")


def header(nbytes: int, seq: int = 0) -> Chunk:
    return Chunk(update=1, receiver=0, seq=seq, last=False, nbytes=nbytes, digest=0, location=Location())


def pair(chunk_bytes: int = 1000, slots: int = 2) -> tuple[MemoryWiring, PickleExporter, PickleImporter]:
    wiring = MemoryWiring()
    exporter = PickleTransport.exporter(terms(chunk_bytes, slots), wiring)
    return wiring, exporter, PickleTransport.importer(terms(chunk_bytes, slots, 0), wiring)


def limit() -> Deadline:
    return Deadline(20, "chunk")


def honest(seq: int, nbytes: int) -> bytes:
    return pickle.dumps((seq, nbytes, pickle.PickleBuffer(bytearray(nbytes))), 5, buffer_callback=lambda _: None)


def test_it_is_usable_anywhere() -> None:
    offer = PickleTransport.probe(Site())
    assert isinstance(offer, Offer)
    assert (offer.backend, offer.api_version) == ("pickle", API_VERSION)
    side = Side(Site(host="a"), offer, "cpu", "2.13.0")
    match = PickleTransport.match(side, Side(Site(host="b", uid=7), offer, "cuda:0", "2.9.0"), frozenset())
    assert isinstance(match, Match)
    assert match.reach is Reach.LINK


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 999, 1000, 70_000])
def test_bytes_arrive_without_a_copy_of_the_slot(nbytes: int) -> None:
    wiring, exporter, importer = pair(max(nbytes, 1))
    exporter.slots[1][:nbytes].random_(0, 256)
    exporter.publish(1, header(nbytes, seq=300), limit())
    sent = wiring.parts[-1]
    assert isinstance(sent, memoryview)
    if nbytes:
        exporter.slots[1][0] = 77
        assert sent[0] == 77, "the frame's part is a copy"
        wiring.frames[-1] = bytes(sent)
    landed = importer.open(header(nbytes, seq=300), None, limit())
    assert landed.dtype == torch.uint8
    assert bytes(landed.tolist()) == bytes(exporter.slots[1][:nbytes].tolist())


def test_slots_are_reused_and_aligned() -> None:
    _, exporter, _ = pair(chunk_bytes=100, slots=5)
    assert len(exporter.slots) == 5
    assert all(a is b for a, b in zip(exporter.slots, exporter.slots, strict=True))
    assert all(slot.data_ptr() % 64 == 0 and slot.shape == (100,) for slot in exporter.slots)


@pytest.mark.parametrize("seq", [0, 255, 256, 65536, 2**31, 2**62])
def test_the_streams_of_all_sequence_numbers_pass(seq: int) -> None:
    wiring, _, importer = pair()
    wiring.frames += [honest(seq, 3), b"abc"]
    assert bytes(importer.open(header(3, seq), None, limit()).tolist()) == b"abc"


def test_landing_slots_are_bounded_and_come_back() -> None:
    wiring, _, importer = pair(slots=2)
    for seq in (0, 1):
        wiring.frames += [honest(seq, 1), b"x"]
        importer.open(header(1, seq), None, limit())
    with pytest.raises(LeaseError):
        importer.open(header(1, 2), None, limit())
    importer.release(header(1, 0))
    wiring.frames += [honest(2, 1), b"y"]
    assert importer.open(header(1, 2), None, limit()).tolist() == [ord("y")]


class Command:
    """Pickled, it runs a command when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def long_(value: int) -> bytes:
    return struct.pack("<i", value)


def huge(value: int) -> bytes:
    return struct.pack("<Q", value)


HOSTILE = {
    "nothing": b"",
    "no end": honest(0, 8)[:-1],
    "trailing garbage": honest(0, 8) + b"N.",
    "global": b"cposix\nsystem\n(S'true'\ntR.",
    "stack global": pickle.dumps(os.system, 5),
    "extension code": b"\x80\x02\x82\x01.",
    "persistent id": b"Pid\n.",
    "binary persistent id": b"\x80\x02NQ.",
    "deep nesting": b"\x80\x02" + b"(" * 500 + b"t" * 500 + b".",
    "deeper tuples": b"\x80\x02)" + b"\x85" * 1000 + b".",
    "memo index": b"\x80\x02Nr" + long_(2**31 - 1) + b".",
    "lying frame": b"\x80\x05\x95" + huge(2**62) + honest(0, 8)[11:],
    "long of 4 GiB": b"\x80\x05\x8b" + long_(2**31 - 1) + b".",
    "long cut short": b"\x80\x05\x8a\xff\x01.",
    "bytes of 4 GiB": b"\x80\x05B" + struct.pack("<I", 2**32 - 1) + b".",
    "bytes of 2^60": b"\x80\x05\x8e" + huge(2**60) + b".",
    "bytearray of 4 GiB": b"\x80\x05\x96" + huge(2**32) + b".",
    "text of 4 GiB": b"\x80\x05X" + struct.pack("<I", 2**32 - 1) + b".",
    "in-band bytes": pickle.dumps((0, 8, b"12345678"), 5),
    "no buffer": pickle.dumps((0, 8, 3), 5),
    "a list": b"\x80\x05]\x94.",
    "only the buffer": b"\x80\x05\x97.",
    "two buffers": b"\x80\x05\x97\x97K\x08\x87.",
    "wrong order": b"\x80\x05\x97K\x00K\x08\x87.",
    "empty stack": b"\x80\x05\x87.",
    "bare stop": b".",
    "unknown protocol": b"\x80\x63" + honest(0, 8)[2:],
    "unknown opcode": b"\x80\x05\xff.",
    "another chunk": honest(1, 8),
    "another length": honest(0, 9),
    "booleans": b"\x80\x05\x89K\x08\x97\x87.",
    "read-only buffer": b"\x80\x05K\x00K\x08\x97\x98\x87.",
    "in a tuple": b"\x80\x05K\x00K\x08\x97\x87\x85.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_streams_are_refused(kind: str) -> None:
    wiring, _, importer = pair(slots=1)
    for _ in range(3):  # the landing slot comes back each time
        wiring.frames = collections.deque([HOSTILE[kind], b"12345678"])
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            importer.open(header(8), None, limit())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20
    wiring.frames = collections.deque([honest(0, 8), b"12345678"])
    assert bytes(importer.open(header(8), None, limit()).tolist()) == b"12345678"


def test_no_command_runs(tmp_path: Path) -> None:
    wiring, _, importer = pair()
    for protocol in range(6):
        wiring.frames = collections.deque([pickle.dumps(Command(f"{tmp_path}/ran"), protocol), b"12345678"])
        with pytest.raises(ProtocolError):
            importer.open(header(8), None, limit())
    assert not (tmp_path / "ran").exists()


def test_no_single_changed_byte_does_harm() -> None:
    stream = honest(0, 8)
    wiring, _, importer = pair()
    for position in range(len(stream)):
        for value in (*b"\x00\x01\x08\x7f\xff.(0KMJIGXBCcRbiopPQrt", *range(0x80, 0x99)):
            changed = stream[:position] + bytes([value]) + stream[position + 1 :]
            wiring.frames = collections.deque([changed, b"12345678"])
            try:
                landed = importer.open(header(8), None, limit())
            except ProtocolError:
                continue
            assert bytes(landed.tolist()) == b"12345678"
            importer.release(header(8))


def test_the_unpickler_alone_refuses_globals_and_ids() -> None:
    from transportkit.backends.pickle import load

    for stream in (pickle.dumps(os.system), b"Pid\n.", b"\x80\x02\x82\x01."):
        with pytest.raises(ProtocolError):
            load(stream, memoryview(b""))


def test_an_honest_stream_is_far_below_the_limit() -> None:
    stream = honest(2**63, 2**16)
    check_stream(stream)
    assert len(stream) < STREAM_LIMIT // 8


@pytest.mark.parametrize("nbytes", [-1, 1001])
def test_a_chunk_beyond_the_agreed_size_is_refused(nbytes: int) -> None:
    _, _, importer = pair(chunk_bytes=1000)
    with pytest.raises(ProtocolError, match="1000"):
        importer.open(header(nbytes), None, limit())


def test_too_large_slots_are_a_resource_error() -> None:
    for make in (PickleTransport.exporter, PickleTransport.importer):
        with pytest.raises(ResourceError, match="chunk_bytes"):
            make(terms(chunk_bytes=1 << 60), MemoryWiring())


def test_abort_and_close_end_both_sides() -> None:
    wiring, exporter, importer = pair()
    exporter.abort()
    importer.abort()
    assert exporter.slots[0].shape == (1000,)
    with pytest.raises(BackendError, match="stopped"):
        exporter.publish(0, header(1), limit())
    with pytest.raises(BackendError, match="stopped"):
        importer.open(header(1), None, limit())
    for end in (exporter, importer):
        end.close()
        end.close()
    assert not wiring.frames
