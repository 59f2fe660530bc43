"""Sequences in segments: the same results as whole, against float64, whatever the size of a segment."""

import math
from dataclasses import replace

import pytest
import torch

from flashqla.cases import Case
from flashqla.inputs import make
from flashqla.ops import checks, chunk_gated_delta_rule, plan
from flashqla.reference import chunk_gated_delta_rule_reference

BOUND = 5e-3  # relative L2, bfloat16 operands


def relative(x, truth):
    return ((x.double() - truth).norm() / truth.norm()).item()


def arguments(case):
    inputs = make(case, 11, "cuda")
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")}
    return tensors | {"state_v_first": case.state_v_first, "output_final_state": True}


def run(
    segment_chunks,
    v_tile,
    parts,
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    state_v_first,
    output_final_state,
    output_h=False,
):
    """The kernels under a plan of the test's own."""
    from flashqla.ops.kernels import launch

    problem = checks.problem(
        q,
        k,
        v,
        g,
        beta,
        None,
        initial_state,
        output_final_state,
        False,
        cu_seqlens,
        state_v_first,
        True,
        None,
        output_h=output_h,
    )
    chosen = plan.make(hv=problem.hv, seqlens=problem.seqlens)
    return launch.forward(problem, replace(chosen, segment_chunks=segment_chunks, v_tile=v_tile, parts=parts))


CASES = [
    pytest.param(Case(2, 8, (4096, 1, 63, 2000), gate="mixed"), id="long and short, mixed gate"),
    pytest.param(Case(2, 4, (3000, 0, 1030), gate="zero"), id="nothing forgotten, empty sequence"),
    pytest.param(Case(1, 3, (2500,), gate="strong", initial_state=False), id="all forgotten, no initial state"),
    pytest.param(Case(2, 4, (1030, 777), gate="reset", tail=70), id="resets, rows past the end"),
    pytest.param(Case(2, 4, (1111,) * 3, batch=True, state_v_first=True), id="dense batch, V-first"),
    pytest.param(Case(2, 2, (2048,), keys="correlated", gate="zero", dtype="float16"), id="alike keys, float16"),
    pytest.param(Case(2, 4, (1500,), state_dtype="bfloat16"), id="bfloat16 initial state"),
]


@pytest.mark.parametrize("v_tile", [64, 128])
@pytest.mark.parametrize(("segment_chunks", "parts"), [(1, 1), (5, 1), (5, 2), (16, 1), (16, 4), (3, 4)])
@pytest.mark.parametrize("case", CASES)
def test_segments_of_any_size(case, segment_chunks, parts, v_tile):
    given = arguments(case)
    o, final_state = chunk_gated_delta_rule_reference(**given, dtype=torch.float64)
    first = run(segment_chunks, v_tile, parts, **given)
    again = run(segment_chunks, v_tile, parts, **given)
    assert relative(first.o, o) < BOUND
    assert relative(first.final_state, final_state) < BOUND
    assert torch.equal(first.o, again.o)
    assert torch.equal(first.final_state, again.final_state)
    if case.tail:
        assert not first.o[:, -case.tail :].any()


@pytest.mark.parametrize("exponent", [7, 13, 18, 23])
def test_parts_that_forget_together(exponent):
    """Each part lets 2^-exponent of a state through; by the end of a segment nothing is left of the first one."""
    given = arguments(Case(2, 4, (4096, 1030), gate="zero"))
    given["g"].fill_(-exponent * math.log(2) / (4 * plan.CHUNK))
    o, final_state = chunk_gated_delta_rule_reference(**given, dtype=torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated has NaN in it
    try:
        found = run(16, 64, 4, **given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert relative(found.o, o) < BOUND
    assert relative(found.final_state, final_state) < BOUND


def test_states_of_chunks_in_segments():
    given = arguments(Case(2, 4, (700, 0, 300)))
    whole, split = (run(size, 64, 1, **given, output_h=True) for size in (0, 4))
    assert relative(split.h, whole.h.double()) < BOUND


@pytest.mark.parametrize(
    "case", [Case(2, 8, (32768, 1, 63, 4096)), Case(4, 16, (16384,), batch=True)], ids=lambda case: case.id
)
def test_auto_cp_on_and_off(case):
    given = arguments(case)
    o, final_state = chunk_gated_delta_rule_reference(**given, dtype=torch.float64)
    for auto_cp in (True, False):
        result = chunk_gated_delta_rule(**given, auto_cp=auto_cp)
        assert relative(result[0], o) < BOUND
        assert relative(result[1], final_state) < BOUND


def test_without_auto_cp_neighbours_do_not_matter():
    given = arguments(Case(2, 8, (5000, 640, 1000)))
    o, final_state = chunk_gated_delta_rule(**given, auto_cp=False)
    alone = {name: x[:, 5000:5640] for name, x in given.items() if name in ("q", "k", "v", "g", "beta")}
    o1, final_state1 = chunk_gated_delta_rule(
        **alone, initial_state=given["initial_state"][1:2], output_final_state=True, auto_cp=False
    )
    assert torch.equal(o[:, 5000:5640], o1)
    assert torch.equal(final_state[1:2], final_state1)
