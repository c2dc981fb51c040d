"""The backend that `new-backend` writes, with faults in its ends, for the test of the suite."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from typing import ClassVar

from transportkit.cli.plugin_template.backend import PREFIX, SketchExporter, SketchImporter, SketchTransport
from transportkit.deadline import Deadline
from transportkit.errors import DeadlineError, PeerFailedError
from transportkit.lifecycle import memory_of
from transportkit.session.inlet import Inlet
from transportkit.wire import Aborted


def sketched(exporter: type = SketchExporter, importer: type = SketchImporter, name: str = "broken"):
    """The backend that `new-backend` writes, with other ends."""
    ends = {
        "exporter": classmethod(lambda cls, terms, wiring: exporter(terms, wiring)),
        "importer": classmethod(lambda cls, terms, wiring: importer(terms, wiring)),
    }
    return type("BrokenTransport", (SketchTransport,), {"name": name, **ends})


# -- waits ---------------------------------------------------------------------------------------------------------


class _HalfDeaf:
    """Stops what comes later, and not what waits now."""

    def abort(self) -> None:
        self._stopped = True


class _DeafExporter(_HalfDeaf, SketchExporter):
    pass


class _DeafImporter(_HalfDeaf, SketchImporter):
    pass


DeafToAbort = sketched(_DeafExporter, _DeafImporter)

# -- updates that fail, and bytes that come late ----------------------------------------------------------------------


class _LeavesHalf(SketchExporter):
    """Thinks that nobody wants a chunk that is not read at once."""

    def publish(self, slot, header, deadline) -> None:
        if header.update < 1:
            super().publish(slot, header, deadline)
            return
        with contextlib.suppress(DeadlineError):
            self._write(PREFIX.pack(header.update, header.seq, header.nbytes), deadline)
            self._write(memory_of(self.slots[slot])[: header.nbytes], Deadline(0.05, "room"))


LeavesHalf = sketched(_LeavesHalf)


class _Hasty(SketchImporter):
    """Has a deadline of its own for bytes that are always there at once, on its author's desk."""

    def _read(self, view, deadline) -> None:
        super()._read(view, deadline if view.nbytes == 32 else Deadline(0.1, "bytes"))


GivesUpEarly = sketched(importer=_Hasty)


class _Late(SketchExporter):
    """Returns from `publish` before the bytes are there, as a network does."""

    DELAY = 0.03

    def __init__(self, terms, wiring) -> None:
        super().__init__(terms, wiring)
        self._threads = []

    def publish(self, slot, header, deadline) -> None:
        data = PREFIX.pack(header.update, header.seq, header.nbytes) + bytes(
            memory_of(self.slots[slot])[: header.nbytes]
        )
        before = self._threads[-1] if self._threads else None
        self._threads = [*self._threads[-1:], threading.Thread(target=self._later, args=(data, before), name="late")]
        self._threads[-1].start()

    def _later(self, data, before) -> None:
        if before is not None:
            before.join()
        time.sleep(self.DELAY)
        with contextlib.suppress(OSError):
            self._socket.settimeout(10)
            self._socket.sendall(data)

    def close(self) -> None:
        self.abort()
        for thread in self._threads:
            thread.join()
        super().close()


LateBytes = sketched(_Late, name="late")
LostToTheNews = sketched(_Late)


def let_the_core_give_up() -> None:
    """Have the receiving core of this process end every wait for bytes when it hears that their update has failed."""
    check = Inlet.check

    def hasty(self) -> None:
        check(self)
        if any(isinstance(message, Aborted) for message in self._ahead):
            raise PeerFailedError("the sender ended the update", peer=self.name)

    Inlet.check = hasty


# -- after a kill -----------------------------------------------------------------------------------------------------


class _NamedFile(SketchExporter):
    """Puts something where it has a name, and removes it in order only."""

    def __init__(self, terms, wiring) -> None:
        super().__init__(terms, wiring)
        self._folder = tempfile.mkdtemp()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


class LeavesAFile(SketchTransport):
    name: ClassVar[str] = "broken"

    @classmethod
    def exporter(cls, terms, wiring):
        return _NamedFile(terms, wiring)
