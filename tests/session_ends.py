"""Real processes for the tests of whole sessions: started quickly, watched, ended by their ids; asserts nothing.

A `Child` runs one function of a test module in a process of its own, forked from a server that has imported torch
already. The function gets a `Talk` to its parent. When it ends, what it returned or raised travels to the parent,
together with the descriptors that it left open.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

import transportkit as tk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

BACKENDS = ("pickle", "shm")

#: Seconds after which a child that still runs is killed, and its test failed.
PATIENCE = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "torch",
        "psutil",
        "transportkit.session",
        "transportkit.backends.pickle",
        "transportkit_shm.shm",
        __name__,
    ]
)


class ChildError(Exception):
    """A child ended in another way than its test expects."""


class Talk:
    """The child's end of the channel to its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: object) -> None:
        self._connection.send(("said", value))

    def hear(self, timeout: float = PATIENCE) -> Any:
        """What the parent sends with `Child.tell`."""
        if not self._connection.poll(timeout):
            raise ChildError("the parent says nothing")
        return self._connection.recv()

    def spare(self) -> set[int]:
        return {self._connection.fileno()}


class Child:
    """A process that runs ``function(talk, *args)``.

    Args:
        function: at the top of a test module.
        env: environment variables to set in it first, or to take away (None).
        die: where it kills itself, see `die_at`.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        env: dict[str, str | None] | None = None,
        die: tuple[Any, ...] | None = None,
    ) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(theirs, function, args, env or {}, die), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0
        self._said: list[Any] = []
        self._end: tuple[str, Any, list[str]] | None = None
        self.died_at = 0.0

    @property
    def channel(self) -> int:
        """The descriptor over which this process talks with it."""
        return self._connection.fileno()

    def tell(self, value: object) -> None:
        self._connection.send(value)

    def heard(self, timeout: float = PATIENCE) -> Any:
        """What the child says next."""
        if not self._said:
            self._listen(timeout)
        if self._said:
            return self._said.pop(0)
        raise ChildError(f"the child said nothing more, but ended: {self._end}")

    def result(self, timeout: float = PATIENCE) -> Any:
        """What the function returned. Raises what it raised, and `ChildError` where it left descriptors behind."""
        limit = time.monotonic() + timeout
        while self._end is None:
            self._listen(limit - time.monotonic())
        self.join(max(1.0, limit - time.monotonic()))
        kind, value, left = self._end
        if left:
            raise ChildError(f"descriptors were left open: {left}; the child ended with {kind} {value!r}")
        if kind == "raised":
            raise value
        return value

    def join(self, timeout: float = PATIENCE) -> int:
        """Wait for the process to end; its exit code."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise ChildError(f"process {self.pid} does not end")
        self.died_at = self.died_at or time.monotonic()
        return code

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stopped(self, timeout: float = PATIENCE) -> float:
        """Wait until the process has been stopped; the moment."""
        limit = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > limit or self._process.exitcode is not None:
                raise ChildError(f"process {self.pid} has not been stopped")
            time.sleep(0.005)
        return time.monotonic()

    def end(self) -> None:
        """Kill it if it still runs, and forget it."""
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._process.join(20)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            with contextlib.suppress(ChildError):
                self._listen(0.1)
            error.add_note(f"process {self.pid} said {self._said} and ended with {self._end}")
        self.end()

    def _listen(self, timeout: float) -> None:
        if timeout <= 0 or not self._connection.poll(timeout):
            raise ChildError(f"process {self.pid} says nothing within its time")
        try:
            kind, *value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(20)
            self._end = ("died", self._process.exitcode, [])
            self.died_at = time.monotonic()
            return
        if kind == "said":
            self._said.append(value[0])
        else:
            self._end = (kind, *value)


