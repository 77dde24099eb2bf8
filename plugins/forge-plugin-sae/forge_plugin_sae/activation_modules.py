"""Modules that the components of kind `sparsity` make. N rows, F latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_plugin_sae.activations import JumpReLU


class Activation(nn.Module):
    """(N, F) pre-activations -> (N, F) latents, of which few are not zero. Derive from it for your own activation.

    `forward` is for training, where it may depend on the batch; `infer` treats each row by itself.
    """

    architecture = ""
    """Architecture in SAELens that encodes as `infer` does; empty: it has none, and will refuse the file."""

    def forward(self, pre_NF: Tensor) -> Tensor:
        """Returns the latents in training, where a row's latents may depend on the other rows."""
        raise NotImplementedError

    def infer(self, pre_NF: Tensor) -> Tensor:
        """Returns the latents of rows by themselves; by default as in training."""
        return self(pre_NF)

    def penalty(self, pre_NF: Tensor, latents_NF: Tensor) -> Tensor | float:
        """Returns the loss () to add to the squared error."""
        return 0.0

    def settings(self) -> dict[str, Any]:
        """Returns entries of `cfg.json` that `architecture` needs."""
        return {}

    def threshold_of(self, latents: int) -> Tensor | None:
        """Returns the thresholds (F) that `infer` uses, if its architecture has them."""
        return None


class TopKActivation(Activation):
    """The k largest of each row, if positive."""

    architecture = "topk"

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, pre_NF: Tensor) -> Tensor:
        """Takes the relu first: where fewer than k are positive, the others of the k are zeros."""
        values, indices = pre_NF.relu().topk(self.k, dim=-1, sorted=False)
        return torch.zeros_like(pre_NF).scatter(-1, indices, values)

    def settings(self) -> dict[str, Any]:
        """Returns k; W_dec has unit norm, so that nothing is to be rescaled by the decoder."""
        return {"k": self.k, "rescale_acts_by_decoder_norm": False}


class BatchTopKActivation(Activation):
    """The k N largest of all rows, if positive; `infer` compares with the average of their smallest."""

    architecture = "jumprelu"
    average: Tensor
    weight: Tensor

    def __init__(self, k: int, decay: float) -> None:
        super().__init__()
        self.k, self.decay = k, decay
        # Buffers, so that they are saved with the weights and continue with the run
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, pre_NF: Tensor) -> Tensor:
        """Compares all rows with each other; in training mode, the threshold for `infer` follows."""
        positive = pre_NF.relu()
        # One topk over all rows: k is then a mean, and a row may have more or fewer
        values, indices = positive.flatten().topk(self.k * len(pre_NF), sorted=False)
        latents_NF = torch.zeros_like(positive).flatten().scatter(0, indices, values).view_as(positive)
        if self.training:
            self._average(values.detach())
        return latents_NF

    def _average(self, values: Tensor) -> None:
        """Take the smallest active latent of a batch into the average; nothing changes if none is active."""
        # Without a question to the device: both factors are 1 and 0 where there is no positive value
        smallest = values.masked_fill(values <= 0, torch.inf).min()
        share = smallest.isfinite().to(self.average.dtype) * (1 - self.decay)
        self.average.lerp_(smallest.nan_to_num(posinf=0.0), share)
        # The same average of ones: dividing by it removes the bias to 0, as in Adam
        self.weight.lerp_(torch.ones_like(self.weight), share)

    @property
    def threshold(self) -> Tensor:
        """The threshold () of rows by themselves; 0 before the first batch."""
        return torch.where(self.weight > 0, self.average / self.weight, 0.0)

    def infer(self, pre_NF: Tensor) -> Tensor:
        """Compares each row by itself with the average threshold."""
        return pre_NF.relu() * (pre_NF > self.threshold)

    def threshold_of(self, latents: int) -> Tensor:
        """Returns the one threshold for each of the latents (F): JumpReLU in SAELens has one each."""
        # Copied: safetensors refuses tensors whose elements share memory
        return self.threshold.expand(latents).clone()


