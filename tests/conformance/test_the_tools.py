"""The tools of `transportkit.testing` that other tests rely on: processes, faults, journals, wirings."""

from __future__ import annotations

import os
import pickle
import signal
import time

import pytest
from promptness import PROMPT

from transportkit import registry
from transportkit.backends.pickle import PickleTransport
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    DeadlineError,
    DuplicateBackendError,
    PeerLostError,
    ProtocolError,
    TensorError,
    UnknownBackendError,
)
from transportkit.site import read_site
from transportkit.testing import (
    Call,
    Child,
    ChildDiedError,
    HungError,
    Loopback,
    StalledPair,
    bounded,
    faulty,
    hear,
    in_process,
    in_update,
    installed,
    nothing_left,
    recording,
    report,
)


def answer(value: object) -> object:
    return value


def fail(name: str) -> None:
    raise TensorError("this one", tensor=name)


def fail_oddly() -> None:
    class Odd(Exception):
        pass

    raise Odd("not importable")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def echo() -> str:
    report("ready")
    return f"heard {hear(20)}"


def found(name: str) -> str:
    return registry.load(name).transport.inner.name


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_in_process_gives_result_or_exception(method: str) -> None:
    assert in_process(answer, (1, "x"), method=method) == (1, "x")
    with pytest.raises(TensorError, match="this one") as caught:
        in_process(fail, "weight", method=method)
    assert caught.value.tensor == "weight"
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(ChildDiedError) as died:
        in_process(die, method=method)
    assert died.value.exitcode == -signal.SIGKILL


def test_in_process_ends_in_time_and_leaves_nothing() -> None:
    in_process(int, method="forkserver")
    with nothing_left():
        began = time.monotonic()
        with pytest.raises(HungError, match="said nothing"):
            in_process(time.sleep, 60, timeout=0.3, method="forkserver")
        assert time.monotonic() - began < PROMPT
    with pytest.raises(AssertionError, match="not importable"):
        in_process(fail_oddly, method="forkserver")


def test_a_child_is_talked_to_stopped_and_killed() -> None:
    with Child(echo, method="forkserver") as child:
        assert child.heard(20) == "ready"
        child.stop()
        child.tell("x")
        with pytest.raises(HungError):
            child.heard(0.2)
        child.resume()
        assert child.result(20) == "heard x"
    with Child(echo, method="forkserver") as child:
        child.heard(20)
        child.kill()
        with pytest.raises(ChildDiedError):
            child.result(20)


def test_a_call_tells_where_it_hangs() -> None:
    call = Call(time.sleep, 1.0)
    with pytest.raises(HungError, match="did not end within"):
        call.result(0.05)
    assert call.error(20) is None
    with pytest.raises(ZeroDivisionError):
        bounded(20, divmod, 1, 0)


def test_installed_registers_for_a_while() -> None:
    transport = faulty(PickleTransport, at="publish", error=OSError)
    with installed(transport):
        with installed(transport, recording(transport)):
            assert registry.load("recording-faulty-pickle").transport.inner is transport
            assert isinstance(registry.load("faulty-pickle"), registry.Loaded)
        assert registry.load("faulty-pickle").transport is transport
    with pytest.raises(UnknownBackendError):
        registry.load("faulty-pickle")
    other = faulty(PickleTransport, at="open", name="pickle")
    with installed(other), pytest.raises(DuplicateBackendError):
        registry.choose(read_site("pair"), ["pickle"])


def test_wrapped_backends_travel_to_a_child() -> None:
    transport = recording(
        faulty(PickleTransport, at="open", nth=3, error=BackendError("x", backend="y"), when=in_update)
    )
    again = pickle.loads(pickle.dumps(transport))
    assert (again.name, again.inner.name, again.inner.first) == ("recording-faulty-pickle", "faulty-pickle", 3)
    assert again.inner.error.backend == "y"
    with installed(transport):  # what the child inherits of the path is no second backend there
        name = in_process(found, transport.name, backends=[transport], method="spawn")
    assert name == "faulty-pickle"


def test_faulty_counts_and_names() -> None:
    transport = faulty(PickleTransport, at="probe", nth=2, times=1, error=OSError("no"))
    site = read_site("pair")
    transport.probe(site)
    with pytest.raises(OSError, match="no"):
        transport.probe(site)
    assert transport.probe(site).backend == "faulty-pickle"
    with pytest.raises(ValueError, match=r"exporter\.connect or importer\.connect"):
        faulty(PickleTransport, at="connect")
    with pytest.raises(ValueError, match="no method"):
        faulty(PickleTransport, at="publsh")


def test_a_hang_ends_with_abort() -> None:
    transport = faulty(PickleTransport, at="exporter.connect")
    with StalledPair(transport, "exporter.connect") as pair:
        with pytest.raises(HungError):
            pair.run(0.1, 0.2)
        call = pair.start(0.1)
        pair.abort()
        assert isinstance(call.error(20), BackendError)


def test_the_wiring_double_waits_as_the_core_does() -> None:
    with nothing_left(), Loopback((0, 1), capacity=10) as links:
        links.exporter.send_payload(1, [b"ab", memoryview(b"cd")], Deadline(20, "room"))
        assert links.importers[1].recv_payload(10, Deadline(20, "frame")) == b"abcd"
        with pytest.raises(DeadlineError):
            links.importers[0].recv_payload(10, Deadline(0.05, "frame"))
        links.feed(0, b"12345")
        with pytest.raises(ProtocolError):
            links.importers[0].recv_payload_into(memoryview(bytearray(4)), Deadline(20, "frame"))
        links.exporter.send_payload(0, [bytes(8)], Deadline(20, "room"))
        with pytest.raises(DeadlineError):
            links.exporter.send_payload(0, [bytes(8)], Deadline(0.05, "room"))
        reading, writing = os.pipe()
        waiting = Call(links.importers[0].wait_readable, reading, Deadline(20, "byte"))
        links.importers[0].lose()
        assert isinstance(waiting.error(20), PeerLostError)
        assert links.importers[0].recv_payload(10, Deadline(20, "frame")) == bytes(8)
        os.close(reading)
        os.close(writing)
