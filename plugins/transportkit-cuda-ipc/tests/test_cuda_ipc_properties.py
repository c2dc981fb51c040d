"""Any interleaving of packing, reading, keeping, dropping and closing, on the double: counts and bytes hold."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import cuda_double
import pytest
from cuda_double import AloneTransport
from hypothesis import given, settings
from hypothesis import strategies as st

from transportkit.testing import DirectLane
from transportkit_cuda_ipc import ends
from transportkit_cuda_ipc.tether import parked

if TYPE_CHECKING:
    from torch import Tensor

    from transportkit.lifecycle import Imported

pytestmark = pytest.mark.timeout(120)

SLOTS, NBYTES = 3, 100

#: Carry a chunk; read and release the oldest; the same and keep a view; drop a view; close one receiver; settle all.
STEPS = st.sampled_from(["carry", "carry", "carry", "read", "read", "keep", "drop", "leave", "settle"])


@pytest.mark.parametrize("handover", ["host", "event"])
@settings(max_examples=150)
@given(receivers=st.integers(1, 3), steps=st.lists(st.tuples(STEPS, st.integers(0, 1 << 20)), max_size=40))
def test_any_interleaving(handover: ends.Handover, receivers: int, steps: list[tuple[str, int]]) -> None:
    before, ends.HANDOVER = ends.HANDOVER, handover
    cuda_double.journal.clear()
    try:
        interleave(receivers, steps)
    finally:
        ends.HANDOVER = before
    journal = cuda_double.journal
    end = time.monotonic() + 5
    while (parked() or journal.count("map") > journal.count("unmap")) and time.monotonic() < end:
        time.sleep(0.001)
        if time.monotonic() > end - 4:
            gc.collect()  # what is in a cycle takes longer
    assert (parked(), journal.count("allocate"), journal.count("free")) == (0, 1, 1)
    assert journal.count("map") == journal.count("unmap") <= receivers
    assert journal.count("export") <= receivers, "it is exported once for a receiver"
    assert journal.index("free") == len(journal) - 1, "freed while somebody had it mapped"


def interleave(receivers: int, steps: list[tuple[str, int]]) -> None:
    free = set(range(SLOTS))
    out: dict[int, set[int]] = {}  # slot: the receivers that owe their word
    opened: list[list[tuple[Imported, int, bytes]]] = [[] for _ in range(receivers)]
    kept: list[list[tuple[Tensor, int, bytes]]] = [[] for _ in range(receivers)]
    held: dict[tuple[int, int], int] = {}  # (receiver, seq): slot
    gone: set[int] = set()
    lane = DirectLane(AloneTransport, chunk_bytes=NBYTES, slots=SLOTS, receivers=receivers).connect()

    def word(receiver: int, slot: int) -> None:
        out[slot].discard(receiver)
        if not out[slot]:
            free.add(slot)

    def acknowledged() -> None:
        while lane.acknowledged:
            header = lane.acknowledged.pop()
            word(header.receiver, held.pop((header.receiver, header.seq)))

    with lane:
        for number, (step, draw) in enumerate(steps):
            live = [n for n in range(receivers) if n not in gone]
            receiver = live[draw % len(live)] if live else -1
            if step == "carry" and free and live:
                slot = sorted(free)[draw % len(free)]
                free.discard(slot)
                out[slot] = set(live)
                data = bytes([number % 251]) * (1 + draw % NBYTES)
                for header in lane.pack(slot, data):
                    if header.receiver in live:
                        held[header.receiver, header.seq] = slot
                        chunk = lane.imports[header.receiver].open(header, lane.deadline("chunk"))
                        opened[header.receiver].append((chunk, slot, data))
            elif step in ("read", "keep") and live and opened[receiver]:
                chunk, slot, data = opened[receiver].pop(0)
                assert lane.read(receiver, chunk) == data
                if step == "keep":
                    kept[receiver].append((chunk.view(), slot, data))
                lane.imports[receiver].retire(chunk)
            elif step == "drop" and live and kept[receiver]:
                kept[receiver].pop(draw % len(kept[receiver]))
            elif step == "leave" and draw % 5 == 0 and live:
                gone.add(receiver)
                lane.exporter.drop(receiver)
                lane.imports[receiver].close()
                for slot, owing in out.items():
                    if receiver in owing:
                        word(receiver, slot)
                held = {key: slot for key, slot in held.items() if key[0] != receiver}
            for n in live:
                if n not in gone:
                    lane.imports[n].settle()
                    for view, _, data in kept[n]:
                        assert bytes(view.tolist()) == data, "a lease reads another chunk"
            lane.acknowledged = [h for h in lane.acknowledged if h.receiver not in gone]
            acknowledged()
