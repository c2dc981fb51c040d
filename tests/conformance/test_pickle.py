"""The conformance suite over the fallback, `pickle`."""

from __future__ import annotations

from transportkit.testing import TransportConformance


class TestPickle(TransportConformance):
    backend = "pickle"
