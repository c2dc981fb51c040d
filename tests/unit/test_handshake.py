"""The pure handshake: who gets which backend and why, and which message may follow which."""

from __future__ import annotations

import itertools

import pytest
from hellos import backend, hello
from hypothesis import given
from hypothesis import strategies as st

from transportkit import wire
from transportkit.conversation import TRANSITIONS, Conversation, State
from transportkit.errors import ProtocolError
from transportkit.handshake import Outcome, negotiate, verify
from transportkit.transport import Match, Mismatch, Reach, Side, Transport
from transportkit.wire import Hello, Refusal, Unavailable

pytestmark = pytest.mark.timeout(60)

SHM = backend("shm", rank=10, same_host=True)
MPQUEUE = backend("mpqueue", rank=20, fan_out=False)
PICKLE = backend("pickle", reach=Reach.LINK, rank=90, fan_out=False)
CUDA = backend("cuda-ipc", reach=Reach.SAME_DEVICE, device_slots=True)
ALL = {t.name: t for t in (SHM, MPQUEUE, PICKLE, CUDA)}


def agree(
    sender: Hello, *receivers: Hello, transports: dict[str, type[Transport]] = ALL, **keywords: object
) -> Outcome:
    outcome = negotiate(sender, dict(enumerate(receivers)), transports, session="s", token=b"t", **keywords)  # type: ignore[arg-type]
    assert isinstance(outcome, Outcome), outcome
    return outcome


def refused(sender: Hello, *receivers: Hello, **keywords: object) -> Refusal:
    outcome = negotiate(sender, dict(enumerate(receivers)), ALL, session="s", token=b"t", **keywords)  # type: ignore[arg-type]
    assert isinstance(outcome, Refusal)
    return outcome


def reason(outcome: Outcome, name: str, receiver: int = 0) -> str:
    (verdict,) = [v for v in outcome.agreement.assignments[receiver].verdicts if v.backend == name]
    return ("taken: " if verdict.taken else "not taken: ") + verdict.reason


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_nearest_backend_that_both_can_use_is_taken() -> None:
    outcome = agree(hello("sender", "pickle", "shm"), hello("receiver", "shm", "pickle"))
    assert outcome.agreement.backend() == "shm"
    assert reason(outcome, "shm") == "taken: shm suits"
    assert reason(outcome, "pickle") == "not taken: costs more than shm here"


@pytest.mark.parametrize(
    ("sender", "receiver", "name", "why"),
    [
        (["pickle", "shm"], ["pickle"], "shm", "not installed at the receiver"),
        (["pickle"], ["pickle", "shm"], "shm", "not installed at the sender"),
        (["pickle", Unavailable("shm", "no memfd")], ["pickle", "shm"], "shm", "unavailable at the sender: no memfd"),
        (["pickle", "shm"], ["pickle", Unavailable("shm", "no")], "shm", "unavailable at the receiver: no"),
    ],
)
def test_an_agreement_says_why_a_backend_was_not_taken(
    sender: list[str | Unavailable], receiver: list[str | Unavailable], name: str, why: str
) -> None:
    outcome = agree(hello("sender", *sender), hello("receiver", *receiver))
    assert outcome.agreement.backend() == "pickle"
    assert reason(outcome, name) == f"not taken: {why}"
    assert f"{name}: not taken: {why}" in str(outcome.agreement)


def test_a_backend_that_does_not_match_is_not_taken() -> None:
    outcome = agree(hello("sender", "pickle", "shm", host="a"), hello("receiver", "pickle", "shm", host="b"))
    assert reason(outcome, "shm") == "not taken: on another host"


def test_with_nothing_else_installed_the_agreement_says_that_others_are_plugins() -> None:
    text = str(agree(hello("sender", "pickle"), hello("receiver", "pickle")).agreement)
    assert "pickle is the only backend installed on either side; others are plugins" in text
    narrowed = agree(hello("sender", "pickle", backends=("pickle",)), hello("receiver", "pickle"))
    assert "only backend installed" not in str(narrowed.agreement)


def test_the_senders_list_is_an_order_and_the_receivers_a_filter() -> None:
    sender = hello("sender", "pickle", "shm", backends=("pickle", "shm"))
    assert agree(sender, hello("receiver", "pickle", "shm")).agreement.backend() == "pickle"
    outcome = agree(hello("sender", "pickle", "shm"), hello("receiver", "pickle", "shm", backends=("pickle",)))
    assert outcome.agreement.backend() == "pickle"
    assert reason(outcome, "shm") == "not taken: not in the receiver's list of allowed backends"
    backwards = hello("receiver", "pickle", "shm", backends=("pickle", "shm"))
    assert agree(hello("sender", "pickle", "shm"), backwards).agreement.backend() == "shm"


