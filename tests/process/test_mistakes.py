"""What somebody is told who uses the library in a way that cannot work: the cause, and the way out."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import address_in

import transportkit as tk
from transportkit.testing import Call

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path)


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (tk.serve, "receiver", "receivers"),
        (tk.connect, "timeouts", "timeout"),
        (tk.Inbox, "producer", "producers"),
        (tk.Inbox, "capcity", "capacity"),
        (tk.Outbox, "reconect", "reconnect"),
    ],
)
def test_a_keyword_that_is_misspelt_is_told_with_those_there_are(
    call: Any, wrong: str, right: str, address: str
) -> None:
    with pytest.raises(tk.UsageError, match=f"unknown keyword '{wrong}'; .*{right}") as caught:
        call(address, **{wrong: 1})
    assert ("progress" in str(caught.value)) == (call in (tk.serve, tk.connect))


def test_what_belongs_to_a_process_says_how_another_one_gets_its_own(address: str) -> None:
    with tk.Inbox(address) as inbox, tk.Outbox(address) as outbox:
        for each, way in ((inbox, r"inbox\.outbox\(ctx\)"), (outbox, r"Outbox\(address\)")):
            with pytest.raises(tk.UsageError, match=way):
                pickle.dumps(each)


def test_a_session_says_so_too(address: str) -> None:
    connecting = Call(tk.connect, address, wait=20)
    with tk.serve(address) as sender, connecting.result(20) as receiver:
        for each, way in ((sender, "serve.*pair"), (receiver, "connect.*pair")):
            with pytest.raises(tk.UsageError, match=way):
                pickle.dumps(each)


def test_an_end_of_a_pair_that_is_used_before_the_child_is_started() -> None:
    sender, receiver = tk.pair(multiprocessing.get_context("spawn"))
    with pytest.raises(tk.PeerLostError, match="a child has that was started before the first use"):
        sender.wait()
    with pytest.raises(tk.UsageError, match="start the process that is to have it before that"):
        receiver.join()


def test_an_address_in_use_names_who_uses_it(address: str) -> None:
    sender = tk.serve(address)
    with pytest.raises(tk.AddressError, match=r"in use by this process; close\(\)"):
        tk.Inbox(address)
    code = f"import transportkit as tk; tk.serve({address!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert f"in use by process {multiprocessing.current_process().pid}" in done.stderr
    sender.abort()
    with pytest.raises(tk.AddressError, match="abort"):
        tk.serve(address)
    sender.close()
    tk.serve(address).close()


def test_a_sender_that_waits_tells_how_many_have_come_and_who_did_not_get_in(address: str) -> None:
    sender = tk.serve(address, receivers=2, authkey="right", wait=20)
    with pytest.raises(tk.DeadlineError, match=f"no receiver came to {address} within 0.1 s"):
        sender.wait(0.1)
    with pytest.raises(tk.AuthenticationError):
        tk.connect(address, authkey="wrong")
    with pytest.raises(tk.DeadlineError, match=r"proposal .*`wait\(\)` or `send\(\)`.*all receivers"):
        tk.connect(address, authkey="right", wait=0.3)
    coming = Call(tk.connect, address, authkey="right", wait=1.5)
    with pytest.raises(tk.DeadlineError, match=r"1 of 2 receivers came .*; 2 connections came to nothing"):
        sender.wait(0.5)
    assert isinstance(coming.error(20), tk.DeadlineError)
    sender.close()


def test_a_wait_of_a_single_call_is_checked(address: str) -> None:
    sender = tk.serve(address)
    with pytest.raises(tk.UsageError, match="wait must be a positive number"):
        sender.wait(-1)
    sender.close()


def test_an_iterator_that_was_left_before_its_end(address: str) -> None:
    sending = Call(lambda: tk.serve(address, wait=20, chunk_bytes=1000).send({"a": torch.ones(5000)}))
    receiver = tk.connect(address, wait=20, chunk_bytes=1000)
    pairs = receiver.chunks()
    next(pairs)
    with pytest.raises(tk.UsageError, match=r"iterator of chunks\(\) is not at its end.*close it"):
        receiver.load_into({})
    refused = Call(receiver.close).error(20)
    assert isinstance(refused, tk.UsageError)
    assert "chunks()" in str(refused)
    receiver.abort()
    del pairs  # says nothing on stderr, which pytest would turn into a failure
    gc.collect()
    assert isinstance(sending.error(20), tk.PeerLostError)


def test_what_an_inbox_would_agree_is_what_it_agrees(address: str) -> None:
    with tk.Inbox(address):
        would = tk.inspect(address).agreement
        with tk.Outbox(address) as outbox:
            does = outbox.agreement
    assert would is not None
    (foreseen,), (agreed,) = would.assignments, does.assignments
    assert (foreseen.backend, foreseen.slots, foreseen.chunk_bytes) == (
        agreed.backend,
        agreed.slots,
        agreed.chunk_bytes,
    )
