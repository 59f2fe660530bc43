"""Implementations of the op behind one protocol: ours, three peers, and PyTorch.

`prepare` does everything that is not the op: layouts, the peer's own gate and state conventions, workspace, compilation
and a first call. The call it returns does the op alone and gives outputs in our conventions, through views where the
peer's differ, so that nothing but the op is timed. For "bwd" that is the backward pass on what one forward pass has
saved, which `prepare` runs; for "fwd+bwd" both passes. Gradients are handed back, and accumulated nowhere.

Peers are imported inside their adapters only.
"""

import importlib
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from flashqla.cases import Case, Direction
from flashqla.device import HOPPER, PEERS
from flashqla.errors import ArgumentError
from flashqla.inputs import GRADIENTS, Inputs
from flashqla.ops import chunk_gated_delta_rule, explain, strict
from flashqla.ops import plan as planning
from flashqla.reference import (
    chunk_gated_delta_rule_backward,
    chunk_gated_delta_rule_reference,
    recurrent_gated_delta_rule,
)

# "o" [B, T, hv, V], and "final_state" [N, hv, K, V] (V, K when V-first) if asked for; of a backward pass `GRADIENTS`,
# shaped as the arguments, "dh0" where there is an initial state.
Outputs = dict[str, Tensor]
Call = Callable[[], Outputs]
Compiles = Literal["per head count", "once", "never"]

RECURRENT_TOKENS = 4096  # per sequence; a loop over more takes seconds
COPIES = "it copies from the device while it runs"


class Backend(Protocol):
    """One implementation on one device."""

    @property
    def name(self) -> str: ...

    @property
    def hint(self) -> str:
        """What to do when it is missing."""

    def uncapturable(self, direction: Direction) -> str | None:
        """Why no CUDA graph can hold a call, None where one can: a call that leaves the host alone."""

    @property
    def compiles(self) -> Compiles:
        """When it compiles. Per head count implies a cache on disk, through which another process can do it."""

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Of cases that it takes, enough to compile what all of them need. A miss costs compiling later, no more."""

    @property
    def exact(self) -> bool:
        """Whether it computes in float64, and so must equal the recurrence to rounding."""

    @property
    def contract(self) -> bool:
        """Whether it promises what our op promises besides values: dtypes, and zeros past the last offset."""

    def missing(self) -> str | None:
        """Why it cannot run here."""

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        """Why it cannot take this case."""

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        """A call that runs the op on `inputs`; it has run once, so compiling is over."""

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        """What runs: an implementation with the switches that select it, or the names of kernels."""


def create(names: Sequence[str], device: str, *, exact: bool = False) -> tuple[Backend, ...]:
    """Backends by name, each once. exact: the chunk form in PyTorch computes in float64, which proves its algebra.

    Raises ArgumentError for an unknown name.
    """
    makers: dict[str, Callable[[], Backend]] = {
        "flashqla": lambda: Flashqla(device),
        "fla": lambda: Fla(device),
        "flashinfer": lambda: FlashInfer(device),
        "flash-qla": lambda: FlashQla(device),
        "torch-chunked": lambda: TorchChunked(device, exact),
        "torch-recurrent": lambda: TorchRecurrent(device),
    }
    for name in names:
        if name not in makers:
            raise ArgumentError(f"unknown backend {name}", given=name, supported=", ".join(makers))
    return tuple(makers[name]() for name in dict.fromkeys(names))


def defaults(command: str, device: str) -> tuple[str, ...]:
    """Names of the backends that `command` ("bench" or "verify") runs unless told otherwise."""
    if torch.device(device).type == "cuda":
        return ("flashqla", *PEERS)
    return ("flashqla", "torch-chunked") if command == "verify" else ("flashqla", "torch-recurrent")


@dataclass(frozen=True)
class Flashqla:
    """The op of this package: kernels on Hopper, the PyTorch chunk form elsewhere; `kernels` says which."""

    device: str
    name: ClassVar[str] = "flashqla"
    hint: ClassVar[str] = "see what is missing with: flashqla doctor"
    compiles: ClassVar[Compiles] = "once"
    exact: ClassVar[bool] = False
    contract: ClassVar[bool] = True

    def uncapturable(self, direction: Direction) -> str | None:
        return None if self._hopper() else COPIES

    def _hopper(self) -> bool:
        return _is_cuda(self.device) and torch.cuda.get_device_capability(self.device) == HOPPER

    def missing(self) -> str | None:
        return _no_device(self.device)

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        return None

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        if not self._hopper():
            return ()
        return _one_of_each(
            cases, lambda case: (_switches(case), tuple((p.v_tile, p.segment_chunks > 0) for p in self._plans(case)))
        )

    def _plans(self, case: Case) -> list[planning.Plan]:
        """Of the forward and the backward pass, on Hopper."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        sizes = {"hv": case.hv, "seqlens": case.lengths, "dtype": case.dtype, "sm_count": sms}
        return [planning.make(**sizes, direction=direction) for direction in ("forward", "backward")]

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        arguments = _arguments(inputs)
        with strict() if self._hopper() else nullcontext():  # on Hopper a fallback to PyTorch is not what is asked for
            if direction != "fwd":
                return _first(_differentiated(chunk_gated_delta_rule, arguments, inputs.do, inputs.dht, direction))
            return _first(lambda: _outputs(*chunk_gated_delta_rule(**arguments)))

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        plan = explain(**_arguments(inputs))
        if plan.implementation != "tilelang":
            return ["PyTorch chunk form in float32"]
        forward, backward = self._plans(inputs.case)
        return [*forward.kernels * (direction != "bwd"), *backward.kernels * (direction != "fwd")]


