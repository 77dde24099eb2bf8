"""Runs that go back to an earlier state, that end for good, and that tell where their time goes."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch
from attrs import define, evolve, field

from forge_core import TrainingHook
from forge_core.checkpoint.storage import read_manifest
from forge_core.cli.run import describe_summary
from forge_core.contracts.errors import CheckpointError, ExitCode, ForgeError
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming

STEPS = 8


@define(kw_only=True, slots=False)
class GoBack(TrainingHook):
    """Goes back once, at the end of step `at`; `noise` is added to the weights before."""

    rolls_back: ClassVar[bool] = False

    at: int
    to: int | None = None
    leave_out: int = 0
    noise: float = 0.0
    events: list = field(factory=list)
    done: bool = field(default=False, init=False)

    def on_step_end(self, context):
        if context.step != self.at or self.done:
            return
        self.done = True
        with torch.no_grad():
            for parameter in context.model.parameters():
                parameter.add_(self.noise)
        context.request_rollback("as the test says", to=self.to, leave_out=self.leave_out)

    def on_rollback(self, context, step, reason):
        self.events.append((context.step, step, reason))


@define(kw_only=True, slots=False)
class Counting(TrainingHook):
    """Counts steps, as state that goes back."""

    count: int = field(default=0, init=False)

    def on_step_end(self, context):
        self.count += 1


@pytest.fixture
def saving(make_job):
    """A job that saves every two steps."""
    checkpoint = {"interval": 2, "at_start": True}
    return lambda name="run": make_job(steps=STEPS, checkpoint=checkpoint, job={"name": name})


def test_weights_optimizer_and_hooks_go_back_while_steps_and_data_go_on(saving, train, lines):
    """Against the same run on whose step 5 nothing was trained: that step's update is all that differs."""

    @define(kw_only=True, slots=False)
    class SkipFifth(TrainingHook):
        may_skip = True

        def on_gradients(self, context):
            if context.step == 5:
                context.skip_update("as the test says")

    back, counting = GoBack(at=5, noise=3.0), Counting()
    went_back = lines(train(saving(name="back"), back, counting))
    skipped = lines(train(saving(name="skipped"), SkipFifth()))
    assert back.events == [(5, 4, "as the test says")]
    assert [line["step"] for line in went_back] == list(range(1, STEPS + 1))
    for one, other in zip(went_back, skipped, strict=True):
        assert one["loss"] == other["loss"]
        assert one["lr"] == other["lr"]
        assert one["tokens"] == other["tokens"]
    assert counting.count == STEPS - 1


def test_a_step_can_be_named_and_data_left_out(saving, train, lines):
    texts = []
    back = GoBack(at=5, to=3, leave_out=2)
    summary = train(saving(), back, echo=texts.append)
    assert back.events == [(5, 2, "as the test says")]
    [went_back] = [text for text in texts if text.startswith("step 5: ")]
    assert not lacks(went_back, "step 2", "as the test says", "steps 6 to 7")
    assert [line["step"] for line in lines(summary)] == [1, 2, 3, 4, 5, 8]
    assert read_manifest(summary.folder / "checkpoints/step-8")["progress"]["skipped"] == 2


def test_a_run_that_was_killed_after_going_back_continues_to_the_same_end(saving, train, lines):
    @define(kw_only=True, slots=False)
    class Die(TrainingHook):
        at: int

        def on_step_begin(self, context):
            if context.step == self.at:
                raise RuntimeError("power cut")

    def losses(name, *hooks):
        return [line["loss"] for line in lines(train(saving(name=name), GoBack(at=3, leave_out=2), *hooks))]

    whole = losses("whole")
    with pytest.raises(RuntimeError, match="power cut"):
        losses("cut", Die(at=7))  # after the save of step 4, while data were left out until 5
    assert losses("cut", Die(at=0)) == whole


def test_there_must_be_a_checkpoint_to_go_back_to(make_job, train):
    with pytest.raises(CheckpointError, match=naming("as the test says", "checkpoint.at_start = true")):
        train(make_job(), GoBack(at=2))


@define(kw_only=True, slots=False)
class PutBack(TrainingHook):
    """Takes the state after step 3 and puts it back after step 5, once."""

    rolls_back: ClassVar[bool] = False
    taken: object = None

    def on_step_end(self, context):
        if context.step == 3 and self.taken is None:
            self.taken = context.take_state()
        if context.step == 5 and self.taken:
            context.put_state(self.taken)
            self.taken = False

    def state_dict(self):
        return {}


def test_a_state_that_is_put_back_makes_the_same_steps_again(make_job, train, lines):
    losses = [(line["step"], line["loss"]) for line in lines(train(make_job(steps=STEPS), PutBack(), Counting()))]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert losses[3:5] == losses[5:7]


