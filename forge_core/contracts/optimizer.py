"""Contracts of optimizers: parameters with names and roles, schedules, and weights or state of an optimizer's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.components import OptimizerComponent
from forge_core.contracts.errors import ForgeError, Problem, did_you_mean
from forge_core.contracts.model import ROLES, Model, Role, with_defaults

Schedule = Callable[[int, int], float]
"""(step, total steps) -> factor; pure. Step 0 is the first update."""


@frozen
class NamedParameter:
    """A parameter, its name in the bare model, and its purpose."""

    name: str
    parameter: nn.Parameter
    role: Role


class NamedParameters(tuple[NamedParameter, ...]):
    """Every parameter of a model once, in the model's order; frozen ones too, as they may be unfrozen later."""

    __slots__ = ()

    @classmethod
    def of(cls, model: Model, roles: Mapping[str, Role] | None = None) -> NamedParameters:
        """Name the parameters of a model, whose roles are by default `roles_of(model)`."""
        known = roles_of(model) if roles is None else roles
        return cls(NamedParameter(name, parameter, known[name]) for name, parameter in model.named_parameters())

    def groups(self, decay: float, no_decay: Collection[Role] = ("norm", "bias", "embedding")) -> list[dict[str, Any]]:
        """Two groups for a `torch.optim.Optimizer`: one with `weight_decay=decay`, one without.

        Parameters of fewer than two dimensions are in the second one, whatever their role (a router's bias has the
        role `router`), and so are the roles in `no_decay`.
        """
        spared = {p.name for p in self if p.parameter.ndim < 2 or p.role in no_decay}
        # Always both, empty or not: pipeline ranks have other parameters, and must have the same groups.
        return [
            NamedParameters(p for p in self if p.name not in spared).group(weight_decay=decay),
            NamedParameters(p for p in self if p.name in spared).group(weight_decay=0.0),
        ]

    def group(self, **settings: Any) -> dict[str, Any]:
        """All of these as one group for a `torch.optim.Optimizer`: `params`, `names`, and the settings."""
        return {"params": [p.parameter for p in self], "names": [p.name for p in self], **settings}


def roles_of(model: Model) -> dict[str, Role]:
    """The role of each parameter, by name: as the model declares it, else derived from the modules.

    A `ForgeError` names one of a parameter that the model does not have, or one that is a misspelt usual one.
    """
    declared = dict(with_defaults(model).parameter_roles())
    roles = {
        name: _derive_role(name, module, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
    }
    for name, role in declared.items():
        hint = "" if role in ROLES else did_you_mean(role, ROLES, 0.7)
        if hint or name not in roles:
            raise ForgeError(f"{type(model).__name__}.parameter_roles: no parameter {name!r} or no role {role!r}{hint}")
    return roles | declared


def _derive_role(name: str, module: nn.Module, parameter: nn.Parameter) -> Role:
    kind = type(module).__name__.lower()
    if name.partition(".")[0] == "head" and parameter.ndim > 1:
        return "head"
    if name.endswith("bias"):
        return "bias"
    if "embedding" in kind:
        return "embedding"
    if parameter.ndim <= 1 or "norm" in kind:
        return "norm"
    return "matrix" if parameter.ndim == 2 else "stack"


def role_problems(component: OptimizerComponent, roles: Mapping[str, Role]) -> Iterable[Problem]:
    """Roles of a model's parameters that are unknown to an optimizer which treats each role differently."""
    if component.further_roles is not None:
        known = [*ROLES, *component.further_roles]
        strange = {role: name for name, role in roles.items() if role not in known}
        for role, name in strange.items():
            yield Problem("", f"does not know the role {role!r}, which the model declares for {name}; take another one")


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """An optimizer whose weights for evaluation, between `eval()` and `train()`, differ from the weights it trains.

    A checkpoint holds both: training continues from the trained weights, whereas generation, export and
    `[checkpoint.load]` take the weights for evaluation.
    """

    def eval(self) -> None:
        """Put the weights for evaluation into the parameters."""

    def train(self) -> None:
        """Put back the weights that were there before `eval()`, to the bit."""

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        """Weights for a checkpoint, by parameter and sharded like it; without parameters that are evaluated as is."""
        # Beside `eval()`, which a save must not call: the trained weights would not come back to the bit.

    def load_evaluation_weights(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Take back the weights of a checkpoint, after state and parameters were loaded; or derive them from those."""


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer whose state is neither split like its parameter nor whole on every rank."""

    def empty_slot(self, parameter: Tensor, slot: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Memory for the state of a parameter in a checkpoint, of its size and dtype; None: this rank keeps none of it.

        A DTensor where ranks have parts of it. The default is `forge_core.checkpoint.state.empty_slot`. Raises a
        `CheckpointError` if the checkpoint's state does not fit this optimizer.
        """
