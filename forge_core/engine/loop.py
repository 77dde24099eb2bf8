"""The run loop: `Loop.run` reads top to bottom, the rest are its steps."""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve

from forge_core.checkpoint.manager import Checkpoints, Saver
from forge_core.checkpoint.resume import FLAG, Start
from forge_core.checkpoint.run_diff import collect_provenance
from forge_core.checkpoint.run_folder import displaced, run_folder
from forge_core.checkpoint.state import Progress
from forge_core.contracts.contexts import CheckpointContext, Requests, Rollback, StepContext, TrainContext
from forge_core.contracts.data import Batch
from forge_core.contracts.errors import CheckpointError, ForgeError, NonFiniteError, listed, memory_words
from forge_core.contracts.phase import Phase
from forge_core.contracts.run_end import Cause
from forge_core.contracts.runtime import State
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import Run
from forge_core.engine.evaluation import evaluate
from forge_core.engine.hooks import named
from forge_core.engine.reporting import Recorder, announce, peak_memory
from forge_core.engine.run_state import go_back, restore, snapshot, taken
from forge_core.engine.step import Stepper, agreed_reason
from forge_core.job import TrainSection
from forge_core.launch.rank_process import this_process
from forge_core.parallel.layout import micro_batches
from forge_core.parallel.mesh import gather_objects, largest


