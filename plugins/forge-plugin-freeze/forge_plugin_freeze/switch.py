"""Switches a model in training from one set of trained parameters to another, under every layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forge_core.contracts.model import ChangesWithUpdates
from forge_kit.torch_internals import is_compiled


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Yields this rank's parameters, each with its name and learning rate."""
    # Read from the optimizer, which has all of them regardless of what trains: a module may hold gathered ones instead.
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield name, parameter, float(group["lr"])


def switch(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Collection[str]) -> None:
    """Let the parameters of these names train, and no others; between two steps, when there are no gradients."""
    changed = False
    for name, parameter, _ in parameters_of(optimizer):
        if parameter.requires_grad != (name in trained):
            parameter.requires_grad_(name in trained)
            changed = True
    _hold_updates(model, {name for name, _, _ in parameters_of(optimizer)}, trained)
    # On every rank alike, including pipeline ranks whose own parameters stay as before: both calls cost little.
    _gather_anew(model)
    if changed and is_compiled(model):
        # Graphs contain the backward pass of the parameters that trained when they were traced, and torch assumes that
        # parameters of modules do not change (`skip_fsdp_guards`, `skip_tensor_guards_with_matching_dict_tags`):
        # without this, unfrozen parameters would never have a gradient.
        torch.compiler.reset()


def _gather_anew(model: nn.Module) -> None:
    """Let the units of `fsdp` take note of what trains.

    Each sets dtypes of its reduction by the parameters that train at its first forward pass, and whoever was frozen
    then as a whole has none: its gradients would be reduced in the compute dtype. `unshard` looks again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _hold_updates(model: nn.Module, names: Collection[str], trained: Collection[str]) -> None:
    """Keep the buffers of frozen modules, such as the bias that balances a router's experts, as they are."""
    for path, module in model.named_modules():
        if isinstance(module, ChangesWithUpdates):
            own = [name for name in names if name.startswith(f"{path}.")]
            vars(module).pop("after_update", None)
            if own and not any(name in trained for name in own):
                vars(module)["after_update"] = _stay


def _stay() -> None:
    """Takes the place of `after_update` of a module that is frozen."""


def let_heads_train_alone(model: nn.Module) -> None:
    """Make the gradient of a head reach `fsdp` when nothing before the head trains; before `fsdp` is applied.

    `fsdp` reduces gradients in a backward pass through what the model returns, and a loss applies the head after that.
    """
    # First of the hooks of the output, so that the one of fsdp sees what it returns. The dry run needs it, too.
    model.register_forward_hook(_connected)


def _connected(model: nn.Module, _inputs: Any, hidden: Any) -> Any:
    if not isinstance(model, FSDPModule) or not isinstance(hidden, Tensor):  # in a pipeline there may be a carry
        return hidden
    return hidden.detach().requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden
