"""The gated delta rule on tensors: public functions, what runs behind them, and their registration with torch.library.

A call goes: arguments -> checks.Problem -> plan.Plan -> kernels, or the PyTorch chunk form. A call that comes again is
launched from a recording (`ops.repeats`), because all of that takes longer than the launches. The dispatcher
of PyTorch comes first only where someone listens to it (autograd, torch.compile, fake tensors, dispatch modes,
transforms), because it takes 9 of the microseconds that an eager call has on the host.

Names and shapes: `flashqla.ops`.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashqla.device import HOPPER
from flashqla.errors import ArgumentError, UnsupportedError
from flashqla.ops import checks, plan, repeats
from flashqla.ops.checks import Problem
from flashqla.ops.plan import CHUNK, HEAD_DIM, Plan
from flashqla.reference.backward import chunk_gated_delta_rule_backward, gate_of_sums
from flashqla.reference.chunked import chunk_forward

# g_cumulative, A, o, h and the final state.
ForwardResults = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
# Of q, k, v, g, beta and the initial state.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]

_only_kernels: ContextVar[bool] = ContextVar("only_kernels", default=False)
_warned: set[str] = set()


class FallbackWarning(UserWarning):
    """CUDA tensors are served by PyTorch instead of a kernel. Issued once per process and reason."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, with the conventions of flash-linear-attention.

        S <- exp(g_t) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = scale S^T q_t

    Args:
        q, k: [B, T, hk, 128], bfloat16 or float16 for the kernels. Any strides, as for all tensors here.
        v: [B, T, hv, 128], hv a multiple of hk; value head i uses key head i // (hv // hk).
        g: [B, T, hv], natural log of the decay, <= 0, -inf for a reset; None for no decay.
        beta: [B, T, hv]. g, beta and the initial state are float32, bfloat16 or float16, each its own, never rounded.
        scale: factor of o, 128 ** -0.5 by default.
        initial_state: [N, hv, 128, 128] in (K, V) order, zeros by default.
        output_final_state: whether to return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: divide rows of q and k by sqrt(sum of squares + 1e-6) first.
        cu_seqlens: [N + 1] offsets, int32 or int64, of N sequences that share the row of a batch of 1. Empty sequences
            are fine. Rows past the last offset are not read; their o and gradients are 0.
        head_first: refused when True; transpose instead.
        state_v_first: initial and final state in (V, K) order.
        auto_cp: allow splitting a sequence over SMs where that is faster.
        cu_seqlens_cpu: a copy of cu_seqlens on the CPU. Spares the read below.

    Returns:
        o [B, T, hv, 128], contiguous, in the dtype of v; and the final state [N, hv, 128, 128], float32, or None.

    Lengths: offsets are checked on the host. On the CPU they are read at each call; on the GPU once per tensor, until
    it is written to or moved (inference tensors count no writes: each call), which waits for the GPU; with
    cu_seqlens_cpu never; and not while a stream is captured. Kernels take the offsets from the device, so that a
    captured graph can be replayed with others in the same memory, and a write that PyTorch does not count (that of a
    graph, of another library, or through `.data`) makes a plan less fit and no result wrong.

    What runs: TileLang kernels for bfloat16 and float16 on Hopper; for everything else the chunk form in PyTorch, in
    float32 (float64 for float64 tensors, whose state is float64 too). `explain` says which and why; a fallback on CUDA
    tensors warns, and is an error inside `strict`.

    Gradients: of q, k, v, g, beta and initial_state, each in the dtype of its input, once (no second derivatives, no
    forward mode), from kernels where kernels serve the call; in one graph under torch.compile, and under the transforms
    of torch.func, where vmap calls the op row by row. Forward keeps its inputs alone; backward computes
    everything again, in PyTorch in float32 and with a read of the offsets.
    Calls whose tensors lie where those of an earlier one lay are launched as a CUDA graph of its kernels, which is
    captured when no other Python thread runs. Results are the same; the host has less to do.
    The kernels need about 160 bytes of scratch memory per token and value head, those of backward about 1.4 KB, freed
    when the call returns.

    Raises:
        ArgumentError (a ValueError): an argument is wrong; before anything is launched.
        UnsupportedError: a fallback inside `strict`, or where PyTorch cannot serve: in a captured graph.
    """
    tensors = (q, k, v, g, beta, initial_state)
    flags = (output_final_state, use_qk_l2norm_in_kernel, state_v_first, auto_cp)
    if head_first is False and _as_kept(scale, flags, tensors, cu_seqlens, cu_seqlens_cpu):
        facts = _facts(tensors, cu_seqlens, cu_seqlens_cpu, scale, flags)
        if (again := _again(facts, tensors, cu_seqlens, cu_seqlens_cpu)) is not None:
            o, final_state = again
            return o, final_state
    # fmt: off
    checks.kinds(scale, head_first, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 cu_seqlens_cpu=cu_seqlens_cpu)
    scale, (output_final_state, use_qk_l2norm_in_kernel, state_v_first, auto_cp) = checks.settings(
        scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first, auto_cp=auto_cp)
    arguments = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                 state_v_first, auto_cp, cu_seqlens_cpu)
    # fmt: on
    if _someone_listens(*tensors):
        o, final_state = _call(torch.ops.flashqla.gated_delta_rule, _Rule, arguments)
    elif _differentiable(*tensors):
        o, final_state = _GatedDeltaRule.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        return _forward(*arguments)
    return o, final_state if output_final_state else None


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> ForwardResults:
    """The forward pass with what a backward pass needs. Arguments and errors as in chunk_gated_delta_rule; results are
    detached.

    Returns:
        g_cumulative: [B, T, hv] float32, sum of g from the start of the token's chunk (64 tokens) of its sequence.
        A: [B, T, hv, 64] in the dtype of k: row i of the gated inverse Tm = (I + L0 * R)^-1 of the token's chunk. Rows
            of A and g_cumulative past the last offset are unspecified.
        o: as in chunk_gated_delta_rule.
        h: None, or with output_h [B, chunks, hv, 128, 128] in the dtype of k: the state that enters each chunk (in (V,
            K) order with state_v_first), of a pack in order of sequences. Asking for it reads offsets on the GPU at
            every call. Where the lengths are not to be had (captured stream, torch.compile), and for every captured
            call, chunks is T // 64 + N, of which the last ones are 0.
        final_state: [N, hv, 128, 128] float32, or None.
    """
    # fmt: off
    checks.kinds(scale, head_first, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 cu_seqlens_cpu=cu_seqlens_cpu)
    scale, (output_final_state, output_h, use_qk_l2norm_in_kernel, state_v_first, auto_cp) = checks.settings(
        scale, output_final_state=output_final_state, output_h=output_h,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first, auto_cp=auto_cp)
    arguments = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                 state_v_first, auto_cp, cu_seqlens_cpu)
    # fmt: on
    with torch.no_grad():
        if _someone_listens(q, k, v, g, beta, initial_state):
            g_cumulative, inverse, o, h, final_state = torch.ops.flashqla.gated_delta_rule_fwd(*arguments, output_h)
            return g_cumulative, inverse, o, h if output_h else None, final_state if output_final_state else None
        problem = checks.problem(*arguments, output_h=output_h, read="fresh" if output_h else "cached")
        g_cumulative, inverse, o, h, final_state = _run(problem, for_backward=True)
    if h is not None and problem.cu_seqlens is not None and problem.seqlens is not None and not _capturing(q):
        h = h[:, : sum(-(-length // CHUNK) for length in problem.seqlens)]
    return g_cumulative, inverse, o, h, final_state


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,  # noqa: N803
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The backward pass of chunk_gated_delta_rule_fwd without use_qk_l2norm_in_kernel: pass normalised q and k.

    Args:
        g, A: the cumulative gate and the inverse that the forward pass returned.
        do: gradient of o, in its shape and dtype.
        dht: gradient of the final state, [N, hv, 128, 128] in the order of the initial state; zeros by default.
        Other arguments are those of the forward pass.
        auto_cp: as there; splitting has a plan of its own in each direction.

    Returns:
        dq, dk, dv, dbeta in the shapes and dtypes of their inputs, dg [B, T, hv] float32, of the gate of each token and
        not of its sum, and the gradient of the initial state, None without one. In this order: dq, dk, dv, db, dg, dh0.

    Gradients of a gate below about -69 are 0. Raises as chunk_gated_delta_rule does.
    """
    # fmt: off
    checks.kinds(scale, False, q=q, k=k, v=v, g=g, beta=beta, A=A, do=do, dht=dht, initial_state=initial_state,
                 cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    scale, (state_v_first, auto_cp) = checks.settings(scale, state_v_first=state_v_first, auto_cp=auto_cp)
    if g is None:
        raise ArgumentError("g must be a tensor: the cumulative gate that the forward pass returned")
    with torch.no_grad():
        problem = checks.problem(q, k, v, g, beta, scale, initial_state, dht is not None, False, cu_seqlens,
                                 state_v_first, auto_cp, cu_seqlens_cpu)
        checks.gradients(problem, g, A, do, dht)
        dq, dk, dv, dg, dbeta, dinitial_state = _run_backward(problem, do, dht, (g, A))
    # fmt: on
    return dq, dk, dv, dbeta, dg, dinitial_state


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> Plan:
    """How chunk_gated_delta_rule would run with these arguments, and why. Runs nothing; raises the same ArgumentErrors.

    `flashqla.ops.plan.make` answers from sizes alone, without tensors, torch or a GPU.
    """
    # fmt: off
    checks.kinds(scale, head_first, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                 cu_seqlens_cpu=cu_seqlens_cpu)
    scale, (output_final_state, use_qk_l2norm_in_kernel, state_v_first, auto_cp) = checks.settings(
        scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first, auto_cp=auto_cp)
    return _plan(checks.problem(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                                cu_seqlens, state_v_first, auto_cp, cu_seqlens_cpu))
    # fmt: on


@contextmanager
def strict() -> Iterator[None]:
    """Inside, a call that no kernel can serve raises UnsupportedError. Counts for the calling thread (or asyncio task)
    alone."""
    token = _only_kernels.set(True)
    try:
        yield
    finally:
        _only_kernels.reset(token)


def _someone_listens(*tensors: Tensor | None) -> bool:
    """Whether the call must go through PyTorch's dispatcher. Raises UnsupportedError for inputs with tangents, which
    neither side of it would hand on."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        _refuse_forward_mode()
    return _modes() or any(x is not None and (type(x) is not Tensor or x.is_meta) for x in tensors)


def _modes() -> bool:
    """Whether anything listens to all calls."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def _as_kept(
    scale: Any, flags: tuple[Any, ...], tensors: tuple[Any, ...], cu_seqlens: Any, cu_seqlens_cpu: Any
) -> bool:
    """Whether arguments are as `checks` makes them, plain tensors, a float and bools, and nobody is to know of the
    call: then it needs no judging where one like it was judged. Any other call goes the long way, to the same end."""
    if (scale is not None and type(scale) is not float) or {*map(type, flags)} != {bool}:
        return False
    q, k, v, _, beta, _ = tensors
    if q is None or k is None or v is None or beta is None or forward_ad._current_level >= 0 or _modes():
        return False
    for x in (*tensors, cu_seqlens, cu_seqlens_cpu):  # a loop, as in ops.repeats
        if x is not None and (type(x) is not Tensor or x.layout is not torch.strided or x.is_nested):
            return False
    return not _differentiable(*tensors)


