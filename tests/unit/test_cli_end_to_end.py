"""The installed command as a user runs it, in a process of its own, on the CPU."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flashqla.cases import suite
from flashqla.compare import compare, read_thresholds
from flashqla.records import Run, read, to_json
from flashqla.tables import bench_text, verify_text

FEW = ("bench", "fwd", "--suite", "cpu", "--lens", "1x512", "--repeats", "5")


def flashqla(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "flashqla", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def without_noise(run: Run) -> Run:
    """With every sample at the median: on cores that others use as well a run may be unclear even beside itself."""
    timings = [record.timing for record in run.records if record.timing and record.timing.gpu_ms]
    assert len(timings) == len(run.records)
    calm = [timing.model_copy(update={"samples": [timing.gpu_ms] * 5, "gpu_ms_iqr": 0.0}) for timing in timings]
    records = [record.model_copy(update={"timing": timing}) for record, timing in zip(run.records, calm, strict=True)]
    return run.model_copy(update={"records": records})


def test_verify_proves_the_smoke_suite(tmp_path: Path) -> None:
    done = flashqla("verify", "--suite", "smoke", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)  # nothing else may be on stdout
    ours = [record for record in run["records"] if record["backend"] == "flashqla"]
    assert [record["case_id"] for record in ours] == [case.id for case in suite("smoke")]
    for record in ours:
        assert (record["status"], record["passed"], record["deterministic"]) == ("ok", True, True)
        assert {name: error["nan"] + error["inf"] for name, error in record["errors"].items()} == {
            "o": 0,
            "final_state": 0,
        }
        assert 0 < record["errors"]["o"]["rel_l2"] < record["bound"]
    assert "this is PyTorch on the CPU" in done.stderr


def test_verify_proves_gradients_of_the_smoke_suite(tmp_path: Path) -> None:
    done = flashqla("verify", "bwd", "--suite", "smoke", "--json", "run.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = read(tmp_path / "run.json")
    assert run.kind == "verify-bwd"
    assert verify_text(run) == done.stdout
    ours = [record for record in run.records if record.backend == "flashqla"]
    assert [record.case_id for record in ours] == [case.id for case in suite("smoke")]
    for record in ours:
        assert (record.status, record.passed, record.deterministic) == ("ok", True, True)
        assert {*record.errors} >= {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
        assert sum(error.nan + error.inf for error in record.errors.values()) == 0
        assert 0 < record.errors["dk"].rel_l2 < record.bounds["dk"] <= 2e-2


def test_bench_times_gradients_and_compares_them(tmp_path: Path) -> None:
    arguments = ["--suite", "cpu_bwd", "--heads", "2,4", "--lens", "1x128", "--repeats", "5", "--budget", "60"]
    for direction in ("bwd", "fwd+bwd"):
        done = flashqla("bench", direction, *arguments, "--json", f"{direction}.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = read(tmp_path / f"{direction}.json")
        assert bench_text(run) == done.stdout
        assert [(record.backend, record.passed) for record in run.records] == [
            ("flashqla", True),
            ("torch-recurrent", True),
        ]
        assert {(row.ratio, row.word in ("same", "unclear")) for row in compare(run, run)} == {(1.0, True)}
        (tmp_path / "calm.json").write_text(to_json(without_noise(run)))
        again = flashqla("compare", "calm.json", "calm.json", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert again.stdout.startswith(f"flashqla compare bench {direction}\n")
    times = [read(tmp_path / f"{direction}.json").records[0].timing for direction in ("bwd", "fwd+bwd")]
    assert all(times)
    mixed = flashqla("compare", "bwd.json", "fwd+bwd.json", cwd=tmp_path)
    assert mixed.returncode == 2
    assert "bench bwd against bench fwd+bwd" in mixed.stderr


def test_bench_times_a_row_and_renders_its_file(tmp_path: Path) -> None:
    arguments = ["--suite", "cpu", "--heads", "2,8", "--lens", "1x512", "--repeats", "2"]
    done = flashqla("bench", "fwd", *arguments, "--json", "run.json", "--out", "run.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.txt"]
    run = read(tmp_path / "run.json")
    assert bench_text(run) == done.stdout == (tmp_path / "run.txt").read_text()
    for record in run.records:
        assert record.status == "ok"
        assert record.passed
        assert record.timing is not None
        assert record.timing.gpu_ms is not None
        assert 0 < record.timing.gpu_ms < 60_000
        assert record.timing.clock == "wall"


def test_what_is_written_fits_the_published_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="extra dev has jsonschema: make setup")
    schema = json.loads(flashqla("schema", cwd=tmp_path).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    verify = ["--suite", "smoke", "--backend", "flashqla", "--backend", "fla"]
    small = ["--suite", "cpu_bwd", "--lens", "1x128", "--repeats", "5"]
    for command in (
        ["verify", *verify],
        [*FEW],
        ["verify", "bwd", *verify, "--repeats", "3"],
        ["bench", "bwd", *small],
        ["bench", "fwd+bwd", *small],
    ):
        done = flashqla(*command, "--json", "-", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = json.loads(done.stdout)
        assert [error.message for error in validator.iter_errors(run)] == []
        assert {record["status"] for record in run["records"]} >= {"ok"}
        known = set(schema["$defs"]["Record"]["properties"])
        assert all(set(record) == known for record in run["records"])
        for field, wrong in (("status", "fine"), ("peak_bytes", -1), ("seed", None), ("clocks", {"sm_mhz": "high"})):
            broken = {**run, "records": [{**run["records"][0], field: wrong}]}
            assert list(validator.iter_errors(broken)), field


def test_a_run_has_no_regression_against_itself_or_its_twin(tmp_path: Path) -> None:
    for name in ("first.json", "second.json"):
        done = flashqla(*FEW, "--json", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = (read(tmp_path / name) for name in ("first.json", "second.json"))
    itself = compare(first, first)
    assert len(itself) == len(first.records) == 8
    assert {(row.ratio, row.word in ("same", "unclear")) for row in itself} == {(1.0, True)}
    (tmp_path / "calm.json").write_text(to_json(without_noise(first)))
    assert flashqla("compare", "calm.json", "calm.json", cwd=tmp_path).returncode == 0

    suggested = flashqla("calibrate", "first.json", "second.json", cwd=tmp_path)
    assert suggested.returncode == 0, suggested.stderr
    (tmp_path / "thresholds.toml").write_text(suggested.stdout)
    limits = read_thresholds(tmp_path / "thresholds.toml")
    for old, new in (("first.json", "second.json"), ("second.json", "first.json")):
        done = flashqla("compare", old, new, "--thresholds", "thresholds.toml", cwd=tmp_path)
        assert done.returncode in (0, 4), done.stdout  # 4: so noisy that no row can be judged
    for row in compare(first, second, limits):
        assert row.ratio is not None
        assert 1 / (1 + row.threshold) < row.ratio < 1 + row.threshold

    # A change that is larger than what the thresholds forgive is found, in rows that have samples enough to judge.
    steady = second.model_copy(
        update={
            "records": [
                record.model_copy(
                    update={
                        "timing": record.timing
                        and record.timing.model_copy(update={"samples": 2 * record.timing.samples})
                    }
                )
                for record in second.records
            ]
        }
    )
    slowed = [
        record.model_copy(
            update={
                "timing": record.timing
                and record.timing.model_copy(
                    update={
                        "gpu_ms": 3 * (1 + limits.of(record.case_id)) * max(record.timing.samples),
                        "samples": [3 * (1 + limits.of(record.case_id)) * max(record.timing.samples)]
                        * len(record.timing.samples),
                    }
                )
            }
        )
        for record in steady.records
    ]
    words = [row.word for row in compare(steady, steady.model_copy(update={"records": slowed}), limits)]
    assert words == ["slower"] * len(second.records)


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_shows_no_progress_on_a_terminal(tmp_path: Path, quiet: bool) -> None:
    command = [sys.executable, "-m", "flashqla", "verify", "--suite", "smoke", "-k", "*1x128*", *["--quiet"] * quiet]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "NO_COLOR": "1"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux tells that nobody holds the other end any more
            while chunk := os.read(ours, 4096):
                shown += chunk
        assert process.stdout is not None
        table = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0
    assert "\nflashqla: 1 passed, 0 failed\n" in table
    if quiet:
        assert shown.decode().splitlines() == [
            "note: no Hopper GPU here (no GPU): this is PyTorch on the CPU, not the kernels"
        ]
    else:
        assert b"hk2-hv4/1x128/mixed" in shown
        assert b"0/2" in shown


def test_a_captured_call_is_verified_timed_and_resumed(tmp_path: Path) -> None:
    capture = """
