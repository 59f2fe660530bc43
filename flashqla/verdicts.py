"""Verdicts of a comparison, for people and for machines: text, Markdown, JSON, JUnit XML, GitHub annotations."""

import json as json_text
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Literal

from flashqla.compare import (
    ALL_CALLS,
    CALL_MS,
    COMPARED,
    CONFIDENCE,
    MS,
    REGRESSIONS,
    WORDS,
    Verdict,
    changes,
    tally,
)
from flashqla.device import PEERS
from flashqla.junit import Outcome, suite
from flashqla.junit import text as junit_text
from flashqla.records import Run
from flashqla.tables import Page, Table
from flashqla.tables import markdown as page_markdown
from flashqla.tables import text as page_text

Render = Callable[[Run, Run, Sequence[Verdict], bool], str]


def text(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """A line per row, worst first, and a count per backend. Rows that stayed the same only with `everything`."""
    return page_text(_page(old, new, verdicts, everything))


def markdown(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """The same for a pull request or a job summary, counts first."""
    return page_markdown(_page(old, new, verdicts, everything))


def json(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """All rows with all numbers, and what is known of both runs."""
    runs = {name: run.model_dump(mode="json", exclude={"records"}) for name, run in (("old", old), ("new", new))}
    counts = {backend: dict(count) for backend, count in _counts(verdicts).items()}
    return json_text.dumps({**runs, "counts": counts, "rows": [asdict(row) for row in verdicts]}, indent=2) + "\n"


def junit(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """A test case per row. One that counts and got worse is a failure; one that could not be compared is skipped.

    Where too few rows could be judged, one test more fails: a suite of skipped tests would look as if all was well.
    """
    outcomes = [
        Outcome(
            row.backend,
            f"{row.case_id} {row.direction}{' call' * (row.quantity == CALL_MS)}",
            _result(row),
            row.word,
            _message(row),
        )
        for row in verdicts
    ]
    told = tally(verdicts)
    if not told.enough:
        outcomes.append(Outcome("flashqla compare", "rows that could be judged", "failure", "unclear", told.line))
    return junit_text(suite(f"flashqla compare {new.kind}", new.started.isoformat(), outcomes))


def _result(row: Verdict) -> Literal["passed", "failure", "skipped"]:
    if row.word in REGRESSIONS:
        return "failure" if row.counts else "passed"
    return "skipped" if row.word in ("missing", "unclear") else "passed"


def github(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """Workflow commands of GitHub Actions: errors for what fails the gate, warnings for what could not be compared."""
    lines = [f"::notice title=flashqla compare::{_data('; '.join(_summary(verdicts)))}"]
    for row in verdicts if everything else _telling(verdicts):
        regressed = row.word in REGRESSIONS
        if regressed or row.word in ("missing", "unclear"):
            level = "error" if regressed and row.counts else "warning"
            title = _data(f"{row.backend} {row.word}").replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{level} title={title}::{_data(f'{row.case_id}: {_message(row)}')}")
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Render] = {
    "text": text,
    "markdown": markdown,
    "json": json,
    "junit": junit,
    "github": github,
}


def _page(old: Run, new: Run, verdicts: Sequence[Verdict], everything: bool) -> Page:
    shown, timed = verdicts, new.kind.startswith("bench")
    rows, calls = _apart(verdicts if everything else _telling(verdicts))
    tables = [_table(rows, "ms" if timed else "error", timed)] * bool(rows)
    tables += [_table(calls, CALL_MS, True, "Calls from Python, the host's work included")] * bool(calls)
    verdicts, all_calls = _apart(verdicts)
    hidden = Counter(row.word for row in verdicts) - Counter(row.word for row in rows)
    alone = ", ".join(f"{count} {word}" for word, count in hidden.items() if word != "same")
    idle = dict.fromkeys("peers" if row.backend in PEERS else row.backend for row in verdicts if not row.counts)
    legend = [
        *[
            "ratio: median time, new / old. "
            f"interval: where a bootstrap of the samples puts it, with {CONFIDENCE:.0%} confidence.",
            "slower, faster: ratio and interval lie beyond the threshold. same: both lie within. unclear: neither.",
        ]
        * timed,
        *["error: relative L2, of the output whose error grew most. worse, better: beyond the threshold."]
        * (not timed),
        f"Thresholds: {_thresholds(verdicts)}.",
        *[f"Those of calls: {_thresholds(all_calls)}. Calls are not judged where the device was unsteady."]
        * bool(all_calls),
        *[f"Rows of {', '.join(idle)} are shown and fail nothing."] * bool(idle),
        *[f"Rows that stayed the same are not listed: {hidden['same']} (--all lists them)."] * bool(hidden["same"]),
        *[f"No row has a result in both runs. Those of one alone are not listed: {alone} (--all lists them)."]
        * bool(alone),
    ]
    facts = {"old": _identity(old), "new": _identity(new), "changed": _wrapped(changes(old, new)) or "nothing"}
    return Page(f"flashqla compare {new.kind.replace('-', ' ')}", facts, tables, legend, _summary(shown))


def _apart(verdicts: Sequence[Verdict]) -> tuple[list[Verdict], list[Verdict]]:
    """Verdicts on rows, and those on calls."""
    return (
        [row for row in verdicts if row.quantity != CALL_MS],
        [row for row in verdicts if row.quantity == CALL_MS],
    )


def _table(rows: Sequence[Verdict], unit: str, timed: bool, title: str = "") -> Table:
    head = ["case", "backend", f"old {unit}", f"new {unit}", "ratio", *["interval"] * timed, "verdict", "note"]
    cells = [
        [
            row.case_id,
            row.backend,
            _number(row, row.old),
            _number(row, row.new),
            _ratio(row),
            *[_interval(row)] * timed,
            row.word,
            _note(row),
        ]
        for row in rows
    ]
    return Table([head], cells, title, left=(0, 1, len(head) - 2, len(head) - 1))


def _wrapped(changed: Sequence[str]) -> str:
    """On lines that a terminal holds, below each other; Markdown joins them again."""
    return fill(", ".join(changed), 108, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)


def _telling(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Rows to list: not those that stayed the same, nor, where no row can be compared, all that has no counterpart."""
    idle = {"same"} if any(row.word in COMPARED for row in verdicts) else {"missing", "new"}
    return [row for row in verdicts if row.word not in idle]


def _identity(run: Run) -> str:
    if not run.records:
        return "no rows"
    env = run.environment
    revision = f" (git {env.git_revision})" if env.git_revision else ""
    where = env.gpu or env.cpu
    interrupted = ", interrupted" if run.interrupted else ""
    return (
        f"{run.started.isoformat()}, flashqla {env.flashqla}{revision}, {where}, {len(run.records)} rows{interrupted}"
    )


def _counts(verdicts: Sequence[Verdict]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for row in verdicts:
        if row.case_id == ALL_CALLS:
            continue
        who = f"{row.backend}, calls" if row.quantity == CALL_MS else row.backend
        counts.setdefault(who, Counter())[row.word] += 1
    return counts


def _summary(verdicts: Sequence[Verdict]) -> list[str]:
    """How many rows could not be judged, if any; then a line per backend, those that count first."""
    line = tally(verdicts).line
    idle = {row.backend for row in verdicts if not row.counts}
    all_calls = {
        f"{row.backend}, calls": f"; all together {row.word}, {_ratio(row)} ({_interval(row)})"
        for row in verdicts
        if row.case_id == ALL_CALLS
    }
    counts = [
        f"{backend}{_role(backend) if backend.removesuffix(', calls') in idle else ''}: "
        + ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])
        + all_calls.get(backend, "")
        for backend, count in _counts(verdicts).items()
    ]
    return [*[f"{line}."] * bool(line), *counts] or ["no rows"]


def _role(backend: str) -> str:
    """What a backend is whose rows do not count."""
    return " (a peer)" if backend.removesuffix(", calls") in PEERS else " (does not count)"


def _message(row: Verdict) -> str:
    """A verdict in one line."""
    change = f"{_number(row, row.old)} -> {_number(row, row.new)}" if row.old is not None else ""
    interval = f"interval {_interval(row)}" if row.interval else ""
    parts = [row.word, f"{change} {row.quantity}".strip(), _ratio(row), interval, row.why]
    return ", ".join(part for part in parts if part)


def _number(row: Verdict, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if row.quantity in (MS, CALL_MS) else f"{value:.2e}"


def _ratio(row: Verdict) -> str:
    return "" if row.ratio is None else f"{row.ratio:.3f}x"


def _interval(row: Verdict) -> str:
    return f"{row.interval[0]:.3f}-{row.interval[1]:.3f}" if row.interval else ""


def _note(row: Verdict) -> str:
    tensor = row.quantity if row.quantity not in (MS, CALL_MS) else ""
    return ", ".join(part for part in (tensor, " ".join(row.why.split())) if part)


def _thresholds(verdicts: Sequence[Verdict]) -> str:
    percents = sorted({100 * row.threshold for row in verdicts})
    return ", ".join(f"{share:.0f}%" if share >= 100 else f"{share:.3g}%" for share in percents) or "none"


def _data(words: str) -> str:
    """Escaped as GitHub's workflow commands ask for."""
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