def _differentiable(*tensors: Tensor | None) -> bool:
    """Whether autograd alone is to know of the call: the dispatcher would take its time."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _without_memory(*tensors: Tensor | None) -> bool:
    """Whether gradients are not what their memory holds: zeros without any, or many at once, as `is_grads_batched` has
    them, which is no transform of torch.func. The dispatcher makes tensors of them."""
    batched = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and (batched(x) or x._is_zerotensor()) for x in tensors)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """o and the final state, from the launches of an earlier call like this one where there was one."""
    q, k, v, g, beta, scale, initial_state, final, l2norm, cu_seqlens, state_v_first, auto_cp, hint = arguments
    tensors = (q, k, v, g, beta, initial_state)
    facts = _facts(tensors, cu_seqlens, hint, scale, (final, l2norm, state_v_first, auto_cp))
    again = _again(facts, tensors, cu_seqlens, hint)
    if again is not None:
        o, final_state = again
        return o, final_state
    problem = checks.problem(*arguments)
    _, _, o, _, final_state = _run(problem)
    if facts is not None and (chosen := _plan(problem)).implementation == "tilelang":
        repeats.keep(facts, problem, lambda: _recording().record(problem, chosen))
    return o, final_state


def _backward(*arguments: Any) -> Gradients:
    """Gradients, likewise."""
    (q, k, v, g, beta, do, dht, scale, initial_state, cu_seqlens, state_v_first, l2norm, auto_cp, hint) = arguments
    settings = ("backward", scale or str(scale), l2norm, state_v_first, auto_cp)
    facts = repeats.facts((q, k, v, do), (g, beta, initial_state, dht), cu_seqlens, hint, *settings)
    again = _again(facts, (q, k, v, g, beta, initial_state, do, dht), cu_seqlens, hint)
    if again is not None:
        results: Gradients = tuple(again)
        return results
    # fmt: off
    problem = checks.problem(q, k, v, g, beta, scale, initial_state, dht is not None, l2norm, cu_seqlens,
                             state_v_first, auto_cp, hint)
    # fmt: on
    gradients = _run_backward(problem, do, dht)
    if facts is not None and (chosen := _plan(problem, "backward")).implementation == "tilelang":
        sm_count = _device_facts(q.device)[1]
        repeats.keep(facts, problem, lambda: _recording().record_backward(problem, chosen, do, dht, sm_count))
    return gradients


def _facts(
    tensors: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    hint: Tensor | None,
    scale: float | None,
    flags: tuple[bool, ...],
) -> repeats.Facts | None:
    """What makes forward calls alike. flags: whether to return the final state, l2norm, state_v_first, auto_cp."""
    settings = (scale or str(scale), *flags)  # the string, because 0.0 == -0.0
    return repeats.facts(tensors[:3], tensors[3:], cu_seqlens, hint, *settings)


def _again(
    facts: repeats.Facts | None, inputs: tuple[Tensor | None, ...], cu_seqlens: Tensor | None, hint: Tensor | None
) -> Any:
    """The results of a call that is known, q being the first of its inputs; None if it is not."""
    q: Any = inputs[0]
    recording = None if facts is None else repeats.find(facts, q, cu_seqlens, hint)
    if recording is None:
        return None
    return recording.run(inputs, None if cu_seqlens is None else checks.placed(cu_seqlens, q.device))


def _refuse_forward_mode(*_: Any) -> Any:
    raise UnsupportedError(
        "forward-mode derivatives of the gated delta rule are not supported",
        do="differentiate through flashqla.reference.chunk_gated_delta_rule_reference",
    )


def _call(op: Any, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
    """Call an op that listeners may differentiate; where a transform of torch.func does, by means of `function`.

    torch.func.functionalize differentiates nothing and takes no Function; torch.compile has no use for one.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return op(*arguments)
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize:
        return op(*arguments)
    return function.apply(*arguments)


