"""Initial values of the base model, times factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from forge_core import JobError, Problem
from forge_core.contracts.model import Fill, Initialises


class ScaledFill:
    """Fills a parameter with values that are a factor times as large; see `forge_core.contracts.model.Fill`."""

    def __init__(self, fill: Fill, factor: float) -> None:
        self.fill, self.factor = fill, factor

    def normal(self, std: float, mean: float = 0.0) -> None:
        self.fill.normal(self.factor * std, self.factor * mean)

    def trunc_normal(self, std: float, bound: float = 3.0) -> None:
        self.fill.trunc_normal(self.factor * std, bound)

    def uniform(self, low: float, high: float) -> None:
        self.fill.uniform(self.factor * low, self.factor * high)

    def constant(self, value: float) -> None:
        self.fill.constant(self.factor * value)


def scale_initial_values(
    model: nn.Module, twins: Mapping[str, tuple[nn.Module, str]], factors: Mapping[str, float]
) -> None:
    """Make modules draw parameters as the base model does, times factors.

    As the base and not as the model, since a component may derive deviations from its own width or depth.

    Args:
        model: whose modules are changed.
        twins: by parameter, the module of the base and the key there.
        factors: by parameter.

    Raises:
        JobError: a module does not draw its parameters by `init_parameter`.
    """
    by_module: dict[str, dict[str, float]] = {}
    for name, factor in factors.items():
        holder, _, key = name.rpartition(".")
        by_module.setdefault(holder, {})[key] = factor
    for holder, own in by_module.items():
        module: Any = model.get_submodule(holder)
        pairs = {key: twins[f"{holder}.{key}" if holder else key] for key in own}
        # Vectors keep what their own module draws: an arrangement by head or frequency has no counterpart in the base
        keys = {key: pair for key, pair in pairs.items() if getattr(module, key).ndim > 1 or own[key] != 1}
        if not keys:
            continue
        if not all(isinstance(each, Initialises) for each in (module, *(base for base, _ in keys.values()))):
            message = f"draws {holder}.{next(iter(keys))} by reset_parameters, which cannot be scaled"
            raise JobError([Problem("", f"{type(module).__name__} {message}; implement init_parameter(name, fill)")])
        module.init_parameter = _Drawn(module.init_parameter, keys, own)


class _Drawn:
    """`init_parameter` of a module."""

    # On the instance and not in a derived class: stages such as fsdp exchange the class of a module

    def __init__(self, own: Any, twins: Mapping[str, tuple[Any, str]], factors: Mapping[str, float]) -> None:
        self.own, self.twins, self.factors = own, twins, factors

    def __call__(self, name: str, fill: Fill) -> None:
        if name not in self.twins:
            self.own(name, fill)
            return
        base, key = self.twins[name]
        base.init_parameter(key, ScaledFill(fill, self.factors[name]))
