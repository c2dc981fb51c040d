"""What may be sent, in which ways it is taken, and what both sides are told of it; between two real processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import session_ends as ends
import torch
from session_ends import BACKENDS, Remote, caught, differing, load, model, raw, zeros
from torch import nn

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    with ends.short_folder() as made:
        yield made


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Tied(nn.Module):
    """A small language model: tied embedding and head, a persistent buffer, a scalar, a frozen bfloat16 part."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 16)
        self.mixer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.norm = nn.BatchNorm1d(16)
        self.low = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5 + seed))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.mixer(self.embedding(tokens)) * self.scale
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        hidden = hidden + self.low(hidden.to(torch.bfloat16)).float()
        return self.head(hidden)


def outputs(module: nn.Module) -> bytes:
    module.eval()
    with torch.no_grad():
        return raw(module(torch.arange(24).view(2, 12)))


def live(receiver: tk.Receiver, seed: int) -> tuple[bytes, bytes, bool, tuple[str, ...]]:
    module = Tied(seed)
    before = outputs(module)
    update = receiver.load_into(module)
    assert update.tensors == len(module.state_dict())
    return before, outputs(module), module.head.weight is module.embedding.weight, update.missing


def test_a_module_into_a_live_module(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    module = Tied(seed=1)
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20, chunk_bytes=1000) as sender:
            remote.start(live, 2)
            report = sender.send(module, version=17)
            before, after, tied, missing = remote.answer()
            remote.finish()
    assert before != outputs(module)
    assert after == outputs(module)
    assert tied
    assert missing == ()
    assert report.version == 17
    assert report.backends == {0: backend}
    assert report.chunks[0] > 5
    state = module.state_dict()
    assert report.tensors == len(state)
    assert report.nbytes == sum(t.nbytes for name, t in state.items() if name != "head.weight")  # tied: once


def names_and_values(receiver: tk.Receiver, way: str) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    got: list[tuple[str, torch.Tensor]] = []
    if way == "receive":
        got = list(receiver.receive())
    elif way == "apply":
        receiver.apply(lambda pairs: got.extend((name, tensor.clone()) for name, tensor in pairs))
    else:
        parts: dict[str, list[torch.Tensor]] = {}
        specs: dict[str, tk.TensorSpec] = {}
        for lease in receiver.chunks():
            for spec, offset, tensor in lease:
                part = torch.frombuffer(bytearray(raw(tensor)) or bytearray(1), dtype=torch.uint8)[: len(raw(tensor))]
                assert offset == sum(len(p) for p in parts.setdefault(spec.name, []))
                parts[spec.name].append(part)
                specs[spec.name] = spec
            tensor = None
        for name, spec in specs.items():
            whole = torch.cat(parts[name]) if parts[name] else torch.empty(0, dtype=torch.uint8)
            got.append((name, whole.view(getattr(torch, spec.dtype)).view(spec.shape)))
    return [(name, str(t.dtype), tuple(t.shape), raw(t)) for name, t in got]


def expected(tensors: Any) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, str(t.dtype), tuple(t.shape), raw(t)) for name, t in dict(tensors).items()]


@pytest.mark.parametrize("way", ["receive", "apply", "chunks"])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 640, 4096, 1 << 24])
def test_the_ways_of_taking_an_update(folder: Path, backend: str, way: str, chunk_bytes: int) -> None:
    address = f"unix:{folder}/s"
    tensors = {name: t for name, t in model().items() if chunk_bytes > 100 or t.nbytes < 400}
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20, chunk_bytes=chunk_bytes) as sender:
            for source in (tensors, iter(tensors.items())):
                remote.start(names_and_values, way)
                sender.send(source)
                assert remote.answer() == expected(tensors)
            remote.finish()


def sources(kind: str) -> Any:
    pairs = [(f"t{n}", torch.arange(n, n + 5 * n + 1, dtype=torch.float32)) for n in range(20)]
    match kind:
        case "mapping":
            return dict(pairs)
        case "generator":
            return (pair for pair in pairs)
        case "list":
            return pairs
        case "Source":
            return tk.Source([(name, t.dtype, t.shape) for name, t in pairs], iter(pairs))
        case _:
            module = nn.Module()
            for name, tensor in pairs:
                module.register_buffer(name, tensor)
            return module


