"""What the host asks for: which kernels, whatever the sizes, with arguments as they declare them. Compiles nothing."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqla.device import HOPPER
from flashqla.ops import checks, chunk_gated_delta_rule, gated_delta_rule, plan
from flashqla.ops.kernels import launch, launch_backward

Key = tuple[Any, ...]  # a kernel's name, and the arguments of its builder
HEADS = [(1, 1), (2, 8), (4, 4), (6, 12), (16, 32)]
LENGTHS = [(1,), (64, 65), (0, 130, 3), (20000,)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Key, tuple[Any, ...]]]:
    """Launches, in order, none of which happens."""
    seen: list[tuple[Key, tuple[Any, ...]]] = []

    def kernel(*key: Any) -> Callable[..., None]:
        return lambda *arguments: seen.append((key, arguments))

    monkeypatch.setattr(launch, "_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def drawn(
    hk: int,
    hv: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    offset_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v, gate, offsets and initial state on the CPU, which nobody reads. Without offset_dtype a batch."""
    rows = (len(lengths), lengths[0]) if offset_dtype is None else (1, sum(lengths))
    q, k = torch.empty(2, *rows, hk, 128, dtype=dtype)
    v = torch.empty(*rows, hv, 128, dtype=dtype)
    beta = torch.empty(*rows, hv, dtype=gate_dtype)
    offsets = None if offset_dtype is None else torch.tensor([0, *accumulate(lengths)], dtype=offset_dtype)
    state = None if state_dtype is None else torch.empty(len(lengths), hv, 128, 128, dtype=state_dtype)
    return q, k, v, beta, offsets, state


def run(
    hk: int = 2,
    hv: int = 4,
    lengths: tuple[int, ...] = (130, 3),
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = torch.float32,
    offset_dtype: torch.dtype | None = torch.int32,
    gated: bool = True,
    output_final_state: bool = True,
    l2norm: bool = False,
    state_v_first: bool = False,
    output_h: bool = False,
) -> None:
    """A forward call planned for a Hopper GPU."""
    q, k, v, g, offsets, state = drawn(hk, hv, lengths, dtype, gate_dtype, state_dtype, offset_dtype)
    beta = g.to(beta_dtype or gate_dtype)
    options = (None, state, output_final_state, l2norm, offsets, state_v_first, True, None)
    problem = checks.problem(q, k, v, g if gated else None, beta, *options, output_h=output_h)
    chosen = plan.make(hv=hv, seqlens=problem.seqlens, dtype=checks.DTYPES[dtype])
    launch.forward(problem, chosen, output_g=output_h)


def run_backward(
    hk: int = 2,
    hv: int = 4,
    lengths: tuple[int, ...] = (130, 3),
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = torch.float32,
    offset_dtype: torch.dtype | None = torch.int32,
    gated: bool = True,
    dht: bool = True,
    l2norm: bool = False,
    state_v_first: bool = False,
    saved: bool = False,
) -> launch_backward.Backward:
    """A backward call planned for a Hopper GPU."""
    q, k, v, g, offsets, state = drawn(hk, hv, lengths, dtype, gate_dtype, state_dtype, offset_dtype)
    beta = g.to(beta_dtype or gate_dtype)
    options = (None, state, dht, l2norm, offsets, state_v_first, True, None)
    problem = checks.problem(q, k, v, g if gated else None, beta, *options)
    chosen = plan.make(hv=hv, seqlens=problem.seqlens, dtype=checks.DTYPES[dtype], direction="backward")
    rows = v.shape[:3]
    given = (torch.empty(rows), torch.empty(*rows, 64, dtype=dtype)) if saved else None
    do = torch.ones((), dtype=dtype).expand(v.shape)
    return launch_backward.backward(
        problem, chosen, do, torch.empty(len(lengths), hv, 128, 128) if dht else None, given, 132
    )


def test_sizes_need_no_kernels_of_their_own(calls: list[tuple[Key, Any]]) -> None:
    for hk, hv in HEADS:
        for lengths in LENGTHS:
            for l2norm in (False, True):
                run(hk, hv, lengths, l2norm=l2norm)
    asked = {key for key, _ in calls}
    assert {key[:2] for key in asked if key[0] == "forward"} == {("forward", 64), ("forward", 128)}


