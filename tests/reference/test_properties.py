"""Properties over random shapes, lengths and gates: the chunk form and its backward algebra equal the recurrence."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashqla.reference import (
    chunk_gated_delta_rule_backward,
    chunk_gated_delta_rule_reference,
    recurrent_gated_delta_rule,
)

# Function-scoped fixtures are plain functions here, without state to leak from one example to the next.
RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
GATES = st.sampled_from(["typical", "strong", "zero", "half_zero", "tiny", "reset"])


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    hk = draw(st.integers(1, 3))
    dense = draw(st.booleans())
    length = st.integers(0, 150)
    lengths = [draw(length)] * draw(st.integers(1, 3)) if dense else draw(st.lists(length, min_size=1, max_size=5))
    return {
        "lengths": lengths,
        "dense": dense,
        "tail": 0 if dense else draw(st.integers(0, 20)),
        "hk": hk,
        "hv": hk * draw(st.integers(1, 3)),
        "key_dim": draw(st.integers(1, 9)),
        "value_dim": draw(st.integers(1, 9)),
        "gate": draw(GATES),
        "initial_state": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60, **RELAXED)
@given(shape=problems(), chunk_size=st.sampled_from([1, 16, 64]), l2norm=st.booleans())
def test_chunk_form_equals_the_recurrence(make_problem, run, assert_same, shape, chunk_size, l2norm):
    problem = make_problem(**shape)
    truth = run(recurrent_gated_delta_rule, problem, use_qk_l2norm_in_kernel=l2norm)
    options = {"chunk_size": chunk_size, "use_qk_l2norm_in_kernel": l2norm}
    assert_same(run(chunk_gated_delta_rule_reference, problem, **options), truth)
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht, **options)
    found = {name: x for name, x in gradients._asdict().items() if x is not None}
    assert_same(found, {name: truth[name] for name in found})


@settings(max_examples=30, **RELAXED)
@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=4),
    cut=st.floats(0, 1),
    gate=GATES,
    seed=st.integers(0, 2**16),
)
def test_two_calls_continue_each_other(make_problem, assert_same, lengths, cut, gate, seed):
    """Cutting every sequence anywhere, and passing the states on, changes nothing."""
    problem = make_problem(lengths, gate=gate, seed=seed)
    tokens = {name: problem[name] for name in ("q", "k", "v", "g", "beta")}
    first = [int(cut * length) for length in lengths]
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    head = [t for begin, n in zip(begins, first, strict=True) for t in range(begin, begin + n)]
    tail = [
        t for begin, n, length in zip(begins, first, lengths, strict=True) for t in range(begin + n, begin + length)
    ]
    state, outputs = problem["initial_state"], torch.zeros_like(problem["v"])
    for rows, sizes in ((head, first), (tail, [n - m for n, m in zip(lengths, first, strict=True)])):
        o, state = chunk_gated_delta_rule_reference(
            **{name: x[:, rows] for name, x in tokens.items()},
            initial_state=state,
            cu_seqlens=torch.tensor([0, *sizes]).cumsum(0),
            output_final_state=True,
        )
        outputs[:, rows] = o
    o, final_state = chunk_gated_delta_rule_reference(**problem.arguments, output_final_state=True)
    assert_same({"o": outputs, "final_state": state}, {"o": o, "final_state": final_state})


@settings(max_examples=30, **RELAXED)
@given(
    lengths=st.lists(st.integers(0, 100), min_size=2, max_size=5), gate=GATES, order=st.randoms(use_true_random=False)
)
def test_sequences_of_a_pack_do_not_touch_each_other(make_problem, assert_same, lengths, gate, order):
    """Permuting the sequences permutes the results."""
    problem = make_problem(lengths, gate=gate)
    permutation = list(range(len(lengths)))
    order.shuffle(permutation)
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    rows = [t for n in permutation for t in range(begins[n], begins[n] + lengths[n])]
    o, final_state = chunk_gated_delta_rule_reference(**problem.arguments, output_final_state=True)
    o_permuted, state_permuted = chunk_gated_delta_rule_reference(
        **{name: problem[name][:, rows] for name in ("q", "k", "v", "g", "beta")},
        initial_state=problem["initial_state"][permutation],
        cu_seqlens=torch.tensor([0, *(lengths[n] for n in permutation)]).cumsum(0),
        output_final_state=True,
    )
    assert_same({"o": o_permuted, "s": state_permuted}, {"o": o[:, rows], "s": final_state[permutation]}, 1e-13)
