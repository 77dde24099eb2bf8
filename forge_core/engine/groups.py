"""Parameter groups of a built optimizer: checks, settings of `[[optimizer.groups]]`, and rates at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.mixture import lr_factor
from forge_core.contracts.components import ParameterGroup, SchedulerComponent
from forge_core.contracts.errors import ForgeError, JobError, Problem, did_you_mean, listed

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Outline
    from forge_core.contracts.optimizer import NamedParameters, Schedule
    from forge_core.job import Job

Group = dict[str, Any]
"""As in `torch.optim.Optimizer.param_groups`."""
Names = Mapping[str, Sequence[str]]
"""Tensors of a model, each with all the names it goes by (see `Outline.names`)."""


def check_groups(groups: Sequence[Mapping[str, Any]], parameters: NamedParameters) -> None:
    """Check that every parameter is in exactly one group.

    Raises:
        ForgeError: names the parameters that the optimizer left out or would step twice.
    """
    stepped = Counter(id(parameter) for group in groups for parameter in group["params"])
    if missing := [item.name for item in parameters if not stepped[id(item.parameter)]]:
        raise ForgeError(f"the optimizer left out {listed(missing)}; every parameter must be in one of its groups")
    if twice := [item.name for item in parameters if stepped[id(item.parameter)] > 1]:
        raise ForgeError(f"the optimizer has {listed(twice)} in more than one group")


def check_modes(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer with modes declares which weights are evaluated, or checkpoints would lack them."""
    needed = ("train", "evaluation_weights", "load_evaluation_weights")
    missing = [name for name in needed if name not in dir(optimizer)]
    if "eval" in dir(optimizer) and missing:
        raise ForgeError(
            f"{type(optimizer).__name__} has eval(), but not {', '.join(missing)}; checkpoints and exports need the "
            "weights that are evaluated: see forge_core.contracts.optimizer.HasEvaluationWeights"
        )


def apply_settings(optimizer: torch.optim.Optimizer, tables: Sequence[ParameterGroup], outline: Outline) -> None:
    """Divide the optimizer's groups, in place, so that each parameter has the settings of the first table that fits."""
    if not tables:
        return
    names, groups = outline.names(outline.sizes), optimizer.param_groups
    if problems := list(_problems(tables, groups, names)):
        raise JobError(problems)
    groups[:] = [part for number, group in enumerate(groups) for part in _divide(number, group, tables, names)]


def _divide(number: int, group: Group, tables: Sequence[ParameterGroup], names: Names) -> Iterator[Group]:
    """The parts of a group: first the part without a table, then one per table. Their key `match` identifies them."""
    # A rank of a pipeline may hold a tied parameter by its other name alone.
    known_as = [names.get(name, (name,)) for name in group["names"]]
    chosen = [next((n for n, table in enumerate(tables, 1) if fits(each, table.match)), 0) for each in known_as]
    for place, (match, settings) in enumerate([("", {}), *((f" {table.match}", table.values()) for table in tables)]):
        # Empty parts too: ranks of a pipeline have other parameters, and must have the same groups in a checkpoint.
        own = [index for index, choice in enumerate(chosen) if choice == place]
        part = {key: [group[key][index] for index in own] for key in ("params", "names")}
        # A plugin that has multiplied the optimizer's settings multiplies what a table sets in their place, too.
        factors = {key: group.get("factors", {}).get(key) for key in settings if key in group}
        scaled = {key: settings[key] if factor is None else settings[key] * factor for key, factor in factors.items()}
        yield group | part | scaled | {"match": f"{number}{match}"}


def _problems(tables: Sequence[ParameterGroup], groups: Sequence[Group], names: Names) -> Iterator[Problem]:
    """Patterns that fit no parameter, and settings that no group of a table's parameters has."""
    all_names = [name for names_ in names.values() for name in names_]
    for number, table in enumerate(tables):
        path = f"optimizer.groups.{number}"
        if not fits(all_names, table.match):
            yield Problem(
                f"{path}.match",
                f"{table.match!r} fits no parameter of the model{did_you_mean(table.match, all_names)}",
            )
        fitting = [group for group in groups if any(fits(names.get(n, (n,)), table.match) for n in group["names"])]
        known = {key for group in fitting for key in group} - {"params", "names", "param_names", "match", "factors"}
        for key in table.values() if fitting else ():
            if key not in known:
                table_path = path if key in ("lr", "weight_decay") else f"{path}.settings"
                yield Problem(
                    f"{table_path}.{key}",
                    f"is no setting of these parameters; they have {', '.join(sorted(known))}",
                )


def fits(names: Iterable[str], pattern: str) -> bool:
    """Whether the pattern fits one of the names."""
    return any(fnmatchcase(name, pattern) for name in names)


class Rates:
    """Learning rates, and other scalars that follow a schedule, written into the groups before each update."""

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer, context: BuildContext) -> None:
        self._job = job
        self._groups = optimizer.param_groups
        self._base = [group["lr"] for group in self._groups]
        self._schedule: Schedule = context.build(job.scheduler)
        # A field of the optimizer component that is a schedule goes into the groups' key of the same name.
        self._scheduled = {
            name: context.build(value)
            for name, value in attrs.asdict(job.optimizer, recurse=False).items()
            if isinstance(value, SchedulerComponent)
        }
        for name in self._scheduled:
            if not any(name in group for group in self._groups):
                raise ForgeError(f"optimizer.{name} is a schedule, but the optimizer has no group with a key {name!r}")

    def factor(self, step: int) -> float:
        """The factor of the learning rate's schedule for the update after `step` completed steps."""
        return self._schedule(step, self._job.train.steps)

    def apply(self, step: int, tokens: int) -> float:
        """Set every rate for the update after `step` steps and `tokens` positions; returns the first group's rate."""
        factor = self.factor(step) * lr_factor(self._job, step, tokens)
        # From the job's base rates and not from the groups: a run that continues follows its present job.
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor
            for name, schedule in self._scheduled.items():
                if name in group:
                    group[name] = schedule(step, self._job.train.steps)
        return self._groups[0]["lr"]
