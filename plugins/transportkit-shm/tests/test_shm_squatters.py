"""Who squats where an exporter should be, and what an importer takes from it: nothing but the session's own memory."""

from __future__ import annotations

import array
import gc
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import shm_ends as ends

from transportkit.errors import BackendError, DeadlineError, ResourceError
from transportkit.wire import raw
from transportkit_shm import arena, handover
from transportkit_shm.giver import Giver
from transportkit_shm.handover import CLAIM, GREETING, MAGIC, Invitation, prove
from transportkit_shm.shm import ShmTransport
from transportkit_shm.taker import Taker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(30)

Squatter = Callable[[socket.socket], object]
Ancillary = list[tuple[int, int, bytes]]


def answer(
    *descriptors: int, token: bytes = ends.TOKEN, ancillary: list[tuple[int, int, bytes]] | None = None
) -> Squatter:
    def squat(guest: socket.socket) -> None:
        nonce = bytes(32)
        guest.send(MAGIC + nonce)
        _, its_nonce, _ = CLAIM.unpack(guest.recv(CLAIM.size))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        guest.sendmsg([prove(token, b"exporter", 0, nonce, its_nonce)], ancillary or rights)

    return squat


@pytest.fixture
def squatted(tmp_path: Path) -> Iterator[Callable[[Squatter], Taker]]:
    """A taker whose invitation leads to somebody who behaves as told."""
    with ends.bound(tmp_path / "squatter", listening=True) as listener:
        threads = []

        def squat(behaviour: Squatter) -> Taker:
            def serve() -> None:
                select.select([listener], [], [], 10)  # a waiting accept has taken its descriptor already
                with listener.accept()[0] as guest:
                    behaviour(guest)
                    select.select([guest], [], [], 5)

            threads.append(ends.Background(serve))
            return Taker(Invitation(path=os.fsencode(tmp_path / "squatter")), ends.TOKEN, 0, "")

        yield squat
        for thread in threads:
            thread.outcome()


PIPE = os.pipe()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (lambda guest: guest.shutdown(socket.SHUT_RDWR), "hung up"),
        (lambda guest: guest.send(b"x" * 5000), "instead"),
        (lambda guest: guest.send(b"x"), "instead"),
        (lambda guest: guest.send(b"x" * GREETING), "no exporter"),
        (lambda guest: (guest.send(MAGIC + bytes(32)), guest.recv(100), guest.shutdown(socket.SHUT_RDWR)), "hung up"),
        (answer(0, token=bytes(32)), "does not know the session's token"),
        (answer(), "no descriptor came"),
        (answer(0, 1), "no descriptor came"),
        (answer(*[0] * 100), "no descriptor came"),
    ],
)
def test_squatters_are_found_out(squatted: Callable[[Squatter], Taker], behaviour: Squatter, reason: str) -> None:
    taker = squatted(behaviour)
    before = sorted(ends.descriptors())
    with pytest.raises(BackendError, match=reason) as caught:
        taker.fetch(ends.PollWiring(), ends.limit())
    assert caught.value.backend == "shm"
    assert len(set(ends.descriptors()) - set(before)) <= 1  # the squatter's own end


def test_credentials_instead_of_a_descriptor(squatted: Callable[[Squatter], Taker]) -> None:
    mine = array.array("i", [os.getpid(), os.getuid(), os.getgid()]).tobytes()
    taker = squatted(answer(ancillary=[(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)]))
    with pytest.raises(BackendError, match="no descriptor came"):
        taker.fetch(ends.PollWiring(), ends.limit())


def test_a_silent_squatter_costs_no_more_than_the_deadline(squatted: Callable[[Squatter], Taker]) -> None:
    taker = squatted(lambda guest: None)
    with pytest.raises(DeadlineError):
        taker.fetch(ends.PollWiring(), ends.limit(0.2))


def test_a_received_descriptor_is_closed_on_exec(squatted: Callable[[Squatter], Taker]) -> None:
    descriptor = squatted(answer(PIPE[0])).fetch(ends.PollWiring(), ends.limit())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["pipe", "unsealed", "small"])
def test_wrong_memory_is_not_mapped(kind: str) -> None:
    gc.collect()
    mapped = ends.mappings()
    memory = {
        "pipe": lambda: os.dup(PIPE[0]),
        "unsealed": lambda: os.memfd_create("x"),
        "small": lambda: arena.create(arena.Layout(2, 1000)),
    }[kind]()
    before = len(ends.descriptors()) - 1
    impostor = Giver(memory, ends.TOKEN, [0], 0, "")
    importer = ShmTransport.importer(ends.terms(0), ends.PollWiring())
    importer.join(raw(impostor.invitation))
    serving = ends.Background(impostor.serve, ends.PollWiring(), ends.limit())
    with pytest.raises(BackendError, match=r"no memory file|not sealed|8192 bytes, the terms need 12288"):
        importer.connect(ends.limit())
    assert serving.outcome() is None
    assert len(ends.descriptors()) == before
    assert ends.mappings() == mapped


def test_the_importers_descriptor_limit(squatted: Callable[[Squatter], Taker]) -> None:
    taker = squatted(answer(PIPE[0]))
    handover.overflow_uid()  # opens a file the first time
    # The other end lives in this process too: it takes one for the connection, the importer one for its socket.
    with ends.room_for(2), pytest.raises(ResourceError, match=r"no descriptor came.*descriptor limit"):
        taker.fetch(ends.PollWiring(), ends.limit())


def test_no_descriptor_is_left_for_a_socket() -> None:
    taker = Taker(Invitation(path=b"/nowhere"), ends.TOKEN, 0, "")
    with ends.room_for(0), pytest.raises(ResourceError, match="descriptor limit"):
        taker.fetch(ends.PollWiring(), ends.limit())
