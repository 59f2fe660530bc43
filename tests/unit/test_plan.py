"""What runs, with which tiles, and that the plan says why. No torch, no GPU."""

import subprocess
import sys

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


def test_a_split_promises_a_gain_even_if_no_head_forgets():
    for hv in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64):
        for tokens in (300, 1000, 2048, 5000, 8192, 20000, 65536, 131072):
            whole = plan.make(hv=hv, seqlens=(tokens,), auto_cp=False)
            split = plan.make(hv=hv, seqlens=(tokens,))
            if not split.segment_chunks:
                assert split.v_tile == whole.v_tile
                continue
            chunks = [-(-tokens // plan.CHUNK)]
            segments = plan._segments(chunks, split.segment_chunks)
            assert sum(segments) == chunks[0]
            assert max(segments) == split.segment_chunks
            _, whole_us, _ = plan._choose_v_tile(chunks, hv, 132, plan.COSTS["forward"])
            _, forward_us, _ = plan._choose_v_tile(segments, hv, 132, plan.COSTS["forward"])
            costs = plan.COSTS["forward"]
            us = split.segment_chunks * costs.summary_chunk + costs.summary_cta
            summary = plan._critical_us([(us, hv * (2 * (len(segments) - 1) - 1))], 132)
            assert forward_us + summary + costs.split < whole_us


def test_a_row_too_long_for_a_grid_of_segments_is_not_split():
    assert plan.make(hv=8, seqlens=(2048,), tokens=2048).segment_chunks
    assert not plan.make(hv=8, seqlens=(2048,), tokens=2**26).segment_chunks


@pytest.mark.parametrize(("chunks", "size", "segments"), [([5, 0, 4], 2, [2, 2, 1, 0, 2, 2]), ([3], 8, [3])])
def test_segments(chunks, size, segments):
    assert plan._segments(chunks, size) == segments


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
        pytest.param([(3, 2)] * 100, 10, 60, id="many alike"),
        pytest.param([(900, 1), *[(1, 1)] * 99], 10, 900, id="many, a long one among them"),
        pytest.param([(us, 1) for us in range(1, 101)], 10, 505, id="many lengths load the SMs evenly"),
    ],
)
def test_critical_path(ctas, sms, critical):
    assert plan._critical_us(ctas, sms) == critical


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
