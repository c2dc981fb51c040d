"""The backend `mpqueue` by its contract, in one process: who may use it, limits and waits, how long memory stays."""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from typing import TYPE_CHECKING

import mpqueue_ends as ends
import msgspec
import pytest
import shm_ends

from transportkit import site as host
from transportkit.errors import BackendError, PeerLostError, ProtocolError, ResourceError
from transportkit.testing import Call
from transportkit.transport import API_VERSION, Match, Mismatch, Offer, Reach, Side, Site, Unavailable
from transportkit.wire import raw
from transportkit_shm import unnamed
from transportkit_shm.descriptor_queue import DescriptorQueue
from transportkit_shm.mpqueue import MpqueueTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def queue() -> Iterator[DescriptorQueue]:
    with ends.fresh_queue() as made:
        yield made


# -- who may use it ---------------------------------------------------------------------------------------------------


def side(link: str, boot_id: str = "b") -> Side:
    return Side(Site(boot_id=boot_id, link=link), Offer("mpqueue"), "cpu", "2.13.0")


def test_probe_offers_and_leaves_nothing_behind() -> None:
    before = shm_ends.descriptors()
    offer = MpqueueTransport.probe(host.read_site("pair"))
    assert isinstance(offer, Offer), offer
    assert (offer.backend, offer.api_version) == ("mpqueue", API_VERSION)
    assert shm_ends.descriptors().keys() == before.keys()


def test_probe_needs_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "O_TMPFILE")
    assert isinstance(MpqueueTransport.probe(Site()), Offer)


