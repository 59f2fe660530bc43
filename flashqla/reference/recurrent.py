"""The gated delta rule, token by token: the definition, and in float64 the truth that everything is measured against.

    S <- exp(g_t) S
    u_t = beta_t (v_t - S^T k_t)
    S <- S + k_t u_t^T
    o_t = scale S^T q_t

Source: Gated Delta Networks, arXiv 2412.06464, with the decay before the prediction error.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashqla.reference.packing import pack

# States that the backward pass of one block keeps: memory grows with this, and the recomputation of block inputs
# with its inverse.
BLOCK_ROWS = 256

L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension; flash-linear-attention's convention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _steps(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    counts: tuple[int, ...],
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the steps of a block.

    S [n * hv, K, V] enters; q, k [rows, hk, K]; v [rows, hv, V]; g, beta [rows, hv]. Returns o [rows, hv, V], the
    states that still run, and those that ended, in the order in which they did.
    """
    hk, hv, dtype = k.shape[1], v.shape[1], S.dtype
    q, k, v, beta = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype)
    if l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = scale * q.repeat_interleave(hv // hk, dim=1)
    k = k.repeat_interleave(hv // hk, dim=1)
    decay = g.to(dtype).exp()

    # Both products with the state use the state before the token, so that one batched product per token gives u and
    # the older part of o: u = beta v - (beta decay k)^T S, and o = (decay q)^T S + (q . k) u.
    read = torch.stack([-(beta * decay)[..., None] * k, decay[..., None] * q], dim=2).flatten(0, 1)
    write = beta[..., None] * v
    write = torch.stack([write, torch.zeros_like(write)], dim=2).flatten(0, 1)
    sizes = [count * hv for count in counts]
    tokens = zip(
        sizes,
        torch.split(read, sizes),
        torch.split(write, sizes),
        torch.split(k.flatten(0, 1).unsqueeze(2), sizes),
        torch.split(decay.view(-1, 1, 1), sizes),
        strict=True,
    )
    # A step of no sequence goes first: the o of an empty pack depends on the inputs too, and their gradients are zeros.
    results, ended = [torch.baddbmm(write[:0], read[:0], S[:0])], []
    for size, read_t, write_t, k_t, decay_t in tokens:
        if size < len(S):
            ended.append(S[size:])
            S = S[:size]
        result = torch.baddbmm(write_t, read_t, S)
        S = torch.addcmul(decay_t * S, k_t, result[:, :1])
        results.append(result)
    u, o = torch.cat(results).view(*v.shape[:2], 2, v.shape[2]).unbind(2)
    return o + (q * k).sum(-1, keepdim=True) * u, S, ended


def recurrent_gated_delta_rule(
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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, one token of every sequence at a time.

    q, k [B, T, hk, K]; v [B, T, hv, V]; g [B, T, hv] natural log of the decay (-inf allowed, None: no decay);
    beta [B, T, hv]; initial_state [N, hv, K, V], or [N, hv, V, K] with state_v_first; hk divides hv, K and V are free.
    With cu_seqlens [N + 1] the batch is 1; rows past its last offset are not read, and their o and gradients are 0.
    scale defaults to K ** -0.5. Any device and floating dtype; arguments are not checked.

    Returns o [B, T, hv, V] and the final state (None unless asked for), both in `dtype`, the dtype of all arithmetic.
    Differentiable: states are kept every few hundred tokens, and recomputed in between.
    """
    hv, (key_dim, value_dim) = v.shape[2], (k.shape[3], v.shape[3])
    scale = key_dim**-0.5 if scale is None else scale
    g = torch.zeros_like(beta) if g is None else g
    packing = pack(v, cu_seqlens, unit=1, block_rows=BLOCK_ROWS)
    if initial_state is None:
        S = v.new_zeros((len(packing.order), hv, key_dim, value_dim), dtype=dtype)
    else:
        S = initial_state.to(dtype)
        S = packing.ranked(S.mT if state_v_first else S)
    S = S.flatten(0, 1)

    inputs = (q, k, v, g, beta)
    outputs, ended = [], []
    for block, *rows in zip(packing.blocks, *map(packing.split, inputs), strict=True):
        arguments = (S, *rows, block.counts, scale, use_qk_l2norm_in_kernel)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (S, *rows)):
            o, S, ended_here = checkpoint(_steps, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            o, S, ended_here = _steps(*arguments)
        outputs.append(o)
        ended += ended_here

    o = packing.join(outputs)
    if not output_final_state:
        return o, None
    final_state = packing.unranked([torch.unflatten(x, 0, (-1, hv)) for x in (*ended, S)])
    return o, final_state.mT.contiguous() if state_v_first else final_state
