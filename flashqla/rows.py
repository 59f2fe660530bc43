"""One case of `bench` or `verify`: its rows, what decides their status, and the checks behind that.

Whatever goes wrong with a backend is the status of its record, with a reason.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from flashqla import accuracy, measure
from flashqla import inputs as drawing
from flashqla.backends import Backend, Call
from flashqla.cases import Case, Direction
from flashqla.device import PEERS, Clocks
from flashqla.errors import UnsupportedError
from flashqla.inputs import Inputs
from flashqla.records import KernelSource, Record, Status, TensorErrors, Timing
from flashqla.worker import Lost, Watch

Command = Literal["bench", "verify"]

POISON_BYTES = 256 * 2**20  # more than the outputs and scratch memory of a hard case

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A run of one of the two commands."""

    command: Command
    cases: tuple[Case, ...]
    backends: tuple[Backend, ...]
    device: str
    seed: int
    config: measure.Config  # of bench
    runs: int  # of verify: calls that must give the same bits
    direction: Direction
    compile_ahead: bool


@dataclass
class Row:
    """A record in the making."""

    case: Case
    backend: Backend
    command: Command
    direction: Direction
    seed: int
    status: Status | None = None  # None until something decides it
    reason: str | None = None
    hint: str | None = None
    timing: Timing | None = None
    errors: dict[str, TensorErrors] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    bound: float | None = None
    bounds: dict[str, float] = field(default_factory=dict)
    passed: bool | None = None
    runs: int | None = None
    deterministic: bool | None = None
    kernels: list[str] = field(default_factory=list)
    kernels_from: list[KernelSource] = field(default_factory=list)
    compile_s: float | None = None
    clocks: Clocks | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    broke_gpu: bool = False  # its error may have come from the device, and ended the CUDA context for all

    def able(self) -> bool:
        """Whether the backend can run the case here; if not, the status is decided."""
        if reason := self.backend.missing():
            self.status, self.reason, self.hint = "missing", reason, self.backend.hint
        elif reason := self.backend.unsupported(self.case, self.direction):
            self.refuse(reason)
        return self.status is None

    def prepare(self, inputs: Inputs, watch: Watch) -> Call | None:
        """The call to measure or check, or None with the status decided."""
        watch.compiling(self.backend.name, f"compiling {self.backend.name} for {self.case.id}")
        saves = self.direction == "bwd"
        before = measure.live_bytes(inputs.v.device) if saves else None
        begin = time.perf_counter()
        try:
            call = self.backend.prepare(inputs, self.direction)
            self.compile_s = time.perf_counter() - begin
            self.kernels, self.kernels_from = self.backend.kernels(inputs, self.direction), ["backend"]
            after = measure.live_bytes(inputs.v.device) if saves else None
            if before is not None and after is not None and after >= before:  # less: a cache let go of an earlier row
                self.saved_bytes = after - before
        except Exception as error:  # any backend's failure is a row, not the end of the run
            self.fail(error)
            return None
        finally:
            watch.running(None, self.case.id)
        return call

    def compare(
        self, call: Call, right: accuracy.Truth, inputs: Inputs, before: Mapping[str, torch.Tensor], runs: int
    ) -> None:
        """Run on poisoned memory, `runs` times, and note errors and broken promises."""
        if inputs.v.is_cuda:
            _poison()
        first = accuracy.snapshot(call())
        other = next((number for number in range(2, runs + 1) if not accuracy.same(first, call())), None)
        self.runs, self.deterministic = other or runs, other is None
        self.errors = accuracy.errors(accuracy.shown(first, inputs, self.direction), right.outputs, self.case.tokens)
        self.problems = accuracy.contract(first, inputs, self.direction) if self.backend.contract else []
        if other:
            self.problems.append(f"run {other} differs from the first")
        tensors = inputs.tensors()
        if not accuracy.same(before, tensors):
            self.problems.append("it changed its inputs")
            for name, original in before.items():  # the next backend needs them
                tensors[name].copy_(original)

    def fail(self, error: BaseException) -> None:
        self.status, self.reason = _status(error)
        self.broke_gpu = "cuda" in str(error).lower()  # as torch, Triton and TVM all say, each in its own way
        if self.status == "failed":
            log.warning("%s on %s failed", self.backend.name, self.case.id, exc_info=error)

    def refuse(self, reason: str) -> None:
        self.status, self.reason = "unsupported", reason

    def note(self, text: str | None) -> None:
        """Add something that a reader of the record should know."""
        if text:
            self.reason = f"{self.reason}; {text}" if self.reason else text

    def judge(self, passed: bool | None, why: str | None) -> None:
        self.status, self.passed = "ok", passed
        self.note(why)

    def record(self) -> Record:
        return Record.of(
            self.case,
            backend=self.backend.name,
            direction=self.direction,
            command=self.command,
            status=self.status or "interrupted",
            seed=self.seed,
            reason=self.reason,
            hint=self.hint,
            timing=self.timing,
            errors=self.errors,
            bound=self.bound,
            bounds=self.bounds,
            passed=self.passed,
            runs=self.runs,
            deterministic=self.deterministic,
            kernels=list(dict.fromkeys(self.kernels)),
            kernels_from=self.kernels_from,
            compile_s=self.compile_s,
            clocks=self.clocks,
            peak_bytes=self.peak_bytes,
            saved_bytes=self.saved_bytes,
        )


