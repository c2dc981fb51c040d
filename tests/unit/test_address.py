"""Addresses: how they are read, and who gets to bind them."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from promptness import PROMPT

from transportkit.address import Address, bind, parse, reported, require_key, resolve
from transportkit.deadline import Deadline
from transportkit.errors import AddressError, AuthenticationError, DeadlineError

pytestmark = pytest.mark.timeout(20)


def soon(seconds=20.0):
    return Deadline(seconds, "place to listen")


def place(path, **keywords):
    return bind(parse(f"unix:{path}"), authkey=None, deadline=soon(), **keywords)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/tmp/a.sock", Address("unix", path="/tmp/a.sock")),
        ("unix:/tmp//x/../a b:1", Address("unix", path="/tmp/a b:1")),
        ("unix:///tmp/a", Address("unix", path="/tmp/a")),
        ("tcp://localhost:80", Address("tcp", host="localhost", port=80)),
        ("tcp://127.0.0.1:0", Address("tcp", host="127.0.0.1", port=0)),
        ("tcp://a-b.example:65535", Address("tcp", host="a-b.example", port=65535)),
        ("tcp://[::1]:7", Address("tcp", host="::1", port=7)),
        ("tcp://[fe80::1%eth0]:7", Address("tcp", host="fe80::1%eth0", port=7)),
    ],
)
def test_an_address_is_read_and_written_again(text, address):
    assert parse(text) == address
    assert parse(str(address)) == address


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("unix:x.sock").path == f"{tmp_path}/x.sock"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unix:PATH"),
        ("/tmp/x", "unix:PATH"),
        ("http://localhost:80", "unix:PATH"),
        ("unix:", "no path"),
        ("unix://tmp/x", "slashes"),
        ("unix:/tmp/a\0b", "NUL"),
        ("unix:/tmp/\ud800", "no file name"),
        ("tcp:localhost:80", "tcp://HOST:PORT"),
        ("tcp://localhost", "tcp://HOST:PORT"),
        ("tcp://localhost:", "tcp://HOST:PORT"),
        ("tcp://:80", "tcp://HOST:PORT"),
        ("tcp://::1:80", "IPV6"),
        ("tcp://[::1]", "IPV6"),
        ("tcp://[::zz]:1", "IPV6"),
        ("tcp://[1:2]:1", "no IPv6"),
        ("tcp://localhost:65536", "65535"),
        ("tcp://localhost:-1", "tcp://HOST:PORT"),
        ("tcp://localhost:8\n", "tcp://HOST:PORT"),
        ("tcp://localhost:\u0663", "tcp://HOST:PORT"),
        ("tcp://user@host:1", "tcp://HOST:PORT"),
        ("tcp://host:1/path", "tcp://HOST:PORT"),
        ("tcp://*:80", "0.0.0.0"),
    ],
)
def test_what_is_no_address_is_refused_by_name(text, says):
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


def test_a_path_has_107_bytes_at_most():
    assert parse("unix:/" + "a" * 106).path
    with pytest.raises(AddressError, match=r"108 bytes.* 107"):
        parse("unix:/" + "a" * 107)
    with pytest.raises(AddressError, match=r"109 bytes.* 107"):
        parse("unix:/" + "é" * 54)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("unix:/tmp/x", True),
        ("tcp://localhost:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://example.org:1", False),
    ],
)
def test_beyond_loopback_needs_a_key(text, near):
    address = parse(text)
    assert address.is_loopback is near
    require_key(address, b"k")
    if near:
        require_key(address, None)
    else:
        with pytest.raises(AuthenticationError, match="authkey"):
            require_key(address, None)
        with pytest.raises(AuthenticationError, match="authkey"):
            bind(address, authkey=None, deadline=soon())


def test_a_name_is_judged_by_what_it_resolves_to():
    require_key(parse("tcp://somewhere:1"), None, "127.0.0.1")
    with pytest.raises(AuthenticationError):
        require_key(parse("tcp://localhost:1"), None, "192.0.2.1")


def test_a_silent_resolver_does_not_hold_up(monkeypatch):
    release = threading.Event()

    def silent(host, port, *, type, flags):  # noqa: A002 - the name is getaddrinfo's
        if flags:
            raise OSError("no number")
        release.wait(20)
        raise OSError("too late")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="resolved"):
        resolve(parse("tcp://slow.example:1"), Deadline(0.1, "listener"))
    assert time.monotonic() - start < PROMPT
    release.set()


def test_an_unknown_host_is_an_address_error():
    with pytest.raises(AddressError, match="not known"):
        resolve(parse("tcp://no-such-host.invalid:1"), soon())
    with pytest.raises(AddressError, match="not known"):
        resolve(parse("tcp://a..b:1"), soon())


def test_the_socket_file_is_private_and_goes_away(tmp_path):
    old = os.umask(0)
    try:
        binding = place(tmp_path / "s")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
    assert not os.get_inheritable(binding.sock.fileno())
    binding.close()
    binding.close()
    assert os.listdir(tmp_path) == []


def test_a_file_in_use_is_left_and_a_stale_one_taken_over(tmp_path):
    path = tmp_path / "s"
    first = place(path)
    with pytest.raises(AddressError, match="in use"):
        place(path)
    first.sock.close()  # as if killed: the file stays
    assert path.exists()
    second = place(path)
    first.close()  # no longer its own
    assert path.exists()
    second.close()
    assert not path.exists()


def test_only_its_own_file_is_removed(tmp_path):
    path = tmp_path / "s"
    binding = place(path)
    path.unlink()
    path.write_text("somebody else's")
    binding.close()
    assert path.read_text() == "somebody else's"


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(AddressError, match="no socket"):
        place(path)
    assert path.read_text() == "precious"
    link = tmp_path / "l"
    link.symlink_to(path)
    with pytest.raises(AddressError, match="no socket"):
        place(link)
    with pytest.raises(AddressError, match="no socket"):
        place(tmp_path)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(AddressError, match=f"no directory {tmp_path}/no"):
        place(tmp_path / "no" / "s")
    (tmp_path / "file").write_text("")
    with pytest.raises(AddressError, match="is no directory"):
        place(tmp_path / "file" / "s")


def test_what_is_not_permitted(monkeypatch, tmp_path):
    def refuse(*_args, **_keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AddressError, match="not permitted"):
        place(tmp_path / "s")


def test_the_lock_on_the_directory_has_a_deadline(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(DeadlineError, match=str(tmp_path)):
            bind(parse(f"unix:{tmp_path}/s"), authkey=None, deadline=Deadline(0.1, "lock"))
        binding = None
        timer = threading.Timer(0.1, fcntl.flock, (fd, fcntl.LOCK_UN))
        timer.start()
        binding = place(tmp_path / "s")
        timer.join()
        fcntl.flock(fd, fcntl.LOCK_EX)
        binding.close(0.05)  # cannot have the lock: leaves the file, closes the socket
        assert (tmp_path / "s").exists()
    finally:
        os.close(fd)
    place(tmp_path / "s").close()


CONTEND = """
import sys
from transportkit.address import bind, parse
from transportkit.deadline import Deadline
from transportkit.errors import AddressError
print("ready", flush=True)
sys.stdin.readline()
try:
    binding = bind(parse(sys.argv[1]), authkey=None, deadline=Deadline(10, "lock"))
