"""What fails on one side is known on the other, with its text, and the next update works; in real processes."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
import torch
from promptness import PROMPT
from session_ends import BACKENDS, Child, Remote, Talk, caught, differing, load, model, zeros

import transportkit as tk
from transportkit.backends.pickle import PickleExporter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transportkit.deadline import Deadline
    from transportkit.wire import Chunk

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def session(folder: Path, backend: str, **keywords: Any) -> Iterator[tuple[tk.Sender, Remote]]:
    """A sender here and a receiver in another process, with small chunks."""
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        keywords = {"backends": [backend], "chunk_bytes": 4096, "slots": 2, "wait": 20, "timeout": 20} | keywords
        with tk.serve(address, **keywords) as sender:
            yield sender, remote


def next_works(sender: tk.Sender, remote: Remote) -> None:
    remote.start(load)
    report = sender.send(model())
    wrong, update = remote.answer()
    assert wrong == []
    assert update.version == report.version


# -- the sender's side fails ------------------------------------------------------------------------------------------


def half_way(error: BaseException) -> Any:
    yield "a", torch.ones(5000)
    yield "b", torch.ones(5000)
    raise error


def failed_load(receiver: tk.Receiver, way: str = "load_into") -> tuple[tk.TransportKitError, int | None]:
    target = {"a": torch.zeros(5000), "b": torch.zeros(5000), "c": torch.zeros(5)}
    if way == "load_into":
        error, _ = caught(receiver.load_into, target)
    elif way == "apply":
        error, _ = caught(receiver.apply, lambda pairs: None)
    elif way == "receive":
        error, _ = caught(lambda: [None for _ in receiver.receive()])
    else:
        error, _ = caught(lambda: [None for _ in receiver.chunks()])
    return error, receiver.version


@pytest.mark.parametrize("way", ["load_into", "apply", "receive", "chunks"])
def test_a_source_that_raises_half_way(folder: Path, backend: str, way: str) -> None:
    with session(folder, backend) as (sender, remote):
        next_works(sender, remote)
        for raised in (ValueError("boom 42"), MemoryError("boom 42"), KeyError("boom 42")):
            remote.start(failed_load, way)
            error, _ = caught(sender.send, half_way(raised))
            assert isinstance(error, tk.SourceError)
            assert "boom 42" in str(error)
            theirs, version = remote.answer()
            assert isinstance(theirs, tk.PeerFailedError)
            assert theirs.code == "SourceError"
            assert "boom 42" in theirs.text
            torn = way in ("load_into", "apply")
            assert theirs.torn == (("target",) if torn else ())
            assert version is None if torn else version is not None
            next_works(sender, remote)
        remote.finish()


@pytest.mark.parametrize(
    ("pairs", "kind", "words"),
    [
        ([("a", torch.ones(5000)), ("a", torch.ones(2))], tk.DuplicateNameError, "twice"),
        ([("a", torch.ones(5000)), ("b", None)], tk.TensorError, "b"),
        ([("a", torch.ones(5000)), ("b", lambda: 1)], tk.TensorError, "b"),
        ([("a", torch.ones(5000)), ("b", torch.ones(3).numpy())], tk.TensorError, "b"),
        ([("a", torch.ones(5000)), ("b", torch.ones(3).to_sparse())], tk.UnsupportedTensorError, "sparse"),
        ([("a", torch.ones(5000)), ("b", torch.ones(3, device="meta"))], tk.UnsupportedTensorError, "meta"),
        ([("a", torch.ones(5000)), (7, torch.ones(3))], tk.TensorError, "7"),
        ([("a", torch.ones(5000)), ("", torch.ones(3))], tk.TensorError, "empty"),
        ([("a", torch.ones(5000)), torch.ones(3)], tk.SourceError, "pair"),
        ([("a", torch.ones(5000)), "ab"], tk.SourceError, "pair"),
    ],
)
def test_what_cannot_travel_is_named_in_send(
    folder: Path, backend: str, pairs: list[Any], kind: type[tk.TransportKitError], words: str
) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(failed_load, "receive")
        error, _ = caught(sender.send, iter(pairs))
        assert isinstance(error, kind), repr(error)
        assert words in str(error)
        theirs, _ = remote.answer()
        assert isinstance(theirs, tk.PeerFailedError)
        assert words in theirs.text
        if all(isinstance(pair, tuple) for pair in pairs) and kind is not tk.DuplicateNameError:
            # In a mapping all of this is found before anything moves: the receiver never hears of it.
            remote.start(load)
            error, _ = caught(sender.send, dict(pairs))
            assert isinstance(error, kind)
            sender.send(model())
            assert remote.answer()[0] == []
        else:
            next_works(sender, remote)
        remote.finish()


@pytest.mark.parametrize("source", [None, 7, "text", b"bytes", torch.ones(3), object()])
def test_what_is_no_source(folder: Path, source: Any) -> None:
    with session(folder, "shm") as (sender, remote):
        with pytest.raises(tk.UsageError, match="a source is"):
            sender.send(source)
        next_works(sender, remote)
        remote.finish()


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
@pytest.mark.parametrize("where", ["post", "progress", "manifest"])
def test_what_the_user_gave_to_send_fails(folder: Path, backend: str, where: str, kind: type[Exception]) -> None:
    def boom(*_: Any) -> Any:
        raise kind("boom 42")

    with session(folder, backend) as (sender, remote):
        remote.start(failed_load, "receive")
        if where == "post":
            error, _ = caught(sender.send, {"a": torch.ones(5000)}, post=boom)
            assert isinstance(error, tk.SourceError)
        elif where == "progress":
            error, _ = caught(sender.send, {"a": torch.ones(5000)}, progress=boom)
            assert isinstance(error, tk.CallbackError)
        else:
            error, _ = caught(sender.send, tk.Source([("a", "float32", (3,))], [("a", torch.ones(4))]))
            assert isinstance(error, tk.SourceError)
        theirs, _ = remote.answer()
        assert isinstance(theirs, tk.PeerFailedError)
        assert ("boom 42" in theirs.text) == (where != "manifest")
        next_works(sender, remote)
        remote.finish()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_send_ends_the_session(folder: Path, backend: str, kind: type[BaseException]) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(failed_load)
        with pytest.raises(kind):
            sender.send(half_way(kind("boom 42")))
        theirs, version = remote.answer()
        assert isinstance(theirs, tk.PeerFailedError)
        assert kind.__name__ in str(theirs)
        assert theirs.torn == ("target",)
        assert version is None
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.ClosedError)
        remote.finish()


def test_a_send_that_is_interrupted_between_a_header_and_its_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = PickleExporter.publish

    def interrupted_at_last(exporter: PickleExporter, slot: int, header: Chunk, deadline: Deadline) -> None:
        if header.seq == 3:
            raise KeyboardInterrupt("boom 42")
        publish(exporter, slot, header, deadline)

    with session(folder, "pickle") as (sender, remote):
        next_works(sender, remote)
        monkeypatch.setattr(PickleExporter, "publish", interrupted_at_last)
        remote.start(failed_load, "receive")
        with pytest.raises(KeyboardInterrupt):
            sender.send(model())
        theirs, _ = remote.answer()
        assert isinstance(theirs, tk.PeerFailedError)
        assert "boom 42" in theirs.text
        remote.finish()


def interrupted(receiver: tk.Receiver, kind: type[BaseException]) -> str:
    def function(pairs: list[tuple[str, torch.Tensor]]) -> None:
        raise kind("boom 42")

    try:
        receiver.apply(function)
    except BaseException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_receiver_ends_the_session(folder: Path, backend: str, kind: type[BaseException]) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(interrupted, kind)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerFailedError)
        assert kind.__name__ in str(error)
        assert remote.answer() == kind.__name__
        remote.finish()


# -- the receiver's side fails ----------------------------------------------------------------------------------------


def boom_applying(receiver: tk.Receiver, kind: type[Exception] = RuntimeError) -> Any:
    def function(pairs: list[tuple[str, torch.Tensor]]) -> None:
        if any(name == "weight" for name, _ in pairs):
            raise kind("boom 42")

    error, _ = caught(receiver.apply, function)
    return error, receiver.version


@pytest.mark.parametrize("kind", [RuntimeError, StopIteration, MemoryError])
def test_a_callback_that_raises(folder: Path, backend: str, kind: type[Exception]) -> None:
    with session(folder, backend) as (sender, remote):
        next_works(sender, remote)
        remote.start(boom_applying, kind)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "CallbackError"
        assert "boom 42" in error.text
        assert len(error.torn) == 1
        assert f"pid {remote.pid}" in error.torn[0]
        theirs, version = remote.answer()
        assert isinstance(theirs, tk.CallbackError)
        assert version is None
        next_works(sender, remote)
        remote.finish()


def boom_reporting(receiver: tk.Receiver) -> tk.TransportKitError:
    def progress(done: int, total: int | None) -> None:
        raise RuntimeError("boom 42")

    error, _ = caught(receiver.load_into, zeros(), progress=progress)
    return error


def test_a_progress_callback_that_raises_at_the_receiver(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(boom_reporting)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerFailedError)
        assert "boom 42" in error.text
        assert isinstance(remote.answer(), tk.CallbackError)
        next_works(sender, remote)
        remote.finish()


def leave_early(receiver: tk.Receiver, way: str, how: str) -> str:
    """A loop that ends early, and the session lives on."""
    if how == "break":
        for count, item in enumerate(receiver.receive() if way == "receive" else receiver.chunks()):
            del item
            if count == 2:
                break
    elif how == "raise":
        try:
            for count, item in enumerate(receiver.receive() if way == "receive" else receiver.chunks()):
                del item
                if count == 2:
                    raise RuntimeError("boom 42")
        except RuntimeError as error:
            return str(error)
    else:
        loop = receiver.receive() if way == "receive" else receiver.chunks()
        next(loop)
        loop.close()
    return ""


@pytest.mark.parametrize("way", ["receive", "chunks"])
@pytest.mark.parametrize("how", ["break", "raise", "close"])
def test_a_loop_that_is_left_early(folder: Path, backend: str, way: str, how: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(leave_early, way, how)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerFailedError)
        assert "left" in str(error)
        remote.answer()
        next_works(sender, remote)
        remote.finish()


def boom_within(talk: Talk, address: str, way: str, keywords: dict[str, Any]) -> None:
    with tk.connect(address, **keywords) as receiver:
        talk.say("in")
        if way == "before":
            raise RuntimeError("boom 42")
        for count, _ in enumerate(receiver.receive() if way == "receive" else receiver.chunks()):
            if count == 2:
                raise RuntimeError("boom 42")


@pytest.mark.parametrize("way", ["receive", "chunks", "before"])
def test_an_exception_through_the_with_block_travels_with_its_text(folder: Path, backend: str, way: str) -> None:
    address = f"unix:{folder}/s"
    with Child(boom_within, address, way, {"wait": 20}) as receiver:
        began = time.monotonic()
        with tk.serve(address, backends=[backend], chunk_bytes=4096, slots=2, wait=20) as sender:
            error, moment = caught(sender.send, model())
            assert isinstance(error, tk.PeerFailedError)
            assert "RuntimeError" in str(error)
            assert "boom 42" in str(error)
            assert moment - began < PROMPT
            later, _ = caught(sender.send, model())
            assert isinstance(later, tk.PeerError | tk.ClosedError)
        with pytest.raises(RuntimeError, match="boom 42"):
            receiver.result()


def boom_sending(address: str, backend: str, remote: Remote) -> None:
    with tk.serve(address, backends=[backend], wait=20) as sender:
        next_works(sender, remote)
        remote.start(failed_load)
        time.sleep(0.1)
        raise ZeroDivisionError("boom 42")


def test_an_exception_through_the_sender_travels_with_its_text(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with pytest.raises(ZeroDivisionError):
            boom_sending(address, backend, remote)
        error, version = remote.answer()
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "ZeroDivisionError"
        assert "boom 42" in error.text
        assert error.torn == ()
        assert version == 1
        remote.finish()


def test_a_sender_that_closes_in_order(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20) as sender:
            next_works(sender, remote)
        remote.start(failed_load)
        error, version = remote.answer()
        assert isinstance(error, tk.PeerClosedError)
        assert version == 1
        remote.finish()


def test_of_two_receivers_one_fails(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as one, Remote("receive", address) as two:
        with tk.serve(address, receivers=2, backends=[backend], chunk_bytes=4096, wait=20) as sender:
            one.start(boom_applying)
            two.start(failed_load, "receive")
            error, _ = caught(sender.send, model())
            assert isinstance(error, tk.PeerFailedError)
            assert str(one.pid) in error.peer
            assert all(str(two.pid) not in name for name in error.torn)
            one.answer()
            theirs, _ = two.answer()
            assert isinstance(theirs, tk.PeerFailedError)
            assert "boom 42" in theirs.text
            assert str(one.pid) in theirs.text
            one.start(load)
            two.start(load)
            sender.send(model())
            assert one.answer()[0] == []
            assert two.answer()[0] == []
            one.finish()
            two.finish()


def keep_leases(receiver: tk.Receiver) -> str:
    kept = []
    try:
        for lease in receiver.chunks():
            kept += [tensor for _, _, tensor in lease]
    except tk.LeaseError as error:
        return str(error)
    return ""


def hold_one_lease(receiver: tk.Receiver) -> tuple[bool, int, int]:
    """Keep one tensor of the first chunk across the whole update: its slot is withheld, its bytes stay."""
    kept = None
    for lease in receiver.chunks():
        for spec, _, tensor in lease:
            if kept is None and spec.name == "a":
                kept = tensor
        del tensor
    assert kept is not None
    right = bool((kept == 1).all())
    held = receiver.held
    del kept
    error, _ = caught(receiver.load_into, {"other": torch.zeros(1)}, wait=0.2)
    assert isinstance(error, tk.DeadlineError)
    return right, held, receiver.held


def test_leases_that_are_kept(folder: Path, backend: str) -> None:
    with session(folder, backend, slots=3) as (sender, remote):
        remote.start(keep_leases)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.PeerFailedError)
        assert error.code == "LeaseError"
        assert "clone" in remote.answer()
        next_works(sender, remote)
        remote.start(hold_one_lease)
        sender.send({"a": torch.ones(1000), "b": torch.zeros(10000)})
        assert remote.answer() == (True, 1, 0)
        next_works(sender, remote)
        remote.finish()


# -- waiting ----------------------------------------------------------------------------------------------------------


def impatient(receiver: tk.Receiver) -> tuple[float, str]:
    began = time.monotonic()
    error, moment = caught(receiver.load_into, zeros(), wait=0.3)
    assert isinstance(error, tk.DeadlineError)
    return moment - began, str(error)


def test_when_wait_expires_the_session_is_as_it_was(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        for _ in range(2):
            seconds, text = remote.start(impatient).answer()  # no update comes
            assert 0.25 < seconds < PROMPT
            assert "wait=" in text
            began = time.monotonic()
            error, moment = caught(sender.send, model(), wait=0.3)  # no receiver waits
            assert isinstance(error, tk.DeadlineError)
            assert "wait=" in str(error)
            assert 0.25 < moment - began < PROMPT
            next_works(sender, remote)  # the update that was taken back is not seen
        remote.finish()


def test_one_of_two_receivers_is_not_ready(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as one, Remote("receive", address) as two:
        with tk.serve(address, receivers=2, backends=[backend], wait=20) as sender:
            one.start(load)
            error, _ = caught(sender.send, model(), wait=0.5)
            assert isinstance(error, tk.DeadlineError)
            two.start(load)
            sender.send(model())
            assert one.answer()[0] == []
            assert two.answer()[0] == []
            one.finish()
            two.finish()


def test_receivers_that_do_not_all_come_stay(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    sender = tk.serve(address, receivers=2, backends=[backend], wait=0.5)
    with Remote("receive", address) as one, contextlib.closing(sender):
        one.start(load)
        error, _ = caught(sender.wait)
        assert isinstance(error, tk.DeadlineError)
        error, _ = caught(sender.send, model())
        assert isinstance(error, tk.DeadlineError)
        with Remote("receive", address) as two:
            two.start(load)
            sender.send(model(), wait=20)
            assert one.answer()[0] == []
            assert two.answer()[0] == []
            two.finish()
        one.finish()


@pytest.mark.parametrize("backend", ["shm"])
def test_a_slow_side_that_says_so_is_waited_for(folder: Path, backend: str) -> None:
    """Waiting for the other receivers, or for the next update, is not silence."""
    address = f"unix:{folder}/s"
    with Remote("receive", address, timeout=0.6) as one:
        sender = tk.serve(address, receivers=2, backends=[backend], timeout=0.6)
        with contextlib.closing(sender):
            thread = threading.Thread(target=sender.wait)
            thread.start()
            time.sleep(1.5)
            with Remote("receive", address, timeout=0.6) as two:
                thread.join(10)
                one.start(load)
                two.start(load)
                time.sleep(1.5)
                sender.send(model())
                assert one.answer()[0] == []
                assert two.answer()[0] == []
                two.finish()
            one.finish()


def quitter(talk: Talk, address: str) -> str:
    error, _ = caught(tk.connect, address, wait=0.5)
    return type(error).__name__


@pytest.mark.parametrize("entered", [False, True])
def test_a_receiver_that_gave_up_before_the_sender_was_ready_takes_no_place(folder: Path, entered: bool) -> None:
    address = f"unix:{folder}/s"
    sender = tk.serve(address, wait=20)
    with contextlib.closing(sender):
        thread = threading.Thread(target=sender.wait)
        with Child(quitter, address) as early:
            if not entered:
                assert early.result() == "DeadlineError"
            else:
                early.signal(9)
                early.join()
        with Remote("receive", address) as remote:
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
            next_works(sender, remote)
            remote.finish()


def test_a_surplus_receiver_is_refused(folder: Path) -> None:
    with session(folder, "shm") as (sender, remote):
        error, _ = caught(tk.connect, sender.address, wait=5)
        assert isinstance(error, tk.PeerFailedError)
        assert "places" in str(error)
        next_works(sender, remote)
        assert sender.failures == 1
        remote.finish()


def torn_then_whole(receiver: tk.Receiver) -> list[tuple[Any, ...]]:
    target = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
    seen: list[tuple[Any, ...]] = []
    receiver.load_into(target)
    seen.append((receiver.version, target["a"][0].item()))
    error, _ = caught(receiver.load_into, target)
    seen.append((receiver.version, error.torn, target["a"][0].item()))
    receiver.load_into(target)
    seen.append((receiver.version, target["a"][0].item(), target["b"][-1].item()))
    return seen


def test_a_torn_target_has_no_version_until_a_whole_update_lands(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        remote.start(torn_then_whole)
        sender.send({"a": torch.full((5000,), 1.0), "b": torch.full((5000,), 1.0)}, version=10)

        def source() -> Any:
            yield "a", torch.full((5000,), 2.0)
            raise ValueError("boom 42")

        manifest = [("a", torch.float32, (5000,)), ("b", torch.float32, (5000,))]
        error, _ = caught(sender.send, tk.Source(manifest, source()), version=11)
        assert isinstance(error, tk.SourceError)
        sender.send({"a": torch.full((5000,), 3.0), "b": torch.full((5000,), 3.0)}, version=12)
        first, second, third = remote.answer()
        assert first == (10, 1.0)
        assert second == (None, ("target",), 2.0)
        assert third == (12, 3.0, 3.0)
        remote.finish()


def test_the_source_may_change_after_send(folder: Path, backend: str) -> None:
    with session(folder, backend) as (sender, remote):
        tensors = model()
        for seed in (1, 2, 3):
            for name, tensor in model(seed).items():
                tensors[name].copy_(tensor)
            remote.start(load, seed)
            sender.send(tensors)
            tensors["weight"].zero_()
            assert remote.answer()[0] == []
        assert differing(model(3), tensors) == ["weight"]
        remote.finish()
