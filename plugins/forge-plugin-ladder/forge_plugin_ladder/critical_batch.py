"""The critical batch size at a checkpoint, by branches with larger batches (Merrill et al. 2025, arXiv 2505.23971)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve, frozen

from forge_core import read_metrics
from forge_core.checkpoint.run_folder import JOB, storage_of
from forge_core.checkpoint.storage import read_manifest
from forge_core.config.load import load_job
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.job import Job
from forge_plugin_ladder.runs import RUNS
from forge_plugin_runs.compare.comparison import Comparison
from forge_plugin_runs.compare.grid import Cell, Trial, trial_of
from forge_plugin_runs.compare.results import Outcome

NOISE_SCALE = "stats/noise_scale"
"""Metric of the plugin `noise_scale`, in tokens: the critical batch by the theory of McCandlish et al. 2018."""


@frozen(kw_only=True)
class Branch:
    """A continuation of the run with a larger batch."""

    factor: int
    """Of the run's batch."""
    batch: int
    """Sequences per step."""
    rate_factor: float
    """Of the learning rate."""
    steps: int
    """After the checkpoint."""
    loss: float
    """Mean training loss over the last half of the tokens, in nats."""


@frozen(kw_only=True)
class Plan:
    """Branches of a run from one of its checkpoints, all over the same samples."""

    job: Job
    run: Path
    checkpoint: Path
    step: int
    factors: Sequence[int]
    tokens: int
    """After the checkpoint, in whole steps of the largest batch."""
    rate_power: float

    def settings(self, factor: int, ranks: int) -> dict[str, str]:
        """Returns the keys in which a branch differs from the run, values as in TOML."""
        train = self.job.train
        batch = factor * train.global_batch_size
        return {
            "train.global_batch_size": str(batch),
            # Memory is that of the run: a larger batch has more micro-batches, not larger ones
            "train.micro_batch_size": str(train.micro_batch_size or max(1, train.global_batch_size // ranks)),
            # `steps` is left as it is, so that the schedule's rate at a step is the run's
            "train.stop_after": str(self.step + self.steps(factor)),
            "data.phases": f"[{{start_step = {self.step}, lr_factor = {factor**self.rate_power}}}]",
            "eval.interval": "0",
            "checkpoint.interval": "0",
        }

    def steps(self, factor: int) -> int:
        """Returns the steps of a branch after the checkpoint."""
        return self.tokens // (factor * self.job.train.global_batch_size * self.job.train.seq_len)


def plan(run: Path, step: int, factors: Sequence[int], tokens: float, rate_power: float) -> Plan:
    """Find the checkpoint and check that branches are possible.

    Args:
        run: folder of the run.
        step: of the checkpoint; 0: the newest.
        factors: of the batch, ascending, 1 first.
        tokens: to train after the checkpoint; rounded up to whole steps of the largest batch.
        rate_power: the rate is multiplied by the factor to this power.

    Raises:
        JobError: there is no such run or checkpoint, its job cannot branch, or it is too short.
    """
    if not (run / JOB).is_file():
        raise JobError(f"{run}: is no run folder, which has a {JOB}")
    job, storage = load_job(run / JOB), storage_of(run)
    steps = storage.steps()
    if not steps or (step and step not in steps):
        has = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise JobError(f"--step {step or 'newest'}: {run} has no such checkpoint; it has {has}")
    step = step or max(steps)
    if list(factors) != sorted(set(factors)) or factors[0] != 1:
        raise JobError(f"--factors {' '.join(map(str, factors))}: must ascend from 1, the batch of the run itself")
    if job.data.phases or job.train.batch_schedule:
        raise JobError(
            f"{run}: branches change the rate by a phase; a job with phases or a batch_schedule has none free"
        )
    largest = factors[-1] * job.train.global_batch_size * job.train.seq_len
    rounded = math.ceil(tokens / largest) * largest
    found = Plan(
        job=job,
        run=run,
        checkpoint=storage.path(step),
        step=step,
        factors=factors,
        tokens=rounded,
        rate_power=rate_power,
    )
    if (last := step + found.steps(1)) > job.train.steps:
        raise JobError(
            f"--tokens {tokens:g}: the branch 1x would end at step {last}, and train.steps is {job.train.steps}; "
            "take fewer, or an earlier --step"
        )
    return found


def measure(found: Plan, out: Path, ranks: int, parallel: int, say: Callable[[str], object]) -> list[Branch] | None:
    """Train the branches that have not finished; None after an interruption.

    Raises:
        ForgeError: a branch failed.
    """
    comparison = Comparison(out=out, ranks=ranks, parallel=parallel, say=say)
    trials: list[Trial] = []
    for factor in found.factors:
        cell = Cell(job=found.run / JOB, settings=found.settings(factor, ranks), label=f"batch-{factor}x")
        trial = trial_of(cell, "", (), out / RUNS, taken=[trial.name for trial in trials])
        trials.append(evolve(trial, arguments=("--resume", str(found.checkpoint), "--resume-with-changes")))
    if not comparison.train(trials):
        return None
    outcomes = {outcome.trial.name: outcome for outcome in comparison.outcomes()}
    if failed := [trial.name for trial in trials if outcomes[trial.name].failed]:
        raise ForgeError(f"{', '.join(failed)} failed; see {out / 'logs'}")
    return [branch_of(found, factor, outcomes[trial.name]) for factor, trial in zip(found.factors, trials, strict=True)]


def branch_of(found: Plan, factor: int, outcome: Outcome) -> Branch:
    """Returns a branch with its loss: all are means over the same samples."""
    fed = read_manifest(found.checkpoint)["progress"]["tokens"]
    # A step counts with the tokens before it, as a larger batch has fewer steps in the same half
    half = [
        loss for tokens, loss in zip(outcome.tokens, outcome.losses, strict=True) if tokens > fed + found.tokens / 2
    ]
    return Branch(
        factor=factor,
        batch=factor * found.job.train.global_batch_size,
        rate_factor=factor**found.rate_power,
        steps=found.steps(factor),
        loss=sum(half) / len(half),
    )


def critical(branches: Sequence[Branch], tolerance: float) -> Branch:
    """Returns the largest batch up to which no branch's loss is more than `tolerance` nats above the run's own.

    Section 3 of the paper: a loss that is not finite is above.
    """
    allowed = branches[0].loss + tolerance
    last = branches[0]
    for branch in branches[1:]:
        if not branch.loss <= allowed:
            break
        last = branch
    return last


def noise_scale(found: Plan) -> float | None:
    """Returns what the run has logged last, up to the checkpoint; None if it has no plugin `noise_scale`."""
    steps, values = read_metrics(found.run).column(NOISE_SCALE)
    known = [float(value) for step, value in zip(steps, values, strict=True) if step <= found.step]
    # It is NaN where noise hides the gradient
    return known[-1] if known and math.isfinite(known[-1]) else None


def text_of(found: Plan, branches: Sequence[Branch], tolerance: float) -> str:
    """Returns a table, and the critical batch size in words."""
    train, last = found.job.train, critical(branches, tolerance)
    rows = [
        f"{'batch':>10}{'tokens':>12}{'rate':>8}{'steps':>8}{'loss':>10}{'difference':>12}",
        *(
            f"{branch.batch:>10,}{branch.batch * train.seq_len:>12,}{branch.rate_factor:>7.3g}x{branch.steps:>8,}"
            f"{branch.loss:>10.4f}{branch.loss - branches[0].loss:>+12.4f}"
            for branch in branches
        ),
    ]
    amount = f"{last.batch:,} sequences ({last.batch * train.seq_len:,} tokens)"
    if last is branches[-1]:
        says = f"critical batch at step {found.step:,}: at least {amount}, the largest that was tried"
    else:
        says = f"critical batch at step {found.step:,}: {amount}, within {tolerance:g} nats of the run's own loss"
    noise = noise_scale(found)
    beside = [] if noise is None else [f"gradient noise scale that the run logged: {noise:,.0f} tokens"]
    return "\n".join([*rows, "", says, *beside])