import torch, flashqla
q, k, v = (torch.nn.functional.normalize(torch.randn(1, 100, h, 128), dim=-1) for h in (2, 2, 4))
with flashqla.capture("call.pt"):
    flashqla.chunk_gated_delta_rule(q, k, v, None, torch.rand(1, 100, 4), output_final_state=True)
"""
    subprocess.run([sys.executable, "-c", capture], cwd=tmp_path, check=True)
    for command in (["verify"], ["bench", "fwd", "--repeats", "2"]):
        done = flashqla(*command, "--input", "call.pt", "--json", "run.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = read(tmp_path / "run.json")
        assert {(r.case.gate, r.case.file) for r in run.records} == {("captured", "call.pt")}
        assert {(r.status, r.passed) for r in run.records} == {("ok", True)}
        assert run.settings["input"] == "call.pt"
        again = flashqla(*command, "--input", "call.pt", "--resume", "run.json", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        kept = read(tmp_path / "run.json").records
        assert [r.errors for r in kept] == [r.errors for r in run.records]
        assert {r.session for r in kept} == {run.started}
    (tmp_path / "call.pt").write_bytes(b"something else")
    broken = flashqla("verify", "--input", "call.pt", cwd=tmp_path)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "error: a captured call cannot be read\n  given      call.pt: " in broken.stderr


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 3)])
def test_explain_says_what_runs_and_why(tmp_path: Path, strict: bool, code: int) -> None:
    options = ["--heads", "16,64", "--lengths", "100,0,37", "--dtype", "float16"]
    done = flashqla("explain", *options, "--device", "cpu", "--json", *["--strict"] * strict, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    plan = json.loads(done.stdout)
    assert plan["problem"] == "hk16-hv64/100+0+37/float16"
    assert plan["implementation"] == "torch"
    assert plan["kernels"] == []
    assert not {"v_tile", "segment_chunks", "parts"} & plan.keys()
    assert "the kernels need a Hopper GPU" in plan["why"]
    assert ("error: no kernel serves this problem" in done.stderr) == strict
    assert "doctor" not in done.stderr
    text = flashqla("explain", *options, "--device", "cpu", cwd=tmp_path).stdout
    assert [line.split()[0] for line in text.splitlines()][:4] == ["problem", "device", "implementation", "why"]
    assert "v_tile" not in text


def test_explain_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    done = flashqla("explain", "--target", "sm_90a", "--heads", "4,16", "--lens", "32768", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert (plan["device"], plan["implementation"]) == ("sm_90a, 132 SMs", "tilelang")
    assert plan["kernels"] == ["inverse", "summary", "scan", "forward"]
    assert f"segments of {plan['segment_chunks']} chunks in {plan['parts']} parts" in plan["why"]


@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, "-m", "flashqla", "cases", "--suite", "qwen", "--json"]  # more than a pipe holds
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(lines):
            assert process.stdout.readline() == "[\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_result_that_cannot_be_printed_is_a_known_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashqla", "cases"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: stdout cannot be written\n  given      No space left on device\n"


@pytest.mark.parametrize("command", ["--help", "verify --help", "--version"])
def test_help_that_cannot_be_printed_is_a_known_error(tmp_path: Path, command: str) -> None:
    shell = f"{sys.executable} -m flashqla {command} > /dev/full"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: stdout cannot be written\n  given      No space left on device\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("bench fwd --suite cpu --lens 1x512 --repeats 2 --backend flashqla", 0),
        ("cases --nonsense", 2),
        ("show none.json", 2),
        ("cases -k zzz", 4),
    ],
)
@pytest.mark.parametrize("stderr", ["2> /dev/full", "2>&-"])
def test_notes_that_cannot_be_written_change_nothing(tmp_path: Path, command: str, code: int, stderr: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shell = f"{sys.executable} -m flashqla {command} {stderr}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_ctrl_c_keeps_finished_rows(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "flashqla",
        "verify",
        "--suite",
        "cpu_hard",
        "--device",
        "cpu",
        "--json",
        "run.json",
    ]
    part = tmp_path / "run.json.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (part.exists() and part.read_text().count("\n") > 2):  # a header and two rows
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "hint: interrupted" in stderr
    assert "Traceback" not in stderr
    run = read(tmp_path / "run.json")
    assert run.interrupted
    assert run.records[0].passed
    assert stdout.startswith("flashqla verify fwd\n")
    assert not part.exists()


def test_a_lost_terminal_keeps_finished_rows(tmp_path: Path) -> None:
    code = (  # the tests may run below nohup
        "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "runpy.run_module('flashqla', run_name='__main__')"
    )
    arguments = ["verify", "--suite", "cpu_hard", "--device", "cpu", "--json", "run.json"]
    part = tmp_path / "run.json.jsonl"
    screen, terminal = os.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=tmp_path, **streams) as process:
        os.close(terminal)
        deadline = time.monotonic() + 120
        while not (part.exists() and part.read_text().count("\n") > 2):  # a header and two rows
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.close(screen)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 130
    run = read(tmp_path / "run.json")
    assert run.interrupted
    assert run.records[0].passed
    assert not part.exists()


SIGNALLED_IMPORT = """
import os, signal
try:
    os.kill(os.getpid(), signal.{number})
