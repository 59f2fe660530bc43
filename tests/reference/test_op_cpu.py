"""The public op on CPU tensors: values and gradients against the token recurrence, and what PyTorch makes of the op."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.nn.functional import normalize

from flashqla.errors import ArgumentError, UnsupportedError
from flashqla.ops import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    explain,
    strict,
)
from flashqla.reference import recurrent_gated_delta_rule

LENGTHS = [0, 64, 1, 66]
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture
def problem(make_problem):
    def make(lengths=LENGTHS, **options):
        return make_problem(lengths, hk=1, hv=2, key_dim=128, value_dim=128, **options)

    return make


@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "reset"])
def test_values_and_gradients(problem, run, assert_same, gate):
    given = problem(gate=gate)
    assert_same(run(chunk_gated_delta_rule, given), run(recurrent_gated_delta_rule, given))


@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "reset"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_backward_from_what_forward_returned(problem, run, assert_same, gate, state_v_first):
    given = problem(gate=gate, tail=5)
    expected = run(recurrent_gated_delta_rule, given, state_v_first=state_v_first)
    g, A, *_ = chunk_gated_delta_rule_fwd(**given.arguments, state_v_first=state_v_first)
    rest = {name: x for name, x in given.arguments.items() if name != "g"} | {"do": given.do}
    results = chunk_gated_delta_rule_bwd(**rest, g=g, A=A, dht=given.dht, state_v_first=state_v_first)
    found = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dinitial_state"), results, strict=True))
    assert_same(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("wrong", ["g", "A", "do", "dht"])
def test_backward_refuses_what_forward_does_not_return(problem, wrong):
    given = problem()
    g, A, *_ = chunk_gated_delta_rule_fwd(**given.arguments)
    arguments = given.arguments | {"g": g, "A": A, "do": given.do, "dht": given.dht}
    arguments[wrong] = arguments[wrong].half() if wrong == "g" else arguments[wrong][..., :1]
    with pytest.raises(ArgumentError, match=rf"{wrong} must be"):
        chunk_gated_delta_rule_bwd(**arguments)


def test_rows_past_the_last_offset(problem, run):
    results = run(chunk_gated_delta_rule, problem(tail=7))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (results[name][:, -7:] == 0).all(), name
    assert all(torch.isfinite(x).all() for x in results.values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"state_v_first": True}, id="V-first"),
        pytest.param({"use_qk_l2norm_in_kernel": True}, id="l2norm"),
        pytest.param({"scale": 0.3}, id="scale"),
    ],
)
def test_options(problem, run, assert_same, options):
    given = problem()
    given.arguments |= {name: 5 * given[name] for name in ("q", "k") if "use_qk_l2norm_in_kernel" in options}
    assert_same(run(chunk_gated_delta_rule, given, **options), run(recurrent_gated_delta_rule, given, **options))


def test_no_gate_means_no_decay(problem, run, assert_same):
    given = problem(gate="zero")
    truth = run(recurrent_gated_delta_rule, given)
    del truth["dg"]
    given.arguments["g"] = None
    assert_same(run(chunk_gated_delta_rule, given), truth)


def test_loss_on_one_result_alone(problem, run, assert_same):
    given = problem([70])
    for outputs in (("o",), ("final_state",)):
        gradients = []
        for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
            leaves = {name: given[name].clone().requires_grad_() for name in TENSORS}
            o, final_state = rule(**given.arguments | leaves, output_final_state=True)
            loss = (o * given.do).sum() if outputs == ("o",) else (final_state * given.dht).sum()
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            gradients.append(dict(zip(leaves, found, strict=True)))
        assert_same(*gradients)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(problem, run, assert_same, gate_dtype):
    """o and gradients have the dtypes of their inputs, the state is float32; only results are rounded."""
    given = problem(dtype=torch.bfloat16)
    given.arguments |= {name: given[name].to(gate_dtype) for name in ("g", "beta", "initial_state")}
    given.dht = given.dht.float()
    results = run(chunk_gated_delta_rule, given)
    assert {name: x.dtype for name, x in results.items()} == {
        **dict.fromkeys(("o", "dq", "dk", "dv"), torch.bfloat16),
        **dict.fromkeys(("dg", "dbeta", "dinitial_state"), gate_dtype),
        "final_state": torch.float32,
    }
    assert_same(results, run(recurrent_gated_delta_rule, given), 4e-3)


def test_autocast_does_not_lower_precision(problem):
    given = problem(dtype=torch.float32)
    expected, _ = chunk_gated_delta_rule(**given.arguments)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = chunk_gated_delta_rule(**given.arguments)
    assert torch.equal(o, expected)


def test_forward_results_of_a_pack(problem):
    """G and A by their definitions; h are the states after every 64 tokens."""
    given = problem(gate="strong", keys="correlated")
    G, A, o, h, final_state = chunk_gated_delta_rule_fwd(**given.arguments, output_h=True)
    expected, expected_state = chunk_gated_delta_rule(**given.arguments, output_final_state=True)
    assert torch.equal(o, expected)
    assert torch.equal(final_state, expected_state)

    assert h.shape[1] == 4  # chunks of 64, 1, 64 and 2 tokens
    begin = 65
    last = {name: given[name][:, begin : begin + 64] for name in ("q", "k", "v", "g", "beta")}
    _, after = recurrent_gated_delta_rule(**last, initial_state=given["initial_state"][3:], output_final_state=True)
    torch.testing.assert_close(h[:, 2], given["initial_state"][3:])
    torch.testing.assert_close(h[:, 3], after)

    g, beta = (last[name][0].T for name in ("g", "beta"))
    torch.testing.assert_close(G[0, begin : begin + 64].T, g.cumsum(-1))
    R = (g.cumsum(-1)[:, :, None] - g.cumsum(-1)[:, None, :]).tril().exp()
    K = last["k"][0, :, 0]
    M = (beta[:, :, None] * R * (K @ K.T)).tril(-1)
    Tm = A[0, begin : begin + 64].transpose(0, 1)
    identity = torch.eye(64, dtype=torch.float64).expand(2, 64, 64)
    torch.testing.assert_close(Tm @ (identity + M), identity)
    assert not G.requires_grad


@pytest.mark.parametrize("state", [True, False])
def test_no_tokens(problem, state):
    given = problem([0, 0], initial_state=state)
    leaves = {name: given[name].requires_grad_() for name in TENSORS if given[name] is not None}
    o, final_state = chunk_gated_delta_rule(**given.arguments, output_final_state=True)
    assert o.shape == (1, 0, 2, 128)
    assert torch.equal(final_state, given["initial_state"] if state else torch.zeros_like(final_state))
    found = torch.autograd.grad(final_state, list(leaves.values()), given.dht, allow_unused=True)
    if state:
        assert torch.equal(found[-1], given.dht)
    G, A, o, h, final_state = chunk_gated_delta_rule_fwd(**given.arguments, output_h=True)
    assert (G.shape[1], A.shape[1], o.shape[1], h.shape[1]) == (0, 0, 0, 0)


def test_compile(problem, run, assert_same):
    """Whole graph, gradients too, other offsets without another trace, and the bound on chunks."""
    given = problem()
    backend = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(q, **options):
        o, final_state = chunk_gated_delta_rule(2 * q, **options)
        return o / 2, final_state

    expected = run(chunk_gated_delta_rule, given)
    assert_same(run(compiled, given), expected, 1e-12)
    given.arguments["cu_seqlens"] = torch.tensor([0, 3, 3, 100, 120])
    assert_same(run(compiled, given), run(chunk_gated_delta_rule, given), 1e-12)
    assert backend.frame_count == 1

    forward = torch.compile(chunk_gated_delta_rule_fwd, fullgraph=True, backend="aot_eager")
    h = forward(**given.arguments, output_h=True)[3]
    exact = chunk_gated_delta_rule_fwd(**given.arguments, output_h=True)[3]
    assert (exact.shape[1], h.shape[1]) == (4, 131 // 64 + 4)
    assert torch.equal(h[:, :4], exact)
    assert (h[:, 4:] == 0).all()


@pytest.mark.parametrize("optional", [True, False])
def test_registration(problem, optional):
    """PyTorch's own checks: schema, fake shapes, autograd, tracing."""
    a = problem([65], dense=True).arguments
    required = [a[name].requires_grad_() for name in ("q", "k", "v")]
    g, state = (a["g"].requires_grad_(), a["initial_state"].requires_grad_()) if optional else (None, None)
    shared = (*required, g, a["beta"].requires_grad_(), None, state, optional, True, None, True, True, None)
    torch.library.opcheck(torch.ops.flashqla.gated_delta_rule.default, shared)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in shared]
    torch.library.opcheck(torch.ops.flashqla.gated_delta_rule_fwd.default, (*detached, optional))