class JumpReLUActivation(Activation):
    """Pre-activations above thresholds, which the straight-through estimators move."""

    architecture = "jumprelu"

    def __init__(self, latents: int, settings: JumpReLU) -> None:
        super().__init__()
        self.bandwidth, self.target, self.coefficient = settings.bandwidth, settings.target_l0, settings.coefficient
        self.threshold = nn.Parameter(torch.full((latents,), settings.threshold))

    def forward(self, pre_NF: Tensor) -> Tensor:
        """Clamps the thresholds at 0, in place, before it applies `Jump`."""
        with torch.no_grad():  # a negative threshold would let negative pre-activations through
            self.threshold.clamp_(min=0)
        return Jump.apply(pre_NF, self.threshold, self.bandwidth)  # type: ignore[no-any-return]

    def infer(self, pre_NF: Tensor) -> Tensor:
        """Computes the same as `forward` for thresholds of at least 0, without the straight-through estimator."""
        return pre_NF.relu() * (pre_NF > self.threshold)

    def penalty(self, pre_NF: Tensor, latents_NF: Tensor) -> Tensor:
        """Returns the penalty of `JumpReLU.target_l0`, whose gradient reaches thresholds only."""
        # Not from `latents_NF`, whose count of non-zeros has no gradient
        l0: Any = Step.apply(pre_NF, self.threshold, self.bandwidth)
        l0 = l0.sum(-1).mean()
        return self.coefficient * ((l0 / self.target - 1) ** 2 if self.target else l0)

    def threshold_of(self, latents: int) -> Tensor:
        """Returns a copy of the learned thresholds (F)."""
        return self.threshold.detach().clone()


class L1Activation(Activation):
    """ReLU, whose sum is penalised."""

    architecture = "standard"

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient

    def forward(self, pre_NF: Tensor) -> Tensor:
        """Returns the positive part; few latents are active only by the penalty."""
        return pre_NF.relu()

    def penalty(self, pre_NF: Tensor, latents_NF: Tensor) -> Tensor:
        """Returns the mean L1 norm of a row, times the coefficient."""
        return self.coefficient * latents_NF.sum(-1).mean()


def _near(pre_NF: Tensor, threshold_F: Tensor, bandwidth: float) -> Tensor:
    """The rectangular kernel: 1 within half a bandwidth of the threshold, else 0."""
    return ((pre_NF - threshold_F).abs() < bandwidth / 2).to(pre_NF.dtype)


class Jump(torch.autograd.Function):
    """z H(z - θ), with the derivative -(θ / ε) K((z - θ) / ε) with respect to θ (their equation 11)."""

    @staticmethod
    def forward(ctx: Any, pre_NF: Tensor, threshold_F: Tensor, bandwidth: float) -> Tensor:
        """(N, F) pre-activations, (F) thresholds -> (N, F); the bandwidth is of the backward pass alone."""
        ctx.save_for_backward(pre_NF, threshold_F)
        ctx.bandwidth = bandwidth
        return pre_NF * (pre_NF > threshold_F)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Returns gradients of z, of θ summed over rows, and none of the bandwidth."""
        pre_NF, threshold_F = ctx.saved_tensors
        moved_NF = _near(pre_NF, threshold_F, ctx.bandwidth) * grad_NF
        return (pre_NF > threshold_F) * grad_NF, -(threshold_F / ctx.bandwidth) * moved_NF.sum(0), None


class Step(torch.autograd.Function):
    """H(z - θ), with the derivative -(1 / ε) K((z - θ) / ε) with respect to θ, none to z (their equation 12)."""

    @staticmethod
    def forward(ctx: Any, pre_NF: Tensor, threshold_F: Tensor, bandwidth: float) -> Tensor:
        """(N, F) pre-activations, (F) thresholds -> (N, F) of ones and zeros."""
        ctx.save_for_backward(pre_NF, threshold_F)
        ctx.bandwidth = bandwidth
        return (pre_NF > threshold_F).to(pre_NF.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        """Returns the gradient of θ, summed over rows."""
        pre_NF, threshold_F = ctx.saved_tensors
        return None, -(_near(pre_NF, threshold_F, ctx.bandwidth) * grad_NF).sum(0) / ctx.bandwidth, None
