"""Published tables are rendered from the runs beside them, and never edited."""

import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from flashqla.records import Record, read, to_json
from flashqla.tables import bench_text, verify_text

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.json"))


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_published_tables_are_what_their_json_renders() -> None:
    for path in RESULTS:
        run = read(path)
        render = bench_text if run.kind == "bench-fwd" else verify_text
        assert path.with_suffix(".txt").read_text() == render(run), path.name
        assert path.read_text() == to_json(run), path.name


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
    own, shared = (
        max(ratio for row, ratio in behind.items() if (row[1] == row[2]) == alone) for alone in (True, False)
    )
    assert f"FlashInfer is ahead in {len(behind)} rows" in text
    assert f"up to {own:.2f}x faster where every value head" in text
    assert f"up to {shared:.2f}x elsewhere" in text

    calls = {row: {name: r.timing.call_ms or 0.0 for name, r in of.items() if r.timing} for row, of in rows.items()}
    fla, flashinfer, qla = (geometric_mean(t[peer] / t["flashqla"] for t in calls.values()) for peer in peers)
    ahead = sum(t["flashinfer"] < t["flashqla"] for t in calls.values())
    assert (
        f"the means are {fla:.2f}x, {flashinfer:.2f}x and {qla:.2f}x, and FlashInfer is ahead in {ahead} rows" in text
    )

    throttled = sum(bool(of["flashqla"].clocks and of["flashqla"].clocks.throttle) for of in rows.values())
    assert f"In {throttled} rows, marked in the table, the power cap" in text
    limits = {"o": 1.01, "final_state": 1.05}
    for row, of in rows.items():
        assert times[row]["flashqla"] < min(times[row]["fla"], times[row]["flash-qla"])
        for tensor, limit in limits.items():
            errors = {name: r.errors[tensor].rel_l2 for name, r in of.items() if r.errors}
            assert errors["flashqla"] <= limit * min(errors[peer] for peer in peers)


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_the_readme_says_what_was_measured_against_flashinfer() -> None:
    root = Path(__file__).parents[2]
    text = re.sub(r"\s+", " ", (root / "README.md").read_text())
    rows: dict[str, dict[str, Record]] = {}
    for record in read(root / "results/benchmark_flashinfer_H200.json").records:
        rows.setdefault(record.case_id, {})[record.backend] = record
    graph, call = (
        [clock(of["flashinfer"]) / clock(of["flashqla"]) for of in rows.values()]
        for clock in (lambda r: r.timing.gpu_ms, lambda r: r.timing.call_ms)
    )
    behind, behind_called = (sum(ratio < 1 for ratio in ratios) for ratios in (graph, call))
    told = f"{geometric_mean(graph):.2f}x as a graph, where FlashInfer is ahead in {behind} rows"
    told += (
        f", and {geometric_mean(call):.2f}x called from Python and waited for, where it is ahead in {behind_called}."
    )
    assert f"on the {len(rows)} rows with 16/64, 16/16 and 32/32 heads" in text
    assert told in text
