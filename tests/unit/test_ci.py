"""The recipe for CI, run on the CPU in a git repository of its own, and the workflows around it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashqla.records import read

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "scripts" / "ci-bench.sh"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CASE = "hk2-hv4/1x130/reset_inf"
SETTINGS = {
    "DEVICE": "cpu",
    "VERIFY_ARGS": "--suite smoke -k *reset_inf",
    "BENCH_ARGS": "--suite smoke\n  -k *reset_inf --repeats 6\n",  # as a block of YAML has it
    "COMPARE_ARGS": "--fail 9900%",  # other tests share the processor, and times of runs differ by a factor of 20 then
    "OMP_NUM_THREADS": "1",
}


def recipe(repository: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**inherited, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **SETTINGS, **settings}
    return subprocess.run([RECIPE], cwd=repository, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a reset_inf").touch()  # a * among the arguments must not become this name
    git(folder, "init", "--quiet")
    return folder


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


def commit_baseline(repository: Path, *sources: Path) -> None:
    baseline = repository / "bench-baseline"
    baseline.mkdir(exist_ok=True)
    for source in sources:
        shutil.copy(source, baseline / source.name)
    git(repository, "add", "bench-baseline")
    git(repository, "commit", "--quiet", "--message", "Baseline")


def verdicts(markdown: str) -> dict[tuple[str, str], str]:
    """Case and backend -> verdict, of the comparison of times."""
    markdown = markdown.partition("flashqla compare bench fwd")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return {(row[0].replace("\\", ""), row[1]): row[-2] for row in rows if len(row) >= 7 and row[0].startswith("hk")}


def test_recipe_from_the_first_run_to_a_regression(repository: Path, tmp_path: Path) -> None:
    out, page = repository / "out" / "ci", tmp_path / "page.md"
    page.write_text("of an earlier step\n")

    first = recipe(repository, GITHUB_STEP_SUMMARY=str(page))
    assert first.returncode == 0, first.stderr
    names = {"verify.json", "bench-fwd.json", "report.html", "summary.md", "comment.md"}
    assert {path.name for path in out.iterdir()} == names
    summary, comment = (out / "summary.md").read_text(), (out / "comment.md").read_text()
    assert page.read_text() == "of an earlier step\n" + summary
    assert "Nothing got worse. There is no whole baseline yet: commit verify.json" in comment
    assert "No row has a result in both runs." in comment
    assert "flashqla: 1 new" in comment
    assert [record.case_id for record in read(out / "verify.json").records] == [CASE] * 2
    assert "<details>" in summary  # of the report, whose rows a comment has no room for
    assert "<details>" not in comment
    assert (out / "report.html").read_text().startswith("<!doctype html>")

    commit_baseline(repository, out / "verify.json", out / "bench-fwd.json")
    second = recipe(repository, REQUIRE_BASELINE="1")
    assert second.returncode == 0, second.stderr
    comment = (out / "comment.md").read_text()
    assert "\nNothing got worse.\n" in comment
    assert "flashqla compare verify fwd" in comment
    assert "flashqla: 1 same" in comment
    assert "slower" not in verdicts(comment).values()

    baseline = json.loads((repository / "bench-baseline" / "bench-fwd.json").read_text())
    for record in baseline["records"]:
        if record["backend"] == "flashqla":  # as if the op had been a million times as fast
            timing = record["timing"]
            timing["samples"] = [ms / 1e6 for ms in timing["samples"]]
            timing["gpu_ms"] /= 1e6
    faster = tmp_path / "bench-fwd.json"
    faster.write_text(json.dumps(baseline))
    commit_baseline(repository, faster)
    third = recipe(repository)
    assert third.returncode == 1, third.stderr
    comment = (out / "comment.md").read_text()
    assert "**A wrong result, a failed row or a regression.**" in comment
    found = verdicts(comment)
    assert found[CASE, "flashqla"] == "slower"
    assert "slower" not in {word for row, word in found.items() if row != (CASE, "flashqla")}


def test_recipe_without_the_gpu_it_was_promised(repository: Path) -> None:
    out = repository / "out" / "ci"
    out.mkdir(parents=True)
    for name in ("bench-fwd.json", "report.html"):
        (out / name).write_text("of another run")
    done = recipe(repository, DEVICE="cuda")
    assert done.returncode == 3
    assert "CUDA cannot be used here" in done.stderr
    assert {path.name for path in out.iterdir()} == {"summary.md", "comment.md"}
    assert "**Not judged: exit code 3.**" in (out / "comment.md").read_text()


# A `flashqla` that does as it is told, for what needs no measuring.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>calls
case "$1" in
verify) echo {} >out/ci/verify.json; exit ${VERIFY_CODE:-0} ;;
bench) echo {} >out/ci/bench-fwd.json; exit ${BENCH_CODE:-0} ;;
compare) [[ ${COMPARE_CODE:-0} == 0 ]] || { echo "error: refused" >&2; exit $COMPARE_CODE; }
  seq ${ROWS:-1}; echo "${SAID:-}" ;;
report) [[ $* != *summary.md ]] || echo report >out/ci/summary.md ;;
esac
"""


