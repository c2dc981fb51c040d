"""The conformance suite over `mpqueue`, whose ends are always inherited."""

from __future__ import annotations

from transportkit.testing import TransportConformance


class TestMpqueue(TransportConformance):
    backend = "mpqueue"
    links = ("pair",)
