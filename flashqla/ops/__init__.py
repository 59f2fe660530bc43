"""The gated delta rule as an op, with the names and shapes that the rest of the package uses.

Names load on first use: `flashqla.ops.plan` needs no torch, and importing torch takes 1.6 s.

Sizes
    B         batch                              T    tokens of a row (all sequences of a pack share one row)
    N         sequences: B, or those of a pack   C    tokens of a chunk, 64
    hk, hv    key/query heads, value heads; hv is a multiple of hk, and value head i uses key head i // (hv // hk)
    K, V      dimensions of a key and a value head, 128

Arguments
    q, k               [B, T, hk, K]   bfloat16 or float16 for the kernels; float32, float64 too in PyTorch
    v, o               [B, T, hv, V]   dtype of q
    g                  [B, T, hv]      natural log of the decay of a token, <= 0; -inf is a reset; None: no decay
    beta               [B, T, hv]      write strength, in [0, 1], up to 2 where a model allows it
    initial_state      [N, hv, K, V]   or [N, hv, V, K] with state_v_first; None: zeros
    final_state        as initial_state, float32 (float64 for float64 q)
    cu_seqlens         [N + 1]         int32 or int64 offsets of the sequences of a pack; then B = 1
    scale              factor of the output, K ** -0.5 by default

Chunk mathematics, per value head and chunk
    G    cumulative log gate inside the chunk, inclusive     [C]       decay = exp(G)
    R    exp(G_i - G_j) for j <= i, else 0                   [C, C]
    L0   strict_lower(diag(beta) K K^T)                      [C, C]    A0 = (I + L0)^-1
    Tm   A0 * R = (I + L0 * R)^-1                            [C, C]    `A` [B, T, hv, C] holds its rows, token by token
    S    state entering the chunk                            [K, V]    `h` [B, chunks, hv, K, V]
    W    V - diag(decay) K S                                 [C, V]
    U    Tm diag(beta) W                                     [C, V]
    P    scale * lower(Q K^T) * R                            [C, C]

Gradients are named dq, dk, dv, dg, dbeta, dinitial_state. Source: Gated Delta Networks, arXiv 2412.06464.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashqla.ops.gated_delta_rule import (
        FallbackWarning,
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_bwd,
        chunk_gated_delta_rule_fwd,
        explain,
        strict,
    )

__all__ = [
    "FallbackWarning",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "explain",
    "strict",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashqla.ops import gated_delta_rule

    value = getattr(gated_delta_rule, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
