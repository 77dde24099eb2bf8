"""The components `chunked_cross_entropy` and `distillation`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field, frozen
from attrs.validators import and_, ge, gt, le, lt

from forge_core.contracts.components import FilePath, LossComponent, TrainingHook, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_losses.resumed_models import SameTrained

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import LossFunction
    from forge_core.job import Job


@frozen(kw_only=True)
class ChunkedCrossEntropy(LossComponent):
    """Next-token cross-entropy in nats that never holds all logits, forward or backward.

    The positions of a micro-batch pass through the head in chunks; each chunk's gradient is computed at once, while its
    logits are still in the cache. Same objective, head and vocabulary splits as the core's `cross_entropy`.
    """

    chunk_tokens: int = field(default=0, validator=ge(0), metadata=when_resumed("safe"))
    """Positions whose logits exist at a time. 0: 512 on the CPU, as measured (see the README), 4096 elsewhere; fewer
    where their float32 logits would take more than 256 MB on the CPU, 1 GB elsewhere."""
    label_smoothing: float = field(default=0.0, validator=and_(ge(0), lt(1)))
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016). Cross-entropy with that even
    part is logged unweighted as `loss/uniform`; the reported loss does not contain it."""
    z_loss: float = field(default=0.0, validator=ge(0))
    """Weight of log(Z)² in the objective, Z the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery
    et al. 2022, section 5: 1e-4). Logged unweighted as `loss/z_loss`; the reported loss does not contain it."""

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields the positions of a chunk. The vocabulary, which may lower their number, is not known here."""
        from forge_plugin_losses.vocabulary_chunks import most_chunk_tokens

        if self.chunk_tokens:
            yield "loss", f"chunks of {self.chunk_tokens} positions", "loss.chunk_tokens"
        else:
            why = "measured" if context.device.type == "cpu" else "by arithmetic, not measured"
            yield "loss", f"chunks of at most {most_chunk_tokens(context.device)} positions", why

    def build(self, context: BuildContext) -> LossFunction:
        """Returns the loss; a term whose weight is 0 is neither computed nor logged."""
        from forge_plugin_losses.vocabulary_chunks import chunked_loss

        return chunked_loss(
            self.chunk_tokens, context.auxiliary, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )


WHOLE = {"tp": "vocabulary", "pp": "layers", "cp": "sequences"}
"""Mesh dimensions that split what a teacher needs whole."""


@frozen(kw_only=True)
class Distillation(ChunkedCrossEntropy):
    """Cross-entropy with the labels, mixed with the divergence from a frozen teacher (Hinton, Vinyals and Dean 2015).

    With weight a, temperature T, teacher p and student q, both softened by T, a position's objective is
    (1 - a) cross-entropy + a T² KL(p || q). The teacher runs forward, without gradients, in the compute dtype. It is
    whole on every rank and in no checkpoint. The reported loss is the student's cross-entropy with the labels;
    evaluations do not run the teacher.
    """

    teacher: FilePath
    """A checkpoint, or a run folder or job file whose newest checkpoint is taken. It must have the student's vocabulary
    and tokenizer."""
    weight: float = field(default=0.5, validator=and_(ge(0), le(1)))
    """Share of the divergence in the objective; label smoothing and z-loss belong to the rest. The divergence is logged
    unweighted as `loss/distillation`."""
    temperature: float = field(default=1.0, validator=gt(0))
    """Divides the logits of both models; higher values raise the weight of tokens that the teacher finds unlikely."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses layouts that divide what a teacher needs whole, and a path that does not exist."""
        yield from super().problems(job, layout)
        for dimension, split in WHOLE.items():
            if getattr(layout, dimension) > 1:
                message = f"a teacher needs whole {split}, which parallel.{dimension} splits; use replicate or fsdp"
                yield Problem("teacher", message)
        if not Path(self.teacher).exists():
            message = (
                f"{self.teacher} does not exist; give a checkpoint, a run folder, or a job file whose run is there"
            )
            yield Problem("teacher", message)

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Returns the hook that refuses another checkpoint of the teacher when the run is resumed."""
        return [SameTeacher(teacher=self.teacher)]

    def build(self, context: BuildContext) -> LossFunction:
        """Loads the teacher, whole on every rank. Collective.

        Raises:
            CheckpointError: there is no intact checkpoint.
            JobError: the teacher has another tokenizer, or its model needs components that are not installed.
        """
        from forge_plugin_losses.distillation import distillation_loss
        from forge_plugin_losses.teacher import load_trained

        teacher = load_trained(Path(self.teacher), context)
        fingerprint = teacher.manifest["provenance"].get("tokenizer")
        # A manifest without a fingerprint, of a run without a tokenizer, has nothing to compare
        if context.tokenizer is not None and fingerprint not in (None, context.tokenizer.fingerprint()):
            message = f"{teacher.checkpoint} was trained with another tokenizer: its ids mean other texts"
            raise JobError([Problem("loss.teacher", f"{message}; train both with the same one")])
        return distillation_loss(
            teacher.model,
            super().build(context),
            self.chunk_tokens,
            context.auxiliary,
            weight=self.weight,
            temperature=self.temperature,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )


@define(kw_only=True, slots=False)
class SameTeacher(SameTrained):
    """Refuses to resume with another teacher checkpoint than before."""

    key = "teacher"

    teacher: FilePath
