"""`Sender`: the sending end of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor, nn

from transportkit import wire
from transportkit.deadline import Deadline
from transportkit.errors import (
    PeerClosedError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    TransportKitError,
    UsageError,
)
from transportkit.link import as_link
from transportkit.registry import choose
from transportkit.session.admitting import admit
from transportkit.session.gathering import Gathering
from transportkit.session.guard import Guard
from transportkit.session.lane import acknowledge
from transportkit.session.opening import Ground, Opening
from transportkit.session.options import Options, hello, options, per_call, texts
from transportkit.session.peers import Peers, code_of, unexpected
from transportkit.session.plans import Plans
from transportkit.session.sending import Sending
from transportkit.session.sources import Post, Source, Static, Streamed, resolve
from transportkit.site import read_site

if TYPE_CHECKING:
    from types import TracebackType

    from transportkit.link import Link
    from transportkit.manifest import Layout
    from transportkit.session.lane import Lane
    from transportkit.session.options import Progress
    from transportkit.session.peers import Peer
    from transportkit.session.results import Report
    from transportkit.wire import Agreement

OnLoss = Literal["raise", "continue"]
Sendable = nn.Module | Mapping[str, Tensor] | Source | Iterable[tuple[str, Tensor]]


class Sender:
    """The sending end of a session; made by `serve`, `pair`, or over links of your own by `Sender(links=[...])`.

    One call at a time, from any thread; a call that overlaps another raises `UsageError`. Only `abort` may come at
    any time.
    """

    def __init__(self, links: Iterable[Any], **keywords: Any) -> None:
        """Send over links that exist already.

        Args:
            links: one for each receiver: objects with ``send(data, timeout)``, ``recv(timeout) -> bytes``,
                ``close()`` and optionally ``fileno()``.
            **keywords: as for `serve`.
        """
        self._start([as_link(link) for link in links], options(keywords), {})

    @classmethod
    def over(cls, links: list[Link], wanted: Options, inherited: dict[str, object]) -> Self:
        """A sender over links of our own."""
        self = cls.__new__(cls)
        self._start(links, wanted, inherited)
        return self

    @classmethod
    def listening(cls, address: str, receivers: int, wanted: Options, *, late: bool = False) -> Self:
        """A sender that listens for its receivers."""
        self = cls.__new__(cls)
        self._prepare(address.partition(":")[0], receivers, wanted, {}, late=late)
        self._links = []
        try:
            self._address = self._gathering.listen(address, wanted.authkey, wanted.timeout)
        except BaseException:
            self._gathering.close()
            raise
        return self

    def _start(self, links: list[Link], wanted: Options, inherited: dict[str, object]) -> None:
        if not links:
            raise UsageError("a sender needs at least one link")
        self._prepare(links[0].kind, len(links), wanted, inherited)
        self._links: list[Link] = links

    def _prepare(
        self, kind: str, receivers: int, wanted: Options, inherited: dict[str, object], *, late: bool = False
    ) -> None:
        self._guard = Guard("Sender")
        self._options = wanted
        self._address = ""
        choice = choose(read_site(kind), wanted.backends)
        self._peers = Peers(wanted.timeout)
        self._ground = Ground(self._peers, hello("sender", wanted, choice, kind), choice, inherited)
        self._gathering = Gathering(self._peers, receivers, self._ground.hello, choice, late=late)
        self._lanes: list[Lane] = []
        self._again: frozenset[int] = frozenset()
        self._agreement: Agreement | None = None
        self._plans = Plans()
        self._previous: Layout | None = None
        self._updates = 0
        self._version = 0

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "a Sender does not go to another process: make it there (`serve`), or hand over an end of `pair`"
        )

    # -- the session --------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen; empty where it does not."""
        return self._address

    def wait(self, wait: float | None = None) -> None:
        """Wait for the receivers and agree with them; does nothing where that is done. Every other call does it first.

        A connection that fails before its receiver is known costs only itself: it is counted in `failures` and logged.

        Args:
            wait: bounds waiting for the receivers, in seconds; by default the session's.

        Raises:
            NegotiationError: no backend serves some receiver; the text says why for each.
            PeerError: a receiver was lost or failed while the backends were tried.
            DeadlineError: not all came within ``wait`` (those who came stay), or one made no progress within
                ``timeout``.
        """
        per_call(wait, None)
        with self._guard.call("wait"):
            self._open(None if wait is None else Deadline(wait, "receiver", "wait"))

    @property
    def agreement(self) -> Agreement:
        """Who uses which backend, and why not another one; print it. Those who have left are in it until the next one.

        Raises `UsageError` before anything is agreed.
        """
        if self._agreement is None:
            self._guard.check()
            raise UsageError("nobody is agreed with yet; enter the sender (`with`) or call wait() first")
        return self._agreement

    @property
    def failures(self) -> int:
        """How many connections came to nothing before they were agreed: strangers, wrong keys, wrong versions."""
        return self._gathering.failures

    @property
    def late(self) -> int:
        """How many receivers have come beyond ``receivers=`` and wait for `admit`; always 0 without ``late=True``."""
        return self._gathering.late

    def admit(self, *, wait: float | None = None) -> tuple[int, ...]:
        """Take in the receivers that came late and are held; the next update goes to them, too.

        Those who are there already are not disturbed, but that their lanes take the newcomers in at the next update,
        where one lane can serve them all.

        Args:
            wait: how long to wait for one to come, in seconds; by default not at all.

        Returns:
            The numbers of those who were taken in; empty where nobody had come.

        Raises:
            NegotiationError: no backend serves any of them; the session is as it was.
        """
        per_call(wait, None)
        with self._guard.call("admit"):
            self._open()
            deadline = Deadline(wait or 0, "receiver that comes late", "wait")
            newcomers = self._gathering.admit(deadline)
            if not newcomers:
                return ()
            self._peers.on_message = self._take_late
            first = 1 + max((lane.terms.lane for lane in self._lanes), default=-1)
            agreed = admit(self._ground, newcomers, first)
            if agreed is None:
                return ()
            agreement, lanes = agreed
            shared = {lane.backend for lane in lanes if self._ground.choice.transports[lane.backend].fan_out}
            olds = [lane for lane in self._lanes if lane.backend in shared]
            backends = {lane.backend for lane in olds}
            both = olds + [lane for lane in lanes if lane.backend in backends]
            self._again |= {number for lane in both for number in lane.receivers}
            self._lanes += lanes
            self._agree(agreement)
            numbers = tuple(sorted(each.receiver for each in agreement.assignments))
            self._settle_in(self._peers[number] for number in numbers)
            return numbers

    @property
    def closed(self) -> str | None:
        """Why no further update can come over this session; None while it can."""
        return self._guard.closed

    def abort(self) -> None:
        """End the session at once, from any thread: a running call raises `ClosedError`. Never blocks."""
        self._gathering.abort()
        for peer in list(self._peers):
            peer.link.abort()
        for lane in list(self._lanes):
            lane.exporter.abort()

    def close(self) -> None:
        """End the session in order. Idempotent. Raises `UsageError` while a call runs in another thread."""
        self._finish(None)

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException as error:
            self._finish(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._finish(error)

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(
        self,
        source: Sendable,
        *,
        version: int | None = None,
        post: Post | None = None,
        on_loss: OnLoss = "raise",
        wait: float | None = None,
        progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Report:
        """Send one update; returns when every receiver has applied it. From then on the source may change.

        Args:
            source: a module (its `state_dict`: persistent buffers and every tied name), a mapping of names to
                tensors, a `Source`, or an iterable of (name, tensor). It is read once, in order, on this thread.
            version: of the update; by default one more than the last.
            post: ``post((name, tensor)) -> tensor``, applied to each before it is sent; may change dtype and shape.
            on_loss: what becomes of the update where one of several receivers is lost or fails in it: ``"raise"`` ends
                it for all; with ``"continue"`` it goes on for the others, `Report.lost` tells whom it did not reach,
                and only the failure of the last one raises.
            wait: bounds waiting for the receivers to begin, in seconds; by default the session's.
            progress: called with (bytes done, bytes in all); by default the session's.
            metadata: text that travels with the update, to `Update.metadata`.

        Raises:
            TensorError: a tensor cannot travel; with a module, mapping or `Source` nothing has moved.
            SourceError: the source or ``post`` raised; the receivers are told.
            PeerFailedError: a receiver refused the update or failed; ``torn`` names those whose target is half written.
            PeerError: a receiver is gone; the session is closed.
            DeadlineError: nobody was ready within ``wait`` (then the session is as it was), or no progress within
                ``timeout``.
        """
        if version is not None and (type(version) is not int or not 0 <= version < 1 << 63):
            raise UsageError(f"version must be an integer from 0 to 2**63 - 1, not {version!r}")
        if on_loss not in ("raise", "continue"):
            raise UsageError(f'on_loss must be "raise" or "continue", not {on_loss!r}')
        per_call(wait, progress)
        data = texts(metadata)
        with self._guard.call("send"):
            wait = self._options.wait if wait is None else wait
            deadline = Deadline(wait, "receiver ready for the update", "wait")
            self._open(deadline)
            if not len(self._peers):
                raise self._deserted()
            resolved = resolve(source, post, self._previous)
            self._updates += 1
            sending = Sending(
                self._updates,
                self._version + 1 if version is None else version,
                resolved,
                self._lanes,
                self._ground,
                self._plans,
                data,
                progress or self._options.progress,
                deadline,
                forgiving=on_loss == "continue",
                again=self._again,
                agreed=self._agree,
            )
            try:
                report = sending.run()
            except BaseException as error:
                self._failed(sending, error)
                raise
            finally:
                self._peers.on_message = self._take_late
                self._again = sending.again
                if isinstance(resolved, Streamed):
                    resolved.pairs.close()
            self._version = report.version
            self._previous = resolved.manifest.layout if isinstance(resolved, Static) else None
            return report

    def _deserted(self) -> PeerError:
        """Nobody is left to send to: why, where the last one did not leave in order."""
        advice = "; `admit` takes in those who come late" if self._gathering.holds else "; open a new session"
        last = self._peers.last
        if isinstance(last, PeerLostError):
            return PeerLostError(f"{last}; no receiver is left{advice}", peer=last.peer)
        return PeerClosedError(f"no receiver is left{advice}", peer="every receiver")

    def _take_late(self, peer: Peer, message: wire.Message) -> None:
        """What a receiver still says of updates that are over: of leases that it held, and of what it failed in."""
        match message:
            case wire.Ack():
                acknowledge(self._lanes, message, peer.number)
            case wire.Present():
                peer.ready = False  # it may have said so once more before it saw the update
            case wire.Accept() | wire.Applied() | wire.Failed():
                pass
            case wire.Stranded():
                peer.conversation.received(message)
                self._again |= {peer.number}
            case _:
                raise unexpected(message, peer.name)

    def _failed(self, sending: Sending, error: BaseException) -> None:
        """An update ended early: the receivers are told, and the session is as before or closed."""
        sending.abort(error)
        if sending.settled(error):
            words = sending.last_words()
            if words is not None and isinstance(error, PeerFailedError):
                error.code, error.text = words.code, words.text
                error.args = (f"{error.peer} failed: {words.code}: {words.text}", *error.args[1:])
        torn = sending.torn
        if torn and isinstance(error, TransportKitError):
            error.torn = torn
            error.args = (f"{error.args[0]}; torn: {', '.join(torn)}", *error.args[1:])
        others_may_come = self._gathering.holds and not len(self._peers) and isinstance(error, TransportKitError)
        if not sending.settled(error) and not others_may_come:
            self._end(error)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _open(self, deadline: Deadline | None = None) -> None:
        if self._agreement is not None:
            return
        if deadline is None:
            deadline = Deadline(self._options.wait, "receiver", "wait")
        try:
            while self._links:
                self._gathering.seat(self._links.pop(0))
            self._gathering.wait(deadline)
        except BaseException as error:
            if self._gathering.short:
                self._end(error)
            raise
        try:
            self._agreement, self._lanes = Opening(self._ground, self._peers.numbers).run()
        except BaseException as error:
            self._gathering.dismiss(error)
            if not self._address:
                self._end(error)
            raise
        self._settle_in(self._peers)

    def _settle_in(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            peer.link.renew_on_progress = True
            peer.link.control_limit = wire.CONTROL_FRAME_LIMIT

    def _agree(self, agreement: Agreement) -> None:
        """Some receivers have another lane now."""
        assert self._agreement is not None
        fresh = {each.receiver: each for each in agreement.assignments}
        kept = [each for each in self._agreement.assignments if each.receiver in self._peers.numbers]
        merged = {each.receiver: each for each in kept} | fresh
        assignments = tuple(merged[number] for number in sorted(merged))
        self._agreement = wire.Agreement(agreement.session, agreement.sender, assignments)

    def _finish(self, error: BaseException | None) -> None:
        if self._guard.may_end("send", "wait", "admit"):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close everything; the peers learn why."""
        if self._guard.closed is not None:
            return
        self._guard.closed = "it was closed" if error is None else str(error) or type(error).__name__
        self._peers.tell(wire.Bye() if error is None else wire.Bye(code_of(error), wire.plain(str(error))))
        for lane in self._lanes:
            lane.close()
        self._lanes = []
        for peer in self._peers:
            peer.link.close()
        for link in self._links:
            link.close()
        with contextlib.suppress(TransportKitError):
            self._gathering.close()
