"""Addresses: how they are written, bound and given back; no connections and no bytes belong here.

An address is ``unix:PATH`` or ``tcp://HOST:PORT``; an IPv6 host stands in brackets. A TCP address beyond loopback needs
a key on either side.

A unix socket's file is private to its user from the moment it exists, and it outlives a process that is killed. The
next listener tells a file that is left over (nobody answers: ECONNREFUSED) from one in use by connecting to it, and
takes it over under an flock on the directory, so that of many that try at once exactly one wins. The lock is held for
test, bind and listen only, and no lock file is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import attrs

from transportkit.deadline import Deadline
from transportkit.errors import AddressError, AuthenticationError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["UNIX_PATH_LIMIT", "Address", "Binding", "bind", "parse", "reported", "require_key", "resolve"]

#: Longest path of a unix socket on Linux, in bytes (``sockaddr_un`` holds 108 with the terminator).
UNIX_PATH_LIMIT = 107

_FORMS = "write unix:PATH, tcp://HOST:PORT or tcp://[IPV6]:PORT"
_TCP = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\s:\[\]/@?#*]+)):(?P<port>[0-9]{1,5})\Z", re.ASCII
)

#: How often a lock that another process holds is tried again, in seconds.
_LOCK_INTERVAL = 0.005


@attrs.frozen
class Address:
    """A parsed address; ``str(address)`` writes it again.

    Args:
        kind: ``unix`` or ``tcp``.
        path: the socket's absolute path; empty for tcp.
        host: name or number, an IPv6 number without its brackets; empty for unix.
        port: 0 to 65535, where 0 lets the system choose; 0 for unix.
    """

    kind: Literal["unix", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it, as far as the text tells; names but localhost count as beyond."""
        return self.kind == "unix" or self.host.lower() == "localhost" or _loopback(self.host)

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Parse ``unix:PATH`` or ``tcp://HOST:PORT``; a relative path is taken from the working directory of now.

    Raises:
        AddressError: it is neither, or the path does not fit a socket's address.
    """
    if not isinstance(text, str):
        raise AddressError(f"an address is text, not {text!r}: {_FORMS}")
    if text.startswith("unix:"):
        return _parse_unix(text)
    if not text.startswith("tcp://"):
        raise AddressError(f"cannot read the address {text!r}: {_FORMS}")
    found = _TCP.match(text[len("tcp://") :])
    if found is None:
        hint = "name the interface to listen on; 0.0.0.0 means all of them" if "*" in text else _FORMS
        raise AddressError(f"cannot read the address {text!r}: {hint}")
    port = int(found["port"])
    if port > 65535:
        raise AddressError(f"cannot read the address {text!r}: the port {port} is above 65535")
    if found["v6"] is not None and _number(found["v6"]) is None:
        raise AddressError(f"cannot read the address {text!r}: {found['v6']} is no IPv6 number")
    return Address("tcp", host=found["v6"] or found["host"], port=port)


def _parse_unix(text: str) -> Address:
    path = text[len("unix:") :]
    if not path:
        raise AddressError(f"the address {text!r} names no path: write unix:PATH")
    if "\0" in path:
        raise AddressError(f"the path in {text!r} has a NUL in it; every socket here has a file: write unix:PATH")
    if path.startswith("//") and not path.startswith("///"):
        raise AddressError(f"cannot read the address {text!r}: write unix:PATH, without the slashes of a URL")
    path = os.path.abspath(path)
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise AddressError(f"the path in the address {text!r} is no file name here: {error.reason}") from error
    if length > UNIX_PATH_LIMIT:
        raise AddressError(
            f"the path of {text!r} is {length} bytes long when absolute, above a unix socket's {UNIX_PATH_LIMIT}: "
            "choose a shorter directory, /run/user/UID or /tmp say"
        )
    return Address("unix", path=path)


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return mapped or number


def _loopback(host: str) -> bool:
    number = _number(host)
    return number is not None and number.is_loopback


def require_key(address: Address, authkey: bytes | None, host: str = "") -> None:
    """Raise `AuthenticationError` if the address is beyond loopback and there is no key.

    Args:
        host: what the name resolved to; empty judges by the text.
    """
    near = address.kind == "unix" or (_loopback(host) if host else address.is_loopback)
    if authkey is None and not near:
        what = f"{address} ({host})" if host and host != address.host else f"{address}"
        raise AuthenticationError(
            f"{what} reaches beyond loopback, which needs a key: pass the same `authkey=` on both sides, or use a "
            "loopback or unix address"
        )


def reported(sock: socket.socket, *, own: bool) -> bytes:
    """The listening end's address as the kernel reports it, the same bytes at both ends of one connection.

    Args:
        own: True at the accepted socket (its own address), False at the dialling one (its peer's).
    """
    name: Any = sock.getsockname() if own else sock.getpeername()
    if sock.family == socket.AF_UNIX:
        return b"unix:" + os.fsencode(name)
    number = _number(name[0].partition("%")[0])  # a scope is an index of one host's interfaces: the other's differs
    return f"tcp:{number}:{name[1]}".encode()


def resolve(address: Address, deadline: Deadline) -> list[tuple[socket.AddressFamily, Any]]:
    """The families and socket addresses that the address stands for, in the order to be tried.

    Raises:
        AddressError: the name does not resolve (now); its cause is an OSError.
        DeadlineError: the resolver did not answer.
    """
    if address.kind == "unix":
        return [(socket.AF_UNIX, address.path)]
    with contextlib.suppress(OSError):
        return _lookup(address, socket.AI_NUMERICHOST)
    found: list[list[tuple[socket.AddressFamily, Any]] | OSError] = []
    done = threading.Event()

    def ask() -> None:  # a resolver has no deadline of its own
        try:
            found.append(_lookup(address, 0))
        except OSError as error:
            found.append(error)
        finally:
            done.set()

    threading.Thread(target=ask, name="transportkit-resolve", daemon=True).start()
    if not done.wait(deadline.remaining(threading.TIMEOUT_MAX)):
        raise DeadlineError(
            f"the name of {address} was not resolved within {deadline.seconds:g} s (raise `{deadline.keyword}=`)"
        )
    answer = found[0]
    if isinstance(answer, OSError):
        raise AddressError(f"the host of {address} is not known: {answer.strerror or answer}") from answer
    return answer


def _lookup(address: Address, flags: int) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"no host name: {error}") from error
    return [(family, sockaddr) for family, _, _, _, sockaddr in rows]


@attrs.define(eq=False)
class Binding:
    """A listening, non-blocking socket and, for unix, the file that is its own.

    Args:
        address: where it listens, with the port that the system chose.
        identity: device and inode of the socket's file; None for tcp.
    """

    sock: socket.socket
    address: Address
    identity: tuple[int, int] | None = None

    def close(self, seconds: float = 2.0) -> None:
        """Remove the file if it is still this socket's, then close the socket. Idempotent.

        Where the directory's lock does not come free within ``seconds`` the file stays; the next listener takes it.
        """
        identity, self.identity = self.identity, None
        if identity is not None and self.sock.fileno() >= 0:
            with (
                contextlib.suppress(OSError, DeadlineError),
                _locked(self.address, Deadline(seconds, "lock on the directory")),
            ):
                now = os.lstat(self.address.path)
                # The socket is open still and holds its inode, so an equal number is this very file.
                if (now.st_dev, now.st_ino) == identity:
                    os.unlink(self.address.path)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a process forked without our hook may hold the descriptor still
        self.sock.close()

    def forget(self) -> None:
        """In a forked child: close the descriptor and leave the file, which is the parent's."""
        self.identity = None
        self.sock.close()


def bind(address: Address, *, authkey: bytes | None, deadline: Deadline, backlog: int = 1024) -> Binding:
    """Bind and listen on exactly this address.

    Raises:
        AddressError: in use, not permitted, no such directory or host, or a file that is no socket is in the way.
        AuthenticationError: beyond loopback without a key.
        DeadlineError: the directory's lock, held by another process, or the resolver did not come.
    """
    if address.kind == "unix":
        with _locked(address, deadline):
            return _bind_unix(address, backlog)
    require_key(address, authkey)
    refused: OSError | None = None
    for family, sockaddr in resolve(address, deadline):
        require_key(address, authkey, sockaddr[0])
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            refused = error
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # :: is not 0.0.0.0 as well
            sock.bind(sockaddr)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            refused = error
            continue
        return Binding(sock, attrs.evolve(address, port=sock.getsockname()[1]))
    assert refused is not None
    raise _cannot_bind(address, refused) from refused


def _bind_unix(address: Address, backlog: int) -> Binding:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _cannot_bind(address, error) from error
    try:
        _clear(address)
        os.fchmod(sock.fileno(), 0o600)  # Linux makes the file with the socket's mode; a umask is the whole process's
        sock.bind(address.path)
        made = os.lstat(address.path)
        sock.listen(backlog)  # under the lock too: bound but not listening looks like left over
    except OSError as error:
        sock.close()
        if isinstance(error, AddressError):
            raise
        raise _cannot_bind(address, error) from error
    return Binding(sock, address, (made.st_dev, made.st_ino))


def _clear(address: Address) -> None:
    """Remove a socket's file that nobody listens on; raise `AddressError` for anything else that is in the way."""
    try:
        mode = os.lstat(address.path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(
            f"cannot listen on {address}: a file that is no socket is there and was left alone; choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        answer = probe.connect_ex(address.path)
        occupied = _OCCUPIED if answer else _occupant(probe)
    if answer == errno.ECONNREFUSED:
        os.unlink(address.path)
    elif answer in (errno.EACCES, errno.EPERM):
        raise OSError(answer, os.strerror(answer))
    elif answer != errno.ENOENT:
        raise AddressError(f"cannot listen on {address}: {occupied}")


_OCCUPIED = "it is in use by a running process; choose another path or end that one"


def _occupant(probe: socket.socket) -> str:
    """Who listens at the other end, and what to do about it."""
    pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid == os.getpid():
        return "it is in use by this process; close() what listens there (abort() does not give it free)"
    return f"it is in use by process {pid}; choose another path or end that one" if pid else _OCCUPIED


def _cannot_bind(address: Address, error: OSError) -> AddressError:
    directory = os.path.dirname(address.path)
    advice = {
        errno.EADDRINUSE: "it is in use; choose another one" + (" or port 0" if address.kind == "tcp" else ""),
        errno.EADDRNOTAVAIL: "the host is no address of this machine; listen on one that it has",
        errno.EACCES: "not permitted; choose an address that this user may bind",
        errno.EPERM: "not permitted; choose an address that this user may bind",
        errno.ENOENT: f"there is no directory {directory}; make it first",
        errno.ENOTDIR: f"{directory} is no directory; choose another path",
        errno.EROFS: f"{directory} cannot be written to; choose another path",
    }
    return AddressError(f"cannot listen on {address}: {advice.get(error.errno or 0, error.strerror or str(error))}")


@contextlib.contextmanager
def _locked(address: Address, deadline: Deadline) -> Iterator[None]:
    directory = os.path.dirname(address.path)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_bind(address, error) from error
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired():
                    raise DeadlineError(
                        f"cannot listen on {address}: another process has held the lock on {directory} for "
                        f"{deadline.seconds:g} s; end it, or choose another directory"
                    ) from None
                time.sleep(_LOCK_INTERVAL)
            except OSError as error:
                why = error.strerror or str(error)
                raise AddressError(f"cannot listen on {address}: {directory} cannot be locked: {why}") from error
        yield
    finally:
        os.close(fd)
