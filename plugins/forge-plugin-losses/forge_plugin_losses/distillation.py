"""The loss `distillation`: cross-entropy and divergence from a teacher, chunk by chunk.

With the temperature T, student logits l and teacher logits t, and p = softmax(t/T), q = softmax(l/T), the divergence
T² KL(p || q) has the gradient T (q - p) with respect to l. Shape suffixes as in `chunked`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_plugin_losses.objectives import Chunk, CrossEntropyObjective, Objective
from forge_plugin_losses.vocabulary_chunks import chunked
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.auxiliary import Auxiliary
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head, Model
    from forge_core.contracts.runtime import LossFunction, LossOutput


def distillation_loss(
    teacher: Model,
    plain: LossFunction,
    chunk_tokens: int,
    auxiliary: Auxiliary,
    *,
    weight: float,
    temperature: float,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> LossFunction:
    """Build the loss `distillation`.

    Args:
        teacher: frozen, in evaluation mode, on the device of the batches.
        plain: the loss without a teacher, for evaluations.
        chunk_tokens: positions whose logits exist at a time; 0: see `default_chunk_tokens`.
        auxiliary: logs the divergence, unweighted.
        weight: share of the divergence in the objective.
        temperature: divides the logits of both models.
        label_smoothing: of the cross-entropy.
        z_loss: of the cross-entropy.

    Returns:
        The loss; a call raises `ForgeError` if the vocabularies of the two models differ in size.
    """

    def objective(_head: Head, batch: Batch, workspace: Workspace) -> Objective:
        labels_T = batch["labels"].flatten()
        with torch.no_grad():
            hidden = teacher(dict(batch))  # a copy: a model may add entries to the batch that are wrong for another
        hidden_TD = hidden.flatten(0, -2)
        cross_entropy = CrossEntropyObjective(
            labels_T=labels_T, shard=None, workspace=workspace, label_smoothing=label_smoothing, z_loss=z_loss
        )
        return DistillationObjective(
            cross_entropy=cross_entropy,
            valid_T=labels_T != IGNORED_LABEL,
            teacher_logits=lambda rows: teacher.head.logits(hidden_TD[rows]),
            weight=weight,
            temperature=temperature,
            workspace=workspace,
        )

    # Not `learned_only`: the teacher's states are of all positions, and `rows` must select the same ones
    distilled = chunked(objective, chunk_tokens, auxiliary)

    def loss(head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        return (distilled if torch.is_grad_enabled() else plain)(head, hidden, batch)

    return loss


@frozen(kw_only=True)
class DistillationObjective:
    """(1 - a) times the cross-entropy's objective, plus a T² KL(p || q)."""

    cross_entropy: CrossEntropyObjective
    valid_T: Tensor
    teacher_logits: Callable[[slice], Tensor]
    """The teacher's logits (C, V) of some positions."""
    weight: float
    temperature: float
    workspace: Workspace

    @torch.no_grad()
    def chunk(self, logits_CV: Tensor, rows: slice) -> Chunk:
        """Returns both objectives mixed by `weight`; the losses are the cross-entropy alone.

        Raises:
            ForgeError: the teacher has a vocabulary of another size.
        """
        hard = self.cross_entropy.chunk(logits_CV, rows)
        soft_C, gradient_CV = self._divergence(logits_CV, self.teacher_logits(rows), self.valid_T[rows])
        objective = torch.lerp(hard.objective, soft_C.sum(), self.weight)
        metrics = {**hard.metrics, "loss/distillation": soft_C.sum()}

        def gradient() -> Tensor:
            # In place, in the memory of the cross-entropy's softmax, which is free from here on
            return hard.gradient_CV().mul_(1 - self.weight).add_(gradient_CV, alpha=self.weight)

        return Chunk(objective, hard.losses_C, metrics, gradient)

    def _divergence(self, student_CV: Tensor, teacher_CV: Tensor, valid_C: Tensor) -> tuple[Tensor, Tensor]:
        """Returns T² KL(p || q) (C,), 0 where a label is ignored, and its gradient (C, V) by the student's logits."""
        if teacher_CV.shape != student_CV.shape:
            message = (
                f"the teacher's logits are over {teacher_CV.shape[-1]} words, the student's over {student_CV.shape[-1]}"
            )
            raise ForgeError(f"loss.teacher: {message}; distillation needs one vocabulary")
        # In place, since each of these is as large as a chunk's logits: p and q are read before they are overwritten.
        q_log_CV = (self.workspace.widened("wide", student_CV) / self.temperature).log_softmax(-1)
        p_log_CV = (self.workspace.widened("teacher", teacher_CV) / self.temperature).log_softmax(-1)
        p_CV = p_log_CV.exp()
        # T², so that gradients do not shrink with the temperature (Hinton et al. 2015, section 2)
        divergence_C = p_log_CV.sub_(q_log_CV).mul_(p_CV).sum(-1).mul_(self.temperature**2).where(valid_C, 0)
        # The gradient of T² KL(p || q) by logits that were divided by T is T (q - p)
        gradient_CV = q_log_CV.exp_().sub_(p_CV).mul_((self.temperature * valid_C)[:, None])
        return divergence_C, gradient_CV
