"""Whole sessions over `gloo`: several receivers, what is open meanwhile, and what is left afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gloo_ends as ends
import pytest
import torch
import torch.distributed as dist

import transportkit as tk
from transportkit.testing import Call, Child, bulk, nothing_left, prints
from transportkit_collective.runner import parked

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_receiver_gets_the_same_and_one_lane_serves_them_all(count: int) -> None:
    updates = [bulk(300_000, seed) for seed in range(3)]
    where = ends.address()
    with (
        ends.receivers(where, count, ends.take, 3) as took,
        tk.serve(where, receivers=count, **ends.KEYWORDS) as sender,
    ):
        assert {(a.backend, a.lane) for a in sender.agreement.assignments} == {("gloo", 0)}
        assert all("over loopback" in str(a.verdicts) for a in sender.agreement.assignments)
        for version, tensors in enumerate(updates):
            report = Call(sender.send, tensors, version=version).result(30)
            assert report.version == version
            assert set(report.chunks) == set(range(count))
        expected = [prints(tensors) for tensors in updates]
        for child in took:
            assert child.result(20) == expected


def test_one_address_is_listened_on_and_none_of_all_interfaces() -> None:
    where = ends.address()
    before = set(ends.listening(os.getpid()))
    with (
        ends.receivers(where, 2, ends.take_for_ever) as others,
        tk.serve(where, receivers=2, **ends.KEYWORDS) as sender,
    ):
        for child in others:
            assert child.heard(20) == "agreed"
        mine = [one for one in ends.listening(os.getpid()) if one not in before]
        theirs = [one for child in others for one in ends.listening(child.pid)]
        assert len(mine) == 1
        assert len(theirs) == 2
        assert {one.partition(":")[0] for one in mine + theirs} == {"0100007F"}, "127.0.0.1, in the kernel's way"
        sender.close()


def test_the_default_group_is_left_alone(tmp_path: Path) -> None:
    def alone() -> int:
        value = torch.ones(3)
        dist.all_reduce(value)
        return int(value.sum())

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert alone() == 3
        where = ends.address()
        with (
            ends.receivers(where, 2, ends.take, 1) as others,
            tk.serve(where, receivers=2, **ends.KEYWORDS) as sender,
        ):
            # A source may use the caller's own collectives.
            names = [("a", torch.full((4,), float(alone()))), ("b", torch.ones(9))]
            Call(sender.send, iter(names)).result(30)
            for child in others:
                assert child.result(20) == [prints(names)]
        assert alone() == 3
        assert dist.group.WORLD is group
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_no_default_group_is_needed_or_made() -> None:
    where = ends.address()
    with ends.receivers(where, 1, ends.take, 1), tk.serve(where, **ends.KEYWORDS) as sender:
        Call(sender.send, bulk(1000)).result(30)
        assert not dist.is_initialized()


def test_twenty_sessions_in_a_row_leave_nothing() -> None:
    def once() -> None:
        where = ends.address()
        sender = tk.serve(where, receivers=2, **ends.KEYWORDS)
        joining = [Call(tk.connect, where, **ends.KEYWORDS, wait=20.0) for _ in range(2)]
        with sender:
            receivers = [call.result(20) for call in joining]
            taking = [Call(ends.take, receiver, 1) for receiver in receivers]
            tensors = bulk(100_000)
            sender.send(tensors)
            assert [call.result(20) for call in taking] == [[prints(tensors)]] * 2
            for receiver in receivers:
                receiver.close()

    once()
    gc.collect()
    with nothing_left():
        for _ in range(20):
            once()
        limit = time.monotonic() + 10  # `close` does not wait for the thread of a group, which ends soon after
        while any("gloo" in thread.name for thread in threading.enumerate()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not [thread for thread in threading.enumerate() if "gloo" in thread.name]
        assert parked() == 0


def test_chunks_that_nobody_has_opened_are_passed_over() -> None:
    """A receiver refuses a tensor before it opens the chunk that brings it; the update after that is whole."""
    where = ends.address()
    keywords = {**ends.KEYWORDS, "chunk_bytes": 1000, "slots": 2}
    target = {"a": torch.zeros(2000), "b": torch.zeros(5)}
    joining = Call(tk.connect, where, **keywords, wait=20.0)
    with tk.serve(where, **keywords) as sender:
        with joining.result(20) as receiver:
            for _ in range(4):
                loading = Call(receiver.load_into, target)
                sending = Call(
                    sender.send, iter([("a", torch.ones(2000)), ("b", torch.ones(7)), ("c", torch.ones(900))])
                )
                assert isinstance(loading.error(20), tk.TargetError)
                assert isinstance(sending.error(20), tk.PeerFailedError)
                loading = Call(receiver.load_into, target)
                Call(sender.send, {"a": torch.arange(2000.0), "b": torch.ones(5)}).result(20)
                loading.result(20)
                assert target["a"].equal(torch.arange(2000.0))
                assert receiver.agreement.backend() == "gloo"


# -- the end of a process ---------------------------------------------------------------------------------------------

RECEIVER = """
import sys, time
sys.path[:0] = {path!r}
import transportkit as tk
with tk.connect({where!r}, wait=20.0, **{keywords!r}) as receiver:
    for lease in receiver.chunks():
        lease.release()
        print("stuck", flush=True)
        time.sleep(60)
