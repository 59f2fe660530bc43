"""The report: what the page says, that it stands alone in both themes, and that nothing in a run breaks out of it."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from flashqla import plots, report
from flashqla.cases import Case
from flashqla.cli.app import app
from flashqla.compare import compare
from flashqla.errors import ArgumentError, EnvironmentProblem, RecordError, UnsupportedError
from flashqla.records import Record, Run, TensorErrors, Writer, read, to_json, write
from flashqla.tables import bench_page, csv, text, verify_page
from flashqla.verdicts import FORMATS

pytest.importorskip("matplotlib")

Make = Callable[..., Record]
MODEL = "397B/122B TP8"
A = Case(2, 8, (32768,), batch=True, model=MODEL)
B = Case(2, 8, (2048,), batch=True, model=MODEL)
C = Case(2, 8, (28672, 4096), model=MODEL)
HOSTILE = '$\\frac{ </script><script src="http://evil.example/x.js">alert(1)</script><img src=x onerror="a()"> & | `x`'


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="flashqla")


class Elements(HTMLParser):
    """Tags with their attributes, and the text outside of style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] != "style":
            self.words.append(data)


@pytest.fixture
def bench(make_run: Callable[..., Run], timed: Make, absent: Make) -> Run:
    """Times made up for these tests: no device has shown them."""
    return make_run(
        timed(A, "flashqla", 0.1),
        timed(A, "fla", 0.4),
        absent(A, "flashinfer"),
        timed(B, "flashqla", 0.02, throttle=("power cap",)),
        timed(B, "fla", 0.04),
        absent(B, "flashinfer"),
        timed(C, "flashqla", 0.2),
        timed(C, "fla", 0.1, passed=False, reason="wrong result"),
        absent(C, "flashinfer", "oom", reason="20 GB asked"),
    )


@pytest.fixture
def verify(make_run: Callable[..., Run], verified: Make, absent: Make) -> Run:
    return make_run(
        verified(A, "flashqla", 3.1e-3, 2e-3),
        verified(A, "fla", 3.2e-3, 2.5e-3),
        verified(B, "flashqla", 1e-3, 1e-3),
        verified(B, "fla", 0.5, 1.0, passed=False),
        verified(C, "flashqla", 2e-3, 1e-3),
        absent(C, "fla", "unsupported", command="verify", reason="no packed rows", hint=None),
        kind="verify-fwd",
    )


def test_page_has_the_numbers_and_what_made_them(bench: Run) -> None:
    text = Elements(report.html([bench])).text
    assert "flashqla bench fwd, suite qwen, on NVIDIA H200" in text
    assert "2.83x the speed of fla, geometric mean 2.00x to 4.00x; faster in 2 of 2 rows" in text
    assert "23% of the floor, median 14% to 46%, 3 rows" in text
    assert "132 SMs, driver 580.1, SM clock 1755 MHz, 60 C, 500 W" in text
    assert "kernels sources sha256 0123456789abcdef" in text
    assert "L2 cold, CUDA graph replay" in text
    assert "1x32768 0.1000 0.4000 n/a 1 0.2000 0.8000 4.00x - 0.0462 365 1709 46%" in text
    assert "1x2048 0.0200* 0.0400 n/a 1" in text
    assert "28672+4096 0.2000 0.1000! 2 n/a 3 0.4000 0.2000 - -" in text


def test_rows_that_went_wrong_are_listed_with_reason_and_hint(bench: Run) -> None:
    troubles = report._troubles(bench)
    assert [(t.backend, t.what, t.bad, len(t.cases)) for t in troubles] == [
        ("fla", "wrong result", True, 1),
        ("flashinfer", "oom", True, 1),
        ("flashqla", "throttled by power cap", False, 1),
        ("flashinfer", "missing", False, 2),
    ]
    text = Elements(report.html([bench])).text
    assert "flashinfer : missing , it is not installed (pip install flashinfer) 2 rows" in text
    assert f"flashinfer : oom , 20 GB asked (pip install flashinfer) : {C.id}" in text


def test_rows_with_too_few_samples_are_listed(make_run: Callable[..., Run], timed: Make) -> None:
    record = timed(A, "flashqla", 0.1)
    assert record.timing
    few = record.model_copy(update={"timing": record.timing.model_copy(update={"samples": [0.1] * 4})})
    (trouble,) = report._troubles(make_run(few))
    assert (trouble.what, trouble.bad) == ("fewer than 5 samples, too few to tell how noisy", False)


