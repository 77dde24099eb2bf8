"""Where a reference comes from: checks of the key `reference`, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import ForgeError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job


ADAPTERS_OFF = "adapters_off"
"""The value of `reference` that means the model in training with its adapters off."""


def reference_problems(reference: str, job: Job) -> Iterator[Problem]:
    """Checks that a reference exists; an empty one is in the data, which their source checks."""
    if reference == ADAPTERS_OFF:
        yield from _adapter_problems(job)
    elif reference and not Path(reference).exists():
        message = f"{reference} does not exist; give a checkpoint, a run folder, or a job file whose run is there"
        yield Problem("reference", message)


def _adapter_problems(job: Job) -> Iterator[Problem]:
    """Why the model with adapters off is not the one from which training began."""
    alone = _adapters_alone(job)
    if not alone:
        message = f'"{ADAPTERS_OFF}" is the model without its adapters, and the job trains none'
        yield Problem("reference", f"{message}; add [plugins.lora], or give a checkpoint")
    for name, is_alone in alone.items():
        if not is_alone:
            message = f"plugins.{name} also trains parameters that are no adapters (its key `train`)"
            hint = "train adapters alone, or give a checkpoint"
            yield Problem("reference", f'{message}, which "{ADAPTERS_OFF}" cannot undo; {hint}')


def _adapters_alone(job: Job) -> dict[str, bool]:
    """By the name of each plugin of a job that adds adapters: whether it trains nothing else."""
    # By an attribute and not by its class, so that plugins of others count, too
    found = {name: getattr(plugin, "adapters_alone", None) for name, plugin in job.plugins.items()}
    return {name: alone for name, alone in found.items() if alone is not None}


def starts_as_reference(reference: str, context: BuildContext) -> bool:
    """Whether training is known to start from the weights of the reference, all of them. Collective."""
    if reference == ADAPTERS_OFF:
        return _starts_without_adapters(context)
    from forge_plugin_losses.teacher import find_trained

    job = context.job
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


def _starts_without_adapters(context: BuildContext) -> bool:
    """Whether adapters begin at zero, as none are loaded. Collective."""
    from forge_plugin_losses.teacher import context_beside, find_trained

    tables = list(context.job.checkpoint.loads.values())
    if not tables:
        return True
    # One of several may load adapters alone, as type `peft` does; and so may one of another kind
    path = getattr(tables[0], "path", None) if len(tables) == 1 else None
    if path is None:
        return False
    try:
        checkpoint, manifest = find_trained(Path(path))
        trained = context_beside(context, manifest["job"], str(checkpoint / "manifest.json"))
    except (ForgeError, OSError):  # the run names what is missing
        return False
    return not _adapters_alone(trained.job)
