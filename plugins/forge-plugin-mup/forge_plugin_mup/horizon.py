"""Rules for the batch and the length of training: AdamW with the same noise and the same time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from forge_core import Job, Problem


@frozen
class Horizon:
    """Batch and length of a run, relative to the base's."""

    batch: float = 1.0
    """Tokens a step."""
    tokens: float = 1.0
    """Tokens of the whole run."""

    @classmethod
    def of(cls, job: Job, batch_tokens: float, tokens: float) -> Horizon:
        """Compare a job with the base's figures, of which 0 means that the job has the same."""
        own = job.train.global_batch_size * job.train.seq_len
        return cls(own / (batch_tokens or own), own * job.train.steps / (tokens or own * job.train.steps))

    @property
    def time(self) -> float:
        """Length of a step, k, as a part of the run and relative to the base: fewer steps have to go as far."""
        return self.batch / self.tokens

    @property
    def factors(self) -> dict[str, float]:
        """Factors on settings of AdamW, by their names in its groups."""
        root = math.sqrt(self.time)
        # The product of rate and decay is what a step takes away. Epsilon follows the noise of gradients, which depends
        # on the batch alone
        return {"lr": root, "weight_decay": root, "eps": 1 / math.sqrt(self.batch)}

    def applied(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a parameter group of an AdamW with the settings for this run.

        In k times the time, averages forget k times as much, weight decay takes k times as much away, and a random walk
        goes sqrt(k) as far. Malladi et al. 2022 (arXiv 2205.10287) derive this for the batch, by the stochastic
        differential equation of Adam; Mlodozeniec et al. 2025 (Complete(d)P, arXiv 2512.22382) use it for the length.
        """
        if self == Horizon():
            return group
        scaled = {key: group[key] * factor for key, factor in self.factors.items()}
        return group | scaled | {"betas": tuple(1 - self.time * (1 - beta) for beta in group["betas"])}

    def problems(self, job: Job) -> Iterator[Problem]:
        """Yields why a job cannot have these rules."""
        optimizer: Any = job.optimizer
        if self == Horizon():
            return
        if job.train.batch_schedule is not None:
            message = "rules for batch and length are for steps of one size, and the job has train.batch_schedule"
            yield Problem("", f"{message}; leave base_batch_tokens and base_tokens out")
        if not getattr(optimizer, "adam_rule", False):
            message = f"{type(optimizer).__name__} does not declare `adam_rule`: rules for batch and length are AdamW's"
            yield Problem("", f"{message}; leave base_batch_tokens and base_tokens out")
            return
        if lost := [beta for beta in optimizer.betas if self.time * (1 - beta) >= 1]:
            message = f"steps are {self.time:g} times as long as the base's, so that beta = {lost[0]:g} becomes"
            yield Problem("", f"{message} {1 - self.time * (1 - lost[0]):g}; take smaller batches, or a longer run")

    def __str__(self) -> str:
        root = math.sqrt(self.time)
        named = {"rate": root, "weight decay": root, "1 - betas": self.time, "epsilon": 1 / math.sqrt(self.batch)}
        return ", ".join(f"{name} x {value:.4g}" for name, value in named.items() if value != 1)
