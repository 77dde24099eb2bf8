"""The objectives: from log-probabilities of completions to a sum over them, or over their tokens.

Shapes: B rows, each with G completions of one prompt in G slots of W positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_core.losses import loss_output
from forge_kit.nn.routes import without_routes
from forge_kit.torch_internals import detect_fake_mode
from forge_plugin_losses.apart import check_apart
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_plugin_losses.reference import Reference, load_reference
from forge_plugin_losses.reference_path import ADAPTERS_OFF, starts_as_reference
from forge_plugin_losses.shared_rows import SharedRows
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary, Unit
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction, LossOutput
    from forge_plugin_grpo.grpo import GRPO

ADVANTAGES = "advantages"
"""Entry of batches, (B, G): of each completion."""
OLD, SAMPLED, REFERENCE = "old_log_p", "sampler_log_p", "reference_log_p"
"""Entries of batches, (B, 1, S): log-probabilities of each label before the first update on these rows, as the sampler
drew it, and under the reference. They have a dimension of 1 at the place of positions, so that a stage that divides
sequences leaves them whole: completions are compared as a whole."""
DIFFERENCE = "rollout/log_p_difference"
"""The metric of how far the first two are apart, as a mean over labels."""
KL = "kl"
"""The metric of the KL divergence from the reference, as a mean over labels."""


class Divergence(NamedTuple):
    """The KL divergence of a micro-batch from the reference, without its weight."""

    sum: Tensor
    """(): to be divided as the sum of the objective."""
    tokens: Tensor
    """(): the plain sum over labels."""


class Objective(NamedTuple):
    """The objective of a micro-batch."""

    sum: Tensor
    """(): to be divided by the count of `unit` in the global batch."""
    unit: Unit
    clipped: Tensor
    """(): how many labels, or completions of `gspo`, the clipping keeps from being learned."""
    kl: Divergence | None = None
    """None without a reference."""


def objective(
    loss: GRPO, log_p: Tensor, old: Tensor, valid: Tensor, advantages: Tensor, reference: Tensor | None = None
) -> Objective:
    """The sum over the completions of some rows, with the sign of a loss.

    Args:
        loss: its algorithm and bounds.
        log_p: (B, G, W) of the model, differentiable; 0 where there is no label.
        old: the same before the first update on these rows.
        valid: (B, G, W) bool: where labels are.
        advantages: (B, G).
        reference: (B, G, W) as `log_p`, under the reference; None: there is none.
    """
    result = _policy(loss, log_p, old, valid, advantages)
    if reference is None:
        return result
    each = k3(log_p, reference).where(valid, 0)
    return result._replace(kl=Divergence(_total(loss, each, valid), each.sum()))


def k3(log_p: Tensor, reference: Tensor) -> Tensor:
    """An estimate of the KL divergence from the reference, from one draw, in nats: r - log r - 1, r = reference / p.

    Never negative, and without bias for draws from p: Schulman 2020, "Approximating KL divergence", estimator k3; Shao
    et al. 2024, equation 4.
    """
    log_ratio = reference - log_p
    # Near 0, where training begins, exp(x) - 1 would be rounding alone
    return log_ratio.expm1() - log_ratio


def _policy(loss: GRPO, log_p: Tensor, old: Tensor, valid: Tensor, advantages: Tensor) -> Objective:
    """See `objective`, without a reference."""
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
    unit: Unit = "token" if loss.algorithm == "dapo" else "example"
    return Objective(-_total(loss, value.where(valid, 0), valid), unit, (clipped & valid).sum())


def _total(loss: GRPO, values: Tensor, valid: Tensor) -> Tensor:
    """(): what the algorithm sums over tokens or completions, of (B, G, W) values of tokens, 0 where there is none."""
    if loss.algorithm in ("dapo", "rloo"):
        return values.sum()
    if loss.algorithm == "dr_grpo":
        # By a constant, so that a long wrong completion weighs as much per token as a short one
        return values.sum() / loss.max_tokens
    # Clamped: a completion without a label has length 0, and 0 / 0 would spoil the sum
    return (values.sum(-1) / valid.sum(-1).clamp(min=1)).sum()


def _clipped(loss: GRPO, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A) (Schulman et al. 2017, equation 7), and where it is constant."""
    bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    plain, limited = ratio * advantages, bounded * advantages
    # Strictly less: within the bounds both are equal, and the gradient is not 0
    return torch.minimum(plain, limited), limited < plain


