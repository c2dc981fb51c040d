"""What backends hand to a child, and when a process gives its copies up: one broken plugin costs only itself."""

from __future__ import annotations

import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

from transportkit.inheritance import bequeath, give_up

if TYPE_CHECKING:
    import pytest

CTX = multiprocessing.get_context("spawn")


def backend(made: Any) -> Any:
    """A backend that makes this, or raises it."""

    class Made:
        @classmethod
        def inherit(cls, ctx: object) -> object:
            assert ctx is CTX
            if isinstance(made, Exception):
                raise made
            return made

    return Made


class Handed:
    """Writes down which ends are closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.closed: list[str] = []
        self.error = error

    def close(self, role: str) -> None:
        self.closed.append(role)
        if self.error is not None:
            raise self.error


def test_what_is_made_is_kept_by_name(caplog: pytest.LogCaptureFixture) -> None:
    handed = Handed()
    backends = {"plain": backend(None), "broken": backend(OSError(24, "Too many open files")), "queue": backend(handed)}
    assert bequeath(backends, CTX) == {"queue": handed}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "backend broken made nothing" in record.message
    assert "Too many open files" in record.message


def test_ends_are_given_up_whatever_a_plugin_does(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Handed(ValueError("no")), Handed()
    inherited = {"a": object(), "b": broken, "c": sound, "d": 7}
    give_up(inherited, "receiver")
    give_up(inherited, "receiver", "sender")
    assert broken.closed == sound.closed == ["receiver", "receiver", "sender"]
    assert len(caplog.records) == 3
    assert all("backend b" in record.message for record in caplog.records)
