"""The gated delta rule in chunks of 64 tokens, in PyTorch; one function per stage of the kernels.

    gate     G_i = g_1 + ... + g_i inside the chunk       R_ij = exp(G_i - G_j) for j <= i, else 0
    inverse  Tm = (I + L0 * R)^-1                         L0 = strict_lower(diag(beta) K K^T)
    states   W = V - diag(exp G) K S                      U = Tm diag(beta) W
             S' = exp(G_C) S + (diag(exp(G_C - G)) K)^T U
    output   O = scale diag(exp G) Q S + P U              P = scale lower(Q K^T) * R

S enters the chunk and S' leaves it. The end of a sequence is padded with g = 0 and k = v = beta = 0, which leaves the
state alone. In float64 this equals the token recurrence, and takes a fraction of its time.

Public functions take the tensors of the op. The others work on slots, a slot being one chunk of one sequence, with
tensors [slots, heads, C, ...].

Source: Gated Delta Networks, arXiv 2412.06464, chunkwise form.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashqla.reference.packing import Block, Packing, pack
from flashqla.reference.recurrent import l2_normalize

CHUNK = 64
# Tokens whose intermediates exist at once, as long as no gradient is recorded: about 25 KB a token and head in float64.
BLOCK_ROWS = 2048
# exp of these is 0, and a chunk of them still sums to a finite number: a reset stays a reset, without inf - inf.
LOWEST_GATE = {torch.float32: -104.0, torch.float64: -746.0}


class ChunkForward(NamedTuple):
    """All results of the forward pass. Rows outside every sequence are 0; states are [.., V, K] with state_v_first."""

    g: Tensor  # cumulative gate G [B, T, hv]
    A: Tensor | None  # [B, T, hv, C], row i of its chunk's Tm
    o: Tensor  # [B, T, hv, V]
    h: Tensor | None  # [B, chunks, hv, K, V], the state that enters every chunk, sequence by sequence
    final_state: Tensor  # [N, hv, K, V]


@dataclass(frozen=True)
class ChunkTerms:
    """What the keys and gates of chunks give, before any state. Key heads are repeated for their value heads."""

    k: Tensor  # [slots, hv, C, K]
    beta: Tensor  # [slots, hv, C, 1]
    G: Tensor  # [slots, hv, C]
    decay: Tensor  # exp(G) [slots, hv, C, 1]
    rest: Tensor  # exp(G_C - G) [slots, hv, C, 1]
    R: Tensor  # [slots, hv, C, C]
    KK: Tensor  # K K^T [slots, hv, C, C]
    M: Tensor  # L0 * R [slots, hv, C, C]
    Tm: Tensor  # [slots, hv, C, C]


class ChunkStates(NamedTuple):
    """What the recurrence over the chunks of a block gives."""

    h: Tensor  # [slots, hv, K, V]
    W: Tensor  # [slots, hv, C, V]
    U: Tensor  # [slots, hv, C, V]
    running: Tensor  # [n, hv, K, V], the states behind the last chunk
    ended: list[Tensor]  # [n, hv, K, V] each, the states of sequences that ended on the way


def compute_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the arithmetic: as asked for, or float64 for a float64 tensor, else float32."""
    return dtype or (torch.float64 if x.dtype == torch.float64 else torch.float32)


