"""`Receiver`: the receiving end of a session, and its four ways of taking an update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from transportkit.errors import TransportKitError, UsageError
from transportkit.link import as_link
from transportkit.session.guard import Guard
from transportkit.session.leases import Lease
from transportkit.session.options import Options, options, per_call
from transportkit.session.sinks import IntoFunction, IntoTarget, Leased, Owned, told
from transportkit.session.updates import Updates
from transportkit.session.walk import walk, write

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from types import TracebackType

    from torch import Tensor, nn

    from transportkit.link import Link
    from transportkit.session.options import Progress
    from transportkit.session.receiving import Receiving
    from transportkit.session.results import Incoming, Update
    from transportkit.session.sinks import Sink
    from transportkit.session.targets import Binding
    from transportkit.wire import Agreement


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
        self._updates = Updates(link, wanted, inherited, self._guard)
        self._binding: Binding | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "a Receiver does not go to another process: make it there (`connect`), or hand over an end of `pair`"
        )

    # -- the session --------------------------------------------------------------------------------------------------

    def join(self, wait: float | None = None) -> None:
        """Agree with the sender; does nothing where that is done. `connect` and every other call do it first.

        Args:
            wait: bounds waiting until the sender is ready, in seconds; by default the session's.

        Raises:
            NegotiationError: no backend serves this pair; the text says why for each.
            PeerError: the sender is gone.
            DeadlineError: the sender said nothing within ``timeout``, or was not ready within ``wait``.
        """
        per_call(wait, None)
        with self._guard.call("join"):
            self._updates.join(None if wait is None else self._updates.ready_within(wait))

    @property
    def agreement(self) -> Agreement:
        """Who uses which backend, and why not another one; print it. Raises `UsageError` before anything is agreed."""
        if self._updates.joined is None:
            self._guard.check()
            raise UsageError("nothing is agreed yet; call join() or enter the receiver (`with`) first")
        return self._updates.joined.agreement

    @property
    def version(self) -> int | None:
        """The version of the last update that landed whole; None before the first, and while a target is torn."""
        return self._updates.version

    @property
    def last(self) -> Update | None:
        """The last update that landed whole."""
        return self._updates.last

    @property
    def incoming(self) -> Incoming | None:
        """The update that is coming in, from its first chunk to its end; for the loops of `receive` and `chunks`."""
        return None if self._updates.current is None else self._updates.current.incoming

    @property
    def held(self) -> int:
        """How many slots are held back because tensors of earlier leases are alive."""
        return 0 if self._updates.joined is None else self._updates.joined.imports.held

    @property
    def closed(self) -> str | None:
        """Why no further update can come over this session; None while it can."""
        return self._guard.closed

    def abort(self) -> None:
        """End the session at once, from any thread: a running call raises `ClosedError`. Never blocks."""
        self._updates.inlet.link.abort()
        if self._updates.joined is not None:
            self._updates.joined.imports.importer.abort()

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

        with self._guard.call("load_into"), self._updates.taking(make, wait, progress) as (receiving, sink):
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
                return IntoFunction(function, self._options.device, self._updates.join().terms.chunk_bytes)

            with self._updates.taking(make, wait, progress) as (receiving, sink):
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

        def make() -> Owned:
            return Owned(self._options.device)

        with self._guard.call("receive"), self._updates.taking(make, wait, progress) as (receiving, sink):
            with contextlib.closing(walk(receiving, sink)) as chunks:
                for chunk, pieces in chunks:
                    write(receiving, sink, chunk, pieces)
                    del chunk
                    yield from sink.ready()
            return self._updates.applied(receiving, sink)

    def _chunks(self, wait: float | None, progress: Progress | None) -> Generator[Lease, None, Update]:
        with self._guard.call("chunks"), self._updates.taking(Leased, wait, progress) as (receiving, sink):
            with contextlib.closing(walk(receiving, sink)) as chunks:
                for chunk, pieces in chunks:
                    lease = Lease(chunk, pieces, sink.specs, sink.tied, receiving.imports, receiving.reroute)
                    try:
                        yield lease
                    except BaseException:
                        lease.end(leaving=True)
                        raise
                    lease.end()
            return self._updates.applied(receiving, sink)

    # -- one update ---------------------------------------------------------------------------------------------------

    def _fill(self, receiving: Receiving, sink: Sink) -> Update:
        """Let the sink take every chunk."""
        with contextlib.closing(walk(receiving, sink)) as chunks:
            for chunk, pieces in chunks:
                write(receiving, sink, chunk, pieces)
        sink.finish()
        return self._updates.applied(receiving, sink)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _finish(self, error: BaseException | None) -> None:
        if not self._guard.may_end("load_into", "apply", "join"):
            return
        receiving = self._updates.current
        if receiving is not None and receiving.began:
            code, text = told(GeneratorExit() if error is None else error)
            with contextlib.suppress(TransportKitError):
                receiving.fail(code, text, torn=False)
        self._updates.end(error)
