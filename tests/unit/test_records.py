"""Records: what is written is what is read, whatever ends a run."""

import errno
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flashqla.cases import Case
from flashqla.compare import compare
from flashqla.errors import RecordError
from flashqla.records import (
    Record,
    Run,
    TensorErrors,
    Timing,
    Writer,
    gather,
    json_schema,
    judged,
    read,
    resume,
    to_json,
    went_wrong,
    whole,
)
from flashqla.tables import page
from flashqla.tables import text as table_text

DATA = Path(__file__).parents[1] / "data"
CASE = Case(2, 8, (28672, 4096), model="397B/122B TP8")


def test_a_record_describes_its_case(timed: Callable[..., Record]) -> None:
    record = timed(CASE, "flashqla", 0.5)
    assert (record.case_id, record.model, record.hk, record.hv, record.layout, record.tokens) == (
        "hk2-hv8/28672+4096/mixed",
        "397B/122B TP8",
        2,
        8,
        "28672+4096",
        32768,
    )
    assert record.case == CASE


def test_errors_that_are_not_finite_become_null() -> None:
    errors = TensorErrors(rel_l2=math.nan, max_abs=math.inf, cosine=0.5, nan=3, inf=1)
    assert json.loads(errors.model_dump_json()) == {"rel_l2": None, "max_abs": None, "cosine": 0.5, "nan": 3, "inf": 1}


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_refused(ms: float) -> None:
    with pytest.raises(ValidationError):
        Timing(gpu_ms=ms, l2="cold", clock="graph", repeats=1)


def test_writer_appends_rows_then_leaves_one_file(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], absent: Callable[..., Record]
) -> None:
    path, part = tmp_path / "run.json", tmp_path / "run.json.jsonl"
    rows = [timed(CASE, "flashqla", 0.5), absent(CASE, "fla")]
    writer = Writer(path, make_run())
    for count, row in enumerate(rows, start=1):
        writer.append(row)
        assert len(part.read_text().splitlines()) == 1 + count
    assert not path.exists()

    run = writer.finish()
    assert list(tmp_path.iterdir()) == [path]
    assert read(path) == run
    assert run.records == rows
    assert run.finished is not None
    assert not run.interrupted
    assert to_json(read(path)) == path.read_text()


def test_the_final_file_replaces_an_older_one_only_at_the_end(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    writer = Writer(path, make_run())
    writer.append(timed(CASE, "flashqla", 0.5))
    assert path.read_text() == "old"
    writer.finish(interrupted=True)
    assert read(path).interrupted


def test_a_run_that_measured_nothing_replaces_no_file(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], absent: Callable[..., Record]
) -> None:
    path = tmp_path / "run.json"
    for began_with in ([], [timed(CASE, "flashqla", 0.5)]):
        path.write_text("old")
        writer = Writer(path, make_run(*began_with))
        writer.append(absent(CASE, "fla", "interrupted"))
        writer.append(absent(CASE, "flash-qla", "missing"))
        assert writer.finish(interrupted=True).interrupted
        assert path.read_text() == "old"
        assert [*tmp_path.iterdir()] == [path]
    path.unlink()
    Writer(path, make_run()).finish(interrupted=True)
    assert read(path).interrupted
    path.write_text("old")
    Writer(path, make_run()).finish()  # all that was wanted was there before
    assert not read(path).interrupted


