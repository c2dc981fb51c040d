"""Links: frames that arrive, frames that must not, peers that die, and calls that must end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
from promptness import PROMPT

from transportkit.deadline import Deadline
from transportkit.errors import ClosedError, DeadlineError, ForkedError, PeerLostError, ProtocolError
from transportkit.link import HEAD, READ_AHEAD, CustomLink, SocketLink, pair_sockets, wait

pytestmark = pytest.mark.timeout(30)

LONG = 1 << 30


def soon(seconds=20.0):
    return Deadline(seconds, "frame")


@pytest.fixture
def links():
    """Two ends of one link."""
    one, other = (SocketLink.over(sock, peer=peer) for sock, peer in zip(pair_sockets(), ("B", "A"), strict=True))
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw():
    """A plain socket and the link at its other end."""
    sock, other = pair_sockets()
    link = SocketLink.over(other, peer="the attacker")
    yield sock, link
    sock.close()
    link.close()


def tcp_sockets():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def inside(call, *arguments):
    """Run a call on a thread; returns a function that joins it and returns or raises what the call did."""
    outcome = []

    def run():
        try:
            outcome.append((call(*arguments), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join(seconds=10.0):
        thread.join(seconds)
        assert not thread.is_alive(), "the call does not end"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return join


# -- frames that arrive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pair_sockets, tcp_sockets])
def test_frames_arrive_in_order_both_ways(make):
    one, other = (SocketLink.over(sock, kind="tcp" if make is tcp_sockets else "pair") for sock in make())
    with one, other:
        for body in (b"", b"a", b"b" * 70_000):
            one.send(body, soon())
        one.send_payload([b"xy", memoryview(b""), memoryview(struct.pack("3d", 1, 2, 3)).cast("d")], soon())
        one.send_payload([], soon())
        one.send_payload([b"view"], soon())
        other.send(b"back", soon())
        assert [other.recv(soon()) for _ in range(3)] == [b"", b"a", b"b" * 70_000]
        assert other.recv_payload(26, soon()) == b"xy" + struct.pack("3d", 1, 2, 3)
        other.recv_payload_into(memoryview(bytearray()), soon())
        into = bytearray(4)
        other.recv_payload_into(memoryview(into), soon())
        assert into == b"view"
        assert one.recv(soon()) == b"back"


def test_a_payload_of_many_parts_and_one_larger_than_every_buffer(links):
    one, other = links
    parts = [bytes([n % 256]) * (n % 50) for n in range(3000)]
    big = os.urandom(20 << 20)
    join = inside(lambda: (one.send_payload(parts, soon()), one.send_payload([big[:9], big[9:]], soon())))
    assert other.recv_payload(LONG, soon()) == b"".join(parts)
    into = bytearray(len(big))
    other.recv_payload_into(memoryview(into), soon())
    assert into == big
    join()
    join = inside(one.send_payload, [big], soon())
    assert other.recv_payload(LONG, soon()) == big
    join()
    join = inside(one.send, big, soon())
    assert other.recv(soon()) == big
    join()


def test_payload_is_received_into_any_item_size(links):
    one, other = links
    one.send_payload([struct.pack("4i", 1, 2, 3, 4)], soon())
    into = memoryview(bytearray(16)).cast("i")
    other.recv_payload_into(into, soon())
    assert into.tolist() == [1, 2, 3, 4]


def test_bytes_read_before_the_link_was_made_come_first():
    one, other = pair_sockets()
    with SocketLink.over(one) as sender, SocketLink.over(other, ahead=HEAD.pack(0, 3) + b"a") as receiver:
        one.send(b"bc")
        sender.send(b"next", soon())
        assert [receiver.recv(soon()), receiver.recv(soon())] == [b"abc", b"next"]


def test_acknowledgements_flow_against_a_payload(links):
    """Both write at once: the payload's sender reads nothing until it is through, the receiver acknowledges first."""
    one, other = links
    payload = bytes(8 << 20)
    ack = b"a" * 4000

    def receive():
        for _ in range(150):  # more than the socket holds, less than the read-ahead
            other.send(ack, soon())
        into = bytearray(len(payload))
        other.recv_payload_into(memoryview(into), soon())
        return bytes(into)

    join = inside(receive)
    one.send_payload([payload], soon())
    assert join() == payload
    assert [one.recv(soon()) for _ in range(150)] == [ack] * 150


