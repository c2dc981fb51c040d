"""Several reroutes in one update: casts, tied names, layouts; and candidates without end, one failing after another."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from session_ends import differing
from threaded_ends import Ends, received

from transportkit.errors import ResourceError
from transportkit.testing import altered, faulty, in_update, installed
from transportkit_shm.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    import transportkit as tk
    from transportkit.transport import Transport


def source() -> dict[str, torch.Tensor]:
    """Every layout, in an order that puts a name of each tie before and behind the places where backends fail."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(40, 60, generator=generator)
    tied, scalar, empty = torch.randn(50, 50, generator=generator), torch.tensor(2.5), torch.empty(0, 4)
    return {
        "head": tied,
        "scalar": scalar,
        "transposed": wide.t(),
        "third": wide.flatten()[::3],
        "expanded": torch.arange(9.0).expand(30, 9),
        "empty": empty,
        "long": torch.arange(3000),
        "half": torch.randn(700, generator=generator).to(torch.bfloat16),
        "complex": torch.randn(300, dtype=torch.complex64, generator=generator).conj(),
        "none": torch.empty(0, dtype=torch.int8),
        "tail": tied,
        "scalar.too": scalar,
        "empty.too": empty,
        "flags": torch.arange(901) % 3 == 0,
        "last": torch.randn(999, generator=generator),
    }


TIES = (("head", "tail"), ("scalar", "scalar.too"), ("empty", "empty.too"))
CAST = {
    "head": torch.bfloat16,
    "tail": torch.bfloat16,
    "transposed": torch.float64,
    "third": torch.float16,
    "long": torch.float32,
    "scalar": torch.float64,
    "scalar.too": torch.float64,
}


def target(cast: dict[str, torch.dtype], *, tied: bool) -> dict[str, torch.Tensor]:
    """Zeros, some of them strided."""
    made = {n: torch.zeros(t.shape, dtype=cast.get(n, t.dtype)) for n, t in source().items()}
    made["transposed"] = torch.zeros(40, 60, dtype=made["transposed"].dtype).t()
    made["last"] = torch.zeros(1998)[::2]
    return made | {second: made[first] for first, second in TIES if tied}


def load_cast(receiver: tk.Receiver, *, tied: bool) -> dict[str, torch.Tensor]:
    into = target(CAST, tied=tied)
    update = receiver.load_into(into, cast=True)
    assert set(update.cast) == set(CAST)
    return into


def load_as_it_is(receiver: tk.Receiver, *, tied: bool) -> dict[str, torch.Tensor]:
    into = target({}, tied=tied)
    receiver.load_into(into)
    return into


def apply(receiver: tk.Receiver) -> dict[str, torch.Tensor]:
    got: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}

    def take(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            first = next((one for one, other in TIES if name == other), None)
            got[name] = copies.setdefault(id(got[first]), got[first]) if first else tensor.clone()
            assert torch.equal(got[name], tensor)

    receiver.apply(take)
    return got


def failing(places: tuple[str, ...]) -> list[type[Transport]]:
    """One backend for each place, which fails there for good after a few chunks."""
    return [
        faulty(
            ShmTransport,
            at=at,
            nth=2 + n,
            when=in_update,
            error=ResourceError(f"no room {n}"),
            name=f"faulty-{n}",
        )
        for n, at in enumerate(places)
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "places",
    [
        ("importer.open", "publish"),
        ("publish", "importer.reading"),
        ("importer.release", "importer.open", "publish"),
        ("publish", "publish", "importer.reading"),
    ],
)
def test_values_casts_and_ties_over_several_reroutes(places: tuple[str, ...], streamed: bool) -> None:
    backends = failing(places)
    names = [backend.name for backend in backends]
    tied = not streamed  # equal addresses mean nothing where tensors are made one by one
    ways: list[Callable[[tk.Receiver], dict[str, torch.Tensor]]] = [
        functools.partial(load_cast, tied=tied),
        functools.partial(load_as_it_is, tied=tied),
        received,
        apply,
    ]
    with installed(*backends), Ends(len(ways), *names, "pickle", chunk_bytes=2500) as ends:
        for _ in range(2):
            taking = [ends.pool.submit(way, each) for way, each in zip(ways, ends.receivers, strict=True)]
            given: Any = iter(source().items()) if streamed else source()
            report = ends.pool.submit(ends.sender.send, given).result(60)
            assert {line.split()[4] for line in report.reroutes} >= {"pickle"}
            assert max(sum(f"receiver {n}:" in line for line in report.reroutes) for n in range(4)) >= len(places)
            cast, *same = [one.result(60) for one in taking]
            assert differing(cast, {n: t.to(CAST.get(n, t.dtype)) for n, t in source().items()}) == []
            for got in same:
                assert differing(got, source()) == []
            for got, shares in ((cast, tied), (same[0], tied), (same[1], False)):  # what is received is the caller's
                assert [got[one].data_ptr() == got[two].data_ptr() for one, two in TIES if got[one].numel()] == [
                    shares
                ] * 2


# -- candidates without end -------------------------------------------------------------------------------------------


def test_any_number_of_candidates_may_fail_one_after_the_other() -> None:
    """Neither the stack nor what is held open grows with them."""
    depths: list[int] = []
    waiting: list[int] = []
    closed: list[None] = []

    def fail(*_: object) -> None:
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        waiting.append(len(depths) - len(closed))
        raise ResourceError("no room")

    def close(call: Callable[[], None], *_: object) -> None:
        call()
        closed.append(None)

    count, trial = 24, 1
    backends = []
    for n in range(count):
        told = altered(ShmTransport, at="exporter.close", change=close, name="told")
        backends.append(altered(told, at="exporter.ready", nth=1 + trial, change=fail, name=f"failing-{n}"))
    tensors = {f"t{n}": torch.full((3000,), n, dtype=torch.uint8) for n in range(6)}
    with installed(*backends), Ends(1, *(backend.name for backend in backends), "pickle") as ends:
        taking = ends.pool.submit(received, ends.receivers[0])
        report = ends.pool.submit(ends.sender.send, tensors).result(60)
        assert differing(taking.result(60), tensors) == []
        assert len(report.reroutes) == len(depths) == count
        assert max(depths[1:]) == min(depths[1:])
        assert max(waiting) <= 2
