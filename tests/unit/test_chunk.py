"""The sender's plan and the receiver's check of it, by table."""

from __future__ import annotations

import pytest

from transportkit.chunk import ALIGNMENT, MAX_PIECES, Cursor, Cutter, digest, plan, used
from transportkit.errors import ProtocolError
from transportkit.wire import Piece

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("sizes", "chunk_bytes", "expected"),
    [
        ([], 100, ()),
        ([None], 100, ()),
        ([100], 100, (((0, 0, 100, 0),),)),
        ([3, 4], 100, (((0, 0, 3, 0), (1, 0, 4, 64)),)),
        ([3, 40], 100, (((0, 0, 3, 0),), ((1, 0, 40, 0),))),
        ([0], 1, (((0, 0, 0, 0),),)),
        ([0, 0, 1], 1, (((0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 1, 0)),)),
        ([1, 0], 1, (((0, 0, 1, 0),), ((1, 0, 0, 0),))),
        ([64, 0], 64, (((0, 0, 64, 0), (1, 0, 0, 64)),)),
        ([100, 0], 100, (((0, 0, 100, 0),), ((1, 0, 0, 0),))),
        ([3], 1, (((0, 0, 1, 0),), ((0, 1, 1, 0),), ((0, 2, 1, 0),))),
        ([10, 300], 128, (((0, 0, 10, 0), (1, 0, 64, 64)), ((1, 64, 128, 0),), ((1, 192, 108, 0),))),
        ([64, 129], 65, (((0, 0, 64, 0), (1, 0, 1, 64)), ((1, 1, 65, 0),), ((1, 66, 63, 0),))),
        ([64, 129], 64, (((0, 0, 64, 0),), ((1, 0, 64, 0),), ((1, 64, 64, 0),), ((1, 128, 1, 0),))),
        ([200, 30, None, 30], 128, (((0, 0, 128, 0),), ((0, 128, 72, 0),), ((1, 0, 30, 0), (3, 0, 30, 64)))),
    ],
)
def test_plan(sizes: list[int | None], chunk_bytes: int, expected: tuple[tuple[tuple[int, ...], ...], ...]) -> None:
    assert plan(sizes, chunk_bytes) == tuple(tuple(Piece(*piece) for piece in chunk) for chunk in expected)


def test_a_chunk_has_a_bounded_number_of_pieces() -> None:
    chunks = plan([0] * (MAX_PIECES + 1), 100)
    assert list(map(len, chunks)) == [MAX_PIECES, 1]
    cursor = Cursor(100)
    for pieces in chunks:
        cursor.advance(pieces, used(pieces), [0] * (MAX_PIECES + 1))
    with pytest.raises(ProtocolError, match="pieces"):
        Cursor(100).advance([Piece(i, 0, 0, 0) for i in range(MAX_PIECES + 1)], 0, [0] * (MAX_PIECES + 1))


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_a_chunk_has_a_size(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Cutter(chunk_bytes)


def test_huge_tensors_are_planned_without_looking_at_their_bytes() -> None:
    chunks = plan([1 << 50], 1 << 40)
    assert len(chunks) == 1024
    assert used(chunks[-1]) == 1 << 40


SIZES = [10, 0, None, 300]
FIRST = (Piece(0, 0, 10, 0), Piece(1, 0, 0, 64), Piece(3, 0, 64, 64))


@pytest.mark.parametrize(
    ("pieces", "nbytes", "text"),
    [
        (FIRST, 129, "129 bytes came"),
        (FIRST, -1, "-1 bytes came"),
        (FIRST, 127, "end at byte 128"),
        ((), 0, "0 pieces"),
        (FIRST[1:], 128, "byte 0 of tensor 1 came, where byte 0 of tensor 0 was due"),
        ((FIRST[0], FIRST[2]), 128, "tensor 3 came, where byte 0 of tensor 1"),
        ((Piece(0, 1, 9, 0),), 9, "byte 1 of tensor 0"),
        ((Piece(0, 0, 11, 0),), 11, "11 bytes at byte 0 of tensor 0 came, which has 10"),
        ((Piece(0, 0, 0, 0),), 0, "0 bytes at byte 0"),
        ((Piece(0, 0, -4, 0),), 0, "-4 bytes"),
        ((Piece(0, 0, 4, 0), Piece(0, 4, 6, 4)), 10, "offset 4"),
        ((Piece(0, 0, 4, 0), Piece(0, 4, 6, 0)), 6, "offset 0 came after one that ends at 4"),
        ((Piece(0, 0, 10, -64),), 0, "offset -64"),
        ((FIRST[0], FIRST[1], Piece(2, 0, 10, 64)), 74, "tensor 2 came"),
        ((Piece(-1, 0, 10, 0),), 10, "tensor -1"),
        ((Piece(0, 0, 10, 0), Piece(1, 0, 0, 64), Piece(1, 0, 0, 64)), 64, "tensor 1 came"),
    ],
)
def test_a_header_that_does_not_hold_is_refused_whole(pieces: tuple[Piece, ...], nbytes: int, text: str) -> None:
    cursor = Cursor(128)
    with pytest.raises(ProtocolError, match=text):
        cursor.advance(pieces, nbytes, SIZES)
    assert (cursor.tensor, cursor.start) == (0, 0)
    cursor.advance(FIRST, 128, SIZES)
    assert (cursor.tensor, cursor.start) == (3, 64)


def test_pieces_of_tensors_that_nobody_announced_are_refused() -> None:
    cursor = Cursor(128)
    sizes: list[int | None] = [4]
    cursor.advance((Piece(0, 0, 4, 0),), 4, sizes)
    with pytest.raises(ProtocolError, match="all 1 tensors are complete"):
        cursor.advance((Piece(1, 0, 4, 0),), 4, sizes)
    sizes.append(4)
    cursor.advance((Piece(1, 0, 4, 0),), 4, sizes)
    cursor.finish(sizes)


def test_an_update_that_ends_early_is_refused() -> None:
    cursor = Cursor(128)
    with pytest.raises(ProtocolError, match="3 tensors due, 0 arrived"):
        cursor.finish(SIZES)
    cursor.advance(FIRST, 128, SIZES)
    with pytest.raises(ProtocolError, match="3 tensors due, 2 arrived, 64 of 300 bytes of the next"):
        cursor.finish(SIZES)
    cursor.advance((Piece(3, 64, 128, 0),), 128, SIZES)
    cursor.advance((Piece(3, 192, 108, 0),), 108, SIZES)
    cursor.finish([*SIZES, None])
    Cursor(1).finish([])


def test_digest() -> None:
    assert digest(b"") == 0x2D06800538D394C2
    assert digest(memoryview(b"abc")) == digest(bytearray(b"abc")) == 0x78AF5F94892F3950
    assert ALIGNMENT == 64
