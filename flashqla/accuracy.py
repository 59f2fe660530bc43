"""Outputs against the float64 truth: errors per tensor, and the error that is allowed.

The truth is the token recurrence in float64, and for gradients autograd through it. Above 4096 tokens per sequence its
one step per token would take seconds, and the chunk form in float64 stands in, with its backward pass written out;
tests and `verify` hold both to the recurrence within 1e-9.

Gradients of g are also shown as they reach the parameters of a model, which makes gates from activations a as

    g = -exp(A_log) softplus(a + dt_bias)    dA_log = sum dg g    ddt_bias = sum dg g sigmoid(x) / softplus(x)

with x = a + dt_bias and sums over all tokens of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flashqla.cases import Direction
from flashqla.inputs import GRADIENTS, Inputs, take_heads
from flashqla.records import TensorErrors
from flashqla.reference import (
    chunk_gated_delta_rule_backward,
    chunk_gated_delta_rule_reference,
    recurrent_gated_delta_rule,
)

FLOOR = 5e-3  # two roundings to bfloat16, each up to 2^-9 of a value
EXACT = 1e-9  # float64 against float64: rounding, times the condition of the chunk inverse
PEER_FACTOR = 1.1
REFERENCE_FACTOR = 1.5  # over the chunk form in PyTorch, whose operands are not rounded to 16 bits on the way
CHECK = 2e-2  # before timing: tells a wrong result from a rounded one, and no more
# Gradients pass through more products of rounded operands than outputs do. With strong gates dg is a thousandth of a
# percent of the terms that it is a sum of.
GRADIENT, GRADIENT_AT_STRONG_GATES, GRADIENT_CHECK = 1e-2, 2e-2, 5e-2
STRONG = -1.0  # half of the gates are below: a token keeps at most 37 percent of the state
STABLE_STEP = 2.0 + 2.0**-6  # beta |k|^2 above 2 grows the state; keys in bfloat16 have norms a little off 1

RECURRENCE_TOKENS = 4096  # per sequence
TRUTH_BYTES = 16 * 2**30  # at once; heads are taken in groups that fit
TOKEN_BYTES = 8 * 2**10  # per head: inputs, outputs and their copies in float64
BLOCK_BYTES = 400 * 2**20  # per head: intermediates of a block of tokens
BACKWARD = 3  # times these for gradients
BLOCK = 2**24  # elements that are compared at once
HEAD_AXIS = {"o": 2, "final_state": 1, "dq": 2, "dk": 2, "dv": 2, "dg": 2, "dbeta": 2, "dh0": 1}
KEY_HEADS = ("dq", "dk")  # have a row per key head
GATE_SCALE = {"strong": 16.0}  # exp(A_log), by the gates of a case; drawn gates are such multiples of a softplus
USUAL_GATE_SCALE = 1 / 16


@dataclass(frozen=True)
class Truth:
    """Outputs in float64, and how they came about."""

    outputs: dict[str, Tensor]
    recurrence: bool
    unstable: str | None  # why errors mean nothing on these inputs
    conditions: dict[str, float]  # of sums: the norm that they would have if no term cancelled another, over their own

    @property
    def name(self) -> str:
        return "float64 recurrence" if self.recurrence else "float64 chunk form"


def truth(inputs: Inputs, direction: Direction = "fwd") -> Truth:
    """What the op must give on these inputs, rows past the last offset as zeros; its gradients for "bwd"."""
    recurrence = max(inputs.case.lengths) <= RECURRENCE_TOKENS
    outputs = _by_heads(inputs, recurrence, torch.float64, direction)
    terms = _terms_of_parameters(inputs, outputs["dg"]) if direction == "bwd" else {}
    conditions = {name: _condition(x) for name, x in terms.items()}
    return Truth(shown(outputs, inputs, direction), recurrence, instability(inputs), conditions)


def shown(outputs: Mapping[str, Tensor], inputs: Inputs, direction: Direction) -> dict[str, Tensor]:
    """Outputs to compare: gradients with dA_log and ddt_bias, summed up in float64."""
    if direction != "bwd":
        return dict(outputs)
    terms = _terms_of_parameters(inputs, outputs["dg"])
    return {**outputs, **{name: x.sum((0, 1)) for name, x in terms.items()}}


def _terms_of_parameters(inputs: Inputs, dg: Tensor) -> dict[str, Tensor]:
    """What dA_log and ddt_bias are sums of, [B, T, hv] float64."""
    g, dg = inputs.g.double(), dg.double()
    if inputs.case.packed:
        g, dg = g[:, : inputs.case.tokens], dg[:, : inputs.case.tokens]
    g = g.clamp(max=0.0)
    scale = GATE_SCALE.get(inputs.case.gate, USUAL_GATE_SCALE)
    # No parameters give a reset of -inf, whose dg is 0 too; sigmoid(x) is 1 - exp(-softplus(x)).
    return {"dA_log": torch.where(g.isinf(), 0.0, dg * g), "ddt_bias": dg * scale * torch.expm1(g / scale)}


def _condition(terms: Tensor) -> float:
    whole, parts = (float(torch.linalg.vector_norm(x.sum((0, 1)))) for x in (terms, terms.abs()))
    return parts / whole if whole else 1.0


def reference_errors(inputs: Inputs, right: Truth) -> dict[str, TensorErrors]:
    """Errors that the chunk form in PyTorch makes on the same inputs, with outputs in the dtypes of the op."""
    return errors(_by_heads(inputs, False, None, "fwd"), right.outputs, inputs.case.tokens)


def quick_truth(inputs: Inputs, heads: Sequence[int], direction: Direction = "fwd") -> dict[str, Tensor]:
    """Outputs of some value heads by the chunk form in float32: enough to tell whether a result is wrong."""
    taken = take_heads(inputs, heads)
    outputs = _outputs(taken, False, torch.float32) if direction != "bwd" else {}
    if direction != "fwd":
        groups = len(dict.fromkeys(head // (inputs.case.hv // inputs.case.hk) for head in heads))
        outputs |= _sum_groups(_gradients(taken, False, torch.float32), groups)
    return outputs


def some_heads(inputs: Inputs, direction: Direction = "fwd") -> tuple[int, ...]:
    """The first value head and the last, which in the Qwen head counts is one that does not decay under mixed gates.

    For gradients all value heads of the first key head and of the last: those of keys are sums over them.
    """
    hv, group = inputs.case.hv, 1 if direction == "fwd" else inputs.case.hv // inputs.case.hk
    return tuple(dict.fromkeys((*range(group), *range(hv - group, hv))))


def heads_of(outputs: Mapping[str, Tensor], heads: Sequence[int], group: int = 1) -> dict[str, Tensor]:
    """Outputs of some value heads, and of the key heads that are theirs, one for each `group` of all value heads."""
    key_heads = tuple(dict.fromkeys(head // group for head in heads))

    def take(name: str, x: Tensor) -> Tensor:
        chosen = key_heads if name in KEY_HEADS else heads
        return x.index_select(HEAD_AXIS[name], torch.tensor(chosen, device=x.device))

    return {name: take(name, x) for name, x in outputs.items()}


def errors(outputs: Mapping[str, Tensor], right: Mapping[str, Tensor], tokens: int) -> dict[str, TensorErrors]:
    """Errors of every output that `right` has. `tokens`: rows of a pack that count; those past them do not.

    Raises KeyError for an output that is missing, ValueError for one of another shape.
    """
    found = {}
    for name, expected in right.items():
        output = outputs[name]
        if HEAD_AXIS.get(name) == 2 and expected.shape[0] == 1:
            output, expected = output[:, :tokens], expected[:, :tokens]
        found[name] = tensor_errors(output, expected)
    return found


def tensor_errors(output: Tensor, right: Tensor) -> TensorErrors:
    """Relative L2, largest absolute difference and cosine, in float64. NaN and inf are counted, and leave no number.

    Entries that are the same infinity in both are no error, and are left out. Against zeros the error is absolute.
    """
    if output.shape != right.shape:
        raise ValueError(f"an output of shape {list(output.shape)}, and {list(right.shape)} expected")
    sums = torch.zeros(4, dtype=torch.float64, device=right.device)
    largest, nan, inf = sums[0].clone(), sums[0].clone(), sums[0].clone()
    for x, y in zip(output.reshape(-1).split(BLOCK), right.reshape(-1).split(BLOCK), strict=True):
        x, y = x.double(), y.double()
        same = torch.isinf(x) & (x == y)
        x, y = x.masked_fill(same, 0.0), y.masked_fill(same, 0.0)
        off = x - y
        sums += torch.stack([off.dot(off), y.dot(y), x.dot(x), x.dot(y)])
        nan += x.isnan().sum()
        inf += x.isinf().sum()
        if x.numel():
            largest = torch.maximum(largest, off.abs().max())
    off_square, y_square, x_square, dot, highest, nans, infs = torch.stack([*sums, largest, nan, inf]).tolist()
    if nans or infs:
        return TensorErrors(rel_l2=None, max_abs=None, cosine=None, nan=int(nans), inf=int(infs))
    norms = (x_square * y_square) ** 0.5
    return TensorErrors(
        rel_l2=(off_square / (y_square or 1.0)) ** 0.5, max_abs=highest, cosine=dot / norms if norms else None
    )


def bounds(
    found: Mapping[str, TensorErrors],
    peers: Sequence[Mapping[str, TensorErrors]],
    reference: Callable[[], Mapping[str, TensorErrors]],
) -> dict[str, float]:
    """Allowed relative L2 error per output of `found`.

    With peers 1.1 times the error of the best of them, else 1.5 times that of the chunk form in PyTorch, up to 2e-2;
    neither is asked to be below 5e-3. `reference` gives the errors of the chunk form, and is only called for an error
    above that.
    """
    allowed = {}
    for name, error in found.items():
        theirs = [own for peer in peers if name in peer and (own := peer[name].rel_l2) is not None]
        if theirs:
            allowed[name] = max(FLOOR, PEER_FACTOR * min(theirs))
        elif _ratio(error, FLOOR) <= 1.0:
            allowed[name] = FLOOR
        else:
            own = reference()[name].rel_l2
            allowed[name] = max(FLOOR, min(CHECK, REFERENCE_FACTOR * (own or 0.0)))
    return allowed


def gradient_bounds(
    found: Mapping[str, TensorErrors],
    peers: Sequence[Mapping[str, TensorErrors]],
    strong_gates: bool,
    conditions: Mapping[str, float],
) -> dict[str, float]:
    """Allowed relative L2 error per gradient of `found`: 1e-2, or 2e-2 at strong gates, or 1.1 times that of the best
    peer where it is more. A sum whose terms cancel is allowed as much of what they are without their signs, up to
    5e-2: terms that are each off by no more may leave that."""
    limit = GRADIENT_AT_STRONG_GATES if strong_gates else GRADIENT
    best = {name: [own for peer in peers if name in peer and (own := peer[name].rel_l2) is not None] for name in found}
    limits = {name: max(limit, min(GRADIENT_CHECK, limit * conditions.get(name, 1.0))) for name in found}
    return {name: max(limits[name], PEER_FACTOR * min(theirs, default=0.0)) for name, theirs in best.items()}


def nearest(found: Mapping[str, TensorErrors], allowed: Mapping[str, float]) -> float | None:
    """The bound that decides: that of the output which comes nearest to its own, or exceeds it most."""
    ratios = {name: _ratio(found[name], bound) for name, bound in allowed.items() if name in found}
    return allowed[max(ratios, key=lambda name: ratios[name])] if ratios else None


def within(found: Mapping[str, TensorErrors], allowed: Mapping[str, float]) -> bool:
    """Whether every output is there and within its bound."""
    return not beyond(found, allowed)


def beyond(found: Mapping[str, TensorErrors], allowed: Mapping[str, float]) -> list[str]:
    """Outputs that are not there, or not within their bound."""
    return [name for name, bound in allowed.items() if name not in found or _ratio(found[name], bound) > 1.0]


def instability(inputs: Inputs) -> str | None:
    """Why errors mean nothing on these inputs: they are not finite, or the rule itself diverges. None where they do."""
    if spoiled := _not_finite(inputs):
        return f"inputs that are not finite: {spoiled}"
    tokens = inputs.case.tokens if inputs.case.packed else inputs.v.shape[1]
    g, beta, k = (x[:, :tokens].float() for x in (inputs.g, inputs.beta, inputs.k))
    if g.numel() == 0:
        return None
    if g.max() > 0:
        return f"outside the stable range: a gate of {g.max().item():.3g}, above 0"
    if not inputs.case.l2norm:
        step = (beta * k.square().sum(-1).repeat_interleave(inputs.case.hv // inputs.case.hk, dim=2)).max().item()
        if step > STABLE_STEP:
            return f"outside the stable range: beta |k|^2 of {step:.3g}, above 2"
    return None


def _not_finite(inputs: Inputs) -> str:
    """Entries that spoil every result, as `3 in q, 1 in k`. Not gates of -inf, which are resets, nor rows of a tail."""
    counts = {}
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x = inputs.tensors().get(name)
        if x is None:
            continue
        if name != "initial_state" and inputs.case.packed:
            x = x[:, : inputs.case.tokens]
        good = x.isfinite() | x.isneginf() if name == "g" else x.isfinite()
        counts[name] = x.numel() - int(good.count_nonzero())
    return ", ".join(f"{count} in {name}" for name, count in counts.items() if count)


def strong_gates(inputs: Inputs) -> bool:
    """Whether most gates erase most of the state, as those of trained models do."""
    g = inputs.g[:, : inputs.case.tokens] if inputs.case.packed else inputs.g
    return g.numel() > 0 and bool(g.float().median() < STRONG)


def contract(outputs: Mapping[str, Tensor], inputs: Inputs, direction: Direction = "fwd") -> list[str]:
    """What is wrong with outputs besides their values: dtypes, and rows past the last offset that are not 0."""
    return _contract_of_gradients(outputs, inputs) if direction == "bwd" else _contract_of_outputs(outputs, inputs)


def _contract_of_gradients(outputs: Mapping[str, Tensor], inputs: Inputs) -> list[str]:
    """Gradients have shape and dtype of their inputs, and inputs that are not there have none."""
    arguments = {GRADIENTS[name]: x for name, x in inputs.tensors().items() if name in GRADIENTS}
    problems = [f"{name} is missing" for name in arguments if name not in outputs]
    problems += [f"{name} is there without an initial state" for name in outputs if name not in arguments]
    for name, like in arguments.items():
        found = outputs.get(name, like)
        if found.shape != like.shape:
            problems.append(f"{name} has shape {list(found.shape)}, and its input {list(like.shape)}")
        elif found.dtype != like.dtype:
            problems.append(f"{name} is {found.dtype}, and its input {like.dtype}")
        elif name in outputs and name != "dh0" and inputs.case.tail and _dirty(found, inputs):
            problems.append(f"rows of {name} past the last offset are not 0")
    return problems


def _dirty(x: Tensor, inputs: Inputs) -> bool:
    return bool(x[:, inputs.case.tokens :].count_nonzero())  # NaN counts as not zero


def _contract_of_outputs(outputs: Mapping[str, Tensor], inputs: Inputs) -> list[str]:
    problems = []
    if outputs["o"].dtype != inputs.v.dtype:
        problems.append(f"o is {outputs['o'].dtype}, v is {inputs.v.dtype}")
    state = outputs.get("final_state")
    if state is not None and state.dtype != torch.float32:
        problems.append(f"final_state is {state.dtype}, not float32")
    if inputs.case.final_state != (state is not None):
        problems.append("final_state is there without being asked for, or missing")
    if outputs["o"].shape != inputs.v.shape:
        problems.append(f"o has shape {list(outputs['o'].shape)}, v {list(inputs.v.shape)}")
    elif inputs.case.tail and _dirty(outputs["o"], inputs):
        problems.append("rows of o past the last offset are not 0")
    return problems


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that `same` can be asked about later."""
    return {name: x.clone() for name, x in tensors.items()}


