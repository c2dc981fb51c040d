"""Targets and sources whose memory is not what it seems: shared, replaced, made anew, freed; never wrong bytes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mailbox_ends import address_in
from torch import Tensor, nn

import transportkit as tk
from transportkit.testing import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

Duo = Any


@pytest.fixture(params=["shm", "pickle"])
def duo(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Runs a sender's and a receiver's part against each other; returns what each returned or raised."""

    def run(send: Callable[[tk.Sender], Any], receive: Callable[[tk.Receiver], Any], **options: Any) -> tuple[Any, Any]:
        options = {"backends": (request.param,), "timeout": 10, "chunk_bytes": 4096} | options
        results: list[Any] = [None, None]
        sender = tk.serve(f"unix:{tmp_path}/link", **options)

        def guarded(index: int, make: Callable[[], Any], part: Callable[[Any], Any]) -> None:
            try:
                with make() as end:
                    results[index] = part(end)
            except BaseException as error:
                results[index] = error

        other = threading.Thread(target=guarded, args=(1, lambda: tk.connect(sender.address, **options), receive))
        other.start()
        guarded(0, lambda: sender, send)
        other.join()
        return results[0], results[1]

    return run


def twice(source: Any) -> Callable[[tk.Sender], Any]:
    return lambda sender: [sender.send(source), sender.send(source)]


class Scaled(nn.Linear):
    """Keeps a number in its extra state, as quantised layers do."""

    scale = 0.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = float(state)


def test_extra_state_that_a_module_makes_anew_is_refused_as_a_target(duo: Duo) -> None:
    source, target = Scaled(2, 2), Scaled(2, 2)
    source.scale = 7.0
    sent, taken = duo(lambda s: s.send(source), lambda r: r.load_into(target))
    assert isinstance(taken, tk.TargetError)
    assert "_extra_state" in str(taken)
    assert isinstance(sent, tk.PeerFailedError)


def test_a_state_dict_of_copies_is_refused_as_a_target(duo: Duo) -> None:
    target = nn.Linear(2, 2)
    target.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({k: v.clone() for k, v in state.items()})
    )
    _, taken = duo(lambda s: s.send(nn.Linear(2, 2)), lambda r: r.load_into(target))
    assert isinstance(taken, tk.TargetError)
    assert "makes this tensor anew" in str(taken)


def test_a_name_that_is_untied_between_updates_is_missed(duo: Duo) -> None:
    weight = torch.zeros(4)
    target = {"w": weight, "w2": weight}

    def receive(receiver: tk.Receiver) -> None:
        receiver.load_into(target)
        target["w2"] = weight.clone()
        receiver.load_into(target)

    _, taken = duo(twice({"w": torch.ones(4)}), receive)
    assert isinstance(taken, tk.TargetError)
    assert taken.tensor == "w2"


def overlapping(memory: Tensor) -> dict[str, Tensor]:
    return {"a": memory[:6], "b": memory[4:]}


def conjugate(memory: Tensor) -> dict[str, Tensor]:
    return {"a": memory, "b": memory.conj()}


BASE = torch.arange(10.0)
TIED, OTHER = torch.arange(4.0), torch.arange(4.0) + 9


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"a": TIED, "b": TIED, "c": OTHER}, lambda x, y: {"a": x, "b": y, "c": y}),
        ({"a": TIED, "b": OTHER}, lambda x, y: {"a": x, "b": x}),
        ({"a": BASE[:6], "b": BASE[4:] + 1}, lambda x, y: overlapping(torch.zeros(10))),
        (
            {"a": TIED.to(torch.complex64), "b": TIED.to(torch.complex64)},
            lambda x, y: conjugate(torch.zeros(4, dtype=torch.complex64)),
        ),
    ],
    ids=["tied and apart", "one memory", "overlap", "conjugate"],
)
def test_targets_that_would_overwrite_each_other_are_refused(
    duo: Duo, source: dict[str, Tensor], target: Callable[[Tensor, Tensor], dict[str, Tensor]]
) -> None:
    tensors = target(torch.zeros(4), torch.zeros(4))
    _, taken = duo(lambda s: s.send(source), lambda r: r.load_into(tensors))
    assert isinstance(taken, tk.TargetError)
    assert "shares memory" in str(taken)
    assert not any(tensor.abs().sum() for tensor in tensors.values()), "nothing was written"


def test_a_target_that_gets_other_memory_while_it_waits_is_written_where_it_is_now(duo: Duo) -> None:
    target = nn.Linear(300, 300)
    source = nn.Linear(300, 300)
    waiting = threading.Event()

    def send(sender: tk.Sender) -> None:
        sender.send(source)
        waiting.wait(10)
        time.sleep(0.2)
        for parameter in target.parameters():
            parameter.data = parameter.data.clone()
        sender.send(source)

    def receive(receiver: tk.Receiver) -> None:
        receiver.load_into(target)
        with torch.no_grad():
            target.weight.zero_()
        waiting.set()
        receiver.load_into(target)

    assert duo(send, receive) == (None, None)
    assert torch.equal(target.weight, source.weight)