def test_a_killed_run_leaves_readable_rows(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    path, part = tmp_path / "run.json", tmp_path / "run.json.jsonl"
    rows = [timed(CASE, "flashqla", 0.5), timed(CASE, "fla", 0.7)]
    writer = Writer(path, make_run())
    for row in rows:
        writer.append(row)
    with part.open("a") as file:
        file.write('{"case_id": "cut o')  # the process died in the middle of a line
    run = read(part)
    assert run.records == rows
    assert run.interrupted

    del writer
    later = Writer(path, make_run())  # keeps them
    assert read(part).records == []
    assert read(part).interrupted
    assert read(tmp_path / "run.json.jsonl.old") == run
    later.finish()


def test_a_resumed_run_begins_with_what_is_settled(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], absent: Callable[..., Record]
) -> None:
    rows = [timed(CASE, "flashqla", 0.5), absent(CASE, "fla"), absent(CASE, "flashinfer", "timeout")]
    wanted = [(CASE.id, name) for name in ("flashqla", "fla", "flashinfer", "flash-qla")]
    first = make_run(*rows)
    second = make_run(started=datetime(2026, 2, 1, tzinfo=UTC))
    begun = resume(first, second, wanted)
    assert begun.records == [row.model_copy(update={"session": first.started}) for row in rows[:2]]
    assert (begun.started, begun.sessions) == (second.started, [first.started])

    path = tmp_path / "run.json"
    writer = Writer(path, begun)
    writer.append(timed(CASE, "flash-qla", 0.8))
    assert read(tmp_path / "run.json.jsonl").records[:2] == begun.records
    writer.append(timed(CASE, "flashinfer", 0.7))
    done = writer.finish(order=wanted)
    assert [record.backend for record in done.records] == [name for _, name in wanted]
    assert read(path) == done

    third = make_run(started=datetime(2026, 3, 1, tzinfo=UTC))
    again = resume(done, third, wanted)
    assert again.sessions == [first.started, second.started]
    assert [record.session for record in again.records] == [first.started] * 2 + [second.started] * 2


@pytest.mark.parametrize(
    ("environment", "settings", "kind", "given"),
    [
        (
            {"kernel_fingerprint": "f" * 16},
            {},
            "bench-fwd",
            f"kernel_fingerprint: {'f' * 16} there, 0123456789abcdef here",
        ),
        ({"gpu_uuid_hash": "beef"}, {}, "bench-fwd", "gpu_uuid_hash: beef there, feed here"),
        ({"git_revision": "def456"}, {}, "bench-fwd", "git_revision: def456 there, abc123 here"),
        (
            {"torch": None, "cuda": "12.8"},
            {},
            "bench-fwd",
            "torch: None there, 2.13.0 here; cuda: 12.8 there, 13.0 here",
        ),
        ({}, {"seed": 1}, "bench-fwd", "seed: 1 there, 0 here"),
        ({}, {}, "verify-fwd", "kind: verify-fwd there, bench-fwd here"),
    ],
)
def test_a_run_is_not_resumed_under_other_conditions(
    make_run: Callable[..., Run], environment: dict[str, str], settings: dict[str, int], kind: str, given: str
) -> None:
    here = make_run()
    there = make_run(
        kind=kind,
        environment=replace(here.environment, **environment),
        settings={**here.settings, **settings},
        argv=["bench", "fwd", "-k", "a b"],
    )
    with pytest.raises(RecordError) as caught:
        resume(there, here, [])
    assert caught.value.given == given
    assert caught.value.do == "it was started by: flashqla bench fwd -k 'a b'"


