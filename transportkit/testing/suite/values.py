"""Tests of what arrives, in sessions: every dtype, layout, source and way of receiving, at all sizes of chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from transportkit.chunk import plan
from transportkit.testing import ends
from transportkit.testing.samples import bulk, bytes_of, placed, print_of, prints, samples
from transportkit.testing.suite.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from transportkit.testing.samples import Print


def exact_fit(tensors: Mapping[str, Tensor]) -> int:
    """The size of chunk that these tensors fill to the last byte."""
    sizes = [len(bytes_of(tensor)) for tensor in tensors.values()]
    ((*_, last),) = plan(sizes, 1 << 40)
    return last.offset + last.nbytes


def differing(seen: Mapping[str, Print], expected: Mapping[str, Print]) -> list[str]:
    """The names whose tensors did not arrive as they were sent."""
    return [name for name in {**expected, **seen} if seen.get(name) != expected.get(name)]


#: (chunk_bytes, slots, checksum)
TERMS = [(1, 1, None), (3, 2, False), (100, 3, None), (1000, 7, None), (1000, 1, False), (1 << 20, 2, None)]


class Values(Subject):
    """Every dtype, layout, source and way of receiving."""

    @pytest.mark.parametrize(("chunk_bytes", "slots", "checksum"), TERMS)
    def test_every_value_arrives(self, chunk_bytes: int, slots: int, checksum: bool | None) -> None:
        tensors = {name: placed(tensor, self.device) for name, tensor in samples().items()}
        tensors["tied_again"] = tensors["tied"]
        expected = prints(tensors)
        with self.session(chunk_bytes=chunk_bytes, slots=slots, checksum=checksum) as session:
            wanted = "none" if checksum is False or not self.digests else "xxh3-64"
            assert [a.digest for a in session.sender.agreement.assignments] == [wanted]
            for turn, way in enumerate(ends.WAYS):
                kinds = list(ends.SOURCES)
                # A chunk of a byte takes a round for every byte: there each source meets one way only.
                for kind in [kinds[turn]] if chunk_bytes < 10 else kinds:
                    seen = session.carry(ends.SOURCES[kind](tensors), ends.WAYS[way], expected)
                    assert differing(seen, expected) == [], f"sent as {kind}, received by {way}"
        assert prints(tensors) == expected, "the sender's tensors changed"

    def test_tensors_that_fill_their_chunks_exactly(self) -> None:
        tensors = {name: tensor.to(self.device) for name, tensor in bulk(5000).items() if tensor.is_contiguous()}
        expected = prints(tensors)
        size = exact_fit(tensors)
        for chunk_bytes, chunks in ((size, 1), (size - 1, 2), (size + 1, 1)):
            with self.session(chunk_bytes=chunk_bytes) as session:
                receiving = session.receive(ends.receive, expected)
                report = session.send(tensors).result(self.patience)
                assert differing(receiving.result(self.patience), expected) == []
                assert set(report.chunks.values()) == {chunks}

    @pytest.mark.parametrize("slots", [1, 3])
    def test_large_tensors_arrive(self, slots: int) -> None:
        with self.session(chunk_bytes=(1 << 20) + 13, slots=slots) as session:
            for seed, way in enumerate(ends.WAYS):
                tensors = {name: tensor.to(self.device) for name, tensor in bulk(6 << 20, seed).items()}
                expected = prints(tensors)
                assert differing(session.carry(tensors, ends.WAYS[way], expected), expected) == [], way

    def test_updates_without_bytes(self) -> None:
        with self.session() as session:
            empty = {"a": torch.empty(0), "b": torch.empty(3, 0)}
            updates: list[dict[str, Tensor]] = [{}, {"empty": torch.empty(0, 3)}, empty]
            for tensors in updates:
                for kind, source in ends.SOURCES.items():
                    for way in ends.WAYS:
                        expected = prints(tensors)
                        seen = session.carry(source(tensors), ends.WAYS[way], expected)
                        assert differing(seen, expected) == [], f"sent as {kind}, received by {way}"

    def test_a_plan_that_both_sides_know_is_used_again(self) -> None:
        with self.session(chunk_bytes=1000) as session:
            for seed in (1, 2, 3, 3):
                tensors = {name: tensor.to(self.device) for name, tensor in bulk(9000, seed).items()}
                expected = prints(tensors)
                assert differing(session.carry(tensors, ends.load, expected), expected) == []
            other = {"another": torch.arange(1000, dtype=torch.float32, device=self.device)}
            assert session.carry(other, ends.load, prints(other)) == prints(other)

    def test_post_changes_what_is_sent(self) -> None:
        tensors = {"a": torch.arange(100, dtype=torch.float32, device=self.device).view(10, 10)}
        with self.session(chunk_bytes=77) as session:
            seen = session.carry(tensors, ends.receive, {}, post=lambda pair: pair[1].to(torch.bfloat16).t())
        assert seen == {"a": print_of(tensors["a"].to(torch.bfloat16).t())}
