"""Bases of preference losses. A loss over pairs has one method, from log-probabilities to a number for each pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import FilePath, LossComponent, TrainingHook, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_losses.reference_path import reference_problems
from forge_plugin_preference.hooks import reference_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import LossFunction
    from forge_core.job import Job
    from forge_plugin_preference.answers import Answers


@frozen(kw_only=True)
class AnswerLoss(LossComponent):
    """Base of losses over whole answers, by their log-probabilities or by their scores.

    The objective is the mean over the examples of the global batch, independent of micro-batches, packing and ranks. It
    is logged as `loss/NAME`.
    """

    name: ClassVar[str] = ""
    """Name of the loss in metrics; by default the class's in small letters."""
    reads_answers: ClassVar[bool] = True
    """Informs a dataset of answers that they are learned as such: `pairs` refuses a loss without it."""
    paired: ClassVar[bool] = True
    """Whether an example is a pair; else it is one answer, which is desirable or not."""
    uses_reference: ClassVar[bool] = False
    """Whether it compares the model with a frozen reference."""
    scores_answers: ClassVar[bool] = False
    """Whether it takes scores by the head of the plugin `reward_head`, and not log-probabilities."""

    @property
    def metric(self) -> str:
        """Name of the mean loss in the lines of metrics."""
        return f"loss/{self.name or type(self).__name__.lower()}"

    @property
    def wants_mismatched(self) -> bool:
        """Whether rows must have `forge_plugin_preference.answers.MISMATCHED`."""
        return False

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses sources whose rows have no answers."""
        for number, source in enumerate(job.data.sources):
            # By an attribute, so that sources of other plugins count, too
            if not getattr(type(source), "gives_answers", False):
                message = f"compares answers, and data.sources.{number} ({type(source).__name__}) gives none"
                yield Problem("", f'{message}; take type = "pairs"')

    def first_loss(self, metrics: Mapping[str, float]) -> float | None:
        """The mean loss of a step in which the model still is the reference; None: not known.

        Args:
            metrics: the other means of that step, as they are logged.
        """
        return None


@frozen(kw_only=True)
class PreferenceLoss(AnswerLoss):
    """Base of losses over the log-probabilities of answers; the reported loss is the cross-entropy of chosen ones."""

    chunk_tokens: int = field(default=0, validator=ge(0), metadata=when_resumed("safe"))
    """Positions whose logits exist at a time; 0: as many as `chunked_cross_entropy` takes."""

    def build(self, context: BuildContext) -> LossFunction:
        """Returns the loss; loads the reference, if there is one. Collective.

        Raises:
            CheckpointError: the reference has no intact checkpoint.
            JobError: it has another tokenizer, or its model cannot be built or divided.
        """
        from forge_plugin_preference.objective import preference_loss

        return preference_loss(self, context)


@frozen(kw_only=True)
class PairLoss(PreferenceLoss):
    """Base of losses over pairs that need no reference: derive, add keys, and write `losses`.

        @frozen(kw_only=True)
        class Hinge(PairLoss):
            \"\"\"max(0, margin - (log p(chosen) - log p(rejected))), by token.\"\"\"

            margin: float = field(default=0.5, validator=gt(0))
            \"\"\"Nats a token by which the chosen answer shall be likelier.\"\"\"

            def losses(self, chosen, rejected):
                return (self.margin - chosen.mean_log_p + rejected.mean_log_p).clamp(min=0)

    Logged as means over pairs: `loss/hinge`, `rewards/accuracy` (share of pairs whose chosen answer has the larger
    reward), `rewards/margin`, `rewards/chosen`, `rewards/rejected`, `logps/chosen` and `logps/rejected`.
    """

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Returns (N,): the loss of each of N pairs, differentiable by `log_p` of both."""
        raise NotImplementedError

    def rewards(self, answers: Answers) -> Tensor:
        """Returns (N,): the reward that the model gives each answer, for metrics; `log_p` by default."""
        return answers.log_p

    def further(self, chosen: Answers, rejected: Answers) -> Mapping[str, tuple[float, Tensor]]:
        """Further terms of the objective by the name of their metric: weight, and (N,) of each pair."""
        return {}


@frozen(kw_only=True)
class ReferencePairLoss(PairLoss):
    """Base of losses over pairs that compare the model with a frozen reference; see `PairLoss`.

    `Answers.reference` and `Answers.log_ratio` are then there. By default the reward is `log_ratio`.
    """

    uses_reference: ClassVar[bool] = True

    reference: FilePath = ""
    """The frozen reference: a checkpoint, or a run folder or job file whose newest checkpoint is taken. Ranks divide it
    as `[parallel]` divides the model, but for a pipeline's stages. `adapters_off`: the model in training with its
    adapters off, in a forward pass before each step. Empty: the data have its log-probabilities."""
    check_first_loss: bool = True
    """Whether the first loss is compared with the one of a model that is the reference, where `[checkpoint.load]` has
    that checkpoint, or adapters begin at zero. Dropout needs `false`: with it, a model in training computes something
    else than the reference."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks sources, and that the reference exists."""
        yield from super().problems(job, layout)
        yield from reference_problems(self.reference, job)

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Hooks that keep the reference the same in a continued run, and check the first loss."""
        return reference_hooks(self, self.reference, self.check_first_loss)

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields where the reference comes from, and the first loss if it is known."""
        return describe_reference(self, context)

    def rewards(self, answers: Answers) -> Tensor:
        """Returns `log_ratio`."""
        return answers.log_ratio


def describe_reference(loss: PreferenceLoss, context: BuildContext) -> Iterator[tuple[str, str, str]]:
    """Yields lines for the summary of a run, as `Component.choices` does. Rank 0 alone calls it."""
    from forge_plugin_preference.objective import objective_of

    objective = objective_of(context.auxiliary)
    if objective.adapters_off:
        yield "reference", "the model with its adapters off", "loss.reference"
    elif objective.reference is None:
        yield "reference", "log-probabilities in the data", "loss.reference is empty"
    else:
        yield "reference", str(objective.reference.checkpoint), "loss.reference"
    known = loss.first_loss({})
    if known is not None and objective.starts_as_reference:
        yield "first loss", f"{known:.6f}", "the model starts as the reference; another one ends the run"
