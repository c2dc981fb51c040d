"""What a probe reads: the torch build, the driver, the GPUs that may be used, rights and settings. No CUDA is called.

A probe runs in every process that only lists backends, so nothing here makes a CUDA context, or imports torch. What is
found is put in order, not believed: a real export and import is the trial's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transportkit_cuda_ipc import nvml
from transportkit_cuda_ipc.matching import CudaOffer, plain_uuid
from transportkit_cuda_ipc.nvml import NvmlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transportkit_cuda_ipc.nvml import Driver, Gpu

#: Device files without which no process can use a GPU.
NODES = ("dev/nvidiactl", "dev/nvidia-uvm")
#: The driver's program that makes them, for any user, at the first use after a start of the machine.
MAKES_NODES = "usr/bin/nvidia-modprobe"


def survey(
    *,
    root: str = "/",
    environ: Mapping[str, str] = os.environ,
    ask: Callable[[], Driver] | None = None,
    torch_versions: Callable[[], Mapping[str, str | None]] | None = None,
) -> CudaOffer | str:
    """What this process can offer, or why it cannot use CUDA IPC and what the user can do.

    Args:
        root: where ``proc`` and ``dev`` are looked for.
        environ: the environment variables.
        ask: asks the driver.
        torch_versions: ``cuda`` and ``hip`` of the torch build.
    """
    versions = (torch_versions or torch_build)()
    reason = _wrong_torch(versions) or _forked()
    if reason:
        return reason
    runtime = versions["cuda"] or ""
    wsl = _is_wsl(root)
    try:
        driver = (ask or nvml.ask)()
    except NvmlError as error:
        return _no_driver(str(error), root, wsl=wsl)
    reason = (
        _too_old(driver, runtime) or _no_rights(root, wsl=wsl) or _no_bindings(runtime) or _missing("numpy", "numpy")
    )
    if reason:
        return reason
    if not driver.gpus:
        return "the driver sees no GPU; in a container, hand one in (docker run --gpus all)"
    gpus = visible(driver.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} leaves no GPU of {len(driver.gpus)}"
    settings = (environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    devices, current = _as_torch_counts() or (tuple(plain_uuid(gpu.uuid) for gpu in gpus), 0)
    return CudaOffer(
        devices=devices,
        current=current,
        driver=".".join(map(str, driver.cuda)),
        runtime=runtime,
        allocator=",".join(filter(None, settings)),
        note="under WSL, where only a trial can tell whether CUDA shares memory" if wsl else "",
    )


def visible(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows, in its order, under a value of ``CUDA_VISIBLE_DEVICES``.

    That is a list of numbers, or of UUIDs or beginnings of them; it ends at the first entry that names nothing, and
    shows nothing where one comes twice. Without one, of a divided GPU only its first instance is shown, and where any
    is divided, nothing else.
    """
    if wanted is None:
        divided = [gpu for gpu in gpus if gpu.uuid.startswith("MIG-")]
        return divided[:1] or list(gpus)
    found: list[Gpu] = []
    for entry in wanted.split(","):
        entry = entry.strip()
        if entry.isascii() and entry.isdigit():
            named = [gpu for gpu in gpus if gpu.number == int(entry)][:1]
        else:
            named = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in found:
            return []
        found += named
    return found


def torch_build() -> dict[str, str | None]:
    """The CUDA and ROCm versions that the installed torch was built for, read off its ``version.py``."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            text = Path(folder, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(?:'([^']*)'|None)", text, re.MULTILINE))
        return {"cuda": found.get("cuda") or None, "hip": found.get("hip") or None}
    return {"cuda": None, "hip": None}


def _wrong_torch(versions: Mapping[str, str | None]) -> str:
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if versions.get("hip"):
        return f"torch is built for ROCm {versions['hip']}, where this has not been made to work; `shm` stages instead"
    if not versions.get("cuda"):
        return "this torch is built without CUDA; install a CUDA build where there is an NVIDIA GPU"
    return ""


def _forked() -> str:
    torch = sys.modules.get("torch")
    poisoned = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    try:
        bad = bool(poisoned and poisoned())
    except Exception:  # a private function, which may change
        bad = False
    return "this process was forked after its parent had used CUDA; start it with spawn or forkserver" if bad else ""


def _no_driver(error: str, root: str, *, wsl: bool) -> str:
    if wsl:
        return f"{error}; under WSL the driver is that of Windows: install or update it there"
    if _in_container(root):
        return (
            f"{error}; start this container with a GPU and the capabilities utility and compute (docker run --gpus all)"
        )
    if Path(root, "proc/driver/nvidia/version").exists():
        return f"{error}; the kernel has the driver, so its libraries are missing or of another version: reinstall it"
    return f"{error}; no NVIDIA driver is here"


def _too_old(driver: Driver, runtime: str) -> str:
    major = runtime.partition(".")[0]
    if major.isdigit() and driver.cuda[0] < int(major):
        has = ".".join(map(str, driver.cuda))
        return (
            f"the driver supports CUDA {has}, torch is built for {runtime}; update the driver, or install another build"
        )
    return ""


def _no_rights(root: str, *, wsl: bool) -> str:
    """Device files that this process may not open, as in a container that was not given them."""
    if wsl:
        return ""  # there is one other device file there, and the driver has just used it
    for node in NODES:
        path = Path(root, node)
        if not path.exists():
            if Path(root, MAKES_NODES).exists():
                continue  # CUDA runs it at its first use
            return (
                f"/{node} is not here; load the driver's modules, or hand the container a GPU (docker run --gpus all)"
            )
        if not os.access(path, os.R_OK | os.W_OK):
            return f"this user may not open /{node}; give it the right, or the group that has it"
    return ""


def _no_bindings(runtime: str) -> str:
    major = runtime.partition(".")[0]
    install = (
        f"pip install 'cuda-bindings>={major},<{int(major) + 1}'" if major.isdigit() else "pip install cuda-bindings"
    )
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return f"cuda-bindings is not installed: {install}"
    if version.partition(".")[0] != major:
        return f"cuda-bindings {version} is for another CUDA than torch, which is built for {runtime}: {install}"
    return ""


def _missing(module: str, distribution: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{distribution} is not installed: pip install {distribution}"


def _as_torch_counts() -> tuple[tuple[str, ...], int] | None:
    """The GPUs as torch numbers them and the current one, where it has a CUDA context already; the exact answer."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        uuids = tuple(plain_uuid(str(cuda.get_device_properties(n).uuid)) for n in range(cuda.device_count()))
        return uuids, int(cuda.current_device())
    except Exception:  # of a driver; the trial will meet it again
        return None


def _is_wsl(root: str) -> bool:
    return Path(root, "dev/dxg").exists() or (root == "/" and "microsoft" in platform.release().lower())


def _in_container(root: str) -> bool:
    if any(Path(root, name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    try:
        return "container=" in Path(root, "proc/1/environ").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
