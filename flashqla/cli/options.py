"""Options that several commands share, and what they mean: one flag, one meaning."""

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashqla.cases import SUITES, Case, read_cases, select, suite
from flashqla.cli import console
from flashqla.errors import ArgumentError, NothingToDo


class L2(StrEnum):
    cold = "cold"
    warm = "warm"


class Target(StrEnum):
    sm_90a = "sm_90a"


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


def finite(context: typer.Context, option: typer.CallbackParam, seconds: float) -> float:
    """A time that ends, and is not over at once. Raises ArgumentError."""
    if not 0 < seconds < math.inf:
        name = option.opts[0]
        raise ArgumentError(f"{name} takes seconds", given=f"{name} {seconds}", supported="a finite number above 0")
    return seconds


Texts = list[str] | None
SUITE_NAMES = ", ".join(SUITES)

SuiteOption = Annotated[Texts, typer.Option("--suite", metavar="NAME", help=f"One of {SUITE_NAMES}. Repeatable.")]
CasesOption = Annotated[
    Path | None, typer.Option("--cases", metavar="FILE", help="Cases of your own, from a TOML file; see the README.")
]
InputOption = Annotated[
    list[Path] | None,
    typer.Option("--input", metavar="FILE", help="A captured call, .safetensors or .pt; see the README. Repeatable."),
]
HeadsOption = Annotated[Texts, typer.Option("--heads", metavar="HK,HV", help="Keep these head counts. Repeatable.")]
LensOption = Annotated[
    Texts,
    typer.Option("--lens", metavar="LAYOUT", help="Keep these lengths, as 1x32768 or 4096+28672. Repeatable."),
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="TEXT", help="Keep models whose label has this.")]
PatternOption = Annotated[
    Texts,
    typer.Option("-k", metavar="PATTERN", help="Keep cases whose id or note has this; * and ?. Repeatable."),
]
BackendOption = Annotated[Texts, typer.Option("--backend", metavar="NAME", help="Run these only. Repeatable.")]
DeviceOption = Annotated[Device | None, typer.Option("--device", help="Where to run; by default a Hopper GPU if any.")]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the run as JSON; - is stdout, without the table."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="Seed of the inputs.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
NoColorOption = Annotated[
    bool, typer.Option("--no-color", callback=console.plain, is_eager=True, help="Plain text, as with NO_COLOR set.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Go on with an interrupted run, keeping what needs no second try."),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        callback=finite,
        metavar="SECONDS",
        help="For a case to run; as long for a backend to compile.",
    ),
]
CompileAheadOption = Annotated[
    bool,
    typer.Option(
        "--compile-ahead/--no-compile-ahead",
        help="Compile all peers first, side by side; without, each in its first row: for caches that are warm.",
    ),
]
InProcessOption = Annotated[bool, typer.Option("--in-process", help="No worker process and no timeout: for debugging.")]
TIMEOUT_S = 600.0
LONGEST = "each of at most 9 digits"  # of numbers in a list, see parse_numbers
MOST_REPEATS = 100_000  # of which a row takes hours
BudgetOption = Annotated[
    float,
    typer.Option(
        "--budget", callback=finite, metavar="SECONDS", help="For the samples of a row, all backends together."
    ),
]
BUDGET_S = 3.0
RooflineOption = Annotated[
    bool, typer.Option("--roofline", help="Add TFLOP/s, GB/s and percent of the least possible time.")
]
MemoryOption = Annotated[
    bool, typer.Option("--memory", help="Add what a call of each backend allocates at its peak; GPU only.")
]
DetailsOption = Annotated[
    bool, typer.Option("--details", help="Add the largest absolute error and the cosine of every output; verify only.")
]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="PATH", help="Write the table to a file as well.")]


def check_runs(files: Sequence[Path]) -> None:
    """Raise ArgumentError where one is named twice."""
    from flashqla.records import target

    if len(set(map(target, files))) < len(files):
        raise ArgumentError("a run is given twice", given=" ".join(map(str, files)), do="name each file once")


def parse_heads(texts: list[str]) -> list[tuple[int, int]]:
    """`2,8` -> (2, 8). Raises ArgumentError."""
    pairs = []
    for text in texts:
        numbers = parse_numbers(text)
        if len(numbers) != 2:
            supported = f"--heads 2,8, {LONGEST}"
            raise ArgumentError("--heads takes two numbers", given=f"--heads {text}", supported=supported)
        pairs.append((numbers[0], numbers[1]))
    return pairs


def parse_numbers(text: str) -> tuple[int, ...]:
    """`2,8` -> (2, 8); nothing for a text that holds anything but numbers of at most 9 digits."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(map(int, parts)) if all(re.fullmatch("[0-9]{1,9}", part) for part in parts) else ()


def chosen_cases(
    suites: Sequence[str],
    *,
    file: Path | None = None,
    captured: Sequence[Path] = (),
    heads: Texts = None,
    lens: Texts = None,
    model: str | None = None,
    pattern: Texts = None,
) -> tuple[Case, ...]:
    """Cases of suites, of a file and of captured calls that pass the filters, each id once.

    Raises NothingToDo when none does, or when a value of a filter matches none: it may be mistyped.
    """
    found = [case for name in suites for case in suite(name)]
    if file:
        found += read_cases(file)
    if captured:
        from flashqla import captures  # and with it torch

        found += [captures.read(path).case for path in captured]
    everything = {case.id: case for case in found}.values()
    pairs = parse_heads(heads or [])
    kept = select(everything, heads=pairs, lens=lens or (), model=model, pattern=pattern or ())
    idle = [f"--heads {hk},{hv}" for hk, hv in pairs if not select(everything, heads=[(hk, hv)])]
    idle += [f"--lens {layout}" for layout in lens or () if not select(everything, lens=[layout])]
    idle += [f"-k {part}" for part in pattern or () if not select(everything, pattern=[part])]
    if not kept or idle:
        sources = {"--suite": suites, "--cases": [file] if file else [], "--input": captured}
        filters = {"--heads": heads, "--lens": lens, "--model": [model] if model else [], "-k": pattern}
        given = " ".join(f"{flag} {value}" for flag, values in (sources | filters).items() for value in values or ())
        look = " ".join(f"{flag} {value}" for flag in ("--suite", "--cases") for value in sources[flag])
        raise NothingToDo(
            "a filter matches no case" if kept else "no case is left",
            given=", ".join(idle) if kept else given,
            do=f"look at: flashqla cases {look}".rstrip(),
        )
    return kept


def sources(suites: Sequence[str], file: Path | None = None, captured: Sequence[Path] = ()) -> dict[str, str]:
    """What the cases of a run come from, in short, for its record."""
    names = {"suite": suites, "cases": [file.name] if file else [], "input": [path.name for path in captured]}
    return {name: "+".join(values) for name, values in names.items() if values}
