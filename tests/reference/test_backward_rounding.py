"""What the backward kernels compute, in PyTorch: their algebra, and what they round to 16 bits on the way.

    chain, forward   S as an operand; W, U and decay_C / decay U
    chain, reverse   dS as an operand; P; dU; E and scale decay dO, in fp16 without the decay of the first token;
                     beta dY, which is what gradients reads of dY
    gradients        Z and X; S of every second chunk, and decay_C / decay U for it; everything else comes from tensors
                     of the others, and is summed in float32

Products of rounded operands in float32 stand for those of the tensor cores. They are compared with the recurrence in
float64 on the same inputs, as the kernels are on a GPU: what is left is what rounding leaves.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqla.reference import chunk_gated_delta_rule_backward

C = 64
SMALL_BETA = 2.0**-10
GATE_FLOOR = -126.0 * 0.6931471805599453


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def chunks_of(x: Tensor, begin: int, end: int) -> Tensor:
    """[T, H, ...] -> [chunks, H, C, ...] of rows begin..end, zeros after them."""
    rows = x[begin:end]
    padded = torch.cat([rows, rows.new_zeros((-(end - begin) % C, *rows.shape[1:]))]).float()
    return padded.unflatten(0, (-1, C)).transpose(1, 2)


def backward(
    arguments: dict[str, Any],
    do: Tensor,
    dht: Tensor | None,
    l2norm: bool,
    stages: list[tuple[Tensor, ...]] | None = None,
) -> dict[str, Tensor]:
    """The gradients that the kernels give for a pack. To `stages` goes what passes between kernels, chunk by chunk."""
    q, k, v, g, beta = (arguments[name][0] for name in ("q", "k", "v", "g", "beta"))
    dtype, (hk, hv) = q.dtype, (k.shape[1], v.shape[1])
    found: dict[str, list[Tensor]] = {name: [] for name in ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")}
    for n, (begin, end) in enumerate(pairwise(arguments["cu_seqlens"].tolist())):
        S = torch.zeros(hv, 128, 128) if arguments["initial_state"] is None else arguments["initial_state"][n].float()
        dS = torch.zeros(hv, 128, 128) if dht is None else dht[n].float()
        q_, k_, v_, do_ = (chunks_of(x, begin, end) for x in (q, k, v, do[0]))
        g_, beta_ = (chunks_of(x, begin, end) for x in (g, beta))
        chunks = list(zip(q_, k_, v_, do_, g_, beta_, strict=True))
        factors = [chunk_factors(*chunk, hv // hk, l2norm, dtype) for chunk in chunks]
        entering, errors = [], []
        for (_, _, v_c, _, _, _), f in zip(chunks, factors, strict=True):
            S_in = rounded(S, dtype)
            W = rounded(f["beta"] * v_c - f["beta_decay"] * (f["k"] @ S_in), dtype)
            U = f["A"] @ W
            entering.append((S_in, rounded(U, dtype)))
            S = f["chunk_decay"] * S + f["k"].mT @ rounded(f["key_decay"] * U, dtype)
        for (_, _, _, do_c, _, _), f in zip(reversed(chunks), reversed(factors), strict=True):
            dS_in = rounded(dS, dtype)
            dU = rounded(f["key_decay"] * (f["k"] @ dS_in) + f["P"].mT @ do_c, dtype)
            dY = f["A"].mT @ dU
            errors.append((dS_in, rounded(torch.where(f["beta"].abs() < SMALL_BETA, 1.0, f["beta"]) * dY, dtype)))
            first = f["decay_taken_out"]
            dS = f["chunk_decay"] / first * dS + f["q"].mT @ rounded(f["out_scale"] / first * do_c, dtype)
            dS = (dS - f["k"].mT @ rounded(f["beta_decay"] / first * dY, dtype)) * first
        found["dinitial_state"].append(dS)
        if stages is not None:
            stages += [(*a, *b) for a, b in zip(entering, reversed(errors), strict=True)]
        parts = [
            gradients(chunk, f, S_in, U, dS_out, D, l2norm, dtype)
            for chunk, f, (S_in, U), (dS_out, D) in zip(
                chunks, factors, from_every_second(entering, factors, dtype), reversed(errors), strict=True
            )
        ]
        for name, pieces in zip(found, zip(*parts, strict=True), strict=False):
            found[name].append(torch.cat([x.transpose(0, 1) for x in pieces])[: end - begin])
    joined = {name: torch.cat(x)[None] for name, x in found.items() if name != "dinitial_state"}
    of_keys = {name: rounded(joined[name], dtype) for name in ("dq", "dk", "dv")}
    state = {"dinitial_state": torch.stack(found["dinitial_state"])} if arguments["initial_state"] is not None else {}
    return joined | of_keys | state


def from_every_second(
    entering: list[tuple[Tensor, Tensor]], factors: list[dict[str, Tensor]], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """States as the gradients kernel has them, and U: the first, third, .. are stored, the others follow from those."""
    states = list(entering)
    for c in range(1, len(entering), 2):
        (S, U), f = entering[c - 1], factors[c - 1]
        write = rounded(f["key_decay"] * U, dtype)
        states[c] = (rounded(f["chunk_decay"] * S + f["k"].mT @ write, dtype), entering[c][1])
    return states


def chunk_factors(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, g: Tensor, beta: Tensor, group: int, l2norm: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The record of a chunk for all value heads, and its tiles."""
    q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    rq, rk = ((x.square().sum(-1) + 1e-6).rsqrt() if l2norm else torch.ones(x.shape[:-1]) for x in (q, k))
    G = g.clamp(min=GATE_FLOOR).cumsum(-1)
    ratio = (G[..., :, None] - G[..., None, :]).masked_fill(torch.ones(C, C).triu(1).bool(), -torch.inf).exp()
    scale = k.shape[-1] ** -0.5
    score = ratio * rq[..., :, None] * rk[..., None, :] * scale
    factor = (ratio * rk[..., :, None] * rk[..., None, :]).tril(-1)
    M = beta[..., None] * factor * (k @ k.mT)
    A = torch.linalg.solve_triangular(M, torch.eye(C).expand_as(M), upper=False, unitriangular=True)
    return {
        "q": q,
        "k": k,
        "A": rounded(A, dtype),
        "P": rounded(score * (q @ k.mT), dtype),
        "score": score,
        "factor": factor,
        "gate": g,
        "beta": beta[..., None],
        "decay": (G.exp() * rk)[..., None],
        "beta_decay": (beta * G.exp() * rk)[..., None],
        "out_scale": (scale * G.exp() * rq)[..., None],
        "key_decay": ((G[..., -1:] - G).exp() * rk)[..., None],
        "chunk_decay": G[..., -1:].exp()[..., None],
        "decay_taken_out": (G[..., :1] if dtype == torch.float16 else torch.zeros(())).exp()[..., None],
    }


