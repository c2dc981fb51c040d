"""`gloo` between two network namespaces of one kernel, which stand for two hosts: a TCP link over a pair of veth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(90)

HERE = Path(__file__).parent
NAMES = (f"tk{os.getpid()}a", f"tk{os.getpid()}b")
HOSTS = ("10.213.7.1", "10.213.7.2")
PORT = 7431


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other. Skips where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command here")
    with contextlib.ExitStack() as undo:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                undo.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, check=False)
            ip(
                "link",
                "add",
                f"{NAMES[0]}v",
                "netns",
                NAMES[0],
                "type",
                "veth",
                "peer",
                f"{NAMES[1]}v",
                "netns",
                NAMES[1],
            )
            for name, host in zip(NAMES, HOSTS, strict=True):
                ip("-n", name, "address", "add", f"{host}/24", "dev", f"{name}v")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", f"{name}v", "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        yield NAMES


def run(namespaces: tuple[str, str], *peers: tuple[int, str, str]) -> list[dict[str, Any]]:
    """What each peer printed; a peer is (index of its namespace, role, whether it allows plain text)."""
    address = f"tcp://{HOSTS[0]}:{PORT}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    children = []
    try:
        for index, role, allow in peers:
            command = [sys.executable, str(HERE / "namespace_peer.py"), role, address, allow]
            children.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespaces[index], *command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
    assert [child.returncode for child in children] == [0] * len(children), [err for _, err in outputs]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]  # gloo of torch 2.9 greets on stdout


def hexadecimal(host: str) -> str:
    """An address as the kernel's table of listeners writes it."""
    return "".join(f"{int(part):02X}" for part in reversed(host.split(".")))


def test_between_namespaces_it_is_gloo_and_not_shm(namespaces: tuple[str, str]) -> None:
    pytest.importorskip("transportkit_shm")
    # One receiver beside the sender, one elsewhere; all of them allow plain text.
    sender, beside, away = run(namespaces, (0, "serve", "allow"), (0, "connect", "allow"), (1, "connect", "allow"))
    assert sorted(backend for backend, _ in sender["agreed"]) == ["gloo", "shm"]
    ((backend, reasons),) = away["agreed"]
    assert backend == "gloo"
    assert reasons["gloo"] == "over the network, unencrypted"
    assert reasons["shm"] == "its descriptor socket is not reachable from another network namespace"
    assert beside["agreed"][0][0] == "shm"
    assert [one.partition(":")[0] for one in away["listens"]] == [hexadecimal(HOSTS[1])]
    assert {one.partition(":")[0] for one in sender["listens"]} == {hexadecimal(HOSTS[0])}


def test_a_lane_that_leaves_the_host_takes_those_beside_the_sender_along(namespaces: tuple[str, str]) -> None:
    os.environ["TRANSPORTKIT_DISABLE"] = "shm,mpqueue"
    try:
        sender, beside, away = run(namespaces, (0, "serve", "allow"), (0, "connect", "allow"), (1, "connect", "allow"))
    finally:
        del os.environ["TRANSPORTKIT_DISABLE"]
    assert [backend for backend, _ in sender["agreed"]] == ["gloo", "gloo"]
    assert [one.partition(":")[0] for one in beside["listens"]] == [hexadecimal(HOSTS[0])]
    assert [one.partition(":")[0] for one in away["listens"]] == [hexadecimal(HOSTS[1])]


def test_without_plain_text_it_is_pickle_and_the_agreement_names_the_keyword(namespaces: tuple[str, str]) -> None:
    sender, *others = run(namespaces, (0, "serve", "allow"), (1, "connect", "no"), (1, "connect", "allow"))
    assert sorted(backend for backend, _ in sender["agreed"]) == ["gloo", "pickle"]
    (reasons,) = [other["agreed"][0][1] for other in others if other["agreed"][0][0] == "pickle"]
    assert "which the receiver did not allow; give `allow_plaintext=True` on both sides" in reasons["gloo"]
