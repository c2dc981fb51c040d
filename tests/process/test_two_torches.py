"""Two processes with different versions of torch agree and transfer.

``TRANSPORTKIT_OTHER_PYTHON`` names the interpreter of another environment in which transportkit and its plugins are
installed beside another torch; ``nox -s tests-two-torches`` makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OTHER = os.environ.get("TRANSPORTKIT_OTHER_PYTHON", "")
PEER = Path(__file__).parents[1] / "torch_peer.py"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not OTHER, reason="needs a second environment: TRANSPORTKIT_OTHER_PYTHON names none"),
]


def start(python: str, **order: Any) -> subprocess.Popen[str]:
    command = [python, "-W", "ignore", str(PEER), json.dumps(order)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What each of them printed, whether or not another one failed."""
    ends = []
    for process in processes:
        try:
            ends.append(process.communicate(timeout=90))
        except subprocess.TimeoutExpired:
            process.kill()
            ends.append(process.communicate())
    errors = "\n".join(error for _, error in ends)
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return [json.loads(out) for out, _ in ends]


@pytest.fixture(scope="module")
def known() -> tuple[dict[str, Any], dict[str, Any]]:
    """The torch and the dtypes of this environment and of the other one."""
    here, there = finish(start(sys.executable, act="describe"), start(OTHER, act="describe"))
    if here["torch"] == there["torch"]:
        pytest.skip(f"both environments have torch {here['torch']}")
    return here, there


@pytest.mark.parametrize("backend", ["shm", "pickle"])
@pytest.mark.parametrize("outward", [True, False], ids=["to_the_other", "from_the_other"])
def test_every_common_value_arrives(
    outward: bool, backend: str, known: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    sender, receiver = (sys.executable, OTHER) if outward else (OTHER, sys.executable)
    address = f"unix:{tmp_path}/link.sock"
    dtypes = sorted(set(known[0]["dtypes"]) & set(known[1]["dtypes"]))
    sent, came = finish(
        start(sender, act="send", address=address, backend=backend, dtypes=dtypes),
        start(receiver, act="receive", address=address),
    )
    assert sent["backend"] == came["backend"] == backend
    assert len(sent["values"]) > 50
    assert came["values"] == [sent["values"]] * 3
    print(f"torch {known[0]['torch']} and {known[1]['torch']}: {len(sent['values'])} tensors over {backend}")


@pytest.mark.parametrize("backend", ["shm", "pickle"])
def test_a_dtype_that_one_lacks_is_refused_by_name(
    backend: str, known: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    pythons = [sys.executable, OTHER]
    for index, (mine, others) in enumerate([known, known[::-1]]):
        for dtype in sorted(set(mine["dtypes"]) - set(others["dtypes"])):
            address = f"unix:{tmp_path}/{dtype}.sock"
            sending = start(pythons[index], act="send_one", address=address, backend=backend, dtype=dtype)
            receiving = start(pythons[1 - index], act="receive_one", address=address)
            sent, came = finish(sending, receiving)
            name, text = sent["failure"]
            assert name == "UnsupportedTensorError"
            assert text.startswith("odd: ")
            assert dtype in text
            assert came["plain"] == [1, 1, 1], "the session goes on"
            return
    pytest.skip("both environments have the same dtypes")
