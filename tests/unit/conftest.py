"""Runs made by hand, for the tests of records, tables and the command line."""

import resource
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flashqla.cases import Case
from flashqla.device import Clocks, Environment
from flashqla.records import Record, Run, TensorErrors, Timing

ENVIRONMENT = Environment(
    flashqla="0.1.0",
    git_revision="abc123",
    kernel_fingerprint="0123456789abcdef",
    python="3.11.7",
    torch="2.13.0",
    cuda="13.0",
    triton="3.7.0",
    tilelang="0.1.15",
    tvm_ffi="0.1.12",
    peers={"fla": "0.6.0", "flashinfer": None},
    driver="580.1",
    gpu="NVIDIA H200",
    gpu_uuid_hash="feed",
    sm_count=132,
    cpu="a CPU",
)


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """A Run of the given records."""

    def make(*records: Record, kind: str = "bench-fwd", **fields: Any) -> Run:
        defaults: dict[str, Any] = {
            "argv": ["bench", "fwd"],
            "started": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "environment": ENVIRONMENT,
            "settings": {"suite": "qwen", "seed": 0, "device": "cuda"},
        }
        return Run(kind=kind, records=list(records), **{**defaults, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture
def timed() -> Callable[..., Record]:
    """A bench record with a time in ms."""

    def make(
        case: Case,
        backend: str,
        ms: float,
        *,
        throttle: tuple[str, ...] = (),
        iqr: float | None = None,
        **fields: Any,
    ) -> Record:
        return Record.of(
            case,
            backend=backend,
            direction=fields.pop("direction", "fwd"),
            command="bench",
            status="ok",
            seed=0,
            timing=Timing(
                gpu_ms=ms, gpu_ms_iqr=iqr, samples=[ms] * 12, call_ms=2 * ms, l2="cold", clock="graph", repeats=12
            ),
            clocks=Clocks(1755, 3201, 500.0, 60, list(throttle)),
            **fields,
        )

    return make


@pytest.fixture
def verified() -> Callable[..., Record]:
    """A verify record with the relative L2 errors of o and final_state."""

    def make(case: Case, backend: str, o: float, state: float, *, passed: bool = True, **fields: Any) -> Record:
        relative = {"o": o, "final_state": state}
        errors = {name: TensorErrors(rel_l2=error, max_abs=error, cosine=1.0) for name, error in relative.items()}
        return Record.of(
            case, backend=backend, direction="fwd", command="verify", status="ok", seed=0, errors=errors, bound=5e-3,
            passed=passed, kernels=["inverse", "forward"] if backend == "flashqla" else [], **fields,
        )  # fmt: skip

    return make


@pytest.fixture
def absent() -> Callable[..., Record]:
    """A record of a backend that gave no result."""

    def make(case: Case, backend: str, status: str = "missing", **fields: Any) -> Record:
        return Record.of(
            case, backend=backend, status=status, seed=0,  # type: ignore[arg-type]
            **{"direction": "fwd", "command": "bench", "reason": "it is not installed",
               "hint": f"pip install {backend}", **fields},
        )  # fmt: skip

    return make


@pytest.fixture
def starts_at_once(tmp_path: Path) -> Callable[..., bool]:
    """Whether a command takes less than 0.3 s, on a slow machine not much more than the libraries of any of its kind.

    The fastest of five, in processor time and in turn, because others share the machine.
    """

    def seconds(call: tuple[str | Path, ...]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(call, cwd=tmp_path, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    def measured(*call: str | Path) -> bool:
        libraries = (sys.executable, "-c", "import typer.main, rich.console")
        ours, others = zip(*((seconds(call), seconds(libraries)) for _ in range(5)), strict=True)
        return min(ours) < max(0.3, 3.5 * min(others))

    return measured
