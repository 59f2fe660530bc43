"""Machine facts, with NVML and the compiler replaced."""

import hashlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashqla import device


class Nvml(ModuleType):
    """Two GPUs as NVML shows them."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    uuids = ("GPU-aaa", "GPU-bbb")

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.uuids):
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise self.NVMLError
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self.uuids[handle].encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("NVIDIA A100", "NVIDIA H200")[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [[8, 0], [9, 0]][handle]

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return (6912, 16896)[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        info = ModuleType("memory")
        info.total = (40, 141)[handle] * 10**9  # type: ignore[attr-defined]
        return info

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetClockInfo(self, handle: int, domain: int) -> int:
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 3201}[domain]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise self.NVMLError  # not every card tells

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1 | 0x4 | 0x40  # idle, power cap, hardware thermal


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def test_gpu_facts(nvml: Nvml) -> None:
    assert device.gpu(1) == device.Gpu(
        name="NVIDIA H200",
        capability=device.HOPPER,
        sm_count=132,
        memory_bytes=141 * 10**9,
        uuid_hash=hashlib.sha256(b"GPU-bbb").hexdigest()[:16],
        driver="580.1",
    )
    first = device.gpu(0)
    assert first is not None
    assert first.sm_count == 108  # 64 cores per SM there
    assert nvml.open == 0


def test_clocks_are_read_and_never_set() -> None:
    sources = Path(device.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in re.findall(r"\bnvml[A-Z]\w*", path.read_text())}
    assert "nvmlDeviceGetClockInfo" in used
    reads = re.compile(r"nvml(Init|Shutdown|(Device|System)Get\w+|ClocksEventReasons)")
    assert [name for name in sorted(used) if not reads.fullmatch(name)] == []


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [
        (None, 0, "NVIDIA A100"),
        ("1", 0, "NVIDIA H200"),
        ("1,0", 1, "NVIDIA A100"),
        ("GPU-bbb", 0, "NVIDIA H200"),
        ("", 0, None),
        ("0", 1, None),
        (None, 2, None),
        ("7", 0, None),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, name: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = device.gpu(index)
    assert (found.name if found else None) == name


def test_clocks_leave_out_what_cannot_be_read(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    with device.meter(1) as read:
        assert nvml.open == 1
        assert read() == device.Clocks(1755, 3201, None, 61, ["power cap", "hardware thermal"])
        monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", nvml.nvmlDeviceGetPowerUsage)
        assert read() == device.Clocks(1755, 3201, None, 61, None)  # unknown, and not: none
        assert nvml.open == 1  # for both readings
    assert nvml.open == 0


def test_without_a_driver_there_is_no_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert device.gpu() is None
    with device.meter() as read:
        assert read() is None


def test_environment_reports_what_is_installed_and_nothing_else(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.PACKAGES, "fla", "no-such-distribution")
    environment = device.environment(1)
    assert environment.gpu == "NVIDIA H200"
    assert environment.sm_count == 132
    assert environment.driver == "580.1"
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert environment.peers.keys() == device.PEERS.keys()
    assert environment.peers["fla"] is None


def test_fingerprint_follows_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "ops" / "kernels"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(device, "__file__", str(tmp_path / "device.py"))
    (kernels / "b.py").write_text("two")
    (kernels / "a.py").write_text("one")
    (kernels / "a.cuh").write_text("tile")
    (kernels / "notes.txt").write_text("not a source")
    first = device.kernel_fingerprint()
    assert first == hashlib.sha256(b"a.cuh\0tile\0a.py\0one\0b.py\0two\0").hexdigest()[:16]
    for name in ("b.py", "a.cuh"):
        (kernels / name).write_text("changed")
        before, first = first, device.kernel_fingerprint()
        assert first != before


def test_fingerprint_leaves_no_kernel_source_out() -> None:
    kernels = Path(device.__file__).parent / "ops" / "kernels"
    assert {path.suffix for path in kernels.iterdir() if path.is_file()} <= device.KERNEL_SOURCES


def test_nvcc_is_looked_for_where_tilelang_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def toolkit(name: str, release: str) -> Path:
        path = tmp_path / name / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        path.chmod(0o755)
        return path

    on_path, at_home = toolkit("path", "12.8"), toolkit("home", "13.0")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert device.nvcc() == (on_path, "12.8")
    monkeypatch.setenv("CUDA_HOME", str(at_home.parents[1]))
    assert device.nvcc() == (at_home, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))  # TileLang would not look any further
    assert device.nvcc() is None
