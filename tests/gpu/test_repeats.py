"""Calls that come again on Hopper: from the third on they are launched from a recording, with the same results, and
where their addresses come again as a CUDA graph."""

import time
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from flashqla.ops import chunk_gated_delta_rule, explain, repeats, strict
from flashqla.ops.kernels import graphs
from flashqla.reference import chunk_gated_delta_rule_reference

RECORDED = repeats.RECORDED_CALL + 1  # calls, the last of which comes from a recording


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "_packs", {})
    monkeypatch.setattr(graphs, "kept", graphs.Graphs())
    monkeypatch.setattr(graphs, "active_count", lambda: 1)  # threads of pytest-xdist wait for no device


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


def settle(arguments: dict[str, Any]) -> None:
    """Call until a graph is launched. No results are kept, so that PyTorch's allocator gives the same memory again."""
    for _ in range(RECORDED + 3):
        call(arguments)
    assert graphs.kept._graphs
    assert not graphs.kept._failed


def launched_as_graphs(monkeypatch: pytest.MonkeyPatch) -> list[graphs.Graph]:
    """Graphs that are launched from now on, in order."""
    launched: list[graphs.Graph] = []
    launch = graphs.Graph.launch

    def noted(graph: graphs.Graph, stream: int) -> None:
        launched.append(graph)
        launch(graph, stream)

    monkeypatch.setattr(graphs.Graph, "launch", noted)
    return launched


def write(static: dict[str, Any], values: dict[str, Any]) -> None:
    for name, x in values.items():
        if x is not None:
            static[name].copy_(x)


@pytest.mark.parametrize("packed", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [65, 8192])
def test_a_graph_reads_what_is_there(monkeypatch: pytest.MonkeyPatch, tokens: int, packed: torch.dtype | None) -> None:
    cu_seqlens = None if packed is None else torch.tensor([0, 20, tokens - 1], dtype=packed, device="cuda")
    inputs = [make(tokens, seed, cu_seqlens=cu_seqlens) for seed in range(3)]
    expected = [call(arguments) for arguments in inputs]
    for arguments, found in zip(inputs, expected, strict=True):
        exact = chunk_gated_delta_rule_reference(**arguments, output_final_state=True, dtype=torch.float64)
        for x, truth in zip(found, exact, strict=True):
            assert torch.linalg.vector_norm(x - truth) < 5e-3 * torch.linalg.vector_norm(truth)
    del found, exact, x, truth
    static = {name: None if x is None else x.clone() for name, x in inputs[0].items()}
    settle(static)
    launched = launched_as_graphs(monkeypatch)
    for _ in range(4):
        for arguments, right in zip(inputs, expected, strict=True):
            for name in ("q", "k", "v", "g", "beta"):
                static[name].copy_(arguments[name])
            assert_same(call(static), right)
    assert len(launched) >= 6  # all but those that the comparisons have moved


