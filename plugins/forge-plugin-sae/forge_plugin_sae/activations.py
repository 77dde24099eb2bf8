"""The kind `sparsity`: how pre-activations become a few active latents, and what training adds to the squared error.

N rows, F latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from forge_core.contracts.components import Component

if TYPE_CHECKING:
    from forge_plugin_sae.activation_modules import Activation


@frozen(kw_only=True)
class SparsityComponent(Component):
    """Makes the activation of a sparse autoencoder: the table `activation` of the sink `sae`."""

    kind = "sparsity"

    @property
    def revival(self) -> float:
        """Coefficient of the loss by which dead latents explain what the others leave; 0: none."""
        return 0.0

    def size_problem(self, latents: int) -> str:
        """Why an autoencoder with this number of latents cannot have this activation; empty if it can."""
        return ""

    def activation(self, latents: int) -> Activation:
        """Returns a new module for F = `latents`, on the default device and of the default dtype."""
        raise NotImplementedError


@frozen(kw_only=True)
class TopK(SparsityComponent):
    """The k largest positive pre-activations of each row (Gao et al. 2024, sections 2.3 and A.2)."""

    k: int = field(default=32, validator=gt(0))
    """Active latents of a row; fewer where fewer pre-activations are positive."""
    auxiliary: float = field(default=1 / 32, validator=ge(0))
    """Weight of the loss in which dead latents reconstruct the error of the others, relative to the variance of that
    error. It uses D / 2 dead latents at most, D the width of the target. 0: dead latents stay dead."""

    @property
    def revival(self) -> float:
        """Returns `auxiliary`: without it, latents that never are among the k largest get no gradient."""
        return self.auxiliary

    def size_problem(self, latents: int) -> str:
        """Checks that k is at most the number of latents, as topk requires."""
        return f"k = {self.k} exceeds the {latents} latents; lower k, or add latents" if self.k > latents else ""

    def activation(self, latents: int) -> Activation:
        """Returns a module without parameters or buffers."""
        from forge_plugin_sae.activation_modules import TopKActivation

        return TopKActivation(self.k)


@frozen(kw_only=True)
class BatchTopK(TopK):
    """The k x N largest positive pre-activations of N rows together (Bussmann et al. 2024).

    Rows may so have more or fewer than k. A row by itself, after training, keeps latents above one threshold: the mean
    of the smallest active latent of a batch (their equation 6), here as a moving average.
    """

    threshold_decay: float = field(default=0.999, validator=[ge(0), lt(1)])
    """Decay of the average of thresholds over batches, which counts only batches seen: it is not biased to 0."""

    def activation(self, latents: int) -> Activation:
        """Returns a module with two buffers, the average threshold and its weight."""
        from forge_plugin_sae.activation_modules import BatchTopKActivation

        return BatchTopKActivation(self.k, self.threshold_decay)


@frozen(kw_only=True)
class JumpReLU(SparsityComponent):
    """Pre-activations above a learned threshold of their latent (Rajamanoharan et al. 2024, "Jumping Ahead").

    The loss has no gradient with respect to a threshold; a straight-through estimator with a rectangular kernel
    stands in for it (their equations 11 and 12). Thresholds are trained as such, not as logarithms: Adam moves a
    parameter by its rate, which at a logarithm is a share of the threshold and hardly moves a small one.
    """

    target_l0: float = field(default=32.0, validator=ge(0))
    """Active latents of a row to aim at: the penalty is `coefficient` x (L0 / target_l0 - 1)^2, L0 the mean over a
    batch. 0: the penalty is `coefficient` x L0, and the number of active latents follows from the coefficient."""
    coefficient: float = field(default=1.0, validator=ge(0))
    """Weight of the penalty beside the squared error, whose target has a mean squared norm of 1 if `normalise`."""
    bandwidth: float = field(default=0.001, validator=gt(0))
    """Width of the kernel: pre-activations within half of it of a threshold move that threshold."""
    threshold: float = field(default=0.001, validator=ge(0))
    """Initial threshold of all latents."""

    def size_problem(self, latents: int) -> str:
        """Checks that the target is within reach: L0 is at most the number of latents."""
        if self.target_l0 > latents:
            return f"target_l0 = {self.target_l0:g} exceeds the {latents} latents; lower it, or add latents"
        return ""

    def activation(self, latents: int) -> Activation:
        """Returns a module with a trainable threshold for each latent."""
        from forge_plugin_sae.activation_modules import JumpReLUActivation

        return JumpReLUActivation(latents, self)


@frozen(kw_only=True)
class L1(SparsityComponent):
    """ReLU, with the sum of active latents as a penalty (Bricken et al. 2023, "Towards Monosemanticity")."""

    coefficient: float = field(default=1e-2, validator=ge(0))
    """Weight of the mean over rows of the sum of latents. Decoder rows have unit norm, so that latents cannot shrink at
    no cost."""

    def activation(self, latents: int) -> Activation:
        """Returns a module without parameters or buffers."""
        from forge_plugin_sae.activation_modules import L1Activation

        return L1Activation(self.coefficient)
