"""One run of a comparison that stops after a step, with a checkpoint: `python -m … STEP JOB.toml [OVERRIDES]`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from forge_core import ForgeError, TrainingHook, load_job

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext


class StopAt(TrainingHook):
    """Stops the run after a step; without state, so that no checkpoint has anything of it."""

    def __init__(self, step: int) -> None:
        """Stop after `step`."""
        self._step = step

    def on_step_end(self, context: StepContext) -> None:
        """Requests a stop, with which the loop saves a checkpoint: the next rung continues from it."""
        if context.step >= self._step:
            context.request_stop(f"step {self._step} of a comparison")


def main(argv: list[str]) -> int:
    """Train up to a step, and return the exit code of `forge-run`."""
    from forge_core import Trainer

    step, file, *overrides = argv
    try:
        # One process: `--halving` refuses several ranks
        job = load_job(file, overrides=overrides, world_size=1)
        return int(Trainer(job, hooks=[StopAt(int(step))]).run().exit_code)
    except ForgeError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
