"""Backends and measuring on a GPU: each peer right against float64, and timed through a graph that holds its call."""

from dataclasses import replace

import pytest
import torch

from flashqla import accuracy, backends, inputs, measure, runner
from flashqla.backends import Backend
from flashqla.cases import Case, Direction
from flashqla.device import PEERS
from flashqla.measure import Config
from flashqla.records import Record

CASES = {
    "packed, mixed gates, a tail": Case(2, 8, (130, 64, 73), tail=7),
    "dense batch, V-first, bf16 gates and state": Case(
        4, 4, (192, 192), batch=True, gate="typical", gate_dtype="bfloat16", state_dtype="bfloat16", state_v_first=True
    ),
}
# Peers round the cumulative gate, the states of a split or more to 16 bits: enough to tell a convention that is wrong.
RIGHT = 2e-2


def peer(name: str) -> Backend:
    (backend,) = backends.create([name], "cuda")
    if reason := backend.missing():
        pytest.skip(f"{name}: {reason}")
    return backend


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_right(name: str, case: Case) -> None:
    backend = peer(name)
    assert backend.unsupported(case, "fwd") is None
    assert_right(backend, case, "fwd")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["flashqla", "fla", "flash-qla"])
def test_gradients_are_right(name: str, case: Case) -> None:
    backend = peer(name)
    if name == "fla":  # what stands behind the last sequence gets into its gradients, NaN here
        case = replace(case, tail=0)
    if name == "flash-qla" and case.gate_dtype != "float32":
        assert "float32" in str(backend.unsupported(case, "bwd"))
        case = replace(case, gate_dtype="float32")
    assert backend.unsupported(case, "bwd") is None
    assert_right(backend, case, "bwd")


def assert_right(backend: Backend, case: Case, direction: Direction) -> None:
    drawn = inputs.make(case, 0, "cuda", direction)
    before = accuracy.snapshot(drawn.tensors())
    right = accuracy.truth(drawn, direction).outputs
    with torch.no_grad():
        outputs = accuracy.shown(backend.prepare(drawn, direction)(), drawn, direction)
    assert outputs.keys() == right.keys()
    found = accuracy.errors(outputs, right, case.tokens)
    assert accuracy.within(found, dict.fromkeys(right, RIGHT)), found
    assert accuracy.same(before, drawn.tensors())


@pytest.mark.parametrize("l2", ["cold", "warm"])
@pytest.mark.parametrize("name", ["flashqla", *PEERS])
def test_a_graph_holds_the_call(name: str, l2: measure.L2) -> None:
    """The outputs of the last replay are right, on inputs that were changed after the capture."""
    backend = peer(name)
    drawn = inputs.make(Case(2, 8, (1000, 200)), 0, "cuda")
    with torch.no_grad():
        call = backend.prepare(drawn, "fwd")
        readings = measure.interleaved({name: call}, Config(repeats=6, l2=l2), "cuda")
        reading = readings[name]
        assert reading.error is None
        assert reading.timing
        assert (reading.timing.clock, reading.timing.l2, reading.note) == ("graph", l2, None)
        assert len(reading.timing.samples) == 6
        assert 0 < reading.timing.gpu_ms_min <= reading.timing.gpu_ms < 100
        assert 0 < reading.timing.call_ms < 100
        assert reading.kernels
        drawn.v.mul_(0.5)
        drawn.initial_state.mul_(0.5)
        if name != "flashinfer":  # its initial state is a copy in its own layout
            reading.owner.replay()
            found = accuracy.errors(reading.outputs, accuracy.truth(drawn).outputs, 1200)
            assert accuracy.within(found, dict.fromkeys(found, RIGHT)), found


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", ["fla", "flash-qla"])
def test_a_graph_holds_a_backward_pass(name: str, direction: Direction) -> None:
    """It is captured on the stream of its forward pass, and a replay gives what the eager call gives."""
    backend = peer(name)
    drawn = inputs.make(Case(2, 8, (1000, 200)), 0, "cuda", direction)
    with torch.no_grad(), measure.side_stream("cuda"):
        call = backend.prepare(drawn, direction)
        eager = accuracy.snapshot(call())
        reading = measure.interleaved({name: call}, Config(repeats=6), "cuda")[name]
    assert reading.error is None
    assert reading.timing
    assert (reading.timing.clock, reading.note) == ("graph", None)
    assert reading.kernels
    assert 0 < reading.timing.gpu_ms_min <= reading.timing.gpu_ms < 100
    found = accuracy.errors(reading.outputs, eager, 1200)
    assert accuracy.within(found, dict.fromkeys(found, 1e-3)), found
    assert reading.peak_bytes >= sum(x.nbytes for x in (drawn.q, drawn.k, drawn.v))  # gradients alone


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_a_row_of_bench_of_gradients(direction: Direction) -> None:
    records: list[Record] = []
    chosen = backends.create(backends.defaults("bench", "cuda"), "cuda")
    case = Case(4, 8, (1844, 204), model="35B/9B/4B TP4")
    runner.bench(
        [case], chosen, "cuda", records.append, direction=direction, config=Config(repeats=6), compile_ahead=False
    )
    runner.verify([case], chosen, "cuda", records.append, direction="bwd", compile_ahead=False)
    for record in records:
        if record.backend == "flashinfer":
            assert record.status in ("unsupported", "missing")
        elif record.status != "missing":
            assert record.status == "ok", record
            assert record.passed or (record.command == "verify" and record.backend in PEERS), record
    timed = [record for record in records if record.timing]
    assert timed
    for record in timed:
        assert record.peak_bytes
        assert (record.saved_bytes is not None) == (direction == "bwd")
        if record.backend in PEERS:
            assert record.timing.clock == "graph"


