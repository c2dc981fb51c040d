"""Plans and cursors, for any sizes and any chunk size."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from transportkit.chunk import ALIGNMENT, Cursor, Cutter, plan, used
from transportkit.errors import ProtocolError

if TYPE_CHECKING:
    from transportkit.wire import Piece

pytestmark = pytest.mark.timeout(60)

sizes = st.lists(st.one_of(st.none(), st.integers(0, 3), st.integers(0, 600)), max_size=12)
chunk_sizes = st.one_of(st.integers(1, 5), st.integers(1, 300), st.integers(1, 20).map(lambda n: 64 * n))


@given(sizes, chunk_sizes)
def test_a_plan_keeps_its_rules(sizes: list[int | None], chunk_bytes: int) -> None:
    chunks = plan(sizes, chunk_bytes)
    for pieces in chunks:
        assert 0 <= used(pieces) <= chunk_bytes
        assert all(piece.offset % ALIGNMENT == 0 for piece in pieces)
        assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(pieces))
    flat = [piece for pieces in chunks for piece in pieces]
    for tensor, size in enumerate(sizes):
        mine = [piece for piece in flat if piece.tensor == tensor]
        assert sum(piece.nbytes for piece in mine) == (size or 0)
        assert len(mine) == 0 if size is None else len(mine) >= 1
        assert len(mine) <= 1 or (size is not None and size > chunk_bytes)
        starts = [piece.start for piece in mine]
        assert starts == [sum(piece.nbytes for piece in mine[:index]) for index in range(len(mine))]
        assert all(piece.offset + piece.nbytes == chunk_bytes for piece in mine[:-1])
    assert [piece.tensor for piece in flat] == sorted(piece.tensor for piece in flat)


@given(sizes, chunk_sizes)
def test_cutting_one_by_one_is_the_plan(sizes: list[int | None], chunk_bytes: int) -> None:
    cutter = Cutter(chunk_bytes)
    chunks: list[list[Piece]] = []
    for tensor, size in enumerate(sizes):
        for fresh, piece in [] if size is None else cutter.cut(tensor, size):
            if fresh:
                chunks.append([])
            chunks[-1].append(piece)
    assert tuple(map(tuple, chunks)) == plan(sizes, chunk_bytes)


@given(sizes, chunk_sizes)
def test_a_cursor_accepts_every_plan(sizes: list[int | None], chunk_bytes: int) -> None:
    cursor = Cursor(chunk_bytes)
    for pieces in plan(sizes, chunk_bytes):
        cursor.advance(pieces, used(pieces), sizes)
    cursor.finish(sizes)


@given(sizes, chunk_sizes)
def test_a_cursor_accepts_specs_that_come_with_the_chunks(sizes: list[int | None], chunk_bytes: int) -> None:
    cursor = Cursor(chunk_bytes)
    for pieces in plan(sizes, chunk_bytes):
        cursor.advance(pieces, used(pieces), sizes[: pieces[-1].tensor + 1])
    cursor.finish(sizes)


@given(st.data(), sizes, chunk_sizes)
def test_a_cursor_refuses_every_mutation(data: st.DataObject, sizes: list[int | None], chunk_bytes: int) -> None:
    chunks = [list(pieces) for pieces in plan(sizes, chunk_bytes)]
    assume(chunks)
    original = [list(pieces) for pieces in chunks]
    lengths = [used(pieces) for pieces in chunks]
    at = data.draw(st.integers(0, len(chunks) - 1))
    index = data.draw(st.integers(0, len(chunks[at]) - 1))
    match data.draw(st.sampled_from(["field", "drop piece", "drop chunk", "repeat piece", "swap", "length"])):
        case "field":
            field = data.draw(st.sampled_from(["tensor", "start", "nbytes"]))
            piece = chunks[at][index]
            other = data.draw(st.integers(-70, 700).filter(lambda value: value != getattr(piece, field)))
            chunks[at][index] = msgspec.structs.replace(piece, **{field: other})
            lengths[at] = used(chunks[at])
        case "drop piece":
            del chunks[at][index]
            lengths[at] = used(chunks[at])
        case "drop chunk":
            del chunks[at], lengths[at]
        case "repeat piece":
            chunks[at].insert(index, chunks[at][index])
        case "swap":
            other = data.draw(st.integers(0, len(chunks[at]) - 1))
            chunks[at][index], chunks[at][other] = chunks[at][other], chunks[at][index]
            lengths[at] = used(chunks[at])
        case _:
            lengths[at] = data.draw(st.integers(-1, chunk_bytes + 1))
    assume((chunks, lengths) != (original, [used(pieces) for pieces in original]))
    cursor = Cursor(chunk_bytes)
    with pytest.raises(ProtocolError):
        _take(cursor, chunks, lengths, sizes)


@given(st.data(), sizes, chunk_sizes)
def test_offsets_that_a_cursor_accepts_are_sound(
    data: st.DataObject, sizes: list[int | None], chunk_bytes: int
) -> None:
    """Another offset may be as good as the sender's: then it is aligned, in bounds and overlaps nothing."""
    for pieces in plan(sizes, chunk_bytes):
        moved = [msgspec.structs.replace(p, offset=data.draw(st.integers(-2, 12)) * 32) for p in pieces]
        cursor = Cursor(chunk_bytes)
        cursor.tensor, cursor.start = pieces[0].tensor, pieces[0].start
        end, sound = 0, True
        for piece in moved:
            sound &= piece.offset % 64 == 0 and piece.offset >= end
            end = piece.offset + piece.nbytes
        try:
            cursor.advance(moved, used(moved), sizes)
        except ProtocolError:
            assert not sound or end > chunk_bytes
        else:
            assert sound
            assert end <= chunk_bytes


def _take(cursor: Cursor, chunks: list[list[Piece]], lengths: list[int], sizes: list[int | None]) -> None:
    for pieces, nbytes in zip(chunks, lengths, strict=True):
        before = cursor.tensor, cursor.start
        try:
            cursor.advance(pieces, nbytes, sizes)
        except ProtocolError:
            assert (cursor.tensor, cursor.start) == before
            raise
    cursor.finish(sizes)
