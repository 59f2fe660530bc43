"""Two runs -> one verdict per row.

A time is compared by the ratio of medians, new / old, with a bootstrap interval from the raw samples of both. A row is
`slower` when ratio and interval both lie above the threshold: the one alone may be noise, the other alone too small
to care. Errors of a verify run are compared by their ratio. Rows without a number, for whatever reason, get a verdict
and never enter a statistic.

Calls from Python have verdicts of their own. A run has one number for each, the median of a few, which the host
scatters: on one build up to a third either way (results/*_H200.json, FlashInfer in both). The median of their ratios
over all rows scatters little, and what slows the host down slows all rows: it is judged by the threshold for calls and
its interval over rows; one row alone by four times that threshold, twice the time.
"""

import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flashqla.cases import read_toml
from flashqla.device import OURS
from flashqla.errors import ArgumentError, NothingToDo, UnsupportedError
from flashqla.records import Record, Run, Timing, judged, went_wrong

Word = Literal["failed", "slower", "worse", "unclear", "missing", "new", "same", "better", "faster"]
WORDS: tuple[Word, ...] = get_args(Word)  # worst first
REGRESSIONS = ("failed", "slower", "worse")
COMPARED = ("slower", "worse", "unclear", "same", "better", "faster")

Mix = Literal["l2", "clock", "hardware"]  # conditions under which times are not comparable

MS, CALL_MS = "ms", "call ms"  # quantities
ALL_CALLS = "all calls"  # stands for a case id
NO_ROW = "no such row"
CUT_OFF = "not reached: the run was interrupted"

DEFAULT_THRESHOLD = 0.05
CALLS_THRESHOLD = 0.25  # of the median call of all rows
ONE_CALL = 4  # times that threshold is what one row has to move by: with noise of 12% on either side that is 4 sigma
CONFIDENCE = 0.99  # not 0.95: a sweep asks hundreds of rows at once
RESAMPLES = 2000
MIN_SAMPLES = 5  # fewer say nothing about noise
NEGLIGIBLE = 1e-3  # share of the allowed error: below it all errors are the same
MARGIN = 1.5  # of a suggested threshold over the widest spread seen: a few runs do not show the widest there is
USELESS = 0.10  # a threshold that lets a slow-down of so much pass guards nothing
ENOUGH = 0.5  # share of rows that must have been judged before a comparison says that nothing got worse
COVERED = 0.9  # share of cases that the suggested default is enough for; the others get their own


@dataclass(frozen=True)
class Verdict:
    """What became of one row: a case, a backend and a direction."""

    case_id: str
    backend: str
    direction: str
    word: Word
    counts: bool  # False for a peer or a reference, whose rows are shown but fail nothing
    threshold: float
    quantity: str = ""  # "ms", "call ms", or the tensor whose relative L2 error grew most
    old: float | None = None
    new: float | None = None
    ratio: float | None = None  # new / old
    interval: tuple[float, float] | None = None  # of the ratio
    why: str = ""


@dataclass(frozen=True)
class Thresholds:
    """Relative changes that matter: 0.05 is 5 percent."""

    default: float = DEFAULT_THRESHOLD
    cases: Mapping[str, float] = field(default_factory=dict)  # case id or pattern (* and ?) -> threshold
    calls: float = CALLS_THRESHOLD

    def of(self, case_id: str) -> float:
        """Of a case: the last pattern that fits decides."""
        return [self.default, *(value for pattern, value in self.cases.items() if fnmatchcase(case_id, pattern))][-1]


