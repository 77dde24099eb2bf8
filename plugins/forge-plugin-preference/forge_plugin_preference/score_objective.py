"""The loss function of a reward model: from the hidden state of the last token of each answer to its score.

Shapes: B rows, S positions of this rank, E ids of documents, P = (E - 1) / 2 places for pairs, N = B x P.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import LossOutput
from forge_core.vocab_parallel import accumulation_dtype
from forge_kit.torch_internals import detect_fake_mode
from forge_plugin_losses.apart import check_apart
from forge_plugin_losses.shared_rows import shared_groups
from forge_plugin_losses.workspace import Workspace
from forge_plugin_preference.answers import ABSENT, MARGINS
from forge_plugin_preference.objective import (
    Objective,
    Rows,
    Terms,
    pairs_of,
    register,
    reward_metrics,
    sum_over_ranks,
)
from forge_plugin_preference.reward_head import SCORE, RewardHead

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction
    from forge_plugin_preference.bradley_terry import BradleyTerry


def score_loss(loss: BradleyTerry, context: BuildContext) -> LossFunction:
    """Build the loss function of a reward model."""
    check_apart(context)
    objective = ScoreObjective(
        loss=loss,
        auxiliary=context.auxiliary,
        reference=None,
        groups=shared_groups(context),
        workspace=Workspace(),
        starts_as_reference=loss.check_first_loss and detect_fake_mode() is None and _begins_at_zero(context),
        copies=context.layout.tp,
    )
    register(objective)
    return objective.training


def _begins_at_zero(context: BuildContext) -> bool:
    """Whether the head of a new run is zero: by its own initial values, and not loaded."""
    plugins = [plugin for plugin in context.job.plugins.values() if isinstance(plugin, RewardHead)]
    loaded = any(SCORE in table.names() for table in context.job.checkpoint.loads.values())
    return all(plugin.init_std == 0 for plugin in plugins) and not loaded


@frozen(eq=False, kw_only=True)
class ScoreObjective(Objective):
    """A `BradleyTerry` loss with what it has built for a run."""

    loss: BradleyTerry
    copies: int = 1
    """Ranks that all compute the whole loss of the same positions, in tensor parallelism."""

    @property
    def known_start(self) -> str:
        """See `Objective.known_start`."""
        return "the reward head begins at zero"

    def training(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        """A `LossFunction`; the reported loss is the mean over pairs, in training and in evaluations."""
        terms = self.terms(head, hidden, batch)
        (_, values), *_ = terms.objective.values()
        # The objective is attached: a loss returns sums over tokens, and this one is a mean over examples
        anchor = values.sum() * 0
        if torch.is_grad_enabled():
            anchor = self._attach(anchor, terms)
        # Ranks that share rows count each pair together once
        rows = (len(hidden), -1)
        sums = values.detach().where(terms.mask, 0).view(rows).sum(-1) / self.ranks
        counts = terms.mask.view(rows).sum(-1, dtype=sums.dtype) / self.ranks
        return LossOutput(anchor, counts.sum(), (sums, counts))

    def terms(self, head: Head, hidden: Tensor, batch: Batch) -> Terms:
        """See `Objective.terms`.

        Raises:
            ForgeError: the batch lacks an entry that the loss needs.
        """
        rows = Rows.of(batch, self.loss)
        scores, there = self._scores(head, hidden, rows, batch)
        chosen, rejected = pairs_of(scores)
        margins = self._margins(batch, scores)
        objective = {self.loss.metric: (1.0, self.loss.losses(chosen, rejected, margins))}
        if self.loss.center_weight:
            objective["loss/center"] = self.loss.center_weight, (chosen + rejected).square()
        return Terms(_both(there), objective, reward_metrics(chosen, rejected), {})

    def _scores(self, head: Head, hidden: Tensor, rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
        """The score of each document (B, E), float32 or wider, and whether it is there. Collective."""
        places, here = self._ends(rows, batch)
        own = hidden[torch.arange(len(hidden), device=hidden.device)[:, None], places]
        # In float32 or wider: the difference of two scores is small beside them
        wide = own.to(accumulation_dtype(hidden.dtype))
        with head.whole(wide.dtype):
            scores = head.logits(wide)[..., 0].where(here, 0)
        if self.copies > 1:
            scores = _ShareGradient.apply(scores, self.copies)
        stacked = torch.stack([scores, rows.count_labels(scores.dtype)])
        total, tokens = sum_over_ranks(stacked, self.groups) if self.groups else stacked
        # An evaluation fills its last batch with rows whose labels are all ignored
        return total, (rows.kinds != ABSENT) & (tokens > 0)

    def _ends(self, rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where the last token of each document stands on this rank (B, E), and whether it does. Collective."""
        # Planned steps have batches of tokens alone
        positions = batch.get("positions", torch.zeros_like(rows.documents))
        ids = torch.arange(rows.kinds.shape[1], device=positions.device)
        numbers = positions[:, None, :].where(rows.documents[:, None, :] == ids[:, None], -1)
        own, places = numbers.max(-1)
        # Reduced in place, and compared with this rank's numbers
        last = own.clone()
        for group in self.groups:
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        return places, (own == last) & (last >= 0)

    def _margins(self, batch: Batch, scores: Tensor) -> Tensor | None:
        if not self.loss.margins:
            return None
        if MARGINS not in batch:
            if detect_fake_mode() is not None:
                return None
            message = f"batches have no {MARGINS}, by how much a chosen answer is better"
            raise ForgeError(f'loss: {message}; take a source of type "pairs", or set loss.margins = false')
        return pairs_of(batch[MARGINS][:, 0].to(scores.dtype))[0]


def _both(there: Tensor) -> Tensor:
    """(B, E) -> (N,): whether both answers of a pair are there."""
    return there[:, :-1].reshape(-1, 2).all(-1)


class _ShareGradient(torch.autograd.Function):
    """Identity whose gradient is divided among `copies` ranks, each of which has the whole of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.copies, None
