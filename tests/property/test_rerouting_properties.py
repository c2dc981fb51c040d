"""Whatever fails wherever in an update, as long as one backend holds: every receiver has every byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_ends import differing, model
from threaded_ends import SOURCES, WAYS, Ends

from transportkit.errors import ResourceError
from transportkit.testing import faulty, in_update, installed
from transportkit_shm.shm import ShmTransport

PLACES = ("packing", "exporter.ready", "locate", "publish", "importer.open", "importer.reading", "importer.release")

faults = st.fixed_dictionaries(
    {
        "at": st.sampled_from(PLACES),
        "nth": st.integers(1, 30),
        "times": st.none() | st.integers(1, 3),
    }
)


@pytest.mark.timeout(300)
@given(
    faults=st.lists(faults, min_size=1, max_size=3),
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=3),
    sources=st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=3),
    chunk_bytes=st.sampled_from([700, 4096, 9000, 1 << 20]),
    slots=st.integers(1, 4),
)
@settings(max_examples=40)
def test_every_byte_arrives(
    faults: list[dict[str, Any]], ways: list[str], sources: list[str], chunk_bytes: int, slots: int
) -> None:
    backends = [
        faulty(
            ShmTransport,
            **fault,
            # What carries no header cannot be told from the trial's: it may fail there, which is a strike.
            when=in_update if fault["at"] not in ("packing", "exporter.ready", "locate") else None,
            error=ResourceError("no room"),
            name=f"faulty-{number}",
        )
        for number, fault in enumerate(faults)
    ]
    names = [backend.name for backend in backends]
    with installed(*backends), Ends(len(ways), *names, "pickle", chunk_bytes=chunk_bytes, slots=slots) as ends:
        for source in sources:
            taking = [ends.pool.submit(WAYS[way], each) for way, each in zip(ways, ends.receivers, strict=True)]
            report = ends.pool.submit(ends.sender.send, SOURCES[source]()).result(60)
            assert [differing(one.result(60), model()) for one in taking] == [[]] * len(ways)
            assert set(report.backends) == set(range(len(ways)))
            assert report.lost == {}
            assert len(set(report.chunks.values())) == 1
