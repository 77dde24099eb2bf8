"""The reward `reward_model`: the score by a model that another run has trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.validators import ge

from forge_core import Problem, TrainingHook
from forge_core.contracts.components import FilePath, when_resumed
from forge_core.contracts.errors import CheckpointError
from forge_plugin_grpo.kinds import Completion, RewardComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class RewardModel(RewardComponent):
    """The score of prompt and completion by a reward model (Ouyang et al. 2022), at their end of text.

    The model is one that a run with `[plugins.reward_head]` of forge-plugin-preference has trained, with the tokenizer
    of this job. Each rank loads all of it, in the compute dtype, and scores the completions that it draws. A completion
    that was cut is scored as if it ended there.
    """

    path: FilePath
    """A checkpoint, or a run folder or job file whose newest checkpoint is taken."""
    batch_size: int = field(default=16, validator=ge(1), metadata=when_resumed("safe"))
    """Completions of a forward pass."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the path exists."""
        if not Path(self.path).exists():
            message = f"{self.path} does not exist; give a checkpoint, a run folder, or a job file whose run is there"
            yield Problem("path", message)

    def plan_lines(self, job: Job) -> Iterable[tuple[str, str]]:
        """Yields that a plan leaves the model out."""
        yield "reward", f"the model {self.path}, whole on each rank; its memory and its passes are not counted"

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """One that loads the model."""
        return [LoadsRewardModel(reward=self)]

    def score(self, completion: Completion) -> float:
        """See `RewardComponent.score`."""
        return self.scores([completion])[0]

    def scores(self, completions: Sequence[Completion]) -> Sequence[float]:
        """See `RewardComponent.scores`.

        Raises:
            ForgeError: no run has loaded the model.
        """
        from forge_plugin_grpo.model_scores import scorer_of

        return scorer_of(self).scores(completions)


@define(kw_only=True, slots=False)
class LoadsRewardModel(TrainingHook):
    """Loads a reward model when a run begins, and refuses to continue the run with another checkpoint of it.

    A run folder that names the model may have newer checkpoints since.
    """

    resumes_as = "safe"
    reward: RewardModel
    checkpoint: str = field(init=False, default="")

    def on_train_begin(self, context: TrainContext) -> None:
        """Loads the model, the whole of it on each rank.

        Raises:
            CheckpointError: there is no intact checkpoint, or it is another one than the run began with.
            JobError: it is no reward model, has another tokenizer, or needs components that are not installed.
        """
        from forge_plugin_grpo.model_scores import load_scorer

        assert context.build is not None, "the run loop gives hooks its context"
        rewards: Mapping[str, Any] = getattr(context.job.loss, "rewards", {})
        table = next((f"loss.rewards.{name}" for name, each in rewards.items() if each == self.reward), "loss.rewards")
        current = str(load_scorer(self.reward, context.build, table))
        # Called after the state was loaded, if the run continues
        before, self.checkpoint = self.checkpoint, current
        if before and before != current:
            message = f"the model {self.reward.path} of {table} was {before} when this run began, and is {current} now"
            hint = f'name it in the job, {table}.path = "{before}", and continue with --resume-with-changes'
            raise CheckpointError(f"{message}; {hint}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the path as the job has it, and the checkpoint that was found there."""
        return {"path": self.reward.path, "checkpoint": self.checkpoint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state if the job names another path: that change is intended."""
        if state["path"] == self.reward.path:
            self.checkpoint = state["checkpoint"]
