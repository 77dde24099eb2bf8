"""The component `soap`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, lt, optional

from forge_core.contracts.components import OptimizerComponent, when_resumed
from forge_kit.optim import fields
from forge_kit.optim.update_size import elementwise

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.model import Role
    from forge_core.contracts.optimizer import NamedParameters


@frozen(kw_only=True)
class SOAP(OptimizerComponent):
    """Adam in the eigenbasis of Shampoo's preconditioner for matrices of hidden layers; AdamW for the rest.

    Algorithm 3 of Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam". Embeddings, head, norms,
    biases and routers are AdamW's.

    A parameter that stacks matrices, such as the weights of experts, has each of them treated separately; one that
    fuses several is treated as one matrix. The first gradient of a matrix only initialises its preconditioner. The
    result does not depend on the layout: every matrix is computed as a whole, by one of the ranks that share it.

    State: for a matrix (m, n), two tensors like it and two each of (m, m) and (n, n), all on the rank that computes it;
    AdamW's for other parameters.

    On a GPU the host waits for the device once in a step that brings bases up to date, or once for each `working_gb` of
    them, and in the first step for each matrix too.
    """

    further_roles = ()  # it has to know of each parameter whether it is a matrix of a hidden layer

    lr: float = field(default=3e-3, validator=gt(0))
    """Base learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = field(default=(0.95, 0.95), validator=fields.betas)
    """Decay of the averages of the gradient and, in the eigenbasis, of its square."""
    preconditioner_beta: float | None = field(default=None, validator=optional([ge(0), lt(1)]))
    """Decay of the averages of G Gᵀ and Gᵀ G, whose eigenvectors are the basis. None: the second of `betas`."""
    eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of the averaged square."""
    weight_decay: float = field(default=0.01, validator=ge(0))
    """Decoupled weight decay: each step subtracts lr x this x the weight."""
    precondition_frequency: int = field(default=10, validator=ge(1))
    """Updates between two corrections of the eigenbasis, each by a step of the power method and a QR decomposition.
    More often is better and slower (section 6.3 of the paper)."""
    max_dim: int = field(default=10000, validator=ge(1), metadata=when_resumed("impossible"))
    """Sides of a matrix longer than this are not rotated."""
    working_gb: float = field(default=1.0, validator=gt(0), metadata=when_resumed("safe"))
    """Gigabytes (10⁹ bytes) of whole matrices that a rank computes at a time, or one matrix a rank. A step needs about
    twice this beside the state. Less memory means more rounds, each with two collectives; the result is the same."""

    adam_lr: float | None = field(default=None, validator=optional(gt(0)))
    """Base learning rate of all other parameters. None: `lr`."""
    adam_betas: tuple[float, float] = field(default=(0.9, 0.95), validator=fields.betas)
    """Decay of AdamW's averages of the gradient and of its square."""
    adam_eps: float = field(default=1e-8, validator=gt(0))
    """Added to the root of AdamW's averaged square."""
    adam_weight_decay: float = field(default=0.01, validator=ge(0))
    """Weight decay of the head and of routers; norms, biases and embeddings have none."""
    fused: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether AdamW's update is one fused kernel. false: torch's loop over parameters."""

    def waits(self) -> str:
        return f"one every {self.precondition_frequency} updates, for the bases of SOAP"

    def update_size(self, role: Role, outputs: int, inputs: int) -> float:
        """See `forge_kit.optim.update_size.HasUpdateSize`."""
        # As Adam's, by measurement (docs/log.md): bases follow the gradients too slowly to make updates orthogonal
        return elementwise(inputs)

    def build(self, context: BuildContext, parameters: NamedParameters) -> torch.optim.Optimizer:
        from forge_kit.optim.matrix_optimizer import divide
        from forge_plugin_soap.optimizer import SOAPOptimizer

        matrices, others = divide(parameters)
        return SOAPOptimizer(
            [matrices.group()],
            others.groups(self.adam_weight_decay),
            lr=self.lr,
            betas=self.betas,
            preconditioner_beta=self.preconditioner_beta,
            eps=self.eps,
            weight_decay=self.weight_decay,
            precondition_frequency=self.precondition_frequency,
            max_dim=self.max_dim,
            adam_lr=self.adam_lr,
            adam_betas=self.adam_betas,
            adam_eps=self.adam_eps,
            fused=self.fused,
            working_bytes=int(self.working_gb * 1e9),
            mesh=context.mesh,
        )
