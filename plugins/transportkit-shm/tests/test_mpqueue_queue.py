"""The queue of `mpqueue`: what goes through it, what is stale or out of order, and which process has its ends."""

from __future__ import annotations

import array
import logging
import os
import pickle
import socket
import threading
import time
import warnings
from typing import TYPE_CHECKING

import mpqueue_ends as ends
import pytest
import shm_ends

from transportkit.deadline import Deadline
from transportkit.errors import BackendError, DeadlineError, UsageError
from transportkit.testing import Call
from transportkit.wire import raw
from transportkit_shm import arena, unnamed
from transportkit_shm.descriptor_queue import MAGIC, MESSAGE, DescriptorQueue, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def queue() -> Iterator[DescriptorQueue]:
    with ends.fresh_queue() as made:
        yield made


# -- what goes through it ---------------------------------------------------------------------------------------------


def test_what_is_stale_is_dropped_counted_and_logged(queue: DescriptorQueue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "transportkit.mpqueue")
    for number in range(5):  # exporters that died, or whose handshake failed, when their importers had gone
        dead = ends.exporter(queue, bytes([number]) * 32)
        dead.slots[0].fill_(number)
        dead.connect(shm_ends.limit())
        dead.close()
    received = ends.importer(queue)
    sent = ends.exporter(queue)
    sent.slots[0].fill_(9)
    sent.connect(shm_ends.limit())
    held = len(shm_ends.descriptors())
    received.connect(shm_ends.limit())
    assert len(shm_ends.descriptors()) == held
    assert ends.first_bytes(received, sent) == [9, 9, 9]
    assert queue.stale == 5
    assert sum("session that is over" in record.message for record in caplog.records) == 5
    sent.close()
    received.close()


def test_what_comes_out_of_order_is_kept_for_whom_it_is_for(queue: DescriptorQueue) -> None:
    tokens = [bytes([number]) * 32 for number in range(4)]
    received = [ends.importer(queue, token) for token in tokens]
    sent = [ends.exporter(queue, token) for token in tokens]
    waiting = [Call(received[number].connect, shm_ends.limit(10)) for number in (0, 1)]
    time.sleep(0.1)
    for number in (2, 1, 3, 0):
        sent[number].slots[0].fill_(number)
        sent[number].connect(shm_ends.limit())
    for call in waiting:
        call.result(10)
    for number in (3, 2):  # theirs was read by the others
        received[number].connect(shm_ends.limit())
    assert [ends.first_bytes(received[n], sent[n])[0] for n in range(4)] == [0, 1, 2, 3]
    assert queue.stale == 0
    for end in (*sent, *received):
        end.close()


def test_what_nobody_fetched_is_dropped_at_the_end(queue: DescriptorQueue) -> None:
    first, second = ends.importer(queue, b"1" * 32), ends.importer(queue, b"2" * 32)
    sent = [ends.exporter(queue, token * 32) for token in (b"1", b"2", b"3")]
    for end in sent:
        end.connect(shm_ends.limit())
    held = len(shm_ends.descriptors())
    second.close()  # reads them all: keeps the first for its importer, drops its own and the third
    assert len(shm_ends.descriptors()) == held + 1
    assert queue.stale == 2
    first.close()
    assert len(shm_ends.descriptors()) == held
    for end in sent:
        end.close()


def test_an_importer_can_start_again(queue: DescriptorQueue) -> None:
    for number in range(3):
        token = bytes([number]) * 32
        received = ends.importer(queue, token)
        received.join(raw({"queue": queue.mark}))  # the same session asks twice
        if number == 1:
            with pytest.raises(DeadlineError):
                received.connect(shm_ends.limit(0.1))
            received.close()
            ends.exporter(queue, token).connect(shm_ends.limit())  # too late
            continue
        sent = ends.exporter(queue, token)
        sent.connect(shm_ends.limit())
        received.connect(shm_ends.limit())
        sent.slots[0].fill_(number)
        assert ends.first_bytes(received, sent)[0] == number
        sent.close()
        received.close()
    assert queue.stale == 1