@pytest.mark.parametrize("layout", ["fsdp2", "pp2"])
def test_ranks_go_back_together(make_job, catalog, train, lines, layout):
    case = LAYOUTS[layout]

    def curves(rank):
        def job(name):
            model = Transformer(vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=2))
            keys = {"parallel": case.stages(catalog), "micro_batch_size": case.micro_batch_size, "model": model}
            changes = {"checkpoint": {"interval": 2}, "job": {"name": name}, "global_batch_size": 8}
            return make_job(steps=6, **changes, **keys)

        # One rank asks for the checkpoint, each for its own part of a state in memory
        summaries = [
            train(job("from-a-checkpoint"), GoBack(at=5 if rank == 1 else 0, noise=0.0), Counting()),
            train(job("from-memory"), PutBack(), Counting()),
            train(job("plain"), Counting()),
        ]
        return [[(line["step"], line["loss"]) for line in lines(summary)] for summary in summaries]

    from_checkpoint, from_memory, plain = run_on_ranks(2, curves)[0]
    assert from_memory[:5] == plain[:5]
    assert from_memory[5:] == plain[3:]
    assert from_checkpoint[:5] == plain[:5]
    # The update of step 5 is undone: the loss of step 6 is that of the weights before it
    assert from_checkpoint[5] != plain[5]
    assert from_checkpoint[5][1] == pytest.approx(plain[5][1], rel=0.2)


def test_ranks_that_disagree_about_a_state_in_memory_end_by_name(make_job, train):
    def ends(rank):
        with pytest.raises(ForgeError, match=naming("some ranks", "state in memory")):
            train(make_job(steps=STEPS), *([PutBack()] if rank else []))
        return True

    # Ranks whose hooks differ are no job's; hooks given in Python may
    assert run_on_ranks(2, ends) == [True, True]


def test_a_final_end_is_no_interruption_and_is_not_continued(saving, train, lines):
    @define(kw_only=True, slots=False)
    class Enough(TrainingHook):
        def on_eval_end(self, context, metrics):
            if context.step == 4:
                context.request_stop("good enough", final=True)

    job = saving()
    job = evolve(job, eval=evolve(job.eval, interval=2))
    texts = []
    first = train(job, Enough())
    assert (first.step, first.stopped, first.end.final, first.exit_code) == (4, "good enough", True, ExitCode.FINISHED)
    assert not lacks(describe_summary(first).splitlines()[0], "for good", "step 4", "good enough", "loss")
    before = (first.folder / "checkpoints/step-4/manifest.json").stat().st_mtime_ns
    again = train(job, Enough(), echo=texts.append)
    assert (again.step, again.end.final, again.exit_code) == (4, True, ExitCode.FINISHED)
    assert any(not lacks(text, "good enough", "--resume-with-changes") for text in texts)
    assert (first.folder / "checkpoints/step-4/manifest.json").stat().st_mtime_ns == before
    further = train(job, resume_with_changes=True)
    assert (further.step, further.end.final, further.stopped) == (STEPS, False, "")
    assert "ended" not in read_manifest(first.folder / f"checkpoints/step-{STEPS}")
    assert [line["step"] for line in lines(first)] == list(range(1, STEPS + 1))


def test_a_stop_that_is_not_final_is_continued(saving, train):
    @define(kw_only=True, slots=False)
    class Stop(TrainingHook):
        def on_step_end(self, context):
            if context.step == 3:
                context.request_stop("for now")

    assert train(saving(), Stop()).exit_code == ExitCode.STOPPED
    assert train(saving(), Stop()).step == STEPS


def test_seconds_by_phase_are_those_of_the_clock(saving, train):
    @define(kw_only=True, slots=False)
    class Watch(TrainingHook):
        seen: list = field(factory=list)

        def on_step_end(self, context):
            time.sleep(0.02)
            self.seen.append((time.perf_counter(), dict(context.seconds)))

        def on_train_end(self, context):
            self.end = dict(context.seconds)

    watch = Watch()
    train(saving(), watch)
    (began, first), (ended, last) = watch.seen[0], watch.seen[-1]
    assert sum(last.values()) - sum(first.values()) == pytest.approx(ended - began, abs=0.01)
    assert last["hook python.Watch"] - first["hook python.Watch"] >= 0.02 * (STEPS - 1)
    assert {"data", "forward and backward", "optimizer", "save", "agreement of the ranks"} <= watch.end.keys()


def test_a_context_without_a_run_loop_says_so(make_job, build):
    from forge_core.contracts.contexts import TrainContext

    run = build(make_job())
    with pytest.raises(ForgeError, match=naming("run loop")):
        _ = TrainContext(**run.references, step=0).seconds


def test_lines_have_the_time_of_the_clock(make_job, train, lines):
    before = time.time()
    times = [line["time"] for line in lines(train(make_job()))]
    assert before < times[0] <= times[-1] < time.time()
    assert times == sorted(times)
