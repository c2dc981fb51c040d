"""The conformance suite passes a sound backend, and catches each of the deliberately broken ones."""

from __future__ import annotations

from pathlib import Path

import broken_backends
import pytest

from transportkit.testing import TransportConformance, in_process


class TestLocal(TransportConformance):
    """A backend that is not installed, and that works within one process only."""

    transport = broken_backends.LocalTransport
    links = ()


#: What is wrong, and tests of the suite that must find it.
CAUGHT = {
    "DroppedBytes": ["test_every_value_arrives", "test_the_next_chunk_does_not_reach_the_last"],
    "WrongOffset": ["test_every_value_arrives", "test_every_slot_carries_every_length"],
    "ChangedUnderALease": ["test_an_open_chunk_keeps_its_bytes", "test_a_kept_lease_withholds_its_slot"],
    "NoPublish": ["test_every_slot_carries_every_length", "test_updates_without_bytes"],
    "AttachedAgain": ["test_an_export_is_attached_once", "test_every_call_has_its_counterpart"],
    "NoRelease": ["test_every_slot_carries_every_length", "test_large_tensors_arrive"],
    "Leaking": ["test_twenty_lanes_leave_nothing", "test_many_sessions_leave_nothing"],
    "Unmapped": ["test_views_stay_readable_when_all_is_closed", "test_views_outlive_the_session"],
    "HangsInOpen": ["test_large_tensors_arrive"],
    "Deaf": ["test_a_stalled_peer_costs_no_more_than_the_deadline", "test_abort_frees_a_call_from_another_thread"],
    "BlocksInAbort": ["test_abort_frees_a_call_from_another_thread"],
    "NativeError": ["test_a_header_that_does_not_hold_is_refused"],
    "CloseTwice": ["test_close_is_idempotent_at_any_time"],
    "LeavesAfterProbe": ["test_probe_is_cheap_and_leaves_nothing"],
    "SlowProbe": ["test_probe_is_cheap_and_leaves_nothing"],
    "NoReason": ["test_match_is_pure_and_has_its_reasons"],
    "Moody": ["test_match_is_pure_and_has_its_reasons"],
    "Misaligned": ["test_slots_are_as_the_terms_say"],
    "Overlapping": ["test_slots_are_as_the_terms_say"],
    "LeavesAFile": ["test_a_sender_that_dies_in_the_handshake_is_noticed"],
}


class Failures:
    """A plugin of pytest's that counts the failed tests."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.failed


def failures(module: str, test: str) -> int:
    """How many tests of that name fail, up to the first. In a process of its own: a hung backend never gives back."""
    found = Failures()
    pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(Path(module).parent), "-k", test, module], [found]
    )
    return found.count


@pytest.mark.parametrize("fault", CAUGHT)
def test_the_suite_catches(fault: str, tmp_path: Path) -> None:
    module = tmp_path / "test_broken.py"
    module.write_text(f"""
import broken_backends
from transportkit.testing import TransportConformance

class TestBroken(TransportConformance):
    transport = broken_backends.{fault}
    patience = 2.0
    notice = 1.0
    links = {("pair",) if fault == "LeavesAFile" else ()}
""")
    for test in CAUGHT[fault]:
        assert in_process(failures, str(module), test, timeout=60, method="forkserver"), f"{test} passes over {fault}"


def test_every_fault_is_tried() -> None:
    made = {name for name, value in vars(broken_backends).items() if getattr(value, "name", "") == "broken"}
    assert made == set(CAUGHT)