@pytest.fixture
def stand_in(repository: Path, tmp_path: Path) -> dict[str, str]:
    command = tmp_path / "bin" / "flashqla"
    command.parent.mkdir()
    command.write_text(STAND_IN)
    command.chmod(0o755)
    return {"PATH": f"{command.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({}, 0),
        ({"VERIFY_CODE": "1"}, 1),
        ({"BENCH_CODE": "1", "COMPARE_CODE": "3"}, 1),  # the first one
        ({"COMPARE_CODE": "3"}, 3),
    ],
)
def test_recipe_goes_on_after_a_failure_and_remembers_it(
    repository: Path, stand_in: dict[str, str], codes: dict[str, str], code: int
) -> None:
    done = recipe(repository, **stand_in, **codes)
    assert done.returncode == code, done.stderr
    first_words = [line.split()[0] for line in (repository / "calls").read_text().splitlines()]
    assert first_words == ["verify", "bench", "compare", "compare", "report", "report"]
    comment = (repository / "out" / "ci" / "comment.md").read_text()
    assert ("error: refused" in comment) == ("COMPARE_CODE" in codes)


def test_recipe_does_not_say_that_nothing_got_worse_where_it_cannot_know(
    repository: Path, stand_in: dict[str, str]
) -> None:
    comment = repository / "out" / "ci" / "comment.md"
    assert recipe(repository, **stand_in).returncode == 0
    assert "Nothing got worse." in comment.read_text()
    assert recipe(repository, **stand_in, SAID="6 of 8 rows could be judged: 2 unclear.").returncode == 0
    assert "Nothing that could be judged got worse; some rows could not be judged" in comment.read_text()
    assert recipe(repository, **stand_in, COMPARE_CODE="4").returncode == 4
    assert "Not judged: exit code 4.** There was nothing to run or to compare" in comment.read_text()
    assert "Nothing got worse" not in comment.read_text()


def test_recipe_ends_at_an_interrupt(repository: Path, stand_in: dict[str, str]) -> None:
    assert recipe(repository, **stand_in, VERIFY_CODE="130").returncode == 130
    assert len((repository / "calls").read_text().splitlines()) == 1


def test_a_missing_baseline_is_allowed_only_where_there_is_none(repository: Path, stand_in: dict[str, str]) -> None:
    (repository / "bench-baseline").mkdir()
    (repository / "bench-baseline" / "verify.json").touch()
    recipe(repository, **stand_in)
    recipe(repository, **stand_in, REQUIRE_BASELINE="1")
    compared = [line for line in (repository / "calls").read_text().splitlines() if line.startswith("compare")]
    assert ["--allow-missing-baseline" in line for line in compared] == [False, True, False, False]


def test_a_long_comment_is_cut_openly(repository: Path, stand_in: dict[str, str]) -> None:
    recipe(repository, **stand_in, ROWS="20000")
    out = repository / "out" / "ci"
    comment = (out / "comment.md").read_text()
    assert 59_000 < len(comment) < 65_536
    assert comment.endswith("\n\nCut here, because a comment cannot be longer: summary.md has all rows.\n")
    assert "\n20000\n" in (out / "summary.md").read_text()


# Workflows


