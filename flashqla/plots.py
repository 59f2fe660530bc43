"""Runs -> figures: drawn once, as SVG that takes its colours from the page around it, or as SVG and PNG files.

matplotlib, of extra `report`, is imported by the functions that draw.
"""

import io
import math
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from flashqla import records
from flashqla.errors import EnvironmentProblem, RecordError
from flashqla.records import Record, Run
from flashqla.tables import blocks, columns, reached, right_ms, speedups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = 6  # colours for backends, ours first; a seventh backend begins anew
HEAT = (0.8, 0.95, 1.05, 1.25, 1.6, 2.5)  # ratios at which the colour of a cell changes

# Colours by theme. Text on every ground, and every series on the page, has a contrast of 4.5 or more.
LIGHT = {
    "bg": "#ffffff", "card": "#f5f7fa", "fg": "#1b1f24", "muted": "#57606a", "line": "#d0d7de", "link": "#0757ba",
    "bad": "#b42318", "warn": "#8a5a00",
    "series0": "#0757ba", "series1": "#b3440a", "series2": "#146c43", "series3": "#7a3ed0", "series4": "#7d5b00",
    "series5": "#a3195b",
    "heat0": "#f2a48a", "heat1": "#fad9cd", "heat2": "#eceff2", "heat3": "#d5e8f9", "heat4": "#aed4f5",
    "heat5": "#7fbaf0", "heat6": "#559fe4",
}  # fmt: skip
DARK = {
    "bg": "#0f1318", "card": "#171d24", "fg": "#e4e9ee", "muted": "#9ba7b4", "line": "#323b45", "link": "#79b8ff",
    "bad": "#ff8f80", "warn": "#e5b95c",
    "series0": "#6db3ff", "series1": "#ffa066", "series2": "#5fd09b", "series3": "#c3a1ff", "series4": "#e2c14e",
    "series5": "#ff8fc4",
    "heat0": "#8a3b22", "heat1": "#553126", "heat2": "#28303a", "heat3": "#1b3a57", "heat4": "#1c4670",
    "heat5": "#1c558c", "heat6": "#1d66ac",
}  # fmt: skip
# matplotlib draws with these, and the SVG gets the variables instead.
STAND_INS = {name: f"#fe{number:02x}fd" for number, name in enumerate(LIGHT)}

Paint = Mapping[str, str]


def need(*packages: str) -> None:
    """Raises EnvironmentProblem, with what to install, if one of the packages is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            "pages and plots need packages that are not installed",
            given=", ".join(missing),
            do="pip install 'flashqla[report]', or take --format markdown without --plots",
        )


def variables(theme: Paint) -> str:
    """A theme as CSS variables."""
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())


def heat(ratio: float) -> str:
    """Name of the colour of a ratio peer / ours."""
    return f"heat{bisect(HEAT, ratio)}"


def inline(run: Run) -> dict[str, str]:
    """SVG elements by plot name, in the order to show them; a plot with nothing to show is left out."""
    return {name: svg for name in PLOTS if (svg := _svg(name, run))}


def make_folder(folder: Path) -> None:
    """Make a folder for `write`. Raises RecordError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError("the folder cannot be made", given=f"{folder}: {error.strerror}") from error


def pictures(run: Run) -> dict[str, str]:
    """SVG files by plot name, light or dark as their viewer is."""
    style = f"<style>svg{{{variables(LIGHT)}}}@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}</style>"
    return {name: re.sub(r"<svg[^>]*>", rf"\g<0>{style}", svg, count=1) + "\n" for name, svg in inline(run).items()}


def write(run: Run, folder: Path, prefix: str = "") -> list[Path]:
    """Write every plot of a run as SVG, light or dark as its viewer is, and as light PNG. Raises RecordError."""
    written = []
    for name, svg in pictures(run).items():
        path = records.destination(folder / f"{prefix}{name}.svg")
        records.write(path, svg)
        picture = records.destination(path.with_suffix(".png"))
        picture.write_bytes(_draw(name, run, LIGHT, format="png", dpi=160, metadata={"Software": None}) or b"")
        written += [path, picture]
    return written


