"""Optimizers beside parameters that are bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.contracts.optimizer import NamedParameters

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.components import OptimizerComponent
    from forge_core.contracts.contexts import BuildContext


def build_without_bytes(
    component: OptimizerComponent, context: BuildContext, parameters: NamedParameters
) -> torch.optim.Optimizer | None:
    """Build an optimizer of parameters with numbers, and list the others in its first group afterwards.

    torch's fused optimizers refuse to be built of bytes, and the engine refuses parameters that are in no group.
    Without a gradient they are left alone.

    Returns:
        The optimizer; None if there are no bytes.
    """
    stored = [item for item in parameters if not item.parameter.is_floating_point()]
    if not stored:
        return None
    others = NamedParameters(item for item in parameters if item.parameter.is_floating_point())
    optimizer = component.build(context, parameters=others)
    first = optimizer.param_groups[0]
    first["params"] += [item.parameter for item in stored]
    first["names"] += [item.name for item in stored]
    return optimizer
