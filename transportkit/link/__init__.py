"""Links: frames on a byte stream or on a user's own channel; no messages and no decisions belong here.

`base` has the frame, the contract and `wait`; `sockets` the links over unix, tcp and inherited sockets, `outgoing` what
they have still to write, `tuning` how sockets are set; `custom` adapts
an object of the user's.
"""

from __future__ import annotations

from transportkit.link.ahead import READ_AHEAD
from transportkit.link.base import CONTROL, HEAD, PAYLOAD, Link, close_in_child, wait
from transportkit.link.custom import CustomLink, UserLink, as_link
from transportkit.link.sockets import SocketLink
from transportkit.link.tuning import pair_sockets

__all__ = [
    "CONTROL",
    "HEAD",
    "PAYLOAD",
    "READ_AHEAD",
    "CustomLink",
    "Link",
    "SocketLink",
    "UserLink",
    "as_link",
    "close_in_child",
    "pair_sockets",
    "wait",
]
