"""What all tests build on: the backend under test, its capabilities, and how to drive it; no test belongs here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from transportkit import registry
from transportkit.site import read_site
from transportkit.testing.installing import installed
from transportkit.testing.lanes import DirectLane
from transportkit.testing.sessions import Session
from transportkit.wire import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transportkit.transport import Transport


class Subject:
    """The backend under test, and the flags by which a backend's author says what it cannot do."""

    backend: ClassVar[str] = ""
    """The name of the installed backend; or give `transport`."""
    transport: ClassVar[type[Transport] | None] = None
    """The backend's class, for one that is not installed."""
    same_process: ClassVar[bool] = True
    """Whether exporter and importer may live in one process. If not, tests that need that are skipped, and sessions
    have their receiver in a process of its own."""
    links: ClassVar[tuple[str, ...]] = ("pair", "unix", "tcp")
    """The kinds of link on which the backend can be agreed between two processes of this host."""
    device: ClassVar[str] = "cpu"
    """Where the tensors of both sides are."""
    options: ClassVar[dict[str, Any]] = {}
    """Further keywords for the sessions of both sides: ``{"allow_plaintext": True}``."""
    patience: ClassVar[float] = 15.0
    """Seconds after which a step that should have ended counts as hung."""
    notice: ClassVar[float] = 5.0
    """Seconds within which the death of a peer, an abort or a passed deadline must be noticed."""
    probe_seconds: ClassVar[float] = 0.2
    """How long a probe may take; the quickest of several counts."""
    memory_slack: ClassVar[int] = 32 << 20
    """Bytes by which the memory of a process may grow over many updates."""

    def subject(self) -> type[Transport]:
        """The class under test."""
        if self.transport is not None:
            return self.transport
        assert self.backend, "say which backend: `backend = 'name'`, or `transport = MyTransport`"
        loaded = registry.load(self.backend)
        if isinstance(loaded, registry.Failure):
            raise loaded.error()
        return loaded.transport

    @property
    def fan_out(self) -> bool:
        return self.subject().fan_out

    @property
    def digests(self) -> bool:
        """Whether digests are taken: slots are host memory."""
        return not self.subject().device_slots

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        transport = self.subject()
        with installed(transport):
            answer = transport.probe(read_site("pair"))
            if isinstance(answer, Unavailable):
                pytest.skip(f"{transport.name} is unavailable here: {answer.reason}")
            yield

    def session(self, transport: type[Transport] | None = None, **keywords: Any) -> Session:
        """A session over the backend, or over one that wraps it and is `installed`."""
        given: dict[str, Any] = {"process": not self.same_process, "device": self.device, "within": self.patience}
        return Session(transport or self.subject(), **{**self.options, **given, **keywords})

    def lane(self, transport: type[Transport] | None = None, **keywords: Any) -> DirectLane:
        """A lane in this process; skips where the backend's ends need two."""
        self.in_one_process()
        return DirectLane(transport or self.subject(), device=self.device, within=self.patience, **keywords)

    def in_one_process(self) -> None:
        """Skip the test where the backend's ends need two processes."""
        if not self.same_process:
            pytest.skip("exporter and importer of this backend need two processes")
