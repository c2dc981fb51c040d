"""What a process knows of its surroundings, and the free memory under memory cgroups of both versions."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

import transportkit
from transportkit import site, wire

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_a_site_of_this_process() -> None:
    here = site.read_site("tcp")
    assert here.link == "tcp"
    assert here.host == socket.gethostname()
    assert here.pid == os.getpid()
    assert here.platform == sys.platform
    assert here.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert here.uid == os.getuid()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=wire.Site) == here
    assert site.describe(here) == f"pid {os.getpid()} on host {socket.gethostname()}"


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces and boot ids are Linux's")
def test_a_site_on_linux() -> None:
    here = site.read_site("unix")
    assert here.boot_id
    assert here.namespaces["net"].isdigit()
    assert set(here.namespaces) <= set(site.NAMESPACES)


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(os, "readlink", refuse)
    monkeypatch.setattr(site.Path, "read_text", refuse)
    monkeypatch.delattr(os, "getuid")
    here = site.read_site("pair")
    assert (here.boot_id, here.namespaces, here.uid) == ("", {}, -1)
    assert site.free_memory() is None


def test_describe_without_a_host() -> None:
    assert site.describe(wire.Site(pid=7)) == "pid 7 on host unknown"


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.library_version() == transportkit.__version__
    assert site.torch_version() == importlib.metadata.version("torch")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert site.torch_version() == ""


# -- free memory ------------------------------------------------------------------------------------------------------


def lay(root: Path, files: dict[str, str | int]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(root)


MEMINFO = "MemTotal:       65536000 kB\nMemFree:  100 kB\nMemAvailable:   1024000 kB"
V2 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/system.slice/job/task",
    "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
}
TOP2 = "sys/fs/cgroup"
JOB2 = f"{TOP2}/system.slice/job"
V1 = {
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n0::/",
    "proc/self/mountinfo": (
        "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "garbage"
    ),
}
TOP1 = "sys/fs/cgroup/memory"
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 5 kB\nMemAvailable:"}, None),
        ({"proc/meminfo": MEMINFO}, 1000 * MIB),
        # version 2: no limit anywhere; its own limit; the parent's; the softer of two; cache that can be taken back
        ({**V2, f"{JOB2}/task/memory.max": "max", f"{JOB2}/task/memory.current": 5}, 1000 * MIB),
        ({**V2, f"{JOB2}/task/memory.max": 100 * MIB, f"{JOB2}/task/memory.current": 30 * MIB}, 70 * MIB),
        (
            {
                **V2,
                f"{JOB2}/task/memory.max": "max",
                f"{JOB2}/task/memory.current": 10 * MIB,
                f"{JOB2}/memory.max": 50 * MIB,
                f"{JOB2}/memory.current": 45 * MIB,
            },
            5 * MIB,
        ),
        (
            {
                **V2,
                f"{JOB2}/task/memory.max": 100 * MIB,
                f"{JOB2}/task/memory.high": 80 * MIB,
                f"{JOB2}/task/memory.current": 30 * MIB,
            },
            50 * MIB,
        ),
        (
            {
                **V2,
                f"{JOB2}/task/memory.max": 100 * MIB,
                f"{JOB2}/task/memory.current": 90 * MIB,
                f"{JOB2}/task/memory.stat": f"anon {20 * MIB}\nfile {70 * MIB}\ninactive_file {60 * MIB}",
            },
            70 * MIB,
        ),
        # over the limit already; a limit above what the machine has; usage that cannot be read
        ({**V2, f"{JOB2}/task/memory.max": 10, f"{JOB2}/task/memory.current": 30}, 0),
        ({**V2, f"{JOB2}/task/memory.max": 9000 * MIB, f"{JOB2}/task/memory.current": 0}, 1000 * MIB),
        ({**V2, f"{JOB2}/task/memory.max": 9000}, 1000 * MIB),
        # a container: the mount begins at the process's own group, or the path is not visible at all
        (
            {
                **V2,
                "proc/self/mountinfo": "31 23 0:28 /system.slice/job /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
                f"{TOP2}/task/memory.max": 100 * MIB,
                f"{TOP2}/task/memory.current": 60 * MIB,
            },
            40 * MIB,
        ),
        (
            {
                **V2,
                "proc/self/cgroup": "0::/../../other",
                f"{TOP2}/memory.max": 100 * MIB,
                f"{TOP2}/memory.current": 70 * MIB,
            },
            30 * MIB,
        ),
        # version 1
        (
            {
                **V1,
                f"{TOP1}/memory.limit_in_bytes": UNLIMITED,
                f"{TOP1}/memory.usage_in_bytes": 900 * MIB,
                f"{TOP1}/docker/abc/memory.limit_in_bytes": 100 * MIB,
                f"{TOP1}/docker/abc/memory.usage_in_bytes": 90 * MIB,
                f"{TOP1}/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {15 * MIB}",
            },
            25 * MIB,
        ),
        (
            {
                **V1,
                "proc/meminfo": "",
                f"{TOP1}/docker/abc/memory.limit_in_bytes": UNLIMITED,
                f"{TOP1}/docker/abc/memory.usage_in_bytes": 1,
            },
            None,
        ),
        (
            {
                **V1,
                f"{TOP1}/docker/memory.limit_in_bytes": 64 * MIB,
                f"{TOP1}/docker/memory.usage_in_bytes": 60 * MIB,
                f"{TOP1}/docker/abc/memory.limit_in_bytes": UNLIMITED,
                f"{TOP1}/docker/abc/memory.usage_in_bytes": MIB,
            },
            4 * MIB,
        ),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str | int], free: int | None) -> None:
    assert site.free_memory(root=lay(tmp_path, files)) == free


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_free_memory_here() -> None:
    free = site.free_memory()
    assert free is not None
    assert 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
