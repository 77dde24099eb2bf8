"""The stage of the component `float8`: makes linear layers multiply in float8."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.runtime import ParallelStage
from forge_plugin_lowbit.float8.choice import choose, linear_layers, short
from forge_plugin_lowbit.float8.float8 import NO_GLOO


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences torchao, which when imported warns of each of its kernels for devices other than this machine's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


with _without_warnings():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from forge_plugin_lowbit.float8.gathering import gather_in_float8
    from forge_plugin_lowbit.float8.product import multiply_in_float8

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Model
    from forge_plugin_lowbit.float8.float8 import Float8


class Float8Stage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: Float8, context: BuildContext) -> None:
        """Raises JobError if weights are to be gathered in float8 on a device that cannot send it."""
        if component.all_gather and not sends_float8(context.device):
            raise JobError([Problem("parallel.float8.all_gather", NO_GLOO)])
        self._component = component
        self._device = context.device
        self._emulated = not multiplies_float8(context.device)
        self._compiled = any(context.type_of(s).endswith("/compile") for s in context.job.parallel.values())
        self._changed: Sequence[str] = ()
        self._left: Mapping[str, Sequence[str]] = {}
        """Names of linear layers that keep their precision, by the reason."""

    def apply(self, model: Model) -> Model:
        """Change the forward pass of linear layers, in place: no module is replaced, so no name changes."""
        linear = linear_layers(model)
        self._changed, self._left = choose(model, self._component.exclude)
        config = self._config()
        # With nothing to convert: it sets up the compiler, which else miscompiles float8 products on some devices.
        convert_to_float8_training(nn.Identity(), config=config)
        for name in self._changed:
            multiply_in_float8(linear[name], config)
            if self._component.all_gather:
                gather_in_float8(linear[name], config)
        return model

    def describe(self) -> str:
        """Returns the recipe, the layers it applies to, and the layers it does not with the reasons."""
        how = "" if self._compiled else ", slow without [parallel.compile]"
        if self._emulated:
            how = f", emulated in float32, slowly: {_name(self._device)} has no float8 products"
        gathered = ", gathered in float8" if self._component.all_gather else ""
        parts = [
            f"{self._component.recipe}{how}{gathered}",
            f"{len(self._changed)} linear layers: {short(self._changed)}",
        ]
        parts += [f"not {short(names)} ({reason})" for reason, names in self._left.items()]
        return "; ".join(parts)

    def _config(self) -> Float8LinearConfig:
        recipe = Float8LinearConfig.from_recipe_name(self._component.recipe)
        return dataclasses.replace(
            recipe, emulate=self._emulated, enable_fsdp_float8_all_gather=self._component.all_gather
        )


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has float8 matrix products: NVIDIA GPUs since Ada, AMD's since MI300."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def sends_float8(device: torch.device) -> bool:
    """Whether collectives between such devices accept float8: NCCL's do, gloo's do not."""
    return device.type == "cuda"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
