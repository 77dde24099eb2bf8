"""The table `[plugins.freeze]`: when its stages are, what they train, and mistakes that are found before a run."""

from __future__ import annotations

import re

import pytest

from forge_core import JobError, TrainingHook
from forge_core.cli import main
from forge_core.contracts.layout import Layout
from forge_core.parallel.mesh import leave_group
from forge_plugin_freeze import Freeze, Stage
from forge_plugin_transformer import Transformer
from forge_testing import TinyModel, job_problems
from forge_testing.refusals import at, check_problems, lacks, problems_of, refuses
from forge_testing.tiny import tiny_job

TIED = Transformer(vocab_size=32, dim=16, layers=1, tie_embeddings=True)
JOB = """
[train]
steps = 10
global_batch_size = 4
seq_len = 8
device = "cpu"
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
[plugins.freeze]
[[plugins.freeze.stages]]
steps = 4
train = ["{first}"]
[[plugins.freeze.stages]]
freeze = ["{left_out}"]
"""


def refusal(build, make_job, *stages, **changes):
    with pytest.raises(JobError) as error:
        build(make_job(plugins={"freeze": Freeze(stages=stages)}, steps=10, **changes))
    return error.value.problems


@pytest.mark.parametrize(("step", "stage"), [(1, 0), (3, 0), (4, 1), (5, 1), (6, 2), (99, 2)])
def test_a_stage_ends_with_its_last_step(step, stage):
    assert Freeze(stages=(Stage(steps=3), Stage(steps=2), Stage())).stage_of(step) == stage


def test_all_names_of_train_but_those_of_freeze(build, make_job):
    run = build(make_job(plugins={"freeze": Freeze(stages=(Stage(train=("*",), freeze=("*.bias", "head.*")),))}))
    frozen = {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {n for n, _ in run.model.named_parameters() if n.endswith(".bias") or n == "head.weight"}


def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest(build, make_job):
    problems = refusal(build, make_job, Stage(train=("layer.0.*",)))
    check_problems(problems, at("plugins.freeze.stages.0.train", "'layer.0.*'", "'layers.0.*'"))
    problems = refusal(build, make_job, Stage(freeze=("hed.*",)))
    check_problems(problems, at("plugins.freeze.stages.0.freeze", "'hed.*'", "'head.*'"))


def test_the_check_of_a_job_knows_the_names_of_its_model(make_job):
    problems = problems_of(make_job(plugins={"freeze": Freeze(stages=(Stage(train=("layer.0.*",)),))}))
    check_problems(problems, at("plugins.freeze.stages.0.train", "'layer.0.*'", "'layers.0.*'"))


def test_a_stage_that_trains_nothing_is_refused(build, make_job):
    problems = refusal(build, make_job, Stage(steps=3), Stage(train=("head.*",), freeze=("*.weight",)))
    check_problems(problems[:1], at("plugins.freeze.stages.1", "nothing"))


def test_half_of_tied_parameters_is_refused_and_both_are_fine(build, make_job):
    problems = refusal(build, make_job, Stage(train=("layers.*", "head.*")), model=TIED)
    check_problems(problems, at("plugins.freeze.stages.0.train", "head.weight", "embedding.weight"))
    build(make_job(plugins={"freeze": Freeze(stages=(Stage(train=("head.*", "embedding.*")),))}, model=TIED))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((Stage(), Stage()), at("stages.0.steps", "missing")),
        ((Stage(steps=10), Stage()), at("stages.1", "10 steps")),
        ((Stage(steps=4), Stage(steps=4)), at("stages.1.steps", "8 steps", "train.steps is 10")),
        ((Stage(steps=4), Stage(steps=7)), at("stages.1.steps", "11 steps", "train.steps is 10")),
    ],
)
def test_stages_that_do_not_fit_the_run_are_refused(tmp_path, catalog, stages, expected):
    job = tiny_job(str(tmp_path), catalog, steps=10)
    assert not problems_of(job)
    check_problems(Freeze(stages=stages).problems(job, Layout()), expected)


