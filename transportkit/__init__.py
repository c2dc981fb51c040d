"""Named tensors, moved between processes over whichever installed backend both sides can really use.

Only the public names belong here. They are resolved at first use, so that ``import transportkit`` imports neither torch
nor a plugin: a launcher, a command line or an error handler may import it for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from transportkit.errors import (
        AddressError,
        AuthenticationError,
        BackendError,
        BackendUnavailableError,
        CallbackError,
        ClosedError,
        DeadlineError,
        DuplicateBackendError,
        DuplicateNameError,
        ForkedError,
        IntegrityError,
        LeaseError,
        MessageError,
        NegotiationError,
        PeerClosedError,
        PeerError,
        PeerFailedError,
        PeerLostError,
        ProtocolError,
        ResourceError,
        SourceError,
        TargetError,
        TensorError,
        TransportKitError,
        UnknownBackendError,
        UnsupportedTensorError,
        UpdateError,
        UsageError,
        VersionError,
    )
    from transportkit.mailbox import Inbox, InboxStats, Mail, Outbox, OutboxStats, OutOfBand, OutOfBandStats, Postmark
    from transportkit.session import (
        Incoming,
        Lease,
        Receiver,
        Report,
        Sender,
        Source,
        Update,
        connect,
        inspect,
        pair,
        serve,
    )
    from transportkit.wire import Agreement, TensorSpec

__all__ = [
    "AddressError",
    "Agreement",
    "AuthenticationError",
    "BackendError",
    "BackendUnavailableError",
    "CallbackError",
    "ClosedError",
    "DeadlineError",
    "DuplicateBackendError",
    "DuplicateNameError",
    "ForkedError",
    "Inbox",
    "InboxStats",
    "Incoming",
    "IntegrityError",
    "Lease",
    "LeaseError",
    "Mail",
    "MessageError",
    "NegotiationError",
    "OutOfBand",
    "OutOfBandStats",
    "Outbox",
    "OutboxStats",
    "PeerClosedError",
    "PeerError",
    "PeerFailedError",
    "PeerLostError",
    "Postmark",
    "ProtocolError",
    "Receiver",
    "Report",
    "ResourceError",
    "Sender",
    "Source",
    "SourceError",
    "TargetError",
    "TensorError",
    "TensorSpec",
    "TransportKitError",
    "UnknownBackendError",
    "UnsupportedTensorError",
    "Update",
    "UpdateError",
    "UsageError",
    "VersionError",
    "__version__",
    "connect",
    "inspect",
    "pair",
    "serve",
]

_HOMES = {
    **dict.fromkeys(["Incoming", "Lease", "Receiver", "Report", "Sender", "Source", "Update"], "session"),
    **dict.fromkeys(["connect", "inspect", "pair", "serve"], "session"),
    **dict.fromkeys(
        ["Inbox", "InboxStats", "Mail", "OutOfBand", "OutOfBandStats", "Outbox", "OutboxStats", "Postmark"], "mailbox"
    ),
    **dict.fromkeys(["Agreement", "TensorSpec"], "wire"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