@dataclass(frozen=True)
class TorchChunked:
    """The chunk form in PyTorch, in float32, or in float64 when exact."""

    device: str
    exact: bool = False
    name: ClassVar[str] = "torch-chunked"
    hint: ClassVar[str] = "it needs PyTorch alone"
    compiles: ClassVar[Compiles] = "never"
    contract: ClassVar[bool] = False

    def uncapturable(self, direction: Direction) -> str | None:
        return COPIES

    def missing(self) -> str | None:
        return _no_device(self.device)

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        return None

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return ()

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        arguments = _reference_arguments(inputs)
        dtype = torch.float64 if self.exact else None
        gradients = {name: x for name, x in arguments.items() if name != "output_final_state"}

        def call() -> Outputs:
            forward = direction != "bwd"
            outputs = _outputs(*chunk_gated_delta_rule_reference(**arguments, dtype=dtype)) if forward else {}
            if direction != "fwd":
                do = cast(Tensor, inputs.do)
                found = chunk_gated_delta_rule_backward(**gradients, do=do, dht=inputs.dht, dtype=dtype)
                outputs |= {name: x for name, x in zip(GRADIENTS.values(), found, strict=True) if x is not None}
            return outputs

        return _first(call)

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return [f"PyTorch chunk form in {'float64' if self.exact else 'float32'}"]


@dataclass(frozen=True)
class TorchRecurrent:
    """The token recurrence in PyTorch, in float32."""

    device: str
    name: ClassVar[str] = "torch-recurrent"
    hint: ClassVar[str] = "it needs PyTorch alone"
    compiles: ClassVar[Compiles] = "never"
    exact: ClassVar[bool] = False
    contract: ClassVar[bool] = False

    def uncapturable(self, direction: Direction) -> str | None:
        return COPIES

    def missing(self) -> str | None:
        return _no_device(self.device)

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        if max(case.lengths) > RECURRENT_TOKENS:
            return f"it takes a step for every token, and no more than {RECURRENT_TOKENS} of them in a sequence"
        return None

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return ()

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        arguments = _reference_arguments(inputs) | {"dtype": torch.float32}
        if direction != "fwd":
            return _first(_differentiated(recurrent_gated_delta_rule, arguments, inputs.do, inputs.dht, direction))
        return _first(lambda: _outputs(*recurrent_gated_delta_rule(**arguments)))

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["PyTorch recurrence in float32"]