def test_a_run_is_not_resumed_without_some_of_its_rows(
    make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    run = make_run(timed(CASE, "flashqla", 0.5), timed(CASE, "fla", 0.5))
    with pytest.raises(RecordError, match=re.escape(f"rows not asked for here: {CASE.id} fla, in all 1")):
        resume(run, make_run(), [(CASE.id, "flashqla")])


def test_changes_since_the_commit_are_no_other_revision(make_run: Callable[..., Run]) -> None:
    here = make_run()
    assert resume(make_run(environment=replace(here.environment, git_revision="abc123+")), here, []).sessions


def test_two_runs_do_not_write_one_file(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    path = tmp_path / "run.json"
    first = Writer(path, make_run())
    with pytest.raises(RecordError, match="another run is writing it"):
        Writer(path, make_run())
    first.append(timed(CASE, "flashqla", 0.5))
    assert len(read(tmp_path / "run.json.jsonl").records) == 1
    first.finish()
    assert list(tmp_path.iterdir()) == [path]
    Writer(path, make_run()).finish()


def test_a_folder_without_permission_is_named_before_anything_is_measured(
    tmp_path: Path, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who may run this, is let in everywhere
    with pytest.raises(RecordError, match=r"run\.json: permission denied"):
        Writer(tmp_path / "run.json", make_run())
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    link, path = tmp_path / "latest.json", tmp_path / "run.json"
    link.symlink_to(path)
    Writer(link, make_run()).finish()
    assert link.is_symlink()
    assert read(path).records == []


def test_a_pipe_is_left_alone(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(RecordError, match="it is a device or a pipe"):
        Writer(path, make_run())
    assert path.is_fifo()


def test_a_full_disk_is_a_record_error(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left on device"):
        Writer(tmp_path / "run.json", make_run())

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = Writer(tmp_path / "other.json", make_run())
    writer.append(timed(CASE, "flashqla", 0.5))
    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(RecordError, match="No space left on device"):
        writer.finish()
    assert len(read(tmp_path / "other.json.jsonl").records) == 1
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("lines", [0, 1])  # that there is room for
def test_a_disk_too_full_to_begin_leaves_what_a_killed_run_left(
    tmp_path: Path,
    make_run: Callable[..., Run],
    timed: Callable[..., Record],
    monkeypatch: pytest.MonkeyPatch,
    lines: int,
) -> None:
    path, part = tmp_path / "run.json", tmp_path / "run.json.jsonl"
    written = Writer._line

    def fill(writer: Writer, content: dict[str, Any]) -> None:
        if writer._file is not None and len(part.read_text().splitlines()) == lines:
            writer._file.write("half")
            raise RecordError("a file cannot be written")
        written(writer, content)

    run = make_run(timed(CASE, "flashqla", 0.5))
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_line", fill)
        with pytest.raises(RecordError):
            Writer(path, run)
    assert not [*tmp_path.iterdir()]
    Writer(path, run)
    before = part.read_bytes()
    monkeypatch.setattr(Writer, "_line", fill)
    with pytest.raises(RecordError):
        Writer(path, run)
    assert [*tmp_path.iterdir()] == [part]
    assert part.read_bytes() == before


@pytest.mark.parametrize("begun", ["", "{"])
def test_a_session_killed_before_it_began_hides_none_before(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], begun: str
) -> None:
    path, part = tmp_path / "run.json", tmp_path / "run.json.jsonl"
    Writer(path, make_run(timed(CASE, "flashqla", 0.5)))
    part.rename(tmp_path / "run.json.jsonl.old")
    part.write_text(begun)
    run, found = gather(path)
    assert [record.backend for record in run.records] == ["flashqla"]
    assert found == {part: "not a result file of flashqla, and is left alone"}


def test_writer_without_a_path_keeps_records(make_run: Callable[..., Run], timed: Callable[..., Record]) -> None:
    writer = Writer(None, make_run())
    row = timed(CASE, "flashqla", 0.5)
    writer.append(row)
    assert writer.finish().records == [row]


@pytest.mark.parametrize("name", ["no/such/folder/run.json", "."])
def test_an_unwritable_path_fails_before_anything_is_measured(
    tmp_path: Path, make_run: Callable[..., Run], name: str
) -> None:
    with pytest.raises(RecordError) as caught:
        Writer(tmp_path / name, make_run())
    assert caught.value.exit_code == 2
    assert str(tmp_path) in caught.value.given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a result file"),
        ("[1]", "not a result file"),
        ("", "the file is empty"),
        ("[" * 100_000, "nested too deep"),
        ('{"schema_version": 1, "settings": null, "records": []}', "not a result file"),
        ("{}", "it has no schema_version"),
        ('{"schema_version": 2}', "schema version 2 is not supported"),
        ('{"schema_version": 1, "kind": "bench-fwd"}', "argv: is missing"),
    ],
)
def test_files_of_another_kind_are_refused_clearly(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_row_stands_once(tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]) -> None:
    row = timed(CASE, "flashqla", 0.5)
    path = tmp_path / "run.json"
    path.write_text(to_json(make_run(row, row)))
    with pytest.raises(RecordError, match="more than once") as caught:
        read(path)
    assert f"flashqla on {CASE.id}" in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "run.jsonl", "run"])
def test_content_says_what_a_file_is(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], name: str
) -> None:
    run = make_run(timed(CASE, "flashqla", 0.5))
    path = tmp_path / name
    for text in (to_json(run), json.dumps(json.loads(to_json(run)))):
        path.write_text(text)
        assert read(path) == run


