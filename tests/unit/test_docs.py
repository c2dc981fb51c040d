"""The documentation is true: its examples run, and its tables name all there is.

An example is a fenced ``python`` block after a comment ``<!-- run: GROUP ROLE -->``. The blocks of a group run against
each other, each in a process of its own; a block of a receiver once for each time its role is named. A ``script`` is
run alone, as a file. Lines in the comment that begin with ``before:`` and ``after:`` are run with it, unseen by the
reader.
"""

from __future__ import annotations

import copy
import multiprocessing
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs
import msgspec
import pytest

import transportkit
from transportkit import conversation, errors, wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not PAGES, reason="the documentation is not here, as in an installed copy of the tests"),
]

#: Seconds that the processes of one example have.
PATIENCE = 30.0

_BLOCK = re.compile(
    r"^(?P<comment><!-- run: (?P<group>\w+) (?P<roles>[\w ]+?)\s*(?P<extra>\n.*?)?-->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

#: Addresses that the examples use, each of which is replaced by one of the test's own.
_UNIX = re.compile(r"unix:[\w/.-]+\.sock")
_TCP = "tcp://127.0.0.1:7000"


@attrs.frozen
class Example:
    """One block.

    Args:
        group: the blocks that belong together have one.
        roles: the processes that run it.
    """

    page: str
    group: str
    roles: tuple[str, ...]
    code: str
    before: str
    after: str


def _examples(path: Path) -> Iterator[Example]:
    for found in _BLOCK.finditer(path.read_text(encoding="utf-8")):
        extra = dict(re.findall(r"^(before|after): (.*)$", found["extra"] or "", re.MULTILINE))
        roles = tuple((found["roles"] or "").split())
        page = str(path.relative_to(ROOT))
        yield Example(page, found["group"] or "", roles, found["code"], extra.get("before", ""), extra.get("after", ""))


EXAMPLES = [example for page in PAGES for example in _examples(page)]
GROUPS = sorted({(example.page, example.group) for example in EXAMPLES if "script" not in example.roles})
SCRIPTS = [example for example in EXAMPLES if "script" in example.roles]


# -- running them -----------------------------------------------------------------------------------------------------

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch", "transportkit.session", "transportkit.backends.pickle", __name__])


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 50, bias=False))
    model[3].weight = model[0].weight  # tied, as those of a language model are
    return model


def _same(model: Any, wanted: dict[str, Any]) -> bool:
    import torch

    state = model.state_dict()
    return set(state) == set(wanted) and all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def _play(pipe: Connection, role: str, before: str, code: str, after: str, title: str) -> None:
    """In a process of its own: what the reader has, then the block."""
    import torch

    model = _model()
    original = copy.deepcopy(model.state_dict())
    if role == "receiver":
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
    names: dict[str, Any] = {"__name__": "__main__", "model": model, "original": original, "same": _same}
    try:
        for part in (before, code, after):  # not under the future statements of this module
            exec(compile(part, title, "exec", dont_inherit=True), names)
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")


def _run(parts: list[tuple[str, str, str, str]], title: str) -> None:
    """Run the (role, before, code, after) of one group at once; fails with the tracebacks of those that failed."""
    processes = []
    failures = []
    for role, before, code, after in parts:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_play, args=(theirs, role, before, code, after, f"<{title}: {role}>"))
        process.start()
        theirs.close()
        processes.append((role, process, ours))
    for role, _, pipe in processes:
        try:
            told = pipe.recv() if pipe.poll(PATIENCE) else "it does not end"
        except EOFError:
            told = "it died"
        if told:
            failures.append(f"{role}: {told}")
    for _, process, pipe in processes:
        process.join(0.1 if failures else 10)
        if process.exitcode is None:
            process.kill()
            process.join()
        pipe.close()
    assert not failures, "\n".join([title, *failures])


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _placed(code: str, folder: str, port: int) -> str:
    return _UNIX.sub(lambda found: f"unix:{folder}/{Path(found[0]).name}", code).replace(
        _TCP, f"tcp://127.0.0.1:{port}"
    )


