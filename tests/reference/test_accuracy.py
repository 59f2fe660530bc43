"""Errors, the truth they are measured against, and the bounds on them."""

import math
from dataclasses import replace

import pytest
import torch

from flashqla import accuracy, inputs
from flashqla.accuracy import EXACT, FLOOR, tensor_errors
from flashqla.cases import Case
from flashqla.records import TensorErrors
from flashqla.reference import recurrent_gated_delta_rule

CASE = Case(2, 4, (70, 0, 42), tail=5)


def off(rel_l2: float | None) -> TensorErrors:
    return TensorErrors(rel_l2=rel_l2, max_abs=None, cosine=None, nan=int(rel_l2 is None))


def test_errors_of_known_vectors() -> None:
    found = tensor_errors(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert found.rel_l2 == pytest.approx(0.1)
    assert found.max_abs == pytest.approx(0.5)
    assert found.cosine == pytest.approx(27 / (5 * math.hypot(3, 4.5)))
    assert (found.nan, found.inf) == (0, 0)


def test_errors_over_many_blocks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 1000, dtype=torch.float64)
    whole = tensor_errors(x, y)
    monkeypatch.setattr(accuracy, "BLOCK", 7)
    assert tensor_errors(x, y).model_dump() == pytest.approx(whole.model_dump())


def test_nan_and_inf_are_counted_and_leave_no_number() -> None:
    right = torch.tensor([1.0, 2.0, 3.0, math.inf])
    found = tensor_errors(torch.tensor([math.nan, math.inf, 3.0, math.inf]), right)
    assert found == TensorErrors(rel_l2=None, max_abs=None, cosine=None, nan=1, inf=1)
    assert tensor_errors(right, right).rel_l2 == 0.0  # the same infinity is no error
    assert tensor_errors(right.where(right < 3, -right), right).inf == 1  # the opposite one is


def test_errors_against_zeros_are_absolute() -> None:
    found = tensor_errors(torch.tensor([0.0, 0.5]), torch.zeros(2))
    assert (found.rel_l2, found.cosine) == (0.5, None)
    assert tensor_errors(torch.zeros(0), torch.zeros(0)).rel_l2 == 0.0


def test_an_output_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[3\], and \[2\] expected"):
        tensor_errors(torch.zeros(3), torch.zeros(2))


def test_the_truth_has_zeros_in_the_tail_and_does_not_depend_on_grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = inputs.make(CASE, 0, "cpu")
    whole = accuracy.truth(drawn)
    assert whole.recurrence
    assert whole.outputs["o"].dtype == torch.float64
    assert (whole.outputs["o"][:, 112:] == 0).all()
    monkeypatch.setattr(accuracy, "TRUTH_BYTES", 1)
    by_head = accuracy.truth(drawn)
    for name, x in whole.outputs.items():
        torch.testing.assert_close(by_head.outputs[name], x, rtol=0, atol=1e-14)


def test_the_chunk_form_stands_in_for_a_long_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = inputs.make(replace(CASE, gate="strong"), 0, "cpu")
    exact = accuracy.truth(drawn)
    monkeypatch.setattr(accuracy, "RECURRENCE_TOKENS", 69)
    stand_in = accuracy.truth(drawn)
    assert (exact.name, stand_in.name) == ("float64 recurrence", "float64 chunk form")
    found = accuracy.errors(stand_in.outputs, exact.outputs, CASE.tokens)
    assert accuracy.within(found, dict.fromkeys(exact.outputs, EXACT))
    assert not torch.equal(stand_in.outputs["o"], exact.outputs["o"])


def test_the_quick_truth_is_that_of_its_heads() -> None:
    drawn = inputs.make(replace(CASE, hv=8), 0, "cpu")
    heads = accuracy.some_heads(drawn)
    assert heads == (0, 7)
    right = accuracy.heads_of(accuracy.truth(drawn).outputs, heads)
    found = accuracy.errors(accuracy.quick_truth(drawn, heads), right, CASE.tokens)
    assert accuracy.within(found, dict.fromkeys(right, 1e-6))


