"""Chooses the linear layers of a model that are computed in float8."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from forge_core.contracts.errors import Problem, did_you_mean
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Model
from forge_kit.nn.adapters import HasAdapter
from forge_kit.nn.modules import Linear
from forge_plugin_lowbit.float8.float8 import MULTIPLE

NOT_A_MULTIPLE = f"sizes are no multiples of {MULTIPLE}"
OWN_WAY = "it computes in its own way"
NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)")
"""The index of a module in a list, within the module's name."""


def linear_layers(model: Model) -> dict[str, nn.Module]:
    """Returns every linear layer, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear | nn.Linear)}


def choose(model: Model, exclude: Sequence[str]) -> tuple[Sequence[str], Mapping[str, Sequence[str]]]:
    """Choose the linear layers that change, and group those that keep their precision.

    Args:
        model: the model, split by pipeline stages at most.
        exclude: name patterns of layers that keep their precision, in addition to the head and to the layers that the
            model exempts.

    Returns:
        Names of the layers that change, and names of those that do not, by the reason.
    """
    head = set(model.head.modules())
    exempt = model.float8_exempt()
    changed: list[str] = []
    left: dict[str, list[str]] = {}
    for name, module in linear_layers(model).items():
        reason = _reason(module, module in head or _fits(name, exempt), _fits(name, exclude))
        (left.setdefault(reason, []) if reason else changed).append(name)
    return changed, left


def model_problems(model: Model, exclude: Sequence[str], layout: Layout, all_gather: bool = False) -> Iterator[Problem]:
    """Yields why a model cannot be computed in float8 with these settings."""
    names = list(linear_layers(model))
    for pattern in exclude:
        if not fnmatch.filter(names, pattern):
            yield Problem("exclude", f"{pattern!r} fits no linear layer{did_you_mean(pattern, names)}")
    changed, left = choose(model, exclude)
    if adapted := [name for name in changed if all_gather and isinstance(model.get_submodule(name), HasAdapter)]:
        message = f"{short(adapted)}: adapters read the weight beside them, which fsdp would gather rounded"
        yield Problem("all_gather", f"{message}; leave it out, or exclude these layers")
    if not changed:
        why = "; ".join(f"{short(names)}: {reason}" for reason, names in left.items())
        message = f"{type(model).__name__} has no linear layer to compute in float8" + (f" ({why})" if why else "")
        yield Problem("", f"{message}; leave the stage out")
    if layout.tp > 1:
        yield from _part_problems(model, changed, layout.tp)


def _part_problems(model: Model, changed: Sequence[str], ranks: int) -> Iterator[Problem]:
    """Yields layers whose parts under tensor parallel no float8 product accepts.

    The choice of layers must not depend on the layout, so such a part is an error. It is one on emulated devices too:
    a job that runs there then runs on all others.
    """
    plan = model.tensor_parallel_plan()
    sizes: dict[tuple[int, str], list[str]] = {}
    for name in changed:
        way = next((way for pattern, way in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if way in ("column", "row"):
            # The weight is (out, in): `column` divides its rows, `row` its columns
            size = model.get_parameter(f"{name}.weight").shape[way == "row"]
            if size % (MULTIPLE * ranks):
                sizes.setdefault((size, "columns" if way == "row" else "rows"), []).append(name)
    for (size, dimension), names in sizes.items():
        message = f"{short(names)}: {size} {dimension}, {size / ranks:g} for each of {ranks} tensor-parallel ranks"
        hint = f"a float8 product takes multiples of {MULTIPLE}; exclude them, or lower the degree"
        yield Problem("", f"{message}, but {hint}")


def _reason(module: nn.Module, exempt: bool, excluded: bool) -> str:
    if exempt or excluded:
        return "exempt" if exempt else "excluded"
    # A custom forward pass, of the class or set on the object, computes something other than x Wᵀ + b.
    own = without_adapter(type(module))
    if own.forward not in (Linear.forward, nn.Linear.forward) or "forward" in vars(module):
        return OWN_WAY
    return NOT_A_MULTIPLE if any(size % MULTIPLE for size in module.weight.shape) else ""  # type: ignore[union-attr]


def without_adapter(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that computes x Wᵀ + b: `cls`, or of a layer with an adapter the one that it is put before."""
    return next(each for each in cls.__mro__ if issubclass(each, nn.Module) and not issubclass(each, HasAdapter))


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def short(names: Sequence[str]) -> str:
    """Join names that differ in their first number only: `layers.0-3,5.ffn.up`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        # The pattern has a group: the parts are before, number, after; without a number, before alone
        before, *rest = NUMBER.split(name, maxsplit=1)
        numbers.setdefault((before, "".join(rest[1:])), []).extend(int(number) for number in rest[:1])
    return ", ".join(f"{before}{_ranges(indices)}{after}" for (before, after), indices in numbers.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Formats numbers as ranges: `0-3,5`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(str(end) for end in ends) for ends in ranges)
