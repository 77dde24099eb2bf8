"""The run loop: `Loop.run` reads top to bottom, the rest are its steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from forge_core.checkpoint.manager import Checkpoints, State
from forge_core.checkpoint.provenance import collect
from forge_core.checkpoint.resume import Start
from forge_core.checkpoint.run_folder import save_tokenizer, write_record
from forge_core.checkpoint.saving import Saver
from forge_core.checkpoint.state import Progress, gather_state
from forge_core.config.dump import dump_job
from forge_core.contracts.contexts import CheckpointContext, EvaluationContext, Requests, StepContext, TrainContext
from forge_core.contracts.data import Batch, Dataset
from forge_core.contracts.errors import CheckpointError, NonFiniteError
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.contracts.runtime import Logger
from forge_core.data.held_out import evaluation_batches
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run
from forge_core.engine.rank_agreement import report
from forge_core.engine.recorder import Recorder
from forge_core.engine.restore import continue_run, take_weights
from forge_core.engine.signals import stop_on_signals
from forge_core.engine.step import Stepper, dry_run, metrics
from forge_core.engine.summary import describe_run
from forge_core.launch.progress_beacon import ProgressBeacon
from forge_core.launch.rendezvous import current_rendezvous
from forge_core.parallel.mesh import all_reduce_tokens, any_rank, global_rank, pipeline_group


class Loop:
    """One run, from where its checkpoint left it to its last step."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        start: Start,
        stack: ExitStack,
        phases: ProgressBeacon,
        echo: Callable[[str], object],
    ) -> None:
        assert run.context.folder is not None
        self.built = run
        self.job = run.job
        self.folder: Path = run.context.folder
        self.requests = Requests()
        self.stepper = Stepper(run)
        self._alone = run.context.layout.world_size == 1
        self._agreed_to_end = False
        self._echo = echo
        self.phases = phases
        run.hooks.phases = phases
        self.provenance = collect(self.job, run.context.plugins.catalog, run.context.tokenizer)
        self.progress = Progress()
        self.saver = Saver(self.job.checkpoint, checkpoints, lambda: self.recorder.sync(), self._on_saved)
        self._restore(start)
        self.loader = TrainLoader(self.job, run.datasets, run.context, self.progress)
        stack.callback(self.loader.close)
        self.recorder = Recorder(run, self._open_loggers(stack), self._count_skipped)
        self.recorder.last_evaluation = self.saver.evaluation.get("metrics", {})

    def run(self) -> None:
        with self._session():
            self._begin()
            self._agree_on_requests()  # a signal may have come since the start
            while self.progress.step < self.job.train.steps and not self._ending:
                self._step(self._load())
                save = self._agree_on_requests()
                if self._due(self.job.eval.interval):
                    self._evaluate()
                if self._wants_save(save):
                    self._save()
            self._end()

    # --- steps of the loop ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._dry_run()
        self.built.hooks("on_train_begin", self._train_context())
        if self.job.checkpoint.at_start and self.progress.step == 0 and self.saver.saved_step is None:
            self._save()  # before the evaluation, which a run that continues from here makes again
        if self.job.eval.at_start and self.progress.step == 0:
            self._evaluate()
        self.recorder.restart_clock()

    def _load(self) -> list[Batch]:
        self.phases.enter("data", self.progress.step + 1)
        return self.loader.next_step()

    def _step(self, batches: list[Batch]) -> None:
        run, context = self.built, self._step_context(batches)
        run.hooks("on_step_begin", context)
        self.phases.enter("forward and backward")
        rate = run.rates.apply(self.progress.step, self.progress.tokens)
        context.output, sums = self.stepper.gradients(batches, self.progress.step)
        context.grad_norm = self.stepper.norm()
        run.hooks("on_gradients", context)
        self.phases.enter("optimizer")
        skipped = self.stepper.update(context, sums["loss_sum"])
        self.progress.step += 1
        self.progress.tokens += self.job.train.global_batch_size * self.job.train.seq_len
        run.hooks("on_step_end", context)
        scalars = metrics(sums)
        scalars.update(self.stepper.summaries())
        scalars["grad_norm"] = context.grad_norm
        if skipped is not None:
            scalars["skipped"] = skipped
        self.recorder.step(context, self.progress.tokens, rate, self.loader.waited, scalars)
        if self._due(self.job.train.gc_interval):
            gc.collect(1)

    def _evaluate(self) -> None:
        self.phases.enter("evaluation")
        self.recorder.flush()
        found: dict[str, float] = {}
        with self._evaluation_mode():
            for evaluation in self.job.evaluations.values():
                found |= evaluation.evaluate(self._evaluation_context())
        if found:
            self.recorder.evaluation(self.progress.step, found)
        self.saver.note_evaluation(self.progress.step, found)
        self.built.hooks("on_eval_end", self._step_context([]), found)
        self.recorder.restart_clock()

    def _save(self, final: bool = False) -> None:
        self.phases.enter("save")
        self.recorder.flush()
        self.saver.save(self.progress.step, self._state(), final)
        self.requests.checkpoint = False
        self.recorder.restart_clock()

    def _end(self) -> None:
        self.phases.enter("end")
        self.recorder.flush()
        finished = self.progress.step >= self.job.train.steps
        if finished and self.saver.evaluation.get("step") != self.progress.step:
            self._evaluate()
        self._save_at_end()
        self.saver.close()
        if self.requests.non_finite:
            raise NonFiniteError(f"{self.requests.non_finite}; their updates were skipped, and the state is saved")
        self.built.hooks("on_train_end", self._train_context())

    def _save_at_end(self) -> None:
        self.saver.settle()
        if self.saver.saved_step == self.progress.step:
            self.saver.tidy()
            return
        try:
            self._save(final=True)
        except CheckpointError:
            self.built.hooks("on_train_end", self._train_context())  # one that exports the weights may still save them
            raise

    def _state(self) -> State:
        """All that a checkpoint holds. Taking it changes nothing."""
        run = self.built
        self.progress.samples = self.loader.state()
        self.progress.schedule = run.rates.factor(self.progress.step - 1) if self.progress.step else None
        holders, pipeline = (run.hooks.hooks, run.context.plugins.active), pipeline_group(run.context.mesh)
        state = gather_state(run.model, run.optimizer, self.progress, *holders, pipeline)
        values = {"tokens": self.progress.tokens, "job": dump_job(self.job, run.context.plugins.catalog)}
        return State(state.tensors, {**values, "provenance": self.provenance, **state.values})

    def _on_saved(self, step: int, path: Path) -> None:
        self.built.hooks("on_checkpoint_save", CheckpointContext(**self._common(), step=step, path=path))

    def _dry_run(self) -> None:
        mode = self.job.train.dry_run
        if mode == "never" or (mode == "auto" and self.built.context.device.type == "cpu"):
            return
        loader = TrainLoader(self.job, self.built.datasets, self.built.context, self.progress)
        self._echo(dry_run(self.built, loader.next_step()))
        loader.close()

    # --- requests ------------------------------------------------------------------------------------------------

    def _count_skipped(self, record: Mapping[str, Any]) -> None:
        """A step's numbers have arrived: follow the non-finite policy."""
        train, progress = self.job.train, self.progress
        progress.skipped += bool(record.get("skipped"))
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if record.get("skipped") else 0
        limit = 1 if train.non_finite == "stop" else train.non_finite_limit
        if progress.skipped_in_a_row >= limit and not self.requests.non_finite:
            row = f"{limit} step{'s' if limit > 1 else ''} in a row"
            self.requests.non_finite = f"loss or gradients were not finite for {row}, up to step {record['step']}"

    @property
    def _ending(self) -> bool:
        """Whether all ranks have agreed to end; a process alone need not ask."""
        return self.requests.ends_run if self._alone else self._agreed_to_end

    def _agree_on_requests(self) -> bool:
        """The one point of a step at which ranks agree on what was asked of any of them: whether to end, and (the
        result) whether to save. What is asked later, by a signal during an evaluation say, waits for the next step.
        Here they also learn that a checkpoint is written, once it is on every rank."""
        self.phases.enter("agreement of the ranks")
        requests = self.requests
        asked = [bool(requests.stop), requests.checkpoint, bool(requests.non_finite), self.saver.writing]
        stop, checkpoint, non_finite, writing = asked if self._alone else any_rank(asked)
        if stop and not requests.stop:
            requests.stop = "another rank asked for it"
        if non_finite and not requests.non_finite:
            requests.non_finite = "another rank found it"
        self._agreed_to_end = stop or non_finite
        if not writing:
            self.saver.settle()
        return checkpoint

    def _wants_save(self, asked: bool) -> bool:
        """Whether to save now. The last step is saved at the end, after its evaluation."""
        step = self.progress.step
        return step < self.job.train.steps and (asked or self.saver.due(step))

    def _due(self, interval: int) -> bool:
        return bool(interval) and self.progress.step % interval == 0

    # --- surroundings --------------------------------------------------------------------------------------------

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Signals, garbage collection, and the report to hooks if the loop fails."""
        quiet_gc = bool(self.job.train.gc_interval)
        with stop_on_signals(self.requests):
            if quiet_gc:
                gc.collect()
                gc.disable()
            try:
                yield
            except BaseException as error:
                report(error, current_rendezvous())  # first of all: what follows may wait for other ranks
                self.built.hooks.exception(self._train_context(), error)
                self.saver.abandon(error)
                raise
            finally:
                if quiet_gc:
                    gc.enable()

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Model and optimizer in evaluation mode."""
        model, optimizer = self.built.model, self.built.optimizer
        model.eval()
        if isinstance(optimizer, HasEvaluationWeights):
            optimizer.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if isinstance(optimizer, HasEvaluationWeights):
                optimizer.train()
            model.train()

    def _restore(self, start: Start) -> None:
        """Continue a checkpoint, or take the weights of one."""
        run = self.built
        if start.weights is not None:
            self._echo(take_weights(start, run, self.provenance))
        if start.checkpoint is not None:
            self.phases.enter("loading the checkpoint")
            self.progress, told = continue_run(start, run, self.provenance)
            run.hooks("on_checkpoint_load", self._checkpoint_context(start.checkpoint))
            self._echo(told)
            self.saver.continues(start.manifest)

    def _open_loggers(self, stack: ExitStack) -> list[Logger]:
        """On rank 0: print and keep the plan, then start every logger."""
        if global_rank() != 0:
            return []
        run, catalog = self.built, self.built.context.plugins.catalog
        plan = describe_run(run, self.stepper, self.provenance)
        if run.context.tokenizer is not None:
            save_tokenizer(self.folder, run.context.tokenizer)
        write_record(self.folder, dump_job(self.job, catalog), self.provenance, plan)
        self._echo(plan)
        loggers: list[Logger] = []
        for component in self.job.loggers.values():
            logger = run.context.build(component)
            logger.start(self.progress.step)
            stack.callback(logger.close)
            loggers.append(logger)
        return loggers

    def _common(self) -> dict[str, Any]:
        run = self.built
        common = {"job": self.job, "model": run.model, "optimizer": run.optimizer}
        return {**common, "tokenizer": run.context.tokenizer, "folder": self.folder}

    def _train_context(self) -> TrainContext:
        return TrainContext(**self._common(), step=self.progress.step)

    def _step_context(self, batches: list[Batch]) -> StepContext:
        step = self.progress.step + bool(batches)
        may_skip = self.built.hooks.may_skip
        requests = self.requests.for_step()
        return StepContext(**self._common(), step=step, batches=batches, may_skip=may_skip, requests=requests)

    def _checkpoint_context(self, path: Path) -> CheckpointContext:
        return CheckpointContext(**self._common(), step=self.progress.step, path=path)

    def _evaluation_context(self) -> EvaluationContext:
        run = self.built
        return EvaluationContext(
            job=self.job,
            build=run.context,
            step=self.progress.step,
            model=run.model,
            executor=run.executor,
            held_out=run.held_out,
            draw=self._evaluation_batches,
            sum_over_tokens=lambda tensor: all_reduce_tokens(tensor, run.context.mesh),
        )

    def _evaluation_batches(self, dataset: Dataset, count: int) -> Iterator[Batch]:
        for number, batch in enumerate(evaluation_batches(dataset, count, self.job, self.built.context), 1):
            self.phases.enter(f"evaluation, batch {number}")
            yield batch
