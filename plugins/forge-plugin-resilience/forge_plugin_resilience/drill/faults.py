"""The faults of a drill: what each does inside a rank, which jobs it applies to, and how the run should end.

Methods with an `Injection` are called inside the ranks of the run, the others in the process of
`forge-run doctor drill`.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forge_core.contracts.errors import ExitCode, ForgeError
from forge_core.contracts.run_end import Cause
from forge_plugin_resilience.drill.records import Event, Evidence, Finding

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import StepContext, TrainContext
    from forge_plugin_resilience.drill.injection import Injection
    from forge_plugin_resilience.drill.subject import Subject

ECHO_S = 1.2
"""Seconds between two signals that count as two; the same within one second is an echo."""
NOTICED_S = 30.0
"""Seconds in which a rank has to note a signal."""
ENDED_S = 30.0
"""Seconds in which a second signal has to end a rank."""
SLOWER_S = 1.0
"""Seconds by which a slow rank is late in each forward pass: far above the noise of a busy machine."""
LEAST_S = 10.0
"""Seconds of work at the end where there is no limit on hangs."""
LONGER = 1.5
"""How many times as long as the limit on hangs the work at the end takes."""
NOISE = 3.0
"""Standard deviation of noise on weights, in root mean squares of each tensor."""


CORRUPTION = 77
"""Exit code of a run that ends because copies of its weights differ."""


class Fault:
    """Base of all faults."""

    name: ClassVar[str]
    """For `--only`."""
    title: ClassVar[str]
    ends: ClassVar[Sequence[int]] = (ExitCode.FAILED,)
    """Exit codes with which the run may end; 0: it continues to its last step."""
    missing: ClassVar[str] = "the run did not record what had happened"
    """Reason for the failure if there is no finding; empty if none is required."""
    in_save: ClassVar[bool] = False
    """Whether it happens in the step after which the run saves, and not in the middle between two saves."""
    same_curve: ClassVar[bool] = True
    """Whether all losses must equal the losses of the run without a fault; if not, only the losses before the fault."""
    waits: ClassVar[bool] = False
    """Whether it is found by a time limit of `[launch]`."""
    is_silent: ClassVar[bool] = False
    """Whether the rank stops sending heartbeats, for which there is a separate time limit."""
    hits_all: ClassVar[bool] = False
    """Whether it is the whole run that is hit, and not one rank of it."""
    saves_all: ClassVar[bool] = False
    """Whether the run must not lose a step."""
    mark: ClassVar[str] = ""
    """How the curve differs after the fault, where it does."""
    twice_as_long: ClassVar[bool] = False
    """Whether it needs a run of twice as many steps, and happens after the last step of the one without a fault."""
    hint: ClassVar[str] = "see the log of the run"
    """Keys to set if the run does not end as it should."""

    def ranks(self, subject: Subject) -> Sequence[int]:
        """Returns the ranks to hit, each in a separate run."""
        return (0,)

    def refusal(self, subject: Subject) -> str:
        """Returns why the fault does not apply to a job; empty if it does."""
        return ""

    def keys(self, subject: Subject) -> Mapping[str, Any]:
        """Returns further keys for the job of this fault, by path."""
        return {}

    def between(self, subject: Subject, folder: str) -> None:
        """Called between the end of the run and its restart; `folder` is the run folder."""

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns what shows that the run has found the fault that hit `rank`."""
        return None

    def objection(self, evidence: Evidence) -> str:
        """Returns why a run that ended with an allowed exit code did not hold all the same; else nothing."""
        return ""

    def prepare(self, injection: Injection, context: TrainContext) -> None:
        """Called before the first step of the run in which the fault is due."""

    def at_begin(self, injection: Injection, context: StepContext) -> None:
        """Called before the micro-batches of the step."""

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Called when the gradients of the step are complete."""

    def at_end(self, injection: Injection, context: StepContext) -> None:
        """Called after the update of the step."""

    def before_step(self, injection: Injection, context: StepContext) -> None:
        """Called before every step, before or after the fault."""

    def after_step(self, injection: Injection, context: StepContext) -> None:
        """Called after every step, before or after the fault."""

    def before_commit(self, injection: Injection) -> None:
        """Called on a rank that is about to commit the checkpoint of the step."""

    def at_train_end(self, injection: Injection, context: TrainContext) -> None:
        """Called at the end of the run, after the last step and its save."""

    after_training: ClassVar[bool] = False
    """Whether it happens after the last step."""
    changes_loss: ClassVar[bool] = False
    """Whether it acts in the loss function."""
    changes_storage: ClassVar[bool] = False
    """Whether it acts in the storage of checkpoints."""

    def wrong_gradient(self, gradient: Tensor) -> Tensor:
        """Returns what becomes of the gradient of the last hidden states (B, S, D)."""
        return gradient


class OfSeveralRanks(Fault):
    """Base of faults that hit rank 0, which serves the others, and the last rank."""

    def ranks(self, subject: Subject) -> Sequence[int]:
        """Returns rank 0 and the last rank; a single rank once."""
        return tuple(dict.fromkeys((0, subject.ranks - 1)))


class Killed(OfSeveralRanks):
    """A rank is killed by SIGKILL in the middle of a step, as by the kernel when memory is short."""

    name, title = "killed", "rank killed"
    ends = (ExitCode.FAILED, -signal.SIGKILL)

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run if it was recorded as the kill of `rank`, the first rank to end."""
        return evidence.ended(Cause.KILLED, rank=rank)

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Kill the rank with SIGKILL, which no handler receives: what it has begun to write stays as it is."""
        if injection.is_victim:
            # Before the signal, after which nothing can be written; a restart would be killed again without the record
            injection.mark()
            os.kill(os.getpid(), signal.SIGKILL)


class Frozen(OfSeveralRanks):
    """A process stands still (SIGSTOP): a machine that swaps, or that has gone without a word."""

    name, title, waits, is_silent = "frozen", "process frozen", True, True
    hint = "set launch.hang_timeout_s to a number of seconds: with 0 nobody watches whether ranks still move"

    def refusal(self, subject: Subject) -> str:
        return "one process: there is no other rank to notice it" if subject.ranks == 1 else ""

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run as silence or as a hang: the limits in `[launch]` determine which comes first."""
        return evidence.ended(Cause.SILENT, Cause.HANG, rank=rank)

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Stop the process with SIGSTOP, once the others have a heartbeat of it from training."""
        if injection.is_victim:
            injection.await_heartbeat()
            injection.mark()
            os.kill(os.getpid(), signal.SIGSTOP)


class FrozenAtEnd(Frozen):
    """A process stands still after the last step, in `on_train_end`: nobody may wait for it for ever."""

    name, title, after_training = "frozen-at-end", "process frozen at the end", True

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Not in a step."""

    def at_train_end(self, injection: Injection, context: TrainContext) -> None:
        """Stop the process with SIGSTOP where no further step would show that it is missing."""
        if injection.is_victim:
            injection.await_heartbeat()
            injection.mark()
            os.kill(os.getpid(), signal.SIGSTOP)


