"""`compare`, `calibrate`, `show` and `schema`: files in, results on stdout, exit codes, and no torch anywhere."""

import csv
import io
import json
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from flashqla.cases import Case
from flashqla.cli.app import app
from flashqla.records import Record, Run, Timing, Writer, to_json
from flashqla.tables import bench_text, markdown, page, verify_text

Make = Callable[..., Record]
Save = Callable[..., str]
A = Case(2, 8, (32768,), batch=True, model="397B/122B TP8")
B = Case(2, 8, (28672, 4096), model="397B/122B TP8")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="flashqla")


@pytest.fixture
def row(timed: Make) -> Make:
    """A bench record with six equal samples."""

    def make(case: Case, ms: float, backend: str = "flashqla", **fields: object) -> Record:
        timing = Timing(gpu_ms=ms, samples=[ms] * 6, l2="cold", clock="graph", repeats=6)
        return timed(case, backend, ms, **fields).model_copy(update={"timing": timing})

    return make


@pytest.fixture
def save(make_run: Callable[..., Run], tmp_path: Path) -> Save:
    """Writes a run of the given records, and gives its path."""

    def make(name: str, *records: Record, **fields: object) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(to_json(make_run(*records, **fields)))
        return str(path)

    return make


@pytest.fixture
def old(save: Save, row: Make) -> str:
    return save("old", row(A, 1.0), row(B, 1.0))


# Exit codes of compare


def test_nothing_worse_is_0(old: str) -> None:
    result = invoke("compare", old, old)
    assert result.exit_code == 0
    assert result.stdout.endswith("\nflashqla: 2 same\n")
    assert result.stderr == ""


def test_a_slower_row_is_1(old: str, save: Save, row: Make) -> None:
    new = save("new", row(A, 1.1), row(B, 1.0))
    result = invoke("compare", old, new)
    assert result.exit_code == 1
    assert "\nflashqla: 1 slower, 1 same\n" in result.stdout
    assert invoke("compare", old, new, "--fail", "20%").exit_code == 0
    assert invoke("compare", old, new, "--fail", "0.09").exit_code == 1
    assert invoke("compare", new, old).exit_code == 0


def test_a_failed_row_is_1(old: str, save: Save, row: Make, absent: Make) -> None:
    assert invoke("compare", old, save("new", row(A, 1.0), absent(B, "flashqla", "oom"))).exit_code == 1
    assert invoke("compare", old, save("new", row(A, 1.0), row(B, 0.1, passed=False))).exit_code == 1