@dataclass(frozen=True)
class Fla:
    """flash-linear-attention's Triton kernels.

    Its own dispatch would hand the call to flash-qla where that is installed; FLA_FLASH_QLA=0 keeps it with Triton.
    It reads the variable at every call, so it stays set.
    """

    device: str
    name: ClassVar[str] = "fla"
    hint: ClassVar[str] = "pip install flash-linear-attention==0.6.0"
    compiles: ClassVar[Compiles] = "per head count"
    exact: ClassVar[bool] = False
    contract: ClassVar[bool] = False

    def uncapturable(self, direction: Direction) -> str | None:
        return None

    def missing(self) -> str | None:
        return _no_gpu(self.device) or _import_problem("fla.ops.gated_delta_rule", "FLA_FLASH_QLA=0")

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        return _no_tokens(case)

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        # Keys of its tuning hold heads and switches, and no lengths.
        return _one_of_each(cases, lambda case: (case.hk, case.hv, case.packed, _switches(case)))

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        os.environ["FLA_FLASH_QLA"] = "0"
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

        # Offsets are the same tensors at every call: FLA keeps its chunk table by their identity.
        arguments = _contiguous(_arguments(inputs))
        for name in ("cu_seqlens", "cu_seqlens_cpu"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].long()
        if direction != "fwd":
            return _first(_differentiated(op, arguments, *_contiguous_gradients(inputs), direction))
        return _first(lambda: _outputs(*op(**arguments)))

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["Triton (FLA_FLASH_QLA=0)"]


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer's CuTe DSL prefill for Hopper, with its own choice of context parallelism.

    It takes one row of packed tokens [T, heads, 128], the decay as a factor instead of its logarithm, gates in float32,
    and states in (V, K) order. Rows past the last offset are not handed over.
    """

    device: str
    name: ClassVar[str] = "flashinfer"
    hint: ClassVar[str] = "pip install 'flashinfer-python[cu13]==0.7.4'"
    compiles: ClassVar[Compiles] = "once"
    exact: ClassVar[bool] = False
    contract: ClassVar[bool] = False

    def uncapturable(self, direction: Direction) -> str | None:
        return None

    def missing(self) -> str | None:
        return _no_hopper(self.device) or _import_problem("flashinfer.gdn_prefill")

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        if direction != "fwd":
            return "it has no backward pass"
        return _no_tokens(case) or _no_float32(case)

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Of every layout the cases with the fewest and the most value heads, between which its choices turn."""
        few = _one_of_each(sorted(cases, key=lambda case: -case.hv), lambda case: (case.lengths, _switches(case)))
        many = _one_of_each(sorted(cases, key=lambda case: case.hv), lambda case: (case.lengths, _switches(case)))
        return tuple(dict.fromkeys((*few, *many)))

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule as op

        case, tokens = inputs.case, inputs.case.tokens
        q, k, v, g, beta = (
            x.flatten(0, 1)[:tokens].contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )
        state = inputs.initial_state
        if state is not None and not case.state_v_first:
            state = state.mT.contiguous()
        offsets = inputs.cu_seqlens
        if offsets is None:
            rows = len(case.lengths)
            offsets = torch.arange(rows + 1, dtype=torch.int32, device=v.device) * case.lengths[0]
        state_shape = (len(case.lengths), case.hv, v.shape[-1], q.shape[-1])
        output_state = torch.empty(state_shape, dtype=torch.float32, device=v.device)
        arguments: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "g": g.float().exp(),
            "beta": beta.float(),
            "scale": inputs.scale,
            "initial_state": state,
            "output_final_state": case.final_state,
            "cu_seqlens": offsets,
            "use_qk_l2norm_in_kernel": case.l2norm,
            "output": torch.empty_like(v),
            "output_state": output_state,
            "max_seqlen": max(case.lengths),
        }
        rows_of_batch = inputs.v.shape[0] if case.batch else 1

        def call() -> Outputs:
            result = op(**arguments)
            o, final_state = result if case.final_state else (result, None)
            if final_state is not None and not case.state_v_first:
                final_state = final_state.mT
            return _outputs(o.unflatten(0, (rows_of_batch, -1)), final_state)

        return _first(call)

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["CuTe DSL for SM90, use_cp=auto"]


@dataclass(frozen=True)
class FlashQla:
    """flash-qla's TileLang kernels, with its own choice of context parallelism."""

    device: str
    name: ClassVar[str] = "flash-qla"
    hint: ClassVar[str] = "pip install flash-qla==0.1.3"
    compiles: ClassVar[Compiles] = "per head count"
    exact: ClassVar[bool] = False
    contract: ClassVar[bool] = False

    def uncapturable(self, direction: Direction) -> str | None:
        return None

    def missing(self) -> str | None:
        return _no_hopper(self.device) or _import_problem("flash_qla")

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        if case.packed and 0 in case.lengths:
            return "its choice of context parallelism refuses empty sequences"
        if direction != "fwd" and case.gate_dtype != "float32":
            return "its backward pass takes gates in float32 only"
        return _no_tokens(case) or _no_float32(case)

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return tuple(cases)  # how it splits, and with it what it compiles, depends on lengths, by a model of its own

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        from flash_qla import chunk_gated_delta_rule as op

        arguments = _contiguous(_arguments(inputs))
        del arguments["cu_seqlens_cpu"]
        if direction != "fwd":
            return _first(_differentiated(op, arguments, *_contiguous_gradients(inputs), direction))
        return _first(lambda: _outputs(*op(**arguments)))

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["TileLang, auto_cp=True"]


