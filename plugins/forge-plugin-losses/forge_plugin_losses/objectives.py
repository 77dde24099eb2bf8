"""Objectives: from the logits of a chunk to the objective, the reported loss, and the gradient.

Shape suffixes as in `chunked`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.vocab_parallel import (
    combine_gathered,
    combine_logsumexp,
    combine_mean,
    local_labels,
    subtract_at,
)

if TYPE_CHECKING:
    from forge_core.contracts.model import VocabShard
    from forge_plugin_losses.workspace import Workspace


@frozen
class Chunk:
    """Results of an objective for the positions of a chunk."""

    objective: Tensor
    """(): the differentiated objective, summed over valid positions."""
    losses_C: Tensor
    """The reported loss: cross-entropy, 0 where the label is ignored."""
    metrics: Mapping[str, Tensor]
    """(): further values to log, by name, as sums over valid positions."""
    gradient_CV: Callable[[], Tensor]
    """Computes the gradient of the objective by the logits; to be called at most once, before the next chunk."""


class Objective(Protocol):
    """A function of the logits of a micro-batch, chunk by chunk."""

    def chunk(self, logits_CV: Tensor, rows: slice) -> Chunk:
        """Returns the results for the positions `rows`; chunks may come in any order."""
        ...


@frozen(kw_only=True)
class CrossEntropyObjective:
    """(1 - s) (z - l_y) + s (z - mean l) + w z², with s the label smoothing and w the weight of the z-loss."""

    labels_T: Tensor
    shard: VocabShard | None
    workspace: Workspace
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def chunk(self, logits_CV: Tensor, rows: slice) -> Chunk:
        """Collective if the vocabulary is split; `rows` selects labels only, as the logits are the chunk's already."""
        at = self._normalise(logits_CV, self.labels_T[rows])
        losses_C = (at.logsumexp_C - at.target_C).where(at.valid_C, 0)
        objective, metrics, even = losses_C.sum(), {}, None
        if self.label_smoothing:
            mean_C, size = combine_mean(at.wide_CV.sum(-1), at.wide_CV.shape[-1], self.shard)
            even, uniform_C = self.label_smoothing / size, at.logsumexp_C - mean_C
            metrics["loss/uniform"] = uniform_C.where(at.valid_C, 0).sum()
            objective = torch.lerp(objective, metrics["loss/uniform"], self.label_smoothing)
        if self.z_loss:
            metrics["loss/z_loss"] = at.logsumexp_C.where(at.valid_C, 0).square().sum()
            objective = objective + self.z_loss * metrics["loss/z_loss"]
        return Chunk(objective, losses_C, metrics, lambda: self._gradient(at, even))

    def _normalise(self, logits_CV: Tensor, labels_C: Tensor) -> _Normalised:
        wide_CV = self.workspace.widened("wide", logits_CV)
        softmax_CV = self.workspace.empty("softmax", wide_CV.shape, wide_CV.dtype, wide_CV.device)
        torch.softmax(wide_CV, -1, out=softmax_CV)
        # The softmax of the largest logit is 1 / Σ exp(l - max); logsumexp would compute all exponentials again.
        local_C = wide_CV.amax(-1) - softmax_CV.amax(-1).log_()
        # Collectives where the vocabulary is split, from here on: all of its ranks must reach them in one order
        logsumexp_C = combine_logsumexp(local_C, self.shard)
        valid_C = labels_C != IGNORED_LABEL
        # An ignored label is no valid index: any other one serves, as its loss is masked
        index_C, inside_C = local_labels(labels_C.where(valid_C, 0), self.shard)
        target_C = combine_gathered(wide_CV.gather(-1, index_C[:, None])[:, 0], inside_C, self.shard)
        share_C = (local_C - logsumexp_C).exp_()
        return _Normalised(wide_CV, softmax_CV, share_C, logsumexp_C, target_C, valid_C, index_C, inside_C)

    def _gradient(self, at: _Normalised, even: Tensor | None) -> Tensor:
        """Returns the gradient (C, V), in the memory of the softmax. `even`: the share of each word by smoothing."""
        # The softmax is over this rank's words; its share of all probability makes it that over the whole vocabulary.
        scale_C = at.share_C * (1 + 2 * self.z_loss * at.logsumexp_C)
        at.softmax_CV.mul_(scale_C.where(at.valid_C, 0)[:, None])
        if even is not None:
            at.softmax_CV.sub_((even * at.valid_C)[:, None])
        at_label_C = (at.valid_C & at.inside_C).to(scale_C.dtype) * (1 - self.label_smoothing)
        subtract_at(at.softmax_CV, at.index_C, at_label_C)
        return at.softmax_CV


@frozen
class _Normalised:
    wide_CV: Tensor
    softmax_CV: Tensor
    """Over this rank's V; `share_C` is the part of the whole probability that falls there."""
    share_C: Tensor
    logsumexp_C: Tensor
    target_C: Tensor
    """The logit of the label."""
    valid_C: Tensor
    index_C: Tensor
    """Labels as indices into V; `inside_C` is whether they lie there."""
    inside_C: Tensor
