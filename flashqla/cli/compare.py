"""`flashqla compare` and `flashqla calibrate`: two runs, and what differences mean nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashqla.cli import console, options
from flashqla.errors import NothingToDo

if TYPE_CHECKING:
    from flashqla.compare import Thresholds, Verdict
    from flashqla.records import Run

EXAMPLES = """\b
Exit codes:
  0  nothing got worse
  1  a row is slower or worse, or failed; with --strict also unclear or missing
  2  wrong usage, or a file that cannot be read
  3  runs that cannot be compared: other L2 mode, clock or hardware
  4  nothing was compared, more than half of the rows could not be judged, or there is no baseline

\b
Examples:
  flashqla compare main.json branch.json --fail 5%
  flashqla compare main.json branch.json --format markdown
"""
CALIBRATE_EXAMPLES = """\b
Examples:
  flashqla calibrate first.json second.json third.json
  flashqla calibrate first.json second.json > thresholds.toml
"""

BackendOption = Annotated[
    options.Texts, typer.Option("--backend", metavar="NAME", help="Rows of these only. Repeatable.")
]


class Format(StrEnum):
    text = "text"
    markdown = "markdown"
    json = "json"
    junit = "junit"
    github = "github"


class Allowed(StrEnum):
    l2 = "l2"
    clock = "clock"
    hardware = "hardware"


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The baseline: a run kept with --json.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run to judge.")],
    fail: Annotated[
        str | None, typer.Option("--fail", metavar="SHARE", help="Smallest change that counts; 5% by default.")
    ] = None,
    fail_calls: Annotated[
        str | None,
        typer.Option(
            "--fail-calls", metavar="SHARE", help="Likewise for calls from Python, all rows together; 25% by default."
        ),
    ] = None,
    thresholds: Annotated[
        Path | None, typer.Option("--thresholds", metavar="PATH", help="TOML file with thresholds per case.")
    ] = None,
    backend: BackendOption = None,
    allow: Annotated[
        list[Allowed] | None, typer.Option("--allow", help="Compare although this differs. Repeatable.")
    ] = None,
    allow_missing_baseline: Annotated[
        bool, typer.Option("--allow-missing-baseline", help="No baseline, or none with these rows, is no error.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Unclear and missing rows, and peers, count too.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List rows that stayed the same as well.")] = False,
    form: Annotated[Format, typer.Option("--format", help="Of the result on stdout.")] = Format.text,
    no_color: options.NoColorOption = False,
) -> None:
    """Compare two runs, row by row.

    A row is slower if the ratio of medians and its interval both lie above the threshold. Calls from Python, with the
    host's work, are compared apart: over all rows, and for one by four times that threshold. Peers and the forms
    in PyTorch are shown and do not count, unless flashqla did not run. Works without PyTorch and without a GPU.
    """
    from flashqla import compare as comparing
    from flashqla.records import read
    from flashqla.verdicts import FORMATS

    limits = comparing.read_thresholds(thresholds) if thresholds else comparing.Thresholds()
    limits = replace(limits, default=comparing.threshold(fail)) if fail is not None else limits
    limits = replace(limits, calls=comparing.threshold(fail_calls)) if fail_calls is not None else limits
    after = comparing.only(read(new), backend or ())
    before = comparing.only(_baseline(old, after, allow_missing_baseline), backend or ())
    verdicts = comparing.compare(before, after, limits, [mix.value for mix in allow or ()])
    if strict:
        verdicts = [replace(row, counts=True) for row in verdicts]
    console.result(FORMATS[form.value](before, after, verdicts, everything))
    _warn_of_idle_patterns(limits, verdicts)
    worse = Counter(
        row.word for row in verdicts if row.counts and (row.word in comparing.REGRESSIONS or (strict and _open(row)))
    )
    if worse:
        console.note("exit code 1: " + ", ".join(f"{count} {word}" for word, count in worse.items()))
        raise typer.Exit(1)
    if not allow_missing_baseline and not any(row.word in comparing.COMPARED for row in verdicts):
        raise NothingToDo(
            "no row was compared",
            given=f"{old} has {_rows(before, backend)}, {new} has {_rows(after, backend)}",
            do="compare runs of the same suite and backends, or pass --allow-missing-baseline",
        )
    tally = comparing.tally(verdicts)
    if not tally.enough:
        what = "less than half of the rows" if tally.told else "no row"
        do = "make both runs again"
        if after.kind.startswith("bench"):
            do += ", such as with --budget 30 --repeats 100"
            do += "" if thresholds else ", or take the thresholds of flashqla calibrate"
        elif after.interrupted:
            do = f"go on with the interrupted run, by its command and --resume {new}"
        raise NothingToDo(f"{what} could be judged", given=tally.line, do=do)


def _open(row: "Verdict") -> bool:
    """Whether nothing is known of a row that --strict asks about: not of calls, of which no run has more to tell."""
    from flashqla.compare import CALL_MS

    return row.word in ("unclear", "missing") and row.quantity != CALL_MS


def _rows(run: "Run", backends: options.Texts) -> str:
    """How many rows a run has, of the backends asked for, and the first of them."""
    of = f" of {' or '.join(backends)}" if backends else ""
    first = "".join(f", the first is {record.case_id} {record.backend}" for record in run.records[:1])
    return f"{len(run.records)} rows{of}{first}"


def _baseline(path: Path, new: "Run", allowed: bool) -> "Run":
    """The old run; where there is none and that is allowed, a run without rows."""
    from flashqla.records import read, target

    if target(path).exists():
        return read(path)
    if not allowed:
        raise NothingToDo(
            "there is no baseline yet",
            given=f"{path}: no such file",
            do="keep one with --json, or pass --allow-missing-baseline until there is one",
        )
    console.note(f"there is no baseline yet ({path}): every row is new")
    return new.model_copy(update={"records": []})


def _warn_of_idle_patterns(limits: "Thresholds", verdicts: Sequence["Verdict"]) -> None:
    for pattern in limits.cases:
        if not any(fnmatchcase(row.case_id, pattern) for row in verdicts):
            console.note(f"no row has the threshold of {pattern!r}")


def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Runs of one build on one machine.")],
    backend: BackendOption = None,
    no_color: options.NoColorOption = False,
) -> None:
    """Suggest thresholds from runs of the same build.

    From how far their times lie apart, and half as much again. The result is a file for compare --thresholds. Three
    runs or more, taken at different times of the day, show more of the noise than two in a row. Runs so noisy that a
    slow-down of 10% would pass get a warning, also in the file.
    """
    from flashqla import compare as comparing
    from flashqla.records import read

    options.check_runs(runs)
    loaded = [comparing.only(read(path), backend or ()) for path in runs]
    limits = comparing.calibrate(loaded)
    little = comparing.guards_little(limits)
    env = loaded[0].environment
    console.result(
        f"# Half as much again as the times of {len(loaded)} runs of one build lay apart.\n"
        f"# flashqla {env.flashqla}, kernels {env.kernel_fingerprint}, {env.gpu or env.cpu}\n"
        + f"# Beware: {little}.\n" * bool(little)
        + f"{comparing.to_toml(limits)}"
    )
    if little:
        console.note(little)
        console.hint("calibrate with runs of a longer --budget and more --repeats, while the machine does nothing else")
