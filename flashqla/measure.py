"""Times of calls, taken side by side.

On a GPU a sample is one replay of a CUDA graph that holds one call, between two events. Backends take turns, A B C C B
A, so that a drift of the clocks hits all alike. With a cold L2, a buffer larger than the cache is written before the
first event; that also keeps the stream busy while the host enqueues the replay. A call that cannot be captured is
launched between the events instead, behind a device-side wait as long as its own launch work, and its clock says
"events".

`call_ms` is another quantity: an eager call from an idle device to its end, with the host's work in it.

Beside the time stand the peak memory of a call that is not timed, and the clocks: after its samples each call runs for
a few milliseconds more, which nothing times, and meanwhile they are read.

On the CPU a sample is the wall time of one call.
"""

import gc
import math
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from flashqla import device as machine
from flashqla.device import Clocks
from flashqla.errors import FlashqlaError
from flashqla.records import Timing

Call = Callable[[], Any]
Turn = Callable[[str], None]
L2 = Literal["cold", "warm"]
Clock = Literal["graph", "events", "wall"]

MIN_SAMPLES_FOR_IQR = 5
MIN_ROUNDS = 3
WARM_REPLAYS = 2
READING_MS = 2.0  # of work for the device while its clocks are read; NVML answers within a millisecond
READING_LAUNCHES = 50  # at most
CALL_REPEATS = 5
CALL_BUDGET_MS = 1000.0  # no further repeat of a call once they took so long
FLUSH_BYTES = 256 * 2**20  # at least; 4 times the L2 where that is more
SPIN_CYCLES_PER_MS = 2_000_000  # H200 at its highest clock, 1980 MHz: waits a little long at lower ones


@dataclass(frozen=True)
class Config:
    """How to measure. A row of slow calls takes fewer than `repeats` rounds, to end in about `budget_s`."""

    repeats: int = 12  # samples of every backend
    l2: L2 = "cold"
    graph: bool = True  # False: events around an eager launch
    budget_s: float = 3.0  # per row, all backends together


@dataclass(frozen=True)
class Reading:
    """What measuring one call gave: a timing, or the error that came instead."""

    timing: Timing | None = None
    outputs: Any = None  # of the last timed call
    clocks: Clocks | None = None  # of the device while it ran this call
    peak_bytes: int | None = None  # that a call allocates on the device, above its inputs
    kernels: tuple[str, ...] = ()  # names in the captured graph, in order, each once
    note: str | None = None  # why the clock is not the one asked for
    error: Exception | None = None
    owner: Any = None  # the graph whose memory holds the outputs


def interleaved(
    calls: Mapping[str, Call],
    config: Config,
    device: str,
    *,
    uncapturable: Mapping[str, str] | None = None,
    turn: Turn = lambda name: None,
) -> dict[str, Reading]:
    """Time calls that have run at least once before, so that nothing compiles here.

    A call that fails gets a Reading with its error, and the others go on. `uncapturable`: calls that no graph can hold,
    and why. `turn` is told, outside of what is timed, which call comes next, or is waited for.
    """
    if torch.device(device).type == "cuda":
        return _on_gpu(calls, config, torch.device(device), uncapturable or {}, turn)
    return _on_cpu(calls, config, turn)


@contextmanager
def side_stream(device: str) -> Iterator[None]:
    """A stream of its own for what is prepared and measured inside; nothing on the CPU.

    Autograd runs a backward pass on the stream of its forward pass, and the default stream cannot be captured.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def live_bytes(device: torch.device) -> int | None:
    """Device memory of tensors that are still in use; None on the CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # an autograd graph of another backend may wait in a cycle, and be freed between two readings
    return torch.cuda.memory_allocated(device)


def summary(samples: list[float], *, call_ms: float | None, l2: L2, clock: Clock) -> Timing:
    """A Timing of samples in ms. Raises FlashqlaError for a time that cannot be."""
    if not samples or min(samples) <= 0 or not math.isfinite(sum(samples)):
        raise FlashqlaError("a measured time is not positive", given=f"{clock} samples {samples} ms")
    spread = None
    if len(samples) >= MIN_SAMPLES_FOR_IQR:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        spread = high - low
    return Timing(
        gpu_ms=statistics.median(samples),
        gpu_ms_min=min(samples),
        gpu_ms_iqr=spread,
        samples=samples,
        call_ms=call_ms,
        l2=l2,
        clock=clock,
        repeats=len(samples),
    )


def rounds(config: Config, row_ms: float) -> int:
    """Rounds that fit in the budget when one of every call takes row_ms together."""
    return max(min(MIN_ROUNDS, config.repeats), min(config.repeats, int(1000 * config.budget_s / max(row_ms, 1e-3))))


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """Names in the order of a round: A B C in even ones, C B A in odd ones."""
    return list(names if turn % 2 == 0 else reversed(names))


# --- CPU ---


def _on_cpu(calls: Mapping[str, Call], config: Config, turn: Turn) -> dict[str, Reading]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    outputs: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    deadline = time.perf_counter() + config.budget_s
    for number in range(config.repeats):
        if number >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for name in in_turn([name for name in calls if name not in errors], number):
            turn(name)
            try:
                elapsed, outputs[name] = _wall_ms(calls[name])
                samples[name].append(elapsed)
            except Exception as error:  # any backend's failure is a row, not the end of the run
                errors[name] = error
    return {
        name: Reading(error=errors[name])
        if name in errors
        else Reading(
            timing=summary(taken, call_ms=statistics.median(taken), l2="warm", clock="wall"), outputs=outputs[name]
        )
        for name, taken in samples.items()
    }


def _wall_ms(call: Call) -> tuple[float, Any]:
    begin = time.perf_counter()
    outputs = call()
    return 1000 * (time.perf_counter() - begin), outputs


# --- GPU ---


@dataclass
class _Sampler:
    """One call, ready to be sampled."""

    launch: Call
    clock: Clock
    call_ms: float
    peak_bytes: int
    outputs: Any
    graph: Any = None
    kernels: tuple[str, ...] = ()
    note: str | None = None
    clocks: Clocks | None = None
    events: list[tuple[Any, Any]] = field(default_factory=list)


def _on_gpu(
    calls: Mapping[str, Call], config: Config, device: torch.device, uncapturable: Mapping[str, str], turn: Turn
) -> dict[str, Reading]:
    errors: dict[str, Exception] = {}
    samplers: dict[str, _Sampler] = {}
    cold = config.l2 == "cold"
    with torch.cuda.device(device), machine.meter(torch.cuda.current_device()) as meter:
        for name, call in calls.items():
            turn(name)
            try:
                samplers[name] = _sampler(call, cold, capture=config.graph and name not in uncapturable)
                if name in uncapturable:
                    samplers[name].note = f"no CUDA graph: {uncapturable[name]}"
            except Exception as error:  # any backend's failure is a row, not the end of the run
                errors[name] = error
        taken: list[tuple[str, Any]] = []
        for number in range(rounds(config, sum(sampler.call_ms for sampler in samplers.values()))):
            for name in in_turn(list(samplers), number):
                turn(name)
                taken.append((name, _sample(samplers[name], cold)))
        for name, end in taken:
            turn(name)
            end.synchronize()
        for name, sampler in samplers.items():
            turn(name)
            sampler.clocks = _clocks(sampler, meter)

    readings = {name: Reading(error=error) for name, error in errors.items()}
    readings |= {name: _reading(sampler, config) for name, sampler in samplers.items()}
    return {name: readings[name] for name in calls}


def _reading(sampler: _Sampler, config: Config) -> Reading:
    samples = [begin.elapsed_time(end) for begin, end in sampler.events]
    try:
        timing = summary(samples, call_ms=sampler.call_ms, l2=config.l2, clock=sampler.clock)
    except FlashqlaError as error:
        return Reading(error=error)
    return Reading(
        timing,
        sampler.outputs,
        sampler.clocks,
        sampler.peak_bytes,
        sampler.kernels,
        sampler.note,
        owner=sampler.graph,
    )


