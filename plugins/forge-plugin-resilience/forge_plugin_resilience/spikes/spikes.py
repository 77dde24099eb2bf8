"""The hook `spikes`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field
from attrs.validators import deep_iterable, ge, gt, in_, min_len

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import Problem
from forge_plugin_resilience.spikes.score import Score, robust_score

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import CheckpointSection, Job, TrainSection

ENOUGH = 32
"""Values from which a median deviation is reliable: with fewer in the window, nothing is judged."""
MARK = "spike of "
"""Begins every reason of this hook, so that a rank recognises the reasons of other ranks."""
REMEMBERED = 64
"""Ranges of unusable checkpoints that are remembered; retention has long deleted the checkpoints of earlier ranges."""


@define(kw_only=True, slots=False)
class Spikes(TrainingHook):
    """Finds spikes of loss and gradient norm, and leaves their updates out, goes back, or ends the run.

    A value is a spike if it is not finite, or lies more than `threshold` deviations above the median of the last
    `window` ones, by the robust z-score of logarithms (`robust_score`). Both are known before the update, for one wait
    on the device in each step. Values of updates that were not made never enter the window.

    The run goes back to weights that are known to be good. The values of a step belong to the weights before it, so a
    checkpoint is good if the next step that was trained was no spike, and the run has not left it behind since.

    Decisions follow from values that all ranks share, and the engine agrees on them. What they depend on is part of the
    state, so that a run that continues decides alike.
    """

    may_skip: ClassVar[bool] = True
    rolls_back: ClassVar[bool] = False  # else it would forget how often it went back, and do so for ever

    watch: tuple[Literal["grad_norm", "loss"], ...] = field(
        default=("grad_norm", "loss"), validator=[min_len(1), deep_iterable(in_(("grad_norm", "loss")))]
    )
    """Values to judge: the global gradient norm before clipping, the mean loss of the global batch."""
    window: int = field(default=128, validator=ge(8))
    """Number of earlier values to judge by. Until it is full, there must be 32 (or `window`, if that is less)."""
    threshold: float = field(default=6.0, validator=gt(0))
    """Robust z-score above which a value is a spike."""
    warmup_steps: int = field(default=100, validator=ge(0))
    """Steps at the start whose finite values are kept but not judged: norms change quickly then."""
    action: Literal["warn", "skip", "roll_back", "stop"] = "skip"
    """Action on a spike: `warn` reports it; `skip` leaves out the update, and after `skip_limit` in a row goes back;
    `roll_back` goes back at the first; `stop` leaves out the update, saves, and ends the run (exit code 76)."""
    skip_limit: int = field(default=3, validator=gt(0))
    """With `skip`: spikes in a row after which the run goes back."""
    roll_back_to: int = field(default=1, validator=gt(0))
    """How many saves to go back: 1 for the newest checkpoint, 2 for the one before."""
    leave_out: int = field(default=200, validator=ge(0))
    """Further steps whose data are left out after going back."""
    max_roll_backs: int = field(default=5, validator=ge(0))
    """How often the run may go back; then it saves and ends (exit code 76)."""

    logarithms: dict[str, list[float]] = field(factory=dict, init=False)
    """Logarithms of the last values of each watched name, oldest first."""
    row: int = field(default=0, init=False)
    """Spikes since the last update that was made."""
    roll_backs: int = field(default=0, init=False)
    last_step: int = field(default=0, init=False)
    """Last step that was trained, and whose data were not left out."""
    unusable: list[list[int]] = field(factory=list, init=False)
    """Ranges (first, last) of steps whose checkpoints had a spike next, or were left behind by a roll-back."""
    last_roll_back: list[int] = field(factory=list, init=False)
    """The last roll-back as (step gone back to, step at which); empty before the first."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the action can be taken: by the limit of skipped steps, by retention, and by planned saves."""
        if len(set(self.watch)) < len(self.watch):
            yield Problem("watch", f"names a value twice: {', '.join(self.watch)}")
        if self.action in ("skip", "roll_back"):
            yield from self._problems_of_skips(job.train)
            yield from self._problems_of_checkpoints(job.checkpoint)

    def _problems_of_skips(self, train: TrainSection) -> Iterator[Problem]:
        if self.action == "skip" and self.skip_limit > train.non_finite_limit:
            limit = f"train.non_finite_limit = {train.non_finite_limit} ends the run before {self.skip_limit} in a row"
            yield Problem("skip_limit", f"{limit}; lower skip_limit, or raise that limit")

    def _problems_of_checkpoints(self, section: CheckpointSection) -> Iterator[Problem]:
        if self.max_roll_backs == 0:
            return
        if 0 < section.keep < self.roll_back_to:
            deletes = f"checkpoint.keep = {section.keep} deletes the checkpoint of {self.roll_back_to} saves ago"
            yield Problem("roll_back_to", f"{deletes}; keep {self.roll_back_to + 1}, or go back less far")
        may_save = section.interval or section.interval_minutes or section.at_start or section.early_steps
        if self.action == "roll_back" and not may_save:
            yield Problem("action", "there will be no checkpoint to go back to; set checkpoint.interval")

    def waits(self) -> str:
        """One: the step's loss and norm come together."""
        return "one a step, for spikes"

    def on_gradients(self, context: StepContext) -> None:
        """Judge the values of the step, and request to leave out its update. Waits for the device once."""
        # Later ones are made again, after a hook has put back a state with its step
        self.unusable = [steps for steps in self.unusable if steps[1] < context.step]
        self._values = _read(context, self.watch)
        reasons = []
        for name, value in self._values.items():
            score = self._judge(name, value, context.step)
            if score is not None:
                context.log(f"spikes/z/{name}", score.z)
                if score.z > self.threshold:
                    reasons.append(self._words(name, value, score))
        self._reason = "; ".join(reasons)
        if reasons and self.action != "warn":
            context.skip_update(self._reason)

    def on_step_end(self, context: StepContext) -> None:
        """Keep the values of an update that was made; on a spike, distrust the weights before it, and act."""
        context.log("spikes/roll_backs", self.roll_backs)
        if not context.skipped:
            self._keep_values()
            self.row = 0
        # The engine has agreed on skipping: a rank that found no spike receives another rank's reason here
        reason = self._reason or (context.requests.skip if MARK in context.requests.skip else "")
        if reason:
            self._distrust(self.last_step, context.step - 1)
            if self.last_roll_back[1:] == [self.last_step]:  # weights that the run has gone back to are no better
                self._distrust(self.last_roll_back[0], self.last_roll_back[0])
        self.last_step = context.step
        if reason:
            self._act(context, reason)

    def on_rollback(self, context: TrainContext, step: int, reason: str) -> None:
        """Distrust the checkpoints that were left behind, also where another hook has requested the roll-back."""
        self.row = 0
        self.last_roll_back = [step, context.step]
        self._distrust(step + 1, context.step - 1)

    def _distrust(self, first: int, last: int) -> None:
        if self.unusable and first - 1 <= self.unusable[-1][1] <= last:  # one range for many in a row
            first = min(first, self.unusable.pop()[0])
        if first <= last:
            self.unusable = [*self.unusable, [first, last]][-REMEMBERED:]

    def _judge(self, name: str, value: float, step: int) -> Score | None:
        """The score of a value; None if it cannot be judged yet, or has no logarithm."""
        earlier = self.logarithms.get(name, [])
        if not math.isfinite(value):
            return robust_score(value, earlier)
        if step <= self.warmup_steps or len(earlier) < min(self.window, ENOUGH) or value <= 0:
            return None
        return robust_score(value, earlier)

    def _words(self, name: str, value: float, score: Score) -> str:
        if not math.isfinite(value):
            return f"{MARK}{name}: {value} is not finite"
        steps = len(self.logarithms[name])
        usual = f"the median of the {steps} steps before is {score.median:.4g}"
        return f"{MARK}{name}: {value:.4g}, {usual}, z = {score.z:.1f} (threshold {self.threshold:g})"

    def _keep_values(self) -> None:
        for name, value in self._values.items():
            if math.isfinite(value) and value > 0:
                kept = self.logarithms.setdefault(name, [])
                kept.append(math.log(value))
                del kept[: -self.window]

    def _act(self, context: StepContext, reason: str) -> None:
        if self.action == "warn":
            _warn(f"step {context.step}: {reason}")
        elif self.action == "stop":
            _end_run(context, reason)
        else:
            self.row += 1
            if self.action == "roll_back" or self.row >= self.skip_limit:
                self._roll_back(context, reason)

    def _roll_back(self, context: StepContext, reason: str) -> None:
        if self.row > 1:
            reason = f"{self.row} in a row, the last a {reason}"
        self.row = 0
        if self.roll_backs >= self.max_roll_backs:
            _end_run(context, f"{reason}; rolled back {self.roll_backs} times, as often as max_roll_backs allows")
            return
        step = self._step_to_go_back_to(context)
        if step is None:
            age = "" if self.roll_back_to == 1 else f" of {self.roll_back_to} saves ago"
            _warn(f"step {context.step}: no checkpoint{age} to go back to, the update is only skipped; {reason}")
            return
        self.roll_backs += 1
        context.log("spikes/roll_backs", self.roll_backs)
        context.request_rollback(reason, to=step, leave_out=self.leave_out)

    def _step_to_go_back_to(self, context: StepContext) -> int | None:
        section, now = context.job.checkpoint, context.step
        saved = [step for step in context.checkpoints() if self._is_usable(step, now)]
        due = [step for step in saved if _is_due(section, step)]
        pending = _last_due(section, now)
        if section.async_save and pending > max(saved, default=-1) and self._is_usable(pending, now):
            # It is still being written; going back waits for it. Whether it is listed is a matter of the clock, by
            # which decisions must not differ.
            saved, due = [*saved, pending], [*due, pending]
        # Without saves by the clock, saves at a stop are off schedule: a run that was not stopped does not have them
        choices = due if not section.interval_minutes and len(due) >= self.roll_back_to else saved
        return choices[-self.roll_back_to] if len(choices) >= self.roll_back_to else None

    def _is_usable(self, step: int, now: int) -> bool:
        return step < now and not any(first <= step <= last for first, last in self.unusable)


def _is_due(section: CheckpointSection, step: int) -> bool:
    at_start = step == 0 and section.at_start
    return at_start or section.is_early(step) or bool(section.interval and step > 0 and step % section.interval == 0)


def _last_due(section: CheckpointSection, now: int) -> int:
    """The last step before `now` whose number requires a checkpoint; -1 if there is none."""
    return next((step for step in range(now - 1, -1, -1) if _is_due(section, step)), -1)


def _read(context: StepContext, names: Iterable[str]) -> Mapping[str, float]:
    """Values by name, on the host, for one wait."""
    import torch

    own: dict[str, Any] = {"grad_norm": context.grad_norm, "loss": context.loss}
    assert own["loss"] is not None
    values = [own[name].detach().to(own["loss"].device, torch.float64, non_blocking=True) for name in names]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))


def _end_run(context: StepContext, reason: str) -> None:
    """Save and end with exit code 76, which no scheduler continues by itself, as it does after a stop (75)."""
    context.requests.non_finite = f"step {context.step}: {reason}"


def _warn(text: str) -> None:
    from forge_core.parallel.mesh import global_rank

    if global_rank() == 0:
        warnings.warn(text, stacklevel=2)
