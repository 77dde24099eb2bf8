"""The components `schedule_free_adamw` and `schedule_free_sgd`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core.contracts.components import OptimizerComponent
from forge_kit.optim import fields

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.optimizer import NamedParameters

SHORT = (0.95, 0.99)
"""`betas` for short runs."""
SPANS = 3
"""A run shorter than so many spans of the average of squared gradients is better off with a shorter one."""


@frozen(kw_only=True)
class ScheduleFree(OptimizerComponent):
    """Base of the two optimizers."""

    has_evaluation_weights: ClassVar[bool] = True

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight; not of norms, biases and embeddings."""
    warmup_steps: int = field(default=0, validator=ge(0))
    """Steps over which the rate rises linearly. Leave `[scheduler]` at its default, a constant rate."""
    r: float = field(default=0.0, validator=ge(0))
    """Exponent of the step's number in its weight in the average."""
    weight_lr_power: float = field(default=2.0, validator=ge(0))
    """Exponent of the rate in a step's weight in the average, which makes a difference during the warm-up."""
    foreach: bool = True
    """Whether operations process all parameters at once: faster, with more memory at the peak."""


@frozen(kw_only=True)
class ScheduleFreeAdamW(ScheduleFree):
    """AdamW without a schedule (Defazio et al. 2024, "The Road Less Scheduled", algorithm 1).

    An average of the weights takes the place of the decay of the rate. By the authors' package `schedulefree`.
    Evaluation, generation, export and other runs use the average; training continues with its own weights.

    State: two tensors like each parameter.
    """

    lr: float = field(default=2.5e-3, validator=gt(0))
    """Learning rate; larger ones than with a schedule are usual."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=fields.betas_with_positive_first)
    """Interpolation of the weights between z and the average (y), and decay of the average of squared gradients. The
    default is the paper's, for long runs; [0.95, 0.99] is better in one of some hundred steps (docs/optimizers.md)."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the averaged square."""

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Points at `betas` where the average of squared gradients spans much of the run."""
        steps, kept = context.job.train.steps, self.betas[1]
        # An average of decay β spans about 1 / (1 - β) steps
        if steps * (1 - kept) < SPANS and kept > SHORT[1]:
            span = f"the second averages over {1 / (1 - kept):,.0f} steps, and the run has {steps:,}"
            yield "betas", f"{list(self.betas)}", f"{span}; in short runs {list(SHORT)} was better"

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Norms, biases and embeddings are a group without weight decay (`NamedParameters.groups`)."""
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
    """SGD without a schedule (Defazio et al. 2024, equations 3 to 5), by the authors' package `schedulefree`.

    See `schedule_free_adamw`.

    State: one tensor like each parameter.
    """

    lr: float = field(default=1.0, validator=gt(0))
    """Learning rate; larger ones than with a schedule are usual."""
    momentum: float = field(default=0.9, validator=[gt(0), lt(1)])
    """Interpolation of the weights between z and the average (y)."""

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        """Groups as in `schedule_free_adamw`; `momentum` has the role of `betas[0]`."""
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
