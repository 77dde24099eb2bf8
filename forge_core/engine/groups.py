"""Checks of a built optimizer, and the settings of `[[optimizer.groups]]`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from forge_core.contracts.errors import ForgeError, JobError, Problem, did_you_mean

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.components import ParameterGroup
    from forge_core.contracts.parameters import NamedParameters
    from forge_core.engine.model_facts import Outline

Group = dict[str, Any]
"""As in `torch.optim.Optimizer.param_groups`."""


def check_groups(groups: Sequence[Mapping[str, Any]], parameters: NamedParameters) -> None:
    """Every parameter must be in exactly one group.

    Raises:
        ForgeError: names the parameters that the optimizer left out or would step twice.
    """
    stepped = [id(parameter) for group in groups for parameter in group["params"]]
    counts = {p.name: stepped.count(id(p.parameter)) for p in parameters} if len(set(stepped)) != len(stepped) else None
    present = set(stepped)
    missing = [p.name for p in parameters if id(p.parameter) not in present]
    if missing:
        raise ForgeError(f"the optimizer left out {_some(missing)}; every parameter must be in one of its groups")
    if counts:
        twice = [name for name, count in counts.items() if count > 1]
        raise ForgeError(f"the optimizer has {_some(twice)} in more than one group")


def check_modes(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer with modes must say what its weights for evaluation are, or checkpoints would lack them.

    Raises:
        ForgeError: it has `eval()`, but not all of `forge_core.contracts.optimizer.HasEvaluationWeights`.
    """
    needed = ("train", "evaluation_weights", "load_evaluation_weights")
    missing = [name for name in needed if name not in dir(optimizer)]
    if "eval" in dir(optimizer) and missing:
        lacking = ", ".join(missing)
        raise ForgeError(
            f"{type(optimizer).__name__} has eval(), but not {lacking}; checkpoints and exports need the weights that "
            "are evaluated: see forge_core.contracts.optimizer.HasEvaluationWeights"
        )


def apply_settings(optimizer: torch.optim.Optimizer, tables: Sequence[ParameterGroup], outline: Outline) -> None:
    """Divide the groups of `optimizer`, in place, so that each parameter has the settings of the first table that fits.

    Every table makes a group of every group, empty ones too: pipeline ranks, which have other parameters, have the same
    groups.

    Args:
        outline: of the whole model; a pattern that fits none of its parameters is a mistake.

    Raises:
        JobError: a pattern fits nothing, or a setting is none of the optimizer's.
    """
    if not tables:
        return
    ties = outline.ties.items()
    names = {name: (name, *(other for other, first in ties if first == name)) for name in outline.sizes}
    problems = [*_unfitting(tables, names), *_unknown(tables, optimizer.param_groups, names)]
    if problems:
        raise JobError(problems)
    groups = enumerate(optimizer.param_groups)
    optimizer.param_groups[:] = [part for of, group in groups for part in _divide(of, group, tables, names)]


def _divide(
    of: int, group: Group, tables: Sequence[ParameterGroup], names: Mapping[str, Sequence[str]]
) -> Iterator[Group]:
    """The parts of group number `of`; `match` says which one a part is, whatever the order of the tables."""
    chosen = [_first_fitting(tables, names.get(name, (name,))) for name in group["names"]]
    matches = [f"{of}", *(f"{of} {table.match}" for table in tables)]
    for number, settings in enumerate([{}, *(table.values() for table in tables)]):
        own = [index for index, table in enumerate(chosen) if table == number - 1]
        part = {key: [group[key][index] for index in own] for key in ("params", "names")}
        known = {key: value for key, value in settings.items() if key in group}
        yield group | part | known | {"match": matches[number]}


def _first_fitting(tables: Sequence[ParameterGroup], names: Sequence[str]) -> int:
    """Number of the table; -1 if none fits."""
    return next((number for number, table in enumerate(tables) if _fits(names, table)), -1)


def _fits(names: Iterable[str], table: ParameterGroup) -> bool:
    return any(fnmatchcase(name, table.match) for name in names)


def _unfitting(tables: Sequence[ParameterGroup], names: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    known = [name for all_names in names.values() for name in all_names]
    for number, table in enumerate(tables):
        if not _fits(known, table):
            hint = did_you_mean(table.match, known)
            yield Problem(f"optimizer.groups.{number}.match", f"{table.match!r} fits no parameter of the model{hint}")


def _unknown(
    tables: Sequence[ParameterGroup], groups: Sequence[Group], names: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Settings that no group has of those whose parameters a table fits."""
    for number, table in enumerate(tables):
        fitted = [group for group in groups if any(_fits(names.get(name, (name,)), table) for name in group["names"])]
        known = {key for group in fitted for key in group} - {"params", "names", "param_names", "match"}
        for key in table.values():
            if fitted and key not in known:
                path = f"optimizer.groups.{number}" + ("" if key in ("lr", "weight_decay") else ".settings")
                allowed = ", ".join(sorted(known))
                yield Problem(f"{path}.{key}", f"is no setting of these parameters; they have {allowed}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
