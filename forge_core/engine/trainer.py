"""The public face of the engine: a job in, a trained model in its run folder out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

from forge_core.checkpoint.resume import find_start, open_checkpoints
from forge_core.checkpoint.run_folder import owned, run_folder
from forge_core.config.load import complete
from forge_core.config.rules import check_rules
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.engine.build import build_context, build_run
from forge_core.engine.loop import Loop
from forge_core.engine.rank_agreement import agree_on_job, joined_run
from forge_core.job import Job
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.parallel.mesh import global_rank, world_size
from forge_core.plugins.catalog import Catalog


@frozen(kw_only=True)
class Summary:
    """Result of a run."""

    step: int
    """Completed steps."""
    loss: float | None
    """Training loss of the last step, in nats a token; None if no step was run."""
    evaluation: Mapping[str, float]
    """Metrics of the last evaluation."""
    folder: Path
    stopped: str
    """Why the run ended before its last step; empty if it did not."""

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.STOPPED if self.stopped else ExitCode.FINISHED


class Trainer:
    """Trains what a job describes.

        summary = Trainer(load_job("job.toml")).run()

    Args:
        job: what to train.
        hooks: training hooks besides those of the job; they run last.
        catalog: where components are looked up; by default everything installed.
        resume: `auto` continues the run folder's newest checkpoint, `never` refuses a folder that has any, and a path
            names a checkpoint, or a run folder whose newest one is meant, to start from.
        resume_with_changes: continue even if the job has changed in ways that make another run of it.
        echo: receives what a person should read (the plan, what was resumed), on rank 0.
        on_folder: receives the run folder, on every rank, once it is certain that the run goes ahead in it.
    """

    def __init__(
        self,
        job: Job,
        *,
        hooks: Iterable[TrainingHook] = (),
        catalog: Catalog | None = None,
        resume: str = "auto",
        resume_with_changes: bool = False,
        echo: Callable[[str], object] = print,
        on_folder: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self._catalog: Catalog = catalog or (job.checked.catalog if job.checked else Catalog.installed())
        self.job = complete(job, self._catalog)
        self._hooks = list(hooks)
        self._resume = resume
        self._with_changes = resume_with_changes
        self._echo = echo
        self._on_folder = on_folder

    def run(self) -> Summary:
        """Build everything, train to the last step, and return the result.

        Raises:
            JobError: the job cannot run as written.
            CheckpointError: a checkpoint is damaged or does not fit, or the job has changed since.
            NonFiniteError: the non-finite policy ended the run.
            EndedElsewhere: another rank has ended the run.
        """
        folder = run_folder(self.job)
        beacon = ProgressBeacon()
        with ExitStack() as stack:
            rendezvous = stack.enter_context(joined_run(self.job, beacon))
            self._check()
            # All ranks must run the same job before one of them touches the folder, and own the folder before process
            # groups start, whose collectives could not be ended.
            if rendezvous is not None:
                agree_on_job(rendezvous, self.job, self._catalog)
                rendezvous.on_rank0("owned", lambda: stack.enter_context(owned(folder)))
            elif global_rank() == 0:
                stack.enter_context(owned(folder))
            self._on_folder(folder)  # only now is it certain that the run goes ahead in it
            beacon.enter("starting the process groups")
            context = build_context(self.job, self._catalog, folder)
            beacon.enter("looking for a checkpoint")
            checkpoints = open_checkpoints(self.job, context)
            # Before anything is built: data and model may take minutes, and the job may not be allowed to continue.
            start = find_start(self.job, self._catalog, checkpoints, self._resume, self._with_changes)
            beacon.enter("building")
            run = build_run(self.job, context, self._hooks, beacon)
            # The stack closes the loop's loader and loggers before it gives up the lock of the folder.
            loop = Loop(run, checkpoints, start, stack, self._echo if global_rank() == 0 else lambda text: None)
            loop.run()
        return Summary(
            step=loop.progress.step,
            loss=loop.recorder.last_loss,
            evaluation=loop.recorder.last_evaluation,
            folder=folder,
            stopped=loop.requests.stop if loop.progress.step < self.job.train.steps else "",
        )

    def _check(self) -> None:
        # Not once more what `load_job` has checked: each check builds the model on the meta device, on every rank.
        checked = self.job.checked
        if not checked or checked.catalog is not self._catalog or checked.world_size != world_size():
            problems = check_rules(self.job, self._catalog, world_size())
            if problems:
                raise JobError(problems)
