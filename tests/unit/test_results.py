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

    behind = {row: min(t[peer] for peer in peers) / t["flashqla"] for row, t in times.items()}
    behind = {row: ratio for row, ratio in behind.items() if ratio < 1}
    (count,) = re.findall(r"FlashInfer is ahead in (\d+) rows", readme)
    assert len(behind) == int(count)
    assert {row[3].partition("x")[2] for row in behind} == {"4", "8"}
    alone, shared = ([ratio for row, ratio in behind.items() if (row[1] == row[2]) == own] for own in (True, False))
    percents = [f"{100 * (1 - min(ratios)):.0f} percent" for ratios in (alone, shared)]
    assert f"by up to {percents[0]} where every value head" in re.sub(r"\s+", " ", readme)
    assert f"by up to {percents[1]} elsewhere" in readme
    for row in times:
        assert times[row]["flashqla"] < min(times[row]["fla"], times[row]["flash-qla"])
        errors = {name: r.errors["o"].rel_l2 for name, r in rows[row].items() if r.errors}
        assert errors["flashqla"] <= 1.01 * min(error for name, error in errors.items() if name != "flashqla")
