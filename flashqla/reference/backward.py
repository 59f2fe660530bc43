"""Backward pass of the chunk form, written out: the algebra that backward kernels compute, not autograd.

Per chunk, given dO and dS' (gradient of the state that leaves it), with the names of chunked.py:

    dU = P^T dO + diag(exp(G_C - G)) K dS'      dY = Tm^T dU                          Y = diag(beta) W
    dV = diag(beta) dY                          E  = -diag(exp G) dV                  gradient of K S
    dM = -strict_lower(dY U^T)                  dP = lower(dO U^T)                    M = L0 * R
    X  = diag(beta) dM * R                      Z  = scale dP * R
    dQ = scale diag(exp G) dO S^T + Z K
    dK = E S^T + X K + X^T K + Z^T Q + diag(exp(G_C - G)) U dS'^T
    dS = K^T E + scale Q^T diag(exp G) dO + exp(G_C) dS'
    dbeta_i = dY_i . (W_i - (strict_lower(R * K K^T) U)_i)
    dG_i = E_i . (K S)_i + scale exp(G_i) (Q S)_i . dO_i          s_i = exp(G_C - G_i) k_i . (dS' u_i)
           + rowsum(N)_i - colsum(N)_i                            N = strict_lower(M * dM + P * dP)
    dG_C += exp(G_C) <S, dS'>
    dg_i = dG_i + .. + dG_C + s_1 + .. + s_(i-1)

dG_i also has - s_i, and dG_C has sum_i s_i: added up they leave the sum of the s before a token. N has no diagonal,
because there rows and columns cancel. Left in, both would drown the dg of strong gates in the rounding of terms that
are not there.

Source: differentiation of the chunk form; the tests compare it with autograd through the token recurrence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashqla.reference.chunked import (
    BLOCK_ROWS,
    CHUNK,
    LOWEST_GATE,
    ChunkStates,
    ChunkTerms,
    chunk_terms,
    compute_dtype,
    initial_states,
    scan_states,
    score_ratios,
    slots_of,
    tokens_of,
)
from flashqla.reference.packing import Block, pack
from flashqla.reference.recurrent import L2_EPS, l2_normalize


class Gradients(NamedTuple):
    """Gradients shaped as their inputs; dg and dinitial_state are None where the input was."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor
    dinitial_state: Tensor | None