def rows_of(job: Job, case: Case, names: Sequence[str]) -> dict[str, Row]:
    return {b.name: Row(case, b, job.command, job.direction, job.seed) for b in job.backends if b.name in names}


def decide(
    job: Job,
    case: Case,
    rows: dict[str, Row],
    known: Sequence[Record],
    watch: Watch,
    lost: Lost | None = None,
) -> Lost | None:
    """Decide the rows of a case. Returns what ended this process's GPU, if anything did; `lost`: what did before."""
    one = _bench_case if job.command == "bench" else _verify_case
    watch.running(None, case.id)
    with torch.no_grad():
        able = {}
        for name, row in rows.items():
            watch.compiling(name, "")  # finding out imports a peer, which takes as long
            if row.able():
                able[name] = row
        watch.running(None)
        if lost:
            for row in able.values():
                row.status, row.reason = "failed", f"the GPU was lost in an earlier case: {lost.reason}"
            return None
        culprit = _guarded(one, job, case, able, known, watch) if able else None
        watch.running(None)
        reason = _lost_gpu(able)
        return Lost("failed", reason, culprit) if reason else None


def _guarded(
    one: Callable[..., None],
    job: Job,
    case: Case,
    rows: dict[str, Row],
    known: Sequence[Record],
    watch: Watch,
) -> str | None:
    """Run `one`, whatever it raises. Returns the backend whose error came first from the device, if one did."""
    culprit = None
    try:
        one(job, case, rows, known, watch)
    except Exception as error:  # what concerns all rows: no memory for the inputs or the truth, a device error
        culprit = watch.now
        for row in rows.values():
            if row.status is None:
                row.fail(error)
                row.broke_gpu = False
    if any(row.status in ("failed", "oom") for row in rows.values()):
        gc.collect()  # tracebacks hold tensors in cycles; collecting after every case would take longer than the cases
    free_memory()
    return next((name for name, row in rows.items() if row.broke_gpu), culprit)


def _lost_gpu(rows: Mapping[str, Row]) -> str | None:
    """Why the GPU of this process can run nothing any more, None if it can. Some errors end a CUDA context for good."""
    if not torch.cuda.is_initialized() or all(row.status != "failed" for row in rows.values()):
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return None


