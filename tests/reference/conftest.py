"""Problems for the reference, what a call gives for them, and how two results are compared; as fixtures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

Results = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small here: handing their work to threads costs more than it saves, above all on busy processors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Problem:
    """Arguments of a call, and the gradients of its results."""

    arguments: dict[str, Any]
    do: Tensor
    dht: Tensor | None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def _gate(kind: str, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    typical = logsigmoid(x) / 16
    if kind == "typical":
        return typical
    if kind == "strong":  # as in trained models
        return -16 * softplus(0.5 * x + 1)
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "half_zero":
        return torch.where(torch.rand(shape) < 0.5, 0.0, typical)
    if kind == "tiny":
        return torch.full_like(x, 1e-12).log()
    if kind == "reset":
        pick = torch.rand(shape)
        return typical.masked_fill(pick < 0.03, -torch.inf).masked_fill(pick > 0.97, -90.0)
    raise ValueError(kind)


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    def make(
        lengths: list[int],
        hk: int = 1,
        hv: int = 2,
        key_dim: int = 8,
        value_dim: int = 12,
        gate: str = "typical",
        keys: str = "normal",
        dense: bool = False,
        tail: int = 0,
        initial_state: bool = True,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Problem:
        """float64 values, rounded to dtype. A tail of NaN rows follows the last offset."""
        torch.manual_seed(seed)
        batch, tokens = (len(lengths), lengths[0]) if dense else (1, sum(lengths) + tail)
        n = len(lengths)
        draw = torch.rand if keys == "correlated" else torch.randn
        q = normalize(torch.randn(batch, tokens, hk, key_dim, dtype=torch.float64), dim=-1)
        k = normalize(draw(batch, tokens, hk, key_dim, dtype=torch.float64), dim=-1)
        v = torch.randn(batch, tokens, hv, value_dim, dtype=torch.float64)
        g = _gate(gate, (batch, tokens, hv))
        beta = torch.rand(batch, tokens, hv, dtype=torch.float64)
        do = torch.randn_like(v)
        if tail:
            for x in (q, k, v, g, beta):
                x[:, -tail:] = torch.nan
        h0, dht = (torch.randn(n, hv, key_dim, value_dim, dtype=torch.float64).to(dtype) for _ in range(2))
        arguments = {
            "q": q.to(dtype),
            "k": k.to(dtype),
            "v": v.to(dtype),
            "g": g.to(dtype),
            "beta": beta.to(dtype),
            "initial_state": h0 if initial_state else None,
            "cu_seqlens": None if dense else torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0),
        }
        return Problem(arguments, do.to(dtype), dht)

    return make


NAMES = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dinitial_state"}


@pytest.fixture
def run() -> Callable[..., Results]:
    """Call a rule: o, final_state, and the gradients of every tensor argument by autograd."""

    def run(rule: Callable[..., tuple[Tensor, Tensor]], problem: Problem, **options: Any) -> Results:
        leaves = {name: problem[name].detach().clone().requires_grad_() for name in NAMES if problem[name] is not None}
        o, final_state = rule(**{**problem.arguments, **leaves, **options}, output_final_state=True)
        outputs, gradients = [o], [problem.do.to(o.dtype)]
        if problem.dht is not None and final_state.requires_grad:
            outputs.append(final_state)
            gradients.append(problem.dht.to(final_state.dtype))
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients)
        results = {"o": o.detach(), "final_state": final_state.detach()}
        return results | {NAMES[name]: x for name, x in zip(leaves, found, strict=True)}

    return run


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Every tensor finite, and within a relative L2 error of the truth.

    An absolute error of a thousandth of that, per element, is allowed: gradients of gates that erase everything are
    differences of numbers near 1.
    """

    def check(got: Results, truth: Results, tolerance: float = 1e-10) -> None:
        assert got.keys() == truth.keys()
        for name, expected in truth.items():
            found = got[name].double()
            assert found.shape == expected.shape, name
            assert torch.isfinite(found).all(), f"{name} has NaN or inf"
            error = torch.linalg.vector_norm(found - expected.double()).item()
            allowed = torch.linalg.vector_norm(expected.double()).item() + 1e-3 * expected.numel() ** 0.5
            assert error <= tolerance * allowed, f"{name}: relative error {error / max(allowed, 1e-300):.1e}"

    return check
