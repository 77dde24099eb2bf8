"""The evaluation `rewards`: completions of held-out prompts, scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import EvaluationComponent, Problem
from forge_plugin_grpo.grpo import GRPO
from forge_plugin_grpo.prompts import Prompts

if TYPE_CHECKING:
    from forge_core.contracts.contexts import EvaluationContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


@frozen(kw_only=True)
class Rewards(EvaluationComponent):
    """The mean reward of completions of held-out prompts, by the rewards of `[loss]`.

    Logs `eval/reward`, `eval/reward/NAME` of each reward, `eval/ended`, the share of completions that end, and
    `eval/negative_reward`, for `checkpoint.best_metric`, of which the lowest value is the best.
    """

    prompts: int = field(default=0, validator=ge(0))
    """How many prompts, always the same, the first ones of each source; 0: all that are held out."""
    temperature: float = field(default=0.0, validator=ge(0))
    """0 takes the most likely tokens; else they are drawn, alike in each evaluation."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there are rewards and held-out prompts."""
        if not isinstance(job.loss, GRPO):
            yield Problem("", f"scores completions by the rewards of [loss], and {type(job.loss).__name__} has none")
        elif not any(isinstance(source, Prompts) and source.held_out_every for source in job.data.sources):
            yield Problem("", "no source holds out prompts; set held_out_every of one")

    def evaluate(self, context: EvaluationContext) -> Mapping[str, float]:
        """See `EvaluationComponent.evaluate`."""
        import torch

        from forge_core.parallel import mesh
        from forge_core.parallel.initialise import seed_of
        from forge_plugin_generate.generate import Sampling
        from forge_plugin_generate.prompts import stop_ids
        from forge_plugin_generate.sample import sample
        from forge_plugin_grpo.prompts import encode_prompt
        from forge_plugin_grpo.scoring import Scorer, weighted

        loss, tokenizer = context.job.loss, context.build.tokenizer
        assert isinstance(loss, GRPO)
        assert tokenizer is not None
        sources = [source for source in context.job.data.sources if isinstance(source, Prompts)]
        lines = [line for source in sources for line in source.lines(held_out=True)[: self.prompts or None]]
        # Each rank its part; one without any computes the first prompt, as ranks generate together, and counts nothing
        ranks, rank = context.build.layout.data_parallel, mesh.sample_rank(context.build.mesh, context.build.layout)
        own = list(range(len(lines)))[rank::ranks]
        chosen = [lines[number] for number in own or [0]]
        scorer = Scorer(loss, tokenizer, stop_ids(tokenizer))
        drawn = sample(
            context.model,
            [encode_prompt(tokenizer, line["prompt"]) for line in chosen],
            loss.max_tokens,
            scorer.stops,
            Sampling(temperature=self.temperature),
            # By the number of the prompt, not by rank: every layout draws the same
            [seed_of(f"{context.job.job.seed}:evaluation:{number}") for number in own or [0]],
        )
        scores = scorer(drawn, chosen)
        means = {"reward": weighted(loss, scores), **{f"reward/{name}": values for name, values in scores.items()}}
        means["ended"] = torch.tensor([float(scorer.ended(one)) for one in drawn], dtype=torch.float64)
        sums = torch.stack([*(values.sum() for values in means.values()), torch.tensor(float(len(chosen)))])
        total = context.all_reduce((sums * bool(own)).to(context.build.device))
        metrics = dict(zip(means, (total[:-1] / total[-1]).tolist(), strict=True))
        metrics["negative_reward"] = 0.0 - metrics["reward"]  # no -0.0
        return {f"eval/{name}": value for name, value in metrics.items()}
