"""A case -> the work that the chunked form needs, and the least time a device needs for it.

Units   u: one product of a 64x64 with a 64x128 matrix, 2 * 64 * 64 * 128 = 1,048,576 FLOP
FLOPs   per chunk of 64 tokens and value head: 8 u + 2 u / r with r = hv / hk. These are K S, Q S and K^T U (2 u each),
        T W and P U (1 u each), and Q K^T and K K^T (1 u each), which the r value heads of a group share. The inverse,
        the gates and the norms are left out, and so is what a split of long sequences adds.
Bytes   what has to cross HBM once: q, k, v, g, beta and initial states read, o and final states written
Floor   the larger of FLOPs over the rate of the tensor cores and bytes over the rate of HBM. HBM counts from a cold
        L2: small problems can go below the floor from a warm one.
"""

from dataclasses import dataclass

from flashqla.cases import CHUNK, Case

HEAD_DIM = 128
UNIT = 2 * CHUNK * CHUNK * HEAD_DIM  # FLOP
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # per element
FINAL_STATE = 4  # bytes per element: always float32


@dataclass(frozen=True)
class Work:
    flops: float
    bytes_moved: int


@dataclass(frozen=True)
class Ceilings:
    """Rates that a kernel can reach, which are below those of a data sheet."""

    flops_per_s: float  # bf16 and fp16 products with fp32 sums, on the tensor cores
    bytes_per_s: float  # HBM, read and written together


# Measured on an H200 SXM at the clocks it chose: an 8192^3 bf16 product of PyTorch runs at 770 to 800 TFLOP/s (the data
# sheet says 989; wgmma from shared memory alone has shown 865 to 910), and a device copy moves 4.3 TB/s (4.8).
H200 = Ceilings(flops_per_s=790e12, bytes_per_s=4.3e12)
# By full name: an H200 NVL, a GH200 or a MIG slice has other clocks, memory or SMs, and nobody measured those here.
CEILINGS = {"NVIDIA H200": H200}


@dataclass(frozen=True)
class Rates:
    """What a measured time comes to. The last two are None on a device whose ceilings are not known."""

    tflops_per_s: float
    gb_per_s: float
    floor_ms: float | None
    percent: float | None  # of the floor: 100 is as fast as the ceilings allow


def forward(case: Case) -> Work:
    """Work of the forward pass. The last chunk of a sequence counts whole."""
    chunks = sum(-(-length // CHUNK) for length in case.lengths)
    units = chunks * (8 * case.hv + 2 * case.hk)
    width = BYTES[case.dtype]
    per_token = 2 * case.hk * HEAD_DIM * width + 2 * case.hv * HEAD_DIM * width + 2 * case.hv * BYTES[case.gate_dtype]
    states = len(case.lengths) * case.hv * HEAD_DIM**2
    per_state = case.initial_state * BYTES[case.state_dtype] + case.final_state * FINAL_STATE
    return Work(flops=units * UNIT, bytes_moved=case.tokens * per_token + states * per_state)


def floor_ms(case: Case, gpu: str | None) -> float | None:
    """Least time of the forward pass in ms on the GPU of that name; None where the ceilings are not known."""
    ceilings = CEILINGS.get(gpu or "")
    if ceilings is None or case.dtype == "float32":  # the rate holds for 16-bit operands
        return None
    work = forward(case)
    return 1e3 * max(work.flops / ceilings.flops_per_s, work.bytes_moved / ceilings.bytes_per_s)


def rates(case: Case, gpu_ms: float, gpu: str | None) -> Rates:
    """Rates and percent of the floor of a forward pass that took `gpu_ms`."""
    work, least = forward(case), floor_ms(case, gpu)
    return Rates(
        tflops_per_s=work.flops / gpu_ms / 1e9,
        gb_per_s=work.bytes_moved / gpu_ms / 1e6,
        floor_ms=least,
        percent=None if least is None else 100 * least / gpu_ms,
    )
