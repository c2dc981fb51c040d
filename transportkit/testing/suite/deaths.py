"""Tests between processes: values, and what the survivor makes of a peer that is killed, stopped or aborted."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from transportkit.errors import ClosedError, DeadlineError, PeerError, PeerLostError, TransportKitError
from transportkit.session import connect, pair, serve
from transportkit.testing import ends
from transportkit.testing.calls import Call, bounded
from transportkit.testing.faults import faulty
from transportkit.testing.installing import installed
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.processes import Child, context_of, in_process
from transportkit.testing.samples import bulk, prints
from transportkit.testing.suite.subject import Subject
from transportkit.testing.suite.values import differing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transportkit.session import Receiver, Sender
    from transportkit.transport import Transport

#: Bytes of an update in which one side dies.
NBYTES = 1 << 20


def keeping_files_in(folder: str, work: Callable[..., Any], *args: Any) -> Any:
    """Do something in a process whose temporary files come to lie in a folder of the test's."""
    tempfile.tempdir = folder
    return work(*args)


def join_and_wait(receiver: Receiver) -> None:
    """Agree; a fault in the backend makes this hang."""
    receiver.join()


def wait_for_receivers(sender: Sender) -> None:
    """Agree; a fault in the backend makes this hang."""
    sender.wait()