except KeyboardInterrupt:  # as in an import below C++, which may lose it
    pass
raise ImportError("the signal was lost")
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("package", ["typer", "torch"])  # the first that the command imports, and the slowest
def test_a_signal_during_an_import_ends_the_command_at_once(tmp_path: Path, number: str, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(SIGNALLED_IMPORT.format(number=number))  # found there before any other
    done = flashqla("verify", "--device", "cpu", "--json", "run.json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not list(tmp_path.glob("run.json*"))


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 3), ("SIGHUP", 3), ("SIGTERM", 130)])
def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path, number: str, code: int) -> None:
    """As Ctrl-C is in a job that a script starts with &: `timeout` has to send SIGTERM, as it does by default.

    And as SIGHUP is below nohup.
    """
    (tmp_path / "torch.py").write_text(SIGNALLED_IMPORT.format(number=number))
    shell = f"trap '' INT HUP; exec {sys.executable} -m flashqla verify --device cpu"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ("the signal was lost" in done.stderr) == (code == 3)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_when_all_is_done_does_not_change_the_exit_code(tmp_path: Path, number: str) -> None:
    late = f"import atexit, runpy, signal; atexit.register(signal.raise_signal, signal.{number})"
    code = f"{late}; runpy.run_module('flashqla', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_below_exec_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """It comes up there when a dataclass is made; CPython remembers it, though it is caught further up."""
    code = 'try:\n    exec("raise KeyboardInterrupt")\nexcept KeyboardInterrupt:\n    raise ImportError("it")\n'
    (tmp_path / "torch.py").write_text(code)
    done = flashqla("verify", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 3, done.stderr


def test_importing_the_package_leaves_signals_alone() -> None:
    code = (
        "import signal; numbers = (signal.SIGINT, signal.SIGTERM); before = [*map(signal.getsignal, numbers)]\n"
        "import flashqla, flashqla.cli.app\n"
        "assert [*map(signal.getsignal, numbers)] == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_closed_descriptor_is_no_ones(tmp_path: Path, closed: str) -> None:
    """Where stderr is closed, what it would have got must not end up in the file that is opened next."""
    command = f"{sys.executable} -m flashqla verify --suite smoke -k '*1x128*' --json run.json {closed}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == 0
    assert verify_text(read(tmp_path / "run.json")) == done.stdout.decode()


def test_any_note_can_be_shown_anywhere(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('["é漢"]\nhk = 1\nhv = 1\nlengths = [70]\n', encoding="utf-8")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "flashqla", "cases", "--cases", "own.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"\\xe9\\u6f22" in done.stdout
