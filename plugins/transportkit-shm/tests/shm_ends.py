"""What the tests of `shm` share: a wiring that waits as the core does, terms, headers, what the kernel says of us."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from transportkit.deadline import Deadline
from transportkit.errors import PeerLostError
from transportkit.transport import Site, Terms, Wiring
from transportkit.wire import Chunk, Location
from transportkit_shm.shm import ShmExporter, ShmImporter, ShmTransport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from transportkit_shm.handover import Invitation

TOKEN = bytes(range(32))


class PollWiring(Wiring):
    """Waits for the backend's descriptor and for the peer's death, which is the end of file of ``link``."""

    def __init__(self, address: str = "", link: int = -1) -> None:
        self.site = Site()
        self.inherited = None
        self.address = address
        self.link = link

    def check(self) -> None:
        if self.link >= 0 and select.select([self.link], [], [], 0)[0]:
            raise PeerLostError("the peer is gone", peer="peer")

    def wait_readable(self, fileno: int, deadline: Deadline) -> None:
        poll = select.poll()
        for watched in (fileno, self.link):
            if watched >= 0:
                poll.register(watched, select.POLLIN)
        left = deadline.remaining()
        ready = dict(poll.poll(None if left is None else left * 1000))
        if self.link in ready:
            raise PeerLostError("the peer is gone", peer="peer")
        if not ready:
            raise deadline.error()

    def send_payload(self, receiver: int, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        raise AssertionError("shm sends nothing down the link")

    def recv_payload(self, limit: int, deadline: Deadline) -> bytes:
        raise AssertionError("shm reads nothing from the link")

    def recv_payload_into(self, view: memoryview, deadline: Deadline) -> None:
        raise AssertionError("shm reads nothing from the link")


def terms(receiver: int = -1, *, receivers: int = 1, chunk_bytes: int = 1000, slots: int = 3) -> Terms:
    return Terms("s", TOKEN, "shm", 0, tuple(range(receivers)), receiver, chunk_bytes, slots, "none")


def header(location: Location, nbytes: int) -> Chunk:
    return Chunk(update=1, receiver=0, seq=0, last=False, nbytes=nbytes, digest=0, location=location)


def limit(seconds: float = 5) -> Deadline:
    return Deadline(seconds, "descriptor")


class Background(threading.Thread):
    """Runs a call and keeps how it ended; `outcome` joins."""

    def __init__(self, call: object, *args: object) -> None:
        super().__init__(daemon=True)
        self.call, self.args, self.result = call, args, None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call(*self.args)
        except BaseException as error:
            self.error = error

    def outcome(self) -> BaseException | None:
        self.join(10)
        assert not self.is_alive()
        return self.error


def importer_for(exporter: ShmExporter, address: str = "", number: int = 0, **sizes: int) -> ShmImporter:
    importer = ShmTransport.importer(terms(number, **sizes), PollWiring(address))
    importer.join(exporter.invite(number))
    return importer


def meet(
    address: str = "", receivers: int = 1, chunk_bytes: int = 1000, slots: int = 3
) -> tuple[ShmExporter, list[ShmImporter], list[torch.Tensor]]:
    """A connected lane in this process: exporter, importers, and what each has attached."""
    sizes = {"receivers": receivers, "chunk_bytes": chunk_bytes, "slots": slots}
    exporter = ShmTransport.exporter(terms(**sizes), PollWiring(address))
    importers = [importer_for(exporter, address, number, **sizes) for number in range(receivers)]
    serving = Background(exporter.connect, limit())
    for importer in importers:
        importer.connect(limit())
    assert serving.outcome() is None
    return exporter, importers, [importer.attach(exporter.locate(0, 0).handle) for importer in importers]


def mappings() -> int:
    """How many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("transportkit-shm")


def descriptors() -> dict[int, str]:
    """What this process's descriptors lead to."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
    return found


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """A descriptor limit that leaves this process so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filling: list[int] = []
    gc.collect()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        for _ in range(descriptors):
            os.close(filling.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filling:
            os.close(number)


def bound(path: Path, *, listening: bool) -> socket.socket:
    live = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    live.bind(str(path))
    if listening:
        live.listen(0)
    return live


def dial(invitation: Invitation) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(5)
    stranger.connect(invitation.path or b"\0" + invitation.abstract)
    return stranger


def connects(exporter: ShmExporter, link: str = "") -> None:
    """The exporter still serves its importer."""
    serving = Background(exporter.connect, limit())
    importer = importer_for(exporter, link)
    importer.connect(limit())
    assert serving.outcome() is None
    exporter.slots[0].fill_(4)
    assert importer.attach(exporter.locate(0, 0).handle)[:2].tolist() == [4, 4]
    exporter.close()


def export(link: str = "", receivers: int = 1) -> ShmExporter:
    return ShmTransport.exporter(terms(receivers=receivers), PollWiring(link))