def test_a_full_queue_makes_the_exporter_wait(queue: DescriptorQueue) -> None:
    sent = ends.exporter(queue)
    memory = unnamed.open_file()
    while queue.put(b"x" * 32, 1, memory):
        pass
    os.close(memory)
    with pytest.raises(DeadlineError):
        sent.connect(Deadline(0.2, "room"))
    again = ends.exporter(queue)
    received = ends.importer(queue)
    putting = Call(again.connect, shm_ends.limit(10))
    assert not putting.wait(0.2)
    received.connect(shm_ends.limit())
    putting.result(10)
    assert queue.stale > 100
    for end in (sent, again, received):
        end.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", "no shared memory"),
        ("read-only", "no shared memory"),
        ("small", "has 8192 bytes, the terms need 12288"),
        ("another size", "of 5 bytes was announced, 12288 were agreed"),
        ("none", "0 descriptors came"),
        ("two", "2 descriptors came"),
    ],
)
def test_wrong_memory_is_not_mapped(kind: str, reason: str, queue: DescriptorQueue) -> None:
    layout = arena.Layout(2 if kind == "small" else 3, 1000)
    memory = arena.furnish(layout, unnamed.open_file)
    if kind == "pipe":
        os.close(memory)
        memory, other = os.pipe()
        os.close(other)
    elif kind == "read-only":
        again = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        os.close(memory)
        memory = again
    received = ends.importer(queue)
    message = MESSAGE.pack(MAGIC, key_of(shm_ends.TOKEN, 0), 5 if kind == "another size" else 12288)
    rights = {"none": [], "two": [memory, memory]}.get(kind, [memory])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else []
    queue.use("sender").sendmsg([message], ancillary)
    os.close(memory)
    held = len(shm_ends.descriptors())
    with pytest.raises(BackendError, match=reason):
        received.connect(shm_ends.limit())
    assert len(shm_ends.descriptors()) == held
    received.close()


@pytest.mark.parametrize("noise", [b"x", b"x" * 48, b"x" * 49, b"x" * 5000, MAGIC])
def test_noise_on_the_queue_is_passed_over(noise: bytes, queue: DescriptorQueue) -> None:
    received, sent = ends.importer(queue), ends.exporter(queue)
    with open(os.devnull, "rb") as file:
        for count in (0, 1, 4, 9):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * count))] * bool(count)
            queue.use("sender").sendmsg([noise], rights)
    held = len(shm_ends.descriptors())
    sent.connect(shm_ends.limit())
    received.connect(shm_ends.limit())
    assert len(shm_ends.descriptors()) == held - 1
    assert queue.stale == 4
    for end in (sent, received):
        end.close()


# -- who has it -------------------------------------------------------------------------------------------------------


def test_a_queue_is_pickled_only_for_a_process_that_is_started(queue: DescriptorQueue) -> None:
    with pytest.raises(UsageError, match="while that is started"):
        pickle.dumps(queue)


def test_a_forked_child_loses_the_ends_in_use_and_keeps_the_others(queue: DescriptorQueue) -> None:
    sent = ends.exporter(queue)
    locked = threading.Event()

    def hold() -> None:
        with queue._lock:
            locked.set()
            time.sleep(0.5)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()  # somebody has the lock at the moment of the fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
        child = os.fork()
    if child == 0:
        try:
            received = ends.importer(queue)
            held = ends.queue_ends(), [t for t in shm_ends.descriptors().values() if t.startswith("/dev/shm")]
            received.close()
            queue.close("receiver")
            os._exit(0 if held == (1, []) and ends.queue_ends() == 0 else 1)
        finally:
            os._exit(2)
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    received = ends.importer(queue)
    sent.slots[0].fill_(5)
    sent.connect(shm_ends.limit())
    received.connect(shm_ends.limit())
    assert ends.first_bytes(received, sent) == [5, 5, 5]
    sent.close()
    received.close()
