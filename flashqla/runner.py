"""The loops of `bench` and `verify`: one Record per case and backend, given to a sink as soon as its case is done.

Whatever goes wrong with a backend is the status of its record, with a reason, and the loop goes on. Ctrl-C gives the
records of the case in hand the status "interrupted", and then ends the loop: KeyboardInterrupt leaves it.

Neither this module nor the peers and compilers that it runs write to stdout: while they work, descriptor 1 is stderr.
"""

import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from flashqla import accuracy, measure
from flashqla import inputs as drawing
from flashqla.backends import Backend, Call, create
from flashqla.cases import Case
from flashqla.device import PEERS, Clocks
from flashqla.errors import UnsupportedError
from flashqla.inputs import Inputs
from flashqla.records import Record, Status, TensorErrors, Timing

Sink = Callable[[Record], None]
Command = Literal["bench", "verify"]

MAX_COMPILERS = 16  # processes; each takes about 1 GB of host memory and half of that on the GPU
POISON_BYTES = 256 * 2**20  # more than the outputs and scratch memory of a hard case

log = logging.getLogger(__name__)


def bench(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    device: str,
    sink: Sink,
    *,
    seed: int = 0,
    config: measure.Config | None = None,
    compile_ahead: bool = True,
) -> None:
    """Time every backend on every case, and check what the timed calls gave.

    The check compares two value heads with the chunk form in float32: it tells a wrong result from a rounded one. A
    wrong result keeps its time, and its record says so. compile_ahead: see `warm_up`.
    """
    if compile_ahead:
        warm_up(cases, backends, device, seed)
    uncapturable = [backend.name for backend in backends if not backend.capturable]

    def one(case: Case, rows: dict[str, _Row]) -> None:
        inputs = drawing.make(case, seed, device)
        before = accuracy.snapshot(inputs.tensors())
        calls = {name: call for name, row in rows.items() if (call := row.prepare(inputs))}
        readings = measure.interleaved(calls, config or measure.Config(), device, uncapturable=uncapturable)
        heads = accuracy.some_heads(inputs)
        right = accuracy.quick_truth(inputs, heads) if calls else {}
        unstable = accuracy.instability(inputs)
        changed = None if accuracy.same(before, inputs.tensors()) else "a backend of this row changed the inputs"
        for name, reading in readings.by_name.items():
            row = rows[name]
            if reading.error is not None:
                row.fail(reading.error)
                continue
            row.timing, row.clocks = reading.timing, readings.clocks
            row.kernels += reading.kernels
            row.note(reading.note)
            row.note(unstable)
            row.bound = accuracy.CHECK
            try:
                row.errors = accuracy.errors(accuracy.heads_of(reading.outputs, heads), right, case.tokens)
            except (KeyError, ValueError) as error:
                row.judge(False, f"wrong result: {error}")
                continue
            good = not changed and accuracy.within(row.errors, dict.fromkeys(right, accuracy.CHECK))
            row.judge(None if unstable else good, None if good or unstable else changed or "wrong result")

    _loop(one, cases, backends, "bench", seed, sink)


def verify(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    device: str,
    sink: Sink,
    *,
    seed: int = 0,
    compile_ahead: bool = True,
) -> None:
    """Compare every backend on every case with the float64 truth, and check what it promises besides values.

    Backends that are `exact` must equal the token recurrence to rounding. Others are allowed what `accuracy.bounds`
    says, ours in view of the peers that ran. Besides: inputs are left as they were, a second run gives the same bits,
    and backends under our contract keep its dtypes and give zeros past the last offset. compile_ahead: see `warm_up`.
    """
    if compile_ahead:
        warm_up(cases, backends, device, seed)

    def one(case: Case, rows: dict[str, _Row]) -> None:
        inputs = drawing.make(case, seed, device)
        before = accuracy.snapshot(inputs.tensors())
        right = accuracy.truth(inputs)
        for row in rows.values():
            if row.backend.exact and not right.recurrence:
                row.refuse(f"{max(case.lengths)} tokens in a sequence are too many for the recurrence to prove it by")
            elif call := row.prepare(inputs):
                try:
                    row.compare(call, right, inputs, before)
                except Exception as error:  # any backend's failure is a row, not the end of the run
                    row.fail(error)

        reference = cache(lambda: accuracy.reference_errors(inputs, right))
        compared = {name: row for name, row in rows.items() if row.status is None}
        peers = [row.errors for name, row in compared.items() if name in PEERS]
        for name, row in compared.items():
            if row.backend.exact:
                allowed = dict.fromkeys(right.outputs, accuracy.EXACT)
            else:
                allowed = accuracy.bounds(row.errors, [] if name in PEERS else peers, reference)
            row.bound = accuracy.nearest(row.errors, allowed)
            if not accuracy.within(row.errors, allowed) and not right.unstable:
                row.problems.insert(0, f"off the {right.name}")
            row.note(right.unstable)
            row.note(None if right.recurrence else f"truth: {right.name}")
            row.judge(None if right.unstable and not row.problems else not row.problems, "; ".join(row.problems))

    with _one_thread():
        _loop(one, cases, backends, "verify", seed, sink)


