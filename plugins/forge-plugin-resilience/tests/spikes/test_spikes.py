"""Spikes in runs: what is found, what is done about it, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import define, evolve
from spiked_runs import AT, STEPS, Disturb, Note, Poison

from forge_core import TrainingHook
from forge_core.checkpoint.storage import read_manifest
from forge_core.contracts.errors import ExitCode, NonFiniteError
from forge_testing.refusals import at, check_problems, lacks, naming, problems_of


def by_step(records):
    return {record["step"]: record for record in records}


def test_a_run_whose_weights_were_disturbed_goes_back_and_ends_where_a_clean_one_does(spiked, spikes, train, lines):
    texts, note = [], Note()
    clean = lines(train(spiked(None, "clean")))[-1]["loss"]
    lost = lines(train(spiked(None, "lost"), Disturb()))[-1]["loss"]
    records = by_step(lines(train(spiked(spikes()), Disturb(), note, echo=texts.append)))
    assert lost > 2 * clean, "without the hook the run is lost"
    assert records[STEPS]["loss"] < 1.5 * clean
    assert note.back == [(AT + 3, AT - 4)]
    assert [step for step, record in records.items() if record.get("skipped")] == [AT + 1, AT + 2, AT + 3]
    assert records.keys() == set(range(1, STEPS + 1)) - {AT + 4, AT + 5, AT + 6}
    assert [records[step]["spikes/roll_backs"] for step in (AT + 2, AT + 3, STEPS)] == [0, 1, 1]
    (spike,) = (text for text in texts if text.startswith(f"step {AT + 1}: "))
    assert not lacks(spike, f"step {AT + 1}", "skipped", "spike of grad_norm", "spike of loss")
    z, norm = records[AT + 1]["spikes/z/grad_norm"], records[AT + 1]["grad_norm"]
    assert not lacks(spike, f"{norm:.4g}", "16 steps", f"z = {z:.1f}", "threshold 12")
    (back,) = (text for text in texts if "went back" in text)
    assert not lacks(back, f"step {AT + 3}", "step 20", "3 in a row", "grad_norm")
    assert not lacks(back, f"steps {AT + 4} to {AT + 6}", "left out")


def test_only_values_of_updates_that_were_made_enter_the_window(spiked, spikes, train, lines):
    hook = spikes()
    records = lines(train(spiked(hook), Disturb()))
    made = [record for record in records if not record.get("skipped")][-16:]
    for name in ("grad_norm", "loss"):
        assert hook.logarithms[name] == [math.log(record[name]) for record in made]


def test_a_value_is_judged_by_those_before_it(spiked, spikes, train, lines):
    from forge_plugin_resilience.spikes import robust_score

    records = lines(train(spiked(spikes(watch=("loss",), warmup_steps=18))))
    assert "spikes/z/loss" not in records[17]
    logarithms = [math.log(record["loss"]) for record in records]
    for number in range(18, STEPS):
        expected = robust_score(records[number]["loss"], logarithms[number - 16 : number]).z
        assert records[number]["spikes/z/loss"] == expected
        assert "spikes/z/grad_norm" not in records[number]


def test_nothing_is_judged_before_there_are_32_values(spiked, spikes, train, lines):
    records = lines(train(spiked(spikes(window=128))))
    assert [r["step"] for r in records if "spikes/z/loss" in r] == list(range(33, STEPS + 1))


@pytest.mark.parametrize("non_finite", ["skip", "ignore"])
def test_what_is_not_finite_is_a_spike_from_the_first_step(spiked, spikes, train, lines, non_finite):
    """Skipped by the engine's policy or by the hook; 3 in a row go back before the policy ends the run at 10."""
    note = Note()
    hook = spikes(warmup_steps=1000, leave_out=0)
    summary = train(spiked(hook, non_finite=non_finite, steps=16), Poison(at=(2, 8, 9, 10)), note)
    records = by_step(lines(summary))
    assert [step for step, record in records.items() if record.get("skipped")] == [2, 8, 9, 10]
    assert records[2]["spikes/z/grad_norm"] == "inf"
    assert note.back == [(10, 5)]
    assert all(map(math.isfinite, hook.logarithms["grad_norm"]))
    assert len(hook.logarithms["grad_norm"]) == 12


def test_a_batch_of_wrong_labels_is_skipped(spiked, spikes, train, lines):
    @define(kw_only=True, slots=False)
    class Garble(TrainingHook):
        def on_step_begin(self, context):
            if context.step == 76:
                for batch in context.batches:
                    batch["labels"].copy_((batch["labels"] + 16) % 32)

    records = by_step(lines(train(spiked(spikes(window=32, threshold=6.0), steps=80), Garble())))
    assert [step for step, record in records.items() if record.get("skipped")] == [76]
    assert records[76]["spikes/z/loss"] > 6 > records[77]["spikes/z/loss"]


def test_warn_changes_nothing_and_says_it(spiked, spikes, train, lines):
    plain = lines(train(spiked(None, "plain"), Disturb()))
    with pytest.warns(UserWarning, match=naming(f"step {AT + 1}", "grad_norm")):
        watched = lines(train(spiked(spikes(action="warn")), Disturb()))
    assert [record["loss"] for record in watched] == [record["loss"] for record in plain]


def test_stop_saves_without_the_update_and_ends_with_code_76(spiked, spikes, train, tmp_path):
    with pytest.raises(NonFiniteError, match=naming(f"step {AT + 1}", "spike")) as caught:
        train(spiked(spikes(action="stop")), Disturb())
    assert caught.value.exit_code == ExitCode.NON_FINITE
    assert read_manifest(tmp_path / f"run/checkpoints/step-{AT + 1}")["progress"]["skipped"] == 1


