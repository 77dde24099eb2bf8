"""Hooks that check the first step of a run: log-probabilities of sampler and trainer, and the distance to the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import define

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.parallel import mesh
from forge_plugin_grpo.objective import DIFFERENCE, KL, policy_loss_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import StepContext
    from forge_core.job import Job

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2}
"""By `train.precision`: the largest mean difference of log-probabilities, in nats a token, that rounding explains."""
KL_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-3}
"""Likewise, the largest mean of k3: about half of the square of a difference."""


def tolerance(job: Job, of: Mapping[str, float] = TOLERANCE) -> float:
    """Returns the largest mean, in nats a token, that the precision of a job explains."""
    # Products in TF32 and below have as few bits as those in bfloat16, or three more
    rounds = job.train.precision == "fp32" and job.train.float32_matmul != "highest"
    return of["bf16" if rounds else job.train.precision]


def first_mean(context: StepContext, name: str) -> float | None:
    """Returns the mean over all ranks of a metric of tokens in the first step; None where it is not to be checked.

    Collective then.
    """
    build = context.build
    assert build is not None, "the run loop gives hooks its context"
    # A run that continues has compared before; of several runs that train one model, each has a part of the mean
    if context.step != 1 or build.layout.run[1] > 1:
        return None
    # Ranks of a pipeline without the loss have no such entry, and add 0 below
    total = build.auxiliary.totals().get(name, torch.zeros(()))
    # A copy: reductions are in place, and the counter itself is still to be logged
    mean = total.detach().to(build.device, torch.float64).clone()
    pipeline = mesh.pipeline_group(build.mesh)
    if pipeline is not None:  # only its last rank has log-probabilities
        torch.distributed.all_reduce(mean, group=pipeline)
    return mesh.all_reduce_tokens(mean, build.mesh).item()


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
        difference, allowed = first_mean(context, DIFFERENCE), tolerance(context.job)
        if difference is None:
            return
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


@define(kw_only=True, slots=False)
class FirstKL(TrainingHook):
    """Checks that the model begins as its reference, before the first update."""

    resumes_as = "safe"

    def on_gradients(self, context: StepContext) -> None:
        """Compares in the first step, if the job loads the reference. Collective then.

        Raises:
            ForgeError: the KL divergence is more than rounding.
        """
        assert context.build is not None, "the run loop gives hooks its context"
        if not policy_loss_of(context.build.auxiliary).starts_as_reference:
            return
        mean, allowed = first_mean(context, KL), tolerance(context.job, KL_TOLERANCE)
        # Not a number is not <= either, and ends the run
        if mean is None or mean <= allowed:
            return
        message = (
            f"{KL} of the first step is {mean:.3g} nats a token, and must be 0 (at most {allowed:g} with "
            f'train.precision = "{context.job.train.precision}"), as training starts from loss.reference: the model '
            "that is trained computes something else"
        )
        hint = (
            "look for dropout, noise, other settings of the model, or a plugin that changes it; if it is meant, set "
            "loss.check_first_kl = false"
        )
        raise ForgeError(f"{message}; {hint}")
