"""Which implementation runs a problem, with which tiles, and why. Pure: integers and strings in, a Plan out, no torch.

A plan never changes what is computed, only how fast. So facts that are hints (lengths read a moment ago, while the
device may hold newer ones) are good enough for it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from heapq import heappop, heappush
from itertools import product
from typing import Any, Literal, NamedTuple

from flashqla.device import HOPPER, HOPPER_SMS

CHUNK, HEAD_DIM = 64, 128
KERNELS = {
    "forward": ("inverse", "forward"),
    "backward": ("inverse", "chain", "chain", "gradients"),
}
SPLIT_KERNELS = {
    "forward": ("inverse", "summary", "scan", "forward"),
    "backward": ("inverse", "summary", "chain", "scan", "scan", "chain", "chain", "gradients"),
}
Direction = Literal["forward", "backward"]
VTile = Literal[64, 128]
KERNEL_DTYPES = ("bfloat16", "float16")


class Costs(NamedTuple):
    """What the choice of tiles and segments knows of the kernels of a direction, in microseconds.

    cta: for a CTA to start and to end, its states read and written. chunk: per chunk of it, one CTA per SM, by columns
    of V in a CTA, for each of the recurrences that run side by side as they start. traffic: per chunk and value head,
    by columns, what these take longer because they share HBM. summary_cta, summary_chunk: as cta and chunk where
    segments are summarised, with all columns; reverse_summary_chunk: where those of gradients are, beside that, by
    columns, if there are any. scan_segment: per segment of the scans, scan_part: per part of it beyond the first.
    split: for the launches that splitting adds. gain: of the estimate without; where most heads forget, a split must
    promise more than estimates are off.
    """

    cta: float
    chunk: tuple[dict[int, float], ...]
    traffic: dict[int, float]
    summary_cta: float
    summary_chunk: float
    reverse_summary_chunk: dict[int, float]
    scan_segment: float
    scan_part: float
    split: float
    gain: float


# Measured on an H200 (docs/performance-log.md). Forward: recurrences fitted to 198 shapes, whole and split; half the
# columns do not halve the time, as scores and gates are repeated. Backward: to 39 shapes; the gradients kernel costs
# the same whatever the plan, and is left out. The forward recurrence, the second one, is partly in the shadow of the
# other, and counts for less than it takes alone. What splitting adds is such that of the plans that were timed for a
# shape one is chosen which takes 0.6 percent more than the best forward (the mean of 48 shapes), 1.5 backward (of 47);
# the forward gain, that of 66 other shapes none takes 5 percent more than whole.
COSTS: dict[Direction, Costs] = {
    "forward": Costs(
        cta=5.1,
        chunk=({128: 1.78, 64: 1.11},),
        traffic={128: 0.0, 64: 0.0},
        summary_cta=5.9,
        summary_chunk=0.93,
        reverse_summary_chunk={},
        scan_segment=1.05,
        scan_part=0.55,
        split=4.8,
        gain=0.93,
    ),
    "backward": Costs(
        cta=3.9,
        chunk=({128: 2.07, 64: 1.67}, {128: 1.39, 64: 0.82}),
        traffic={128: 0.008, 64: 0.004},
        summary_cta=3.3,
        summary_chunk=0.68,
        reverse_summary_chunk={128: 2.18, 64: 1.17},
        scan_segment=1.7,
        scan_part=1.07,
        split=15.0,
        gain=0.95,
    ),
}
V_TILES: tuple[VTile, ...] = (128, 64)
SUMMARY_KINDS = 2  # CTAs of a part and head where nothing is forgotten
LASTING_HEADS = 4  # in trained models about one head in so many keeps what it knows beyond a segment
FORGETTING_CHUNKS = 8  # at the end of a segment are enough for a head that forgets
SEGMENTS = (2, 3, 4, 5, 6, 8, 11, 16, 22, 32)  # of the longest sequence
PARTS = (1, 2, 4)  # in which a segment may be summarised
SHORTEST_SEGMENT = 8  # chunks, of a part too
MOST_SEQUENCES = 65535  # rows of a grid
STATES_KB, TOKENS_KB = 96, 32  # a value head: of a row of states and transition; of v and o of a chunk
MOST_STATES = 2  # memory of all states over that of v and o
# Beyond this many sequences and segments the SMs are evenly loaded, and scheduling them would cost host time.
SCHEDULED_RUNS = 64
LONG_PACK = 1024  # sequences
LONGEST_FIRST = 32  # sequences: so many start in order of their lengths, if whole (longest_first in segments.cuh)

Pack = Sequence[tuple[int, int]]  # chunks of a sequence or segment, and how many such there are


@dataclass(frozen=True)
class Plan:
    """How a call runs. `kernels` are the names of the launches, none for PyTorch; `why` explains every choice.

    v_tile: columns of V per CTA; 128 is one CTA per (segment, value head), 64 is two.
    segment_chunks: chunks of a segment, which run side by side; 0 leaves sequences whole.
    parts: in which a segment is summarised, side by side as well.
    inverse_ctas: the most CTAs that the inverse kernel has.
    """

    implementation: Literal["tilelang", "torch"]
    v_tile: VTile
    kernels: tuple[str, ...]
    why: str
    segment_chunks: int = 0
    inverse_ctas: int = 0
    parts: int = 1


def _kept(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Keeps plans, with the lengths they are of: where these take memory, a few."""
    kept, kept_of_long_packs = lru_cache(maxsize=1024)(make), lru_cache(maxsize=8)(make)

    @wraps(make)
    def made(*, seqlens: tuple[int, ...] | None, **facts: Any) -> Plan:
        few = seqlens is None or len(seqlens) <= LONG_PACK
        return (kept if few else kept_of_long_packs)(seqlens=seqlens, **facts)

    return made


