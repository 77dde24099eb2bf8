"""The component template_name: its keys in a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core import OptimizerComponent

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class TemplateName(OptimizerComponent):
    """Gradient descent with momentum and decoupled weight decay. State: one tensor per parameter."""

    lr: float = field(default=1e-2, validator=gt(0))
    """Base learning rate, which the schedule multiplies."""
    momentum: float = field(default=0.9, validator=[ge(0), lt(1)])
    """Decay of the running sum of gradients; 0: this step's gradient alone."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled weight decay: each update subtracts lr x this x the weight; not of norms, biases and embeddings."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_template_name.momentum import MomentumDescent

        return MomentumDescent(parameters.groups(decay=self.weight_decay), self.lr, self.momentum)
