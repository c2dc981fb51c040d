"""What this process knows of its surroundings: host, namespaces, versions, free memory.

Only reading belongs here, and nothing is concluded: what a backend makes of it is its own business, and the trial of
the handshake has the last word. Whatever a system does not tell is left out; no function here fails on a foreign one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from transportkit import __version__
from transportkit.wire import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACES = ("pid", "net", "ipc", "mnt", "user", "uts")

#: A version 1 cgroup without a limit says 2**63 - 1, rounded down to a page; so large is no limit.
_NO_LIMIT = 1 << 60


def read_site(link_kind: str) -> Site:
    """Describe this process for the peer and for the backends.

    Args:
        link_kind: ``unix``, ``tcp``, ``pair`` or ``custom``.
    """
    return Site(
        host=socket.gethostname(),
        boot_id=_read("/proc/sys/kernel/random/boot_id").strip(),
        platform=sys.platform,
        kernel=platform.release(),
        python=platform.python_version(),
        pid=os.getpid(),
        uid=os.getuid() if hasattr(os, "getuid") else -1,
        namespaces=_namespaces(),
        link=link_kind,
    )


def describe(site: Site) -> str:
    """Who that is, in words: ``"pid 1234 on host trainer-0"``."""
    return f"pid {site.pid} on host {site.host or 'unknown'}"


def library_version() -> str:
    """The version of this library."""
    return __version__


def torch_version() -> str:
    """The version of torch, local part included (``"2.13.0+cpu"``), without importing it; empty when not known."""
    try:
        return importlib.metadata.version("torch")
    except Exception:  # not installed, or metadata that is damaged in one of many ways
        return str(getattr(sys.modules.get("torch"), "__version__", ""))


def free_memory(*, root: str = "/") -> int | None:
    """Bytes that this process may still take before it is refused or killed; None when the system does not tell.

    That is the smallest of what the kernel calls available and what each memory cgroup leaves, from this process's own
    up to the outermost that can be seen. Page cache that nobody used lately counts as free in both: the kernel takes it
    back first.

    Args:
        root: where ``proc`` and the mounts of the cgroups are looked for.
    """
    bounds = [*_available(root), *_cgroup_headrooms(root)]
    return max(0, min(bounds)) if bounds else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _namespaces() -> dict[str, str]:
    """``{"net": "4026531833"}``: two processes with the same number share the namespace, if they share the boot id."""
    found = {}
    for kind in NAMESPACES:
        try:
            found[kind] = os.readlink(f"/proc/self/ns/{kind}").partition("[")[2].rstrip("]")
        except OSError:
            continue
    return found


def _available(root: str) -> Iterator[int]:
    for line in _read(Path(root, "proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable" and value.split()[:1] and value.split()[0].isdigit():
            yield int(value.split()[0]) * 1024


# -- memory cgroups ---------------------------------------------------------------------------------------------------


class _Files(NamedTuple):
    """The names of one cgroup version's files: limits, what is in use, and the reclaimable part of that."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _cgroup_headrooms(root: str) -> Iterator[int]:
    """What each level of each memory hierarchy leaves, in bytes; levels without a limit say nothing."""
    memberships = _memberships(_read(Path(root, "proc/self/cgroup")))
    for files, mounted, mount_point in _mounts(_read(Path(root, "proc/self/mountinfo"))):
        if files in memberships:
            top = Path(root, mount_point.lstrip("/"))
            for level in _levels(top, mounted, memberships[files]):
                yield from _headroom(level, files)


def _memberships(text: str) -> dict[_Files, str]:
    """The process's path in each hierarchy that can limit memory, from ``/proc/self/cgroup`` (cgroups(7))."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[_V2] = path
        elif "memory" in controllers.split(","):
            found[_V1] = path
    return found


def _mounts(text: str) -> Iterator[tuple[_Files, str, str]]:
    """Version, mounted path and mount point of each such hierarchy, from ``/proc/self/mountinfo`` (proc(5))."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        mounted, mount_point = (field.replace("\\040", " ") for field in fields[3:5])
        if kinds[0] == "cgroup2":
            yield _V2, mounted, mount_point
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield _V1, mounted, mount_point


def _levels(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """The folders from the process's own cgroup up to the top of the mount.

    In a container the mount may begin part of the way down the path (then the rest counts), or the path may not be
    visible at all (then the top is all there is to see).
    """
    own = PurePosixPath(path)
    below = own.relative_to(mounted) if own.is_relative_to(mounted) else own.relative_to(own.anchor)
    level = top / below
    if ".." in below.parts or not level.is_dir():
        level = top
    while level != top:
        yield level
        level = level.parent
    yield top


def _headroom(level: Path, files: _Files) -> Iterator[int]:
    limits = [number for name in files.limits for number in _numbers(_read(level / name)) if number < _NO_LIMIT]
    if not limits:
        return
    for usage in _numbers(_read(level / files.usage)):
        cache = 0
        for line in _read(level / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == files.reclaimable:
                cache = sum(_numbers(value))
        yield min(limits) - max(0, usage - cache)


def _numbers(text: str) -> list[int]:
    """The number that a one-line file holds; none for ``max``, for nothing and for anything else."""
    text = text.strip()
    return [int(text)] if text.isascii() and text.isdigit() else []