class Loop:
    """One run, from where its checkpoint left it to its last step."""

    def __init__(
        self, run: Run, checkpoints: Checkpoints, start: Start, stack: ExitStack, echo: Callable[[str], object]
    ) -> None:
        self._run, self._job, self._hooks, self._beacon, self._echo = run, run.job, run.hooks, run.hooks.beacon, echo
        self.seconds = self._beacon.seconds
        self.requests, self._checkpoints = Requests(), checkpoints
        self._stepper = Stepper(run)
        self._provenance = collect_provenance(run.job, run.context.plugins.catalog, run.context.tokenizer)
        self.progress = restore(start, run, self._provenance, echo)
        this_process.completed = lambda: self.progress.step
        self._loader = TrainLoader(run.job, run.datasets, run.context, self.progress)
        stack.callback(lambda: self._loader.close())  # noqa: PLW0108  a run that goes back makes another loader
        # Before the loggers write: what a person reads first is what will run.
        announce(run, self._stepper, self._provenance, echo)
        follow = partial(follow_non_finite, run.job.train, self.progress, self.requests)
        self.recorder = Recorder(run, self.progress.step, follow, stack)
        self.log_artifact = self.recorder.artifact
        self._saver = Saver(run.job.checkpoint, checkpoints, self.recorder.sync, self._saved)
        if start.checkpoint is not None:
            self._saver.continues(start.manifest)
            self.recorder.last_evaluation = self._saver.evaluation.get("metrics", {})
        if start.with_changes:
            self._saver.ended = ""
        elif ended := self._saver.ended:
            self.requests.stop, self.requests.final = ended, True
            echo(f"the run was ended for good: {ended}; to train on all the same, run the same command with {FLAG}")
        self._agreement = Agreement(run, self.requests, self._saver)

    def run(self) -> None:
        """Train to the last step or a request to stop. An error is raised once hooks and the saver have seen it."""
        stop, interval = self._agreement.ask_to_stop, self._job.train.gc_interval
        with this_process.delivering_stop_requests(stop), _collecting(interval):
            try:
                self._train()
            except BaseException as error:
                error = _in_words(self._run, error)
                self._fail(error)
                raise error

    def _train(self) -> None:
        self._begin()
        self._agree()  # a signal may have come since the start
        while self.progress.step < self._job.train.last_step and not self._agreement.ends_run:
            self._step() if self.progress.step >= self.progress.leave_out_until else self._pass_over()
            save = self._agree()
            if self._job.eval.interval and self.progress.step % self._job.eval.interval == 0:
                self._evaluate()
            # After the evaluation: the save then has what hooks learnt from it. The last step is saved at the end.
            if self.progress.step < self._job.train.last_step and (save or self._saver.due(self.progress.step)):
                self._save()
        self._end()

    def _begin(self) -> None:
        _rehearse(self._run, self.progress, self._echo)
        self._hooks("on_train_begin", self.context())
        if self._job.checkpoint.at_start and self.progress.step == 0 and self._saver.saved_step is None:
            self._save()  # before the evaluation, which a run that continues from here makes again
        if self._job.eval.at_start and self.progress.step == 0:
            self._evaluate()
        self.recorder.clock.restart()

    def _step(self) -> None:
        progress = self.progress
        self._beacon.enter(Phase.DATA, progress.step + 1)
        batches = self._loader.next_step()
        context = self._step_context(progress.step + 1, batches)
        self._hooks("on_step_begin", context)
        self._beacon.enter(Phase.FORWARD_BACKWARD)
        rate = self._run.rates.apply(progress.step, progress.tokens)
        context.output, sums = self._stepper.gradients(context.batches, progress.step, self._loader.waited)
        context.loss, context.grad_norm = sums["loss_sum"] / sums["count"].clamp(min=1), self._stepper.norm()
        self._hooks("on_gradients", context)  # complete ones, before clipping hides their size
        self._beacon.enter(Phase.OPTIMIZER)
        skipped = self._stepper.update(context, sums["loss_sum"])
        progress.step += 1  # skipped or not: its samples are used up
        fed = self._loader.rows * self._job.train.seq_len
        progress.tokens += fed
        if self.requests.skip:
            self._echo(f"step {progress.step}: update skipped: {self.requests.skip}")
        self._hooks("on_step_end", context)
        context.logged |= self._agreement.peaks
        self.recorder.step(context, fed, progress.tokens, rate, sums, skipped)
        if self._job.train.gc_interval and progress.step % self._job.train.gc_interval == 0:
            gc.collect(1)  # not the oldest generation, which holds the model: it costs most and frees nothing

    def _pass_over(self) -> None:
        """Use up the data of a step without training on it."""
        self._beacon.enter(Phase.DATA, self.progress.step + 1)
        self._loader.next_step()
        self.progress.step += 1
        self.progress.skipped += 1

    def _agree(self) -> bool:
        """Agree on requests, go back if that is one, and return whether to save."""
        save = self._agreement.reach()
        if self.requests.rollback is not None:
            self._go_back(self.requests.rollback)
        return save

    def _go_back(self, rollback: Rollback) -> None:
        self._beacon.enter(Phase.GOING_BACK)
        self.recorder.flush()
        self._saver.settle()  # it may be writing the checkpoint to go back to
        before, step = go_back(rollback, self._run, self._checkpoints), self.progress.step
        # Only now, as flushed lines may have asked for the end of a run that is finite again
        self.requests.rollback, self.requests.non_finite, self.progress.skipped_in_a_row = None, "", 0
        self.progress.finite = True
        last = self.progress.leave_out_until = step + rollback.leave_out
        left_out = f"; the data of steps {step + 1} to {last} are left out" if rollback.leave_out else ""
        way = "back" if before.step <= step else "forward"  # a group of ranks that was behind takes another's state
        self._echo(f"step {step}: went {way} to the state of step {before.step}: {rollback.reason}{left_out}")
        if rollback.with_data:
            for name, value in asdict(before).items():
                setattr(self.progress, name, value)
            self._loader.close()
            self._loader = TrainLoader(self._job, self._run.datasets, self._run.context, self.progress)
            self._saver.saved_step = None
        self._hooks("on_rollback", TrainContext(**self._references(), step=step), before.step, rollback.reason)
        self.recorder.clock.restart()

    def _evaluate(self) -> None:
        self._beacon.enter(Phase.EVALUATION)
        self.recorder.flush()  # lines of steps come before the line of their evaluation
        metrics = evaluate(self._run, self.progress.step)
        if metrics:
            self.recorder.evaluation(self.progress.step, metrics)
        self._saver.note_evaluation(self.progress.step, metrics)
        self._hooks("on_eval_end", self._step_context(self.progress.step), metrics)
        self.recorder.clock.restart()

    def _save(self, final: bool = False) -> None:
        self._beacon.enter(Phase.SAVE)
        self._check_folder()
        self._hooks("on_checkpoint_begin", self.context())
        self.recorder.flush()  # so that the counters of skipped steps, which are part of the state, are up to date
        self.progress.samples = self._loader.state()
        self._saver.save(self.progress.step, snapshot(self._run, self.progress, self._provenance), final)
        self.requests.checkpoint = False
        self.recorder.clock.restart()

    def _check_folder(self) -> None:
        """End the run if its folder has another owner by now: nothing may be written there."""
        if text := self._checkpoints.ranks.on_rank0(lambda: displaced(run_folder(self._job))):
            raise ForgeError(f"{text}; this run ends at step {self.progress.step}, and saves nothing there")

    def _end(self) -> None:
        self._beacon.enter(Phase.END)
        if self.progress.step == self._job.train.last_step < self._job.train.steps and not self.requests.stop:
            self.requests.stop = f"train.stop_after = {self._job.train.stop_after}"
            self.requests.cause = Cause.PLANNED
        self.recorder.flush()  # before anything is decided: the lines of the last steps count for the non-finite policy
        if self.progress.step >= self._job.train.steps and self._saver.evaluation.get("step") != self.progress.step:
            self._evaluate()
        self._save_at_end()
        self._saver.close()
        if reason := self.requests.non_finite or self._not_finite():
            raise NonFiniteError(f"{reason}; the state is saved")
        self._hooks("on_train_end", self.context())

    def _not_finite(self) -> str:
        """Why this end is no success, although the policy let the run reach it; empty if it is one. Collective."""
        reasons = [] if self.progress.finite else [f"loss or gradients of step {self.progress.step} are not finite"]
        if names := self._saver.evaluation.get("not_finite"):
            reasons.append(f"{listed(names)} of the last evaluation, at step {self._saver.evaluation['step']}")
        # A run that was stopped by request continues from here: its policy decides then
        ended = self.progress.step >= self._job.train.steps or self.requests.final
        return agreed_reason(f"not finite at the end of the run: {'; '.join(reasons)}" if ended and reasons else "")

    def _save_at_end(self) -> None:
        self._check_folder()
        self._saver.settle()
        before, self._saver.ended = self._saver.ended, self.requests.stop if self.requests.final else ""
        if self._saver.saved_step == self.progress.step and self._saver.ended == before:
            self._checkpoints.tidy(self.progress.step)  # as a process that was killed right after a save has not
            return
        try:
            self._save(final=True)
        except CheckpointError:  # a hook that exports the weights may still save them
            self._hooks("on_train_end", self.context())
            raise

    def _fail(self, error: BaseException) -> None:
        # First of all: hooks and the saver may wait for other ranks, which do not know yet that this one fails.
        if this_process.rendezvous is not None:
            this_process.end_run(error)
        self._hooks.exception(self.context(), error)
        self._saver.abandon(error)

    def _saved(self, step: int, path: Path) -> None:
        self._hooks("on_checkpoint_save", CheckpointContext(**self._references(), step=step, path=path))

    def context(self) -> TrainContext:
        return TrainContext(**self._references(), step=self.progress.step)

    def _step_context(self, step: int, batches: Sequence[Batch] = ()) -> StepContext:
        self.requests.skip = ""  # must be requested in each step; the others stay until ranks agree on them
        return StepContext(**self._references(), step=step, batches=batches, may_skip=self._hooks.may_skip)

    def _references(self) -> dict[str, Any]:
        return dict(self._run.references, requests=self.requests, engine=self, checkpoints=self._checkpoints.steps)

    def take_state(self) -> State:
        self.progress.samples = self._loader.state()
        return taken(snapshot(self._run, self.progress, self._provenance))


