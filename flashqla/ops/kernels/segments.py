"""The segment of a sequence that a CTA works on."""

import tilelang.language as T

SEQUENCE, INDEX, FIRST, LENGTH, BEHIND, SLOT, PAIR = range(7)  # of what find_segment writes, see segments.cuh
FOUND = 7
STATE_KNOWN, GRADIENT_KNOWN = 1, 2  # flags of a part: what leaves it at its end, or at its front, is N, or nobody asks for it


@T.macro
def find_segment(found, cu_seqlens, offset_step, sequences, tokens, segment_chunks, segment):
    """`found`: a vector of FOUND integers. Registers, or quotients are computed at every use."""
    T.call_extern("handle", "flashqla::find_segment", found.data, T.address_of(cu_seqlens[0]), offset_step, sequences, tokens, segment_chunks, segment)