def test_read_ahead_is_bounded(raw):
    sock, link = raw
    sock.setblocking(False)
    frame = HEAD.pack(0, 10_000) + bytes(10_000)
    sent = 0
    feeding = True

    def feed():
        nonlocal sent
        while feeding:
            try:
                sent += sock.send(frame * 30)
            except BlockingIOError:
                time.sleep(0.001)

    join = inside(feed)
    with pytest.raises(DeadlineError):
        link.send_payload([bytes(50 << 20)], soon(0.5))
    feeding = False
    join()
    assert READ_AHEAD <= sent < READ_AHEAD + (3 << 20)


def test_try_send_never_waits_and_keeps_what_is_partly_written(links):
    one, other = links
    body = b"w" * 100_000
    accepted = 0
    start = time.monotonic()
    while one.try_send(body):
        accepted += 1
    assert not one.try_send(b"more")
    assert time.monotonic() - start < PROMPT
    assert 1 <= accepted < 100
    for _ in range(accepted - 1):
        assert other.recv(soon()) == body
    join = inside(other.recv, soon())  # its rest comes out while the other side waits
    with pytest.raises(DeadlineError):
        one.recv(soon(0.3))
    assert join() == body
    assert one.try_send(b"again")
    assert other.recv(soon()) == b"again"


def test_what_try_send_left_goes_first(links):
    one, other = links
    accepted = 0
    while one.try_send(b"w" * 100_000):
        accepted += 1
    join = inside(one.send, b"last", soon())
    assert [len(other.recv(soon())) for _ in range(accepted)] == [100_000] * accepted
    assert other.recv(soon()) == b"last"
    join()


# -- frames that must not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, (1 << 28) + 1])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_lying_length_is_refused_before_anything_is_allocated(raw, length, kind):
    sock, link = raw
    sock.sendall(HEAD.pack(kind, length))
    assert link.poll()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"the attacker .* {length} bytes"):
            link.recv(soon()) if kind == 0 else link.recv_payload(1 << 20, soon())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ClosedError, match="earlier error"):
        link.recv(soon())
    with pytest.raises(ClosedError):
        link.send(b"", soon())


