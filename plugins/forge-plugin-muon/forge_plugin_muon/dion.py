"""The component `dion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional

from forge_core.contracts.components import OptimizerComponent, SchedulerComponent, when_resumed
from forge_kit.optim import fields
from forge_kit.optim.update_size import HIDDEN, elementwise
from forge_plugin_muon.muon import momentum_or_schedule

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Role
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class Dion(OptimizerComponent):
    """Momentum orthogonalised at a low rank, with error feedback, for matrices; AdamW for all other parameters.

    Algorithm 1 of Ahn et al. 2025, "Dion: Distributed Orthonormalized Updates" (arXiv 2504.05295). A step of the power
    method from the last step's right factor Q finds the r largest directions of the momentum; they get singular values
    near 1, and the momentum keeps what they leave out. r is `rank_fraction` of the shorter side. Embeddings, head,
    norms, biases and routers are AdamW's.

    A parameter that stacks matrices, such as the weights of experts, has each of them treated separately; one that
    fuses several is treated as one matrix. The result does not depend on the layout: every matrix is computed as a
    whole, by one of the ranks that share it.

    State: for a matrix (m, n), one tensor like it and one of (n, r), on the rank that computes it; AdamW's for other
    parameters.
    """

    further_roles = ()  # it has to know of each parameter whether it is a matrix of a hidden layer

    lr: float = field(default=0.02, validator=gt(0))
    """Base learning rate of matrices, which √(rows / columns) multiplies; the schedule multiplies both rates."""
    momentum: float | SchedulerComponent = field(default=0.95, validator=momentum_or_schedule)
    """Share that the momentum keeps, per step, of the directions that the update used. A table makes it a schedule."""
    weight_decay: float = field(default=0.1, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    rank_fraction: float = field(default=0.25, validator=and_(gt(0), le(1)), metadata=when_resumed("impossible"))
    """Rank of an update, as a share of the shorter side of a matrix, rounded up. 1 updates all directions."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the length of a column that is divided by it."""
    working_gb: float = field(default=1.0, validator=gt(0), metadata=when_resumed("safe"))
    """Gigabytes (10⁹ bytes) of whole matrices that a rank computes at a time, or one matrix a rank. Less memory means
    more rounds, each with two collectives; the result is the same."""

    adam_lr: float | None = field(default=None, validator=optional(gt(0)))
    """Base learning rate of all other parameters. None: 0.15 x `lr`, as for `muon`."""
    adam_betas: tuple[float, float] = field(default=(0.9, 0.95), validator=fields.betas)
    """Decay of AdamW's averages of the gradient and of its square."""
    adam_eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of AdamW's averaged square."""
    adam_weight_decay: float = field(default=0.1, validator=ge(0))
    """Weight decay of the head and of routers; norms, biases and embeddings have none."""
    fused: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether AdamW's update is one fused kernel. false: torch's loop over parameters."""

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        from forge_plugin_muon.optimizer import ADAM_SHARE

        if self.adam_lr is None:
            share = ADAM_SHARE["original"]
            yield "adam_lr", f"{share * self.lr:.3g}", f"{share:g} x lr"

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        # The rate's own factor, sqrt(rows / columns), makes it the same for all shapes
        return 1.0 if role in HIDDEN else elementwise(inputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_kit.optim.matrix_optimizer import divide
        from forge_plugin_muon.dion_optimizer import DionOptimizer

        matrices, others = divide(parameters)
        return DionOptimizer(
            [matrices.group()],
            others.groups(self.adam_weight_decay),
            lr=self.lr,
            # A schedule's value is written into the groups before each step.
            momentum=0.0 if isinstance(self.momentum, SchedulerComponent) else self.momentum,
            weight_decay=self.weight_decay,
            rank_fraction=self.rank_fraction,
            eps=self.eps,
            adam_lr=self.adam_lr,
            adam_betas=self.adam_betas,
            adam_eps=self.adam_eps,
            fused=self.fused,
            working_bytes=int(self.working_gb * 1e9),
            mesh=context.mesh,
        )