def _in_words(run: Run, error: BaseException) -> BaseException:
    """`error` with the keys that reduce memory, if it ran out; any other error as it is."""
    if not (words := memory_words(error)):
        return error
    position, (_, size) = run.hooks.beacon.position, micro_batches(run.job, run.context.layout)
    where = f"step {position.step}, {position}" if position.step else str(position)
    return ForgeError(
        f"memory ran out in {where}: {words}\nReduce train.micro_batch_size (here {size}), train.seq_len or the model, "
        "or recompute activations; see `forge-run plan`"
    )


@contextmanager
def _collecting(interval: int) -> Iterator[None]:
    """Python's own garbage collection is off within this context, in which the loop collects (0: it stays on)."""
    # Python collects after a number of allocations, at another time on every rank, and all wait for the slowest.
    if interval:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if interval:
            gc.enable()


def _rehearse(run: Run, progress: Progress, echo: Callable[[str], object]) -> None:
    """Try the shapes of a step, forward and backward, as set by `train.dry_run`."""
    mode, device = run.job.train.dry_run, run.context.device
    if mode == "never" or (mode == "auto" and device.type == "cpu"):  # an accelerator's memory may not suffice
        return
    run.hooks.beacon.enter(Phase.DRY_RUN)
    job = evolve(run.job, train=evolve(run.job.train, batch_schedule=None))  # the largest batches
    with closing(TrainLoader(job, run.datasets, run.context, progress)) as loader:  # the run's uses up no samples
        batches = loader.next_step()
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    shape = " x ".join(map(str, batches[0]["input_ids"].shape))
    with named(f"the dry run, on a micro-batch of {shape} tokens"):
        # A pipeline's schedule is made for all its micro-batches; one alone would not run
        pipelined = any(dimension.layers and size > 1 for dimension, size in run.context.layout.sizes)
        Stepper(run).gradients(batches if pipelined else batches[:1], step=0)
    # It has changed nothing but gradients and buffers: generators are reseeded, and counts zeroed, in every step.
    run.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in run.model.named_buffers():
            buffer.copy_(buffers[name])
    peaks = peak_memory(device)
    known = f", peak memory {peaks['peak_memory_gb']:.1f} GB" if peaks else ""
    echo(f"dry run: a micro-batch of {shape} tokens went forward and backward{known}")


