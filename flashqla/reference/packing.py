"""Sequences of a batch or a pack, side by side in one time loop.

A step is `unit` tokens of every sequence that still runs: 1 in the recurrence, a chunk in the chunk form. Sequences
are ranked longest first, so those that run at a step are a prefix of those that ran before, and the rows of a step
follow each other in memory: a loop over steps slices and never gathers, and no work is spent on padding short
sequences to the longest. Steps are cut into blocks of bounded size, which bounds the memory of everything that is
computed for many steps at once.

Rows outside every sequence are never read. Empty sequences have a rank, and no step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Consecutive steps. `counts`: sequences that run at each of them; `rows`: tokens in all of them."""

    counts: tuple[int, ...]
    rows: int
    unit: int
    target: Tensor  # [rows] int64, the place of every token among the slots

    def spread(self, rows: Tensor) -> Tensor:
        """Tokens [rows, ...] -> slots [sum(counts), unit, ...], zero past the end of a sequence."""
        if self.unit == 1:
            return rows.unsqueeze(1)
        slots = sum(self.counts)
        padded = rows.new_zeros((slots * self.unit, *rows.shape[1:])).index_copy(0, self.target, rows)
        return padded.view(slots, self.unit, *rows.shape[1:])

    def steps(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Slots [sum(counts), ...] -> those of every step."""
        return torch.split(slots, list(self.counts))

    def collect(self, slots: Tensor) -> Tensor:
        """Slots [sum(counts), unit, ...] -> tokens [rows, ...]; the inverse of `spread`."""
        return slots.flatten(0, 1).index_select(0, self.target)


@dataclass(frozen=True)
class Packing:
    """How the rows of [batch, tokens, ...] tensors map to steps. Index tensors are int64, on the tensors' device."""

    batch: int
    tokens: int
    blocks: tuple[Block, ...]  # at least one, so that outputs of an empty pack still depend on its inputs
    order: Tensor  # [N] sequences by rank, longest first
    rank: Tensor  # [N] rank of every sequence
    source: Tensor  # [sum of lengths] row of the flattened inputs, in step order
    slot_order: Tensor  # [slots] slot of every (sequence, step), sequence by sequence

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[batch, tokens, ...] -> the tokens of every block, [rows, ...] each."""
        rows = x.reshape(self.batch * self.tokens, *x.shape[2:]).index_select(0, self.source)
        return torch.split(rows, [block.rows for block in self.blocks])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tokens of every block -> [batch, tokens, ...], zero in rows outside every sequence."""
        rows = torch.cat(list(parts))
        out = rows.new_zeros((self.batch * self.tokens, *rows.shape[1:])).index_copy(0, self.source, rows)
        return out.view(self.batch, self.tokens, *rows.shape[1:])

    def ranked(self, states: Tensor) -> Tensor:
        """States [N, ...] by sequence -> by rank."""
        return states.index_select(0, self.order)

    def unranked(self, pieces: Sequence[Tensor]) -> Tensor:
        """States by rank, in pieces in the order in which the sequences ended -> [N, ...] by sequence."""
        return torch.cat(list(reversed(pieces))).index_select(0, self.rank)


def pack(x: Tensor, cu_seqlens: Tensor | None, unit: int, block_rows: int) -> Packing:
    """Packing for tensors like x [batch, tokens, ...].

    cu_seqlens: offsets [N + 1] of the sequences in the one row, on any device (one on a GPU costs a synchronising
    read); None means that every row of the batch is a sequence. A block takes as many steps of `unit` tokens as fit
    in block_rows slot rows, at least one.
    """
    batch, tokens = x.shape[:2]
    count = partial(torch.arange, device="cpu")  # whatever the default device is
    if cu_seqlens is None:
        begins = count(batch) * tokens
        lengths = torch.full((batch,), tokens, device="cpu")
    else:
        offsets = cu_seqlens.to("cpu", torch.int64)
        begins, lengths = offsets[:-1], offsets.diff()

    sequences = len(lengths)
    order = torch.argsort(lengths, descending=True, stable=True)
    rank = torch.argsort(order)
    steps = (lengths + unit - 1) // unit
    counts = sequences - torch.bincount(steps, minlength=1).cumsum(0)[:-1]  # sequences with more than t steps
    first_slot = counts.cumsum(0) - counts

    sequence = torch.repeat_interleave(count(sequences), lengths)
    position = count(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
    target = (first_slot[position // unit] + rank[sequence]) * unit + position % unit
    target, by_target = target.sort()
    source = (begins[sequence] + position)[by_target].to(x.device)
    chunk_sequence = torch.repeat_interleave(count(sequences), steps)
    chunk_step = count(len(chunk_sequence)) - (steps.cumsum(0) - steps)[chunk_sequence]
    slot_order = first_slot[chunk_step] + rank[chunk_sequence]

    groups: list[list[int]] = [[]]
    for live in counts.tolist():
        if groups[-1] and (sum(groups[-1]) + live) * unit > block_rows:
            groups.append([])
        groups[-1].append(live)
    edges = torch.tensor([sum(group) for group in groups], device="cpu").cumsum(0) * unit
    ends = torch.searchsorted(target, edges).tolist()
    target = target.to(x.device)
    blocks, begin = [], 0
    for group, edge, end in zip(groups, edges.tolist(), ends, strict=True):
        base = edge - sum(group) * unit
        blocks.append(Block(tuple(group), end - begin, unit, target[begin:end] - base))
        begin = end
    return Packing(batch, tokens, tuple(blocks), order.to(x.device), rank.to(x.device), source, slot_order.to(x.device))