@define(eq=False)
class PolicyLoss:
    """The loss function of a run, with what it has built and what it keeps for the next updates on the same rows."""

    loss: GRPO
    auxiliary: Auxiliary
    rows: SharedRows
    reference: Reference | None
    """The frozen model; None without one, or where it is the model in training with its adapters off."""
    starts_as_reference: bool
    """Whether the KL divergence of the first step is known to be 0, and to be checked."""
    workspace: Workspace = field(factory=Workspace)
    old_log_p: list[Tensor] = field(factory=list)
    """(B, S) of each micro-batch of a first update, in order: log-probabilities before it."""
    reference_log_p: list[Tensor] = field(factory=list)
    """(B, S) likewise, under `reference`."""

    @classmethod
    def of(cls, loss: GRPO, context: BuildContext) -> PolicyLoss:
        """Load the reference, if the loss names one. Collective."""
        check_apart(context, "completions")
        is_path = loss.reference not in ("", ADAPTERS_OFF)
        reference = load_reference(Path(loss.reference), context, loss.chunk_tokens) if is_path else None
        checked = loss.reference and loss.check_first_kl and detect_fake_mode() is None
        # Found out here, where every rank is: it is collective
        starts = bool(checked) and starts_as_reference(loss.reference, context)
        workspace = Workspace() if reference is None else reference.workspace
        return cls(loss, context.auxiliary, SharedRows.of(context), reference, starts, workspace)

    def training(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """A `LossFunction`."""
        labels = batch["labels"]
        log_p = self._log_p(head, hidden, batch)
        anchor = log_p.sum() * 0
        if torch.is_grad_enabled():
            if ADVANTAGES in batch:
                anchor = self._learn(anchor, log_p, batch)
            elif self.reference is not None and detect_fake_mode() is not None:
                # A planned step, whose batches have tokens alone: this pass is a part of its memory
                self.reference.log_probabilities(batch)
        return loss_output(anchor, -log_p, labels != IGNORED_LABEL)

    def whole_log_p(self, head: Head, hidden: Tensor, batch: Batch) -> Tensor:
        """Returns (B, S): log p of each label of whole rows, 0 where there is none. Collective."""
        return self.rows.whole(self._log_p(head, hidden, batch), batch)

    def forget(self) -> None:
        """Drop what was kept, before the first update on other rows."""
        self.old_log_p.clear()
        self.reference_log_p.clear()

    def _log_p(self, head: Head, hidden: Tensor, batch: Batch) -> Tensor:
        chunk = self.loss.chunk_tokens
        return log_probabilities(head, hidden, batch["labels"], chunk_tokens=chunk, workspace=self.workspace)

    def _learn(self, anchor: Tensor, log_p: Tensor, batch: Batch) -> Tensor:
        """Returns `anchor` with the objective attached: the sum that a loss returns is divided by tokens."""
        loss, auxiliary, ranks = self.loss, self.auxiliary, self.rows.ranks
        # Of whole rows, since ratios, lengths and KL divergences are of whole completions. Ranks that share rows
        # compute the same objective; each has the gradient of the positions that it holds.
        log_p = self.rows.whole(log_p, batch)
        valid = self.rows.whole((batch["labels"] != IGNORED_LABEL).to(log_p.dtype), batch) > 0
        shape = (len(log_p), loss.group, -1)
        old = self._old(log_p, batch)
        reference = self._reference(log_p, batch)
        result = objective(
            loss,
            log_p.view(shape),
            old.view(shape),
            valid.view(shape),
            batch[ADVANTAGES],
            None if reference is None else reference.view(shape),
        )
        anchor = auxiliary.attach(anchor, result.sum / ranks, unit=result.unit, name="loss/policy", weight=ranks)
        if result.kl is not None:
            weight = loss.kl_weight * ranks
            if weight:
                anchor = auxiliary.attach(
                    anchor, result.kl.sum / ranks, unit=result.unit, name="loss/kl", weight=weight
                )
            auxiliary.metric(KL, result.kl.tokens / ranks, "token")
        unit: Unit = "example" if loss.algorithm == "gspo" else "token"
        auxiliary.metric("policy/clipped", result.clipped / ranks, unit)
        apart = (old - batch[SAMPLED].view_as(old)).abs().where(valid, 0)
        auxiliary.metric(DIFFERENCE, apart.sum() / ranks, "token")
        return anchor

    def _old(self, log_p: Tensor, batch: Batch) -> Tensor:
        """(B, S): log-probabilities before the first update on these rows."""
        if OLD in batch:
            # The hook stores float64 in a pipeline, whatever dtype the loss computes in
            return batch[OLD].view_as(log_p).to(log_p.dtype)
        if self.loss.updates > 1:
            self.old_log_p.append(log_p.detach())
        return log_p.detach()

    def _reference(self, log_p: Tensor, batch: Batch) -> Tensor | None:
        """(B, S): log-probabilities under the reference, from the batch where they were computed before."""
        if REFERENCE in batch:
            return batch[REFERENCE].view_as(log_p).to(log_p.dtype)
        if self.reference is None:
            if self.loss.reference:
                message = f"batches have no {REFERENCE}, which a hook adds before each step"
                raise ForgeError(f"loss: {message} for loss.reference = {ADAPTERS_OFF!r}")
            return None
        values = self.rows.whole(self.reference.log_probabilities(without_routes(batch)), batch)
        if self.loss.updates > 1:
            self.reference_log_p.append(values)
        return values.to(log_p.dtype)


_LOSSES: WeakKeyDictionary[Auxiliary, PolicyLoss] = WeakKeyDictionary()
"""By the auxiliary values of a run, which its loss and its hooks both have."""


def policy_loss(loss: GRPO, context: BuildContext) -> LossFunction:
    """Build the loss function. Collective if it loads a reference.

    Raises:
        CheckpointError: the reference has no intact checkpoint.
        JobError: the model lets the completions in a row see each other, and the part of it is named; or the reference
            has another tokenizer, or cannot be built or divided.
    """
    built = _LOSSES[context.auxiliary] = PolicyLoss.of(loss, context)
    return built.training


def policy_loss_of(auxiliary: Auxiliary) -> PolicyLoss:
    """Returns what `policy_loss` has built for the run with these auxiliary values."""
    return _LOSSES[auxiliary]
