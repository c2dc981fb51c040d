"""The documentation's example for Ray, run for real; `nox -s ray` installs Ray, and nothing else does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ray_actors.py"

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="`nox -s ray` installs Ray"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the documentation is not here"),
]


@pytest.mark.parametrize("backend", ["pickle", "shm", "gloo"])
def test_a_trainer_and_its_workers_are_actors(backend: str) -> None:
    environment = {**os.environ, "TRANSPORTKIT_BACKENDS": backend, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same weights everywhere: True" in done.stdout
    assert done.stdout.count(f"{backend}: taken") == 2, done.stdout
