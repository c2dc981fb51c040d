"""The backend `shm` by its contract: who may use it, what is shared, and how long the memory stays."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import shm_ends as ends
import torch

from transportkit import site as host
from transportkit.errors import BackendError, ProtocolError, ResourceError
from transportkit.transport import API_VERSION, Match, Mismatch, Offer, Reach, Side, Site, Unavailable
from transportkit.wire import EMPTY, Location, raw
from transportkit_shm import arena
from transportkit_shm.shm import ShmExporter, ShmTransport

pytestmark = pytest.mark.timeout(30)

HERE = Path(__file__).parent


# -- who may use it ---------------------------------------------------------------------------------------------------


def side(overflow_uid: int | None = None, **fields: object) -> Side:
    known = {"boot_id": "b", "uid": 1000, "link": "unix", "namespaces": {"net": "1"}}
    params = EMPTY if overflow_uid is None else raw({"overflow_uid": overflow_uid})
    return Side(Site(**{**known, **fields}), Offer("shm", params=params), "cpu", "2.13.0")


def test_probe_offers_and_leaves_nothing_behind() -> None:
    before = ends.descriptors()
    offer = ShmTransport.probe(host.read_site("unix"))
    assert isinstance(offer, Offer), offer
    assert (offer.backend, offer.api_version) == ("shm", API_VERSION)
    assert ends.descriptors().keys() == before.keys()


def test_probe_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        answer = ShmTransport.probe(Site())
        assert isinstance(answer, Unavailable)
        assert "Linux" in answer.reason
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        answer = ShmTransport.probe(Site())
        assert isinstance(answer, Unavailable)
        assert "memfd_create" in answer.reason
    monkeypatch.setattr(os, "memfd_create", refuse)
    answer = ShmTransport.probe(Site())
    assert isinstance(answer, Unavailable)
    assert "not permitted" in answer.reason


@pytest.mark.parametrize(
    ("sender", "receiver", "reason"),
    [
        (side(), side(), ""),
        (side(), side(namespaces={"net": "2"}), ""),
        (side(boot_id="x"), side(), "on another host"),
        (side(boot_id=""), side(boot_id=""), "on another host"),
        (side(), side(uid=1001), "sender has uid 1000, the receiver uid 1001"),
        (side(uid=65534), side(uid=65534), "uid 65534"),
        (side(), side(overflow_uid=1000), "uid 1000"),
        (side(uid=-1), side(uid=-1), "uid -1"),
        (side(overflow_uid=7), side(overflow_uid=7), ""),
        (side(link="tcp"), side(link="tcp"), ""),
        (side(link="tcp"), side(link="tcp", namespaces={"net": "2"}), "another network namespace"),
        (side(link="pair"), side(link="pair", namespaces={}), "another network namespace"),
        (side(link="custom"), side(link="custom", namespaces={"net": "2"}), "another network namespace"),
    ],
)
def test_match(sender: Side, receiver: Side, reason: str) -> None:
    for verdict in (
        ShmTransport.match(sender, receiver, frozenset()),
        ShmTransport.match(sender, receiver, frozenset("a")),
    ):
        if reason:
            assert isinstance(verdict, Mismatch)
            assert reason in verdict.reason
        else:
            assert verdict == Match(reach=Reach.HOST_MEMORY, note="same host and user")


# -- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_bytes", "slots"), [(1, 1), (1, 64), (4096, 3), (4097, 2), (1 << 20, 3)])
@pytest.mark.parametrize("beside", [True, False])
def test_every_slot_is_seen_by_every_receiver(tmp_path: Path, chunk_bytes: int, slots: int, beside: bool) -> None:
    address = str(tmp_path / "link.sock") if beside else ""
    exporter, importers, attached = ends.meet(address, receivers=2, chunk_bytes=chunk_bytes, slots=slots)
    assert len(exporter.slots) == slots
    for index, slot in enumerate(exporter.slots):
        assert slot.shape == (chunk_bytes,)
        assert slot.data_ptr() % 64 == 0
        slot.fill_(index + 1)
    for importer, whole in zip(importers, attached, strict=True):
        for index in range(slots):
            seen = importer.open(ends.header(exporter.locate(index, 0), chunk_bytes), whole, ends.limit())
            assert seen.shape == (chunk_bytes,)
            assert bool((seen == index + 1).all())
    assert list(tmp_path.iterdir()) == []
    exporter.close()
    for importer in importers:
        importer.detach(1)
        importer.close()


def test_headers_that_point_outside_are_refused() -> None:
    exporter, (importer,), (whole,) = ends.meet(chunk_bytes=4096, slots=2)
    good = exporter.locate(1, 0)
    for offset, nbytes in [(4097, 4096), (-1, 1), (8192, 0), (0, 8193), (2**62, 2**62), (0, -1), (-4096, 10), (64, 1)]:
        bad = ends.header(msgspec.structs.replace(good, offset=offset), nbytes)
        with pytest.raises(ProtocolError):
            importer.open(bad, whole, ends.limit())
    for location in (Location(), Location(export=2), Location(export=None, offset=4)):
        with pytest.raises(ProtocolError):
            importer.open(ends.header(location, 1), whole, ends.limit())
    assert importer.open(ends.header(good, 0), whole, ends.limit()).numel() == 0


def test_a_handle_of_another_size_is_refused() -> None:
    exporter = ends.ShmTransport.exporter(ends.terms(), ends.PollWiring())
    importer = ends.importer_for(exporter)
    serving = ends.Background(exporter.connect, ends.limit())
    importer.connect(ends.limit())
    assert serving.outcome() is None
    with pytest.raises(ProtocolError, match="agreed"):
        importer.attach(raw({"nbytes": 1 << 40}))


# -- how long it stays ------------------------------------------------------------------------------------------------


def test_no_descriptor_stays_open() -> None:
    gc.collect()
    mapped = ends.mappings()
    before = ends.descriptors().keys()
    exporter, importers, attached = ends.meet(receivers=3)
    assert ends.descriptors().keys() == before
    assert ends.mappings() == 4 + mapped
    del exporter, importers, attached
    gc.collect()
    assert ends.mappings() == mapped


def test_live_tensors_outlive_close_and_unmap_when_they_die() -> None:
    gc.collect()
    mapped = ends.mappings()
    exporter, (importer,), (whole,) = ends.meet(chunk_bytes=1 << 20)
    exporter.slots[2].fill_(9)
    kept = importer.open(ends.header(exporter.locate(2, 0), 1 << 20), whole, ends.limit()).view(torch.int64)[5:100]
    own = exporter.slots[2][:10]
    assert ends.mappings() == mapped + 2
    exporter.close()
    del whole
    importer.detach(1)
    importer.close()
    gc.collect()
    assert ends.mappings() == mapped + 2
    assert kept.tolist() == [0x0909090909090909] * 95
    assert own.tolist() == [9] * 10
    del own
    assert ends.mappings() == mapped + 1
    del kept
    assert ends.mappings() == mapped


def test_slots_stay_readable_after_abort() -> None:
    exporter, (importer,), (whole,) = ends.meet()
    exporter.slots[0].fill_(3)
    exporter.abort()
    importer.abort()
    assert exporter.slots[0].tolist() == [3] * 1000
    with pytest.raises(BackendError, match="stopped"):
        exporter.ready(0, ends.limit())
    with pytest.raises(BackendError, match="stopped"):
        importer.open(ends.header(exporter.locate(0, 0), 5), whole, ends.limit())
    for end in (exporter, importer, exporter, importer):
        end.close()


def test_calls_out_of_order_are_typed_errors() -> None:
    importer = ShmTransport.importer(ends.terms(0), ends.PollWiring())
    with pytest.raises(BackendError):
        importer.connect(ends.limit())
    with pytest.raises(BackendError):
        importer.attach(raw({"nbytes": 1}))
    for invitation in (
        raw(3),
        raw({"path": b"relative"}),
        raw({"abstract": b"other"}),
        raw({"path": b"/" + b"x" * 200}),
    ):
        with pytest.raises(ProtocolError):
            importer.join(invitation)
    importer.abort()
    importer.close()


# -- where there is not enough ----------------------------------------------------------------------------------------


def make(**sizes: int) -> ShmExporter:
    return ShmTransport.exporter(ends.terms(**sizes), ends.PollWiring())


def test_too_little_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ends.descriptors().keys()
    monkeypatch.setattr(host, "free_memory", lambda: 40 << 20)
    make(chunk_bytes=1 << 20).close()
    with pytest.raises(ResourceError, match=r"50331648 bytes\).*41943040 bytes are free.*chunk_bytes"):
        make(chunk_bytes=16 << 20)
    monkeypatch.setattr(host, "free_memory", lambda: None)
    make(chunk_bytes=16 << 20).close()
    assert ends.descriptors().keys() == before


@pytest.mark.parametrize("room", [0, 1, 2])
def test_descriptor_limit(room: int) -> None:
    before = ends.descriptors().keys()
    with ends.room_for(room), pytest.raises(ResourceError, match=r"descriptor limit.*ulimit -n"):
        make()
    assert ends.descriptors().keys() == before
    with ends.room_for(3):
        make().close()


def test_file_size_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ResourceError, match="File too large"):
            make(chunk_bytes=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("code", [28, 12, 1])
def test_no_space(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    before = ends.descriptors().keys()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(BackendError) as caught:
        make()
    assert isinstance(caught.value, ResourceError) is (code != 1)
    assert os.strerror(code) in str(caught.value)
    assert ends.descriptors().keys() == before


def test_signals_do_not_keep_the_arena_from_being_made() -> None:
    previous = signal.signal(signal.SIGPROF, lambda *_: None)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)  # in effect a tick of the kernel, 1 to 10 ms
    try:
        make(chunk_bytes=128 << 20).close()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


# -- forked children --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_holds_no_descriptor_and_leaves_the_file(tmp_path: Path) -> None:
    address = str(tmp_path / "link.sock")
    before = ends.descriptors().keys()
    exporter = ShmTransport.exporter(ends.terms(), ends.PollWiring(address))
    exporter.slots[0].fill_(5)
    assert len(ends.descriptors().keys() - before) == 3
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours = [path for path in ends.descriptors().values() if path.startswith(("socket:", "/memfd:"))]
            left = ends.descriptors().keys() - before
            exporter.abort()
            exporter.close()
            status = 0 if not left and not [p for p in ours if "memfd" in p] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(tmp_path.iterdir())) == 1
    importer = ends.importer_for(exporter, address)
    serving = ends.Background(exporter.connect, ends.limit())
    importer.connect(ends.limit())
    assert serving.outcome() is None
    assert importer.attach(exporter.locate(0, 0).handle)[:3].tolist() == [5, 5, 5]


def test_nothing_is_inherited_over_exec() -> None:
    exporter = make()
    handed = [number for number in ends.descriptors() if number > 2 and os.get_inheritable(number)]
    done = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False)
    assert "memfd" not in done.stdout
    assert not [n for n in handed if "memfd" in ends.descriptors()[n]]
    exporter.close()


def test_an_interpreter_that_ends_with_live_tensors_ends_cleanly() -> None:
    code = "import shm_ends as ends\nlane = ends.meet()\nkeep = lane[0].slots[0]\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, timeout=20, check=True)


# -- the memory itself ------------------------------------------------------------------------------------------------


def test_the_layout_is_in_whole_pages() -> None:
    for chunk_bytes in (1, 4095, 4096, 4097):
        layout = arena.Layout(64, chunk_bytes)
        assert layout.stride % 4096 == 0
        assert 0 <= layout.stride - chunk_bytes < 4096
        assert layout.nbytes == 64 * layout.stride


def test_a_created_arena_can_neither_shrink_nor_grow() -> None:
    layout = arena.Layout(2, 5000)
    memory = arena.create(layout)
    try:
        assert os.fstat(memory).st_size == layout.nbytes
        assert os.fstat(memory).st_blocks * 512 >= layout.nbytes
        assert not os.get_inheritable(memory)
        for size in (0, layout.nbytes + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(memory, size)
        arena.check(memory, layout)
        with pytest.raises(BackendError, match="16384 bytes, the terms need 24576"):
            arena.check(memory, arena.Layout(3, 5000))
    finally:
        os.close(memory)


def test_memory_without_seals_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    layout = arena.Layout(1, 10)
    bare = os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, 4096)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(4096)
        for descriptor, reason in ((bare, "not sealed"), (file.fileno(), "no memory file")):
            with pytest.raises(BackendError, match=reason):
                arena.check(descriptor, layout)
    os.close(bare)
