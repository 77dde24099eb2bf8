"""Which checkpoints are saved by number, and which are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from forge_core.checkpoint.manager import Checkpoints, Retention, State
from forge_core.checkpoint.storage import LocalStorage
from forge_core.contracts.components import AnyFloat, EvaluationComponent, TrainingHook
from forge_testing.refusals import naming, refuses

STEPS = st.lists(st.integers(0, 200), unique=True).map(sorted)
LOSSES = st.dictionaries(st.integers(0, 200), st.floats(0, 10))
NUMBERS = st.integers(0, 12)
RULES = st.builds(
    Retention,
    keep=NUMBERS,
    keep_every=NUMBERS,
    keep_best=NUMBERS,
    early_steps=st.integers(0, 64),
    at_start=st.booleans(),
)


def kept(rules, steps, metrics):
    return [step for step in steps if step not in rules.to_delete(steps, metrics)]


class TestTheRule:
    @given(RULES, STEPS, LOSSES)
    def test_deletes_only_what_exists_and_not_all_of_it(self, rules, steps, metrics):
        doomed = rules.to_delete(steps, metrics)
        assert set(doomed) <= set(steps)
        assert kept(rules, steps, metrics) or not steps

    @given(RULES, STEPS, LOSSES)
    def test_comes_to_rest(self, rules, steps, metrics):
        left = kept(rules, steps, metrics)
        assert rules.to_delete(left, metrics) == []

    @given(RULES, STEPS, LOSSES)
    def test_keeps_the_newest(self, rules, steps, metrics):
        newest = steps[-rules.keep :] if rules.keep else steps
        assert set(newest) <= set(kept(rules, steps, metrics))

    @given(RULES, STEPS, LOSSES)
    def test_keeps_the_best_whatever_comes_later(self, rules, steps, metrics):
        left = kept(rules, steps, metrics)
        gone = [metrics[step] for step in steps if step in metrics and step not in left]
        better = [step for step in left if step in metrics and all(metrics[step] <= loss for loss in gone)]
        assert not gone or len(better) >= rules.keep_best

    @given(RULES, STEPS, STEPS, LOSSES)
    def test_keeps_forever_what_it_keeps_forever(self, rules, steps, later, metrics):
        forever = {step for step in steps if rules.keeps_forever(step)}
        assert forever <= set(kept(rules, sorted({*steps, *later}), metrics))

    @given(RULES, STEPS, LOSSES)
    def test_asking_for_more_never_deletes_more(self, rules, steps, metrics):
        from attrs import evolve

        more = evolve(rules, keep_best=rules.keep_best + 1, at_start=True, early_steps=2 * rules.early_steps)
        assert set(more.to_delete(steps, metrics)) <= set(rules.to_delete(steps, metrics))

    def test_in_an_example(self):
        rules = Retention(keep=2, keep_every=40, keep_best=1, early_steps=4, at_start=True)
        steps = [0, 1, 2, 4, 10, 20, 30, 40, 50, 60, 70]
        assert kept(rules, steps, {10: 3.0, 20: 1.0, 30: 2.0}) == [0, 1, 2, 4, 20, 40, 60, 70]

    def test_of_equal_ones_the_earlier_is_the_best(self):
        assert kept(Retention(keep=1, keep_best=1), [1, 2, 3, 4], {1: 2.0, 2: 1.0, 3: 1.0, 4: 5.0}) == [2, 4]


def saved(summary):
    return sorted(int(path.name.removeprefix("step-")) for path in (summary.folder / "checkpoints").iterdir())


def test_the_newest_are_kept(make_job, train):
    assert saved(train(make_job(steps=6, checkpoint={"interval": 1, "keep": 2}))) == [5, 6]


def test_zero_keeps_all(make_job, train):
    assert saved(train(make_job(steps=6, checkpoint={"interval": 1, "keep": 0}))) == [1, 2, 3, 4, 5, 6]


def test_every_kth_is_kept(make_job, train):
    checkpoint = {"interval": 1, "keep": 1, "keep_every": 3}
    assert saved(train(make_job(steps=8, checkpoint=checkpoint))) == [3, 6, 8]


def test_early_steps_are_saved_at_powers_of_two_and_kept(make_job, train):
    checkpoint = {"interval": 5, "keep": 1, "early_steps": 9}
    assert saved(train(make_job(steps=17, checkpoint=checkpoint))) == [1, 2, 4, 8, 17]


def test_the_start_is_saved_on_request_and_kept(make_job, train):
    assert saved(train(make_job(steps=3, checkpoint={"interval": 1, "keep": 1, "at_start": True}))) == [0, 3]


def test_the_end_is_saved_in_any_case(make_job, train):
    assert saved(train(make_job(steps=3, checkpoint={"interval": 0}))) == [3]


@frozen(kw_only=True)
class Losses(EvaluationComponent):
    """A loss as written down, by step."""

    values: tuple[AnyFloat, ...]

    def evaluate(self, context):
        return {"eval/loss": self.values[context.step - 1], "eval/odd": -self.values[context.step - 1]}


class Crash(TrainingHook):
    def __init__(self, at):
        self.at = at

    def on_step_begin(self, context):
        if context.step == self.at:
            raise RuntimeError("power cut")


class TestTheBest:
    LOSSES = (5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0)

    def job(self, make_job, losses=LOSSES, every=1, **checkpoint):
        settings = {"interval": 1, "keep": 1, "keep_best": 2, **checkpoint}
        evaluations = {"held_out": Losses(values=losses)}
        return make_job(steps=7, eval={"interval": every}, checkpoint=settings, evaluations=evaluations)

    def test_are_kept_by_evaluation_loss(self, make_job, train):
        assert saved(train(self.job(make_job))) == [2, 4, 7]

    def test_are_known_after_a_restart(self, make_job, train):
        with pytest.raises(RuntimeError, match="power cut"):
            train(self.job(make_job), Crash(5))
        assert saved(train(self.job(make_job), Crash(99))) == [2, 4, 7]

    def test_may_go_by_another_metric(self, make_job, train):
        assert saved(train(self.job(make_job, best_metric="eval/odd"))) == [6, 7]

    def test_an_evaluation_counts_for_the_first_checkpoint_after_it(self, make_job, train):
        """Steps 2 and 3 both go by the evaluation of step 2, the best one: only step 2 is kept for it."""
        losses = (9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0)
        assert saved(train(self.job(make_job, losses, every=2))) == [2, 4, 7]

    def test_a_loss_that_is_not_a_number_is_never_the_best(self, make_job, train):
        losses = (float("nan"), 1.0, float("-inf"), 2.0, float("nan"), 6.0, 7.0)
        assert saved(train(self.job(make_job, losses))) == [2, 4, 7]

    def test_the_manifest_has_the_newest_evaluation(self, make_job, train):
        folder = train(self.job(make_job, every=3, keep=0)).folder / "checkpoints"
        noted = [json.loads((folder / f"step-{n}/manifest.json").read_text())["evaluation"] for n in (2, 3, 5)]
        assert noted == [{}, *2 * [{"step": 3, "metrics": {"eval/loss": 4.0, "eval/odd": -4.0}}]]

    def test_an_evaluation_is_not_forgotten_by_a_restart(self, make_job, train):
        job = self.job(make_job, every=3, keep=0)
        with pytest.raises(RuntimeError, match="power cut"):
            train(job, Crash(5))
        folder = train(job, Crash(99)).folder / "checkpoints"
        assert json.loads((folder / "step-5/manifest.json").read_text())["evaluation"]["step"] == 3

    def test_a_metric_that_no_evaluation_gives_is_named(self, make_job, train):
        with pytest.warns(UserWarning, match=naming("best_metric", "'eval/los'", "eval/loss, eval/odd")):
            train(self.job(make_job, best_metric="eval/los"))

    def test_need_evaluations_during_the_run(self, make_job, train):
        with refuses("checkpoint.keep_best", "eval.interval"):
            train(make_job(checkpoint={"keep_best": 2}))


class TestDeleting:
    def checkpoints(self, tmp_path, **rules):
        return Checkpoints(LocalStorage(tmp_path), Retention(**rules), "full")

    def test_what_was_just_saved_stays_though_damaged_ones_are_newer(self, tmp_path):
        """As after a run passed over a damaged checkpoint and continued from the one before. Sizes do not show it."""
        everything = self.checkpoints(tmp_path)
        for step in (2, 4):
            everything.save(step, State({}, {}))
        index = tmp_path / "step-4/index.json"
        index.write_bytes(b"x" * index.stat().st_size)
        self.checkpoints(tmp_path, keep=1).save(3, State({}, {}))
        assert everything.storage.steps() == [3, 4]
        with pytest.warns(UserWarning, match=naming("step-4/index.json", "SHA-256")):
            assert everything.newest()[0].name == "step-3"

    def test_what_dead_saves_left_is_removed_by_the_next(self, tmp_path):
        for name in ("step-7.tmp", "step-9-replaced.tmp"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
        self.checkpoints(tmp_path).save(8, State({}, {}))
        assert [path.name for path in tmp_path.iterdir()] == ["step-8"]

    def test_a_step_can_be_saved_anew(self, tmp_path):
        import torch

        checkpoints = self.checkpoints(tmp_path)
        checkpoints.save(8, State({"x": torch.zeros(3)}, {"which": "first"}))
        checkpoints.save(8, State({"x": torch.ones(3)}, {"which": "second"}))
        assert checkpoints.newest()[1]["which"] == "second"
        assert [path.name for path in tmp_path.iterdir()] == ["step-8"]

    def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(self, tmp_path, monkeypatch):
        def refuse(self, step):
            raise OSError(30, "Read-only file system")

        checkpoints = self.checkpoints(tmp_path, keep=1)
        checkpoints.save(1, State({}, {}))
        monkeypatch.setattr(LocalStorage, "delete", refuse)
        with pytest.warns(UserWarning, match=naming("Read-only file system")):
            checkpoints.save(2, State({}, {}))
        assert checkpoints.storage.steps() == [1, 2]

    def test_a_deletion_that_is_cut_short_leaves_no_part_under_the_name_of_a_checkpoint(self, tmp_path, monkeypatch):
        def cut_short(path, **options):
            next(Path(path).iterdir()).unlink()
            raise KeyboardInterrupt

        checkpoints = self.checkpoints(tmp_path)
        checkpoints.save(1, State({}, {"which": "first"}))
        checkpoints.save(2, State({}, {"which": "second"}))
        with monkeypatch.context() as cut:
            cut.setattr(shutil, "rmtree", cut_short)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.storage.delete(1)
        assert checkpoints.storage.steps() == [2]
        checkpoints.save(3, State({}, {}))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