def _one_of_each(cases: Sequence[Case], variant: Callable[[Case], Hashable]) -> tuple[Case, ...]:
    """Of the cases of every variant the last with the most tokens: no short way around a kernel is taken there."""
    largest: dict[Hashable, Case] = {}
    for case in cases:
        key = variant(case)
        if key not in largest or case.tokens >= largest[key].tokens:
            largest[key] = case
    return tuple(largest.values())


def _switches(case: Case) -> Hashable:
    """What of a case turns into constants of a kernel, whosever kernel it is."""
    dtypes = case.dtype, case.gate_dtype, case.state_dtype
    return *dtypes, case.l2norm, case.state_v_first, case.initial_state, case.final_state


def _arguments(inputs: Inputs) -> dict[str, Any]:
    """Arguments of a call in our convention, which is that of flash-linear-attention."""
    return {
        **_reference_arguments(inputs),
        "cu_seqlens_cpu": inputs.cu_seqlens_cpu,
    }


def _reference_arguments(inputs: Inputs) -> dict[str, Any]:
    return {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "g": inputs.g,
        "beta": inputs.beta,
        "scale": inputs.scale,
        "initial_state": inputs.initial_state,
        "output_final_state": inputs.case.final_state,
        "use_qk_l2norm_in_kernel": inputs.case.l2norm,
        "cu_seqlens": inputs.cu_seqlens,
        "state_v_first": inputs.case.state_v_first,
    }


def _contiguous(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def _contiguous_gradients(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    return tuple(None if x is None else x.contiguous() for x in (inputs.do, inputs.dht))  # type: ignore[return-value]


def _differentiated(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    arguments: dict[str, Any],
    do: Tensor | None,
    dht: Tensor | None,
    direction: Direction,
) -> Call:
    """A call of the backward pass of `op` through autograd, on what a forward pass saves here; or of both passes."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in GRADIENTS if arguments[name] is not None}

    def forward() -> Outputs:
        with torch.enable_grad():
            return _outputs(*op(**(arguments | leaves)))

    def backward(outputs: Outputs, again: bool) -> Outputs:
        found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given, retain_graph=again)
        return {GRADIENTS[name]: x for name, x in zip(leaves, found, strict=True)}

    def both() -> Outputs:
        outputs = forward()
        gradients = backward(outputs, again=False)
        return {name: x.detach() for name, x in outputs.items()} | gradients

    saved = forward()
    given = [x.to(y.dtype) for x, y in zip((do, dht), saved.values(), strict=False) if x is not None]
    return both if direction == "fwd+bwd" else partial(backward, saved, again=True)


def _outputs(o: Tensor, final_state: Tensor | None) -> Outputs:
    return {"o": o} if final_state is None else {"o": o, "final_state": final_state}


def _first(call: Call) -> Call:
    """`call`, after it has run once to its end: what it compiles and allocates is then there."""
    output = next(iter(call().values()))
    if output.is_cuda:
        torch.cuda.synchronize(output.device)
    return call


def _is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _no_device(device: str) -> str | None:
    return "torch finds no CUDA device" if _is_cuda(device) and not torch.cuda.is_available() else None


def _no_gpu(device: str) -> str | None:
    return _no_device(device) if _is_cuda(device) else "it runs on NVIDIA GPUs only"


def _no_hopper(device: str) -> str | None:
    reason = _no_gpu(device)
    if reason is None and (found := torch.cuda.get_device_capability(device)) != HOPPER:
        reason = "its kernels used here are for compute capability 9.0, this GPU has {}.{}".format(*found)
    return reason


def _no_tokens(case: Case) -> str | None:
    return "there is no token to launch a kernel for" if case.tokens == 0 else None


def _no_float32(case: Case) -> str | None:
    return "q, k and v in float32; it takes bfloat16 and float16" if case.dtype == "float32" else None


@cache
def _import_problem(module: str, *environment: str) -> str | None:
    """Why a module cannot be imported, or None. `environment`: assignments that must stand before it is."""
    os.environ.update(dict(assignment.split("=", 1) for assignment in environment))
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"package {error.name} is not installed"
    except Exception as error:  # peers run device and toolchain checks while they are imported
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None