def _svg(name: str, run: Run) -> str:
    drawn = _draw(name, run, STAND_INS, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    if drawn is None:
        return ""
    svg = drawn.decode()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure, and a page may hold many
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    svg = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    for colour, stand_in in STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{colour})")
    return _smaller(svg).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def _smaller(svg: str) -> str:
    """Without groups that hold nothing, indentation, turns by nothing, and digits beyond a hundredth of a point; and
    each style once, as a class whose name is the same for the same style, because a page may hold many figures."""
    svg = re.sub(r"\n\s+", "\n", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", tag[0]), svg)
    while (less := re.sub(r"<g>\s*</g>\n?|<g/>\n?", "", svg)) != svg:
        svg = less
    classes = {style: f"s{crc32(style.encode()):08x}" for style in re.findall(r' style="([^"]*)"', svg)}
    svg = re.sub(r' style="([^"]*)"', lambda style: f' class="{classes[style[1]]}"', svg)
    rules = "".join(f"\n.{name}{{{style}}}" for style, name in classes.items())
    return svg.replace("</style>", f"{rules}\n</style>", 1)


def _draw(name: str, run: Run, paint: Paint, **options: Any) -> bytes | None:
    """A plot as the bytes of a file, the same for the same run; None when there is nothing to show."""
    import matplotlib as mpl

    style: Any = {
        "figure.facecolor": paint["bg"], "axes.facecolor": paint["bg"], "savefig.facecolor": paint["bg"],
        "text.color": paint["fg"], "axes.labelcolor": paint["fg"], "axes.titlecolor": paint["fg"],
        "xtick.color": paint["muted"], "ytick.color": paint["muted"], "axes.edgecolor": paint["line"],
        "grid.color": paint["line"], "axes.grid": True, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4.5,
        "figure.constrained_layout.h_pad": 0.08, "font.size": 9,
        "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.frameon": False,
        "svg.fonttype": "none", "svg.hashsalt": name,  # text that can be searched; the same ids every time
        "text.parse_math": False,  # a $ in the name of a model is a $
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = PLOTS[name](run, paint)
        if figure is None:
            return None
        file = io.BytesIO()
        figure.savefig(file, **options)
        return file.getvalue()


@dataclass(frozen=True)
class _Points:
    """What one backend gives to one panel: lines of single sequences, and points of several."""

    lines: list[list[tuple[int, float]]]
    loose: list[tuple[int, float]]


def latency(run: Run, paint: Paint) -> "Figure | None":
    """Time over tokens, both on log scales: a panel per head count, a line per backend, and the floor."""

    def least(record: Record) -> float | None:
        found = reached(record, run.environment.gpu)
        return found.floor_ms if found else None

    return _panels(run, paint, right_ms, "ms", least=least)


def floor(run: Run, paint: Paint) -> "Figure | None":
    """Percent of the floor over tokens: a panel per head count, a line per backend."""

    def percent(record: Record) -> float | None:
        found = reached(record, run.environment.gpu)
        return found.percent if found else None

    return _panels(run, paint, percent, "% of the floor")


def _panels(
    run: Run,
    paint: Paint,
    value: Callable[[Record], float | None],
    unit: str,
    least: Callable[[Record], float | None] | None = None,
) -> "Figure | None":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panels = {}
    for title, rows in blocks(run):
        found = {name: _points(rows, name, value) for name in columns(run)}
        if any(points.lines or points.loose for points in found.values()):
            panels[title] = (found, rows)
    if not panels:
        return None
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(3.9 * max(across, 2), 2.7 * down + 0.5), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    handles: dict[str, Any] = {}
    for axis, (title, (found, rows)) in zip(axes, panels.items(), strict=False):
        if least:
            known = {record.case_id: record for row in rows for record in row.values() if least(record)}
            for line in _points([{"": record} for record in known.values()], "", least).lines:
                handles["floor"], *_ = axis.plot(*zip(*line, strict=True), color=paint["muted"], linestyle=(0, (2, 2)))
        for index, (name, points) in reversed(list(enumerate(found.items()))):  # ours on top
            look: dict[str, Any] = {"color": paint[f"series{index % SERIES}"], "marker": "osD^vP"[index % SERIES]}
            for line in points.lines:
                handles[name], *_ = axis.plot(*zip(*line, strict=True), **look, linewidth=2 if index == 0 else 1.4)
            if points.loose:  # a column per backend, to the right of the lines
                shifted = [(tokens * 1.06 ** (index + 1), number) for tokens, number in points.loose]
                dots = axis.plot(*zip(*shifted, strict=True), **look, linestyle="", fillstyle="none", alpha=0.8)
                handles.setdefault(name, dots[0])
        axis.set_title(_short(title), fontsize=9, loc="left")
        axis.set_xscale("log", base=2)
        if least:
            axis.set_yscale("log")
        tokens = sorted({x for points in found.values() for line in (*points.lines, points.loose) for x, _ in line})
        axis.set_xticks(tokens if len(tokens) <= 8 else tokens[:: math.ceil(len(tokens) / 8)])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
        axis.tick_params(labelleft=True, labelbottom=True)
    for axis in axes[len(panels) :]:
        axis.remove()
    if least:  # what is set for one panel holds for all, as they share it
        low, high = axes[0].get_ylim()
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1, 3)))
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes[0].yaxis.set_minor_locator(NullLocator())
    else:
        axes[0].set_ylim(bottom=0)
    order = [name for name in (*columns(run), "floor") if name in handles]
    figure.legend([handles[name] for name in order], map(_short, order), loc="outside upper left", ncols=len(order))
    figure.supxlabel("tokens of all sequences", fontsize=9)
    figure.supylabel(unit, fontsize=9)
    return figure


