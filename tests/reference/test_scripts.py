"""Scripts for who changes kernels: what they do before, after and beside the GPU."""

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashqla import cases
from flashqla.ops import plan

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ab() -> ModuleType:
    return script("ab")


@pytest.fixture(scope="module")
def splits() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)  # as Python has it for a script: this one imports its neighbour
        return script("splits")


def test_problems_are_read(ab: ModuleType) -> None:
    assert ab.problem("fwd", "16/64:8192x4") == ab.Problem("fwd", 16, 64, (8192,) * 4, "mixed")
    assert ab.problem("bwd", "2/8:28672+4096:zero") == ab.Problem("bwd", 2, 8, (28672, 4096), "zero")
    for text in ("2/8", "2:64", "2/8:64x", "2/8:64+", "a/b:64"):
        with pytest.raises(ValueError):  # noqa: PT011
            ab.problem("fwd", text)


TREES = """
import sys
from pathlib import Path
import ab, flashqla.cases

before = {name: module for name, module in sys.modules.items() if ab.ours(name)}
one, other = (ab.Tree(Path(name)) for name in ("one", "other"))
for tree in (one, other):
    ab.load(tree)
assert {name: module for name, module in sys.modules.items() if ab.ours(name)} == before
plans = [tree.modules["flashqla.ops.plan"] for tree in (one, other)]
assert [hasattr(plan, "mark") for plan in plans] == [False, True]
with other:
    from flashqla.ops import kernels, plan  # kernels for the first time in this tree
    assert plan is plans[1]
    assert Path(kernels.__file__).is_relative_to(Path("other").resolve())
for direction in ("fwd", "bwd"):
    found = ab.measure({"one": one, "other": other}, ab.problem(direction, "1/2:70+0+5"), 3, "cpu")
    assert found.same_as_first == {"one": True, "other": direction == "fwd"}, found
    assert found.same_again == {"one": True, "other": True}, found
    assert found.relative_l2 == {"one": 0.0, "other": 1.0 if direction == "bwd" else 0.0}, found
    assert {name: len(times) for name, times in found.ms.items()} == {"one": 3, "other": 3}, found
assert "flashqla.ops.kernels" in other.modules and "flashqla.ops.kernels" not in one.modules
assert {name: module for name, module in sys.modules.items() if ab.ours(name)} == before
"""


OTHER_GRADIENTS = """
right = chunk_gated_delta_rule_backward
def chunk_gated_delta_rule_backward(*arguments, **options):
    found = right(*arguments, **options)
    return found._replace(dq=2 * found.dq)
"""


def test_trees_have_modules_of_their_own(tmp_path: Path) -> None:
    """In a process of its own: PyTorch keeps the op of the tree that was loaded last."""
    for name in ("one", "other"):
        shutil.copytree(ROOT / "flashqla", tmp_path / name / "flashqla", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("ops/plan", "mark = True\n"), ("reference/backward", OTHER_GRADIENTS)):
        with (tmp_path / f"other/flashqla/{name}.py").open("a") as file:
            file.write(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "scripts", ROOT)))}
    command = [sys.executable, "-W", "error", "-c", TREES]
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


def test_differences_are_told(ab: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([3.0, 4.0])
    assert ab.relative_l2(x * 1.5, x) == pytest.approx(0.5)
    assert ab.relative_l2(x * 0, x * 0) == 0
    names = ("base", "new")
    ab.show(
        ab.Result(
            ab.problem("fwd", "2/8:64"),
            same_as_first={"base": True, "new": False},
            same_again={"base": True, "new": False},
            relative_l2={"base": 0.0, "new": 1e-5},
            ms={"base": [2.0, 1.0, 9.0], "new": [1.0, 1.0, 1.0]},
            kernel_us={name: {"inverse": 1.5} for name in names},
        )
    )
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["base", "2.0000", "ms", "1.000", "the", "same", "bits"]
    assert told[3].endswith("1.0000 ms  0.500  differs by 1.0e-05, AND FROM CALL TO CALL")


@pytest.mark.parametrize("suite", ["qwen", "bwd"])
def test_a_suite_is_all_rows_of_a_table(ab: ModuleType, suite: str) -> None:
    tree = ab.Tree(ROOT)
    with tree:
        from flashqla import cases as of_tree
    problems = ab.of_suite(tree, suite)
    assert {problem.direction for problem in problems} == {"bwd" if suite == "bwd" else "fwd"}
    made = [of_tree.Case(x.hk, x.hv, x.lengths, gate=x.gate).id for x in problems]
    assert made == [case.id for case in cases.suite(suite)]  # with nothing else that a case can have


def test_means_are_told_by_length_of_call(ab: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    given = ab.problem("fwd", "2/8:64")
    times = [(0.05, 0.1), (0.1, 0.05), (1.0, 0.25)]
    ab.show_means([ab.Result(given, ms={"base": [base, base, 9.0], "new": [new]}) for base, new in times])
    assert capsys.readouterr().out == (
        "fwd new over base: 0 to inf ms 0.6300 (3), 0 to 0.06 ms 2.0000 (1), 0.1 to 0.2 ms 0.5000 (1), "
        "0.4 to inf ms 0.2500 (1)\n"
    )
    ab.show_means([ab.Result(given, ms={"base": [1.0], "new": [1.0]})])
    assert not capsys.readouterr().out


def test_splits_are_tried_on_shapes_of_no_suite(splits: ModuleType) -> None:
    shapes = splits.shapes()
    assert len(shapes) == len(set(shapes)) >= 60
    assert not {(case.hk, case.hv, case.lengths) for case in cases.suite("qwen")} & set(shapes)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fixed_splits_are_plans_of_their_direction(splits: ModuleType, direction: plan.Direction) -> None:
    tried = splits.of_suite("bwd")
    assert len(tried) == 48
    for _, hv, lengths in [*splits.shapes(), *tried]:
        chosen = plan.make(hv=hv, seqlens=lengths, tokens=sum(lengths), direction=direction)
        fixed_splits = splits.fixed_splits(chosen, lengths, direction)
        assert len({splits.name(fixed) for fixed in fixed_splits}) == len(fixed_splits)
        for fixed in fixed_splits:
            assert fixed.kernels == plan.SPLIT_KERNELS[direction]
            assert plan.SHORTEST_SEGMENT * fixed.parts <= fixed.segment_chunks <= max(lengths) // 64 + 1


def test_a_summary_of_splits(splits: ModuleType) -> None:
    rows = [
        {"chosen": "a", "whole": "w", "ms": {"a": 1.0, "w": 2.0, "b": 0.5}},
        {"chosen": "w", "whole": "w", "ms": {"w": 1.0, "b": 1.25}},
    ]
    told = splits.summary(rows)
    assert told.startswith(
        "2 shapes and gates, 1 of them split: over whole sequences 0.750 in the mean and 1.000 at most"
    )
    assert told.endswith("over the best plan 1.500 and 2.000")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, on which they would run")
@pytest.mark.parametrize(("name", "arguments"), [("ab", [f"base={ROOT}", "--fwd", "2/8:64"]), ("splits", [])])
def test_scripts_need_a_gpu(
    name: str, arguments: list[str], request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        request.getfixturevalue(name).main(arguments)
    assert ended.value.code == 2
    assert "there is no Hopper GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("tree", ["base=nowhere", "base", "base=scripts"])
def test_a_folder_without_the_package_is_refused(
    ab: ModuleType, tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        ab.main([tree])
    assert "holds no package flashqla" in capsys.readouterr().err