class LongExport(Fault):
    """Rank 0 works after the last step, for longer than any limit, and reports progress: it must be allowed to finish.

    Its run may take neither for a hang, and no other rank may leave meanwhile: a scheduler would kill rank 0 then.
    """

    name, title, waits, after_training = "long-export", "long work at the end", True, True
    ends = (ExitCode.FINISHED,)
    hint = "a hook or a launcher of your own ends ranks that wait: see launch.hang_timeout_s"

    def refusal(self, subject: Subject) -> str:
        return "one process: there is no other rank to leave early" if subject.ranks == 1 else ""

    def prepare(self, injection: Injection, context: TrainContext) -> None:
        """Set the duration: 1.5 times `launch.hang_timeout_s` of the drill's job, or 15 s if that is 0."""
        self._duration_s = LONGER * (context.job.launch.hang_timeout_s or LEAST_S)

    def at_train_end(self, injection: Injection, context: TrainContext) -> None:
        """Report progress for the whole duration; then record how many processes the launcher still has."""
        from forge_core import report_progress

        if not injection.is_victim:
            return
        injection.mark()
        parent = os.getppid()
        end = time.monotonic() + self._duration_s
        while (left_s := end - time.monotonic()) > 0:
            report_progress("exporting, for a drill", self._duration_s - left_s, self._duration_s)
            time.sleep(min(0.5, left_s))
        # The ranks are the children of the launcher, and a rank that has left is none any more
        there = len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        injection.note(Event.WORKED, context.step, ranks=there)

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns when the work was done, and with how many ranks left; None if it was never done."""
        done = evidence.last(Event.WORKED)
        if done is None:
            return None
        return Finding(text=f"finished the work at the end, with {done.ranks} ranks there", time=done.time)

    def objection(self, evidence: Evidence) -> str:
        """Returns why a run that did the work failed all the same: a rank had ended before rank 0 was done."""
        done = evidence.last(Event.WORKED)
        left = done is not None and evidence.ranks > done.ranks
        return "other ranks left meanwhile: SLURM kills rank 0 then" if left else ""


class Deadlock(Fault):
    """The last rank leaves out a collective, in which the others wait for it."""

    name, title, waits = "deadlock", "collective left out", True
    hint = Frozen.hint

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run as a hang, whichever rank it names: the ranks that wait are not the cause."""
        return evidence.ended(Cause.HANG)

    def ranks(self, subject: Subject) -> Sequence[int]:
        return (subject.ranks - 1,)

    def refusal(self, subject: Subject) -> str:
        return "one process: it has no collectives" if subject.ranks == 1 else ""

    def prepare(self, injection: Injection, context: TrainContext) -> None:
        """Make the group of the collective. On every rank, and early: `new_group` is collective itself."""
        import torch.distributed as dist

        from forge_core.parallel.mesh import group_timeout

        # A separate group: in a group of the run, this collective would be matched with the last rank's next one
        self._group = dist.new_group(timeout=group_timeout())

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Start an all-reduce on all ranks but the victim, which continues with the step."""
        import torch.distributed as dist

        from forge_core.parallel.mesh import local_part

        if injection.is_victim:
            injection.mark()
            return
        # On the device of the run, for its backend. Of a sharded parameter it is a DTensor
        ones = next(iter(context.model.parameters())).new_ones(1)
        dist.all_reduce(local_part(ones), group=self._group)


class Raises(OfSeveralRanks):
    """A rank raises an exception, as by a mistake in a hook."""

    name, title = "raises", "rank raises"

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run if it names `rank`, and not a rank that failed because of it."""
        return evidence.ended(Cause.FAILED, rank=rank)

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Raise a `ForgeError` on the victim, within a step in which the other ranks need it."""
        if injection.is_victim:
            injection.mark()
            raise ForgeError("forge-run doctor drill raises an error on purpose")


def _launcher() -> int:
    """The process that a scheduler would send signals to: the launcher of the ranks, or the only process."""
    return os.getppid() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else os.getpid()


def _ask_to_stop(context: StepContext) -> None:
    """Send SIGTERM to the launcher and wait until this rank has noted it, so that the run does not end earlier."""
    os.kill(_launcher(), signal.SIGTERM)
    deadline = time.monotonic() + NOTICED_S
    while not context.requests.stop and time.monotonic() < deadline:
        time.sleep(0.01)


class Stop(Fault):
    """A request to stop (SIGTERM to the launcher), as by a scheduler that preempts the job."""

    name, title, ends = "stop", "stop request", (ExitCode.STOPPED,)
    hits_all, saves_all = True, True
    hint = "let the component that keeps the run from stopping return from its work sooner"

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run by a signal, whichever rank has recorded it."""
        return evidence.ended(Cause.SIGNAL)

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Send SIGTERM to the launcher, and continue with the step once rank 0 has noted the request."""
        if injection.is_victim:
            injection.mark()
            _ask_to_stop(context)


class SecondSignal(Fault):
    """A second SIGTERM while the run is about to stop: it must end at once, without a save."""

    name, title, ends = "second-signal", "second signal", (ExitCode.SECOND_SIGNAL,)
    hits_all, missing = True, ""

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end by a signal if it was recorded; a run that ends at once need not record it."""
        return evidence.ended(Cause.SIGNAL)

    def at_gradients(self, injection: Injection, context: StepContext) -> None:
        """Send two signals; the injection is recorded between them, so that times count from the second one."""
        if injection.is_victim:
            _ask_to_stop(context)
            time.sleep(ECHO_S)
            injection.mark()
            os.kill(_launcher(), signal.SIGTERM)
            # The step is held up, so that the run cannot stop regularly before the second signal takes effect
            time.sleep(ENDED_S)


