"""The table `[plugins.features]`: towers whose features cannot be kept are refused when a job is checked."""

from __future__ import annotations

import pytest
from attrs import frozen
from kept_runs import FROZEN, job, model
from torch import nn

from forge_core.cli import main
from forge_plugin_freeze import Freeze, Stage
from forge_plugin_vision import Joint, LinearAdapter, TiledViT, VisionLanguage, VisionPart, ViT
from forge_plugin_vision.features import Features
from forge_testing import Numbers, TinyModel
from forge_testing.refusals import at, check_problems, lacks, problems_of
from forge_testing.vision import tiny_language

JOB = """
[train]
steps = 2
global_batch_size = 2
seq_len = 24
device = "cpu"
[model]
type = "vision_language"
[model.language]
dim = 16
layers = 1
vocab_size = 32
[model.language.attention]
heads = 2
[model.vision.encoder]
type = "vit"
dim = 16
layers = 1
heads = 2
patch = 2
size = [4, 4]
[[data.sources]]
type = "forge_testing.vision:RandomImages"
[optimizer]
type = "forge_testing:TinyAdamW"
[plugins.features]
"""


def refusals(folder, **changes):
    return problems_of(job(folder, features=Features(path=str(folder / "features")), **changes))


def test_a_frozen_tower_is_accepted(tmp_path):
    assert refusals(tmp_path) == []


def test_a_stage_that_trains_the_tower_is_refused(tmp_path):
    stages = (Stage(freeze=("vision.encoder.*",), steps=2), Stage(train=("*.positions.weight", "embedding.*")))
    names = ("stage 1", "[plugins.freeze]", "vision.encoder.positions.weight", 'freeze = ["vision.encoder.*"]')
    problems = refusals(tmp_path, plugins={"freeze": Freeze(stages=stages)})
    check_problems(problems, at("plugins.features", *names, "plugins.freeze.stages.1"))


def test_a_tower_that_nothing_freezes_is_refused_by_check(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["check", str(path)]) != 0
    printed = " ".join(capsys.readouterr().err.split())
    assert not lacks(printed, "plugins.features", "vision.encoder.patch.weight, vision.encoder.patch.bias")
    path.write_text(JOB + '[plugins.freeze]\n[[plugins.freeze.stages]]\nfreeze = ["vision.encoder.*"]\n')
    assert main(["check", str(path)]) == 0


def test_a_model_without_a_tower_is_refused(tmp_path):
    without = {
        "model": TinyModel(),
        "data": {"sources": (Numbers(),)},
        "plugins": {"freeze": Freeze(stages=(Stage(),))},
    }
    check_problems(refusals(tmp_path, **without), at("plugins.features", "TinyModel", "vision tower"))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "features").write_text("")
    check_problems(refusals(tmp_path), at("plugins.features.path", tmp_path / "features"))


@frozen(kw_only=True)
class Unsteady(ViT):
    """A tower with a module that computes something else at each call."""

    dropout: bool = True

    def build(self, context, taps):
        built = super().build(context, taps)
        built.extra = nn.Dropout(0.1) if self.dropout else nn.BatchNorm1d(4, affine=False)
        return built


@pytest.mark.parametrize(("dropout", "what"), [(True, "random"), (False, "BatchNorm1d")])
def test_a_tower_whose_features_differ_from_call_to_call_is_refused(tmp_path, dropout, what):
    tower = Unsteady(dim=16, layers=1, heads=2, patch=2, size=(4, 4), dropout=dropout)
    seeing = VisionLanguage(language=model().language, vision=VisionPart(encoder=tower, images_per_sequence=2))
    problems = refusals(tmp_path, model=seeing, plugins={"freeze": FROZEN})
    check_problems(problems, at("plugins.features", "vision.encoder.extra", what))


def test_a_tower_whose_features_are_not_its_patches_is_refused(tmp_path):
    tower = TiledViT(dim=16, layers=1, global_layers=1, heads=2, patch=2, tile=4, intermediate=())
    model = VisionLanguage(
        language=tiny_language(), vision=VisionPart(encoder=tower, adapter=LinearAdapter()), fusion=Joint()
    )
    check_problems(refusals(tmp_path, model=model), at("plugins.features", "16 patches", "20 features"))