def test_a_source_that_gets_other_memory_while_send_waits_is_sent_as_it_was(duo: Duo) -> None:
    source = {"w": torch.ones(100_000)}
    got: list[dict[str, Tensor]] = []

    def swap() -> None:
        time.sleep(0.3)
        source["w"].data = torch.full((100_000,), 2.0)

    def send(sender: tk.Sender) -> None:
        thread = threading.Thread(target=swap)
        thread.start()
        sender.send(source)
        thread.join()

    def receive(receiver: tk.Receiver) -> None:
        time.sleep(0.6)
        got.append(dict(receiver.receive()))

    assert duo(send, receive) == (None, None)
    assert bool((got[0]["w"] == 1).all())


def test_storage_that_shrank_at_the_same_address_is_noticed(duo: Duo) -> None:
    weight = torch.zeros(1000)
    first = weight.untyped_storage().data_ptr()

    def receive(receiver: tk.Receiver) -> None:
        receiver.load_into({"w": weight})
        weight.untyped_storage().resize_(16)
        receiver.load_into({"w": weight})

    _, taken = duo(twice({"w": torch.ones(1000)}), receive)
    assert isinstance(taken, tk.TargetError), f"{taken!r}; the storage was at {first}"


def test_received_tensors_may_be_written_outside_of_inference_mode(duo: Duo) -> None:
    got: dict[str, Tensor] = {}

    def receive(receiver: tk.Receiver) -> None:
        with torch.inference_mode():
            got.update(receiver.receive())

    assert duo(lambda s: s.send({"w": torch.ones(3)}), receive)[1] is None
    got["w"].add_(1)
    assert got["w"].tolist() == [2, 2, 2]


def test_a_default_device_without_memory_does_not_reach_our_own_tensors(duo: Duo) -> None:
    source, target = {"w": torch.ones(3000)}, {"w": torch.zeros(3000)}

    def elsewhere(part: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(end: Any) -> Any:
            with torch.device("meta"):
                return part(end)

        return run

    sent, taken = duo(elsewhere(lambda s: s.send(source)), elsewhere(lambda r: r.load_into(target)))
    assert (sent.version, taken.version) == (1, 1)
    assert bool((target["w"] == 1).all())


# -- texts and errors that are not as expected ------------------------------------------------------------------------


def test_text_that_cannot_be_encoded_still_reaches_the_peer(duo: Duo) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3)
        raise RuntimeError("cannot read 'bad\udcff.bin'")

    def send(sender: tk.Sender) -> Any:
        with pytest.raises(tk.SourceError):
            sender.send(source())
        return sender.send({"a": torch.ones(3)}).version

    def receive(receiver: tk.Receiver) -> Any:
        with pytest.raises(tk.PeerFailedError, match=r"bad\\udcff"):
            list(receiver.receive())
        return len(list(receiver.receive()))

    assert duo(send, receive) == (1, 1)


def test_an_exception_with_such_text_passes_through_with_unchanged(duo: Duo) -> None:
    def receive(receiver: tk.Receiver) -> None:
        raise ValueError("bad \udcff")

    sent, taken = duo(lambda s: s.send({"a": torch.ones(3)}), receive)
    assert type(taken) is ValueError
    assert isinstance(sent, tk.PeerError)


def test_an_endless_text_is_cut(duo: Duo) -> None:
    def fail(pairs: list[tuple[str, Tensor]]) -> None:
        raise ValueError("x" * 50_000_000)

    sent, taken = duo(lambda s: s.send({"a": torch.ones(3)}), lambda r: r.apply(fail))
    assert isinstance(taken, tk.CallbackError)
    assert isinstance(sent, tk.PeerFailedError)
    assert len(str(sent)) < 40_000


@pytest.mark.parametrize("error", [tk.PeerLostError("upstream"), tk.DeadlineError("upstream"), tk.ClosedError("x")])
def test_an_error_of_ours_out_of_a_source_is_the_sources(duo: Duo, error: Exception) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3)
        raise error

    def send(sender: tk.Sender) -> Any:
        with pytest.raises(tk.SourceError) as caught:
            sender.send(source())
        assert caught.value.__cause__ is error
        return sender.send({"a": torch.ones(3)}).version

    def receive(receiver: tk.Receiver) -> Any:
        with pytest.raises(tk.PeerFailedError):
            list(receiver.receive())
        return len(list(receiver.receive()))

    assert duo(send, receive) == (1, 1)


def test_a_generator_is_closed_when_its_update_fails(duo: Duo) -> None:
    closed: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        try:
            for index in range(100):
                yield f"w{index}", torch.ones(1000)
        finally:
            closed.append("yes")

    def send(sender: tk.Sender) -> list[str]:
        try:
            sender.send(source())
        except tk.PeerFailedError:
            return list(closed)
        return []

    def fail(pairs: list[tuple[str, Tensor]]) -> None:
        raise ValueError("no")

    assert duo(send, lambda r: r.apply(fail))[0] == ["yes"]


