"""Calls that come again on Hopper: from the third on they are launched from a recording, with the same results."""

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from flashqla.ops import chunk_gated_delta_rule, explain, repeats, strict
from flashqla.reference import chunk_gated_delta_rule_reference

RECORDED = repeats.RECORDED_CALL + 1  # calls, the last of which comes from a recording


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "_packs", {})


def make(tokens: int, seed: int = 0, device: str = "cuda", cu_seqlens: Tensor | None = None) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, *sizes: int) -> Tensor:
        return torch.randn(1, tokens, heads, *sizes, device=device, generator=generator)

    return {
        "q": normalize(draw(2, 128), dim=-1).bfloat16(),
        "k": normalize(draw(2, 128), dim=-1).bfloat16(),
        "v": draw(4, 128).bfloat16(),
        "g": logsigmoid(draw(4)) / 16,
        "beta": draw(4).sigmoid(),
        "cu_seqlens": cu_seqlens,
    }


def call(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with strict():
        o, final_state = chunk_gated_delta_rule(**arguments, output_final_state=True)
    assert final_state is not None
    return o, final_state


def call_often(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Results of the first call that comes from a recording."""
    return [call(arguments) for _ in range(RECORDED)][-1]


def recordings() -> int:
    return sum(x.recording is not None for notes in (repeats._known, repeats._packs) for x in notes.values())


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("packed", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [65, 8192])
def test_results_stay_the_same(tokens: int, packed: torch.dtype | None) -> None:
    cu_seqlens = None if packed is None else torch.tensor([0, 20, tokens - 1], dtype=packed, device="cuda")
    first, other = (make(tokens, seed, cu_seqlens=cu_seqlens) for seed in (0, 1))
    assert len(explain(**first).kernels) == (2 if tokens == 65 else 4)
    expected, others = call(first), call(other)
    assert recordings() == 1
    for _ in range(2):
        assert_same(call(first), expected)
        assert_same(call(other), others)
    exact = chunk_gated_delta_rule_reference(**other, output_final_state=True, dtype=torch.float64)
    for found, truth in zip(others, exact, strict=True):
        assert torch.linalg.vector_norm(found - truth) < 5e-3 * torch.linalg.vector_norm(truth)


def differentiate(arguments: dict[str, Any], do: Tensor) -> tuple[Tensor, ...]:
    leaves = {name: arguments[name].detach().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    with strict():
        o, _ = chunk_gated_delta_rule(**arguments | leaves)
        return torch.autograd.grad(o, list(leaves.values()), do)


@pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [65, 8192])
def test_gradients_stay_the_same(tokens: int, packed: torch.dtype | None, beta: torch.dtype) -> None:
    """And so does the memory that they need."""
    cu_seqlens = None if packed is None else torch.tensor([0, 20, tokens - 1], dtype=packed, device="cuda")
    calls = [make(tokens, seed, cu_seqlens=cu_seqlens) for seed in (0, 1)]
    for arguments in calls:
        arguments["beta"] = arguments["beta"].to(beta)
    do = torch.randn(1, tokens, 4, 128, device="cuda").bfloat16()
    peaks = []

    def measured(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        before = torch.cuda.memory_allocated()  # the gradients that are kept count, too
        torch.cuda.reset_peak_memory_stats()
        gradients = differentiate(arguments, do)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return gradients

    expected, others = (measured(arguments) for arguments in calls)
    assert recordings() == 2  # forward and backward
    for _ in range(2):
        assert_same(measured(calls[0]), expected)
        assert_same(measured(calls[1]), others)
    assert max(peaks[3:]) <= max(peaks[:2]) + 2**20


def test_kernels_run_on_the_current_stream() -> None:
    """A call's inputs are made late, on its own stream: a launch on another one would read them too early."""
    arguments = make(8192)
    expected = call_often(arguments)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = {name: None if x is None else torch.zeros_like(x) for name, x in arguments.items()}
        side.synchronize()
        torch.cuda._sleep(20_000_000)
        for name, x in arguments.items():
            if x is not None:
                late[name].copy_(x)
        found = call(late)
    side.synchronize()
    assert recordings() == 1
    assert_same(found, expected)


def test_threads_do_not_share_addresses() -> None:
    inputs = [make(8192, seed) for seed in range(2)]
    expected = [call_often(x) for x in inputs]
    torch.cuda.synchronize()
    right: list[bool] = []

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            right.extend(torch.equal(call(inputs[n])[0], expected[n][0]) for _ in range(100))

    threads = [Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


def test_a_graph_outlives_recordings() -> None:
    """What is captured is laid out anew, in the memory of the graph."""
    static = make(8192)
    call_often(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static)
    repeats._known.clear()
    repeats._packs.clear()
    for name, x in make(8192, seed=1).items():
        if x is not None:
            static[name].copy_(x)
    graph.replay()
    assert_same(call(static), captured)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    arguments = make(8192)
    expected = call(arguments)
    moved = {name: None if x is None else x.to("cuda:1") for name, x in arguments.items()}
    for _ in range(RECORDED):
        assert_same(tuple(x.to("cuda:0") for x in call(moved)), expected)
        assert torch.cuda.current_device() == 0
    for _ in range(RECORDED):
        with torch.cuda.device(1):
            assert_same(tuple(x.to("cuda:0") for x in call(moved)), expected)
    assert recordings() == 1
