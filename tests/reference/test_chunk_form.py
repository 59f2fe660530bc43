"""The chunk form against the token recurrence in float64, values and gradients, and its stages one by one."""

import pytest
import torch
from torch import Tensor

from flashqla.reference import (
    chunk_forward,
    chunk_gate,
    chunk_gated_delta_rule_reference,
    chunk_inverse,
    chunk_states,
    recurrent_gated_delta_rule,
)

GATES = ["typical", "strong", "zero", "half_zero", "tiny", "reset"]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("lengths", "dense"),
    [pytest.param([73, 0, 130, 64, 1], False, id="pack"), pytest.param([70, 70], True, id="dense")],
)
def test_equals_the_recurrence(make_problem, run, assert_same, lengths, dense, gate):
    problem = make_problem(lengths, hk=2, hv=4, dense=dense, gate=gate)
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)


@pytest.mark.parametrize("chunk_size", [1, 16, 48, 128])
def test_chunk_size_does_not_matter(make_problem, run, assert_same, chunk_size):
    problem = make_problem([100, 33], gate="reset")
    truth = run(recurrent_gated_delta_rule, problem)
    assert_same(run(chunk_gated_delta_rule_reference, problem, chunk_size=chunk_size), truth)


def test_states_pass_from_block_to_block(make_problem, run, assert_same, monkeypatch):
    problem = make_problem([200, 30, 64, 0, 129], gate="reset")
    truth = run(recurrent_gated_delta_rule, problem)
    monkeypatch.setattr("flashqla.reference.chunked.BLOCK_ROWS", 128)
    assert_same(run(chunk_gated_delta_rule_reference, problem), truth)


@pytest.mark.parametrize("option", ["state_v_first", "use_qk_l2norm_in_kernel"])
def test_options_equal_those_of_the_recurrence(make_problem, run, assert_same, option):
    problem = make_problem([70, 20], key_dim=8, value_dim=8)
    truth = run(recurrent_gated_delta_rule, problem, **{option: True})
    assert_same(run(chunk_gated_delta_rule_reference, problem, **{option: True}), truth)


@pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunk_gated_delta_rule_reference])
def test_no_gate_and_no_state_are_zeros(make_problem, run, assert_same, rule):
    zeros = make_problem([70, 0, 20], gate="zero")
    zeros.arguments["initial_state"] = torch.zeros_like(zeros["initial_state"])
    absent = make_problem([70, 0, 20], gate="zero", initial_state=False)
    absent.arguments["g"] = None
    expected = run(rule, zeros)
    del expected["dg"], expected["dinitial_state"]
    assert_same(run(rule, absent), expected, 1e-14)


@pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunk_gated_delta_rule_reference])
def test_final_state_only_when_asked_for(make_problem, rule):
    assert rule(**make_problem([5]).arguments)[1] is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
def test_lower_precision_is_near_float64(make_problem, run, assert_same, dtype, tolerance):
    problem = make_problem([150, 64], hk=1, hv=2, key_dim=32, value_dim=32, dtype=dtype)
    results = run(chunk_gated_delta_rule_reference, problem)
    assert results["final_state"].dtype == torch.float32
    assert {x.dtype for name, x in results.items() if name != "final_state"} == {dtype}
    assert_same(results, run(recurrent_gated_delta_rule, problem), tolerance)


def test_is_a_truth_for_16_bit_inputs(make_problem, assert_same):
    """Asked for float64, it differs from the recurrence by float64 rounding alone."""
    problem = make_problem([150, 64], dtype=torch.bfloat16)
    o, state = chunk_gated_delta_rule_reference(**problem.arguments, output_final_state=True, dtype=torch.float64)
    truth_o, truth_state = recurrent_gated_delta_rule(**problem.arguments, output_final_state=True)
    assert o.dtype == torch.float64
    assert_same({"o": o, "state": state}, {"o": truth_o, "state": truth_state}, 1e-13)


def test_gradcheck(make_problem):
    problem = make_problem([3, 0, 6], hk=1, hv=2, key_dim=3, value_dim=2)
    names = ["q", "k", "v", "g", "beta", "initial_state"]
    leaves = [problem[name].requires_grad_() for name in names]

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        tensor_arguments = dict(zip(names, tensors, strict=True))
        return chunk_gated_delta_rule_reference(
            **tensor_arguments, cu_seqlens=problem["cu_seqlens"], output_final_state=True, chunk_size=4
        )

    assert torch.autograd.gradcheck(rule, leaves)


def chunks_of(lengths: list[int], chunk_size: int = 64) -> list[tuple[int, int, int]]:
    """(sequence, begin, end) of every chunk of a pack, as rows of the pack."""
    chunks, row = [], 0
    for n, length in enumerate(lengths):
        chunks += [(n, row + i, row + min(i + chunk_size, length)) for i in range(0, length, chunk_size)]
        row += length
    return chunks


LENGTHS = [70, 0, 64, 5, 129]


