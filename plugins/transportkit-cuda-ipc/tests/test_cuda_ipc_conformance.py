"""The conformance suite over `cuda-ipc` on the double of a GPU: strictly between processes, and within one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda_double import AloneTransport, DoubleTransport

from transportkit.testing import TransportConformance

if TYPE_CHECKING:
    from typing import ClassVar

    from transportkit.transport import Transport


class TestBetweenProcesses(TransportConformance):
    """No rule is relaxed: what needs both ends in one process is skipped."""

    transport: ClassVar[type[Transport] | None] = DoubleTransport
    same_process = False


class TestWithinOneProcess(TransportConformance):
    """The double lets a process map its own memory here, so that the ends can be driven step by step."""

    transport: ClassVar[type[Transport] | None] = AloneTransport
