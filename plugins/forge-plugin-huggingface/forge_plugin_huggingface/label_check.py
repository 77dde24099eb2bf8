"""A check that a run whose data is learned in part learns something."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import define

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import DataError

if TYPE_CHECKING:
    from forge_core.contracts.components import WhenResumed
    from forge_core.contracts.contexts import StepContext


@define(kw_only=True, slots=False)
class LearnsSomething(TrainingHook):
    """Ends a run whose first global batch has no label: its loss would be 0, and no other metric would show it."""

    resumes_as: ClassVar[WhenResumed | None] = "safe"

    sources: tuple[str, ...]
    """Names of the sources of which only a part is learned."""

    def on_gradients(self, context: StepContext) -> None:
        """Looks at the batches of the first step, after hooks that replace them; raises `DataError` on all ranks."""
        from forge_core.parallel.mesh import any_rank

        if context.step != 1:
            return
        (learns,) = any_rank([any(bool((batch["labels"] != IGNORED_LABEL).any()) for batch in context.batches)])
        if not learns:
            names = ", ".join(map(repr, self.sources))
            message = f"no token of the first global batch is learned (sources with chats or completions: {names})"
            length = f"prompts may be longer than train.seq_len = {context.job.train.seq_len:,}"
            hint = 'raise it, or set too_long = "truncate"; `forge-run data` shows the learned tokens of each sample'
            raise DataError(f"{message}: {length}; {hint}")