class Agreement:
    """The point of a step at which ranks agree on requests: one that acted at once would leave the others waiting."""

    def __init__(self, run: Run, requests: Requests, saver: Saver) -> None:
        self._beacon, self._requests, self._saver = run.hooks.beacon, requests, saver
        self._alone, self._device = run.context.layout.world_size == 1, run.context.device
        self._agreed_to_end = False
        self.peaks: dict[str, float] = {}
        """`peak_memory` of the rank with the most, up to the last agreement: for the line of the next step."""

    @property
    def ends_run(self) -> bool:
        """Whether all ranks have agreed to end; a process alone need not ask."""
        return bool(self._requests.stop or self._requests.non_finite) if self._alone else self._agreed_to_end

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Note that this rank shall stop, on a signal."""
        # Nothing else: a signal comes at any point of a step, perhaps inside a collective, on each rank at another.
        if not self._requests.stop:
            self._requests.stop, self._requests.signal = f"signal {number.name}", number.name
            self._requests.cause = Cause.SIGNAL

    def reach(self) -> bool:
        """Agree on whether to end, and return whether to save. Collective."""
        self._beacon.enter(Phase.AGREEMENT)
        requests, saver = self._requests, self._saver
        asked = [bool(requests.stop), requests.checkpoint or saver.overdue, bool(requests.non_finite), saver.writing]
        asked += [requests.final, requests.rollback is not None]
        peaks = peak_memory(self._device)  # along with the flags, as a separate collective would cost as much again
        values = [*asked, *peaks.values()]
        values = values if self._alone else largest(values)
        stop, checkpoint, non_finite, writing, final, rollback = map(bool, values[: len(asked)])
        self.peaks = dict(zip(peaks, values[len(asked) :], strict=True))
        # Texts travel only in the step in which ranks have agreed that there is one: other steps cost four flags.
        if stop:
            requests.stop, requests.cause, requests.signal = _agreed_stop(requests)
        if non_finite:
            requests.non_finite = agreed_reason(requests.non_finite)
        if rollback:
            requests.rollback = _agreed_rollback(requests.rollback)
        requests.final = final
        self._agreed_to_end = stop or (non_finite and not rollback)
        if not writing:  # on any rank: only now is a checkpoint that was written in the background whole
            self._saver.settle()
        return checkpoint


def _agreed_stop(own: Requests) -> tuple[str, Cause, str]:
    """Reason, cause and signal of this rank's request to stop, or else of the first rank that has one. Collective."""
    every = gather_objects((own.stop, own.cause, own.signal))
    rank, (reason, cause, name) = next((rank, each) for rank, each in enumerate(every) if each[0])
    return (own.stop, own.cause, own.signal) if own.stop else (f"{reason} (rank {rank})", cause, name)


def _agreed_rollback(own: Rollback | None) -> Rollback:
    """The request of the first rank that has one; a state in memory is each rank's own. Collective."""
    every = gather_objects((evolve(own, state=None), own.state is not None) if own else (None, False))
    if len({has_state for _, has_state in every}) > 1:
        raise ForgeError("some ranks go back to a state in memory and others do not: each must ask for its own part")
    return evolve(next(filter(None, (request for request, _ in every))), state=own.state if own else None)


def follow_non_finite(train: TrainSection, progress: Progress, requests: Requests, record: Mapping[str, Any]) -> None:
    """Count a step if it was skipped, and ask for the end of the run after too many in a row (`train.non_finite`)."""
    is_finite = math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])  # then a hook has skipped it
    limit = 1 if train.non_finite == "stop" and not is_finite else train.non_finite_limit
    # Here and not where the update was skipped: with `found_inf` the host learns of it up to two steps later.
    progress.finite = is_finite or (train.non_finite == "ignore" and math.isfinite(record["loss"]))
    progress.skipped += bool(record.get("skipped"))
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if record.get("skipped") else 0
    if progress.skipped_in_a_row >= limit and not requests.non_finite:
        row = f"{limit} step{'s' if limit > 1 else ''} in a row"
        requests.non_finite = f"updates were skipped (not finite, or by a hook) for {row}, up to step {record['step']}"
