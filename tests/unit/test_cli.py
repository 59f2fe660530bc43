"""The command line, with the layers below replaced: options, streams, exit codes, files."""

import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from typer.testing import CliRunner, Result

import flashqla
from flashqla import device, records, signals
from flashqla.cases import Case, suite
from flashqla.cli import console, session
from flashqla.cli.app import app
from flashqla.errors import ArgumentError, FlashqlaError, UnsupportedError
from flashqla.records import Record, Run, read, to_json
from flashqla.tables import bench_text, verify_text

Make = Callable[..., Record]
COMMANDS = [
    [],
    ["verify"],
    ["bench"],
    ["bench", "fwd"],
    ["bench", "bwd"],
    ["bench", "fwd+bwd"],
    ["doctor"],
    ["explain"],
    ["cases"],
    ["compare"],
    ["calibrate"],
    ["show"],
    ["report"],
    ["schema"],
    ["warmup"],
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="flashqla")


class Layers:
    """Stands for backends, measure and runner: gives one record per case and backend, as `answer` says."""

    def __init__(self, answer: Callable[[Case, str], Record]) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}
        self.before: Callable[[int], None] = lambda count: None  # called before each record

    def create(self, names: Sequence[str], where: str, *, exact: bool = False) -> list[str]:
        if "nonsense" in names:
            raise ArgumentError("unknown backend", given="nonsense")
        self.asked |= {"names": list(names), "device": where, "exact": exact}
        return list(names)

    def loop(self, cases: Sequence[Case], backends: Sequence[str], where: str, sink: Any, **options: Any) -> None:
        self.asked |= {"cases": cases, **options}
        sys.stdout.write("compiling\n")  # as libraries do
        os.write(1, b"compiling\n")
        kept = {(record.case_id, record.backend) for record in options.get("kept", ())}
        wanted = [(case, backend) for case in cases for backend in backends if (case.id, backend) not in kept]
        for count, (case, backend) in enumerate(wanted):
            self.before(count)
            sink(self.answer(case, backend))


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch, timed: Make, verified: Make) -> Iterator[Layers]:
    """The layers that need torch, replaced, on a machine without a GPU."""
    fake = Layers(lambda case, backend: verified(case, backend, 1e-3, 1e-3))
    modules = {
        "backends": SimpleNamespace(create=fake.create, defaults=lambda command, where: ("flashqla", "fla")),
        "measure": SimpleNamespace(Config=lambda **settings: settings),
        "runner": SimpleNamespace(verify=fake.loop, bench=fake.loop),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"flashqla.{name}", module)
        monkeypatch.setattr(flashqla, name, module, raising=False)
    monkeypatch.setattr(device, "gpu", lambda index=0: None)
    return fake


