"""Saves, in the foreground and while training goes on: what they hold, when they happen, that they change nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from attrs import define, field, frozen

from forge_core.checkpoint.manager import Checkpoints, Retention, Saver, State
from forge_core.checkpoint.storage import Local, LocalStorage
from forge_core.checkpoint.tensors import TensorWriter, load_tensors
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.layout import Layout
from forge_core.job import CheckpointSection
from forge_core.parallel.mesh import make_mesh
from forge_kit.tools.checkpoints import stored_tensors
from forge_testing import TinyModel
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming


def test_a_checkpoint_is_saved_where_a_link_to_itself_has_its_name(tmp_path):
    storage = LocalStorage(tmp_path)
    (tmp_path / "step-60").symlink_to("step-60")
    assert list(storage.steps()) == []
    (storage.begin(60) / "a").touch()
    assert [path.name for path in storage.commit(60).iterdir()] == ["a"]
    assert list(storage.steps()) == [60]


GATE = threading.Event()
"""Closed: nothing is written."""


@frozen(kw_only=True)
class Gated(Local):
    """Checkpoints that are not begun while the gate is closed."""

    def build(self, context):
        return GatedStorage(context.folder / self.folder)


class GatedStorage(LocalStorage):
    def begin(self, step):
        assert GATE.wait(30)
        return super().begin(step)


@pytest.fixture(autouse=True)
def closed_gate():
    GATE.clear()
    yield
    GATE.set()


@pytest.fixture
def savers(monkeypatch):
    """The savers of the runs of a test."""
    made = []

    class Noted(Saver):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("forge_core.engine.loop.Saver", Noted)
    return made


def wait_for(saver):
    while saver.writing:
        time.sleep(0.01)


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Opens the gate at a step, or at the end, and notes what happens when."""

    open_at: int = 0
    events: list = field(factory=list)

    def on_step_begin(self, context):
        if context.step == self.open_at:
            GATE.set()

    def on_checkpoint_save(self, context):
        assert threading.current_thread() is threading.main_thread()
        assert (context.path / "manifest.json").is_file()
        self.events.append((context.step, context.path.name))


def curve(lines, summary):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in lines(summary)]


