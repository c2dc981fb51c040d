"""The next broadcast begins while the one before it is on its way, at both ends."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

import pytest

from transportkit.testing import Call
from transportkit.testing.lanes import DirectLane
from transportkit_collective.gloo import GlooTransport
from transportkit_collective.planes import GlooPlane

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.timeout(60)


#: Chunks that are sent, and those of them that are opened: the last one need not wait for a next one.
SENT, OPENED = 4, 3


def hold(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[int]:
    """Let no broadcast but the first and the last end, at any rank, before the next one has begun there."""
    begun: collections.Counter[int] = collections.Counter()
    ended: collections.Counter[int] = collections.Counter()
    original_begin, original_finish = GlooPlane._begin, GlooPlane._finish

    def begin(plane: GlooPlane, tensor: torch.Tensor, seconds: float) -> Any:
        work = original_begin(plane, tensor, seconds)
        begun[id(plane)] += 1
        return work

    def finish(plane: GlooPlane, work: Any) -> None:
        number = ended[id(plane)]
        limit = time.monotonic() + 10
        while 0 < number < SENT - 1 and begun[id(plane)] < number + 2:
            assert time.monotonic() < limit, f"broadcast {number + 1} does not begin before {number} has ended"
            time.sleep(0.001)
        original_finish(plane, work)
        ended[id(plane)] += 1

    monkeypatch.setattr(GlooPlane, "_begin", begin)
    monkeypatch.setattr(GlooPlane, "_finish", finish)
    return begun


@pytest.mark.parametrize("receivers", [1, 3])
def test_the_next_broadcast_begins_before_the_last_one_has_ended(
    monkeypatch: pytest.MonkeyPatch, receivers: int
) -> None:
    with DirectLane(GlooTransport, receivers=receivers, slots=SENT) as lane:
        lane.connect()
        begun = hold(monkeypatch)
        data = [bytes([turn]) * (100 + turn) for turn in range(SENT)]
        headers = [lane.pack(turn, each) for turn, each in enumerate(data)]
        for turn, header in enumerate(headers):
            lane.exporter.publish(turn, header[0], lane.deadline("room for the chunk"))
        for turn in range(OPENED):
            opening = [
                Call(imports.open, header, lane.deadline("chunk"))
                for imports, header in zip(lane.imports, headers[turn], strict=True)
            ]
            chunks = [call.result(20) for call in opening]
            assert [lane.read(number, chunk) for number, chunk in enumerate(chunks)] == [data[turn]] * receivers
            lane.release(chunks)
        assert len(begun) == receivers + 1
