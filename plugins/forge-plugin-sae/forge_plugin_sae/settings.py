"""Settings of training, shared by the sink `sae` and the command `inside sae`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, lt

from forge_core.contracts.components import default_type
from forge_core.contracts.errors import Problem
from forge_plugin_sae.activations import SparsityComponent

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, slots=False)  # a component has its base's slots, and Python combines no two such layouts
class Training:
    """How each sparse autoencoder is trained."""

    activation: SparsityComponent = default_type("topk")
    """What makes latents sparse: `topk`, `batch_topk`, `jumprelu` or `l1`."""
    latents: int = field(default=0, validator=ge(0))
    """Number of latents; 0: `expansion` times the width of the input."""
    expansion: int = field(default=8, validator=gt(0))
    """Latents per feature of the input, where `latents` is 0."""
    lr: float = field(default=0.0, validator=ge(0))
    """Learning rate of Adam; 0: 2e-4 / sqrt(latents / 2^14), the scaling law of Gao et al. 2024, figure 3."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable([ge(0), lt(1)]))
    """Decays of Adam's averages."""
    warmup: int = field(default=100, validator=ge(0))
    """Updates over which the rate grows linearly from 1/warmup of itself; 0: none."""
    batch: int = field(default=2048, validator=gt(0))
    """Rows of an update."""
    buffer: int = field(default=16384, validator=gt(0))
    """Rows of the mixing buffer, through which all rows pass. Training starts when it is full."""
    normalise: bool = True
    """Whether inputs and targets are divided by their root mean squared norm, as the first full buffer has it, so that
    rates and coefficients mean the same at every point. The saved weights apply to the model's original activations."""
    grad_clip_norm: float = field(default=1.0, validator=ge(0))
    """Norm to which gradients are clipped; 0: they are not."""
    dead_after: int = field(default=1_000_000, validator=gt(0))
    """Rows without being active after which a latent is dead: counted as such, and revived by `topk` and `batch_topk`.
    Gao et al. take 10 million."""
    precision: Literal["fp32", "fp64"] = "fp32"
    """Precision of weights, activations and sums."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `precision`."""
        import torch

        return torch.float64 if self.precision == "fp64" else torch.float32

    def latents_of(self, width: int) -> int:
        """Latents of an autoencoder whose input has that width."""
        return self.latents or self.expansion * width

    def rate_of(self, latents: int) -> float:
        """The learning rate after the warm-up."""
        return self.lr or 2e-4 / math.sqrt(latents / 2**14)

    def setting_problems(self) -> Iterator[Problem]:
        """Mistakes that show without knowing any width."""
        if self.batch > self.buffer:
            yield Problem(
                "batch", f"{self.batch} exceeds the buffer of {self.buffer} rows; raise buffer, or lower batch"
            )
        if self.latents and (problem := self.activation.size_problem(self.latents)):
            yield Problem("activation", problem)
