"""The conformance suite over `gloo`."""

from __future__ import annotations

from transportkit.testing import TransportConformance


class TestGloo(TransportConformance):
    backend = "gloo"