def warm_up(cases: Sequence[Case], backends: Sequence[Backend], device: str, seed: int = 0) -> float:
    """Compile ahead of a sweep, in many processes at once; returns the seconds that took.

    For backends that compile for every head count: one after the other that takes several times as long as timing them.
    Their caches on disk hand the results to this process, which compiles the other backends meanwhile. A failure here
    is no verdict: the row that meets it again says so. Does nothing on a CPU, or when one process would do.
    """
    begin = time.perf_counter()
    with _stdout_is_stderr():  # finding out imports the peers
        able = [backend for backend in backends if torch.device(device).type == "cuda" and not backend.missing()]
    jobs: dict[tuple[str, int, int, str], list[Case]] = {}
    for backend in able:
        for case in cases:
            if backend.compiles == "per head count" and not backend.unsupported(case, "fwd"):
                jobs.setdefault((backend.name, case.hk, case.hv, case.dtype), []).append(case)
    if len(jobs) > 1:
        workers = min(len(jobs), MAX_COMPILERS, os.cpu_count() or 1)
        with _stdout_is_stderr(), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            try:
                waiting = [pool.submit(_compile, name, group, device, seed) for (name, *_), group in jobs.items()]
                for backend in able:
                    if backend.compiles == "once":
                        _compile(backend.name, _extremes(cases), device, seed)
                for future in waiting:
                    if error := future.exception():
                        log.warning("a compiling process failed: %s", error)
            except BrokenExecutor as error:
                log.warning("no process to compile in: %s", error)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return time.perf_counter() - begin


def _compile(name: str, cases: Sequence[Case], device: str, seed: int) -> None:
    """Run one backend once on each case, for what that leaves in its caches."""
    if multiprocessing.parent_process():
        # FLA would keep tuning results on disk as well. Those of a GPU shared by many processes are noise.
        os.environ["FLA_CACHE_RESULTS"] = "0"
    (backend,) = create([name], device)
    if backend.missing():
        return
    with torch.no_grad():
        for case in cases:
            try:
                if not backend.unsupported(case, "fwd"):
                    backend.prepare(drawing.make(case, seed, device), "fwd")
            except Exception as error:  # met again where it counts
                log.warning("compiling %s for %s: %s", name, case.id, _first_line(error))
            _free_memory()