def test_a_peer_that_is_worse_widens_the_bound() -> None:
    def never() -> dict[str, TensorErrors]:
        raise AssertionError("not needed")

    found = {"o": off(9e-3), "final_state": off(4e-3)}
    peers = [{"o": off(9e-3), "final_state": off(2e-3)}, {"o": off(8e-3)}, {"o": off(None)}]
    allowed = accuracy.bounds(found, peers, never)
    assert allowed == {"o": pytest.approx(1.1 * 8e-3), "final_state": FLOOR}
    assert not accuracy.within(found, allowed)
    assert accuracy.nearest(found, allowed) == allowed["o"]
    assert accuracy.bounds({"o": off(FLOOR)}, [], never) == {"o": FLOOR}


@pytest.mark.parametrize(
    ("own", "bound"), [(1e-3, FLOOR), (6e-3, pytest.approx(9e-3)), (1.0, accuracy.CHECK), (None, FLOOR)]
)
def test_without_peers_the_chunk_form_sets_the_bound(own: float | None, bound: float) -> None:
    assert accuracy.bounds({"o": off(0.5)}, [], lambda: {"o": off(own)}) == {"o": bound}


def test_an_error_that_is_no_number_is_never_within() -> None:
    assert not accuracy.within({"o": off(None)}, {"o": 1.0})
    assert not accuracy.within({}, {"o": 1.0})


def test_the_reference_in_bf16_is_within_the_floor() -> None:
    drawn = inputs.make(CASE, 0, "cpu")
    found = accuracy.reference_errors(drawn, accuracy.truth(drawn))
    assert accuracy.within(found, {"o": FLOOR, "final_state": 1e-6})
    assert found["o"].rel_l2 > 1e-4  # o is rounded to bf16


GATES = ("mixed", "strong", "tiny", "reset_inf")