@pytest.mark.parametrize("directions", [("fwd",), ("bwd",), ("fwd", "bwd")], ids="+".join)
def test_compile_all_compiles_what_calls_ask_for(
    calls: list[tuple[Key, Any]], monkeypatch: pytest.MonkeyPatch, directions: tuple[str, ...]
) -> None:
    dtypes = [torch.bfloat16, torch.float16]
    for dtype, (hk, hv), lengths, l2norm, beta_dtype in product(
        dtypes, HEADS, LENGTHS, (False, True), (torch.float32, None)
    ):
        options: dict[str, Any] = {"dtype": dtype, "l2norm": l2norm, "beta_dtype": beta_dtype or dtype}
        if "fwd" in directions:
            run(hk, hv, lengths, **options)
        if "bwd" in directions:
            run_backward(hk, hv, lengths, **options)
            if not l2norm:  # what a forward pass saved is for keys that are normalised already
                run_backward(hk, hv, lengths, **options, saved=True)
    compiled: list[Key] = []
    monkeypatch.setattr(launch, "_kernel", lambda *key: compiled.append(key))
    launch.compile_all(tuple(checks.DTYPES[dtype] for dtype in dtypes), directions)
    assert sorted(compiled) == sorted({key for key, _ in calls})


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("hv", [4, 32])
@pytest.mark.parametrize(
    ("l2norm", "beta_dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
def test_a_training_step_finds_its_kernels_compiled(
    calls: list[tuple[Key, Any]],
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    hv: int,
    l2norm: bool,
    beta_dtype: torch.dtype,
) -> None:
    """What the op and autograd launch, here on tensors that are taken to be on a Hopper GPU."""
    q, k, v, g, offsets, _ = drawn(2, hv, lengths, torch.bfloat16, torch.float32, None, torch.int32)
    q, k, v, g, beta = (x.requires_grad_() for x in (q, k, v, g, g.to(beta_dtype, copy=True)))
    monkeypatch.setattr(gated_delta_rule, "_plan", planned)
    monkeypatch.setattr(gated_delta_rule, "_device_facts", lambda device: (HOPPER, 132, ""))
    monkeypatch.setattr(gated_delta_rule, "_on", lambda device: nullcontext())
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets, use_qk_l2norm_in_kernel=l2norm)
    o.sum().backward()
    needed = {key for key, _ in calls}
    assert {"forward", "chain", "gradients"} <= {key[0] for key in needed}

    compiled: set[Key] = set()
    monkeypatch.setattr(launch, "_kernel", lambda *key: compiled.add(key))
    launch.compile_all()
    assert needed <= compiled


def planned(problem: checks.Problem, direction: plan.Direction = "forward") -> plan.Plan:
    return plan.make(hv=problem.hv, seqlens=problem.seqlens, direction=direction)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="packed"),
        pytest.param({"offset_dtype": None, "lengths": (65, 65)}, id="batch"),
        pytest.param({"offset_dtype": torch.int64}, id="int64-offsets"),
        pytest.param({"lengths": (20000,)}, id="split"),
        pytest.param({"hv": 64, "lengths": (640,) * 3}, id="v-tile-128"),
        pytest.param({"gated": False, "state_dtype": None, "output_final_state": False}, id="nothing-optional"),
        pytest.param({"state_v_first": True, "output_h": True}, id="v-first-h"),
        pytest.param({"gate_dtype": torch.float16, "state_dtype": torch.bfloat16, "l2norm": True}, id="16-bit"),
    ],
)
def test_arguments_are_as_declared(calls: list[tuple[Key, tuple[Any, ...]]], options: dict[str, Any]) -> None:
    run(**options)
    assert [key[0] for key, _ in calls][:: len(calls) - 1] == ["inverse", "forward"]
    assert_arguments(calls, {("forward", "h_handle")})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="packed"),
        pytest.param({"saved": True}, id="saved"),
        pytest.param({"offset_dtype": None, "lengths": (65, 65)}, id="batch"),
        pytest.param({"offset_dtype": torch.int64}, id="int64-offsets"),
        pytest.param({"lengths": (20000,)}, id="split"),
        pytest.param({"hv": 64, "lengths": (640,) * 3}, id="v-tile-128"),
        pytest.param({"gated": False, "state_dtype": None, "dht": False}, id="nothing-optional"),
        pytest.param({"state_v_first": True}, id="v-first"),
        pytest.param({"gate_dtype": torch.float16, "state_dtype": torch.bfloat16, "l2norm": True}, id="16-bit"),
    ],
)
def test_backward_arguments_are_as_declared(calls: list[tuple[Key, tuple[Any, ...]]], options: dict[str, Any]) -> None:
    results = run_backward(**options)
    kernels = (plan.SPLIT_KERNELS if options.get("lengths") == (20000,) else plan.KERNELS)["backward"]
    assert [key[0] for key, _ in calls] == [("records" if options.get("saved") else "inverse"), *kernels[1:]]
    assert [key[1] for key, _ in calls if key[0] == "chain"][-2:] == ["reverse", "forward"]
    assert_arguments(calls, {("chain", f"{name}_handle") for name in ("q", "leaving", "states", "y")})
    gate_dtype = options.get("gate_dtype", torch.float32)
    assert results.dbeta.dtype == gate_dtype
    assert (results.dg is None) == (not options.get("gated", True))
    state_dtype = options.get("state_dtype", torch.float32)
    assert (None if results.dinitial_state is None else results.dinitial_state.dtype) == state_dtype