def _run(problem: Problem, for_backward: bool = False) -> ForwardResults:
    """Run a problem. The first two results mean something with `for_backward` alone. `h` has as many chunks as the
    lengths need, or as many as `problem.chunks`."""
    result: Any  # the same fields from either side
    p, chosen = problem, _plan(problem)
    if chosen.implementation == "torch":
        _fall_back(p.q, chosen.why)
    if p.batch * p.tokens == 0:  # nothing to launch, on any device
        return _without_tokens(p)
    if chosen.implementation == "tilelang":
        launch, _ = _kernels()
        with _on(p.q.device):
            result = launch.forward(p, chosen, for_backward)
    else:
        _refuse_capture(p.q, chosen.why)
        with torch.autocast(p.q.device.type, enabled=False):
            # fmt: off
            result = chunk_forward(p.q, p.k, p.v, p.g, p.beta, p.scale, p.initial_state, p.cu_seqlens, p.state_v_first,
                                   p.l2norm, output_A=for_backward, output_h=p.output_h)
            # fmt: on
    return result.g, result.A, result.o, result.h, result.final_state if p.output_final_state else None


def _run_backward(
    problem: Problem, do: Tensor, dht: Tensor | None, saved: tuple[Tensor, Tensor] | None = None
) -> Gradients:
    """Gradients of a problem. saved: cumulative gate and A of the forward pass; then problem.g is that gate too."""
    p, chosen = problem, _plan(problem, "backward")
    do, dht = do.resolve_neg(), None if dht is None else dht.resolve_neg()  # kernels read memory as it is
    if chosen.implementation == "tilelang" and p.batch * p.tokens > 0:
        with _on(p.q.device):
            gradients: Gradients = _backward_kernels().backward(p, chosen, do, dht, saved, _device_facts(p.q.device)[1])
            return gradients
    if chosen.implementation == "torch":
        _fall_back(p.q, chosen.why)
        _refuse_capture(p.q, chosen.why)
    with torch.autocast(p.q.device.type, enabled=False):
        g = p.g if saved is None else gate_of_sums(saved[0], p.cu_seqlens)
        # fmt: off
        return chunk_gated_delta_rule_backward(p.q, p.k, p.v, g, p.beta, do, dht, p.scale, p.initial_state,
                                               p.cu_seqlens, p.state_v_first, p.l2norm)
        # fmt: on


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one. PyTorch's own context takes its time even where it already is."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def _without_tokens(problem: Problem) -> ForwardResults:
    v, initial_state, dtype = problem.v, problem.initial_state, problem.state_dtype
    rows, states = v.shape[:3], (problem.hv, HEAD_DIM, HEAD_DIM)
    if initial_state is None:
        final_state = v.new_zeros((problem.sequences, *states), dtype=dtype)
    else:
        final_state = initial_state.to(dtype, copy=True)
    return (
        v.new_empty(rows, dtype=dtype),
        v.new_empty((*rows, CHUNK)),
        v.new_empty(v.shape),
        v.new_zeros((problem.batch, problem.chunks, *states)) if problem.output_h else None,
        final_state if problem.output_final_state else None,
    )


