"""Kernels of several source trees in one process, in turn: what a change claims about speed, from one machine.

    python scripts/ab.py base=. new=../other-tree --fwd 16/64:8192x4 --fwd 2/8:32768 --bwd 16/32:32768:zero

    python scripts/ab.py base=. new=../other-tree --suite qwen

A tree is a folder that holds the package `flashqla`, as `git worktree add` and `git archive` make them. A problem is
key heads / value heads : lengths : gate; lengths as 32768, 8192x4 or 28672+4096; the gate as in `flashqla cases`,
mixed unless another is given. A suite is all rows of a published table.

Of each problem and tree: whether results are bit for bit those of the first tree, and the same in a second call; the
median of the milliseconds that `flashqla bench` would measure with the trees as backends, a CUDA graph behind a cold L2
cache, in rounds, because a GPU is faster while it is cool; and the microseconds of each kernel (CUPTI, warm L2). In the
end, of each tree, its time over the first tree's in the geometric mean, by how long calls take. Needs a Hopper GPU.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import geometric_mean, median
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

SUITES = {"qwen": "fwd", "bwd": "bwd"}  # those whose rows differ in nothing but what a problem has
BOUNDS = (0.06, 0.1, 0.2, 0.4)  # ms, between which means are taken apart: what starts a call counts in short ones


@dataclass(frozen=True)
class Problem:
    direction: str  # fwd or bwd
    hk: int
    hv: int
    lengths: tuple[int, ...]
    gate: str = "mixed"


@dataclass
class Result:
    """What was found of a problem, by the names of the trees."""

    problem: Problem
    same_as_first: dict[str, bool] = field(default_factory=dict)
    same_again: dict[str, bool] = field(default_factory=dict)
    relative_l2: dict[str, float] = field(default_factory=dict)  # of the output that differs most from the first tree's
    ms: dict[str, list[float]] = field(default_factory=dict)  # of each round, as they came
    kernel_us: dict[str, dict[str, float]] = field(default_factory=dict)


def problem(direction: str, text: str) -> Problem:
    """A problem as the command line gives it. Raises ValueError for text that is none."""
    heads, _, rest = text.partition(":")
    lengths, _, gate = rest.partition(":")
    hk, hv = map(int, heads.split("/"))
    sequences: list[int] = []
    for part in lengths.split("+"):
        length, times, count = part.partition("x")
        sequences += [int(length)] * (int(count) if times else 1)
    return Problem(direction, hk, hv, tuple(sequences), gate or "mixed")


def ours(name: str) -> bool:
    return name == "flashqla" or name.startswith("flashqla.")


class Tree:
    """A source tree. Inside `with`, its modules are the ones that imports find, also those inside functions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.modules: dict[str, ModuleType] = {}
        self._others: dict[str, ModuleType] = {}
        if not (self.folder / "flashqla" / "__init__.py").is_file():
            raise ValueError(f"{folder} holds no package flashqla")

    def __enter__(self) -> "Tree":
        self._others = {name: sys.modules.pop(name) for name in [*sys.modules] if ours(name)}
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.path.remove(str(self.folder))
        self.modules = {name: sys.modules.pop(name) for name in [*sys.modules] if ours(name)}
        sys.modules.update(self._others)
        strangers = [name for name, module in self.modules.items() if not self._holds(module)]
        if strangers and error is None:
            raise RuntimeError(f"{', '.join(strangers)} did not come from {self.folder}")

    def _holds(self, module: ModuleType) -> bool:
        return module.__file__ is not None and Path(module.__file__).is_relative_to(self.folder)


