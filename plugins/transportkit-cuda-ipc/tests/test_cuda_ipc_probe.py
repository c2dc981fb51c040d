"""What a probe makes of a driver, a torch build, rights and settings: every branch, over faked files and libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from transportkit.site import read_site
from transportkit.wire import Offer, Unavailable, decode_as
from transportkit_cuda_ipc import nvml, survey
from transportkit_cuda_ipc.cuda_ipc import CudaIpcTransport
from transportkit_cuda_ipc.matching import CudaOffer
from transportkit_cuda_ipc.nvml import Driver, Gpu, NvmlError

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

A, B, C = "GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000"
MIG = "MIG-cccc4444-0000"
DRIVER = Driver((13, 0), (Gpu(A, 0), Gpu(B, 1), Gpu(C, 2)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which everything is as it should be."""
    for name in survey.NODES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "13.0.3" if name == "cuda-bindings" else version(name)
    )
    monkeypatch.setattr(survey, "_as_torch_counts", lambda: None)
    return tmp_path


def look(
    root: Path,
    driver: Driver | NvmlError = DRIVER,
    cuda: str | None = "13.0",
    hip: str | None = None,
    **environ: str,
) -> CudaOffer | str:
    def ask() -> Driver:
        if isinstance(driver, NvmlError):
            raise driver
        return driver

    return survey.survey(root=str(root), environ=environ, ask=ask, torch_versions=lambda: {"cuda": cuda, "hip": hip})


def told(found: CudaOffer | str) -> str:
    assert isinstance(found, str), found
    assert "\n" not in found
    return found


def offered(found: CudaOffer | str) -> CudaOffer:
    assert isinstance(found, CudaOffer), found
    return found


def test_a_machine_that_can(machine: Path) -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    offer = offered(look(machine, **settings))
    assert offer.devices == ("aaaa1111-0000", "aaaa2222-0000", "bbbb3333-0000")
    assert (offer.driver, offer.runtime, offer.note) == ("13.0", "13.0", "")
    assert offer.allocator == "expandable_segments:True", "it is told, and does not matter to memory past the allocator"
    assert offered(look(machine, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")).allocator == "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("1,0", [B, A]),
        (f"{C},{A}", [C, A]),
        ("GPU-bbbb", [C]),
        ("2,-1,0", [C]),
        ("2,7,0", [C]),
        ("1,0,1", []),
        ("GPU-aaaa", []),  # it names two
        ("", []),
        (" 2 , 1 ", [C, B]),
        ("nonsense", []),
    ],
)
def test_visible_devices_are_taken_as_cuda_takes_them(wanted: str, devices: list[str]) -> None:
    assert [gpu.uuid for gpu in survey.visible(DRIVER.gpus, wanted)] == devices


def test_divided_gpus(machine: Path) -> None:
    driver = Driver((13, 0), (Gpu(A, 0), Gpu(MIG, 1), Gpu("MIG-dddd", 1)))
    assert offered(look(machine, driver)).devices == ("cccc4444-0000",), "CUDA shows the first instance only"
    assert offered(look(machine, driver, CUDA_VISIBLE_DEVICES="MIG-dddd")).devices == ("dddd",)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"cuda": None}, "built without CUDA; install"),
        ({"cuda": None, "hip": "6.4"}, "ROCm 6.4"),
        ({"driver": Driver((12, 8), DRIVER.gpus)}, "driver supports CUDA 12.8, torch is built for 13.0; update"),
        ({"driver": Driver((13, 0), ())}, "sees no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' leaves no GPU of 3"),
        ({"cuda": "12.8"}, "cuda-bindings 13.0.3 is for another CUDA"),
        ({"driver": NvmlError("libnvidia-ml.so.1 cannot be loaded")}, "no NVIDIA driver is here"),
    ],
)
def test_what_is_missing_is_told_with_what_to_do(machine: Path, keywords: dict[str, Any], words: str) -> None:
    assert words in told(look(machine, **keywords))


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "proc/1/environ"])
def test_a_container_without_a_gpu(machine: Path, mark: str) -> None:
    (machine / mark).parent.mkdir(parents=True, exist_ok=True)
    (machine / mark).write_text("a=b\0container=podman\0")
    assert "docker run --gpus all" in told(look(machine, NvmlError("no library")))


def test_a_driver_without_its_libraries(machine: Path) -> None:
    (machine / "proc/driver/nvidia").mkdir(parents=True)
    (machine / "proc/driver/nvidia/version").write_text("NVRM")
    assert "reinstall" in told(look(machine, NvmlError("no library")))


@pytest.mark.parametrize("node", survey.NODES)
def test_device_files_that_are_not_there(machine: Path, node: str) -> None:
    (machine / node).unlink()
    assert f"/{node} is not here" in told(look(machine))


@pytest.mark.parametrize("node", survey.NODES)
def test_device_files_that_are_made_at_the_first_use(machine: Path, node: str) -> None:
    (machine / node).unlink()
    (machine / survey.MAKES_NODES).parent.mkdir(parents=True)
    (machine / survey.MAKES_NODES).write_bytes(b"")
    assert len(offered(look(machine)).devices) == 3


@pytest.mark.parametrize("node", survey.NODES)
def test_device_files_that_may_not_be_opened(machine: Path, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(node))
    assert f"this user may not open /{node}" in told(look(machine))


