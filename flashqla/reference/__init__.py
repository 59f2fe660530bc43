"""The gated delta rule in plain PyTorch, on any device and in any precision.

recurrent.py is the definition, chunked.py the form that the kernels compute, stage by stage, and backward.py its
gradient written out. packing.py lays the sequences of a pack side by side for their loops.
"""

from flashqla.reference.backward import Gradients, chunk_gated_delta_rule_backward
from flashqla.reference.chunked import (
    ChunkForward,
    chunk_forward,
    chunk_gate,
    chunk_gated_delta_rule_reference,
    chunk_inverse,
    chunk_states,
)
from flashqla.reference.recurrent import recurrent_gated_delta_rule

__all__ = [
    "ChunkForward",
    "Gradients",
    "chunk_forward",
    "chunk_gate",
    "chunk_gated_delta_rule_backward",
    "chunk_gated_delta_rule_reference",
    "chunk_inverse",
    "chunk_states",
    "recurrent_gated_delta_rule",
]