def _bench_case(job: Job, case: Case, rows: dict[str, Row], known: Sequence[Record], watch: Watch) -> None:
    inputs = drawing.make(case, job.seed, job.device, job.direction)
    before = accuracy.snapshot(inputs.tensors())
    uncapturable = {name: why for name, row in rows.items() if (why := row.backend.uncapturable(job.direction))}
    with measure.side_stream(job.device) if job.direction != "fwd" else nullcontext():
        calls = {name: call for name, row in rows.items() if (call := row.prepare(inputs, watch))}
        readings = measure.interleaved(calls, job.config, job.device, uncapturable=uncapturable, turn=watch.running)
    watch.running(None)
    heads = accuracy.some_heads(inputs, job.direction)
    right = accuracy.quick_truth(inputs, heads, job.direction) if calls else {}
    allowed = {name: accuracy.GRADIENT_CHECK if name.startswith("d") else accuracy.CHECK for name in right}
    unstable = accuracy.instability(inputs)
    changed = None if accuracy.same(before, inputs.tensors()) else "a backend of this row changed the inputs"
    for name, reading in readings.items():
        row = rows[name]
        if reading.error is not None:
            row.fail(reading.error)
            continue
        row.timing, row.clocks, row.peak_bytes = reading.timing, reading.clocks, reading.peak_bytes
        row.kernels += reading.kernels
        row.kernels_from += ["graph"] if reading.kernels else []
        row.note(reading.note)
        row.note(unstable)
        try:
            found = accuracy.heads_of(reading.outputs, heads, case.hv // case.hk)
            row.errors = accuracy.errors(found, right, case.tokens)
        except (KeyError, ValueError) as error:
            row.judge(False, f"wrong result: {error}")
            continue
        row.bound, row.bounds = accuracy.nearest(row.errors, allowed), allowed
        good = not changed and accuracy.within(row.errors, allowed)
        row.judge(None if unstable else good, None if good or unstable else changed or "wrong result")


def _verify_case(job: Job, case: Case, rows: dict[str, Row], known: Sequence[Record], watch: Watch) -> None:
    with _one_thread():
        inputs = drawing.make(case, job.seed, job.device, job.direction)
        before = accuracy.snapshot(inputs.tensors())
        right = accuracy.truth(inputs, job.direction)
        for name, row in rows.items():
            if row.backend.exact and not right.recurrence:
                row.refuse(f"{max(case.lengths)} tokens in a sequence: too many for the recurrence, which is the proof")
            elif call := row.prepare(inputs, watch):
                try:
                    watch.running(name)
                    row.compare(call, right, inputs, before, job.runs)
                except Exception as error:  # any backend's failure is a row, not the end of the run
                    row.fail(error)
        watch.running(None)

        reference = cache(lambda: accuracy.reference_errors(inputs, right))
        compared = {name: row for name, row in rows.items() if row.status is None}
        peers = [row.errors for name, row in compared.items() if name in PEERS]
        peers += [record.errors for record in known if record.backend in PEERS and record.status == "ok"]
        for name, row in compared.items():
            if row.backend.exact:
                allowed = dict.fromkeys(right.outputs, accuracy.EXACT)
            elif job.direction == "fwd":
                allowed = accuracy.bounds(row.errors, [] if name in PEERS else peers, reference)
            else:
                others = [] if name in PEERS else peers
                strong = accuracy.strong_gates(inputs)
                allowed = accuracy.gradient_bounds(row.errors, others, strong, right.conditions)
            row.bound, row.bounds = accuracy.nearest(row.errors, allowed), allowed
            if not accuracy.within(row.errors, allowed) and not right.unstable:
                off = "" if job.direction == "fwd" else f"{', '.join(accuracy.beyond(row.errors, allowed))} "
                row.problems.insert(0, f"{off}off the {right.name}")
            row.note(right.unstable)
            row.note(None if right.recurrence else f"truth: {right.name}")
            row.judge(None if right.unstable and not row.problems else not row.problems, "; ".join(row.problems))


def _status(error: BaseException) -> tuple[Status, str]:
    """Status and reason of a row that ended in an error."""
    text = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
    words = str(error).lower()
    exhausted = any(sign in words for sign in ("out of memory", "can't allocate memory"))  # of a GPU, and of the host
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or exhausted:
        return "oom", _with_free_bytes(" ".join(str(error).split()) or text)
    if isinstance(error, UnsupportedError | NotImplementedError):
        return "unsupported", text
    return "failed", text


def _with_free_bytes(reason: str) -> str:
    """A lack of memory, with what was free. PyTorch's allocator for GPUs says that itself; the driver and the host name
    the bytes asked for, if any."""
    free = None
    if " free" not in reason:
        with suppress(RuntimeError, OSError, ValueError, IndexError):  # a GPU that is lost, a host without /proc
            if "CUDA" in reason:
                free = torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None
            else:
                free = 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    return reason if free is None else f"{reason} ({free / 2**30:.1f} GiB are free)"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def free_memory() -> None:
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # of a GPU that is lost
            torch.cuda.empty_cache()


def _poison() -> None:
    """Fill the memory that the next call will get with NaN, so that reading what was never written shows."""
    torch.cuda.empty_cache()
    blocks = [torch.full((POISON_BYTES // 4,), torch.nan, device="cuda")]
    blocks += [
        torch.full((2**16,), torch.nan, device="cuda") for _ in range(64)
    ]  # blocks under 1 MB have their own pool
    del blocks


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one CPU thread: cases to verify are small, and sharing them out takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Point descriptor 1 at stderr: compilers and peers print there, child processes included."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