@_kept
def make(
    *,
    hv: int,
    seqlens: tuple[int, ...] | None,
    sequences: int = 1,
    tokens: int = 0,
    dtype: str = "bfloat16",
    device: str = "cuda",
    capability: tuple[int, int] | None = HOPPER,
    sm_count: int = HOPPER_SMS,
    missing: str = "",
    auto_cp: bool = True,
    direction: Direction = "forward",
) -> Plan:
    """The plan for one direction of a problem on a device.

    seqlens: tokens of every sequence; None where only the device knows them, and then `sequences` sequences are taken
    to share `tokens` tokens evenly. tokens: of a row, of which the last ones may belong to no sequence. dtype: of q, k
    and v. device: its type, "cuda" or "cpu". missing: why the kernels cannot be loaded here, "" if they can. auto_cp:
    whether sequences may be split.
    """
    if seqlens is not None:
        sequences = len(seqlens)
    reason = _refusal(sequences, dtype, device, capability, missing)
    if reason:
        return Plan("torch", 128, (), f"{reason}: the PyTorch chunk form runs")

    if seqlens is None:
        seqlens = (-(-tokens // max(sequences, 1)),) * sequences
    # Of no sequence, as of empty ones, every plan is as good.
    pack, costs = _pack(seqlens or (0,)), COSTS[direction]
    started = sorted(pack, reverse=True) if _size(pack) <= LONGEST_FIRST else pack
    v_tile, us, reason = _choose_v_tile(started, hv, sm_count, costs)
    split = _choose_split(pack, tokens // CHUNK, hv, sm_count, us, costs) if auto_cp else None
    whole = f"sequences stay whole: an estimated {us:.0f} us" if auto_cp else "auto_cp is off"
    segment_chunks, v_tile, parts, reason = split or (0, v_tile, 1, f"{whole}; {reason}")
    kernels = (SPLIT_KERNELS if segment_chunks else KERNELS)[direction]
    return Plan("tilelang", v_tile, kernels, reason, segment_chunks, sm_count, parts)


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


def _pack(seqlens: tuple[int, ...]) -> Pack:
    """Chunks of the sequences: one by one and in order where they are few enough to be scheduled, else counted, so that
    planning takes no longer for many."""
    lengths = Counter(seqlens)
    empty = lengths.pop(0, 0)
    pack: list[tuple[int, int]]
    if len(seqlens) - empty <= SCHEDULED_RUNS:
        pack = [(-(-length // CHUNK), 1) for length in seqlens if length]
    else:
        chunks: Counter[int] = Counter()
        for length, count in lengths.items():
            chunks[-(-length // CHUNK)] += count
        pack = [*chunks.items()]
    return [*pack, (0, empty)] if empty else pack


def _size(pack: Pack) -> int:
    """Sequences or segments of a pack."""
    return sum(count for _, count in pack)


def _choose_v_tile(pack: Pack, hv: int, sm_count: int, costs: Costs) -> tuple[VTile, float, str]:
    """The columns of V a CTA, the microseconds of the recurrence they promise, and why."""
    whole, half = (_recurrences_us(pack, hv, sm_count, tile, costs) for tile in V_TILES)
    v_tile: VTile = 64 if half < whole else 128
    pairs = f"{_size(pack)} sequences or segments x {hv} v-heads on {sm_count} SMs"
    reason = f"{pairs}: an estimated {whole:.0f} us with V whole and {half:.0f} us in halves, so v_tile={v_tile}"
    return v_tile, min(whole, half), reason


def _recurrences_us(pack: Pack, hv: int, sm_count: int, v_tile: int, costs: Costs) -> float:
    full = [(n, count) for n, count in pack if n]
    slices = HEAD_DIM // v_tile
    runs = [(n * us[v_tile] + costs.cta, count * hv * slices) for us in costs.chunk for n, count in full]
    traffic_us = sum(n * count for n, count in full) * hv * costs.traffic[v_tile]
    return _critical_us(runs, sm_count, _size(full) <= SCHEDULED_RUNS) + traffic_us


def _choose_split(
    pack: Pack, row_chunks: int, hv: int, sm_count: int, unsplit_us: float, costs: Costs
) -> tuple[int, VTile, int, str] | None:
    """Chunks per segment, the columns of V a CTA, the parts of a segment, and why; None if sequences stay whole.

    The gate decides on the device what the summary kernel costs. A split must not lose where no head forgets; the best
    of those that do not is the one for heads of which most forget, where it must pay.
    """
    longest, sequences = max(n for n, _ in pack), _size(pack)
    chunks = sum(n * count for n, count in pack)
    row_chunks = max(row_chunks, chunks)
    most_rows = min(MOST_SEQUENCES, MOST_STATES * chunks * TOKENS_KB // STATES_KB)
    promised: dict[tuple[int, VTile, int], float] = {}
    for count, tile in product(SEGMENTS, V_TILES):
        size = -(-longest // count)
        if size < SHORTEST_SEGMENT:
            break
        rows = row_chunks // size + sequences  # of states for each part, of which a sequence has some, used or not
        recurrences_us = _recurrences_us(_segments(pack, size), hv, sm_count, tile, costs)
        for parts in PARTS:
            if size < parts * SHORTEST_SEGMENT or rows * parts > most_rows:
                break
            scan_us = (count - 1) * (costs.scan_segment + (parts - 1) * costs.scan_part)
            rest_us = recurrences_us + scan_us + costs.split
            if rest_us >= unsplit_us:
                break
            worst_us, typical_us = (
                _summaries_us(pack, size, parts, lasting, hv, sm_count, tile, costs)
                for lasting in (hv, -(-hv // LASTING_HEADS))
            )
            if rest_us + worst_us < unsplit_us and rest_us + typical_us < costs.gain * unsplit_us:
                promised[size, tile, parts] = rest_us + typical_us
    if not promised:
        return None
    best = min(promised, key=promised.__getitem__)
    size, v_tile, parts = best
    in_parts = f" in {parts} parts" if parts > 1 else ""
    split = f"segments of {size} chunks{in_parts}, v_tile={v_tile}: an estimated {promised[best]:.0f} us"
    return size, v_tile, parts, f"{split}, where whole sequences take {unsplit_us:.0f} us"


def _summaries_us(
    pack: Pack, size: int, parts: int, lasting: int, hv: int, sm_count: int, v_tile: int, costs: Costs
) -> float:
    """Of segments of `size` chunks where `lasting` of the heads forget nothing."""
    # The last segment of a sequence needs no summary, and the first part no transition.
    summaries, firsts = _size(_segments(pack, size)) - _size(pack), sum(alike for n, alike in pack if n > size)
    part = -(-size // parts)
    late = min(part, FORGETTING_CHUNKS)
    whole = (SUMMARY_KINDS * parts * summaries - firsts) * lasting
    runs = [(part * costs.summary_chunk, whole), (late * costs.summary_chunk, summaries * (hv - lasting))]
    if costs.reverse_summary_chunk:
        us, slices = costs.reverse_summary_chunk[v_tile], HEAD_DIM // v_tile
        runs = [
            (part * costs.summary_chunk, (parts - 1) * firsts * lasting),  # transitions of last segments
            *runs,
            (part * us, parts * summaries * slices * lasting),
            (late * us, summaries * slices * (hv - lasting)),
        ]
    return _critical_us([(us + costs.summary_cta, count) for us, count in runs], sm_count)


def _segments(pack: Pack, size: int) -> Pack:
    """The segments of all sequences; an empty sequence has one, too."""
    parts = [((size, n // size * count), (n % size, count if n % size or not n else 0)) for n, count in pack]
    return [(n, count) for pair in parts for n, count in pair if count]


def _critical_us(runs: Sequence[tuple[float, int]], sm_count: int, scheduled: bool = True) -> float:
    """When the last SM is done. runs: the microseconds that a CTA takes and how many there are, in the order in which
    they start, each on the SM that is free first; unless `scheduled`, evenly spread."""
    if not scheduled:
        return max(max(us for us, _ in runs), sum(us * count for us, count in runs) / sm_count)
    loads = [(0.0, sm_count)]  # a heap of (microseconds so far, SMs with that load): those alike move as one
    for us, count in runs:
        left = count
        while left:
            load, sms = heappop(loads)
            taken = min(sms, left)
            if taken < sms:
                heappush(loads, (load, sms - taken))
            heappush(loads, (load + us, taken))
            left -= taken
    return max(load for load, _ in loads)
