"""Runs that begin alike: of each size and seed the longest is the trunk, and shorter ones branch from it.

A schedule that is constant before its decay (WSD) makes runs of several lengths equal up to the decay of the shorter
one. Nothing here names a schedule: two are compared step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve

from forge_core.checkpoint.run_diff import text_changes
from forge_core.config.keys import walk_components
from forge_core.config.load import dump_job
from forge_core.contracts.components import SchedulerComponent
from forge_core.contracts.errors import JobError
from forge_core.contracts.layout import Layout
from forge_core.job import Job
from forge_core.parallel.initialise import bare_context
from forge_core.plugins.catalog import Catalog
from forge_plugin_ladder.planned import STEPS, Planned

HOOK = "hooks.branch_points"
LEAST = 0.5
"""Part of its steps that a branch has in common with its trunk, at least: a warm-up alone makes no trunk."""


def with_trunks(runs: Sequence[Planned], jobs: Mapping[str, Job], is_demanded: bool, catalog: Catalog) -> list[Planned]:
    """Returns the runs with the trunk of each, and the steps at which others branch.

    Args:
        runs: of a ladder.
        jobs: by the runs' names.
        is_demanded: whether the ladder trains branches.
        catalog: the installed components.

    Raises:
        JobError: `is_demanded`, and two runs of one size have less than half of the shorter one in common.
    """
    groups: dict[tuple[str, int | None, tuple[float, ...]], list[Planned]] = {}
    for run in runs:
        groups.setdefault((run.size, run.seed, tuple(run.factors.values())), []).append(run)
    found: dict[str, Planned] = {}
    for group in groups.values():
        # The longest run is needed anyway; a trunk without a decay would be one more
        trunk = max(group, key=lambda run: run.steps)
        branches = []
        for run in group:
            if run is trunk:
                continue
            steps, reason = shared_steps(jobs[trunk.name], jobs[run.name], catalog)
            is_branch = steps >= LEAST * run.steps
            if is_demanded and not is_branch:
                raise JobError(
                    f"trunk: {run.name} cannot branch from {trunk.name}, with which it shares {steps} of its "
                    f"{run.steps} steps: {reason}"
                )
            branches.append(evolve(run, trunk=trunk.name, branch_step=steps) if is_branch else run)
        points = sorted({run.branch_step for run in branches if run.trunk})
        found |= {run.name: run for run in [evolve(trunk, branch_points=points), *branches]}
    return [found[run.name] for run in runs]


def shared_steps(trunk: Job, branch: Job, catalog: Catalog) -> tuple[int, str]:
    """Returns the number of steps with which two runs begin that are equal to the bit, and what differs then."""
    schedules, others = _schedules(branch), _schedules(trunk)
    for change in text_changes(dump_job(trunk, catalog), dump_job(branch, catalog), catalog):
        # Keys of schedules are judged by the rates that they make, below
        is_schedule = change.path.startswith(tuple(f"{path}." for path in schedules))
        if change.path != STEPS and not (is_schedule and change.means == "safe"):
            return 0, f"their jobs differ in {change}"
    if trunk.train.batch_sizes != branch.train.batch_sizes:
        return 0, "their batch schedules differ"
    # Schedules are functions of the step and the run's length alone, so that no model is needed
    context = bare_context(branch, Layout(), catalog, torch.device("cpu"))
    pairs = {path: (context.build(others[path]), context.build(schedules[path])) for path in schedules}
    # A branch makes its last step itself: a run without a step would have no metrics
    last = branch.train.steps - 1
    for step in range(last):
        for path, (first, second) in pairs.items():
            if first(step, trunk.train.steps) != second(step, branch.train.steps):
                return step, f"`{path}` has other rates from step {step + 1} on; `wsd` is constant before its decay"
    return last, "nothing; its last step is its own"


def _schedules(job: Job) -> dict[str, SchedulerComponent]:
    return {path: each for path, each in walk_components(job) if isinstance(each, SchedulerComponent)}


def trunk_settings(run: Planned) -> dict[str, str]:
    """Returns the keys, values as in TOML, by which a run saves where others branch; none where none does."""
    if not run.branch_points:
        return {}
    # Saves by time remain, for a run that is interrupted; a save in every thousand steps would stay forever
    return {
        f"{HOOK}.type": '"forge-plugin-ladder/branch_points"',
        f"{HOOK}.steps": str(list(run.branch_points)),
        "checkpoint.interval": "0",
        "checkpoint.keep": "0",
    }
