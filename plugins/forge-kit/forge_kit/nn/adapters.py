"""What adapters of matrices need from the modules that they are added to, and how code leaves them out for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from forge_core import JobError, Problem
from forge_kit.nn.derived_class import derived
from forge_kit.nn.modules import Linear

if TYPE_CHECKING:
    from forge_core.contracts.model import Model

SECOND = "the model has adapters of another plugin, and each would freeze the other's: leave one of the tables out"
"""Why a model takes the adapters of one plugin only."""


@runtime_checkable
class Adaptable(Protocol):
    """A module that multiplies by its `weight`, (…, out, in), and may add a bias: `module(x, *further)`.

    `forge_kit.nn.modules.Linear` is one, and so may be the stacked matrices of experts.
    """

    weight: Tensor

    def resized(self, inputs: int, outputs: int, *, std: float) -> nn.Module:
        """Returns a module of this kind without a bias, of other widths, called with the same further arguments.

        Its weight is drawn from N(0, std²).
        """
        ...


def resized(module: nn.Module, inputs: int, outputs: int, *, std: float) -> nn.Module | None:
    """Returns a module of the kind of `module` with other widths; see `Adaptable`. None: it is not of such a kind."""
    if isinstance(module, Adaptable):
        return module.resized(inputs, outputs, std=std)
    return Linear(inputs, outputs, std=std) if type(module) is nn.Linear else None


class HasAdapter(nn.Module):
    """Base of modules whose adapter can be switched off, so that they compute what they did without it."""

    adapter_on: bool = True


def put_before(mixin: Any, module: Any) -> None:
    """Make a module compute by `mixin`, whose `super()` is the module's own class: what adds an adapter to a matrix.

    A forward hook would come after a stage that sums the module's output over ranks, and miss the sum.

    Raises:
        JobError: the module has an adapter already, whose parameters would be hidden behind this one.
    """
    base: Any = type(module)
    if issubclass(mixin, HasAdapter) and isinstance(module, HasAdapter):
        raise JobError([Problem("plugins", SECOND)])
    # In place: its name, its parameters and references to it stay valid
    module.__class__ = derived(mixin, base)


def train_adapters(model: Model, train: Collection[str] = ()) -> None:
    """Freeze all parameters but adapters, and declare to checkpoints what begins here and what never changes.

    A run then loads a checkpoint that has no adapters, and its checkpoints have none of the frozen parameters.

    Args:
        model: built, with its adapters, before its parameters have values.
        train: names of further parameters that train as they are.

    Raises:
        JobError: another plugin has added adapters, and has decided what trains.
    """
    adapters = adapter_names(model)
    if {*adapters} & {*model.begins_here}:
        raise JobError([Problem("plugins", SECOND)])
    # Beside what others have added, such as a head that scores answers
    model.begins_here = [*model.begins_here, *adapters]
    trained = {*adapters, *train}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    # No buffers, which are small: a module may change its own in any forward pass, as a batch norm does
    model.unchanged = [name for name, _ in model.named_parameters() if name not in trained]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes without its adapters: the model from which fine-tuning began.

    Raises:
        ValueError: the model has no adapters, so that it would be no other model.
    """
    modules: list[Any] = [module for module in model.modules() if isinstance(module, HasAdapter)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no adapters to switch off")
    before = [module.adapter_on for module in modules]
    for module in modules:
        module.adapter_on = False
    try:
        yield
    finally:
        for module, was_on in zip(modules, before, strict=True):
            module.adapter_on = was_on


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which modules are in evaluation mode: two passes agree, as neither draws for dropout.

    Unlike an evaluation of the engine, it leaves weights as they are that an optimizer averages.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def merge_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights with their adapters added, by the name of the parameter that each replaces; float32 or wider.

    The names of what the adapters own are in `adapter_names`. The model stays as it is, and may not be sharded.
    """
    return {
        f"{name}.weight": module.merged_weight()
        for name, module in model.named_modules()
        if isinstance(module, MergesAdapter)
    }


@runtime_checkable
class MergesAdapter(Protocol):
    """A module with an adapter that can be added to its weight."""

    def merged_weight(self) -> Tensor:
        """Returns the weight that alone computes what weight and adapter do, (…, out, in), float32 or wider."""
        ...

    def adapter_parameters(self) -> Iterator[str]:
        """Yields the names, relative to the module, of the parameters that only the adapter has."""
        ...


def adapter_names(model: nn.Module) -> list[str]:
    """Returns the names of all parameters that only adapters have."""
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, MergesAdapter)
        for own in module.adapter_parameters()
    ]
