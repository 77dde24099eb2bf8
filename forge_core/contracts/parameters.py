"""Parameters with names and roles: what optimizers receive."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from attrs import frozen
from torch import nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import HasRoles, Role

if TYPE_CHECKING:
    from forge_core.contracts.model import Model

ROLES: tuple[Role, ...] = get_args(Role)


@frozen
class NamedParameter:
    """A parameter, its name in the bare model, and what it is for."""

    name: str
    parameter: nn.Parameter
    role: Role


class NamedParameters(Sequence[NamedParameter]):
    """Every parameter of a model once, in the model's order, frozen ones included.

    A frozen parameter (`requires_grad` is false) has no gradient, so optimizers pass over it; it is in their groups all
    the same and trains as soon as it is unfrozen.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self._parameters = tuple(parameters)

    @classmethod
    def of(cls, model: Model, roles: Mapping[str, Role] | None = None) -> NamedParameters:
        """
        Args:
            roles: role of each parameter, by name; by default `roles_of(model)`.

        Raises:
            ForgeError: the model declares a role that does not exist, or one of a parameter it does not have.
        """
        known = roles_of(model) if roles is None else roles
        return cls([NamedParameter(name, parameter, known[name]) for name, parameter in model.named_parameters()])

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        return self._parameters[index]

    def __iter__(self) -> Iterator[NamedParameter]:
        return iter(self._parameters)

    def with_roles(self, roles: Collection[Role]) -> NamedParameters:
        """Only the parameters of these roles."""
        return NamedParameters([p for p in self if p.role in roles])

    def without_roles(self, roles: Collection[Role]) -> NamedParameters:
        """Only the parameters of other roles."""
        return NamedParameters([p for p in self if p.role not in roles])

    def groups(self, decay: float, no_decay: Collection[Role] = ("norm", "bias", "embedding")) -> list[dict[str, Any]]:
        """Parameter groups for a `torch.optim.Optimizer`: one with `weight_decay=decay`, one without.

        Each has `params`, `names` (the same order) and `weight_decay`. There are always both, so that pipeline ranks,
        which have other parameters, have the same groups.
        """
        return [
            self.without_roles(no_decay).group(weight_decay=decay),
            self.with_roles(no_decay).group(weight_decay=0.0),
        ]

    def group(self, **settings: Any) -> dict[str, Any]:
        """All of these as one parameter group for a `torch.optim.Optimizer`: `params`, `names`, and the settings."""
        return {"params": [p.parameter for p in self], "names": [p.name for p in self], **settings}


def roles_of(model: Model) -> dict[str, Role]:
    """What each parameter is for: as the model declares it, else derived from the modules.

    Raises:
        ForgeError: the model declares a role that does not exist, or one of a parameter it does not have.
    """
    declared = dict(model.parameter_roles()) if isinstance(model, HasRoles) else {}
    roles = _derive_roles(model)
    for name, role in declared.items():
        if role not in ROLES or name not in roles:
            raise ForgeError(f"{type(model).__name__}.parameter_roles: no parameter {name!r} or no role {role!r}")
    return roles | declared


def _derive_roles(model: Model) -> dict[str, Role]:
    assert isinstance(model, nn.Module)
    roles: dict[str, Role] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            roles[full] = _derive_role(full, module, parameter)
    return roles


def _derive_role(name: str, module: nn.Module, parameter: nn.Parameter) -> Role:
    kind = type(module).__name__.lower()
    if name.split(".")[0] == "head" and parameter.ndim > 1:
        return "head"
    if name.endswith("bias"):
        return "bias"
    if "embedding" in kind:
        return "embedding"
    if parameter.ndim <= 1 or "norm" in kind:
        return "norm"
    return "matrix" if parameter.ndim == 2 else "stack"
