"""The plugin `reward_head`: a model that scores answers in place of predicting tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import ge

from forge_core import Job, ModelComponent, Plugin, Problem, hookimpl

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model

SCORE = "head.score.weight"
"""Name of the parameter, (1, width)."""


@define(kw_only=True, slots=False)
class RewardHead(Plugin):
    """Replaces the head of a model by one with a single output: the score of an answer, at its last token.

    The score is the final hidden state, after the last norm, times a vector (Stiennon et al. 2020, Ouyang et al. 2022),
    without a bias. The parameter is `head.score.weight`, (1, dim). A checkpoint of a language model may be loaded: it
    need not have this parameter, and its own head is left out. Such a model generates no text.
    """

    resumes_as = "impossible"

    init_std: float = field(default=0.0, validator=ge(0))
    """Standard deviation of the normal distribution that the vector is drawn from. 0: it begins at zero, so that all
    answers have the score 0 and the first loss is ln 2. `transformers` draws with 0.02, Stiennon et al. with
    1/√(dim + 1)."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses losses that need logits."""
        if not getattr(type(job.loss), "scores_answers", False):
            message = f"leaves the model without logits, which [loss] ({type(job.loss).__name__}) needs"
            yield Problem("", f'{message}; take [loss] type = "bradley_terry", or leave this table out')

    # Inside of the wrappers of other plugins: `lora` and `freeze` select among the parameters of the whole model
    @hookimpl(wrapper=True, trylast=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Replaces the head."""
        model = yield
        if component is context.job.model:  # and not a model inside of it
            from forge_plugin_preference.score_head import replace_head

            table = next(name for name, plugin in context.job.plugins.items() if plugin is self)
            replace_head(model, self.init_std, f"plugins.{table}")
        return model
