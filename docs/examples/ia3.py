"""(IA)³: a factor for each output of some matrices (Liu et al. 2022, section 3.3), as a plugin in one file."""

from fnmatch import fnmatchcase

import torch
from attrs import define
from torch import nn

from forge_core import JobError, Plugin, Problem, hookimpl
from forge_kit.nn.adapters import HasAdapter, put_before, train_adapters
from forge_kit.nn.modules import Linear


class Factors(nn.Module):
    """What training adds to factors of 1: `weight` (out,) starts at zero, so that training starts with the base."""

    def __init__(self, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def init_parameter(self, name, fill):
        """Fills `weight`."""
        fill.constant(0.0)

    def init_buffers(self, device):
        """There are none."""

    def forward(self):
        """Returns the factors: by a call, in which the stages of `[parallel]` give each rank its part."""
        return 1 + self.weight


class Scaled(HasAdapter):
    """l * (W x): the module's own class, which comes after this one, computes W x."""

    def forward(self, x):
        """(…, in) to (…, out)."""
        y = super().forward(x)
        return y * self.ia3().to(y.dtype) if self.adapter_on else y

    def merged_weight(self):
        """Returns the weight that alone computes the same: (out, in)."""
        return self.ia3().detach()[:, None] * self.weight.detach()

    def adapter_parameters(self):
        """Yields the names of parameters that only the adapter has."""
        yield "ia3.weight"


@define(kw_only=True, slots=False)
class IA3(Plugin):
    """Freezes the model, and trains a factor for each key, each value and each hidden feature."""

    resumes_as = "impossible"
    adapters_alone = True  # losses may take the model with its adapters off as their reference

    targets: tuple[str, ...] = ("*.attention.k", "*.attention.v", "*.ffn.up")
    """Patterns of module names."""

    @hookimpl(wrapper=True)
    def forge_build_model(self, component, context):
        """Adds the factors to the model that the job names."""
        model = yield
        if component is not context.job.model:  # a model inside of it, or a teacher
            return model
        names = [name for name, _ in model.named_modules() if any(fnmatchcase(name, one) for one in self.targets)]
        others = [name for name in names if not isinstance(model.get_submodule(name), Linear | nn.Linear)]
        if others or not names:  # a stack of experts has rows of many matrices, and an embedding has no outputs
            what = f"{others[0]} is no linear layer" if others else f"{self.targets} fit no module of the model"
            raise JobError([Problem("plugins.ia3.targets", what)])
        for name in names:
            module = model.get_submodule(name)
            module.ia3 = Factors(len(module.weight))
            put_before(Scaled, module)
        train_adapters(model)
        # Of a matrix whose rows ranks share, each has the factors of its rows; in front, as the first pattern counts
        plan = model.tensor_parallel_plan
        model.tensor_parallel_plan = lambda: {**{f"{name}.ia3": "column" for name in names}, **plan()}
        return model
