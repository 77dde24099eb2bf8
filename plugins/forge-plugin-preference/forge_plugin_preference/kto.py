"""The loss `kto`, over single answers that are desirable or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.components import FilePath, TrainingHook
from forge_core.contracts.errors import Problem
from forge_plugin_losses.reference_path import reference_problems
from forge_plugin_preference.base import PreferenceLoss, describe_reference
from forge_plugin_preference.hooks import Baseline, reference_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_preference.answers import Answers


@frozen(kw_only=True)
class KTO(PreferenceLoss):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equation 7): learns from single answers with a label.

    w (1 - σ(β (r - z))) of a desirable answer, w' (1 - σ(β (z - r))) of an undesirable one, with r = log p(y|x) -
    log p_reference(y|x). z is the larger of 0 and the mean of r over answers to other prompts, in the global batch and
    without gradient, as it is in every layout: a further forward pass before each step. Logged as `kto/z`; rewards are
    β r, their means over the answers of each kind. The first loss is w/2 or w'/2 of each answer.
    """

    name: ClassVar[str] = "kto"
    paired: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = True

    reference: FilePath = ""
    """The frozen reference: a checkpoint, or a run folder or job file whose newest checkpoint is taken. Ranks divide it
    as `[parallel]` divides the model, but for a pipeline's stages. `adapters_off`: the model in training with its
    adapters off, in a forward pass before each step. Empty: the data have its log-probabilities."""
    check_first_loss: bool = True
    """Whether the first loss is compared with the one of a model that is the reference, where `[checkpoint.load]` has
    that checkpoint, or adapters begin at zero. Dropout needs `false`: with it, a model in training computes something
    else than the reference."""
    beta: float = field(default=0.1, validator=gt(0))
    """β, per nat: how strongly the model is held to the reference."""
    desirable_weight: float = field(default=1.0, validator=gt(0))
    """w: weight of desirable answers. The paper wants w times their number to be 1 to 4/3 of the other product."""
    undesirable_weight: float = field(default=1.0, validator=gt(0))
    """w': weight of undesirable answers."""
    estimate_z: bool = True
    """Whether z is estimated as above; false: z = 0, which costs nothing (TRL's `apo_zero_unpaired`)."""

    @property
    def wants_mismatched(self) -> bool:
        """Whether z is estimated."""
        return self.estimate_z

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks sources and reference, and that z can be estimated with it."""
        yield from super().problems(job, layout)
        yield from reference_problems(self.reference, job)
        if self.estimate_z and not self.reference:
            message = "is estimated on prompts with answers to others, whose reference log-probabilities no data have"
            yield Problem("estimate_z", f"{message}; set it to false, or give a reference")
        if self.estimate_z and layout.run[1] > 1:
            message = "is a mean over the global batch, of which each of several runs of one model has a part"
            yield Problem("estimate_z", f"{message}; set it to false, or train in one run")

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Hooks that estimate z, keep the reference the same in a continued run, and check the first loss."""
        yield from reference_hooks(self, self.reference, self.check_first_loss)
        if self.estimate_z:
            yield Baseline()

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Yields that a plan leaves out the pass for z, whose rows it does not have."""
        if self.estimate_z:
            yield "kto z", "a forward pass of model and reference before each step; its time and memory are not counted"

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields where the reference comes from, and the first loss if it is known."""
        return describe_reference(self, context)

    def losses(self, answers: Answers, desirable: Tensor, z: Tensor) -> Tensor:
        """Returns (N,): the loss of each answer.

        Args:
            answers: N of them.
            desirable: (N,) bool.
            z: (N,), the reference point, in nats.
        """
        distance = self.beta * (answers.log_ratio - z)
        # 1 - σ(x) = σ(-x), without the cancellation of the difference
        gain = self.desirable_weight * (-distance).sigmoid()
        return gain.where(desirable, self.undesirable_weight * distance.sigmoid())

    def rewards(self, answers: Answers) -> Tensor:
        """Returns β r."""
        return self.beta * answers.log_ratio

    def first_loss(self, metrics: Mapping[str, float]) -> float | None:
        """Half the mean weight of the answers of that step; before it, known only if both weights are equal."""
        share = metrics.get("kto/desirable", 1.0 if self.desirable_weight == self.undesirable_weight else None)
        if share is None:
            return None
        return (share * self.desirable_weight + (1 - share) * self.undesirable_weight) / 2