def test_less_exact_is_1(save: Save, verified: Make) -> None:
    exact = save("exact", verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd")
    worse = save("worse", verified(A, "flashqla", 1e-3, 2e-3), kind="verify-fwd")
    wrong = save("wrong", verified(A, "flashqla", 1, 1, passed=False), kind="verify-fwd")
    codes = {(x, y): invoke("compare", x, y).exit_code for x in (exact, worse) for y in (exact, worse, wrong)}
    assert list(codes.values()) == [0, 1, 1, 0, 0, 1]


def test_missing_rows_are_1_only_when_strict(old: str, save: Save, row: Make) -> None:
    new = save("new", row(A, 1.0))
    result = invoke("compare", old, new)
    assert result.exit_code == 0
    assert f"  {B.id} " in result.stdout
    assert invoke("compare", old, new, "--strict").exit_code == 1


def test_peers_fail_nothing_unless_strict_or_alone(save: Save, row: Make) -> None:
    before = save("before", row(A, 1.0), row(A, 1.0, "fla"))
    after = save("after", row(A, 1.0), row(A, 2.0, "fla"))
    assert invoke("compare", before, after).exit_code == 0
    assert invoke("compare", before, after, "--strict").exit_code == 1
    assert invoke("compare", before, after, "--backend", "fla").exit_code == 1
    result = invoke("compare", before, after, "--backend", "flashqla")
    assert (result.exit_code, "fla (a peer)" in result.stdout) == (0, False)


def test_wrong_usage_is_2(old: str, save: Save, verified: Make, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    verify = save("verify", verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd")
    for arguments in (
        [old],
        [old, str(bad)],
        [str(bad), old],
        [old, str(tmp_path / "none.json")],
        [old, verify],
        [old, old, "--fail", "5"],
        [old, old, "--fail", ""],
        [old, old, "--thresholds", str(tmp_path / "none.toml")],
        [old, old, "--allow", "anything"],
        [old, old, "--format", "xml"],
    ):
        result = invoke("compare", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert "rror" in result.stderr


def test_other_conditions_are_3_unless_allowed(old: str, save: Save, row: Make, make_run: Callable[..., Run]) -> None:
    environment = replace(make_run().environment, gpu="NVIDIA H100")
    new = save("new", row(A, 1.0), row(B, 1.0), environment=environment)
    result = invoke("compare", old, new)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "NVIDIA H200 against NVIDIA H100" in result.stderr
    assert "--allow hardware" in result.stderr
    assert invoke("compare", old, new, "--allow", "hardware").exit_code == 0


def test_other_hardware_is_told_before_rows_that_differ(
    old: str, save: Save, row: Make, make_run: Callable[..., Run]
) -> None:
    environment = replace(make_run().environment, gpu="NVIDIA H100")
    new = save("new", row(replace(A, gate="strong"), 1.0), environment=environment)
    for flags in ([], ["--allow-missing-baseline"]):
        result = invoke("compare", old, new, *flags)
        assert (result.exit_code, result.stdout) == (3, "")
        assert result.stderr == (
            "error: these runs were measured on different hardware\n  given      NVIDIA H200 against NVIDIA H100\n"
            "  do         measure both on one machine, or allow it: --allow hardware\n"
        )
    assert invoke("compare", old, new, "--allow", "hardware").exit_code == 4


def test_a_missing_baseline_is_4_unless_allowed(old: str, save: Save, absent: Make, tmp_path: Path) -> None:
    none = str(tmp_path / "none.json")
    result = invoke("compare", none, old)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "there is no baseline yet" in result.stderr
    assert "--allow-missing-baseline" in result.stderr

    result = invoke("compare", none, old, "--allow-missing-baseline")
    assert result.exit_code == 0
    assert "  old       no rows\n" in result.stdout
    assert result.stdout.endswith("\nflashqla: 2 new\n")
    failed = save("failed", absent(A, "flashqla", "failed"))
    assert invoke("compare", none, failed, "--allow-missing-baseline").exit_code == 1


def test_no_row_in_common_is_4(old: str, save: Save, row: Make) -> None:
    new = save("new", row(replace(A, gate="strong"), 1.0))
    result = invoke("compare", old, new)
    assert result.exit_code == 4
    assert result.stdout.endswith("\nflashqla: 2 missing, 1 new\n")  # counted, and listed when asked for
    assert "\nNo row has a result in both runs. Those of one alone are not listed: 2 missing, 1 new" in result.stdout
    assert B.id not in result.stdout
    assert B.id in invoke("compare", old, new, "--all").stdout
    assert invoke("compare", old, new, "--format", "github").stdout.count("\n") == 1
    assert "no row was compared" in result.stderr
    assert f"old.json has 2 rows, the first is {A.id} flashqla, " in result.stderr
    assert invoke("compare", old, new, "--allow-missing-baseline").exit_code == 0
    result = invoke("compare", old, old, "--backend", "nobody")
    assert (result.exit_code, f"given      {old} has 0 rows of nobody, " in result.stderr) == (4, True)


@pytest.fixture
def short(row: Make) -> Make:
    """A bench record with three samples, too few to judge it by."""

    def make(case: Case, ms: float) -> Record:
        record = row(case, ms)
        assert record.timing
        return record.model_copy(update={"timing": record.timing.model_copy(update={"samples": [ms] * 3})})

    return make


def test_runs_that_no_row_can_be_judged_by_are_4(save: Save, short: Make) -> None:
    old, new = save("old", short(A, 1.0), short(B, 1.0)), save("new", short(A, 9.0), short(B, 1.0))
    line = "0 of 2 rows could be judged: 2 unclear, 2 of them with too few samples; measure longer, with --budget"
    for form in ("text", "markdown", "github", "junit"):
        result = invoke("compare", old, new, "--format", form)
        assert (result.exit_code, line in result.stdout) == (4, True), form
        assert "error: no row could be judged\n" in result.stderr
    assert ElementTree.fromstring(result.stdout).get("failures") == "1"
    assert invoke("compare", old, new, "--allow-missing-baseline").exit_code == 4
    assert invoke("compare", old, new, "--strict").exit_code == 1


def test_runs_that_some_rows_can_be_judged_by_pass_and_say_so(old: str, save: Save, row: Make, short: Make) -> None:
    new = save("new", row(A, 1.0), short(B, 1.0))
    result = invoke("compare", old, new)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\n1 of 2 rows could be judged: 1 unclear, 1 of them with too few samples; " in result.stdout
    junit = invoke("compare", old, new, "--format", "junit").stdout
    assert [ElementTree.fromstring(junit).get(name) for name in ("failures", "skipped")] == ["0", "1"]


def test_runs_of_which_most_rows_cannot_be_judged_are_4(save: Save, row: Make, short: Make, make_run: object) -> None:
    third = replace(A, lengths=(4096,))
    old = save("old", row(A, 1.0), row(B, 1.0), row(third, 1.0))
    new = save("new", row(A, 1.0), short(B, 1.0), short(third, 1.0))
    result = invoke("compare", old, new)
    assert result.exit_code == 4
    assert "error: less than half of the rows could be judged\n" in result.stderr
    assert "flashqla calibrate" in result.stderr
    # One that is surely slower fails the gate, however many others cannot be judged.
    assert invoke("compare", old, save("slow", row(A, 1.1), short(B, 1.0), short(third, 1.0))).exit_code == 1
    # Fewer cases are a choice, unless they were cut off.
    assert invoke("compare", old, save("part", row(A, 1.0))).exit_code == 0
    assert invoke("compare", old, save("cut", row(A, 1.0), interrupted=True)).exit_code == 4


@pytest.mark.parametrize("interrupted", [True, False])
def test_verify_runs_that_cannot_be_judged_get_advice_of_their_own(
    save: Save, verified: Make, absent: Make, interrupted: bool
) -> None:
    right, kind = [verified(case, "flashqla", 1e-3, 1e-3) for case in (A, B)], "verify-fwd"
    third = replace(A, lengths=(4096,))
    old = save("old", *right, verified(third, "flashqla", 1e-3, 1e-3), kind=kind)
    lost = [absent(case, "flashqla", command="verify") for case in (B, third)]
    new = save("new", right[0], *lost, kind=kind, interrupted=interrupted)
    result = invoke("compare", old, new)
    do = f"go on with the interrupted run, by its command and --resume {new}" if interrupted else "make both runs again"
    assert result.exit_code == 4
    assert result.stderr.endswith(f"  do         {do}\n")


def test_slower_calls_are_1(save: Save, timed: Make) -> None:
    def run(name: str, call_ms: float) -> str:
        record = timed(A, "flashqla", 1.0, iqr=0.0)
        timing = record.timing.model_copy(update={"call_ms": call_ms})
        return save(name, record.model_copy(update={"timing": timing}))

    old, new = run("old", 1.2), run("new", 2.5)
    result = invoke("compare", old, new)
    assert result.exit_code == 1
    assert result.stdout.endswith("\nflashqla: 1 same\nflashqla, calls: 1 slower\n")
    assert invoke("compare", old, run("near", 2.3)).exit_code == 0
    assert invoke("compare", old, new, "--fail-calls", "30%").exit_code == 0
    assert invoke("compare", old, new, "--fail", "90%").exit_code == 1
    assert invoke("compare", old, new, "--fail-calls", "5").exit_code == 2


# Files and formats


def test_thresholds_come_from_the_file_and_the_flag(old: str, save: Save, row: Make, tmp_path: Path) -> None:
    new = save("new", row(A, 1.1), row(B, 1.1))
    path = tmp_path / "thresholds.toml"
    path.write_text(f'[cases]\n"{A.id}" = "15%"\n"hk9-*" = "15%"\n')
    result = invoke("compare", old, new, "--thresholds", str(path))
    assert result.exit_code == 1
    assert "\nflashqla: 1 slower, 1 same\n" in result.stdout
    assert result.stderr == "note: no row has the threshold of 'hk9-*'\nnote: exit code 1: 1 slower\n"
    # The flag replaces the default of the file, and leaves its cases alone.
    assert invoke("compare", old, new, "--thresholds", str(path), "--fail", "12%").exit_code == 0
    path.write_text(f'default = "12%"\n[cases]\n"{A.id}" = "5%"\n')
    assert invoke("compare", old, new, "--thresholds", str(path), "--fail", "12%").exit_code == 1


def test_formats(old: str, save: Save, row: Make) -> None:
    new = save("new", row(A, 1.1), row(B, 1.0))
    results = {name: invoke("compare", old, new, "--format", name) for name in ("json", "junit", "markdown", "github")}
    assert {result.exit_code for result in results.values()} == {1}
    assert json.loads(results["json"].stdout)["counts"] == {"flashqla": {"slower": 1, "same": 1}}
    assert ElementTree.fromstring(results["junit"].stdout).get("failures") == "1"
    assert f"\n| {A.id} | flashqla | 1 | 1.1 | 1.100x |" in results["markdown"].stdout
    assert f"\n::error title=flashqla slower::{A.id}: slower, 1 -> 1.1 ms" in results["github"].stdout


def test_what_a_killed_run_left_can_be_compared(
    old: str, row: Make, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "killed.json", make_run())
    writer.append(row(A, 1.1))
    result = invoke("compare", old, f"{tmp_path}/killed.json.jsonl")
    assert result.exit_code == 1
    assert ", 1 rows, interrupted\n" in result.stdout
    assert "\nflashqla: 1 slower, 1 missing\n" in result.stdout


# Calibrate


def test_calibrate_writes_a_thresholds_file(old: str, save: Save, row: Make, tmp_path: Path) -> None:
    other = save("other", row(A, 1.04), row(B, 1.0))
    result = invoke("calibrate", old, other)
    assert result.exit_code == 0
    *comments, default = result.stdout.splitlines()
    assert default == 'default = "6%"'
    assert all(line.startswith("# ") for line in comments)
    path = tmp_path / "thresholds.toml"
    path.write_text(result.stdout)
    assert invoke("compare", old, other, "--fail", "3%").exit_code == 1
    assert invoke("compare", old, other, "--thresholds", str(path)).exit_code == 0
    assert invoke("calibrate", old).exit_code == 2
    twice = invoke("calibrate", old, f"{Path(old).parent}/./{Path(old).name}")
    assert (twice.exit_code, twice.stdout) == (2, "")
    assert "error: a run is given twice\n" in twice.stderr
    assert invoke("calibrate", old, other, "--backend", "nobody").exit_code == 4


def test_calibrate_warns_of_thresholds_that_guard_nothing(save: Save, row: Make) -> None:
    many = [replace(A, lengths=(length,)) for length in range(1, 12)]

    def told(*, first: float, others: float) -> str:  # on stderr, and in the file
        times = [(many[0], first), *((case, others) for case in many[1:])]
        runs = [save("a", *(row(case, 1.0) for case, _ in times)), save("b", *(row(case, ms) for case, ms in times))]
        result = invoke("calibrate", *runs)
        assert result.exit_code == 0
        note, _, _ = result.stderr.partition("\n")
        assert ("# Beware: " in result.stdout) == bool(note)
        assert note.replace("note: ", "# Beware: ") in result.stdout
        return result.stderr

    assert told(first=1.05, others=1.05) == ""
    assert told(first=1.07, others=1.0).startswith(
        f"note: these thresholds guard little: a slow-down of 10% passes in 1 cases, such as {many[0].id}\nhint: "
    )
    assert "a slow-down of 10% passes in every case" in told(first=1.07, others=1.07)


# Show and schema


def test_show_renders_what_was_printed(save: Save, row: Make, verified: Make, make_run: Callable[..., Run]) -> None:
    bench, verify = [row(A, 1.0), row(A, 2.0, "fla")], [verified(A, "flashqla", 1e-3, 2e-3)]
    assert invoke("show", save("bench", *bench)).stdout == bench_text(make_run(*bench))
    path = save("verify", *verify, kind="verify-fwd")
    run = make_run(*verify, kind="verify-fwd")
    assert invoke("show", path).stdout == verify_text(run)
    assert invoke("show", path, "--format", "markdown").stdout == markdown(page(run))
    assert invoke("show", "none.json").exit_code == 2


def test_show_adds_columns(save: Save, row: Make, verified: Make) -> None:
    path = save("bench", row(A, 1.0, peak_bytes=2**21))
    assert "peak MiB" not in invoke("show", path).stdout
    assert "2.0" in invoke("show", path, "--memory").stdout
    assert "| peak MiB flashqla |" in invoke("show", path, "--memory", "--format", "markdown").stdout
    assert "TFLOP/s" in invoke("show", path, "--roofline").stdout
    refused = invoke("show", save("verify", verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd"), "--memory")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: a verify run has no such columns\n  given      --memory\n")
    assert invoke("show", path, "--details").exit_code == 2
    assert (
        "cosine"
        in invoke("show", save("verify", verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd"), "--details").stdout
    )


def test_show_as_csv(save: Save, row: Make, absent: Make) -> None:
    path = save("run", row(A, 1.5), absent(B, "fla", reason='no "fla",\nsorry'))
    first, second = csv.DictReader(io.StringIO(invoke("show", path, "--format", "csv").stdout))
    assert (first["case_id"], first["timing.gpu_ms"], first["timing.samples"]) == (A.id, "1.5", "; ".join(["1.5"] * 6))
    assert (second["status"], second["reason"], second["timing.gpu_ms"]) == ("missing", 'no "fla",\nsorry', "")


@pytest.mark.parametrize(
    "command",
    [
        ["show", "RUN"],
        ["show", "RUN", "--format", "markdown"],
        ["show", "RUN", "--format", "csv"],
        ["compare", "RUN", "RUN", "--all"],
        ["compare", "RUN", "RUN", "--all", "--format", "github"],
        ["report", "RUN", "--format", "text"],
        ["report", "RUN", "--format", "markdown"],
        ["cases", "--cases", "CASES"],
        ["cases", "--cases", "CASES", "-k", "\x1bnothing"],
    ],
    ids=" ".join,
)
def test_files_do_not_control_the_terminal(
    command: list[str], save: Save, row: Make, absent: Make, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    controls = "\x1b[31m\a\x9b1m\x7f\r"
    environment = replace(make_run().environment, gpu=f"a GPU{controls}")
    run = save("run", row(A, 1.0), absent(B, f"fla{controls}", "failed", reason=controls), environment=environment)
    cases = tmp_path / "cases.toml"
    cases.write_text('[a]\nhk = 1\nhv = 1\nlengths = [1]\nnote = "\\u001b[31m\\u009b1m\\ttab"\n')
    result = invoke(*({"RUN": run, "CASES": str(cases)}.get(word, word) for word in command))
    shown = result.stdout + result.stderr
    assert result.exit_code in (0, 4), result.stderr
    assert not any(unicodedata.category(letter) == "Cc" for letter in shown.replace("\n", "").replace("\t", ""))
    assert "\N{REPLACEMENT CHARACTER}" in shown
    assert ("\ttab" in shown) == (command == ["cases", "--cases", "CASES"])


def test_schema_is_the_one_of_the_records() -> None:
    content = json.loads(invoke("schema").stdout)
    assert content["properties"]["schema_version"]["const"] == 1
    assert {"argv", "environment", "records"} <= set(content["properties"])


# Without torch


WITHOUT_TORCH = """
import sys
import unicodedata

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "tilelang", "tvm_ffi", "triton", "pynvml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from flashqla.cli.app import main
main()
"""


@pytest.mark.parametrize("command", ["compare", "calibrate", "show", "schema", "report", "cases"])
def test_commands_run_where_torch_is_not_installed(command: str, old: str) -> None:
    other = str(Path(shutil.copy(old, f"{old}.again.json")))
    files = {"compare": [old, old], "calibrate": [old, other], "show": [old], "report": [old, "--format", "markdown"]}
    files["cases"] = ["--suite", "smoke"]
    call = [command, *files.get(command, [])]
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *call], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


@pytest.mark.parametrize("command", ["compare", "calibrate", "show", "schema"])
def test_help_comes_at_once(command: str, starts_at_once: Callable[..., bool]) -> None:
    call = [sys.executable, "-m", "flashqla", command, "--help"]
    assert starts_at_once(*call)
    traced = subprocess.run([call[0], "-X", "importtime", *call[1:]], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in traced.stderr.splitlines()}
    assert "flashqla" in imported
    assert not {"torch", "numpy", "scipy"} & imported


def test_a_reference_that_became_slower_is_shown_and_fails_nothing(save: Save, row: Make) -> None:
    old, new = (
        save(name, row(A, 1.0), row(A, ms, backend="torch-recurrent")) for name, ms in (("before", 1.0), ("after", 1.5))
    )
    result = invoke("compare", old, new)
    assert result.exit_code == 0
    assert "torch-recurrent (does not count): 1 slower" in result.stdout
    assert invoke("compare", old, new, "--backend", "torch-recurrent").exit_code == 1
