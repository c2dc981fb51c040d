"""The parts of both backends: who may meet, what travels ahead of a chunk, the store, and the end of connections."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from promptness import PROMPT

from transportkit.errors import BackendError, ProtocolError
from transportkit.lifecycle import host_slots
from transportkit.site import read_site
from transportkit.testing import Loopback
from transportkit.transport import Match, Mismatch, Offer, Reach, Side, Site, Unavailable
from transportkit.wire import raw
from transportkit_collective import head, meeting, nccl
from transportkit_collective.gloo import GlooTransport
from transportkit_collective.matching import LEAVES, STAYS, minor
from transportkit_collective.nccl import NcclTransport
from transportkit_collective.severing import listening, shut_down
from transportkit_collective.store import KEYS_PER_RANK, VALUE_LIMIT, LinkStore

pytestmark = pytest.mark.timeout(60)

HERE = Site(boot_id="b", namespaces={"net": "1"}, link="tcp")
THERE = Site(boot_id="c", namespaces={"net": "1"}, link="tcp")


def side(site: Site = HERE, *, plain: bool = False, version: str = "2.13.0+cpu", **more: object) -> Side:
    values = {"offer": Offer("gloo"), "device": "cpu", **more}
    return Side(site, values["offer"], values["device"], version, plain)  # type: ignore[arg-type]


# -- who may meet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "receiver", "lane", "reason"),
    [
        (side(), side(), frozenset(), ""),
        (side(version="2.13.1"), side(version="2.13.0+cu130"), frozenset(), ""),
        (side(version="2.12.0"), side(), frozenset(), "the sender has 2.12.0, the receiver 2.13.0+cpu"),
        (side(version=""), side(version=""), frozenset(), "the sender has an unknown one"),
        (side(version="x.y"), side(version="x.y"), frozenset(), "same torch"),
        (side(), side(THERE), frozenset(), "which the sender and the receiver did not allow"),
        (side(plain=True), side(THERE), frozenset(), "which the receiver did not allow"),
        (side(), side(THERE, plain=True), frozenset(), "allow_plaintext=True"),
        (side(plain=True), side(THERE, plain=True), frozenset(), ""),
        (
            side(),
            side(Site(boot_id="b", namespaces={"net": "2"}, link="unix")),
            frozenset(),
            "a unix link has no address",
        ),
        (side(plain=True), side(Site(link="custom"), plain=True), frozenset(), "a custom link has no address"),
        (side(Site(link="pair")), side(Site(link="pair")), frozenset(), "a pair link has no address"),
        (side(plain=True), side(THERE, plain=True), frozenset({STAYS}), "keeps the lane on loopback"),
        (side(), side(), frozenset({LEAVES}), "its lane leaves this host unencrypted"),
        (side(plain=True), side(plain=True), frozenset({LEAVES}), ""),
        (side(), side(), frozenset({STAYS}), ""),
    ],
)
def test_who_may_meet_over_gloo(sender: Side, receiver: Side, lane: frozenset[str], reason: str) -> None:
    verdict = GlooTransport.match(sender, receiver, lane)
    if reason:
        assert isinstance(verdict, Mismatch), verdict
        assert reason in verdict.reason
    else:
        assert isinstance(verdict, Match), verdict
        assert verdict.reach == Reach.HOST_NETWORK
        away = receiver.site is THERE
        assert verdict.claims == ({LEAVES} if away else frozenset() if sender.allow_plaintext else {STAYS})


def test_versions() -> None:
    assert [minor(text) for text in ("2.13.0+cpu", "2.9", "2", "", "a.b")] == ["2.13", "2.9", None, None, None]


def gpu_side(device: str, *, uuid: str = "GPU-a", runtime: str = "2.28.9", site: Site = HERE, **settings: str) -> Side:
    offer = nccl.NcclOffer(runtime, (uuid, "GPU-second"), settings)
    return side(site, plain=True, offer=Offer("nccl", params=raw(offer)), device=device)


def test_who_may_meet_over_nccl() -> None:
    def verdict(sender: Side, receiver: Side, *lane: str) -> Match | str:
        answer = NcclTransport.match(sender, receiver, frozenset(lane))
        return answer if isinstance(answer, Match) else answer.reason

    one, other = gpu_side("cuda:0"), gpu_side("cuda:1")
    good = verdict(one, other)
    assert isinstance(good, Match)
    assert good.reach == Reach.DEVICE_NETWORK
    (claim,) = good.claims
    assert "GPU-second" in claim
    assert "another receiver of its lane is on the same GPU" in str(verdict(one, other, claim))
    assert "both ends are on one GPU" in str(verdict(one, one))
    assert isinstance(verdict(one, gpu_side("cuda:0", site=THERE)), Match), "one number on another host"
    assert "the receiver 2.27.5" in str(verdict(one, gpu_side("cuda:1", runtime="2.27.5")))
    assert "an unknown one" in str(verdict(gpu_side("cuda:0", runtime=""), gpu_side("cuda:1", runtime="")))
    assert "receiver's tensors are on cpu" in str(verdict(one, gpu_side("cpu")))
    assert "NCCL_CUMEM_ENABLE is not the same" in str(verdict(one, gpu_side("cuda:1", NCCL_CUMEM_ENABLE="0")))
    told = verdict(one, gpu_side("cuda:1", NCCL_IB_HCA="mlx5"))
    assert isinstance(told, Match)
    assert "NCCL_IB_HCA" in told.note
    broken = side(plain=True, offer=Offer("nccl", params=raw([1])), device="cuda:0")
    assert "an offer that is none" in str(verdict(broken, other))


def test_nccl_says_why_it_is_unavailable() -> None:
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("this machine has what it takes")
    answer = NcclTransport.probe(read_site("pair"))
    assert isinstance(answer, Unavailable)
    assert "CUDA" in answer.reason


def test_gloo_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(GlooTransport.probe(read_site("pair")), Offer)
    assert isinstance(GlooTransport.probe(Site(platform="darwin")), Unavailable)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    answer = GlooTransport.probe(read_site("pair"))
    assert isinstance(answer, Unavailable)
    assert "built without" in answer.reason


# -- where they meet --------------------------------------------------------------------------------------------------


def test_who_is_beside_the_exporter() -> None:
    invitation = raw(meeting.Invitation.of(HERE))
    assert meeting.answer(invitation, HERE).beside
    assert not meeting.answer(invitation, THERE).beside
    assert not meeting.answer(raw(meeting.Invitation("", "")), Site()).beside
    with pytest.raises(ProtocolError):
        meeting.answer(raw(7), HERE)


def test_nobody_listens_where_it_was_not_allowed() -> None:
    with Loopback() as links:
        wiring = links.exporter
        wiring.local_host = lambda receiver: "10.0.0.5"  # type: ignore[method-assign]
        assert meeting.exporter_host({0: True, 1: True}, wiring, "gloo") == "127.0.0.1"
        assert meeting.exporter_host({0: True, 1: False}, wiring, "gloo") == "10.0.0.5"
        assert meeting.importer_host(True, "10.0.0.5", wiring, 0, "gloo") == "10.0.0.5"
        assert meeting.importer_host(False, "10.9.9.9", wiring, 0, "gloo") == "10.0.0.5"
        for told in ("0.0.0.0", "::", "224.0.0.1", "host.example", "", "/tmp"):
            with pytest.raises(ProtocolError):
                meeting.importer_host(True, told, wiring, 0, "gloo")
        wiring.allow_plaintext = False
        assert meeting.importer_host(True, "127.0.0.1", wiring, 0, "gloo") == "127.0.0.1"
        for call in (
            lambda: meeting.exporter_host({0: False}, wiring, "gloo"),
            lambda: meeting.importer_host(True, "10.0.0.5", wiring, 0, "gloo"),
            lambda: meeting.importer_host(False, "127.0.0.1", wiring, 0, "gloo"),
        ):
            with pytest.raises(BackendError, match="allow_plaintext=True"):
                call()
        wiring.allow_plaintext = True
        wiring.local_host = lambda receiver: ""  # type: ignore[method-assign]
        with pytest.raises(BackendError, match="tcp://"):
            meeting.exporter_host({0: False}, wiring, "gloo")


# -- what travels -----------------------------------------------------------------------------------------------------


def test_a_head_survives_and_what_is_none_is_refused() -> None:
    (slot,) = host_slots(1, head.HEAD + 100 + head.TAIL)
    told = head.Head(True, -3, 7, 90)
    told.write(slot)
    told.write_tail(slot)
    assert head.read(slot, 100) == told
    told.check_tail(slot)
    with pytest.raises(ProtocolError, match="announces 90 bytes, the agreed limit is 80"):
        head.read(slot, 80)
    with pytest.raises(ProtocolError, match="did not carry all of chunk 8"):
        head.Head(True, -3, 8, 90).check_tail(slot)
    head.forget(slot)
    with pytest.raises(ProtocolError, match="nothing at all"):
        head.read(slot, 100)


def test_the_store_waits_tells_and_is_bounded() -> None:
    rung: list[int] = []
    store = LinkStore(2, lambda: rung.append(1))
    store.set("0", b"own")
    assert rung == [1]
    assert store.take_untold() == {"0": b"own"}
    assert store.take_untold() == {}
    threading.Timer(0.1, store.put, [{"1": b"other"}]).start()
    assert store.get("1") == b"other"
    store.wait(["0", "1"], timedelta(seconds=1))
    assert store.check(["0", "1"])
    assert not store.check(["2"])
    assert store.entries() == ([b"own"], [b"other"])
    with pytest.raises(ProtocolError, match="something else under '1'"):
        store.put({"1": b"changed"})
    with pytest.raises(ProtocolError, match="more into its store"):
        store.put({"2": bytes(VALUE_LIMIT + 1)})
    with pytest.raises(ProtocolError, match="more into its store"):
        store.put({f"k{n}": b"" for n in range(KEYS_PER_RANK * 4)})


def test_a_get_ends_with_its_time_or_with_the_store() -> None:
    store = LinkStore(2, lambda: None)
    store.seconds = 0.2
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"told nothing within 0\.2 s"):
        store.get("1")
    with pytest.raises(RuntimeError):
        store.wait(["1"], timedelta(seconds=0.1))
    assert 0.2 < time.monotonic() - began < PROMPT
    store.seconds = 30.0
    threading.Timer(0.1, store.end, ["it was aborted"]).start()
    with pytest.raises(RuntimeError, match="it was aborted"):
        store.get("1")


# -- connections ------------------------------------------------------------------------------------------------------


def entry(host: str, port: int) -> bytes:
    """What a rank of gloo writes into the store, as far as it matters: a `sockaddr` in the middle of something."""
    if ":" in host:
        packed = socket.inet_pton(socket.AF_INET6, host)
        address = socket.AF_INET6.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + bytes(4) + packed
    else:
        address = socket.AF_INET.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + socket.inet_aton(host)
    return b"\x02\x00\x00\x00" + b"x" * 17 + address + bytes(140)


def test_where_the_ranks_listen_is_read_from_the_store() -> None:
    others = [entry("10.0.0.7", 81), entry("10.0.0.8", 82)]
    assert listening("10.0.0.6", entry("10.0.0.6", 80), others) == {
        ("10.0.0.6", 80),
        ("10.0.0.7", 81),
        ("10.0.0.8", 82),
    }
    six = entry("fe80::1", 70)
    assert listening("fe80::1%eth0", six, [entry("fe80::2", 71)]) == {("fe80::1", 70), ("fe80::2", 71)}
    assert listening("10.0.0.6", b"something else", others) == frozenset()
    assert listening("10.0.0.6", entry("10.0.0.9", 80), others) == frozenset()
    assert listening("nonsense", entry("10.0.0.6", 80), others) == frozenset()
    assert listening("10.0.0.6", entry("10.0.0.6", 80), [b"short", six]) == {("10.0.0.6", 80)}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_groups_connections_are_shut_down(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        ours, foreign = (socket.create_server((host, 0), family=family) for _ in range(2))
    except OSError:
        pytest.skip(f"{host} cannot be bound here")
    pairs = []
    for server in (ours, foreign):
        pairs += [(socket.create_connection(server.getsockname()[:2]), server.accept()[0])]
    unix = socket.socketpair()
    try:
        addresses = listening(host, entry(host, ours.getsockname()[1]), [])
        assert shut_down(addresses) == 2, "both ends are in this process"
        assert shut_down(frozenset()) == 0
        assert pairs[0][1].recv(1) == b""
        for left, right in (pairs[1], unix):
            left.send(b"x")
            assert right.recv(1) == b"x"
        again = socket.create_connection(ours.getsockname()[:2])
        ours.accept()[0].close()
        again.close()
    finally:
        for one in (ours, foreign, *unix, *(end for pair in pairs for end in pair)):
            one.close()
    assert os.path.exists("/proc/self/fd")
