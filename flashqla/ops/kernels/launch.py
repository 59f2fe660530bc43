"""Host side of the kernels: lays out their arguments, compiles each kernel once, launches them in order.

Arguments are right when they get here (`ops.checks`), and what to run is decided (`ops.plan`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import tilelang
import torch
from torch import Tensor

from flashqla.ops.bounded import note
from flashqla.ops.checks import CHUNK, DTYPES, HEAD_DIM, Problem
from flashqla.ops.kernels.common import RECORD
from flashqla.ops.plan import Plan

_tracing = Lock()  # TileLang's factories keep the last call in plain fields; what comes after them may run side by side


class Forward(NamedTuple):
    """Results of `forward`; see chunk_gated_delta_rule_fwd for shapes."""

    g: Tensor | None
    A: Tensor
    o: Tensor
    h: Tensor | None
    final_state: Tensor | None


def _builder(name: str) -> Any:
    """The factory of a kernel. Making one takes tenths of a second: a first call waits for those alone that it needs."""
    return getattr(import_module(f"flashqla.ops.kernels.{name}"), f"build_{name}")


@cache
def _kernel(name: str, *arguments: Any) -> Any:
    with _tracing:
        builder = _builder(name)
        program = builder.get_tir(*arguments)
    return _function(tilelang.compile(program, target=builder.target, pass_configs=builder.pass_configs))


def _function(kernel: Any) -> Callable[..., None]:
    """What launches a compiled kernel. Calling TileLang's object does the same 7 us later: it looks for outputs to allocate."""
    return kernel.adapter.get_exportable_executable()["main"]


