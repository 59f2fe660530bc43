"""The roles of the inverse kernel and their barriers, played in Python: does each wait end with its phase, and do all?

A barrier tells no more of its phase than the parity: a wait that comes a phase too early passes, one that comes too
late never ends. On a GPU that happens now and then.
"""

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flashqla.ops.kernels.inverse import FACTOR_JOBS, JOBS, KEYS, PRODUCTS, WARPS

TURNS = 40


class Barrier:
    def __init__(self, arrivals: int = 1) -> None:
        self.arrivals = self.missing = arrivals
        self.phase = 0  # that is not complete

    def arrive(self, phase: int) -> None:
        assert self.phase == phase, "an arrival counts in another phase"
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.arrivals, phase + 1


Steps = Iterator[tuple[Barrier, int] | None]  # waits for phases; none: goes on sooner or later


def roles(group: int, l2norm: bool, jobs: int) -> list[Steps]:
    """Each arrives as one. Use u of a stage is phase u of its barriers; it is free after phase u - 1."""
    keys_ready, keys_free = ([Barrier() for _ in range(KEYS)] for _ in range(2))
    job_ready, job_free = ([Barrier() for _ in range(jobs)] for _ in range(2))
    product_ready = [Barrier() for _ in range(WARPS)]
    product_free = [Barrier(group * (1 + l2norm)) for _ in range(PRODUCTS)]

    def load() -> Steps:
        for turn in range(TURNS):
            yield keys_free[turn % KEYS], turn // KEYS - 1
            keys_ready[turn % KEYS].arrive(turn // KEYS)

    def multiply() -> Steps:
        for turn in range(TURNS):
            yield keys_ready[turn % KEYS], turn // KEYS
            yield product_free[turn % PRODUCTS], turn // PRODUCTS - 1
            keys_free[turn % KEYS].arrive(turn // KEYS)
            yield None
            product_ready[turn % WARPS].arrive(turn // WARPS)

    def prepare(first: int) -> Steps:
        for job in range(first, TURNS * group, FACTOR_JOBS):
            both = [(of, of // group) for of in (job, job + 1) if of < TURNS * group]
            for of, turn in both:
                if l2norm:
                    yield product_ready[turn % WARPS], turn // WARPS
                yield job_free[of % jobs], of // jobs - 1
            yield None
            for of, turn in both:
                job_ready[of % jobs].arrive(of // jobs)
                if l2norm:
                    product_free[turn % PRODUCTS].arrive(turn // PRODUCTS)

    def invert(warp: int) -> Steps:
        for job in range(warp, TURNS * group, WARPS):
            turn = job // group
            yield job_ready[job % jobs], job // jobs
            yield product_ready[turn % WARPS], turn // WARPS
            yield None
            product_free[turn % PRODUCTS].arrive(turn // PRODUCTS)
            job_free[job % jobs].arrive(job // jobs)

    return [load(), multiply(), *map(prepare, range(0, FACTOR_JOBS, 2)), *map(invert, range(WARPS))]


def play(running: list[Steps], draw: random.Random) -> None:
    pace = {role: draw.choice((1, 1, 30)) for role in running}
    waits: dict[Steps, tuple[Barrier, int] | None] = dict.fromkeys(running)
    while waits:
        ready = [role for role, wait in waits.items() if wait is None or wait[0].phase % 2 != wait[1] % 2]
        assert ready, "every role waits"
        (role,) = draw.choices(ready, [pace[role] for role in ready])
        wait = waits.pop(role)
        assert wait is None or wait[0].phase == wait[1] + 1, "a wait ends with another phase"
        with suppress(StopIteration):
            waits[role] = next(role)


def play_often(group: int, l2norm: bool, jobs: int) -> None:
    for seed in range(25):
        play(roles(group, l2norm, jobs), random.Random(seed))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_every_wait_ends_with_its_phase(group: int, l2norm: bool) -> None:
    play_often(group, l2norm, JOBS)


# One stage for different halves of FACTORS in turn; and for more jobs of a warp of INVERT than it has come to.
@pytest.mark.parametrize("jobs", [22, FACTOR_JOBS])
def test_a_ring_of_jobs_that_cannot_be_told_by_parity_is_found(jobs: int) -> None:
    with pytest.raises(AssertionError, match="another phase"):
        play_often(8, False, jobs)
