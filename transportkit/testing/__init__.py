"""For those who write backends: the conformance suite, and what it is made of; the extra ``transportkit[testing]``.

Subclass `TransportConformance` in a test module, and run pytest::

    from transportkit.testing import TransportConformance

    class TestMine(TransportConformance):
        backend = "mine"              # the name under which it is installed; or, for a class that is not installed:
        # transport = MyTransport

What a backend cannot do it says by further attributes, and the tests that need it are skipped with a reason:

=================  ===================================================================================================
``fan_out``        taken from the class: whether one exporter serves several importers
``device_slots``   taken from the class: whether slots are device memory, where no digests are taken
``same_process``   False where exporter and importer cannot live in one process (CUDA handles)
``links``          the kinds of link on which two processes can agree on it; default ``pair``, ``unix``, ``tcp``
``device``         where the tensors of both sides are; default ``"cpu"``
``options``        further keywords for sessions, ``{"allow_plaintext": True}``
``patience``       seconds after which a step counts as hung; default 15
``notice``         seconds within which a death, an abort or a deadline must be noticed; default 5
=================  ===================================================================================================

Nothing in it waits without a bound: what hangs fails, and says where. It takes less than a minute on two cores.

The tools of the suite serve other tests as well:

- `Call`, `bounded`: a call on a thread, waited for within bounds;
- `Child`, `in_process`, `report`, `hear`: a function in a process of its own, to be talked to, stopped or killed;
- `installed`: backends that are no distribution's, registered for as long as a block takes;
- `faulty`, `altered`, `recording`: a backend around another one, that fails or hangs at a chosen call, does something
  else there, or writes every call down; `in_update` for faults that spare the trial;
- `Loopback`, `WiringDouble`: what the core hands to exporters and importers, without a session;
- `DirectLane`: an exporter and its importers, driven step by step; `StalledPair`: one of which the peer has stopped;
- `Session`: a sender and a receiver that have agreed, the latter on a thread or in a process; `TamperedLink`: a link
  that changes messages on their way;
- `samples`, `bulk`, `prints`, `print_of`, `bytes_of`: tensors of every kind, and their bytes;
- `nothing_left`, `Holdings`, `resident`: what a process holds before and after.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transportkit.testing.calls import Call, HungError, bounded
    from transportkit.testing.conformance import TransportConformance
    from transportkit.testing.faults import altered, faulty, in_update
    from transportkit.testing.installing import installed
    from transportkit.testing.journals import Entry, Journal, Recording, recording
    from transportkit.testing.lanes import DirectLane
    from transportkit.testing.leftovers import Holdings, nothing_left, resident
    from transportkit.testing.processes import Child, ChildDiedError, hear, in_process, report
    from transportkit.testing.samples import bulk, bytes_of, print_of, prints, samples
    from transportkit.testing.sessions import Session
    from transportkit.testing.stalls import STALLS, Outcome, StalledPair
    from transportkit.testing.tampering import TamperedLink
    from transportkit.testing.wirings import Loopback, WiringDouble

__all__ = [
    "STALLS",
    "Call",
    "Child",
    "ChildDiedError",
    "DirectLane",
    "Entry",
    "Holdings",
    "HungError",
    "Journal",
    "Loopback",
    "Outcome",
    "Recording",
    "Session",
    "StalledPair",
    "TamperedLink",
    "TransportConformance",
    "WiringDouble",
    "altered",
    "bounded",
    "bulk",
    "bytes_of",
    "faulty",
    "hear",
    "in_process",
    "in_update",
    "installed",
    "nothing_left",
    "print_of",
    "prints",
    "recording",
    "report",
    "resident",
    "samples",
]

_HOMES = {
    "calls": ("Call", "HungError", "bounded"),
    "conformance": ("TransportConformance",),
    "faults": ("altered", "faulty", "in_update"),
    "installing": ("installed",),
    "journals": ("Entry", "Journal", "Recording", "recording"),
    "lanes": ("DirectLane",),
    "leftovers": ("Holdings", "nothing_left", "resident"),
    "processes": ("Child", "ChildDiedError", "hear", "in_process", "report"),
    "samples": ("bulk", "bytes_of", "print_of", "prints", "samples"),
    "sessions": ("Session",),
    "stalls": ("STALLS", "Outcome", "StalledPair"),
    "tampering": ("TamperedLink",),
    "wirings": ("Loopback", "WiringDouble"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] == "conformance":
        if importlib.util.find_spec("pytest") is None:
            raise ImportError("the conformance suite needs pytest: pip install 'transportkit[testing]'")
        import pytest

        # So that a failed assertion of the suite shows its values, as one of the author's own would.
        pytest.register_assert_rewrite(f"{__name__}.suite")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