def pretend_torch(monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> None:
    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.cuda = SimpleNamespace(is_available=lambda: cuda)  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(cuda="13.0")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


# Help, version, usage


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_two_commands_that_run(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    *_, heading, first, second = result.stdout.rstrip().splitlines()
    assert heading.strip() == "Examples:"
    for line in (first, second):
        words = line.replace('"', "").split()
        assert words[0] == "flashqla"
        assert words[1 : 1 + len(command)] == command or not command
        assert invoke(*words[1:], "--help").exit_code == 0


def test_help_documents_exit_codes() -> None:
    text = invoke("--help").stdout
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "70 ", "130 "):
        assert f"\n    {code}" in text


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"flashqla {flashqla.__version__}\n")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "flashqla", option]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "tilelang", "pydantic", "rich", "numpy", "pynvml"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing"], 2, "No such command"),
        (["verify", "--bogus"], 2, "--bogus"),
        (["bench", "fwd", "--repeats", "0"], 2, "--repeats"),
        (["verify", "--repeats", "1"], 2, "--repeats"),
        (["verify", "--repeats", "9" * 20], 2, "100000"),
        (["bench", "fwd", "--repeats", "100001"], 2, "100000"),
        *(
            (["bench", "fwd", flag, seconds], 2, f"error: {flag} takes seconds\n  given      {flag} {seconds}\n")
            for flag, seconds in (("--budget", "inf"), ("--budget", "nan"), ("--timeout", "inf"))
        ),
        (["bench", "fwd", "--budget", "0"], 2, "error: --budget takes seconds"),
        (["bench", "fwd", "--l2", "hot"], 2, "hot"),
        (["bench", "fwd", "--heads", "2"], 2, "error: --heads takes two numbers"),
        (["cases", "--suite", "no"], 2, "error: unknown suite"),
        (["cases", "--suite", ""], 2, "  given      ''\n"),
        (["cases", "-k", "no such case"], 4, "error: no case is left"),
        (["cases", "--heads", "2,8", "--heads", "99,99"], 4, "a filter matches no case\n  given      --heads 99,99\n"),
        (["cases", "--suite", "qwen", "--lens", "1x2048", "--lens", "1x7"], 4, "  given      --lens 1x7\n"),
        (["cases", "-k", "strong", "-k", "no such case"], 4, "  given      -k no such case\n"),
        (["cases", "--heads", "²,8"], 2, "error: --heads takes two numbers"),
        (["explain", "--lengths", "a"], 2, "error: --lengths takes numbers"),
        (["explain", "--lengths", "²"], 2, "error: --lengths takes numbers"),
        (["explain", "--lengths", "9" * 20], 2, "supported  --lengths 4096,28672, each of at most 9 digits"),
        (["explain", "--heads", f"2,{'9' * 20}"], 2, "supported  --heads 2,8, each of at most 9 digits"),
        (["explain", "--lengths", "9" * 9, "--heads", f"2,{8 * 10**8}"], 2, "error: no tensor is that large"),
        (["explain", "--heads", "3,4"], 2, "error: head counts do not fit"),
        (["explain", "--target", "sm_90a", "--device", "cpu"], 2, "error: --target stands for another device"),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "known"),
    [
        (UnsupportedError("not here", do="go there"), 3, True),
        (FlashqlaError("a bug"), 70, False),
        (ZeroDivisionError("a bug"), 70, False),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, known: bool | None
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("flashqla.cli.options.chosen_cases", fail)
    result = invoke("cases")
    assert result.exit_code == code
    assert ("Traceback" in result.stderr) == (known is False)
    if known:
        assert result.stderr == "error: not here\n  do         go there\n"


@pytest.mark.parametrize(("given", "line"), [(None, ""), ("", "\n  given      ''"), ("0", "\n  given      0")])
def test_an_empty_text_that_was_given_is_shown(given: str | None, line: str) -> None:
    assert str(FlashqlaError("not so", given=given)) == f"not so{line}"


# cases


def test_cases_lists_ids_and_notes() -> None:
    result = invoke("cases", "--suite", "hard", "-k", "/1x1/", "-k", "1x2/")
    assert result.stdout.splitlines() == [
        "hk2-hv4/1x1/mixed  lengths around a chunk",
        "hk2-hv4/1x2/mixed  lengths around a chunk",
    ]


def test_cases_say_what_their_default_is() -> None:
    assert invoke("cases").stderr.startswith("note: these are the cases of suite hard; --suite takes ")
    assert invoke("cases", "--suite", "smoke").stderr == ""


def test_cases_as_json() -> None:
    rows = json.loads(invoke("cases", "--suite", "qwen", "--heads", "2,8", "--lens", "8192x4", "--json").stdout)
    assert [(row["id"], row["model"], row["lengths"]) for row in rows] == [
        ("hk2-hv8/8192x4/mixed", "397B/122B TP8", [8192] * 4)
    ]


# A user's own cases


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text("[defaults]\nhk = 2\nhv = 8\nbatch = true\n[short]\nlengths = [64]\n[long]\nlengths = [4096]\n")
    return str(path)


def test_cases_of_a_file_are_listed_and_filtered(own: str) -> None:
    short, long = "hk2-hv8/1x64/mixed    short", "hk2-hv8/1x4096/mixed  long"
    assert invoke("cases", "--cases", own).stdout.splitlines() == [short, long]
    assert invoke("cases", "--cases", own, "--lens", "1x4096").stdout.splitlines() == [long]
    both = invoke("cases", "--cases", own, "--suite", "smoke").stdout.splitlines()
    assert len(both) == 2 + len(suite("smoke"))


@pytest.mark.parametrize("command", [["cases", "--cases"], ["compare", "a", "b", "--thresholds"]], ids=" ".join)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=" + "[" * 20_000, "nested too deep"),
        ("default" + ".a" * 20_000 + "=1", "nested too deep"),
        ("default=" + "9" * 5_000, "Exceeds the limit"),
        ("default=0x" + "f" * 5_000, "Exceeds the limit"),
    ],
    ids=["arrays", "tables", "digits", "hex"],
)
def test_a_file_that_no_table_of_python_holds_is_wrong_usage(
    command: list[str], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    result = invoke(*command, str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"file cannot be read\n  given      {path}: {message}" in result.stderr


@pytest.mark.parametrize("command", [["verify"], ["bench", "fwd"]], ids=" ".join)
def test_cases_of_a_file_are_run_alone(command: list[str], layers: Layers, own: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    good = layers.answer
    layers.answer = lambda case, backend: good(case, backend).model_copy(update={"command": command[0]})
    result = invoke(*command, "--cases", own, "-k", "short", "--json", str(path))
    assert result.exit_code == 0, result.stderr
    assert [case.note for case in layers.asked["cases"]] == ["short"]
    assert read(path).settings["cases"] == "own.toml"


def test_an_empty_choice_from_a_file_says_where_to_look(own: str) -> None:
    result = invoke("verify", "--cases", own, "-k", "nothing")
    assert result.exit_code == 4
    assert f"--cases {own} -k nothing" in result.stderr
    assert f"flashqla cases --cases {own}" in result.stderr


def test_a_mistake_in_a_file_is_wrong_usage(own: str) -> None:
    Path(own).write_text("[a]\nhk = '2'\n")
    result = invoke("verify", "--cases", own)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"error: hk is an integer\n  given      {own}: [a]: hk = '2'\n")


# verify and bench


def test_verify_prints_the_table_on_stdout_and_nothing_else(layers: Layers, capfd: pytest.CaptureFixture[str]) -> None:
    result = invoke("verify", "--suite", "smoke", "--seed", "7")
    assert result.exit_code == 0
    assert result.stdout.startswith("flashqla verify fwd\n")
    assert result.stdout.endswith("flashqla: 6 passed, 0 failed\nfla: 6 passed, 0 failed\n")
    assert "compiling" not in result.stdout
    assert "this is PyTorch on the CPU" in result.stderr
    assert layers.asked["seed"] == 7
    assert layers.asked["runs"] == 2
    assert layers.asked["exact"]
    assert layers.asked["cases"] == suite("smoke")
    streams = capfd.readouterr()  # the descriptors, which the runner does not catch
    assert (streams.out, streams.err) == ("", "compiling\n")


def test_defaults_fit_the_machine(layers: Layers, monkeypatch: pytest.MonkeyPatch, timed: Make) -> None:
    invoke("verify")
    assert layers.asked["device"] == "cpu"
    assert {case.id for case in layers.asked["cases"]} == {
        case.id for name in ("smoke", "cpu_hard") for case in suite(name)
    }
    layers.answer = lambda case, backend: timed(case, backend, 1.0)
    invoke("bench", "fwd")
    assert layers.asked["cases"] == suite("cpu")
    assert layers.asked["config"] == {"repeats": 12, "l2": "cold", "budget_s": 3.0}

    hopper = device.Gpu("NVIDIA H200", (9, 0), 132, 2**37, "feed", "580.1")
    monkeypatch.setattr(device, "gpu", lambda index=0: hopper)
    pretend_torch(monkeypatch, cuda=True)
    result = invoke("bench", "fwd")
    assert layers.asked["device"] == "cuda"
    assert layers.asked["cases"] == suite("qwen")
    assert result.stderr == "compiling\n"  # and no note


def test_bench_options_reach_the_runner(layers: Layers, timed: Make, tmp_path: Path) -> None:
    layers.answer = lambda case, backend: timed(case, backend, 1.0 if backend == "flashqla" else 3.0)
    out, path = tmp_path / "run.txt", tmp_path / "run.json"
    result = invoke(
        *[
            "bench",
            "fwd",
            "--suite",
            "qwen",
            "--heads",
            "2,8",
            "--heads",
            "16,64",
            "--lens",
            "1x2048",
            "--repeats",
            "3",
        ],
        *[
            "--l2",
            "warm",
            "--budget",
            "7.5",
            "--backend",
            "flashqla",
            "--backend",
            "fla",
            "--json",
            str(path),
            "--out",
            str(out),
        ],
    )
    assert result.exit_code == 0
    assert layers.asked["config"] == {"repeats": 3, "l2": "warm", "budget_s": 7.5}
    assert layers.asked["names"] == ["flashqla", "fla"]
    run = read(path)
    assert [(r.case_id, r.backend) for r in run.records] == [
        (f"{heads}/1x2048/mixed", backend) for heads in ("hk2-hv8", "hk16-hv64") for backend in ("flashqla", "fla")
    ]
    assert run.kind == "bench-fwd"
    settings = {"suite": "qwen", "device": "cpu", "seed": 0, "repeats": 3, "budget_s": 7.5, "l2": "warm"}
    assert run.settings == {**settings, "threads": torch.get_num_threads()}
    assert result.stdout == out.read_text() == bench_text(run)
    assert "3.00x" in result.stdout


def test_verify_repeats_reach_the_runner(layers: Layers, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert invoke("verify", "--suite", "smoke", "--repeats", "100", "--json", str(path)).exit_code == 0
    assert layers.asked["runs"] == 100
    assert read(path).settings == {"suite": "smoke", "device": "cpu", "seed": 0, "repeats": 100}


def test_verify_has_the_filters_of_bench(layers: Layers, tmp_path: Path) -> None:
    out = tmp_path / "run.txt"
    options = ["--heads", "2,8", "--heads", "16,32", "--lens", "1x2048", "--model", "35b", "-k", "mixed"]
    result = invoke("verify", "--suite", "sweep", *options, "--out", str(out))
    assert result.exit_code == 0
    assert [case.id for case in layers.asked["cases"]] == ["hk16-hv32/1x2048/mixed"]
    assert out.read_text() == result.stdout


def test_bench_shows_memory_when_asked(layers: Layers, timed: Make) -> None:
    layers.answer = lambda case, backend: timed(case, backend, 1.0, peak_bytes=3 * 2**20)
    few = ("bench", "fwd", "--suite", "cpu", "--lens", "1x512", "--heads", "2,8")
    assert "peak MiB" not in invoke(*few).stdout
    line = next(line for line in invoke(*few, "--memory").stdout.splitlines() if "1x512" in line)
    assert line.split()[-2:] == ["3.0", "3.0"]


def test_verify_takes_a_direction(layers: Layers, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    good = layers.answer
    for arguments, kind, direction in (
        ([], "verify-fwd", "fwd"),
        (["fwd"], "verify-fwd", "fwd"),
        (["bwd"], "verify-bwd", "bwd"),
    ):
        layers.answer = lambda case, backend, way=direction: good(case, backend).model_copy(update={"direction": way})
        result = invoke("verify", *arguments, "--suite", "smoke", "--json", str(path))
        assert result.exit_code == 0
        assert result.stdout.startswith(f"flashqla verify {direction}\n")
        assert (layers.asked["direction"], layers.asked["cases"]) == (direction, suite("smoke"))
        assert read(path).kind == kind
    assert invoke("verify", "--suite", "smoke", "bwd").exit_code == 0
    assert layers.asked["direction"] == "bwd"


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_bench_takes_a_direction(
    layers: Layers, timed: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: str
) -> None:
    layers.answer = lambda case, backend: timed(case, backend, 1.0, direction=direction)
    path = tmp_path / "run.json"
    result = invoke("bench", direction, "--json", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"flashqla bench {direction}\n")
    assert (layers.asked["direction"], layers.asked["cases"]) == (direction, suite("cpu_bwd"))
    run = read(path)
    assert run.kind == f"bench-{direction}"
    assert {record.direction for record in run.records} == {direction}
    hopper = device.Gpu("NVIDIA H200", (9, 0), 132, 2**37, "feed", "580.1")
    monkeypatch.setattr(device, "gpu", lambda index=0: hopper)
    pretend_torch(monkeypatch, cuda=True)
    invoke("bench", direction)
    assert (layers.asked["device"], layers.asked["cases"]) == ("cuda", suite("bwd"))


def test_json_to_stdout_is_json_alone(layers: Layers, tmp_path: Path) -> None:
    result = invoke("verify", "--suite", "smoke", "--json", "-")
    path = tmp_path / "run.json"
    path.write_text(result.stdout)
    assert len(read(path).records) == 12


def test_a_wrong_result_exits_1_and_a_wrong_peer_does_not(layers: Layers, verified: Make) -> None:
    bad = "flashqla"
    layers.answer = lambda case, backend: verified(case, backend, 1e-3, 1e-3, passed=backend != bad)
    assert invoke("verify", "--suite", "smoke").exit_code == 1
    bad = "fla"
    result = invoke("verify", "--suite", "smoke")
    assert result.exit_code == 0
    assert "fla off" in result.stdout
    assert invoke("verify", "--suite", "smoke", "--backend", "fla").exit_code == 1


@pytest.mark.parametrize(
    ("ours", "peer", "strict", "code"),
    [
        ("ok", "ok", True, 0),
        ("ok", "missing", False, 0),
        ("ok", "missing", True, 3),
        ("ok", "oom", False, 0),
        ("ok", "oom", True, 1),
        ("missing", "ok", False, 3),
        ("unsupported", "ok", False, 3),
        ("failed", "ok", False, 1),
        ("timeout", "missing", True, 1),
    ],
)
def test_exit_code(
    make_run: Callable[..., Run], timed: Make, absent: Make, ours: str, peer: str, strict: bool, code: int
) -> None:
    case = suite("smoke")[0]

    def record(backend: str, status: str) -> Record:
        return timed(case, backend, 1.0) if status == "ok" else absent(case, backend, status)

    assert session.exit_code(make_run(record("flashqla", ours), record("fla", peer)), strict=strict) == code


@pytest.mark.parametrize(("passed", "code"), [((None, None), 4), ((None, True), 0), ((None, False), 1)])
def test_a_verification_that_could_judge_nothing_is_4(
    make_run: Callable[..., Run], timed: Make, passed: tuple[bool | None, ...], code: int
) -> None:
    cases = suite("smoke")[:2]
    fields = {"command": "verify", "timing": None}
    records = [
        timed(case, "flashqla", 1.0).model_copy(update={**fields, "passed": p})
        for case, p in zip(cases, passed, strict=True)
    ]
    assert session.exit_code(make_run(*records, kind="verify-fwd")) == code
    benched = timed(cases[0], "flashqla", 1.0).model_copy(update={"passed": None})
    assert session.exit_code(make_run(benched)) == 0


def test_one_unsupported_row_among_good_ones_is_fine(make_run: Callable[..., Run], timed: Make, absent: Make) -> None:
    first, second = suite("smoke")[:2]
    run = make_run(timed(first, "flashqla", 1.0), absent(second, "flashqla", "unsupported"))
    assert session.exit_code(run) == 0


def test_ctrl_c_keeps_finished_rows_and_exits_130(layers: Layers, tmp_path: Path) -> None:
    def stop(count: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    layers.before = stop
    path = tmp_path / "run.json"
    result = invoke("verify", "--suite", "smoke", "--json", str(path))
    assert result.exit_code == 130
    run = read(path)
    assert run.interrupted
    assert len(run.records) == 3
    assert result.stdout == verify_text(run)
    assert "hint: interrupted: 3 of 12 rows are kept" in result.stderr


def argv(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, ...]:
    """Arguments, also as a process of its own would find them."""
    monkeypatch.setattr(sys, "argv", ["flashqla", *arguments])
    return arguments


def test_a_run_goes_on_where_it_was_interrupted(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: Make
) -> None:
    def stop(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    layers.before = stop
    good = layers.answer
    oom = partial(absent, status="oom", command="verify")
    layers.answer = lambda case, backend: oom(case, backend) if "zero" in case.id else good(case, backend)
    path = tmp_path / "a run.json"
    command = argv(monkeypatch, "verify", "--suite", "smoke", "--json", str(path))
    result = invoke(*command)
    assert f"go on with: flashqla verify --suite smoke --json '{path}' --resume '{path}'\n" in result.stderr
    first = read(path)

    layers.before = lambda count: None
    result = invoke(*argv(monkeypatch, *command, "--resume", str(path)))
    assert layers.asked["kept"] == [
        record.model_copy(update={"session": first.started}) for record in first.records if record.status == "ok"
    ]
    assert result.exit_code == 1
    assert read(path).sessions == [first.started]

    result = invoke("verify", "--suite", "smoke", "--resume", str(path), "--seed", "1")
    assert result.exit_code == 2
    assert "error: these runs do not go together\n  given      seed: 0 there, 1 here\n" in result.stderr
    assert f"it was started by: flashqla verify --suite smoke --json '{path}' --resume '{path}'" in result.stderr


def test_a_part_file_is_resumed_into_the_file_it_belongs_to(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(count: int) -> None:
        if count == 3:
            raise ZeroDivisionError

    layers.before = crash
    path, part = tmp_path / "run.json", tmp_path / "run.json.jsonl"
    result = invoke(*argv(monkeypatch, "verify", "--suite", "smoke", "--json", str(path)))
    assert f"go on with: flashqla verify --suite smoke --json {path} --resume {part}" in result.stderr
    del result
    gc.collect()  # a process that has ended locks nothing
    layers.before = lambda count: None
    layers.loop = lambda cases, backends, where, sink, *, kept, **options: [
        sink(layers.answer(case, backend))
        for case in cases
        for backend in reversed(backends)  # out of order
        if (case.id, backend) not in {(record.case_id, record.backend) for record in kept}
    ]
    monkeypatch.setattr(sys.modules["flashqla.runner"], "verify", layers.loop)
    assert invoke("verify", "--suite", "smoke", "--resume", str(part)).exit_code == 0
    assert [(r.case_id, r.backend) for r in read(path).records] == [
        (case.id, backend) for case in suite("smoke") for backend in ("flashqla", "fla")
    ]


def test_a_resumed_run_that_was_killed_loses_no_row(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    moments = (datetime(2026, 3, 1, hour, tzinfo=UTC) for hour in range(24))
    monkeypatch.setattr(sys.modules["flashqla.cli.session"], "now", lambda: next(moments))
    rows = 2 * len(suite("smoke"))

    def end_after(count: int, error: type[BaseException]) -> Callable[[int], None]:
        def end(done: int) -> None:
            if done == count:
                raise error

        return end

    layers.before = end_after(2, KeyboardInterrupt)
    invoke("verify", "--suite", "smoke", "--json", str(path))
    for kept, stderr in ((2, ""), (5, "5 rows of this run, taken over"), (8, "8 rows of this run, taken over")):
        layers.before = end_after(3, ZeroDivisionError)
        result = invoke(*argv(monkeypatch, "verify", "--suite", "smoke", "--resume", str(path)))
        assert stderr in result.stderr
        assert len(layers.asked["kept"]) == kept
        del result
        gc.collect()  # a process that has ended locks nothing
    names = [path.name, *(f"{path.name}.jsonl{ending}" for ending in ("", ".old", ".old.2"))]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    layers.before = lambda count: None
    result = invoke("verify", "--suite", "smoke", "--resume", str(path))
    assert f"note: {path}.jsonl: 11 rows of this run, taken over\n" in result.stderr
    assert f"note: what a killed run left there is now {path}.jsonl.old.3\n" in result.stderr
    assert len(layers.asked["kept"]) == 11
    assert len(read(path).records) == rows
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("arguments", "timeout_s"), [([], 600.0), (["--timeout", "7.5"], 7.5), (["--in-process"], None)]
)
def test_cases_run_in_a_worker_unless_told_otherwise(
    layers: Layers, arguments: list[str], timeout_s: float | None
) -> None:
    for command in (["verify"], ["bench", "fwd"]):
        invoke(*command, "--suite", "smoke", *arguments)
        assert layers.asked["timeout_s"] == timeout_s


@pytest.mark.parametrize("arguments", [[], ["--no-compile-ahead"]], ids=["", "no"])
def test_peers_compile_ahead_unless_told_otherwise(layers: Layers, arguments: list[str]) -> None:
    for command in (["verify"], ["bench", "fwd"], ["bench", "bwd"]):
        suite = "cpu_bwd" if command[-1] == "bwd" else "smoke"
        result = invoke(*command, "--suite", suite, *arguments)
        assert result.exit_code == 0, result.stderr
        assert layers.asked["compile_ahead"] is not bool(arguments)


def test_warmup_without_a_gpu_says_what_works(layers: Layers) -> None:
    result = invoke("warmup")
    assert result.exit_code == 3
    assert "do         flashqla warmup --target sm_90a compiles for one" in result.stderr
    assert invoke("warmup", "--heads", "foo").exit_code == 2


@pytest.mark.parametrize("direction", [[], ["fwd"], ["bwd"], ["fwd+bwd"]], ids="".join)
@pytest.mark.parametrize("target", [True, False])
def test_warmup_compiles_and_says_where(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, target: bool, direction: list[str]
) -> None:
    compiled: list[tuple[tuple[str, ...], list[str]]] = []
    warmed: list[Any] = []
    kernels = ModuleType("flashqla.ops.kernels")
    kernels.launch = SimpleNamespace(compile_all=lambda *given: compiled.append(given))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashqla.ops.kernels", kernels)
    monkeypatch.setattr(device, "nvcc", lambda: (Path("nvcc"), "13.0"))
    monkeypatch.setattr(signals, "keep_from_z3", lambda: compiled.append("Ctrl-C is ours"))  # type: ignore[arg-type]
    peers = {name: SimpleNamespace(name=name, missing=lambda: "not installed") for name in device.PEERS}
    sys.modules["flashqla.backends"].create = lambda names, where: [peers[name] for name in names]  # type: ignore[attr-defined]
    sys.modules["flashqla.runner"].warm_up = lambda *given, **options: warmed.append((*given, options))  # type: ignore[attr-defined]
    if not target:
        monkeypatch.setattr(device, "gpu", lambda: device.Gpu("NVIDIA H200", (9, 0), 132, 2**37, "feed", "580.1"))
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/some/where")
    directions = (direction or ["fwd+bwd"])[0].split("+")
    arguments = [*direction, "--dtype", "float16", "--dtype", "bfloat16"]
    for one in directions:  # each suite has one of them
        arguments += ["--heads", {"fwd": "2,8", "bwd": "2,4"}[one]]
    result = invoke("warmup", *arguments, *["--target", "sm_90a"] * target)
    assert result.exit_code == 0, result.stderr
    assert compiled == ["Ctrl-C is ours", (("float16",), directions), (("bfloat16",), directions)]
    assert "TILELANG_CACHE_DIR  /some/where\n" in result.stdout
    assert "compiling our kernels for float16 (1 of 2)\n" in result.stderr
    if target:
        assert not warmed
    else:
        for one, (cases, backends, where, options) in zip(directions, warmed, strict=True):
            hv = {"fwd": 8, "bwd": 4}[one]
            assert {(case.hk, case.hv, case.dtype) for case in cases} == {(2, hv, "float16"), (2, hv, "bfloat16")}
            assert (backends, where, options["always"]) == (list(peers.values()), "cuda", True)
            assert options["direction"] == one
        assert "fla is left out: not installed\n" in result.stderr


INTERRUPTED_WARMUP = """
import os, signal, subprocess, sys, threading, time, types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

signal.signal(signal.NUMBER, signal.SIG_DFL)  # the tests may run below nohup

def compile_all(*given):
    threading.Thread(target=time.sleep, args=(60,)).start()
    threading.Timer(0.3, os.killpg, (0, signal.NUMBER)).start()
    with ThreadPoolExecutor() as pool:  # as nvcc dies with the group, and TileLang says that it failed
        list(pool.map(lambda command: subprocess.run(command, check=True), [["sleep", "60"]] * 2))

kernels = types.ModuleType("flashqla.ops.kernels")
kernels.launch = types.SimpleNamespace(compile_all=compile_all)
sys.modules["flashqla.ops.kernels"] = kernels
from flashqla import device
device.nvcc = lambda: (Path("nvcc"), "13.0")
sys.argv = ["flashqla", "warmup", "--target", "sm_90a"]
from flashqla.cli.app import main
main()
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_group_ends_warmup_without_waiting_for_kernels(number: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_WARMUP.replace("NUMBER", number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, start_new_session=True)
    assert done.returncode == 130, done.stderr
    assert done.stderr == (
        "compiling our kernels for bfloat16\n"
        "hint: interrupted: kernels compiled so far are kept; the same command goes on with the others\n"
    )


def test_verify_prints_details_when_asked(layers: Layers) -> None:
    assert "cosine" in invoke("verify", "--suite", "smoke", "--details").stdout
    assert "cosine" not in invoke("verify", "--suite", "smoke").stdout


def test_rows_that_were_interrupted_do_not_count_as_kept(layers: Layers, absent: Make) -> None:
    layers.answer = lambda case, backend: absent(case, backend, "interrupted" if backend == "fla" else "ok")

    def stop(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    layers.before = stop
    assert "hint: interrupted: 2 of 12 rows are kept" in invoke("verify", "--suite", "smoke").stderr


@pytest.fixture
def handler_of_before() -> Iterator[object]:
    """What a program had SIGTERM and SIGHUP do before it ran a command; it must not be called, and come back."""

    def of_others(number: int, frame: object) -> None:
        pytest.fail("the handler of before was called")

    before = {number: signal.signal(number, of_others) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield of_others
    for number, usual in before.items():
        signal.signal(number, usual)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_other_signals_end_a_run_as_ctrl_c_does(
    layers: Layers, handler_of_before: object, number: signal.Signals
) -> None:
    layers.before = lambda count: signal.raise_signal(number) if count == 3 else None
    result = invoke("verify", "--suite", "smoke")
    assert result.exit_code == 130
    assert "hint: interrupted: 3 of 12 rows are kept" in result.stderr
    assert signal.getsignal(number) is handler_of_before


@pytest.mark.usefixtures("handler_of_before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_the_file_is_opened_leaves_no_part_of_it(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    opened = records._open_alone

    def signalled(part: Path) -> tuple[TextIO, Path | None]:
        file = opened(part)
        signal.raise_signal(number)
        return file

    monkeypatch.setattr(records, "_open_alone", signalled)
    path = tmp_path / "run.json"
    result = invoke("verify", "--suite", "smoke", "--json", str(path))
    assert result.exit_code == 130
    assert "hint: interrupted: 0 of 12 rows are kept" in result.stderr
    assert "cases" not in layers.asked  # the loop has not begun
    assert [*tmp_path.iterdir()] == [path]
    assert read(path).interrupted


@pytest.mark.usefixtures("handler_of_before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("rows", [[], ["interrupted", "interrupted"], ["interrupted", "missing"]], ids=",".join)
def test_a_signal_before_the_first_row_leaves_files_as_they_are(
    layers: Layers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    absent: Make,
    number: signal.Signals,
    rows: list[str],
) -> None:
    path, out = tmp_path / "run.json", tmp_path / "run.txt"
    command = argv(monkeypatch, "verify", "--suite", "smoke", "--json", str(path), "--out", str(out))
    assert invoke(*command).exit_code == 0
    before = path.read_bytes(), out.read_bytes()

    def stop(count: int) -> None:
        if count == len(rows):
            signal.raise_signal(number)

    layers.before = stop
    statuses = iter(rows * 2)
    layers.answer = lambda case, backend: absent(case, backend, next(statuses), command="verify")
    result = invoke(*command)
    assert result.exit_code == 130
    assert (path.read_bytes(), out.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [path, out]
    assert result.stderr.splitlines()[-3:] == [
        f"note: no row was measured, and {path} is left as it was",
        f"note: no row was measured, and {out} is left as it was",
        f"hint: interrupted: 0 of 12 rows are kept; begin again with: {shlex.join(['flashqla', *command])}",
    ]
    out.unlink()
    assert invoke(*command).exit_code == 130
    assert path.read_bytes() == before[0]
    assert out.exists()  # as where there was none before


@pytest.mark.parametrize("other", [False, True])  # whether --json names the file of another run
def test_a_signal_before_the_first_row_of_a_resumed_run_loses_nothing(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: Make, other: bool
) -> None:
    def stop_at(row: int) -> None:
        layers.before = lambda count: signal.raise_signal(signal.SIGINT) if count == row else None

    path, elsewhere = tmp_path / "run.json", tmp_path / "other.json"
    good = layers.answer
    bad = partial(absent, status="oom", command="verify")
    layers.answer = lambda case, backend: bad(case, backend) if backend == "fla" else good(case, backend)
    stop_at(5)
    command = argv(monkeypatch, "verify", "--suite", "smoke", "--json", str(path))
    invoke(*command)
    assert [record.status for record in read(path).records] == ["ok", "oom", "ok", "oom", "ok"]
    before = path.read_bytes()
    if other:
        elsewhere.write_bytes(before)
        command = ("verify", "--suite", "smoke", "--json", str(elsewhere))
    stop_at(0)
    result = invoke(*argv(monkeypatch, *command, "--resume", str(path)))
    assert result.exit_code == 130
    assert path.read_bytes() == before
    assert not other or elsewhere.read_bytes() == before
    again = shlex.join(["flashqla", *command, "--resume", str(path)])
    assert result.stderr.endswith(f"hint: interrupted: 3 of 12 rows are kept; go on with: {again}\n")


@pytest.mark.usefixtures("handler_of_before")
def test_a_second_signal_at_once_is_the_first_one(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` sends two, and the second may come when the file is written and the table is not."""

    def slow(run: Run, *, details: bool) -> str:
        signal.raise_signal(signal.SIGTERM)
        return verify_text(run)

    monkeypatch.setattr("flashqla.tables.verify_text", slow)
    layers.before = lambda count: signal.raise_signal(signal.SIGTERM) if count == 3 else None
    path = tmp_path / "run.json"
    result = invoke("verify", "--suite", "smoke", "--json", str(path))
    assert result.exit_code == 130
    assert result.stdout == verify_text(read(path))
    assert "hint: interrupted: 3 of 12 rows are kept" in result.stderr


def test_who_insists_is_heard(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of --in-process runs code of others, in which an exception may be lost."""
    monkeypatch.setattr("flashqla.signals.SAME_S", 0.0)

    def lose_one(count: int) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    layers.before = lose_one
    assert invoke("verify", "--suite", "smoke").exit_code == 130


def test_a_signal_that_code_of_others_has_lost_comes_up_before_the_next_step(layers: Layers) -> None:
    def lose_one(count: int) -> None:
        if count == 2:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        layers.asked["tell"]("compiling", True)

    layers.before = lose_one
    result = invoke("verify", "--suite", "smoke")
    assert result.exit_code == 130
    assert "hint: interrupted: 2 of 12 rows are kept" in result.stderr


def test_ctrl_c_does_not_keep_the_file_from_being_written(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(run: Run) -> str:
        signal.raise_signal(signal.SIGINT)
        return to_json(run)

    monkeypatch.setattr(records, "to_json", impatient)
    path = tmp_path / "run.json"
    assert invoke("verify", "--suite", "smoke", "--json", str(path)).exit_code == 0
    assert len(read(path).records) == 12


def test_the_table_is_printed_though_its_file_cannot_be_written(layers: Layers, timed: Make, tmp_path: Path) -> None:
    layers.answer = lambda case, backend: timed(case, backend, 1.0)
    out = tmp_path / "run.txt"
    layers.before = lambda count: out.mkdir(exist_ok=True)
    result = invoke("bench", "fwd", "--out", str(out))
    assert result.exit_code == 2
    assert result.stdout.startswith("flashqla bench fwd\n")
    assert f"given      {out}: Is a directory" in result.stderr


@pytest.mark.parametrize("lost", ["folder", "name"])
def test_the_table_is_printed_though_the_run_cannot_be_kept(layers: Layers, tmp_path: Path, lost: str) -> None:
    path, out = tmp_path / "out" / "run.json", tmp_path / "run.txt"
    path.parent.mkdir()

    def lose(count: int) -> None:
        if count == 3 and lost == "folder":
            shutil.rmtree(path.parent)
        elif count == 3:
            path.mkdir()

    layers.before = lose
    result = invoke("verify", "--suite", "smoke", "--json", str(path), "--out", str(out))
    assert result.exit_code == 2
    assert result.stdout == out.read_text()
    assert result.stdout.endswith("\nflashqla: 6 passed, 0 failed\nfla: 6 passed, 0 failed\n")
    assert f"error: a file cannot be written\n  given      {path}: " in result.stderr
    assert (f"hint: rows finished so far are in {path}.jsonl" in result.stderr) == (lost == "name")


def test_a_crash_keeps_finished_rows_and_the_older_file(layers: Layers, tmp_path: Path) -> None:
    def crash(count: int) -> None:
        if count == 3:
            raise ZeroDivisionError

    layers.before = crash
    path = tmp_path / "run.json"
    path.write_text("older")
    result = invoke("verify", "--suite", "smoke", "--json", str(path))
    assert result.exit_code == 70
    assert "ZeroDivisionError" in result.stderr
    assert path.read_text() == "older"
    assert f"hint: rows finished so far are in {path}.jsonl" in result.stderr
    assert len(read(tmp_path / "run.json.jsonl").records) == 3


def test_a_backward_pass_has_no_roofline(layers: Layers) -> None:
    result = invoke("bench", "bwd", "--roofline")
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "error: the least time of a backward pass is not known\n  given      --roofline, bench bwd\n" in result.stderr
    )
    assert "cases" not in layers.asked


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--json", "/no/such/folder/run.json"], 2, "error: a file cannot be written"),
        (["--json", ""], 2, "it is a folder"),
        (["--out", "/no/such/folder/run.txt"], 2, "error: a file cannot be written"),
        (["--out", "-"], 2, "error: --out needs a file of its own"),
        (["--out", "/no/such/run", "--json", "/no/./such/run"], 2, "error: --out needs a file of its own"),
        (["--out", "/no/such/a.jsonl", "--json", "/no/such/a.jsonl"], 2, "error: --out needs a file of its own"),
        (["--out", "/no/such/run.jsonl", "--json", "/no/such/run"], 2, "error: --out needs a file of its own"),
        (["--seed", str(2**32)], 2, "--seed"),
        (["--backend", "nonsense"], 2, "error: unknown backend"),
        (["--strict"], 3, "error: no Hopper GPU here"),
        (["--lens", "3x3"], 4, "error: no case is left"),
    ],
)
def test_bench_fails_before_it_measures(layers: Layers, arguments: list[str], code: int, message: str) -> None:
    result = invoke("bench", "fwd", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "note:" not in result.stderr
    assert result.stdout == ""
    assert "cases" not in layers.asked


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_cannot_be_resumed(layers: Layers, name: str) -> None:
    result = invoke("verify", "--suite", "smoke", "--resume", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: a folder is no result file" in result.stderr


@pytest.mark.parametrize("name", [".jsonl", ".jsonl.old", ".jsonl.old.2"])
def test_an_ending_alone_cannot_be_resumed(layers: Layers, name: str) -> None:
    result = invoke("verify", "--suite", "smoke", "--resume", name, "--json", "run.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: a part file has the name of its run before .jsonl\n  given      {name}\n" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--json", "LOOP"],
        ["verify", "--out", "LOOP"],
        ["verify", "--resume", "LOOP"],
        ["verify", "--json", "run.json", "--out", "LOOP"],
        ["report", "run.json", "--format", "text", "--out", "LOOP"],
        ["calibrate", "run.json", "LOOP"],
        ["compare", "LOOP", "run.json", "--allow-missing-baseline"],
    ],
    ids=" ".join,
)
def test_links_in_a_circle_are_wrong_usage(
    layers: Layers, make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(to_json(make_run()))
    Path("LOOP").symlink_to("LOOP")
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: links lead in a circle\n  given      LOOP\n" in result.stderr


def test_asking_for_cuda_without_it_is_an_environment_error(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, cuda=False)
    result = invoke("verify", "--device", "cuda")
    assert result.exit_code == 3
    assert "error: CUDA cannot be used here" in result.stderr


def test_without_torch_the_error_says_so(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    result = invoke("verify")
    assert result.exit_code == 3
    assert "error: PyTorch is not installed" in result.stderr


# console


def test_colour_only_on_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console.note("a")
    monkeypatch.setenv("NO_COLOR", "1")
    console.note("b")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    console.note("c")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    console.note("d")
    assert capsys.readouterr().err.splitlines() == ["\033[33mnote:\033[0m a", "note: b", "note: c", "note: d"]


def test_no_color_option_tells_every_library(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    invoke("verify", "--suite", "smoke", "--no-color")
    assert os.environ["NO_COLOR"] == "1"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_that_is_over_soon_has_no_progress_without_a_terminal(
    capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    with console.progress(2, quiet=quiet) as progress:
        progress.tell("compiling", True)
        progress.step("one")
        progress.step("two")
    assert capsys.readouterr() == ("", "")
    assert "flashqla progress" not in [thread.name for thread in threading.enumerate()]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_there_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    log = console.Log(3, clock)
    lines: list[tuple[float, str]] = []

    def sleep(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            log.look()
            lines.extend((clock.now, line) for line in capsys.readouterr().err.splitlines())

    log.tell("starting a process", True)
    sleep(4)
    log.tell("compiling fla, 9 jobs left", True)
    sleep(40)
    log.tell("compiled fla for hk2-hv8, 8 jobs left", True)
    sleep(50)
    log.tell("", False)  # at 94
    log.tell("one \033[31m", False)
    for name in ("one", "two"):
        sleep(25)
        log.tell(f"compiling fla for {name}", True)  # which the caches have
        sleep(1)
        log.tell(name, False)
        log.step(name)
    log.tell("compiling flash-qla for three", True)  # in no cache
    sleep(33)
    log.tell("three", False)
    sleep(31)
    assert lines == [
        (5, "compiling fla, 9 jobs left (5 s)"),
        (35, "compiling fla, 9 jobs left (35 s)"),
        (65, "compiled fla for hk2-hv8, 8 jobs left (65 s)"),
        (95, "ready after 94 s"),
        (124, "1 of 3 rows, 0:00:50 left"),
        (154, "compiling flash-qla for three (8 s)"),
        (180, "ready after 33 s"),
        (209, "2 of 3 rows, 0:00:25 left"),
    ]


def test_a_log_is_looked_after_while_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(console, "GLANCE_S", 0.0)
    monkeypatch.setattr(console.Log, "look", lambda log: looked.set())
    with console.progress(1, quiet=False):
        assert looked.wait(60)


def test_lines_of_warmup_have_the_seconds_that_compiling_took(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = console.Lines(clock)
    for now, text, compiling in ((1, "a", True), (31, "b", True), (40, "c", False), (50, "d", True), (52, "e", True)):
        clock.now = now
        lines.tell(text, compiling)
    assert capsys.readouterr().err.splitlines() == ["a", "b (30 s)", "c", "d", "e (2 s)"]


def test_progress_on_a_terminal_says_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    bar = SimpleNamespace(add_task=lambda *_, **__: 0, update=lambda task, **fields: said.append(fields))
    times = iter([0.0, 10.0, 12.0, 12.0, 14.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(console.Pace.__init__, "__defaults__", (console.time.monotonic,))
    progress = console.Bar(bar, 3)  # type: ignore[arg-type]
    progress.tell("compiling fla", True)
    progress.tell("", False)  # at 0
    progress.step("one")  # at 10
    progress.tell("two", True)  # at 12
    assert said == [
        {"description": "compiling fla"},
        {"advance": 1, "description": "one", "left": "0:00:20 left"},
        {"description": "two"},
    ]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", ["[red]x[/]", "[/x]", ":smile:"])
def test_brackets_on_a_terminal_are_brackets(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with console.progress(2, quiet=False) as progress:
        progress.tell(f"compiling {text}", True)
        progress.step(f"done {text}\033[31m")
        sys.stderr.write(f"printed {text}")
        sys.stderr.flush()  # a line that is not at its end yet
    shown = terminal.getvalue()
    assert f"done {text}\N{REPLACEMENT CHARACTER}[31m" in shown
    assert f"printed {text}" in shown


def test_time_left_leaves_compiling_out() -> None:
    now = 0.0
    pace = console.Pace(4, lambda: now)
    assert pace.left() == ""
    for compiling, seconds in ((True, 1000.0), (False, 3.0), (True, 500.0), (False, 5.0)):
        pace.turn(compiling)
        now += seconds
    pace.step()
    assert pace.left() == "0:00:24 left"  # three rows of 8 s
    now += 4
    pace.step()
    assert pace.left() == "0:00:12 left"  # two of 6 s
