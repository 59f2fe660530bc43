"""Which implementation runs a problem, with which tiles, and why. Pure: integers and strings in, a Plan out, no torch.

A plan never changes what is computed, only how fast. So facts that are hints (lengths read a moment ago, while the
device may hold newer ones) are good enough for it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal

from flashqla.device import HOPPER

CHUNK, HEAD_DIM = 64, 128
KERNELS = ("inverse", "forward")
KERNEL_DTYPES = ("bfloat16", "float16")
GRADIENTS = "gradients come from the PyTorch chunk form, because there is no backward kernel yet"

# Microseconds per chunk on the critical path of the forward kernel, one CTA per SM, by columns of V in a CTA. Half the
# columns do not halve the time: scores and gates are repeated. Estimates from the count of tensor work, 10 units of
# 0.175 us for a whole head and 6 for half of one.
CHUNK_US = {128: 1.75, 64: 1.05}
# The inverse kernel may treat the value heads of a group together and share K K^T; it then has fewer CTAs. Worth it
# from this number of CTAs per SM on.
CTAS_PER_SM = 4
# Beyond this many sequences the SMs are evenly loaded, and scheduling them one by one would cost host time.
SCHEDULED_SEQUENCES = 64


@dataclass(frozen=True)
class Plan:
    """How a call runs. `kernels` are the names of the launches, none for PyTorch; `why` explains every choice.

    v_tile: columns of V per CTA; 128 is one CTA per (sequence, value head), 64 is two.
    heads_per_inverse: value heads that one CTA of the inverse kernel treats.
    """

    implementation: Literal["tilelang", "torch"]
    v_tile: Literal[64, 128]
    heads_per_inverse: int
    kernels: tuple[str, ...]
    why: str


@lru_cache(maxsize=1024)
def make(
    *,
    hk: int,
    hv: int,
    seqlens: tuple[int, ...] | None,
    sequences: int = 1,
    tokens: int = 0,
    dtype: str = "bfloat16",
    device: str = "cuda",
    capability: tuple[int, int] | None = HOPPER,
    sm_count: int = 132,
    missing: str = "",
) -> Plan:
    """The plan for a problem on a device.

    seqlens: tokens of every sequence; None where only the device knows them, and then `sequences` sequences are taken
    to share `tokens` tokens evenly. dtype: of q, k and v. device: its type, "cuda" or "cpu". missing: why the
    kernels cannot be loaded here, "" if they can.
    """
    reason = _refusal(dtype, device, capability, missing)
    if reason:
        return Plan("torch", 128, 1, (), f"{reason}: the PyTorch chunk form runs; {GRADIENTS}")

    if seqlens is None:
        seqlens = (-(-tokens // sequences),) * sequences
    chunks = [-(-length // CHUNK) for length in seqlens]
    v_tile, tile_reason = _choose_v_tile(chunks, hv, sm_count)
    group, ctas = hv // hk, sum(chunks) * hk
    shared = ctas >= CTAS_PER_SM * sm_count
    inverse_reason = (
        f"{ctas} pairs of chunk and k-head {'fill' if shared else 'do not fill'} {sm_count} SMs {CTAS_PER_SM} times, "
        f"so a CTA of the inverse treats {f'the {group} v-heads of a group' if shared else 'one v-head'}"
    )
    why = "; ".join((tile_reason, inverse_reason, GRADIENTS))
    return Plan("tilelang", v_tile, group if shared else 1, KERNELS, why)


def _refusal(dtype: str, device: str, capability: tuple[int, int] | None, missing: str) -> str:
    """Why the kernels cannot serve a problem, or ""."""
    if device != "cuda":
        return f"tensors are on {device}, the kernels need a Hopper GPU"
    if capability != HOPPER:
        found = "unknown" if capability is None else "{}.{}".format(*capability)
        return f"compute capability {found}, the kernels need {HOPPER[0]}.{HOPPER[1]}"
    if dtype not in KERNEL_DTYPES:
        return f"q, k and v are {dtype}, the kernels take {' and '.join(KERNEL_DTYPES)}"
    return missing


def _choose_v_tile(chunks: list[int], hv: int, sm_count: int) -> tuple[Literal[64, 128], str]:
    whole, half = (
        _critical_chunks(chunks, hv * HEAD_DIM // tile, sm_count) * CHUNK_US[tile] for tile in (HEAD_DIM, HEAD_DIM // 2)
    )
    v_tile: Literal[64, 128] = 64 if half < whole else 128
    ctas = f"{len(chunks)} x {hv} pairs of sequence and v-head on {sm_count} SMs"
    return v_tile, f"{ctas}: an estimated {whole:.0f} us with V whole and {half:.0f} us in halves, so v_tile={v_tile}"


def _critical_chunks(chunks: Iterable[int], ctas_per_sequence: int, sm_count: int) -> int:
    """Chunks that the busiest SM runs when CTAs start longest first, each on the SM that is free first."""
    counts = Counter(chunks)
    if counts.total() > SCHEDULED_SEQUENCES:
        total = sum(length * count for length, count in counts.items()) * ctas_per_sequence
        return max(max(counts), -(-total // sm_count))
    loads = [(0, sm_count)]  # a heap of (chunks so far, SMs with that load): heads of a sequence move as one
    for length, count in sorted(counts.items(), reverse=True):
        ctas = count * ctas_per_sequence
        while ctas and length:
            load, sms = heappop(loads)
            taken = min(sms, ctas)
            if taken < sms:
                heappush(loads, (load, sms - taken))
            heappush(loads, (load + length, taken))
            ctas -= taken
    return max(load for load, _ in loads)