@pytest.mark.parametrize("gate", GATES)
def test_the_chunk_form_stands_in_for_gradients_too(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = inputs.make(replace(CASE, gate=gate), 0, "cpu", "bwd")
    exact = accuracy.truth(drawn, "bwd").outputs
    assert list(exact) == ["dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"]
    assert {x.dtype for x in exact.values()} == {torch.float64}
    assert all((exact[name][:, 112:] == 0).all() for name in ("dq", "dk", "dv", "dg", "dbeta"))
    monkeypatch.setattr(accuracy, "RECURRENCE_TOKENS", 69)
    stand_in = accuracy.truth(drawn, "bwd")
    assert not stand_in.recurrence
    found = accuracy.errors(stand_in.outputs, exact, CASE.tokens)
    assert accuracy.within(found, dict.fromkeys(exact, EXACT)), found
    assert not torch.equal(stand_in.outputs["dk"], exact["dk"])


def test_gradients_do_not_depend_on_grouping(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = inputs.make(replace(CASE, hv=8), 0, "cpu", "bwd")
    whole = accuracy.truth(drawn, "bwd").outputs
    monkeypatch.setattr(accuracy, "TRUTH_BYTES", 1)
    by_head = accuracy.truth(drawn, "bwd").outputs
    assert {name: x.shape for name, x in whole.items()} == {name: x.shape for name, x in by_head.items()}
    for name, x in whole.items():
        torch.testing.assert_close(by_head[name], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", ["mixed", "strong"])
def test_dg_reaches_the_parameters_of_a_gate(gate: str) -> None:
    """As autograd takes it there, from parameters and activations that give these gates."""
    drawn = inputs.make(Case(1, 4, (60,), batch=True, gate=gate), 0, "cpu", "bwd")
    scale = accuracy.GATE_SCALE.get(gate, accuracy.USUAL_GATE_SCALE)
    soft = (-drawn.g.double() / scale).clamp(min=1e-30)  # a gate of 0 takes an activation of nearly -inf
    dt_bias = torch.randn(4, dtype=torch.float64).requires_grad_()
    a = (soft + torch.log(-torch.expm1(-soft)) - dt_bias).detach()
    A_log = torch.full((4,), math.log(scale), dtype=torch.float64, requires_grad=True)
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    torch.testing.assert_close(g, drawn.g.double(), rtol=1e-9, atol=1e-12)
    qkv = [x.double() for x in (drawn.q, drawn.k, drawn.v)]
    o, state = recurrent_gated_delta_rule(
        *qkv, g, drawn.beta.double(), drawn.scale, drawn.initial_state.double(), output_final_state=True
    )
    expected = torch.autograd.grad([o, state], [A_log, dt_bias], [drawn.do.double(), drawn.dht.double()])
    found = accuracy.truth(drawn, "bwd").outputs
    for name, right in zip(("dA_log", "ddt_bias"), expected, strict=True):
        assert found[name].norm() > 0
        torch.testing.assert_close(found[name], right, rtol=1e-6, atol=1e-9 * right.abs().max().item())


@pytest.mark.parametrize(("hk", "hv", "heads"), [(4, 8, (0, 1, 6, 7)), (1, 3, (0, 1, 2)), (2, 2, (0, 1))])
def test_the_quick_truth_has_gradients_of_whole_groups(hk: int, hv: int, heads: tuple[int, ...]) -> None:
    drawn = inputs.make(replace(CASE, hk=hk, hv=hv), 0, "cpu", "bwd")
    assert accuracy.some_heads(drawn, "bwd") == heads
    quick = accuracy.quick_truth(drawn, heads, "bwd")
    whole = accuracy.truth(drawn, "bwd").outputs
    right = accuracy.heads_of({name: whole[name] for name in quick}, heads, hv // hk)
    assert right["dk"].shape[2] == min(hk, 2)
    found = accuracy.errors(quick, right, CASE.tokens)
    assert accuracy.within(found, dict.fromkeys(right, 1e-5)), found
    both = accuracy.quick_truth(drawn, heads, "fwd+bwd")
    assert both.keys() == {"o", "final_state", *quick}
    assert all(torch.equal(both[name], x) for name, x in quick.items())


def test_gradients_are_allowed_what_the_best_peer_needs() -> None:
    found = {"dq": off(9e-3), "dg": off(3e-2)}
    assert accuracy.gradient_bounds(found, [], False, {}) == {"dq": 1e-2, "dg": 1e-2}
    assert accuracy.gradient_bounds(found, [], True, {}) == {"dq": 2e-2, "dg": 2e-2}
    peers = [{"dq": off(1e-3), "dg": off(4e-2)}, {"dg": off(3e-2)}, {"dg": off(None)}]
    allowed = accuracy.gradient_bounds(found, peers, False, {})
    assert allowed == {"dq": 1e-2, "dg": pytest.approx(3.3e-2)}
    assert accuracy.within(found, allowed)
    assert accuracy.beyond({"dq": off(2e-2), "dg": off(None)}, {**allowed, "dh0": 1.0}) == ["dq", "dg", "dh0"]


def test_sums_that_cancel_are_allowed_what_their_parts_are() -> None:
    found = {name: off(9e-3) for name in ("dg", "dA_log", "ddt_bias")}
    conditions = {"dA_log": 3.0, "ddt_bias": 1e6}
    allowed = accuracy.gradient_bounds(found, [], False, conditions)
    assert allowed == {"dg": 1e-2, "dA_log": pytest.approx(3e-2), "ddt_bias": 5e-2}
    allowed = accuracy.gradient_bounds(found, [{"dA_log": off(4e-2)}], True, conditions)
    assert allowed == {"dg": 2e-2, "dA_log": 5e-2, "ddt_bias": 5e-2}


def test_the_condition_of_sums_is_that_of_their_terms() -> None:
    """Parts that are off by one in a hundred, all in the direction that hurts most, stay within what is allowed."""
    drawn = inputs.make(replace(CASE, keys="correlated", tail=0), 0, "cpu", "bwd")
    right = accuracy.truth(drawn, "bwd")
    assert accuracy.truth(drawn).conditions == {}
    assert right.conditions.keys() == {"dA_log", "ddt_bias"}
    terms = right.outputs["dg"] * drawn.g.double()
    assert right.conditions["dA_log"] == pytest.approx(float(terms.abs().sum((0, 1)).norm() / terms.sum((0, 1)).norm()))
    worse = {**right.outputs, "dg": right.outputs["dg"] * (1 + 1e-2 * terms.sign())}
    shown = accuracy.shown({name: worse[name] for name in worse if name not in right.conditions}, drawn, "bwd")
    errors = accuracy.errors(shown, right.outputs, CASE.tokens)
    assert errors["dA_log"].rel_l2 == pytest.approx(1e-2 * right.conditions["dA_log"])


@pytest.mark.parametrize(
    ("gate", "strong"),
    [("strong", True), ("tiny", True), ("typical", False), ("mixed", False), ("zero", False), ("reset_inf", False)],
)
def test_strong_gates_are_known_by_their_values(gate: str, strong: bool) -> None:
    for case in (replace(CASE, gate=gate), Case(1, 1, (50, 50), batch=True, gate=gate)):
        assert accuracy.strong_gates(inputs.make(case, 0, "cpu")) is strong
    assert accuracy.strong_gates(inputs.make(Case(1, 1, (0,), gate=gate), 0, "cpu")) is False


def test_the_contract_of_gradients_names_what_is_broken() -> None:
    drawn = inputs.make(replace(CASE, gate_dtype="float16"), 0, "cpu", "bwd")
    right = {
        **{name: torch.zeros_like(getattr(drawn, name[1:])) for name in ("dq", "dk", "dv", "dg", "dbeta")},
        "dh0": torch.zeros_like(drawn.initial_state),
    }

    def problems(**changes: torch.Tensor) -> list[str]:
        return accuracy.contract({**right, **changes}, drawn, "bwd")

    assert problems() == []
    assert problems(dg=right["dg"].float()) == ["dg is torch.float32, and its input torch.float16"]
    assert problems(dk=right["dv"]) == ["dk has shape [1, 117, 4, 128], and its input [1, 117, 2, 128]"]
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        dirty = right[name].clone()
        dirty[0, -1, 0] = math.nan
        assert problems(**{name: dirty}) == [f"rows of {name} past the last offset are not 0"]
    del right["dh0"]
    assert problems() == ["dh0 is missing"]
    stateless = inputs.make(replace(CASE, initial_state=False), 0, "cpu", "bwd")
    plain = {name: torch.zeros_like(getattr(stateless, name[1:])) for name in right}
    assert accuracy.contract(plain, stateless, "bwd") == []
    surplus = accuracy.contract({**plain, "dh0": torch.zeros(1)}, stateless, "bwd")
    assert surplus == ["dh0 is there without an initial state"]


def test_inputs_outside_the_stable_range_say_so() -> None:
    steady = Case(1, 2, (40,), batch=True)
    assert accuracy.instability(inputs.make(CASE, 0, "cpu")) is None
    assert accuracy.instability(inputs.make(replace(steady, beta="one"), 0, "cpu")) is None
    loud = replace(steady, keys="norm5")
    assert accuracy.instability(inputs.make(replace(loud, l2norm=True), 0, "cpu")) is None
    assert "beta |k|^2" in accuracy.instability(inputs.make(loud, 0, "cpu"))
    drawn = inputs.make(steady, 0, "cpu")
    drawn.g[0, 3, 1] = 0.25
    assert "a gate of 0.25" in accuracy.instability(drawn)
    assert accuracy.instability(inputs.make(Case(1, 1, (0,)), 0, "cpu")) is None


def test_the_contract_names_what_is_broken() -> None:
    drawn = inputs.make(CASE, 0, "cpu")
    o, state = torch.zeros_like(drawn.v), torch.zeros(3, 4, 128, 128)
    assert accuracy.contract({"o": o, "final_state": state}, drawn) == []
    assert accuracy.contract({"o": o}, drawn) == ["final_state is there without being asked for, or missing"]
    assert accuracy.contract({"o": o.float(), "final_state": state.half()}, drawn) == [
        "o is torch.float32, v is torch.bfloat16",
        "final_state is torch.float16, not float32",
    ]
    for value in (1.0, math.nan):
        dirty = o.clone()
        dirty[0, -1, 2, 5] = value
        assert "past the last offset" in accuracy.contract({"o": dirty, "final_state": state}, drawn)[0]
    assert "o has shape" in accuracy.contract({"o": o[:, :-5], "final_state": state}, drawn)[0]


def test_bits_are_compared_and_not_numbers() -> None:
    before = {"x": torch.tensor([math.nan, 0.0]), "y": torch.zeros(3, dtype=torch.bfloat16)}
    after = accuracy.snapshot(before)
    assert accuracy.same(before, after)
    after["x"][1] = -0.0
    assert not accuracy.same(before, after)
    assert not accuracy.same(before, {"x": before["x"]})
