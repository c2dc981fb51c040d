"""The conformance suite over `shm`."""

from __future__ import annotations

from transportkit.testing import TransportConformance


class TestShm(TransportConformance):
    backend = "shm"
