"""The backward kernels on Hopper against float64, at the inputs that have broken such kernels elsewhere."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from flashqla.errors import ArgumentError
from flashqla.ops import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    gated_delta_rule,
    repeats,
    strict,
)
from flashqla.reference import chunk_gated_delta_rule_backward

Arguments = dict[str, Any]
NAMES = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dinitial_state"}
TOLERANCE = 1e-2  # relative L2 error


def gates(kind: str, shape: tuple[int, ...]) -> Tensor:
    x, pick = torch.randn(shape, device="cuda"), torch.rand(shape, device="cuda")
    typical = logsigmoid(x) / 16
    return {
        "typical": typical,
        "strong": -16 * softplus(0.5 * x + 1),
        "zero": torch.zeros_like(x),
        "half_zero": torch.where(pick < 0.5, 0.0, typical),
        "tiny": torch.full_like(x, 1e-12).log(),
        # Each four chunks let 2^-3, 2^-8, 2^-13 ... through.
        "even": torch.zeros_like(x) - math.log(2) / 256 * (3 + 5 * torch.arange(shape[-1], device="cuda")),
        "reset": typical.masked_fill(pick < 0.03, -torch.inf).masked_fill(pick > 0.97, -90.0),
    }[kind]


def make(
    lengths: list[int],
    hk: int = 2,
    hv: int = 4,
    gate: str = "typical",
    keys: str = "normal",
    dtype: torch.dtype = torch.bfloat16,
    dense: bool = False,
    tail: int = 0,
    seed: int = 0,
) -> tuple[Arguments, Tensor, Tensor]:
    """Arguments, do and dht on the GPU. A tail of NaN rows follows the last offset."""
    torch.manual_seed(seed)
    rows = (len(lengths), lengths[0]) if dense else (1, sum(lengths) + tail)
    draw = torch.rand if keys == "correlated" else torch.randn
    arguments = {
        "q": normalize(torch.randn(*rows, hk, 128, device="cuda"), dim=-1).to(dtype),
        "k": normalize(draw(*rows, hk, 128, device="cuda"), dim=-1).to(dtype),
        "v": torch.randn(*rows, hv, 128, device="cuda").to(dtype),
        "g": gates(gate, (*rows, hv)),
        "beta": torch.rand(*rows, hv, device="cuda"),
        "initial_state": torch.randn(len(lengths), hv, 128, 128, device="cuda"),
        "cu_seqlens": None if dense else torch.tensor([0, *lengths]).cumsum(0).int().cuda(),
    }
    do, dht = torch.randn_like(arguments["v"]), torch.randn_like(arguments["initial_state"])
    if tail:
        for x in (*(arguments[name] for name in "qkvg"), arguments["beta"], do):
            x[:, -tail:] = torch.nan
    return arguments, do, dht


def differentiate(arguments: Arguments, do: Tensor, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """Gradients by the kernels, through autograd, with NaN in what is allocated on the way."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in NAMES if arguments[name] is not None}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with strict():
            o, final_state = chunk_gated_delta_rule(
                **{**arguments, **leaves}, output_final_state=dht is not None, **options
            )
            outputs = [(o, do)] if final_state is None or dht is None else [(o, do), (final_state, dht)]
            results, gradients = zip(*outputs, strict=True)
            found = torch.autograd.grad(results, list(leaves.values()), gradients)
    finally:
        torch.use_deterministic_algorithms(False)
    for leaf, dx in zip(leaves.values(), found, strict=True):
        assert dx.dtype == leaf.dtype
    return {NAMES[name]: dx for name, dx in zip(leaves, found, strict=True)}


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    for name, x in found.items():
        expected = exact[name].double()
        assert torch.isfinite(x).all(), f"{name} has NaN or inf"
        norm = torch.linalg.vector_norm(expected) + 1e-3 * expected.numel() ** 0.5
        error = (torch.linalg.vector_norm(x.double() - expected) / norm).item()
        assert error < tolerance, f"{name}: {error:.1e}"


