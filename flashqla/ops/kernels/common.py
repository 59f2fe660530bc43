"""What every kernel shares: target, pass settings, sizes, the layout of a chunk's record, and CUDA device functions."""

from pathlib import Path

from flashqla.ops.plan import CHUNK as CHUNK  # tokens
from flashqla.ops.plan import HEAD_DIM as HEAD_DIM  # K and V

HOPPER = {"kind": "cuda", "arch": "sm_90a"}
# Roles, barriers and bounds are written out, so TileLang must add none of its own: no warp specialization, no barrier around shared memory, no
# test of an index.
MANUAL_ROLES = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.enable_fast_math": True,
}

CUDA_TYPES = {"bfloat16": "bfloat16_t", "float16": "half_t", "float32": "float"}
TILE = 64  # columns of a 16-bit tile with rows of 128 bytes, the widest that swizzles
WARP = 32
HALF_WARP, OWN = WARP // 2, 4  # makes a record: each lane has four tokens that follow each other
WARP_GROUP = 128  # threads

# The record of a chunk and value head: rows of 64 floats, one a token, but for the last row, which holds two numbers. With G the cumulative
# log gate inside the chunk in base 2, and rq, rk the inverse norms of a query and a key (1 unless the op normalises them):
ROW_LOG = 0  # G + log2(rq)      2^(ROW_LOG[i] - COL_LOG[j]) is the factor of q_i . k_j in P, but for the scale
COL_LOG = 1  # G - log2(rk)
DECAY = 2  # 2^G * rk                factor of k . S in W
OUT_SCALE = 3  # scale * 2^G * rq    factor of q . S in o
KEY_DECAY = 4  # 2^(G[last] - G) * rk   factor of k in the state that leaves the chunk
CHUNK_DECAY = 5  # 2^G[last], then G[last]
RECORD = 6
# The backward pass has rows of its own after those, and one instead of DECAY.
GIVEN_BETA = 2  # what dY is handed out with: beta, but 1 where that is small (records.cuh)
BETA = 6
ERROR_DECAY = 7  # -beta * 2^G * rk, factor of k . S in W
KEY_LOG = 8  # G + log2(rk)      2^(KEY_LOG[i] - COL_LOG[j]) is the factor of beta[i] k_i . k_j in M
BACKWARD_RECORD = 9
FORGOTTEN = -24.0  # base-2 log of a decay that leaves of a state less than a rounding of fp32
# Chunk c of sequence n has the slot cu_seqlens[n] // 64 + n + c. That needs no table, keeps apart the chunks of different sequences, and leaves
# at most one slot a sequence unused. Pairs of chunks, 2p and 2p + 1, have slots of their own in the same way: cu_seqlens[n] // 128 + n + p.


def cuda(*names: str) -> str:
    """CUDA source of this folder, for T.import_source."""
    return "".join(Path(__file__).with_name(f"{name}.cuh").read_text() for name in names)