def sourced(receiver: tk.Receiver) -> tuple[list[str], tuple[int, int, bool]]:
    target = {name: torch.zeros_like(t) for name, t in sources("list")}
    known: list[Any] = []
    update = receiver.load_into(target, progress=lambda done, total: known.append((done, total)))
    assert known[-1][0] == update.nbytes
    return differing(target, sources("list")), (update.tensors, update.nbytes, known[-1][1] is not None)


@pytest.mark.parametrize("kind", ["mapping", "module", "Source", "generator", "list"])
def test_every_kind_of_source(folder: Path, backend: str, kind: str) -> None:
    address = f"unix:{folder}/s"
    told: list[tuple[int, int | None]] = []
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20, chunk_bytes=512) as sender:
            for _ in range(3):  # the plan is known the second time
                told.clear()
                remote.start(sourced)
                report = sender.send(sources(kind), progress=lambda *numbers: told.append(numbers))
                wrong, (tensors, nbytes, total_known) = remote.answer()
                assert wrong == []
                assert (
                    (report.tensors, report.nbytes)
                    == (tensors, nbytes)
                    == (20, sum(t.nbytes for _, t in sources("list")))
                )
                assert total_known == (kind in ("mapping", "module", "Source"))
                assert [done for done, _ in told] == sorted({done for done, _ in told})
                assert told[0][0] == 0
                assert told[-1] == (nbytes, nbytes if total_known else None)
            remote.finish()


def halved(receiver: tk.Receiver) -> list[str]:
    target = {name: torch.zeros(t.numel(), dtype=torch.float16) for name, t in sources("list")}
    receiver.load_into(target)
    return differing(target, {name: t.to(torch.float16) for name, t in sources("list")})


@pytest.mark.parametrize("kind", ["mapping", "module", "generator"])
def test_post_changes_what_is_sent(folder: Path, backend: str, kind: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20) as sender:
            remote.start(halved)
            sender.send(sources(kind), post=lambda pair: pair[1].to(torch.float16))
            assert remote.answer() == []
            # A Source's manifest states what `post` returns.
            pairs = sources("list")
            remote.start(halved)
            sender.send(
                tk.Source([(name, "float16", t.shape) for name, t in pairs], pairs),
                post=lambda pair: pair[1].to(torch.float16),
            )
            assert remote.answer() == []
            remote.finish()


def versions(receiver: tk.Receiver) -> tuple[int, int | None, dict[str, str], str, bool]:
    update = receiver.load_into(zeros())
    return update.version, receiver.version, dict(update.metadata), update.backend, update.seconds > 0


def test_versions_and_metadata(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    metadata = {"format": "pt", "a key": "ein Wert: äöü", "": ""}
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20) as sender:
            for given, due in [(None, 1), (None, 2), (17, 17), (None, 18), (3, 3), (0, 0), (2**63 - 1, 2**63 - 1)]:
                remote.start(versions)
                assert sender.send(model(), version=given, metadata=metadata).version == due
                assert remote.answer() == (due, due, metadata, backend, True)
            remote.finish()
            for wrong in (-1, 2**63, 1.0, True, "1"):
                with pytest.raises(tk.UsageError, match="version"):
                    sender.send(model(), version=wrong)  # type: ignore[arg-type]
            with pytest.raises(tk.UsageError, match="metadata"):
                sender.send(model(), metadata={"n": 1})  # type: ignore[dict-item]


def lenient(receiver: tk.Receiver, strict: bool, cast: bool) -> Any:
    target = {
        "same": torch.zeros(4),
        "cast": torch.zeros(4, dtype=torch.float64),
        "only here": torch.full((2,), 9.0),
    }
    error = None
    update = None
    try:
        update = receiver.load_into(target, strict=strict, cast=cast)
    except tk.TransportKitError as raised:
        error = ends._bare(raised)
    values = {name: t.tolist() for name, t in target.items()}
    return error, update and (update.skipped, update.missing, update.cast), values