@pytest.mark.parametrize(
    ("change", "given", "supported"),
    [
        ({"case": {}}, "case.hk: is missing", ""),
        ({"case": None}, "case: None", "a dictionary or an instance of Case"),
        ({"case.hk": 3}, "case: head counts do not fit, heads (3, 8)", "hv = n * hk, n >= 1"),
        ({"case.gate": "weak"}, "case.gate: 'weak'", "'typical', 'strong'"),
        ({"case.lengths": [64]}, "case_id 'hk2-hv8/28672+4096/mixed' where the case has 'hk2-hv8/1x64/mixed'", ""),
        ({"tokens": 7}, "tokens 7 where the case has 32768", ""),
        ({"timing.gpu_ms": 0}, "timing.gpu_ms: 0", "greater than or equal to 0.000000001"),
        ({"timing.gpu_ms": 5e-324}, "timing.gpu_ms: 5e-324", "greater than or equal to 0.000000001"),
        ({"timing.samples": [1e308]}, "timing.samples.0: 1e+308", "less than or equal to 1000000000000"),
        ({"timing.gpu_ms": True}, "timing.gpu_ms: True", "a valid number"),
        ({"timing.gpu_ms": "0.5"}, "timing.gpu_ms: '0.5'", "a valid number"),
        ({"timing.repeats": -5}, "timing.repeats: -5", "greater than or equal to 0"),
        ({"timing.repeats": 12.0}, "timing.repeats: 12.0", "a valid integer"),
        ({"case.hk": "2"}, "case.hk: '2'", "a valid integer"),
        ({"seed": False}, "seed: False", "a valid integer"),
        ({"passed": "yes"}, "passed: 'yes'", "a valid boolean"),
        ({"clocks.power_w": math.inf}, "clocks.power_w: inf", "a finite number"),
        ({"peak_bytes": 10**400}, f"peak_bytes: 1{'0' * 76}...", "less than"),
        ({"status": "fine"}, "status: 'fine'", "'ok', 'missing'"),
        ({"session": "2026-01-02"}, "session: '2026-01-02'", "Input"),
    ],
)
def test_a_malformed_record_is_named(
    tmp_path: Path,
    make_run: Callable[..., Run],
    timed: Callable[..., Record],
    change: dict[str, object],
    given: str,
    supported: str,
) -> None:
    path = tmp_path / "run.json"
    content = json.loads(to_json(make_run(timed(CASE, "fla", 0.5), timed(CASE, "flashqla", 0.5))))
    for place, value in change.items():
        *outer, last = place.split(".")
        fields = content["records"][1]
        for name in outer:
            fields = fields[name]
        fields[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError) as caught:
        read(path)
    assert caught.value.given.startswith(f"{path}: record 2 (hk2-hv8/28672+4096/mixed flashqla)")
    assert given in caught.value.given
    assert supported in caught.value.supported
    assert "\n" not in caught.value.given + caught.value.supported


