"""The plugin `noise_scale`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from attrs.validators import ge, lt

from forge_core import Job, Plugin, Problem, TrainingHook, hookimpl
from forge_core.contracts.components import WhenResumed
from forge_plugin_taps.stats.training_stats import PREFIX

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext, StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import Executor, ParallelStage
    from forge_plugin_taps.stats.half_gradient import HalfGradient

VARIANCE, SQUARE, NOISE = (f"{PREFIX}/{name}" for name in ("gradient_variance", "gradient_square", "noise_scale"))


@define(kw_only=True, slots=False)
class NoiseScale(Plugin):
    """Logs the gradient noise scale, the batch in tokens beyond which a larger one helps little.

    It is tr Σ / |G|² (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", equation 2.8), with Σ the
    covariance of the gradient of one token and G the gradient of the whole distribution. Both are estimated without
    bias from the norms of two gradients (appendix A.1), of the global batch and of its rows with even numbers:

    - `stats/gradient_variance`: tr Σ = (|G_half|² - |G_all|²) / (1 / B_half - 1 / B_all);
    - `stats/gradient_square`: |G|² = (B_all |G_all|² - B_half |G_half|²) / (B_all - B_half);
    - `stats/noise_scale`: ratio of the moving averages of both; NaN where the second is not positive.

    B are tokens with a label. Rows are the independent samples: Σ is their covariance times the tokens of a row. A
    sampled step first computes the half by itself, with the labels of other rows masked, which takes one forward and
    backward pass and one collective more. The gradient of the half is dropped before the step begins, so that the peak
    of memory stays. Auxiliary losses are of all rows in both.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    interval: int = field(default=100, validator=ge(1))
    """Steps between sampled ones: step N is sampled if it is divisible by this."""
    smoothing: float = field(default=0.9, validator=[ge(0), lt(1)])
    """Share of the average that a new sample leaves as it is. A single estimate is noisy, and their ratio is biased."""

    @hookimpl
    def forge_validate_job(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Requires two rows, one run, a loss per token, and a sampled step."""
        path = next(f"plugins.{name}" for name, plugin in job.plugins.items() if plugin is self)
        if self.interval > job.train.steps:
            message = f"no step up to train.steps {job.train.steps} is divisible by {self.interval}"
            yield Problem(f"{path}.interval", f"{message}, so nothing would be logged", fits=job.train.steps)
        if job.train.global_batch_size < 2:
            yield Problem(
                path, "compares a half of the batch with all of it; train.global_batch_size must be at least 2"
            )
        if not job.loss.is_cross_entropy:
            message = "takes rows as independent samples, and the loss of this job is no mean over their tokens"
            yield Problem(path, f"{message}; leave it out, or take a cross-entropy")
        if layout.run[1] > 1:
            yield Problem(path, "measures the gradient of one run, and several share the batch; leave it out")

    @hookimpl
    def forge_training_hooks(self) -> Iterable[TrainingHook]:
        """Adds the hook by which the executor learns the number of the step, and which logs."""
        return [NoiseHook(plugin=self)]

    @hookimpl(wrapper=True)
    def forge_build_executor(
        self, context: BuildContext, model: Model, stages: Sequence[ParallelStage]
    ) -> Generator[None, Executor, Executor]:
        """Wraps the executor of the job, whichever component builds it."""
        from forge_plugin_taps.stats.half_gradient import HalfGradient

        # Of the executor that other plugins have wrapped already: what they do belongs to the half, too
        executor = yield
        self.half: HalfGradient = HalfGradient(executor, model, context, stages)
        return self.half


@define(kw_only=True, slots=False)
class NoiseHook(TrainingHook):
    """Chooses the steps that are sampled, and logs."""

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    plugin: NoiseScale
    averages: Any = field(default=None, init=False)
    """(2,) moving averages of variance and square, on the device; None before the first sample."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Agrees with the other ranks on the parts of parameters. Collective."""
        self.plugin.half.begin()

    def on_step_begin(self, context: StepContext) -> None:
        """Lets the executor compute the half in a sampled step."""
        self.plugin.half.due = context.step % self.plugin.interval == 0

    def on_step_end(self, context: StepContext) -> None:
        """Logs the estimates of a sampled step, on the device."""
        half, self.plugin.half.due = self.plugin.half, False
        if half.square is None or context.grad_norm is None:
            return
        import torch

        found = torch.stack(estimates(half.square, context.grad_norm.double().square(), half.tokens, half.all_tokens))
        # From 0, whose bias is the same in both and cancels in the ratio
        before = torch.zeros_like(found) if self.averages is None else self.averages.to(found.device)
        # A step that is not finite, or has labels in one half only, would stay in the average for good
        self.averages = before.lerp(found, 1 - self.plugin.smoothing).where(found.isfinite().all(), before)
        variance, square = self.averages.unbind()
        context.log(VARIANCE, found[0])
        context.log(SQUARE, found[1])
        context.log(NOISE, (variance / square).where(square > 0, torch.nan))
        half.square = None


def estimates(small: Tensor, whole: Tensor, tokens: Tensor, all_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of tr Σ and |G|², from squared norms of the gradients of a part of a batch and of all of it.

    Args:
        small: () squared norm of the mean gradient of the part.
        whole: () the same of the whole batch.
        tokens: () size of the part.
        all_tokens: () size of the whole batch.
    """
    variance = (small - whole) / (1 / tokens - 1 / all_tokens)
    square = (all_tokens * whole - tokens * small) / (all_tokens - tokens)
    return variance, square
