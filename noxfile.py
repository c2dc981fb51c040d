"""Every check of this project, each in a clean environment of its own: `nox` runs the default ones, `nox -l` lists all.

Versions are those of `constraints.txt`, except where a session is there to meet others.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "typing", "tests", "docs", "plugin"]

ROOT = pathlib.Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH_VERSIONS = PROJECT["tool"]["transportkit"]["torch"]
PLUGINS = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/pyproject.toml"))

KNOWN_GOOD = ("--constraint", str(ROOT / "constraints.txt"))

# The checkout's packages must not stand in for the installed ones, in the session or in a child of it.
INSTALLED_ONLY = {"PYTHONSAFEPATH": "1"}


@nox.session
def lint(session: nox.Session) -> None:
    """Style and likely bugs, with ruff."""
    session.install(*KNOWN_GOOD, "--group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Types, with mypy --strict."""
    session.install(*KNOWN_GOOD, "--group=typing", "--group=tests", ".[cli,testing]")
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests of the core and of its plugins, against what a user would install."""
    session.install(*KNOWN_GOOD, "--group=tests", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    session.run("pytest", *session.posargs, env=INSTALLED_ONLY)


@nox.session(name="tests-torch", default=False)
@nox.parametrize("torch", [nox.param(version, id=version) for version in TORCH_VERSIONS])
def tests_torch(session: nox.Session, torch: str) -> None:
    """All tests on one of the supported torch versions, with the newest of everything else."""
    editable = [f"-e./{plugin}" for plugin in PLUGINS]
    session.install("-e.[cli,testing]", *editable, f"torch~={torch}.0", "--group=tests")
    told = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    if not str(told).startswith(f"{torch}."):
        session.error(f"asked for torch {torch}, got {told}")
    session.run("pytest", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with warnings as errors; ends up in docs/_build/html."""
    session.install(*KNOWN_GOOD, "--group=docs", ".[cli,testing]")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Wheels and sdists of the core and its plugins; end up in dist/."""
    session.install(*KNOWN_GOOD, "hatchling")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for project in [".", *PLUGINS]:
        with session.chdir(ROOT / project):
            session.run("hatchling", "build", "--directory", str(dist))
    # What was built from the checkout must also build from its own sdist, and hold the same.
    for sdist in sorted(dist.glob("*.tar.gz")):
        again = pathlib.Path(session.create_tmp(), sdist.name)
        session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(again), str(sdist))
        for wheel in again.glob("*.whl"):
            if wheel.stat().st_size != (dist / wheel.name).stat().st_size:
                session.error(f"{wheel.name} differs when it is built from {sdist.name}")


@nox.session
def plugin(session: nox.Session) -> None:
    """Installs wheels of core and plugin, uses the backend, uninstalls the plugin, goes on without."""
    wheels = pathlib.Path(session.create_tmp(), "wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    projects = [".", "./plugins/transportkit-shm"]
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *projects)
    core, shm = sorted(wheels.glob("transportkit-*.whl")), sorted(wheels.glob("transportkit_shm-*.whl"))
    session.install(*KNOWN_GOOD, f"{core[0]}[cli]", str(shm[0]))
    transfer = str(ROOT / "tests" / "installed_transfer.py")

    if "shm" not in _installed_backends(session):
        session.error("the plugin is installed, but `transportkit backends` does not list shm")
    session.run("python", transfer, "shm", env=INSTALLED_ONLY)

    session.run("pip", "uninstall", "--quiet", "--yes", "transportkit-shm")
    if "shm" in _installed_backends(session):
        session.error("the plugin is uninstalled, but `transportkit backends` still lists shm")
    session.run("python", transfer, "pickle", env=INSTALLED_ONLY)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """The performance targets, each beside its baseline in the same run."""
    session.install(*KNOWN_GOOD, "--group=tests", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    session.run("python", "tests/benchmarks", *session.posargs)


def _installed_backends(session: nox.Session) -> set[str]:
    told = session.run("transportkit", "backends", "--json", silent=True, env=INSTALLED_ONLY)
    listed = json.loads(str(told))
    return {entry["name"] for entry in (listed["backends"] if isinstance(listed, dict) else listed)}
