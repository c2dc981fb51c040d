"""Listening and dialling: who gets through, who does not, and what it costs the others."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from promptness import PROMPT

import transportkit.dial
import transportkit.listener
from transportkit.auth import Preamble, Role
from transportkit.deadline import Deadline
from transportkit.errors import (
    AddressError,
    AuthenticationError,
    DeadlineError,
    ForkedError,
    PeerLostError,
    ProtocolError,
    UsageError,
    VersionError,
)
from transportkit.link import HEAD
from transportkit.listener import Listener, dial

pytestmark = pytest.mark.timeout(30)


def soon(seconds=20.0):
    return Deadline(seconds, "frame")


class Host:
    """A listener with what it handed over; each frame is answered with itself."""

    def __init__(self, address, *, authkey=None, timeout=20.0, start=True, **keywords):
        self.links, self.frames, self.errors = [], [], []
        self.changed = threading.Condition()
        self.listener = Listener(
            address, authkey=authkey, timeout=timeout, on_arrival=self.arrive, on_failure=self.fail, **keywords
        )
        self.address = self.listener.address
        if start:
            self.listener.start()

    def arrive(self, link, frame):
        with self.changed:
            self.links.append(link)
            self.frames.append(frame)
            self.changed.notify_all()
        link.send(frame, soon())

    def fail(self, peer, error):
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def until(self, condition, seconds=20.0):
        with self.changed:
            assert self.changed.wait_for(condition, seconds), (self.frames, self.errors)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        for link in self.links:
            link.close()


def greet(address, word=b"hello", authkey=None, **keywords):
    with dial(address, authkey=authkey, timeout=20, **keywords) as link:
        link.send(word, soon())
        assert link.recv(soon()) == word


def plain(host):
    """A plain socket to the listener."""
    if host.address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(host.address[5:])
    else:
        sock = socket.create_connection(("127.0.0.1", int(host.address.rpartition(":")[2])))
    sock.settimeout(5)
    return sock


@pytest.fixture(params=["unix", "tcp"])
def place(request, tmp_path):
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest.mark.parametrize("key", [None, b"secret"])
def test_both_sides_meet(place, key):
    with Host(place, authkey=key) as host:
        with dial(host.address, authkey=key, timeout=20) as link:
            link.send(b"hello", soon())
            assert link.recv(soon()) == b"hello"
            (ours,) = host.links
            assert link.kind == ours.kind == place[: place.index(":")]
            assert link.path == ours.path == (place[5:] if link.kind == "unix" else "")
            assert host.address in link.peer
            assert str(os.getpid()) in ours.peer or "127.0.0.1" in ours.peer
            assert ours.control_limit == link.control_limit
        assert host.listener.failures == 0
        with pytest.raises(PeerLostError):
            ours.recv(soon())


def test_the_socket_is_private_and_goes_with_the_listener(tmp_path):
    with Host(f"unix:{tmp_path}/s") as host:
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
        greet(host.address)
        with pytest.raises(AddressError, match="in use"):
            Host(host.address)
    assert os.listdir(tmp_path) == []
    host.listener.close()
    with Host(f"unix:{tmp_path}/s", start=False):
        pass
    assert os.listdir(tmp_path) == []


def test_links_handed_over_outlive_the_listener(place):
    with Host(place) as host, dial(host.address, authkey=None, timeout=20) as link:
        link.send(b"hello", soon())
        assert link.recv(soon()) == b"hello"
        host.listener.close()
        host.links[0].send(b"still", soon())
        assert link.recv(soon()) == b"still"


def test_a_listener_starts_once(place):
    with Host(place) as host:
        with pytest.raises(UsageError, match="running"):
            host.listener.start()
        host.listener.close()
        with pytest.raises(UsageError, match="closed"):
            host.listener.start()


def test_connections_wait_for_start(place):
    with Host(place, start=False) as host:
        thread = threading.Thread(target=greet, args=(host.address,))
        thread.start()
        time.sleep(0.05)
        host.listener.start()
        thread.join(20)
        assert host.frames == [b"hello"]


# -- who does not get through -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), [(b"one", b"two"), (b"one", None), (None, b"two")])
def test_keys_that_differ_are_told_to_both_sides_at_once(place, ours, theirs, caplog):
    with Host(place, authkey=theirs) as host, caplog.at_level(logging.INFO, "transportkit"):
        start = time.monotonic()
        with pytest.raises(AuthenticationError, match="authkey"):
            dial(host.address, authkey=ours, timeout=20)
        assert time.monotonic() - start < PROMPT
        host.until(lambda: host.errors)
        assert isinstance(host.errors[0], AuthenticationError)
        greet(host.address, authkey=theirs)
        assert host.listener.failures == 1
    assert len(caplog.records) == 1
    assert "came to nothing" in caplog.records[0].getMessage()


@pytest.mark.parametrize("refuser", ["listener", "dialler"])
def test_another_user_is_refused_and_told(tmp_path, monkeypatch, refuser):
    monkeypatch.setattr(getattr(transportkit, {"dialler": "dial"}.get(refuser, refuser)), "same_user", lambda _: False)
    with Host(f"unix:{tmp_path}/s") as host:
        with pytest.raises(AuthenticationError, match="user"):
            dial(host.address, authkey=None, timeout=20)
        host.until(lambda: host.errors)
        assert isinstance(host.errors[0], AuthenticationError)
        assert "user" in str(host.errors[0])


def test_the_overflow_uid_is_nobody(monkeypatch):
    from transportkit import identity

    one, other = socket.socketpair()
    with one, other:
        assert identity.same_user(one)
        monkeypatch.setattr(identity, "_overflow_uid", os.geteuid)
        assert not identity.same_user(one)
        monkeypatch.undo()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not identity.same_user(one)


@pytest.mark.parametrize(
    ("garbage", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ProtocolError),
        pytest.param(os.urandom(64), ProtocolError, id="random"),  # workers of a parallel run agree on names
        (b"tptkit\r\n\x07" + bytes(35), VersionError),
        (b"tpt", PeerLostError),
        (b"", PeerLostError),
    ],
)
def test_something_else_costs_only_itself(place, garbage, error):
    with Host(place) as host:
        with plain(host) as sock:
            sock.sendall(garbage)
            if error is PeerLostError:
                sock.shutdown(socket.SHUT_WR)
            host.until(lambda: host.errors)
        assert type(host.errors[0]) is error
        greet(host.address)
        assert host.listener.failures == 1


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (HEAD.pack(0, 1 << 63), ProtocolError),
        (HEAD.pack(0, (1 << 20) + 1), ProtocolError),
        (HEAD.pack(1, 5) + b"hello", ProtocolError),
        (b"\xff" * 9, ProtocolError),
        (HEAD.pack(0, 5) + b"he", PeerLostError),
    ],
)
def test_a_hostile_first_frame_costs_only_itself(place, frame, error):
    with Host(place) as host:
        with plain(host) as sock:
            sock.sendall(Preamble(Role.DIALLER, None, b"").outgoing() + frame)
            if error is PeerLostError:
                assert len(sock.recv(44)) == 44
                sock.shutdown(socket.SHUT_WR)
            host.until(lambda: host.errors)
        assert type(host.errors[0]) is error
        greet(host.address)


def test_the_largest_first_frame_gets_through(place):
    with Host(place) as host:
        greet(host.address, bytes(1 << 20))


def test_silent_and_slow_peers_hold_nobody_up(place):
    with Host(place, timeout=4.0) as host, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(plain(host)) for _ in range(10)]
        half = stack.enter_context(plain(host))
        half.sendall(Preamble(Role.DIALLER, None, b"").outgoing() + HEAD.pack(0, 100))
        drip = stack.enter_context(plain(host))
        for _ in range(20):
            greet(host.address)
        assert host.errors == []  # before anybody's time is over
        for byte in Preamble(Role.DIALLER, None, b"").outgoing():
            with contextlib.suppress(OSError):
                drip.send(bytes([byte]))
            time.sleep(0.15)
        host.until(lambda: len(host.errors) == 12)
        assert {type(error) for error in host.errors} == {DeadlineError}
        assert any("hello" in str(error) for error in host.errors)
        assert silent[0].recv(1) == b""


def test_the_oldest_that_is_not_authenticated_is_dropped(place):
    with Host(place, pending=4) as host, contextlib.ExitStack() as stack:
        passed = stack.enter_context(dial(host.address, authkey=None, timeout=20))
        silent = [stack.enter_context(plain(host)) for _ in range(6)]
        host.until(lambda: len(host.errors) == 3)
        assert [sock.recv(1) for sock in silent[:3]] == [b""] * 3
        passed.send(b"after all", soon())
        assert passed.recv(soon()) == b"after all"


def test_callbacks_that_raise_cost_only_that_connection(place):
    def raising(*_):
        raise RuntimeError("callback")

    with Listener(place, authkey=None, timeout=20, on_arrival=raising, on_failure=raising) as listener:
        listener.start()
        for _ in range(2):
            with dial(listener.address, authkey=None, timeout=20) as link:
                link.send(b"x", soon())
                with pytest.raises(PeerLostError):
                    link.recv(soon())
        assert listener.failures == 2


def test_a_listener_is_closed_from_its_callback(tmp_path):
    done = threading.Event()

    def arrive(link, _frame):
        link.close()
        listener.close()
        done.set()

    listener = Listener(f"unix:{tmp_path}/s", authkey=None, timeout=20, on_arrival=arrive)
    listener.start()
    with dial(listener.address, authkey=None, timeout=20) as link:
        link.send(b"x", soon())
        assert done.wait(5)
    until = time.monotonic() + 5
    while os.listdir(tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == []


def test_close_ends_those_on_the_way(place):
    with Host(place) as host, plain(host) as sock:
        with plain(host):
            pass
        host.until(lambda: host.errors)
        host.listener.close()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_no_descriptors_left_does_not_spin_and_passes(place, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Host(place) as host, contextlib.ExitStack() as stack:
        socks = []
        for _ in range(3):
            sock = socket.socket(socket.AF_UNIX if place[0] == "u" else socket.AF_INET)
            socks.append(stack.enter_context(sock))
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        filler = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    filler.append(os.open("/dev/null", os.O_RDONLY))
            target = host.address[5:] if place[0] == "u" else ("127.0.0.1", int(host.address.rpartition(":")[2]))
            before = time.process_time()
            for sock in socks:
                sock.connect(target)
            time.sleep(0.6)
            assert time.process_time() - before < 0.2
        finally:
            for fd in filler:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [r.levelname for r in caplog.records if "cannot accept" in r.getMessage()] == ["WARNING"]
        for sock in socks:
            sock.sendall(Preamble(Role.DIALLER, None, b"").outgoing())
            sock.settimeout(5)
            assert len(sock.recv(44)) == 44


def test_beyond_loopback_needs_a_key_on_both_sides():
    with pytest.raises(AuthenticationError, match="authkey"):
        Host("tcp://0.0.0.0:0")
    with pytest.raises(AuthenticationError, match="authkey"):
        dial("tcp://192.0.2.1:9", authkey=None, timeout=20)
    with Host("tcp://0.0.0.0:0", authkey=b"k") as host:
        greet(f"tcp://127.0.0.1:{host.address.rpartition(':')[2]}", authkey=b"k")
    with pytest.raises(UsageError, match="authkey"):
        Host("tcp://127.0.0.1:0", authkey=b"")


# -- dialling ---------------------------------------------------------------------------------------------------------


def test_the_two_sides_start_in_any_order(tmp_path):
    address = f"unix:{tmp_path}/s"
    thread = threading.Thread(target=greet, args=(address,))
    thread.start()
    time.sleep(0.1)
    with Host(address) as host:
        thread.join(20)
        assert host.frames == [b"hello"]


@pytest.mark.parametrize(("wait", "keyword"), [(0.15, "wait"), (None, "timeout"), (0, "wait")])
def test_nobody_listens(tmp_path, wait, keyword):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"unix:{tmp_path}/s", f"tcp://127.0.0.1:{port}"):
        start = time.monotonic()
        with pytest.raises(AddressError, match=f"{address} .*`{keyword}=`") as caught:
            dial(address, authkey=None, timeout=0.15, wait=wait)
        assert time.monotonic() - start < PROMPT
        assert isinstance(caught.value.__cause__, OSError)


def test_a_name_that_is_looked_up_too_slowly_at_a_later_try_hides_nothing(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    tries = []

    def resolved(address, deadline):
        tries.append(address)
        if len(tries) > 1:
            raise DeadlineError("the name was not resolved")
        return [(socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr("transportkit.dial.resolve", resolved)
    with pytest.raises(AddressError, match=r"nobody listens on .*Connection refused"):
        dial(f"tcp://localhost:{port}", authkey=None, timeout=1, wait=0.01)
    assert len(tries) == 2
    with pytest.raises(DeadlineError, match="not resolved"):
        dial(f"tcp://localhost:{port}", authkey=None, timeout=1, wait=0.01)


def test_a_socket_does_not_meet_itself():
    """On Linux a port of the ephemeral range where nobody listens is sometimes given to the dialling socket itself."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    met = False
    for port in range(low, min(high, low + 300)):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                met = True
                with pytest.raises(ConnectionRefusedError):
                    transportkit.dial._connect(
                        _Connected(sock), ("127.0.0.1", port), transportkit.dial.parse("tcp://127.0.0.1:1"), soon()
                    )
                break
    assert met