def _points(rows: Sequence[Mapping[str, Record]], name: str, value: Callable[[Record], float | None]) -> _Points:
    """Single sequences that differ in nothing but length form a line; what has several sequences stands alone."""
    lines: dict[str, list[tuple[int, float]]] = {}
    loose = []
    for record in (row[name] for row in rows if name in row):
        number = value(record)
        if number is None or not record.tokens:
            continue
        if len(record.case.lengths) == 1:
            lines.setdefault(record.case_id.replace(record.layout, "", 1), []).append((record.tokens, number))
        else:
            loose.append((record.tokens, number))
    return _Points([sorted(line) for line in lines.values()], loose)


def speedup(run: Run, paint: Paint) -> "Figure | None":
    """Ratio peer / ours as coloured cells: a panel per peer, a line per head count, a column per layout."""
    from matplotlib.figure import Figure

    ours, *peers = columns(run)
    ratios: dict[str, dict[tuple[str, str], float]] = {name: {} for name in peers}
    heads: dict[str, None] = {}
    layouts: dict[str, None] = {}
    for title, rows in blocks(run):
        for row in rows:
            record = next(iter(row.values()))
            column = record.case_id.partition("/")[2].removesuffix("/mixed")  # the gate of the published rows
            for name, ratio in speedups(row, ours, peers).items():
                ratios[name][title, column] = ratio
                heads.setdefault(title)
                layouts.setdefault(column)
    peers = [name for name in peers if ratios[name]]
    if not peers:
        return None
    height = 0.27 * len(heads) + 0.35
    figure = Figure(figsize=(max(6.0, 2.1 + 0.46 * len(layouts)), height * len(peers) + 1.1), layout="constrained")
    for axis, name in zip(figure.subplots(len(peers), 1, squeeze=False, sharex=True).flat, peers, strict=True):
        for y, title in enumerate(heads):
            for x, column in enumerate(layouts):
                found = ratios[name].get((title, column))
                text = "–" if found is None else f"{found:.2f}" if found < 10 else f"{found:.0f}"
                colour = paint["muted" if found is None else "fg"]
                axis.text(x, y, text, ha="center", va="center", fontsize=7.5, color=colour)
                if found is not None:
                    axis.add_patch(_cell(x, y, paint[heat(found)]))
        axis.set_title(f"time of {_short(name)} / time of {_short(ours)}", fontsize=9, loc="left")
        axis.set_xlim(-0.5, len(layouts) - 0.5)
        axis.set_ylim(len(heads) - 0.5, -0.5)
        axis.set_yticks(range(len(heads)), map(_short, heads), fontsize=8)
        axis.set_xticks(range(len(layouts)), map(_short, layouts), fontsize=8, rotation=90)
        axis.tick_params(length=0)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
    return figure


