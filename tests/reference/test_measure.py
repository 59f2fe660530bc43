"""Measuring: statistics, order and budget; on the CPU the whole of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from flashqla import measure
from flashqla.device import Clocks
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
    readings = measure.interleaved(calls, FAST, "cpu")
    assert "".join(order) == "ABCCBA" * 3
    assert list(readings) == list("ABC")
    assert all(reading.timing and len(reading.timing.samples) == 6 for reading in readings.values())
    assert [reading.outputs for reading in readings.values()] == list("ABC")


def test_the_wall_clock_measures_the_call_alone() -> None:
    calls = {"slow": lambda: time.sleep(0.01), "fast": lambda: time.sleep(0.002)}
    slow, fast = (reading.timing for reading in measure.interleaved(calls, FAST, "cpu").values())
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
    readings = measure.interleaved(calls, FAST, "cpu", turn=slowly)
    assert "".join(told) == "ABBA" * 3
    assert all(1 <= reading.timing.gpu_ms_min < 8 for reading in readings.values() if reading.timing)


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    turns = iter(range(100))

    def fails_at_its_second_turn() -> None:
        if next(turns) == 1:
            raise RuntimeError("no more")

    readings = measure.interleaved({"bad": fails_at_its_second_turn, "good": lambda: 1}, FAST, "cpu")
    assert str(readings["bad"].error) == "no more"
    assert readings["bad"].timing is None
    assert readings["good"].error is None
    assert readings["good"].timing.repeats == 6


def test_a_row_ends_when_its_budget_is_spent() -> None:
    readings = measure.interleaved({"slow": lambda: time.sleep(0.01)}, replace(FAST, budget_s=0.0), "cpu")
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
    assert measure.kernel_names(dot) == ("forward_kernel", "add")
    assert measure.kernel_names("") == ()


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("chunk_fwd_kernel_o", "chunk_fwd_kernel_o"),
        ("void at::native::fill<4, at::F<float>, std::array<char*, 1ul> >(int, at::F<float>)", "at::native::fill"),
        (
            "void (anonymous namespace)::indexed<int, at::arange(at::Tensor&)::{lambda()#1}::operator()() const>(int)",
            "indexed",
        ),
        ("<>", "<>"),
    ],
)
def test_a_kernel_has_a_short_name(signature: str, name: str) -> None:
    assert measure._function_name(signature) == name


class Card:
    """A device that keeps a log of what it is told, and an allocator that counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.allocated = self.peak = 1000  # the inputs
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                card.log.append("|")

            def synchronize(self) -> None:
                card.log.append("wait")

            def elapsed_time(self, later: "Event") -> float:
                return 0.5

        @contextmanager
        def meter(index: int) -> Iterator[Callable[[], Clocks]]:
            def read() -> Clocks:
                card.log.append("clocks")
                return Clocks(1000 + len(card.log), None, None, None, ["power cap"] if card.log[-2] == "B" else [])

            yield read

        for name, function in {
            "device": nullcontext,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "_sleep": lambda cycles: None,
            "Event": Event,
            "memory_allocated": lambda: card.allocated,
            "max_memory_allocated": lambda: card.peak,
            "reset_peak_memory_stats": self.reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(measure.machine, "meter", meter)
        monkeypatch.setattr(measure, "_flush", lambda: card.log.append("flush"))

    def reset(self) -> None:
        self.peak = self.allocated

    def allocate(self, number: int) -> None:
        self.allocated += number
        self.peak = max(self.peak, self.allocated)

    def call(self, name: str, scratch: int, kept: torch.Tensor | None = None) -> measure.Call:
        def run() -> dict[str, torch.Tensor]:
            self.log.append(name)
            self.allocate(scratch)
            self.allocate(-scratch)
            if kept is None:
                self.allocate(40)  # and nobody frees it
            return {"o": torch.zeros(10) if kept is None else kept}

        return run


@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_clocks_are_read_for_every_call_and_outside_of_what_is_timed(
    monkeypatch: pytest.MonkeyPatch, l2: measure.L2
) -> None:
    card = Card(monkeypatch)
    calls = {name: card.call(name, 0) for name in "ABC"}
    readings = measure.interleaved(calls, Config(repeats=4, l2=l2, graph=False), "cuda:0")
    assert all(len(reading.timing.samples) == 4 for reading in readings.values() if reading.timing)
    for at, word in enumerate(card.log):
        if word == "clocks":
            assert card.log[:at].count("|") % 2 == 0  # no span is open
            assert "|" not in card.log[at:]  # and no sample comes after it
    tail = card.log[max(at for at, word in enumerate(card.log) if word == "wait") + 1 :]
    assert [word for word, next_one in zip(tail, [*tail[1:], ""], strict=True) if word != next_one] == [
        "A", "clocks", "B", "clocks", "C", "clocks",
    ]  # fmt: skip
    found = [readings[name].clocks for name in "ABC"]
    assert [reading.throttle for reading in found if reading] == [[], ["power cap"], []]
    assert len({reading.sm_mhz for reading in found if reading}) == 3


def test_graphs_are_captured_where_their_calls_were_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd goes back on the stream of its forward pass: on another one the capture would miss it."""
    card = Card(monkeypatch)
    now = ["default"]
    made = iter("abcd")
    captured: list[str] = []

    class Stream:
        def __init__(self, device: str | None = None, name: str = "") -> None:
            self.name = name or next(made)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.name == other.name

        def wait_stream(self, other: "Stream") -> None:
            card.log.append(f"{self.name} waits for {other.name}")

        def synchronize(self) -> None:
            pass

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        now.append(stream.name)
        yield
        now.pop()

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            assert keep_graph  # or nothing is left to dump

        def enable_debug_mode(self) -> None:
            pass

        def capture_begin(self) -> None:
            captured.append(now[-1])

        def capture_end(self) -> None:
            pass

        def replay(self) -> None:
            pass

        def debug_dump(self, path: str) -> None:
            raise RuntimeError("no dump")

    for name, stand_in in {
        "Stream": Stream,
        "stream": inside,
        "CUDAGraph": Graph,
        "current_stream": lambda device=None: Stream(name=now[-1]),
        "default_stream": lambda: Stream(name="default"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    calls = {name: card.call(name, 0) for name in "AB"}
    with measure.side_stream("cuda:0"):
        assert now[-1] == "a"
        readings = measure.interleaved(calls, Config(repeats=3), "cuda:0")
    assert captured == ["a", "a"]
    assert {reading.timing.clock for reading in readings.values() if reading.timing} == {"graph"}
    assert (card.log[0], card.log[-1]) == ("a waits for default", "default waits for a")
    measure.interleaved(calls, Config(repeats=3), "cuda:0")
    assert captured[2:] == ["b", "c"]  # the default stream cannot be captured
    with measure.side_stream("cpu"):
        assert now == ["default"]


def test_a_call_that_no_graph_can_hold_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    reading = measure.interleaved({"A": card.call("A", 0)}, FAST, "cuda:0", uncapturable={"A": "it reads lengths"})["A"]
    assert reading.timing
    assert (reading.timing.clock, reading.note) == ("events", "no CUDA graph: it reads lengths")


def test_slow_calls_are_waited_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.4, 1.0, 1.4, 2.0, 2.4, 3.0, 3.4])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[int] = []
    assert measure._eager_ms(lambda: calls.append(1), cold=False) == pytest.approx(400)
    assert len(calls) == 3  # 1.2 s are enough


def test_reading_clocks_takes_a_few_milliseconds_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = measure._Sampler(lambda: launches.append(1), "graph", 1.0, 0, None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    taken = []
    for each_ms in (0.0, 0.3, 1.9, 50.0):
        launches: list[int] = []
        event = type("Event", (), {"elapsed_time": lambda self, other, ms=each_ms: ms})()
        sampler.events = [(event, event)]
        assert measure._clocks(sampler, lambda: None) is None
        taken.append(len(launches))
    assert taken == [measure.READING_LAUNCHES, 7, 2, 1]


def test_peak_memory_counts_scratch_and_outputs_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    kept = torch.zeros(25)
    calls = {
        "scratch, then an output": card.call("A", 300),
        "an output": card.call("B", 0),
        "an output in memory of its own": card.call("C", 70, kept),
        "a view of it": card.call("D", 0, kept[:5]),
    }
    readings = measure.interleaved(calls, Config(repeats=3, graph=False), "cuda:0")
    assert [readings[name].peak_bytes for name in calls] == [300, 40, 70 + 100, 100]