def test_second_derivatives_are_refused(problem):
    given = problem([65])
    q = given["q"].requires_grad_()
    o, _ = chunk_gated_delta_rule(**given.arguments)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        dq.sum().backward()


def test_forward_mode_derivatives_are_refused(problem):
    """Not lost: that is what an op of torch.library does with them."""
    given = problem([3]).arguments
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda v: chunk_gated_delta_rule(**given | {"v": v})[0], (given["v"],), (given["v"],))
    with forward_ad.dual_level():
        chunk_gated_delta_rule(**given)
        with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
            chunk_gated_delta_rule_fwd(**given | {"v": forward_ad.make_dual(given["v"], given["v"])})


def test_results_may_be_changed_in_place(problem):
    gradients = []
    for change in (torch.Tensor.mul, torch.Tensor.mul_):
        given = problem()
        v = given["v"].requires_grad_()
        results = chunk_gated_delta_rule(**given.arguments, output_final_state=True)
        gradients += torch.autograd.grad(sum(change(x, 3).sum() for x in results), v)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_meta_tensors_give_shapes(problem, device):
    given = {name: x if x is None else x.to("meta") for name, x in problem().arguments.items()}
    given["cu_seqlens"] = torch.zeros(5, dtype=torch.int32, device=device)
    o, final_state = chunk_gated_delta_rule(**given, output_final_state=True)
    assert (o.shape, final_state.shape) == ((1, 131, 2, 128), (4, 2, 128, 128))
    assert o.device == final_state.device == torch.device("meta")
    assert explain(**given).implementation == "torch"


def test_what_runs_is_told_and_can_be_forbidden(problem):
    given = problem([65]).arguments
    assert explain(**given).implementation == "torch"
    with strict(), pytest.raises(UnsupportedError, match="tensors are on cpu"):
        chunk_gated_delta_rule(**given)
    chunk_gated_delta_rule(**given)


def test_normalised_inputs_equal_the_option(problem):
    given = problem([65]).arguments
    unit = {name: normalize(given[name], dim=-1) for name in ("q", "k")}
    five = {name: 5 * x for name, x in unit.items()}
    expected, _ = chunk_gated_delta_rule(**given | unit)
    o, _ = chunk_gated_delta_rule(**given | five, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)  # FLA adds 1e-6 to the squared norm