def _short(label: str, most: int = 40) -> str:
    """A label that leaves room for the plot."""
    return label if len(label) <= most else label[: most - 1] + "…"


def _cell(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0)


def accuracy(run: Run, paint: Paint) -> "Figure | None":
    """Relative L2 error of every case in the order of ours, on a log scale: a panel per output, points per backend."""
    from matplotlib.figure import Figure

    names = columns(run)
    rows = [row for _, rows in blocks(run) for row in rows]
    outputs = dict.fromkeys(name for row in rows for record in row.values() for name in record.errors)
    panels = {output: found for output in outputs if (found := _errors(rows, names, output))}
    if run.kind.startswith("bench") or not panels:
        return None
    figure = Figure(figsize=(11, 2.7 * len(panels) + 0.5), layout="constrained")
    handles: dict[str, Any] = {}
    for axis, (output, found) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels.items(), strict=True):
        bounds = [(x, bound) for x, (bound, _) in enumerate(found) if bound]
        if bounds:
            look: dict[str, Any] = {"color": paint["muted"], "marker": "_", "linestyle": "", "markersize": 7}
            handles["bound"], *_ = axis.plot(*zip(*bounds, strict=True), **look)
        for index, name in reversed(list(enumerate(names))):
            dots = [(x, errors[name]) for x, (_, errors) in enumerate(found) if name in errors]
            if dots:
                look = {"color": paint[f"series{index % SERIES}"], "marker": "osD^vP"[index % SERIES], "linestyle": ""}
                look |= {"fillstyle": "full" if index == 0 else "none", "markersize": 4.5}
                handles[name], *_ = axis.plot(*zip(*dots, strict=True), **look)
        axis.set_title(output, fontsize=9, loc="left")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:.0e}")
        axis.set_xticks([])
        axis.margins(x=0.02)
    order = [name for name in (*names, "bound") if name in handles]
    figure.legend([handles[name] for name in order], map(_short, order), loc="outside upper left", ncols=len(order))
    figure.supxlabel(f"cases, by the error of {_short(names[0])}", fontsize=9)
    figure.supylabel("relative L2 error against float64", fontsize=9)
    return figure


def _errors(
    rows: Sequence[Mapping[str, Record]], names: Sequence[str], output: str
) -> list[tuple[float | None, dict[str, float]]]:
    """Per case the bound of ours, and the errors by backend that are more than zero; by the error of ours."""
    cases = []
    for row in rows:
        found = {name: record.errors[output].rel_l2 for name, record in row.items() if output in record.errors}
        errors = {name: error for name, error in found.items() if error}
        if errors:
            ours = row.get(names[0])
            cases.append((ours.bounds.get(output, ours.bound) if ours else None, errors))
    return sorted(cases, key=lambda case: case[1].get(names[0], math.inf))


PLOTS: dict[str, Callable[[Run, Paint], "Figure | None"]] = {
    "latency": latency,
    "speedup": speedup,
    "floor": floor,
    "accuracy": accuracy,
}