def gradients(
    chunk: tuple[Tensor, ...],
    f: dict[str, Tensor],
    S: Tensor,
    U: Tensor,
    dS: Tensor,
    D: Tensor,
    l2norm: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """dq, dk [hk, C, K], dv [hv, C, V], dg, dbeta [hv, C]. D is dY, times beta where that is not small."""
    q, k, v, do, _, _ = chunk
    hk = q.shape[0]
    small = f["beta"].abs() < SMALL_BETA
    other = torch.where(small, f["beta"], 1.0)
    dP, DU = do @ U.mT, D @ U.mT
    Z, of_beta = f["score"] * dP, -f["factor"] * DU
    X = other * of_beta
    Z_in, X_in = (rounded(x, dtype) for x in (Z, X))
    read, error, written = do @ S.mT, D @ S.mT, U @ dS.mT
    dq = f["out_scale"] * read + Z_in @ f["k"]
    dk = -other * f["decay"] * error + f["key_decay"] * written + X_in @ f["k"] + X_in.mT @ f["k"] + Z_in.mT @ f["q"]
    dq, dk = (torch.unflatten(x, 0, (hk, -1)).sum(1) for x in (dq, dk))
    if l2norm:
        dq, dk = (d - x * ((x * d).sum(-1) / (x.square().sum(-1) + 1e-6))[..., None] for d, x in ((dq, q), (dk, k)))
    KK = f["k"] @ f["k"].mT
    QK = f["q"] @ f["k"].mT
    gated = (Z * QK).tril(-1) + X * KK
    k_error = (f["k"] * error).sum(-1)
    reads = (f["out_scale"] * f["q"] * read).sum(-1) - (other * f["decay"])[..., 0] * k_error
    reads = reads + gated.sum(-1) - gated.sum(-2)
    writes = (f["key_decay"] * f["k"] * written).sum(-1)
    inner = f["chunk_decay"][..., 0] * (S * dS).sum((-2, -1))[..., None]
    earlier = torch.cat([writes.new_zeros(writes[:, :1].shape), writes[:, :-1]], -1)
    dg = reads.flip(-1).cumsum(-1).flip(-1) + earlier.cumsum(-1) + inner
    dg = dg.masked_fill(f["gate"] < -100 * 0.6931471805599453, 0)
    beta = f["beta"][..., 0]
    exact = (D * v).sum(-1) - f["decay"][..., 0] * k_error + (of_beta * KK).sum(-1)
    dbeta = torch.where(small[..., 0], exact, (D * U).sum(-1) / beta.square())
    return dq, dk, torch.where(small, f["beta"] * D, D), dg, dbeta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("keys", ["normal", "correlated"])
@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "half_zero", "tiny", "reset"])
def test_rounding_leaves_the_gradients(make_problem, gate, keys, l2norm, dtype):
    problem = make_problem([130, 64, 0, 321], hk=1, hv=2, key_dim=128, value_dim=128, gate=gate, keys=keys, dtype=dtype)
    a = problem.arguments
    a["g"], a["beta"] = a["g"].float(), a["beta"].float()
    a["beta"][:, ::17] = 0
    a["beta"][:, 5::17] = 1e-5
    truth = chunk_gated_delta_rule_backward(
        **a, do=problem.do, dht=problem.dht, use_qk_l2norm_in_kernel=l2norm, dtype=torch.float64
    )._asdict()
    found = backward(a, problem.do, problem.dht, l2norm)
    assert found.keys() == truth.keys()
    for name, x in found.items():
        expected = truth[name]
        error = torch.linalg.vector_norm(x - expected) / torch.linalg.vector_norm(expected)
        assert error < (2e-2 if gate in ("strong", "tiny") else 1e-2), f"{name}: {error:.1e}"


