"""The handshake without I/O: hellos in, agreement out.

`negotiate` is a pure function; both sides can repeat it, and the same hellos give the same agreement. Which message may
follow which is `transportkit.conversation`'s; who sends them, and when to give up, is `transportkit.session`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from transportkit.transport import Match, Mismatch, Side
from transportkit.wire import (
    Agreement,
    Assignment,
    Digest,
    Hello,
    Proposal,
    Refusal,
    Terms,
    Unavailable,
    Verdict,
)

if TYPE_CHECKING:
    from msgspec import Raw

    from transportkit.transport import Transport

Strikes = Mapping[tuple[int, str], str]
"""What was tried in vain: (receiver, backend) to what became of it, as the agreement shall tell."""


@attrs.frozen
class LanePlan:
    """One lane of an outcome.

    Args:
        terms: the exporter's terms.
        importers: the terms of each receiver's importer.
    """

    terms: Terms
    importers: Mapping[int, Terms]


@attrs.frozen
class Outcome:
    """What `negotiate` found: an agreement in which every receiver has a backend, and its lanes in order."""

    agreement: Agreement
    lanes: tuple[LanePlan, ...]


@attrs.define
class _Lane:
    backend: str
    receivers: list[int]
    claims: frozenset[str]
    params: Raw


def side(hello: Hello, backend: str) -> Side | str:
    """One end for `Transport.match`, or why the backend is out of the question at that end."""
    wishes = hello.wishes
    if wishes.backends is not None and backend not in wishes.backends:
        return f"not in the {hello.role}'s list of allowed backends"
    if backend in wishes.disabled:
        return f"disabled at the {hello.role}"
    for offer in hello.offers:
        if offer.backend == backend:
            if isinstance(offer, Unavailable):
                return f"unavailable at the {hello.role}: {offer.reason}"
            return Side(hello.site, offer, wishes.device, hello.torch, wishes.allow_plaintext)
    return f"not installed at the {hello.role}"


def judge(
    transport: type[Transport] | None,
    backend: str,
    sender: Hello,
    receiver: Hello,
    claims: frozenset[str] = frozenset(),
) -> Match | Mismatch:
    """Whether this pair could use this backend; what each side checks for itself."""
    ends = side(sender, backend), side(receiver, backend)
    for end in ends:
        if isinstance(end, str):
            return Mismatch(end)
    if transport is None:
        return Mismatch("not loaded here")
    if sender.byteorder != receiver.byteorder:
        return Mismatch(f"the sender is {sender.byteorder}-endian, the receiver {receiver.byteorder}-endian")
    digest = digest_of(transport, sender, receiver)
    if digest is None:
        return Mismatch("its slots are device memory, where no digests are taken; leave `checksum=True` away to use it")
    try:
        verdict: object = transport.match(ends[0], ends[1], claims)  # type: ignore[arg-type]
    except Exception as error:  # a plugin's code, fed with what a peer sent
        return Mismatch(f"its match() failed: {type(error).__name__}: {error}")
    if not isinstance(verdict, Match | Mismatch):
        return Mismatch(f"its match() returned {type(verdict).__name__}")
    return verdict


def digest_of(transport: type[Transport], sender: Hello, receiver: Hello) -> Digest | None:
    """The digest that this pair agrees on; None when one side insists on what the backend cannot give."""
    wishes = sender.wishes.checksum, receiver.wishes.checksum
    if transport.device_slots:
        return None if True in wishes else "none"
    return "none" if wishes == (False, False) else "xxh3-64"


def cost(transport: type[Transport], match: Match, sender: Hello, receiver: Hello) -> tuple[int, int, int, str]:
    """What a backend costs for a pair, least first: (ends to be staged, reach, rank, name)."""
    on_device = [hello.wishes.device.split(":")[0] != "cpu" for hello in (sender, receiver)]
    staged = sum(device != transport.device_slots for device in on_device)
    return staged, int(match.reach), transport.rank, transport.name


def negotiate(
    sender: Hello,
    receivers: Mapping[int, Hello],
    transports: Mapping[str, type[Transport]],
    *,
    session: str,
    token: bytes,
    strikes: Strikes = {},  # noqa: B006 - never changed
    first_lane: int = 0,
) -> Outcome | Refusal:
    """Choose a backend for every receiver and put the receivers on lanes.

    Args:
        sender: the sender's hello.
        receivers: each receiver's hello, by its number.
        transports: the sender's loaded backends, by name.
        session: the session's id.
        token: the session's secret for data sockets.
        strikes: pairs that were tried and failed.
        first_lane: number of the first lane; the others follow.

    Returns:
        The outcome, or a refusal that explains every backend of every receiver that has none.
    """
    lanes: list[_Lane] = []
    by_backend: dict[str, _Lane] = {}
    chosen: dict[int, tuple[_Lane, tuple[Verdict, ...]]] = {}
    refused: dict[int, tuple[Verdict, ...]] = {}
    for number in sorted(receivers):
        hello = receivers[number]
        candidates, reasons = _candidates(sender, hello, number, transports, strikes, by_backend)
        if not candidates:
            refused[number] = tuple(Verdict(name, False, why) for name, why in sorted(reasons.items()))
            continue
        backend, match = candidates[0]
        shared = by_backend.get(backend)
        if shared is not None and transports[backend].fan_out:
            lane = shared
            lane.receivers.append(number)
            lane.claims |= match.claims
        else:
            lane = by_backend[backend] = _Lane(backend, [number], match.claims, match.params)
            lanes.append(lane)
        verdicts = [Verdict(backend, True, match.note or "usable at both ends")]
        verdicts += [Verdict(name, False, f"costs more than {backend} here") for name, _ in candidates[1:]]
        verdicts += [Verdict(name, False, why) for name, why in sorted(reasons.items())]
        chosen[number] = lane, tuple(verdicts)
    if refused:
        return _refusal(sender, receivers, refused, session)
    plans = [
        _plan(number, lane, sender, receivers, transports, session, token)
        for number, lane in enumerate(lanes, first_lane)
    ]
    index_of = {number: index for index, lane in enumerate(lanes) for number in lane.receivers}
    assignments = []
    for number, (lane, outcome) in chosen.items():
        terms = plans[index_of[number]].terms
        assignments.append(
            Assignment(
                receiver=number,
                peer=peer_text(receivers[number]),
                backend=lane.backend,
                lane=terms.lane,
                chunk_bytes=terms.chunk_bytes,
                slots=terms.slots,
                digest=terms.digest,
                verdicts=outcome,
                note=_note(outcome, sender, receivers[number]),
            )
        )
    return Outcome(Agreement(session, peer_text(sender), tuple(assignments)), tuple(plans))


def verify(proposal: Proposal, sender: Hello, receiver: Hello, transports: Mapping[str, type[Transport]]) -> str | None:
    """The receiver's own check of a proposal: None if it holds, else the reason to decline it."""
    terms = proposal.terms
    verdict = judge(transports.get(terms.backend), terms.backend, sender, receiver)
    if isinstance(verdict, Mismatch):
        return verdict.reason
    if not 1 <= terms.chunk_bytes <= receiver.limits.chunk_bytes:
        return f"chunks of {terms.chunk_bytes} bytes are proposed, the limit here is {receiver.limits.chunk_bytes}"
    if not 1 <= terms.slots <= receiver.limits.slots:
        return f"{terms.slots} slots are proposed, the limit here is {receiver.limits.slots}"
    if terms.digest == "none" and digest_of(transports[terms.backend], sender, receiver) != "none":
        return "no digests are proposed, but this side did not switch them off"
    if terms.receiver not in terms.receivers:
        return f"the terms are for receiver {terms.receiver}, which is not on the lane"
    return None


