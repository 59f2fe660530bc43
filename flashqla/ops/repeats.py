"""Calls like an earlier one: what makes calls alike, and what is kept of those that come again.

A call that is known needs no checks but those of its offsets, no plan and no layout. So all that these depend on is
among the facts that make calls alike, and the values of offsets are looked at each time.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flashqla.ops import checks
from flashqla.ops.bounded import note
from flashqla.ops.checks import Problem

Facts = tuple[Hashable, ...]
MOST = 1024  # kinds of calls, and of packs; the oldest goes
MOST_SEQUENCES = 1024  # of a pack: lengths are kept, and work on more hides what the host does
# Recording takes as long as several calls, which those with sizes that never come again need not pay.
RECORDED_CALL = 2


@dataclass
class _Known:
    calls: int = 0
    recording: Any = None


_known: dict[Hashable, _Known] = {}  # by facts
_packs: dict[Hashable, _Known] = {}  # by facts and lengths
_keeping = Lock()


def facts(
    copied: tuple[Tensor, ...],
    others: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    *settings: Hashable,
) -> Facts | None:
    """What makes calls alike: all but the values in tensors. None for a call that must not be run from a recording.

    copied: what tensor copy engines read, which want 16 bytes, q first. settings: all else that a result depends on.
    """
    if not _launchable(copied[0]) or (cu_seqlens is not None and cu_seqlens.numel() > MOST_SEQUENCES):
        return None
    for x in copied:
        if x.data_ptr() % 16:
            return None
    found: list[Hashable] = [*settings]
    # A loop, as generators and calls take longer than what they look at.
    for y in (*copied, *others, cu_seqlens, cu_seqlens_cpu):
        if y is None:
            found.append(None)
        elif y.is_neg():  # memory is not what it says
            return None
        else:
            found += (y.shape, y.stride(), y.dtype, y.device)
    return tuple(found)


def find(facts: Facts, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Any:
    """The recording for a call, or None. Raises ArgumentError for offsets with wrong values."""
    known = _known.get(facts)
    if known is not None and cu_seqlens is not None:  # arguments like these were judged, so that offsets can be read
        known = _packs.get((facts, checks.lengths(cu_seqlens, cu_seqlens_cpu, q.shape[1], "cached")))
    return None if known is None else known.recording


def keep(facts: Facts, problem: Problem, record: Callable[[], Any]) -> None:
    """Note a call that kernels have run, and record it if it came again."""
    if problem.batch * problem.tokens == 0:
        return
    with _keeping:
        known = _noted(_known, facts)
        if problem.cu_seqlens is not None:
            known = _noted(_packs, (facts, problem.seqlens))
        known.calls += 1
        if known.calls == RECORDED_CALL:
            known.recording = record()


def _noted(notes: dict[Hashable, _Known], key: Hashable) -> _Known:
    return notes.get(key) or note(notes, key, _Known(), MOST)


def _launchable(q: Tensor) -> bool:
    """Whether q is on the current device, and nothing is captured: a graph would outlive what a recording holds."""
    return q.is_cuda and torch.cuda.current_device() == q.get_device() and not torch.cuda.is_current_stream_capturing()
