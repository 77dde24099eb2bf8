"""Maximal update parametrisation (Yang et al. 2022): rates that were tuned on a narrow model suit a wide one.

    [model]
    type = "transformer"
    dim = 4096

    [plugins.mup]
    type = "./mup.py:MuP"
    base.dim = 256              # as it was when the rates were tuned

It acts where parameters are drawn, where logits are made, and on the groups of whatever optimizer is built.
"""

from __future__ import annotations

import attrs
from attrs import define, field
from attrs.validators import min_len

from forge_core import JobError, Plugin, Problem, hookimpl
from forge_core.contracts.model import Initialises
from forge_core.contracts.optimizer import NamedParameters

HIDDEN = ("matrix", "stack", "fused")
"""Roles of weights between two widths; their last dimension is the inputs."""


@define(kw_only=True, slots=False)
class MuP(Plugin):
    """Table 8 of the paper for Adam, relative to a base model. With r = inputs of the base / inputs here,

    - hidden matrices have r times the rate of their group, and initial values √r times as large;
    - logits are multiplied by r of the head's inputs;
    - all else (embeddings, head, norms, biases) stays as it is.

    A decoupled weight decay, which is multiplied by the rate, is divided by r: what it takes away stays the same. Base
    rates may differ by role, as the optimizer has them. What `[[optimizer.groups]]` sets is taken as it is written.
    Attention should keep the width of its heads, and have more of them.
    """

    base: dict[str, int] = field(validator=min_len(1))
    """Keys of `[model]`, with the values of the base model."""

    def problems(self, job, layout):
        known = attrs.fields_dict(type(job.model))
        for key in self.base.keys() - known.keys():
            yield Problem(f"base.{key}", f"unknown key of the model, which has {', '.join(known)}")

    @hookimpl(wrapper=True)
    def forge_build_model(self, component, context):
        model = yield
        base = attrs.evolve(component, **self.base).build(context)
        inputs = {item.name: item.parameter.shape[-1] for item in NamedParameters.of(base)}
        hidden = NamedParameters(item for item in NamedParameters.of(model) if item.role in HIDDEN)
        if missing := [item.name for item in hidden if item.name not in inputs]:
            raise JobError([Problem("plugins.mup.base", f"lacks {missing[0]}; it may be narrower, and nothing else")])
        self.ratios = {item.name: inputs[item.name] / item.parameter.shape[-1] for item in hidden}
        for name, ratio in self.ratios.items():
            module, _, key = name.rpartition(".")
            scale_initial_values(model.get_submodule(module), key, ratio**0.5)
        scale_logits(model.head, inputs_of(base.head) / inputs_of(model.head))
        return model

    @hookimpl(wrapper=True)
    def forge_build_optimizer(self):
        optimizer = yield
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in self.divided(group)]
        return optimizer

    def divided(self, group):
        """One group for each ratio that the model has, empty ones too: all pipeline ranks have the same groups."""
        for ratio in sorted({1.0, *self.ratios.values()}):
            own = [index for index, name in enumerate(group["names"]) if self.ratios.get(name, 1.0) == ratio]
            part = {key: [group[key][index] for index in own] for key in ("params", "names")}
            decay = {"weight_decay": group["weight_decay"] / ratio} if "weight_decay" in group else {}
            yield group | part | decay | {"lr": group["lr"] * ratio}


def inputs_of(head) -> int:
    return next(parameter.shape[-1] for parameter in head.parameters() if parameter.ndim == 2)


def scale_logits(head, factor: float) -> None:
    logits = head.logits
    head.logits = lambda hidden: logits(hidden * factor)


def scale_initial_values(module, key: str, factor: float) -> None:
    """Those of the parameter `key`. Modules of torch's kind (`reset_parameters`) go by their inputs themselves."""
    if not isinstance(module, Initialises):
        return
    initialise = module.init_parameter
    module.init_parameter = lambda name, fill: initialise(name, ScaledFill(fill, factor if name == key else 1.0))


class ScaledFill:
    """See `forge_core.contracts.model.Fill`."""

    def __init__(self, fill, factor: float) -> None:
        self.fill, self.factor = fill, factor

    def normal(self, std, mean=0.0):
        self.fill.normal(self.factor * std, self.factor * mean)

    def trunc_normal(self, std, bound=3.0):
        self.fill.trunc_normal(self.factor * std, bound)

    def uniform(self, low, high):
        self.fill.uniform(self.factor * low, self.factor * high)

    def constant(self, value):
        self.fill.constant(self.factor * value)
