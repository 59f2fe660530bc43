"""What all tests share: the `gpu` marker, and how many tests it left out.

Everything under tests/gpu carries the marker. Without a Hopper GPU those tests are skipped, with the reason, and the
end of the run counts them, so that a green run without them is not taken for more than it is.
"""

import os
import signal
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers already fill the processor

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as under `make test &`: tests of Ctrl-C start processes that inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    reason = _no_hopper()
    for item in on_gpu:
        # One worker of pytest-xdist for all of them: some fill most of the device memory.
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_hopper() -> str | None:
    """Why the kernels cannot run here; None when they can."""
    import torch

    if not torch.cuda.is_available():
        return "no Hopper GPU: torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"no Hopper GPU: {torch.cuda.get_device_name()} has compute capability {major}.{minor}, not 9.0"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    counts = {
        outcome: sum("gpu" in report.keywords for report in stats.get(outcome, []) if hasattr(report, "keywords"))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    if not any(counts.values()):
        return
    terminalreporter.section("GPU tests")
    terminalreporter.line(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    if counts["skipped"] and not counts["passed"] + counts["failed"]:
        terminalreporter.line("No kernel ran: this run says nothing about results on a GPU.")
