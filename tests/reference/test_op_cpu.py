"""The public op on CPU tensors: values and gradients against the token recurrence, and what PyTorch makes of the op."""

from fractions import Fraction

import numpy
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
from flashqla.reference.backward import chunk_gated_delta_rule_backward

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


@pytest.mark.parametrize("lengths", [LENGTHS, [70]])
def test_the_default_device_does_not_matter(problem, lengths):
    arguments = problem(lengths).arguments
    expected = chunk_gated_delta_rule_fwd(**arguments)
    with torch.device("meta"):
        found = chunk_gated_delta_rule_fwd(**arguments)
        recurrent_gated_delta_rule(**arguments)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True) if x is not None)


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


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        pytest.param({}, TENSORS, id="all"),
        pytest.param({"state_v_first": True}, ("q", "k", "g"), id="V-first"),
        pytest.param({"use_qk_l2norm_in_kernel": True}, ("v", "beta", "initial_state"), id="l2norm"),
        pytest.param({"scale": 0.3, "initial_state": None}, ("k", "beta"), id="no-state"),
        pytest.param({"g": None, "use_qk_l2norm_in_kernel": True}, ("q", "v"), id="no-gate"),
        pytest.param({"dense": True}, ("g", "initial_state"), id="batch"),
    ],
)
def test_compiled_training(problem, options, wanted):
    """Forward and backward in one graph each, with results used twice, for the gradients that are asked for."""
    given = problem([65] * 2 if "dense" in options else LENGTHS, dense="dense" in options)
    arguments = {**given.arguments, **{name: x for name, x in options.items() if name != "dense"}}
    leaves = {name: arguments[name].requires_grad_() for name in wanted}

    def loss(**leaves):
        o, final_state = chunk_gated_delta_rule(**arguments | leaves, output_final_state=True)
        return (o.square() + o * given.do).sum() + (final_state * given.dht).sum() + final_state.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(rule(**leaves), list(leaves.values())) for rule in (compiled, loss))
    for name, got, exact in zip(wanted, found, expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


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

    q, k, v, g, beta, _, state, *_ = detached
    do, dht = torch.randn_like(v), torch.randn(1, 2, 128, 128, dtype=v.dtype) if optional else None
    torch.library.opcheck(
        torch.ops.flashqla.gated_delta_rule_backward.default,
        (q, k, v, g, beta, do, dht, 0.1, state, None, True, True, True, None),
    )


def test_torch_func(problem, run, assert_same):
    """The transforms of torch.func, one in another, give what autograd gives."""
    given = problem()
    tensors = {name: given[name] for name in TENSORS}
    rest = {"cu_seqlens": given["cu_seqlens"], "use_qk_l2norm_in_kernel": True, "output_final_state": True}

    def loss(tensors):
        o, final_state = chunk_gated_delta_rule(**tensors, **rest)
        return (o * given.do).sum() + (final_state * given.dht).sum()

    exact = run(chunk_gated_delta_rule, given, use_qk_l2norm_in_kernel=True)
    expected = {name: exact[f"d{name}"] for name in TENSORS}
    assert_same(torch.func.grad(loss)(tensors), expected, 1e-12)
    _, pull_back = torch.func.vjp(loss, tensors)
    assert_same(pull_back(torch.ones((), dtype=torch.float64))[0], expected, 1e-12)

    two = {name: torch.stack([x, 0.5 * x]) for name, x in tensors.items()}
    each = torch.func.vmap(torch.func.grad(loss))(two)
    assert_same({name: x[0] for name, x in each.items()}, expected, 1e-12)
    together = torch.func.grad(lambda two: torch.func.vmap(loss)(two).sum())(two)
    assert_same(together, each, 1e-12)


def test_second_derivatives_of_torch_func_are_refused(problem):
    given = problem([3]).arguments

    def loss(v):
        return chunk_gated_delta_rule(**given | {"v": v})[0].square().sum()

    with pytest.raises(UnsupportedError, match="second derivatives"):
        torch.func.grad(lambda v: torch.func.grad(loss)(v).sum())(given["v"])
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.hessian(loss)(given["v"])


def ways_to_the_op(given):
    """Its tensors as they come in eager mode, for autograd, and for shapes alone."""
    tensors = {name: given[name] for name in TENSORS}
    leaf = {"q": given["q"].clone().requires_grad_()}
    return tensors, tensors | leaf, {name: x.to("meta") for name, x in tensors.items()}


@pytest.mark.parametrize(
    "scale", [2, numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2), Fraction(1, 2)], ids=lambda x: type(x).__name__
)
def test_numbers_are_taken_everywhere(problem, scale):
    given = problem([3], dense=True)
    expected, _ = chunk_gated_delta_rule(**given.arguments, scale=float(scale))
    *values, shape = (chunk_gated_delta_rule(**way, scale=scale)[0] for way in ways_to_the_op(given))
    assert all(torch.equal(o, expected) for o in values)
    assert shape.shape == expected.shape
    assert torch.equal(chunk_gated_delta_rule_fwd(**given.arguments, scale=scale)[2], expected)


