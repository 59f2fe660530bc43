"""Runs -> one page to look at: HTML with plots that needs nothing from the net, Markdown for a pull request, or text.

For CI systems there is JUnit XML.

A page has a section per run; runs are never merged, because times of two runs are no comparison.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from statistics import geometric_mean, median
from typing import NamedTuple
from xml.etree import ElementTree

from flashqla import junit as xml
from flashqla import plots, tables
from flashqla.compare import MIN_SAMPLES
from flashqla.plots import HEAT
from flashqla.records import Record, Run, judged, shortfall, went_wrong
from flashqla.tables import (
    NOISY,
    Page,
    Table,
    bench_page,
    blocks,
    columns,
    counts,
    few,
    markdown,
    noisy,
    page,
    reached,
    speedups,
)

CAPTIONS = {
    "latency": (
        "Latency against tokens",
        "Both axes are logarithmic. Lines join single sequences; hollow points, moved to the right a little, are "
        "several sequences packed into one row. Wrong results are left out.",
    ),
    "speedup": (
        "Speed-up",
        "Time of the other over ours, a line per head count and a column per layout. Above 1, ours is the faster one. "
        "A dash: no time, or a wrong result.",
    ),
    "floor": (
        "Percent of the floor",
        "The least possible time over the measured one: 100 is as fast as the measured ceilings of the device allow.",
    ),
    "accuracy": (
        "Accuracy, side by side",
        "Relative L2 error of every case against the float64 recurrence, on a logarithmic axis, in the order of our "
        "error. Lower is more exact, and below the bound a result passes. An error of exactly 0 has no point.",
    ),
}


@dataclass(frozen=True)
class Tile:
    """One number to remember of a run."""

    value: str
    what: str
    detail: str


@dataclass(frozen=True)
class Trouble:
    """Rows that have the same thing to tell."""

    backend: str
    what: str
    reason: str
    hint: str
    bad: bool  # rather than merely absent
    cases: list[str]


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """One run, ready for the template."""

    title: str
    interrupted: bool
    facts: dict[str, str]
    tiles: list[Tile]
    troubles: list[Trouble]
    plots: list[Plot]
    tables: list[Table]
    notes: list[str]


class Noted(NamedTuple):
    """A cell or a note, and the number of its footnote."""

    text: str
    number: str


def html(runs: Sequence[Run], *, details: bool = False) -> str:
    """The page as one HTML file, light or dark as its reader's system is.

    details: more columns for runs of verify, here as in the other formats.
    Raises EnvironmentProblem without the packages of extra report.
    """
    plots.need("jinja2", "matplotlib")
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"tone": _tone, "note": _noted, "footnote": _footnote}
    sections = [_section(run, details, {name: Markup(svg) for name, svg in plots.inline(run).items()}) for run in runs]
    template = environment.from_string(files("flashqla").joinpath("report.html").read_text(encoding="utf-8"))
    edges = [f"{edge:g}" for edge in HEAT]
    ranges = [f"below {edges[0]}", *map("-".join, pairwise(edges)), f"above {edges[-1]}"]
    return template.render(
        title=sections[0].title if len(sections) == 1 else "flashqla report",
        sections=sections,
        light=plots.variables(plots.LIGHT),
        dark=plots.variables(plots.DARK),
        heats={f"heat{level}": text for level, text in enumerate(ranges)},
    )


def summary(runs: Sequence[Run], *, details: bool = False) -> str:
    """The page as Markdown, for a pull request or a job summary: the outcome in sight, all rows folded away."""
    return "\n".join(_digest(run, details) for run in runs)


def text(runs: Sequence[Run], *, details: bool = False) -> str:
    """The tables of the page as plain text."""
    return "\n".join(tables.text(_page(run, details)) for run in runs)


def junit(runs: Sequence[Run]) -> str:
    """A suite per run, and in it a test per row.

    A row that counts and went wrong is a failure; one that could not run is skipped. Where the run is not complete one
    test more fails: the rows that it has may all have passed.
    """
    root = ElementTree.Element("testsuites")
    for run in runs:
        counted = judged(run)
        outcomes = [_outcome(record, record.backend in counted) for record in run.records]
        outcomes += [
            xml.Outcome(_title(run), "the run is complete", "failure", "incomplete", lack) for lack in shortfall(run)
        ]
        root.append(xml.suite(_title(run), run.started.isoformat(), outcomes))
    return xml.text(root)


def _outcome(record: Record, counts: bool) -> xml.Outcome:
    complaints = _complaints(record)
    errors = {name: error.rel_l2 for name, error in record.errors.items() if error.rel_l2 is not None}
    facts = [
        f"{record.timing.gpu_ms:.4g} ms" if record.timing and record.timing.gpu_ms else "",
        *[f"relative L2 of {name} {error:.1e}" for name, error in errors.items()],
        *complaints,
        record.reason or "",
        f"hint: {record.hint}" if record.hint else "",
    ]
    return xml.Outcome(
        record.backend,
        f"{record.case_id} {record.direction}",
        "failure" if counts and went_wrong(record) else "skipped" if record.status != "ok" else "passed",
        next(iter(complaints), ""),
        ", ".join(dict.fromkeys(filter(None, facts))),
    )


def _digest(run: Run, details: bool) -> str:
    full = _page(run, details)
    facts = {name: fact for name, fact in full.facts.items() if name != "cpu" or run.environment.gpu is None}
    outcome = shortfall(run)
    outcome += [f"{tile.value} {tile.what}" + f" ({tile.detail})" * bool(tile.detail) for tile in _tiles(run)]
    notes = [f"{_words(trouble)}: {_some(trouble.cases)}" for trouble in _troubles(run)]
    rows = markdown(Page("All rows", {}, full.tables, full.notes))
    top = markdown(Page(_title(run), facts, _means(run), notes, outcome))
    return f"{top}\n<details><summary>All rows</summary>\n\n{rows}\n</details>\n"


def _some(cases: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(cases) - most} more" if len(cases) > most else ""
    return ", ".join(cases[:most]) + rest


def _words(trouble: Trouble) -> str:
    hint = f" (hint: {trouble.hint})" if trouble.hint else ""
    return f"{trouble.backend}: {trouble.what}" + f", {trouble.reason}" * bool(trouble.reason) + hint


def _section(run: Run, details: bool, drawn: Mapping[str, str]) -> Section:
    full = _page(run, details)
    command = {"command": " ".join(["flashqla", *run.argv])} if run.argv else {}
    return Section(
        title=_title(run),
        interrupted=run.interrupted,
        facts=full.facts | command,
        tiles=_tiles(run),
        troubles=_troubles(run),
        plots=[Plot(name, *CAPTIONS[name], svg) for name, svg in drawn.items()],
        tables=full.tables,
        notes=full.notes,
    )


def _page(run: Run, details: bool) -> Page:
    if run.kind.startswith("verify"):
        return page(run, details=details)
    return bench_page(
        run, roofline=run.kind == "bench-fwd", memory=any(record.peak_bytes is not None for record in run.records)
    )


def _title(run: Run) -> str:
    suite = run.settings.get("suite")
    what = f"{run.kind.replace('-', ' ')}, suite {suite}," if suite else run.kind.replace("-", " ")
    return f"flashqla {what} on {run.environment.gpu or run.environment.cpu}"


def _tiles(run: Run) -> list[Tile]:
    if run.kind.startswith("verify"):
        found = [counts(run, name).partition(": ")[::2] for name in columns(run)]  # "fla", "3 passed, 1 failed"
        return [Tile(rest.partition(", ")[0], name, rest.partition(", ")[2]) for name, rest in found]
    ours, *peers = columns(run)
    rows = [speedups(row, ours, peers) for _, rows in blocks(run) for row in rows]
    tiles = []
    for name in peers:
        if ratios := [row[name] for row in rows if name in row]:
            wins = sum(ratio > 1 for ratio in ratios)
            detail = f"{min(ratios):.2f}x to {max(ratios):.2f}x; faster in {wins} of {len(ratios)} rows"
            tiles.append(Tile(f"{geometric_mean(ratios):.2f}x", f"the speed of {name}, geometric mean", detail))
    if percents := _percents(run, [record for record in run.records if record.backend == ours]):
        detail = f"{min(percents):.0f}% to {max(percents):.0f}%, {len(percents)} rows"
        tiles.append(Tile(f"{median(percents):.0f}%", "of the floor, median", detail))
    return tiles


def _percents(run: Run, records: Sequence[Record]) -> list[float]:
    found = [reached(record, run.environment.gpu) for record in records]
    return [rates.percent for rates in found if rates and rates.percent is not None]


def _means(run: Run) -> list[Table]:
    """A row per head count: geometric means of the ratios, and of a forward pass the median percent of the floor."""
    ours, *peers = columns(run)
    floor = bool(_percents(run, run.records))
    if run.kind.startswith("verify") or not run.records:
        return []
    rows = []
    for title, block in blocks(run):
        ratios = [speedups(row, ours, peers) for row in block]
        found = {name: [row[name] for row in ratios if name in row] for name in peers}
        percents = _percents(run, [row[ours] for row in block if ours in row])
        means = [f"{geometric_mean(values):.2f}x" if values else "-" for values in found.values()]
        rows.append([title, str(len(block)), *means, *[f"{median(percents):.0f}%" if percents else "-"] * floor])
    head = ["heads", "rows", *(f"speed / {name}" for name in peers), *["of floor, median"] * floor]
    return [Table([head], rows)]


def _troubles(run: Run) -> list[Trouble]:
    """Records that have something to tell, by what it is; those with a wrong result or none first, and ours first."""
    groups: dict[tuple[object, ...], Trouble] = {}
    for record in run.records:
        for what in _complaints(record):
            bad = went_wrong(record) and not what.startswith(("throttled", "noisy", "fewer than"))
            reason = record.reason if record.reason and record.reason != what else ""
            facts = (record.backend, what, reason, record.hint or "", bad)
            groups.setdefault(facts, Trouble(*facts, cases=[])).cases.append(record.case_id)
    order = columns(run)
    return sorted(groups.values(), key=lambda trouble: (not trouble.bad, order.index(trouble.backend)))


def _complaints(record: Record) -> list[str]:
    throttle = (record.clocks.throttle if record.clocks else None) or []
    return [
        *[record.status] * (record.status != "ok"),
        *["wrong result"] * (record.status == "ok" and record.passed is False),
        *["not deterministic"] * (record.deterministic is False),
        *[f"throttled by {', '.join(throttle)}"] * bool(throttle),
        *[f"noisy by more than {NOISY:.0%}"] * noisy(record),
        *[f"fewer than {MIN_SAMPLES} samples, too few to tell how noisy"] * few(record),
    ]


def _tone(text: str) -> str:
    """Class of a cell: the colour of a ratio, or that of something wrong or absent."""
    if re.fullmatch(r"\d+\.\d\dx", text):
        return plots.heat(float(text[:-1]))
    if "!" in text or "WRONG" in text or "not deterministic" in text:
        return "bad"
    return "muted" if text == "-" or text.startswith("n/a") else ""


def _noted(text: str) -> Noted:
    """`n/a[3]` -> n/a and 3."""
    found = re.fullmatch(r"(.*)\[(\d+)\]", text)
    return Noted(*found.groups()) if found else Noted(text, "")


def _footnote(text: str) -> Noted:
    """`[3] fla: missing` -> the text and 3."""
    found = re.fullmatch(r"\[(\d+)\] (.*)", text, re.DOTALL)
    return Noted(found[2], found[1]) if found else Noted(text, "")