def same(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether tensors are equal bit by bit; NaNs of equal bits are equal."""
    if before.keys() != after.keys():
        return False
    return all(torch.equal(_bits(x), _bits(after[name])) for name, x in before.items())


def _by_heads(inputs: Inputs, recurrence: bool, dtype: torch.dtype | None, direction: Direction) -> dict[str, Tensor]:
    """Outputs or gradients, on groups of value heads that fit into memory."""
    run, factor = (_outputs, 1) if direction == "fwd" else (_gradients, BACKWARD)
    hv, rows = inputs.case.hv, inputs.v.shape[0] * inputs.v.shape[1]
    group = max(1, min(hv, TRUTH_BYTES // (factor * (BLOCK_BYTES + TOKEN_BYTES * rows))))
    if group == hv:
        return run(inputs, recurrence, dtype)
    groups = (range(first, min(first + group, hv)) for first in range(0, hv, group))
    parts = [run(take_heads(inputs, heads), recurrence, dtype) for heads in groups]
    whole = {name: torch.cat([part[name] for part in parts], dim=HEAD_AXIS[name]) for name in parts[0]}
    return _sum_groups(whole, inputs.case.hk)


def _sum_groups(gradients: dict[str, Tensor], hk: int) -> dict[str, Tensor]:
    """Gradients of `take_heads` -> of the heads that it gave a key head each, which belong to `hk` key heads."""
    return {name: torch.unflatten(x, 2, (hk, -1)).sum(3) if name in KEY_HEADS else x for name, x in gradients.items()}


def _outputs(inputs: Inputs, recurrence: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    arguments = _arguments(inputs)
    with torch.no_grad():
        if recurrence:
            o, final_state = recurrent_gated_delta_rule(**arguments, dtype=dtype or torch.float64)
        else:
            o, final_state = chunk_gated_delta_rule_reference(**arguments, dtype=dtype)
    return {"o": o} if final_state is None else {"o": o, "final_state": final_state}


def _gradients(inputs: Inputs, recurrence: bool, dtype: torch.dtype | None) -> dict[str, Tensor]:
    do, dht = cast(Tensor, inputs.do), inputs.dht
    arguments = _arguments(inputs)
    if not recurrence:
        del arguments["output_final_state"]
        found = chunk_gated_delta_rule_backward(**arguments, do=do, dht=dht, dtype=dtype)
        return {name: x for name, x in zip(GRADIENTS.values(), found, strict=True) if x is not None}
    dtype = dtype or torch.float64
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.tensors().items() if name in GRADIENTS}
    given = [x.to(dtype) for x in (do, dht) if x is not None]
    with torch.enable_grad():
        results = recurrent_gated_delta_rule(**{**arguments, **leaves}, dtype=dtype)
        gradients = torch.autograd.grad([x for x in results if x is not None], list(leaves.values()), given)
    return {GRADIENTS[name]: x for name, x in zip(leaves, gradients, strict=True)}


def _arguments(inputs: Inputs) -> dict[str, Any]:
    case = inputs.case
    return {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "g": inputs.g,
        "beta": inputs.beta,
        "scale": inputs.scale,
        "initial_state": inputs.initial_state,
        "output_final_state": case.final_state,
        "cu_seqlens": inputs.cu_seqlens,
        "state_v_first": case.state_v_first,
        "use_qk_l2norm_in_kernel": case.l2norm,
    }


def _ratio(error: TensorErrors, bound: float) -> float:
    return float("inf") if error.rel_l2 is None else error.rel_l2 / bound


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])