def _extremes(cases: Iterable[Case]) -> list[Case]:
    """Of every layout and dtype the cases with the fewest and the most value heads, between which choices turn."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.layout, case.dtype), []).append(case)
    ends = [(min(group, key=lambda c: c.hv), max(group, key=lambda c: c.hv)) for group in groups.values()]
    return list(dict.fromkeys(case for pair in ends for case in pair))


@dataclass
class _Row:
    """A record in the making."""

    case: Case
    backend: Backend
    command: Command
    seed: int
    status: Status | None = None  # None until something decides it
    reason: str | None = None
    hint: str | None = None
    timing: Timing | None = None
    errors: dict[str, TensorErrors] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    bound: float | None = None
    passed: bool | None = None
    deterministic: bool | None = None
    kernels: list[str] = field(default_factory=list)
    compile_s: float | None = None
    clocks: Clocks | None = None

    def able(self) -> bool:
        """Whether the backend can run the case here; if not, the status is decided."""
        if reason := self.backend.missing():
            self.status, self.reason, self.hint = "missing", reason, self.backend.hint
        elif reason := self.backend.unsupported(self.case, "fwd"):
            self.refuse(reason)
        return self.status is None

    def prepare(self, inputs: Inputs) -> Call | None:
        """The call to measure or check, or None with the status decided."""
        begin = time.perf_counter()
        try:
            call = self.backend.prepare(inputs, "fwd")
            self.compile_s = time.perf_counter() - begin
            self.kernels = self.backend.kernels(inputs)
        except Exception as error:  # any backend's failure is a row, not the end of the run
            self.fail(error)
            return None
        return call

    def compare(self, call: Call, right: accuracy.Truth, inputs: Inputs, before: Mapping[str, torch.Tensor]) -> None:
        """Run twice on poisoned memory, and note errors and broken promises."""
        if inputs.v.is_cuda:
            _poison()
        first = accuracy.snapshot(call())
        self.deterministic = accuracy.same(first, call())
        self.errors = accuracy.errors(first, right.outputs, self.case.tokens)
        self.problems = accuracy.contract(first, inputs) if self.backend.contract else []
        if not self.deterministic:
            self.problems.append("two runs differ")
        tensors = inputs.tensors()
        if not accuracy.same(before, tensors):
            self.problems.append("it changed its inputs")
            for name, original in before.items():  # the next backend needs them
                tensors[name].copy_(original)

    def fail(self, error: BaseException) -> None:
        self.status, self.reason = _status(error)
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
            direction="fwd",
            command=self.command,
            status=self.status or "interrupted",
            seed=self.seed,
            reason=self.reason,
            hint=self.hint,
            timing=self.timing,
            errors=self.errors,
            bound=self.bound,
            passed=self.passed,
            deterministic=self.deterministic,
            kernels=list(dict.fromkeys(self.kernels)),
            compile_s=self.compile_s,
            clocks=self.clocks,
        )


def _loop(
    one: Callable[[Case, dict[str, _Row]], None],
    cases: Sequence[Case],
    backends: Sequence[Backend],
    command: Command,
    seed: int,
    sink: Sink,
) -> None:
    """Call `one` with the rows of each case that can run; give all its records to the sink, in order of backends."""
    lost: str | None = None  # why nothing can run any more
    for case in cases:
        rows = {backend.name: _Row(case, backend, command, seed) for backend in backends}
        try:
            with _stdout_is_stderr(), torch.no_grad():
                able = {name: row for name, row in rows.items() if row.able()}
                if lost:
                    for row in able.values():
                        row.status, row.reason = "failed", lost
                elif able:
                    _guarded(one, case, able)
                    lost = _lost_gpu(able)
        except KeyboardInterrupt:
            for row in rows.values():
                sink(row.record())
            raise
        for row in rows.values():
            sink(row.record())


def _guarded(one: Callable[[Case, dict[str, _Row]], None], case: Case, rows: dict[str, _Row]) -> None:
    try:
        one(case, rows)
    except Exception as error:  # what concerns all rows: no memory for the inputs or the truth, a device error
        for row in rows.values():
            if row.status is None:
                row.fail(error)
    if any(row.status in ("failed", "oom") for row in rows.values()):
        gc.collect()  # tracebacks hold tensors in cycles; collecting after every case would take longer than the cases
    _free_memory()


def _lost_gpu(rows: Mapping[str, _Row]) -> str | None:
    """Why the GPU of this process can run nothing any more, None if it can. Some errors end a CUDA context for good."""
    if not torch.cuda.is_initialized() or all(row.status != "failed" for row in rows.values()):
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the GPU was lost in an earlier case: {_first_line(error)}"
    return None


def _status(error: BaseException) -> tuple[Status, str]:
    """Status and reason of a row that ended in an error."""
    text = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "out of memory" in text.lower():
        return "oom", " ".join(str(error).split())  # torch names the bytes asked for, and those free
    if isinstance(error, UnsupportedError | NotImplementedError):
        return "unsupported", text
    return "failed", text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _free_memory() -> None:
    if torch.cuda.is_initialized():
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
def _stdout_is_stderr() -> Iterator[None]:
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
