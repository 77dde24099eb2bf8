"""The final loss of a run, and a mean over its last steps.

Every command that names a run's loss shows the training loss of its last step, as `metrics.jsonl` has it. One step is
one batch, so that two runs may lie in the wrong order by it: whatever orders runs takes the mean, and is labelled so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LAST = 20
"""The mean is over this part of the steps: a twentieth."""
MEAN_NAME = f"mean loss, last {100 // LAST} %"


def final_loss(losses: Sequence[float]) -> float:
    """Returns the training loss of the last step; NaN without one."""
    return losses[-1] if losses else math.nan


def last_values(values: Sequence[float]) -> Sequence[float]:
    """Returns the last twentieth of the values, at least one."""
    return values[-max(1, len(values) // LAST) :]


def mean_of_last(losses: Sequence[float]) -> float:
    """Returns the mean over the last twentieth of the steps; NaN without one."""
    return statistics.fmean(last_values(losses)) if losses else math.nan
