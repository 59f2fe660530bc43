"""Splitting of sequences on, off, and fixed, on shapes that no suite has: what the plan chooses, and what it could.

    python scripts/splits.py --json splits.json

    python scripts/splits.py --direction backward --suite bwd

Milliseconds of a pass as `flashqla bench --l2 warm` would measure it with the plans as backends, with mixed gates and
with none, and microseconds of each kernel; on the rows of a suite if one is given. Ends with how much more than whole
sequences, and than the best plan, the chosen ones take. Needs a Hopper GPU, and a few minutes.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import ab
import torch

from flashqla import cases, device, inputs, measure
from flashqla.ops import checks, gated_delta_rule, plan

HEADS = ((1, 4), (2, 6), (4, 12), (20, 20), (6, 6), (6, 48), (8, 40))
LENGTHS = (
    (65536,),
    (131072,),
    (512,) * 64,
    (3000,),
    (10000,),
    (777,) * 20,
    (40000, *(5000,) * 4),
    (20000, *(300,) * 10),
    (1500,) * 3,
    (12345, 6789),
)
GATES: tuple[cases.Gate, ...] = ("mixed", "zero")
MOST_ELEMENTS = 131072 * 20 * plan.HEAD_DIM  # of v
SEGMENTS = (2, 4, 8, 16)  # of the longest sequence, of the fixed splits
PARTS = (1, 2, 4)
MOST_STATES = 3  # memory of states over that of v and o
CONFIG = measure.Config(l2="warm")

Shape = tuple[int, int, tuple[int, ...]]  # key heads, value heads, lengths


def shapes() -> list[Shape]:
    """Shapes that no suite has."""
    listed = set(of_suite("qwen"))
    fitting = ((hk, hv, n) for (hk, hv), n in product(HEADS, LENGTHS) if sum(n) * hv * plan.HEAD_DIM <= MOST_ELEMENTS)
    return [shape for shape in fitting if shape not in listed]


def of_suite(name: str) -> list[Shape]:
    """The shapes of the rows of a suite."""
    return [(case.hk, case.hv, case.lengths) for case in cases.suite(name)]


def fixed_splits(chosen: plan.Plan, lengths: tuple[int, ...], direction: plan.Direction) -> list[plan.Plan]:
    longest = -(-max(lengths) // plan.CHUNK)
    plans = []
    for count, v_tile, parts in product(SEGMENTS, plan.V_TILES, PARTS):
        size = -(-longest // count)
        rows = (sum(lengths) // plan.CHUNK // size + len(lengths)) * parts
        most_rows = MOST_STATES * sum(lengths) // plan.CHUNK * plan.TOKENS_KB // plan.STATES_KB
        if size >= plan.SHORTEST_SEGMENT * parts and rows <= most_rows:
            split = replace(chosen, segment_chunks=size, v_tile=v_tile, parts=parts)
            plans.append(replace(split, kernels=plan.SPLIT_KERNELS[direction]))
    return plans


@torch.no_grad()
def times(case: cases.Case, direction: plan.Direction) -> dict[str, Any]:
    from flashqla.ops.kernels import launch, launch_backward

    given = inputs.make(case, 0, "cuda", "bwd" if direction == "backward" else "fwd")
    # fmt: off
    problem = checks.problem(given.q, given.k, given.v, given.g, given.beta, None, given.initial_state, True, False,
                             given.cu_seqlens, False, True, given.cu_seqlens_cpu)
    # fmt: on
    chosen, whole = (gated_delta_rule._plan(replace(problem, auto_cp=auto_cp), direction) for auto_cp in (True, False))
    plans = {name(tried): tried for tried in (whole, chosen, *fixed_splits(chosen, case.lengths, direction))}
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count

    def run(tried: plan.Plan) -> object:
        if given.do is None:
            return launch.forward(problem, tried)
        return launch_backward.backward(problem, tried, given.do, given.dht, None, sm_count)

    calls = {of: partial(run, tried) for of, tried in plans.items()}
    for call in calls.values():
        call()  # compiles
    ms, kernel_us = {}, {}
    for of, reading in measure.interleaved(calls, CONFIG, "cuda").items():
        if reading.timing is None or reading.note:
            raise reading.error or RuntimeError(reading.note)
        ms[of] = reading.timing.gpu_ms
        kernel_us[of] = ab.kernel_us(reading.owner)
    return {"case": case.id, "chosen": name(chosen), "whole": name(whole), "ms": ms, "kernel_us": kernel_us}


def name(of: plan.Plan) -> str:
    return f"{of.segment_chunks} chunks, {of.parts} parts, v_tile {of.v_tile}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    over_whole = [row["ms"][row["chosen"]] / row["ms"][row["whole"]] for row in rows]
    over_best = [row["ms"][row["chosen"]] / min(row["ms"].values()) for row in rows]
    split = sum(row["chosen"] != row["whole"] for row in rows)
    return (
        f"{len(rows)} shapes and gates, {split} of them split: over whole sequences {fmean(over_whole):.3f} in the "
        f"mean and {max(over_whole):.3f} at most, over the best plan {fmean(over_best):.3f} and {max(over_best):.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--suite", choices=ab.SUITES, help="its rows, instead of shapes that no suite has")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    chosen = parser.parse_args(arguments)
    card = device.gpu()
    if card is None or card.capability != device.HOPPER:
        parser.error("there is no Hopper GPU here")
    rows = []
    tried = of_suite(chosen.suite) if chosen.suite else shapes()
    for (hk, hv, lengths), gate in product(tried, GATES):
        rows.append(times(cases.Case(hk, hv, lengths, gate=gate), chosen.direction))
        torch.cuda.empty_cache()
        row = rows[-1]
        print(
            f"{row['case']}: {row['chosen']}, {row['ms'][row['chosen']]:.4f} ms; whole {row['ms'][row['whole']]:.4f} ms"
        )
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1))
    print(summary(rows))


if __name__ == "__main__":
    main()
