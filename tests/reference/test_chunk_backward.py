"""The explicit backward algebra against autograd through the token recurrence, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqla.reference import chunk_gated_delta_rule_backward, recurrent_gated_delta_rule

GATES = ["typical", "strong", "zero", "half_zero", "tiny", "reset"]


def explicit(problem: Any, **options: Any) -> dict[str, Tensor]:
    gradients = chunk_gated_delta_rule_backward(**problem.arguments, do=problem.do, dht=problem.dht, **options)
    return {name: x for name, x in gradients._asdict().items() if x is not None}


@pytest.fixture
def truth(run: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def truth(problem: Any, **options: Any) -> dict[str, Tensor]:
        results = run(recurrent_gated_delta_rule, problem, **options)
        return {name: x for name, x in results.items() if name.startswith("d")}

    return truth


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("lengths", "dense"),
    [pytest.param([73, 0, 130, 64, 1], False, id="pack"), pytest.param([70, 70], True, id="dense")],
)
def test_equals_autograd_through_the_recurrence(make_problem, truth, assert_same, lengths, dense, gate):
    problem = make_problem(lengths, hk=2, hv=4, dense=dense, gate=gate)
    assert_same(explicit(problem), truth(problem))


@pytest.mark.parametrize("option", ["state_v_first", "use_qk_l2norm_in_kernel"])
def test_options(make_problem, truth, assert_same, option):
    problem = make_problem([70, 20], hk=2, hv=4, key_dim=8, value_dim=8)
    assert_same(explicit(problem, **{option: True}), truth(problem, **{option: True}))


def test_scale_and_chunk_size(make_problem, truth, assert_same):
    problem = make_problem([100, 33], gate="reset")
    assert_same(explicit(problem, scale=0.3, chunk_size=16), truth(problem, scale=0.3))


def test_gradients_pass_from_block_to_block(make_problem, truth, assert_same, monkeypatch):
    problem = make_problem([200, 30, 64, 0, 129], gate="reset")
    expected = truth(problem)
    monkeypatch.setattr("flashqla.reference.backward.BLOCK_ROWS", 128)
    assert_same(explicit(problem), expected)


def test_without_final_state_gradient(make_problem, truth, assert_same):
    problem = make_problem([70, 0, 20])
    problem.dht = None
    assert_same(explicit(problem), truth(problem))


def test_gradients_only_for_what_is_given(make_problem, truth, assert_same):
    problem = make_problem([70, 20], gate="zero", initial_state=False)
    expected = truth(problem)
    problem.arguments["g"] = None
    del expected["dg"]
    assert_same(explicit(problem), expected)


def test_beta_zero_and_two(make_problem, truth, assert_same):
    """dbeta divides by no beta; 2 is a full reflection, as in models with negative eigenvalues."""
    problem = make_problem([100])
    problem["beta"][:, ::3] = 0
    problem["beta"][:, 1::3] = 2
    assert_same(explicit(problem), truth(problem))


def test_tail_rows_are_not_read_and_get_zero(make_problem):
    problem = make_problem([70, 20], tail=9, gate="reset")
    problem.do[:, -9:] = torch.nan
    gradients = explicit(problem)
    assert all(torch.isfinite(x).all() for x in gradients.values())
    assert all((x[:, -9:] == 0).all() for name, x in gradients.items() if name != "dinitial_state")


@pytest.mark.parametrize("gate", ["strong", "tiny"])
def test_dg_of_gates_that_erase_everything_keeps_its_digits(make_problem, truth, gate):
    """It is some 1e-12 beside gradients near 1; terms that cancel would leave their rounding, 1e-7, in its place."""
    problem = make_problem([130, 70], hk=1, hv=2, key_dim=32, value_dim=32, gate=gate, dtype=torch.float32)
    expected = truth(problem, dtype=torch.float64)["dg"].double()
    assert expected.norm() < 1e-3
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float64, 1e-7)):  # the truth is rounded to float32
        found = explicit(problem, dtype=dtype)["dg"].double()
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-3)])
def test_dtypes(make_problem, truth, assert_same, dtype, tolerance):
    problem = make_problem([150, 64], hk=1, hv=2, key_dim=32, value_dim=32, dtype=dtype)
    expected = truth(problem)
    gradients = explicit(problem)
    assert {x.dtype for x in gradients.values()} == {dtype}
    assert_same(gradients, expected, tolerance)
    assert {x.dtype for x in explicit(problem, dtype=torch.float64).values()} == {torch.float64}
