"""TileLang kernels, one file each, and `launch`, which runs them, or `recording` again. Nothing outside this folder knows
TileLang.

Kernels trust their caller: `ops.checks` has judged the arguments, `ops.plan` has chosen the tiles. Lengths of sequences
come from cu_seqlens on the device alone.

Forward            inverse -> forward
  split sequences  inverse -> summary -> scan -> forward
Backward           inverse -> chain (forward and reverse side by side) -> gradients
  A is given       records -> chain -> gradients
  split sequences  inverse -> summary -> chain (summary) -> scan, scan (reverse) -> chain -> gradients
"""
