"""Sweeps with backends that hang, crash or take the GPU down, and what a killed run leaves to a later one."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashqla import rows, runner
from flashqla.cases import Case, suite
from flashqla.measure import Config
from flashqla.records import Record, Run, read

SUPPORT = Path(__file__).parents[1] / "support"
CASES = [Case(1, 1, (70,), batch=True, gate=gate) for gate in ("mixed", "zero", "strong")]
TIMEOUT_S = 4.0  # a case takes a tenth of a second


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SUPPORT)
    import fake_backends

    return fake_backends


def table(records: list[Record]) -> list[tuple[str, str, str]]:
    return [(record.case.gate, record.backend, record.status) for record in records]


def test_a_sweep_outlives_its_backends(fakes: Any) -> None:
    """The rows of the others are there, measured in turn, and right."""
    chosen = [
        fakes.Fake("first"),
        fakes.Fake("hangs", "hang", "zero", call=2),  # in the middle of the timed calls
        fakes.Fake("exits", "exit", "strong"),
        fakes.Fake("raises", "raise", "strong"),
        fakes.Fake("faults", "fault", "zero", call=3),
        fakes.Fake("gone", reason="it is not here"),
        fakes.Fake("last", call_s=0.05),
    ]
    records: list[Record] = []
    begin = time.monotonic()
    runner.bench(CASES, chosen, "cpu", records.append, config=Config(repeats=5), timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin < 60
    names = [fake.name for fake in chosen]
    assert [(r.case_id, r.backend) for r in records] == [(case.id, name) for case in CASES for name in names]
    wrong = {
        ("zero", "hangs"): ("timeout", "running took more than 4 s"),
        ("zero", "faults"): ("failed", "the process died: SIGSEGV"),
        ("strong", "exits"): ("failed", "the process died: exit code 3"),
        ("strong", "raises"): ("failed", "ValueError: no way"),
    }
    for record in records:
        key = record.case.gate, record.backend
        if record.backend == "gone":
            assert (record.status, record.reason) == ("missing", "it is not here")
        elif key in wrong:
            assert (record.status, record.reason, record.timing) == (*wrong[key], None)
        else:
            assert (record.status, record.passed, record.reason) == ("ok", True, None), key
            assert record.timing is not None
            assert len(record.timing.samples) == 5
            if record.backend == "last":  # the watch over it is outside of what is timed
                assert 50 <= (record.timing.gpu_ms_min or 0) < 150


def test_verify_goes_on_after_a_lost_gpu(fakes: Any) -> None:
    chosen = [fakes.Fake("first"), fakes.Fake("poisons", "poison", "zero", call=2), fakes.Fake("last")]
    records: list[Record] = []
    runner.verify(CASES[:2], chosen, "cpu", records.append, timeout_s=TIMEOUT_S)
    assert [status for *_, status in table(records)] == ["ok", "ok", "ok", "ok", "failed", "ok"]
    assert records[4].reason == "CUDA error: an illegal memory access was encountered"
    assert all(record.passed for record in records if record.status == "ok")


def test_without_a_worker_a_lost_gpu_ends_all(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_lost_gpu", rows._lost_gpu)  # the fake replaces it
    chosen = [fakes.Fake("poisons", "poison", "mixed"), fakes.Fake("last")]
    records: list[Record] = []
    runner.verify(CASES[:2], chosen, "cpu", records.append)
    assert [status for *_, status in table(records)] == ["failed", "ok", "failed", "failed"]
    assert "the GPU was lost in an earlier case" in (records[3].reason or "")


def test_a_backend_that_always_dies_is_left_out_after_a_while(fakes: Any) -> None:
    cases = [replace(CASES[0], lengths=(length,)) for length in range(1, runner.MAX_LOSSES + 3)]
    records: list[Record] = []
    chosen = [fakes.Fake("exits", "exit", "any"), fakes.Fake("last")]
    runner.bench(cases, chosen, "cpu", records.append, config=Config(repeats=2), timeout_s=TIMEOUT_S)
    assert [record.status for record in records] == ["failed", "ok"] * len(cases)
    reasons = [record.reason or "" for record in records[::2]]
    assert reasons[: runner.MAX_LOSSES] == ["the process died: exit code 3"] * runner.MAX_LOSSES
    assert all(reason.startswith("not run: so ended the 3 cases before") for reason in reasons[runner.MAX_LOSSES :])


def test_kept_rows_are_not_run_again_and_count_as_peers(fakes: Any) -> None:
    """The one row that is left gets the bound that the peer's row, which is kept, allows."""
    chosen = [fakes.Fake("flashqla"), fakes.Fake("fla")]
    whole: list[Record] = []
    runner.verify(CASES[:2], chosen, "cpu", whole.append)
    rest: list[Record] = []
    runner.verify(CASES[:2], chosen, "cpu", rest.append, kept=[whole[1], *whole[2:]])
    assert rest == [replaced(whole[0], rest[0])]


def replaced(record: Record, other: Record) -> Record:
    return record.model_copy(update={"compile_s": other.compile_s})


# The command


def command(*arguments: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import fake_backends; fake_backends.main()"
    return [sys.executable, "-c", code, *arguments]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=120)