def tensors_of(path):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(path).items()}
    load_tensors(path, tensors)
    return tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestASaveChangesNothing:
    @pytest.mark.parametrize("async_save", [False, True])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_at_any_step_the_first_included(self, make_job, train, lines, tmp_path, async_save, ranks):
        changes = {"steps": 9, "precision": "bf16", "model": TinyModel(dropout=0.3), "micro_batch_size": 2 // ranks}
        settings = {"interval": 1, "at_start": True, "early_steps": 8, "keep": 0, "async_save": async_save}
        GATE.set()

        def work(rank):
            return [
                train(make_job(job={"name": "often"}, checkpoint=settings, **changes)),
                train(make_job(job={"name": "never"}, checkpoint={"interval": 0}, **changes)),
            ]

        often, never = run_on_ranks(ranks, work)[0]
        assert curve(lines, often) == curve(lines, never)
        assert len(list((often.folder / "checkpoints").iterdir())) == 10
        assert same(tensors_of(often.folder / "checkpoints/step-9"), tensors_of(never.folder / "checkpoints/step-9"))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_can_continue_from_step_0(make_job, train, lines, async_save):
    GATE.set()
    straight = train(make_job(job={"name": "straight"}))
    start = train(make_job(steps=1, checkpoint={"at_start": True, "async_save": async_save}))
    path = start.folder / "checkpoints/step-0"
    assert curve(lines, train(make_job(job={"name": "other"}), resume=str(path))) == curve(lines, straight)


def test_the_manifest_tells_what_the_checkpoint_is_of(make_job, train):
    began = time.time()
    summary = train(make_job(steps=3))
    manifest = json.loads((summary.folder / "checkpoints/step-3/manifest.json").read_text())
    assert (manifest["step"], manifest["tokens"]) == (3, 3 * 4 * 8)
    assert manifest["tokens"] == manifest["progress"]["tokens"]
    assert manifest["evaluation"]["step"] == 3
    assert manifest["evaluation"]["metrics"]["eval/loss"] == summary.evaluation["eval/loss"]
    assert began <= manifest["time"] <= time.time()
    assert {"job", "provenance", "files"} <= manifest.keys()


def test_the_last_step_is_saved_once_and_after_its_evaluation(make_job, train):
    @define(kw_only=True, slots=False)
    class Learnt(TrainingHook):
        evaluations: int = field(init=False, default=0)

        def on_eval_end(self, context, metrics):
            self.evaluations += 1

    watch = Watch()
    summary = train(make_job(steps=4, checkpoint={"interval": 2}), Learnt(), watch)
    assert watch.events == [(2, "step-2"), (4, "step-4")]
    manifest = json.loads((summary.folder / "checkpoints/step-4/manifest.json").read_text())
    assert manifest["extras"]["hook:python.Learnt"] == {"evaluations": 1}


def test_a_save_is_due_by_time_too(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("forge_core.checkpoint.manager.time.monotonic", lambda: clock[0])
    make_mesh(Layout(), torch.device("cpu"))
    checkpoints = Checkpoints(LocalStorage(tmp_path), Retention(), "full")

    def saver(**keys):
        return Saver(CheckpointSection(storage=None, **keys), checkpoints, lambda: None, lambda step, path: None)

    by_default, never = saver(), saver(interval_minutes=0)
    clock[0] += 29 * 60
    assert not by_default.overdue
    clock[0] += 61
    assert by_default.overdue
    assert not never.overdue
    by_default.save(7, State({"a": torch.ones(3)}, {}))
    assert not by_default.overdue


def test_a_run_saves_by_time(make_job, train, monkeypatch):
    monkeypatch.setattr(Saver, "overdue", property(lambda self: True))
    summary = train(make_job(steps=3, checkpoint={"interval": 0, "keep": 0}))
    assert sorted(path.name for path in (summary.folder / "checkpoints").glob("step-*")) == [
        "step-1",
        "step-2",
        "step-3",
    ]


class TestAnAsynchronousSave:
    SECTION = CheckpointSection(async_save=True, storage=None)

    @pytest.fixture
    def saver(self, tmp_path):
        make_mesh(Layout(), torch.device("cpu"))
        saved = []
        checkpoints = Checkpoints(GatedStorage(tmp_path), Retention(keep=1), "full")
        saver = Saver(self.SECTION, checkpoints, lambda: None, lambda step, path: saved.append((step, path.name)))
        saver.saved = saved
        yield saver
        GATE.set()
        saver.settle()
        saver.close()

    def test_holds_the_step_that_asked_though_everything_changes_at_once(self, saver, tmp_path):
        tensors = {"a": torch.arange(6.0).view(2, 3).T, "count": torch.tensor(3), "none": torch.zeros(0, 4)}
        values = {"list": [1, 2], "number": 3}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        saver.save(7, State(tensors, values))
        for tensor in tensors.values():
            tensor.fill_(-1)
        values["list"].append("later")
        assert saver.writing
        GATE.set()
        saver.settle()
        assert same(tensors_of(tmp_path / "step-7"), before)
        assert json.loads((tmp_path / "step-7/manifest.json").read_text())["list"] == [1, 2]
        assert saver.saved == [(7, "step-7")]

    def test_uses_its_memory_again(self, saver):
        GATE.set()
        tensors = {"a": torch.randn(1000)}
        saver.save(1, State(tensors, {}))
        memory = saver._staging.parts["a"]
        saver.save(2, State(tensors, {}))
        assert saver._staging.parts["a"] is memory
        saver.save(3, State({"a": torch.randn(5)}, {}))
        assert saver._staging.parts["a"].shape == (5,)

    def test_waits_for_the_one_before(self, saver, tmp_path):
        saver.save(1, State({"a": torch.ones(3)}, {}))
        threading.Timer(0.3, GATE.set).start()
        saver.save(2, State({"a": torch.zeros(3)}, {}))
        assert saver.saved == [(1, "step-1")]
        saver.settle()
        assert tensors_of(tmp_path / "step-2")["a"].sum() == 0

    def test_is_waited_for_when_it_is_the_last(self, saver, tmp_path):
        threading.Timer(0.3, GATE.set).start()
        saver.save(1, State({}, {}), final=True)
        assert not saver.writing
        assert saver.saved == [(1, "step-1")]


def asynchronous(**settings):
    return {"interval": 2, "async_save": True, "keep": 0, "storage": Gated(), **settings}


class TestARunThatSavesWhileItTrains:
    def test_sees_the_commit_at_a_later_step(self, make_job, train, savers):
        @define(kw_only=True, slots=False)
        class Steps(Watch):
            def on_step_end(self, context):
                assert (context.folder / "checkpoints/step-3").exists() == (context.step > 5)
                self.events.append(f"step {context.step}")
                if context.step == 5:
                    GATE.set()
                    wait_for(savers[-1])

        hook = Steps()
        train(make_job(steps=7, checkpoint=asynchronous(interval=3)), hook)
        started = ["step 1", "step 2", "step 3", "step 4", "step 5"]
        assert hook.events[:7] == [*started, (3, "step-3"), "step 6"]
        assert hook.events[-1] == (7, "step-7")

    def test_equals_one_that_waits(self, make_job, train, lines):
        GATE.set()
        found = train(make_job(steps=7, job={"name": "async"}, checkpoint=asynchronous()))
        waited = train(make_job(steps=7, job={"name": "sync"}, checkpoint={"interval": 2, "keep": 0}))
        assert curve(lines, found) == curve(lines, waited)
        for step in (2, 4, 6, 7):
            folders = [summary.folder / f"checkpoints/step-{step}" for summary in (found, waited)]
            assert same(*map(tensors_of, folders))

    def test_has_its_metrics_on_the_disk_before_the_commit(self, make_job, train, monkeypatch):
        """At the moment of each commit, the file has the lines up to the step, and they were flushed to the disk."""
        synced, found = {}, []
        fsync, commit = os.fsync, LocalStorage.commit

        def note_sync(descriptor):
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            synced[os.path.basename(path)] = os.path.getsize(path)

        def note_commit(self, step):
            text = (self.path(step).parents[1] / "metrics.jsonl").read_text()[: synced["metrics.jsonl"]]
            found.append((step, [r["step"] for line in text.splitlines() if "loss" in (r := json.loads(line))]))
            return commit(self, step)

        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(LocalStorage, "commit", note_commit)
        GATE.set()
        train(make_job(steps=5, checkpoint=asynchronous(), eval={"interval": 1}))
        assert [step for step, _ in found] == [2, 4, 5]
        assert all(steps[-1] >= step for step, steps in found)

    def test_prunes_when_a_save_commits(self, make_job, train):
        GATE.set()
        summary = train(make_job(steps=7, checkpoint=asynchronous(keep=2)))
        assert sorted(path.name for path in (summary.folder / "checkpoints").iterdir()) == ["step-6", "step-7"]

    def test_waits_for_the_save_when_it_is_stopped(self, make_job, train):
        @define(kw_only=True, slots=False)
        class Stop(TrainingHook):
            def on_step_end(self, context):
                if context.step == 2:
                    context.request_stop("enough")
                    threading.Timer(0.3, GATE.set).start()

        watch = Watch()
        summary = train(make_job(steps=7, checkpoint=asynchronous()), Stop(), watch)
        assert summary.stopped == "enough"
        assert watch.events == [(2, "step-2")]

    def test_waits_for_the_save_when_it_fails(self, make_job, train, tmp_path):
        @define(kw_only=True, slots=False)
        class Crash(TrainingHook):
            def on_step_begin(self, context):
                if context.step == 4:
                    threading.Timer(0.3, GATE.set).start()
                    raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            train(make_job(steps=7, checkpoint=asynchronous()), Crash())
        assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]

    def test_tells_of_a_failed_save_when_it_fails_itself(self, make_job, train, monkeypatch):
        @define(kw_only=True, slots=False)
        class Crash(TrainingHook):
            def on_step_begin(self, context):
                if context.step == 3:
                    threading.Timer(0.3, GATE.set).start()
                    raise RuntimeError("power cut")

        monkeypatch.setattr(LocalStorage, "commit", fail)
        with pytest.raises(RuntimeError, match="power cut") as caught:
            train(make_job(steps=7, checkpoint=asynchronous()), Crash())
        assert not lacks(caught.value.__notes__[-1], "step 2", "no more room")

    def test_reports_a_failure_at_the_next_step(self, make_job, train, monkeypatch, savers):
        @define(kw_only=True, slots=False)
        class Count(TrainingHook):
            steps: int = field(init=False, default=0)

            def on_step_end(self, context):
                self.steps = context.step
                if context.step == 4:
                    GATE.set()
                    wait_for(savers[-1])

        monkeypatch.setattr(LocalStorage, "commit", fail)
        count = Count()
        with pytest.raises(CheckpointError, match=naming("step 3", "no more room")):
            train(make_job(steps=7, checkpoint=asynchronous(interval=3)), count)
        assert count.steps == 4


def fail(self, step):
    raise OSError(28, "no more room")


def test_ranks_see_a_commit_at_the_same_step_though_one_is_slower(make_job, train, tmp_path, monkeypatch):
    write = TensorWriter._write

    def slow(*arguments):
        time.sleep(0.3 * torch.distributed.get_rank())
        return write(*arguments)

    @define(kw_only=True, slots=False)
    class Seen(TrainingHook):
        step: int = field(init=False, default=0)
        seen: list = field(init=False, factory=list)

        def on_step_begin(self, context):
            self.step = context.step
            time.sleep(0.02)

        def on_checkpoint_save(self, context):
            self.seen.append((context.step, self.step))

    monkeypatch.setattr(TensorWriter, "_write", slow)
    GATE.set()
    job = make_job(steps=40, checkpoint={"interval": 0, "early_steps": 2, "async_save": True})

    def work(rank):
        hook = Seen()
        train(job, hook)
        return hook.seen

    first, second = run_on_ranks(2, work)
    assert first == second
    assert [step for step, _ in first] == [1, 2, 40]
    assert first[1][1] > 3, "training went on"
    run = SimpleNamespace(folder=tmp_path / "run")
    assert tensors_of(run.folder / "checkpoints/step-2").keys() == tensors_of(run.folder / "checkpoints/step-40").keys()