def compare(old: Run, new: Run, thresholds: Thresholds | None = None, allow: Collection[Mix] = ()) -> list[Verdict]:
    """A verdict per row of either run: rows that count first, and of these the worst first. Then, in that order, those
    of calls that can be judged.

    Raises ArgumentError for a bench run against a verify run, and UnsupportedError when rows were timed under other
    conditions that `allow` does not name.
    """
    if old.kind != new.kind:
        raise ArgumentError("these runs are of different commands", given=f"{_command(old)} against {_command(new)}")
    thresholds = thresholds or Thresholds()
    before, after = _rows(old), _rows(new)
    mixes = _mixes(old, new)
    _refuse_hardware(old, new, mixes, allow)
    _refuse({key: found for key, mix in mixes.items() if (found := {k: v for k, v in mix.items() if k not in allow})})
    ours = {*judged(old), *judged(new)}
    ours = ours & {OURS} or ours  # what it is compared with, peers and the forms in PyTorch, fails nothing beside it
    verdicts = [
        Verdict(
            *key,
            counts=key[1] in ours,
            threshold=thresholds.of(key[0]),
            **_change(before.get(key), after.get(key), thresholds.of(key[0]), [*mixes.get(key, {}).values()]),
        )
        for key in {**before, **after}
    ]
    if new.interrupted:
        verdicts = [replace(row, why=CUT_OFF) if row.why == NO_ROW else row for row in verdicts]
    if old.environment.cpu == new.environment.cpu:
        calls = _calls({key: (before[key], after[key]) for key in before.keys() & after.keys() if not mixes.get(key)})
        verdicts += _change_of_calls(calls, ours, thresholds.calls)
    return sorted(
        verdicts,
        key=lambda row: (
            row.quantity == CALL_MS,
            not row.counts,
            WORDS.index(row.word),
            row.case_id != ALL_CALLS,
            -(row.ratio or 0),
        ),
    )


class Tally(NamedTuple):
    """Of how many rows it was asked whether they got worse, how many told, and a line about the others, if any."""

    told: int
    asked: int
    line: str

    @property
    def enough(self) -> bool:
        return self.told >= ENOUGH * self.asked


def tally(verdicts: Sequence[Verdict]) -> Tally:
    """Rows that count, calls aside.

    One that the new run does not have counts as not judged where it should have: that run was interrupted, or the
    backend gave no result. A run of fewer cases is a choice.
    """
    rows = [row for row in verdicts if row.counts and row.quantity != CALL_MS]
    unclear = [row for row in rows if row.word == "unclear"]
    lost = sum(row.word == "missing" and row.why != NO_ROW for row in rows)
    told = sum(row.word in COMPARED or row.word == "failed" for row in rows) - len(unclear)
    asked = told + len(unclear) + lost
    if told == asked:
        return Tally(told, asked, "")
    few = sum(row.quantity == MS and row.interval is None for row in unclear)
    found = f"{len(unclear)} unclear" + f", {few} of them with too few samples" * bool(few) if unclear else ""
    words = ", ".join(filter(None, [found, f"{lost} missing" * bool(lost)]))
    do = "; measure longer, with --budget and --repeats" if unclear and unclear[0].quantity == MS else ""
    return Tally(told, asked, f"{told} of {asked} rows could be judged: {words}{do}")


def changes(old: Run, new: Run) -> list[str]:
    """What else differs between two runs, as `torch 2.13.0 -> 2.14.0`."""
    facts = [
        {**asdict(run.environment), **run.environment.peers, **run.settings, "interrupted": run.interrupted}
        for run in (old, new)
    ]
    names = [name for name in {**facts[0], **facts[1]} if name != "peers"]
    pairs = [(name, *(found.get(name) for found in facts)) for name in names]
    return [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]


def only(run: Run, backends: Collection[str]) -> Run:
    """A run with the records of some backends; of all when none is named."""
    kept = [record for record in run.records if not backends or record.backend in backends]
    return run.model_copy(update={"records": kept})


# Rows

Key = tuple[str, str, str]  # case id, backend, direction


def _command(run: Run) -> str:
    return run.kind.replace("-", " ")


def _rows(run: Run) -> dict[Key, Record]:
    return {(record.case_id, record.backend, record.direction): record for record in run.records}


def _change(before: Record | None, after: Record | None, threshold: float, mix: list[str]) -> dict[str, Any]:
    """Fields of a verdict that depend on the two records."""
    absent, lost = _lacks(before), _lacks(after)
    if after and went_wrong(after):
        return {"word": "failed", "why": lost + (", as before" if before and went_wrong(before) else "")}
    if lost or after is None:
        return {"word": "missing", "why": lost}
    if absent or before is None:
        return {"word": "new", "why": f"before: {absent}" if before else ""}
    if before.timing and after.timing:
        throttled = any(record.clocks and record.clocks.throttle for record in (before, after))
        why = [*mix, *["clocks were throttled"] * throttled]
        return _change_of_time(before.timing, after.timing, threshold, why)
    return _change_of_errors(before, after, threshold)


