"""The loops of `bench` and `verify`: one Record per case and backend, given to a sink as soon as its case is done.

Whatever goes wrong with a backend is the status of its record, with a reason, and the loop goes on: also a hang and a
dead process, for the cases run in a process of their own. Ctrl-C gives the records of the case in hand the status
"interrupted", and then ends the loop: KeyboardInterrupt leaves it.

Neither this module nor the peers and compilers that it runs write to stdout: while they work, descriptor 1 is stderr.
"""

import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashqla import inputs as drawing
from flashqla import measure
from flashqla.backends import Backend, create
from flashqla.cases import Case, Direction
from flashqla.errors import EnvironmentProblem
from flashqla.records import Record
from flashqla.rows import Job, decide, first_line, free_memory, rows_of, stdout_is_stderr
from flashqla.worker import Lost, Tell, Watch, Worker, die_with_parent

Sink = Callable[[Record], None]
Step = Callable[[Case, Sequence[str], Sequence[Record], Sink], None]  # case, backends, what is known of it, sink

MAX_COMPILERS = 16  # processes; each takes about 1 GB of host memory and half of that on the GPU
MAX_LOSSES = 3  # cases in a row in which a backend takes down or hangs its process, before it is left out

log = logging.getLogger(__name__)


def bench(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    device: str,
    sink: Sink,
    *,
    direction: Direction = "fwd",
    seed: int = 0,
    config: measure.Config | None = None,
    compile_ahead: bool = True,
    kept: Sequence[Record] = (),
    timeout_s: float | None = None,
    tell: Tell | None = None,
) -> None:
    """Time every backend on every case, and check what the timed calls gave.

    The check compares two value heads with the chunk form in float32: it tells a wrong result from a rounded one. A
    wrong result keeps its time, and its record says so.

    direction      what is timed: the forward pass, the backward pass on what one forward pass saved, or both passes
    compile_ahead  see `warm_up`
    kept           records of an earlier run: what they hold is not run again, nor given to the sink
    timeout_s      cases run in another process, where each may run for so long, and each backend compile; None: here
    tell           is called with what is being done, and whether that is compiling
    """
    config = config or measure.Config()
    job = Job("bench", tuple(cases), tuple(backends), device, seed, config, 1, direction, compile_ahead)
    _sweep(job, sink, kept, timeout_s, tell)


def verify(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    device: str,
    sink: Sink,
    *,
    direction: Direction = "fwd",
    seed: int = 0,
    runs: int = 2,
    compile_ahead: bool = True,
    kept: Sequence[Record] = (),
    timeout_s: float | None = None,
    tell: Tell | None = None,
) -> None:
    """Compare every backend on every case with the float64 truth, and check what it promises besides values.

    Backends that are `exact` must equal the token recurrence to rounding. Others are allowed what `accuracy.bounds`
    and, for "bwd", `accuracy.gradient_bounds` say, ours in view of the peers that ran. Besides: inputs are left as they
    were, `runs` calls give the same bits, and backends under our contract keep its dtypes and give zeros past the last
    offset. For the options see `bench`.
    """
    job = Job("verify", tuple(cases), tuple(backends), device, seed, measure.Config(), runs, direction, compile_ahead)
    _sweep(job, sink, kept, timeout_s, tell)


def warm_up(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    device: str,
    seed: int = 0,
    direction: Direction = "fwd",
    *,
    watch: Watch | None = None,
    always: bool = False,
) -> float:
    """Compile ahead of a sweep, in many processes at once; returns the seconds that took.

    Each backend says which cases it takes to compile what all of them need. Those that compile for every head count
    take several times as long for that as for timing: they do it in a process per head count, and their caches on disk
    hand the results to this process, which compiles the other backends meanwhile. A failure here is no verdict: the
    row that meets it again says so. Does nothing on a CPU, or when there is but one thing to compile, unless `always`.
    """
    begin = time.perf_counter()
    watch = watch or Watch()
    able: list[Backend] = []
    with stdout_is_stderr():  # finding out imports the peers
        for backend in backends:
            watch.compiling(backend.name, f"loading {backend.name}")
            if torch.device(device).type == "cuda" and not backend.missing():
                able.append(backend)
    elsewhere: dict[tuple[str, str], list[Case]] = {}
    here: dict[str, list[Case]] = {}
    for backend in able:
        for case in backend.representatives([case for case in cases if not backend.unsupported(case, direction)]):
            if backend.compiles == "per head count":
                elsewhere.setdefault((backend.name, f"hk{case.hk}-hv{case.hv} {case.dtype}"), []).append(case)
            elif backend.compiles == "once":
                here.setdefault(backend.name, []).append(case)
    left = len(elsewhere) + len(here)
    if left > (0 if always else 1):
        try:
            with stdout_is_stderr(), _compilers(len(elsewhere)) as pool:
                futures = {
                    pool.submit(_compile_elsewhere, job[0], group, device, seed, direction): job
                    for job, group in elsewhere.items()
                }
                for name, group in here.items():
                    watch.compiling(name, f"compiling {name}, {left} jobs left")
                    _compile(name, group, device, seed, direction)
                    left -= 1
                watch.compiling(None, f"compiling in other processes, {left} jobs left")
                for future in as_completed(futures):
                    left -= 1
                    name, what = futures[future]
                    watch.compiling(None, f"compiled {name} for {what}, {left} jobs left")
                    if error := future.exception():
                        log.warning("a process compiling %s for %s failed: %s", name, what, error)
        except BrokenExecutor as error:
            log.warning("no process to compile in: %s", error)
    watch.running(None)
    return time.perf_counter() - begin


