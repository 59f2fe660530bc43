"""The work model against numbers worked out by hand, and what the bench table makes of it."""

from collections.abc import Callable

import pytest

from flashqla.cases import Case, suite
from flashqla.records import Record, Run
from flashqla.roofline import floor_ms, forward, rates
from flashqla.tables import bench_page, reached, text

Make = Callable[..., Record]
LONG = Case(2, 8, (32768,), batch=True, model="397B/122B TP8")
SHORT = Case(16, 64, (1024,) * 8, model="397B/122B TP1")
RAGGED = Case(1, 3, (65, 0), initial_state=False, gate_dtype="bfloat16", tail=7)
H200 = "NVIDIA H200"

# Units: chunks * (8 hv + 2 hk) of 1,048,576 FLOP. Bytes: tokens * (q, k + v, o + g, beta) + states in and out.
BY_HAND = [
    (LONG, 512 * (64 + 4) * 1_048_576, 32768 * (1024 + 4096 + 64) + 8 * 65536 * 2),
    (SHORT, 128 * (512 + 32) * 1_048_576, 8192 * (8192 + 32768 + 512) + 8 * 64 * 65536 * 2),
    (RAGGED, 2 * (24 + 2) * 1_048_576, 65 * (512 + 1536 + 12) + 2 * 3 * 65536),  # a partial chunk, states only out
]


@pytest.mark.parametrize(("case", "flops", "moved"), BY_HAND, ids=[case.id for case, *_ in BY_HAND])
def test_work_of_the_forward_pass(case: Case, flops: int, moved: int) -> None:
    work = forward(case)
    assert (work.flops, work.bytes_moved) == (flops, moved)


def test_floor_is_bound_by_tensor_cores_or_by_memory() -> None:
    assert floor_ms(LONG, H200) == pytest.approx(36_507_222_016 / 790e9, rel=1e-12)  # 0.0462 ms
    assert floor_ms(SHORT, H200) == pytest.approx(406_847_488 / 4.3e9, rel=1e-12)  # 0.0946 ms


def test_16_bit_states_halve_what_is_read() -> None:
    narrow = Case(2, 8, (64,), state_dtype="float16", final_state=False)
    assert forward(narrow).bytes_moved == 64 * (1024 + 4096 + 64) + 8 * 16384 * 2


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H20", None])
def test_floor_of_other_devices_is_unknown(gpu: str | None) -> None:
    assert floor_ms(LONG, gpu) is None
    found = rates(LONG, 0.1, gpu)
    assert (found.floor_ms, found.percent) == (None, None)
    assert found.tflops_per_s == pytest.approx(365.07222016)


def test_floor_of_float32_is_unknown_everywhere() -> None:
    assert floor_ms(Case(2, 8, (64,), dtype="float32"), H200) is None


def test_rates_of_a_time() -> None:
    found = rates(SHORT, 0.2, H200)
    assert found.tflops_per_s == pytest.approx(73_014_444_032 / 0.2e9)
    assert found.gb_per_s == pytest.approx(406_847_488 / 0.2e6)
    assert found.percent == pytest.approx(47.3079, abs=1e-4)


def test_every_published_row_has_a_floor() -> None:
    floors = [floor_ms(case, H200) for case in suite("qwen")]
    assert all(floor and 0.002 < floor < 0.4 for floor in floors)


def test_columns_of_the_bench_table(make_run: Callable[..., Run], timed: Make, absent: Make) -> None:
    run = make_run(timed(LONG, "flashqla", 0.1), timed(LONG, "fla", 0.5), absent(SHORT, "flashqla", "failed"))
    with_roofline = text(bench_page(run, roofline=True))
    lines = {line.split()[0]: line.split() for line in with_roofline.splitlines() if line.strip()}
    assert lines["1x32768"][-4:] == ["0.0462", "365", "1709", "46%"]
    assert lines["1024x8"][-4:] == ["-"] * 4
    assert "floor: the larger of FLOPs at 790 TFLOP/s and bytes at 4.3 TB/s, from a cold L2." in with_roofline
    assert "floor" not in text(bench_page(run))


def test_other_devices_have_rates_without_a_floor(make_run: Callable[..., Run], timed: Make) -> None:
    run = make_run(timed(LONG, "flashqla", 0.1))
    other = run.model_copy(update={"environment": run.environment.__class__(**{**vars(run.environment), "gpu": None})})
    table = text(bench_page(other, roofline=True))
    assert next(line for line in table.splitlines() if "1x32768" in line).split()[-3:] == ["0.2000", "365", "1709"]
    assert "of floor" not in table
    assert "floor: not known for this device" in table


def test_wrong_results_and_backward_passes_have_no_rates(timed: Make) -> None:
    record = timed(LONG, "flashqla", 0.1)
    assert reached(record, H200)
    assert reached(record.model_copy(update={"passed": False}), H200) is None
    assert reached(record.model_copy(update={"direction": "bwd"}), H200) is None
    assert reached(record.model_copy(update={"timing": None}), H200) is None