def test_no_common_backend_is_a_refusal_that_explains_each() -> None:
    refusal = refused(hello("sender", "shm", host="a"), hello("receiver", "shm", "pickle", host="b"))
    assert refusal.code == "NegotiationError"
    assert "shm: not taken: on another host" in refusal.text
    assert "pickle: not taken: not installed at the sender" in refusal.text
    assert "backends=" in refusal.text


def test_a_strike_leads_to_the_next_backend_and_stands_in_the_agreement() -> None:
    sides = hello("sender", "pickle", "shm"), hello("receiver", "pickle", "shm")
    outcome = agree(*sides, strikes={(0, "shm"): "trial failed: no descriptor came"})
    assert outcome.agreement.backend() == "pickle"
    assert reason(outcome, "shm") == "not taken: trial failed: no descriptor came"


def test_device_memory_costs_least_on_a_device_and_is_staged_elsewhere() -> None:
    names = ("shm", "cuda-ipc", "pickle")
    on_device = agree(hello("sender", *names, device="cuda:0"), hello("receiver", *names, device="cuda"))
    assert on_device.agreement.backend() == "cuda-ipc"
    assert on_device.agreement.assignments[0].digest == "none"
    on_host = agree(hello("sender", *names), hello("receiver", *names))
    assert on_host.agreement.backend() == "shm"


def test_insisting_on_checksums_rules_device_memory_out() -> None:
    names = ("cuda-ipc", "pickle")
    sides = hello("sender", *names, device="cuda", checksum=True), hello("receiver", *names, device="cuda")
    outcome = agree(*sides)
    assert outcome.agreement.backend() == "pickle"
    assert "no digests are taken" in reason(outcome, "cuda-ipc")


@pytest.mark.parametrize("wishes", [*itertools.product([None, True, False], repeat=2)])
def test_digests_are_on_unless_both_sides_switch_them_off(wishes: tuple[bool | None, bool | None]) -> None:
    outcome = agree(hello("sender", "pickle", checksum=wishes[0]), hello("receiver", "pickle", checksum=wishes[1]))
    assert outcome.lanes[0].terms.digest == ("none" if wishes == (False, False) else "xxh3-64")


def test_sizes_are_the_smaller_of_both() -> None:
    terms = (
        agree(hello("sender", "shm", chunk_bytes=1, slots=9), hello("receiver", "shm", chunk_bytes=5, slots=2))
        .lanes[0]
        .terms
    )
    assert (terms.chunk_bytes, terms.slots) == (1, 2)


def test_a_backend_that_fans_out_shares_one_lane_and_others_get_one_each() -> None:
    sender = hello("sender", "shm", "pickle", host="a")
    near = [hello("receiver", "shm", "pickle", host="a", chunk_bytes=size) for size in (1000, 700)]
    far = [hello("receiver", "shm", "pickle", host="b") for _ in range(2)]
    outcome = agree(sender, near[0], far[0], near[1], far[1])
    assert [(lane.terms.backend, lane.terms.receivers) for lane in outcome.lanes] == [
        ("shm", (0, 2)),
        ("pickle", (1,)),
        ("pickle", (3,)),
    ]
    assert outcome.lanes[0].terms.chunk_bytes == 700
    assert {t.receiver for t in outcome.lanes[0].importers.values()} == {0, 2}


def test_two_receivers_with_one_claim_do_not_share_a_lane() -> None:
    claiming = backend("shm", exclusive=True)
    transports = {"shm": claiming, "pickle": PICKLE}
    same = [hello("receiver", "shm", "pickle", uid=uid) for uid in (1, 2, 1)]
    outcome = agree(hello("sender", "shm", "pickle"), *same, transports=transports)
    assert [a.backend for a in outcome.agreement.assignments] == ["shm", "shm", "pickle"]
    assert reason(outcome, "shm", 2) == "not taken: uid 1 is on the lane already"


def test_a_match_that_raises_is_a_reason_and_no_crash() -> None:
    transports = {"shm": backend("shm", fault=ValueError("odd params")), "pickle": PICKLE}
    outcome = agree(hello("sender", "shm", "pickle"), hello("receiver", "shm", "pickle"), transports=transports)
    assert reason(outcome, "shm") == "not taken: its match() failed: ValueError: odd params"


