"""The objectives: from log-probabilities of completions to a sum over them, or over their tokens.

Shapes: B rows, each with G completions of one prompt in G slots of W positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.losses import loss_output
from forge_plugin_losses.apart import check_apart
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary, Unit
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction, LossOutput
    from forge_plugin_grpo.grpo import GRPO

ADVANTAGES, OLD, SAMPLED = "advantages", "old_log_p", "sampler_log_p"
"""Entries of batches: (B, G), of each completion; (B, S), of each label, before the first update on these rows, and as
the sampler drew it."""
DIFFERENCE = "rollout/log_p_difference"
"""The metric of how far the last two are apart, as a mean over labels."""


class Objective(NamedTuple):
    """The objective of a micro-batch."""

    sum: Tensor
    """(): to be divided by the count of `unit` in the global batch."""
    unit: Unit
    clipped: Tensor
    """(): how many labels, or completions of `gspo`, the clipping keeps from being learned."""


def objective(loss: GRPO, log_p: Tensor, old: Tensor, valid: Tensor, advantages: Tensor) -> Objective:
    """The sum over the completions of some rows, with the sign of a loss.

    Args:
        loss: its algorithm and bounds.
        log_p: (B, G, W) of the model, differentiable; 0 where there is no label.
        old: the same before the first update on these rows.
        valid: (B, G, W) bool: where labels are.
        advantages: (B, G).
    """
    each = advantages.unsqueeze(-1).to(log_p.dtype)
    lengths = valid.sum(-1)
    log_ratio = (log_p - old).where(valid, 0)
    if loss.algorithm == "rloo":
        # REINFORCE on whole completions; the ratio makes later updates on the same rows right
        ratio = log_ratio.sum(-1).exp()
        return Objective(-(ratio * advantages).sum(), "example", (ratio * 0).sum())
    if loss.algorithm == "gspo":
        # The geometric mean over tokens: a ratio of whole sequences (Zheng et al. 2025, equation 7)
        ratio = (log_ratio.sum(-1) / lengths.clamp(min=1)).exp()
        value, clipped = _clipped(loss, ratio, advantages)
        return Objective(-value.where(lengths > 0, 0).sum(), "example", (clipped & (lengths > 0)).sum())
    value, clipped = _clipped(loss, log_ratio.exp(), each)
    value = value.where(valid, 0)
    count = (clipped & valid).sum()
    if loss.algorithm == "dapo":
        return Objective(-value.sum(), "token", count)
    # Dr. GRPO divides by a constant, so that a long wrong completion weighs as much per token as a short one
    divisor = lengths.clamp(min=1) if loss.algorithm == "grpo" else loss.max_tokens
    return Objective(-(value.sum(-1) / divisor).sum(), "example", count)


def _clipped(loss: GRPO, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A) (Schulman et al. 2017, equation 7), and where it is constant."""
    bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    plain, limited = ratio * advantages, bounded * advantages
    return torch.minimum(plain, limited), limited < plain


@define(eq=False)
class Memory:
    """What the loss of a run tells its hook: log-probabilities of a step, for the next updates on the same rows."""

    log_p: list[Tensor] = field(factory=list)
    """(B, S) of each micro-batch, in order."""


MEMORIES: WeakKeyDictionary[Auxiliary, Memory] = WeakKeyDictionary()
"""By the auxiliary values of a run, which its loss and its hook both have."""


def grpo_loss(loss: GRPO, context: BuildContext) -> LossFunction:
    """Build the loss function.

    Raises:
        JobError: the model lets the completions in a row see each other; the part of it is named.
    """
    check_apart(context, "completions")
    auxiliary, workspace = context.auxiliary, Workspace()
    memory = MEMORIES[auxiliary] = Memory()

    def function(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        labels = batch["labels"]
        valid = labels != IGNORED_LABEL
        log_p = log_probabilities(head, hidden, labels, chunk_tokens=loss.chunk_tokens, workspace=workspace)
        anchor = log_p.sum() * 0
        if torch.is_grad_enabled() and ADVANTAGES in batch:
            if OLD not in batch:
                memory.log_p.append(log_p.detach())
            old = batch.get(OLD, log_p.detach())
            shape = (len(labels), loss.group, -1)
            result = objective(loss, log_p.view(shape), old.view(shape), valid.view(shape), batch[ADVANTAGES])
            # Attached: the sum that a loss returns is divided by tokens
            anchor = auxiliary.attach(anchor, result.sum, unit=result.unit, name="loss/policy")
            unit: Unit = "example" if loss.algorithm == "gspo" else "token"
            auxiliary.metric("policy/clipped", result.clipped, unit)
            apart = (old - batch[SAMPLED]).abs().where(valid, 0)
            auxiliary.metric(DIFFERENCE, apart.sum(), "token")
        return loss_output(anchor, -log_p, valid)

    return function
