"""Published tables are rendered from the runs beside them, and never edited."""

from pathlib import Path

import pytest

from flashqla.records import read, to_json
from flashqla.tables import bench_text, verify_text

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.json"))


@pytest.mark.skipif(not RESULTS, reason="nothing is published yet")
def test_published_tables_are_what_their_json_renders() -> None:
    for path in RESULTS:
        run = read(path)
        render = bench_text if run.kind == "bench-fwd" else verify_text
        assert path.with_suffix(".txt").read_text() == render(run), path.name
        assert path.read_text() == to_json(run), path.name
