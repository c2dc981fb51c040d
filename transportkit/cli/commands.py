"""What can be written on the command line, and what each of it means; nothing is done here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from transportkit import __version__
from transportkit.address import parse
from transportkit.errors import AddressError

if TYPE_CHECKING:
    from transportkit.cli import Job

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def nbytes(text: str) -> int:
    """A number of bytes: ``1000``, ``16MiB``, ``1.5GB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?|)b?", text.strip(), re.IGNORECASE | re.ASCII)
    value = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if not 1 <= value < 1 << 62:
        raise click.BadParameter(f"{text!r} is no positive number of bytes, such as 1000, 16MiB or 2GB")
    return int(value)


def seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise click.BadParameter(f"{text!r} is no positive number of seconds")
    return value


def written_address(text: str) -> str:
    """An address. ``unix:~/...`` is below the home directory: no shell expands a tilde after a colon."""
    if text.startswith("unix:~"):
        text = "unix:" + os.path.expanduser(text[len("unix:") :])
    try:
        parse(text)
    except AddressError as error:
        raise click.BadParameter(str(error)) from error
    return text


ADDRESS = click.argument("address", type=written_address)


def everywhere(function: F) -> F:
    """The options of every command."""
    # Read off the arguments in `main`, which must know it when parsing fails, too.
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error, and log.")(
        function
    )


QUIET = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")

TRANSFER = [
    click.option(
        "--backend",
        "backends",
        multiple=True,
        metavar="NAME",
        help="Use this backend only; may be repeated, best first.",
    ),
    click.option(
        "--chunk-bytes", type=nbytes, metavar="SIZE", help="Bound of a chunk, such as 4MiB.  [default: 16MiB]"
    ),
    click.option("--slots", type=click.IntRange(min=1), help="Chunks under way at once.  [default: 3]"),
    click.option("--no-checksum", is_flag=True, help="Take no digests, if the other side says so, too."),
    click.option("--timeout", type=seconds, metavar="SECONDS", help="Bound on the lack of progress.  [default: 60]"),
]
SESSION = [
    *TRANSFER,
    click.option("--wait", type=seconds, metavar="SECONDS", help="Bound on waiting for the other side to come."),
    click.option(
        "--authkey-file", type=click.Path(path_type=Path), metavar="FILE", help="Holds the secret that both sides know."
    ),
    click.option("--allow-plaintext", is_flag=True, help="Allow backends whose bytes cross a network unencrypted."),
]


def options(several: list[Callable[[F], F]]) -> Callable[[F], F]:
    """Several options as one decorator, in their order."""

    def decorate(function: F) -> F:
        for option in reversed(several):
            function = option(function)
        return function

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="transportkit", message="%(prog)s %(version)s")
def transportkit() -> None:
    """Move named tensors between processes over whichever installed backend both sides can use.

    ADDRESS is unix:PATH or tcp://HOST:PORT.

    Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130, 143 and
    129 stopped by SIGINT, SIGTERM and SIGHUP.
    """


@transportkit.command()
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE.safetensors]")
@click.option("--size", type=nbytes, metavar="SIZE", help="Size of the synthetic model.  [default: 512MiB]")
@click.option("--updates", type=click.IntRange(1, 10_000), default=6, show_default=True, help="How often it is moved.")
@options(TRANSFER)
@QUIET
@everywhere
def demo(file: Path | None, size: int | None, updates: int, quiet: bool, **given: Any) -> Job:
    """Move a model between two processes that are started for it, and show how.

    The model is FILE's, or a synthetic one. Every update is checked on arrival, and its rate is shown beside that of a
    plain memory copy.
    """
    if file is not None and size is not None:
        raise click.UsageError("--size is for the synthetic model; a FILE has its own size")

    def job() -> None:
        from transportkit.cli.demo import run

        run(file, size or 512 << 20, updates, _keywords(given), quiet=quiet)

    return job


@transportkit.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.safetensors")
@ADDRESS
@click.option("--receivers", type=click.IntRange(min=1), default=1, show_default=True, help="How many must fetch it.")
@options(SESSION)
@QUIET
@everywhere
def serve(file: Path, address: str, receivers: int, quiet: bool, **given: Any) -> Job:
    """Send a safetensors file to those who fetch it; ends when all have.

    The file is read tensor by tensor while it is sent. Its metadata and the exact text of its header travel, too.
    """

    def job() -> None:
        from transportkit.cli.serve import run

        run(file, address, receivers, _keywords(given), quiet=quiet)

    return job


@transportkit.command()
@ADDRESS
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.safetensors")
@options(SESSION)
@QUIET
@everywhere
def fetch(address: str, out: Path, quiet: bool, **given: Any) -> Job:
    """Receive one update and write it to a safetensors file.

    What `transportkit serve` sends becomes an identical file. OUT appears, or is replaced, only when all has come.
    """

    def job() -> None:
        from transportkit.cli.fetch import run

        run(address, out, _keywords(given), quiet=quiet)

    return job


@transportkit.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.option("--check", is_flag=True, help="Load and probe each: usable here, or why not.")
@everywhere
def backends(as_json: bool, check: bool) -> Job:
    """List the installed backends; without --check none of them is imported."""

    def job() -> None:
        from transportkit.cli.backends import run

        run(as_json=as_json, check=check)

    return job


@transportkit.command()
@ADDRESS
@options(SESSION)
@everywhere
def doctor(address: str, **given: Any) -> Job:
    """Ask a listening sender what it would agree with this process.

    Takes no receiver's place. The backends are compared, not tried.
    """

    def job() -> None:
        from transportkit.cli.doctor import run

        run(address, _keywords(given))

    return job


@transportkit.command("new-backend")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new or empty directory to write to.  [default: transportkit-NAME]",
)
@everywhere
def new_backend(name: str, directory: Path | None) -> Job:
    """Write a plugin distribution: a backend that works, its tests, its pyproject.toml.

    NAME becomes the backend's name, and transportkit-NAME the distribution's.
    """

    def job() -> None:
        from transportkit.cli.new_backend import run

        run(name, directory)

    return job


def _keywords(given: dict[str, Any]) -> dict[str, Any]:
    """The options as `serve` and `connect` take them; what was not given is left to them."""
    keywords = {name: value for name, value in given.items() if value is not None}
    keywords["backends"] = given["backends"] or None
    if keywords.pop("no_checksum"):
        keywords["checksum"] = False
    path = keywords.pop("authkey_file", None)
    if path is not None:
        from transportkit.cli.files import read_key

        keywords["authkey"] = read_key(path)
    return keywords
