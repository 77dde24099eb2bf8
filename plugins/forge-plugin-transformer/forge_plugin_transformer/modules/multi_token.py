"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Shapes: B sequences, S positions, D model width, K modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.contracts.data import IGNORED_LABEL
from forge_plugin_transformer.modules.block import PARTS, Block
from forge_plugin_transformer.modules.documents import document_starts
from forge_plugin_transformer.modules.residual import collapsed, expanded

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.data import Batch
    from forge_core.contracts.runtime import LossFunction, LossOutput
    from forge_kit.nn.modules import Embedding, LinearHead

IDS, LABELS = "input_ids ahead", "labels ahead"
"""Entries of a batch, (B, S, K): ids and labels k positions later, k from 1 to K."""
LOSS, WEIGHT, TARGETS = "mtp/loss", "mtp/weight", "mtp/targets"


def look_ahead(batch: Batch, depth: int) -> Batch:
    """Returns the batch with `IDS` and `LABELS`. Positions in another document or beyond the end have no label.

    Their ids do not matter: a position with a label sees only positions whose id belongs to the same document.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    # Numbered, since an id may occur again later in a row, where it is another document
    documents = document_starts(batch["document_ids"]).cumsum(1) if "document_ids" in batch else torch.zeros_like(ids)
    ahead, targets = [], []
    for distance in range(1, depth + 1):
        inside = _from(documents, distance, -1) == documents
        ahead.append(_from(ids, distance, 0))
        targets.append(_from(labels, distance, IGNORED_LABEL).where(inside, IGNORED_LABEL))
    return {**batch, IDS: torch.stack(ahead, -1), LABELS: torch.stack(targets, -1)}


def _from(values: Tensor, distance: int, absent: int) -> Tensor:
    """Returns (B, S): the values `distance` positions later."""
    return F.pad(values[:, distance:], (0, distance), value=absent)


class PredictionBlock(Block):
    """One module, without embedding and head: (states (B, S, D), embeddings (B, S, D), batch) -> (B, S, D)."""

    PARTS = ("embedding_norm", "hidden_norm", "projection", *PARTS, "norm")
    """Parts in the order of the forward pass."""

    def __init__(
        self, *, embedding_norm: nn.Module, hidden_norm: nn.Module, projection: nn.Module, norm: nn.Module, block: Block
    ) -> None:
        super().__init__(
            **{name: getattr(block, name) for name in PARTS},
            parallel=block.parallel,
            shared_norm=block.shared_norm,
            scale=block.scale,
            scalar=block.scalar,
            streams=block.streams,
        )
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.projection = projection
        self.norm = norm

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedded: Tensor, batch: Batch, cache: Any = None
    ) -> Tensor:
        """Returns the normalised states (B, S, D), from the states of the previous module and the embeddings ahead."""
        # In the order of `eh_proj` in DeepSeek-V3's weights; equation 21 of the paper has the states first
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        (x,) = super().forward((expanded(self.projection(both), self.streams),), batch, cache)
        return self.norm(collapsed(x, self.streams))


class Objective(nn.Module):
    """The loss of a module: (states (B, S, D), head, batch, number) -> `LossOutput`.

    A separate module, for stages after which the head computes on other positions than the blocks.
    """

    def __init__(self, loss: LossFunction) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, hidden: Tensor, head: LinearHead, batch: Batch, number: int) -> LossOutput:
        """`number` counts from 0: the labels are `number` + 1 positions later than the model's."""
        return self._loss(head, hidden, {**batch, "labels": batch[LABELS][..., number]})


class Predictions(nn.Module):
    """The modules, and their part of the training objective.

    It is weight / K times the sum of their losses over all targets, divided like the model's loss by the valid tokens
    of the global batch (equations 24 and 25), so it depends on neither micro-batches nor ranks.

    Args:
        weights: function from completed steps to the weight of the next.
    """

    def __init__(
        self,
        blocks: Sequence[PredictionBlock],
        loss: LossFunction,
        weights: Callable[[int], float],
        auxiliary: Auxiliary,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.objective = Objective(loss)
        self._weights, self._auxiliary = weights, auxiliary
        # A constant weight is set only here, as no hook exists for it
        self.begin_step(0)
        auxiliary.summarise(TARGETS, mean_losses)

    def begin_step(self, completed: int) -> None:
        """Set the weight of the step that follows `completed` steps."""
        self.weight = self._weights(completed)

    @property
    def active(self) -> bool:
        """Whether a training step is under way."""
        return self._auxiliary.active

    def look_ahead(self, batch: Batch) -> Batch:
        """Returns the batch with the entries that a training step needs."""
        return look_ahead(batch, len(self.blocks)) if self.active and LABELS not in batch else batch

    def forward(self, hidden: Tensor, embedding: Embedding, head: LinearHead, batch: Batch) -> Tensor:
        """Returns the model's states (B, S, D), with the objective attached to their graph."""
        hidden, *embedded = _Joined.apply(hidden, *(embedding(ids) for ids in batch[IDS].unbind(-1)))
        state, losses = hidden, []
        for number, block in enumerate(self.blocks):
            state = block(state, embedded[number], batch)
            output = self.objective(state, head, batch, number)
            self._count(number + 1, output)
            losses.append(output.sum)
        value = torch.stack(losses).mean()
        weight = torch.full((), self.weight, dtype=torch.float64, device=value.device)
        self._auxiliary.metric(WEIGHT, weight, unit="layer")
        return self._auxiliary.attach(hidden, value, unit="token", name=LOSS, weight=self.weight)

    def _count(self, distance: int, output: LossOutput) -> None:
        sums, counts = output.per_sequence
        self._auxiliary.count(TARGETS, distance, torch.stack([sums.sum(), counts.sum()]))


class _Joined(torch.autograd.Function):
    """The same tensors, as outputs of one operation.

    Pipelines with a split backward pass (torch.distributed.pipelining) start from the operations where the weights meet
    tensors that depend on the stage's input. For the embedding these would be several operations, one behind another,
    and starting from each would run the backward pass of the blocks between them twice.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def mean_losses(rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
    """Metrics: the mean loss of each module over its targets, from sum and number."""
    return {f"{LOSS}_{distance}": total / count.clamp(min=1) for distance, (total, count) in rows.items()}
