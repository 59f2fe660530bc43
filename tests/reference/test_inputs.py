"""Inputs drawn for a case: what a case says is what its tensors are."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flashqla import inputs
from flashqla.cases import BACKWARD_LENGTHS, Case
from flashqla.reference import recurrent_gated_delta_rule

PACK = Case(2, 8, (70, 0, 42))


def test_the_same_seed_gives_the_same_tensors() -> None:
    first, again, other = (inputs.make(PACK, seed, "cpu").tensors() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if name != "cu_seqlens")


def test_mixed_gates_leave_every_fourth_head_without_decay() -> None:
    g = inputs.make(PACK, 0, "cpu").g
    assert (g[..., 3::4] == 0).all()
    decaying = [head for head in range(8) if head % 4 != 3]
    assert (g[..., decaying] < 0).all()
    assert g[..., decaying].mean() == pytest.approx(-0.806 / 16, abs=0.01)  # E[logsigmoid(normal)] = -0.806


@pytest.mark.parametrize(
    ("gate", "low", "high"),
    [("zero", 0, 0), ("tiny", -27.64, -27.63), ("strong", -100, -0.5), ("typical", -1, 0), ("half_zero", -1, 0)],
)
def test_gates_are_in_their_range(gate: str, low: float, high: float) -> None:
    g = inputs.make(replace(PACK, gate=gate), 0, "cpu").g
    assert low <= g.min()
    assert g.max() <= high
    zeros = (g == 0).float().mean().item()
    assert zeros == {"zero": 1.0}.get(gate, pytest.approx(0.5, abs=0.1) if gate == "half_zero" else 0.0)


@pytest.mark.parametrize(("gate", "value"), [("reset", -90.0), ("reset_inf", -torch.inf)])
def test_every_sequence_has_one_reset(gate: str, value: float) -> None:
    packed = inputs.make(Case(1, 2, (50, 0, 20, 1), gate=gate), 0, "cpu").g
    assert (packed == value).all(-1).nonzero()[:, 1].tolist() == [37, 50 + 19, 70]
    dense = inputs.make(Case(1, 2, (40, 40), batch=True, gate=gate), 0, "cpu").g
    assert (dense == value).all(-1).nonzero().tolist() == [[0, 37], [1, 37]]


def test_rows_have_the_norms_of_the_case() -> None:
    def norms(**fields: str) -> torch.Tensor:
        drawn = inputs.make(replace(PACK, dtype="float32", **fields), 0, "cpu")
        return torch.stack([drawn.q.norm(dim=-1), drawn.k.norm(dim=-1)])

    torch.testing.assert_close(norms(), torch.ones(2, 1, 112, 2))
    torch.testing.assert_close(norms(keys="norm5"), torch.full((2, 1, 112, 2), 5.0))
    torch.testing.assert_close(norms(keys="correlated"), torch.ones(2, 1, 112, 2))
    assert (inputs.make(replace(PACK, keys="correlated"), 0, "cpu").k >= 0).all()
    assert (inputs.make(replace(PACK, beta="one"), 0, "cpu").beta == 1).all()


def test_dtypes_layouts_and_offsets_are_those_of_the_case() -> None:
    case = replace(PACK, dtype="float16", gate_dtype="bfloat16", state_dtype="bfloat16", tail=9)
    drawn = inputs.make(case, 0, "cpu")
    assert {drawn.q.dtype, drawn.k.dtype, drawn.v.dtype} == {torch.float16}
    assert {drawn.g.dtype, drawn.beta.dtype, drawn.initial_state.dtype} == {torch.bfloat16}
    assert drawn.cu_seqlens.tolist() == drawn.cu_seqlens_cpu.tolist() == [0, 70, 70, 112]
    assert drawn.v.shape == (1, 121, 8, 128)
    assert drawn.initial_state.shape == (3, 8, 128, 128)
    for x in (drawn.q, drawn.k, drawn.v, drawn.g, drawn.beta):
        assert x[:, 112:].isnan().all()
        assert x[:, :112].isfinite().all()
    dense = inputs.make(Case(2, 2, (30, 30), batch=True, initial_state=False), 0, "cpu")
    assert dense.v.shape == (2, 30, 2, 128)
    assert dense.cu_seqlens is None
    assert dense.initial_state is None


def test_strided_inputs_hold_the_same_values() -> None:
    plain, strided = (inputs.make(replace(PACK, strided=on), 0, "cpu") for on in (False, True))
    for name, x in strided.tensors().items():
        assert torch.equal(x, plain.tensors()[name])
        assert x.is_contiguous() == (name in ("initial_state", "cu_seqlens"))
    storages = {x.untyped_storage().data_ptr() for x in (strided.q, strided.k, strided.v)}
    assert len(storages) == 1


def test_taken_heads_are_the_heads_of_the_whole() -> None:
    drawn = inputs.make(PACK, 0, "cpu")
    heads = (1, 7, 4)

    def run(x: inputs.Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        return recurrent_gated_delta_rule(
            x.q, x.k, x.v, x.g, x.beta, x.scale, x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
        )

    taken = inputs.take_heads(drawn, heads)
    assert (taken.case.hk, taken.case.hv) == (3, 3)
    (o, state), (o_all, state_all) = run(taken), run(drawn)
    torch.testing.assert_close(o, o_all[:, :, list(heads)])
    torch.testing.assert_close(state, state_all[:, list(heads)])


def test_gradients_of_results_are_drawn_for_a_backward_pass_alone() -> None:
    plain, drawn, again = (inputs.make(PACK, 0, "cpu", direction) for direction in ("fwd", "bwd", "fwd+bwd"))
    assert plain.do is plain.dht is None
    for name, x in plain.tensors().items():
        assert torch.equal(x, drawn.tensors()[name])
    assert drawn.do is not None
    assert drawn.dht is not None
    assert (drawn.do.shape, drawn.do.dtype) == (drawn.v.shape, torch.bfloat16)
    assert (drawn.dht.shape, drawn.dht.dtype) == ((3, 8, 128, 128), torch.float32)
    assert drawn.dht.std().item() == pytest.approx(0.125, rel=0.01)
    assert torch.equal(drawn.do, again.do)
    assert not torch.equal(drawn.do, drawn.v)
    assert not torch.equal(drawn.do, inputs.make(PACK, 1, "cpu", "bwd").do)
    assert inputs.make(replace(PACK, final_state=False), 0, "cpu", "bwd").dht is None


def test_gradients_of_results_are_laid_out_as_the_case_says() -> None:
    plain = inputs.make(PACK, 0, "cpu", "bwd").do
    tailed = inputs.make(replace(PACK, tail=9, dtype="float16"), 0, "cpu", "bwd").do
    assert tailed.dtype == torch.float16
    assert tailed[:, 112:].isnan().all()
    assert tailed[:, :112].isfinite().all()
    strided = inputs.make(replace(PACK, strided=True), 0, "cpu", "bwd").do
    assert torch.equal(strided, plain)
    assert not strided.is_contiguous()
    taken = inputs.take_heads(inputs.make(PACK, 0, "cpu", "bwd"), (7, 1))
    assert torch.equal(taken.do, plain[:, :, [7, 1]])
    assert taken.dht.shape == (3, 2, 128, 128)


def test_backward_rows_have_the_lengths_of_the_published_table() -> None:
    """Its totals are cut at the first of a permutation that torch makes from seed 42."""

    def cut(count: int, tokens: int) -> tuple[int, ...]:
        places = torch.randperm(tokens - 1, dtype=torch.int32, generator=torch.Generator().manual_seed(42))
        bars = [0, *(places[: count - 1].sort().values + 1).tolist(), tokens]
        return tuple(end - begin for begin, end in pairwise(bars))

    assert tuple(cut(count, tokens) for tokens in (8192, 32768) for count in (1, 2, 4, 8)) == BACKWARD_LENGTHS
