"""Joint work of several ranks other than training: commands that they run, and the use of a model that they share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from forge_core.cli.command_line import positive
from forge_core.contracts.errors import JobError
from forge_core.job import LaunchSection
from forge_core.launch.world import join_world
from forge_kit.tools.supervisor import run_ranks

if TYPE_CHECKING:
    from forge_core.contracts.runtime import Executor
    from forge_kit.tools.trained_model import TrainedModel

GRACE_S = 5.0
"""Seconds that ranks have to end after a request to stop: there is nothing to save."""


def add_ranks(
    parser: argparse.ArgumentParser, purpose: str = "which share the model or the work by [parallel]"
) -> None:
    """Add the option `--nproc`, as `forge-run run` has it; `purpose` completes its help."""
    parser.add_argument("--nproc", type=positive, metavar="N", help=f"start N ranks on this machine, {purpose} (1)")


def ranks_asked_for(started: int | None) -> int:
    """Returns the number of ranks of a command, as started by `--nproc`, or by torchrun or srun.

    Raises:
        JobError: `--nproc` in a process that is one of several ranks already.
    """
    world = join_world()
    if started is None or started == 1:
        return world.size
    if not world.alone:
        already = f"this process is one of {world.size} ranks already"
        raise JobError(f"--nproc starts ranks, and {already}; leave it out, or start one process only")
    return started


def run_on_ranks(command: str, argv: Sequence[str], started: int | None, work: Callable[[], int]) -> int:
    """Run a command in this process, in the ranks that `--nproc` starts, or as a rank of torchrun or srun.

    What ranks other than 0 print is dropped. When one fails, all end, and its error is the command's. Ranks have no
    standard input.

    Args:
        command: its name, such as `generate` or `inside lens`.
        argv: its arguments, which each rank receives.
        started: value of `--nproc`.
        work: the command itself, on each rank; returns the exit code. It may join the other ranks in collectives, as
            `forge_core.load_model` with `parallel` does.

    Returns:
        The exit code.
    """
    if ranks_asked_for(started) == 1:
        return work()
    if started is not None and started > 1:
        again = [sys.executable, "-m", "forge_core", *command.split(), *argv, "--nproc=1"]
        return run_ranks(again, started, Path(os.devnull), GRACE_S)
    from forge_core.launch.rank_process import this_process
    from forge_core.launch.stop_requests import end_at_once

    with this_process.stoppable(), this_process.delivering_stop_requests(lambda number: end_at_once()):
        return this_process.run(join_world(), lambda log: _as_rank(work))


def _as_rank(work: Callable[[], int]) -> int:
    from forge_core.launch.progress_beacon import ProgressBeacon
    from forge_core.launch.rank_process import this_process
    from forge_core.launch.watchdog import Watchdog
    from forge_core.parallel.mesh import leave_group

    # Without a limit for hangs: a long text is no hang. The watchdog ends this rank when another one has failed.
    rendezvous = this_process.join(join_world(), LaunchSection().start_timeout_s, 0.0)
    watchdog = Watchdog(rendezvous, ProgressBeacon(), this_process.emit)
    try:
        code = work()
    except BaseException as error:
        this_process.end_run(error)  # while the watchdogs of the others still listen
        raise
    finally:
        watchdog.stop()
    leave_group()
    return code


def executor_of(trained: TrainedModel) -> Executor:
    """Returns an executor that evaluates a trained model under every layout.

    Each rank calls its `evaluate(batches, measure)` alike: by default for the plain cross-entropy. Batches have what
    training has (`input_ids` and `labels` (B, S)), of equal shape on all ranks, and S as the layout divides it
    (`forge_kit.nn.batches.length_multiple`).

    Args:
        trained: of `forge_core.load_model`.
    """
    from forge_core.engine.build import build_executor
    from forge_core.engine.executor import Plain
    from forge_core.losses import cross_entropy_loss

    # In place of the executor of its training, which need not be installed: a stage may still bring its own.
    job = attrs.evolve(trained.context.job, executor=Plain())
    return build_executor(job, trained.context, trained.built, cross_entropy_loss(None))
