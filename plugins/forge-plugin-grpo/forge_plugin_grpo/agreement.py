"""The hook that compares the log-probabilities of sampler and trainer in the first step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.parallel import mesh
from forge_plugin_grpo.objective import DIFFERENCE

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext
    from forge_core.job import Job

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2}
"""By `train.precision`: the largest mean difference of log-probabilities, in nats a token, that rounding explains."""


def tolerance(job: Job) -> float:
    """Returns the largest mean difference, in nats a token, that the precision of a job explains."""
    # Products in TF32 and below have as few bits as those in bfloat16, or three more
    rounds = job.train.precision == "fp32" and job.train.float32_matmul != "highest"
    return TOLERANCE["bf16" if rounds else job.train.precision]


@define(kw_only=True, slots=False)
class SamplerAgrees(TrainingHook):
    """Compares what the sampler gives as log-probabilities with those of training, before the first update.

    The weights that train are then those that have drawn, so that only rounding may be between the two.
    """

    resumes_as = "safe"

    def on_gradients(self, context: StepContext) -> None:
        """Compares in the first step. Collective then.

        Raises:
            ForgeError: they differ by more than rounding.
        """
        build = context.build
        assert build is not None, "the run loop gives hooks its context"
        # A run that continues has compared before; of several runs that train one model, each has a part of the mean
        if context.step != 1 or build.layout.run[1] > 1:
            return
        total = build.auxiliary.totals().get(DIFFERENCE, torch.zeros(()))
        mean = total.detach().to(build.device, torch.float64).clone()
        pipeline = mesh.pipeline_group(build.mesh)
        if pipeline is not None:  # only its last rank has log-probabilities
            torch.distributed.all_reduce(mean, group=pipeline)
        difference, allowed = mesh.all_reduce_tokens(mean, build.mesh).item(), tolerance(context.job)
        if not difference <= allowed:  # also where it is not a number
            message = (
                f"{DIFFERENCE} of the first step is {difference:.3g} nats a token, and at most {allowed:g} is rounding "
                f'with train.precision = "{context.job.train.precision}": what loss.rollout has drawn comes from '
                "another distribution than the one that is trained"
            )
            hint = (
                "look for a sampler with other weights, other prompts or a temperature in its log-probabilities, and "
                "for dropout or noise in training; if it is meant, set loss.check_first_log_p = false"
            )
            raise ForgeError(f"{message}; {hint}")