def _lacks(record: Record | None) -> str:
    """Why a row has no number to compare; nothing when it has one."""
    if record is None:
        return NO_ROW
    if record.status != "ok":
        return f"{record.status}: {record.reason}" if record.reason else record.status
    if record.passed is False:
        return record.reason or "wrong result"
    if record.deterministic is False:
        return "not deterministic"
    timed = record.timing and record.timing.gpu_ms
    return "no time" if record.command == "bench" and not timed else ""


def _change_of_time(before: Timing, after: Timing, threshold: float, why: list[str]) -> dict[str, Any]:
    old, new = before.gpu_ms or math.nan, after.gpu_ms or math.nan
    ratio, interval = new / old, _interval(before.samples, after.samples)
    word = _word(ratio, interval, threshold) if interval else "unclear"
    why = why if interval else [*why, f"fewer than {MIN_SAMPLES} samples"]
    numbers = {"old": old, "new": new, "ratio": ratio, "interval": interval}
    return {"word": word, "quantity": MS, **numbers, "why": ", ".join(why)}


def _word(ratio: float, interval: tuple[float, float], threshold: float) -> Word:
    limit = 1 + threshold
    if min(ratio, interval[0]) > limit:
        return "slower"
    if max(ratio, interval[1]) < 1 / limit:
        return "faster"
    return "same" if 1 / limit <= interval[0] and interval[1] <= limit else "unclear"


