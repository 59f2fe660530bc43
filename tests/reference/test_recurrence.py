"""The token recurrence against its definition, written as plainly as possible."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flashqla.reference import recurrent_gated_delta_rule


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, tokens, hk, key_dim = k.shape
    hv = v.shape[2]
    scale = key_dim**-0.5 if scale is None else scale
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        spans = [(0, begin, end) for begin, end in pairwise(cu_seqlens)]
    o = torch.zeros_like(v)
    final_state = torch.zeros_like(initial_state)
    for n, (b, begin, end) in enumerate(spans):
        for head in range(hv):
            key_head = head // (hv // hk)
            S = initial_state[n, head]
            for t in range(begin, end):
                S = g[b, t, head].exp() * S
                u = beta[b, t, head] * (v[b, t, head] - S.T @ k[b, t, key_head])
                S = S + torch.outer(k[b, t, key_head], u)
                o[b, t, head] = scale * S.T @ q[b, t, key_head]
            final_state[n, head] = S
    return o, final_state


@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "reset"])
@pytest.mark.parametrize(
    ("lengths", "dense"),
    [pytest.param([9, 0, 30, 9, 0], False, id="pack"), pytest.param([20, 20], True, id="dense")],
)
def test_equals_the_definition(make_problem, run, assert_same, lengths, dense, gate):
    problem = make_problem(lengths, hk=2, hv=4, dense=dense, gate=gate)
    assert_same(run(recurrent_gated_delta_rule, problem), run(definition, problem), 1e-13)


def test_scale_is_not_fixed(make_problem, run, assert_same):
    problem = make_problem([7])
    assert_same(run(recurrent_gated_delta_rule, problem, scale=0.3), run(definition, problem, scale=0.3), 1e-13)


def test_states_pass_from_block_to_block(make_problem, run, assert_same, monkeypatch):
    problem = make_problem([50, 3, 20, 0, 33], gate="reset")
    one_block = run(recurrent_gated_delta_rule, problem)
    monkeypatch.setattr("flashqla.reference.recurrent.BLOCK_ROWS", 10)
    assert_same(run(recurrent_gated_delta_rule, problem), one_block, 1e-14)


def test_float32_is_near_float64(make_problem, run, assert_same):
    problem = make_problem([100], hk=1, hv=2, dtype=torch.float32)
    single = run(recurrent_gated_delta_rule, problem, dtype=torch.float32)
    assert {x.dtype for x in single.values()} == {torch.float32}
    assert_same(single, run(recurrent_gated_delta_rule, problem), 1e-6)


def test_truth_for_16_bit_inputs_is_float64(make_problem, run):
    results = run(recurrent_gated_delta_rule, make_problem([5], dtype=torch.bfloat16))
    assert results["o"].dtype == results["final_state"].dtype == torch.float64
    assert results["dq"].dtype == results["dg"].dtype == torch.bfloat16


def test_without_gradients_gives_the_same(make_problem, run):
    problem = make_problem([300, 20])
    o, final_state = recurrent_gated_delta_rule(**problem.arguments, output_final_state=True)
    recorded = run(recurrent_gated_delta_rule, problem)
    assert torch.equal(o, recorded["o"])
    assert final_state is not None
    assert torch.equal(final_state, recorded["final_state"])


def test_gradcheck(make_problem):
    problem = make_problem([3, 0, 5], hk=1, hv=2, key_dim=3, value_dim=2)
    names = ["q", "k", "v", "g", "beta", "initial_state"]
    leaves = [problem[name].requires_grad_() for name in names]

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        tensor_arguments = dict(zip(names, tensors, strict=True))
        return recurrent_gated_delta_rule(
            **tensor_arguments, cu_seqlens=problem["cu_seqlens"], output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    assert torch.autograd.gradcheck(rule, leaves)