def assert_arguments(calls: list[tuple[Key, tuple[Any, ...]]], absent: set[tuple[str, str]]) -> None:
    """What the calls pass is what the kernels declare; `absent`, by kernel and parameter, may be None."""
    for (name, *choices), arguments in calls:
        program = launch._builder(name).get_tir(*choices)
        sizes: dict[str, int] = {}  # of dimensions that tensors share, and of strides
        for value, parameter in zip(arguments, program.params, strict=True):
            if parameter not in program.buffer_map:
                assert type(value) is {"int32": int, "float32": float}[str(parameter.dtype)], parameter
            elif value is None:
                assert (name, parameter.name) in absent
            else:
                buffer = program.buffer_map[parameter]
                assert str(value.dtype) == f"torch.{buffer.dtype}", buffer
                assert_fits(value, buffer, sizes)


def assert_fits(value: Tensor, buffer: Any, sizes: dict[str, int]) -> None:
    assert value.is_contiguous() or len(buffer.strides)
    for found, declared in [
        *zip(value.shape, buffer.shape, strict=True),
        *zip(value.stride() if len(buffer.strides) else (), buffer.strides, strict=True),
    ]:
        fixed = getattr(declared, "value", None)
        assert found == (sizes.setdefault(str(declared), found) if fixed is None else int(fixed)), (buffer, declared)


def test_offsets_of_a_batch_outlive_the_graphs_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for kept in ("_kept_offsets", "_offsets_of_graphs"):
        monkeypatch.setattr(launch, kept, {})
    cpu = torch.device("cpu")
    offsets = launch._even_offsets(3, 5, cpu)
    assert offsets.tolist() == [0, 5, 10, 15]
    assert offsets.dtype == torch.int32
    assert launch._even_offsets(3, 5, cpu) is offsets
    capturing = True
    assert launch._even_offsets(3, 5, cpu) is offsets
    first, second = (launch._even_offsets(3, 6, cpu) for _ in range(2))  # in the memory of two graphs
    assert first is not second
    assert first.tolist() == second.tolist() == [0, 6, 12, 18]
    capturing = False
    for tokens in range(6, 6 + launch._KEPT_OFFSETS):
        launch._even_offsets(3, tokens, cpu)
    assert len(launch._kept_offsets) == launch._KEPT_OFFSETS
    assert launch._even_offsets(3, 5, cpu) is offsets


INTERRUPTED_PROOF = """
import os, signal, threading, time
from flashqla.signals import keep_from_z3
import tilelang, z3

got = []
keep_from_z3()
signal.signal(signal.SIGINT, lambda *arguments: got.append(arguments))
solver = z3.Solver()
solver.set("timeout", 1000)
x, y = z3.BitVecs("x y", 128)
solver.add(x * y == (2**61 - 1) * (2**31 - 1) * 2**20 + 1, z3.UGT(x, 1), z3.UGT(y, 1), z3.BVMulNoOverflow(x, y, False))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
solver.check()
assert time.monotonic() - begin > 0.3, "too easy a proof"
print(len(got))
"""


def test_ctrl_c_amid_a_proof_of_tilelang_is_not_lost() -> None:
    """Kernels compile in threads, so that it is lost or not by chance; a proof in z3 itself is always hit."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_PROOF], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