def _interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval of the ratio of medians; the same samples always give the same one."""
    if min(len(old), len(new)) < MIN_SAMPLES:
        return None
    # Here, because both together take most of a second to import.
    import numpy as np
    from scipy.stats import bootstrap

    def ratio(a: Any, b: Any, axis: int) -> Any:
        return np.median(b, axis=axis) / np.median(a, axis=axis)

    # Percentile, not BCa: the jackknife in BCa does not hold for medians.
    found = bootstrap(
        (old, new), ratio, method="percentile", confidence_level=CONFIDENCE, n_resamples=RESAMPLES, rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def _calls(rows: Mapping[Key, tuple[Record, Record]]) -> dict[Key, tuple[float, float]]:
    """Old and new time of the calls that can be judged: right results on both sides, of a GPU that was steady."""
    return {
        key: (before.timing.call_ms, after.timing.call_ms)
        for key, (before, after) in rows.items()
        if before.timing and before.timing.call_ms and after.timing and after.timing.call_ms
        if not any(_lacks(record) or went_wrong(record) or _unsteady(record) for record in (before, after))
    }


def _unsteady(record: Record) -> bool:
    """Whether the time of a call says little: on a CPU it is the time of the op, and what disturbed the samples of the
    device, or cannot be told from them, may have disturbed the calls beside them."""
    timing = record.timing
    if timing is None or timing.clock == "wall" or timing.gpu_ms is None or timing.gpu_ms_iqr is None:
        return True
    throttled = bool(record.clocks and record.clocks.throttle)
    return throttled or len(timing.samples) < MIN_SAMPLES or timing.gpu_ms_iqr > DEFAULT_THRESHOLD * timing.gpu_ms


def _change_of_calls(
    calls: Mapping[Key, tuple[float, float]], ours: Collection[str], threshold: float
) -> list[Verdict]:
    """A verdict per row, and one for all rows of a backend where they are enough to show how they scatter."""
    verdicts = []
    by_backend: dict[tuple[str, str], list[float]] = {}
    one = 1 + ONE_CALL * threshold
    for (case_id, backend, direction), (old, new) in calls.items():
        ratio = new / old
        by_backend.setdefault((backend, direction), []).append(ratio)
        word: Word = "slower" if ratio > one else "faster" if ratio < 1 / one else "same"
        verdicts.append(
            Verdict(
                case_id, backend, direction, word, backend in ours, one - 1,
                quantity=CALL_MS, old=old, new=new, ratio=ratio,
            )
        )  # fmt: skip
    for (backend, direction), ratios in by_backend.items():
        if interval := _interval([1.0] * len(ratios), ratios):
            ratio = statistics.median(ratios)
            verdicts.append(
                Verdict(
                    ALL_CALLS, backend, direction, _word(ratio, interval, threshold), backend in ours, threshold,
                    quantity=CALL_MS, ratio=ratio, interval=interval, why=f"the median of {len(ratios)} rows",
                )
            )  # fmt: skip
    return verdicts


def _change_of_errors(before: Record, after: Record, threshold: float) -> dict[str, Any]:
    if before.passed is None or after.passed is None:  # the rule itself diverges there, so errors mean nothing
        return {"word": "unclear", "why": "not judged"}
    gone = [name for name in before.errors if name not in after.errors]
    pairs = [(name, error.rel_l2, after.errors[name].rel_l2) for name, error in before.errors.items() if not gone]
    least = max(NEGLIGIBLE * (after.bound or 0.0), sys.float_info.min)
    ratios = [
        (max(new, least) / max(old, least), name, old, new)
        for name, old, new in pairs
        if old is not None and new is not None
    ]
    if not ratios:
        return {"word": "unclear" if gone else "same", "why": f"not compared: {', '.join(gone)}" if gone else ""}
    ratio, name, old, new = max(ratios)
    word = "worse" if ratio > 1 + threshold else "better" if ratio < 1 / (1 + threshold) else "same"
    return {"word": word, "quantity": name, "old": old, "new": new, "ratio": ratio}


# Conditions


def _mixes(old: Run, new: Run) -> dict[Key, dict[Mix, str]]:
    """Rows that were timed under other conditions, and which these are."""
    before, after = _rows(old), _rows(new)
    found: dict[Key, dict[Mix, str]] = {}
    for key in before.keys() & after.keys():
        a, b = before[key].timing, after[key].timing
        if a and b and not _lacks(before[key]) and not _lacks(after[key]):
            conditions: dict[Mix, tuple[str, str]] = {
                "l2": (f"{a.l2} L2", f"{b.l2} L2"),
                "clock": (f"{a.clock} clock", f"{b.clock} clock"),
                "hardware": (_hardware(old, a), _hardware(new, b)),
            }
            found[key] = {name: f"{x} against {y}" for name, (x, y) in conditions.items() if x != y}
    return found


def _hardware(run: Run, timing: Timing) -> str:
    return run.environment.cpu if timing.clock == "wall" else run.environment.gpu or "unknown GPU"


def _refuse_hardware(old: Run, new: Run, mixes: Mapping[Key, Mapping[Mix, str]], allow: Collection[Mix]) -> None:
    """Other hardware comes first: it explains all else that differs, rows included."""
    a, b = ({_hardware(run, record.timing) for record in run.records if record.timing} for run in (old, new))
    if a and b and not a & b and "hardware" not in allow:
        names = {"hardware"} | {name for mix in mixes.values() for name in mix} - {*allow}
        raise UnsupportedError(
            "these runs were measured on different hardware",
            given=f"{', '.join(sorted(a))} against {', '.join(sorted(b))}",
            do=f"measure both on one machine, or allow it: {' '.join(f'--allow {name}' for name in sorted(names))}",
        )


def _refuse(mixes: Mapping[Key, Mapping[Mix, str]]) -> None:
    if mixes:
        texts = dict.fromkeys(text for mix in mixes.values() for text in mix.values())
        names = dict.fromkeys(name for mix in mixes.values() for name in mix)
        raise UnsupportedError(
            "times of these runs cannot be compared",
            given=f"{'; '.join(sorted(texts))} (rows: {len(mixes)}, one is {' '.join(min(mixes))})",
            do=f"measure again as before, or allow it: {' '.join(f'--allow {name}' for name in sorted(names))}",
        )


# Thresholds


def threshold(value: object) -> float:
    """`"5%"` or `0.05` -> 0.05. Raises ArgumentError."""
    number = str(value).strip()
    try:
        found = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        found = math.nan
    # A bare 5 is refused, because it is more likely to mean 5% than 500%.
    if not (0 < found < 1 or (number.endswith("%") and 1 <= found < math.inf)):
        raise ArgumentError(
            "not a threshold", given=number, supported="percent, such as 5%, or a share below 1, such as 0.05"
        )
    return found


def read_thresholds(path: Path) -> Thresholds:
    """Thresholds from a TOML file: `default`, `calls`, and a table `cases` of ids or patterns. Raises ArgumentError."""
    content = read_toml(path, "thresholds")
    cases = content.get("cases", {})
    unknown = [name for name in content if name not in ("default", "calls", "cases")]
    if unknown or not isinstance(cases, dict):
        raise ArgumentError(
            "not a thresholds file",
            given=f"{path}: {', '.join(unknown) or 'cases is no table'}",
            supported='default = "5%", calls = "25%", and a table [cases] with lines like "hk2-hv8/*" = "8%"',
        )
    default = threshold(content.get("default", DEFAULT_THRESHOLD))
    calls = threshold(content.get("calls", CALLS_THRESHOLD))
    return Thresholds(default, {pattern: threshold(value) for pattern, value in cases.items()}, calls)


def calibrate(runs: Sequence[Run]) -> Thresholds:
    """Thresholds that repeated runs of one build stay below, from how far the medians of each row lie apart, and their
    calls.

    Raises ArgumentError unless all are bench runs of one build, UnsupportedError when they were timed under different
    conditions, NothingToDo when no row has a time in two of them.
    """
    builds = dict.fromkeys(
        f"{_command(run)} of {run.environment.flashqla} ({run.environment.kernel_fingerprint})" for run in runs
    )
    if len(runs) < 2 or len(builds) > 1 or not runs[0].kind.startswith("bench"):
        raise ArgumentError(
            "calibration takes two or more bench runs of one build", given=f"{len(runs)}: {', '.join(builds)}"
        )
    times: dict[Key, list[float]] = {}
    for run in runs:
        _refuse({key: mix for key, mix in _mixes(runs[0], run).items() if mix})
        for key, record in _rows(run).items():
            if key[1] in judged(run) and record.timing and record.timing.gpu_ms and not _lacks(record):
                times.setdefault(key, []).append(record.timing.gpu_ms)
    spreads: dict[str, float] = {}
    for (case_id, *_), values in times.items():
        if len(values) > 1:
            spreads[case_id] = max(spreads.get(case_id, 0.0), max(values) / min(values) - 1)
    if not spreads:
        raise NothingToDo("no row has a time in two of these runs")
    needed = {case_id: _with_margin(spread) for case_id, spread in spreads.items()}
    default = sorted(needed.values())[math.ceil(COVERED * len(needed)) - 1]
    return Thresholds(default, {name: value for name, value in needed.items() if value > default}, _calls_apart(runs))


def _with_margin(spread: float) -> float:
    """In whole percent, at least one; rounded first, because 1.3 / 1.0 - 1 is a little over 0.3."""
    return max(math.ceil(round(100 * MARGIN * spread, 6)), 1) / 100


def _calls_apart(runs: Sequence[Run]) -> float:
    """A threshold for calls that no two of these runs come near; the default where their calls cannot be compared."""
    pairs = ((_rows(old), _rows(new)) for old, new in combinations(runs, 2))
    changes = [
        (max(verdict.ratio, 1 / verdict.ratio) - 1) / (1 if verdict.case_id == ALL_CALLS else ONE_CALL)
        for old, new in pairs
        for verdict in _change_of_calls(
            _calls({key: (old[key], new[key]) for key in old.keys() & new.keys()}), judged(runs[0]), CALLS_THRESHOLD
        )
        if verdict.counts and verdict.ratio
    ]
    return _with_margin(max(changes)) if changes else CALLS_THRESHOLD


def guards_little(thresholds: Thresholds) -> str:
    """Where a slow-down that any gate should stop would pass; empty where none would."""
    wide = [case_id for case_id, share in thresholds.cases.items() if share >= USELESS]
    if thresholds.default < USELESS and not wide:
        return ""
    where = "in every case" if thresholds.default >= USELESS else f"in {len(wide)} cases, such as {wide[0]}"
    return f"these thresholds guard little: a slow-down of {USELESS:.0%} passes {where}"


def to_toml(thresholds: Thresholds) -> str:
    """Thresholds as the file that `read_thresholds` reads."""
    lines = [f'"{case_id}" = "{value:.0%}"' for case_id, value in thresholds.cases.items()]
    calls = [f'calls = "{thresholds.calls:.0%}"'] * (thresholds.calls != CALLS_THRESHOLD)
    return "\n".join([f'default = "{thresholds.default:.0%}"', *calls, *["", "[cases]"] * bool(lines), *lines]) + "\n"
