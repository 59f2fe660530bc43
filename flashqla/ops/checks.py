"""Arguments of the op -> Problem, or an error before anything is launched. The only judge of user input in `ops`: calls
that are like one judged before (`ops.repeats`) come here for their offsets alone.

Everything but the values of cu_seqlens is judged from shapes, dtypes and devices. Offsets on the host are read each
time. Offsets on a GPU cost a synchronising read; its result stays on the tensor, for as long as PyTorch counts no write
to it and it points at the same memory. Left behind it is by what PyTorch does not see: another library's kernel, the
replay of a graph, a write through `.data`, and a write on another stream for which the stream of the read did not wait.
So lengths choose tiles and reject nonsense, while kernels take addresses from the device's offsets alone: lengths that
are old cost time, and never a result. Where a result depends on them (`h`, the PyTorch chunk form) they are read anew.
"""

import weakref
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from operator import sub
from typing import Any, Literal, NoReturn

import numpy
import torch
from torch import Tensor

from flashqla.errors import ArgumentError
from flashqla.ops.plan import CHUNK, HEAD_DIM

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
# Dtypes of g, beta and the initial state by dtype of q.
GATE_DTYPES = {dtype: tuple(x for x in DTYPES if x != torch.float64 or dtype == x) for dtype in DTYPES}
OFFSET_DTYPES = (torch.int32, torch.int64)
# What a number may be: Real covers NumPy's too, and torch.compile may trace one as a symbol.
NUMBERS = (type(None), float, int, Real, torch.SymFloat, torch.SymInt)
FLAGS = (type(None), bool, Integral, numpy.bool_, torch.SymBool)  # bool is Integral too, which takes longer to see
SHORT_PACK = 64  # offsets that Python's own numbers are quicker for than NumPy's
OPTIONAL = {"g", "initial_state", "cu_seqlens", "cu_seqlens_cpu", "dht"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A call whose arguments are right. Tensors as given (any strides), in the shapes of `flashqla.ops`.

    cu_seqlens: on q's device, contiguous. seqlens: tokens of every sequence where the host knows them, else None. They
    are a hint: a captured graph may be replayed with other offsets, which the kernels read from cu_seqlens, clamping
    them to [0, tokens]; rows outside every sequence get 0. tokens: T, of a row. sequences: N.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    seqlens: tuple[int, ...] | None
    scale: float
    output_final_state: bool
    l2norm: bool
    state_v_first: bool
    auto_cp: bool
    output_h: bool
    batch: int
    tokens: int
    hk: int
    hv: int
    sequences: int

    @property
    def chunks(self) -> int:
        """Chunks per row: exact for a batch. For a pack a bound that needs no lengths: a sequence of n tokens has at
        most n // 64 + 1. The chunks of a pack are numbered in order of sequences, and those past the last are 0."""
        return -(-self.tokens // CHUNK) if self.cu_seqlens is None else self.tokens // CHUNK + self.sequences

    @property
    def state_dtype(self) -> torch.dtype:
        """dtype of the final state."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


Read = Literal["cached", "fresh", "never"]


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    auto_cp: bool,
    cu_seqlens_cpu: Tensor | None,
    *,
    output_h: bool = False,
    read: Read = "cached",
) -> Problem:
    """Judge the arguments of the op.

    read: whether offsets that only a GPU holds may be read: "never" for fake tensors, "cached" once per tensor and
    value, "fresh" each time, for callers whose result depends on it. Nothing is read while a stream is captured.
    Raises ArgumentError.
    """
    if q.ndim != 4 or v.ndim != 4 or k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        _refuse("q, k and v do not fit together", "q, k [B, T, hk, 128] and v [B, T, hv, 128]", q=q, k=k, v=v)
    batch, tokens, hk, key_dim = q.shape
    hv, value_dim = v.shape[2:]
    if key_dim != HEAD_DIM or value_dim != HEAD_DIM:
        raise ArgumentError(
            f"head_dim {value_dim if key_dim == HEAD_DIM else key_dim} is not supported",
            given=_describe(q=q, v=v),
            supported=f"K = V = {HEAD_DIM}",
            do=f"pad q, k and v to {HEAD_DIM} with zeros, and pass scale",
        )
    if hk < 1 or hv < hk or hv % hk:
        _refuse(f"{hv} value heads do not divide over {hk} key heads", "hv = n * hk with n >= 1", q=q, v=v)
    if cu_seqlens is not None:
        _judge_offsets(cu_seqlens, cu_seqlens_cpu, batch, q.device)
    elif cu_seqlens_cpu is not None:
        raise ArgumentError("cu_seqlens_cpu without cu_seqlens", do="pass the offsets as cu_seqlens")
    rows = v.shape[:3]
    if beta.shape != rows or (g is not None and g.shape != rows):
        _refuse("g and beta need a number per token and value head", f"[B, T, hv] = {list(rows)}", g=g, beta=beta)
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    states = (sequences, hv, HEAD_DIM, HEAD_DIM)
    if initial_state is not None and initial_state.shape != states:
        order = "[N, hv, V, K]" if state_v_first else "[N, hv, K, V]"
        _refuse(
            f"initial_state needs a state per sequence and value head, for {sequences} sequences",
            f"{order} = {list(states)}",
            initial_state=initial_state,
        )

    dtype, device = q.dtype, q.device
    if k.dtype != dtype or v.dtype != dtype or dtype not in DTYPES:
        _refuse("q, k and v need one floating dtype", ", ".join(DTYPES.values()), q=q, k=k, v=v)
    allowed = GATE_DTYPES[dtype]
    if (
        beta.dtype not in allowed
        or (g is not None and g.dtype not in allowed)
        or (initial_state is not None and initial_state.dtype not in allowed)
    ):
        names = ", ".join(DTYPES[x] for x in allowed)
        _refuse(f"a dtype does not go with {DTYPES[dtype]} q", names, g=g, beta=beta, initial_state=initial_state)
    if (
        k.device != device
        or v.device != device
        or beta.device != device
        or (g is not None and g.device != device)
        or (initial_state is not None and initial_state.device != device)
    ):
        _refuse(
            "tensors are on several devices", "one device", q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state
        )

    seqlens: tuple[int, ...] | None
    if cu_seqlens is None:
        seqlens = None if read == "never" else (tokens,) * batch
    else:
        seqlens = lengths(cu_seqlens, cu_seqlens_cpu, tokens, read)
        cu_seqlens = placed(cu_seqlens, device)
    # Kernels read memory as it is, without the sign that a view such as x.conj().imag carries beside it.
    return Problem(
        q.resolve_neg(),
        k.resolve_neg(),
        v.resolve_neg(),
        None if g is None else g.resolve_neg(),
        beta.resolve_neg(),
        None if initial_state is None else initial_state.resolve_neg(),
        cu_seqlens,
        seqlens,
        HEAD_DIM**-0.5 if scale is None else scale,
        output_final_state,
        l2norm,
        state_v_first,
        auto_cp,
        output_h,
        batch,
        tokens,
        hk,
        hv,
        sequences,
    )


def gradients(problem: Problem, g: Tensor, A: Tensor, do: Tensor, dht: Tensor | None) -> None:  # noqa: N803
    """Judge what a backward pass takes beside the arguments of the forward pass. Raises ArgumentError."""
    p, rows = problem, problem.v.shape[:3]
    if g.shape != rows or g.dtype != p.state_dtype:
        _refuse("g must be the cumulative gate that the forward pass returned", f"{list(rows)}, {p.state_dtype}", g=g)
    if A.shape != (*rows, CHUNK) or A.dtype != p.k.dtype:
        _refuse("A must be what the forward pass returned", f"{[*rows, CHUNK]} in the dtype of k", A=A, k=p.k)
    if do.shape != p.v.shape or do.dtype != p.v.dtype:
        _refuse("do must be shaped as o, in its dtype", "that of v", do=do, v=p.v)
    states = (p.sequences, p.hv, HEAD_DIM, HEAD_DIM)
    if dht is not None and (dht.shape != states or dht.dtype not in GATE_DTYPES[p.q.dtype]):
        _refuse("dht must be shaped as the final state", f"{list(states)}, a floating dtype", dht=dht)
    others = (g, A, do) if dht is None else (g, A, do, dht)
    if any(x.device != p.q.device for x in others):
        _refuse("tensors are on several devices", "one device", q=p.q, g=g, A=A, do=do, dht=dht)


def kinds(scale: Any, head_first: Any, **tensors: Any) -> None:
    """Raise ArgumentError for arguments of the wrong kind, and for a layout that the op does not take."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not (x is None and name in OPTIONAL):
            raise ArgumentError(f"{name} must be a tensor", given=f"{name} = {x!r}")
        if x is not None and (x.layout is not torch.strided or x.is_nested):
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise ArgumentError(f"{name} must be a dense tensor", given=f"{name}: {kind}", supported="strided tensors")
    if isinstance(scale, Tensor):
        raise ArgumentError("scale must be a number", given=_describe(scale=scale), do="pass scale.item()")
    if not isinstance(scale, NUMBERS) or isinstance(scale, bool):
        raise ArgumentError("scale must be a number", given=f"scale = {scale!r}")
    if not isinstance(head_first, FLAGS):
        raise ArgumentError("head_first must be False", given=f"head_first: {type(head_first).__name__}")
    if head_first:
        raise ArgumentError(
            "head_first=True is not supported",
            supported="q, k [B, T, hk, K], v [B, T, hv, V], g and beta [B, T, hv]",
            do="pass x.transpose(1, 2) for q, k, v, g and beta, without head_first; strides are free",
        )


def settings(scale: Any, **flags: Any) -> tuple[float | None, list[bool]]:
    """scale, which `kinds` has judged, as a float, and flags as bools, in order: what the schema of the op would make
    of them, whether or not the call goes through it. Raises ArgumentError for a flag that is something else."""
    if scale is not None and type(scale) not in (float, torch.SymFloat):
        try:
            scale = float(scale)
        except OverflowError:
            do = "pass a number that a float64 holds"
            raise ArgumentError("scale is too large", given=f"{len(str(scale))} characters", do=do) from None
    values = list(flags.values())
    if {*map(type, values)} == {bool}:  # nearly always, and most of the time of the rest
        return scale, values
    for name, x in flags.items():
        if not isinstance(x, FLAGS):
            given = _describe(**{name: x}) if isinstance(x, Tensor) else f"{name} = {x!r}"
            raise ArgumentError(f"{name} must be True or False", given=given)
    return scale, [bool(x) for x in values]


class _Lengths:
    """Lengths read from one tensor at one version, in one place: `x.data = y` moves x, and counts as no write. Copies
    and pickles of it get none: their versions start anew."""

    __slots__ = ("end", "owner", "seqlens", "state")

    def __init__(self, owner: Tensor, state: tuple[int, int], seqlens: tuple[int, ...]) -> None:
        self.owner, self.state, self.seqlens, self.end = weakref.ref(owner), state, seqlens, sum(seqlens)

    def of(self, tensor: Tensor) -> tuple[int, ...] | None:
        return self.seqlens if self.owner() is tensor and self.state == _state(tensor) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes when PyTorch writes to a tensor or points it elsewhere."""
    return tensor._version, tensor.data_ptr()


def _judge_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, batch: int, device: torch.device) -> None:
    """Raise ArgumentError for offsets of the wrong shape, dtype or place; their values are not looked at."""
    if batch != 1:
        raise ArgumentError(
            f"cu_seqlens with a batch of {batch}",
            given=f"batch {batch}, {cu_seqlens.numel() - 1} sequences",
            supported="batch 1: the sequences of a pack share one row",
            do="reshape q, k, v, g and beta to [1, B * T, ...]",
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in OFFSET_DTYPES:
        _refuse("cu_seqlens must hold the N + 1 offsets of N >= 1 sequences", "int32 or int64", cu_seqlens=cu_seqlens)
    if cu_seqlens.device != device and cu_seqlens.device.type != "cpu":
        raise ArgumentError(
            "cu_seqlens is on another device than q",
            given=f"cu_seqlens on {cu_seqlens.device}, q on {device}",
            supported="q's device, or the CPU",
        )
    if cu_seqlens_cpu is not None and (
        cu_seqlens_cpu.device.type != "cpu"
        or cu_seqlens_cpu.shape != cu_seqlens.shape
        or cu_seqlens_cpu.dtype not in OFFSET_DTYPES
    ):
        _refuse(
            "cu_seqlens_cpu must be a copy of cu_seqlens on the CPU",
            f"{cu_seqlens.numel()} offsets, int32 or int64, on the CPU",
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )


def lengths(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, tokens: int, read: Read) -> tuple[int, ...] | None:
    """Tokens of every sequence, or None where they are not to be had without a read that is not allowed."""
    if read == "never" or cu_seqlens.is_meta:
        return None

    if cu_seqlens.device.type == "cpu":
        if cu_seqlens_cpu is not None and not _same(cu_seqlens_cpu, cu_seqlens):
            given, offsets = cu_seqlens_cpu.tolist(), cu_seqlens.tolist()
            at = next(n for n, pair in enumerate(zip(given, offsets, strict=True)) if pair[0] != pair[1])
            raise ArgumentError(
                "cu_seqlens_cpu differs from cu_seqlens",
                given=f"offset {at} is {given[at]} there, and {offsets[at]} in cu_seqlens",
                do="pass the same offsets, or cu_seqlens alone",
            )
        return _checked(cu_seqlens, tokens)
    if cu_seqlens_cpu is not None:
        return _checked(cu_seqlens_cpu, tokens)

    # An inference tensor counts no versions, so nothing could tell that its cached lengths are old.
    versioned = not cu_seqlens.is_inference()
    if versioned and read == "cached":
        cached: _Lengths | None = getattr(cu_seqlens, "_flashqla_lengths", None)
        known = cached.of(cu_seqlens) if cached else None
        if cached and known and cached.end <= tokens:
            return known
    if torch.cuda.is_current_stream_capturing():
        return None
    state = _state(cu_seqlens) if versioned else None  # before the read: another thread may write behind it
    seqlens = _checked(cu_seqlens.cpu(), tokens)
    if state:
        cu_seqlens._flashqla_lengths = _Lengths(cu_seqlens, state, seqlens)  # type: ignore[attr-defined]
    return seqlens


def _same(offsets: Tensor, others: Tensor) -> bool:
    if offsets.numel() <= SHORT_PACK:
        same: bool = offsets.tolist() == others.tolist()
        return same
    return numpy.array_equal(offsets.numpy(), others.numpy())


def _checked(cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
    """Offsets on the host -> lengths, or ArgumentError."""
    if cu_seqlens.numel() <= SHORT_PACK:
        offsets = cu_seqlens.tolist()
        seqlens = tuple(map(sub, offsets[1:], offsets))
        first, last, rising = offsets[0], offsets[-1], min(seqlens) >= 0
    else:
        values = cu_seqlens.numpy()
        seqlens = tuple(numpy.diff(values).tolist())
        # Compared, because differences of what is no offset may overflow.
        first, last, rising = int(values[0]), int(values[-1]), bool((values[1:] >= values[:-1]).all())
    if first != 0:
        raise ArgumentError("cu_seqlens must start at 0", given=f"cu_seqlens[0] = {first}")
    if not rising:
        offsets = cu_seqlens.tolist()
        n = next(n for n, (begin, end) in enumerate(pairwise(offsets)) if end < begin)
        raise ArgumentError(
            "cu_seqlens must not decrease",
            given=f"cu_seqlens[{n}] = {offsets[n]}, cu_seqlens[{n + 1}] = {offsets[n + 1]}",
        )
    if last > tokens:
        raise ArgumentError(
            f"cu_seqlens ends at {last}, past the {tokens} tokens of q",
            given=f"cu_seqlens[-1] = {last}, T = {tokens}",
            supported="a last offset of T or less; rows past it give 0",
        )
    return seqlens


def placed(cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Offsets on `device`, contiguous."""
    if cu_seqlens.device != device:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The graph would read this host memory again at every replay, when it may be gone.
            raise ArgumentError("cu_seqlens is on the CPU while a graph is captured", do="pass it on q's device")
        if cu_seqlens.is_pinned():  # or its owner might write to it before the copy reads it
            cu_seqlens = cu_seqlens.clone()
        cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    return cu_seqlens if cu_seqlens.is_contiguous() else cu_seqlens.contiguous()


def _refuse(message: str, supported: str, **tensors: Tensor | None) -> NoReturn:
    raise ArgumentError(message, given=_describe(**tensors), supported=supported)


def _describe(**tensors: Tensor | None) -> str:
    """`q [1, 4096, 16, 96] bfloat16 on cpu, ...`"""
    return ", ".join(
        f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
        for name, x in tensors.items()
        if x is not None
    )