@pytest.mark.parametrize("keys", ["normal", "correlated"])
@pytest.mark.parametrize("gate", ["typical", "zero", "strong"])
def test_every_second_state_is_enough(make_problem, monkeypatch, gate, keys):
    """With all states stored the gradients are hardly nearer to the truth, even where nothing is forgotten."""
    lengths = [130, 64, 640]
    problem = make_problem(lengths, hk=1, hv=2, key_dim=128, value_dim=128, gate=gate, keys=keys, dtype=torch.bfloat16)
    a = problem.arguments
    a["g"], a["beta"] = a["g"].float(), a["beta"].float()
    truth = chunk_gated_delta_rule_backward(**a, do=problem.do, dht=problem.dht, dtype=torch.float64)._asdict()
    found = backward(a, problem.do, problem.dht, False)
    monkeypatch.setitem(globals(), "from_every_second", lambda entering, *_: entering)
    with_all = backward(a, problem.do, problem.dht, False)
    assert all(
        torch.equal(found[name], with_all[name]) for name in ("dv", "dinitial_state")
    )  # need no state that is made
    for name, worse in {"dq": 1.1, "dk": 1.05, "dbeta": 1.05, "dg": 1.25}.items():
        errors = [torch.linalg.vector_norm(x[name] - truth[name]) for x in (found, with_all)]
        assert errors[0] < worse * errors[1], f"{name}: {errors[0] / errors[1]:.3f}"


def test_a_gradient_of_the_initial_state_that_fp16_cannot_hold(make_problem):
    problem = make_problem([130, 64], hk=1, hv=2, key_dim=128, value_dim=128, gate="strong", dtype=torch.float16)
    a = problem.arguments
    a["g"], a["beta"] = a["g"].float(), a["beta"].float()
    truth = chunk_gated_delta_rule_backward(**a, do=problem.do, dht=problem.dht, dtype=torch.float64).dinitial_state
    found = backward(a, problem.do, problem.dht, False)["dinitial_state"]
    for x, expected in zip(found.flatten(0, 1), truth.flatten(0, 1), strict=True):  # of each head
        assert expected.abs().max() < 2.0**-14
        assert torch.linalg.vector_norm(x - expected) < 1e-2 * torch.linalg.vector_norm(expected)
