"""The state of an injection in one rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.launch.progress_beacon import report_progress
from forge_core.launch.rank_process import this_process
from forge_plugin_resilience.drill.faults import FAULTS
from forge_plugin_resilience.drill.records import INJECTED, STEPS, Event, Record

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Head
    from forge_core.contracts.runtime import LossFunction, LossOutput, Storage


REPORT_S = 0.2
"""Seconds between two reports of a rank that no limit on hangs may end yet."""
POLL_S = 0.02


class Injection:
    """Decides when the fault of a drill is due in this rank, and notes what it sees."""

    def __init__(self, folder: str, steps: int, fault: str, step: int, rank: int) -> None:
        self._folder, self._steps, self.step, self.rank = Path(folder), steps, step, rank
        self._fault = FAULTS[fault]() if fault else None
        self._own_rank = 0
        self._armed = False
        self._storage: Storage | None = None
        self._weights = 0
        self._limits_bind = threading.Event()
        self._save_settled = threading.Event()
        self.due_in_loss = False
        """Whether the next loss of this rank shall have a wrong gradient."""
        self.pause_s = 0.0
        """Seconds by which each loss of this rank takes longer."""

    @property
    def is_victim(self) -> bool:
        """Whether this rank is the one to hit."""
        return self._own_rank == self.rank

    def mark(self) -> None:
        """Note that the fault happens now: it never does again in this folder."""
        self.disarm()
        self._record(Event.INJECTED, self.step).append(self._folder / INJECTED)

    def disarm(self) -> None:
        """Do nothing any more in this process."""
        self._armed = False

    def largest_file(self) -> int:
        """Bytes of the largest file of the newest checkpoint; of this rank's weights if its files are elsewhere."""
        assert self._storage is not None
        steps = self._storage.steps()
        # Before the first save there is no checkpoint to go by
        files = [each for each in self._storage.path(steps[-1]).iterdir() if each.is_file()] if steps else []
        return max((each.stat().st_size for each in files), default=self._weights)

    def hold_limits(self) -> None:
        """Keep limits on hangs, which a drill may have shortened for its fault, from ending ranks before it is due."""
        # A start takes as long as the machine is busy. A restart has no fault to find, so limits wait for its end.
        if self._fault is not None and self._fault.waits and this_process.rendezvous is not None:
            threading.Thread(target=self._report, name="forge-drill", daemon=True).start()

    def _report(self) -> None:
        while not self._limits_bind.wait(REPORT_S):
            report_progress()

    def await_heartbeat(self) -> None:
        """Wait until the other ranks have a heartbeat of this rank from training.

        The steps of a small job may all take place between two heartbeats. A rank that falls silent then was last seen
        before its first step, where `launch.silence_timeout_s` is ten times as long.
        """
        from forge_core.launch.rendezvous import HEARTBEAT

        rendezvous = this_process.rendezvous
        assert rendezvous is not None, "faults that others notice need several ranks"
        while rendezvous.get(HEARTBEAT, [self._own_rank]).get(self._own_rank, {}).get("step", 0) == 0:
            time.sleep(POLL_S)

    def begin(self, context: TrainContext) -> None:
        """Training begins."""
        from forge_core.parallel.mesh import global_rank, local_part

        self._own_rank = global_rank()
        self.note(Event.BEGIN, context.step)
        # The same on every rank: the file is there, or not, from before their start
        self._armed = self._fault is not None and not (self._folder / INJECTED).exists()
        self._weights = sum(local_part(each).nbytes for each in context.model.parameters())
        if self._fault is not None and self._armed:
            self._fault.prepare(self, context)

    def step_begins(self, context: StepContext) -> None:
        """Call the fault before the step; limits on hangs apply from the step of the fault on."""
        if self._fault is not None:
            self._fault.before_step(self, context)
        if self._is_due(context.step):
            self._limits_bind.set()
            self._fault.at_begin(self, context)  # type: ignore[union-attr]

    def gradients_are_there(self, context: StepContext) -> None:
        """Call the fault in its step, unless it has happened in this folder already."""
        if self._is_due(context.step):
            self._fault.at_gradients(self, context)  # type: ignore[union-attr]

    def step_ends(self, context: StepContext) -> None:
        """Note the step, and end the run after the last one of the drill."""
        self.note(Event.STEP, context.step)
        if self._fault is not None:
            self._fault.after_step(self, context)
        if self._is_due(context.step):
            self._fault.at_end(self, context)  # type: ignore[union-attr]
        if self._steps <= context.step < context.job.train.steps:
            # Final: exit code 0, as of a run that has reached `train.steps`, and the same command does not train on
            context.request_stop(f"the drill's last step, {self._steps}", final=True)

    def training_ends(self, context: TrainContext) -> None:
        """Call a fault that is due after the last step; limits on hangs apply from here on in any case."""
        self._limits_bind.set()
        if self._fault is not None and self._armed:
            self._fault.at_train_end(self, context)

    def watch_storage(self, storage: Storage) -> None:
        """Take part in the saves of a storage."""
        self._storage = storage
        if self._fault is None or not self._fault.changes_storage:
            return
        # On the class: an instance may have slots, and a delegate would not be recognised as a `SpreadStorage`
        cls: Any = type(storage)
        commit, discard = cls.commit, cls.discard

        def committing(own: Storage, step: int) -> Path:
            if self._is_due(step):
                self._fault.before_commit(self)  # type: ignore[union-attr]
            # Before the commit: one that fails must not leave `await_save` waiting for ever
            self._note_settled(step)
            return commit(own, step)

        def discarding(own: Storage, step: int) -> None:
            self._note_settled(step)
            discard(own, step)

        cls.commit, cls.discard = committing, discarding

    def _note_settled(self, step: int) -> None:
        if step == self.step:
            self._save_settled.set()

    def await_save(self) -> None:
        """Wait until the files of the step's checkpoint are written, or failed to be: it may be in the background."""
        if self._own_rank == 0:  # the only rank whose storage is always called; the step's collectives hold the others
            self._save_settled.wait()

    def around_loss(self, loss: LossFunction) -> LossFunction:
        """Returns the loss function; if the fault changes the loss, its gradient is wrong once."""
        return _Disturbed(loss, self) if self._fault is not None and self._fault.changes_loss else loss

    def wrong_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the last hidden states, as the fault changes it."""
        assert self._fault is not None
        self.mark()
        return self._fault.wrong_gradient(gradient)

    def _is_due(self, step: int) -> bool:
        return self._armed and step == self.step

    def note(self, event: Event, step: int, to: int = 0, ranks: int = 0) -> None:
        """Record what this run does, on rank 0."""
        if self._own_rank == 0:
            self._record(event, step, to, ranks).append(self._folder / STEPS)

    def _record(self, event: Event, step: int, to: int = 0, ranks: int = 0) -> Record:
        return Record(event=event, step=step, rank=self._own_rank, time=time.time(), to=to, ranks=ranks)


@frozen
class _Disturbed:
    """A loss function."""

    inner: LossFunction
    injection: Injection

    def __call__(self, head: Head, hidden: Tensor, batch: Batch) -> LossOutput:
        if self.injection.pause_s:
            time.sleep(self.injection.pause_s)
        # An evaluation has no gradient: the fault then waits for the next loss of training
        if self.injection.due_in_loss and hidden.requires_grad:
            self.injection.due_in_loss = False  # once: a recomputation of the step, as by `sdc`, is right
            hidden.register_hook(self.injection.wrong_gradient)
        return self.inner(head, hidden, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # other attributes of a loss, such as its parameters