def peer_text(hello: Hello) -> str:
    """A process in words: ``"pid 1234 on host x"``."""
    return f"pid {hello.site.pid} on host {hello.site.host or 'unknown'}"


def _candidates(
    sender: Hello,
    receiver: Hello,
    number: int,
    transports: Mapping[str, type[Transport]],
    strikes: Strikes,
    by_backend: Mapping[str, _Lane],
) -> tuple[list[tuple[str, Match]], dict[str, str]]:
    """The usable backends, best first, and the reason for each other one."""
    usable: list[tuple[str, Match]] = []
    reasons: dict[str, str] = {}
    names = dict.fromkeys(o.backend for hello in (sender, receiver) for o in hello.offers)
    for hello in (sender, receiver):
        names |= dict.fromkeys(hello.wishes.backends or ())
    for name in names:
        if (number, name) in strikes:
            reasons[name] = strikes[number, name]
            continue
        transport = transports.get(name)
        shared = by_backend.get(name)
        claims = shared.claims if shared is not None and transport is not None and transport.fan_out else frozenset()
        verdict = judge(transport, name, sender, receiver, claims)
        if isinstance(verdict, Match):
            usable.append((name, verdict))
        else:
            reasons[name] = verdict.reason
    order = sender.wishes.backends
    if order is not None:
        usable.sort(key=lambda candidate: order.index(candidate[0]))
    else:
        usable.sort(key=lambda candidate: cost(transports[candidate[0]], candidate[1], sender, receiver))
    return usable, reasons


