"""A whole session for tests: the sender here, the receiver on a thread or in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import TYPE_CHECKING, Any, Self

from transportkit.errors import TransportKitError, UsageError
from transportkit.inheritance import bequeath, give_up
from transportkit.link import SocketLink, pair_sockets
from transportkit.session import Receiver, Sender, pair
from transportkit.session.options import options
from transportkit.testing import ends
from transportkit.testing.calls import Call
from transportkit.testing.processes import Child, context_of
from transportkit.testing.tampering import TamperedLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.transport import Transport


class Session:
    """A sender and a receiver that have agreed; a context manager.

    Args:
        transport: the backend that they use; it must be installed, or `installed`.
        process: the receiver is in a process of its own, and not on threads of this one.
        within: seconds that any step may take.
        receiver: keywords for the receiver alone, which is on a thread then.
        **keywords: as for `transportkit.serve`, for both sides.

    Attributes:
        sender: the sending side.
        outward: the sender's link, where the receiver is on a thread; its ``change`` may be set.
    """

    def __init__(
        self,
        transport: type[Transport],
        *,
        process: bool = False,
        within: float = 20.0,
        receiver: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.within = within
        keywords = {"backends": (transport.name,), "timeout": within, **keywords}
        self.child: Child | None = None
        self._calls: list[Call[Any]] = []
        self._receiver: Receiver | None = None
        self._inherited: dict[str, object] = {}
        if process:
            self.sender, theirs = pair(context_of("forkserver"), **keywords)
            self.child = Child(ends.receiving, theirs, backends=[transport], method="forkserver")
            joining = self._begin(self.child.heard, within)
        else:
            left, right = pair_sockets()
            self.outward = TamperedLink(SocketLink.over(left))
            self._inherited = bequeath({transport.name: transport}, multiprocessing.get_context("spawn"))
            self.sender = Sender.over([self.outward], options(keywords), self._inherited)
            wanted = options({**keywords, **(receiver or {})})
            self._receiver = Receiver.over(SocketLink.over(right), wanted, self._inherited)
            joining = self._begin(self._receiver.join)
        waiting = self._begin(self.sender.wait)
        try:
            errors = [error for call in (waiting, joining) if (error := call.error(within + 1)) is not None]
            # What is none of ours comes first: it is the worse fault, and a test that expects one of ours sees it.
            for error in sorted(errors, key=lambda error: isinstance(error, TransportKitError)):
                raise error
        except BaseException:
            self.close()
            raise

    @property
    def receiver(self) -> Receiver:
        """The receiving side, where it is on a thread."""
        assert self._receiver is not None, "the receiver of this session is in another process"
        return self._receiver

    def receive(self, work: Callable[..., Any], *args: Any) -> Call[Any]:
        """Start ``work(receiver, *args)`` where the receiver is; a module-level function of picklable arguments."""
        if self.child is None:
            return self._begin(work, self.receiver, *args)
        return self._begin(_ordered, self.child, work, args, self.within)

    def send(self, source: Any, **keywords: Any) -> Call[Any]:
        """Start `Sender.send` on a thread."""
        return self._begin(self.sender.send, source, **keywords)

    def carry(self, source: Any, work: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """One update: what ``work`` returned, when both sides are through."""
        receiving = self.receive(work, *args)
        sending = self.send(source, **keywords)
        value = receiving.result(self.within)
        sending.result(self.within)
        return value

    def close(self) -> None:
        """Close both sides, whatever they are doing. Idempotent."""
        self._shut(self.sender)
        if self._receiver is not None:
            self._shut(self._receiver)
        give_up(self._inherited, "sender", "receiver")
        if self.child is not None:
            with self.child as child, contextlib.suppress(OSError, EOFError, AssertionError):
                child.tell(None)
                child.result(self.within)
            self.child = None

    def _shut(self, end: Sender | Receiver) -> None:
        with contextlib.suppress(UsageError):
            end.close()
            return
        end.abort()  # a call of it is running
        for call in self._calls:
            call.wait(self.within)
        with contextlib.suppress(UsageError):  # if it still runs, the test has failed
            end.close()

    def _begin(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Call[Any]:
        self._calls = [call for call in self._calls if call.running]
        call = Call(function, *args, **keywords)
        self._calls.append(call)
        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ordered(child: Child, work: Callable[..., Any], args: tuple[Any, ...], within: float) -> Any:
    child.tell((work, args))
    kind, value = child.heard(within)
    if kind == "raised":
        raise value
    return value