class _Connected:
    """A socket that is connected already."""

    def __init__(self, sock):
        self.getsockname, self.getpeername = sock.getsockname, sock.getpeername

    def connect_ex(self, _):
        return 0


def test_what_cannot_be_right_is_not_tried_again(tmp_path):
    (tmp_path / "file").write_text("")
    for address, says in [
        (f"unix:{tmp_path}/file", "no socket"),
        (f"unix:{tmp_path}/file/s", "directory"),
        ("tcp://127.0.0.1:0", "port 0"),
        ("nonsense", "unix:PATH"),
    ]:
        start = time.monotonic()
        with pytest.raises(AddressError, match=says):
            dial(address, authkey=None, timeout=20)
        assert time.monotonic() - start < PROMPT


def test_a_listener_that_hangs_up_before_the_preamble_is_tried_again(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=greet, args=(f"unix:{path}",))
        thread.start()
        for _ in range(3):
            server.accept()[0].close()
    with Host(f"unix:{path}") as host:
        thread.join(20)
        assert host.frames == [b"hello"]


def test_a_listener_that_accepts_and_is_silent_or_something_else(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=address):
            dial(address, authkey=None, timeout=0.2, wait=10)
        assert time.monotonic() - start < PROMPT

        def answer():
            server.accept()[0].close()  # that of the first try
            sock = server.accept()[0]
            sock.sendall(b"220 mail.example ESMTP\r\n")
            sock.recv(100)
            sock.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="something else"):
            dial(address, authkey=None, timeout=20)
        thread.join(20)