@pytest.mark.parametrize(
    "manifest",
    [[(5, "float32", (3,))], [("\ud800", "float32", (3,))], [("a", "float32", (3.5,))], [("a", "float33", (3,))], [3]],
)
def test_a_bad_manifest_is_refused_where_the_source_is_made(manifest: list[Any]) -> None:
    with pytest.raises((tk.TensorError, tk.UsageError)):
        tk.Source(manifest, [])


def test_a_manifest_may_say_its_dtypes_and_shapes_in_torchs_own_words(duo: Duo) -> None:
    source = tk.Source([("a", torch.bfloat16, torch.Size([3])), ("b", "int8", [2])], iter([]))
    assert [(s.dtype, s.shape) for s in source.manifest] == [("bfloat16", (3,)), ("int8", (2,))]
    whole = tk.Source(source.manifest, {"a": torch.ones(3).bfloat16(), "b": torch.ones(2).to(torch.int8)}.items())
    got: dict[str, Tensor] = {}
    assert duo(lambda s: s.send(whole).version, lambda r: got.update(r.receive())) == (1, None)
    assert got["a"].dtype is torch.bfloat16


@pytest.mark.parametrize("keywords", [{"wait": "x"}, {"wait": float("nan")}, {"wait": -1}, {"progress": 5}])
def test_keywords_of_a_single_call_are_checked_before_anything_is_written(duo: Duo, keywords: dict[str, Any]) -> None:
    target = {"a": torch.zeros(3)}

    def receive(receiver: tk.Receiver) -> Any:
        for call in (receiver.receive, receiver.chunks, lambda **k: receiver.load_into(target, **k)):
            with pytest.raises(tk.UsageError):
                call(**keywords)
        return receiver.load_into(target).version

    def send(sender: tk.Sender) -> Any:
        with pytest.raises(tk.UsageError):
            sender.send({"a": torch.ones(3)}, **keywords)
        return sender.send({"a": torch.ones(3)}).version

    assert duo(send, receive) == (1, 1)


def test_close_within_a_call_is_a_wrong_use(duo: Duo) -> None:
    def send(sender: tk.Sender) -> Any:
        def source() -> Iterator[tuple[str, Tensor]]:
            with pytest.raises(tk.UsageError, match="within send"):
                sender.close()
            yield "a", torch.ones(3)

        return sender.send(source()).version

    assert duo(send, lambda r: len(list(r.receive()))) == (1, 1)


@pytest.mark.parametrize("device", ["meta", "nonsense", 3.5])
def test_a_device_without_memory_is_refused_at_once(device: Any, tmp_path: Path) -> None:
    with pytest.raises(tk.UsageError, match="device"):
        tk.serve(f"unix:{tmp_path}/link", device=device)


@pytest.mark.parametrize("address", [None, b"unix:x", 5])
def test_an_address_that_is_no_text_is_refused(address: Any) -> None:
    for end in (tk.serve, tk.connect):
        with pytest.raises(tk.AddressError, match="address"):
            end(address)


def test_a_lease_that_is_in_use_goes_on_after_a_release_that_failed(duo: Duo) -> None:
    def receive(receiver: tk.Receiver) -> Any:
        for lease in receiver.chunks():
            (entry,) = list(lease)
            with pytest.raises(tk.LeaseError):
                lease.release()
            assert bool((entry[2] == 1).all())
            (again,) = list(lease)
            assert bool((again[2] == 1).all())
            del entry
            with pytest.raises(tk.LeaseError):
                lease.release()
            del again
            lease.release()
        return receiver.held

    assert duo(lambda s: s.send({"a": torch.ones(30)}).version, receive) == (1, 0)


@pytest.mark.parametrize("way", ["apply", "receive"])
def test_without_memory_a_tensor_is_named(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = 5000

    def exhausted(original: Any) -> Any:
        def make(*args: Any, **keywords: Any) -> torch.Tensor:
            made: torch.Tensor = original(*args, **keywords)
            if made.nbytes >= large:
                raise RuntimeError("can't allocate memory")
            return made

        return make

    weight = torch.ones(large, dtype=torch.uint8)
    address = address_in(tmp_path)
    connecting = Call(tk.connect, address, wait=20, chunk_bytes=1000)
    with tk.serve(address, wait=20, chunk_bytes=1000) as sender, connecting.result(20) as receiver:
        sending = Call(sender.send, {"b": torch.ones(3), "weight": weight, "tied": weight})
        with monkeypatch.context() as patch:
            if way == "apply":
                patch.setattr(torch, "empty", exhausted(torch.empty))
            else:
                patch.setattr(torch.Tensor, "clone", exhausted(torch.Tensor.clone))
            with pytest.raises(tk.TensorError, match=r"no memory .*'(weight|tied)'") as caught:
                receiver.apply(len) if way == "apply" else list(receiver.receive())
        assert caught.value.tensor == ("weight" if way == "apply" else "tied")
        assert isinstance(sending.error(20), tk.PeerFailedError)
        sending = Call(sender.send, {"weight": weight})
        assert [name for name, _ in receiver.receive()] == ["weight"]
        sending.result(20)
