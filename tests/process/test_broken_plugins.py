"""Good plugins beside broken ones of every sort, as somebody meets them: in real sessions and at the command line.

The plugins are directories with metadata, as pip leaves them, on the path of processes of their own. What the registry
makes of each sort, in more sorts, is `test_registry`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("click", reason="the command line needs click")

pytestmark = pytest.mark.timeout(90)

TESTS = Path(__file__).parents[1]

#: The good ones. `slow` takes longer to import than anybody likes, and works.
GOOD = {
    "sketch": "from transportkit.cli.plugin_template.backend import SketchTransport as Plugin",
    "slow": (
        "import time; time.sleep(2.1)\n"
        "from transportkit.cli.plugin_template.backend import SketchTransport\n"
        "class Plugin(SketchTransport):\n    name = 'slow'\n    rank = 99\n"
    ),
}

_SUBCLASS = "from transportkit.backends.pickle import PickleTransport\nclass Plugin(PickleTransport):\n"

#: The broken ones: the module's text, and a part of the reason.
BROKEN = {
    "import-error": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "native-import-error": ("import ctypes; ctypes.CDLL('libnone.so.7')", "OSError: libnone.so.7"),
    "syntax-error": ("def broken(:", "SyntaxError"),
    "assertion": ("assert False, 'needs a newer driver'", "AssertionError: needs a newer driver"),
    "system-exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "noisy-exit": ("print('usage: nothing'); raise SystemExit('bye')", "SystemExit: bye"),
    "interrupting": ("class Panic(BaseException): pass\nraise Panic('out of cheese')", "Panic: out of cheese"),
    "no-attribute": ("Other = 1", "AttributeError"),
    "wrong-class": ("class Plugin: pass", "is not a subclass of transportkit.transport.Transport"),
    "number": ("Plugin = 42", "is not a class, but an int"),
    "abstract": (
        "import transportkit.transport as t\nclass Plugin(t.Transport):\n    name = 'abstract'\n    api_version = 1\n",
        "it is abstract: exporter, importer, match, probe not implemented",
    ),
    "other-name": (
        _SUBCLASS + "    name = 'another'\n",
        "its entry point is named 'other-name', its class says 'another'",
    ),
    "newer-api": (_SUBCLASS + "    name = 'newer-api'\n    api_version = 7\n", "written for version 7"),
    "probe-raises": (
        _SUBCLASS + "    name = 'probe-raises'\n    def probe(site): raise OSError(5, 'device lost')\n",
        "probe() raised OSError: [Errno 5] device lost",
    ),
    "probe-lies": (_SUBCLASS + "    name = 'probe-lies'\n    def probe(site): return True\n", "probe() returned True"),
}


@attrs.frozen
class Place:
    """An environment with all these plugins."""

    path: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH", "")]))
        # torch (2.14) reads all entry points when it is imported, and fails at the damaged ones.
        env = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
        for name in ("TRANSPORTKIT_BACKENDS", "TRANSPORTKIT_DISABLE"):
            if name not in variables:
                env.pop(name, None)
        command = (sys.executable, *command)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=80, check=False)

    def install(self, name: str, text: str, *, distribution: str = "", entry_points: str = "") -> None:
        distribution = distribution or f"acme-{name}"
        module = distribution.replace("-", "_")
        info = self.path / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(entry_points or f"[transportkit.backends]\n{name} = {module}:Plugin\n")
        (self.path / f"{module}.py").write_text(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("site"))
    for name, text in GOOD.items():
        place.install(name, text)
    for name, (text, _) in BROKEN.items():
        place.install(name, text)
    for distribution in ("acme-double", "rival-double"):
        place.install("double", _SUBCLASS + "    name = 'double'\n", distribution=distribution)
    place.install("damaged", "Plugin = 1", entry_points="[transportkit.backends]\nno equals sign\n")
    return place


@pytest.fixture(scope="module")
def listed(place: Place) -> list[dict[str, Any]]:
    """What `transportkit backends --check --json` says."""
    done = place.run("-m", "transportkit.cli", "backends", "--check", "--json")
    assert done.returncode == 0, done.stderr
    assert "the backends of acme-damaged are skipped: its metadata is damaged" in done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_the_listing_names_each_with_distribution_and_reason(place: Place, listed: list[dict[str, Any]]) -> None:
    rows = {row["name"]: row for row in listed}
    for name in (*GOOD, "pickle"):
        assert (rows[name]["usable"], rows[name]["reason"]) == (True, "")
    for name, (_, reason) in BROKEN.items():
        row = rows[name]
        assert (row["usable"], row["distribution"], row["version"]) == (False, f"acme-{name}", "2.5")
        assert reason in row["reason"]
    doubles = [row for row in listed if row["name"] == "double"]
    assert [row["distribution"] for row in doubles] == ["acme-double", "rival-double"]
    for row in doubles:
        assert not row["usable"]
        assert "acme-double 2.5 (as acme_double:Plugin) and rival-double 2.5 (as rival_double:Plugin)" in row["reason"]
    assert "damaged" not in rows

    table = place.run("-m", "transportkit.cli", "backends", "--check").stdout.splitlines()
    for row in listed:
        (line,) = [line for line in table if line.split()[:2] == [row["name"], row["distribution"]]]
        assert line.endswith("  yes" if row["usable"] else f"no: {row['reason']}")


def test_a_torch_that_cannot_be_imported_is_the_reason(place: Place) -> None:
    done = place.run("-m", "transportkit.cli", "backends", "--check", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in json.loads(done.stdout) if row["name"] == "pickle"]
    assert row["usable"] or row["reason"].startswith("torch cannot be imported: ")


def test_without_check_nothing_is_imported(place: Place) -> None:
    done = place.run("-X", "importtime", "-m", "transportkit.cli", "backends")
    assert done.returncode == 0
    assert "acme-system-exit" in done.stdout
    assert not [line for line in done.stderr.splitlines() if "| " in line and "acme_" in line]


def test_the_good_ones_work_in_a_session_and_the_broken_are_told_of(place: Place, listed: list[dict[str, Any]]) -> None:
    done = place.run(str(TESTS / "installed_transfer.py"), "sketch", TRANSPORTKIT_DISABLE="shm,gloo")
    assert done.returncode == 0, done.stderr
    assert "moved over sketch" in done.stdout
    assert "slow: not taken: costs more than sketch here" in done.stdout
    for row in listed:
        if row["version"] == "2.5" and not row["usable"]:
            assert f"  {row['name']}: not taken: unavailable at " in done.stdout
            assert row["reason"] in done.stdout
            warned = [line for line in done.stderr.splitlines() if f"backend {row['name']} (" in line]
            assert row["name"] == "double" or len(warned) == 2, "a warning in each of the two processes"


ASK = """
import json, sys, tempfile
import transportkit as tk

told = {}
for name in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            tk.serve(f"unix:{folder}/link.sock", backends=("pickle", name))
        except tk.BackendError as error:
            told[name] = [type(error).__name__, error.backend, str(error)]
print(json.dumps(told))
"""


def test_a_broken_one_asked_for_by_name_is_refused_in_the_same_words(
    place: Place, listed: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = {row["name"]: row for row in listed if row["version"] == "2.5" and not row["usable"]}
    done = place.run("-c", ASK, *broken, "damaged")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])  # one of them prints
    assert set(told) == {*broken, "damaged"}
    for name, row in broken.items():
        kind, backend, text = told[name]
        assert (kind, backend) == ("DuplicateBackendError" if name == "double" else "BackendUnavailableError", name)
        assert text.endswith(row["reason"])
        assert f"{row['distribution']} 2.5" in text
    assert told["damaged"][0] == "UnknownBackendError"

    fetch = ("-m", "transportkit.cli", "fetch", f"unix:{tmp_path}/x", f"{tmp_path}/y", "--wait", "5", "--backend")
    asked = place.run(*fetch, "system-exit")
    assert asked.returncode == 1
    assert asked.stderr.splitlines()[-1] == f"transportkit: {told['system-exit'][2]}"
