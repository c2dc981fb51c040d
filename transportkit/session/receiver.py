"""`Receiver`: the receiving end of a session, and its four ways of taking an update."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    BackendError,
    DeadlineError,
    IntegrityError,
    PeerError,
    ProtocolError,
    TransportKitError,
    UsageError,
)
from transportkit.link import as_link
from transportkit.manifest import dtype_names
from transportkit.registry import choose
from transportkit.session.guard import Guard
from transportkit.session.inlet import Inlet
from transportkit.session.joining import Joined, Joining
from transportkit.session.leases import Lease
from transportkit.session.ledger import Memory
from transportkit.session.options import Options, hello, options, per_call
from transportkit.session.receiving import Receiving
from transportkit.session.sinks import IntoFunction, IntoTarget, Leased, Owned, Sink, ours, told
from transportkit.session.walk import walk, write
from transportkit.site import read_site

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from types import TracebackType

    from torch import Tensor, nn

    from transportkit.link import Link
    from transportkit.session.options import Progress
    from transportkit.session.results import Incoming, Update
    from transportkit.session.targets import Binding
    from transportkit.wire import Agreement

_log = logging.getLogger("transportkit")

S = TypeVar("S", bound=Sink)


class Receiver:
    """The receiving end of a session; made by `connect`, `pair`, or over a link of your own by `Receiver(link=...)`.

    One call at a time, from any thread; a call that overlaps another raises `UsageError`. Only `abort` may come at
    any time.
    """

    def __init__(self, link: Any, **keywords: Any) -> None:
        """Receive over a link that exists already.

        Args:
            link: an object with ``send(data, timeout)``, ``recv(timeout) -> bytes``, ``close()`` and optionally
                ``fileno()``.
            **keywords: as for `connect`.
        """
        self._start(as_link(link), options(keywords), {})

    @classmethod
    def over(cls, link: Link, wanted: Options, inherited: dict[str, object]) -> Self:
        """A receiver over one of our own links."""
        self = cls.__new__(cls)
        self._start(link, wanted, inherited)
        return self

    def _start(self, link: Link, wanted: Options, inherited: dict[str, object]) -> None:
        self._guard = Guard("Receiver")
        self._options = wanted
        self._inherited = inherited
        self._inlet = Inlet(link, wanted.timeout)
        self._memory = Memory()
        self._joining: Joining | None = None
        self._joined: Joined | None = None
        self._version: int | None = None
        self._last: Update | None = None
        self._current: Receiving | None = None
        self._binding: Binding | None = None

    # -- the session --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Agree with the sender; does nothing where that is done. `connect` and every other call do it first.

        Raises:
            NegotiationError: no backend serves this pair; the text says why for each.
            PeerError: the sender is gone.
            DeadlineError: the sender said nothing within ``timeout``, or was not ready within ``wait``.
        """
        with self._guard.call("join"):
            self._join()

    @property
    def agreement(self) -> Agreement:
        """Who uses which backend, and why not another one; print it. Raises `UsageError` before anything is agreed."""
        if self._joined is None:
            self._guard.check()
            raise UsageError("nothing is agreed yet; call join() or enter the receiver (`with`) first")
        return self._joined.agreement

    @property
    def version(self) -> int | None:
        """The version of the last update that landed whole; None before the first, and while a target is torn."""
        return self._version

    @property
    def last(self) -> Update | None:
        """The last update that landed whole."""
        return self._last

    @property
    def incoming(self) -> Incoming | None:
        """The update that is coming in, from its first chunk to its end; for the loops of `receive` and `chunks`."""
        return None if self._current is None else self._current.incoming

    @property
    def held(self) -> int:
        """How many slots are held back because tensors of earlier leases are alive."""
        return 0 if self._joined is None else self._joined.imports.held

    @property
    def closed(self) -> str | None:
        """Why no further update can come over this session; None while it can."""
        return self._guard.closed

    def abort(self) -> None:
        """End the session at once, from any thread: a running call raises `ClosedError`. Never blocks."""
        self._inlet.link.abort()
        if self._joined is not None:
            self._joined.imports.importer.abort()

    def close(self) -> None:
        """End the session in order. Idempotent. Raises `UsageError` while a call runs in another thread."""
        self._finish(None)

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._finish(error)

    # -- four ways to take an update ----------------------------------------------------------------------------------

    def load_into(
        self,
        target: nn.Module | Mapping[str, Tensor],
        *,
        strict: bool = True,
        cast: bool = False,
        wait: float | None = None,
        progress: Progress | None = None,
    ) -> Update:
        """Write the next update into existing tensors, in place.

        Args:
            target: a module, whose `state_dict` names are written, or a mapping of names to tensors.
            strict: refuse an update whose names are not exactly the target's; else `Update.skipped` and
                `Update.missing` tell.
            cast: convert values where the dtypes differ; `Update.cast` tells.
            wait: bounds waiting for the update to begin, in seconds; by default the session's.
            progress: called with (bytes done, bytes in all); by default the session's.

        Raises:
            TargetError: the update does not suit the target. The sender is told, and nothing was written, unless it
                came from a bare iterator, whose earlier tensors are then written already.
            PeerError: the sender ended the update or is gone; ``torn`` tells whether the target is half written.
            DeadlineError: nothing began within ``wait`` (then the session is as it was), or no progress within
                ``timeout``.
        """

        per_call(wait, progress)

        def make() -> IntoTarget:
            return IntoTarget(target, strict=strict, cast=cast, last=self._binding)

        with self._guard.call("load_into"), self._updating(make, wait, progress) as (receiving, sink):
            self._binding = None
            update = self._fill(receiving, sink)
            self._binding = sink.binding
            return update

    def apply(
        self,
        function: Callable[[list[tuple[str, Tensor]]], Any],
        *,
        wait: float | None = None,
        progress: Progress | None = None,
    ) -> Update:
        """Call ``function`` with lists of complete (name, tensor) pairs of the next update, in order.

        The tensors are for reading, and only during the call. One above ``chunk_bytes`` is assembled in a buffer that
        is used again for the next such tensor. A tied name comes right after the tensor that it shares.

        Args:
            function: `model.load_weights` of an inference engine, say.
            wait: bounds waiting for the update to begin, in seconds; by default the session's.
            progress: called with (bytes done, bytes in all); by default the session's.

        Raises:
            CallbackError: ``function`` raised; its exception is the cause, and the sender is told.
            PeerError, DeadlineError: as for `load_into`.
        """
        if not callable(function):
            raise UsageError(f"apply() takes a callable, not {type(function).__name__}")
        per_call(wait, progress)
        with self._guard.call("apply"):

            def make() -> IntoFunction:
                return IntoFunction(function, self._options.device, self._join().terms.chunk_bytes)

            with self._updating(make, wait, progress) as (receiving, sink):
                return self._fill(receiving, sink)

    def receive(self, *, wait: float | None = None, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
        """The (name, tensor) pairs of the next update, each as soon as it is complete; the tensors are the caller's
        own.

        Leaving the loop early fails the update, and the sender is told. Raises as `load_into`, from within the loop.
        """
        self._guard.check()
        per_call(wait, progress)
        return self._receive(wait, progress)

    def chunks(self, *, wait: float | None = None, progress: Progress | None = None) -> Iterator[Lease]:
        """The chunks of the next update as leases, which are read in place: nothing is copied.

        A lease iterates as (spec, byte offset, tensor) and ends at the next step of the loop. Raises as `receive`, and
        `LeaseError` when so many tensors are kept that no slot is left for the next chunk.
        """
        self._guard.check()
        per_call(wait, progress)
        return self._chunks(wait, progress)

    def _receive(self, wait: float | None, progress: Progress | None) -> Generator[tuple[str, Tensor], None, Update]:
        with (
            self._guard.call("receive"),
            self._updating(lambda: Owned(self._options.device), wait, progress) as (
                receiving,
                sink,
            ),
        ):
            with contextlib.closing(walk(receiving, sink)) as chunks:
                for chunk, pieces in chunks:
                    write(receiving, sink, chunk, pieces)
                    del chunk
                    yield from sink.ready()
            return self._applied(receiving, sink)

    def _chunks(self, wait: float | None, progress: Progress | None) -> Generator[Lease, None, Update]:
        with self._guard.call("chunks"), self._updating(Leased, wait, progress) as (receiving, sink):
            with contextlib.closing(walk(receiving, sink)) as chunks:
                for chunk, pieces in chunks:
                    lease = Lease(chunk, pieces, sink.specs, sink.tied, receiving.imports, receiving.reroute)
                    try:
                        yield lease
                    except BaseException:
                        lease.end(leaving=True)
                        raise
                    lease.end()
            return self._applied(receiving, sink)

    # -- one update ---------------------------------------------------------------------------------------------------

    def _fill(self, receiving: Receiving, sink: Sink) -> Update:
        """Let the sink take every chunk."""
        with contextlib.closing(walk(receiving, sink)) as chunks:
            for chunk, pieces in chunks:
                write(receiving, sink, chunk, pieces)
        sink.finish()
        return self._applied(receiving, sink)

    @contextlib.contextmanager
    def _updating(
        self, make: Callable[[], S], wait: float | None, progress: Progress | None
    ) -> Iterator[tuple[Receiving, S]]:
        """Around one update: waits for it to begin, and tells the sender of whatever ends it early."""
        wait = self._options.wait if wait is None else wait
        deadline = Deadline(wait, f"update from {self._inlet.name}", "wait")
        self._join(deadline)
        sink = make()
        receiving = self._new(progress)
        try:
            self._wait(receiving, deadline)
        except BaseException:
            sink.rest()
            raise
        self._current = receiving
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
            self._current = None
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
        joined = self._join()
        assert self._joining is not None
        return Receiving(
            self._inlet,
            self._joining,
            joined,
            self._agree,
            self._memory,
            dtype_names(),
            progress or self._options.progress,
        )

    def _agree(self, joined: Joined) -> None:
        """The sender has proposed another backend, and it is agreed."""
        self._joined = joined

    def _applied(self, receiving: Receiving, sink: Sink) -> Update:
        update = receiving.applied(skipped=sink.skipped, missing=sink.missing, cast=sink.cast)
        self._version = update.version
        self._last = update
        return update

    def _failed(self, receiving: Receiving, error: BaseException, *, torn: bool) -> None:
        """An update ended early: the target is torn, the sender is told, and the link is settled or closed."""
        if torn:
            self._version = None
            if isinstance(error, TransportKitError) and error.args and not error.torn:
                error.torn = ("target",)
                error.args = (f"{error.args[0]}; the target is torn: part of it holds new values", *error.args[1:])
        if self._guard.closed is not None:
            return
        if receiving.over and not isinstance(error, PeerError):
            return
        if _ends_session(error, receiving):
            self._end(error)
            return
        code, text = told(error)
        try:
            receiving.fail(code, text, torn=torn)
        except TransportKitError as worse:
            _log.debug("after %s the session could not be settled: %s", error, worse)
            self._end(worse)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _join(self, deadline: Deadline | None = None) -> Joined:
        if self._joined is None:
            link = self._inlet.link
            if deadline is None:
                deadline = Deadline(self._options.wait, f"word from {self._inlet.name}", "wait")
            try:
                if self._joining is None:
                    choice = choose(read_site(link.kind), self._options.backends)
                    greeting = hello("receiver", self._options, choice, link.kind)
                    self._joining = Joining(self._inlet, greeting, choice, self._inherited)
                self._joined = self._joining.run(deadline)
            except BaseException as error:
                if not isinstance(error, DeadlineError) or error.silent:
                    self._end(error)
                raise
            link.renew_on_progress = True
            link.control_limit = wire.CONTROL_FRAME_LIMIT
        return self._joined

    def _finish(self, error: BaseException | None) -> None:
        if self._guard.closed is not None:
            return
        if self._guard.forked:
            self._guard.closed = "inherited by a forked child"
            return
        if self._guard.elsewhere:
            raise UsageError(f"{self._guard.running}() is running in another thread; `abort()` ends it")
        if self._guard.running in ("load_into", "apply", "join"):
            raise UsageError(f"close() was called within {self._guard.running}(); raise an exception to end it")
        receiving = self._current
        if receiving is not None and receiving.began:
            code, text = told(GeneratorExit() if error is None else error)
            with contextlib.suppress(TransportKitError):
                receiving.fail(code, text, torn=False)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close everything; the peer learns why."""
        if self._guard.closed is not None:
            return
        self._guard.closed = "it was closed" if error is None else str(error) or type(error).__name__
        self._inlet.tell(wire.Bye() if error is None else wire.Bye(*told(error)))
        try:
            if self._joined is not None:
                self._joined.imports.close()
        except BackendError as failure:
            _log.warning("closing failed: %s", failure)
        finally:
            self._inlet.link.close()


def _ends_session(error: BaseException, receiving: Receiving) -> bool:
    """Whether the link can carry no further update after this error."""
    if isinstance(error, PeerError):
        return not receiving.over
    if isinstance(error, IntegrityError):
        return False
    if isinstance(error, DeadlineError | ProtocolError | BackendError):
        return True
    return not isinstance(error, Exception | GeneratorExit)