def scan_state_gradients(
    block: Block, q: Tensor, do: Tensor, P: Tensor, terms: ChunkTerms, dS: Tensor, dht: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence of a block, last chunk first.

    q, do [slots, hv, C, ...]; dS [n, hv, K, V] enters from the step behind the block, and dht [N, hv, K, V] holds the
    gradients of all final states, by rank. Returns dY [slots, hv, C, V], dS' of every chunk [slots, hv, K, V], and the
    dS in front of the block.
    """
    chunks = zip(
        block.counts,
        block.steps(P.mT @ do),
        block.steps(terms.rest * terms.k),
        block.steps(terms.Tm.mT),
        block.steps((terms.decay * terms.beta * terms.k).mT),
        block.steps(scale * (terms.decay * q).mT @ do),
        block.steps(terms.decay[:, :, -1:]),
        strict=True,
    )
    dY, dS_out = [do[:0]], [dht[:0]]
    # Reversed, because a chunk needs the state gradient of the one behind it.
    for count, dU_output, k_write, t_transposed, k_read, dS_output, kept in reversed(list(chunks)):
        dS = torch.cat([dS, dht[len(dS) : count]])  # sequences whose last chunk this is
        dY.append(t_transposed @ (dU_output + k_write @ dS))
        dS_out.append(dS)
        dS = dS_output + kept * dS - k_read @ dY[-1]
    return torch.cat(dY[::-1]), torch.cat(dS_out[::-1]), dS


def chunk_gradients(
    q: Tensor,
    do: Tensor,
    P: Tensor,
    terms: ChunkTerms,
    states: ChunkStates,
    dY: Tensor,
    dS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything else, for all chunks of a block at once; dS is the gradient of the state that leaves each chunk.

    Returns dq and dk [slots, hv, C, K], dv, dg and dbeta.
    """
    k, S, U, R = terms.k, states.h, states.U, terms.R
    dV = terms.beta * dY
    E = -terms.decay * dV
    dM = -(dY @ U.mT).tril(-1)
    dP = (do @ U.mT).tril()
    X = terms.beta * dM * R
    Z = scale * dP * R
    do_S = scale * terms.decay * (do @ S.mT)
    U_dS = terms.rest * (U @ dS.mT)

    dq = do_S + Z @ k
    dk = E @ S.mT + X @ k + X.mT @ k + Z.mT @ q + U_dS
    dbeta = (dY * (states.W - (R * terms.KK).tril(-1) @ U)).sum(-1)

    N = terms.M * dM + (P * dP).tril(-1)
    s = (k * U_dS).sum(-1)
    dG = (E * (k @ S)).sum(-1) + (q * do_S).sum(-1) + N.sum(-1) - N.sum(-2)
    dG[..., -1] += terms.decay[:, :, -1, 0] * (S * dS).sum((-2, -1))
    dg = dG.flip(-1).cumsum(-1).flip(-1)
    dg[..., 1:] += s[..., :-1].cumsum(-1)
    return dq, dk, dV, dg, dbeta


def gate_of_sums(G: Tensor, cu_seqlens: Tensor | None = None, chunk_size: int = CHUNK) -> Tensor:
    """The log gate [B, T, hv] of which G is the sum from the start of every chunk; 0 outside the sequences."""
    packing, parts = pack(G, cu_seqlens, chunk_size, BLOCK_ROWS), []
    for block, rows in zip(packing.blocks, packing.split(G), strict=True):
        sums = slots_of(block, rows, G.dtype)
        parts.append(tokens_of(block, sums.diff(dim=-1, prepend=torch.zeros_like(sums[..., :1]))))
    return packing.join(parts)


def _sum_groups(x: Tensor, hk: int) -> Tensor:
    """[slots, hv, C, K] -> [slots, hk, C, K], over the value heads of every key head."""
    return torch.unflatten(x, 1, (hk, -1)).sum(2)


def _l2_backward(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of x from that of y = l2_normalize(x)."""
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    y = x * rstd
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


@torch.no_grad()
def chunk_gated_delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of chunk_gated_delta_rule_reference, from do [B, T, hv, V] and dht (shaped as the final state).

    The other arguments are those of the forward call. With dtype None the arithmetic is that of the forward pass and
    every gradient has the dtype of its input; a given dtype is that of the arithmetic and of every gradient.
    Rows of do outside every sequence are not read. States are kept for every block of chunks, and recomputed inside.
    """
    work = compute_dtype(v, dtype)
    hk, group = k.shape[2], v.shape[2] // k.shape[2]
    scale = k.shape[3] ** -0.5 if scale is None else scale
    log_gate = torch.zeros_like(beta) if g is None else g
    packing = pack(v, cu_seqlens, chunk_size, BLOCK_ROWS)
    S = initial_states(packing, k, v, initial_state, state_v_first, work)
    dht = initial_states(packing, k, v, dht, state_v_first, work)

    inputs = tuple(map(packing.split, (q, k, v, log_gate, beta, do)))
    entering = []
    for block, _, k_rows, v_rows, g_rows, beta_rows, _ in zip(packing.blocks, *inputs, strict=True):
        entering.append(S)
        k_, v_, g_, beta_ = (slots_of(block, x, work) for x in (k_rows, v_rows, g_rows, beta_rows))
        terms = chunk_terms(l2_normalize(k_) if use_qk_l2norm_in_kernel else k_, g_, beta_)
        S = scan_states(block, terms, v_, S).running

    parts: list[tuple[Tensor, ...]] = []
    dS = dht[:0]
    for block, S, *rows in reversed(list(zip(packing.blocks, entering, *inputs, strict=True))):
        q_raw, k_raw, v_, g_, beta_, do_ = (slots_of(block, x, work) for x in rows)
        q_, k_ = (l2_normalize(q_raw), l2_normalize(k_raw)) if use_qk_l2norm_in_kernel else (q_raw, k_raw)
        terms = chunk_terms(k_, g_, beta_)
        states = scan_states(block, terms, v_, S)
        P = score_ratios(q_, k_, terms.R, scale)
        q_ = q_.repeat_interleave(group, dim=1)
        dY, dS_out, dS = scan_state_gradients(block, q_, do_, P, terms, dS, dht, scale)
        dq, dk, dv, dg, dbeta = chunk_gradients(q_, do_, P, terms, states, dY, dS_out, scale)
        dq, dk = _sum_groups(dq, hk), _sum_groups(dk, hk)
        if use_qk_l2norm_in_kernel:
            dq, dk = _l2_backward(q_raw, dq), _l2_backward(k_raw, dk)
        dg = dg.masked_fill(g_ < LOWEST_GATE[work], 0)  # exp is constant there
        parts.append(tuple(tokens_of(block, x) for x in (dq, dk, dv, dg, dbeta)))

    dq, dk, dv, dg, dbeta = (
        packing.join(x).to(dtype or like.dtype)
        for x, like in zip(zip(*reversed(parts), strict=True), (q, k, v, log_gate, beta), strict=True)
    )
    dinitial_state = None
    if initial_state is not None:
        dinitial_state = packing.unranked([torch.cat([dS, dht[len(dS) :]])]).to(dtype or initial_state.dtype)
        dinitial_state = dinitial_state.mT.contiguous() if state_v_first else dinitial_state
    return Gradients(dq, dk, dv, dg if g is not None else None, dbeta, dinitial_state)
