"""The updates of a receiver, one after the other: waits for each, and tells the sender of whatever ends one early.

What becomes of the bytes is a sink's part; the ways of taking an update are the `Receiver`'s.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, TypeVar

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    DeadlineError,
    IntegrityError,
    PeerError,
    ProtocolError,
    TransportKitError,
)
from transportkit.manifest import dtype_names
from transportkit.registry import choose
from transportkit.session.inlet import Inlet
from transportkit.session.joining import Joined, Joining
from transportkit.session.ledger import Memory
from transportkit.session.options import Options, hello
from transportkit.session.receiving import Receiving
from transportkit.session.sinks import Sink, ours, told
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transportkit.link import Link
    from transportkit.session.guard import Guard
    from transportkit.session.options import Progress
    from transportkit.session.results import Update

_log = logging.getLogger("transportkit")

S = TypeVar("S", bound=Sink)


class Updates:
    """What a receiver keeps from one update to the next, its link included.

    Args:
        link: to the sender.
        wanted: what the user asked for.
        inherited: per backend, what `Transport.inherit` made.
        guard: the session's; what ends the session is told there.
    """

    def __init__(self, link: Link, wanted: Options, inherited: dict[str, object], guard: Guard) -> None:
        self.inlet = Inlet(link, wanted.timeout)
        self._options = wanted
        self._inherited = inherited
        self._guard = guard
        self._memory = Memory()
        self._joining: Joining | None = None
        self.joined: Joined | None = None
        """What is agreed; None before."""
        self.version: int | None = None
        """Of the last update that landed whole; None before the first, and while a target is torn."""
        self.last: Update | None = None
        self.current: Receiving | None = None
        """The update that is coming in."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when everything is closed."""

    def join(self, deadline: Deadline | None = None) -> Joined:
        """Agree with the sender; what was agreed where that is done. Raises as `Receiver.join`."""
        if self.joined is None:
            link = self.inlet.link
            if deadline is None:
                deadline = self.ready_within(self._options.wait)
            try:
                if self._joining is None:
                    choice = choose(read_site(link.kind), self._options.backends)
                    greeting = hello("receiver", self._options, choice, link.kind)
                    self._joining = Joining(self.inlet, greeting, choice, self._inherited)
                self.joined = self._joining.run(deadline)
            except BaseException as error:
                if not isinstance(error, DeadlineError) or error.silent:
                    self.end(error)
                raise
            link.renew_on_progress = True
            link.control_limit = wire.CONTROL_FRAME_LIMIT
        return self.joined

    def ready_within(self, wait: float | None) -> Deadline:
        """Bounds waiting for a sender that is there and has not begun to agree."""
        what = (
            f"proposal from {self.inlet.name}, which agrees in its `wait()` or `send()`, once all receivers are there,"
        )
        return Deadline(wait, what, "wait")

    @contextlib.contextmanager
    def taking(
        self, make: Callable[[], S], wait: float | None, progress: Progress | None
    ) -> Iterator[tuple[Receiving, S]]:
        """Around one update: waits for it to begin, and tells the sender of whatever ends it early."""
        wait = self._options.wait if wait is None else wait
        deadline = Deadline(wait, f"update from {self.inlet.name}", "wait")
        self.join(deadline)
        sink = make()
        receiving = self._new(progress)
        try:
            self._wait(receiving, deadline)
        except BaseException:
            sink.rest()
            raise
        self.current = receiving
        try:
            if receiving.streamed:
                sink.begin_streamed()
            else:
                sink.begin(receiving.specs)
            receiving.accept()
            yield receiving, sink
            return
        except Exception as error:
            if isinstance(error, TransportKitError):
                self._failed(receiving, error, torn=sink.torn)
                raise
            mapped = ours(error)
            self._failed(receiving, mapped, torn=sink.torn)
            raise mapped from error
        except BaseException as error:
            self._failed(receiving, error, torn=sink.torn)
            raise
        finally:
            self.current = None
            sink.rest()

    def _wait(self, receiving: Receiving, deadline: Deadline) -> None:
        try:
            receiving.wait(deadline)
        except BaseException as error:
            if isinstance(error, DeadlineError) and not receiving.began:
                receiving.leave()
                raise
            self._failed(receiving, error, torn=False)
            raise

    def _new(self, progress: Progress | None) -> Receiving:
        joined = self.join()
        assert self._joining is not None
        return Receiving(
            self.inlet,
            self._joining,
            joined,
            self._agree,
            self._memory,
            dtype_names(),
            progress or self._options.progress,
        )

    def _agree(self, joined: Joined) -> None:
        """The sender has proposed another backend, and it is agreed."""
        self.joined = joined

    def applied(self, receiving: Receiving, sink: Sink) -> Update:
        """The sink has taken all of it: tell the sender."""
        update = receiving.applied(skipped=sink.skipped, missing=sink.missing, cast=sink.cast)
        self.version = update.version
        self.last = update
        return update

    def _failed(self, receiving: Receiving, error: BaseException, *, torn: bool) -> None:
        """An update ended early: the target is torn, the sender is told, and the link is settled or closed."""
        if torn:
            self.version = None
            if isinstance(error, TransportKitError) and error.args and not error.torn:
                error.torn = ("target",)
                error.args = (f"{error.args[0]}; the target is torn: part of it holds new values", *error.args[1:])
        if self._guard.closed is not None:
            return
        if receiving.over and not isinstance(error, PeerError):
            return
        if _ends_session(error, receiving):
            self.end(error)
            return
        code, text = told(error)
        try:
            receiving.fail(code, text, torn=torn)
        except TransportKitError as worse:
            _log.debug("after %s the session could not be settled: %s", error, worse)
            self.end(worse)

    def end(self, error: BaseException | None) -> None:
        """Close everything; the peer learns why."""
        if self._guard.closed is not None:
            return
        self._guard.closed = "it was closed" if error is None else str(error) or type(error).__name__
        self.inlet.tell(wire.Bye() if error is None else wire.Bye(*told(error)))
        try:
            if self.joined is not None:
                self.joined.imports.close()
        except BackendError as failure:
            _log.warning("closing failed: %s", failure)
        finally:
            self.inlet.link.close()
            self.on_end()


def _ends_session(error: BaseException, receiving: Receiving) -> bool:
    """Whether the link can carry no further update after this error."""
    if isinstance(error, PeerError):
        return not receiving.over
    if isinstance(error, IntegrityError):
        return False
    if isinstance(error, DeadlineError | ProtocolError | BackendError):
        return True
    return not isinstance(error, Exception | GeneratorExit)
