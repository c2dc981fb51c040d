"""Tests of what a backend says of itself: the class, `probe` and `match`; nothing is moved here."""

from __future__ import annotations

import inspect
import math
import os
import sys
import time
from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest

from transportkit.errors import TransportKitError
from transportkit.site import read_site
from transportkit.testing.calls import bounded
from transportkit.testing.lanes import side_of
from transportkit.testing.leftovers import nothing_left
from transportkit.testing.processes import in_process
from transportkit.testing.suite.subject import Subject
from transportkit.transport import API_VERSION, Match, Mismatch, Reach, Transport
from transportkit.wire import Offer, Site, Unavailable, raw

if TYPE_CHECKING:
    from transportkit.transport import Side

#: Peers that differ from this process in one thing.
STRANGERS: dict[str, dict[str, object]] = {
    "another_host": {"host": "elsewhere", "boot_id": "00000000-0000-0000-0000-000000000000"},
    "another_user": {"uid": 54321},
    "overflow_user": {"uid": 65534},
    "another_network": {"namespaces": {"net": "1"}},
    "no_namespaces": {"namespaces": {}},
    "tcp": {"link": "tcp"},
    "custom_link": {"link": "custom"},
    "another_platform": {"platform": "darwin"},
    "unknown": {name: type(value)() for name, value in msgspec.structs.asdict(Site()).items() if name != "uid"},
}

#: Parameters that no backend has put into its own offer.
GARBAGE = [b"\xc0", b"\x00", b"\xff", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"\xa3abc", b"\xc1", b""]


def verdict(transport: type[Transport], sender: Side, receiver: Side) -> Match | Mismatch:
    """What the backend makes of a pair; for a child process too."""
    return transport.match(sender, receiver, frozenset())


class Declaration(Subject):
    """The class, `probe` and `match`."""

    def test_the_class_says_what_it_is(self) -> None:
        transport = self.subject()
        assert isinstance(transport, type)
        assert issubclass(transport, Transport)
        assert not inspect.isabstract(transport), f"not implemented: {sorted(transport.__abstractmethods__)}"
        assert transport.name
        assert not self.backend or transport.name == self.backend
        assert transport.api_version == API_VERSION
        kinds = [type(transport.fan_out), type(transport.rank), type(transport.device_slots)]
        assert kinds == [bool, int, bool], "fan_out and device_slots are bool, rank is an int"

    def test_probe_is_cheap_and_leaves_nothing(self) -> None:
        transport, site = self.subject(), read_site("pair")
        cuda = sys.modules["torch"].cuda
        initialised = cuda.is_initialized()
        transport.probe(site)
        with nothing_left(grace=0.0):
            answers, seconds = [], math.inf
            for _ in range(5):
                started = time.monotonic()
                answers.append(bounded(self.patience, transport.probe, site))
                seconds = min(seconds, time.monotonic() - started)
        assert all(isinstance(answer, Offer) for answer in answers)
        assert {answer.backend for answer in answers} == {transport.name}
        assert len({msgspec.msgpack.encode(answer) for answer in answers}) == 1, "probe() says something else each time"
        assert seconds <= self.probe_seconds, f"a probe took {seconds:.3f} s"
        assert cuda.is_initialized() == initialised, "probe() initialised CUDA"

    def test_probe_knows_no_exception(self) -> None:
        answer = bounded(self.patience, self.subject().probe, Site())
        assert isinstance(answer, Offer | Unavailable)
        assert isinstance(answer, Offer) or answer.reason

    def test_this_process_matches_itself(self) -> None:
        transport = self.subject()
        for kind in self.links:
            side = side_of(transport, read_site(kind), device=self.device)
            answer = transport.match(side, side, frozenset())
            assert isinstance(answer, Match), f"over {kind}: {answer}"
            assert isinstance(answer.reach, Reach)
            assert all(isinstance(claim, str) for claim in answer.claims)

    @pytest.mark.parametrize("stranger", STRANGERS)
    def test_match_is_pure_and_has_its_reasons(self, stranger: str) -> None:
        transport = self.subject()
        side = side_of(transport, read_site("pair"), device=self.device)
        other = attrs.evolve(side, site=msgspec.structs.replace(side.site, **STRANGERS[stranger]))
        for sender, receiver in ((side, other), (other, side), (other, other)):
            with nothing_left(grace=0.0):
                answers = [transport.match(sender, receiver, frozenset()) for _ in range(3)]
            assert answers[0] == answers[1] == answers[2], "match() says something else each time"
            if isinstance(answers[0], Mismatch):
                assert answers[0].reason.strip(), "a Mismatch without a reason"
                assert "\n" not in answers[0].reason, "the reason of a Mismatch is one clause, on one line"
            else:
                assert isinstance(answers[0], Match)

    def test_match_depends_on_no_process(self) -> None:
        transport = self.subject()
        side = side_of(transport, read_site("pair"), device=self.device)
        other = attrs.evolve(side, site=msgspec.structs.replace(side.site, **STRANGERS["another_host"]))
        here = [verdict(transport, side, side), verdict(transport, side, other)]
        there = [
            in_process(verdict, transport, side, end, timeout=self.patience * 2, method="forkserver")
            for end in (side, other)
        ]
        assert [repr(_plain(answer)) for answer in there] == [repr(_plain(answer)) for answer in here]

    @pytest.mark.parametrize("claims", [frozenset({"someone else's"}), frozenset({""})])
    def test_match_takes_any_claims(self, claims: frozenset[str]) -> None:
        transport = self.subject()
        side = side_of(transport, read_site("pair"), device=self.device)
        assert isinstance(transport.match(side, side, claims), Match | Mismatch)

    def test_match_survives_what_a_peer_offers(self) -> None:
        transport = self.subject()
        side = side_of(transport, read_site("pair"), device=self.device)
        for params in [msgspec.Raw(data) for data in GARBAGE] + [raw({"a": [1, {"b": None}]}), raw("x" * 70_000)]:
            other = attrs.evolve(side, offer=msgspec.structs.replace(side.offer, params=params))
            for ends in ((side, other), (other, side)):
                try:
                    answer = bounded(self.patience, transport.match, *ends, frozenset())
                except TransportKitError:
                    continue
                assert isinstance(answer, Match | Mismatch)

    def test_importing_it_starts_nothing(self) -> None:
        module = self.subject().__module__
        assert in_process(_descriptors_after_import, module, timeout=self.patience * 2, method="forkserver") <= 0


def _descriptors_after_import(module: str) -> int:
    import importlib

    before = len(os.listdir("/proc/self/fd"))
    importlib.import_module(module)
    return len(os.listdir("/proc/self/fd")) - before


def _plain(answer: Match | Mismatch) -> object:
    if isinstance(answer, Mismatch):
        return answer
    return answer.reach, bytes(answer.params), sorted(answer.claims), answer.note
