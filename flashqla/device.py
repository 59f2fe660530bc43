"""What this machine is: GPU, clocks, compiler and package versions, without importing torch or TileLang.

GPU facts come from NVML. Anything that cannot be read is None, never a guess.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

from flashqla._version import __version__

HOPPER = (9, 0)  # compute capability our kernels are written for
HOPPER_SMS = 132  # of an H100 or H200 with SXM
KERNEL_SOURCES = {".py", ".cuh"}

OURS = "flashqla"  # the backend that all of this is about
# Backends that are other people's work, and the distribution of each.
PEERS = {"fla": "flash-linear-attention", "flashinfer": "flashinfer-python", "flash-qla": "flash-qla"}
PACKAGES = {
    "flashqla": "flashqla",
    "torch": "torch",
    "triton": "triton",
    "tilelang": "tilelang",
    "tvm_ffi": "apache-tvm-ffi",
    **PEERS,
}


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    sm_count: int | None
    memory_bytes: int
    uuid_hash: str  # tells machines apart without naming them
    driver: str


@dataclass(frozen=True)
class Clocks:
    """One reading. `throttle` holds the reasons for which the driver lowers the clocks, idling left out.

    What cannot be read is None.
    """

    sm_mhz: int | None
    mem_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: list[str] | None


@dataclass(frozen=True)
class Environment:
    """Identity of a run: versions, sources and device. The host name is not recorded."""

    flashqla: str
    git_revision: str | None  # of the working tree the package lies in, "+" appended when it has changes
    kernel_fingerprint: str  # first 16 hex digits of sha256 over the kernel sources
    python: str
    torch: str | None
    cuda: str | None  # CUDA version that torch was built for
    triton: str | None
    tilelang: str | None
    tvm_ffi: str | None
    peers: dict[str, str | None]  # backend name -> version
    driver: str | None
    gpu: str | None
    gpu_uuid_hash: str | None
    sm_count: int | None
    cpu: str


def environment(index: int = 0) -> Environment:
    """Facts about this machine and GPU `index`. `cuda` is known once something else has imported torch."""
    versions, card = package_versions(), gpu(index)
    torch = sys.modules.get("torch")
    return Environment(
        flashqla=versions["flashqla"] or __version__,
        git_revision=_git_revision(),
        kernel_fingerprint=kernel_fingerprint(),
        python=platform.python_version(),
        torch=versions["torch"],
        cuda=torch.version.cuda if torch else None,
        triton=versions["triton"],
        tilelang=versions["tilelang"],
        tvm_ffi=versions["tvm_ffi"],
        peers={name: versions[name] for name in PEERS},
        driver=card.driver if card else None,
        gpu=card.name if card else None,
        gpu_uuid_hash=card.uuid_hash if card else None,
        sm_count=card.sm_count if card else None,
        cpu=_cpu_name(),
    )


def gpu(index: int = 0) -> Gpu | None:
    """GPU `index` among those visible to CUDA, or None when there is none or no NVML to ask."""
    with _nvml(index) as (nvml, handle):
        if handle is None:
            return None
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            capability=(major, minor),
            sm_count=_sm_count(nvml, handle, (major, minor)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            uuid_hash=hashlib.sha256(uuid.encode()).hexdigest()[:16],
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
        )


@contextmanager
def meter(index: int = 0) -> Iterator[Callable[[], Clocks | None]]:
    """What reads clocks, power and temperature of GPU `index` when it is called, and gives None without NVML.

    NVML stays open meanwhile, because opening it takes longer than a reading. Never changes a setting.
    """
    with _nvml(index) as (nvml, handle):
        yield lambda: None if handle is None else _clocks(nvml, handle)


def _clocks(nvml: Any, handle: Any) -> Clocks:
    def read(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    power = read("nvmlDeviceGetPowerUsage")  # milliwatts
    reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Clocks(
        sm_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        mem_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        power_w=None if power is None else power / 1000,
        temperature_c=read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttle=None if reasons is None else [name for bit, name in _THROTTLE.items() if reasons & bit],
    )


# Bits of nvmlClocksEventReasons; "idle" and "application clocks setting" slow nothing down that runs.
_THROTTLE = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
}


def package_versions() -> dict[str, str | None]:
    """Installed version of each package in `PACKAGES`, None where it is missing. Imports none of them."""

    def installed(distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    return {name: installed(distribution) for name, distribution in PACKAGES.items()}


def nvcc() -> tuple[Path, str] | None:
    """Path and release ("13.0") of the CUDA compiler, looked for where TileLang looks.

    That is CUDA_HOME or CUDA_PATH alone if one is set, else PATH, the nvidia-cuda-nvcc wheel, /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin"] if home else [os.environ.get("PATH", ""), *_wheel_folders(), "/usr/local/cuda/bin"]
    found = next((path for folder in places if folder and (path := shutil.which("nvcc", path=folder))), None)
    if found is None:
        return None
    words = (_output(found, "--version") or "").replace(",", " ").split()
    return Path(found), words[words.index("release") + 1] if "release" in words else "unknown"


def _wheel_folders() -> list[str]:
    try:
        return [str(Path(str(f.locate())).parent) for f in files("nvidia-cuda-nvcc") or () if f.name == "nvcc"]
    except PackageNotFoundError:
        return []


def kernel_fingerprint() -> str:
    """First 16 hex digits of sha256 over names and contents of the sources in flashqla/ops/kernels, in name order."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "ops" / "kernels").glob("*.*")):
        if path.suffix not in KERNEL_SOURCES:
            continue
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _nvml(index: int) -> Iterator[tuple[Any, Any]]:
    """The NVML module and the handle of a GPU as CUDA counts them; (None, None) where either is missing."""
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        yield None, None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not match
        yield None, None
        return
    try:
        yield pynvml, _handle(pynvml, index)
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> Any:
    # NVML ignores CUDA_VISIBLE_DEVICES, which holds indices or UUIDs; an unset variable means every device.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if visible is None:
            return nvml.nvmlDeviceGetHandleByIndex(index)
        entry = visible.split(",")[index].strip()
        return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else nvml.nvmlDeviceGetHandleByUUID(entry)
    except (nvml.NVMLError, IndexError):
        return None


def _sm_count(nvml: Any, handle: Any, capability: tuple[int, int]) -> int | None:
    try:  # NVML counts CUDA cores, not SMs; an SM has 64 of them on Volta, Turing and A100, and 128 since
        cores = int(nvml.nvmlDeviceGetNumGpuCores(handle))
    except (nvml.NVMLError, AttributeError):
        return None
    return cores // (64 if capability <= (8, 0) else 128)


def _git_revision() -> str | None:
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # an installed package, perhaps inside somebody else's repository
        return None
    revision = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return revision and revision + ("+" if changes else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} threads"


def _output(*command: str) -> str | None:
    """Standard output of a command that needs no input, None when it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _text(value: str | bytes) -> str:  # older bindings answer in bytes
    return value.decode() if isinstance(value, bytes) else value
