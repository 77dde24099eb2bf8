"""The component `muon`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from forge_core.contracts.components import OptimizerComponent, SchedulerComponent, when_resumed
from forge_kit.optim import fields
from forge_kit.optim.update_size import HIDDEN, elementwise

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Role
    from forge_core.contracts.optimizer import NamedParameters
    from forge_plugin_muon.optimizer import MuonOptimizer

Scaling = Literal["original", "match_rms_adamw"]
SMALL = 5e-3
"""Rates below it, with the original scaling, are more often left from another optimizer than meant."""


def momentum_or_schedule(_instance: object, _attribute: object, value: float | SchedulerComponent) -> None:
    """Validator of a momentum, in [0, 1), or a schedule.

    Raises:
        ValueError: it is a number outside.
    """
    if not isinstance(value, SchedulerComponent) and not 0 <= value < 1:
        raise ValueError(f"must be >= 0 and < 1, or a schedule, got {value}")


def scale_of(rows: int, columns: int, scaling: Scaling) -> float:
    """Returns the factor on the rate of a matrix; see `Muon.scaling`."""
    if scaling == "original":
        return math.sqrt(max(1.0, rows / columns))
    # An orthogonal matrix has 1 / sqrt(longer side) in the root mean square, and AdamW's updates about 0.2
    return 0.2 * math.sqrt(max(rows, columns))


@frozen(kw_only=True)
class Muon(OptimizerComponent):
    """Orthogonalised momentum for the matrices of hidden layers; AdamW for all other parameters.

    By a Newton-Schulz iteration (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").
    Embeddings, head, norms, biases and routers are AdamW's.

    A parameter that stacks matrices, such as the weights of experts, has each of them orthogonalised separately; one
    that fuses several is treated as one matrix. The result does not depend on the layout: every matrix is
    orthogonalised as a whole, by one of the ranks that share it.

    State: one tensor like each matrix; AdamW's for other parameters.
    """

    further_roles = ()  # it has to know of each parameter whether it is a matrix of a hidden layer

    lr: float = field(default=0.02, validator=gt(0))
    """Base learning rate of matrices; the schedule multiplies it."""
    momentum: float | SchedulerComponent = field(default=0.95, validator=momentum_or_schedule)
    """Decay of the average of the gradient. A table makes it a schedule."""
    nesterov: bool = True
    """Whether the present gradient counts once more, with weight 1 - momentum."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    scaling: Scaling = "original"
    """Factor on the rate of a matrix. original: √max(1, rows / columns), as Jordan has it. match_rms_adamw:
    0.2 √max(rows, columns), which makes updates as large as AdamW's, so that AdamW's rate and decay can be reused
    (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2)."""
    ns_steps: int = field(default=5, validator=[ge(1), le(99)])
    """Steps of the Newton-Schulz iteration."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the iteration's polynomial a X + b (X Xᵀ) X + c (X Xᵀ)² X; the default is Jordan's."""
    ns_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the iteration. bf16 is the published one, and drifts by some 1e-4 with the order of sums. fp32: float32,
    or the dtype of the parameters if it is wider. auto: bf16 where `precision` is "bf16" and the processor multiplies
    it natively, else fp32; the run's summary shows the choice."""
    ns_eps: float = field(default=1e-7, validator=gt(0))
    """Lower bound of the norm that a matrix is divided by before the iteration."""
    working_gb: float = field(default=1.0, validator=gt(0), metadata=when_resumed("safe"))
    """Gigabytes (10⁹ bytes) of whole matrices that a rank orthogonalises at a time, or one matrix a rank. A step needs
    about three times this beside the state. Less memory means more rounds, each with two collectives; the result is
    the same."""

    adam_lr: float | None = field(default=None, validator=optional(gt(0)))
    """Base learning rate of all other parameters. None: as `scaling` relates the two rates, 0.15 x `lr` with original
    (3e-3 for the default `lr`) and `lr` with match_rms_adamw."""
    adam_betas: tuple[float, float] = field(default=(0.9, 0.95), validator=fields.betas)
    """Decay of AdamW's averages of the gradient and of its square."""
    adam_eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of AdamW's averaged square."""
    adam_weight_decay: float = field(default=0.1, validator=ge(0))
    """Weight decay of the head and of routers; norms, biases and embeddings have none."""
    fused: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether AdamW's update is one fused kernel. false: torch's loop over parameters."""

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        from forge_plugin_muon.newton_schulz import fast_dtype
        from forge_plugin_muon.optimizer import ADAM_SHARE

        if self.scaling == "original" and self.lr < SMALL:
            takes_it = 'scaling = "match_rms_adamw", which takes it'
            yield "lr", f"{self.lr:g} is small", f"AdamW's? Set lr near {Muon().lr:g}, or {takes_it}"
        if self.adam_lr is None:
            share = ADAM_SHARE[self.scaling]
            yield "adam_lr", f"{share * self.lr:.3g}", f'{share:g} x lr, with scaling = "{self.scaling}"'
        if self.ns_dtype == "auto":
            precision = context.job.train.precision
            if precision != "bf16":
                yield "Newton-Schulz", "float32 or wider", f'precision = "{precision}"'
            else:
                dtype = str(fast_dtype(context.device)).removeprefix("torch.")
                native = "this processor multiplies bfloat16 natively"
                yield "Newton-Schulz", dtype, native if dtype == "bfloat16" else "this processor emulates bfloat16"

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        if role not in HIDDEN:
            return elementwise(inputs)
        # All singular values are 1, and a mean square is over the outputs or the inputs
        return scale_of(outputs, inputs, self.scaling) * math.sqrt(inputs / outputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_plugin_muon.optimizer import MuonOptimizer

        return self.build_as(MuonOptimizer, context, parameters)

    def build_as(
        self, optimizer: type[MuonOptimizer], context: BuildContext, parameters: NamedParameters, **settings: Any
    ) -> MuonOptimizer:
        """Build a subclass of Muon's optimizer with the keys of this component.

        Args:
            optimizer: the class.
            context: the run's.
            parameters: all of the model's.
            settings: arguments that Muon's optimizer lacks.
        """
        import torch

        from forge_kit.optim.matrix_optimizer import divide

        matrices, others = divide(parameters)
        wide = self.ns_dtype == "fp32" or (self.ns_dtype == "auto" and context.job.train.precision != "bf16")
        return optimizer(
            [matrices.group()],
            others.groups(self.adam_weight_decay),
            lr=self.lr,
            # A schedule's value is written into the groups before each step.
            momentum=0.0 if isinstance(self.momentum, SchedulerComponent) else self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            scaling=self.scaling,
            ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients,
            ns_dtype=torch.float32 if wide else torch.bfloat16 if self.ns_dtype == "bf16" else None,
            ns_eps=self.ns_eps,
            adam_lr=self.adam_lr,
            adam_betas=self.adam_betas,
            adam_eps=self.adam_eps,
            fused=self.fused,
            working_bytes=int(self.working_gb * 1e9),
            mesh=context.mesh,
            **settings,
        )
