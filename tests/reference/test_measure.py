"""Measuring: statistics, order and budget; on the CPU the whole of it."""

import time
from dataclasses import replace

import pytest

from flashqla import measure
from flashqla.errors import FlashqlaError
from flashqla.measure import Config

FAST = Config(repeats=6)


def test_a_summary_keeps_the_samples_in_order() -> None:
    timing = measure.summary([3.0, 1.0, 2.0, 5.0, 4.0], call_ms=7.0, l2="cold", clock="graph")
    assert (timing.gpu_ms, timing.gpu_ms_min, timing.gpu_ms_iqr, timing.repeats) == (3.0, 1.0, 2.0, 5)
    assert timing.samples == [3.0, 1.0, 2.0, 5.0, 4.0]
    assert (timing.call_ms, timing.l2, timing.clock) == (7.0, "cold", "graph")


def test_a_spread_takes_five_samples() -> None:
    assert measure.summary([1.0, 2.0, 3.0, 4.0], call_ms=None, l2="warm", clock="events").gpu_ms_iqr is None


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_a_time_that_cannot_be_is_an_error(samples: list[float]) -> None:
    with pytest.raises(FlashqlaError, match="not positive"):
        measure.summary(samples, call_ms=None, l2="warm", clock="events")


def test_slow_calls_get_fewer_rounds() -> None:
    config = Config(repeats=12, budget_s=1.0)
    assert [measure.rounds(config, row_ms) for row_ms in (0.0, 50.0, 125.0, 1e6)] == [12, 12, 8, 3]
    assert measure.rounds(Config(repeats=2), 1e6) == 2


def test_calls_take_turns_in_alternating_order() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) or name for name in "ABC"}
    readings = measure.interleaved(calls, FAST, "cpu").by_name
    assert "".join(order) == "ABCCBA" * 3
    assert list(readings) == list("ABC")
    assert all(reading.timing and len(reading.timing.samples) == 6 for reading in readings.values())
    assert [reading.outputs for reading in readings.values()] == list("ABC")


def test_the_wall_clock_measures_the_call_alone() -> None:
    calls = {"slow": lambda: time.sleep(0.01), "fast": lambda: time.sleep(0.002)}
    slow, fast = (reading.timing for reading in measure.interleaved(calls, FAST, "cpu").by_name.values())
    assert slow
    assert fast
    assert (slow.clock, slow.l2) == ("wall", "warm")
    assert 10 <= slow.gpu_ms_min <= slow.gpu_ms
    assert 2 <= fast.gpu_ms_min < 10


def test_turns_are_told_and_not_timed() -> None:
    told: list[str] = []

    def slowly(name: str) -> None:
        told.append(name)
        time.sleep(0.01)

    calls = {name: lambda: time.sleep(0.001) for name in "AB"}
    readings = measure.interleaved(calls, FAST, "cpu", turn=slowly).by_name
    assert "".join(told) == "ABBA" * 3
    assert all(1 <= reading.timing.gpu_ms_min < 8 for reading in readings.values() if reading.timing)


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    turns = iter(range(100))

    def fails_at_its_second_turn() -> None:
        if next(turns) == 1:
            raise RuntimeError("no more")

    readings = measure.interleaved({"bad": fails_at_its_second_turn, "good": lambda: 1}, FAST, "cpu").by_name
    assert str(readings["bad"].error) == "no more"
    assert readings["bad"].timing is None
    assert readings["good"].error is None
    assert readings["good"].timing.repeats == 6


def test_a_row_ends_when_its_budget_is_spent() -> None:
    readings = measure.interleaved({"slow": lambda: time.sleep(0.01)}, replace(FAST, budget_s=0.0), "cpu").by_name
    assert readings["slow"].timing.repeats == measure.MIN_ROUNDS


def test_kernels_are_named_from_a_dumped_graph() -> None:
    dot = r"""
digraph dot {
subgraph cluster_1 {
label="graph_1"
"graph_1_node_0"[style="solid" shape="record" label="{KERNEL
| {ID | 0 (topoId: 3) | forward_kernel\<\<\<64,384,221184\>\>\>}
| {{node handle | func handle} | {0x55d0 | 0x55d1}}
}"];
"graph_1_node_1"[style="solid" shape="record" label="{MEMSET
| {{ID | node handle | dptr} | {1 (topoId: 2) | 0x55 | 0x7f}}
}"];
"graph_1_node_2"[style="bold" shape="octagon" label="2
_Z3addPfi\<\<\<1,128,0\>\>\>"];
"graph_1_node_3"[style="bold" shape="octagon" label="3
forward_kernel\<\<\<64,384,0\>\>\>"];
"graph_1_node_0" -> "graph_1_node_1";
}
}"""
    assert measure.kernel_names(dot) == ("forward_kernel", "add(float*, int)")
    assert measure.kernel_names("") == ()