def test_a_missing_file_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_fields_of_a_newer_writer_are_ignored(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    run = make_run(timed(CASE, "flashqla", 0.5))
    content = json.loads(to_json(run))
    content["records"][0]["surprise"] = content["environment"]["surprise"] = 1
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    assert read(path) == run


@pytest.mark.parametrize("name", ["first_bench", "first_verify"])
def test_files_of_the_first_flashqla_are_read_for_ever(name: str, tmp_path: Path) -> None:
    """Written by commit 435853b, the first that kept runs. What it did not know is null, or empty, and no reading."""
    path = DATA / f"{name}.json"
    written = json.loads(path.read_text())
    run = read(path)
    assert [record.status for record in run.records] == ["ok"] * len(written["records"])
    for record, before in zip(run.records, written["records"], strict=True):
        now = record.model_dump(mode="json")
        assert {key: now[key] for key in before if key != "case"} == {k: v for k, v in before.items() if k != "case"}
        later = {key: value for key, value in now.items() if key not in before}
        assert {"peak_bytes", "runs", "session"} <= set(later)
        assert not any(later.values())
    assert table_text(page(run)).startswith("flashqla ")
    assert not {verdict.word for verdict in compare(run, run)} - {"same", "unclear"}
    again = tmp_path / "again.json"
    again.write_text(to_json(run))
    assert read(again) == run


def test_schema_names_every_field_of_a_record() -> None:
    definitions = json_schema()["$defs"]
    assert set(definitions["Record"]["properties"]) == set(Record.model_fields)
    assert {"sm_mhz", "power_w", "throttle"} <= set(definitions["Clocks"]["properties"])


def test_peers_are_not_judged_unless_alone(
    make_run: Callable[..., Run], verified: Callable[..., Record], absent: Callable[..., Record]
) -> None:
    ours, peer = verified(CASE, "flashqla", 1e-3, 1e-3), verified(CASE, "fla", 1.0, 1.0, passed=False)
    assert judged(make_run(peer, ours)) == ("flashqla",)
    assert judged(make_run(peer)) == ("fla",)
    assert [went_wrong(r) for r in (ours, peer, absent(CASE, "x"), absent(CASE, "x", "oom"))] == [
        False,
        True,
        False,
        True,
    ]


def damaged(path: Path, number: int, line: bytes) -> None:
    """Put another line in place of one of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = line
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("line", [b'{"case_id": "cut o\n', b"\0\0\0\0\n", b'"\xff\xfe"\n'], ids=["cut", "zero", "byte"])
def test_a_damaged_line_costs_its_row_alone(
    tmp_path: Path,
    make_run: Callable[..., Run],
    timed: Callable[..., Record],
    caplog: pytest.LogCaptureFixture,
    line: bytes,
) -> None:
    writer = Writer(tmp_path / "run.json", make_run())
    rows = [timed(CASE, name, 0.5) for name in ("flashqla", "fla", "flashinfer")]
    for row in rows:
        writer.append(row)
    assert writer.part
    damaged(writer.part, 2, line)
    assert read(writer.part).records == [rows[0], rows[2]]
    assert [record.getMessage() for record in caplog.records] == [
        f"{writer.part}: line 3 is damaged, and its row is left out"
    ]


def test_half_a_file_is_one_error(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.json"
    text = to_json(make_run(timed(CASE, "flashqla", 0.5)))
    path.write_text(text[: len(text) // 2])
    with pytest.raises(RecordError, match=r"run\.json: it is cut off, or no JSON$"):
        read(path)
    assert not caplog.records


def killed(path: Path, run: Run, *rows: Record) -> None:
    """A session that ends after some rows, leaving its part file."""
    writer = Writer(path, run)
    for row in rows:
        writer.append(row)


def test_rows_of_every_killed_session_are_taken_over(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], absent: Callable[..., Record]
) -> None:
    path = tmp_path / "run.json"
    names = ("flashqla", "fla", "flashinfer", "flash-qla")
    wanted = [(CASE.id, name) for name in names]
    rows = [timed(CASE, name, 0.5) for name in names]
    days = [make_run(started=datetime(2026, 3, day, tzinfo=UTC)) for day in range(1, 6)]
    writer = Writer(path, days[0])
    writer.append(rows[0])
    writer.append(absent(CASE, "fla", "timeout"))
    writer.finish(interrupted=True)

    for day, row in ((1, rows[1]), (2, rows[2])):
        begun, _ = gather(path)
        killed(path, resume(begun, days[day], wanted), row)
    part, old = tmp_path / "run.json.jsonl", tmp_path / "run.json.jsonl.old"
    damaged(part, 2, b"{\n")  # of its three rows the second, which the session before has too
    begun, found = gather(path)
    assert found == {part: "2 rows of this run, taken over", old: "2 rows of this run, taken over"}
    assert {record.backend: record.session for record in begun.records} == {
        name: days[day].started for day, name in enumerate(names[:3])
    }
    begun = resume(begun, days[3], wanted)
    assert begun.sessions == [run.started for run in days[:3]]
    writer = Writer(path, begun)
    assert writer.aside == tmp_path / "run.json.jsonl.old.2"
    assert old.exists()
    writer.append(rows[3])
    done = writer.finish(order=wanted)
    assert [record.model_copy(update={"session": None}) for record in done.records] == rows
    assert [*tmp_path.iterdir()] == [path]


def test_a_run_of_which_every_session_was_killed_is_named_by_its_file(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    """There is no run.json yet, and the command that goes on is the same each time."""
    path = tmp_path / "run.json"
    names = ("flashqla", "fla", "flashinfer")
    days = [make_run(started=datetime(2026, 3, day, tzinfo=UTC)) for day in range(1, 4)]
    killed(path, days[0], timed(CASE, names[0], 0.5))
    for day in (1, 2):
        begun, _ = gather(path)
        assert [record.backend for record in begun.records] == list(names[:day])
        begun = resume(begun, days[day], [(CASE.id, name) for name in names])
        killed(path, begun, timed(CASE, names[day], 0.5))
    assert not path.exists()
    assert [record.backend for record in gather(path)[0].records] == list(names)
    with pytest.raises(RecordError, match="cannot be read"):
        gather(tmp_path / "another.json")
    with pytest.raises(RecordError, match="cannot be read"):
        gather(tmp_path / "no folder" / "run.json")


def test_rows_are_on_the_disk_before_the_next_is_measured(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lent for a while may be taken away, and a file that was only handed to the system with it."""
    path = tmp_path / "run.json"
    synced: list[bytes] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes()))
    writer = Writer(path, make_run())
    for number, name in enumerate(("flashqla", "fla"), start=1):
        writer.append(timed(CASE, name, 0.5))
        assert synced[-1] == path.with_name("run.json.jsonl").read_bytes()
        assert synced[-1].count(b"\n") == 1 + number
    writer.finish()
    assert synced[-1] == path.read_bytes()  # before the part file goes


