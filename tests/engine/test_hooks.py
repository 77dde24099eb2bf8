"""Training hooks: events, order, requests, state."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from attrs import define, field

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode
from forge_core.engine.trainer import Trainer


@define(kw_only=True, slots=False)
class Trace(TrainingHook):
    """Notes every event."""

    events: list[str] = field(init=False, factory=list)

    def on_train_begin(self, context):
        self.events.append("train_begin")

    def on_step_begin(self, context):
        assert context.output is None
        assert context.grad_norm is None
        self.events.append(f"step_begin {context.step}")

    def on_gradients(self, context):
        assert all(p.grad is not None for p in context.model.parameters())
        assert context.grad_norm is not None
        self.events.append(f"gradients {context.step}")

    def on_step_end(self, context):
        assert context.skipped is False
        self.events.append(f"step_end {context.step}")

    def on_eval_end(self, context, metrics):
        assert metrics["eval/loss"] > 0
        self.events.append(f"eval_end {context.step}")

    def on_checkpoint_begin(self, context):
        self.events.append(f"checkpoint_begin {context.step}")

    def on_checkpoint_save(self, context):
        assert (context.path / "manifest.json").is_file()
        self.events.append(f"checkpoint_save {context.step}")

    def on_checkpoint_load(self, context):
        self.events.append(f"checkpoint_load {context.step}")

    def on_train_end(self, context):
        self.events.append("train_end")


def test_every_event_comes_in_its_place(make_job, train):
    trace = Trace()
    train(make_job(steps=2, eval={"interval": 1}), trace)
    assert trace.events == [
        "train_begin",
        *("step_begin 1", "gradients 1", "step_end 1", "eval_end 1"),
        *("step_begin 2", "gradients 2", "step_end 2", "eval_end 2"),
        *("checkpoint_begin 2", "checkpoint_save 2"),
        "train_end",
    ]


def test_hooks_run_in_the_order_components_plugins_job_python(make_job, build, catalog, tmp_path):
    from forge_core.contracts.components import Plugin
    from forge_core.contracts.hookspecs import hookimpl
    from forge_core.engine.build import build_context, build_run

    @define(kw_only=True, slots=False)
    class Contributes(Plugin):
        @hookimpl
        def forge_training_hooks(self):
            return [Trace()]

    job = make_job(hooks={"b": Trace(), "a": Trace()}, plugins={"p": Contributes()})
    run = build_run(job, build_context(job, catalog, tmp_path), [Trace()])
    assert list(run.hooks.hooks) == ["plugins.Trace", "hooks.b", "hooks.a", "python.Trace"]


@define(kw_only=True, slots=False)
class SkipEven(TrainingHook):
    may_skip: ClassVar[bool] = True

    def on_gradients(self, context):
        self.before = {n: p.detach().clone() for n, p in context.model.named_parameters()}
        if context.step % 2 == 0:
            context.skip_update("even")

    def on_step_end(self, context):
        unchanged = all(torch.equal(p, self.before[n]) for n, p in context.model.named_parameters())
        assert unchanged == (context.step % 2 == 0)


def test_a_hook_can_skip_updates(make_job, train, lines):
    records = lines(train(make_job(), SkipEven()))
    assert [record.get("skipped", 0) for record in records] == [0, 1, 0, 1]
    assert [record["step"] for record in records] == [1, 2, 3, 4]


def test_the_reason_for_a_skipped_update_is_printed(make_job, catalog):
    printed: list[str] = []
    Trainer(make_job(), hooks=[SkipEven()], catalog=catalog, echo=printed.append).run()
    skipped = [line for line in printed if line.endswith(": even")]
    assert [line.partition(":")[0] for line in skipped] == ["step 2", "step 4"]


def test_only_a_hook_that_declares_it_may_skip(make_job, train):
    @define(kw_only=True, slots=False)
    class Undeclared(TrainingHook):
        def on_gradients(self, context):
            context.skip_update("undeclared")

    with pytest.raises(Exception, match="may_skip"):
        train(make_job(), Undeclared())


@define(kw_only=True, slots=False)
class Asks(TrainingHook):
    """Asks for a checkpoint after step 1 and for the end after step 2."""

    count: int = field(init=False, default=0)

    def on_step_end(self, context):
        self.count += 1
        context.log("asks/count", self.count)
        context.log("asks/norm", context.grad_norm * 2)
        if context.step == 1:
            context.request_checkpoint()
        if context.step == 2:
            context.request_stop("enough")


def test_a_hook_can_ask_for_a_checkpoint_and_for_the_end(make_job, train, lines):
    summary = train(make_job(), Asks())
    assert summary.stopped == "enough"
    assert summary.exit_code == ExitCode.STOPPED
    assert summary.step == 2
    folders = sorted(path.name for path in (summary.folder / "checkpoints").iterdir())
    assert folders == ["step-1", "step-2"]
    assert [record["asks/count"] for record in lines(summary)] == [1, 2]
    record = lines(summary)[0]
    assert record["asks/norm"] == pytest.approx(2 * record["grad_norm"])


def test_the_state_of_a_hook_travels_with_the_checkpoint(make_job, train):
    @define(kw_only=True, slots=False)
    class Counter(TrainingHook):
        seen: int = field(init=False, default=0)
        total: torch.Tensor = field(init=False, factory=lambda: torch.zeros(3))

        def on_step_end(self, context):
            self.seen += 1
            self.total += context.step

    first = Counter()
    train(make_job(steps=2, checkpoint={"keep": 0}), first)
    second = Counter()
    train(make_job(steps=4, checkpoint={"keep": 0}), second)
    assert second.seen == 4
    assert second.total.tolist() == [10.0, 10.0, 10.0]


def test_an_error_in_a_hook_names_it_and_reaches_on_exception(make_job, train):
    @define(kw_only=True, slots=False)
    class Fails(TrainingHook):
        def on_step_end(self, context):
            raise RuntimeError("no")

    @define(kw_only=True, slots=False)
    class Listens(TrainingHook):
        heard: str = field(init=False, default="")

        def on_exception(self, context, error):
            self.heard = f"{error} at {context.step}"

    listener = Listens()
    with pytest.raises(RuntimeError, match="no") as caught:
        train(make_job(), Fails(), listener)
    assert caught.value.__notes__ == ["in hook python.Fails, on_step_end"]
    assert listener.heard == "no at 1"