@contextmanager
def _compilers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    workers = max(1, min(jobs, MAX_COMPILERS, os.cpu_count() or 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=die_with_parent, initargs=(os.getpid(),)) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_elsewhere(name: str, cases: Sequence[Case], device: str, seed: int, direction: Direction) -> None:
    """`_compile` in a process of the pool."""
    # FLA would keep tuning results on disk as well. Those of a GPU shared by many processes are noise.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    _compile(name, cases, device, seed, direction)


def _compile(name: str, cases: Sequence[Case], device: str, seed: int, direction: Direction) -> None:
    """Run one backend once on each case, for what that leaves in its caches."""
    (backend,) = create([name], device)
    if backend.missing():
        return
    with torch.no_grad():
        for case in cases:
            try:
                backend.prepare(drawing.make(case, seed, device, direction), direction)
            except Exception as error:  # met again where it counts
                log.warning("compiling %s for %s: %s", name, case.id, first_line(error))
            free_memory()


def _sweep(job: Job, sink: Sink, kept: Sequence[Record], timeout_s: float | None, tell: Tell | None) -> None:
    """Run what is not kept, case by case; the records of a case go to the sink together, in order of backends."""
    known: dict[str, list[Record]] = {}
    for record in kept:
        known.setdefault(record.case_id, []).append(record)
    wanted: list[tuple[Case, list[str]]] = []
    for case in job.cases:
        done = {record.backend for record in known.get(case.id, [])}
        if names := [backend.name for backend in job.backends if backend.name not in done]:
            wanted.append((case, names))
    if not wanted:
        return
    asked = {name for _, names in wanted for name in names}
    job = replace(
        job, cases=tuple(case for case, _ in wanted), backends=tuple(b for b in job.backends if b.name in asked)
    )
    with _here(job, tell) if timeout_s is None else _isolated(job, timeout_s, tell) as step:
        for case, names in wanted:
            step(case, names, known.get(case.id, []), sink)


@contextmanager
def _here(job: Job, tell: Tell | None) -> Iterator[Step]:
    """Cases run in this process: nothing ends one that hangs, and a dead GPU ends all."""
    watch = Watch(tell)
    if job.compile_ahead:
        warm_up(job.cases, job.backends, job.device, job.seed, job.direction, watch=watch)
    lost: Lost | None = None  # why nothing can run any more

    def step(case: Case, names: Sequence[str], known: Sequence[Record], sink: Sink) -> None:
        nonlocal lost
        rows = rows_of(job, case, names)
        try:
            with stdout_is_stderr():
                gone = decide(job, case, rows, known, watch, lost)
            lost = lost or gone
        except KeyboardInterrupt:
            for row in rows.values():
                sink(row.record())
            raise
        for row in rows.values():
            sink(row.record())

    yield step


@contextmanager
def _isolated(job: Job, timeout_s: float, tell: Tell | None) -> Iterator[Step]:
    """Cases run in a worker process, which is replaced when a case takes it down or does not come to an end.

    Such a case runs again, without the backend that was in hand: the others are still measured side by side.
    """
    worker = Worker(partial(_serve, job), [backend.name for backend in job.backends], timeout_s, tell)
    losses: Counter[str] = Counter()  # of a backend, in a row
    last: dict[str, Lost] = {}

    def ask(case: Case, names: Sequence[str], known: Sequence[Record]) -> list[Record]:
        while True:
            try:
                records: list[Record] = worker.ask((case, names, known))
                return records
            except Lost as lost:
                if not lost.starting:
                    raise
                if job.compile_ahead and worker.start == first:
                    log.warning("compiling ahead was given up: %s: %s", lost.name or "a process", lost.reason)
                else:
                    do = "see why with --in-process"
                    raise EnvironmentProblem("the worker process does not start", given=lost.reason, do=do) from None
            finally:
                worker.start = again

    first = worker.start
    again = partial(_serve, replace(job, compile_ahead=False))

    def step(case: Case, names: Sequence[str], known: Sequence[Record], sink: Sink) -> None:
        rows = rows_of(job, case, names)
        records: dict[str, Record] = {}
        for name, row in rows.items():
            if losses[name] >= MAX_LOSSES:
                row.status = last[name].status
                row.reason = f"not run: so ended the {MAX_LOSSES} cases before: {last[name].reason}"
                records[name] = row.record()
        try:
            while left := [name for name in rows if name not in records]:
                try:
                    found = {record.backend: record for record in ask(case, left, known)}
                    losses.subtract({name: losses[name] for name in found})
                    records |= found
                except Lost as lost:
                    for name in [lost.name] if lost.name in left else left:
                        losses[name] += name == lost.name
                        last[name] = lost
                        rows[name].status = lost.status
                        rows[name].reason = lost.reason if name == lost.name else f"{lost.reason}, outside any backend"
                        records[name] = rows[name].record()
                        log.warning("%s on %s: %s", lost.name or "no backend", case.id, lost.reason)
        except KeyboardInterrupt:
            for name, row in rows.items():
                sink(records.get(name) or row.record())
            raise
        for name in rows:
            sink(records[name])

    try:
        yield step
        worker.close()
    finally:
        worker.kill()


def _serve(job: Job, watch: Watch) -> Callable[[Any], list[Record]]:
    """In the worker process: what runs a case."""
    if job.compile_ahead:
        warm_up(job.cases, job.backends, job.device, job.seed, job.direction, watch=watch)
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # no case is to blame for that
                raise Lost("failed", first_line(error)) from error

    def do(task: tuple[Case, Sequence[str], Sequence[Record]]) -> list[Record]:
        case, names, known = task
        rows = rows_of(job, case, names)
        if lost := decide(job, case, rows, known, watch):
            raise lost
        return [row.record() for row in rows.values()]

    return do
