"""Records as text, Markdown and CSV.

The same run always gives the same bytes: published tables are rendered from their JSON.
"""

import csv as csv_file
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashqla.compare import DEFAULT_THRESHOLD, MIN_SAMPLES
from flashqla.errors import ArgumentError
from flashqla.records import Kind, Record, Run, TensorErrors, judged, shortfall, went_wrong
from flashqla.roofline import CEILINGS, Rates, rates

TIMED = {
    "bench-fwd": "the op alone",
    "bench-bwd": "the backward pass alone, on what one forward pass saved",
    "bench-fwd+bwd": "forward and backward pass, through autograd",
}
NOISY = DEFAULT_THRESHOLD  # interquartile range over median: samples that differ by what `compare` takes for a change
FEW = f"?: fewer than {MIN_SAMPLES} samples, too few to tell how noisy they are; --budget and --repeats give more."
SOURCES = ("suite", "cases", "input")  # settings that say where the cases of a run come from
CLOCKS = {"graph": "CUDA graph replay", "events": "CUDA events", "wall": "wall clock"}


@dataclass(frozen=True)
class Table:
    """Rows of cells below one or more rows of column heads."""

    head: list[list[str]]
    rows: list[list[str]]
    title: str = ""
    left: tuple[int, ...] = (0,)  # columns of words; the others are numbers, and stand to the right


@dataclass(frozen=True)
class Page:
    """Tables and what is said about them, before a format is chosen."""

    title: str
    facts: dict[str, str]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)


def text(page: Page) -> str:
    """Plain text, for a terminal or a file."""
    lines = [page.title, *(f"  {name:<10}{fact}" for name, fact in page.facts.items())]
    for table in page.tables:
        lines += ["", *[table.title] * bool(table.title), *_grid(table)]
    for block in (page.notes, page.summary):
        lines += ["", *block] if block else []
    return "\n".join(lines) + "\n"


