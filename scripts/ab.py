"""Kernels of several source trees in one process, in turn: what a change claims about speed, from one machine.

    python scripts/ab.py base=. new=../other-tree --fwd 16/64:8192x4 --fwd 2/8:32768 --bwd 16/32:32768:zero

A tree is a folder that holds the package `flashqla`, as `git worktree add` and `git archive` make them. A problem is
key heads / value heads : lengths : gate; lengths as 32768, 8192x4 or 28672+4096; the gate as in `flashqla cases`,
mixed unless another is given.

Of each problem and tree: whether results are bit for bit those of the first tree, and the same in a second call; the
median of the milliseconds of a CUDA graph behind a cold L2 cache, over rounds in which the trees take turns; and the
microseconds of each kernel (CUPTI, warm L2). In rounds, because a GPU is faster while it is cool. Needs a Hopper GPU.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 256 * 2**20  # of writes, several times the L2 cache
REPLAYS = 7  # of a graph in a round


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
    ms: dict[str, list[float]] = field(default_factory=dict)  # of each round
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


def load(tree: Tree) -> Tree:
    """The op of this process is that of the tree from now on, also elsewhere."""
    with tree, second_registrations():
        import flashqla.inputs
        import flashqla.ops.gated_delta_rule  # noqa: F401
    return tree


def call_of(tree: Tree, given: Problem, inputs: Any) -> Callable[[], list[Tensor]]:
    """A call of a tree's kernels, to be made inside it."""
    op, checks = (tree.modules[f"flashqla.ops.{name}"] for name in ("gated_delta_rule", "checks"))
    # fmt: off
    laid_out = checks.problem(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, None, inputs.initial_state, True,
                              False, inputs.cu_seqlens, False, True, inputs.cu_seqlens_cpu)
    # fmt: on

    def forward() -> list[Tensor]:
        _, _, o, _, final_state = op._run(laid_out)
        return [o, final_state]

    def backward() -> list[Tensor]:
        return [x for x in op._run_backward(laid_out, inputs.do, inputs.dht) if x is not None]

    return forward if given.direction == "fwd" else backward


def measure(trees: dict[str, Tree], given: Problem, rounds: int) -> Result:
    found = Result(given, ms={name: [] for name in trees})
    first = next(iter(trees.values()))
    with first:
        case = first.modules["flashqla.cases"].Case(given.hk, given.hv, given.lengths, gate=given.gate)
        inputs = first.modules["flashqla.inputs"].make(case, 0, "cuda", given.direction)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    kept: list[list[Tensor]] = []  # what graphs write to
    right: list[Tensor] = []
    for name, tree in trees.items():
        with tree, torch.no_grad():
            call = call_of(tree, given, inputs)
            results = [x.clone() for x in call()]
            right = right or results
            found.same_as_first[name] = all(map(torch.equal, right, results))
            found.same_again[name] = all(map(torch.equal, results, call()))
            found.relative_l2[name] = max(map(relative_l2, results, right))
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                kept.append(call())
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for turn in range(rounds):
        for name in [*trees][:: 1 if turn % 2 == 0 else -1]:
            found.ms[name].append(cold_ms(graphs[name], flush))
    found.kernel_us = {name: kernel_us(graph) for name, graph in graphs.items()}
    return found


def relative_l2(x: Tensor, right: Tensor) -> float:
    norm = right.double().norm()
    return float((x.double() - right.double()).norm() / norm) if norm else 0.0


def cold_ms(graph: torch.cuda.CUDAGraph, flush: Tensor) -> float:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in pairs))


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--fwd", action="append", default=[], metavar="PROBLEM")
    parser.add_argument("--bwd", action="append", default=[], metavar="PROBLEM")
    parser.add_argument("--rounds", type=int, default=6)
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
    results = []
    for given in problems:
        results.append(measure(trees, given, chosen.rounds))
        show(results[-1])
        torch.cuda.empty_cache()
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