class Remote(Child):
    """A process that holds one end of a session and does with it what it is told.

    Args:
        side: ``"receive"`` or ``"send"``.
        keywords: of `connect` or `serve`.
    """

    def __init__(self, side: str, address: str, env: dict[str, str | None] | None = None, **keywords: Any) -> None:
        super().__init__(_obey, side, address, {"wait": 20, "timeout": 20} | keywords, env=env)

    def start(self, function: Callable[..., object], *args: Any) -> Remote:
        """Have it call ``function(session, *args)``; the function is at the top of a module."""
        self.tell((function, args))
        return self

    def answer(self, timeout: float = PATIENCE) -> Any:
        """What that call returned; raises what it raised."""
        kind, value = self.heard(timeout)
        if kind == "raised":
            raise value
        return value

    def finish(self) -> None:
        """Let it close its session and end, and see that it left nothing behind."""
        self.tell(None)
        self.result()
        if (code := self.join()) != 0:
            raise ChildError(f"process {self.pid} ended with {code}")


def _obey(talk: Talk, side: str, address: str, keywords: dict[str, Any]) -> None:
    opened: Any = tk.connect(address, **keywords) if side == "receive" else tk.serve(address, **keywords)
    with opened as session:
        while (command := talk.hear()) is not None:
            function, args = command
            try:
                outcome: tuple[str, Any] = ("returned", function(session, *args))
            except BaseException as error:
                outcome = ("raised", _bare(error))
            talk.say(outcome)


def _run(
    connection: Connection,
    function: Callable[..., object],
    args: tuple[Any, ...],
    env: dict[str, str | None],
    die: tuple[Any, ...] | None,
) -> None:
    warnings.simplefilter("error")
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # to look at a child that hangs
    threading.excepthook = _told_by_exit  # type: ignore[assignment]
    logging.getLogger("transportkit").addHandler(_Formatting())
    logging.getLogger("transportkit").setLevel(logging.DEBUG)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if die is not None:
        die_at(*die)
    talk = Talk(connection)
    before = descriptors()
    try:
        outcome: tuple[str, Any] = ("returned", function(talk, *args))
    except BaseException as error:
        outcome = ("raised", _bare(error))
    left = leftovers(before)
    try:
        connection.send((*outcome, left))
    except (TypeError, AttributeError, ValueError) as error:
        connection.send(("raised", ChildError(f"{outcome!r} cannot travel: {error}"), left))


class _Formatting(logging.Handler):
    """Formats every record, so that one that cannot be formatted ends its test."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


def _told_by_exit(hook: threading.ExceptHookArgs) -> None:
    sys.__excepthook__(hook.exc_type, hook.exc_value or hook.exc_type(), hook.exc_traceback)
    os._exit(70)  # an exception that a thread lost


def _bare(error: BaseException) -> BaseException:
    """The error without its frames, which hold sessions alive."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error


# -- what a process holds ---------------------------------------------------------------------------------------------


def descriptors() -> dict[int, str]:
    """What this process's descriptors lead to."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def shared_names() -> set[str]:
    """What is in `/dev/shm`, but for the semaphores of `multiprocessing`: tests beside this one have some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def leftovers(before: dict[int, str], grace: float = 2.0) -> list[str]:
    """The descriptors and mapped arenas beyond those of ``before``; threads that are ending get a moment."""
    limit = time.monotonic() + grace
    while True:
        left = [f"{n}: {to}" for n, to in descriptors().items() if before.get(n) != to and "/fd" not in to]
        left += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
        left += [t.name for t in threading.enumerate() if t.name.startswith("transportkit")]
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.01)
        gc.collect()


# -- where a process kills itself -------------------------------------------------------------------------------------