@pytest.mark.parametrize(("page", "group"), GROUPS, ids=[f"{page}:{group}" for page, group in GROUPS])
def test_examples_run_against_each_other(page: str, group: str) -> None:
    assert group, f"{page}: a python block says nothing of how it is run"
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        port = _free_port()
        parts = [
            (role, example.before, _placed(example.code, folder, port), example.after)
            for example in EXAMPLES
            if (example.page, example.group) == (page, group)
            for role in example.roles
        ]
        assert {role for role, *_ in parts} <= {"sender", "receiver"}
        _run(parts, f"{page}, {group}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What became of every script: exit code and stderr. They run at once, since most of their time is imports."""
    running = {}
    for example in SCRIPTS:
        folder = tmp_path_factory.mktemp(example.group)
        script = folder / "example.py"
        script.write_text(example.code, encoding="utf-8")
        command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
        running[example.group] = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    ends = {}
    for group, process in running.items():
        try:
            _, told = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            _, told = process.communicate()
            told += "it does not end"
        ends[group] = process.returncode, told
    return ends


@pytest.mark.parametrize("example", SCRIPTS, ids=[f"{example.page}:{example.group}" for example in SCRIPTS])
def test_scripts_run(example: Example, finished: dict[str, tuple[int, str]]) -> None:
    code, told = finished[example.group]
    assert code == 0, told
    assert "Traceback" not in told, told


def test_the_readme_moves_a_model() -> None:
    blocks = [example.code for example in _examples(ROOT / "README.md") if "box(" not in example.code]
    senders = [code for code in blocks if "serve(" in code]
    receivers = [code for code in blocks if "serve(" not in code]
    assert senders, "the README has no example of a sender"
    assert receivers, "the README has no example of a receiver"
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        sender, receiver = (_placed("\n".join(codes), folder, _free_port()) for codes in (senders, receivers))
        parts = [
            ("sender", "", sender, ""),
            ("receiver", "", receiver, "assert same(model, original), 'another model arrived'"),
        ]
        _run(parts, "README.md")


def test_the_readme_sends_a_message() -> None:
    inbox, outbox = (example.code for example in _examples(ROOT / "README.md") if "box(" in example.code)
    before = "import msgspec, torch; import transportkit as tk; tensor = torch.ones(50_000)\n"
    before += 'Request = msgspec.defstruct("Request", [("id", str), ("pixels", torch.Tensor)])'
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        inbox, outbox = _placed(inbox, folder, 0), _placed(outbox, folder, 0)
        after = "assert request.id == '42' and request.pixels.sum() == 50_000"
        _run([("receiver", before, inbox, after), ("sender", before, outbox, "")], "README.md, mailbox")


# -- what the pages must name ----------------------------------------------------------------------------------------


def _errors() -> list[type[errors.TransportKitError]]:
    found: list[type[errors.TransportKitError]] = [errors.TransportKitError]
    for base in found:
        found += [one for one in base.__subclasses__() if one.__module__ == errors.__name__ and one not in found]
    return found


def test_the_table_of_errors_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "how-to" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == {one.__name__ for one in _errors()}


def test_every_error_is_a_public_name() -> None:
    assert {one.__name__ for one in _errors()} <= set(transportkit.__all__)


def _structs(root: Any) -> set[type[msgspec.Struct]]:
    """The structs that a type is made of."""
    found: set[type[msgspec.Struct]] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one not in found:
            found.add(one)
            waiting += [field.type for field in msgspec.structs.fields(one)]
        waiting += get_args(one)
    return found


def _rows() -> list[list[str]]:
    lines = (DOCS / "wire-format.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]


@pytest.mark.parametrize("struct", sorted(_structs(wire.Message), key=str))
def test_the_wire_format_has_every_field(struct: type[msgspec.Struct]) -> None:
    tag = struct.__struct_config__.tag
    name = {"TensorSpec": "spec"}.get(struct.__name__, struct.__name__.lower())
    titles = {f"`{tag}`"} if tag is not None and tag not in ("offer", "unavailable") else {name}
    titles |= {f"{name}, an array", f"{name}, with `type` `{tag}`"}
    mine = [row for row in _rows() if row[0] in titles and row[-1] != "any type"]
    assert mine, f"docs/wire-format.md has no row for {sorted(titles)}"
    text = " ".join(mine[0])
    absent = [field for field in struct.__struct_fields__ if f"`{field}`" not in text]
    assert not absent, f"docs/wire-format.md, {mine[0][0]}: {absent}"


def test_the_wire_format_has_every_transition() -> None:
    told = {tuple(row) for row in _rows()}
    for (state, role, message), following in conversation.TRANSITIONS.items():
        tag = message.__struct_config__.tag  # type: ignore[attr-defined]
        if tag not in ("waiting", "bye", "refusal"):
            assert (state.value, f"`{tag}`", role, following.value) in told


def test_the_wire_format_names_the_limits() -> None:
    from transportkit.backends.pickle import STREAM_LIMIT
    from transportkit.chunk import ALIGNMENT, MAX_PIECES
    from transportkit.kinds import MAX_DIMENSIONS

    text = (DOCS / "wire-format.md").read_text(encoding="utf-8")
    limits = [wire.HANDSHAKE_FRAME_LIMIT, wire.CONTROL_FRAME_LIMIT, wire.SIGNAL_LIMIT]
    limits += [MAX_PIECES, ALIGNMENT, MAX_DIMENSIONS, STREAM_LIMIT]
    assert [limit for limit in limits if not re.search(rf"\b{limit}\b", text)] == []


def test_the_docs_state_the_defaults() -> None:
    from transportkit.session.options import DEFAULT_CHUNK_BYTES, DEFAULT_SLOTS, DEFAULT_TIMEOUT

    backends = (DOCS / "how-to" / "backends.md").read_text(encoding="utf-8")
    assert f"({DEFAULT_CHUNK_BYTES} bytes) and {DEFAULT_SLOTS}" in backends
    assert f"{DEFAULT_CHUNK_BYTES * DEFAULT_SLOTS >> 20} MiB" in backends
    assert f"default {DEFAULT_TIMEOUT:g} seconds" in (DOCS / "how-to" / "errors.md").read_text(encoding="utf-8")


def test_the_command_line_page_has_every_command_and_option() -> None:
    click = pytest.importorskip("click")
    from transportkit.cli.commands import transportkit as command

    text = (DOCS / "how-to" / "command-line.md").read_text(encoding="utf-8")
    absent = []
    for name, sub in command.commands.items():
        absent += [name] if f"transportkit {name}" not in text else []
        for option in sub.params:
            if isinstance(option, click.Option):
                absent += [
                    f"{name} {flag}" for flag in option.opts if f"`{flag}" not in text and f" {flag} " not in text
                ]
    assert not absent