def check(problem: tuple[Arguments, Tensor, Tensor], tolerance: float = TOLERANCE, **options: Any) -> None:
    arguments, do, dht = problem
    found = differentiate(arguments, do, dht, **options)
    exact = chunk_gated_delta_rule_backward(**arguments, do=do, dht=dht, dtype=torch.float64, **options)
    assert_near(found, exact._asdict(), tolerance)
    again = differentiate(arguments, do, dht, **options)
    assert all(torch.equal(x, again[name]) for name, x in found.items()), "differs from run to run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", ["normal", "correlated"])
@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "half_zero", "tiny", "reset"])
def test_gates(gate, keys, dtype):
    check(make([500, 77], gate=gate, keys=keys, dtype=dtype), 2e-2 if gate in ("strong", "tiny") else TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param([1], {}, id="1"),
        pytest.param([63], {}, id="63"),
        pytest.param([64], {}, id="64"),
        pytest.param([65], {}, id="65"),
        pytest.param([128], {}, id="128"),
        pytest.param([129], {}, id="129"),
        pytest.param([64, 192, 65, 1, 127, 128, 300], {}, id="pack-of-odd-and-even-chunks"),
        pytest.param([73, 0, 130, 64, 1], {"tail": 150}, id="pack-with-tail"),
        pytest.param([0, 0], {"tail": 70}, id="nothing-but-tail"),
        pytest.param([200] * 3, {"dense": True}, id="batch"),
        pytest.param([4096], {"hk": 1, "hv": 4}, id="long"),
        pytest.param([513] * 12, {"hk": 4, "hv": 16}, id="more-items-than-CTAs"),
    ],
)
def test_lengths(lengths, options):
    check(make(lengths, **options))


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (3, 3), (2, 6), (1, 8), (16, 64)])
def test_heads(hk, hv):
    check(make([130, 321], hk=hk, hv=hv))


def test_beta_zero_tiny_and_two():
    """beta dY says nothing of dY where beta is 0."""
    problem = make([500, 77])
    beta = problem[0]["beta"]
    beta[:, ::17], beta[:, 5::17], beta[:, 7::17] = 0, 1e-5, 2
    check(problem)


@pytest.mark.parametrize("gate", ["typical", "strong"])
def test_l2norm(gate):
    arguments, do, dht = make([500, 77], gate=gate)
    arguments["q"], arguments["k"] = torch.randn_like(arguments["q"]), 3 * torch.randn_like(arguments["k"])
    check((arguments, do, dht), 2e-2 if gate == "strong" else TOLERANCE, use_qk_l2norm_in_kernel=True)


def test_states_are_optional_each():
    arguments, do, dht = make([130, 0, 64])
    exact = chunk_gated_delta_rule_backward(**arguments, do=do, dtype=torch.float64)
    assert_near(differentiate(arguments, do, None), exact._asdict())
    arguments["initial_state"] = None
    check((arguments, do, dht))


def test_state_v_first():
    check(make([130, 64]), state_v_first=True)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """Makes backward passes run in segments of so many chunks, each in so many parts, with so many columns a CTA."""
    planned = gated_delta_rule._plan
    monkeypatch.setattr(repeats, "_launchable", lambda q: False)  # a recording would hold the first plan

    def choose(segment_chunks: int, parts: int, v_tile: Any) -> None:
        def chosen(problem: Any, direction: Any = "forward") -> Any:
            plan = planned(problem, direction)
            facts: dict[str, Any] = {"segment_chunks": segment_chunks, "parts": parts, "v_tile": v_tile}
            return replace(plan, **facts) if direction == "backward" else plan

        monkeypatch.setattr(gated_delta_rule, "_plan", chosen)

    return choose


# The last segments are of one chunk, of no whole part, of all; two sequences are in one segment.
LENGTHS_OF_SEGMENTS = [1090, 0, 2500, 63, 2048]


