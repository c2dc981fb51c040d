"""How a session comes about: `serve` and `connect` over an address, `pair` for a child process, `inspect` to ask
only.
"""

from __future__ import annotations

import functools
import multiprocessing.context
from typing import TYPE_CHECKING, Any

import attrs

from transportkit import wire
from transportkit.address import parse
from transportkit.deadline import Deadline
from transportkit.errors import ClosedError, ProtocolError, UsageError
from transportkit.inheritance import bequeath, give_up
from transportkit.link import Link, SocketLink, pair_sockets
from transportkit.listener import dial
from transportkit.registry import choose
from transportkit.session.inlet import Inlet
from transportkit.session.joining import refused
from transportkit.session.options import Options, hello, options
from transportkit.session.receiver import Receiver
from transportkit.session.sender import Sender
from transportkit.site import read_site

if TYPE_CHECKING:
    import socket
    from multiprocessing.context import BaseContext


def serve(address: str, *, receivers: int = 1, late: bool = False, **keywords: Any) -> Sender:
    """Listen for receivers. Binds and returns; entering the sender, or `Sender.wait`, waits for them.

    Args:
        address: ``unix:PATH`` or ``tcp://HOST:PORT``; port 0 picks one, see `Sender.address`.
        receivers: how many are waited for.
        late: hold receivers that come beyond that until `Sender.admit`, instead of refusing them.
        backends: names of the backends that may be used, best first; by default all that are installed, in order of
            cost.
        chunk_bytes: bound of a chunk, in bytes; default 16 MiB. The smaller of both sides' values is agreed.
        slots: chunks under way at once; default 3. The smaller of both sides' values is agreed.
        checksum: False switches digests off where both sides do so; True insists on them.
        authkey: a secret that both sides know; needed for TCP beyond loopback.
        allow_plaintext: allow backends whose bytes cross a network unencrypted.
        device: where this side's tensors are; default ``"cpu"``.
        timeout: bound on the lack of progress, in seconds; default 60.
        wait: bound on waiting for a peer to begin, in seconds; default none.
        progress: called with (bytes done, bytes in all) during updates.

    Raises:
        AddressError: the address is malformed, in use, too long or not permitted.
        AuthenticationError: TCP beyond loopback without ``authkey``.
        UnknownBackendError, BackendUnavailableError: a backend that was asked for by name.
        UsageError: a keyword is wrong.
    """
    wanted = options(keywords, "receivers", "late")
    if type(receivers) is not int or receivers < 1:
        raise UsageError(f"receivers must be a positive integer, not {receivers!r}")
    if not isinstance(late, bool):
        raise UsageError(f"late must be True or False, not {late!r}")
    parse(address)
    return Sender.listening(address, receivers, wanted, late=late)


def connect(address: str, **keywords: Any) -> Receiver:
    """Connect to a sender and agree with it; waits until somebody listens and until the sender is ready.

    Args:
        address: ``unix:PATH`` or ``tcp://HOST:PORT``.
        **keywords: as for `serve`. ``wait`` bounds waiting for somebody to listen (else ``timeout`` does) and for
            the sender to be ready.

    Raises:
        AddressError: nobody listened in time, or the address is malformed or not permitted.
        AuthenticationError: the key or the user is refused.
        NegotiationError: no backend serves this pair; the text says why for each.
        PeerError, DeadlineError: the sender was lost, or silent.
    """
    wanted = options(keywords)
    parse(address)
    choose(read_site(address.partition(":")[0]), wanted.backends)
    link = dial(address, authkey=wanted.authkey, timeout=wanted.timeout, wait=wanted.wait, user_timeout=wanted.timeout)
    receiver = Receiver.over(link, wanted, {})
    try:
        receiver.join()
    except BaseException:
        receiver.close()
        raise
    return receiver


def inspect(address: str, **keywords: Any) -> wire.Inspected:
    """Ask a listening sender what it would agree with this process; takes no receiver's place. Arguments as
    `connect`.
    """
    wanted = options(keywords)
    choice = choose(read_site(address.partition(":")[0]), wanted.backends)
    link = dial(address, authkey=wanted.authkey, timeout=wanted.timeout, wait=wanted.wait, user_timeout=wanted.timeout)
    try:
        inlet = Inlet(link, wanted.timeout)
        inlet.send(hello("receiver", wanted, choice, link.kind, "inspect"))
        deadline = Deadline(wanted.timeout, f"answer from {link.peer}")
        while True:
            answer = inlet.next(deadline)
            match answer:
                case wire.Inspected():
                    return answer
                case wire.Hello():
                    continue
                case wire.Refusal():
                    raise refused(answer, link.peer)
                case _:
                    raise ProtocolError(f"{link.peer} answered with {type(answer).__name__.lower()}")
    finally:
        link.close()