@contextmanager
def second_registrations() -> Iterator[None]:
    """The op of a second tree has the name of the first one's, which PyTorch refuses. The scripts call neither."""
    names = ("define", "impl", "register_fake", "register_autograd")
    kept = {name: getattr(torch.library, name) for name in names}

    def tolerant(register: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            try:
                return register(*arguments, **options)
            except RuntimeError as error:
                if "already" not in str(error) and "multiple times" not in str(error):
                    raise
                return lambda function: function

        return attempt

    for name, register in kept.items():
        setattr(torch.library, name, tolerant(register))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*all operators", UserWarning)
            yield
    finally:
        for name, register in kept.items():
            setattr(torch.library, name, register)


def load(tree: Tree) -> None:
    """The op of this process is that of the tree from now on, also elsewhere."""
    with tree, second_registrations():
        import flashqla.inputs
        import flashqla.measure
        import flashqla.ops.gated_delta_rule  # noqa: F401


def call_of(tree: Tree, given: Problem, inputs: Any) -> Callable[[], list[Tensor]]:
    """A call of a tree's kernels."""
    op, checks = (tree.modules[f"flashqla.ops.{name}"] for name in ("gated_delta_rule", "checks"))
    # fmt: off
    with tree:
        laid_out = checks.problem(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, None, inputs.initial_state,
                                  True, False, inputs.cu_seqlens, False, True, inputs.cu_seqlens_cpu)
    # fmt: on

    def call() -> list[Tensor]:
        with tree:
            if given.direction == "bwd":
                return [x for x in op._run_backward(laid_out, inputs.do, inputs.dht) if x is not None]
            _, _, o, _, final_state = op._run(laid_out)
            return [o, final_state]

    return call


@torch.no_grad()
def measure(trees: dict[str, Tree], given: Problem, rounds: int, device: str = "cuda") -> Result:
    found = Result(given)
    modules = next(iter(trees.values())).modules
    timing = modules["flashqla.measure"]
    case = modules["flashqla.cases"].Case(given.hk, given.hv, given.lengths, gate=given.gate)
    inputs = modules["flashqla.inputs"].make(case, 0, device, given.direction)
    calls = {name: call_of(tree, given, inputs) for name, tree in trees.items()}
    right: list[Tensor] = []
    for name, call in calls.items():
        results = [x.clone() for x in call()]
        right = right or results
        found.same_as_first[name] = all(map(torch.equal, right, results))
        found.same_again[name] = all(map(torch.equal, results, call()))
        found.relative_l2[name] = max(map(relative_l2, results, right))
    for name, reading in timing.interleaved(calls, timing.Config(repeats=rounds), device).items():
        if reading.error or reading.note:
            raise reading.error or RuntimeError(reading.note)
        found.ms[name] = reading.timing.samples
        found.kernel_us[name] = kernel_us(reading.owner) if reading.owner else {}
    return found


def relative_l2(x: Tensor, right: Tensor) -> float:
    norm = right.double().norm()
    return float((x.double() - right.double()).norm() / norm) if norm else 0.0


def kernel_us(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Kernels of one name together: medians over three replays, summed where a replay has more than one."""
    replays = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: round(median(own) * max(len(own) // replays, 1), 1) for name, own in times.items()}


def show(found: Result) -> None:
    given = found.problem
    print(f"{given.direction} {given.hk}/{given.hv} {'+'.join(map(str, given.lengths))} {given.gate}")
    first = median(next(iter(found.ms.values())))
    for name, times in found.ms.items():
        same = "the same bits" if found.same_as_first[name] else f"differs by {found.relative_l2[name]:.1e}"
        again = "" if found.same_again[name] else ", AND FROM CALL TO CALL"
        print(f"  {name:<10} {median(times):9.4f} ms {median(times) / first:6.3f}  {same}{again}")
        print(f"  {'':<10} {', '.join(f'{kernel} {us}' for kernel, us in found.kernel_us[name].items())}")


def of_suite(tree: Tree, name: str) -> list[Problem]:
    """The rows of a suite."""
    cases = tree.modules["flashqla.cases"].suite(name)
    return [Problem(SUITES[name], case.hk, case.hv, case.lengths, case.gate) for case in cases]


def show_means(results: Sequence[Result]) -> None:
    for direction in ("fwd", "bwd"):
        rows = [{name: median(ms) for name, ms in x.ms.items()} for x in results if x.problem.direction == direction]
        if len(rows) < 2:
            continue
        base, *others = rows[0]
        for name in others:
            parts = []
            for low, high in [(0.0, inf), *pairwise((0.0, *BOUNDS, inf))]:
                ratios = [row[name] / row[base] for row in rows if low <= row[base] < high]
                if ratios:
                    parts.append(f"{low:g} to {high:g} ms {geometric_mean(ratios):.4f} ({len(ratios)})")
            print(f"{direction} {name} over {base}: {', '.join(parts)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--fwd", action="append", default=[], metavar="PROBLEM")
    parser.add_argument("--bwd", action="append", default=[], metavar="PROBLEM")
    parser.add_argument("--suite", action="append", default=[], choices=SUITES)
    parser.add_argument("--rounds", type=int, default=12, help="fewer where they take more than 3 s [12]")
    parser.add_argument("--json", type=Path, help="also write all that was found to this file")
    chosen = parser.parse_args(arguments)
    try:
        trees = {name: Tree(Path(folder)) for name, _, folder in (tree.partition("=") for tree in chosen.trees)}
        problems = [problem(direction, text) for direction in ("fwd", "bwd") for text in getattr(chosen, direction)]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("there is no Hopper GPU here")
    for tree in trees.values():
        load(tree)
    logging.getLogger("tilelang").setLevel(logging.ERROR)  # it tells of each kernel that two trees share
    for name in chosen.suite:
        problems += of_suite(next(iter(trees.values())), name)
    results = []
    for given in problems:
        results.append(measure(trees, given, chosen.rounds))
        show(results[-1])
        torch.cuda.empty_cache()
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    show_means(results)


if __name__ == "__main__":
    main()
