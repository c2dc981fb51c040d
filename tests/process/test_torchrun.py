"""The documentation's example for programs of torch.distributed, run by `torchrun` with three processes on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torchrun_weights.py"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the documentation is not here"),
]


@pytest.mark.parametrize("backend", ["pickle", "gloo"])
def test_rank_0_sends_and_the_others_receive(backend: str) -> None:
    if backend == "gloo" and importlib.util.find_spec("transportkit_collective") is None:
        pytest.skip("transportkit-collective is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(EXAMPLE)]
    environment = {**os.environ, "TRANSPORTKIT_BACKENDS": backend, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same weights everywhere: True") == 3, done.stdout
    assert done.stdout.count(f"{backend}: taken") == 2, done.stdout
