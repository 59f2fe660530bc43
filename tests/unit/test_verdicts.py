"""Formats of a comparison: the exact text where people read it, a parse where machines do."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from flashqla import verdicts as formats
from flashqla.cases import Case
from flashqla.compare import Verdict, compare
from flashqla.records import Record, Run, Timing

Make = Callable[..., Record]
A = Case(2, 8, (32768,), batch=True, model="397B/122B TP8")
B = Case(2, 8, (28672, 4096), model="397B/122B TP8")
C = Case(16, 16, (2048,), batch=True, model="2B/0.8B TP1")

TEXT = """\
flashqla compare bench fwd
  old       2026-01-02T03:04:05+00:00, flashqla 0.1.0 (git abc123), NVIDIA H200, 4 rows
  new       2026-01-02T03:04:05+00:00, flashqla 0.1.0 (git abc123), NVIDIA H200, 4 rows, interrupted
  changed   interrupted False -> True

  case                      backend   old ms  new ms   ratio     interval  verdict  note
  hk16-hv16/1x2048/mixed    flashqla                                       failed   oom: 20 GB | asked
  hk2-hv8/1x32768/mixed     flashqla   0.152   0.171  1.125x  1.125-1.125  slower   clocks were throttled
  hk2-hv8/28672+4096/mixed  fla                                            missing  missing: it is not installed

ratio: median time, new / old. interval: where a bootstrap of the samples puts it, with 99% confidence.
slower, faster: ratio and interval lie beyond the threshold. same: both lie within. unclear: neither.
Thresholds: 5%.
Rows of peers are shown and fail nothing.
Rows that stayed the same are not listed: 1 (--all lists them).

