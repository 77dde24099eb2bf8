"""The hook `training_stats`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import define, field
from attrs.validators import ge

from forge_core.contracts.components import TrainingHook, WhenResumed
from forge_core.contracts.errors import ForgeError, Problem
from forge_plugin_taps.stats.limits import Limit, Limits

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_taps.stats.step_probe import StepProbe
    from forge_plugin_taps.stats.tensor_norms import TensorNorms

PREFIX = "stats"
WEIGHT, GRADIENT, UPDATE, RATIO = (
    f"{PREFIX}/{name}" for name in ("weight_norm", "gradient_norm", "update_norm", "update_ratio")
)
LARGEST_LOGIT = f"{PREFIX}/logits/max"
PHASES = ("forward", "backward", "optimizer")
"""Phases at whose ends the peak of memory is read."""
WHOLE = "model"
"""Last part of the names of the numbers of all parameters together."""


@define(kw_only=True, slots=False)
class TrainingStats(TrainingHook):
    """Logs norms of weights, gradients and updates by layer and role, every `interval` steps.

    A number is `stats/KIND/GROUP`, where KIND is

    - `weight_norm`: Euclidean norm of the weights before the update;
    - `gradient_norm`: of the gradient of the global batch, before clipping;
    - `update_norm`: of the difference that the update has made, 0 where it was skipped;
    - `update_ratio`: update norm over weight norm, 0 where all weights are 0.

    GROUP is a layer with a role, part or parameter (`layers.3/matrix`), or `model` for all parameters. All numbers are
    the same under every layout. Parameters that do not train have gradients and updates of 0.

    Of the model as a whole there are

    - `stats/logits/max`, `stats/logits/rms`: largest absolute value and root mean square of the logits of all
      positions, NaN where a loss does not enter `Head.whole`;
    - `stats/memory/forward_gb`, `backward_gb`, `optimizer_gb`: peak of allocated memory, in 10^9 bytes, from the
      beginning of the step to the end of the first forward pass, of all passes, and of the update, of the rank with
      most. Devices without memory statistics, such as CPUs, have none of them.

    A sampled step costs one pass over weights, gradients and updates, one collective, and no wait of the host. With
    `updates` it keeps a copy of this rank's part of the weights that train, from the end of the backward pass, when the
    activations are freed, to the end of the step. Between sampled steps nothing is kept and nothing is computed.
    """

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    interval: int = field(default=100, validator=ge(1))
    """Steps between sampled ones: step N is sampled if it is divisible by this."""
    by: Literal["role", "part", "parameter"] = "role"
    """Groups within a layer: by role (`matrix`, `norm`, …), by the layer's parts (`attention`, `ffn`, …), or each
    parameter by itself. Parameters outside of layers belong to their module (`embedding`, `head`, …)."""
    updates: bool = True
    """Whether norms of updates are logged, for which weights are copied."""
    logits: bool = True
    """Whether extremes of logits are logged, for which a sampled step computes them once more, without a gradient."""
    limits: tuple[Limit, ...] = ()
    """`[[hooks.training_stats.limits]]`: numbers of sampled steps that must stay within bounds."""

    def __attrs_post_init__(self) -> None:
        # Not fields, which would be state: between two steps there is nothing to save
        self._norms: TensorNorms | None = None
        self._sampled: list[Tensor] = []
        self._before: list[Tensor | None] = []
        self._probe: StepProbe | None = None
        self._limits = Limits(self.limits)

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that some step is sampled, and that each limit has a bound."""
        if self.interval > job.train.steps:
            message = f"no step up to train.steps {job.train.steps} is divisible by {self.interval}"
            yield Problem("interval", f"{message}, so nothing would be logged", fits=job.train.steps)
        for number, limit in enumerate(self.limits):
            yield from (problem.below(f"limits.{number}") for problem in limit.problems())

    def on_train_begin(self, context: TrainContext) -> None:
        """Agrees with the other ranks on the groups and on who has which part of a parameter. Collective."""
        from forge_plugin_taps.stats.tensor_norms import TensorNorms

        if context.build is None:
            raise ForgeError("training_stats needs the contexts of the run loop, with `build`")
        self._norms = TensorNorms(context.model, context.build.device, self.by)
        self._forget()

    def on_step_begin(self, context: StepContext) -> None:
        """Looks at head and memory from the first forward pass of a sampled step on."""
        from forge_plugin_taps.stats.step_probe import StepProbe

        if context.build is not None and context.step % self.interval == 0:
            self._probe = StepProbe(context.model, context.build.device, self.logits)

    def on_gradients(self, context: StepContext) -> None:
        """Sums squares of weights and gradients, and copies the weights that are about to change."""
        if self._norms is None or self._probe is None:
            return
        self._probe.leave()
        weights, gradients = self._norms.weights(), self._norms.gradients()
        self._sampled = [self._norms.squares(weights), self._norms.squares(gradients)]
        if self.updates:
            # Here and not at the beginning of the step: activations are freed by now, so that the peak stays
            pairs = zip(weights, gradients, strict=True)
            self._before = [None if gradient is None else weight.clone() for weight, gradient in pairs]

    def on_step_end(self, context: StepContext) -> None:
        """Adds up over ranks, logs, and judges the numbers of the sampled step before. Collective in a sampled step."""
        # The step before, whose copy has arrived by now: to judge this step's would wait for the device
        self._limits.settle(context)
        if self._norms is None or self._probe is None:
            return
        for name, value in self._probe.over_ranks().items():
            context.log(f"{PREFIX}/{name}", value)
        if self.updates:
            self._sampled.append(self._norms.changes(self._before))
        # One collective for all kinds: latency, and not size, is what it costs
        kinds = (WEIGHT, GRADIENT, UPDATE)
        norms = dict(zip(kinds, self._norms.over_ranks(self._sampled), strict=False))
        if self.updates:
            weight = norms[WEIGHT]
            # 0 and not infinite for weights of 0, such as new adapters, which would be beyond every limit
            norms[RATIO] = (norms[UPDATE] / weight).where(weight > 0, 0.0)
        self._forget()
        groups = [*self._norms.groups, WHOLE]
        # As tensors on the device, which the line takes along without a wait
        for kind, values in norms.items():
            for group, value in zip(groups, values.unbind(), strict=True):
                context.log(f"{kind}/{group}", value)
        self._limits.note(context)

    def on_checkpoint_begin(self, context: TrainContext) -> None:
        """Judges the numbers of the last sampled step, as the run may end with this save, which waits anyhow."""
        self._limits.settle(context)

    def on_exception(self, context: TrainContext, error: BaseException) -> None:
        """Gives the model its methods back, as a notebook may continue to use it."""
        if self._probe is not None:
            self._probe.leave()

    def _forget(self) -> None:
        self._probe = None
        self._sampled = []
        self._before = []