def test_the_last_stage_may_end_with_the_run(tmp_path, catalog):
    plugins = {"freeze": Freeze(stages=(Stage(steps=4), Stage(steps=6)))}
    assert not job_problems(tiny_job(str(tmp_path), catalog, steps=10, plugins=plugins))


def test_what_the_model_froze_stays_frozen(build, make_job):
    class Adapters(Freeze):
        """Stands for a plugin that freezes a part for good, inside of the stages."""

        def _select(self, model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith("layers.0"))
            super()._select(model)

    run = build(make_job(plugins={"freeze": Adapters(stages=(Stage(),))}))
    frozen = {name for name, parameter in run.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in run.model.named_parameters() if name.startswith("layers.0")}
    with refuses("plugins.freeze.stages.0.train", "'layers.0.*'", "frozen"):
        build(make_job(plugins={"freeze": Adapters(stages=(Stage(train=("layers.0.*",)),))}))


def test_the_summary_says_what_each_stage_trains(make_job, train):
    text = []
    plugins = {"freeze": Freeze(stages=(Stage(train=("layers.*",), freeze=("*.bias",), steps=1), Stage()))}
    train(make_job(plugins=plugins), echo=lambda line: text.append(str(line)))
    rows = [line for line in "\n".join(text).splitlines() if line.startswith("freeze ")]
    assert rows == [
        "freeze 0     steps 1 to 1 train 2,048 of 3,168 parameters (64.6%) (layers.* but *.bias)",
        "freeze 1     steps 2 to 4 train 3,168 of 3,168 parameters (100.0%) (*)",
    ]


def planned(folder, capsys, **stages):
    """Returns the report of `forge-run plan`, and its figures by their names, in bytes."""
    leave_group()
    (folder / "job.toml").write_text(JOB.format(**stages))
    assert main(["plan", str(folder / "job.toml")]) == 0
    out = capsys.readouterr().out
    units = {"B": 1, "kB": 1e3, "MB": 1e6}
    rows = re.findall(r"^  (\w[\w ]*?) {2,}([\d.]+) (B|kB|MB) ", out, re.MULTILINE)
    return out, {name: float(value) * units[unit] for name, value, unit in rows}


def test_plan_says_it_too_and_estimates_the_stage_that_trains_most(tmp_path, capsys):
    out, figures = planned(tmp_path, capsys, first="embedding.*", left_out="layers.*")
    assert "freeze 0   steps 1 to 4 train 512 of 3,168 parameters (16.2%)\n" in out
    assert not lacks(out, "freeze 1", "steps 5 to 10", "1,056 of 3,168", "33.3%", "all estimates")
    assert figures["gradients"] == 4220  # 1,056 x 4 bytes


def test_what_is_frozen_costs_neither_gradients_nor_state_nor_activations(tmp_path, capsys):
    _, top = planned(tmp_path, capsys, first="head.*", left_out="[el]*")
    _, everything = planned(tmp_path, capsys, first="head.*", left_out="head.weigh?")
    assert top["gradients"] == pytest.approx(4 * (512 + 32), abs=5)  # head and norm
    assert top["optimizer state"] < 0.25 * everything["optimizer state"]
    assert top["activations"] < 0.5 * everything["activations"]


def test_the_model_inside_of_a_model_has_no_stages(build, make_job):
    class Around(TinyModel):
        """Builds a model of its kind inside, as `vision_language` does."""

        def build(self, context):
            context.build(TinyModel(layers=1))
            return super().build(context)

    build(make_job(model=Around(layers=2), plugins={"freeze": Freeze(stages=(Stage(train=("layers.1.*",)),))}))


def test_it_is_a_hook_of_the_run(make_job, catalog, build):
    run = build(make_job(plugins={"freeze": Freeze(stages=(Stage(),))}))
    (name,) = run.hooks.hooks
    assert name == "plugins.freeze.StagedFreezing"
    assert isinstance(run.hooks.hooks[name], TrainingHook)
