"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import fields_dict, frozen

if TYPE_CHECKING:
    from forge_core.config.job import CheckpointSection


@frozen(kw_only=True)
class Retention:
    """What a job wants kept; see the keys of `[checkpoint]`. A checkpoint stays if any of these names it."""

    keep: int = 0
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "eval/loss"
    early_steps: int = 0
    at_start: bool = False

    @classmethod
    def of(cls, section: CheckpointSection) -> Retention:
        """What `[checkpoint]` says."""
        return cls(**{name: getattr(section, name) for name in fields_dict(cls)})

    def to_delete(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        """The steps, of those that have a checkpoint, that nothing asks to keep.

        Args:
            metrics: step -> value of the metric, lower is better; steps without one are never the best.
        """
        kept = {step for step in steps if self.keeps_forever(step)}
        kept |= set(sorted(steps)[-self.keep :])
        best = sorted((metrics[step], step) for step in steps if step in metrics)
        kept |= {step for _, step in best[: self.keep_best]}
        return sorted(set(steps) - kept)

    def keeps_forever(self, step: int) -> bool:
        """Whether a checkpoint of this step is never deleted, whatever comes later."""
        every = bool(self.keep_every) and step > 0 and step % self.keep_every == 0
        return every or self.is_early(step) or (self.at_start and step == 0)

    def is_early(self, step: int) -> bool:
        """Whether the step is in the dense window at the start: a power of two."""
        return 0 < step <= self.early_steps and step & (step - 1) == 0
