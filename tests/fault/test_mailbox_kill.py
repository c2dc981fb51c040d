"""``kill -9`` and SIGSTOP of either end of a mailbox: nothing hangs, what is complete arrives, the rest is counted."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import WAYS, Way, address_in, consume_for_ever, open_and_sleep, put_for_ever, reach, value
from promptness import PROMPT
from session_ends import Child, Talk, caught, shared_names

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

#: Where the consumer is the child; with mpqueue it is the parent.
ADDRESSED = [name for name in WAYS if name != "mpqueue"]

#: Small chunks, so that a message has many of them.
SIZES: dict[str, Any] = {"chunk_bytes": 4096, "slots": 2, "timeout": 20}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return Way(request.param, address_in(tmp_path))


@pytest.fixture(autouse=True)
def formatted() -> Iterator[list[str]]:
    """Every log line is formatted; one that cannot be fails its test."""
    lines: list[str] = []

    class Formatting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Formatting(), logging.getLogger("transportkit")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


# -- producers --------------------------------------------------------------------------------------------------------

POSTING = "transportkit.mailbox.posting:Posting."
DEATHS = {
    "before the letter": (POSTING + "_frame", "before", 5, "Letter"),
    "after the letter": (POSTING + "_frame", "after", 5, "Letter"),
    "first chunk packed": (POSTING + "_pack", "after", 21),
    "header sent": (POSTING + "_move", "before", 23),
    "middle chunk": (POSTING + "_move", "after", 23),
    "last chunk": (POSTING + "_frame", "after", 25),
    "put": ("transportkit.mailbox.outbox:Outbox.put", "after", 5),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_producer_that_dies_leaves_what_is_complete(way: Way, death: str, formatted: list[str]) -> None:
    """It puts messages of five chunks each and dies in or after the fifth."""
    with (
        way.inbox(**SIZES, spin=0) as inbox,
        Child(put_for_ever, way.where(inbox, **SIZES, inline=0), 2, 2500, die=DEATHS[death]) as child,
    ):
        identity = child.heard()
        quiet = way.outbox(inbox)
        taken = 0
        until = time.monotonic() + 20
        while inbox.stats.lost == 0 and time.monotonic() < until:
            try:
                message = inbox.get(timeout=0.1)
            except tk.DeadlineError:
                continue
            assert message["message"] == taken
            for index, tensor in enumerate(message["t"]):
                assert torch.equal(tensor, value(0, taken, index, 2500))
            taken += 1
        assert child.join() == -signal.SIGKILL
        assert taken in (4, 5)
        assert (inbox.stats.lost, inbox.stats.slots_in_use) == (1, 0)
        partial = inbox.stats.dropped.get("producer lost", 0)
        assert partial == 1 or death in ("before the letter", "first chunk packed", "put", "last chunk")
        assert not partial or any(f"message 5 of producer {identity}" in line for line in formatted)
        assert any(f"producer {identity} " in line and "is lost" in line for line in formatted)
        quiet.put("alive")
        assert inbox.get(timeout=20) == "alive"
        assert list(inbox.producers) == [quiet.identity]
        quiet.close(5)


def test_a_producer_that_stops_in_mid_message_delays_nobody(way: Way) -> None:
    stop = (POSTING + "_move", "after", 3, "", signal.SIGSTOP)
    with (
        way.inbox(**SIZES) as inbox,
        Child(put_for_ever, way.where(inbox, **SIZES, inline=0), 2, 2500, die=stop) as child,
    ):
        child.heard()
        with way.outbox(inbox) as quiet:
            while not stopped(child):
                quiet.put("quiet")
                assert inbox.get(timeout=20) == "quiet"
            began = time.monotonic()
            with pytest.raises(tk.DeadlineError):
                inbox.get(timeout=0.3)
            assert time.monotonic() - began < PROMPT
            child.signal(signal.SIGCONT)
            message = inbox.get(timeout=10)
            assert torch.equal(message["t"][1], value(0, 0, 1, 2500))


def stopped(child: Child) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


# -- consumers --------------------------------------------------------------------------------------------------------


def test_a_consumer_that_dies_is_named_at_once(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    for backend in ("shm", "pickle"):
        with Child(open_and_sleep, address, {"backends": [backend]}) as child:
            assert child.heard() == "open"
            outbox = tk.Outbox(address, backends=[backend], wait=10)
            for number in range(3):
                outbox.put({"n": number, "t": torch.ones(5000)})
            child.signal(signal.SIGKILL)
            child.join()
            error, when = caught(outbox.put, "late", timeout=10)
            assert isinstance(error, tk.PeerLostError)
            assert when - child.died_at < PROMPT
            assert f"the inbox (pid {child.pid} " in str(error)
            assert "put and not taken: 1 to 3" in str(error)
            assert outbox.unacknowledged == (1, 2, 3)
            assert isinstance(caught(outbox.put, "later")[0], tk.ClosedError)
            outbox.close()


@pytest.mark.parametrize("backend", ADDRESSED)
def test_a_consumer_that_dies_ends_a_put_that_waits(backend: str, tmp_path: Path) -> None:
    way = Way(backend, address_in(tmp_path))
    with Child(open_and_sleep, way.address, {"backends": [way.backend], **SIZES}) as child:
        child.heard()
        outbox = tk.Outbox(way.address, backends=[way.backend], wait=10, inline=0, **SIZES)
        child.signal(signal.SIGSTOP)
        child.stopped()
        with pytest.raises(tk.DeadlineError):
            outbox.put(torch.ones(50_000), timeout=0.3)
        child.signal(signal.SIGCONT)
        killer = Killer(child)
        error, when = caught(outbox.put, torch.ones(50_000), timeout=20)
        assert isinstance(error, tk.PeerLostError)
        assert when - killer.when() < PROMPT
        outbox.close()


class Killer:
    """Kills a child in a moment."""

    def __init__(self, child: Child) -> None:
        self._when = 0.0
        self._child = child
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(0.3)
        self._child.signal(signal.SIGKILL)
        self._when = time.monotonic()

    def when(self) -> float:
        self._thread.join(10)
        return self._when


def test_a_consumer_that_is_started_again_is_found_again(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    for backend in ("shm", "pickle"):
        keywords = {"backends": [backend], "wait": 20}
        outbox: tk.Outbox | None = None
        for life in range(3):
            with Child(consume_for_ever, address, keywords) as child:
                child.heard()
                if outbox is None:
                    outbox = tk.Outbox(address, reconnect=True, **keywords)
                first = outbox.put({"message": life, "t": torch.ones(3000)}, timeout=10)
                assert child.heard() == life
                outbox.flush(10)
                child.signal(signal.SIGSTOP)
                child.stopped()
                lost = [outbox.put({"message": -1}, timeout=10) for _ in range(2)]
                assert lost == [first + 1, first + 2]
                child.signal(signal.SIGKILL)
                child.join()
        assert outbox is not None
        # Of the last consumer the outbox does not know yet; the others' are reported, and were not sent again.
        assert outbox.unacknowledged == (2, 3, 5, 6, 8, 9)
        error, _ = caught(outbox.put, "nobody", timeout=0.5)
        assert isinstance(error, tk.AddressError)
        assert outbox.stats.lost == 6
        assert outbox.stats.connections == 3
        assert outbox.forget() == (2, 3, 5, 6, 8, 9)
        assert outbox.unacknowledged == ()
        outbox.close()


def sends_and_leaves(talk: Talk, where: Any, count: int) -> tuple[str, float]:
    outbox = reach(where)
    talk.say("open")
    put = 0
    try:
        for number in range(count):
            outbox.put({"n": number}, timeout=0.5)
            put += 1
    except tk.TransportKitError:
        pass
    talk.say(put)
    talk.hear()
    began = time.monotonic()
    try:
        outbox.close(timeout=3)
        ended = "closed"
    except tk.TransportKitError as error:
        ended = type(error).__name__
    return ended, time.monotonic() - began


@pytest.mark.parametrize("death", ["killed", "asleep"])
def test_a_program_whose_consumer_reads_nothing_ends(tmp_path: Path, death: str) -> None:
    address = address_in(tmp_path)
    with Child(open_and_sleep, address, {"capacity": 2000}) as consumer:
        consumer.heard()
        with Child(sends_and_leaves, (address, {"capacity": 2000}), 1000) as producer:
            assert producer.heard() == "open"
            assert producer.heard() > 100
            if death == "killed":
                consumer.signal(signal.SIGKILL)
                consumer.join()
            producer.tell("close")
            ended, seconds = producer.result()
            assert producer.join() == 0
            assert ended == ("PeerLostError" if death == "killed" else "DeadlineError")
            assert seconds < PROMPT


@pytest.mark.parametrize("backend", ADDRESSED)
def test_a_stopped_consumer_loses_nothing(backend: str, tmp_path: Path) -> None:
    """What put reported is what arrives, in order, when it goes on."""
    way = Way(backend, address_in(tmp_path))
    keywords = {"backends": [way.backend], "capacity": 4, "wait": 20}
    with Child(consume_for_ever, way.address, keywords) as child:
        child.heard()
        with tk.Outbox(way.address, **keywords) as outbox:
            child.signal(signal.SIGSTOP)
            child.stopped()
            put = []
            for number in range(8):
                try:
                    outbox.put({"message": number, "t": torch.ones(30_000)}, timeout=0.1)
                    put.append(number)
                except tk.DeadlineError:
                    continue
            child.signal(signal.SIGCONT)
            outbox.put({"message": 99}, timeout=10)
            outbox.flush(10)
            assert [child.heard() for _ in range(len(put) + 1)] == [*put, 99]
            assert len(put) < 8


def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    address, before = address_in(tmp_path), shared_names()
    for _ in range(3):
        with Child(consume_for_ever, address, {"wait": 20}) as consumer:
            consumer.heard()
            with Child(put_for_ever, (address, {}), 1, 20_000) as producer:
                producer.heard()
                assert consumer.heard() == 0
                for child in (producer, consumer):  # a producer whose consumer is gone ends by itself
                    child.signal(signal.SIGKILL)
                    child.join()
    assert shared_names() <= before
