"""What runs, with which tiles, and that the plan says why. No torch, no GPU."""

import random
import re
import subprocess
import sys
import time

import pytest

from flashqla.ops import plan


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"device": "cpu", "capability": None}, "tensors are on cpu"),
        ({"capability": (10, 0)}, "compute capability 10.0, the kernels need 9.0"),
        ({"dtype": "float32"}, "q, k and v are float32"),
        ({"missing": "TileLang cannot be imported"}, "TileLang cannot be imported"),
        ({"seqlens": None, "sequences": 65536, "tokens": 65536}, "65536 sequences, the kernels take 65535"),
    ],
)
def test_pytorch_serves_what_the_kernels_cannot(facts, reason):
    chosen = plan.make(**{"hv": 8, "seqlens": (4096,)} | facts)
    assert (chosen.implementation, chosen.kernels) == ("torch", ())
    assert chosen.why.startswith(reason)


@pytest.mark.parametrize(
    ("hv", "seqlens", "v_tile"),
    [
        pytest.param(8, (32768,), 64, id="8 CTAs leave SMs idle"),
        pytest.param(64, (16384, 16384), 128, id="128 CTAs fill the SMs once"),
        pytest.param(48, (8192,) * 4, 64, id="192 whole heads take two waves, 384 halves three"),
        pytest.param(64, (28672, 4096), 64, id="one long sequence decides"),
        pytest.param(8, (0, 0), 128, id="nothing to do"),
    ],
)
def test_tiles_of_whole_sequences(hv, seqlens, v_tile):
    chosen = plan.make(hv=hv, seqlens=seqlens, auto_cp=False)
    assert (chosen.segment_chunks, chosen.kernels) == (0, plan.KERNELS["forward"])
    assert "auto_cp is off" in chosen.why
    assert chosen.implementation == "tilelang"
    assert chosen.v_tile == v_tile
    assert f"v_tile={v_tile}" in chosen.why


@pytest.mark.parametrize(
    ("hv", "seqlens", "splits"),
    [
        pytest.param(8, (32768,), True, id="few heads, one long sequence"),
        pytest.param(8, (2048,), True, id="few heads, short"),
        pytest.param(8, (512,), False, id="too short"),
        pytest.param(8, (4096,) * 8, False, id="eight sequences fill the SMs"),
        pytest.param(8, (32768, 1, 63, 4096), True, id="one long sequence among short ones"),
        pytest.param(64, (32768,), False, id="64 heads fill the SMs in halves"),
        pytest.param(8, (0, 0), False, id="nothing to do"),
    ],
)
def test_splits(hv, seqlens, splits):
    chosen = plan.make(hv=hv, seqlens=seqlens)
    assert chosen.kernels == (plan.SPLIT_KERNELS if splits else plan.KERNELS)["forward"]
    assert bool(chosen.segment_chunks) == splits
    if splits:
        assert plan.SHORTEST_SEGMENT <= chosen.segment_chunks < max(seqlens) / plan.CHUNK
        assert f"segments of {chosen.segment_chunks} chunks" in chosen.why
        assert (f" in {chosen.parts} parts" in chosen.why) == (chosen.parts > 1)


