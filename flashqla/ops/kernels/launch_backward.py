"""Host side of the backward kernels: lays out their arguments, and launches them in order. Compiling is in `launch`.

Arguments are right when they get here (`ops.checks`), and what to run is decided (`ops.plan`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashqla.ops.checks import CHUNK, DTYPES, HEAD_DIM, Problem
from flashqla.ops.kernels import launch
from flashqla.ops.kernels.common import BACKWARD_RECORD
from flashqla.ops.plan import Plan


class Backward(NamedTuple):
    """Gradients in the shapes and dtypes of their inputs; dg and dinitial_state are None where there is no such input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor
    dinitial_state: Tensor | None


def backward(
    problem: Problem,
    plan: Plan,
    do: Tensor,
    dht: Tensor | None,
    saved: tuple[Tensor, Tensor] | None,
    sm_count: int,
) -> Backward:
    """Run the backward kernels on the current stream of q's device. At least one token. Never waits for the GPU.

    do [B, T, hv, 128] and dht (shaped as the initial state, or None) are the gradients of the results. saved: the
    cumulative gate and A of the forward pass, whose q and k were normalised already; without it they are computed again.
    Per chunk and value head 16 KB of states, 32 KB of their gradients, 16 KB of U, 8 KB of A and 2.3 KB of factors are allocated.
    """
    raw = raw_gradients(problem, plan, do, dht, saved, sm_count, launch._kernel)
    inputs = (problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state)
    return Backward(*(None if x is None else x.to(like.dtype) for x, like in zip(raw, inputs, strict=True)))


def raw_gradients(
    problem: Problem,
    plan: Plan,
    do: Tensor,
    dht: Tensor | None,
    saved: tuple[Tensor, Tensor] | None,
    sm_count: int,
    kernel: Callable[..., Any],
) -> Backward:
    """As `backward`, with dg, dbeta and dinitial_state in float32, in which kernels write them. kernel: finds one, as `launch._kernel` does."""
    p = problem
    q, k, v, do = (launch._rows(x) for x in (p.q, p.k, p.v, do))
    beta = p.beta.flatten(0, 1)
    tokens, hk, hv, sequences, group = q.shape[0], p.hk, p.hv, p.sequences, p.hv // p.hk
    offsets, step = launch._offsets(p)
    slots = tokens // CHUNK + sequences + 1
    dtype = DTYPES[q.dtype]

    dv, u = (v.new_empty((tokens, hv, HEAD_DIM)) for _ in range(2))
    records = q.new_empty((slots, hv, BACKWARD_RECORD, CHUNK), dtype=torch.float32)
    # Of two neighbouring chunks the second enters with a state that the gradients kernel makes from that of the first.
    pairs = tokens // (2 * CHUNK) + sequences
    states, dstates = (q.new_empty((count, hv, HEAD_DIM, HEAD_DIM)) for count in (pairs, slots))
    nothing = records.as_strided((sequences, hv, HEAD_DIM, HEAD_DIM), (0, 0, 0, 0))  # stands for a state that is not there
    initial, dfinal = (nothing if x is None else launch._key_first(p, x) for x in (p.initial_state, dht))
    dinitial = None if p.initial_state is None else records.new_empty(p.initial_state.shape)

    # fmt: off
    if saved is None:
        A = q.new_empty((tokens, hv, CHUNK))
        g = beta if p.g is None else p.g.flatten(0, 1)
        kernel("inverse", dtype, DTYPES[g.dtype], DTYPES[beta.dtype], p.l2norm, True)(
            q, k, g, beta, offsets, A, records, records.new_empty((1, hv)), dv, p.scale, sequences, step, group,
            plan.inverse_ctas, int(p.g is not None), 0, 0,
        )
    else:
        cumulative, A = saved[0].flatten(0, 1), saved[1].flatten(0, 1).contiguous()
        kernel("records", DTYPES[beta.dtype])(cumulative, beta, offsets, records, p.scale, sequences, step)
    has_initial, has_dht, has_dinitial = (int(x is not None) for x in (p.initial_state, dht, dinitial))
    segments, parts = plan.segment_chunks, plan.parts
    starts = dstarts = nothing  # of a split sequence, the state in front of segments and its gradient behind them
    if segments:
        shape = ((tokens // (CHUNK * segments) + sequences) * parts, hv, HEAD_DIM, HEAD_DIM)
        starts, dstarts = (records.new_empty(shape) for _ in range(2))
        transitions, forgets = q.new_empty(shape), records.new_empty(shape[:2], dtype=torch.int32)
        kernel("summary", dtype, DTYPES[initial.dtype], True)(
            k, v, A, records, offsets, initial, starts, transitions, forgets, group, step, segments, parts, has_initial,
        )
        kernel("chain", "summary", plan.v_tile, dtype, DTYPES[dfinal.dtype])(
            q, k, do, A, records, offsets, dfinal, None, None, None, dstarts, p.scale, group, step, segments, parts, has_dht, 0,
        )
        kernel("scan", dtype)(offsets, starts, transitions, forgets, tokens, step, segments, parts, sequences)
        kernel("scan", dtype, True)(offsets, dstarts, transitions, forgets, tokens, step, segments, parts, sequences)
    kernel("chain", "reverse", plan.v_tile, dtype, DTYPES[dfinal.dtype])(
        q, k, do, A, records, offsets, dfinal, dstates, dv, nothing if dinitial is None else launch._key_first(p, dinitial), dstarts,
        p.scale, group, step, segments, parts, has_dht, has_dinitial,
    )
    kernel("chain", "forward", plan.v_tile, dtype, DTYPES[initial.dtype])(
        None, k, v, A, records, offsets, initial, states, u, None, starts, p.scale, group, step, segments, parts, has_initial, 0,
    )
    del A, starts, dstarts  # what comes next may lie where they lay: it is written when those who read them have ended
    dq, dk = (q.new_empty((tokens, hk, HEAD_DIM)) for _ in range(2))
    dg, dbeta = (records.new_empty((tokens, hv)) for _ in range(2))
    # Every second chunk has a state to be made first: none of the CTAs, which go on by as many items, should meet those alone.
    ctas = min(slots * hk, sm_count - int(sm_count % (2 * hk) == 0))
    kernel("gradients", dtype, p.l2norm)(
        q, k, v, do, u, records, states, dstates, offsets, dq, dk, dv, dg, dbeta, p.scale, sequences, step,
        ctas,
    )
    # fmt: on
    return Backward(
        dq.view(p.q.shape),
        dk.view(p.k.shape),
        dv.view(p.v.shape),
        None if p.g is None else dg.view(p.g.shape),
        dbeta.view(p.beta.shape),
        dinitial,
    )
