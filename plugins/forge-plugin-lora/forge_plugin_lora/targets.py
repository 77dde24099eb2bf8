"""Which modules of a model get adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from forge_core.contracts.errors import Problem, did_you_mean
from forge_core.contracts.model import ROLES
from forge_core.contracts.optimizer import roles_of
from forge_kit.nn.adapters import resized
from forge_plugin_lora.nf4 import BLOCK
from forge_plugin_lora.nf4_matrix import fits
from forge_plugin_lora.sharing import BY_COLUMNS, way_of

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
        # The widths do not matter: only whether the module can be made with others
        if f"{name}.weight" in roles and module not in head and resized(module, 1, 1, std=0.0) is not None
    }


def select(model: Model, targets: Sequence[str], rank: int) -> list[str]:
    """Returns the names of the modules that the targets name, in the order of the model."""
    known = adaptable(model)
    return [
        name
        for name, role in known.items()
        if any(_fits(target, name, role) for target in targets if target != ALL)
        # Else the adapter would have more parameters than the matrix
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
            similar = did_you_mean(target, [ALL, *ROLES, *ends, *known])
            hint = similar or f"; modules end in {', '.join(sorted(ends))}, as {next(iter(known), 'none')} does"
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


def storable(model: Model, chosen: Collection[str], train: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the names of modules whose frozen matrix can be stored in NF4, and of those whose widths do not fit.

    They are those with adapters, `chosen`, and all others that the target `all` means.
    """
    matrices = [
        name
        for name, role in adaptable(model).items()
        if (name in chosen or role not in LEFT_OUT) and not _trains(f"{name}.weight", train)
    ]
    stored = [name for name in matrices if fits(_shape(model, name))]
    return stored, [name for name in matrices if name not in stored]


def store_problems(
    model: Model, stored: Sequence[str], left: Sequence[str], train: Sequence[str], ranks: int
) -> Iterator[Problem]:
    """Yields why matrices cannot be stored in NF4, on `ranks` tensor-parallel ranks; paths as in `target_problems`."""
    if not stored:
        reason = f"{left[0]} has {_shape(model, left[0])[-1]} columns" if left else "all matrices train"
        message = f"NF4 is made of blocks of {BLOCK} weights of a row, and no frozen matrix has such rows"
        yield Problem("base_dtype", f'{message} ({reason}); take "bf16"')
    for name in stored:
        if len(_shape(model, name)) > 2 and _trains(f"{name}.bias", train):
            message = f"{name}.bias trains beside matrices of experts in NF4, which give it no gradient"
            yield Problem("train", f'{message}; leave it out, or take base_dtype = "bf16"')
            break
    if ranks == 1:
        return
    plan = model.tensor_parallel_plan()
    for name in stored:
        columns = _shape(model, name)[-1]
        if way_of(plan, name) in BY_COLUMNS and columns % (BLOCK * ranks):
            message = f"{name} has {columns} columns, {columns / ranks:g} for each of {ranks} tensor-parallel ranks"
            hint = f'but a rank needs whole blocks of {BLOCK}: lower the degree, or take "bf16"'
            yield Problem("base_dtype", f"{message}, {hint}")
            break


def _trains(name: str, train: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in train)


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