def _plan(problem: Problem, direction: plan.Direction = "forward") -> Plan:
    device = problem.q.device
    capability, sm_count, missing = _device_facts(device)
    return plan.make(
        hv=problem.hv,
        seqlens=problem.seqlens,
        sequences=problem.sequences,
        tokens=problem.tokens,
        dtype=checks.DTYPES[problem.q.dtype],
        device=device.type,
        capability=capability,
        sm_count=sm_count,
        missing=missing,
        auto_cp=problem.auto_cp,
        direction=direction,
    )


@cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int] | None, int, str]:
    """Compute capability, number of SMs, and why the kernels cannot be loaded for them ("" if they can)."""
    if device.type != "cuda":
        return None, 0, ""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return capability, properties.multi_processor_count, _kernels()[1] if capability == HOPPER else ""


@cache
def _kernels() -> tuple[Any, str]:
    """The module that launches kernels, and why it cannot be loaded. Importing TileLang takes most of a second, and
    works on fewer machines than PyTorch."""
    try:
        from flashqla.ops.kernels import launch
    except (ImportError, OSError) as error:
        return None, f"TileLang cannot be imported ({error})"
    return launch, ""


def _recording() -> Any:
    from flashqla.ops.kernels import recording

    return recording


@cache
def _backward_kernels() -> Any:
    """The module that launches the backward kernels; asked for after `_kernels` has found that there are any."""
    from flashqla.ops.kernels import launch_backward

    return launch_backward