def test_a_call_that_synchronises_is_timed_with_events() -> None:
    x = torch.ones(2**20, device="cuda")

    def call() -> float:
        return x.sum().item()

    reading = measure.interleaved({"sync": call}, Config(repeats=6), "cuda")["sync"]
    assert reading.timing
    assert reading.timing.clock == "events"
    assert reading.note.startswith("no CUDA graph: ")
    assert reading.outputs == 2**20
    # The device still works, and so does the next capture.
    after = measure.interleaved({"sum": lambda: x.sum()}, Config(repeats=6), "cuda")["sum"]
    assert after.timing
    assert after.timing.clock == "graph"
    assert len(after.kernels) >= 1


def test_peak_memory_is_that_of_the_call() -> None:
    x, kept = torch.ones(2**20, device="cuda"), torch.empty(2**20, device="cuda")
    calls = {
        "scratch and output": lambda: {"o": (x * 2) + 1},
        "output in memory of its own": lambda: {"o": torch.mul(x, 2, out=kept)},
        "nothing": lambda: {"o": x},
    }
    readings = measure.interleaved(calls, Config(repeats=3), "cuda")
    assert [readings[name].peak_bytes for name in calls] == [2 * 2**22, 2**22, 2**22]


def test_clocks_are_read_for_every_call() -> None:
    x = torch.ones(2**24, device="cuda")
    calls = {"sum": lambda: x.sum(), "slow sum": lambda: [x.sum() for _ in range(99)][-1], "sync": lambda: x[0].item()}
    for reading in measure.interleaved(calls, Config(repeats=3), "cuda").values():
        assert reading.clocks
        assert reading.clocks.sm_mhz > 0
        assert 0 < reading.clocks.temperature_c < 120
        assert reading.clocks.power_w > 0
        assert reading.clocks.throttle is not None


def test_a_row_of_bench_and_of_verify() -> None:
    records: list[Record] = []
    chosen = backends.create(backends.defaults("bench", "cuda"), "cuda")
    case = Case(2, 8, (2048,), batch=True, model="397B/122B TP8")
    runner.bench([case], chosen, "cuda", records.append, config=Config(repeats=6), compile_ahead=False)
    runner.verify([case], chosen, "cuda", records.append, compile_ahead=False)
    assert [r.backend for r in records] == 2 * [backend.name for backend in chosen]
    for record in records:
        if record.status == "missing":
            continue
        assert (record.status, record.passed) == ("ok", True), record
        assert record.kernels
        assert record.kernels_from == ["backend", *["graph"] * (record.command == "bench")]
    timed = [record for record in records if record.timing]
    assert timed
    assert all(record.timing.clock == "graph" for record in timed)
    for record in timed:
        assert record.clocks
        assert record.clocks.sm_mhz > 0
        assert record.peak_bytes >= case.tokens * case.hv * 128 * 2  # o alone
    assert all(record.runs == 2 for record in records if record.command == "verify" and record.status == "ok")