def test_the_receiver_declines_terms_that_do_not_hold_for_it() -> None:
    sender, receiver = hello("sender", "shm"), hello("receiver", "shm", chunk_bytes=100, slots=2)
    outcome = agree(sender, receiver)
    terms = outcome.lanes[0].importers[0]

    def checked(**changes: object) -> str | None:
        changed = wire.Terms(**{f: getattr(terms, f) for f in terms.__struct_fields__} | changes)
        return verify(wire.Proposal(1, changed, outcome.agreement), sender, receiver, ALL)

    assert checked() is None
    assert "limit here is 100" in str(checked(chunk_bytes=101))
    assert "limit here is 2" in str(checked(slots=3))
    assert "did not switch them off" in str(checked(digest="none"))
    assert "not installed" in str(checked(backend="pickle"))
    assert "not on the lane" in str(checked(receiver=4))


NAMES = st.lists(st.sampled_from(sorted(ALL)), unique=True, min_size=1)
SIDES = st.fixed_dictionaries(
    {"host": st.sampled_from("ab"), "chunk_bytes": st.integers(1, 9), "slots": st.integers(1, 4)},
    optional={
        "checksum": st.sampled_from([True, False]),
        "device": st.sampled_from(["cpu", "cuda:0"]),
        "backends": st.lists(st.sampled_from(sorted(ALL)), unique=True, min_size=1).map(tuple),
    },
)


