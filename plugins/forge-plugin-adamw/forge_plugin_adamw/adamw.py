"""The component `adamw`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import OptimizerComponent, when_resumed
from forge_kit.optim import fields
from forge_kit.optim.update_size import elementwise

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Role
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class AdamW(OptimizerComponent):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2): torch's own, in its fused form.

    Each rank updates its own part of a parameter that is split over ranks.

    State: two tensors like each parameter, and a step count. Norms, biases and embeddings are not decayed.
    """

    adam_rule: ClassVar[bool] = True
    """See `forge_kit.optim.update_size`."""

    lr: float = field(default=3e-4, validator=gt(0))
    """Base learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), validator=fields.betas)
    """Decay of the averages of the gradient and of its square."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the averaged square."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    decay_embeddings: bool = False
    """Whether embeddings are decayed too (a tied head is one)."""
    fused: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether the whole update is one fused kernel. false: torch's loop over parameters, for comparison."""

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        return elementwise(inputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_kit.torch_internals import LocalAdamW

        spared: tuple[Role, ...] = ("norm", "bias") if self.decay_embeddings else ("norm", "bias", "embedding")
        groups = parameters.groups(self.weight_decay, spared)
        return LocalAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=self.fused)