@pytest.mark.parametrize("streamed", [False, True])
def test_strict_and_cast(folder: Path, backend: str, streamed: bool) -> None:
    address = f"unix:{folder}/s"
    tensors = {"same": torch.ones(4), "cast": torch.full((4,), 2.5), "only there": torch.ones(3)}
    nothing = {"same": [0.0] * 4, "cast": [0.0] * 4, "only here": [9.0] * 2}
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20) as sender:

            def send() -> tk.Report:
                return sender.send(iter(tensors.items()) if streamed else tensors)

            remote.start(lenient, True, True)
            error, _ = caught(send)
            assert isinstance(error, tk.PeerFailedError)
            assert error.code == "TargetError"
            assert "only there" in error.text
            assert error.torn == ()  # all three came in one chunk, refused before any of it was written
            theirs, _, values = remote.answer()
            assert isinstance(theirs, tk.TargetError)
            assert theirs.tensor == "only there"
            if not streamed:
                assert values == nothing

            remote.start(lenient, False, False)
            error, _ = caught(send)
            assert "cast=True" in str(error)
            theirs, _, values = remote.answer()
            assert isinstance(theirs, tk.TargetError)
            assert theirs.tensor == "cast"
            if not streamed:
                assert values == nothing

            remote.start(lenient, False, True)
            send()
            theirs, reports, values = remote.answer()
            assert theirs is None
            assert reports == (("only there",), ("only here",), ("cast",))
            assert values == {"same": [1.0] * 4, "cast": [2.5] * 4, "only here": [9.0] * 2}
            remote.finish()


WRONG_TARGETS: dict[str, Any] = {
    "shape": lambda: {"a": torch.zeros(3, 2), "b": torch.zeros(3)},
    "dtype": lambda: {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(3)},
    "lacks": lambda: {"b": torch.zeros(3)},
    "more": lambda: {"a": torch.zeros(2, 3), "b": torch.zeros(3), "c": torch.zeros(1)},
}


def wrong_targets(receiver: tk.Receiver) -> list[tuple[str, str, bool]]:
    outcomes = []
    for name, make in WRONG_TARGETS.items():
        target = make()
        error, _ = caught(receiver.load_into, target)
        assert isinstance(error, tk.TargetError), error
        outcomes.append((name, error.tensor, any(bool(t.any()) for t in target.values())))
    return outcomes


def test_a_target_that_does_not_suit_is_left_alone(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20) as sender:
            remote.start(wrong_targets)
            for _ in range(4):
                error, _ = caught(sender.send, {"b": torch.ones(3), "a": torch.ones(2, 3)})
                assert isinstance(error, tk.PeerFailedError)
                assert error.code == "TargetError"
                assert error.torn == ()
            assert remote.answer() == [
                ("shape", "a", False),
                ("dtype", "a", False),
                ("lacks", "a", False),
                ("more", "c", False),
            ]
            remote.start(load)
            sender.send(model())
            wrong, _ = remote.answer()
            assert wrong == []
            remote.finish()


# -- cases ------------------------------------------------------------------------------------------------------------

TWO_BYTES = (torch.bfloat16, torch.float16)
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)

