"""Parameter groups of optimizers, which take plain tensors as well as groups with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from forge_core.contracts.optimizer import NamedParameters

Groups = Iterable[Tensor] | Iterable[dict[str, Any]] | NamedParameters
"""Parameters, or groups of them, as `torch.optim.Optimizer` takes them."""


def as_groups(parameters: Groups) -> list[dict[str, Any]]:
    """Returns parameter groups."""
    # Never none: a rank of a pipeline may have no parameter of a kind, and torch refuses an empty list of groups.
    if isinstance(parameters, NamedParameters):
        return [parameters.group()]
    items: list[Any] = list(parameters)
    return [dict(item) for item in items] if items and isinstance(items[0], Mapping) else [{"params": items}]


def names_in(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Returns the name of each parameter: that in its group's `names`, or else its number among all."""
    names: dict[Tensor, str] = {}
    for group in groups:
        parameters = list(group["params"])
        # Counted over all groups, so that names are unique
        default = [str(len(names) + number) for number in range(len(parameters))]
        names.update(zip(parameters, group.get("names", default), strict=True))
    return names