class Deaths(Subject):
    """Two processes, and what becomes of one when the other ends."""

    def keywords(self, **more: Any) -> dict[str, Any]:
        return {
            "backends": (self.subject().name,),
            "device": self.device,
            "timeout": self.patience,
            **self.options,
            **more,
        }

    def extra(self) -> list[type[Transport]]:
        return [self.subject()]

    def warmed(self) -> None:
        """Have the fork server running, which is no leftover; skips where no two processes can agree on the backend."""
        if "pair" not in self.links:
            pytest.skip("no two processes can agree on this backend over an inherited link")
        in_process(int, method="forkserver")

    # -- values between processes -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ends.WAYS)
    def test_values_reach_another_process(self, way: str) -> None:
        tensors = {name: tensor.to(self.device) for name, tensor in bulk(3 << 20).items()}
        expected = prints(tensors)
        self.warmed()
        with nothing_left():
            with self.session(process=True, chunk_bytes=100_001) as session:
                for source in ("mapping", "iterator"):
                    seen = session.carry(ends.SOURCES[source](tensors), ends.WAYS[way], expected)
                    assert differing(seen, expected) == []
                assert session.sender.agreement.backend(0) == self.subject().name
            del session

    def test_unrelated_processes_meet_over_a_unix_link(self, tmp_path: Path) -> None:
        if "unix" not in self.links:
            pytest.skip("this backend cannot be agreed on over a unix link")
        self.meet(f"unix:{tmp_path}/link.sock", tmp_path, "spawn")

    def test_unrelated_processes_meet_over_a_tcp_link(self, tmp_path: Path) -> None:
        if "tcp" not in self.links:
            pytest.skip("this backend cannot be agreed on over a tcp link")
        self.meet("tcp://127.0.0.1:0", tmp_path, "forkserver")

    def meet(self, address: str, folder: Path, method: str) -> None:
        in_process(int, method="forkserver")
        with nothing_left(folder):
            sender = serve(address, **self.keywords(wait=self.patience * 2))
            tensors = {name: tensor.to(self.device) for name, tensor in bulk(NBYTES).items()}
            expected = prints(tensors)
            order = (sender.address, ends.load, (expected,), self.keywords(wait=self.patience))
            with Child(ends.connect_and, *order, backends=self.extra(), method=method) as child, sender:
                assert sender.agreement.backend(0) == self.subject().name
                Call(sender.send, tensors).result(self.patience)
                assert differing(child.result(self.patience), expected) == []
            del sender

    # -- death --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("slots", [1, 3])
    def test_the_death_of_a_sender_is_noticed(self, slots: int, tmp_path: Path) -> None:
        self.warmed()
        with nothing_left(tmp_path):
            theirs, receiver = pair(context_of("forkserver"), **self.keywords(chunk_bytes=50_000, slots=slots))
            order = (keeping_files_in, str(tmp_path), ends.endless, theirs, NBYTES)
            with Child(*order, backends=self.extra(), method="forkserver") as child:
                del theirs
                receiving = Call(ends.receive, receiver, {})
                assert child.heard(self.patience) == "mid-update"
                child.kill()
                error = receiving.error(self.notice)
                assert isinstance(error, PeerLostError), repr(error)
                receiver.close()
            del receiver, receiving, error

    @pytest.mark.parametrize("slots", [1, 3])
    def test_the_death_of_a_receiver_is_noticed(self, slots: int, tmp_path: Path) -> None:
        self.warmed()
        with nothing_left(tmp_path):
            sender, theirs = pair(context_of("forkserver"), **self.keywords(chunk_bytes=50_000, slots=slots))
            order = (keeping_files_in, str(tmp_path), ends.first_chunk, theirs)
            with Child(*order, backends=self.extra(), method="forkserver") as child:
                del theirs
                sending = Call(sender.send, bulk(NBYTES))
                assert child.heard(self.patience) == "mid-update"
                child.kill()
                error = sending.error(self.notice)
                assert isinstance(error, PeerLostError), repr(error)
                sender.close()
            del sender, sending, error

    @pytest.mark.parametrize("at", ["importer.connect", "open", "release"])
    def test_a_receiver_that_dies_in_the_handshake_is_noticed(self, at: str, tmp_path: Path) -> None:
        transport = faulty(self.subject(), at=at, seconds=600)
        self.warmed()
        with installed(transport), nothing_left(tmp_path):
            sender, theirs = pair(context_of("forkserver"), **self.keywords(backends=(transport.name,)))
            order = (keeping_files_in, str(tmp_path), join_and_wait, theirs)
            with Child(*order, backends=[transport], method="forkserver") as child:
                del theirs
                waiting = Call(sender.wait)
                assert not waiting.wait(0.5), waiting.error(0)
                child.kill()
                error = waiting.error(self.notice)
                assert isinstance(error, PeerLostError), repr(error)
                sender.close()
            del sender, waiting, error

    @pytest.mark.parametrize("at", ["exporter.connect", "ready", "publish"])
    def test_a_sender_that_dies_in_the_handshake_is_noticed(self, at: str, tmp_path: Path) -> None:
        transport = faulty(self.subject(), at=at, seconds=600)
        self.warmed()
        hint = (
            f"the sender was killed in `{at}`, so nothing that it does later, in `connect` or `close`, removes that; "
            "use what has no name and goes with its last descriptor"
        )
        with installed(transport), nothing_left(tmp_path, hint=hint):
            theirs, receiver = pair(context_of("forkserver"), **self.keywords(backends=(transport.name,)))
            order = (keeping_files_in, str(tmp_path), wait_for_receivers, theirs)
            with Child(*order, backends=[transport], method="forkserver") as child:
                del theirs
                joining = Call(receiver.join)
                assert not joining.wait(1.5), joining.error(0)  # time for the sender to get there, on a busy machine
                child.kill()
                error = joining.error(self.notice)
                assert isinstance(error, PeerLostError), repr(error)
                receiver.close()
            del receiver, joining, error

    def test_a_new_session_on_the_same_address_works_after_a_kill(self, tmp_path: Path) -> None:
        if "unix" not in self.links:
            pytest.skip("this backend cannot be agreed on over a unix link")
        address = f"unix:{tmp_path}/link.sock"
        in_process(int, method="forkserver")
        for seed in range(2):
            order = (address, seed, NBYTES, self.keywords(wait=self.patience))
            with Child(ends.serve_and_send, *order, backends=self.extra(), method="forkserver") as child:
                receiver = bounded(self.patience, connect, address, **self.keywords(wait=self.patience))
                with receiver:
                    if seed == 0:
                        child.kill()
                        with pytest.raises(PeerError):
                            bounded(self.notice, ends.receive, receiver, {})
                    else:
                        expected = prints(bulk(NBYTES, seed))
                        assert differing(bounded(self.patience, ends.receive, receiver, {}), expected) == []
                        assert child.result(self.patience) == self.subject().name
        assert [path.name for path in tmp_path.iterdir()] == []

    # -- silence ------------------------------------------------------------------------------------------------------

    def test_a_stopped_sender_ends_in_a_deadline(self) -> None:
        self.warmed()
        with nothing_left():
            theirs, receiver = pair(context_of("forkserver"), **self.keywords(chunk_bytes=50_000, timeout=1.0))
            with Child(ends.endless, theirs, NBYTES, backends=self.extra(), method="forkserver") as child:
                del theirs
                receiving = Call(ends.receive, receiver, {})
                child.heard(self.patience)
                child.stop()
                self.assert_on_time(receiving, 1.0)
                receiver.close()
            del receiver, receiving

    def test_a_stopped_receiver_ends_in_a_deadline(self) -> None:
        self.warmed()
        with nothing_left():
            sender, theirs = pair(context_of("forkserver"), **self.keywords(chunk_bytes=50_000, timeout=1.0))
            with Child(ends.first_chunk, theirs, backends=self.extra(), method="forkserver") as child:
                del theirs
                sending = Call(sender.send, bulk(NBYTES))
                child.heard(self.patience)
                child.stop()
                self.assert_on_time(sending, 1.0)
                sender.close()
            del sender, sending

    def assert_on_time(self, call: Call[Any], timeout: float) -> None:
        error = call.error(timeout + self.notice)
        assert isinstance(error, DeadlineError), repr(error)

    # -- abort --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("side", ["sender", "receiver"])
    def test_abort_from_another_thread_ends_a_call(self, side: str) -> None:
        self.in_one_process()
        with nothing_left():
            with self.session(chunk_bytes=1000, slots=2) as session:
                call = session.send(bulk(NBYTES)) if side == "sender" else session.receive(ends.receive, {})
                end = session.sender if side == "sender" else session.receiver
                assert not call.wait(0.2), "nothing to abort"
                bounded(self.notice, end.abort)
                error = call.error(self.notice)
                assert isinstance(error, ClosedError), repr(error)
                assert isinstance(error, TransportKitError)
            del session, call, end, error
