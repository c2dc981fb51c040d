"""The conformance suite passes a sound backend, and catches each of the deliberately broken ones."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import broken_backends
import broken_sketches
import pytest

from transportkit.testing import TransportConformance, in_process
from transportkit.testing.processes import context_of
from transportkit.testing.suite.failures import Failures


class TestLocal(TransportConformance):
    """A backend that is not installed, and that works within one process only."""

    transport = broken_backends.LocalTransport
    links = ()


class TestLateBytes(Failures):
    """A sound backend whose bytes arrive after `publish` has returned."""

    transport = broken_sketches.LateBytes


#: What is wrong, the tests of the suite that must find it, and words of theirs. Of a test with parameters one case must
#: fail: the first that does is the last one that runs.
CAUGHT: dict[str, dict[str, str]] = {
    "DroppedBytes": {
        "test_every_value_arrives[1-1": "with other bytes than were sent",
        "test_the_next_chunk_does_not_reach_the_last": "with other bytes than were sent",
    },
    "WrongOffset": {
        "test_every_value_arrives[1000-7": "with other bytes than were sent",
        "test_every_slot_carries_every_length": "3 bytes through slot 1",
    },
    "ChangedUnderALease": {
        "test_an_open_chunk_keeps_its_bytes": "bytes changed under an open lease",
        "test_a_kept_lease_withholds_its_slot": "bytes changed under a lease",
    },
    "NoPublish": {
        "test_every_slot_carries_every_length": "no chunk within 3 s",
        "test_updates_without_bytes": "trial failed",
    },
    "AttachedAgain": {
        "test_an_export_is_attached_once": "a slot is exported once, not once per chunk",
        "test_every_call_has_its_counterpart": "an export is attached once, and made once per slot",
    },
    "NoRelease": {
        "test_every_slot_carries_every_length": "all 1 landing slots are held by leases",
        "test_large_tensors_arrive": "all 1 landing slots are held by leases",
    },
    "Leaking": {"test_twenty_lanes_leave_nothing": "left behind", "test_many_sessions_leave_nothing": "left behind"},
    "Unmapped": {
        "test_views_stay_readable_when_all_is_closed": "freed memory that is still viewed",
        "test_views_outlive_the_session": "freed memory that is still viewed",
    },
    "HangsInOpen": {"test_large_tensors_arrive": ""},
    "Deaf": {
        "test_a_stalled_peer_costs_no_more_than_the_deadline[importer.connect": "did not end",
        "test_abort_frees_a_call_from_another_thread[importer.connect": "did not end",
    },
    "BlocksInAbort": {"test_abort_frees_a_call_from_another_thread": "StalledPair.abort did not end within 1 s"},
    "DeafToAbort": {
        "test_abort_alone_ends_a_wait_in_connect[exporter.connect": "`abort` did not end `exporter.connect`",
        "test_abort_alone_ends_a_wait_in_connect[importer.connect": "`abort` did not end `importer.connect`",
    },
    "NativeError": {"test_a_header_that_does_not_hold_is_refused": "`open` raised IndexError('native') for"},
    "ReadsElsewhere": {
        "test_a_header_that_does_not_hold_is_refused[offset_huge": (
            "`open` accepted offset 4611686018427387911 and 300 bytes, outside the attached 300 bytes"
        ),
    },
    "BelievesSignals": {"test_signals_of_a_liar": "TypeError"},
    "CloseTwice": {"test_close_is_idempotent_at_any_time": "KeyError"},
    "CountsOn": {
        "test_a_failed_update_leaves_the_next_one_clean[small-sender": (
            "the importer's `open` of chunk 0 of update 2 raised ProtocolError('chunk 0 came where chunk 2 was due')"
        ),
    },
    "LeavesHalf": {
        "test_a_failed_update_leaves_the_next_one_clean[large-receiver": (
            "the importer's `open` of chunk 2 of update 1 raised DeadlineError("
        ),
    },
    "GivesUpEarly": {
        "test_bytes_that_come_late_are_waited_for": "`open` raised DeadlineError('no bytes within 0.1 s",
    },
    "LostToTheNews": {
        "test_a_failed_update_leaves_the_next_one_clean[large-sender": ", although the sender had published it",
        "test_a_failed_update_leaves_the_next_one_clean[small-sender": ", although the sender had published it",
    },
    "LeavesAfterProbe": {"test_probe_is_cheap_and_leaves_nothing": "left behind"},
    "SlowProbe": {"test_probe_is_cheap_and_leaves_nothing": "a probe took"},
    "NoReason": {"test_match_is_pure_and_has_its_reasons": "AssertionError: a Mismatch without a reason"},
    "Moody": {"test_match_is_pure_and_has_its_reasons": "AssertionError: match() says something else each time"},
    "Misaligned": {"test_slots_are_as_the_terms_say": "multiples of 64"},
    "Overlapping": {"test_slots_are_as_the_terms_say": "overlap"},
    "LeavesAFile": {"test_a_sender_that_dies_in_the_handshake_is_noticed": "the sender was killed in `"},
}

#: The broken backends, and the module of each.
MADE = {
    name: module.__name__
    for module in (broken_backends, broken_sketches)
    for name, value in vars(module).items()
    if getattr(value, "name", "") == "broken"
}

#: What shows between two processes only.
BETWEEN_PROCESSES = {"LeavesAFile"}

#: What hangs or leaks, and so gets a process for itself.
ALONE = BETWEEN_PROCESSES | {"Deaf", "DeafToAbort", "HangsInOpen", "Leaking", "LeavesHalf", "LostToTheNews"}

#: What the core of the process does wrong, for a fault that is not the backend's.
CORE = {"LostToTheNews": "broken_sketches.let_the_core_give_up()"}


class Caught:
    """A plugin of pytest's: runs the chosen tests, each until a case of it fails, and keeps what the failures say."""

    def __init__(self) -> None:
        self.told = {fault: dict.fromkeys(tests, "") for fault, tests in CAUGHT.items()}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._find(item.nodeid)[1]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        fault, test = self._find(item.nodeid)
        if self.told[fault][test]:
            pytest.skip("another case has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            fault, test = self._find(report.nodeid)
            self.told[fault][test] += report.longreprtext

    def _find(self, nodeid: str) -> tuple[str, str]:
        _, fault, name = nodeid.split("::")
        return fault, next((test for test in self.told[fault] if name.startswith(test)), "")


def caught(folder: str, faults: list[str]) -> dict[str, dict[str, str]]:
    """What the failures of the suite say of backends with these faults, by fault and test."""
    module = Path(folder, f"test_{len(faults)}_{faults[0]}.py")
    lines = [
        "import broken_backends, broken_sketches",
        "from transportkit.testing import TransportConformance, leftovers",
        f"leftovers.GRACE = {0.3 if len(faults) == 1 else 3.0}",
    ]
    if len(faults) == 1:
        lines.append(CORE.get(faults[0], ""))
    for fault in faults:
        apart = fault in BETWEEN_PROCESSES
        lines += [
            f"class {fault}(TransportConformance):",
            f"    transport = {MADE[fault]}.{fault}",
            f"    patience, notice = {(15.0, 5.0) if apart else (3.0, 1.0)}",
            f"    links = {('pair',) if apart else ()}",
        ]
    module.write_text("\n".join(lines))
    found = Caught()
    options = ["-q", "-p", "no:cacheprovider", "-o", f"python_classes={' '.join(faults)}", "--rootdir", folder]
    pytest.main([*options, str(module)], [found])
    return found.told


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What the suite says of the faults that can share a process, which takes a good while to start."""
    faults = [fault for fault in CAUGHT if fault not in ALONE]
    folder = str(tmp_path_factory.mktemp("quiet"))
    found: dict[str, dict[str, str]] = in_process(caught, folder, faults, timeout=100, method="forkserver")
    return found


@pytest.mark.parametrize("fault", CAUGHT)
def test_the_suite_catches(fault: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if fault in BETWEEN_PROCESSES:  # in a process that may have children, which those of `in_process` may not
        with ProcessPoolExecutor(1, mp_context=context_of("forkserver")) as pool:
            told = pool.submit(caught, str(tmp_path), [fault]).result(100)
    elif fault in ALONE:
        told = in_process(caught, str(tmp_path), [fault], timeout=60, method="forkserver")
    else:
        told = request.getfixturevalue("quiet")
    for test, words in CAUGHT[fault].items():
        assert told[fault][test], f"{test} passes over {fault}"
        assert words in told[fault][test], f"{test} finds {fault} for another reason:\n{told[fault][test]}"


def test_every_fault_is_tried() -> None:
    assert set(MADE) == set(CAUGHT)