def slots_of(block: Block, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens [rows, heads, ...] -> [slots, heads, C, ...] in dtype."""
    return block.spread(x.to(dtype)).transpose(1, 2)


def tokens_of(block: Block, x: Tensor) -> Tensor:
    """[slots, heads, C, ...] -> tokens [rows, heads, ...]."""
    return block.collect(x.transpose(1, 2))


def initial_states(
    packing: Packing, k: Tensor, v: Tensor, initial_state: Tensor | None, state_v_first: bool, dtype: torch.dtype
) -> Tensor:
    """States [N, hv, K, V] by rank, in dtype; zeros where none are given."""
    if initial_state is None:
        return v.new_zeros((len(packing.order), v.shape[2], k.shape[3], v.shape[3]), dtype=dtype)
    S = initial_state.to(dtype)
    return packing.ranked(S.mT if state_v_first else S)


def cumulative_gate(g: Tensor) -> Tensor:
    """Stage `gate`: g [slots, hv, C] -> G."""
    return g.clamp(min=LOWEST_GATE[g.dtype]).cumsum(-1)


def decay_ratios(G: Tensor) -> Tensor:
    """G [slots, hv, C] -> R. The mask goes inside the exponent: above the diagonal exp would overflow."""
    above = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool, device=G.device).triu(1)
    return (G[..., :, None] - G[..., None, :]).masked_fill(above, -torch.inf).exp()


def chunk_terms(k: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Stages `gate` and `inverse` of k [slots, hk, C, K], g and beta [slots, hv, C]."""
    group = beta.shape[1] // k.shape[1]
    G = cumulative_gate(g)
    R = decay_ratios(G)
    KK = (k @ k.mT).repeat_interleave(group, dim=1)
    M = (beta[..., None] * R * KK).tril(-1)
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand_as(M)
    return ChunkTerms(
        k=k.repeat_interleave(group, dim=1),
        beta=beta[..., None],
        G=G,
        decay=G.exp()[..., None],
        rest=(G[..., -1:] - G).exp()[..., None],
        R=R,
        KK=KK,
        M=M,
        Tm=torch.linalg.solve_triangular(M, identity, upper=False, unitriangular=True),
    )


def scan_states(block: Block, terms: ChunkTerms, v: Tensor, S: Tensor) -> ChunkStates:
    """Stage `states` of v [slots, hv, C, V], from the states S [n, hv, K, V] that enter the first step of the block."""
    chunks = zip(
        block.counts,
        block.steps(v),
        block.steps(terms.decay * terms.k),
        block.steps(terms.Tm * terms.beta.mT),
        block.steps((terms.rest * terms.k).mT),
        block.steps(terms.decay[:, :, -1:]),
        strict=True,
    )
    # A step of no sequence goes first: the o of an empty pack depends on the inputs too, and their gradients are zeros.
    h, W, U, ended = [S[:0]], [v[:0]], [terms.Tm[:0] @ v[:0]], []
    for count, v_c, k_read, t_beta, k_write, kept in chunks:
        if count < len(S):
            ended.append(S[count:])
            S = S[:count]
        h.append(S)
        W.append(v_c - k_read @ S)
        U.append(t_beta @ W[-1])
        S = kept * S + k_write @ U[-1]
    return ChunkStates(torch.cat(h), torch.cat(W), torch.cat(U), S, ended)


def score_ratios(q: Tensor, k: Tensor, R: Tensor, scale: float) -> Tensor:
    """P of q and k [slots, hv or hk, C, K]."""
    QK = q @ k.mT
    return scale * R * QK.repeat_interleave(R.shape[1] // QK.shape[1], dim=1)


def chunk_output(q: Tensor, P: Tensor, terms: ChunkTerms, states: ChunkStates, scale: float) -> Tensor:
    """Stage `output`: q [slots, hv, C, K] -> O [slots, hv, C, V]."""
    return scale * terms.decay * (q @ states.h) + P @ states.U


def chunk_gate(
    g: Tensor, cu_seqlens: Tensor | None = None, chunk_size: int = CHUNK, dtype: torch.dtype | None = None
) -> Tensor:
    """Cumulative gate G [B, T, hv] of g [B, T, hv], from the start of every chunk of every sequence; 0 outside them."""
    packing, dtype = pack(g, cu_seqlens, chunk_size, BLOCK_ROWS), compute_dtype(g, dtype)
    blocks = zip(packing.blocks, packing.split(g), strict=True)
    return packing.join([tokens_of(block, cumulative_gate(slots_of(block, rows, dtype))) for block, rows in blocks])


def chunk_inverse(
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A [B, T, hv, C] of k [B, T, hk, K], g and beta [B, T, hv]: row i of its chunk's inverse Tm, in the dtype of the
    arithmetic; 0 outside the sequences."""
    packing, dtype = pack(k, cu_seqlens, chunk_size, BLOCK_ROWS), compute_dtype(k, dtype)
    g = torch.zeros_like(beta) if g is None else g
    parts = []
    for block, *rows in zip(packing.blocks, *map(packing.split, (k, g, beta)), strict=True):
        k_, g_, beta_ = (slots_of(block, x, dtype) for x in rows)
        terms = chunk_terms(l2_normalize(k_) if use_qk_l2norm_in_kernel else k_, g_, beta_)
        parts.append(tokens_of(block, terms.Tm))
    return packing.join(parts)


def chunk_states(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """h [B, chunks, hv, K, V], the state that enters every chunk, in the dtype of the arithmetic.

    Arguments and order as in chunk_forward.
    """
    packing, dtype = pack(v, cu_seqlens, chunk_size, BLOCK_ROWS), compute_dtype(v, dtype)
    g = torch.zeros_like(beta) if g is None else g
    S = initial_states(packing, k, v, initial_state, state_v_first, dtype)
    h = []
    for block, *rows in zip(packing.blocks, *map(packing.split, (k, v, g, beta)), strict=True):
        k_, v_, g_, beta_ = (slots_of(block, x, dtype) for x in rows)
        terms = chunk_terms(l2_normalize(k_) if use_qk_l2norm_in_kernel else k_, g_, beta_)
        states = scan_states(block, terms, v_, S)
        S = states.running
        h.append(states.h)
    return _by_sequence(packing, h, state_v_first)


def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK,
    dtype: torch.dtype | None = None,
    output_A: bool = True,
    output_h: bool = True,
) -> ChunkForward:
    """All stages. Arguments as in chunk_gated_delta_rule_reference.

    With dtype None, A and h have the dtype of k, o that of v, g and final_state that of the arithmetic (float32, or
    float64 for float64 tensors); a given dtype is that of the arithmetic and of every result.
    """
    work = compute_dtype(v, dtype)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    g = torch.zeros_like(beta) if g is None else g
    packing = pack(v, cu_seqlens, chunk_size, BLOCK_ROWS)
    S = initial_states(packing, k, v, initial_state, state_v_first, work)
    group = v.shape[2] // k.shape[2]

    G, A, o, h, ended = [], [], [], [], []
    for block, *rows in zip(packing.blocks, *map(packing.split, (q, k, v, g, beta)), strict=True):
        q_, k_, v_, g_, beta_ = (slots_of(block, x, work) for x in rows)
        if use_qk_l2norm_in_kernel:
            q_, k_ = l2_normalize(q_), l2_normalize(k_)
        terms = chunk_terms(k_, g_, beta_)
        states = scan_states(block, terms, v_, S)
        P = score_ratios(q_, k_, terms.R, scale)
        output = chunk_output(q_.repeat_interleave(group, dim=1), P, terms, states, scale)
        S = states.running
        ended += states.ended
        G.append(tokens_of(block, terms.G))
        o.append(tokens_of(block, output).to(dtype or v.dtype))
        if output_A:
            A.append(tokens_of(block, terms.Tm).to(dtype or k.dtype))
        if output_h:
            h.append(states.h.to(dtype or k.dtype))

    final_state = packing.unranked([*ended, S])
    if state_v_first:
        final_state = final_state.mT.contiguous()
    return ChunkForward(
        g=packing.join(G),
        A=packing.join(A) if output_A else None,
        o=packing.join(o),
        h=_by_sequence(packing, h, state_v_first) if output_h else None,
        final_state=final_state,
    )


def _by_sequence(packing: Packing, h: list[Tensor], state_v_first: bool) -> Tensor:
    """The states of all blocks [slots, hv, K, V] -> [B, chunks, hv, K, V]."""
    chunks = len(packing.slot_order) // max(packing.batch, 1)
    states = torch.cat(h).index_select(0, packing.slot_order)
    states = states.view(packing.batch, chunks, *states.shape[1:])
    return states.mT.contiguous() if state_v_first else states


def chunk_gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule in chunks: batched over heads and sequences, with a Python loop over chunks alone.

    q, k [B, T, hk, K]; v [B, T, hv, V]; g [B, T, hv] natural log of the decay (-inf allowed, None: no decay);
    beta [B, T, hv]; initial_state [N, hv, K, V], or [N, hv, V, K] with state_v_first; hk divides hv, K and V are free.
    With cu_seqlens [N + 1] the batch is 1; rows past its last offset are not read, and their o and gradients are 0.
    scale defaults to K ** -0.5. Any device and floating dtype; arguments are not checked.

    Returns o [B, T, hv, V] and the final state (None unless asked for). With dtype None, 16-bit and float32 tensors are
    computed in float32 and float64 ones in float64, o has the dtype of v and the state that of the arithmetic. A given
    dtype is that of the arithmetic and of both results: float64 makes this a truth for inputs of any dtype.
    Differentiable, with gradients in the dtypes of the inputs.
    """
    result = chunk_forward(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
        dtype=dtype,
        output_A=False,
        output_h=False,
    )
    return result.o, result.final_state if output_final_state else None