def test_rows_of_another_run_are_left_alone_and_kept(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record]
) -> None:
    path, row = tmp_path / "run.json", timed(CASE, "flashqla", 0.5)
    killed(path, make_run(started=datetime(2026, 3, 1, tzinfo=UTC)), row)
    killed(path, make_run(started=datetime(2026, 3, 2, tzinfo=UTC)), row)
    Writer(path, make_run()).finish()
    olds = [tmp_path / "run.json.jsonl.old", tmp_path / "run.json.jsonl.old.2"]
    assert [len(read(old).records) for old in olds] == [1, 1]
    olds[1].write_text("mine\n")
    begun, found = gather(path)
    assert (begun, found) == (
        read(path),
        {olds[0]: "1 rows of another run, left alone", olds[1]: "not a result file of flashqla, and is left alone"},
    )
    assert [whole(name) for name in (path, *olds)] == [path] * 3


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda r: r["timing"].update(gpu_ms=0.4), "timing.gpu_ms 0.4 where the median of its samples is 0.5"),
        (lambda r: r.update(direction="bwd"), "bench-bwd in a bench-fwd run"),
        (lambda r: r.update(command="verify"), "verify-fwd in a bench-fwd run"),
        (lambda r: r["errors"]["o"].update(rel_l2=0.03), "passed with rel_l2 0.03 of o, whose bound is 0.02"),
        (lambda r: r["errors"]["o"].update(nan=1, rel_l2=None), "passed with 1 nan and 0 inf in o"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    tmp_path: Path,
    make_run: Callable[..., Run],
    timed: Callable[..., Record],
    change: Callable[[dict[str, Any]], object],
    given: str,
) -> None:
    errors = {"o": TensorErrors(rel_l2=0.01, max_abs=1.0, cosine=1.0)}
    row = timed(CASE, "flashqla", 0.5, errors=errors, bound=0.02, bounds={"o": 0.02}, passed=True)
    path = tmp_path / "run.json"
    content = json.loads(to_json(make_run(row)))
    path.write_text(json.dumps(content))
    assert read(path).records == [row]
    change(content["records"][0])
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="contradicts itself") as caught:
        read(path)
    assert caught.value.given == f"{path}: record 1 ({CASE.id} flashqla), {given}"


@pytest.mark.parametrize("part", [False, True])
def test_a_key_that_stands_twice_is_refused(
    tmp_path: Path, make_run: Callable[..., Run], timed: Callable[..., Record], part: bool
) -> None:
    path = tmp_path / "run.json"
    killed(path, make_run(), timed(CASE, "flashqla", 0.5), timed(CASE, "fla", 0.5))
    if part:
        path = tmp_path / "run.json.jsonl"
    else:
        path.write_text(to_json(make_run(timed(CASE, "flashqla", 0.5))))
    path.write_text(path.read_text().replace('"gpu_ms": 0.5', '"gpu_ms": 0.5, "gpu_ms": 0.1', 1))
    with pytest.raises(RecordError, match="gpu_ms stands more than once in one object"):
        read(path)


@pytest.mark.parametrize("name", ["a" * 250, "é" * 126])
def test_a_name_too_long_is_refused_before_anything_is_measured(
    tmp_path: Path, make_run: Callable[..., Run], name: str
) -> None:
    with pytest.raises(RecordError, match="File name too long"):
        Writer(tmp_path / name, make_run())
    Writer(tmp_path / ("a" * 245), make_run()).finish()
    assert [len(path.name) for path in tmp_path.iterdir()] == [245]


def test_half_a_surrogate_pair_in_a_file_is_read(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    path, run = tmp_path / "run.json", make_run(argv=["bench", "fwd", "\udcff"])
    path.write_text(to_json(run))
    assert read(path) == run