def test_pages_show_peak_memory_where_it_is_known(bench: Run) -> None:
    first = bench.records[0].model_copy(update={"peak_bytes": 7 * 2**19})
    known = bench.model_copy(update={"records": [first, *bench.records[1:]]})
    assert "4.00x - 0.0462 365 1709 46% 3.5" in Elements(report.html([known])).text
    assert "| of floor flashqla | peak MiB flashqla |\n" in report.summary([known])
    assert "peak MiB" not in report.summary([bench]) + report.html([bench])


def test_pages_of_gradients(make_run: Callable[..., Run], timed: Make, verified: Make) -> None:
    bench = make_run(
        timed(A, "flashqla", 0.1, direction="bwd", peak_bytes=2**20, saved_bytes=2**21),
        timed(A, "fla", 0.4, direction="bwd", peak_bytes=2**22, saved_bytes=2**22),
        kind="bench-bwd",
    )
    errors = {name: TensorErrors(rel_l2=2e-3, max_abs=1.0, cosine=1.0) for name in ("dq", "dk", "dA_log")}
    ours = verified(A, "flashqla", 0, 0, bounds=dict.fromkeys(errors, 1e-2)).model_copy(update={"errors": errors})
    verify = make_run(ours, kind="verify-bwd")
    text = Elements(report.html([bench, verify])).text
    assert "flashqla bench bwd, suite qwen, on NVIDIA H200" in text
    assert "1x32768 0.1000 0.4000 0.2000 0.8000 4.00x 1.0 4.0 2.0 4.0" in text
    assert f"{A.id} dq 2.0e-03 1.0e-02 ok dk 2.0e-03 1.0e-02 dA_log 2.0e-03 1.0e-02" in text
    assert list(plots.inline(bench)) == ["latency", "speedup"]
    assert list(plots.inline(verify)) == ["accuracy"]
    summary = report.summary([bench, verify])
    assert "4.00x the speed of fla" in summary
    assert "of floor" not in summary


def test_plots_of_a_bench_run_hold_its_rows(bench: Run) -> None:
    drawn = plots.inline(bench)
    assert list(drawn) == ["latency", "speedup", "floor"]
    assert [name for name, svg in drawn.items() if f">{MODEL}  h_k=2 h_v=8</text>" not in svg] == []
    cells = re.findall(r">([\d.]+|–)</text>", drawn["speedup"])
    assert cells == ["4.00", "2.00"]  # the wrong and the missing times make no cell
    assert "var(--heat6)" in drawn["speedup"]
    assert ">floor<" in drawn["latency"]


def test_only_a_device_with_known_ceilings_has_a_floor(bench: Run) -> None:
    other = bench.model_copy(update={"environment": replace(bench.environment, gpu="NVIDIA H100 80GB HBM3")})
    assert list(plots.inline(other)) == ["latency", "speedup"]
    page = report.html([other])
    assert "floor: not known for this device" in page
    assert "of the floor, median" not in page


def test_verify_run_alone(verify: Run) -> None:
    page = report.html([verify])
    text = Elements(page).text
    assert "3 passed flashqla 0 failed" in text
    assert "1 passed fla 1 failed, 1 unsupported" in text
    assert f"{A.id} 3.1e-03 / 2.0e-03 5.0e-03 3.2e-03 / 2.5e-03 ok" in text
    assert f"{B.id} 1.0e-03 / 1.0e-03 5.0e-03 5.0e-01 / 1.0e+00! fla off" in text
    assert "fla : unsupported , no packed rows" in text
    (svg,) = plots.inline(verify).values()
    assert [word for word in (">o<", ">final_state<", ">bound<", ">fla<") if word not in svg] == []
    assert page.count("<svg") == 1


