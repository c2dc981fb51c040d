"""Sessions over links that are not addresses: `pair`, with every start method, and channels of the user's own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import queue
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Self

import pytest
import session_ends as ends
import torch
from promptness import PROMPT
from session_ends import BACKENDS, Child, ChildError, Talk, caught, differing, load, model, zeros

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

pytestmark = pytest.mark.timeout(60)

METHODS = [pytest.param("spawn", marks=pytest.mark.slow), "fork", "forkserver"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- pairs ------------------------------------------------------------------------------------------------------------


def receiving_child(receiver: tk.Receiver, results: Connection) -> None:
    with receiver:
        outcome = [load(receiver, seed)[0] for seed in (1, 2)]
        results.send((outcome, str(receiver.agreement)))


def sending_child(sender: tk.Sender, results: Connection) -> None:
    with sender:
        for seed in (1, 2):
            sender.send(model(seed))
        results.send(str(sender.agreement))


class Started:
    """A child of the pytest process itself, started by one of multiprocessing's methods."""

    def __init__(self, method: str, function: Callable[..., object], *args: Any) -> None:
        self.context: Any = multiprocessing.get_context(method)
        self.results, theirs = self.context.Pipe()
        self.process = self.context.Process(target=function, args=(*args, theirs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
            self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.join(10)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(20)
        self.code = self.process.exitcode
        self.process.close()
        self.results.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_whose_receiver_goes_to_a_child(method: str, backend: str) -> None:
    before = ends.descriptors()
    sender, receiver = tk.pair(multiprocessing.get_context(method), backends=[backend], timeout=30)
    with Started(method, receiving_child, receiver) as child:
        with sender:
            for seed in (1, 2):
                sender.send(model(seed))
            text = str(sender.agreement)
            assert f"{backend}: taken" in text
            assert child.results.poll(10)
            assert child.results.recv() == ([[], []], text)
    assert child.code == 0
    del child, sender, receiver
    left = [what for what in ends.leftovers(before) if "pipe" not in what]  # multiprocessing's own helpers have pipes
    assert left == []


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_whose_sender_goes_to_a_child(method: str, backend: str) -> None:
    sender, receiver = tk.pair(multiprocessing.get_context(method), backends=[backend], timeout=30)
    with Started(method, sending_child, sender) as child:
        sender.close()  # the parent's copy; the child's end lives on
        with receiver:
            assert load(receiver, 1)[0] == []
            assert load(receiver, 2)[0] == []
            assert child.results.poll(10)
            assert child.results.recv() == str(receiver.agreement)
    assert child.code == 0


def test_the_ends_of_a_pair_are_used_once() -> None:
    sender, receiver = tk.pair(timeout=2, wait=0.2)
    with pytest.raises(tk.PeerLostError):
        receiver.join()  # the other end's only copy went with this use
    with pytest.raises(tk.UsageError, match="given up"):
        sender.wait()
    receiver.close()
    receiver.close()
    sender.close()
    with pytest.raises(tk.ClosedError):
        receiver.join()
    sender, receiver = tk.pair()
    sender.abort()
    receiver.close()
    sender.close()
    for end in (sender.wait, receiver.join):
        with pytest.raises(tk.ClosedError):
            end()
    import pickle

    sender, receiver = tk.pair()
    with pytest.raises(RuntimeError):
        pickle.dumps(sender)
    sender.close()
    receiver.close()


def test_waiting_for_the_other_end_of_a_pair_can_be_repeated(backend: str) -> None:
    context = multiprocessing.get_context("forkserver")
    sender, receiver = tk.pair(context, backends=[backend], timeout=20)
    with Started("forkserver", late_child, receiver) as child:
        for _ in range(2):
            error, _ = caught(sender.send, model(), wait=0.2)
            assert isinstance(error, tk.DeadlineError)
        child.results.send("now")
        assert child.results.poll(10)
        assert child.results.recv() == 2
        child.results.send("now")
        with sender:
            sender.send(model(1))
            assert child.results.poll(10)
            assert child.results.recv() == []


def late_child(receiver: tk.Receiver, results: Connection) -> None:
    results.recv()
    expired = 0
    for _ in range(2):
        error, _ = caught(receiver.load_into, zeros(), wait=0.1)
        expired += isinstance(error, tk.DeadlineError)
    results.send(expired)
    results.recv()
    with receiver:
        results.send(load(receiver, 1)[0])


# -- channels of the user's own ---------------------------------------------------------------------------------------


class OverConnection:
    """A link over a `multiprocessing.Connection`, with its descriptor."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, data: bytes, timeout: float | None) -> None:
        self.connection.send_bytes(data)

    def recv(self, timeout: float | None) -> bytes:
        if not self.connection.poll(timeout):
            raise TimeoutError
        return self.connection.recv_bytes()

    def close(self) -> None:
        self.connection.close()

    def fileno(self) -> int:
        return self.connection.fileno()


class WithoutDescriptor(OverConnection):
    fileno = None  # type: ignore[assignment]


class OverQueues:
    """A link over two queues, as a control plane without descriptors would be."""

    def __init__(self, out: Any, into: Any) -> None:
        self.out, self.into = out, into
        self.closed = False

    def send(self, data: bytes, timeout: float | None) -> None:
        self.out.put(data, timeout=timeout)

    def recv(self, timeout: float | None) -> bytes:
        data = self.into.get(timeout=timeout)
        if data is None:
            self.into.put(None)
            raise EOFError("the other side closed")
        return bytes(data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.out.put(None)


def over_connection(talk: Talk, connection: Connection, kind: str) -> list[list[str]]:
    link: Any = OverConnection(connection) if kind == "descriptor" else WithoutDescriptor(connection)
    with tk.Receiver(link=link, timeout=20) as receiver:
        return [load(receiver, seed)[0] for seed in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["descriptor", "none"])
def test_a_connection_of_the_users(backend: str, kind: str) -> None:
    ours, theirs = multiprocessing.get_context("forkserver").Pipe()
    with Child(over_connection, theirs, kind) as child:
        theirs.close()
        link: Any = OverConnection(ours) if kind == "descriptor" else WithoutDescriptor(ours)
        with tk.Sender(links=[link], backends=[backend], chunk_bytes=5000, timeout=20) as sender:
            assert sender.address == ""
            for seed in (1, 2, 3):
                assert sender.send(model(seed)).backends == {0: backend}
        assert child.result() == [[], [], []]
    assert ours.closed


def test_a_connection_of_the_users_whose_other_end_dies(backend: str) -> None:
    ours, theirs = multiprocessing.get_context("forkserver").Pipe()
    die = ("transportkit.session.receiving:check_digest", "after", 5)
    with Child(over_connection, theirs, "descriptor", die=die) as child:
        theirs.close()
        link = OverConnection(ours)
        with tk.Sender(links=[link], backends=[backend], chunk_bytes=5000, slots=2, timeout=20) as sender:
            error, moment = caught(sender.send, model(1))
            assert isinstance(error, tk.PeerLostError)
            child.join()
            assert moment - child.died_at < PROMPT


def test_queues_between_threads(backend: str) -> None:
    forth: queue.Queue[bytes | None] = queue.Queue(8)
    back: queue.Queue[bytes | None] = queue.Queue(8)
    outcome: list[Any] = []

    def receive() -> None:
        try:
            with tk.Receiver(link=OverQueues(back, forth), timeout=10) as receiver:
                outcome.extend(load(receiver, seed)[0] for seed in (1, 2))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with tk.Sender(links=[OverQueues(forth, back)], backends=[backend], chunk_bytes=5000, timeout=10) as sender:
        for seed in (1, 2):
            sender.send(model(seed))
        thread.join(10)
    assert outcome == [[], []]


def over_queues(talk: Talk, out: Any, into: Any) -> list[str]:
    with tk.Receiver(link=OverQueues(out, into), timeout=10) as receiver:
        wrong, _ = load(receiver, 1)
        talk.say("loaded")
        error, _ = caught(receiver.load_into, zeros())
        assert isinstance(error, tk.PeerClosedError | tk.PeerLostError)
    return wrong


def test_queues_between_processes(backend: str) -> None:
    context = multiprocessing.get_context("forkserver")
    forth, back = context.Queue(), context.Queue()
    try:
        with Child(over_queues, back, forth) as child:
            with tk.Sender(links=[OverQueues(forth, back)], backends=[backend], timeout=10) as sender:
                sender.send(model(1))
                assert child.heard() == "loaded"
            assert child.result() == []
    finally:
        for used in (forth, back):
            used.close()
            used.join_thread()


@pytest.mark.parametrize("wrong", [object(), 7, type("Half", (), {"send": print, "recv": print})()])
def test_what_is_no_link(wrong: Any) -> None:
    before = ends.descriptors()
    with pytest.raises(tk.UsageError, match="a link needs"):
        tk.Sender(links=[wrong])
    with pytest.raises(tk.UsageError, match="a link needs"):
        tk.Receiver(link=wrong)
    with pytest.raises(tk.UsageError, match="at least one link"):
        tk.Sender(links=[])
    assert ends.leftovers(before) == []


def test_a_link_whose_other_end_says_nonsense_ends_the_session() -> None:
    ours, theirs = multiprocessing.Pipe()
    before = ends.descriptors()
    sender = tk.Sender(links=[OverConnection(ours)], timeout=2, wait=5)
    theirs.send_bytes(b"\x00nonsense")
    error, _ = caught(sender.send, model())
    assert isinstance(error, tk.ProtocolError)
    error, _ = caught(sender.send, model())
    assert isinstance(error, tk.ClosedError)
    sender.close()
    theirs.close()
    assert [what for what in ends.leftovers(before) if "pipe" not in what] == []


# -- several in one process -------------------------------------------------------------------------------------------


def many_receivers(talk: Talk, addresses: list[str], backend: str) -> list[list[str]]:
    receivers = [tk.connect(address, wait=20, backends=[backend]) for address in addresses]
    wrong = [load(receiver, seed)[0] for seed, receiver in enumerate(receivers)]
    wrong += [load(receiver, seed)[0] for seed, receiver in reversed(list(enumerate(receivers)))]
    for receiver in receivers:
        receiver.close()
    return wrong


def test_several_sessions_side_by_side(backend: str) -> None:
    with ends.short_folder() as folder:
        addresses = [f"unix:{folder}/{n}" for n in range(4)]
        senders = [tk.serve(address, wait=20, backends=[backend], chunk_bytes=3000) for address in addresses]
        with Child(many_receivers, addresses, backend) as child:
            failures: list[BaseException] = []

            def serve(seed: int, sender: tk.Sender) -> None:
                try:
                    with sender:
                        sender.send(model(seed))
                        sender.send(model(seed))
                        time.sleep(0.05)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=serve, args=entry) for entry in enumerate(senders)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert failures == []
            assert child.result() == [[]] * 8


def test_both_ends_in_one_process(backend: str) -> None:
    with ends.short_folder() as folder:
        address = f"unix:{folder}/s"
        outcome: list[Any] = []

        def receive() -> None:
            with tk.connect(address, wait=10) as receiver:
                outcome.append(load(receiver)[0])
                outcome.append(differing(list(receiver.receive()), model(2)))

        thread = threading.Thread(target=receive)
        thread.start()
        with tk.serve(address, wait=10, backends=[backend]) as sender:
            sender.send(model())
            sender.send(model(2))
        thread.join(10)
        assert outcome == [[], []]


def test_fifty_sessions_leave_nothing(backend: str) -> None:
    with ends.short_folder() as folder:
        before = ends.descriptors()
        tensors = {"a": torch.arange(100.0)}
        for number in range(50):
            address = f"unix:{folder}/{number % 3}"
            thread = threading.Thread(target=_take_one, args=(address,))
            thread.start()
            with tk.serve(address, wait=10, backends=[backend], chunk_bytes=64) as sender:
                sender.send(tensors)
            thread.join(10)
        assert ends.leftovers(before) == []
        assert list(folder.iterdir()) == []


def _take_one(address: str) -> None:
    with tk.connect(address, wait=10) as receiver:
        target = {"a": torch.zeros(100)}
        receiver.load_into(target)
        if differing(target, {"a": torch.arange(100.0)}):
            raise ChildError("wrong value")