@pytest.mark.parametrize("what", ["platform", "shared memory", "socket pairs", "descriptors"])
def test_probe_says_why_not(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if what == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif what == "shared memory":
        monkeypatch.setattr(unnamed, "FOLDER", "/nowhere")
    elif what == "socket pairs":
        monkeypatch.setattr(socket, "socketpair", refuse)
    else:
        monkeypatch.delattr(socket, "SCM_RIGHTS")
    answer = MpqueueTransport.probe(Site())
    assert isinstance(answer, Unavailable)
    assert {
        "platform": "Linux",
        "shared memory": "/nowhere: No such file",
        "socket pairs": "not permitted",
        "descriptors": "SCM_RIGHTS",
    }[what] in answer.reason


@pytest.mark.parametrize(
    ("sender", "receiver", "reason"),
    [
        (side("pair"), side("pair"), ""),
        (side("pair", ""), side("pair", ""), ""),
        (side("pair"), side("pair", "x"), "on another host"),
        (side("unix"), side("unix"), r"the sender has not inherited its end: make both ends with `pair(ctx)`"),
        (side("pair"), side("unix"), "the receiver has not inherited its end"),
        (side("custom"), side("pair"), "the sender has not inherited its end"),
    ],
)
def test_match(sender: Side, receiver: Side, reason: str) -> None:
    verdict = MpqueueTransport.match(sender, receiver, frozenset())
    if reason:
        assert isinstance(verdict, Mismatch)
        assert reason in verdict.reason
    else:
        assert verdict == Match(reach=Reach.HOST_MEMORY, note="ends inherited from one parent")


@pytest.mark.parametrize("inherited", [None, object(), {"mpqueue": 1}])
def test_an_end_that_has_inherited_nothing_says_so(inherited: object) -> None:
    for make, terms in (
        (MpqueueTransport.exporter, ends.terms()),
        (MpqueueTransport.importer, ends.terms(0)),
    ):
        with pytest.raises(BackendError, match=r"inherited no queue: make both ends with `pair\(ctx\)`") as caught:
            make(terms, ends.wiring(inherited))
        assert caught.value.backend == "mpqueue"


def test_ends_of_different_pairs_say_so(queue: DescriptorQueue) -> None:
    other = DescriptorQueue.new()
    sent = ends.exporter(other)
    received = MpqueueTransport.importer(ends.terms(0), ends.wiring(queue))
    with pytest.raises(BackendError, match="different queues"):
        received.join(sent.invite(0))
    with pytest.raises(BackendError, match="stopped"):
        received.connect(shm_ends.limit())
    sent.close()
    received.close()
    other.close("sender")
    other.close("receiver")


def test_an_end_that_was_given_up_says_so(queue: DescriptorQueue) -> None:
    queue.close("sender")
    queue.close("sender")
    with pytest.raises(BackendError, match="given its sender's end"):
        ends.exporter(queue)
    received = ends.importer(queue)
    with pytest.raises(BackendError, match="no process has the other end"):
        received.connect(shm_ends.limit())
    received.close()


# -- limits, waits, ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1])
def test_no_descriptor_is_left_to_wait_with(room: int, queue: DescriptorQueue) -> None:
    received = ends.importer(queue)
    with shm_ends.room_for(room), pytest.raises(ResourceError, match="descriptor limit") as caught:
        received.connect(shm_ends.limit())
    assert caught.value.backend == "mpqueue"
    received.close()


def test_no_descriptor_is_left_for_what_comes(queue: DescriptorQueue) -> None:
    received, sent = ends.importer(queue), ends.exporter(queue)
    sent.connect(shm_ends.limit())
    with shm_ends.room_for(0), pytest.raises(ResourceError, match=r"no descriptor came.*descriptor limit") as caught:
        received.connect(shm_ends.limit())
    assert caught.value.backend == "mpqueue"
    for end in (sent, received):
        end.close()


def test_no_descriptor_is_left_for_the_memory_or_the_queue(queue: DescriptorQueue) -> None:
    with shm_ends.room_for(0):
        with pytest.raises(ResourceError, match="descriptor limit"):
            ends.exporter(queue)
        with pytest.raises(ResourceError, match="descriptor limit"):
            MpqueueTransport.inherit(None)
        assert isinstance(MpqueueTransport.probe(Site()), Unavailable)


def test_memory_that_does_not_fit_is_refused_before_it_is_taken(
    queue: DescriptorQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResourceError, match=r"does not fit: \d+ bytes are free") as caught:
        ends.exporter(queue, chunk_bytes=1 << 46)
    assert caught.value.backend == "mpqueue"
    monkeypatch.setattr(host, "free_memory", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        with pytest.raises(ResourceError, match="smaller `chunk_bytes=`") as caught:
            ends.exporter(queue)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.backend == "mpqueue"


def test_a_lost_peer_and_an_abort_end_the_waits(queue: DescriptorQueue) -> None:
    link, other = socket.socketpair()
    memory = unnamed.open_file()
    sent, received = ends.exporter(queue), ends.importer(queue)
    while queue.put(b"x" * 32, 1, memory):
        pass
    os.close(memory)
    putting = Call(sent.connect, shm_ends.limit(20))
    assert not putting.wait(0.1)
    sent.abort()
    assert isinstance(putting.error(20), BackendError)
    queue.collect(received._awaited)  # type: ignore[arg-type]
    while queue.stale < 200:
        queue.collect(received._awaited)  # type: ignore[arg-type]

    received._wiring.link = link.fileno()  # type: ignore[attr-defined]
    fetching = Call(received.connect, shm_ends.limit(20))
    assert not fetching.wait(0.1)
    other.close()
    assert isinstance(fetching.error(20), PeerLostError)
    link.close()

    another = ends.importer(queue)
    fetching = Call(another.connect, shm_ends.limit(20))
    assert not fetching.wait(0.1)
    another.abort()
    error = fetching.error(20)
    assert isinstance(error, BackendError)
    assert "stopped" in str(error)

    last = ends.importer(queue)
    fetching = Call(last.connect, shm_ends.limit(20))
    assert not fetching.wait(0.1)
    queue.close("receiver")
    error = fetching.error(20)
    assert isinstance(error, BackendError)
    assert "given its receiver's end" in str(error)
    for end in (sent, received, another, last):
        end.close()


def test_nobody_at_the_other_end_is_noticed(queue: DescriptorQueue) -> None:
    sent = ends.exporter(queue)
    queue.close("receiver")
    with pytest.raises(BackendError, match="no process has the other end"):
        sent.connect(shm_ends.limit())
    sent.close()


def test_calls_out_of_order_are_typed_errors(queue: DescriptorQueue) -> None:
    received = MpqueueTransport.importer(ends.terms(0), ends.wiring(queue))
    with pytest.raises(BackendError, match="stopped"):
        received.connect(shm_ends.limit())
    with pytest.raises(ProtocolError):
        received.join(msgspec.Raw(b"\xc0"))
    with pytest.raises(BackendError, match="stopped"):
        received.attach(raw({"nbytes": 12288}))
    sent = ends.exporter(queue)
    sent.connect(shm_ends.limit())
    with pytest.raises(BackendError, match="stopped"):
        sent.connect(shm_ends.limit())
    received.close()
    sent.close()


def test_no_descriptor_stays_open_and_tensors_outlive_all(queue: DescriptorQueue) -> None:
    before = shm_ends.descriptors().keys()
    sent, received = ends.exporter(queue, chunk_bytes=1 << 20), ends.importer(queue, chunk_bytes=1 << 20)
    sent.connect(shm_ends.limit())
    received.connect(shm_ends.limit())
    assert shm_ends.descriptors().keys() == before
    whole = received.attach(sent.locate(0, 0).handle)
    sent.slots[2].fill_(9)
    kept = received.open(shm_ends.header(sent.locate(2, 0), 1 << 20), whole, shm_ends.limit())[5:100]
    sent.close()
    del whole
    received.detach(1)
    received.close()
    gc.collect()
    assert len(ends.shared_files()) == 1
    assert kept.tolist() == [9] * 95