class InSave(Fault):
    """Rank 0 dies in a save: all files of the checkpoint are written, but it has not got its name yet."""

    name, title, in_save, changes_storage = "save", "death in a save", True, True
    ends = (ExitCode.FAILED, -signal.SIGKILL)

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of the run if it was recorded as the kill of `rank`."""
        return evidence.ended(Cause.KILLED, rank=rank)

    def before_commit(self, injection: Injection) -> None:
        """Kill the process when all files are written, the manifest too, and only the commit is missing."""
        if injection.is_victim:  # of a spread storage, all ranks commit
            injection.mark()
            os.kill(os.getpid(), signal.SIGKILL)


class DiskFull(Fault):
    """The disk is full at a save: no process may write a file beyond half the size of the largest in a checkpoint.

    By RLIMIT_FSIZE, for which no privileges are needed: writing fails in the middle of a file with EFBIG, where a full
    disk has ENOSPC. The limit is lifted again after one interval of saves, when the save has met it (a save may run in
    the background).
    """

    name, title, in_save, hits_all = "disk-full", "disk full at a save", True, True
    changes_storage = True
    ends = (ExitCode.FAILED, ExitCode.FINISHED)
    hint = 'checkpoint.on_failure = "continue" would train on and try again at the next save'

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the end of a run that failed; else the first save after the fault that never became a checkpoint."""
        saved = {record.step for record in evidence.records if record.event == Event.SAVED}
        later = (record for record in evidence.records if record.time >= evidence.injected.time)
        lost = next((record for record in later if record.event == Event.SAVE and record.step not in saved), None)
        if (end := evidence.ended(Cause.FAILED)) or lost is None:
            return end
        return Finding(text=f"step {lost.step} was not saved, and training continued", time=lost.time)

    def at_end(self, injection: Injection, context: StepContext) -> None:
        """Lower the limit on every rank, before the save that follows this step."""
        self._soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # A save in the background may begin to write only later, and has time until the next one
        self._lift = injection.step + (context.job.checkpoint.interval if context.job.checkpoint.async_save else 1)
        if injection.is_victim:
            injection.mark()
        # On all ranks: `mark` has disarmed the victim alone
        injection.disarm()
        # Only the soft limit: a process without privileges cannot raise the hard one again
        resource.setrlimit(resource.RLIMIT_FSIZE, (injection.largest_file() // 2, hard))

    def before_step(self, injection: Injection, context: StepContext) -> None:
        """Wait for a save in the background, so that it meets the limit before that is lifted."""
        if context.step == getattr(self, "_lift", 0):  # 0, which is no step, until the limit was lowered
            injection.await_save()

    def after_step(self, injection: Injection, context: StepContext) -> None:
        """Lift the limit again after one step, or after one interval of saves in the background."""
        if context.step == getattr(self, "_lift", 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._soft, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Damaged(Stop):
    """One bit of the newest checkpoint is flipped after the run has stopped: it must resume from an older one."""

    name, title, saves_all = "damaged", "damaged newest checkpoint", False
    hint = 'set checkpoint.verify = "full", which finds flipped bits, and checkpoint.keep to 2 or more (0 keeps all)'

    def refusal(self, subject: Subject) -> str:
        if not subject.is_on_disk:
            return f"checkpoint.storage is {subject.storage}, whose files are out of reach"
        return ""

    def between(self, subject: Subject, folder: str) -> None:
        """Flip a bit of the checkpoint that the run saved when it was stopped."""
        subject.flip_bit(folder)


class Infinite(Fault):
    """A gradient becomes infinite on one rank: its update must be skipped on all."""

    name, title, ends = "infinite", "infinite gradient", (ExitCode.FINISHED,)
    same_curve, changes_loss = False, True
    hint, mark = 'set train.non_finite = "skip"', "then without one update"

    def ranks(self, subject: Subject) -> Sequence[int]:
        return (subject.ranks - 1,)  # of a pipeline, the last one has the loss

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the first step whose line of metrics has `skipped`."""
        row = next((row for row in evidence.rows if row.get("skipped")), None)
        return None if row is None else Finding(text=f"step {row['step']}: update skipped", time=row["time"])

    def at_begin(self, injection: Injection, context: StepContext) -> None:
        """Let the next loss of the victim return the wrong gradient."""
        injection.due_in_loss = injection.is_victim

    def wrong_gradient(self, gradient: Tensor) -> Tensor:
        """Returns a copy with one infinite element; a hook of autograd must not change its argument."""
        wrong = gradient.clone()
        wrong.view(-1)[0] = float("inf")
        return wrong


class GradientBit(Infinite):
    """One bit of a gradient is flipped on one rank, before the ranks sum it up: silent data corruption."""

    name, title, same_curve = "gradient-bit", "flipped bit in a gradient", True
    hint = "set `every` of [plugins.sdc]; 1 checks each step"

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the first step whose line of metrics names `rank` as faulty."""
        return evidence.named(rank)

    def refusal(self, subject: Subject) -> str:
        return "" if subject.find("plugin", "sdc") else "no [plugins.sdc] computes steps again"

    def keys(self, subject: Subject) -> Mapping[str, Any]:
        """Check every step: the fault is in one step only, which the job's own interval may pass over."""
        return {f"{path}.every": 1 for path in subject.find("plugin", "sdc")}

    def wrong_gradient(self, gradient: Tensor) -> Tensor:
        """Returns a copy whose largest element is wrong by a factor of 256; see `flip_bit`."""
        wrong = gradient.clone()
        flip_bit(wrong)
        return wrong


class WeightBit(Fault):
    """One bit of a weight is flipped in the copy of one rank, after an update."""

    name, title, ends = "weight-bit", "flipped bit in one copy's weights", (CORRUPTION, ExitCode.FINISHED)
    hint = "set `every` of the hook `replicas`"

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the step that names `rank` (`on_fault = "warn"`), or the end with exit code 77."""
        is_corrupt = evidence.end is not None and evidence.end.code == CORRUPTION
        return evidence.named(rank) or (evidence.ended(Cause.FAILED) if is_corrupt else None)

    def ranks(self, subject: Subject) -> Sequence[int]:
        return (subject.ranks - 1,)

    def refusal(self, subject: Subject) -> str:
        if not subject.find("hook", "replicas"):
            return "no hook `replicas` compares the copies of the weights"
        return "" if subject.replicas > 1 else "every weight is on one rank only: there are no copies"

    def keys(self, subject: Subject) -> Mapping[str, Any]:
        """Compare copies after every step; the job's own interval may be longer than the drill."""
        return {f"{path}.every": 1 for path in subject.find("hook", "replicas")}

    def at_end(self, injection: Injection, context: StepContext) -> None:
        """Flip a bit of the victim's part of the first parameter; the hook compares later in the same step."""
        if injection.is_victim:
            from forge_core.parallel.mesh import local_part

            injection.mark()
            flip_bit(local_part(next(iter(context.model.parameters())).data))


class Spike(Fault):
    """Noise on all weights: loss and gradient norm shoot up, and the run must go back to a checkpoint."""

    name, title, ends = "spike", "noise on weights", (ExitCode.FINISHED, ExitCode.NON_FINITE)
    hits_all, same_curve, twice_as_long, mark = True, False, True, "then from an earlier state"
    missing = "the run continued without going back to a checkpoint"
    hint = 'set action = "skip" or "roll_back" in the table of the hook `spikes`'

    def refusal(self, subject: Subject) -> str:
        if not subject.find("hook", "spikes"):
            return "no hook `spikes` looks for spikes"
        least = 2 * subject.steps
        return (
            f"the hook needs {least} steps to judge by, and the job has fewer"
            if subject.job.train.steps < least
            else ""
        )

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the roll-back; or the end of a run in which the hook may not roll back, or not any more."""
        if back := evidence.last(Event.ROLL_BACK):
            return Finding(text=f"step {back.step}: went back to the state of step {back.to}", time=back.time)
        return evidence.ended(Cause.NON_FINITE)

    def keys(self, subject: Subject) -> Mapping[str, Any]:
        # Its window and its warm-up are longer than the drill; data are left out only to keep spikes from coming back
        settings = {"window": 8, "warmup_steps": 0, "leave_out": 1}
        found = subject.find("hook", "spikes")
        return {f"{path}.{key}": value for path in found for key, value in settings.items()}

    def at_begin(self, injection: Injection, context: StepContext) -> None:
        """Add noise to all weights on every rank, before the forward pass, so that this step's loss shows it."""
        import torch

        from forge_core.parallel.mesh import local_part

        if injection.is_victim:
            injection.mark()
        injection.disarm()
        # The same noise on each rank, so that copies stay equal
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in context.model.parameters():
                weight = local_part(parameter)
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                # Relative to the scale of each tensor, so that every layer is disturbed alike
                weight += NOISE * weight.square().mean().sqrt() * noise


class Slow(Fault):
    """One rank is slower than the others from some step on."""

    name, title, ends, changes_loss = "slow", "slow rank", (ExitCode.FINISHED, ExitCode.STOPPED), True
    hint = "see the keys of the hook `stragglers`"

    def finding(self, evidence: Evidence, rank: int) -> Finding | None:
        """Returns the first step whose line of metrics names `rank` as faulty."""
        return evidence.named(rank)

    def ranks(self, subject: Subject) -> Sequence[int]:
        return (subject.ranks - 1,)

    def refusal(self, subject: Subject) -> str:
        if subject.ranks == 1:
            return "one process: there is none to compare with"
        return "" if subject.find("hook", "stragglers") else "no hook `stragglers` compares the speed of ranks"

    def keys(self, subject: Subject) -> Mapping[str, Any]:
        """Compare ranks after every step: the hook names one only after several comparisons in a row."""
        return {f"{path}.every": 1 for path in subject.find("hook", "stragglers")}

    def prepare(self, injection: Injection, context: TrainContext) -> None:
        """Make every loss of the victim take `SLOWER_S` longer, from the first step of this process on."""
        if injection.is_victim:
            injection.mark()
            injection.pause_s = SLOWER_S


def flip_bit(tensor: Tensor) -> None:
    """Flip a bit of the exponent of the largest element, in place: a factor of 256, up or down."""
    import torch

    mantissa = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[tensor.dtype]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    with torch.no_grad():
        flat = tensor.view(-1)
        place = flat.abs().argmax()
        # Bit 3 of the exponent, which changes it by 8; float16 has 5 bits of exponent, so it has this one too
        flat.view(integers)[place] ^= 1 << (mantissa + 3)


ORDER = (
    *(Killed, Frozen, FrozenAtEnd, LongExport, Deadlock, Raises, Stop, SecondSignal, InSave, DiskFull, Damaged),
    *(Infinite, Spike, GradientBit, WeightBit, Slow),
)
FAULTS: Mapping[str, type[Fault]] = {fault.name: fault for fault in ORDER}
"""Every fault by name, in the order of a drill."""
