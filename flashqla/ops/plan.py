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
SPLIT_KERNELS = ("inverse", "summary", "scan", "forward")
KERNEL_DTYPES = ("bfloat16", "float16")
GRADIENTS = "gradients come from the PyTorch chunk form, because there is no backward kernel yet"

# Microseconds per chunk on the critical path of the forward kernel, one CTA per SM, by columns of V in a CTA: measured
# on an H200 with 512 chunks in sequence. Half the columns do not halve the time: scores and gates are repeated.
CHUNK_US = {128: 1.95, 64: 1.25}
# Splitting a sequence into segments, fitted to six shapes on an H200: microseconds per chunk of a CTA of the summary
# kernel, of which an SM runs two as fast as one; per segment of the scan; and for two more launches.
SUMMARY_CHUNK_US = 1.25
SUMMARY_CTAS = 2
SUMMARY_PARTS = 4  # CTAs of a segment and head where nothing is forgotten
LASTING_HEADS = 4  # in trained models about one head in so many keeps what it knows beyond a segment
SCAN_SEGMENT_US = 2.0
SPLIT_US = 8.0
SEGMENTS = (2, 3, 4, 6, 8, 11, 16, 22, 32)  # of the longest sequence
SHORTEST_SEGMENT = 8  # chunks
SPLIT_GAIN = 0.95  # of the estimate without: a split must promise more than estimates are off
# CTAs of the inverse kernel that an SM holds. They share K K^T among heads of a group as long as they are that many.
INVERSE_CTAS = 4
MOST_SEQUENCES = 65535  # rows of a grid
# Beyond this many sequences the SMs are evenly loaded, and scheduling them one by one would cost host time.
SCHEDULED_SEQUENCES = 64