def die_at(place: str, when: str = "before", call: int = 1, argument: str = "", number: int = signal.SIGKILL) -> None:
    """Have this process kill itself, as ``kill -9`` would, at a call of one function.

    Args:
        place: ``"module:Class.method"`` or ``"module:function"``.
        when: ``"before"`` or ``"after"`` it.
        call: at the how-manieth call.
        argument: count only calls one of whose positional arguments is this text, or of this class.
        number: of the signal, where it is another one.
    """
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    count = 0

    def fatal(*args: Any, **keywords: Any) -> Any:
        nonlocal count
        if not argument or any(argument == (arg if isinstance(arg, str) else type(arg).__name__) for arg in args):
            count += 1
            if count == call and when == "before":
                suicide(number)
        value = original(*args, **keywords)
        if count == call and when == "after":
            suicide(number)
        return value

    setattr(owner, name, fatal)


def suicide(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        time.sleep(10)


# -- models and addresses ---------------------------------------------------------------------------------------------


def model(seed: int = 7, scale: int = 1) -> dict[str, torch.Tensor]:
    """A few tensors of several dtypes and layouts, about 60 KB times ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(48, 64 * scale, generator=generator)
    return {
        "weight": torch.randn(64, 64 * scale, generator=generator),
        "transposed": wide.t(),
        "every.second": wide.flatten()[::2],
        "half": torch.randn(33, 3, generator=generator).to(torch.bfloat16),
        "eight": torch.randn(17, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, dtype=torch.complex64, generator=generator),
        "flags": torch.arange(7) % 2 == 0,
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "last": torch.arange(1000 * scale, dtype=torch.int16),
    }


def zeros(seed: int = 7, scale: int = 1) -> dict[str, torch.Tensor]:
    """Targets for `model`."""
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in model(seed, scale).items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's value."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def differing(got: Any, wanted: Any) -> list[str]:
    """The names under which two mappings differ, by bytes, dtype and shape."""
    got, wanted = dict(got), dict(wanted)
    names = [name for name in wanted if name not in got] + [name for name in got if name not in wanted]
    for name, tensor in wanted.items():
        if name in got:
            other = got[name]
            same = other.dtype == tensor.dtype and other.shape == tensor.shape and raw(other) == raw(tensor)
            names += [] if same else [name]
    return names


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="tk-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def caught(function: Callable[..., object], *args: Any, **keywords: Any) -> tuple[tk.TransportKitError, float]:
    """Call, and return our error and the moment of it. Raises `ChildError` when there was none."""
    try:
        value = function(*args, **keywords)
    except tk.TransportKitError as error:
        now = time.monotonic()
        bare = _bare(error)
        assert isinstance(bare, tk.TransportKitError)
        return bare, now
    raise ChildError(f"no error, but {value!r}")


def load(receiver: tk.Receiver, seed: int = 7, keywords: dict[str, Any] | None = None) -> tuple[list[str], tk.Update]:
    """Take one update of `model` into new targets: the names that came wrong, and the update."""
    target = zeros(seed)
    update = receiver.load_into(target, **keywords or {})
    return differing(target, model(seed)), update


# -- whole sides ------------------------------------------------------------------------------------------------------


def one_update(talk: Talk | None, address: str, keywords: dict[str, Any]) -> str:
    """A receiver that takes one update of `model`; returns the backend."""
    with tk.connect(address, **{"wait": 15, "timeout": 10} | keywords) as receiver:
        target = zeros()
        update = receiver.load_into(target)
        wrong = differing(target, model())
        if wrong:
            raise ChildError(f"wrong values: {wrong}")
        return update.backend


def serve_one(talk: Talk | None, address: str, keywords: dict[str, Any]) -> dict[int, str]:
    """A sender that sends `model` once; returns the report's backends."""
    with tk.serve(address, **{"wait": 15, "timeout": 10} | keywords) as sender:
        return dict(sender.send(model(), version=1).backends)


def session_works(address: str, **keywords: Any) -> str:
    """A new session on this address in two new processes; returns the backend that carried it."""
    with Child(serve_one, address, keywords) as sender, Child(one_update, address, keywords) as receiver:
        backend = receiver.result()
        assert sender.result() == {0: backend}
        return str(backend)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESRCH)


def python(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """An unrelated process that runs ``code``; its output is text."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
