"""A run that was cut and continued equals the run that was not, bit for bit: one feature at a time, in this process.

Real processes, killed at random moments, are in `tests/faults`.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from attrs import define, evolve, field, frozen
from harness.outcome import differences, read_outcome
from parts.averaging import Averaging
from parts.hooks import Remembering, Seen

from forge_core import Catalog, Plugin, TrainingHook, hookimpl
from forge_core.checkpoint.storage import Local, LocalStorage
from forge_core.contracts.components import DatasetComponent, SchedulerComponent
from forge_core.job import Phase
from forge_kit.data.document_streams import StreamedDocument, packed
from forge_plugin_transformer import GroupedQueryAttention, MultiTokenPrediction, Transformer
from forge_testing import Numbers, TinyModel
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.outcomes import Die, PowerCut, Stop
from forge_testing.processes import run_on_ranks
from forge_testing.tiny import VOCABULARY

TEXT = Path(__file__).parent.parent / "faults/parts/text"
STEPS = 7
OFTEN = [Stop(step=3), Die(step=5), Stop(step=6)]
"""How a run is interrupted: it stops after a step, which is saved, or dies at the end of one, which is not."""


@define(kw_only=True, slots=False)
class SkipSome(TrainingHook):
    """Leaves out every third update, as it remembers."""

    may_skip = True
    count: int = field(init=False, default=0)

    def on_gradients(self, context):
        self.count += 1
        if self.count % 3 == 0:
            context.skip_update("the third")


@define(kw_only=True, slots=False)
class Weighing(Plugin):
    """A plugin with state that shapes the training, through a training hook of its own."""

    factor: float = field(init=False, default=1.0)

    @hookimpl
    def forge_training_hooks(self, job):
        return [Weigh(plugin=self)]


@define(kw_only=True, slots=False)
class Weigh(TrainingHook):
    plugin: Weighing

    def on_gradients(self, context):
        self.plugin.factor *= 0.9
        for parameter in context.model.parameters():
            parameter.grad.mul_(self.plugin.factor)


@frozen(kw_only=True)
class Falling(SchedulerComponent):
    """A rate that depends on the length of the run."""

    def build(self, context):
        return lambda step, steps: 1 - step / steps


@frozen(kw_only=True)
class SlowDisk(Local):
    """Training is steps further when the first byte is written."""

    def build(self, context):
        return SlowStorage(context.folder / self.folder)


class SlowStorage(LocalStorage):
    def begin(self, step):
        time.sleep(0.03)
        return super().begin(step)


def features():
    """Name -> changes of the job that it takes. Made afresh for each process: hooks and plugins live in the job."""
    three = (Numbers(weight=3.0), Numbers(weight=2.0, start=70, sequences=5), Numbers(weight=0.5, start=80))
    named = tuple(evolve(source, name=name) for source, name in zip(three, "abc", strict=True))
    phases = (Phase(start_step=2, weights={"c": 4.0}), Phase(start_tokens=128, weights={"a": 0.0}, lr_factor=0.3))
    mtp = MultiTokenPrediction(weight=Falling())
    predicting = Transformer(vocab_size=32, dim=16, attention=GroupedQueryAttention(heads=2), mtp=mtp)
    return {
        "accumulation": {"micro_batch_size": 1},
        "bf16": {"precision": "bf16"},
        "dropout": {"model": TinyModel(dropout=0.4), "micro_batch_size": 2},
        "mixture": {"data": {"sources": three}},
        "mixture, loaded by workers": {"data": {"sources": three, "workers": 2}, "micro_batch_size": 2},
        "phases": {"data": {"sources": named, "phases": phases}},
        "phases, loaded by workers": {"data": {"sources": named, "phases": phases, "workers": 2}},
        "asynchronous saves": {"checkpoint": {"interval": 1, "async_save": True, "storage": SlowDisk()}},
        "schedule": {"scheduler": Falling()},
        "evaluation in between": {"eval": {"interval": 2}},
        "evaluation at the start": {"eval": {"at_start": True}},
        "hook with numbers and tensors": {"hooks": {"remembering": Remembering()}, "eval": {"interval": 2}},
        "skipped updates": {"hooks": {"skip": SkipSome()}},
        "plugin with state": {"plugins": {"weighing": Weighing()}},
        "multi-token prediction": {"model": predicting},
        "optimizer with modes": {"optimizer": Averaging(), "eval": {"interval": 1}},
    }


def installed(kind):
    """The qualified type of every installed component of a kind."""
    return [offer.qualified for offer in Catalog.installed().offers(kind)]


@pytest.fixture
def outcome(make_job, train, tmp_path):
    """Train, with interruptions; gives all that the run left, but not which checkpoints are there: a stop adds one."""

    def run(changes, *interruptions):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for interruption in (*interruptions, None):
            with suppress(PowerCut):
                job = make_job(steps=STEPS, gc_interval=0, **changes())
                summary = train(job, Seen(), *([interruption] if interruption else []))
                assert bool(summary.stopped) == isinstance(interruption, Stop)
        return {what: value for what, value in read_outcome(tmp_path / "run").items() if what != "checkpoints"}

    return run


def left_by(summary):
    """All that the run left, but not which checkpoints are there: a stop adds one."""
    left = read_outcome(summary.folder)
    manifest = {key: value for key, value in left["manifest"].items() if key != "job"}
    return left | {"manifest": manifest, "checkpoints": None}


test_resumption = resumption_law(
    *(
        Interrupted(
            name,
            changes=lambda name=name: {"steps": STEPS, **features()[name]},
            hooks=lambda: [Seen()],
            interruptions=[[Stop(step=1), Die(step=4), Stop(step=6)]],
            also=left_by,
        )
        for name in features()
    )
)


@pytest.mark.parametrize("packing", installed("packing"))
def test_every_installed_packing_continues_exactly(outcome, catalog, packing, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    model, text = catalog.load("model", "transformer"), catalog.load("dataset", "text")

    def changes():
        return {
            "model": model(dim=16, layers=1),
            "seq_len": 32,
            "data": {
                "tokenizer": catalog.load("tokenizer", "bytes")(),
                "packing": catalog.load("packing", packing)(),
                "sources": (text(path=str(TEXT / "notes.jsonl")), text(path=str(TEXT / "*.txt"), weight=0.3)),
            },
        }

    assert differences(outcome(changes), outcome(changes, *OFTEN)) == []


def test_a_run_that_dies_in_its_first_step_continues_from_step_0(outcome):
    def changes():
        return features()["hook with numbers and tensors"] | {
            "checkpoint": {"at_start": True},
            "eval": {"interval": 2, "at_start": True},
        }

    assert differences(outcome(changes), outcome(changes, Die(step=1), Die(step=1))) == []


@pytest.mark.parametrize("feature", ["mixture", "hook with numbers and tensors", "optimizer with modes"])
def test_saving_at_every_step_and_before_the_first_changes_nothing(outcome, feature):
    def seldom():
        return features()[feature]

    def always():
        return features()[feature] | {"checkpoint": {"interval": 1, "at_start": True, "keep": 1}}

    found = differences(outcome(seldom), outcome(always))
    assert [line for line in found if not line.startswith("manifest.job")] == []


def test_evaluating_with_an_optimizer_that_has_modes_changes_no_state(outcome):
    def seldom():
        return {"optimizer": Averaging()}

    def often():
        return {"optimizer": Averaging(), "eval": {"interval": 1, "at_start": True}}

    assert outcome(seldom)["tensors"] == outcome(often)["tensors"]


def test_a_finished_run_that_is_started_again_stays_as_it_is(outcome, make_job, train, tmp_path):
    before = outcome(dict)
    summary = train(make_job(steps=STEPS, gc_interval=0), Seen())
    after = read_outcome(summary.folder)
    assert differences(before, {what: after[what] for what in before}) == []
    assert summary.evaluation.keys() >= {"eval/loss"}


def test_a_finished_run_that_is_started_again_deletes_what_a_kill_left(make_job, train, tmp_path):
    def job():
        return make_job(steps=3, gc_interval=0, checkpoint={"interval": 1, "keep": 1})

    train(job())
    kept = tmp_path / "run/checkpoints"
    shutil.copytree(kept / "step-3", kept / "step-2")  # a kill came before the deletion
    shutil.copytree(kept / "step-3", kept / "step-1.tmp")  # or in the middle of one
    train(job())
    assert [path.name for path in kept.iterdir()] == ["step-3"]


def test_a_process_that_dies_while_it_shortens_the_metrics_loses_no_line(
    outcome, make_job, train, tmp_path, monkeypatch
):
    def die(*args):
        raise PowerCut

    before = outcome(dict)
    monkeypatch.setattr("forge_core.metrics.jsonl.os.replace", die)
    with pytest.raises(PowerCut):
        train(make_job(steps=STEPS, gc_interval=0), Seen())
    assert read_outcome(tmp_path / "run")["metrics"] == before["metrics"]


class Reading:
    """Lane n has documents of its own, each of them once."""

    held_out = None
    lanes = 4

    def read(self, lane, position):
        number = (position or {"next": 0})["next"]
        while True:
            tokens = np.random.default_rng([lane, number]).integers(1, VOCABULARY, 9)
            yield StreamedDocument(np.append(tokens, 0), None, {"next": number})
            number += 1


@frozen(kw_only=True)
class Lanes(DatasetComponent):
    def build(self, context):
        return packed(Reading(), context)


def test_lanes_that_other_ranks_have_read_go_on_where_these_left_off(make_job, train, lines):
    def job(name, steps):
        return make_job(steps=steps, job={"name": name}, data={"sources": (Lanes(),)})

    train(job("whole", 6))
    train(job("cut", 2))
    run_on_ranks(2, lambda rank: train(job("cut", 4)).step)
    whole, cut = train(job("whole", 6)), train(job("cut", 6))
    losses = [record["loss"] for record in lines(whole)]
    assert [record["loss"] for record in lines(cut)] == pytest.approx(losses, abs=1e-6)