@dataclass(frozen=True)
class Plan:
    """How a call runs. `kernels` are the names of the launches, none for PyTorch; `why` explains every choice.

    v_tile: columns of V per CTA; 128 is one CTA per (segment, value head), 64 is two.
    segment_chunks: chunks of a segment, which run side by side; 0 leaves sequences whole.
    heads_per_inverse: value heads that a CTA of the inverse kernel treats at once; inverse_ctas: the most CTAs it has.
    """

    implementation: Literal["tilelang", "torch"]
    v_tile: Literal[64, 128]
    heads_per_inverse: int
    kernels: tuple[str, ...]
    why: str
    segment_chunks: int = 0
    inverse_ctas: int = 0


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
    auto_cp: bool = True,
) -> Plan:
    """The plan for a problem on a device.

    seqlens: tokens of every sequence; None where only the device knows them, and then `sequences` sequences are taken
    to share `tokens` tokens evenly. dtype: of q, k and v. device: its type, "cuda" or "cpu". missing: why the
    kernels cannot be loaded here, "" if they can. auto_cp: whether sequences may be split.
    """
    if seqlens is None:
        seqlens = (-(-tokens // sequences),) * sequences
    reason = _refusal(len(seqlens), dtype, device, capability, missing)
    if reason:
        return Plan("torch", 128, 1, (), f"{reason}: the PyTorch chunk form runs; {GRADIENTS}")

    chunks = [-(-length // CHUNK) for length in seqlens]
    v_tile, us, tile_reason = _choose_v_tile(chunks, hv, sm_count)
    segment_chunks, split_reason = _choose_split(chunks, hv, sm_count, us) if auto_cp else (0, "auto_cp is off")
    if segment_chunks:
        v_tile, _, tile_reason = _choose_v_tile(_segments(chunks, segment_chunks), hv, sm_count)
    heads = _heads_per_inverse(sum(chunks), hk, hv, sm_count)
    ctas = sum(chunks) * hv // heads
    inverse_reason = f"{ctas} CTAs of the inverse with {heads} of {hv // hk} v-heads of a group each, on {sm_count} SMs"
    why = "; ".join((split_reason, tile_reason, inverse_reason, GRADIENTS))
    kernels = SPLIT_KERNELS if segment_chunks else KERNELS
    return Plan("tilelang", v_tile, heads, kernels, why, segment_chunks, INVERSE_CTAS * sm_count)


def _refusal(sequences: int, dtype: str, device: str, capability: tuple[int, int] | None, missing: str) -> str:
    """Why the kernels cannot serve a problem, or ""."""
    if device != "cuda":
        return f"tensors are on {device}, the kernels need a Hopper GPU"
    if capability != HOPPER:
        found = "unknown" if capability is None else "{}.{}".format(*capability)
        return f"compute capability {found}, the kernels need {HOPPER[0]}.{HOPPER[1]}"
    if dtype not in KERNEL_DTYPES:
        return f"q, k and v are {dtype}, the kernels take {' and '.join(KERNEL_DTYPES)}"
    if sequences > MOST_SEQUENCES:
        return f"{sequences} sequences, the kernels take {MOST_SEQUENCES} in a call"
    return missing


def _heads_per_inverse(chunks: int, hk: int, hv: int, sm_count: int) -> int:
    """As many heads of a group as leave enough CTAs, else two, which take no longer than one."""
    group = hv // hk
    divisors = [n for n in range(group, 0, -1) if group % n == 0]
    enough = (n for n in divisors if chunks * hv // n >= INVERSE_CTAS * sm_count)
    return next(enough, 2 if group % 2 == 0 else 1)


def _choose_v_tile(chunks: list[int], hv: int, sm_count: int) -> tuple[Literal[64, 128], float, str]:
    """The columns of V a CTA, the microseconds of the forward kernel they promise, and why."""
    whole, half = (
        _critical_chunks(chunks, hv * HEAD_DIM // tile, sm_count) * CHUNK_US[tile] for tile in (HEAD_DIM, HEAD_DIM // 2)
    )
    v_tile: Literal[64, 128] = 64 if half < whole else 128
    pairs = f"{len(chunks)} sequences or segments x {hv} v-heads on {sm_count} SMs"
    reason = f"{pairs}: an estimated {whole:.0f} us with V whole and {half:.0f} us in halves, so v_tile={v_tile}"
    return v_tile, min(whole, half), reason


def _choose_split(chunks: list[int], hv: int, sm_count: int, unsplit_us: float) -> tuple[int, str]:
    """Chunks per segment, 0 for whole sequences, and why.

    The gate decides on the device what the summary kernel costs. A split must pay even where no head forgets; the best
    of those that do is the one for heads of which most forget.
    """
    longest = max(chunks)
    costs = {}
    for count in SEGMENTS:
        size = -(-longest // count)
        if size < SHORTEST_SEGMENT:
            break
        segments = _segments(chunks, size)
        if len(segments) + len(chunks) > MOST_SEQUENCES:
            continue
        summaries = len(segments) - len(chunks)  # the last segment of a sequence needs none
        _, forward_us, _ = _choose_v_tile(segments, hv, sm_count)
        slots = SUMMARY_CTAS * sm_count
        worst_us, typical_us = (
            SUMMARY_CHUNK_US * _critical_chunks([size] * summaries, SUMMARY_PARTS * heads, slots)
            for heads in (hv, -(-hv // LASTING_HEADS))
        )
        rest_us = forward_us + SCAN_SEGMENT_US * (count - 1) + SPLIT_US
        if rest_us + worst_us < SPLIT_GAIN * unsplit_us:
            costs[size] = rest_us + typical_us
    if not costs:
        return 0, f"sequences stay whole: an estimated {unsplit_us:.0f} us"
    best = min(costs, key=costs.__getitem__)
    us = f"an estimated {costs[best]:.0f} us, where whole sequences take {unsplit_us:.0f} us"
    return best, f"segments of {best} chunks: {us}"


def _segments(chunks: list[int], size: int) -> list[int]:
    """Chunks of the segments of all sequences; an empty sequence has one, too."""
    return [part for n in chunks for part in ([size] * (n // size) + ([n % size] if n % size or not n else []))]


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
