"""Whoever dies or stops at whichever step of a reroute: what all others are told, and that the address serves again."""

from __future__ import annotations

import gc
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from promptness import PROMPT
from session_ends import Child, Talk, caught, descriptors, differing, leftovers, model, session_works, short_folder
from threaded_ends import SMALL, received

import transportkit as tk
from transportkit.errors import ResourceError
from transportkit.testing import faulty, in_update, installed
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transportkit.transport import Transport

REROUTING = "transportkit.session.rerouting:Rerouting."
OPENING = "transportkit.session.opening:Opening."
JOINING = "transportkit.session.joining:Joining."
RECEIVING = "transportkit.session.receiving:Receiving."

Step = tuple[Any, ...]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def broken(at: str, name: str = "faulty-shm", *, sound: bool = False) -> type[Transport]:
    """Fails once, in the third chunk of the first update; a trial comes before it, whose calls cannot be told apart."""
    when = None if at in ("packing", "exporter.ready", "locate") else in_update
    nth = 1 << 30 if sound else {"packing": 4, "exporter.ready": 4, "locate": 7}.get(at, 3)
    return faulty(ShmTransport, at=at, nth=nth, times=1, when=when, error=ResourceError("no room"), name=name)


# -- the sender -------------------------------------------------------------------------------------------------------

#: At which call of the backend it fails, and where the sender is killed then. Of two receivers, first on one lane of
#: `shm`, then on two of `pickle`: so the handshake of the reroute has the third and fourth message of each kind.
SENDER_STEPS: dict[str, tuple[str, Step]] = {
    "packing fails": ("packing", (REROUTING + "run", "before")),
    "ready fails": ("exporter.ready", (REROUTING + "run", "before")),
    "locate fails": ("locate", (REROUTING + "run", "before")),
    "publish fails": ("publish", (REROUTING + "run", "before")),
    "a receiver is stranded": ("importer.open", (REROUTING + "run", "before")),
    "its word is asked": ("publish", ("transportkit.session.peers:Peers.begin", "after", 1, "Reroute")),
    "their words are there": ("publish", (REROUTING + "_ask", "after")),
    "exporters are made": ("publish", (OPENING + "_make", "after", 3)),
    "proposed to one": ("publish", (OPENING + "_send", "after", 3, "Proposal")),
    "proposed to both": ("publish", (OPENING + "_send", "after", 4, "Proposal")),
    "before they meet": ("publish", (OPENING + "_meet", "before", 2)),
    "told to connect": ("publish", (OPENING + "_send", "after", 3, "Connect")),
    "before the trial": ("publish", (OPENING + "_try", "before", 2)),
    "one is tried": ("publish", (OPENING + "_try", "after", 2)),
    "both are tried": ("publish", (OPENING + "_try", "after", 3)),
    "agreed with one": ("publish", (OPENING + "_send", "after", 3, "Agreed")),
    "agreed": ("publish", (REROUTING + "_open", "after")),
    "the old lane is left": ("publish", (REROUTING + "_part", "after")),
    "before what comes again": ("publish", (REROUTING + "_replay", "before")),
    # Of the trial, the chunks and the trials of the new lanes, these are the seventh and eighth.
    "a chunk comes again to one": ("exporter.ready", ("transportkit.session.lane:Lane.emit", "after", 7)),
    "a chunk comes again to both": ("exporter.ready", ("transportkit.session.lane:Lane.emit", "after", 8)),
    "all has come again": ("exporter.ready", (REROUTING + "run", "after")),
    "the next chunk": ("publish", ("transportkit.session.convoy:Convoy.emit", "after", 4)),
}


def send_on(talk: Talk, address: str, at: str) -> None:
    backend = broken(at)
    with (
        installed(backend),
        tk.serve(address, receivers=2, **SMALL, backends=(backend.name, "pickle")) as sender,
    ):
        sender.send(model())


def admit_and_send(talk: Talk, address: str, at: str) -> None:
    with tk.serve(address, late=True, **SMALL, backends=("shm", "pickle")) as sender:
        while not sender.late:
            time.sleep(0.005)
        sender.admit()
        sender.send(model())


def outlive(talk: Talk, address: str) -> None:
    """One session after the other: how each ended for this side, when, and what it left behind."""
    while (at := talk.hear()) is not None:
        backend = broken(at) if at else ShmTransport
        before = descriptors()
        with installed(*([backend] if at else [])):
            try:
                with tk.connect(address, **SMALL, backends=(backend.name, "pickle")) as receiver:
                    told = ("taken", differing(received(receiver), model()))
            except tk.TransportKitError as error:
                told = (type(error).__name__, str(error))
        moment = time.monotonic()
        del backend
        gc.collect()
        talk.say((*told, moment, leftovers(before)))


def sender_dies(address: str, function: Any, steps: dict[str, tuple[str, Step]]) -> None:
    """At each of these steps, at one address, before the eyes of the same two receivers."""
    with Child(outlive, address) as one, Child(outlive, address) as two:
        for step, (at, die) in steps.items():
            one.tell(at)
            two.tell(at)
            with Child(function, address, at, die=die) as victim:
                assert victim.join() == -signal.SIGKILL, step
                for name, text, moment, left in (one.heard(), two.heard()):
                    assert (name, left) == ("PeerLostError", []), (step, text)
                    assert f"pid {victim.pid}" in text, step
                    assert moment - victim.died_at < PROMPT, step
        at = "publish" if function is send_on else ""
        one.tell(at)
        two.tell(at)
        with Child(function, address, at) as last:
            assert [told[:2] for told in (one.heard(), two.heard())] == [("taken", []), ("taken", [])]
            last.result()
        for each in (one, two):
            each.tell(None)
            each.result()