def test_gate_restarts_in_every_chunk_of_every_sequence(make_problem):
    g = make_problem(LENGTHS, tail=3)["g"]
    G = chunk_gate(g, torch.tensor([0, *LENGTHS]).cumsum(0))
    expected = torch.zeros_like(g)
    for _, begin, end in chunks_of(LENGTHS):
        expected[:, begin:end] = g[:, begin:end].cumsum(1)
    torch.testing.assert_close(G, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reset_stays_a_reset_in_the_cumulative_gate(dtype):
    """Nothing from before the token is left, nothing behind it is lost, and nothing is NaN."""
    g = torch.full((1, 64, 1), -0.01, dtype=dtype)
    g[:, 37] = -torch.inf
    G = chunk_gate(g)[0, :, 0]
    assert torch.isfinite(G).all()
    assert (G[37:].exp() == 0).all()
    assert ((G[37:, None] - G[:37]).exp() == 0).all()
    torch.testing.assert_close(G[38:] - G[37], -0.01 * torch.arange(1, 27, dtype=dtype), rtol=0, atol=1e-5)


@pytest.mark.parametrize("gate", ["typical", "strong"])
def test_inverse_is_the_inverse_and_takes_the_gate_elementwise(make_problem, gate):
    problem = make_problem(LENGTHS, hk=1, hv=2, gate=gate, tail=3)
    k, g, beta, cu_seqlens = (problem[name] for name in ("k", "g", "beta", "cu_seqlens"))
    A = chunk_inverse(k, g, beta, cu_seqlens)
    assert A.shape == (1, sum(LENGTHS) + 3, 2, 64)
    assert (A[:, sum(LENGTHS) :] == 0).all()
    for head in range(2):
        for _, begin, end in chunks_of(LENGTHS):
            size = end - begin
            K, G = k[0, begin:end, 0], g[0, begin:end, head].cumsum(0)
            L0 = (beta[0, begin:end, head, None] * (K @ K.T)).tril(-1)
            R = (G[:, None] - G[None]).tril().exp().tril()
            identity = torch.eye(size, dtype=torch.float64)
            Tm = A[0, begin:end, head, :size]
            torch.testing.assert_close((identity + L0 * R) @ Tm, identity, rtol=0, atol=1e-13)
            torch.testing.assert_close(Tm, torch.linalg.inv(identity + L0) * R, rtol=0, atol=1e-13)
            assert (A[0, begin:end, head, size:] == 0).all()


@pytest.mark.parametrize("state_v_first", [False, True])
def test_states_are_those_of_the_recurrence_in_front_of_every_chunk(make_problem, state_v_first):
    problem = make_problem(LENGTHS, key_dim=8, value_dim=8)
    arguments = {**problem.arguments, "state_v_first": state_v_first}
    h = chunk_states(**{name: x for name, x in arguments.items() if name != "q"})
    chunks = chunks_of(LENGTHS)
    assert h.shape[:2] == (1, len(chunks))
    first = {}
    for index, (n, begin, _) in enumerate(chunks):
        start = first.setdefault(n, begin)
        rows = {name: arguments[name][:, start:begin] for name in ("q", "k", "v", "g", "beta")}
        _, expected = recurrent_gated_delta_rule(
            **rows,
            initial_state=problem["initial_state"][n : n + 1],
            output_final_state=True,
            state_v_first=state_v_first,
        )
        torch.testing.assert_close(h[0, index], expected[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dense", [False, True])
def test_forward_gives_the_results_of_its_stages(make_problem, dense):
    problem = make_problem([70, 70], hk=1, hv=2, dense=dense)
    arguments = problem.arguments
    result = chunk_forward(**arguments, use_qk_l2norm_in_kernel=True)
    cu_seqlens, l2norm = arguments["cu_seqlens"], {"use_qk_l2norm_in_kernel": True}
    k, v, g, beta = (arguments[name] for name in ("k", "v", "g", "beta"))
    assert torch.equal(result.g, chunk_gate(g, cu_seqlens))
    assert torch.equal(result.A, chunk_inverse(k, g, beta, cu_seqlens, **l2norm))
    assert torch.equal(result.h, chunk_states(k, v, g, beta, arguments["initial_state"], cu_seqlens, **l2norm))
    assert result.h.shape[:2] == ((2, 2) if dense else (1, 4))
    o, final_state = chunk_gated_delta_rule_reference(**arguments, **l2norm, output_final_state=True)
    assert torch.equal(result.o, o)
    assert torch.equal(result.final_state, final_state)


def test_forward_of_16_bit_tensors_gives_the_dtypes_of_the_op(make_problem):
    result = chunk_forward(**make_problem([70], dtype=torch.bfloat16).arguments)
    assert result.A.dtype == result.h.dtype == result.o.dtype == torch.bfloat16
    assert result.g.dtype == result.final_state.dtype == torch.float32
    lean = chunk_forward(**make_problem([70], dtype=torch.bfloat16).arguments, output_A=False, output_h=False)
    assert lean.A is None
    assert lean.h is None
    assert torch.equal(lean.o, result.o)