@pytest.mark.parametrize("kind", [0, 1])
def test_a_length_within_the_limit_costs_only_what_came(raw, kind):
    sock, link = raw
    sock.sendall(HEAD.pack(kind, 1 << 28) + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(DeadlineError):
            link.recv(soon(0.1)) if kind == 0 else link.recv_payload(1 << 28, soon(0.1))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frames_of_the_wrong_kind_or_size(raw):
    def check(frame, call, says):
        sock, other = pair_sockets()
        with sock, SocketLink.over(other, peer="B") as link:
            sock.sendall(frame)
            with pytest.raises(ProtocolError, match=says):
                call(link)
            with pytest.raises(ClosedError):
                link.poll()

    check(HEAD.pack(1, 1) + b"x", lambda link: link.recv(soon()), "a payload frame instead of a control frame")
    check(HEAD.pack(0, 1) + b"x", lambda link: link.recv_payload(9, soon()), "a control frame instead of a payload")
    check(b"GET / HTTP/1.1\r\n\r\n", lambda link: link.recv(soon()), "kind 71")
    view = memoryview(bytearray(4))
    check(HEAD.pack(1, 3) + b"xxx", lambda link: link.recv_payload_into(view, soon()), "3 bytes where 4 were agreed")
    check(HEAD.pack(1, 5) + b"xxxxx", lambda link: link.recv_payload_into(view, soon()), "5 bytes where at most 4")
    check(HEAD.pack(0, 11) + b"x" * 11, lambda link: link.recv(soon(), 10), "11 bytes where at most 10")


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_nothing_came_and_the_link_goes_on(links):
    one, other = links
    with pytest.raises(DeadlineError, match="frame"):
        other.recv(soon(0.05))
    one.send(b"late", soon())
    assert other.recv(soon()) == b"late"


@pytest.mark.parametrize("frame", [HEAD.pack(0, 10)[:4], HEAD.pack(0, 10) + b"half", HEAD.pack(1, 10) + b"half"])
def test_half_a_frame_then_silence(raw, frame):
    sock, link = raw
    sock.sendall(frame)
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        link.recv_payload(100, soon(0.1)) if frame[0] == 1 else link.recv(soon(0.1))
    assert time.monotonic() - start < PROMPT
    with pytest.raises(ClosedError, match="unusable"):
        link.recv(soon())


@pytest.mark.parametrize("renew", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
def test_drip_feeding(raw, renew, kind):
    """An absolute deadline ends it; one that is renewed by progress bears it until it stops."""
    sock, link = raw
    link.renew_on_progress = renew
    frame = HEAD.pack(kind, 12) + b"dripfeeding!"

    def drip():
        for byte in frame:
            time.sleep(0.03)
            sock.sendall(bytes([byte]))

    join = inside(drip)
    call = (lambda: link.recv(soon(0.25))) if kind == 0 else (lambda: link.recv_payload(12, soon(0.25)))
    if renew:
        assert call() == b"dripfeeding!"
    else:
        start = time.monotonic()
        with pytest.raises(DeadlineError):
            call()
        assert time.monotonic() - start < PROMPT
    join()


def test_a_firehose_of_bytes_does_not_outlast_an_absolute_deadline(raw):
    sock, link = raw
    stop = threading.Event()

    def pour():
        sock.sendall(HEAD.pack(0, 1 << 28))
        sock.settimeout(0.05)
        while not stop.is_set():
            try:
                sock.send(bytes(100))
            except OSError:
                return
            time.sleep(0.0005)

    join = inside(pour)
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        link.recv(soon(0.2))
    assert time.monotonic() - start < PROMPT
    stop.set()
    join()


def test_nobody_reads(raw):
    sock, link = raw
    with pytest.raises(DeadlineError):
        link.send(bytes(10 << 20), soon(0.1))
    with pytest.raises(ClosedError, match="unusable"):
        link.send(b"x", soon())
    sock.recv(1)


def test_a_deadline_before_the_first_byte_written_leaves_the_link_usable(links):
    one, other = links
    while one.try_send(b"x" * 1000):
        pass
    with pytest.raises(DeadlineError):
        one.send(b"never begun", soon(0.05))
    count = 0
    while other.poll():
        assert other.recv(soon()) == b"x" * 1000
        count += 1
        one.poll()
    one.send(b"end", soon())
    assert other.recv(soon()) == b"end"


# -- peers that go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pair_sockets, tcp_sockets])
def test_what_came_before_the_end_is_delivered_first(make):
    one, other = make()
    kind = "tcp" if make is tcp_sockets else "pair"
    sender, receiver = SocketLink.over(one, kind=kind), SocketLink.over(other, kind=kind, peer="the trainer")
    with receiver:
        receiver.send(b"unread by the sender", soon())
        sender.send(b"one", soon())
        sender.send_payload([b"two"], soon())
        sender.send(b"bye", soon())
        sender.close()
        sender.close()
        assert receiver.poll()
        assert receiver.recv(soon()) == b"one"
        assert receiver.poll()
        assert receiver.recv_payload(3, soon()) == b"two"
        assert receiver.recv(soon()) == b"bye"
        for _ in range(2):
            with pytest.raises(PeerLostError, match="the trainer") as caught:
                receiver.recv(soon())
            assert caught.value.peer == "the trainer"
            with pytest.raises(PeerLostError):
                receiver.poll()
            with pytest.raises(PeerLostError):
                receiver.send(b"x", soon())
            with pytest.raises(PeerLostError):
                receiver.try_send(b"x")
    with pytest.raises(ClosedError):
        sender.send(b"", soon())
    with pytest.raises(ClosedError):
        sender.fileno()


def test_a_refused_write_does_not_lose_what_can_be_read(links):
    one, other = links
    one.send(b"why", soon())
    one.close()
    with pytest.raises(PeerLostError):
        other.send(b"x", soon())
    assert other.poll()
    assert other.recv(soon()) == b"why"
    with pytest.raises(PeerLostError):
        other.recv(soon())


@pytest.mark.parametrize("kind", [0, 1])
def test_the_end_in_the_middle_of_a_frame(raw, kind):
    sock, link = raw
    sock.sendall(HEAD.pack(kind, 10) + b"half")
    sock.close()
    with pytest.raises(PeerLostError):
        link.recv(soon()) if kind == 0 else link.recv_payload(10, soon())


PEER = """
import socket, sys, time
from transportkit.deadline import Deadline
from transportkit.link import SocketLink
link = SocketLink.over(socket.socket(fileno=int(sys.argv[1])))
link.send(b"alive", Deadline(20, "room"))
time.sleep(60)
"""


@pytest.mark.parametrize("doing", ["recv", "send", "wait"])
def test_a_killed_peer_is_noticed_at_once(doing):
    one, other = pair_sockets()
    child = subprocess.Popen([sys.executable, "-c", PEER, str(other.fileno())], pass_fds=[other.fileno()])
    other.close()
    with SocketLink.over(one, peer="the worker") as link:
        assert link.recv(soon(10)) == b"alive"
        call = {
            "recv": lambda: link.recv(soon(20)),
            "send": lambda: link.send_payload([bytes(50 << 20)], soon(20)),
            "wait": lambda: (wait([link], soon(20)), link.recv(soon(20))),
        }[doing]
        join = inside(call)
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="the worker"):
            join()
        assert time.monotonic() - start < PROMPT
    child.wait()


# -- abort, fork, descriptors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["recv", "send", "wait", "recv_payload"])
def test_abort_from_another_thread(links, doing):
    one, other = links
    call = {
        "recv": lambda: one.recv(soon(20)),
        "send": lambda: one.send_payload([bytes(50 << 20)], soon(20)),
        "wait": lambda: (wait([one], soon(20)), one.poll()),
        "recv_payload": lambda: one.recv_payload(LONG, soon(20)),
    }[doing]
    join = inside(call)
    time.sleep(0.1)
    start = time.monotonic()
    one.abort()
    with pytest.raises(ClosedError, match="aborted"):
        join()
    assert time.monotonic() - start < PROMPT
    for later in (lambda: one.send(b"", soon()), lambda: one.recv(soon()), one.poll, one.fileno):
        with pytest.raises(ClosedError, match="aborted"):
            later()
    one.abort()
    one.close()
    one.abort()
    with pytest.raises((PeerLostError, ProtocolError)):
        other.recv(soon())


def in_fork(call):
    """What a call returned in a forked child, as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    text = os.read(reading, 10_000).decode()
    os.close(reading)
    return text


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_link(links):
    one, other = links
    custom = CustomLink(Channel.pair()[0])
    fileno = one.fileno()

    def child():
        said = []
        for call in (lambda: one.send(b"", soon()), one.poll, lambda: custom.recv(soon()), custom.fileno):
            try:
                call()
            except ForkedError as error:
                said.append(str(error).split(";")[1].strip())
        for link in (one, custom):
            link.abort()
            link.close()
        try:
            os.fstat(fileno)
            said.append("open")
        except OSError:
            said.append("closed")
        return said

    assert in_fork(child) == repr(["make a new one after the fork"] * 4 + ["closed"])
    one.send(b"still here", soon())
    assert other.recv(soon()) == b"still here"
    custom.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_living_forked_child_does_not_hide_the_end(links):
    one, other = links
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    try:
        one.close()
        with pytest.raises(PeerLostError):
            other.recv(soon(1))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_descriptors_are_close_on_exec(links):
    assert not any(os.get_inheritable(link.fileno()) for link in links)
    assert not any(os.get_inheritable(sock.fileno()) or sock.close() for sock in pair_sockets())


def test_descriptor_numbers_above_1024():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the limit of open files is below 3000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    filler = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
    try:
        one, other = (SocketLink.over(sock) for sock in pair_sockets())
        with one, other:
            assert one.fileno() > 1024
            join = inside(other.recv_payload, LONG, soon())
            one.send_payload([bytes(3 << 20)], soon())
            assert len(join()) == 3 << 20
            other.send(b"x", soon())
            wait([one], soon())
            assert one.recv(soon()) == b"x"
    finally:
        for fd in filler:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_tcp_options_are_set():
    one, other = tcp_sockets()
    with SocketLink.over(one, kind="tcp", user_timeout=8.0), other:
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4


# -- waiting for several ----------------------------------------------------------------------------------------------


def test_wait_returns_for_frames_descriptors_and_ends(links):
    one, other = links
    third, fourth = (SocketLink.over(sock) for sock in pair_sockets())
    reading, writing = os.pipe()
    with third, fourth:
        with pytest.raises(DeadlineError):
            wait([other, fourth], soon(0.05), [reading])
        join = inside(wait, [other, fourth], soon(), [reading])
        time.sleep(0.05)
        third.send(b"x", soon())
        join()
        assert fourth.recv(soon()) == b"x"
        os.write(writing, b"x")
        wait([other, fourth], soon(), [reading])
        os.read(reading, 1)
        one.close()
        wait([other, fourth], soon(), [reading])
        with pytest.raises(PeerLostError):
            other.poll()
    os.close(reading)
    os.close(writing)


def test_wait_wants_whole_control_frames_and_heads_of_payloads(raw):
    sock, link = raw
    sock.sendall(HEAD.pack(0, 4) + b"ab")
    with pytest.raises(DeadlineError):
        wait([link], soon(0.05))
    sock.sendall(b"cd" + HEAD.pack(1, 1000))
    wait([link], soon())
    assert link.recv(soon()) == b"abcd"
    wait([link], soon())
    assert select.select([link.fileno()], [], [], 0) == ([], [], [])


def test_take_gives_whole_control_frames_only(raw):
    sock, link = raw
    link.control_limit = 50_000
    assert link.take() is None
    sock.sendall(HEAD.pack(0, 3) + b"one" + HEAD.pack(0, 40_000)[:4])
    assert link.take() == b"one"
    assert link.take() is None
    sock.sendall(HEAD.pack(0, 40_000)[4:] + b"2" * 39_999)
    assert link.take() is None
    sock.sendall(b"2" + HEAD.pack(0, 0) + HEAD.pack(1, 2) + b"pp" + HEAD.pack(0, 50_001))
    assert [link.take(), link.take()] == [b"2" * 40_000, b""]
    assert link.take() is None, "a payload is next"
    assert link.recv_payload(2, soon()) == b"pp"
    assert link.take() is None, "it is longer than is allowed"
    assert link.poll()
    with pytest.raises(ProtocolError, match="50001"):
        link.recv(soon(), link.control_limit)
    with pytest.raises(ClosedError):
        link.take()


def test_take_gives_what_came_before_the_end(raw):
    sock, link = raw
    sock.sendall(HEAD.pack(0, 3) + b"one" + HEAD.pack(0, 3) + b"t")
    sock.close()
    assert link.take() == b"one"
    with pytest.raises(PeerLostError, match="in the middle of a frame"):
        link.take()


def test_poll_reads_ahead_no_more_than_its_bound(raw):
    sock, link = raw
    body = bytes(3 << 20)
    join = inside(sock.sendall, HEAD.pack(0, len(body)) + body)
    wait([link], soon())
    assert link.recv(soon()) == body
    join()


# -- objects of the user's --------------------------------------------------------------------------------------------


class Channel:
    """A user's object over queues, without a descriptor."""

    def __init__(self, inward, outward):
        self.inward, self.outward = inward, outward
        self.closed = 0

    @classmethod
    def pair(cls, size=0):
        one, other = queue.Queue(size), queue.Queue(size)
        return cls(one, other), cls(other, one)

    def send(self, data, timeout):
        if self.closed:
            raise OSError("closed")
        try:
            self.outward.put(data, timeout != 0, timeout)
        except queue.Full:
            raise TimeoutError from None

    def recv(self, timeout):
        if self.closed:
            raise EOFError
        try:
            item = self.inward.get(timeout != 0, timeout)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self):
        self.closed += 1