def _sampler(call: Call, cold: bool, *, capture: bool) -> _Sampler:
    peak_bytes = _peak_bytes(call)
    call_ms = _eager_ms(call, cold)
    if capture:
        try:
            graph, outputs, kernels = _capture(call)
        except Exception as error:  # a call that synchronises cannot be captured, whatever it raises
            torch.cuda.synchronize()
            note = f"no CUDA graph: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return _Sampler(call, "events", call_ms, peak_bytes, call(), note=note)
        for _ in range(WARM_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        return _Sampler(graph.replay, "graph", call_ms, peak_bytes, outputs, graph, kernels)
    return _Sampler(call, "events", call_ms, peak_bytes, call())


def _sample(sampler: _Sampler, cold: bool) -> Any:
    """Enqueue one sample; the events are read once all samples are enqueued. Returns the later one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if cold:
        _flush()
    else:
        sampler.launch()  # fills the L2 with what this call leaves there
    if sampler.clock == "events":
        torch.cuda._sleep(int(SPIN_CYCLES_PER_MS * sampler.call_ms))
    begin.record()
    outputs = sampler.launch()
    end.record()
    if sampler.clock == "events":
        sampler.outputs = outputs
    sampler.events.append((begin, end))
    return end


def _clocks(sampler: _Sampler, read: Callable[[], Clocks | None]) -> Clocks | None:
    """Clocks while the device runs a call on, after its samples. Nothing of this is timed."""
    begin, end = sampler.events[-1]
    each_ms = sampler.call_ms if sampler.clock == "events" else begin.elapsed_time(end)
    for _ in range(min(READING_LAUNCHES, math.ceil(READING_MS / max(each_ms, 1e-3)))):
        sampler.launch()
    clocks = read()
    torch.cuda.synchronize()
    return clocks


def _peak_bytes(call: Call) -> int:
    """Device memory that a call allocates at its peak.

    An output counts wherever it lies: some backends write it to memory that they keep from call to call.
    """
    first = call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    second = call()
    peak = torch.cuda.max_memory_allocated() - before
    kept = _storages(first).keys()
    return peak + sum(size for address, size in _storages(second).items() if address in kept)


def _storages(outputs: Any) -> dict[int, int]:
    """Address and bytes of the memory of each tensor."""
    tensors = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _eager_ms(call: Call, cold: bool) -> float:
    """Median wall time of a call from an idle device to its end, in ms. It has run before."""
    taken = []
    for _ in range(CALL_REPEATS):
        if cold:
            _flush()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - begin))
        if sum(taken) > CALL_BUDGET_MS:
            break
    return statistics.median(taken)


def _capture(call: Call) -> tuple[Any, Any, tuple[str, ...]]:
    """A graph of one call, its outputs, and the names of its kernels.

    By hand instead of through `torch.cuda.graph`, which empties the allocator's cache at every capture.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its kernels can be named after the capture
    graph.enable_debug_mode()
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # collecting another graph during a capture would break the capture
    try:
        with torch.cuda.stream(stream):
            call()  # whatever is set up per stream must exist before the capture
            stream.synchronize()
            graph.capture_begin()
            try:
                outputs = call()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, outputs, _kernel_names(graph)


def _kernel_names(graph: Any) -> tuple[str, ...]:
    """Names of a captured graph's kernels in order, each once; empty where the dump cannot be read."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces every dump
        path = Path(folder) / "graph.dot"
        try:
            graph.debug_dump(str(path))
            return kernel_names(path.read_text(errors="replace"))
        except (OSError, RuntimeError):
            return ()


def kernel_names(dot: str) -> tuple[str, ...]:
    r"""Kernels in the text of a dumped CUDA graph, where a kernel node reads `name\<\<\<grid,block,shared\>\>\>`."""
    mangled = re.findall(r"([A-Za-z_$][\w$]*)\\?<\\?<\\?<", dot)
    return tuple(dict.fromkeys(_function_name(torch._C._demangle(name)) for name in mangled))


def _function_name(signature: str) -> str:
    """The name alone of a C++ function: of what PyTorch compiles, types and arguments fill pages."""
    name, depth = "", 0
    for letter in signature:
        depth -= letter in ">)"
        name += letter * (depth == 0 and letter not in "<>()")
        depth += letter in "<("
    return (name.split() or [signature])[-1].removeprefix("::")


@cache
def _flush_buffer(index: int) -> torch.Tensor:
    cache_bytes = getattr(torch.cuda.get_device_properties(index), "L2_cache_size", 0)
    return torch.empty(max(FLUSH_BYTES, 4 * cache_bytes), dtype=torch.int8, device=f"cuda:{index}")


def _flush() -> None:
    _flush_buffer(torch.cuda.current_device()).zero_()
