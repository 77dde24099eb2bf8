"""The loss `bradley_terry`, of reward models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import TrainingHook, when_resumed
from forge_core.contracts.errors import Problem
from forge_plugin_preference.base import AnswerLoss
from forge_plugin_preference.hooks import FirstLoss
from forge_plugin_preference.reward_head import SCORE, RewardHead

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.runtime import LossFunction
    from forge_core.job import Job


@frozen(kw_only=True)
class BradleyTerry(AnswerLoss):
    """A reward model: -log σ(r(y+) - r(y-)) (Bradley and Terry 1952; Ouyang et al. 2022, equation 1).

    r is the score of the last token of an answer by the head of `[plugins.reward_head]`, which the job must have. The
    first loss is ln 2, as that head begins at zero. Logged as means over pairs: `loss/bradley_terry`, which is also the
    `loss`, `rewards/accuracy`, `rewards/margin`, `rewards/chosen` and `rewards/rejected`.
    """

    name: ClassVar[str] = "bradley_terry"
    scores_answers: ClassVar[bool] = True
    is_cross_entropy: ClassVar[bool] = False
    predicts_next_token: ClassVar[bool] = False
    """So that attention may be bidirectional."""

    center_weight: float = field(default=0.0, validator=ge(0))
    """Weight of (r(y+) + r(y-))² beside the loss, which keeps scores around 0 (Eisenstein et al. 2023; TRL's
    `center_rewards_coefficient`, 0.01 there), logged as `loss/center`."""
    margins: bool = False
    """Whether each line of the data has a number `margin`, by how much its chosen answer is better: the loss is
    -log σ(r(y+) - r(y-) - margin) (Touvron et al. 2023, equation 2)."""
    check_first_loss: bool = field(default=True, metadata=when_resumed("safe"))
    """Whether the first loss is compared with ln 2, where the head begins at zero and `margins` is off."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks sources, and that the model has a head for scores, which trains."""
        yield from super().problems(job, layout)
        if not any(isinstance(plugin, RewardHead) for plugin in job.plugins.values()):
            message = "learns the score of an answer, for which the model has no head"
            yield Problem("", f"{message}; add [plugins.reward_head]")
        for name, plugin in job.plugins.items():
            # By attributes and not by its class, so that plugins of others that freeze a model count, too
            if not hasattr(plugin, "adapters_alone"):
                continue
            if not any(fnmatchcase(SCORE, pattern) for pattern in getattr(plugin, "train", ())):
                message = f"learns the score by {SCORE}, which plugins.{name} freezes"
                yield Problem("", f'{message}; add "head.*" to plugins.{name}.train')

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """The check of the first loss."""
        return [FirstLoss(loss=self)] if self.check_first_loss else []

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Yields the first loss if it is known."""
        from forge_plugin_preference.objective import objective_of

        known = self.first_loss({})
        if known is not None and objective_of(context.auxiliary).starts_as_reference:
            yield "first loss", f"{known:.6f}", "the head begins at zero; another one ends the run"

    def first_loss(self, metrics: Mapping[str, float]) -> float | None:
        """The value ln 2, if all scores are 0 and there are no margins."""
        return None if self.margins else math.log(2)

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor | None) -> Tensor:
        """Returns (N,): the loss of each of N pairs, from the scores of their answers (N,)."""
        from torch.nn.functional import logsigmoid

        difference = chosen - rejected
        return -logsigmoid(difference if margins is None else difference - margins)

    def build(self, context: BuildContext) -> LossFunction:
        """Returns the loss."""
        from forge_plugin_preference.score_objective import score_loss

        return score_loss(self, context)
