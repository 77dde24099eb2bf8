"""Protocols of a model, answered by combining the answers of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from forge_core.contracts.data import Batch
from forge_core.contracts.model import (
    HasExpertStacks,
    HasFloat8Exemptions,
    HasFlops,
    HasRoles,
    HasSequenceMixers,
    HasTensorParallelPlan,
    Prepares,
    Role,
)


def prepare(part: nn.Module, batch: Batch) -> Batch:
    """Returns the batch with the entries that the part needs."""
    return part.prepare(batch) if isinstance(part, Prepares) else batch


def flops(part: nn.Module, seq_len: int) -> float:
    """Returns FLOPs a token, forward and backward: the part's own count, else 6 an element of its matrices."""
    if isinstance(part, HasFlops):
        return part.flops(seq_len)
    return 6.0 * sum(parameter.numel() for parameter in part.parameters() if parameter.ndim > 1)


def roles(name: str, part: nn.Module) -> dict[str, Role]:
    """Returns the role of each parameter below `name`: the part's own answer, else by shape."""
    declared = part.parameter_roles() if isinstance(part, HasRoles) else {}
    return {f"{name}.{key}": declared.get(key) or _role(key, p.ndim) for key, p in part.named_parameters()}


def _role(name: str, dimensions: int) -> Role:
    if name.endswith("bias"):
        return "bias"
    shapes: Mapping[int, Role] = {1: "norm", 2: "matrix"}
    return shapes.get(dimensions, "stack")


def tensor_parallel_plan(name: str, part: nn.Module) -> dict[str, str]:
    """Returns the part's plan, with module names below `name`; "" is the part itself."""
    plan = part.tensor_parallel_plan() if isinstance(part, HasTensorParallelPlan) else {}
    return {f"{name}.{key}" if key else name: way for key, way in plan.items()}


def sequence_mixers(name: str, part: nn.Module) -> dict[str, int]:
    """Returns the part's sequence mixers, with names below `name`, and their numbers of key/value heads."""
    mixers = part.sequence_mixers() if isinstance(part, HasSequenceMixers) else {}
    return {f"{name}.{key}": heads for key, heads in mixers.items()}


def expert_stacks(name: str, part: nn.Module) -> list[str]:
    """Returns the part's stacks of experts, with names below `name`."""
    return [f"{name}.{key}" for key in part.expert_stacks()] if isinstance(part, HasExpertStacks) else []


def float8_exempt(name: str, part: nn.Module) -> list[str]:
    """Returns the part's exemptions, with module names below `name`."""
    return [f"{name}.{key}" for key in part.float8_exempt()] if isinstance(part, HasFloat8Exemptions) else []


def backend_choices(part: nn.Module, seq_len: int) -> Sequence[tuple[str, str, str]]:
    """Returns the part's choices of kernels: (what, choice, why)."""
    choices = getattr(part, "backend_choices", None)
    return choices(seq_len) if choices is not None else ()
