"""Which modules of a model get adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from forge_core.contracts.errors import Problem, did_you_mean
from forge_core.contracts.model import ROLES
from forge_core.contracts.optimizer import roles_of
from forge_kit.nn.adapters import resized

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.model import Model, Role

ALL = "all"
"""The target that means every matrix that a layer multiplies by, but routers."""
LEFT_OUT: frozenset[Role] = frozenset(("head", "router", "embedding"))
"""Roles that `all` leaves out."""


def adaptable(model: Model) -> dict[str, Role]:
    """Returns the name of each module that can have an adapter, with the role of its weight."""
    roles = roles_of(model)
    head = set(model.head.modules())
    return {
        name: roles[f"{name}.weight"]
        for name, module in model.named_modules()
        if f"{name}.weight" in roles and module not in head and resized(module, 1, 1, std=0.0) is not None
    }


def select(model: Model, targets: Sequence[str], rank: int) -> list[str]:
    """Returns the names of the modules that the targets name, in the order of the model."""
    known = adaptable(model)
    return [
        name
        for name, role in known.items()
        if any(_fits(target, name, role) for target in targets if target != ALL)
        or (ALL in targets and role not in LEFT_OUT and min(_shape(model, name)[-2:]) > rank)
    ]


def _fits(target: str, name: str, role: Role) -> bool:
    """Whether a target is the role, or a pattern of the name or of its end."""
    return target == role or fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _shape(model: Model, name: str) -> Sequence[int]:
    module: nn.Module = model.get_submodule(name)
    return module.weight.shape  # type: ignore[union-attr,return-value]


def target_problems(model: Model, targets: Sequence[str], rank: int, *, decomposed: bool) -> Iterator[Problem]:
    """Yields why targets do not fit a model; paths are relative to the plugin's table."""
    known = adaptable(model)
    ends = {name.rpartition(".")[2] for name in known}
    for number, target in enumerate(targets):
        if target != ALL and not any(_fits(target, name, role) for name, role in known.items()):
            hint = did_you_mean(target, [ALL, *ROLES, *ends, *known]) or f"; there are {', '.join(sorted(ends))}"
            where = _elsewhere(model, target)
            yield Problem(f"targets.{number}", f"{target!r} fits no module that can have an adapter{where or hint}")
    chosen = select(model, targets, rank)
    if not chosen and ALL in targets:
        reason = f"no matrix of {type(model).__name__} has more than rank = {rank} rows and columns"
        yield Problem("rank", f"{reason} and is of a kind that can have an adapter")
    stacks = [name for name in chosen if len(_shape(model, name)) > 2]
    if decomposed and stacks:
        message = f"cannot decompose the stacked matrices of {stacks[0]}, one per expert"
        yield Problem("method", f"'dora' {message}; take 'lora' or 'rslora', or other targets")


def _elsewhere(model: Model, target: str) -> str:
    """The reason, if the target names modules that cannot have an adapter."""
    kinds: Mapping[str, str] = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if _fits(target, name, "") and any(True for _ in module.parameters())
    }
    if not kinds:
        return ""
    name, kind = next(iter(kinds.items()))
    return f": {name} is a {kind}; to train it as it is, name its parameters in `train`"
