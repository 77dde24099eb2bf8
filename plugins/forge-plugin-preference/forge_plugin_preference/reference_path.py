"""Where a reference comes from: checks of the key `reference`, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import ForgeError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job
    from forge_plugin_preference.base import PreferenceLoss


def reference_problems(reference: str) -> Iterator[Problem]:
    """Checks that a reference exists; an empty one is in the data, which their source checks."""
    if reference and not Path(reference).exists():
        message = f"{reference} does not exist; give a checkpoint, a run folder, or a job file whose run is there"
        yield Problem("reference", message)


def starts_as_reference(reference: str, job: Job) -> bool:
    """Whether training starts from the weights of the reference, all of them, by `[checkpoint.load]`. Collective."""
    from forge_plugin_losses.teacher import find_trained

    tables = list(job.checkpoint.loads.values())
    if not reference or len(tables) != 1:
        return False
    table: Any = tables[0]
    path = getattr(table, "path", None) if {"include", "exclude"} <= {*dir(table)} else None
    # A table that leaves out a part starts that part from other values
    if path is None or table.exclude or table.include != ("*",):
        return False
    try:
        return find_trained(Path(path))[0].resolve() == find_trained(Path(reference))[0].resolve()
    except (ForgeError, OSError):  # the run names what is missing
        return False


def describe_reference(loss: PreferenceLoss, context: BuildContext) -> Iterator[tuple[str, str, str]]:
    """Yields lines for the summary of a run, as `Component.choices` does. Rank 0 alone calls it."""
    from forge_plugin_preference.objective import objective_of

    objective = objective_of(context.auxiliary)
    if objective.reference is None:
        yield "reference", "log-probabilities in the data", "loss.reference is empty"
        return
    yield "reference", str(objective.reference.checkpoint), "loss.reference"
    known = loss.first_loss({})
    if known is not None and objective.starts_as_reference:
        yield "first loss", f"{known:.6f}", "the model starts as the reference; another one ends the run"