def load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 takes `on` for a boolean
    return content


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_ask_for_little(path: Path) -> None:
    workflow = load(path)
    assert set(workflow["permissions"].values() if workflow["permissions"] else ()) <= {"read"}
    for name, job in workflow["jobs"].items():
        granted = job.get("permissions", workflow["permissions"])
        writes = {scope for scope, access in granted.items() if access == "write"}
        assert writes == ({"pull-requests"} if name == "comment" else set())
        assert job["timeout-minutes"] <= 120
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
            if "checkout" in step["uses"]:
                assert step["with"]["persist-credentials"] is False
        # What a pull request can name reaches the shell as a variable, never as part of a script.
        assert "${{" not in step.get("run", "")
    for line in path.read_text(encoding="utf-8").splitlines():
        if "uses:" in line:
            assert re.search(r"# v\d+\.\d+\.\d+$", line), f"no version beside the pin: {line}"


def test_tests_workflow_runs_what_contributors_run() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "tests.yml")
    assert any(step.get("run", "").startswith("make test") for step in steps(workflow))


def test_bench_workflow_leaves_the_work_to_the_recipe() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "bench.yml")
    assert set(workflow["on"]) == {"workflow_call", "workflow_dispatch"}
    inputs = workflow["on"]["workflow_call"]["inputs"]
    assert workflow["on"]["workflow_dispatch"]["inputs"] == inputs
    assert len(inputs) <= 10  # more, a workflow that is started by hand cannot have
    assert isinstance(json.loads(inputs["runner"]["default"]), list)
    used = set(re.findall(r"\binputs\.([a-z-]+)", json.dumps(workflow["jobs"])))
    assert used == set(inputs)

    (run,) = [step for step in steps(workflow) if "ci-bench.sh" in step.get("run", "")]
    settings = set(re.findall(r"\$\{([A-Z_]+):-", RECIPE.read_text())) - {"GITHUB_STEP_SUMMARY"}
    assert set(run["env"]) - {"SOURCE"} <= settings
    assert {name for name, value in run["env"].items() if name != "SOURCE" and "${{" in value} == {
        name.replace("-", "_").upper() for name in set(inputs) & {name.lower().replace("_", "-") for name in settings}
    }
    (upload,) = [step for step in steps(workflow) if "upload-artifact" in step.get("uses", "")]
    assert upload["with"]["path"].rstrip("/") == run["env"]["OUT"]
    assert not any("checkout" in step.get("uses", "") for step in workflow["jobs"]["comment"]["steps"])


GH = """#!/usr/bin/env bash
echo "$*" >>calls
[[ $* != *--paginate* ]] || printf "$FOUND"
"""


@pytest.mark.parametrize(
    ("found", "call"),
    [
        ("", "api --silent --method POST repos/o/n/issues/7/comments --field body=@body.md"),
        ("11\\n12\\n", "api --silent --method PATCH repos/o/n/issues/comments/12 --field body=@body.md"),
    ],
)
def test_comment_is_made_once_and_then_replaced(tmp_path: Path, found: str, call: str) -> None:
    workflow = load(ROOT / ".github" / "workflows" / "bench.yml")
    (step,) = [step for step in workflow["jobs"]["comment"]["steps"] if "run" in step]
    (tmp_path / "comment.md").write_text("# flashqla\n")
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "COMMENTS": "repos/o/n/issues/7/comments",
        "FOUND": found,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == call
    assert (tmp_path / "body.md").read_text() == "<!-- flashqla bench -->\n# flashqla\n"
    (query,) = re.findall(r'--jq "(.*?)" \|', step["run"])
    assert "startswith" in query


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_documentation_call_the_workflow_as_it_is(number: int) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    (job,) = yaml.safe_load(examples[number])["jobs"].values()
    workflow = load(ROOT / ".github" / "workflows" / "bench.yml")
    assert set(job["with"]) <= set(workflow["on"]["workflow_call"]["inputs"])
    needed: dict[str, str] = {}
    for called in workflow["jobs"].values():
        needed |= called["permissions"]
    assert job["permissions"] == needed  # less, and GitHub refuses to start it
    assert ".github/workflows/bench.yml" in job["uses"]
