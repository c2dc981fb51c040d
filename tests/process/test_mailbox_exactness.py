"""A message is delivered or reported as not, at whatever moment its ``put`` ends; and the mailbox goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mailbox_ends import Way, address_in
from promptness import PROMPT

import transportkit as tk
from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import BackendError
from transportkit.link import SocketLink, pair_sockets
from transportkit.mailbox.posting import Posting

if TYPE_CHECKING:
    from pathlib import Path

    from transportkit.transport import Exporter


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path)


# -- frames that are taken back ---------------------------------------------------------------------------------------


def links() -> tuple[SocketLink, SocketLink]:
    ours, theirs = pair_sockets()
    return SocketLink.over(ours), SocketLink.over(theirs)


def test_the_last_byte_of_a_frame_says_whether_it_counts() -> None:
    header = wire.Chunk(1, 0, 0, True, 1, 0, wire.Location(), ())
    for message in (wire.Letter(1, b"x", (1,), 0, 1, header), wire.Fragment(1, b"x"), wire.Enclosure(1, header)):
        frame = wire.encode(message)
        assert frame[-1:] == wire.letters.WHOLE
        assert wire.decode(frame) == message
        spoiled = wire.decode(frame[:-1] + wire.SPOILED)
        assert not spoiled.whole  # type: ignore[union-attr]


def test_a_frame_that_has_not_begun_is_withdrawn_without_a_trace() -> None:
    ours, theirs = links()
    with ours, theirs:
        sent = 0
        while ours.try_send(b"x" * 1000):  # on a unix socket a short frame goes whole or not at all
            sent += 1
        ours.hold(b"late")
        with pytest.raises(tk.DeadlineError):
            ours.flush(Deadline(0.05, "room"))
        assert ours.withdraw(b"\xc2")
        for _ in range(sent):
            assert theirs.recv(Deadline(20, "frame")) == b"x" * 1000
        ours.hold(b"next")
        ours.flush(Deadline(20, "room"))
        assert theirs.recv(Deadline(20, "frame")) == b"next"


def test_a_frame_that_is_half_written_ends_with_what_is_said() -> None:
    ours, theirs = links()
    with ours, theirs:
        body = b"a" * 3_000_000 + b"\xc3"
        ours.hold(body)
        with pytest.raises(tk.DeadlineError):
            ours.flush(Deadline(0.05, "room"))
        assert not ours.withdraw(b"\xc2")
        reader: list[bytes] = []
        thread = threading.Thread(target=lambda: reader.append(theirs.recv(Deadline(20, "frame"))))
        thread.start()
        ours.flush(Deadline(20, "room"))
        thread.join(20)
        assert reader == [body[:-1] + b"\xc2"]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_put_that_gives_up_within_a_frame_is_not_delivered(address: str, kind: str) -> None:
    """Nobody reads, so the link is full at last, in mid-frame; all that was reported arrives, and nothing else."""
    where = address if kind == "unix" else "tcp://127.0.0.1:0"
    with tk.Inbox(where, capacity=1000, backends=["pickle"]) as inbox:
        outbox = tk.Outbox(inbox.address, capacity=1000, backends=["pickle"])
        reported, failed = [], 0
        for number in range(1000):
            try:
                outbox.put({"n": number, "s": "x" * 60_000}, timeout=0.02)
                reported.append(number)
            except tk.DeadlineError:
                failed += 1
                if failed == 3:
                    break
        assert failed == 3
        if kind == "tcp":
            assert outbox.stats.withdrawn >= 1
        taken = []
        while len(taken) < len(reported):
            taken.append(inbox.get(timeout=20)["n"])
        assert taken == reported
        last = outbox.put("last", timeout=20)
        assert inbox.get(timeout=20) == "last"
        assert inbox.last == tk.Postmark(outbox.identity, last)
        assert inbox.stats.dropped == ({"withdrawn": outbox.stats.withdrawn} if outbox.stats.withdrawn else {})
        outbox.close()


@pytest.mark.parametrize("backend", ["shm", "pickle"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(
            st.sampled_from(["put", "get"]),
            st.lists(st.integers(0, 60_000), max_size=3),
            st.sampled_from([0, 0.001, 0.02]),
        ),
        min_size=5,
        max_size=30,
    )
)
def test_any_course_of_puts_and_gets_is_exact(tmp_path: Path, backend: str, plan: list[Any]) -> None:
    way = Way(backend, address_in(tmp_path))
    sizes = {"chunk_bytes": 10_000, "slots": 2}
    with way.both({"capacity": 3, **sizes}, inline=50) as (inbox, outbox):
        reported: list[tuple[int, int]] = []
        taken: list[tuple[int, int]] = []

        def take(timeout: float) -> bool:
            try:
                message = inbox.get(timeout=timeout)
            except tk.DeadlineError:
                return False
            assert inbox.last is not None
            taken.append((message["step"], inbox.last.number))
            for tensor in message["t"]:
                assert bool((tensor == message["step"] % 128).all())
            return True

        for step, (what, lengths, timeout) in enumerate(plan):
            if what == "get":
                take(timeout)
                continue
            tensors = [torch.full((length,), step % 128, dtype=torch.int8) for length in lengths]
            try:
                reported.append((step, outbox.put({"step": step, "t": tensors}, timeout=timeout)))
            except tk.DeadlineError:
                pass
        while take(0.05):
            pass
        assert taken == reported
        outbox.flush(5)
        assert outbox.stats.slots_in_use == inbox.stats.slots_in_use == 0


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_an_interrupted_put_is_not_delivered_and_an_interrupted_get_loses_nothing(address: str, backend: str) -> None:
    way = Way(backend, address)
    with way.both({"capacity": 1, "chunk_bytes": 4096, "slots": 1}, inline=0) as (inbox, outbox):
        for message in ("first" if backend == "pickle" else torch.ones(500), torch.ones(5000)):
            timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
            if isinstance(message, torch.Tensor) and message.numel() > 1000:
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    outbox.put(message)
                timer.join()
            else:
                outbox.put(message)
        assert inbox.get(timeout=20) is not None
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            inbox.get(timeout=10)
        timer.join()
        outbox.put("after", timeout=20)
        assert inbox.get(timeout=20) == "after"
        outbox.flush(5)
        assert outbox.stats.slots_in_use == 0


# -- a backend that fails ---------------------------------------------------------------------------------------------


def failing(name: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this step of every exporter fail from its so-manieth call on."""
    from transportkit_shm.shm import ShmExporter

    honest, calls = getattr(ShmExporter, name), [0]

    def step(self: Exporter, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise BackendError("it does not work any more", backend="shm")
        return honest(self, *args)

    monkeypatch.setattr(ShmExporter, name, step)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("step", ["ready", "locate"])
def test_where_the_backend_fails_tensors_go_inline_and_a_counter_says_so(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, after: int
) -> None:
    way = Way("shm", address)
    message = [torch.arange(30_000), torch.arange(40_000), torch.ones(1)]
    with way.both({"chunk_bytes": 100_000}) as (inbox, outbox):
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.extend(inbox.get(timeout=10) for _ in range(2)))
        thread.start()
        failing(step, after, monkeypatch)  # with 2, in the middle of the first message
        for _ in range(2):
            outbox.put(message)
        thread.join(10)
        for came in got:
            assert all(torch.equal(one, other) for one, other in zip(came, message, strict=True))
        assert len(got) == 2
        assert outbox.stats.inline_fallbacks == 4
        assert outbox.stats.withdrawn == (1 if after else 0)
        assert inbox.stats.dropped == ({"withdrawn": 1} if after else {})
        outbox.flush(5)
        assert outbox.stats.slots_in_use == 0
    assert "backend shm failed, so tensors go inline" in caplog.text


def test_a_message_that_torch_cannot_copy_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise NotImplementedError("copy_kernel not implemented")

    with Way("shm", address).both() as (inbox, outbox):
        with monkeypatch.context() as patch:
            patch.setattr("transportkit.packing.Packer.pack", cannot)
            with pytest.raises(tk.TensorError, match="cannot be copied by torch"):
                outbox.put(torch.ones(5000))
        outbox.put(torch.ones(5000))
        assert inbox.get(timeout=20).sum() == 5000
        assert isinstance(outbox._posting, Posting)


def test_a_long_wait_counts(address: str) -> None:
    with Way("shm", address).both() as (inbox, outbox):
        thread = threading.Thread(target=lambda: (time.sleep(0.2), outbox.put(1)))
        thread.start()
        assert inbox.get(timeout=20) == 1
        thread.join()
        assert inbox.stats.waits == 1
        assert 0.1 < inbox.stats.wait_seconds < PROMPT
