"""Inputs that have broken implementations of the gated delta rule, small enough for float64 on a CPU."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, softplus

from flashqla.reference import (
    chunk_gated_delta_rule_backward,
    chunk_gated_delta_rule_reference,
    recurrent_gated_delta_rule,
)

RULES = [recurrent_gated_delta_rule, chunk_gated_delta_rule_reference]
TOKEN_TENSORS = ("q", "k", "v", "g", "beta")


def part(problem: Any, begin: int, end: int, sequence: int) -> dict[str, Any]:
    """The arguments of one sequence of a pack, as a batch of one."""
    rows = {name: problem[name][:, begin:end] for name in TOKEN_TENSORS}
    return {**rows, "initial_state": problem["initial_state"][sequence : sequence + 1]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tail", [47, 1])
def test_rows_past_the_last_offset_are_never_read(make_problem, run, assert_same, rule, tail):
    """Lengths 73, 42, 94, and NaN behind them: zeros there, and the same results in front."""
    lengths = [73, 42, 94]
    poisoned = make_problem(lengths, hk=2, hv=4, tail=tail)
    poisoned.do[:, -tail:] = torch.nan
    clean = make_problem(lengths, hk=2, hv=4)
    clean.arguments |= {name: poisoned[name][:, :-tail] for name in TOKEN_TENSORS}
    clean.arguments["initial_state"] = poisoned["initial_state"]
    clean.do, clean.dht = poisoned.do[:, :-tail], poisoned.dht
    results = run(rule, poisoned)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (results[name][:, -tail:] == 0).all(), name
        results[name] = results[name][:, :-tail]
    assert_same(results, run(rule, clean), 1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_initial_state_gradient_from_the_output_alone(make_problem, run, assert_same, rule):
    """dh0 = sum over tokens of (transition up to the token)^T of scale q do^T, computed by linearity in h0."""
    problem = make_problem([20], hk=1, hv=1, key_dim=4, value_dim=3)
    problem.dht = None
    zero_v = {**problem.arguments, "v": torch.zeros_like(problem["v"])}
    expected = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    for i in range(4):
        for j in range(3):
            unit = torch.zeros_like(expected)
            unit[0, 0, i, j] = 1
            o, _ = recurrent_gated_delta_rule(**{**zero_v, "initial_state": unit})
            expected[0, 0, i, j] = (o * problem.do).sum()
    found = run(rule, problem)["dinitial_state"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_empty_sequences_hand_their_state_through(make_problem, run, assert_same, rule):
    lengths = [0, 64, 0, 0, 130, 1, 0]
    problem = make_problem(lengths, hk=2, hv=4)
    results = run(rule, problem)
    empty = [n for n, length in enumerate(lengths) if length == 0]
    assert torch.equal(results["final_state"][empty], problem["initial_state"][empty])
    assert torch.equal(results["dinitial_state"][empty], problem.dht[empty])

    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)
    assert torch.equal(gradients.dinitial_state[empty], problem.dht[empty])

    for n in (1, 4, 5):
        begin = sum(lengths[:n])
        _, state = rule(**part(problem, begin, begin + lengths[n], n), output_final_state=True)
        torch.testing.assert_close(results["final_state"][n], state[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tail", [0, 5])
def test_pack_of_nothing_but_empty_sequences(make_problem, run, rule, tail):
    problem = make_problem([0, 0, 0], hk=2, hv=4, tail=tail)
    results = run(rule, problem)
    assert results["o"].shape == (1, tail, 4, 12)
    assert torch.equal(results["final_state"], problem["initial_state"])
    assert torch.equal(results["dinitial_state"], problem.dht)
    assert all((results[name] == 0).all() for name in ("o", "dq", "dk", "dv", "dg", "dbeta"))
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)
    assert torch.equal(gradients.dinitial_state, problem.dht)
    assert gradients.dq.shape == problem["q"].shape

    problem.arguments["initial_state"] = None
    _, state = rule(**problem.arguments, output_final_state=True)
    assert (state == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_batch_without_tokens(make_problem, run, rule):
    problem = make_problem([0, 0], dense=True)
    results = run(rule, problem)
    assert results["o"].shape == (2, 0, 2, 12)
    assert torch.equal(results["final_state"], problem["initial_state"])
    assert torch.equal(results["dinitial_state"], problem.dht)


@pytest.mark.parametrize("gate", ["zero", "half_zero"])
def test_zero_gates_are_the_plain_delta_rule(make_problem, run, assert_same, gate):
    problem = make_problem([300], hk=1, hv=2, key_dim=16, value_dim=16, gate=gate)
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)
    single = make_problem([300], hk=1, hv=2, key_dim=16, value_dim=16, gate=gate, dtype=torch.float32)
    assert_same(run(chunk_gated_delta_rule_reference, single), run(recurrent_gated_delta_rule, single), 5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reset", [-torch.inf, -1e30, -90.0])
@pytest.mark.parametrize("token", [0, 37, 63, 64, 129])
def test_one_reset(make_problem, run, assert_same, reset, token, dtype):
    problem = make_problem([130], hk=1, hv=2, dtype=dtype)
    problem["g"][:, token] = reset
    truth = run(recurrent_gated_delta_rule, problem)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    results = run(chunk_gated_delta_rule_reference, problem)
    assert_same(results, truth, tolerance)
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)._asdict()
    assert_same(gradients, {name: truth[name] for name in gradients}, tolerance)
    if reset < -1000:  # nothing from before the token reaches the output or the final state behind it
        assert (truth["dinitial_state"] == 0).all() == (token == 0)
        assert (results["dg"][:, token] == 0).all()
        assert (gradients["dg"][:, token] == 0).all()


def test_reset_forgets_what_was_before(make_problem):
    problem = make_problem([130], hk=1, hv=2)
    problem["g"][:, 37] = -torch.inf
    o, state = chunk_gated_delta_rule_reference(**problem.arguments, output_final_state=True)
    after = {name: problem[name][:, 37:] for name in TOKEN_TENSORS}
    o_after, state_after = recurrent_gated_delta_rule(**after, output_final_state=True)
    torch.testing.assert_close(o[:, 37:], o_after, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, state_after, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_gate_nearly_zero(make_problem, run, assert_same, dtype):
    problem = make_problem([130], hk=1, hv=2, gate="tiny", dtype=dtype)
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth, 1e-10 if dtype == torch.float64 else 1e-4)


def test_every_token_a_reset(make_problem, run, assert_same):
    problem = make_problem([130], hk=1, hv=2)
    problem["g"].fill_(-torch.inf)
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)
    expected = 8**-0.5 * problem["beta"][..., None] * (problem["q"] * problem["k"]).sum(-1, keepdim=True) * problem["v"]
    torch.testing.assert_close(truth["o"], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1000])
def test_lengths_around_the_chunk(make_problem, run, assert_same, tokens):
    problem = make_problem([tokens], hk=1, hv=2)
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [2, 16, 17, 64, 65, 129])
def test_one_more_token_continues_from_the_final_state(make_problem, rule, tokens):
    problem = make_problem([tokens], hk=1, hv=2)
    o, state = rule(**problem.arguments, output_final_state=True)
    o_first, between = rule(**part(problem, 0, tokens - 1, 0), output_final_state=True)
    last = part(problem, tokens - 1, tokens, 0) | {"initial_state": between}
    o_last, state_last = rule(**last, output_final_state=True)
    torch.testing.assert_close(torch.cat([o_first, o_last], dim=1), o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state_last, state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("hk", "hv"), [(1, 3), (2, 6), (4, 12), (8, 24), (16, 48), (2, 4), (2, 8), (16, 64), (1, 1)])
def test_value_heads_of_a_key_head(make_problem, run, assert_same, hk, hv):
    """The same as a call whose key heads are repeated, with the gradients of the copies added."""
    problem = make_problem([70], hk=hk, hv=hv, key_dim=4, value_dim=4)
    repeated = make_problem([70], hk=hk, hv=hv, key_dim=4, value_dim=4)
    for name in ("q", "k"):
        repeated.arguments[name] = problem[name].repeat_interleave(hv // hk, dim=2)
    expected = run(recurrent_gated_delta_rule, repeated)
    for name in ("dq", "dk"):
        expected[name] = expected[name].unflatten(2, (hk, hv // hk)).sum(3)
    assert_same(run(recurrent_gated_delta_rule, problem), expected)
    assert_same(run(chunk_gated_delta_rule_reference, problem), expected)
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)._asdict()
    assert_same(gradients, {name: expected[name] for name in gradients})


def test_pack_equals_separate_calls(make_problem, run, assert_same):
    lengths = [410, 431, 294, 991, 386, 1584]
    problem = make_problem(lengths, hk=16, hv=32, key_dim=8, value_dim=8)
    results = run(chunk_gated_delta_rule_reference, problem)
    begin = 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        alone = make_problem([length], hk=16, hv=32, key_dim=8, value_dim=8, dense=True)
        alone.arguments |= part(problem, begin, begin + length, n)
        alone.do, alone.dht = problem.do[:, rows], problem.dht[n : n + 1]
        here = {
            name: x[n : n + 1] if name in ("final_state", "dinitial_state") else x[:, rows]
            for name, x in results.items()
        }
        assert_same(here, run(chunk_gated_delta_rule_reference, alone), 1e-13)
        begin += length


@pytest.mark.parametrize("rule", RULES)
def test_state_v_first_transposes_states_and_nothing_else(make_problem, run, assert_same, rule):
    problem = make_problem([70, 20], key_dim=8, value_dim=12)
    expected = run(rule, problem)
    for name in ("final_state", "dinitial_state"):
        expected[name] = expected[name].mT
    problem.arguments["initial_state"] = problem["initial_state"].mT
    problem.dht = problem.dht.mT
    assert_same(run(rule, problem, state_v_first=True), expected, 1e-14)
    gradients = chunk_gated_delta_rule_backward(
        **problem.arguments, do=problem.do, dht=problem.dht, state_v_first=True
    )._asdict()
    assert_same(gradients, {name: expected[name] for name in gradients})


@pytest.mark.parametrize("rule", RULES)
def test_in_op_norm_equals_a_normalised_call(make_problem, run, assert_same, rule):
    """Rows of norm 5, where a norm that is ignored would show."""
    problem = make_problem([70], hk=1, hv=2)
    normalised = make_problem([70], hk=1, hv=2)
    for name in ("q", "k"):
        problem.arguments[name] = 5 * problem[name]
        x = problem[name]
        normalised.arguments[name] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    results = run(rule, problem, use_qk_l2norm_in_kernel=True)
    expected = run(rule, normalised)
    for name in ("q", "k"):  # chain rule of the norm
        x = problem[name].detach().requires_grad_()
        y = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        expected[f"d{name}"] = torch.autograd.grad(y, x, expected[f"d{name}"])[0]
    assert_same(results, expected, 1e-12)
    assert (results["o"] - run(rule, problem)["o"]).abs().max() > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gate_dtype(make_problem, run, assert_same, rule, dtype):
    """A gate of any dtype counts with its exact value, and its gradient comes back in its dtype."""
    problem = make_problem([130], hk=1, hv=2, key_dim=16, value_dim=16, dtype=torch.float32)
    problem.arguments |= {name: problem[name].to(dtype) for name in ("g", "beta")}
    results = run(rule, problem)
    assert results["dg"].dtype == results["dbeta"].dtype == dtype
    assert results["dq"].dtype == torch.float32
    exact = make_problem([130], hk=1, hv=2, key_dim=16, value_dim=16, dtype=torch.float32)
    exact.arguments |= {name: problem[name].double() for name in TOKEN_TENSORS}
    expected = run(recurrent_gated_delta_rule, exact)
    gates = {"dg", "dbeta"}
    assert_same({n: results[n] for n in gates}, {n: expected[n] for n in gates}, 4 * torch.finfo(dtype).eps + 1e-6)
    rest = expected.keys() - gates
    assert_same({n: results[n] for n in rest}, {n: expected[n] for n in rest}, 3e-6)


def test_float32_gates_are_not_rounded_down(make_problem):
    """bfloat16 would drop the 1/300: a state that no token writes to shows it after 4096 tokens."""
    tokens, decay = 4096, 1 + 1 / 300
    problem = make_problem([tokens], hk=1, hv=1, key_dim=4, value_dim=4, dtype=torch.bfloat16)
    problem["beta"].zero_()
    problem.arguments["g"] = torch.full((1, tokens, 1), -decay / tokens)
    _, state = chunk_gated_delta_rule_reference(**problem.arguments, output_final_state=True)
    torch.testing.assert_close(state, math.exp(-decay) * problem["initial_state"].float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_slices_of_packed_buffers(make_problem, run, assert_same, rule):
    """q, k, v out of one projection, g and beta out of one buffer, and gradients with other strides."""
    tokens, hk, hv, key_dim, value_dim = 70, 2, 4, 8, 12
    plain = make_problem([tokens], hk=hk, hv=hv, key_dim=key_dim, value_dim=value_dim)
    packed = make_problem([tokens], hk=hk, hv=hv, key_dim=key_dim, value_dim=value_dim)
    flat = torch.cat([plain[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    q, k, v = flat.split([hk * key_dim, hk * key_dim, hv * value_dim], dim=-1)
    gates = torch.stack([plain["g"], plain["beta"]], dim=-1)
    views = {
        "q": q.unflatten(-1, (hk, key_dim)),
        "k": k.unflatten(-1, (hk, key_dim)),
        "v": v.unflatten(-1, (hv, value_dim)),
        "g": gates[..., 0],
        "beta": gates[..., 1],
    }
    packed.arguments |= views
    assert not any(x.is_contiguous() for x in views.values())
    packed.do = plain.do.transpose(1, 3).contiguous().transpose(1, 3)
    expected = run(rule, plain)
    assert_same(run(rule, packed), expected, 1e-14)
    o, _ = rule(**packed.arguments)  # `run` copies its leaves; here the strided views themselves
    assert_same({"o": o}, {"o": expected["o"]}, 1e-14)

    plain.do = plain.do[:, :1].clone().expand_as(plain.do)
    packed.do = plain.do.contiguous()
    assert_same(run(rule, plain), run(rule, packed), 1e-14)
    for problem in (plain, packed):
        gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)._asdict()
        assert_same(gradients, {name: run(rule, plain)[name] for name in gradients})


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_correlated_keys(make_problem, run, assert_same, tokens):
    """All-positive keys: every pair of rows of K K^T is near 1, and the inverse is far from the identity."""
    problem = make_problem([tokens], hk=1, hv=2, key_dim=32, value_dim=16, keys="correlated")
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht)._asdict()
    assert_same(gradients, {name: truth[name] for name in gradients})
    single = make_problem([tokens], hk=1, hv=2, key_dim=32, value_dim=16, keys="correlated", dtype=torch.float32)
    assert_same(run(chunk_gated_delta_rule_reference, single), run(recurrent_gated_delta_rule, single), 1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_strong_gates_chained_into_their_parameters(rule):
    """g = -exp(A_log) softplus(a + dt_bias): gradients of the parameters against central differences."""
    torch.manual_seed(0)
    tokens, heads = 130, 2
    q, k = (normalize(torch.randn(1, tokens, heads, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    v, do = (torch.randn(1, tokens, heads, 8, dtype=torch.float64) for _ in range(2))
    beta = torch.rand(1, tokens, heads, dtype=torch.float64)
    a = torch.randn(1, tokens, heads, dtype=torch.float64)

    def loss(A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
        g = -A_log.exp() * softplus(a + dt_bias)
        return (rule(q, k, v, g, beta)[0] * do).sum()

    A_log = torch.full((heads,), 16.0, dtype=torch.float64).log().requires_grad_()
    dt_bias = torch.full((heads,), -3.0, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(loss, (A_log, dt_bias))