def _plan(
    index: int,
    lane: _Lane,
    sender: Hello,
    receivers: Mapping[int, Hello],
    transports: Mapping[str, type[Transport]],
    session: str,
    token: bytes,
) -> LanePlan:
    transport = transports[lane.backend]
    hellos = [receivers[number] for number in lane.receivers]
    digests = {digest_of(transport, sender, hello) for hello in hellos}
    terms = Terms(
        session=session,
        token=token,
        backend=lane.backend,
        lane=index,
        receivers=tuple(lane.receivers),
        receiver=-1,
        chunk_bytes=min(hello.limits.chunk_bytes for hello in (sender, *hellos)),
        slots=min(hello.limits.slots for hello in (sender, *hellos)),
        digest="xxh3-64" if "xxh3-64" in digests else "none",
        sender_device=sender.wishes.device,
        params=lane.params,
    )
    importers = {}
    for number in lane.receivers:
        device = receivers[number].wishes.device
        fields = {field: getattr(terms, field) for field in terms.__struct_fields__}
        importers[number] = Terms(**fields | {"receiver": number, "receiver_device": device})
    return LanePlan(terms, importers)


def _note(verdicts: tuple[Verdict, ...], *ends: Hello) -> str:
    narrowed = any(end.wishes.backends is not None or end.wishes.disabled for end in ends)
    if len(verdicts) == 1 and not narrowed:
        return (
            f"{verdicts[0].backend} is the only backend installed on either side; others are plugins, "
            "for example `pip install transportkit-shm`"
        )
    return ""


def _refusal(
    sender: Hello, receivers: Mapping[int, Hello], refused: Mapping[int, tuple[Verdict, ...]], session: str
) -> Refusal:
    lines = ["no backend can serve every receiver:"]
    assignments = []
    for number, verdicts in refused.items():
        peer = peer_text(receivers[number])
        lines.append(f"receiver {number} ({peer}):")
        lines += [f"  {v.backend}: not taken: {v.reason}" for v in verdicts]
        assignments.append(Assignment(number, peer, "", -1, 0, 0, "none", verdicts))
    lines.append("install a backend on both sides, or widen `backends=` and TRANSPORTKIT_BACKENDS")
    agreement = Agreement(session, peer_text(sender), tuple(assignments))
    return Refusal("NegotiationError", "\n".join(lines), agreement=agreement)