def markdown(page: Page) -> str:
    """GitHub's Markdown, for a pull request or a job summary."""
    lines = [f"## {page.title}", "", *(_plain(line) + "\n" for line in page.summary)]
    lines += [f"- {name}: {_plain(fact)}" for name, fact in page.facts.items()]
    for table in page.tables:
        head = [_plain(" ".join(filter(None, column))) for column in zip(*table.head, strict=True)]
        rule = [":--" if column in table.left else "--:" for column in range(len(head))]
        rows = [[_plain(cell) for cell in row] for row in table.rows]
        lines += ["", *[f"### {_plain(table.title)}", ""] * bool(table.title)]
        lines += [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    lines += ["", *(f"- {_plain(note)}" for note in page.notes)] if page.notes else []
    return "\n".join(lines) + "\n"


def _plain(words: str) -> str:
    """Words that Markdown shows as they are, on one line and in one cell."""
    return re.sub(r"([\\`*_~|<\[\]])", r"\\\1", " ".join(words.split()))


def csv(run: Run) -> str:
    """A line per record, with every field that any of them has: `timing.gpu_ms` is inside `timing`."""
    rows = [dict(_flat(record.model_dump(mode="json"))) for record in run.records]
    names = dict.fromkeys(name for row in rows for name in row)
    lines = io.StringIO()
    writer = csv_file.DictWriter(lines, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


def _flat(content: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, "; ".join(map(str, value)) if isinstance(value, list) else value


def page(run: Run, *, roofline: bool = False, memory: bool = False, details: bool = False) -> Page:
    """The table of a run, whatever its command was. Raises ArgumentError for columns that it cannot have."""
    check_columns(run.kind, roofline=roofline, memory=memory, details=details)
    if run.kind.startswith("verify"):
        return verify_page(run, details=details)
    return bench_page(run, roofline=roofline, memory=memory)


def check_columns(kind: Kind, *, roofline: bool = False, memory: bool = False, details: bool = False) -> None:
    """Raise ArgumentError for columns that runs of a kind cannot have."""
    if kind.startswith("verify") and (roofline or memory):
        given = " ".join(["--roofline"] * roofline + ["--memory"] * memory)
        raise ArgumentError("a verify run has no such columns", given=given, supported="runs of flashqla bench")
    if kind.startswith("bench") and details:
        raise ArgumentError(
            "a bench run has no such columns", given="--details", supported="runs of flashqla verify", do="leave it out"
        )
    if kind != "bench-fwd" and roofline:
        given = f"--roofline, {kind.replace('-', ' ')}"
        raise ArgumentError(
            "the least time of a backward pass is not known", given=given, supported="bench fwd", do="leave it out"
        )


def bench_text(run: Run) -> str:
    """Table of a bench run as plain text."""
    return text(bench_page(run))


def verify_text(run: Run, *, details: bool = False) -> str:
    """Table of a verify run as plain text."""
    return text(verify_page(run, details=details))


def bench_page(run: Run, *, roofline: bool = False, memory: bool = False) -> Page:
    """Table of a bench run: a block per model, a row per layout, and how many times faster than each peer we are.

    Columns: time per backend in ms (ours first), on a GPU also that of a call from the host, ratios peer / ours. With
    `roofline` also the least time, and our TFLOP/s, GB/s and percent of the floor; with `memory`, and always for a
    backward pass where it is known, also the peak memory of every backend, and what its forward pass saved.
    """
    backends = columns(run)
    ours, peers = backends[0], backends[1:]
    memory |= run.kind != "bench-fwd" and any(record.peak_bytes is not None for record in run.records)
    known = [name for name in backends if any(r.peak_bytes is not None for r in run.records if r.backend == name)]
    asked, memory = memory, memory and bool(known)
    saved = memory and any(record.saved_bytes is not None for record in run.records)
    roof = slice(0, 4) if run.environment.gpu in CEILINGS else slice(1, 3)  # without ceilings, the rates alone
    titles = [("floor", "ms"), ("TFLOP/s", ours), ("GB/s", ours), ("of floor", ours)][roof] if roofline else []
    counted = known or backends  # a peer without a backward pass needs no memory for one
    notes = _Notes()
    # On the CPU the host is the device, and a call has one time.
    timings = [(record.backend, record.timing) for record in run.records if record.timing]
    eager = {name for name, timing in timings if timing.clock != "wall" and timing.call_ms}
    called = [name for name in backends if name in eager]
    ratios: list[dict[str, float]] = []
    tables: list[Table] = []
    for title, rows in blocks(run):
        block = [speedups(row, ours, peers) for row in rows]
        ratios += block
        head = [
            ["", *("ms" for _ in backends), *("call ms" for _ in called), *("faster than" for _ in peers)],
            ["layout", *backends, *called, *peers],
        ]
        if titles:
            head = [[*head[0], *(title for title, _ in titles)], [*head[1], *(below for _, below in titles)]]
        if memory:
            head = [[*head[0], *("peak MiB" for _ in counted)], [*head[1], *counted]]
        if saved:
            head = [[*head[0], *("saved MiB" for _ in counted)], [*head[1], *counted]]
        cells = []
        for row, ratio in zip(rows, block, strict=True):
            times = [_time(row.get(name), notes) for name in backends]
            calls = [_call(row.get(name)) for name in called]
            cells.append([label(row), *times, *calls, *(_ratio(ratio.get(name)) for name in peers)])
            cells[-1] += _roof(row.get(ours), run.environment.gpu)[roof] if roofline else []
            records = [row.get(name) for name in counted]
            cells[-1] += [_mib(record.peak_bytes if record else None) for record in records if memory]
            cells[-1] += [_mib(record.saved_bytes if record else None) for record in records if saved]
        if peers:
            cells.append(["geometric mean", *[""] * (len(backends) + len(called)), *_means(block, peers)])
            cells[-1] += [""] * (len(titles) + len(counted) * (memory + saved))
        tables.append(Table(head, cells, title))
    if peers:
        least = [_ratio(min((row[name] for row in ratios if name in row), default=None)) for name in peers]
        most = [_ratio(max((row[name] for row in ratios if name in row), default=None)) for name in peers]
        counts = [str(sum(name in row for row in ratios)) for name in peers]
        cells = [["geometric mean", *_means(ratios, peers)], ["least", *least], ["most", *most], ["rows", *counts]]
        tables.append(Table([["", *peers]], cells, f"All rows: {ours} faster than"))
    legend = [
        f"ms: median time of {TIMED[run.kind]}.",
        *["call ms: median time of the op called from Python and waited for."] * bool(called),
        *[f"faster than: time of the other / time of {ours}; above 1.00x {ours} is the faster one."] * bool(peers),
        f"n/a: no time, see the note. !: wrong result, so no ratio. *: clocks were throttled{_throttle(run)}.",
        f"~: noisy, the middle half of the samples spans more than {NOISY:.0%} of the time.",
        *[FEW] * any(few(record) for record in run.records),
        "Means leave out rows without a ratio.",
        *[_roof_legend(run.environment.gpu)] * roofline,
        *["peak MiB: device memory that a call allocates at its peak, outputs included and inputs not."] * memory,
        *["peak MiB: not known, because it is counted on a GPU alone."] * (asked and not memory),
        *["saved MiB: device memory that a forward pass leaves for the backward pass, its outputs included."] * saved,
    ]
    return Page(_title(run), facts(run), tables, [*legend, *_kernels(run), *notes.lines()], shortfall(run))


def verify_page(run: Run, *, details: bool = False) -> Page:
    """Table of a verify run: a row per case, the relative L2 errors of each output per backend, the worst case last.

    Outputs share a cell where they are two, and have a line each where they are more. With `details` they always have,
    with their largest absolute error and cosine.
    """
    backends, ours = columns(run), judged(run)
    notes = _Notes()
    rows = [row for _, rows in blocks(run) for row in rows]
    rows.sort(key=lambda row: max((_badness(row[name]) for name in ours if name in row), default=0.0))
    outputs = dict.fromkeys(name for record in run.records for name in record.errors)
    apart = details or len(outputs) > 2
    bounded = {name: name in ours for name in backends}
    head = ["case", *["of"] * apart]
    for name, bound in bounded.items():
        head += [name, *["bound"] * bound, *["max abs", "cosine"] * details]
    head.append("verdict")
    cells = []
    for row in rows:
        names = [name for name in outputs if any(name in record.errors for record in row.values())] if apart else []
        for number, output in enumerate(names or [""]):
            line = [*[next(iter(row.values())).case_id if number == 0 else ""], *[output] * apart]
            for name, bound in bounded.items():
                record = row.get(name)
                line += [_errors(record, notes, output, number == 0), *[_bound(record, output)] * bound]
                line += _details(record, output) if details else []
            cells.append([*line, _verdict(row, ours) if number == 0 else ""])
    of = "" if apart else f": {' / '.join(outputs) or 'none'}"
    legend = [
        f"Relative L2 error against the float64 recurrence{of}. !: above the bound.",
        *["dA_log, ddt_bias: dg summed up as it reaches them, g = -exp(A_log) softplus(a + dt_bias)."]
        * ("dA_log" in outputs),
        *["max abs: the largest absolute error of an entry. cosine: of the angle to the float64 result."] * details,
        "n/a: not run, see the note. A peer that is off says nothing about the others: the yardstick is float64.",
    ]
    runs = sorted({record.runs for record in run.records if record.runs and record.deterministic})
    if runs:
        legend += [f"Each result was made {_range(runs)} times, with the same bits unless its verdict says otherwise."]
    summary = [*shortfall(run), *(counts(run, name) for name in backends)]
    return Page(
        _title(run),
        facts(run),
        [Table([head], cells, left=(0, *[1] * apart))],
        [*legend, *_kernels(run), *notes.lines()],
        summary,
    )


class _Notes:
    """Numbered footnotes, each text once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, record: Record) -> str:
        """`[3]`, or nothing for a record that has nothing to say."""
        facts = ["" if record.status == "ok" else record.status, record.reason, record.hint and f"hint: {record.hint}"]
        text = ", ".join(fact for fact in facts if fact)
        if not text:
            return ""
        text = f"{record.backend}: {text}"
        return f"[{self._numbers.setdefault(' '.join(text.split()), len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {text}" for text, number in self._numbers.items()]


def _title(run: Run) -> str:
    return f"flashqla {run.kind.replace('-', ' ')}"


def facts(run: Run) -> dict[str, str]:
    """What made the numbers of a run: device, clocks, versions, sources and settings, a line each."""
    env, settings = run.environment, run.settings
    readings = [record.clocks for record in run.records if record.clocks]
    speeds = [reading.sm_mhz for reading in readings if reading.sm_mhz]
    degrees = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    watts = [round(reading.power_w) for reading in readings if reading.power_w is not None]
    device = [env.gpu or "no GPU"]
    device += [f"{env.sm_count} SMs"] if env.sm_count else []
    device += [f"driver {env.driver}"] if env.driver else []
    device += [f"SM clock {_range(speeds)} MHz"] if speeds else []
    device += [f"{_range(degrees)} C"] if degrees else []
    device += [f"{_range(watts)} W"] if watts else []
    versions = {
        "python": env.python,
        "torch": env.torch,
        "CUDA": env.cuda,
        "triton": env.triton,
        "tilelang": env.tilelang,
        "tvm-ffi": env.tvm_ffi,
    }
    revision = f" (git {env.git_revision})" if env.git_revision else ""
    timings = [record.timing for record in run.records if record.timing]
    timing = [f"L2 {timings[0].l2}", " or ".join(dict.fromkeys(CLOCKS[t.clock] for t in timings))] if timings else []
    timing += [f"{_range(len(t.samples) for t in timings)} samples per time"] if timings else []
    timing += [f"{name} {settings[name]}" for name in (*SOURCES, "seed", "device") if settings.get(name) is not None]
    return {
        "started": run.started.isoformat() + _resumed(run) + (", interrupted" if run.interrupted else ""),
        "device": ", ".join(device),
        "cpu": env.cpu,
        "software": f"flashqla {env.flashqla}{revision}, " + _list(versions),
        "peers": _list(env.peers) or "none installed",
        "kernels": f"sources sha256 {env.kernel_fingerprint}",
        "settings": ", ".join(timing),
    }


def _resumed(run: Run) -> str:
    """How much of a run was measured before it, at other clocks and temperatures."""
    if not run.sessions:
        return ""
    count, kept = len(run.sessions), sum(record.session is not None for record in run.records)
    sessions = "an earlier session" if count == 1 else f"{count} earlier sessions"
    return f", after {sessions} since {run.sessions[0].isoformat()}, from which {kept} of {len(run.records)} rows are"


def _range(numbers: Iterable[int]) -> str:
    ends = sorted(numbers)
    return f"{ends[0]}-{ends[-1]}" if ends[0] != ends[-1] else f"{ends[0]}"


def _list(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _kernels(run: Run) -> list[str]:
    """What ran, a line per backend; as planned where no captured graph has named it."""
    known = {record.backend for record in run.records if record.kernels_from != ["backend"] and record.kernels}
    ran: dict[str, dict[str, None]] = {name: {} for name in columns(run)}
    for record in run.records:
        # Names that generators give to kernels run to hundreds of characters; the file has them whole.
        ran[record.backend].update(dict.fromkeys(k if len(k) <= 120 else k[:117] + "..." for k in record.kernels))
    return [
        f"{name} ran{'' if name in known else ', as planned'}: {', '.join(kernels)}"
        for name, kernels in ran.items()
        if kernels
    ]


def columns(run: Run) -> list[str]:
    """Backends in the order in which they ran, ours first."""
    names, ours = dict.fromkeys(record.backend for record in run.records), judged(run)
    return sorted(names, key=lambda name: name not in ours) or ["none"]


def blocks(run: Run) -> list[tuple[str, list[dict[str, Record]]]]:
    """Records as (block title, rows); a row maps backend to record. Order of first appearance."""
    blocks: dict[str, dict[str, dict[str, Record]]] = {}
    for record in run.records:
        title = f"{record.model}  h_k={record.hk} h_v={record.hv}".strip()
        blocks.setdefault(title, {}).setdefault(record.case_id, {})[record.backend] = record
    return [(title, list(rows.values())) for title, rows in blocks.items()]


def label(row: dict[str, Record]) -> str:
    """The layout, which is all that differs between rows of a model; else all of the id but the heads."""
    record = next(iter(row.values()))
    return record.layout if record.model else record.case_id.partition("/")[2]


def speedups(row: dict[str, Record], ours: str, peers: Sequence[str]) -> dict[str, float]:
    """Time of each peer over ours, where both have a time and a right result."""
    times = {name: gpu_ms for name, record in row.items() if (gpu_ms := right_ms(record))}
    return {name: times[name] / times[ours] for name in peers if name in times and ours in times}


def right_ms(record: Record) -> float | None:
    """The time of a record with a right result, None for any other."""
    right = record.status == "ok" and record.passed is not False
    return record.timing.gpu_ms if right and record.timing else None


def noisy(record: Record) -> bool:
    """Whether the samples of a time lie far apart; False where they are too few to tell."""
    timing = record.timing
    return bool(timing and timing.gpu_ms and timing.gpu_ms_iqr and timing.gpu_ms_iqr > NOISY * timing.gpu_ms)


def few(record: Record) -> bool:
    """Whether the samples of a time are too few to tell how far apart they lie."""
    return bool(record.timing and record.timing.gpu_ms and len(record.timing.samples) < MIN_SAMPLES)


def reached(record: Record, gpu: str | None) -> Rates | None:
    """What the time of a forward pass comes to; None for a record without a time and a right result."""
    gpu_ms = right_ms(record)
    return None if gpu_ms is None or record.direction != "fwd" else rates(record.case, gpu_ms, gpu)


def _roof(record: Record | None, gpu: str | None) -> list[str]:
    found = reached(record, gpu) if record else None
    if found is None:
        return ["-"] * 4
    speeds = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (found.tflops_per_s, found.gb_per_s)]
    return [_ms(found.floor_ms), *speeds, "-" if found.percent is None else f"{found.percent:.0f}%"]


def _roof_legend(gpu: str | None) -> str:
    ceilings = CEILINGS.get(gpu or "")
    if ceilings is None:
        return f"floor: not known for this device, since its ceilings have not been measured ({gpu or 'no GPU'})."
    peak, memory = ceilings.flops_per_s / 1e12, ceilings.bytes_per_s / 1e12
    return f"floor: the larger of FLOPs at {peak:g} TFLOP/s and bytes at {memory:g} TB/s, from a cold L2."


def _means(ratios: Iterable[dict[str, float]], peers: Sequence[str]) -> list[str]:
    def mean(values: list[float]) -> float | None:
        return math.exp(sum(map(math.log, values)) / len(values)) if values else None

    rows = list(ratios)
    return [_ratio(mean([row[name] for row in rows if name in row])) for name in peers]


def _time(record: Record | None, notes: _Notes) -> str:
    if record is None:
        return "-"
    if record.status != "ok" or record.timing is None or record.timing.gpu_ms is None:
        return "n/a" + notes.mark(record)
    wrong = "!" if record.passed is False else ""
    throttled = "*" if record.clocks and record.clocks.throttle else ""
    return _ms(record.timing.gpu_ms) + wrong + throttled + "~" * noisy(record) + "?" * few(record) + notes.mark(record)


def _call(record: Record | None) -> str:
    return _ms(record.timing.call_ms if record and record.timing else None)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 10 else f"{value:.2f}"


def _mib(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:.1f}"


def _throttle(run: Run) -> str:
    """What throttled any row of the run."""
    reasons = {reason for record in run.records if record.clocks for reason in record.clocks.throttle or ()}
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _errors(record: Record | None, notes: _Notes, output: str, first: bool) -> str:
    """The error of an output, or of all; only the first line of a case has the notes of its records."""
    if record is None:
        return "-" * first
    if record.status != "ok":
        return ("n/a" + notes.mark(record)) * first
    mark = notes.mark(record) if first else ""
    if not output:
        text = " / ".join(_error(error) for error in record.errors.values())
        return text + ("!" if record.passed is False else "") + mark
    error = record.errors.get(output)
    if error is None:
        return "-" + mark
    allowed = record.bounds.get(output)
    above = error.rel_l2 is None or (allowed is not None and error.rel_l2 > allowed)
    return _error(error) + "!" * (above and record.passed is False) + mark


def _bound(record: Record | None, output: str) -> str:
    """What is allowed: for an output, or for the one that comes nearest to it."""
    allowed = (record.bounds.get(output) if output else record.bound) if record else None
    return "-" if allowed is None else f"{allowed:.1e}"


def _details(record: Record | None, output: str) -> list[str]:
    """Largest absolute error and cosine of an output."""
    error = record.errors.get(output) if record else None
    if error is None:
        return ["-", "-"]
    return [
        "-" if error.max_abs is None else f"{error.max_abs:.1e}",
        "-" if error.cosine is None else f"{error.cosine:.7f}",
    ]


def _error(error: TensorErrors) -> str:
    if error.nan or error.inf:
        return f"{error.nan} nan, {error.inf} inf"
    return "n/a" if error.rel_l2 is None else f"{error.rel_l2:.1e}"


def _badness(record: Record) -> float:
    """Sort key: the worst error in bounds, anything that went wrong after anything that went right."""
    shares = (
        (error.rel_l2 or 0.0) / (record.bounds.get(name) or record.bound or 1.0)
        for name, error in record.errors.items()
    )
    return max(shares, default=0.0) + (1e9 if went_wrong(record) else 0.0)


def _verdict(row: dict[str, Record], ours: Sequence[str]) -> str:
    words = []
    for name, record in row.items():
        mine = name in ours
        who = "" if mine and len(ours) == 1 else f"{name} "
        if record.status != "ok":
            words += [f"{who}{record.status}"] if mine else []
        elif record.passed is False:
            words.append(f"{who}WRONG" if mine else f"{name} off")
        elif record.deterministic is False:
            words.append(f"{who}not deterministic")
        elif record.passed is None and mine:  # the rule itself diverges there, so errors mean nothing
            words.append(f"{who}not judged")
    return ", ".join(words) or "ok"


def counts(run: Run, backend: str) -> str:
    """How many results of a backend passed in a verify run, and what became of the others."""
    records = [record for record in run.records if record.backend == backend]
    failed = sum(map(went_wrong, records))
    passed = sum(record.passed is True and not went_wrong(record) for record in records)
    idle = [record for record in records if not record.passed and not went_wrong(record)]
    other = Counter("not judged" if record.status == "ok" else record.status for record in idle)
    rest = "".join(f", {count} {what}" for what, count in sorted(other.items()))
    return f"{backend}: {passed} passed, {failed} failed{rest}"


def _grid(table: Table) -> list[str]:
    """Cells in columns."""
    cells = [*table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust if column in table.left else str.rjust for column in range(len(widths))]
    lines = (
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in cells
    )
    return [f"  {line}".rstrip() for line in lines]