def pair(ctx: BaseContext | None = None, **keywords: Any) -> tuple[Sender, Receiver]:
    """A sender and a receiver that are connected already; one of them goes to a child process while it is being
    started.

    Each end is used in one process only; the first use of one end closes this process's copy of the other.

    Args:
        ctx: the `multiprocessing` context that starts the child; by default the current one.
        **keywords: as for `connect`, for both ends.
    """
    wanted = options(keywords)
    if not isinstance(ctx, multiprocessing.context.BaseContext | None):
        raise UsageError(f"pair() takes a context, as multiprocessing.get_context('spawn') makes it, not {ctx!r}")
    context = ctx if ctx is not None else multiprocessing.get_context()
    choice = choose(read_site("pair"), wanted.backends)
    inherited = bequeath(choice.transports, context)
    left, right = pair_sockets()
    ends = _Ends(left, right)
    return PairedSender(ends, wanted, inherited), PairedReceiver(ends, wanted, inherited)


@attrs.define
class _Ends:
    """This process's copies of both ends of a pair."""

    sender: socket.socket | None
    receiver: socket.socket | None
    closed: set[wire.Role] = attrs.field(factory=set)

    def claim(self, role: wire.Role) -> socket.socket:
        """Take one end for good and close the other."""
        mine, other = (self.sender, self.receiver) if role == "sender" else (self.receiver, self.sender)
        if role in self.closed:
            raise ClosedError(f"the {role} of this pair is closed in this process")
        if mine is None:
            raise UsageError(
                f"the {role} of this pair was given up when its other end was first used in this process; start the "
                "process that is to have it before that"
            )
        if other is not None:
            other.close()
        self.sender = self.receiver = None
        return mine

    def shed(self, role: wire.Role) -> None:
        """Close one end, unused; the other stays as it is."""
        mine = self.sender if role == "sender" else self.receiver
        if mine is not None:
            mine.close()
        if role == "sender":
            self.sender = None
        else:
            self.receiver = None
        self.closed.add(role)


class _Paired:
    """An unused end of a pair: becomes a session at its first use, and can be inherited until then."""

    _role: wire.Role

    def __init__(self, ends: _Ends, wanted: Options, inherited: dict[str, object]) -> None:
        self._unused: tuple[_Ends, Options, dict[str, object]] | None = (ends, wanted, inherited)
        self._handed = inherited

    def __getattr__(self, name: str) -> Any:
        # The session's attributes exist from the first use on; asking for one is that use.
        unused = self.__dict__.get("_unused")
        if unused is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        ends, wanted, inherited = unused
        peer = "the other end of the pair (which a child has that was started before the first use of this one)"
        link = SocketLink.over(ends.claim(self._role), kind="pair", peer=peer)
        give_up(inherited, _other(self._role))
        self._unused = None
        self._begin(link, wanted, inherited)
        return getattr(self, name)

    def close(self) -> None:
        """As for any session; an unused end closes this process's copy of itself, and leaves the other end alone."""
        if self._unused is None:
            super().close()  # type: ignore[misc]
        else:
            self._shed()

    def abort(self) -> None:
        """As for any session; an unused end is closed."""
        if self._unused is None:
            super().abort()  # type: ignore[misc]
        else:
            self._shed()

    def _shed(self) -> None:
        assert self._unused is not None
        self._unused[0].shed(self._role)
        give_up(self._handed, self._role)

    def _begin(self, link: Link, wanted: Options, inherited: dict[str, object]) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            multiprocessing.context.assert_spawning(self)
        except RuntimeError as error:
            raise UsageError("an end of a pair goes to a process as an argument while that is started") from error
        if self._unused is None:
            raise UsageError("this end of the pair is in use; hand it to the child before its first use")
        ends, wanted, inherited = self._unused
        mine = ends.sender if self._role == "sender" else ends.receiver
        return _inherit, (type(self), mine, wanted, inherited)


class PairedSender(_Paired, Sender):
    """The sending end of `pair`."""

    _role = "sender"

    def _begin(self, link: Link, wanted: Options, inherited: dict[str, object]) -> None:
        self._start([link], wanted, inherited)

    def _end(self, error: BaseException | None) -> None:
        try:
            super()._end(error)
        finally:
            give_up(self._handed, self._role)


class PairedReceiver(_Paired, Receiver):
    """The receiving end of `pair`."""

    _role = "receiver"

    def _begin(self, link: Link, wanted: Options, inherited: dict[str, object]) -> None:
        self._start(link, wanted, inherited)
        self._updates.on_end = functools.partial(give_up, inherited, self._role)


def _other(role: wire.Role) -> wire.Role:
    return "receiver" if role == "sender" else "sender"


def _inherit(cls: type[PairedSender | PairedReceiver], sock: socket.socket, *rest: Any) -> Any:
    ends = _Ends(sock, None) if cls is PairedSender else _Ends(None, sock)
    return cls(ends, *rest)