def _fall_back(q: Tensor, reason: str) -> None:
    """Note that PyTorch serves a call, or its gradients; refuse to let it inside `strict`."""
    if _only_kernels.get():
        raise UnsupportedError(
            "no kernel serves this call, and flashqla.ops.strict forbids PyTorch",
            given=reason,
            do="leave strict(), or pass what the kernels take",
        )
    if q.device.type == "cuda" and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"flashqla falls back to PyTorch: {reason}", FallbackWarning, stacklevel=2)


def _refuse_capture(q: Tensor, reason: str) -> None:
    if _capturing(q):
        raise UnsupportedError(
            "the PyTorch chunk form cannot be captured in a CUDA graph: it reads lengths on the host",
            given=reason,
            do="capture calls that the kernels serve; flashqla.ops.explain tells them",
        )


def _capturing(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# What torch.library calls. A registered op returns tensors alone, so an empty one stands for None.


def _op(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, final_state = _forward(*arguments)
    # Autograd forbids in-place changes of results that are views, which `data` is not.
    return o.data, _or_empty(final_state, o).data


def _op_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, o, _, final_state = _fake(checks.problem(*arguments, read="never"))
    return o, final_state


def _op_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    arguments, output_h = arguments[:-1], arguments[-1]
    problem = checks.problem(*arguments, output_h=output_h, read="fresh" if output_h else "cached")
    g_cumulative, inverse, o, h, final_state = _run(problem, for_backward=True)
    if h is not None and h.shape[1] < problem.chunks:
        h = torch.cat((h, h.new_zeros((h.shape[0], problem.chunks - h.shape[1], *h.shape[2:]))), dim=1)
    return g_cumulative, _or_empty(inverse, o), o, _or_empty(h, o), _or_empty(final_state, o)


def _op_fwd_fake(*arguments: Any) -> tuple[Tensor, ...]:
    arguments, output_h = arguments[:-1], arguments[-1]
    return _fake(checks.problem(*arguments, output_h=output_h, read="never"))


def _fake(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    v, dtype = problem.v, problem.state_dtype
    rows, states = v.shape[:3], (problem.hv, HEAD_DIM, HEAD_DIM)
    final = (problem.sequences, *states) if problem.output_final_state else (0,)
    return (
        v.new_empty(rows, dtype=dtype),
        v.new_empty((*rows, CHUNK)),
        v.new_empty(v.shape),
        v.new_empty((problem.batch, problem.chunks, *states) if problem.output_h else (0,)),
        v.new_empty(final, dtype=dtype if problem.output_final_state else v.dtype),
    )


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _op_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(_or_empty(x, arguments[0]) for x in _backward(*arguments))


def _op_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, g, beta, _, _, _, initial_state, *_ = arguments
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, g, beta, initial_state))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # fmt: off
    (q, k, v, g, beta, scale, initial_state, final_wanted, l2norm, cu_seqlens, state_v_first, auto_cp,
     cu_seqlens_cpu) = inputs
    # fmt: on
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
    ctx.scale = HEAD_DIM**-0.5 if scale is None else scale
    ctx.final_wanted, ctx.l2norm, ctx.state_v_first, ctx.auto_cp = final_wanted, l2norm, state_v_first, auto_cp


def _differentiate(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dfinal_state = dfinal_state if ctx.final_wanted else None
    # fmt: off
    arguments = (q, k, v, g, beta, do, dfinal_state, ctx.scale, initial_state, cu_seqlens, ctx.state_v_first,
                 ctx.l2norm, ctx.auto_cp, cu_seqlens_cpu)
    # fmt: on
    tensors = (q, k, v, g, beta, initial_state, do, dfinal_state)
    if _someone_listens(*tensors) or _differentiable(*tensors) or _without_memory(do, dfinal_state):
        dq, dk, dv, dg, dbeta, dinitial_state = _call(
            torch.ops.flashqla.gated_delta_rule_backward, _RuleBackward, arguments
        )
    else:
        dq, dk, dv, dg, dbeta, dinitial_state = _backward(*arguments)
    dg, dinitial_state = (None if g is None else dg), (None if initial_state is None else dinitial_state)
    return dq, dk, dv, dg, dbeta, None, dinitial_state, None, None, None, None, None, None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _refuse_second_derivatives(ctx: Any, *gradients: Tensor | None) -> NoReturn:
    raise UnsupportedError(
        "second derivatives of the gated delta rule are not supported",
        given="a backward pass through gradients that were computed with create_graph=True",
        do="differentiate twice through flashqla.reference.chunk_gated_delta_rule_reference",
    )


class _Rule(torch.autograd.Function):
    """The op under a transform of torch.func. It asks for setup_context, which the Function behind register_autograd
    does not have."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.flashqla.gated_delta_rule(*arguments)


class _GatedDeltaRule(torch.autograd.Function):
    """The op where nobody but autograd listens."""

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _op(*arguments)


class _RuleBackward(torch.autograd.Function):
    """The op of the gradients, likewise."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse_second_derivatives)
    jvp = staticmethod(_refuse_forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.flashqla.gated_delta_rule_backward(*arguments)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, float? scale, Tensor? initial_state, "
    "bool output_final_state, bool l2norm, Tensor? cu_seqlens, bool state_v_first, bool auto_cp, Tensor? cu_seqlens_cpu"
)
_GRADIENT_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor do, Tensor? dfinal_state, float scale, "
    "Tensor? initial_state, Tensor? cu_seqlens, bool state_v_first, bool l2norm, bool auto_cp, "
    "Tensor? cu_seqlens_cpu"
)
for _name, _arguments, _results, _function, _fake_function in (
    ("gated_delta_rule", _ARGUMENTS, 2, _op, _op_fake),
    ("gated_delta_rule_fwd", _ARGUMENTS + ", bool output_h", 5, _op_fwd, _op_fwd_fake),
    ("gated_delta_rule_backward", _GRADIENT_ARGUMENTS, 6, _op_backward, _op_backward_fake),
):
    _schema = f"({_arguments}) -> ({', '.join(['Tensor'] * _results)})"
    torch.library.define(f"flashqla::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"flashqla::{_name}", "CompositeExplicitAutograd", _function)
    torch.library.register_fake(f"flashqla::{_name}", _fake_function)
torch.library.register_autograd("flashqla::gated_delta_rule", _differentiate, setup_context=_save)
torch.library.register_autograd("flashqla::gated_delta_rule_backward", _refuse_second_derivatives)