# -- processes --------------------------------------------------------------------------------------------------------


def test_many_processes_dial_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    address = f"unix:{tmp_path}/s"
    children = [context.Process(target=greet, args=(address, b"%d" % n, b"key"), kwargs={"wait": 20}) for n in range(3)]
    for child in children:
        child.start()
    with Host(address, authkey=b"key") as host:
        host.until(lambda: len(host.frames) == 3, 20)
        for child in children:
            child.join(20)
    assert sorted(host.frames) == [b"0", b"1", b"2"]
    assert [child.exitcode for child in children] == [0, 0, 0]


LISTEN = """
import sys, time
from transportkit.listener import Listener
listener = Listener(sys.argv[1], authkey=None, timeout=20, on_arrival=print)
listener.start()
print("listening", flush=True)
time.sleep(60)
"""


def test_a_killed_listener_leaves_a_file_that_the_next_takes_over(tmp_path):
    address = f"unix:{tmp_path}/s"
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "listening\n"
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert os.listdir(tmp_path) == ["s"]
    with Host(address) as host:
        greet(host.address)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_listener_and_leaves_its_file(tmp_path):
    with Host(f"unix:{tmp_path}/s") as host, plain(host) as sock:
        time.sleep(0.05)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                host.listener.close()
                try:
                    host.listener.start()
                except ForkedError:
                    code = 0
                names = [
                    os.readlink(f"/proc/self/fd/{fd}")
                    for fd in os.listdir("/proc/self/fd")
                    if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
                ]
                if any("eventfd" in name or "eventpoll" in name for name in names):
                    code = 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert os.listdir(tmp_path) == ["s"]
        greet(host.address)
        sock.sendall(b"x")
        host.until(lambda: host.errors)
