"""One message as it comes in: its body, and its chunks, checked and kept until it is handed out; no link is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transportkit.chunk import Cursor
from transportkit.errors import MessageError, ProtocolError
from transportkit.kinds import MAX_BYTES, dtype_of
from transportkit.mailbox.decoding import spec_of
from transportkit.mailbox.encoding import BODY_LIMIT, MAX_TENSORS
from transportkit.memory import allocate, memmove, typed_view
from transportkit.unpacking import Writer
from transportkit.wire import Chunk, Letter, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from transportkit.lifecycle import Imported, Imports
    from transportkit.mailbox.marks import Ref
    from transportkit.wire import Piece


class Incoming:
    """One message.

    A message of one chunk keeps it open until it is handed out, and its tensors are copied straight to where they go,
    or leased. One of more chunks is copied out chunk by chunk, so that it may be larger than all slots.

    Args:
        letter: its beginning.
        chunk_bytes: the agreed bound of a chunk.
        imports: where its chunks are opened.

    Raises:
        ProtocolError: the letter contradicts itself.
    """

    def __init__(self, letter: Letter, chunk_bytes: int, imports: Imports) -> None:
        self.number = letter.number
        self.open: list[Imported] = []
        self.failure: ProtocolError | None = None
        """Why it cannot be handed out."""
        self.sizes = letter.sizes
        self._imports = imports
        self._body = [letter.body]
        self._body_bytes = len(letter.body)
        self._fragments = letter.fragments
        self._chunks = letter.chunks
        self._seq = 0
        self._arrived = 0
        self._moving = False
        self._cursor = Cursor(chunk_bytes)
        self._offsets: dict[int, int] = {}
        self._writer: Writer | None = None
        self._owned: list[Tensor] = []
        self._given: set[int] = set()
        total, tensors = sum(letter.sizes), len(letter.sizes)
        fit = total <= min(letter.chunks * chunk_bytes, MAX_BYTES) and letter.chunks <= tensors + total // chunk_bytes
        if bool(tensors) != bool(letter.chunks) or tensors > MAX_TENSORS or not fit:
            raise ProtocolError(
                f"message {letter.number} came with {tensors} tensors of {total} bytes in "
                f"{letter.chunks} chunks of at most {chunk_bytes}"
            )

    @property
    def body(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    @property
    def whole(self) -> bool:
        """Whether nothing more of it is to come."""
        return not self._fragments and self._arrived == self._chunks and not self._moving

    @property
    def leasable(self) -> bool:
        """Whether its tensors can be read in place."""
        return len(self.open) == 1

    # -- its parts ----------------------------------------------------------------------------------------------------

    def add_body(self, part: bytes) -> None:
        """The next fragment. Raises `ProtocolError`."""
        self._body_bytes += len(part)
        if not self._fragments or self._body_bytes > BODY_LIMIT:
            raise ProtocolError(f"message {self.number} came with more of a body than it announced, or may have")
        self._fragments -= 1
        self._body.append(part)

    def expect(self, header: Chunk) -> None:
        """The next chunk's header. Raises `ProtocolError` where it does not fit the message."""
        if self._fragments or self._moving or (header.update, header.seq) != (self.number, self._seq):
            raise ProtocolError(
                f"chunk {header.seq} of message {header.update} came, where chunk {self._seq} of {self._chunks} of "
                f"message {self.number} was due"
            )
        if header.pieces is None or not header.last or header.receiver != 0 or header.specs:
            raise ProtocolError(f"chunk {header.seq} of message {self.number} has a header that no message has")
        self._cursor.advance(header.pieces, header.nbytes, self.sizes)
        if self._seq == self._chunks - 1:
            self._cursor.finish(self.sizes)
        self._moving = header.location.export is None
        self._seq += 1

    def moved(self, seq: int) -> None:
        """The bytes of a chunk have been sent. Raises `ProtocolError` where none are due."""
        if not self._moving or seq != self._seq - 1 or self._arrived != self._seq:
            raise ProtocolError(f"chunk {seq} of message {self.number} was moved, which was not due")
        self._moving = False

    def add_chunk(self, chunk: Imported) -> None:
        """The bytes of the chunk that was expected."""
        self._arrived += 1
        pieces = chunk.header.pieces
        assert pieces is not None
        if self._chunks == 1:
            self.open.append(chunk)
            self._offsets = {piece.tensor: piece.offset for piece in pieces}
            return
        self.open.append(chunk)
        if self.failure is None:
            self._copy_out(chunk, pieces)
        self.open.remove(chunk)
        self._imports.release(chunk)

    def spoil(self, chunk: Imported, error: ProtocolError) -> None:
        """The bytes of the chunk that was expected are not those that were sent."""
        self._arrived += 1
        self.failure = self.failure or error
        self._imports.release(chunk)

    def _copy_out(self, chunk: Imported, pieces: tuple[Piece, ...]) -> None:
        assert chunk.memory is not None
        writer = self._writer = self._writer or Writer()
        for piece in pieces:  # memory is taken as bytes come, not as they are announced
            while len(self._owned) <= piece.tensor:
                index = len(self._owned)
                spec = TensorSpec(f"tensor {index}", "uint8", (self.sizes[index],))
                self._owned.append(writer.append_owned(spec, chunk.memory.device))
        with self._imports.reading(chunk):
            writer.unpack(pieces, chunk.memory)
        for piece in pieces:
            if piece.start + piece.nbytes == self.sizes[piece.tensor]:
                writer.forget(piece.tensor)

    # -- handing it out -----------------------------------------------------------------------------------------------

    def source(self, *, lease: bool) -> Source:
        """Its tensors, for the decoder; to be used within `reading`."""
        self._given.clear()  # what an interrupted call was given is lost with it
        return Source(self, lease=lease)

    def tensor(self, ref: Ref, device: torch.device, base: Tensor | None) -> Tensor:
        """One tensor that travelled out of band; each once.

        Args:
            base: the leased chunk; None where the tensor is to be the caller's own.
        """
        spec, size = spec_of(ref)
        if ref.index >= len(self.sizes) or self.sizes[ref.index] != size:
            raise ProtocolError(f"message {self.number} names tensor {ref.index} of {size} bytes, which did not come")
        if ref.index in self._given:
            raise MessageError(f"message {self.number} names tensor {ref.index} twice")
        self._given.add(ref.index)
        if not self.open:
            return _typed(self._owned[ref.index], spec).to(device)
        offset = self._offsets[ref.index]
        if base is not None and base.device == device:
            return typed_view(base, offset, spec)
        memory = self.open[0].memory
        assert memory is not None
        if memory.is_cpu and device.type == "cpu":
            tensor = allocate(spec)
            if size:
                memmove(tensor.data_ptr(), memory.data_ptr() + offset, size)
            return tensor
        return typed_view(memory, offset, spec).to(device, copy=True)

    def drop(self) -> None:
        """Let go of its chunks: released, or held back while something views them."""
        opened, self.open = self.open, []
        for chunk in opened:
            self._imports.retire(chunk)
        self.forget()

    def forget(self) -> None:
        """Let go of its memory."""
        self.open = []
        self._owned = []
        self._writer = None


class Source:
    """The tensors of one complete message, each for one place in it."""

    def __init__(self, message: Incoming, *, lease: bool) -> None:
        self._message = message
        self._base = message.open[0].view() if lease and message.leasable else None

    def tensor(self, ref: Ref, device: torch.device) -> Tensor:
        return self._message.tensor(ref, device, self._base)


def _typed(flat: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor of a spec over all the memory of a uint8 one, as its only owner: no view of it."""
    dtype = dtype_of(spec.dtype)
    if dtype.is_complex and dtype.itemsize == 4:  # `torch.empty` warns that few operators know it
        return flat.view(dtype).view(spec.shape)
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), 0, spec.shape)  # type: ignore[call-overload, no-any-return]
