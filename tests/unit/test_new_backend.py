"""`transportkit new-backend`: what it refuses, and that what it writes is whole; a nox session runs what it writes."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from pathlib import Path

import pytest

from transportkit import __version__
from transportkit.errors import TransportKitError, UsageError

pytest.importorskip("click", reason="the command line needs click")
pytest.importorskip("rich", reason="the command line needs rich")

from transportkit.cli import new_backend
from transportkit.cli.commands import transportkit

pytestmark = pytest.mark.timeout(30)

NAMES = ["acme-wire", "x", "sketch", "sketch-book", "class", "v2", "abcdefghijkl-abcdefghijk"]

REFUSED = {
    "": "cannot name a backend",
    "Wire": "cannot name a backend",
    "2wire": "cannot name a backend",
    "a_b": "cannot name a backend",
    "a--b": "cannot name a backend",
    "a-": "cannot name a backend",
    "a.b": "cannot name a backend",
    "a b": "cannot name a backend",
    "a\n": "cannot name a backend",
    "../wire": "cannot name a backend",
    "ä": "cannot name a backend",
    "x" * 25: "24 characters at most",
    "transportkit-wire": "leave the prefix away: 'wire'",
    "pickle": "there is a backend 'pickle' already, from transportkit",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def main(arguments: list[str]) -> int:
    """What `transportkit.cli.main` does with these arguments, less what is for a process of its own."""
    job = transportkit.main(arguments, "transportkit", standalone_mode=False)
    try:
        job()
    except TransportKitError as error:
        print(error, file=sys.stderr)
        return 2 if type(error) is UsageError else 1
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_what_it_writes_is_whole(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", name]) == 0
    root = tmp_path / f"transportkit-{name}"
    module = f"transportkit_{name.replace('-', '_')}"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    source = {f"src/{module}/{file}" for file in ("__init__.py", "backend.py", "py.typed")}
    assert found == {"pyproject.toml", "README.md", "tests/test_conformance.py"} | source

    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["name"] == f"transportkit-{name}"
    ((entry, target),) = project["project"]["entry-points"]["transportkit.backends"].items()
    assert entry == name
    assert target.partition(":")[0] == f"{module}.backend"
    assert any(one.startswith("transportkit>=") for one in project["project"]["dependencies"])
    tree = ast.parse((root / "src" / module / "backend.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert f'name: ClassVar[str] = "{name}"' in ast.unparse(classes[target.partition(":")[2]]).replace("'", '"')
    for path in root.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert "@RELEASES@" not in text
            assert name.startswith("sketch") or "sketch" not in text.lower()
            assert all(len(line) <= 120 for line in text.splitlines() if path.suffix == ".py"), path
    assert str(root.name) in capsys.readouterr().out


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_cannot_be_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "--", name]) == 2
    error = capsys.readouterr().err
    assert REFUSED[name] in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_one_line_installs_it_wherever_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = "pip install -e . 'transportkit[testing]'"
    assert main(["new-backend", "wire"]) == 0
    assert f"cd transportkit-wire && {line} && pytest" in capsys.readouterr().out
    assert f"$ .venv/bin/{line}\n" in new_backend.files("wire")["README.md"]
    assert f"\n{line}\n" in (Path(__file__).parents[2] / "docs" / "authors.md").read_text(encoding="utf-8")


def test_an_installed_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = tmp_path / "path"
    (installed / "transportkit_taken").mkdir(parents=True)
    for distribution in ("acme", "transportkit-idle"):
        info = installed / f"{distribution.replace('-', '_')}-3.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.1\n")
    (installed / "acme-3.1.dist-info" / "entry_points.txt").write_text("[transportkit.backends]\nfast = acme:Fast\n")
    monkeypatch.syspath_prepend(str(installed))
    for name, words in {
        "fast": "there is a backend 'fast' already, from acme 3.1",
        "idle": "transportkit-idle 3.1 is installed already",
        "taken": "there is a module 'transportkit_taken' already",
    }.items():
        assert main(["new-backend", name]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / f"transportkit-{name}").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for directory in ("full", "file", "file/below"):
        assert main(["new-backend", "wire", "--directory", directory]) == 1
        assert f"cannot write {directory}" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["mine"]

    (tmp_path / "empty").mkdir()
    for directory in ("empty", "new/below"):
        assert main(["new-backend", "wire", "--directory", directory]) == 0
        assert (tmp_path / directory / "pyproject.toml").exists()
        assert main(["new-backend", "wire", "--directory", directory]) == 1


def test_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    texts = {"a": "1", "src/b": "2", "src/x/c": "3", "a/d": "4"}
    with pytest.raises(new_backend.CommandError, match="cannot write"):
        new_backend.write(tmp_path / "here", texts)
    with pytest.raises(new_backend.CommandError, match="cannot write"):
        new_backend.write(tmp_path / "there" / "below", texts)
    assert os.listdir(tmp_path) == ["here"]
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.parametrize(
    ("version", "releases"), [("0.1.0", ">=0.1,<0.2"), ("0.12.3.dev1", ">=0.12,<0.13"), ("2.3.4", ">=2.3,<3")]
)
def test_it_asks_for_the_releases_that_share_the_contract(
    version: str, releases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_backend, "__version__", version)
    assert f'"transportkit{releases}"' in new_backend.files("wire")["pyproject.toml"]
    assert __version__.count(".") >= 2
