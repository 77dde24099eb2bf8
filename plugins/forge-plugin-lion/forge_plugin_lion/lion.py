"""The component `lion`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import OptimizerComponent
from forge_kit.optim import fields
from forge_kit.optim.update_size import elementwise

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Role
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class Lion(OptimizerComponent):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2).

    State: one tensor like each parameter, half of Adam's. Every element moves by the rate, so the paper (section 5)
    takes a rate three to ten times smaller than AdamW's and a weight decay as many times larger. Norms, biases and
    embeddings are not decayed.
    """

    lr: float = field(default=1e-4, validator=gt(0))
    """Base learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = field(default=(0.9, 0.99), validator=fields.betas)
    """Weight of the momentum in its interpolation with the gradient for the update, and decay of the momentum."""
    weight_decay: float = field(default=0.3, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    decay_embeddings: bool = False
    """Whether embeddings are decayed too (a tied head is one)."""
    cautious: bool = False
    """Whether only elements move whose update agrees in sign with their gradient. They then move further, by the factor
    elements / (agreeing elements + 1) of their parameter (Liang et al. 2024, "Cautious Optimizers")."""

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        return elementwise(inputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_lion.optimizer import LionOptimizer

        spared: tuple[Role, ...] = ("norm", "bias") if self.decay_embeddings else ("norm", "bias", "embedding")
        groups = parameters.groups(self.weight_decay, spared)
        return LionOptimizer(groups, lr=self.lr, betas=self.betas, cautious=self.cautious)
