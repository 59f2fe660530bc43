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
    ],
)
def test_pytorch_serves_what_the_kernels_cannot(facts, reason):
    chosen = plan.make(hk=2, hv=8, seqlens=(4096,), **facts)
    assert (chosen.implementation, chosen.kernels) == ("torch", ())
    assert chosen.why.startswith(reason)
    assert plan.GRADIENTS in chosen.why


@pytest.mark.parametrize(
    ("hk", "hv", "seqlens", "v_tile", "heads_per_inverse"),
    [
        pytest.param(2, 8, (32768,), 64, 4, id="8 CTAs leave SMs idle"),
        pytest.param(2, 8, (2048,), 64, 1, id="too few chunks to share K K^T"),
        pytest.param(16, 64, (16384, 16384), 128, 4, id="128 CTAs fill the SMs once"),
        pytest.param(16, 48, (8192,) * 4, 64, 3, id="192 whole heads take two waves, 384 halves three"),
        pytest.param(16, 64, (28672, 4096), 64, 4, id="one long sequence decides"),
        pytest.param(16, 16, (32768,), 64, 1, id="groups of one head"),
        pytest.param(2, 8, (0, 0), 128, 1, id="nothing to do"),
    ],
)
def test_tiles(hk, hv, seqlens, v_tile, heads_per_inverse):
    chosen = plan.make(hk=hk, hv=hv, seqlens=seqlens)
    assert chosen.implementation == "tilelang"
    assert (chosen.v_tile, chosen.heads_per_inverse) == (v_tile, heads_per_inverse)
    assert f"v_tile={v_tile}" in chosen.why


def test_unknown_lengths_are_taken_as_equal():
    known = plan.make(hk=16, hv=48, seqlens=(8192,) * 4)
    assert plan.make(hk=16, hv=48, seqlens=None, sequences=4, tokens=32768) == known


@pytest.mark.parametrize(
    ("chunks", "ctas", "sms", "critical"),
    [
        pytest.param([5], 3, 4, 5, id="one wave"),
        pytest.param([5], 9, 4, 15, id="a third wave for one CTA"),
        pytest.param([8, 1, 1, 1], 2, 3, 8, id="short ones share the SM that the long ones leave"),
        pytest.param([4, 3, 3], 2, 4, 6, id="longest first"),
        pytest.param([0, 0, 2], 4, 4, 2, id="empty sequences cost nothing"),
        pytest.param([3] * 100, 2, 10, 60, id="many sequences load the SMs evenly"),
        pytest.param([900, *[1] * 99], 1, 10, 900, id="many sequences, a long one among them"),
    ],
)
def test_critical_path(chunks, ctas, sms, critical):
    assert plan._critical_chunks(chunks, ctas, sms) == critical


def test_plan_needs_no_torch():
    code = "import sys, flashqla.ops.plan as p; p.make(hk=2, hv=8, seqlens=(64,)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