def test_roll_back_goes_back_at_the_first(spiked, spikes, train):
    note = Note()
    train(spiked(spikes(action="roll_back")), Disturb(), note)
    assert note.back == [(AT + 1, AT - 4)]


def test_a_run_that_has_gone_back_too_often_ends_by_name_and_does_so_again(spiked, spikes, train):
    always = Disturb(at=tuple(range(AT, STEPS)))
    job = spiked(spikes(action="roll_back", max_roll_backs=2, leave_out=0))
    ends = r"spike of .*; rolled back 2 times, as often as max_roll_backs allows; the state is saved"
    with pytest.raises(NonFiniteError, match=rf"^step {AT + 5}: {ends}"):
        train(job, always)
    again = evolve(job, hooks={"spikes": spikes(action="roll_back", max_roll_backs=2, leave_out=0)})
    with pytest.raises(NonFiniteError, match=rf"^step {AT + 6}: {ends}"):
        train(again, always)


def test_without_a_checkpoint_the_update_is_only_skipped(spiked, spikes, train, lines):
    note, checkpoint = Note(), {"interval": 1000}
    with pytest.warns(UserWarning, match=naming(f"step {AT + 1}", "checkpoint", "skipped")):
        records = lines(train(spiked(spikes(action="roll_back"), checkpoint=checkpoint, steps=AT + 1), Disturb(), note))
    assert (records[AT].get("skipped"), note.back) == (1, [])
    with pytest.raises(NonFiniteError, match=naming("10 steps")):
        train(spiked(spikes(action="roll_back"), "other", checkpoint=checkpoint), Disturb(), note)


def test_checkpoints_with_a_spike_next_or_left_behind_are_not_gone_back_to(spiked, spikes, train):
    """Saves at 5, 10, …; each disturbance is found one step later."""
    note = Note()
    hook = spikes(action="roll_back", leave_out=0)
    train(spiked(hook, checkpoint={"keep": 0}), Disturb(at=(20, 24, 26, 35)), note)
    # 20 holds the disturbed weights, which 21 finds. 25 is saved after the run has gone back. 35 is disturbed, too
    assert note.back == [(21, 15), (25, 15), (27, 25), (36, 30)]


def test_two_saves_back_is_the_one_before(spiked, spikes, train):
    note = Note()
    hook = spikes(action="roll_back", roll_back_to=2, leave_out=0)
    train(spiked(hook, checkpoint={"keep": 0}), Disturb(at=(AT, AT + 4, AT + 13)), note)
    # At 29, 20 was left behind, and 25 is the newest; at 38, 30 and 35 were saved since
    assert note.back == [(25, 15), (29, 15), (38, 30)]


def test_weights_that_spike_again_at_once_after_going_back_are_left_for_earlier_ones(spiked, spikes, train):
    """The data of steps 25 to 27 spike from any weights."""
    note = Note()
    hook = spikes(action="roll_back", leave_out=0)
    train(spiked(hook, checkpoint={"keep": 0}), Poison(at=(AT + 1, AT + 2, AT + 3), factor=1e9), note)
    assert note.back == [(25, 20), (26, 15), (27, 10)]


def test_a_hook_that_skips_for_reasons_of_its_own_is_no_spike(spiked, spikes, train):
    @define(kw_only=True, slots=False)
    class Skip(TrainingHook):
        may_skip = True

        def on_gradients(self, context):
            if context.step > AT:
                context.skip_update("as the test says")

    note = Note()
    hook = spikes(action="roll_back")
    train(spiked(hook, steps=AT + 6), Skip(), note)
    assert (note.back, hook.roll_backs) == ([], 0)


def test_the_loss_is_that_of_the_global_batch(make_job, train, lines):
    @define(kw_only=True, slots=False)
    class Keep(TrainingHook):
        def on_train_begin(self, context):
            self.losses = []

        def on_gradients(self, context):
            self.losses.append(context.loss.item())

    keep = Keep()
    records = lines(train(make_job(micro_batch_size=1), keep))
    assert keep.losses == [record["loss"] for record in records]


@pytest.mark.parametrize(
    ("keys", "changes", "expected"),
    [
        ({"watch": ("loss", "loss")}, {}, at("hooks.spikes.watch", "loss, loss")),
        ({"skip_limit": 11}, {}, at("hooks.spikes.skip_limit", "train.non_finite_limit = 10", 11)),
        (
            {"roll_back_to": 2},
            {"checkpoint": {"keep": 1}},
            at("hooks.spikes.roll_back_to", "checkpoint.keep = 1", "2 saves", "keep 3"),
        ),
        (
            {"action": "roll_back"},
            {"checkpoint": {"interval": 0}},
            at("hooks.spikes.action", "checkpoint.interval"),
        ),
    ],
)
def test_what_cannot_work_is_refused(spiked, spikes, keys, changes, expected):
    assert problems_of(spiked(spikes(), **changes if "watch" not in keys else {})) == [] or keys == {}
    check_problems(problems_of(spiked(spikes(**keys), **changes)), expected)


@pytest.mark.parametrize("keys", [{"watch": ("lr",)}, {"watch": ()}, {"window": 4}, {"threshold": 0}])
def test_keys_have_limits(spikes, keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        spikes(**keys)


def test_nothing_is_lost_where_only_losses_are_watched(spiked, spikes, train, lines):
    """A weight that is scaled back by the norm: one wait reads what is watched, and no more is kept."""
    hook = spikes(watch=("grad_norm",))
    train(spiked(hook), Poison(at=(AT,), factor=1e6))
    assert hook.logarithms.keys() == {"grad_norm"}
    assert torch.isfinite(torch.tensor(hook.logarithms["grad_norm"])).all()