CASES: dict[str, Any] = {
    "scalars": lambda: {"a": torch.tensor(1.5), "b": torch.ones(2, 2), "c": torch.tensor(3, dtype=torch.int16)},
    "odd bytes": lambda: {
        "a": torch.randn(3).half(),
        "b": torch.randn(2),
        "c": torch.ones(1, dtype=torch.uint8),
        "d": torch.randn(1, dtype=torch.float64),
        "e": torch.randn(1, dtype=torch.complex128),
        "f": torch.tensor([True, False, True]),
        "g": torch.randn(1).bfloat16(),
    },
    "strided": lambda: {
        "t": torch.arange(12.0).view(3, 4).t(),
        "step": torch.arange(12.0)[::2],
        "qkv": torch.arange(36.0).view(6, 6)[2:4],
        "columns": torch.arange(36.0).view(6, 6)[:, 1:3],
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
        "flipped": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "conj": torch.randn(4, 3, dtype=torch.complex64).conj().t(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    },
    "empty": lambda: {
        "full": torch.ones(3),
        "e1": torch.empty(0),
        "full2": torch.ones(2, dtype=torch.int8),
        "e2": torch.empty(0, 3),
        "e3": torch.empty(3, 0, dtype=torch.bfloat16),
        "last": torch.ones(5),
    },
    "only empty": lambda: {"e": torch.empty(0), "f": torch.empty(2, 0, 2)},
    "nothing": dict,
    "larger than a chunk": lambda: {
        **{f"s{n}": torch.randn(10) for n in range(3)},
        "embedding": torch.randn(int(3.2 * (1 << 18))),
        **{f"u{n}": torch.randn(10) for n in range(3)},
    },
    "every bit pattern": lambda: (
        {
            str(dtype): torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(dtype)
            for dtype in (torch.bfloat16, torch.float16)
        }
        | {
            str(dtype): torch.arange(256, dtype=torch.uint8).view(dtype)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
        }
    ),
    "names": lambda: {
        "ä/ü": torch.ones(1),
        "a.b.c": torch.ones(2),
        " ": torch.ones(3),
        "x" * 5000: torch.ones(4),
        "\n": torch.ones(1),
    },
}


def writable(receiver: tk.Receiver, name: str) -> list[str]:
    """Receive, compare, and work in place on every tensor."""
    wrong = []
    torch.manual_seed(3)
    wanted = CASES[name]()
    got = list(receiver.receive())
    if [name for name, _ in got] != list(wanted):
        return ["order"]
    wrong = differing(got, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, tensor in got:
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.int16):
                tensor.add_(1)
            elif tensor.numel():
                tensor.view(torch.uint8).fill_(1)
    return wrong


@pytest.mark.parametrize("chunk_bytes", [65, 1 << 20])
def test_values_that_others_got_wrong(folder: Path, backend: str, chunk_bytes: int) -> None:
    address = f"unix:{folder}/s"
    with Remote("receive", address) as remote:
        with tk.serve(address, backends=[backend], wait=20, chunk_bytes=chunk_bytes) as sender:
            for name, make in CASES.items():
                if chunk_bytes < 100 and name in ("larger than a chunk", "every bit pattern"):
                    continue
                torch.manual_seed(3)
                tensors = make()
                shared = {key: tensor.is_shared() for key, tensor in tensors.items()}
                before = {key: raw(tensor) for key, tensor in tensors.items()}
                for source in (tensors, iter(tensors.items())):
                    remote.start(writable, name)
                    report = sender.send(source)
                    assert remote.answer() == [], name
                    assert report.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
                # The caller's own are neither changed nor moved.
                assert {key: raw(tensor) for key, tensor in tensors.items()} == before
                assert {key: tensor.is_shared() for key, tensor in tensors.items()} == shared
            remote.finish()


def slow(receiver: tk.Receiver) -> bool:
    """Keep what the first of three chunks brought to the very end, while being slow."""
    first: list[tuple[str, torch.Tensor]] = []
    for name, tensor in receiver.receive():
        if not first:
            first.append((name, tensor))
            import time

            time.sleep(0.3)
    return differing(first, {"a": torch.full((1000,), 1.0)}) == []


def test_two_receivers_keep_what_the_first_chunk_brought(folder: Path, backend: str) -> None:
    address = f"unix:{folder}/s"
    tensors = {name: torch.full((1000,), float(n)) for n, name in enumerate("abc", 1)}
    with Remote("receive", address) as one, Remote("receive", address) as two:
        with tk.serve(address, receivers=2, backends=[backend], wait=20, chunk_bytes=4000, slots=1) as sender:
            one.start(slow)
            two.start(names_and_values, "receive")
            report = sender.send(tensors)
            assert set(report.backends.values()) == {backend}
            assert set(report.chunks.values()) == {3}
            assert one.answer()
            assert two.answer() == expected(tensors)
            assert len({a.lane for a in sender.agreement.assignments}) == (1 if backend == "shm" else 2)
            one.finish()
            two.finish()
