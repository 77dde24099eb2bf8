"""Limits of numbers that a run logs: a warning, or the end of the run, where one is left."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.errors import ForgeError, Problem, did_you_mean

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext, TrainContext

SHOWN = 5
"""Numbers beyond a limit that one message names."""


@frozen(kw_only=True)
class Limit:
    """`[[hooks.training_stats.limits]]`: bounds of some numbers. One that is NaN is beyond every bound."""

    metric: str = field(validator=min_len(1))
    """Glob over the names of the numbers (`stats/update_ratio/*`): of this hook, of hooks and modules before it, and
    `loss` and `grad_norm`."""
    above: float | None = None
    """Largest value that is allowed."""
    below: float | None = None
    """Smallest value that is allowed."""
    action: Literal["warn", "stop"] = "warn"
    """`warn` reports it; `stop` also saves and ends the run, with exit code 76, by which no scheduler continues it."""

    def problems(self) -> Iterator[Problem]:
        """Yields a problem if no number, or every number, would be beyond the limit."""
        if self.above is None and self.below is None:
            yield Problem("above", "is missing, and so is below; a limit needs at least one of them")
        elif self.above is not None and self.below is not None and self.below > self.above:
            yield Problem(
                "below", f"{self.below:g} is larger than above = {self.above:g}, so no number would be allowed"
            )

    def matches(self, name: str) -> bool:
        """Whether a number of this name has the limit."""
        return fnmatchcase(name, self.metric)

    def bounds(self) -> str:
        """The allowed range in words: `at most 0.01`."""
        parts = ("at least", self.below), ("at most", self.above)
        return ", ".join(f"{words} {bound:g}" for words, bound in parts if bound is not None)

    def words(self, value: float) -> str:
        """How a value is beyond the limit; empty: it is within."""
        # No comparison with NaN holds, so it would pass as within
        if math.isnan(value):
            return "is nan"
        if self.above is not None and value > self.above:
            return f"is {value:.4g}, above {self.above:g}"
        if self.below is not None and value < self.below:
            return f"is {value:.4g}, below {self.below:g}"
        return ""


class Limits:
    """Judges the numbers of a step in the next one, as reading them at once would wait for the device.

    They are equal on all ranks, and so are the decisions.
    """

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self._pending: tuple[int, Sequence[str], Any, Any] | None = None
        """Step, names, values on their way to the host, and the event behind the copy."""

    def note(self, context: StepContext) -> None:
        """Start to copy the numbers of a step that have a limit.

        Raises:
            ForgeError: a limit matches none of them, so that it would watch nothing.
        """
        if not self._limits:
            return
        import torch

        assert context.build is not None
        known = {"loss": context.loss, "grad_norm": context.grad_norm, **context.build.auxiliary.summaries()}
        known |= context.logged
        for number, limit in enumerate(self._limits):
            if not any(map(limit.matches, known)):
                message = f"limits.{number}.metric {limit.metric!r} matches no number of step {context.step}"
                raise ForgeError(f"training_stats: {message}{did_you_mean(limit.metric, known)}")
        names = [name for name in known if any(limit.matches(name) for limit in self._limits)]
        # Hooks may log plain numbers, too
        values = [torch.as_tensor(known[name], dtype=torch.float64) for name in names]
        home = context.build.device
        together = torch.stack([value.detach().reshape(()).to(home, non_blocking=True) for value in values])
        # On the stream of the copy, so that nothing else is waited for later
        copied = torch.get_device_module(home).Event()
        on_host = together.to("cpu", non_blocking=True)
        copied.record()
        self._pending = context.step, names, on_host, copied

    def settle(self, context: TrainContext) -> None:
        """Judge the numbers that were noted last, if they are not judged yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, names, values, copied = pending
        copied.synchronize()
        found = dict(zip(names, values.tolist(), strict=True))
        for number, limit in enumerate(self._limits):
            own = {name: limit.words(value) for name, value in found.items() if limit.matches(name)}
            texts = [f"{name} {words}" for name, words in own.items() if words]
            if texts:
                more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
                self._act(f"step {step}: {', '.join(texts[:SHOWN])}{more} (limits.{number})", limit, context)

    def _act(self, text: str, limit: Limit, context: TrainContext) -> None:
        from forge_core.parallel.mesh import global_rank

        if limit.action == "stop":
            # As `spikes` ends a run: it saves, and a scheduler does not start it again
            context.requests.non_finite = context.requests.non_finite or text
        elif global_rank() == 0:
            warnings.warn(f"training_stats: {text}", stacklevel=2)