@pytest.mark.parametrize("yes", [1, numpy.bool_(True), numpy.int64(1)], ids=lambda x: type(x).__name__)
def test_flags_are_taken_everywhere(problem, yes):
    given = problem([3], dense=True)
    flags = ("output_final_state", "use_qk_l2norm_in_kernel", "state_v_first", "auto_cp")
    expected = chunk_gated_delta_rule(**given.arguments, **dict.fromkeys(flags, True))
    ways = ways_to_the_op(given)
    *values, shapes = (chunk_gated_delta_rule(**way, **dict.fromkeys(flags, yes)) for way in ways)
    for results in values:
        assert all(torch.equal(x, exact) for x, exact in zip(results, expected, strict=True))
    assert shapes[1].shape == expected[1].shape
    assert all(chunk_gated_delta_rule(**way, output_final_state=None)[1] is None for way in ways)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", True),
        ("scale", numpy.bool_(True)),
        ("scale", torch.tensor(0.5)),
        ("scale", numpy.array(0.5)),
        *((flag, value) for flag in ("output_final_state", "auto_cp") for value in ("yes", 1.0, torch.tensor(True))),
    ],
)
def test_settings_are_refused_everywhere(problem, name, value):
    given = problem([3], dense=True)
    for way in ways_to_the_op(given):
        with pytest.raises(ArgumentError, match=rf"{name} must be (a number|True or False)\n  given"):
            chunk_gated_delta_rule(**way, **{name: value})


def test_a_batch_of_gradients_is_that_of_single_ones(problem):
    """Autograd has a vmap of its own for it, of which neither dispatch modes nor torch.func know."""
    given = problem([3])
    inputs = [given[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")]
    results = chunk_gated_delta_rule(**given.arguments, output_final_state=True)
    many = [torch.randn(2, *x.shape, dtype=x.dtype) for x in results]
    found = torch.autograd.grad(results, inputs, many, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(results, inputs, one, retain_graph=True) for one in zip(*many, strict=True)]
    for x, ones in zip(found, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(ones), rtol=0, atol=0)


@pytest.mark.parametrize("stand_in", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)])
def test_gradients_reach_kernels_as_memory(problem, monkeypatch, stand_in):
    """The imaginary part of a conjugate has its sign in a bit beside its memory, and some zeros have no memory."""
    seen = []

    def backward(q, k, v, g, beta, do, dht, *rest):
        seen.extend((do, dht))
        return chunk_gated_delta_rule_backward(q, k, v, g, beta, do, dht, *rest)

    monkeypatch.setattr("flashqla.ops.gated_delta_rule.chunk_gated_delta_rule_backward", backward)
    given = problem([3])
    given["v"].requires_grad_()
    results = chunk_gated_delta_rule(**given.arguments, output_final_state=True)
    torch.autograd.backward(results, [stand_in(torch.ones_like(x)) for x in results])
    assert [x.is_neg() or x._is_zerotensor() for x in seen] == [False, False]


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