VERIFY = (
    "verify",
    "--suite",
    "smoke",
    "--device",
    "cpu",
    "--timeout",
    "60",
    "--backend",
    "slow",
    "--backend",
    "missing",
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has two cases behind it and four before it."""
    with subprocess.Popen(
        command(*VERIFY, "--json", "run.json"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        part = tmp_path / "run.json.jsonl"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.read_text().count("\n") > 4):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
        process.kill()


def facts(run: Run) -> list[dict[str, Any]]:
    """All of the records that is the same from run to run."""
    return [record.model_dump(exclude={"compile_s", "session"}) for record in run.records]


def in_session(leader: int) -> list[int]:
    """Processes of the session that `leader` has started; ended ones left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def assert_nothing_is_left(leader: int) -> None:
    deadline = time.monotonic() + 10
    while in_session(leader):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_run_is_resumed(started: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(in_session(started.pid)) > 1
    started.send_signal(signal.SIGKILL)
    assert started.wait(timeout=10) == -signal.SIGKILL
    assert_nothing_is_left(started.pid)
    before = read(tmp_path / "run.json.jsonl")
    assert 4 <= len(before.records) < 12

    done = run(*VERIFY, "--resume", "run.json.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = read(tmp_path / "run.json")
    assert not (tmp_path / "run.json.jsonl").exists()
    assert (resumed.interrupted, resumed.sessions) == (False, [before.started])
    sessions = [record.session for record in resumed.records]
    assert sessions == [before.started] * len(before.records) + [None] * (12 - len(before.records))

    whole = run(*VERIFY, "--in-process", "--json", "-", cwd=tmp_path)
    uninterrupted = Run.model_validate(json.loads(whole.stdout))
    assert facts(resumed) == facts(uninterrupted)
    assert [record.status for record in resumed.records] == ["ok", "missing"] * len(suite("smoke"))


def test_a_bench_that_is_killed_again_and_again_loses_no_row(tmp_path: Path) -> None:
    """As on a GPU that is lent for a few minutes at a time: one command, with what there is so far."""
    bench = (
        "bench",
        "fwd",
        "--suite",
        "cpu",
        "--lens",
        "1x512",
        "--device",
        "cpu",
        "--budget",
        "0.1",
        "--json",
        "run.json",
    )
    bench += ("--backend", "slow", "--backend", "missing")
    part = tmp_path / "run.json.jsonl"
    kept: list[Record] = []
    for turn in range(2):
        resumed = ("--resume", "run.json") if turn else ()
        with subprocess.Popen(
            command(*bench, *resumed),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            deadline = time.monotonic() + 60
            while not (part.exists() and part.read_text().count("\n") > 1 + len(kept)):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
        assert_nothing_is_left(process.pid)
        found = read(part).records
        assert [record.timing for record in found[: len(kept)]] == [record.timing for record in kept]
        assert len(found) > len(kept)
        kept = found
    assert not (tmp_path / "run.json").exists()

    done = run(*bench, "--resume", "run.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = read(tmp_path / "run.json")
    assert [record.status for record in whole.records] == ["ok", "missing"] * 4
    assert [record.timing for record in whole.records[: len(kept)]] == [record.timing for record in kept]
    assert len(whole.sessions) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_ctrl_c_leaves_no_process_and_names_the_command_that_goes_on(
    started: subprocess.Popen[str], tmp_path: Path
) -> None:
    started.send_signal(signal.SIGINT)
    _, stderr = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "Traceback" not in stderr
    assert_nothing_is_left(started.pid)
    first = read(tmp_path / "run.json")
    assert first.interrupted
    hint = re.search(r"hint: interrupted: (\d+) of 12 rows are kept; go on with: flashqla (.*)", stderr)
    assert hint
    assert int(hint[1]) == sum(record.status != "interrupted" for record in first.records)

    done = run(*shlex.split(hint[2]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    second = read(tmp_path / "run.json")
    assert [(r.case_id, r.backend) for r in second.records] == [
        (case.id, name) for case in suite("smoke") for name in ("slow", "missing")
    ]
    assert {r.status for r in second.records if r.backend == "slow"} == {"ok"}
    assert second.sessions == [first.started]


def test_sigterm_while_a_backend_hangs(tmp_path: Path) -> None:
    arguments = ("bench", "fwd", "--suite", "smoke", "--device", "cpu", "-k", "zero", "--backend", "hangs")
    with subprocess.Popen(
        command(*arguments, "--json", "run.json"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(8)  # by when it hangs; ending earlier must work as well
        assert process.poll() is None
        process.terminate()
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert_nothing_is_left(process.pid)
    assert [record.status for record in read(tmp_path / "run.json").records] == ["interrupted"]


def test_a_hang_and_a_crash_cost_their_rows(tmp_path: Path) -> None:
    names = [word for name in ("steady", "hangs", "exits") for word in ("--backend", name)]
    arguments = ("bench", "fwd", "--suite", "smoke", "--device", "cpu", "--repeats", "2", "--timeout", "5", *names)
    arguments += ("-k", "strong", "-k", "/zero")
    done = run(*arguments, "--json", "-", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    result = Run.model_validate(json.loads(done.stdout))
    bad = {(record.case.gate, record.backend): record.status for record in result.records if record.status != "ok"}
    assert bad == {("zero", "hangs"): "timeout", ("strong", "exits"): "failed"}
    assert len(result.records) == 3 * 2