flashqla: 1 failed, 1 slower, 1 same
fla (a peer): 1 missing
"""

Comparison = tuple[Run, Run, list[Verdict]]


@pytest.fixture
def bench(make_run: Callable[..., Run], timed: Make, absent: Make) -> Comparison:
    def row(case: Case, backend: str, ms: float, **fields: Any) -> Record:
        timing = Timing(gpu_ms=ms, samples=[ms] * 6, l2="cold", clock="graph", repeats=6)
        return timed(case, backend, ms, **fields).model_copy(update={"timing": timing})

    old = make_run(row(A, "flashqla", 0.152), row(B, "flashqla", 1), row(B, "fla", 1), row(C, "flashqla", 1))
    new = make_run(
        row(A, "flashqla", 0.171, throttle=("power cap",)),
        row(B, "flashqla", 1),
        absent(B, "fla"),
        absent(C, "flashqla", "oom", reason="20 GB | asked"),
        interrupted=True,
    )
    return old, new, compare(old, new)


@pytest.fixture
def verify(make_run: Callable[..., Run], verified: Make) -> Comparison:
    old = make_run(verified(A, "flashqla", 1e-3, 2e-3), kind="verify-fwd")
    new = make_run(verified(A, "flashqla", 1e-3, 3e-3), kind="verify-fwd")
    return old, new, compare(old, new)


def test_text(bench: Comparison) -> None:
    assert formats.text(*bench) == TEXT


def test_long_facts_are_wrapped_and_large_thresholds_written_out(bench: Comparison) -> None:
    old, new, rows = bench
    changed = new.model_copy(update={"settings": {f"setting {n}": "x" * 20 for n in range(20)}})
    wide = [replace(row, threshold=20.17) for row in rows]
    lines = formats.text(old, changed, wide).splitlines()
    assert max(map(len, lines)) < 125
    assert "Thresholds: 2017%." in lines
    assert sum("setting " in line for line in formats.markdown(old, changed, wide).splitlines()) == 1


def test_only_peers_are_called_so(bench: Comparison) -> None:
    old, new, rows = bench
    text = formats.text(old, new, [replace(row, backend=row.backend.replace("fla", "torch", 1)) for row in rows[-1:]])
    assert "\nRows of torch are shown and fail nothing.\n" in text
    assert text.endswith("\ntorch (does not count): 1 missing\n")


def test_text_with_everything_hides_nothing(bench: Comparison) -> None:
    text = formats.text(*bench, True)
    assert re.search(r"28672\+4096/mixed  flashqla +1 +1  1\.000x  1\.000-1\.000  same\n", text)
    assert "--all" not in text


def test_text_of_a_verify_run_names_the_output(verify: Comparison) -> None:
    text = formats.text(*verify)
    assert "  case                   backend   old error  new error   ratio  verdict  note\n" in text
    assert "  hk2-hv8/1x32768/mixed  flashqla   2.00e-03   3.00e-03  1.500x  worse    final_state\n" in text
    assert text.endswith("\nflashqla: 1 worse\n")


def test_markdown_is_a_table(bench: Comparison) -> None:
    lines = formats.markdown(*bench).splitlines()
    assert lines[:3] == ["## flashqla compare bench fwd", "", "flashqla: 1 failed, 1 slower, 1 same"]
    head, rule, *rows = (line for line in lines if line.startswith("|"))
    assert head == "| case | backend | old ms | new ms | ratio | interval | verdict | note |"
    assert rule == "| :-- | :-- | --: | --: | --: | --: | :-- | :-- |"
    assert rows[0] == r"| hk16-hv16/1x2048/mixed | flashqla |  |  |  |  | failed | oom: 20 GB \| asked |"
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows)] == [9] * 5


def test_json_has_every_row_and_both_runs(bench: Comparison) -> None:
    content = json.loads(formats.json(*bench))
    assert content["old"]["environment"]["gpu"] == "NVIDIA H200"
    assert (content["old"]["interrupted"], content["new"]["interrupted"]) == (False, True)
    assert content["counts"] == {"flashqla": {"failed": 1, "slower": 1, "same": 1}, "fla": {"missing": 1}}
    assert [row["word"] for row in content["rows"]] == ["failed", "slower", "same", "missing"]
    slower = content["rows"][1]
    assert (slower["old"], slower["new"], slower["threshold"]) == (0.152, 0.171, 0.05)
    assert slower["ratio"] == pytest.approx(1.125)
    assert slower["interval"] == pytest.approx([1.125, 1.125])


def test_junit_is_read_by_a_parser(bench: Comparison) -> None:
    suite = ElementTree.fromstring(formats.junit(*bench))
    assert suite.tag == "testsuite"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "2", "errors": "0", "skipped": "1"}
    found = {
        (case.get("classname"), case.get("name"), child.tag): child.get("message") for case in suite for child in case
    }
    assert found == {
        ("flashqla", f"{C.id} fwd", "failure"): "failed, oom: 20 GB | asked",
        ("flashqla", f"{A.id} fwd", "failure"): "slower, 0.152 -> 0.171 ms, 1.125x, interval 1.125-1.125, "
        "clocks were throttled",
        ("flashqla", f"{B.id} fwd", "system-out"): None,
        ("fla", f"{B.id} fwd", "skipped"): "missing, missing: it is not installed",
    }


def test_messages_of_compilers_break_neither_xml_nor_annotations(bench: Comparison, absent: Make) -> None:
    old, new, _ = bench
    record = absent(A, "flashqla", "failed", reason='\x1b[31m<error> "100%"\x00\r\nat & line, 1\ud800')
    new = new.model_copy(update={"records": [record]})
    rows = compare(old, new)
    (failure,) = ElementTree.fromstring(formats.junit(old, new, rows)).iter("failure")
    assert failure.text
    assert re.sub(r"\s+", " ", failure.text) == 'failed, failed: [31m<error> "100%" at & line, 1'
    errors = [line for line in formats.github(old, new, rows).splitlines() if line.startswith("::error")]
    assert len(errors) == 1
    assert '<error> "100%25"\x00%0D%0Aat & line, 1' in errors[0]


def test_github_annotates_what_fails_and_what_was_not_compared(bench: Comparison) -> None:
    assert formats.github(*bench).splitlines() == [
        "::notice title=flashqla compare::flashqla: 1 failed, 1 slower, 1 same; fla (a peer): 1 missing",
        f"::error title=flashqla failed::{C.id}: failed, oom: 20 GB | asked",
        f"::error title=flashqla slower::{A.id}: slower, 0.152 -> 0.171 ms, 1.125x, interval 1.125-1.125, "
        "clocks were throttled",
        f"::warning title=fla missing::{B.id}: missing, missing: it is not installed",
    ]


@pytest.mark.parametrize("render", formats.FORMATS.values(), ids=formats.FORMATS)
def test_runs_without_rows_render(render: formats.Render, make_run: Callable[..., Run]) -> None:
    text = render(make_run(), make_run(), [], False)
    assert text.endswith("\n")
    assert "no rows" in text or '"rows": []' in text or 'tests="0"' in text