@pytest.mark.parametrize("v_tile", plan.V_TILES)
def test_summaries_share_the_sms(v_tile):
    """Of four segments in two parts each, on one SM: all CTAs run one after the other."""
    forward, backward = plan.COSTS["forward"], plan.COSTS["backward"]
    states, gradients = 2 * 3, 2 * 3 * 128 // v_tile
    known_at_the_start, in_the_last_segment = 1, 1
    transitions = 2 * 3 - known_at_the_start
    for costs, kinds in (
        (forward, [(forward.summary_chunk, states + transitions)]),
        (
            backward,
            [
                (backward.summary_chunk, states + transitions + in_the_last_segment),
                (backward.reverse_summary_chunk[v_tile], gradients),
            ],
        ),
    ):
        expected = sum((5 * us + costs.summary_cta) * ctas for us, ctas in kinds)
        assert plan._summaries_us([(40, 1)], 10, 2, 1, 1, 1, v_tile, costs) == pytest.approx(expected)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_segments_come_in_parts_where_few_summaries_are_long(direction):
    """Of 16 heads 4 are taken to last: their summaries leave SMs idle."""
    chosen = plan.make(hv=16, seqlens=(32768,), direction=direction)
    assert chosen.parts > 1
    assert chosen.segment_chunks >= chosen.parts * plan.SHORTEST_SEGMENT


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("short", "length", "splits", "parts"),
    [(100, 1, True, True), (10000, 1, True, False), (60000, 1, False, False), (2000, 0, False, False)],
)
def test_states_of_many_sequences_take_no_more_than_twice_the_tokens(direction, short, length, splits, parts):
    """A sequence has states in memory for each part, used or not."""
    seqlens = (*[length] * short, 1_000_000 if length else 32768)
    chosen = plan.make(hv=8, seqlens=seqlens, direction=direction)
    assert bool(chosen.segment_chunks) == splits
    assert (chosen.parts > 1) == parts
    if splits:
        rows = (sum(seqlens) // (plan.CHUNK * chosen.segment_chunks) + len(seqlens)) * chosen.parts
        assert rows <= plan.MOST_SEQUENCES
        assert rows * 96 <= 2 * sum(-(-length // plan.CHUNK) for length in seqlens) * 32


def test_a_split_promises_a_gain_even_if_no_head_forgets():
    for hv in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64):
        for tokens in (300, 1000, 2048, 5000, 8192, 20000, 65536, 131072):
            whole = plan.make(hv=hv, seqlens=(tokens,), auto_cp=False)
            split = plan.make(hv=hv, seqlens=(tokens,))
            if not split.segment_chunks:
                assert split.v_tile == whole.v_tile
                continue
            pack = [(-(-tokens // plan.CHUNK), 1)]
            segments = plan._segments(pack, split.segment_chunks)
            assert sum(n * count for n, count in segments) == pack[0][0]
            assert max(n for n, _ in segments) == split.segment_chunks
            _, whole_us, _ = plan._choose_v_tile(pack, hv, 132, plan.COSTS["forward"])
            _, forward_us, _ = plan._choose_v_tile(segments, hv, 132, plan.COSTS["forward"])
            costs = plan.COSTS["forward"]
            us = -(-split.segment_chunks // split.parts) * costs.summary_chunk + costs.summary_cta
            summary = plan._critical_us([(us, hv * (2 * split.parts * (plan._size(segments) - 1) - 1))], 132)
            assert forward_us + summary + costs.split < whole_us


def test_a_row_too_long_for_a_grid_of_segments_is_not_split():
    assert plan.make(hv=8, seqlens=(2048,), tokens=2048).segment_chunks
    assert not plan.make(hv=8, seqlens=(2048,), tokens=2**26).segment_chunks


@pytest.mark.parametrize(
    ("pack", "size", "segments"),
    [
        ([(5, 1), (0, 1), (4, 1)], 2, [(2, 2), (1, 1), (0, 1), (2, 2)]),
        ([(3, 1)], 8, [(3, 1)]),
        ([(5, 100), (0, 7)], 2, [(2, 200), (1, 100), (0, 7)]),
    ],
)
def test_segments(pack, size, segments):
    assert plan._segments(pack, size) == segments


def test_few_sequences_stay_in_order_and_many_are_counted():
    assert plan._pack((65, 0, 1, 65)) == [(2, 1), (1, 1), (2, 1), (0, 1)]
    assert plan._pack((0,) * 1000 + (64,) * 64) == [(1, 1)] * 64 + [(0, 1000)]
    assert sorted(plan._pack((64, 100, 1, 0, 65) * 20)) == [(0, 20), (1, 40), (2, 40)]


def estimated(seqlens):
    whole = plan.make(hv=32, seqlens=seqlens, auto_cp=False).why
    return float(re.search(r"an estimated (\d+) us with V whole", whole)[1])


def test_whole_sequences_start_with_the_longest_where_they_are_few():
    short, long = (4096,) * 7, (28672,)
    assert estimated(short + long) == estimated(long + short)
    many = (4096,) * plan.LONGEST_FIRST
    assert estimated(many + long) > estimated(long + many)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("longest", [300, 65536])
def test_packs_of_many_sequences_are_planned_in_milliseconds(longest, direction):
    """Where every segment was counted by itself it took up to 430 ms, and the kernels some 10."""
    rng = random.Random(longest)
    seqlens = (*(rng.randrange(300) for _ in range(plan.MOST_SEQUENCES - 1)), longest)
    taken = []
    for turn in range(5):
        begin = time.perf_counter()
        chosen = plan.make(hv=8, seqlens=seqlens, tokens=sum(seqlens) + turn, direction=direction)
        taken.append(time.perf_counter() - begin)
        assert chosen.implementation == "tilelang"
    assert min(taken) < 0.05  # about 2 ms


def test_plans_of_many_long_packs_are_not_kept(monkeypatch):
    """Each holds its lengths, which are megabytes."""
    planned = []
    pack = plan._pack
    monkeypatch.setattr(plan, "_pack", lambda seqlens: planned.append(len(seqlens)) or pack(seqlens))
    for sequences in (plan.LONG_PACK, plan.LONG_PACK + 1):
        for _ in range(2):
            for length in range(1000, 1020):
                plan.make(hv=8, seqlens=(length,) * sequences)
                plan.make(hv=8, seqlens=(length,) * sequences)
    assert planned == [plan.LONG_PACK] * 20 + [plan.LONG_PACK + 1] * 40


def test_unknown_lengths_are_taken_as_equal():
    known = plan.make(hv=48, seqlens=(8192,) * 4)
    assert plan.make(hv=48, seqlens=None, sequences=4, tokens=32768) == known


@pytest.mark.parametrize("seqlens", [(), (0,), (0, 0), None])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_nothing_to_do_has_a_plan(direction, seqlens):
    made = plan.make(hv=8, seqlens=seqlens, sequences=0, direction=direction)
    assert made.implementation == "tilelang"
    assert made.segment_chunks == 0


@pytest.mark.parametrize(
    ("ctas", "sms", "critical"),
    [
        pytest.param([], 4, 0, id="nothing"),
        pytest.param([(5, 3)], 4, 5, id="one wave"),
        pytest.param([(5, 9)], 4, 15, id="a third wave for one CTA"),
        pytest.param([(8, 2), (1, 6)], 3, 8, id="short ones share the SM that the long ones leave"),
        pytest.param([(1, 6), (8, 2)], 3, 10, id="short ones go first where they stand first"),
    ],
)
def test_critical_path(ctas, sms, critical):
    assert plan._critical_us(ctas, sms) == critical


@pytest.mark.parametrize(
    ("ctas", "sms", "critical"),
    [
        pytest.param([(3, 200)], 10, 60, id="many alike"),
        pytest.param([(900, 1), (1, 99)], 10, 900, id="many, a long one among them"),
        pytest.param([(us, 1) for us in range(1, 101)], 10, 505, id="many lengths load the SMs evenly"),
    ],
)
def test_critical_path_of_many(ctas, sms, critical):
    assert plan._critical_us(ctas, sms, scheduled=False) == critical


def test_plan_needs_no_torch():
    code = "import sys, flashqla.ops.plan as p; p.make(hv=8, seqlens=(64,)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("hv", "seqlens", "splits"),
    [
        pytest.param(8, (32768,), True, id="few heads, one long sequence"),
        pytest.param(8, (512,), False, id="too short"),
        pytest.param(32, (4096,) * 8, False, id="eight sequences fill the SMs"),
    ],
)
def test_backward_has_a_plan_of_its_own(hv, seqlens, splits):
    chosen = plan.make(hv=hv, seqlens=seqlens, direction="backward")
    assert chosen.kernels == (plan.SPLIT_KERNELS if splits else plan.KERNELS)["backward"]
    assert bool(chosen.segment_chunks) == splits