@pytest.mark.parametrize("counted", [True, False])
def test_a_graph_reads_offsets_that_were_written(monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    """By a write that PyTorch counts, so that the plan may be another, or by one that only the kernels see."""
    middles = (64, 130, 0)
    arguments = make(256)
    offsets = [torch.tensor([0, middle, 200], dtype=torch.int32, device="cuda") for middle in middles]
    expected = [call(arguments | {"cu_seqlens": cu_seqlens}) for cu_seqlens in offsets]
    arguments["cu_seqlens"] = torch.tensor([0, 20, 200], dtype=torch.int32, device="cuda")
    settle(arguments)
    launched = launched_as_graphs(monkeypatch)
    for _ in range(8):
        for cu_seqlens, right in zip(offsets, expected, strict=True):
            static = arguments["cu_seqlens"]
            (static if counted else static.data).copy_(cu_seqlens)
            assert_same(call(arguments), right)
    assert len(launched) >= 6


def test_graphs_run_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are written late, on that stream: a launch on another one would read them too early."""
    inputs = [make(8192, seed) for seed in range(2)]
    expected = [call(arguments) for arguments in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        static = {name: None if x is None else x.clone() for name, x in inputs[0].items()}
        settle(static)
        launched = launched_as_graphs(monkeypatch)
        for n in (1, 0) * 4:
            side.synchronize()
            torch.cuda._sleep(20_000_000)
            write(static, inputs[n])
            assert_same(call(static), expected[n])
        side.synchronize()
    assert len(launched) >= 4


def test_graphs_are_launched_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one that has done nothing with CUDA before."""
    inputs = [make(8192, seed) for seed in range(2)]
    expected = [call(arguments) for arguments in inputs]
    for arguments in inputs:
        settle(arguments)
    torch.cuda.synchronize()
    monkeypatch.setattr(graphs, "active_count", lambda: 2)
    launched = launched_as_graphs(monkeypatch)
    right: list[bool] = []

    def work(n: int) -> None:
        right.extend(torch.equal(call(inputs[n])[0], expected[n][0]) for _ in range(200))

    for together in ([0], [1], [0, 1]):
        right.clear()
        threads = [Thread(target=work, args=(n,)) for n in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True] * 200 * len(together)
        assert launched


def test_nothing_is_captured_beside_a_thread_that_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # threads count
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(graphs, "kept", graphs.Graphs())
    over, errors = [], []

    def wait() -> None:
        while not over:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                errors.append(error)
                return

    thread = Thread(target=wait)
    thread.start()
    for seed in range(20):
        arguments = make(65, seed)
        for _ in range(RECORDED + 3):
            call(arguments)
    over.append(True)
    thread.join()
    assert not errors
    assert not graphs.kept._graphs


def test_results_that_are_kept_stay_as_they_are() -> None:
    """Their memory is not given again, so that the graph is not for the calls that follow."""
    arguments = make(8192)
    expected = tuple(x.clone() for x in call(arguments))
    settle(arguments)
    kept = [call(arguments) for _ in range(20)]
    settle(arguments)
    for found in kept:
        assert_same(found, expected)


def test_graphs_that_are_destroyed_while_they_run_do_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "RUNS_PER_CAPTURE", 0)
    inputs = [make(8192, seed) for seed in range(6)]
    expected = [tuple(x.clone() for x in call(arguments)) for arguments in inputs]
    for _ in range(5):
        for arguments, right in zip(inputs, expected, strict=True):
            for _ in range(4):
                torch.cuda._sleep(200_000)
                found = call(arguments)
            assert_same(found, right)
            del found
    assert len(graphs.kept._graphs) == 2
    assert not graphs.kept._failed


def test_gradients_from_graphs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(8192)
    do = torch.randn(1, 8192, 4, 128, device="cuda").bfloat16()
    expected = tuple(x.clone() for x in differentiate(arguments, do))
    for _ in range(RECORDED + 3):
        differentiate(arguments, do)
    launched = launched_as_graphs(monkeypatch)
    for seed in (0, 1, 0):
        write(arguments, make(8192, seed))
        found = differentiate(arguments, do)
        if seed == 0:
            assert_same(found, expected)
        del found
    assert launched
    assert not graphs.kept._failed


def test_a_graph_of_the_user_holds_none_of_ours() -> None:
    static = make(8192)
    settle(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(static)
    graphs.kept = graphs.Graphs()  # ours are destroyed
    other = make(8192, seed=1)
    expected = call(other)
    write(static, other)
    for _ in range(2):
        graph.replay()
        assert_same(captured, expected)


@pytest.mark.parametrize("tokens", [65, 8192])
def test_host_time_of_a_repeated_call(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, and not judged: it is the machine's."""
    arguments = make(tokens)
    kernels = len(explain(**arguments).kernels)
    times: dict[str, float] = {}

    def measure(how: str) -> None:
        for _ in range(RECORDED + 3):
            call(arguments)
        best = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(200):
                chunk_gated_delta_rule(**arguments, output_final_state=True)
            best.append((time.perf_counter() - begin) / 200 * 1e6)
        times[how] = min(best)

    with torch.no_grad():
        graphs.kept._failed = True
        measure("one by one")
        graphs.kept._failed = False
        measure("as a graph")
    assert graphs.kept._graphs
    with capsys.disabled():
        told = ", ".join(f"{value:.1f} us {how}" for how, value in times.items())
        print(f"\nhost time of a call with {kernels} kernels: {told}")  # noqa: T201


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
