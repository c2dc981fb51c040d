"""What backends hand to a process while it is started, and when a process gives its copies up; no process belongs here.

`Transport.inherit` makes one object for both ends, in the parent. Each process that has a copy of it uses one end, and
the parent may hand the other to one process after another. An object that holds descriptors has a method
``close(role)``; the core calls it for the end that a process uses no more, or never will.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.context import BaseContext

    from transportkit.transport import Transport
    from transportkit.wire import Role

_log = logging.getLogger("transportkit")


def bequeath(transports: Mapping[str, type[Transport]], ctx: BaseContext) -> dict[str, object]:
    """What each backend that hands something on makes for one pair of ends, by the backend's name.

    A backend that fails costs only itself; that is logged.

    Args:
        transports: the backends that the pair may use.
        ctx: the `multiprocessing` context that starts the child.
    """
    inherited: dict[str, object] = {}
    for name, transport in transports.items():
        try:
            made = transport.inherit(ctx)
        except Exception as error:  # a plugin's code; the handshake finds that the ends have nothing, and goes on
            _log.warning("backend %s made nothing for a child process to inherit: %r", name, error)
            continue
        if made is not None:
            inherited[name] = made
    return inherited


def give_up(inherited: Mapping[str, object], *roles: Role) -> None:
    """Close this process's copies of these ends, in whatever has any; a failure is logged. Idempotent.

    Args:
        inherited: per backend, what `Transport.inherit` made.
        roles: the ends that this process does not use any more.
    """
    for name, made in inherited.items():
        close = getattr(made, "close", None)
        if not callable(close):
            continue
        for role in roles:
            try:
                close(role)
            except Exception as error:  # a plugin's code, and the other backends' ends are still to be closed
                _log.warning("closing what backend %s inherited failed: %r", name, error)