@pytest.mark.parametrize("v_tile", [64, 128])
@pytest.mark.parametrize(("segment_chunks", "parts"), [(16, 1), (16, 4), (11, 2), (5, 2), (3, 4), (1, 1)])
@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "even", "reset"])
def test_segments_of_any_size(split, gate, segment_chunks, parts, v_tile):
    split(segment_chunks, parts, v_tile)
    check(make(LENGTHS_OF_SEGMENTS, gate=gate, tail=70), 2e-2 if gate == "strong" else TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["zero", "even"])
def test_states_of_segments_are_optional_each(split, gate, dtype):
    split(16, 4, 64)
    arguments, do, dht = make(LENGTHS_OF_SEGMENTS, gate=gate, dtype=dtype)
    exact = chunk_gated_delta_rule_backward(**arguments, do=do, dtype=torch.float64)
    assert_near(differentiate(arguments, do, None), exact._asdict())
    arguments["initial_state"] = None
    check((arguments, do, dht))


def test_low_level_op():
    arguments, do, dht = make([500, 0, 77], gate="reset")
    g, A, *_ = chunk_gated_delta_rule_fwd(**arguments)
    rest = {name: arguments[name] for name in ("q", "k", "v", "beta", "initial_state", "cu_seqlens")}
    dq, dk, dv, dbeta, dg, dinitial_state = chunk_gated_delta_rule_bwd(**rest, g=g, A=A, do=do, dht=dht)
    found = {"dq": dq, "dk": dk, "dv": dv, "dbeta": dbeta, "dg": dg, "dinitial_state": dinitial_state}
    exact = chunk_gated_delta_rule_backward(**arguments, do=do, dht=dht, dtype=torch.float64)
    assert_near(found, exact._asdict())
    with pytest.raises(ArgumentError, match="A must be"):
        chunk_gated_delta_rule_bwd(**rest, g=g, A=A[..., :32], do=do)


def test_graph_replay_with_other_offsets():
    arguments, do, _ = make([500, 77, 123])
    g, A, *_ = chunk_gated_delta_rule_fwd(**arguments)
    rest = {name: arguments[name] for name in ("q", "k", "v", "beta", "initial_state", "cu_seqlens")}
    chunk_gated_delta_rule_bwd(**rest, g=g, A=A, do=do)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chunk_gated_delta_rule_bwd(**rest, g=g, A=A, do=do)
    for lengths in ([500, 77, 123], [0, 600, 64]):  # 36 rows are left over
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        arguments["cu_seqlens"].copy_(offsets)
        g_now, A_now, *_ = chunk_gated_delta_rule_fwd(**{**arguments, "cu_seqlens": offsets})
        g.copy_(g_now)
        A.copy_(A_now)
        graph.replay()
        exact = chunk_gated_delta_rule_backward(**{**arguments, "cu_seqlens": offsets}, do=do, dtype=torch.float64)
        order = ("dq", "dk", "dv", "dbeta", "dg", "dinitial_state")
        assert_near(dict(zip(order, found, strict=True)), exact._asdict())


def test_torch_func_and_compile_give_the_gradients_of_autograd():
    """The same kernels on the same numbers: the same bits."""
    arguments, do, dht = make([130, 0, 64])
    leaves = {name: arguments[name] for name in NAMES}

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        with strict():
            o, final_state = chunk_gated_delta_rule(
                **arguments | leaves, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        assert final_state is not None
        return (o.float() * do.float()).sum() + (final_state * dht).sum()

    expected = differentiate(arguments, do, dht, use_qk_l2norm_in_kernel=True)
    found = torch.func.grad(loss)(leaves)
    assert all(torch.equal(found[name], expected[NAMES[name]]) for name in leaves)

    wanted = {name: leaves[name].detach().requires_grad_() for name in ("k", "g")}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(**wanted: Tensor) -> Tensor:
        o, final_state = chunk_gated_delta_rule(
            **arguments | wanted, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert final_state is not None
        return (o.float() * do.float()).sum() + (final_state * dht).sum()

    gradients = torch.autograd.grad(compiled(**wanted), list(wanted.values()))
    assert all(torch.equal(dx, expected[NAMES[name]]) for name, dx in zip(wanted, gradients, strict=True))
