"""The components `schedule_free_adamw` and `schedule_free_sgd`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core.contracts.components import OptimizerComponent
from forge_kit import fields

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.parameters import NamedParameters


@frozen(kw_only=True)
class ScheduleFree(OptimizerComponent):
    """Base of the two optimizers."""

    has_evaluation_weights: ClassVar[bool] = True

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Each step takes lr x this of a weight away; norms, biases and embeddings are spared."""
    warmup_steps: int = field(default=0, validator=ge(0))
    """Steps over which the rate rises linearly. Leave `[scheduler]` at its default, a constant rate."""
    r: float = field(default=0.0, validator=ge(0))
    """Power of the step's number by which it counts in the average."""
    weight_lr_power: float = field(default=2.0, validator=ge(0))
    """Power of the rate by which a step counts in the average; during the warm-up that makes a difference."""
    foreach: bool = True
    """Whether operations take all parameters at a time: faster, with more memory at the peak."""


@frozen(kw_only=True)
class ScheduleFreeAdamW(ScheduleFree):
    """AdamW without a schedule (Defazio et al. 2024, "The Road Less Scheduled", algorithm 1): an average of the weights
    takes the place of the decay of the rate. By the authors' package `schedulefree`.

    Evaluation, generation, export and other runs take the average; training goes on from where it was.

    State: two tensors like each parameter.
    """

    lr: float = field(default=2.5e-3, validator=gt(0))
    """Learning rate; larger ones than with a schedule do well."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=fields.betas_with_positive_first)
    """How far gradients are taken towards the average, and decay of the average of their square."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the averaged square."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_schedule_free.optimizer import AdamWScheduleFree

        return AdamWScheduleFree(
            parameters.groups(self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            warmup_steps=self.warmup_steps,
            r=self.r,
            weight_lr_power=self.weight_lr_power,
            foreach=self.foreach,
        )


@frozen(kw_only=True)
class ScheduleFreeSGD(ScheduleFree):
    """SGD without a schedule (Defazio et al. 2024, equations 3 to 5), by the authors' package `schedulefree`. See
    `schedule_free_adamw`.

    State: one tensor like each parameter.
    """

    lr: float = field(default=1.0, validator=gt(0))
    """Learning rate; larger ones than with a schedule do well."""
    momentum: float = field(default=0.9, validator=[gt(0), lt(1)])
    """How far gradients are taken towards the average."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_schedule_free.optimizer import SGDScheduleFree

        return SGDScheduleFree(
            parameters.groups(self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            warmup_steps=self.warmup_steps,
            r=self.r,
            weight_lr_power=self.weight_lr_power,
            foreach=self.foreach,
        )
