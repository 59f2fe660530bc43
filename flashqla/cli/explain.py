"""`flashqla explain`: which implementation would run, and why."""

import json as json_text
from dataclasses import asdict
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import typer

from flashqla.cases import Case
from flashqla.cli import console, options
from flashqla.device import HOPPER_SMS
from flashqla.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from flashqla.ops.plan import Plan

EXAMPLES = """\b
Examples:
  flashqla explain --heads 16,64 --lengths 4096,28672 --dtype float16
  flashqla explain --target sm_90a --heads 4,16
"""
OF_KERNELS = ("v_tile", "segment_chunks", "parts", "inverse_ctas")  # of a plan: PyTorch has none of it


class DType(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def explain(
    heads: Annotated[str, typer.Option("--heads", metavar="HK,HV", help="Key and value heads.")] = "2,8",
    lengths: Annotated[
        str, typer.Option("--lengths", "--lens", metavar="N,...", help="Tokens of each sequence.")
    ] = "32768",
    dtype: Annotated[DType, typer.Option("--dtype", help="Of q, k and v.")] = DType.bfloat16,
    device: options.DeviceOption = None,
    target: Annotated[
        options.Target | None,
        typer.Option("--target", help=f"For a GPU of that kind with {HOPPER_SMS} SMs, not this machine."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="PyTorch instead of a kernel is an error (3).")] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Say which implementation would run, and why.

    For the forward pass of a problem of the given sizes, on this machine or on the GPU of --target. Nothing is run.
    """
    from flashqla.cli import session
    from flashqla.ops import plan as planning

    ((hk, hv),) = options.parse_heads([heads])
    tokens = options.parse_numbers(lengths)
    if not tokens:
        supported = f"--lengths 4096,28672, {options.LONGEST}"
        raise ArgumentError("--lengths takes numbers", given=f"--lengths {lengths}", supported=supported)
    case = Case(hk, hv, tokens, dtype=dtype.value)
    if target and device:
        raise ArgumentError(
            "--target stands for another device", given=f"--target {target}, --device {device}", supported="one of them"
        )
    where, note = (f"{target}, {HOPPER_SMS} SMs", "") if target else session.choose_device(device)
    with console.results_only():
        plan = planning.make(hv=hv, seqlens=tokens, dtype=case.dtype) if target else _plan(case, where)
    if note:
        console.note(note)
    facts = {"problem": f"hk{hk}-hv{hv}/{case.layout}/{case.dtype}", "device": where, **asdict(plan)}
    if plan.implementation == "torch":
        facts = {name: fact for name, fact in facts.items() if name not in OF_KERNELS}
    if json:
        console.result(json_text.dumps(facts, indent=2))
    else:
        console.result("\n".join(f"{name:<20}{_words(fact)}" for name, fact in facts.items() if fact != ()))
    if strict and plan.implementation == "torch":
        raise UnsupportedError("no kernel serves this problem", given=f"--strict, {plan.why}")


def _plan(case: Case, where: str) -> "Plan":
    """The op's own answer, for tensors of the right shapes that take no memory."""
    import torch

    from flashqla.ops import explain as explain_call

    def tensor(*shape: int, dtype: str = "float32") -> torch.Tensor:
        return torch.empty((), dtype=getattr(torch, dtype), device=where).expand(shape)

    keys, values = (tensor(1, case.tokens, heads, 128, dtype=case.dtype) for heads in (case.hk, case.hv))
    gates = tensor(1, case.tokens, case.hv)
    offsets = torch.tensor([0, *accumulate(case.lengths)]) if case.packed else None
    return explain_call(keys, keys, values, gates, gates, cu_seqlens=offsets)


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value).replace("; ", "\n" + " " * 20)