def test_wsl(machine: Path) -> None:
    (machine / "dev/dxg").write_bytes(b"")
    for node in survey.NODES:
        (machine / node).unlink()
    assert "under WSL" in offered(look(machine)).note
    assert "Windows" in told(look(machine, NvmlError("no library")))


def test_what_is_not_installed(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numpy" else find(name))
    assert told(look(machine)).endswith("pip install numpy")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "pip install 'cuda-bindings>=13,<14'" in told(look(machine))


def test_another_platform(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert told(look(machine)) == "needs Linux, this is win32"


def test_a_child_forked_under_cuda(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "spawn" in told(look(machine))


def test_torch_is_asked_for_its_order_where_it_knows_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_as_torch_counts", lambda: (("x", "y"), 1))
    offer = offered(look(machine))
    assert (offer.devices, offer.current) == (("x", "y"), 1)


@pytest.mark.parametrize(
    ("text", "cuda", "hip"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0", None),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n", None, "6.4.1"),
        ("cuda = '12.8'\n", "12.8", None),
        ("", None, None),
    ],
)
def test_a_torch_build_is_read_off_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cuda: str | None, hip: str | None
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert survey.torch_build() == {"cuda": cuda, "hip": hip}


# -- the driver's library ----------------------------------------------------------------------------------------------


class Library:
    """As much of NVML as is asked for."""

    def __init__(self, gpus: dict[str, list[str]], *, failing: str = "", version: int = 12080) -> None:
        self.gpus, self.failing, self.version = gpus, failing, version
        self.open = 0
        self.handles: list[str] = []
        self.nvmlErrorString: Any = self._error
        for name in ("nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"):
            setattr(self, name, self._may_fail(name, getattr(self, f"_{name}")))

    def _may_fail(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        return lambda *args: 3 if self.failing == name else call(*args)

    class _Error:
        restype: Any = None

        def __call__(self, code: int) -> bytes:
            return b"Not Supported"

    _error = _Error()

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, into: Any) -> int:
        into._obj.value = self.version
        return 0

    def _nvmlDeviceGetCount_v2(self, into: Any) -> int:
        into._obj.value = len(self.gpus)
        return 0

    def _handle(self, uuid: str, into: Any) -> int:
        self.handles.append(uuid)
        into._obj.value = len(self.handles)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, into: Any) -> int:
        return self._handle(list(self.gpus)[number], into)

    def _nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = self.handles[(handle.value or 0) - 1].encode()
        return 0

    def nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p, mode: Any, pending: Any) -> int:
        instances = self.gpus[self.handles[(handle.value or 0) - 1]]
        mode._obj.value = bool(instances)
        return 0 if instances else 3

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: ctypes.c_void_p, into: Any) -> int:
        into._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: ctypes.c_void_p, index: int, into: Any) -> int:
        instances = self.gpus[self.handles[(handle.value or 0) - 1]]
        return self._handle(instances[index], into) if index < len(instances) else 6


def test_the_driver_is_asked_and_let_go() -> None:
    library = Library({A: [], B: [MIG, "MIG-dddd"]})
    assert nvml.read(library) == Driver((12, 8), (Gpu(A, 0), Gpu(MIG, 1), Gpu("MIG-dddd", 1)))  # type: ignore[arg-type]
    assert library.open == 0


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"])
def test_what_the_driver_refuses_is_told(failing: str) -> None:
    library = Library({A: []}, failing=failing)
    with pytest.raises(NvmlError, match=r"Not Supported \(3\)"):
        nvml.read(library)  # type: ignore[arg-type]
    assert library.open == 0


def test_a_gpu_that_is_lost_hides_no_other() -> None:
    library = Library({A: [], B: [], C: [MIG]})
    uuid = library.nvmlDeviceGetUUID  # type: ignore[attr-defined]
    lost = {A}

    def fails(handle: ctypes.c_void_p, text: Any, size: int) -> int:
        return 15 if library.handles[(handle.value or 0) - 1] in lost else uuid(handle, text, size)

    library.nvmlDeviceGetUUID = fails  # type: ignore[attr-defined]
    assert nvml.read(library).gpus == (Gpu(B, 1), Gpu(MIG, 2))  # type: ignore[arg-type]
    lost |= {B, MIG}
    with pytest.raises(NvmlError, match=r"\(15\)"):
        nvml.read(library)  # type: ignore[arg-type]


def test_a_library_that_lacks_what_is_asked_for_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libc.so.6")
    with pytest.raises(NvmlError, match=r"libc\.so\.6 is too old, or a stub"):
        nvml.ask()


# -- this machine ------------------------------------------------------------------------------------------------------


def test_the_probe_of_this_machine_says_what_is_so() -> None:
    answer = CudaIpcTransport.probe(read_site("pair"))
    assert isinstance(answer, Offer | Unavailable)
    if isinstance(answer, Offer):
        assert decode_as(CudaOffer, answer.params).devices
    else:
        assert answer.reason


def test_a_probe_imports_no_torch_and_makes_no_context() -> None:
    script = (
        "import sys\n"
        "from transportkit_cuda_ipc.cuda_ipc import CudaIpcTransport\n"
        "from transportkit.site import read_site\n"
        "CudaIpcTransport.probe(read_site('pair'))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]
