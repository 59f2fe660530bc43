"""Backends without a GPU: what runs on a CPU, why the rest does not, and whether adapters speak each peer's language.

The peers are replaced by functions that expect the peer's own conventions and compute with the chunk form.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashqla import accuracy, backends, inputs
from flashqla.cases import Case, Direction, suite
from flashqla.device import PEERS
from flashqla.errors import ArgumentError
from flashqla.reference import chunk_gated_delta_rule_reference

CASES = {
    "packed, strided, bf16 gates, V-first": Case(
        2, 4, (70, 9, 42), strided=True, gate_dtype="bfloat16", state_v_first=True, state_dtype="bfloat16"
    ),
    "dense batch, K-first, l2norm": Case(2, 4, (70, 70), batch=True, keys="norm5", l2norm=True, gate="reset_inf"),
    "a tail, no states": Case(1, 3, (70, 9), tail=7, initial_state=False, final_state=False),
}

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


def test_names_are_made_once_each_and_unknown_ones_refused() -> None:
    made = backends.create(["torch-chunked", "flashqla", "torch-chunked", *PEERS], "cpu", exact=True)
    assert [backend.name for backend in made] == ["torch-chunked", "flashqla", *PEERS]
    assert [backend.exact for backend in made] == [True, False, False, False, False]
    with pytest.raises(ArgumentError, match=r"unknown backend fla3\n.*given +fla3\n.*supported +flashqla, fla, "):
        backends.create(["fla3"], "cpu")


def test_compiling_takes_few_cases() -> None:
    """One dense and one packed case per head count serve FLA. What flash-qla compiles depends on every length."""
    cases = suite("qwen")
    fla, flashinfer, flash_qla = (backend.representatives(cases) for backend in backends.create(list(PEERS), "cuda"))
    heads = {(case.hk, case.hv) for case in cases}
    assert sorted((c.hk, c.hv, c.packed) for c in fla) == sorted((*pair, packed) for pair in heads for packed in (0, 1))
    assert {case.lengths for case in flashinfer} == {case.lengths for case in cases}
    assert len(flashinfer) == 38
    assert flash_qla == cases
    switched = [replace(cases[0], dtype="float16"), replace(cases[0], l2norm=True), cases[0]]
    assert set(backends.create(["fla"], "cuda")[0].representatives(switched)) == set(switched)
    for name in ("flashqla", "torch-chunked", "torch-recurrent"):
        assert backends.create([name], "cpu")[0].representatives(cases) == ()


def test_ours_compiles_a_case_for_each_kind_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = backends.Flashqla("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cases = suite("qwen")
    chosen = ours.representatives(cases)
    kinds, of_chosen = (
        {tuple((p.v_tile, p.segment_chunks > 0) for p in ours._plans(case)) for case in some}
        for some in (cases, chosen)
    )
    assert of_chosen == kinds
    assert len(chosen) == len(kinds)


def test_defaults_exist() -> None:
    for command in ("bench", "verify"):
        for device in ("cpu", "cuda"):
            names = backends.defaults(command, device)
            assert [backend.name for backend in backends.create(names, device)] == list(names)
    assert backends.defaults("verify", "cpu") == ("flashqla", "torch-chunked")
    assert set(PEERS) < set(backends.defaults("bench", "cuda"))


def test_peers_say_why_they_cannot_run_on_a_cpu() -> None:
    for backend in backends.create(list(PEERS), "cpu"):
        assert backend.missing() == "it runs on NVIDIA GPUs only"
        assert backend.hint.startswith("pip install ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_everything_that_needs_one_is_missing() -> None:
    made = backends.create(["flashqla", "torch-chunked", *PEERS], "cuda")
    assert {backend.missing() for backend in made} == {"torch finds no CUDA device"}


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQLA_TEST", "0")
    assert (
        backends._import_problem("no_such_package.ops", "FLASHQLA_TEST=1") == "package no_such_package is not installed"
    )
    assert os.environ["FLASHQLA_TEST"] == "1"


def test_cases_that_a_backend_cannot_take() -> None:
    made = {b.name: b for b in backends.create([*PEERS, "flashqla", "torch-recurrent"], "cpu")}

    def reasons(case: Case) -> dict[str, str]:
        return {name: reason for name, backend in made.items() if (reason := backend.unsupported(case, "fwd"))}

    usual = Case(2, 8, (4096,), batch=True)
    assert reasons(usual) == {}
    assert list(reasons(replace(usual, lengths=(4097,)))) == ["torch-recurrent"]
    assert list(reasons(replace(usual, dtype="float32"))) == ["flashinfer", "flash-qla"]
    assert list(reasons(Case(2, 8, (64, 0)))) == ["flash-qla"]
    assert list(reasons(Case(2, 8, (0, 0)))) == ["fla", "flashinfer", "flash-qla"]
    for direction in ("bwd", "fwd+bwd"):
        reasons_back = {name: made[name].unsupported(usual, direction) for name in made}
        assert reasons_back == {**dict.fromkeys(made), "flashinfer": "it has no backward pass"}
        gates = replace(usual, gate_dtype="bfloat16")
        assert "flash-qla" in {name for name in made if made[name].unsupported(gates, direction)}
    assert made["flash-qla"].unsupported(gates, "fwd") is None
    assert made["torch-recurrent"].unsupported(replace(usual, lengths=(4097,)), "bwd")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["flashqla", "torch-chunked", "torch-recurrent"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ours_and_pytorch_are_right_on_a_cpu(name: str, case: Case, direction: Direction) -> None:
    _assert_right(backends.create([name], "cpu")[0], case, direction=direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_exact_chunk_form_equals_the_recurrence_to_rounding(direction: Direction) -> None:
    exact = backends.create(["torch-chunked"], "cpu", exact=True)[0]
    _assert_right(exact, CASES["a tail, no states"], direction, accuracy.EXACT)


@pytest.mark.parametrize(("direction", "forwards"), [("bwd", 0), ("fwd+bwd", 1)])
def test_a_backward_call_runs_no_forward_pass_and_adds_nothing_up(
    direction: Direction, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def op(*, cu_seqlens_cpu: torch.Tensor | None, **arguments: Any) -> Any:
        ran.append(1)
        return chunk_gated_delta_rule_reference(**arguments)

    monkeypatch.setattr(backends, "chunk_gated_delta_rule", op)
    drawn = inputs.make(CASES["dense batch, K-first, l2norm"], 0, "cpu", direction)
    with torch.no_grad():
        call = backends.Flashqla("cpu").prepare(drawn, direction)
        ran.clear()
        first, second = accuracy.snapshot(call()), call()
    assert len(ran) == 2 * forwards
    assert accuracy.same(first, second)
    assert not any(x.requires_grad or x.grad is not None for x in drawn.tensors().values())
    assert not any(x.requires_grad for x in second.values())


def test_ours_says_what_runs_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(backends, "explain", lambda **arguments: SimpleNamespace(implementation="tilelang"))
    ours, drawn = backends.Flashqla("cuda"), inputs.make(CASES["a tail, no states"], 0, "cpu")
    assert [ours.uncapturable(direction) for direction in DIRECTIONS] == [None, None, None]
    forward, backward = ["inverse", "forward"], ["inverse", "chain", "chain", "gradients"]
    assert [ours.kernels(drawn, direction) for direction in DIRECTIONS] == [forward, backward, forward + backward]
    for name in PEERS:
        assert backends.create([name], "cuda")[0].uncapturable("bwd") is None
    for name in ("flashqla", "torch-chunked", "torch-recurrent"):
        assert backends.create([name], "cpu")[0].uncapturable("bwd") == backends.COPIES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fla_gets_its_conventions(case: Case, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    def op(*, cu_seqlens_cpu: torch.Tensor | None, **arguments: Any) -> Any:
        assert os.environ["FLA_FLASH_QLA"] == "0"
        assert all(x.is_contiguous() for x in arguments.values() if isinstance(x, torch.Tensor))
        if case.packed:
            assert arguments["cu_seqlens"].dtype == torch.int64
            assert cu_seqlens_cpu.tolist() == arguments["cu_seqlens"].tolist()
        return _judging_gradients(chunk_gated_delta_rule_reference(**arguments), gradients)

    gradients: list[torch.Tensor] = []

    monkeypatch.delenv("FLA_FLASH_QLA", raising=False)
    _stand_in(monkeypatch, "fla.ops.gated_delta_rule", op)
    _assert_right(backends.Fla("cpu"), case, direction)
    assert all(x.is_contiguous() for x in gradients)
    assert bool(gradients) == (direction != "fwd")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flash_qla_gets_its_conventions(case: Case, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    def op(**arguments: Any) -> Any:
        assert all(x.is_contiguous() for x in arguments.values() if isinstance(x, torch.Tensor))
        assert not case.packed or arguments["cu_seqlens"].dtype == torch.int32
        return _judging_gradients(chunk_gated_delta_rule_reference(**arguments), gradients)

    gradients: list[torch.Tensor] = []
    if direction != "fwd":
        case = replace(case, gate_dtype="float32")  # its backward pass takes no other
    _stand_in(monkeypatch, "flash_qla", op)
    _assert_right(backends.FlashQla("cpu"), case, direction)
    assert all(x.is_contiguous() for x in gradients)
    assert bool(gradients) == (direction != "fwd")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flashinfer_gets_its_conventions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def op(
        *,
        output: torch.Tensor,
        output_state: torch.Tensor,
        output_final_state: bool,
        max_seqlen: int,
        cu_seqlens: torch.Tensor,
        initial_state: torch.Tensor | None,
        **rest: Any,
    ) -> Any:
        tokens = cu_seqlens[-1].item()
        assert max_seqlen == cu_seqlens.diff().max()
        assert cu_seqlens.dtype == torch.int32
        for x in (*(rest[name] for name in ("q", "k", "v", "g", "beta")), output):
            assert x.shape[0] == tokens
            assert x.is_contiguous()
        assert rest["g"].dtype == rest["beta"].dtype == output_state.dtype == torch.float32
        assert initial_state is None or initial_state.is_contiguous()
        rows = {name: rest.pop(name)[None] for name in ("q", "k", "v", "beta")}
        o, state = chunk_gated_delta_rule_reference(
            **rows,
            g=rest.pop("g")[None].log(),
            **rest,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            state_v_first=True,
        )
        output.copy_(o[0])
        output_state.copy_(state)
        return (output, output_state) if output_final_state else output

    _stand_in(monkeypatch, "flashinfer.gdn_prefill", op)
    _assert_right(backends.FlashInfer("cpu"), case)


def _stand_in(monkeypatch: pytest.MonkeyPatch, module: str, op: Callable[..., Any]) -> None:
    """Install `op` as chunk_gated_delta_rule of a module that is not there."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[module].chunk_gated_delta_rule = op  # type: ignore[attr-defined]


def _judging_gradients(results: Any, seen: list[torch.Tensor]) -> Any:
    """Results whose gradients are kept in `seen` when a backward pass starts from them."""
    for x in results:
        if x is not None and x.requires_grad:
            x.register_hook(seen.append)
    return results


def _assert_right(
    backend: backends.Backend, case: Case, direction: Direction = "fwd", bound: float = accuracy.FLOOR
) -> None:
    assert backend.unsupported(case, direction) is None
    drawn = inputs.make(case, 0, "cpu", direction)
    before = accuracy.snapshot(drawn.tensors())
    right = {
        **(accuracy.truth(drawn, "fwd").outputs if direction != "bwd" else {}),
        **(accuracy.truth(drawn, "bwd").outputs if direction != "fwd" else {}),
    }
    with torch.no_grad():
        outputs = backend.prepare(drawn, direction)()
    if direction != "fwd":
        outputs = accuracy.shown(outputs, drawn, "bwd")
    assert outputs.keys() == right.keys()
    found = accuracy.errors(outputs, right, case.tokens)
    assert accuracy.within(found, dict.fromkeys(right, bound)), found
    assert accuracy.same(before, drawn.tensors())
    assert backend.kernels(drawn, direction)
