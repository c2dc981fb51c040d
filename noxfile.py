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

# Most tests wait for processes rather than compute: two cores carry four workers. `-- -n0` goes back to one process.
WORKERS = ("-n", "4")

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
    _not_the_checkout(session)
    session.run("pytest", *WORKERS, *session.posargs, env=INSTALLED_ONLY)


@nox.session(name="tests-wheels", default=False)
def tests_wheels(session: nox.Session) -> None:
    """All tests, copied out of the checkout, against wheels and nothing else of it."""
    wheels = _wheels(session, ".", *PLUGINS)
    session.install(*KNOWN_GOOD, "--group=tests", f"{wheels['transportkit']}[cli,testing]", *wheels.values())
    _not_the_checkout(session)
    elsewhere = _empty(session, "elsewhere")
    for name in ["pyproject.toml", "README.md", "docs", "tests", *(f"{plugin}/tests" for plugin in PLUGINS)]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, elsewhere / name)
    with session.chdir(elsewhere):
        session.run("pytest", *WORKERS, *session.posargs, env=INSTALLED_ONLY)


@nox.session(name="tests-minimum", default=False)
def tests_minimum(session: nox.Session) -> None:
    """All tests with the lowest versions that pyproject.toml allows, torch's included."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    wanted += [*project["optional-dependencies"]["testing"], *PROJECT["dependency-groups"]["tests"]]
    lowest = sorted({one.replace(">=", "==") for one in wanted})
    editable = [f"-e./{plugin}" for plugin in PLUGINS]
    session.install("-e.[cli,testing]", *editable, *lowest)
    session.run("pytest", *WORKERS, *session.posargs)


@nox.session(name="tests-torch", default=False)
@nox.parametrize("torch", [nox.param(version, id=version) for version in TORCH_VERSIONS])
def tests_torch(session: nox.Session, torch: str) -> None:
    """All tests on one of the supported torch versions, with the newest of everything else."""
    editable = [f"-e./{plugin}" for plugin in PLUGINS]
    session.install("-e.[cli,testing]", *editable, f"torch~={torch}.0", "--group=tests")
    told = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    if not str(told).startswith(f"{torch}."):
        session.error(f"asked for torch {torch}, got {told}")
    session.run("pytest", *WORKERS, *session.posargs)


@nox.session(name="tests-two-torches", default=False)
def tests_two_torches(session: nox.Session) -> None:
    """Two processes of the oldest and the newest torch agree and transfer; `-- PYTHON` names the older one's."""
    projects = [".[cli]", *(f"./{plugin}" for plugin in PLUGINS)]
    session.install(*projects, "--group=tests", f"torch~={TORCH_VERSIONS[-1]}.0")
    other, *arguments = session.posargs or [""]
    if not other:
        environment = _empty(session, "oldest")
        session.run("python", "-m", "venv", str(environment))
        other = str(environment / "bin" / "python")
        command = (other, "-m", "pip", "install", "--quiet", *projects, f"torch~={TORCH_VERSIONS[0]}.0", "numpy")
        session.run(*command, external=True)
    env = {**INSTALLED_ONLY, "TRANSPORTKIT_OTHER_PYTHON": other}
    session.run("pytest", "tests/process/test_two_torches.py", *arguments, env=env)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device; skipped, with the reason, where there is none."""
    if not pathlib.Path("/proc/driver/nvidia").exists():
        session.skip("this machine has no CUDA device")
    session.install("--group=tests", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    told = session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True)
    if str(told).split()[-1:] != ["True"]:
        session.skip("torch sees no CUDA device: is it a CUDA build, and is the driver new enough?")
    session.run("pytest", "-m", "gpu", *session.posargs, env=INSTALLED_ONLY)


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """The documentation's example of Ray actors, run for real."""
    session.install(*KNOWN_GOOD, "--group=tests", "ray", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    session.run("pytest", "tests/with_ray", *session.posargs, env=INSTALLED_ONLY)


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
    wheels = _wheels(session, ".", "plugins/transportkit-shm")
    session.install(*KNOWN_GOOD, f"{wheels['transportkit']}[cli]", str(wheels["transportkit_shm"]))
    _comes_and_goes(session, "shm", "transportkit-shm")


@nox.session(name="new-backend", default=False)
def new_backend(session: nox.Session) -> None:
    """Generates a plugin, checks it, installs its wheel, runs its conformance suite, uses it, uninstalls it."""
    name, distribution = "acme-wire", "transportkit-acme-wire"
    core = _wheels(session, ".")["transportkit"]
    session.install(*KNOWN_GOOD, "--group=lint", "--group=typing", f"{core}[cli,testing]")
    project = _empty(session, "generated") / distribution
    with session.chdir(project.parent):
        session.run("transportkit", "new-backend", name, env=INSTALLED_ONLY)
    wheel = _wheels(session, str(project))["transportkit_acme_wire"]
    session.install(*KNOWN_GOOD, str(wheel))
    with session.chdir(project):
        session.run("ruff", "check", ".")
        session.run("ruff", "format", "--check", ".")
        session.run("mypy", env=INSTALLED_ONLY)
        session.run("pytest", "--quiet", *session.posargs, env=INSTALLED_ONLY)
    _comes_and_goes(session, name, distribution)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """The performance targets, each beside its baseline in the same run."""
    session.install(*KNOWN_GOOD, "--group=tests", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    session.run("python", "tests/benchmarks", *session.posargs)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Mailboxes whose producers are killed and started again: nothing lost, nothing corrupt, memory flat."""
    session.install(*KNOWN_GOOD, "--group=tests", ".[cli,testing]", *(f"./{plugin}" for plugin in PLUGINS))
    session.run("python", "tests/mailbox_soak.py", *session.posargs)


def _empty(session: nox.Session, name: str) -> pathlib.Path:
    """An empty directory of this session's."""
    folder = pathlib.Path(session.create_tmp(), name).absolute()
    session.env.pop("TMPDIR", None)  # nox has just pointed it there, and paths of unix sockets have to be short
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _wheels(session: nox.Session, *projects: str) -> dict[str, pathlib.Path]:
    """Build wheels; by the name of the distribution as it stands in a wheel's."""
    folder = _empty(session, "wheels")
    # As a path, since pip takes "plugins/x" for a name.
    paths = [str(ROOT / project) for project in projects]
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *paths)
    return {path.name.partition("-")[0]: path for path in sorted(folder.glob("*.whl"))}


def _not_the_checkout(session: nox.Session) -> None:
    """See that the packages come from the environment, as the tests and their children will find them."""
    script = "import importlib.util as u, sys; print(*(u.find_spec(name).origin for name in sys.argv[1:]), sep='\\n')"
    names = ["transportkit", *(pathlib.Path(plugin).name.replace("-", "_") for plugin in PLUGINS)]
    told = session.run("python", "-c", script, *names, silent=True, env=INSTALLED_ONLY)
    for line in str(told).splitlines():
        if not pathlib.Path(line).is_relative_to(pathlib.Path(session.virtualenv.location).absolute()):
            session.error(f"the tests would run against {line}, which is not installed")


def _comes_and_goes(session: nox.Session, backend: str, distribution: str) -> None:
    """Use an installed plugin in a real session; uninstall it; go on without."""
    transfer = str(ROOT / "tests" / "installed_transfer.py")
    if backend not in _installed_backends(session):
        session.error(f"the plugin is installed, but `transportkit backends` does not list {backend}")
    session.run("python", transfer, backend, env=INSTALLED_ONLY)

    session.run("pip", "uninstall", "--quiet", "--yes", distribution)
    if backend in _installed_backends(session):
        session.error(f"the plugin is uninstalled, but `transportkit backends` still lists {backend}")
    session.run("python", transfer, "pickle", env=INSTALLED_ONLY)


def _installed_backends(session: nox.Session) -> set[str]:
    told = session.run("transportkit", "backends", "--json", silent=True, env=INSTALLED_ONLY)
    listed = json.loads(str(told))
    return {entry["name"] for entry in (listed["backends"] if isinstance(listed, dict) else listed)}
