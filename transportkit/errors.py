"""Every error that this library raises on purpose; nothing else belongs here.

The tree (indented names are subclasses)::

    TransportKitError              the one root; catch it to catch everything of ours
        UsageError                 the API was called in a way that its documentation rules out
            ClosedError            ... on a session, link or lease that is closed already
            LeaseError             a leased chunk cannot be released, or no slot is left to go on with
            ForkedError            ... in a forked child that inherited the object
        AddressError               an address cannot be parsed, bound or reached
        AuthenticationError        a key or a user id was refused, on either side
        BackendError               one backend cannot do what was asked; ``backend`` names it
            UnknownBackendError    no installed backend has that name
            DuplicateBackendError  two distributions register different backends under one name
            BackendUnavailableError  installed, but not usable here; the text says why
            ResourceError          no memory, no space or no descriptor left
        NegotiationError           the two sides found no backend that both can really use
            VersionError           the two sides speak no common version of the protocol
        ProtocolError              the peer sent what the protocol does not allow
            IntegrityError         bytes arrived that are not the bytes that were sent
        TensorError                one tensor cannot be sent or received; ``tensor`` names it
            UnsupportedTensorError its kind (sparse, quantised, ...) does not travel
            DuplicateNameError     its name came twice in one update
            TargetError            the target does not have it, or has another shape or dtype
        MessageError               one message of a mailbox cannot be sent, or not be rebuilt; ``path`` says where in it
        DeadlineError              no progress within ``timeout``, or nothing began within ``wait``
        PeerError                  the other side ended this; ``peer`` names it
            PeerLostError          it died, or its link broke
            PeerClosedError        it closed the session in order
            PeerFailedError        it failed and said why; ``code`` and ``text`` are its own
        UpdateError                this side's user code ended an update
            SourceError            the source (or ``post``) raised
            CallbackError          ``apply``'s callable, ``progress`` or the receiving loop raised or left early

An error is pickled with all its attributes, so it survives a `multiprocessing` pool.
"""

from __future__ import annotations


class TransportKitError(Exception):
    """The root of all errors of this library.

    Attributes:
        torn: who holds a half-written target after this error: on the sender the receivers' names,
            on a receiver ``("target",)``; empty when no target was written.
    """

    torn: tuple[str, ...] = ()

    def __init__(self, message: str, **attributes: object) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            setattr(self, name, value)


class UsageError(TransportKitError, RuntimeError):
    """The API was called in a way that its documentation rules out."""


class ClosedError(UsageError):
    """The object is closed."""


class LeaseError(UsageError):
    """A leased chunk is still in use, or was used after its release."""


class ForkedError(UsageError):
    """The object was inherited by a forked child, where it must not be used."""


class AddressError(TransportKitError, OSError):
    """An address cannot be parsed, bound or reached."""

    def __str__(self) -> str:
        return str(self.args[0])


class AuthenticationError(TransportKitError):
    """A key or a user id was refused."""


class BackendError(TransportKitError):
    """One backend cannot do what was asked.

    Attributes:
        backend: the backend's name.
    """

    backend: str = ""


class UnknownBackendError(BackendError, LookupError):
    """No installed backend has that name."""


class DuplicateBackendError(BackendError):
    """Two distributions register different backends under one name."""


class BackendUnavailableError(BackendError):
    """The backend is installed but cannot be used here."""


class ResourceError(BackendError):
    """No memory, space or descriptor is left for the backend."""


class NegotiationError(TransportKitError):
    """The two sides found no backend that both can really use.

    Attributes:
        agreement: the `Agreement` with the reason for each backend, or None where it got less far.
    """

    agreement: object = None


class VersionError(NegotiationError):
    """The two sides speak no common version of the protocol."""


class ProtocolError(TransportKitError):
    """The peer sent what the protocol does not allow."""


class IntegrityError(ProtocolError):
    """Bytes arrived that are not the bytes that were sent."""


class TensorError(TransportKitError, ValueError):
    """One tensor cannot be sent or received.

    Attributes:
        tensor: the tensor's name.
    """

    tensor: str = ""


class UnsupportedTensorError(TensorError):
    """This kind of tensor does not travel."""


class DuplicateNameError(TensorError):
    """A name came twice in one update."""


class TargetError(TensorError):
    """The target lacks the tensor, or has another shape or dtype."""


class MessageError(TransportKitError, ValueError):
    """One message cannot be sent through a mailbox, or not be rebuilt as what the inbox expects.

    Attributes:
        path: where in the message, ``"$.images[0]"``; empty where that is not known.
        producer: the identity of the outbox that sent it; empty at the outbox itself.
        number: its number in that outbox; 0 at the outbox itself.
    """

    path: str = ""
    producer: str = ""
    number: int = 0


class DeadlineError(TransportKitError, TimeoutError):
    """A wait ended without what it waited for.

    Attributes:
        silent: the peer itself said nothing, as opposed to a backend that took too long.
    """

    silent: bool = False

    def __str__(self) -> str:
        return str(self.args[0])


class PeerError(TransportKitError):
    """The other side ended this.

    Attributes:
        peer: who, in words.
    """

    peer: str = ""


class PeerLostError(PeerError, ConnectionError):
    """The peer died, or its link broke."""

    def __str__(self) -> str:
        return str(self.args[0])


class PeerClosedError(PeerError):
    """The peer closed the session in order."""


class PeerFailedError(PeerError):
    """The peer failed and said why.

    Attributes:
        code: the name of the error class over there.
        text: its message over there.
    """

    code: str = ""
    text: str = ""


class UpdateError(TransportKitError):
    """User code on this side ended an update."""


class SourceError(UpdateError):
    """The source of an update, or ``post``, raised; ``__cause__`` is what it raised."""


class CallbackError(UpdateError):
    """A callable or loop of the user on the receiving side raised or ended early."""
