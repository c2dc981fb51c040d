"""On which GPU two sides meet: by UUID, whatever number it has at either end."""

from __future__ import annotations

import pytest

from transportkit.transport import Match, Mismatch, Offer, Reach, Side, Site
from transportkit.wire import decode_as, raw
from transportkit_cuda_ipc.matching import CLAIM, CudaOffer, CudaTerms, meet, plain_uuid

SITE = Site(host="h", boot_id="b", pid=1, uid=7, namespaces={"pid": "4026531836"})


def side(devices: str, device: str = "cuda", *, current: int = 0, note: str = "", **site: object) -> Side:
    known = {name: getattr(SITE, name) for name in SITE.__struct_fields__}
    offer = CudaOffer(devices=tuple(devices), current=current, note=note)
    return Side(Site(**known | site), Offer("cuda-ipc", params=raw(offer)), device, "2.13.0")  # type: ignore[arg-type]


def met(sender: Side, receiver: Side, *lane: str) -> tuple[str, Reach]:
    verdict = meet(sender, receiver, frozenset(CLAIM + uuid for uuid in lane))
    assert isinstance(verdict, Match), verdict
    uuid = decode_as(CudaTerms, verdict.params).uuid
    assert verdict.claims == {CLAIM + uuid}
    assert uuid in verdict.note
    return uuid, verdict.reach


@pytest.mark.parametrize(
    ("sender", "receiver", "uuid", "reach"),
    [
        (side("A"), side("A"), "A", Reach.SAME_DEVICE),
        (side("AB", "cuda:1"), side("BA", "cuda:0"), "B", Reach.SAME_DEVICE),
        (
            side("AB", "cuda:0"),
            side("BA", "cuda:0"),
            "B",
            Reach.HOST_MEMORY,
        ),  # the receiver's, if seen
        (side("AB", "cuda:1"), side("BC", "cuda:1"), "B", Reach.HOST_MEMORY),  # else the sender's
        (side("AB", "cuda", current=1), side("B"), "B", Reach.SAME_DEVICE),
        (side("AB", "cpu"), side("AB", "cuda:1"), "B", Reach.HOST_MEMORY),
        (side("AB", "cuda:1"), side("AB", "cpu"), "B", Reach.HOST_MEMORY),
        (side("AB", "cpu"), side("BA", "cpu"), "A", Reach.HOST_MEMORY),
        (side("XAB", "cuda:0"), side("YBA", "cuda:0"), "A", Reach.HOST_MEMORY),  # a third one, that both see
    ],
)
def test_where_two_sides_meet(sender: Side, receiver: Side, uuid: str, reach: Reach) -> None:
    assert met(sender, receiver) == (uuid, reach)


@pytest.mark.parametrize(
    ("sender", "receiver", "words"),
    [
        (side("A"), side("B"), "no GPU that both see: the sender sees A, the receiver B"),
        (side("A"), side(""), "`device=` is 'cuda', but it sees 0 GPUs"),
        (side("A"), side("A", "cuda:1"), "`device=` is 'cuda:1', but it sees 1 GPUs"),
        (side("A", "cpu"), side("", "cpu"), "the receiver none"),
        (side("A"), side("A", boot_id="other"), "on another host"),
        (side("A", boot_id=""), side("A", boot_id=""), "on another host"),
        (side("A"), side("A", uid=8), "run both as one"),
        (side("A"), side("A", namespaces={"pid": "1"}), "--pid="),
        (side("A", namespaces={}), side("A", namespaces={}), "pid namespace"),
    ],
)
def test_where_two_sides_do_not_meet(sender: Side, receiver: Side, words: str) -> None:
    verdict = meet(sender, receiver, frozenset())
    assert isinstance(verdict, Mismatch)
    assert words in verdict.reason


def test_a_lane_is_on_one_gpu() -> None:
    sender = side("AB")
    assert met(sender, side("BA", "cuda:1"), "A") == ("A", Reach.SAME_DEVICE)
    assert met(sender, side("BA", "cuda:0"), "A") == ("A", Reach.HOST_MEMORY)
    verdict = meet(sender, side("B"), frozenset({CLAIM + "A", "something else"}))
    assert isinstance(verdict, Mismatch)
    assert "memory is on GPU A" in verdict.reason


def test_doubts_are_noted() -> None:
    verdict = meet(side("A", note="under WSL"), side("A", note="under WSL"), frozenset())
    assert isinstance(verdict, Match)
    assert verdict.note == "on GPU A; under WSL"


def test_one_form_of_a_uuid() -> None:
    forms = ["GPU-8D1B-00", "8d1b-00", "gpu-8d1b-00 ", "MIG-8d1b-00"]
    assert {plain_uuid(form) for form in forms} == {"8d1b-00"}