def forward(problem: Problem, plan: Plan, output_g: bool = False, kernel: Callable[..., Any] | None = None) -> Forward:
    """Run the forward kernels on the current stream of q's device. At least one token. Never waits for the GPU.

    output_g: whether to write the cumulative gate and the inverse without beta, which only a backward pass needs. Without it, A holds
    the inverse with beta in its columns, as the kernels use it. kernel: in place of `_kernel`.
    """
    p, kernel = problem, kernel or _kernel
    q, k, v = _rows(p.q), _rows(p.k), _rows(p.v)
    g, beta = None if p.g is None else p.g.flatten(0, 1), p.beta.flatten(0, 1)
    tokens, hv, sequences = q.shape[0], p.hv, p.sequences
    offsets, step = _offsets(p)
    states = (sequences, hv, HEAD_DIM, HEAD_DIM)

    A = q.new_empty((tokens, hv, CHUNK))
    o = q.new_empty((tokens, hv, HEAD_DIM))
    records = q.new_empty((tokens // CHUNK + sequences + 1, hv, RECORD, CHUNK), dtype=torch.float32)
    cumulative = records.new_empty((tokens if output_g else 1, hv))
    final_state = records.new_empty(states) if p.output_final_state else None
    h = q.new_zeros((p.batch, p.chunks, *states[1:])) if p.output_h else None
    nothing = records.as_strided(states, (0, 0, 0, 0))  # stands for a state that is not there
    initial = nothing if p.initial_state is None else _key_first(p, p.initial_state)

    dtype = DTYPES[q.dtype]
    inverse = kernel("inverse", dtype, DTYPES[beta.dtype if g is None else g.dtype], DTYPES[beta.dtype], p.l2norm)
    # fmt: off
    def invert(A: Tensor, has_beta: bool) -> None:
        inverse(
            q, k, beta if g is None else g, beta, offsets, A, records, cumulative, o, p.scale, sequences, step, hv // p.hk,
            plan.inverse_ctas, int(g is not None), int(output_g), int(has_beta),
        )

    without_beta = torch.empty_like(A) if output_g else A
    if output_g:
        invert(without_beta, False)
    invert(A, True)
    segments, parts, states = plan.segment_chunks, plan.parts, nothing
    if segments:
        rows = (tokens // (CHUNK * segments) + sequences) * parts
        states = records.new_empty((rows, hv, HEAD_DIM, HEAD_DIM))
        transitions = q.new_empty(states.shape)
        forgets = records.new_empty((rows, hv), dtype=torch.int32)
        kernel("summary", dtype, DTYPES[initial.dtype])(
            k, v, A, records, offsets, initial, states, transitions, forgets, hv // p.hk, step, segments, parts, int(p.initial_state is not None),
        )
        kernel("scan", dtype)(offsets, states, transitions, forgets, tokens, step, segments, parts, sequences)
    kernel("forward", plan.v_tile, dtype, DTYPES[initial.dtype], p.output_h)(
        q, k, v, A, records, offsets, initial, o, nothing if final_state is None else _key_first(p, final_state),
        None if h is None else _key_first(p, h).flatten(0, 1), states, p.scale, hv // p.hk, step, segments, parts,
        int(p.initial_state is not None), int(p.output_final_state),
    )
    # fmt: on
    rows = p.v.shape[:2]
    return Forward(
        cumulative.view(*rows, hv) if output_g else None,
        without_beta.view(*rows, hv, CHUNK),
        o.view(p.v.shape),
        h,
        final_state,
    )


def compile_all(dtypes: Sequence[str] = ("bfloat16",), directions: Sequence[str] = ("fwd", "bwd")) -> None:
    """Compile, or load from TileLang's cache, every kernel that calls can need with q, k and v in these dtypes.

    directions: "fwd" is for calls without gradients, "bwd" for the gradients alone. Gates and states are in float32, beta in float32
    or in the dtype of q, and h is not asked for: other kernels are compiled by the first call that needs them.
    """
    kernels: list[tuple[Any, ...]] = []
    for dtype in dtypes:
        kernels.append(("scan", dtype))
        gates = [("float32", beta, l2norm) for beta in ("float32", dtype) for l2norm in (False, True)]
        if "fwd" in directions:
            kernels += [("inverse", dtype, *gate) for gate in gates]
            kernels += [("summary", dtype, "float32")]
            kernels += [("forward", v_tile, dtype, "float32", False) for v_tile in (128, 64)]
        if "bwd" in directions:
            kernels += [("inverse", dtype, *gate, True) for gate in gates]
            kernels += [("summary", dtype, "float32", True), ("scan", dtype, True)]
            kernels += [("chain", kind, v_tile, dtype, "float32") for kind in ("summary", "forward", "reverse") for v_tile in (128, 64)]
            kernels += [("gradients", dtype, l2norm) for l2norm in (False, True)]
            kernels += [("records", beta) for beta in ("float32", dtype)]
    kernels = list(dict.fromkeys(kernels))  # records do not depend on dtype, and no kernel is to be compiled twice at once
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: _kernel(*kernel), kernels))


def _key_first(problem: Problem, state: Tensor) -> Tensor:
    return state.transpose(-1, -2) if problem.state_v_first else state


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, D] as [B * T, H, D], copied only where a tensor copy engine cannot read it in place."""
    x = x.flatten(0, 1)
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _offsets(problem: Problem) -> tuple[Tensor, int]:
    """Offsets as int32 on the device, and the distance from one to the next: of int64 the low words are taken."""
    if problem.cu_seqlens is None:
        return _even_offsets(problem.batch, problem.tokens, problem.q.device), 1
    return _int32(problem.cu_seqlens), 2 if problem.cu_seqlens.dtype == torch.int64 else 1


def _int32(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens.view(torch.int32) if cu_seqlens.dtype == torch.int64 else cu_seqlens


_KEPT_OFFSETS = 256  # at most
_kept_offsets: dict[tuple[int, int, torch.device], Tensor] = {}
_offsets_of_graphs: dict[tuple[int, int, torch.device], Tensor] = {}  # a graph knows their address, and holds no tensor: they stay


def _even_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Offsets of a batch, the same tensor at every call: to make them takes two launches."""
    key = batch, tokens, device
    offsets = _offsets_of_graphs.get(key, _kept_offsets.get(key))
    if torch.cuda.is_current_stream_capturing():
        if offsets is None:  # what is allocated during a capture lives in the graph's memory, and may not outlive it
            return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        _offsets_of_graphs[key] = offsets
    elif offsets is None:
        # Copied before this returns, so that a call on another stream may read it at once.
        offsets = torch.tensor([n * tokens for n in range(batch + 1)], dtype=torch.int32, device=device)
        note(_kept_offsets, key, offsets, _KEPT_OFFSETS)
    return offsets
