"""Published tables are rendered from the runs beside them, and never edited."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import pytest

from flashqla import cases, device
from flashqla.records import Record, read, to_json
from flashqla.tables import bench_text, verify_text

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "results").glob("*.json"))


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_published_tables_are_what_their_json_renders() -> None:
    for path in RESULTS:
        run = read(path)
        render = verify_text if run.kind.startswith("verify") else bench_text
        assert path.with_suffix(".txt").read_text() == render(run), path.name
        assert path.read_text() == to_json(run), path.name


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_published_plots_and_page_are_what_their_json_renders() -> None:
    """`make results` renders them. Other versions of matplotlib draw other bytes."""
    matplotlib = pytest.importorskip("matplotlib")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if f"matplotlib=={matplotlib.__version__}" not in pins:
        pytest.skip(f"matplotlib {matplotlib.__version__} is not the one of constraints.txt")
    from flashqla import plots, report

    published = sorted((ROOT / "results").glob("*.svg"))
    shown = re.findall(r"!\[[^\]]+\]\((results/[^)]+\.svg)\)", (ROOT / "README.md").read_text())
    assert published == sorted(ROOT / name for name in shown)
    for path in published:
        stem, _, plot = path.stem.rpartition(".")
        assert path.read_text() == plots.pictures(read(path.with_name(f"{stem}.json")))[plot], path.name
        assert path.stat().st_size < 150_000

    table = ROOT / "results/benchmark_results_H200.json"
    runs = [read(path) for path in (table, *(path for path in RESULTS if path != table))]
    assert (ROOT / "results/report_H200.html").read_text() == report.html(runs)


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_the_readme_says_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text()
    rows: dict[tuple[str, int, int, str], dict[str, Record]] = {}
    for record in read(root / "results/benchmark_results_H200.json").records:
        rows.setdefault((record.model, record.hk, record.hv, record.layout), {})[record.backend] = record
    times = {row: {name: r.timing.gpu_ms for name, r in of.items() if r.timing} for row, of in rows.items()}
    assert {len(of) for of in times.values()} == {4}
    peers = ("fla", "flashinfer", "flash-qla")

    def line(label: str, heads: str, chosen: list[dict[str, float]]) -> str:
        means = [geometric_mean(t[peer] / t["flashqla"] for t in chosen) for peer in peers]
        means.append(geometric_mean(min(t[peer] for peer in peers) / t["flashqla"] for t in chosen))
        return f"| {label} | {heads}" + " | ".join(["", *(f"{mean:.2f}x" for mean in means), ""]).rstrip()

    for model, hk, hv in dict.fromkeys(row[:3] for row in times):
        block = [t for row, t in times.items() if row[:3] == (model, hk, hv)]
        assert line(model, f"{hk}, {hv}", block) in readme
    assert line("all rows", "", list(times.values())).replace("|  |", "| |") in readme

    text = re.sub(r"\s+", " ", readme)
    behind = {row: t["flashqla"] / min(t[peer] for peer in peers) for row, t in times.items()}
    behind = {row: ratio for row, ratio in behind.items() if ratio > 1}
    assert {row[3].partition("x")[2] for row in behind} == {"4", "8"}
    assert all(hk == hv for _, hk, hv, _ in behind)
    assert f"FlashInfer is ahead in {len(behind)} rows" in text
    assert f"up to {max(behind.values()):.2f}x faster where every value head has a key head of its own" in text

    calls = {row: {name: r.timing.call_ms or 0.0 for name, r in of.items() if r.timing} for row, of in rows.items()}
    fla, flashinfer, qla = (geometric_mean(t[peer] / t["flashqla"] for t in calls.values()) for peer in peers)
    ahead = [t["flashqla"] / t["flashinfer"] for t in calls.values() if t["flashinfer"] < t["flashqla"]]
    told = f"the means are {fla:.2f}x, {flashinfer:.2f}x and {qla:.2f}x, and FlashInfer is ahead in {len(ahead)} rows"
    assert f"{told}, by up to {max(ahead):.2f}x." in text

    throttled = sum(bool(of["flashqla"].clocks and of["flashqla"].clocks.throttle) for of in rows.values())
    assert f"In {throttled} rows, marked in the table, the power cap" in text
    limits = {"o": 1.02, "final_state": 1.05}
    for row, of in rows.items():
        assert times[row]["flashqla"] < min(times[row]["fla"], times[row]["flash-qla"])
        for tensor, limit in limits.items():
            errors = {name: r.errors[tensor].rel_l2 for name, r in of.items() if r.errors}
            assert errors["flashqla"] <= limit * min(errors[peer] for peer in peers)
    fla, flashinfer, qla = (
        geometric_mean((of["flashqla"].peak_bytes or 0) / (of[peer].peak_bytes or 0) for of in rows.values())
        for peer in peers
    )
    assert f"allocates {fla:.2f}x of FLA's peak memory, {flashinfer:.2f}x of FlashInfer's and {qla:.2f}x of" in text


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_the_readme_says_what_was_measured_of_the_backward_pass() -> None:
    readme = (ROOT / "README.md").read_text()
    rows: dict[tuple[str, int, int, str], dict[str, Record]] = {}
    for record in read(ROOT / "results/benchmark_bwd_H200.json").records:
        rows.setdefault((record.model, record.hk, record.hv, record.layout), {})[record.backend] = record
    peers = ("fla", "flash-qla")

    def ratio(row: dict[str, Record], peer: str, number: Callable[[Record], float | None], inverse: bool) -> float:
        ours, other = number(row["flashqla"]), number(row[peer])
        assert ours
        assert other
        return ours / other if inverse else other / ours

    def line(label: str, heads: str, chosen: list[dict[str, Record]]) -> str:
        means = [
            geometric_mean(ratio(row, peer, number, inverse) for row in chosen)
            for number, inverse in ((gpu_ms, False), (lambda r: r.peak_bytes, True))
            for peer in peers
        ]
        return f"| {label} | {heads}" + " | ".join(["", *(f"{mean:.2f}x" for mean in means), ""]).rstrip()

    for model, hk, hv in dict.fromkeys(row[:3] for row in rows):
        assert line(model, f"{hk}, {hv}", [of for row, of in rows.items() if row[:3] == (model, hk, hv)]) in readme
    assert line("all rows", "", list(rows.values())).replace("|  |", "| |") in readme
    fla, qla = (min(ratio(of, peer, gpu_ms, False) for of in rows.values()) for peer in peers)
    text = re.sub(r"\s+", " ", readme)
    assert f"the {len(rows)} rows of suite `bwd`" in text
    assert f"of FLA by {fla:.2f}x at least, of flash-qla by {qla:.2f}x." in text
    fla, qla = (geometric_mean(ratio(of, peer, call_ms, False) for of in rows.values()) for peer in peers)
    ahead = [found for of in rows.values() if (found := ratio(of, "flash-qla", call_ms, True)) > 1]
    assert not ahead
    told = []
    for tensor in ("dq", "dk", "dv", "dg", "dbeta", "dh0"):
        errors = [{name: r.errors[tensor].rel_l2 for name, r in of.items() if r.errors} for of in rows.values()]
        told.append(f"{geometric_mean(e['flashqla'] / min(e[peer] for peer in peers) for e in errors):.2f}x")
    assert f"are {', '.join(told[:-1])} and {told[-1]} of those of the better peer" in text
    assert f"the means are {fla:.2f}x and {qla:.2f}x, and every row is ahead." in text


def call_ms(record: Record) -> float | None:
    return record.timing and record.timing.call_ms


def gpu_ms(record: Record) -> float | None:
    return record.timing and record.timing.gpu_ms


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_the_readme_says_what_was_verified() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    passed, total = {}, {}
    for name, suites in (("hard", ["hard"]), ("sweep", ["sweep"]), ("bwd", ["smoke", "hard"])):
        records = read(ROOT / f"results/verify_{name}_H200.json").records
        passed[name] = sum(bool(r.passed) for r in records)
        total[name] = len({case.id for suite in suites for case in cases.suite(suite)})
        assert all(r.passed for r in records if r.status == "ok")
    assert passed["hard"] == total["hard"]
    assert passed["sweep"] == total["sweep"]
    assert f"all {total['hard']} and {total['sweep']} cases pass" in text
    assert f"of the backward pass {passed['bwd']} of {total['bwd']}." in text
    sources = {path.name: read(path).environment.kernel_fingerprint for path in RESULTS}
    today = device.kernel_fingerprint()
    backward = [sources.pop(f"{run}_bwd_H200.json") for run in ("benchmark", "verify")]
    assert len(set(sources.values())) == 1  # of the forward pass: the table is of what was verified
    for measured in {*backward, *sources.values()}:
        assert f"on the kernel sources {measured}" in text
        assert (f"{measured}, those of today." in text) == (measured == today)
