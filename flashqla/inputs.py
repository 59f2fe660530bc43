"""Tensors of a case, in the layout of the public op: `make(case, seed, device)`.

q and k are drawn per token and head, normalised to length 1 unless the case says otherwise; v and the initial state are
normal. `mixed` gates are those of the published benchmark: every fourth value head does not decay at all, the others
decay by logsigmoid(normal) / 16.

Captured inputs are not drawn, but read from the file that their case names. Gradients of results, which a backward pass
starts from, are drawn for all.

The same case, seed and kind of device give the same tensors. Small cases are drawn on the CPU, so that they are the
same on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from flashqla import captures
from flashqla.cases import Case, Direction
from flashqla.errors import ArgumentError

HEAD_DIM = 128
LARGE = 2**22  # elements of v from which drawing on the CPU takes longer than the kernels under test
RESET_TOKEN = 37  # inside a chunk, and off every boundary of 8
UNGATED_EVERY = 4  # mixed: value heads 3, 7, 11, ... do not decay
TINY_GATE = math.log(1e-12)
GRADIENT_SEEDS = 2**31  # added to a seed: generators on the CPU take 32 bits, of which small seeds leave this one free
# Of arguments, by which a backward pass gives them.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0"}
STATE_GRADIENT = 0.125  # gradients of final states, beside those of o; as in the published benchmark


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call.

    q, k [B, T, hk, 128] and v [B, T, hv, 128] in the case's dtype; g (natural log of the decay) and beta [B, T, hv];
    initial_state [N, hv, K, V], or [N, hv, V, K] when the case is V-first; cu_seqlens [N + 1] int32, on the device and
    on the host, for packed cases, where B = 1 and T counts the tail.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    scale: float
    case: Case
    do: Tensor | None = None  # gradient of o, shaped as v, in its dtype; for a backward pass
    dht: Tensor | None = None  # gradient of the final state in float32, where the case has one

    def tensors(self) -> dict[str, Tensor]:
        """The tensors a call may read, by argument name."""
        named = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "g": self.g,
            "beta": self.beta,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
            "do": self.do,
            "dht": self.dht,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def make(case: Case, seed: int, device: str, direction: Direction = "fwd") -> Inputs:
    """Draw the inputs of a case, or read them where they were captured; with gradients of its results for "bwd"."""
    inputs = _captured(case, device) if case.file else _drawn(case, seed, device)
    return inputs if direction == "fwd" else _with_gradients(inputs, seed, device)


def _drawn(case: Case, seed: int, device: str) -> Inputs:
    batch, tokens = (len(case.lengths), case.lengths[0]) if case.batch else (1, case.tokens + case.tail)
    draw = _Draw(seed, _drawn_on(device, batch, tokens, case.hv))

    q = _rows(draw.normal("q", batch, tokens, case.hk, HEAD_DIM), case)
    if case.keys == "correlated":
        k = F.normalize(draw.uniform("k", batch, tokens, case.hk, HEAD_DIM), dim=-1)
    else:
        k = _rows(draw.normal("k", batch, tokens, case.hk, HEAD_DIM), case)
    v = draw.normal("v", batch, tokens, case.hv, HEAD_DIM)
    g = _gates(draw, case, batch, tokens)
    beta = torch.ones_like(g) if case.beta == "one" else draw.normal("beta", batch, tokens, case.hv).sigmoid()
    state = draw.normal("initial_state", len(case.lengths), case.hv, HEAD_DIM, HEAD_DIM) if case.initial_state else None

    qkv = [x.to(device, getattr(torch, case.dtype)) for x in (q, k, v)]
    gates = [x.to(device, getattr(torch, case.gate_dtype)) for x in (g, beta)]
    if case.tail:
        for x in (*qkv, *gates):
            x[:, case.tokens :] = torch.nan
    if case.strided:
        heads = torch.cat(qkv, dim=2)
        qkv = list(heads.split([case.hk, case.hk, case.hv], dim=2))
        gates = list(torch.cat(gates, dim=2).split(case.hv, dim=2))
    offsets = _offsets(case) if case.packed else None
    return Inputs(
        q=qkv[0],
        k=qkv[1],
        v=qkv[2],
        g=gates[0],
        beta=gates[1],
        initial_state=None if state is None else state.to(device, getattr(torch, case.state_dtype)),
        cu_seqlens=None if offsets is None else offsets.to(device),
        cu_seqlens_cpu=offsets,
        scale=HEAD_DIM**-0.5,
        case=case,
    )


def _drawn_on(device: str, batch: int, tokens: int, hv: int) -> str:
    return device if batch * tokens * hv * HEAD_DIM >= LARGE else "cpu"


def _with_gradients(inputs: Inputs, seed: int, device: str) -> Inputs:
    """With do, NaN past the last offset, and laid out head by head where the case is strided; and dht."""
    case, (batch, tokens, *_) = inputs.case, inputs.v.shape
    draw = _Draw(GRADIENT_SEEDS + seed, _drawn_on(device, batch, tokens, case.hv))
    do = draw.normal("v", *inputs.v.shape).to(device, inputs.v.dtype)
    if case.packed:
        do[:, case.tokens :] = torch.nan
    if case.strided:
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    dht = None
    if case.final_state:
        dht = STATE_GRADIENT * draw.normal("initial_state", len(case.lengths), case.hv, HEAD_DIM, HEAD_DIM).to(device)
    return replace(inputs, do=do, dht=dht)


def take_heads(inputs: Inputs, heads: Sequence[int]) -> Inputs:
    """The same problem for some value heads only, each with a key head of its own."""
    case = inputs.case
    v_heads = torch.tensor(heads, device=inputs.v.device)
    k_heads = v_heads // (case.hv // case.hk)

    def states(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.index_select(1, v_heads)

    return replace(
        inputs,
        q=inputs.q.index_select(2, k_heads),
        k=inputs.k.index_select(2, k_heads),
        v=inputs.v.index_select(2, v_heads),
        g=inputs.g.index_select(2, v_heads),
        beta=inputs.beta.index_select(2, v_heads),
        initial_state=states(inputs.initial_state),
        do=None if inputs.do is None else inputs.do.index_select(2, v_heads),
        dht=states(inputs.dht),
        case=replace(case, hk=len(heads), hv=len(heads)),
    )


def _captured(case: Case, device: str) -> Inputs:
    call = captures.read(Path(case.file))
    if call.case.content != case.content:
        raise ArgumentError("the file has changed since it was chosen", given=case.file, do="run the command again")
    offsets = call.tensors.pop("cu_seqlens", None)
    tensors = {name: x.to(device) for name, x in call.tensors.items()}
    return Inputs(
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        g=tensors["g"],
        beta=tensors["beta"],
        initial_state=tensors.get("initial_state"),
        cu_seqlens=None if offsets is None else offsets.to(device),
        cu_seqlens_cpu=offsets,
        scale=call.scale,
        case=case,
    )


class _Draw:
    """Random tensors in float32, each name from a generator of its own: one setting more does not change the others."""

    NAMES = ("q", "k", "v", "g", "beta", "initial_state", "half")

    def __init__(self, seed: int, device: str) -> None:
        self._seed, self._device = seed, device

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator(name), device=self._device)

    def uniform(self, name: str, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator(name), device=self._device)

    def _generator(self, name: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        generator.manual_seed(self._seed * len(self.NAMES) + self.NAMES.index(name))
        return generator


def _rows(x: Tensor, case: Case) -> Tensor:
    rows = F.normalize(x, dim=-1)
    return 5.0 * rows if case.keys == "norm5" else rows


def _gates(draw: _Draw, case: Case, batch: int, tokens: int) -> Tensor:
    """g [B, T, hv], float32."""
    shape = (batch, tokens, case.hv)
    x = draw.normal("g", *shape)
    if case.gate == "zero":
        return torch.zeros_like(x)
    if case.gate == "tiny":
        return torch.full_like(x, TINY_GATE)
    if case.gate == "strong":  # as strong as those of trained Qwen models
        return -16.0 * F.softplus(0.5 * x + 1.0)
    g = F.logsigmoid(x) / 16.0
    if case.gate == "mixed":
        g[..., UNGATED_EVERY - 1 :: UNGATED_EVERY] = 0.0
    elif case.gate == "half_zero":
        g[draw.uniform("half", *shape) < 0.5] = 0.0
    elif case.gate in ("reset", "reset_inf"):
        _reset(g, case, -90.0 if case.gate == "reset" else -math.inf)
    return g


def _reset(g: Tensor, case: Case, value: float) -> None:
    """Put a reset into every sequence, at its token 37 or its last one."""
    rows = g.flatten(0, 1)
    begin = 0
    for length in case.lengths:
        if length:
            rows[begin + min(RESET_TOKEN, length - 1)] = value
        begin += length


def _offsets(case: Case) -> Tensor:
    """cu_seqlens [N + 1] int32 on the host."""
    return F.pad(torch.tensor(case.lengths).cumsum(0), (1, 0)).to(torch.int32)