class Descriptor:
    """A user's object over a datagram-like socket, with a descriptor."""

    def __init__(self, sock):
        self.sock = sock

    @classmethod
    def pair(cls):
        return tuple(cls(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    def send(self, data, timeout):
        self.sock.settimeout(timeout)
        try:
            self.sock.send(data)
        except BlockingIOError:
            raise TimeoutError from None

    def recv(self, timeout):
        self.sock.settimeout(timeout)
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            raise TimeoutError from None
        if not data:
            raise EOFError
        return data

    def fileno(self):
        return self.sock.fileno()

    def close(self):
        self.sock.close()


@pytest.fixture(params=[Channel, Descriptor])
def custom(request):
    one, other = (CustomLink(user, "the other") for user in request.param.pair())
    yield one, other
    one.close()
    other.close()


def test_custom_links_carry_frames(custom):
    one, other = custom
    one.renew_on_progress = other.renew_on_progress = True
    assert not other.poll()
    with pytest.raises(DeadlineError):
        other.recv(soon(0.05))
    one.send(b"taken", soon())
    wait([other], soon())
    assert [other.take(), other.take()] == [b"taken", None]
    one.send(b"a", soon())
    assert one.try_send(b"")
    one.send_payload([b"xy", memoryview(b"z")], soon())
    one.send_payload([b"into"], soon())
    wait([other], soon())
    assert other.poll()
    assert [other.recv(soon()), other.recv(soon())] == [b"a", b""]
    assert other.recv_payload(3, soon()) == b"xyz"
    into = bytearray(4)
    other.recv_payload_into(memoryview(into), soon())
    assert into == b"into"
    with pytest.raises(DeadlineError):
        wait([other], soon(0.05))
    other.send_payload([b"12345"], soon())
    with pytest.raises(ProtocolError, match="5 bytes"):
        one.recv_payload(4, soon())
    with pytest.raises(ClosedError):
        one.recv(soon())


def test_a_custom_link_wakes_whoever_waits(custom):
    one, other = custom
    join = inside(wait, [other], soon(10))
    time.sleep(0.05)
    one.send(b"x", soon())
    start = time.monotonic()
    join()
    assert time.monotonic() - start < PROMPT
    assert other.recv(soon()) == b"x"


def test_a_custom_link_is_aborted_from_another_thread(custom):
    one, _ = custom
    join = inside(one.recv, soon(20))
    time.sleep(0.05)
    start = time.monotonic()
    one.abort()
    with pytest.raises(ClosedError):
        join()
    assert time.monotonic() - start < PROMPT
    with pytest.raises(ClosedError):
        one.send(b"", soon())
    one.close()
    one.close()


def test_a_custom_peer_that_ends_is_lost_after_what_it_sent():
    user, far = Descriptor.pair()
    with CustomLink(user, "the far one") as link:
        far.send(b"\0last", 1)
        far.close()
        assert link.recv(soon()) == b"last"
        with pytest.raises(PeerLostError, match="the far one hung up"):
            link.recv(soon())
        with pytest.raises(PeerLostError):
            link.send(b"x", soon())


@pytest.mark.parametrize(
    ("item", "error", "says"),
    [
        (EOFError(), PeerLostError, "hung up"),
        (ConnectionResetError("reset"), PeerLostError, "reset"),
        (ValueError("broken"), PeerLostError, "broken"),
        ("text", ProtocolError, "str"),
        (b"", ProtocolError, "empty"),
        (b"\x07x", ProtocolError, "kind 7"),
        (b"\x01x", ProtocolError, "payload"),
    ],
)
def test_what_a_users_object_raises_or_returns_is_mapped(item, error, says):
    user, _ = Channel.pair()
    user.inward.put(b"\0first")
    user.inward.put(item)
    with CustomLink(user) as link:
        assert link.recv(soon()) == b"first"
        with pytest.raises(error, match=says):
            link.recv(soon())
        with pytest.raises((error, ClosedError)):
            link.recv(soon())
    assert user.closed == 1


def test_a_full_custom_link_does_not_wait_in_try_send():
    user, _ = Channel.pair(size=1)
    with CustomLink(user) as link:
        assert link.try_send(b"x")
        assert not link.try_send(b"y")
        with pytest.raises(DeadlineError):
            link.send(b"z", soon(0.05))
        assert user.outward.get() == b"\0x"
        assert link.try_send(b"y")


def test_the_reader_thread_is_one_bounded_and_ends_with_its_link():
    before = set(threading.enumerate())

    def readers():
        return set(threading.enumerate()) - before

    def ended():
        until = time.monotonic() + 3
        while readers() and time.monotonic() < until:
            time.sleep(0.02)
        return not readers()

    user, _ = Channel.pair()
    link = CustomLink(user)
    assert len(readers()) == 1
    for _ in range(100):
        user.inward.put(b"\0" + bytes(100_000))
    time.sleep(0.1)
    assert user.inward.qsize() >= 88
    for _ in range(100):
        assert len(link.recv(soon())) == 100_000
    link.close()
    assert ended()
    CustomLink(Channel.pair()[0])  # dropped without close
    gc.collect()
    assert ended()


def test_links_between_real_processes():
    one, other = pair_sockets()
    child = multiprocessing.get_context("spawn").Process(target=_echo, args=(other,))
    child.start()
    other.close()
    with SocketLink.over(one, peer="the child") as link:
        link.send_payload([bytes(range(256)) * 10_000], soon(20))
        assert link.recv_payload(LONG, soon(20)) == bytes(range(256)) * 10_000
        with pytest.raises(PeerLostError):
            link.recv(soon(20))
    child.join(20)
    assert child.exitcode == 0


def _echo(sock):
    with SocketLink.over(sock) as link:
        link.send_payload([link.recv_payload(LONG, Deadline(20, "x"))], Deadline(20, "x"))
