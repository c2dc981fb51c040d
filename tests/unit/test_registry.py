"""The registry, against fake distributions that lie on the path like installed ones."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from msgspec import Raw

from transportkit import discovery, registry
from transportkit.errors import (
    BackendUnavailableError,
    DuplicateBackendError,
    UnknownBackendError,
    UsageError,
)
from transportkit.registry import Failure, Loaded, Usable, choose, discover, load, probe, survey
from transportkit.site import read_site
from transportkit.transport import API_VERSION, Transport
from transportkit.wire import Offer, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Install = Callable[..., None]

SITE = read_site("unix")

GOOD = """
from transportkit.transport import API_VERSION, Transport, Offer, Unavailable, Mismatch

class Good(Transport):
    name = "NAME"
    api_version = API_VERSION
    fan_out = True
    rank = 7
    @classmethod
    def probe(cls, site):
        return Offer("NAME")
    @classmethod
    def match(cls, sender, receiver, lane):
        return Mismatch("a fake")
    @classmethod
    def exporter(cls, terms, wiring):
        raise NotImplementedError
    @classmethod
    def importer(cls, terms, wiring):
        raise NotImplementedError
"""


def good(name: str, **changes: str) -> str:
    """Source of a backend that keeps the contract, with the given replacements."""
    source = GOOD.replace("NAME", name)
    for old, new in changes.items():
        source = source.replace(old, new)
    return source


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_logged", set())
    for variable in (registry.ALLOW_VARIABLE, registry.DISABLE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay a fake distribution on the path: ``install("fast", source)`` registers `Good` of module ``fake_fast``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(
        name: str,
        source: str = "",
        *,
        distribution: str = "",
        value: str = "",
        version: str = "1.0",
        entry_points: str | None = None,
        folder: str = "",
    ) -> None:
        home = tmp_path / folder
        home.mkdir(exist_ok=True)
        distribution = distribution or f"acme-{name}"
        module = "fake_" + name.replace("-", "_")
        info = home / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        text = (
            f"[transportkit.backends]\n{name} = {value or f'{module}:Good'}\n" if entry_points is None else entry_points
        )
        (info / "entry_points.txt").write_text(text)
        if source:
            (home / f"{module}.py").write_text(textwrap.dedent(source))
            monkeypatch.delitem(sys.modules, module, raising=False)
            monkeypatch.setitem(sys.modules, module, sys)  # remembered, so that the real one is removed after the test
            del sys.modules[module]

    return install


# -- found ------------------------------------------------------------------------------------------------------------


def test_the_fallback_is_always_found() -> None:
    (pickle,) = [found for found in discover() if found.name == "pickle"]
    assert pickle.value == "transportkit.backends.pickle:PickleTransport"
    assert pickle.distribution == "transportkit"
    assert pickle.conflict == ""


def test_found_names_the_distribution(install: Install) -> None:
    install("fast", good("fast"), version="3.1")
    (found,) = [found for found in discover() if found.name == "fast"]
    assert (found.value, found.distribution, found.version) == ("fake_fast:Good", "acme-fast", "3.1")


def test_discovery_is_fresh(install: Install) -> None:
    assert "late" not in {found.name for found in discover()}
    install("late", good("late"))
    assert "late" in {found.name for found in discover()}


def test_discovery_imports_nothing(install: Install, tmp_path: Path) -> None:
    install("fast", "raise SystemExit('imported')")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from transportkit.registry import discover\n"
        "names = [found.name for found in discover()]\n"
        "assert 'fast' in names and 'pickle' in names, names\n"
        "print([name for name in ('torch', 'fake_fast', 'transportkit.backends.pickle') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_bare_checkout_has_the_fallback() -> None:
    script = (
        "import importlib.metadata as m; m.distributions = lambda **_: iter(())\n"
        "from transportkit.registry import discover\n"
        "print([found.name for found in discover()])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pickle']"


def test_two_targets_under_one_name_name_both_distributions(install: Install) -> None:
    install("fast", good("fast"))
    install("fast", distribution="rival-fast", value="rival:Fast", version="0.2")
    claims = [found for found in discover() if found.name == "fast"]
    assert len(claims) == 2
    for found in claims:
        assert "acme-fast 1.0" in found.conflict
        assert "rival-fast 0.2" in found.conflict
    with pytest.raises(DuplicateBackendError, match=r"acme-fast 1\.0.*rival-fast 0\.2") as caught:
        choose(SITE, ["fast"])
    assert caught.value.backend == "fast"


def test_a_conflict_costs_only_its_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("fast", good("fast"))
    install("fast", distribution="rival-fast", value="rival:Fast")
    install("other", good("other"))
    choice = choose(SITE, None)
    assert "other" in choice.transports
    (told,) = [offer for offer in choice.offers if offer.backend == "fast"]
    assert isinstance(told, Unavailable)
    assert "rival-fast" in told.reason
    assert caplog.text.count("rival-fast") == 1


def test_duplicates_that_are_not_neighbours(install: Install) -> None:
    install("fast", good("fast"))
    install("middle", good("middle"))
    install("fast", distribution="zeta-fast", value="zeta:Fast")
    assert all(found.conflict for found in discover() if found.name == "fast")


def test_one_target_twice_is_no_conflict(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("fast", good("fast"))
    install("fast", folder="wheel")
    monkeypatch.syspath_prepend(str(tmp_path / "wheel"))
    assert [found.conflict for found in discover() if found.name == "fast"] == [""]


def test_the_distribution_that_imports_see_counts(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fast", good("fast"))
    install("fast", folder="newer", entry_points="[other]\nx = y:z\n", version="2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "newer"))
    assert not [found for found in discover() if found.name == "fast"]


@pytest.mark.parametrize("text", ["[transportkit.backends]\nno equals sign\n", "[transportkit.backends]\n= x:y\n"])
def test_damaged_metadata_costs_only_its_own(install: Install, text: str) -> None:
    install("broken", entry_points=text)
    install("fast", good("fast"))
    assert "fast" in {found.name for found in discover()}


def test_metadata_of_strangers_may_be_damaged(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("stranger", entry_points="[console_scripts]\nno equals sign\n")
    (tmp_path / "acme_stranger-1.0.dist-info" / "METADATA").unlink()
    assert "pickle" in {found.name for found in discover()}
    assert not caplog.records


# -- loaded -----------------------------------------------------------------------------------------------------------


def test_a_good_backend_loads(install: Install) -> None:
    install("fast", good("fast"))
    loaded = load("fast")
    assert isinstance(loaded, Loaded)
    assert issubclass(loaded.transport, Transport)
    assert loaded.found.distribution == "acme-fast"


BROKEN = {
    "import error": ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    "syntax": ("def broken(:", "SyntaxError"),
    "attribute": ("Bad = 1", "AttributeError"),
    "assertion": ("assert False, 'not today'", "AssertionError: not today"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "base exception": ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
    "os error": ("import ctypes; ctypes.CDLL('libnothing.so.9')", "OSError: libnothing.so.9"),
    "mute": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "could not be imported: E"),
    "surrogate": ("raise RuntimeError('\\udcff' * 10)", "RuntimeError: ??????????"),
    "endless text": ("raise RuntimeError('x\\n' * 100_000)", "..."),
    "number": ("Good = 42", "fake_bad:Good is not a class, but an int"),
    "instance": ("class T: pass\nGood = T()", "is not a class, but a T"),
    "none": ("Good = None", "is not a class, but a NoneType"),
    "wrong class": ("class Good: pass", "is not a subclass of transportkit.transport.Transport"),
    "abstract": (
        "from transportkit.transport import Transport\nclass Good(Transport):\n    name = 'bad'\n    api_version = 1",
        "it is abstract: exporter, importer, match, probe not implemented",
    ),
    "other name": (good("worse"), "its entry point is named 'bad', its class says 'worse'"),
    "no name": (good("bad", **{"    name =": "    other ="}), "its class says None"),
    "newer api": (
        good("bad", **{"    api_version = API_VERSION": "    api_version = 99"}),
        "version 99 of the backend",
    ),
    "no api": (good("bad", **{"    api_version =": "    other ="}), "it has no api_version"),
    "api is text": (good("bad", **{"    api_version = API_VERSION": "    api_version = '1'"}), "version '1' of"),
    "api is a bool": (good("bad", **{"    api_version = API_VERSION": "    api_version = True"}), "version True of"),
    "rank": (good("bad", **{"rank = 7": "rank = 'first'"}), "its rank is 'first', not an int"),
    "fan_out": (good("bad", **{"fan_out = True": "fan_out = 1"}), "its fan_out is 1, not a bool"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_costs_only_itself(
    install: Install, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    """The rest works, one WARNING names plugin, distribution and reason; by name it raises the same."""
    install("bad", source)
    install("fast", good("fast"))
    failure = load("bad")
    assert isinstance(failure, Failure)
    assert reason in failure.reason
    assert len(failure.reason) < 700
    assert "\n" not in failure.reason
    failure.reason.encode()

    with caplog.at_level(logging.WARNING, "transportkit"):
        choice = choose(SITE, None)
        choose(SITE, None)
    assert "fast" in choice.transports
    assert "bad" not in choice.transports
    (told,) = [offer for offer in choice.offers if offer.backend == "bad"]
    assert isinstance(told, Unavailable)
    assert reason in told.reason
    assert "acme-bad 1.0" in told.reason
    (message,) = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert "acme-bad 1.0" in message
    assert reason in message

    with pytest.raises(BackendUnavailableError) as caught:
        choose(SITE, ["bad", "fast"])
    assert reason in str(caught.value)
    assert "acme-bad 1.0" in str(caught.value)
    assert caught.value.backend == "bad"


def test_an_interrupt_is_the_users(install: Install) -> None:
    install("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("bad")


@pytest.mark.parametrize("value", ["fake_bad", "fake_bad:", "not valid", "fake_bad:Good.missing", ":Good"])
def test_a_target_that_is_none(install: Install, value: str) -> None:
    install("bad", good("bad"), value=value)
    assert isinstance(load("bad"), Failure)


def test_a_name_that_no_list_could_hold(install: Install) -> None:
    install("bad", good("bad"), entry_points="[transportkit.backends]\na,b = fake_bad:Good\n")
    failure = load("a,b")
    assert isinstance(failure, Failure)
    assert "name" in failure.reason


def test_a_slow_import_is_logged(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLOW_IMPORT", 0.05)
    install("slow", "import time; time.sleep(0.1)\n" + good("slow"))
    with caplog.at_level(logging.INFO, "transportkit"):
        loaded = load("slow")
    assert isinstance(loaded, Loaded)
    assert loaded.seconds >= 0.1
    assert "slow (acme-slow 1.0) took 0." in caplog.text


def test_load_of_an_unknown_name() -> None:
    with pytest.raises(UnknownBackendError, match=r"'warp'.*installed are: .*pickle"):
        load("warp")


# -- usable -----------------------------------------------------------------------------------------------------------

OFFER = 'return Offer("bad")'
PROBES = {
    "raises": ("raise OSError('no device')", "probe() raised OSError: no device", True),
    "exits": ("raise SystemExit", "probe() raised SystemExit", True),
    "none": ("return None", "probe() returned None, neither an Offer nor Unavailable", True),
    "class": ("return Offer", "neither an Offer nor Unavailable", True),
    "other backend": ("return Offer('shm')", "offer of backend 'shm'", True),
    "api": ("return Offer('bad', api_version=9)", "api_version 9", True),
    "params": ("return Offer('bad', params=b'x')", "not a msgspec.Raw", True),
    "bytes": ("import msgspec; return Offer('bad', params=msgspec.Raw(b'\\xc1'))", "cannot be encoded", True),
    "long": ("import msgspec; return Offer('bad', params=msgspec.Raw(b'\\xc0' * 100_000))", "100000 bytes", True),
    "text": ("return Offer('bad', version='\\udc00')", "cannot be encoded", True),
    "unavailable": ("return Unavailable('bad', 'needs Linux')", "needs Linux", False),
    "wordless": ("return Unavailable('bad', '')", "it does not say why", False),
}


@pytest.mark.parametrize(("body", "reason", "broken"), PROBES.values(), ids=PROBES)
def test_what_a_probe_may_do(
    install: Install, caplog: pytest.LogCaptureFixture, body: str, reason: str, broken: bool
) -> None:
    install("bad", good("bad", **{OFFER: body}))
    loaded = load("bad")
    assert isinstance(loaded, Loaded)
    failure = probe(loaded, SITE)
    assert isinstance(failure, Failure)
    assert reason in failure.reason
    assert failure.broken is broken
    with caplog.at_level(logging.WARNING, "transportkit"):
        choice = choose(SITE, None)
    assert any(isinstance(offer, Unavailable) and reason in offer.reason for offer in choice.offers)
    assert bool([record for record in caplog.records if "bad" in record.getMessage()]) is broken
    with pytest.raises(BackendUnavailableError, match="cannot be used here"):
        choose(SITE, ["bad"])


def test_an_offer_gets_the_distributions_version(install: Install) -> None:
    install("fast", good("fast"), version="4.5")
    loaded = load("fast")
    assert isinstance(loaded, Loaded)
    usable = probe(loaded, SITE)
    assert isinstance(usable, Usable)
    assert usable.offer == Offer("fast", API_VERSION, "4.5", Raw(b"\xc0"))


def test_survey_tells_of_all(install: Install) -> None:
    install("fast", good("fast"))
    install("bad", "import no_such_module_at_all")
    results = {(r.loaded.found if isinstance(r, Usable) else r.found).name: type(r) for r in survey(SITE, discover())}
    assert results["fast"] is Usable
    assert results["bad"] is Failure


# -- chosen -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(install: Install) -> None:
    for name in ("one", "three", "two"):
        install(name, good(name))


def names(choice: registry.Choice) -> list[str]:
    return [offer.backend for offer in choice.offers]


@pytest.mark.usefixtures("three")
class TestChoose:
    def test_everything(self) -> None:
        choice = choose(SITE, None)
        assert choice.allowed is None
        assert choice.disabled == ()
        assert {"one", "two", "three"} <= set(choice.transports)

    @pytest.mark.parametrize(
        ("backends", "listed", "disabled", "allowed"),
        [
            (["two", "one"], None, None, ("two", "one")),
            (("two", "one", "two"), None, None, ("two", "one")),
            (None, "three,one", None, ("three", "one")),
            (None, " three , one ,", None, ("three", "one")),
            (["two", "one", "three"], "three,one", None, ("one", "three")),
            (["two", "one"], None, "two", ("one",)),
            (None, "three,one", "three", ("one",)),
            (["one"], "", " , ", ("one",)),
        ],
    )
    def test_lists(
        self,
        monkeypatch: pytest.MonkeyPatch,
        backends: list[str] | None,
        listed: str | None,
        disabled: str | None,
        allowed: tuple[str, ...],
    ) -> None:
        for variable, value in ((registry.ALLOW_VARIABLE, listed), (registry.DISABLE_VARIABLE, disabled)):
            if value is not None:
                monkeypatch.setenv(variable, value)
        choice = choose(SITE, backends)
        assert choice.allowed == allowed
        assert tuple(names(choice)) == allowed
        assert tuple(choice.transports) == allowed

    def test_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(registry.DISABLE_VARIABLE, "two,one")
        choice = choose(SITE, None)
        assert choice.allowed is None
        assert choice.disabled == ("two", "one")
        assert "three" in names(choice)
        assert not {"one", "two"} & set(names(choice))

    @pytest.mark.parametrize("variable", [registry.ALLOW_VARIABLE, registry.DISABLE_VARIABLE])
    def test_unknown_in_the_environment(self, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        monkeypatch.setenv(variable, "one,warp")
        with pytest.raises(
            UnknownBackendError, match=rf"'warp' \(in the environment variable {variable}\).*one, p.*two"
        ):
            choose(SITE, None)

    def test_unknown_by_name(self) -> None:
        with pytest.raises(UnknownBackendError, match=r"'warp' \(in backends=\).*installed are: .*pickle") as caught:
            choose(SITE, ["one", "warp"])
        assert caught.value.backend == "warp"

    def test_nothing_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(registry.ALLOW_VARIABLE, "three")
        with pytest.raises(BackendUnavailableError, match=r"backends= allows one.*TRANSPORTKIT_BACKENDS allows three"):
            choose(SITE, ["one"])
        monkeypatch.setenv(registry.DISABLE_VARIABLE, "three")
        with pytest.raises(BackendUnavailableError, match="TRANSPORTKIT_DISABLE takes away three"):
            choose(SITE, None)

    @pytest.mark.parametrize("backends", ["one", b"one", ["one", 3], {"one"}, (), 7])
    def test_no_list_of_names(self, backends: object) -> None:
        with pytest.raises(UsageError, match="backends="):
            choose(SITE, backends)  # type: ignore[arg-type]

    def test_what_is_not_admitted_is_not_imported(self, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        install("bad", "raise KeyboardInterrupt")
        choose(SITE, ["one"])
        monkeypatch.setenv(registry.DISABLE_VARIABLE, "bad")
        choose(SITE, None)

    def test_a_broken_name_may_be_disabled(self, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        install("one", distribution="rival-one", value="rival:One")
        monkeypatch.setenv(registry.DISABLE_VARIABLE, "one")
        assert "two" in choose(SITE, None).transports
