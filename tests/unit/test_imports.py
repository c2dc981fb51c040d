"""Who may import whom, and what an import costs: the rules of the house, read off the sources."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import transportkit

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(transportkit.__file__).parent

# From the bottom to the top. A module imports its own layer and those below it, types included. Modules not named here
# are the parts (chunk, handshake, link, registry, ...) between the contracts and what puts them together.
PARTS = 3
LAYER = {
    **dict.fromkeys(["errors", "deadline"], 0),
    "wire": 1,
    "transport": 2,
    "backends": 4,
    "session": 5,
    "mailbox": 6,
    **dict.fromkeys(["cli", "testing", "__main__"], 7),
}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ROOMS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in it that stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_no_module_imports_upwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "transportkit" or name == "transportkit.__version__":
            continue
        assert len(parts) > 1, f"{path}:{line} imports the front of the house"
        assert parts[1] in ROOMS, f"{path}:{line} imports {name} through the front of the house"
        assert LAYER.get(parts[1], PARTS) <= LAYER.get(room, PARTS), (
            f"{path}:{line}: {room} imports {parts[1]}, which is above it"
        )


@pytest.mark.parametrize("path", [PACKAGE / "__init__.py", *SOURCES], ids=module_of)
def test_the_core_imports_no_plugin(path: Path) -> None:
    for line, name in imported(path):
        assert not name.startswith("transportkit_"), f"{path}:{line} imports {name}"


def test_every_module_says_what_belongs_in_it() -> None:
    silent = [module_of(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert silent == []


def python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_importing_the_library_is_cheap() -> None:
    heavy = "('torch', 'numpy', 'stevedore', 'click', 'rich', 'transportkit_shm', 'transportkit.session')"
    assert python(f"import sys, transportkit; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_errors_are_had_without_torch() -> None:
    assert python("import sys, transportkit; transportkit.TransportKitError; print('torch' in sys.modules)") == "False"


def test_every_public_name_resolves() -> None:
    for name in transportkit.__all__:
        assert getattr(transportkit, name) is not None
    assert set(transportkit.__all__) <= set(dir(transportkit))


def test_every_error_is_public() -> None:
    from transportkit import errors

    ours = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert ours <= set(transportkit.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tensor'"):
        _ = transportkit.Tensor  # type: ignore[attr-defined]
