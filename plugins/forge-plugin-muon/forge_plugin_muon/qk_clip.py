"""The plugin `qk_clip`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from attrs import define, field
from attrs.validators import and_, ge, gt, le

from forge_core import JobError, Plugin, Problem, TrainingHook, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.components import ModelComponent
    from forge_core.contracts.contexts import BuildContext, StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_kit.nn.attention_scores import ClipsScores

SCORES = "attention/max_logit"
"""Name of the counts, and of the metric: the largest score of a step."""
CLIPPED = "attention/clipped_heads"


class Clipped(NamedTuple):
    """An attention of this rank."""

    row: int
    """Its number, the same on all ranks of a pipeline."""
    attention: ClipsScores


@define(kw_only=True, slots=False)
class QKClip(Plugin):
    """Keeps scores of attention below a threshold by its weights (QK-Clip), with any optimizer; with Muon, MuonClip.

    Kimi Team 2025, "Kimi K2" (arXiv 2507.20534), section 2.1 and algorithm 1. After each update, a head whose largest
    score S of the step (over the global batch, before any cap) is above the threshold t has the weights of its queries
    multiplied by (t / S)ᵃ and the weights of its keys by (t / S)¹⁻ᵃ; heads that share a key have the largest S of
    theirs. In latent attention, the part of queries with a position is multiplied by t / S: all heads share its keys.

    For attention without a norm of queries or keys. Kernels do not return scores, so their products are computed once
    more: a step takes the FLOPs of a sixth of its attention more, whether a head is clipped or not.

    Logs `attention/max_logit` and the number of heads clipped, `attention/clipped_heads`.
    """

    threshold: float = field(default=100.0, validator=gt(0))
    """t: the largest score that a head may keep."""
    alpha: float = field(default=0.5, validator=and_(ge(0), le(1)))
    """a: the share of queries; 0.5: queries and keys alike."""

    @hookimpl
    def forge_validate_job(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Refuses optimizers with other weights for evaluation, and layouts in which no rank sees all scores."""
        path = self._path(job)
        if job.optimizer.has_evaluation_weights:
            name = type(job.optimizer).__name__
            message = f"{name} has its own copy of the weights, which it does not clip"
            yield Problem(path, f"{message}; leave out one of the two")
        if layout.cp > 1:
            message = f"with cp of degree {layout.cp}, a rank has the scores of its positions only"
            yield Problem(path, f"{message}; leave out one of the two")
        if layout.run[1] > 1:
            message = f"each of the {layout.run[1]} runs that train one model has another largest score"
            yield Problem(path, f"{message}; leave out one of the two")

    @hookimpl(wrapper=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Refuses attention that it cannot clip, and a model without any that it can."""
        model = yield
        if component is context.job.model and not any(attentions(model, self._path(context.job)).values()):
            message = "no attention of the model has scores that its weights make smaller; leave it out"
            raise JobError([Problem(self._path(context.job), message)])
        return model

    @hookimpl
    def forge_training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Contributes the hook that clips after each update."""
        return [Clip(threshold=self.threshold, alpha=self.alpha, path=self._path(job))]

    def _path(self, job: Job) -> str:
        return next(f"plugins.{name}" for name, plugin in job.plugins.items() if plugin is self)


@define(kw_only=True, slots=False)
class Clip(TrainingHook):
    """Watches the scores of all attention of this rank, and clips heads after each update; see `QKClip`."""

    threshold: float
    alpha: float
    path: str
    """Of the plugin in the job."""

    def on_train_begin(self, context: TrainContext) -> None:
        """Watch the scores.

        Raises:
            JobError: weights of one attention do not scale its scores or are frozen.
        """
        from forge_core.parallel.mesh import gather_objects
        from forge_kit.nn.attention_scores import ScoreWatch

        assert context.build is not None
        layout, mesh, auxiliary = context.build.layout, context.build.mesh, context.build.auxiliary
        found = attentions(context.model, self.path)
        # A layer may have several, and another rank of a pipeline more than any layer here
        stride = max(gather_objects(max(map(len, found.values()), default=0)))
        rank = mesh.get_local_rank("tp") if mesh is not None and layout.tp > 1 else 0
        self._auxiliary, self._clipped = auxiliary, []
        for layer, of_layer in found.items():
            for place, attention in enumerate(of_layer):
                row = layer * stride + place
                counter = auxiliary.counter(SCORES, row, largest=True)
                attention.score_watch = ScoreWatch(counter.add, rank, layout.tp)
                self._clipped.append(Clipped(row, attention))
        auxiliary.summarise(SCORES, self._summary)

    def on_step_end(self, context: StepContext) -> None:
        """Clip the heads whose largest score is above the threshold."""
        # A skipped step leaves the weights as they were, and its scores need not be finite
        if not context.skipped:
            for row, attention in self._clipped:
                scores = self._auxiliary.counted(SCORES, row)
                attention.scale_scores(self._factors(scores), self.alpha)

    def _factors(self, scores: Tensor) -> Tensor:
        """T / S of heads above the threshold, 1 of others: (H,), from the largest scores (H,)."""
        # An infinite score would give the factor 0, and erase the head
        return (self.threshold / scores).where((scores > self.threshold) & scores.isfinite(), 1.0)

    def _summary(self, rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        import torch

        scores = torch.cat(list(rows.values()))
        return {SCORES: scores.amax(), CLIPPED: (scores > self.threshold).sum()}


def attentions(model: Model, path: str) -> dict[int, list[ClipsScores]]:
    """The attention of each layer whose scores can be clipped.

    Raises:
        JobError: weights of one do not make its scores smaller, or do not train.
    """
    from forge_kit.nn.attention_scores import ClipsScores

    found: dict[int, list[ClipsScores]] = {}
    for key, layer in model.layers.items():
        found[int(key)] = [module for module in layer.modules() if isinstance(module, ClipsScores)]
        for attention in found[int(key)]:
            frozen = not any(parameter.requires_grad for parameter in attention.parameters())  # type: ignore[attr-defined]
            if why := attention.unscalable() or ("its weights are frozen" if frozen else ""):
                name = type(attention).__name__
                message = f"{name} of layer {key} cannot be clipped: {why}; leave it out"
                raise JobError([Problem(path, message)])
    return found
