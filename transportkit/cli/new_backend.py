"""`transportkit new-backend`: writes a plugin distribution with a backend that works; its text is `plugin_template`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
from importlib import resources
from pathlib import Path

from transportkit import __version__
from transportkit.cli import CommandError
from transportkit.cli.terminal import say
from transportkit.discovery import discover, origin
from transportkit.errors import UsageError

#: A name that is at once that of an entry point, a part of a distribution's and, with underscores, of a module's.
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)

#: So that the lines of the files stay as they are wrapped.
LONGEST = 24

PREFIX = "transportkit-"

#: The template of each file, and where it goes; the empty one is for an empty file.
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "src/{module}/__init__.py": "init.py.in",
    "src/{module}/backend.py": "backend.py",
    "src/{module}/py.typed": "",
    "tests/test_conformance.py": "test_conformance.py.in",
}


def run(name: str, directory: Path | None) -> None:
    """Write the files and say what to do with them.

    Args:
        name: of the backend.
        directory: where to write; by default ``transportkit-NAME`` in the current one.

    Raises:
        UsageError: it cannot be the name of a new backend.
        CommandError: the directory is not empty, or nothing can be written there.
    """
    check(name)
    folder = directory or Path(PREFIX + name)
    write(folder, files(name))
    say(f"wrote {folder}: a backend {name!r} that works, through a unix socket of its own")
    say("next: make it yours in " + str(folder / f"src/{_module(name)}/backend.py") + ", and run its tests:")
    say(f"  cd {folder} && pip install -e . 'transportkit[testing]' && pytest")


def check(name: str) -> None:
    """Raise `UsageError` unless this can be the name of a new backend."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a backend: write it in lower-case letters and digits, a letter first, "
            "with single hyphens between words"
        )
    if len(name) > LONGEST:
        raise UsageError(f"{name!r} is too long: {LONGEST} characters at most")
    if name.startswith(PREFIX):
        raise UsageError(
            f"leave the prefix away: {name.removeprefix(PREFIX)!r}; the distribution will be called {name!r}"
        )
    for found in discover():
        if found.name == name:
            raise UsageError(f"there is a backend {name!r} already, from {origin(found)}; choose another name")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(PREFIX + name)
        raise UsageError(f"{PREFIX}{name} {version} is installed already; choose another name")
    if importlib.util.find_spec(_module(name)) is not None:
        raise UsageError(f"there is a module {_module(name)!r} already; choose another name")


def files(name: str) -> dict[str, str]:
    """The text of every file, by its path below the project's directory."""
    pascal = "".join(word.capitalize() for word in name.split("-"))
    words = {"@RELEASES@": _releases(), "transportkit_sketch": _module(name), "Sketch": pascal, "sketch": name}
    templates = resources.files("transportkit.cli.plugin_template")
    made = {}
    for path, template in FILES.items():
        text = templates.joinpath(template).read_text(encoding="utf-8") if template else ""
        made[path.format(module=_module(name))] = re.sub("|".join(words), lambda found: words[found[0]], text)
    return made


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write files into a new or empty directory: all of them, or none. Raises `CommandError`."""
    made: list[Path] = []
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise CommandError(f"cannot write {folder}: it is there and not empty; nothing is ever overwritten")
        for name, text in texts.items():
            path = folder / name
            missing = [parent for parent in path.parents if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir()
                made.append(parent)
            with path.open("x", encoding="utf-8") as file:
                made.append(path)
                file.write(text)
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise CommandError(f"cannot write {error.filename or folder}: {error.strerror or error}") from error
        raise


def _module(name: str) -> str:
    return PREFIX.replace("-", "_") + name.replace("-", "_")


def _releases() -> str:
    """The releases that a backend written for this one works with."""
    major, minor = (int(part) for part in __version__.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"