@given(NAMES, SIDES, st.lists(st.tuples(NAMES, SIDES), min_size=1, max_size=4))
def test_the_same_hellos_give_the_same_sound_agreement(
    names: list[str], side: dict[str, object], others: list[tuple[list[str], dict[str, object]]]
) -> None:
    sender = hello("sender", *names, **side)
    receivers = {n: hello("receiver", *offers, **fields) for n, (offers, fields) in enumerate(others)}
    outcomes = [negotiate(sender, receivers, ALL, session="s", token=b"t") for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    outcome = outcomes[0]
    if isinstance(outcome, Refusal):
        assert outcome.agreement is not None
        assert all(not v.taken for a in outcome.agreement.assignments for v in a.verdicts)
        return
    assert sorted(n for lane in outcome.lanes for n in lane.terms.receivers) == list(receivers)
    for lane in outcome.lanes:
        for number, terms in lane.importers.items():
            proposal = wire.Proposal(1, terms, outcome.agreement)
            assert verify(proposal, sender, receivers[number], ALL) is None
            assert terms.chunk_bytes <= min(sender.limits.chunk_bytes, receivers[number].limits.chunk_bytes)
    for assignment in outcome.agreement.assignments:
        assert [v.taken for v in assignment.verdicts].count(True) == 1


def test_each_pair_is_matched_once_however_many_receivers_there_are() -> None:
    calls: list[str] = []

    def counting(transport: type[Transport]) -> type[Transport]:
        class Counting(transport):  # type: ignore[valid-type, misc]
            @classmethod
            def match(cls, sender: Side, receiver: Side, lane: frozenset[str]) -> Match | Mismatch:
                calls.append(cls.name)
                verdict: Match | Mismatch = super().match(sender, receiver, lane)
                return verdict

        return Counting

    transports = {name: counting(ALL[name]) for name in ("shm", "pickle")}
    receivers = [hello("receiver", "shm", "pickle", pid=n) for n in range(1000)]
    outcome = agree(hello("sender", "shm", "pickle"), *receivers, transports=transports)
    assert len(outcome.lanes) == 1
    assert len(calls) == 2 * len(receivers)


# -- the order of messages --------------------------------------------------------------------------------------------

SENDER, RECEIVER = hello("sender", "shm"), hello("receiver", "shm")
AGREED = agree(SENDER, RECEIVER)
TERMS = AGREED.lanes[0].importers[0]
MESSAGES: dict[type, wire.Message] = {
    wire.Refusal: wire.Refusal("X", "x"),
    wire.Proposal: wire.Proposal(1, TERMS, AGREED.agreement),
    wire.Joined: wire.Joined(1, 0),
    wire.Declined: wire.Declined(1, 0, "shm", "x"),
    wire.Connect: wire.Connect(1, 0),
    wire.Signal: wire.Signal(1, 0),
    wire.Chunk: wire.Chunk(-1, 0, 0, True, 1, 0, wire.Location()),
    wire.Ack: wire.Ack(-1, 0, 0),
    wire.Proof: wire.Proof(1, 0, b""),
    wire.Agreed: wire.Agreed(AGREED.agreement),
    wire.Inspected: wire.Inspected(None),
    wire.Waiting: wire.Waiting(),
    wire.Bye: wire.Bye(),
    wire.Begin: wire.Begin(1, 1),
    wire.Applied: wire.Applied(1, 0, 0, 0),
}
GOOD = [
    ("receiver", RECEIVER),
    ("sender", SENDER),
    *(
        (role, MESSAGES[kind])
        for role, kind in [
            ("sender", wire.Proposal),
            ("receiver", wire.Joined),
            ("sender", wire.Connect),
            ("sender", wire.Signal),
            ("receiver", wire.Signal),
            ("sender", wire.Chunk),
            ("receiver", wire.Ack),
            ("receiver", wire.Proof),
            ("sender", wire.Agreed),
        ]
    ),
]


def play(conversation: Conversation, moves: list[tuple[str, wire.Message]]) -> None:
    for role, message in moves:
        if role == conversation.me:
            conversation.sent(message)
        else:
            assert conversation.received(message)


@pytest.mark.parametrize("me", ["sender", "receiver"])
def test_a_handshake_that_goes_well_ends_in_agreement(me: wire.Role) -> None:
    conversation = Conversation(me)
    play(conversation, GOOD)
    assert conversation.state is State.AGREED


@pytest.mark.parametrize("length", range(len(GOOD) + 1))
@pytest.mark.parametrize("kind", list(MESSAGES))
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_what_the_table_does_not_hold_is_refused_in_every_state(length: int, kind: type, role: wire.Role) -> None:
    conversation = Conversation("receiver" if role == "sender" else "sender")
    play(conversation, GOOD[:length])
    state = conversation.state
    message = MESSAGES[kind]
    again = isinstance(message, wire.Proposal) and conversation.attempt >= 1
    answers = wire.Joined | wire.Declined | wire.Connect | wire.Signal | wire.Proof
    unasked = isinstance(message, answers) and conversation.attempt < 1
    if (state, role, kind) in TRANSITIONS and not again and not unasked:
        assert conversation.received(message)
        assert conversation.state is TRANSITIONS[state, role, kind]
    else:
        with pytest.raises(ProtocolError):
            conversation.received(message)
        assert conversation.state is state


def test_answers_to_an_earlier_proposal_are_dropped() -> None:
    conversation = Conversation("sender")
    play(conversation, GOOD[:5])
    conversation.sent(wire.Proposal(2, TERMS, AGREED.agreement))
    for stale in (wire.Ack(-1, 0, 0), wire.Proof(1, 0, b""), wire.Declined(1, 0, "shm", "late"), wire.Joined(1, 0)):
        assert not conversation.received(stale)
    assert conversation.received(wire.Joined(2, 0))
    assert conversation.state is State.JOINED


@pytest.mark.parametrize("me", ["sender", "receiver"])
def test_late_signals_are_dropped(me: wire.Role) -> None:
    conversation = Conversation(me)
    play(conversation, GOOD[:5])
    if me == "receiver":  # the sender has not heard yet that its proposal was declined
        conversation.sent(wire.Declined(1, 0, "shm", "x"))
    else:
        conversation.sent(wire.Proposal(2, TERMS, AGREED.agreement))
    assert not conversation.received(wire.Signal(1, 0))
    with pytest.raises(ProtocolError):
        conversation.received(wire.Signal(2, 0))
    with pytest.raises(ProtocolError):
        conversation.sent(wire.Signal(1, 0))


@pytest.mark.parametrize("me", ["sender", "receiver"])
def test_signals_are_bounded_in_size_and_number(me: wire.Role) -> None:
    conversation = Conversation(me)
    play(conversation, GOOD[:5])
    with pytest.raises(ProtocolError, match="are allowed"):
        conversation.received(wire.Signal(1, 0, wire.raw(b"x" * wire.SIGNAL_LIMIT)))
    for _ in range(wire.SIGNALS_LIMIT):
        assert conversation.received(wire.Signal(1, 0))
        conversation.sent(wire.Signal(1, 0))
    with pytest.raises(ProtocolError, match="more than 4096 signals"):
        conversation.received(wire.Signal(1, 0))
    conversation.sent(wire.Signal(1, 0))


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_two_ends_of_one_role_are_told_so(role: wire.Role) -> None:
    with pytest.raises(ProtocolError, match=f"both ends are {role}s"):
        Conversation(role).received(hello(role, "shm"))