"""

UNCLOSED = """
import os, signal, subprocess, sys, time, torch
sys.path[:0] = {path!r}
import gloo_ends as ends, transportkit as tk
from transportkit.testing import Call
receiver = subprocess.Popen([sys.executable, "-c", {receiver!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
sender = tk.serve({where!r}, **{keywords!r})
sender.wait()
call = Call(sender.send, ends.big(64 << 20))
while (line := receiver.stdout.readline()) != b"stuck\\n":  # older gloo greets there as well
    assert line
os.kill(receiver.pid, signal.{signal})
if {give_up}:
    assert isinstance(call.error(20), tk.TransportKitError)
else:
    ends.asleep()  # torch ends a process by SIGABRT whose interpreter ends while a daemon thread frees a tensor
print(receiver.pid, time.monotonic(), flush=True)
"""


@pytest.mark.parametrize(("how", "give_up"), [("SIGSTOP", True), ("SIGSTOP", False), ("SIGKILL", True)])
def test_a_process_with_a_group_at_work_ends_promptly_and_in_order(how: str, give_up: bool) -> None:
    names = {
        "path": [str(Path(__file__).parent)],
        "where": ends.address(),
        "keywords": {
            **ends.KEYWORDS,
            "chunk_bytes": 16 << 20,
            "timeout": 2.0 if how == "SIGSTOP" and give_up else 60.0,
        },
    }
    code = UNCLOSED.format(receiver=RECEIVER.format(**names), signal=how, give_up=give_up, **names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=80, check=False)
    ended = time.monotonic()
    receiver, _, moment = (done.stdout.splitlines() or [""])[-1].partition(" ")  # gloo of torch 2.9 greets there
    with contextlib.suppress(ProcessLookupError, ValueError):
        os.kill(int(receiver), signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    assert ended - float(moment) < 15  # a busy machine starts the two processes in any time
    assert "terminate" not in done.stderr


def test_a_forked_child_can_neither_use_nor_harm_the_group() -> None:
    where = ends.address()
    with ends.receivers(where, 1, ends.take, 2) as others, tk.serve(where, **ends.KEYWORDS) as sender:
        tensors = bulk(100_000)
        Call(sender.send, tensors).result(20)
        mine = ends.listening(os.getpid())
        child = os.fork()
        if child == 0:
            status = 1
            try:
                left = [one for one in ends.listening(os.getpid()) if one in mine]
                sender.close()
                gc.collect()
                status = 0 if not left else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        Call(sender.send, tensors).result(20)
        assert others[0].result(20) == [prints(tensors)] * 2


def test_a_sender_in_a_child_process_serves_its_parent() -> None:
    where = ends.address()
    with Child(ends.send_for_ever, where, 1, 200_000, dict(ends.KEYWORDS), method="forkserver") as child:
        with tk.connect(where, wait=20.0, **ends.KEYWORDS) as receiver:
            assert Call(ends.take, receiver, 2).result(20) == [prints(bulk(200_000))] * 2
            assert child.heard(20) == "agreed"