def test_runs_are_shown_one_after_another_and_never_merged(bench: Run, verify: Run) -> None:
    page = Elements(report.html([bench, verify]))
    assert [attributes["id"] for tag, attributes in page.tags if tag == "section"] == ["run1", "run2"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(links) > 4
    assert {str(link).removeprefix("#") for link in links} <= set(ids)
    assert "Accuracy, side by side" in page.text


def test_page_needs_nothing_from_elsewhere(bench: Run, verify: Run) -> None:
    page = report.html([bench, verify])
    for tag, attributes in Elements(page).tags:
        assert tag not in {"script", "link", "iframe", "img", "object", "embed", "base"}
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_page_is_the_same_every_time(bench: Run, verify: Run) -> None:
    assert report.html([bench, verify]) == report.html([bench, verify])


def test_both_themes_are_there_and_plots_follow_them(bench: Run) -> None:
    page = report.html([bench])
    assert "@media (prefers-color-scheme: dark)" in page
    assert 'name="color-scheme" content="light dark"' in page
    for theme in (plots.LIGHT, plots.DARK):
        assert plots.variables(theme) in page
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= set(plots.LIGHT)
    assert set(plots.LIGHT) == set(plots.DARK)
    assert {"bg", "fg", "series0", "series1", "heat6"} <= used
    assert not [colour for colour in plots.STAND_INS.values() if colour in page]
    # Whatever else a plot is painted in would be right in one theme only.
    assert set(re.findall(r"(?:fill|stroke): ?(#\w+|[a-z]+)", "".join(plots.inline(bench).values()))) <= {"none", "var"}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [plots.LIGHT, plots.DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_their_ground(theme: dict[str, str]) -> None:
    grounds = {name for name in theme if name.startswith("heat")} | {"bg", "card"}
    inks = set(theme) - grounds - {"line"}
    assert min(contrast(theme["fg"], theme[ground]) for ground in grounds) >= 4.5
    assert min(contrast(theme[ink], theme[ground]) for ink in inks for ground in ("bg", "card")) >= 4.5


def test_hostile_words_stay_words(make_run: Callable[..., Run], timed: Make, absent: Make, verified: Make) -> None:
    case = replace(A, model=HOSTILE)
    run = make_run(
        timed(case, "flashqla", 0.1),
        timed(case, HOSTILE, 0.4, throttle=(HOSTILE,)),
        absent(case, "fla", "failed", reason=HOSTILE, hint=HOSTILE),
        argv=["bench", HOSTILE],
        settings={"suite": HOSTILE},
    )
    checked = make_run(verified(case, "flashqla", 1e-3, 1e-3), verified(case, HOSTILE, 1e-3, 1e-3), kind="verify-fwd")
    page = report.html([run, checked])
    elements = Elements(page)
    assert not {"script", "img"} & {tag for tag, _ in elements.tags}
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "<script" not in page
    assert " ".join(HOSTILE.split()) in elements.text
    assert "$\\frac{" in unescape(plots.inline(run)["latency"])  # no formula
    # Code spans and tags of Markdown would begin at a bare mark.
    notes = [line for line in report.summary([run]).splitlines() if "failed" in line and line.startswith("- ")]
    assert notes
    assert not re.search(r"(?<!\\)[<|`]", notes[0])


def test_interrupted_run_says_so_and_shows_what_there_is(bench: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = Writer(path, bench.model_copy(update={"records": []}))
    for record in bench.records[:2]:
        writer.append(record)
    part = path.with_name("run.json.jsonl")  # what a killed run leaves
    page = tmp_path / "page.html"
    assert invoke("report", part, "--out", page).exit_code == 0
    text = Elements(page.read_text(encoding="utf-8")).text
    assert "This run was interrupted. What follows are the rows that it finished." in text
    assert "1x32768 0.1000 0.4000" in text
    junit = ElementTree.fromstring(invoke("report", part, "--format", "junit").stdout)[0]
    assert (junit.get("tests"), junit.get("failures")) == ("3", "1")
    assert junit[-1].get("classname") == "flashqla bench fwd, suite qwen, on NVIDIA H200"
    assert (junit[-1].get("name"), junit[-1][0].text) == ("the run is complete", "interrupted: 2 rows are kept")
    for command in (["report"], ["show"]):
        assert "\n\ninterrupted: 2 rows are kept\n" in invoke(*command, part, "--format", "text").stdout
        assert "\n\ninterrupted: 2 rows are kept\n\n" in invoke(*command, part, "--format", "markdown").stdout
    whole = writer.finish()
    assert "interrupted" not in report.summary([whole]) + report.junit([whole]) + report.text([whole])


def test_an_interrupted_run_counts_no_row_that_was_cut_off(verify: Run, absent: Make) -> None:
    cut = absent(A, "other", "interrupted", command="verify")
    run = verify.model_copy(update={"interrupted": True, "records": [*verify.records, cut]})
    line = f"interrupted: {len(verify.records)} rows are kept"
    assert f"\n\n{line}\nflashqla: " in report.text([run])
    assert f"\n\n{line}\n\n" in report.summary([run])
    assert line in report.junit([run])
    assert "rows are kept" not in Elements(report.html([run])).text  # which says so above its tiles


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_run_without_a_row_is_4(make_run: Callable[..., Run], bench: Run, tmp_path: Path, interrupted: bool) -> None:
    file = save(make_run(interrupted=interrupted), tmp_path / "empty.json")
    for form in ("text", "markdown", "csv"):
        result = invoke("show", file, "--format", form)
        assert (result.exit_code, result.stdout) == (4, "")
        assert result.stderr.startswith(f"error: the run has no rows\n  given      {file}\n")
    result = invoke("report", save(bench, tmp_path / "bench.json"), file, "--format", "junit")
    assert result.exit_code == 4
    assert result.stderr.startswith(f"error: a run has no rows\n  given      {file}\n")
    assert [suite.get("failures") for suite in ElementTree.fromstring(result.stdout)] == ["0", "1"]


@pytest.mark.parametrize("kind", ["bench-fwd", "verify-fwd"])
def test_run_without_a_row(make_run: Callable[..., Run], kind: str) -> None:
    run = make_run(kind=kind, interrupted=True)
    assert "This run was interrupted" in report.html([run])
    assert plots.inline(run) == {}
    assert "interrupted" in report.summary([run])


def test_cases_without_a_model_or_tokens(make_run: Callable[..., Run], timed: Make) -> None:
    bare = [Case(2, 8, (0,)), Case(2, 8, (64,), gate="strong"), Case(2, 8, (64,))]
    run = make_run(*(timed(case, name, ms) for case in bare for name, ms in (("flashqla", 1.0), ("fla", 2.0))))
    speedup = plots.inline(run)["speedup"]
    assert [name for name in (">1x0<", ">1x64/strong<", ">1x64<") if name not in speedup] == []


def test_markdown_is_a_summary_with_all_rows_folded_away(bench: Run, verify: Run) -> None:
    summary = report.summary([bench, verify])
    top, _, rest = summary.partition("<details><summary>All rows</summary>")
    assert top.startswith("## flashqla bench fwd, suite qwen, on NVIDIA H200\n")
    assert "2.83x the speed of fla, geometric mean (2.00x to 4.00x; faster in 2 of 2 rows)" in top
    assert "| 397B/122B TP8 h\\_k=2 h\\_v=8 | 3 | 2.83x | - | 23% |" in top
    assert f"- fla: wrong result: {C.id}" in top
    assert f"- flashinfer: missing, it is not installed (hint: pip install flashinfer): {A.id}, {B.id}" in top
    assert "| 1x32768 | 0.1000 | 0.4000 |" in rest
    assert rest.count("</details>") == 2
    assert "1 passed fla (1 failed, 1 unsupported)" in rest
    assert "http" not in summary


def test_a_page_is_not_for_terminals(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(bench))
    monkeypatch.setattr("flashqla.cli.report._terminal", lambda: True)
    refused = invoke("report", path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "do         name a file with --out report.html" in refused.stderr
    assert invoke("report", path, "--format", "text").exit_code == 0


def test_without_ceilings_a_summary_has_no_floor(bench: Run) -> None:
    other = bench.model_copy(update={"environment": replace(bench.environment, gpu="NVIDIA H20")})
    assert "of floor" in report.summary([bench])
    assert "of floor" not in report.summary([other])


def test_noisy_rows_are_told(make_run: Callable[..., Run], timed: Make) -> None:
    run = make_run(timed(A, "flashqla", 1.0, iqr=0.06), timed(B, "flashqla", 1.0, iqr=0.01))
    assert f"- flashqla: noisy by more than 5%: {A.id}\n" in report.summary([run])
    text = Elements(report.html([run])).text
    assert "1x32768 1.0000~ 2.0000" in text
    assert f"flashqla : noisy by more than 5% : {A.id}" in text


def test_details_of_verify_runs_are_on_the_page(bench: Run, verify: Run, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(to_json(bench))
    (tmp_path / "verify.json").write_text(to_json(verify))
    both = [tmp_path / "bench.json", tmp_path / "verify.json"]
    for form in ("html", "markdown", "text"):
        bare = invoke("report", *both, "--format", form).stdout
        shown = invoke("report", *both, "--format", form, "--details").stdout
        assert ("max abs" in bare, shown.count("max abs") > 1, shown.count("cosine") > 1) == (False, True, True)
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", invoke("report", both[1], "--details").stdout)
    assert heads[:6] == ["case", "of", "flashqla", "bound", "max abs", "cosine"]
    refused = invoke("report", both[0], "--details", "--format", "text")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: a bench run has no such columns\n  given      --details\n")


def test_text_is_the_tables(bench: Run, verify: Run) -> None:
    assert report.text([bench, verify]) == "\n".join(
        [text(bench_page(bench, roofline=True)), text(verify_page(verify))]
    )


def test_junit_has_a_test_per_row(bench: Run, verify: Run, make_run: Callable[..., Run], timed: Make) -> None:
    wrong = make_run(timed(A, "flashqla", 1.0, passed=False, reason="wrong result"))
    root = ElementTree.fromstring(report.junit([bench, verify, wrong]))
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("skipped")) for s in root] == [
        ("flashqla bench fwd, suite qwen, on NVIDIA H200", "9", "0", "3"),  # a wrong peer fails nothing
        ("flashqla verify fwd, suite qwen, on NVIDIA H200", "6", "0", "1"),
        ("flashqla bench fwd, suite qwen, on NVIDIA H200", "1", "1", "0"),
    ]
    said = {(t.get("classname"), t.get("name")): t[0] for t in root[0]}
    assert said["flashqla", f"{B.id} fwd"].text == "0.02 ms, throttled by power cap"
    assert said["flashinfer", f"{C.id} fwd"].get("message") == "oom, 20 GB asked, hint: pip install flashinfer"
    assert root[1][0][0].text == "relative L2 of o 3.1e-03, relative L2 of final_state 2.0e-03"
    assert (root[2][0][0].tag, root[2][0][0].get("type")) == ("failure", "wrong result")


# What stands for what may have gone wrong with a file: cut, edited by hand, or written by something else.
WRONG = (None, {}, "x\x00\ud800", -1, math.inf, 10**400, [None])


def places(content: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in JSON; of a list the first."""
    parts = (
        content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    )
    for key, value in parts:
        yield (*place, key)
        yield from places(value, (*place, key))


@pytest.mark.parametrize("kind", ["bench", "verify"])
def test_a_broken_file_is_refused_or_shown(kind: str, bench: Run, verify: Run, tmp_path: Path) -> None:
    good = bench if kind == "bench" else verify
    good = good.model_copy(update={"records": good.records[:2], "sessions": [good.started]})
    whole = json.loads(to_json(good))
    path = tmp_path / "run.json"
    refused = []
    for *outer, last in places(whole):
        for wrong in (*WRONG, places):
            broken = json.loads(to_json(good))
            part = broken
            for key in outer:
                part = part[key]
            if wrong is places:
                del part[last]
            else:
                part[last] = wrong
            path.write_text(json.dumps(broken))
            try:
                run = read(path)
            except RecordError as error:
                refused.append((error.given, f"{path}{': record 1' * (outer[:1] == ['records'])}"))
                continue
            for page in (report.text([run]), report.summary([run]), report.junit([run]), csv(run)):
                write(tmp_path / "page", page)
            if outer[-1:] == ["case"]:
                plots.inline(run)
            with suppress(ArgumentError, UnsupportedError):  # a run of another command or device
                verdicts = compare(good, run)
                for render in FORMATS.values():
                    render(good, run, verdicts, True)
    assert len(refused) > 300
    assert [given for given, place in refused if not given.startswith(place)] == []


def test_many_cases_of_one_trouble_are_cut_openly(make_run: Callable[..., Run], timed: Make, absent: Make) -> None:
    cases = [replace(A, lengths=(64 * n,)) for n in range(1, 6)]
    run = make_run(*(timed(case, "flashqla", 1.0) for case in cases), *(absent(case, "fla") for case in cases))
    assert f"{cases[2].id} and 2 more" in report.summary([run])


def save(run: Run, path: Path) -> Path:
    path.write_text(to_json(run), encoding="utf-8")
    return path


def test_command_writes_page_and_plots_and_names_them(bench: Run, verify: Run, tmp_path: Path) -> None:
    files = [save(bench, tmp_path / "bench.json"), save(verify, tmp_path / "verify.json")]
    page, folder = tmp_path / "page.html", tmp_path / "new" / "plots"
    result = invoke("report", *files, "--out", page, "--plots", folder)
    assert result.exit_code == 0, result.output
    names = ["1-latency", "1-speedup", "1-floor", "2-accuracy"]
    plotted = [folder / f"{name}.{kind}" for name in names for kind in ("svg", "png")]
    assert result.stdout.splitlines() == [str(path) for path in (page, *plotted)]
    assert page.read_text(encoding="utf-8") == report.html([bench, verify])
    for path in plotted:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            root = ElementTree.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            style = root[0].text or ""
            assert plots.variables(plots.LIGHT) in style
            assert f"prefers-color-scheme:dark){{svg{{{plots.variables(plots.DARK)}" in style


def test_figures_are_small_and_lose_nothing(bench: Run) -> None:
    """A style stands once, and is there for everything that had it."""
    svg = plots.inline(bench)["latency"]
    rules = dict(re.findall(r"\n\.(s[0-9a-f]{8})\{([^}]*)\}", svg))
    used = re.findall(r' class="([^"]*)"', svg)
    assert set(used) == set(rules)
    assert len(set(rules.values())) == len(rules) < len(used)
    assert " style=" not in svg
    assert not re.search(r"<g>\s*</g>|<g/>|rotate\(-0|<[^>]*\d\.\d{3}", svg)
    assert {"var(--series0)", "var(--line)", "var(--fg)"} <= {
        colour for style in rules.values() for colour in re.findall(r"var\(--\w+\)", style)
    }
    for number, (name, style) in enumerate(rules.items()):  # the same name only for the same style
        assert plots.crc32(style.encode()) == int(name[1:], 16), number
    assert ElementTree.fromstring(plots.pictures(bench)["latency"]).tag.endswith("svg")


def test_without_out_the_page_is_on_stdout(bench: Run, tmp_path: Path) -> None:
    file = save(bench, tmp_path / "bench.json")
    assert invoke("report", file, "--format", "markdown").stdout == report.summary([bench])
    assert invoke("report", file).stdout.startswith("<!doctype html>")


def test_a_run_is_not_overwritten(bench: Run, tmp_path: Path) -> None:
    file = save(bench, tmp_path / "bench.json")
    before = file.read_text(encoding="utf-8")
    result = invoke("report", file, "--out", file)
    assert result.exit_code == 2
    assert "--out would overwrite a run" in result.stderr
    assert file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no.json"], 2, "the result file cannot be read"),
        ([], 2, "Missing argument"),
        (["run.json", "--out", "nowhere/page.html"], 2, "a file cannot be written"),
        (["run.json", "--format", "pdf"], 2, "'pdf' is not one of"),
        (["run.json", "--format", "markdown", "--plots", "run.json/x"], 2, "the folder cannot be made"),
        (["run.json", "--format", "markdown", "--plots", ""], 2, "--plots takes a folder given --plots ''"),
        (["run.json", "--out", "-"], 2, "--out takes a file given --out -"),
        (["run.json", "./run.json", "--format", "text"], 2, "a run is given twice given run.json run.json"),
    ],
)
def test_wrong_usage(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(bench, tmp_path / "run.json")
    result = invoke("report", *arguments)
    assert result.exit_code == code
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_missing_extra_is_named_with_its_remedy(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = save(bench, tmp_path / "bench.json")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentProblem, match="pip install 'flashqla\\[report\\]'"):
        report.html([bench])
    result = invoke("report", file, "--out", tmp_path / "page.html")
    assert result.exit_code == 3
    assert package in result.stderr
    assert not (tmp_path / "page.html").exists()
    assert invoke("report", file, "--format", "markdown").exit_code == 0  # needs no extra
    if package == "matplotlib":
        assert invoke("report", file, "--format", "markdown", "--plots", tmp_path).exit_code == 3


def test_runs_without_torch(bench: Run, tmp_path: Path) -> None:
    file = save(bench, tmp_path / "bench.json")
    blocked = "import sys; sys.modules |= dict.fromkeys(('torch', 'tilelang', 'triton')); "
    code = f"{blocked}from flashqla.cli.app import main; main()"
    command: list[Any] = [sys.executable, "-c", code, "report", file, "--out", tmp_path / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'page.html'}\n"), done.stderr