except AddressError as error:
    print("in use" if "in use" in str(error) else error, flush=True)
else:
    print("won", flush=True)
sys.stdin.readline()
"""


def test_of_many_that_take_over_at_once_one_wins(tmp_path):
    stale = place(tmp_path / "s")
    stale.sock.close()
    command = [sys.executable, "-c", CONTEND, f"unix:{tmp_path}/s"]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(10)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        words = sorted(child.stdout.readline().strip() for child in children)
        assert words == ["in use"] * 9 + ["won"]
    finally:
        for child in children:
            child.communicate("\n", timeout=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_tcp_port_0_is_chosen_and_only_the_given_host_listens(host):
    try:
        binding = bind(parse(f"tcp://{host}:0"), authkey=None, deadline=soon())
    except AddressError:
        assert host == "[::1]"
        pytest.skip("no IPv6 loopback here")
    try:
        assert binding.address.port > 0
        assert str(binding.address) == f"tcp://{host}:{binding.address.port}"
        assert binding.sock.getsockname()[0] in ("127.0.0.1", "::1")
        with pytest.raises(AddressError, match="in use"):
            bind(binding.address, authkey=None, deadline=soon())
    finally:
        binding.close()


def test_all_interfaces_only_when_told_to():
    binding = bind(parse("tcp://0.0.0.0:0"), authkey=b"key", deadline=soon())
    assert binding.sock.getsockname()[0] == "0.0.0.0"
    binding.close()


def test_a_host_of_another_machine_cannot_be_bound():
    with pytest.raises(AddressError, match="no address of this machine"):
        bind(parse("tcp://192.0.2.1:0"), authkey=b"key", deadline=soon())


@pytest.mark.parametrize("kind", ["unix", "tcp", "mapped"])
def test_both_ends_report_the_same_address(kind, tmp_path):
    text = f"unix:{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    binding = bind(parse(text), authkey=None, deadline=soon())
    name = binding.sock.getsockname()
    if kind == "mapped":
        try:
            dialler = socket.socket(socket.AF_INET6)
            dialler.connect((f"::ffff:{name[0]}", name[1]))
        except OSError:
            binding.close()
            pytest.skip("no IPv6 here")
    else:
        dialler = socket.socket(binding.sock.family)
        dialler.connect(name)
    binding.sock.setblocking(True)
    accepted, _ = binding.sock.accept()
    assert reported(accepted, own=True) == reported(dialler, own=False)
    for sock in (accepted, dialler):
        sock.close()
    binding.close()
