"""Successive halving: after each rung, the worse half of the compared cells stops.

Karnin, Koren and Somekh 2013, algorithm 1 (Jamieson and Talwalkar 2016 for learning rates and the like): of n, about
log2 n rungs, at each of which half of the rest stays. A rung lies at twice the steps of the one before, so that each
costs about as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge_core.contracts.errors import JobError
from forge_core.job import Job


def rungs_of(count: int, jobs: Sequence[Job]) -> list[int]:
    """Returns the steps at which the worse half stops, for `count` cells: multiples of `eval.interval`, ascending.

    Raises:
        JobError: the jobs are of different lengths, do not evaluate, or evaluate too rarely for a single rung.
    """
    lengths = {(job.train.steps, job.eval.interval) for job in jobs}
    if len(lengths) > 1:
        raise JobError("--halving compares runs at equal steps, and train.steps or eval.interval differ between them")
    [(steps, interval)] = lengths
    if not interval:
        raise JobError("--halving compares runs at evaluations before their ends; set eval.interval")
    # As many halvings as leave one of `count`
    rounds = max(1, math.ceil(math.log2(max(count, 1))))
    wanted = [steps / 2**number for number in range(rounds, 0, -1)]
    # Rounded up to steps with an evaluation, whose losses decide
    rungs = sorted({math.ceil(step / interval) * interval for step in wanted})
    rungs = [step for step in rungs if step < steps]
    if count > 1 and not rungs:
        raise JobError(f"--halving needs an evaluation before step {steps}; set eval.interval below {interval}")
    return rungs if count > 1 else []


def kept(count: int) -> int:
    """Returns how many of `count` cells continue after a rung."""
    return max(1, math.ceil(count / 2))
