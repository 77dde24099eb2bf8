"""What the component `float8` builds."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_core.config.suggest import did_you_mean
from forge_core.errors import JobError, Problem
from forge_core.modules import Linear
from forge_core.parallel.mesh import any_rank
from forge_core.protocols import HasFloat8Exemptions, HasTensorParallelPlan
from forge_plugin_float8.float8 import MULTIPLE, NO_GLOO


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torchao, while imported, warns of each of its kernels that are for other devices than this machine's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


with _without_warnings():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from forge_plugin_float8.gathering import gather_in_float8
    from forge_plugin_float8.product import Float8Forward

if TYPE_CHECKING:
    from forge_core.context import BuildContext
    from forge_core.protocols import Model
    from forge_plugin_float8.float8 import Float8

NOT_A_MULTIPLE = f"sizes are no multiples of {MULTIPLE}"
OWN_WAY = "it computes in its own way"
NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)")
"""Of a module in a list, in its name."""


class Float8Stage:
    """See `forge_core.protocols.ParallelStage`."""

    def __init__(self, component: Float8, context: BuildContext) -> None:
        """Raises: JobError: weights are to be gathered in float8 on a device that cannot."""
        if component.all_gather and not sends_float8(context.device):
            raise JobError([Problem("parallel.float8.all_gather", NO_GLOO)])
        self._component = component
        self._layout = context.layout
        self._device = context.device
        self._emulated = not multiplies_float8(context.device)
        type_of = context.plugins.catalog.type_of
        self._compiled = any(type_of(type(s)).endswith("/compile") for s in context.job.parallel.values())
        self._changed: list[str] = []
        self._left: dict[str, list[str]] = {}
        """Names of linear layers that keep their precision, by the reason."""

    def apply(self, model: Model) -> Model:
        """Change the forward pass of linear layers, in place: no module is replaced, so no name changes.

        Raises:
            JobError: there are none, a pattern fits none, or tp leaves a rank a part that no float8 product takes.
        """
        assert isinstance(model, nn.Module)
        linear = {name: module for name, module in model.named_modules() if isinstance(module, Linear | nn.Linear)}
        self._check_patterns(list(linear))
        for name, reason in self._reasons(model, linear).items():
            if reason:
                self._left.setdefault(reason, []).append(name)
            else:
                self._changed.append(name)
        self._check_found(model)
        self._check_parts(model)
        config = self._config()
        # With nothing to convert: for what torchao does to the compiler, which else miscompiles float8 on some devices.
        convert_to_float8_training(nn.Identity(), config=config)
        for name in self._changed:
            linear[name].forward = Float8Forward(linear[name], config)  # type: ignore[method-assign]
            if self._component.all_gather:
                gather_in_float8(linear[name], config)
        return model

    def describe(self) -> str:
        """What is computed how, and what is not."""
        how = "" if self._compiled else ", slow without [parallel.compile]"
        if self._emulated:
            how = f", emulated in float32, slowly: {_name(self._device)} has no float8 products"
        gathered = ", gathered in float8" if self._component.all_gather else ""
        parts = [
            f"{self._component.recipe}{how}{gathered}",
            f"{len(self._changed)} linear layers: {_short(self._changed)}",
        ]
        parts += [f"not {_short(names)} ({reason})" for reason, names in self._left.items()]
        return "; ".join(parts)

    def _config(self) -> Float8LinearConfig:
        recipe = Float8LinearConfig.from_recipe_name(self._component.recipe)
        return dataclasses.replace(
            recipe, emulate=self._emulated, enable_fsdp_float8_all_gather=self._component.all_gather
        )

    # --- which layers ----------------------------------------------------------------------------------------------

    def _reasons(self, model: nn.Module, linear: Mapping[str, nn.Module]) -> dict[str, str]:
        """Why each linear layer keeps its precision, by name; nothing where it does not."""
        head = set(model.head.modules())  # type: ignore[union-attr]
        exempt = model.float8_exempt() if isinstance(model, HasFloat8Exemptions) else ()
        return {
            name: _reason(module, module in head or _fits(name, exempt), _fits(name, self._component.exclude))
            for name, module in linear.items()
        }

    def _check_patterns(self, names: Sequence[str]) -> None:
        patterns = self._component.exclude
        found = [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
        if patterns and self._layout.pp > 1:
            found = any_rank(found)  # other ranks have other layers
        problems = [
            Problem("parallel.float8.exclude", f"{pattern!r} fits no linear layer{did_you_mean(pattern, names)}")
            for pattern, fits in zip(patterns, found, strict=True)
            if not fits
        ]
        if problems:
            raise JobError(problems)

    def _check_found(self, model: nn.Module) -> None:
        found = bool(self._changed)
        if not (any_rank([found])[0] if self._layout.pp > 1 else found):
            left = "; ".join(f"{_short(names)}: {reason}" for reason, names in self._left.items())
            seen = f"{type(model).__name__} has no linear layer to compute in float8" + (f" ({left})" if left else "")
            raise JobError([Problem("parallel.float8", f"{seen}; leave the stage out")])

    def _check_parts(self, model: nn.Module) -> None:
        """What is changed must not depend on the layout, so a part that does not fit is an error.

        It is one on emulated devices too, so that a job which runs there runs on others.
        """
        ranks = self._layout.tp
        plan = model.tensor_parallel_plan() if ranks > 1 and isinstance(model, HasTensorParallelPlan) else {}
        for name in self._changed:
            way = next((way for pattern, way in plan.items() if fnmatchcase(name, pattern)), None)
            if way in ("column", "row"):
                size = model.get_parameter(f"{name}.weight").shape[way == "row"]
                if size % (MULTIPLE * ranks):
                    seen = f"{name} has {size} {'columns' if way == 'row' else 'rows'}, {size / ranks:g} for each of"
                    fix = f"a float8 product takes multiples of {MULTIPLE}; exclude it, or lower the degree"
                    raise JobError([Problem("parallel.float8", f"{seen} {ranks} tensor-parallel ranks, but {fix}")])


def _reason(module: nn.Module, exempt: bool, excluded: bool) -> str:
    if exempt or excluded:
        return "exempt" if exempt else "excluded"
    if type(module).forward not in (Linear.forward, nn.Linear.forward) or "forward" in vars(module):
        return OWN_WAY
    return NOT_A_MULTIPLE if any(size % MULTIPLE for size in module.weight.shape) else ""  # type: ignore[union-attr]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _short(names: Sequence[str]) -> str:
    """Names that differ in their first number only are put together: `layers.0-3,5.ffn.up`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, *rest = NUMBER.split(name, maxsplit=1)
        numbers.setdefault((before, "".join(rest[1:])), []).extend(int(number) for number in rest[:1])
    return ", ".join(f"{before}{_ranges(found)}{after}" for (before, after), found in numbers.items())


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,5`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(str(end) for end in ends) for ends in ranges)


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has float8 matrix products: NVIDIA's from Ada on, AMD's from MI300 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def sends_float8(device: torch.device) -> bool:
    """Whether the collectives between such devices take float8: NCCL's do, gloo's do not."""
    return device.type == "cuda"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