def test_the_sender_is_killed_at_each_step_of_a_reroute(folder: Path) -> None:
    sender_dies(f"unix:{folder}/s", send_on, SENDER_STEPS)


#: With one receiver there and one that is admitted.
ADMITTING: dict[str, tuple[str, Step]] = {
    "the exporter is made": ("", (OPENING + "_make", "after", 2)),
    "proposed": ("", (OPENING + "_send", "after", 2, "Proposal")),
    "told to connect": ("", (OPENING + "_send", "after", 2, "Connect")),
    "before the trial": ("", (OPENING + "_try", "before", 2)),
    "tried": ("", (OPENING + "_try", "after", 2)),
    "agreed": ("", (OPENING + "_send", "after", 2, "Agreed")),
    "admitted": ("", ("transportkit.session.sender:Sender.admit", "after")),
    "before both are on one lane": ("", ("transportkit.session.sending:Sending._renegotiate", "before")),
    "on one lane": ("", ("transportkit.session.sending:Sending._renegotiate", "after")),
}


def test_the_sender_is_killed_while_it_admits_one(folder: Path) -> None:
    sender_dies(f"unix:{folder}/s", admit_and_send, ADMITTING)


# -- a receiver -------------------------------------------------------------------------------------------------------

STEPS: dict[str, tuple[str, Step]] = {
    "its backend fails": ("importer.open", (JOINING + "strand", "before")),
    "it said so": ("importer.open", (JOINING + "strand", "after")),
    "asked": ("publish", (JOINING + "strand", "before")),
    "said how far it is": ("publish", (JOINING + "strand", "after")),
    "proposed": ("publish", (JOINING + "_join", "before", 2)),
    "joined": ("publish", (JOINING + "_join", "after", 2)),
    "in the trial": ("publish", (JOINING + "_prove", "before", 2)),
    "proven": ("publish", (JOINING + "_prove", "after", 2)),
    "agreed": ("publish", (JOINING + "again", "after")),
    "the first chunk again": ("publish", (RECEIVING + "_open", "after", 4)),
    "applied": ("publish", (RECEIVING + "applied", "before")),
    "agreed anew": ("publish", (JOINING + "_prove", "after", 3)),
}


def take(talk: Talk, address: str, backend: type[Transport], updates: int, timeout: float) -> Any:
    keywords = SMALL | {"timeout": timeout, "backends": (backend.name, "pickle")}
    with installed(backend), tk.connect(address, **keywords) as receiver:
        try:
            return [name for _ in range(updates) for name in differing(received(receiver), model())]
        except tk.TransportKitError as error:
            return type(error).__name__, str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("on_loss", ["continue", "raise"])
def test_a_receiver_dies_or_stops_at_each_step_of_a_reroute(on_loss: Any, number: int, folder: Path) -> None:
    """All steps at once, each in a session of its own."""
    timeout = 20.0 if number == signal.SIGKILL else 3.0
    backends = {step: broken(at, f"faulty-{n}") for n, (step, (at, _)) in enumerate(STEPS.items())}
    addresses = {step: f"unix:{folder}/{n}" for n, step in enumerate(STEPS)}

    def session(step: str) -> None:
        victim, *others = children[step]
        keywords = SMALL | {"timeout": timeout, "backends": (backends[step].name, "pickle")}
        with tk.serve(addresses[step], receivers=3, **keywords) as sender:
            names = {each.receiver: each.peer for each in sender.agreement.assignments}
            if on_loss == "continue":
                lost: dict[int, str] = {}
                for update in range(3):
                    report = sender.send(model(), on_loss="continue")
                    lost |= report.lost
                    assert bool(report.reroutes) <= (update == 0), step
                (culprit,) = lost
                assert f"pid {victim.pid} " in names[culprit], step
                assert [other.result() for other in others] == [[], []], step
                return
            began = time.monotonic()
            error, moment = caught(lambda: [sender.send(model()) for _ in range(3)])
            assert isinstance(error, tk.PeerLostError if number == signal.SIGKILL else tk.DeadlineError), (step, error)
            assert f"pid {victim.pid} " in str(error), step
            assert moment - began < timeout + PROMPT, step
            assert sender.closed is not None
        for told in [other.result() for other in others]:
            assert told[0] in ("PeerFailedError", "PeerClosedError", "PeerLostError"), (step, told)
            assert f"pid {victim.pid} " in told[1], (step, told)
        session_works(addresses[step], backends=("shm",))

    children: dict[str, list[Child]] = {}
    updates = 3
    with installed(*backends.values()), ThreadPoolExecutor(len(STEPS)) as pool:
        try:
            for step, (_, (place, when, *nth)) in STEPS.items():
                die = (place, when, *(nth or [1]), "", number)
                children[step] = [Child(take, addresses[step], backends[step], updates, timeout, die=die)]
                fine = broken("importer.open", backends[step].name, sound=True)
                children[step] += [Child(take, addresses[step], fine, updates, timeout) for _ in range(2)]
            for done in [pool.submit(session, step) for step in STEPS]:
                done.result()
        finally:
            for some in children.values():
                for child in some:
                    child.end()
