"""Tests of who shares memory with whom: leases, owned tensors, the sender's own."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from transportkit.errors import DeadlineError, LeaseError, PeerError, TransportKitError
from transportkit.testing.calls import Call
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.samples import bulk, bytes_of, prints
from transportkit.testing.suite.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from transportkit.session import Receiver


def write_into_what_came(receiver: Receiver) -> int:
    """Write to every received tensor, warnings being errors; how many there were."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = list(receiver.receive())
        for _, tensor in kept:
            tensor.fill_(1).add_(1)
        return len(kept)


def shared_memory(tensor: Tensor) -> bool:
    """Whether the tensor's storage is in shared memory."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def numbered(count: int, nbytes: int) -> dict[str, Tensor]:
    """Tensors of one chunk each, the n-th filled with n."""
    return {f"t{n}": torch.full((nbytes,), n, dtype=torch.uint8) for n in range(count)}


class Sharing(Subject):
    """Leases, owned tensors, the sender's own."""

    def test_received_tensors_are_the_receivers_own(self) -> None:
        tensors = {
            "a": torch.arange(300, dtype=torch.float32, device=self.device),
            "b": torch.ones(7, device=self.device),
        }
        tensors["tied"] = tensors["a"]
        expected = prints(tensors)
        shared = [shared_memory(tensor) for tensor in tensors.values()]
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        with self.session(chunk_bytes=500, slots=2) as session:
            for _ in range(3):
                assert session.carry(tensors, write_into_what_came) == 3
                assert prints(tensors) == expected, "a write at the receiver reached the sender"
        assert [shared_memory(tensor) for tensor in tensors.values()] == shared
        assert [tensor.data_ptr() for tensor in tensors.values()] == addresses

    def test_the_source_may_change_after_send(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=64, slots=2) as session:
            tensors = {name: tensor.to(self.device) for name, tensor in bulk(3000).items()}
            expected = prints(tensors)
            receiving = session.receive(lambda receiver: list(receiver.receive()))
            session.send(tensors).result(self.patience)
            kept = receiving.result(self.patience)
            for tensor in tensors.values():
                tensor.zero_()
            assert prints(kept) == expected, "what came is shared with the sender"

    def test_the_next_chunk_does_not_reach_the_last(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=2) as session:
            receiving = session.receive(lambda receiver: list(receiver.receive()))
            session.send(numbered(20, 256)).result(self.patience)
            for n, (_, tensor) in enumerate(receiving.result(self.patience)):
                assert tensor.cpu().tolist() == [n] * 256

    def test_a_kept_lease_withholds_its_slot(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=3) as session:
            sending = session.send(numbered(12, 256))
            kept: list[Tensor] = []
            walk = session.receiver.chunks()
            for n, lease in enumerate(walk):
                for _, _, tensor in lease:
                    assert tensor.cpu().tolist() == [n] * 256
                    if n in (0, 1):
                        kept.append(tensor)
                    del tensor
                del lease
                assert [view.cpu().tolist() for view in kept] == [[i] * 256 for i in range(len(kept))], (
                    "bytes changed under a lease"
                )
                if n > 2:
                    assert session.receiver.held == 2
            sending.result(self.patience)
            assert session.receiver.held == 2
            assert session.carry({"x": torch.ones(9)}, lambda receiver: len(list(receiver.receive()))) == 1
            assert [view.cpu().tolist() for view in kept] == [[0] * 256, [1] * 256]
            kept.clear()
            gc.collect()
            assert session.carry({"x": torch.ones(9)}, lambda receiver: len(list(receiver.receive()))) == 1
            assert session.receiver.held == 0

    def test_keeping_every_lease_is_an_error_and_loses_no_byte(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=2) as session:
            sending = session.send(numbered(8, 256))
            kept: list[Tensor] = []

            def keep(receiver: Receiver) -> None:
                for lease in receiver.chunks():
                    kept.extend(tensor for _, _, tensor in lease)

            error = session.receive(keep).error(self.patience)
            assert isinstance(error, LeaseError), repr(error)
            assert [view.cpu().tolist() for view in kept] == [[0] * 256, [1] * 256]
            assert isinstance(sending.error(self.patience), TransportKitError)
            del error
            kept.clear()

    def test_a_lease_is_not_released_under_a_view(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=2) as session:
            sending = session.send(numbered(4, 256))
            for n, lease in enumerate(session.receiver.chunks()):
                ((_, _, tensor),) = list(lease)
                with pytest.raises(LeaseError):
                    lease.release()
                assert tensor.cpu().tolist() == [n] * 256
                del tensor
            sending.result(self.patience)

    def test_slots_of_released_leases_go_on(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=1) as session:
            sending = session.send(numbered(6, 256))
            for lease in session.receiver.chunks():
                seen = [bytes_of(tensor) for _, _, tensor in lease]
                lease.release()
                assert len(seen[0]) == 256
                with pytest.raises(LeaseError):
                    list(lease)
            sending.result(self.patience)

    def test_views_outlive_the_session(self) -> None:
        self.in_one_process()
        with nothing_left():
            with self.session(chunk_bytes=4096, slots=3) as session:
                sending = session.send(numbered(2, 4096))
                kept = []
                for lease in session.receiver.chunks():
                    kept += [tensor for _, _, tensor in lease]
                sending.result(self.patience)
            del session, lease, sending
            gc.collect()
            spoil = [torch.full((4096,), 255, dtype=torch.uint8) for _ in range(50)]
            seen = [view.cpu().tolist() for view in kept]
            assert seen == [[n] * 4096 for n in range(2)], "`close` or `detach` freed memory that is still viewed"
            del kept, spoil

    def test_leaving_the_loop_early_is_told_and_frees_the_slots(self) -> None:
        self.in_one_process()
        with self.session(chunk_bytes=256, slots=2) as session:
            for _ in range(3):
                sending = session.send(numbered(9, 256))
                walk: Iterator[tuple[str, Tensor]] = session.receiver.receive()
                next(walk)
                leaving = Call(walk.close)  # type: ignore[attr-defined]
                assert isinstance(sending.error(self.patience), PeerError)
                leaving.result(self.patience)
            expected = prints(numbered(9, 256))
            assert session.carry(numbered(9, 256), lambda receiver: prints(receiver.receive())) == expected

    def test_a_receiver_that_waits_too_briefly_can_wait_again(self) -> None:
        self.in_one_process()
        with self.session() as session:
            for _ in range(2):
                with pytest.raises(DeadlineError):
                    next(iter(session.receiver.receive(wait=0.05)))
            assert session.carry({"x": torch.ones(3)}, lambda receiver: len(list(receiver.receive()))) == 1
