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

import pytest
from pydantic import ValidationError

from flashqla.cases import Case
from flashqla.errors import RecordError
from flashqla.records import (
    Record,
    Run,
    TensorErrors,
    Timing,
    Writer,
    json_schema,
    judged,
    read,
    resume,
    to_json,
    went_wrong,
)

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
        ({"timing.gpu_ms": 0}, "timing.gpu_ms: 0", "greater than 0"),
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
