"""The component signsgd: its keys in a job file."""

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
class SignSGD(OptimizerComponent):
    """Sign of a running mean of gradients (Bernstein et al. 2018, Signum). State: one tensor per parameter."""

    lr: float = field(default=1e-3, validator=gt(0))
    """What every weight moves by in one update, before the schedule."""
    momentum: float = field(default=0.9, validator=[ge(0), lt(1)])
    """Weight of the past in the running mean; 0: the sign of this step's gradient."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled: weights shrink by lr x this. Norms, biases and embeddings are left out."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_signsgd.optimizer import SignSGDOptimizer

        return SignSGDOptimizer(parameters.groups(decay=self.weight_decay), lr=self.lr, momentum=self.momentum)
