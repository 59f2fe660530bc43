"""Per-token factors of every 64-token chunk, from the cumulative gate that a forward pass returned: for a backward pass that is given A.

Shapes  g [T, hv] fp32, the sum of the log gate from the start of the chunk; beta [T, hv]  ->  records [slots, hv, 9, 64] fp32 (common.py)
Grid    a CTA per chunk and eight value heads, half a warp each
Cost    2.8 KB of HBM per chunk and value head
Source  Gated Delta Networks, arXiv 2412.06464, chunkwise form
"""

import tilelang
import tilelang.language as T

from flashqla.ops.kernels.common import (
    BACKWARD_RECORD,
    CHUNK,
    CUDA_TYPES,
    HALF_WARP,
    HOPPER,
    MANUAL_ROLES,
    OWN,
    WARP_GROUP,
    cuda,
)

HEADS = WARP_GROUP // HALF_WARP


@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_records(beta_dtype: str):
    record_of_sums = f"flashqla::record_of_sums<{CUDA_TYPES[beta_dtype]}>"
    tokens, slots, hv, offsets = (T.dynamic(x) for x in ("tokens", "slots", "hv", "offsets"))
    g0, g1, b0, b1 = (T.dynamic(x) for x in ("g0", "g1", "b0", "b1"))

    @T.prim_func
    def chunk_records(
        g: T.StridedTensor((tokens, hv), (g0, g1), "float32"),
        beta: T.StridedTensor((tokens, hv), (b0, b1), beta_dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        records: T.Tensor((slots, hv, BACKWARD_RECORD, CHUNK), "float32"),
        scale: T.float32,
        sequences: T.int32,
        offset_step: T.int32,
    ):
        with T.Kernel(slots, T.ceildiv(hv, HEADS), threads=WARP_GROUP) as (slot, by):  # slots along x: y ends at 65535
            T.import_source(cuda("records", "segments"))
            sums = T.alloc_local((OWN,), "float32")
            betas = T.alloc_local((OWN,), beta_dtype)
            T.pdl_trigger()
            head: T.int32 = by * HEADS + T.get_thread_binding() // HALF_WARP
            chunk: T.int64 = T.call_extern("int64", "flashqla::chunk_of", T.address_of(cu_seqlens[0]), offset_step, sequences, tokens, slot)
            first: T.int32 = T.cast(chunk >> 7, "int32")
            rows: T.int32 = T.if_then_else(head < hv, T.cast(chunk & 127, "int32"), 0)
            T.call_extern("handle", "flashqla::four_tokens", sums.data, T.address_of(g[0, 0]), first, g0, head, g1, rows)
            T.call_extern("handle", "flashqla::four_tokens", betas.data, T.address_of(beta[0, 0]), first, b0, head, b1, rows)
            T.call_extern("handle", record_of_sums, sums.data, betas.data, T.address_of(records[slot, head, 0, 0]), rows, scale)

    return chunk_records
