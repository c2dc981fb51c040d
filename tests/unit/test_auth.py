"""The preamble: two machines and whatever an attacker passes between them."""

from __future__ import annotations

import pytest

from transportkit.auth import Preamble, Role, check_authkey
from transportkit.errors import AuthenticationError, ProtocolError, UsageError, VersionError

pytestmark = pytest.mark.timeout(10)

HERE = b"unix:/run/s"


def machines(dialler_key, listener_key, *, address=HERE, **keywords):
    return (
        Preamble(Role.DIALLER, dialler_key, HERE, peer="the listener", **keywords),
        Preamble(Role.LISTENER, listener_key, address, peer="the dialler"),
    )


def run(dialler, listener, step=1 << 20):
    """Pass bytes to and fro, ``step`` at a time; the errors of both."""
    errors = {}
    moved = True
    while moved:
        moved = False
        for name, source, sink in (("listener", dialler, listener), ("dialler", listener, dialler)):
            data = source.outgoing()
            for start in range(0, len(data), step):
                moved = True
                if name not in errors:
                    try:
                        sink.feed(data[start : start + step])
                    except Exception as error:
                        errors[name] = error
    return errors


@pytest.mark.parametrize("key", [None, b"k", b"\0" * 300])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_two_that_agree_are_done_and_keep_what_follows(key, step):
    dialler, listener = machines(key, key)
    assert run(dialler, listener, step) == {}
    assert dialler.done
    assert listener.done
    listener.feed(b"frame")
    assert listener.rest == b"frame"
    assert dialler.rest == b""
    assert dialler.wanted == listener.wanted == 0


def test_bytes_beyond_the_preamble_are_kept():
    dialler, listener = machines(None, None)
    listener.feed(dialler.outgoing() + b"hello")
    assert listener.done
    assert listener.rest == b"hello"


def test_a_wrong_key_is_told_to_both():
    errors = run(*machines(b"one", b"two"))
    assert {type(error) for error in errors.values()} == {AuthenticationError}
    assert "is not ours" in str(errors["listener"])
    assert "the listener refused our key" in str(errors["dialler"])


@pytest.mark.parametrize(("ours", "theirs"), [(b"k", None), (None, b"k")])
def test_a_key_on_one_side_is_told_to_both(ours, theirs):
    errors = run(*machines(ours, theirs))
    assert {type(error) for error in errors.values()} == {AuthenticationError}
    has, lacks = ("dialler", "listener") if ours else ("listener", "dialler")
    assert f"the {lacks} has none" in str(errors[has])
    assert f"the {has} has a key" in str(errors[lacks])


def test_another_listener_address_is_refused():
    errors = run(*machines(b"k", b"k", address=b"tcp:10.0.0.1:5"))
    assert "refused our key" in str(errors["dialler"])
    assert "address translation" in str(errors["dialler"])


@pytest.mark.parametrize("refuser", ["dialler", "listener"])
def test_a_refused_user_is_told_to_both(refuser):
    dialler = Preamble(Role.DIALLER, None, HERE, refuse_user=refuser == "dialler", peer="the listener")
    listener = Preamble(Role.LISTENER, None, HERE, refuse_user=refuser == "listener", peer="the dialler")
    errors = run(dialler, listener)
    assert set(errors) == {"dialler", "listener"}
    assert all(isinstance(error, AuthenticationError) and "user" in str(error) for error in errors.values())


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x80\x04\x95", b"tptkiT", b"\0" * 44])
def test_something_else_is_refused_at_its_first_wrong_byte(garbage):
    for role in Role:
        machine = Preamble(role, b"k", HERE)
        machine.outgoing()
        with pytest.raises(ProtocolError, match="something else"):
            machine.feed(garbage)
        assert not machine.done
        assert machine.outgoing() == b""  # a stranger learns nothing


def test_another_version_is_refused_on_both_sides_with_both_in_the_text():
    dialler, listener = machines(None, None)
    hello = bytearray(dialler.outgoing())
    hello[8] = 9
    with pytest.raises(VersionError, match=r"version 9 .* 1"):
        listener.feed(bytes(hello))
    answer = bytearray(listener.outgoing())
    assert len(answer) == 44
    answer[8] = 9
    with pytest.raises(VersionError, match=r"version 9 .* 1"):
        dialler.feed(bytes(answer))


@pytest.mark.parametrize("key", [None, b"k"])
def test_two_of_one_role_refuse_each_other(key):
    one, other = Preamble(Role.DIALLER, key, HERE), Preamble(Role.DIALLER, key, HERE)
    with pytest.raises(ProtocolError, match="role"):
        one.feed(other.outgoing())


def test_a_reflected_preamble_and_proof_are_refused():
    # To a dialler: its own preamble with the role changed, then its own proof as the verdict.
    dialler = Preamble(Role.DIALLER, b"k", HERE)
    own = bytearray(dialler.outgoing())
    own[10] = Role.LISTENER
    dialler.feed(bytes(own))
    proof = dialler.outgoing()
    assert len(proof) == 32
    with pytest.raises(AuthenticationError, match="does not know our key"):
        dialler.feed(b"\x01" + proof)
    assert not dialler.done


def test_a_listener_cannot_be_used_against_itself():
    # An attacker without the key opens two connections to one listener and lets each answer the other.
    first, second = Preamble(Role.LISTENER, b"k", HERE), Preamble(Role.LISTENER, b"k", HERE)
    outsider = Preamble(Role.DIALLER, b"?", HERE)
    first.feed(outsider.outgoing())
    challenge = bytearray(first.outgoing())
    challenge[10] = Role.DIALLER
    second.feed(bytes(challenge))
    assert len(second.outgoing()) == 44  # a preamble and no proof: the listener proves last
    with pytest.raises(AuthenticationError):
        first.feed(bytes(32))


def test_a_replayed_proof_is_refused():
    dialler, listener = machines(b"k", b"k")
    hello = dialler.outgoing()
    listener.feed(hello)
    dialler.feed(listener.outgoing())
    proof = dialler.outgoing()
    listener.feed(proof)
    verdict = listener.outgoing()
    assert listener.done

    again = Preamble(Role.LISTENER, b"k", HERE)
    again.feed(hello)
    again.outgoing()
    with pytest.raises(AuthenticationError):
        again.feed(proof)
    assert again.outgoing() == bytes(33)
    assert not again.done

    third, fourth = machines(b"k", b"k")
    fourth.feed(third.outgoing())
    third.feed(fourth.outgoing())
    with pytest.raises(AuthenticationError):
        third.feed(verdict)


def test_flags_and_refusals_changed_on_the_way_are_noticed():
    dialler, listener = machines(b"k", b"k")
    hello = bytearray(dialler.outgoing())
    hello[9] |= 0x80
    listener.feed(bytes(hello))
    dialler.feed(listener.outgoing())
    with pytest.raises(AuthenticationError):
        listener.feed(dialler.outgoing())


@pytest.mark.parametrize("key", ["text", b"", bytearray(b"x"), 5])
def test_what_can_be_no_key_is_a_usage_error(key):
    with pytest.raises(UsageError, match="authkey"):
        check_authkey(key)
