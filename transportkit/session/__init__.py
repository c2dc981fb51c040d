"""Sessions: a sender and its receivers, from the first connection to the last update.

The path of the data: `sender` -> `sources` -> `sending` -> `lane` -> (backend) -> `receiving` -> `sinks` ->
`receiver`. The way to an agreement: `ends` -> `gathering` -> `opening` on the sender's side, `joining` on the
receiver's. `peers` and `inlet` are the links as either side sees them. Everything that decides without I/O is
elsewhere: `transportkit.handshake`, `chunk`, `manifest`.
"""

from __future__ import annotations

from transportkit.session.ends import connect, inspect, pair, serve
from transportkit.session.leases import Lease
from transportkit.session.receiver import Receiver
from transportkit.session.results import Incoming, Report, Update
from transportkit.session.sender import Sender
from transportkit.session.sources import Source

__all__ = [
    "Incoming",
    "Lease",
    "Receiver",
    "Report",
    "Sender",
    "Source",
    "Update",
    "connect",
    "inspect",
    "pair",
    "serve",
]
