"""Training with kept features: the numbers of training without, and a tower that does not run twice for an image."""

from __future__ import annotations

import pytest
from attrs import frozen
from kept_runs import EPOCH, ROWS, run
from kept_runs import model as model_of

from forge_core import ForgeError, TrainingHook
from forge_plugin_compile import Compile
from forge_plugin_vision import VisionLanguage, VisionPart, ViT
from forge_plugin_vision.features import Features
from forge_testing.outcomes import Stop
from forge_testing.refusals import naming
from forge_testing.vision import RandomImages

CASES = [
    ("joint", "fp32"),
    ("joint", "bf16"),
    ("cross_attention", "bf16"),
    ("mot", "fp32"),
    ("deepstack", "bf16"),
    ("naflex", "fp32"),
]


@pytest.mark.parametrize(("fusion", "precision"), CASES)
def test_a_curve_is_the_same_to_the_bit(tmp_path, fusion, precision):
    """In the first epoch, which makes the features, in the second, which finds them, and in a run that finds all."""
    settings = {"model": model_of(fusion), "precision": precision}
    kept = Features(path=str(tmp_path / "features"))
    plain = run(tmp_path, "plain", **settings)
    first, second = (run(tmp_path, name, features=kept, **settings) for name in ("first", "second"))
    assert plain.equals(first)
    assert plain.equals(second)
    assert first.hits == [0] * EPOCH + [1] * EPOCH
    assert second.hits == [1] * 2 * EPOCH
    assert [len(calls) for calls in first.tower_rows] == [1] * EPOCH + [0] * EPOCH
    assert not any(second.tower_rows)


def test_the_tower_costs_nothing(tmp_path):
    """Else it costs 2 of 6 FLOPs of four patches of 12 values in each image, as it is frozen."""
    kept = Features(path=str(tmp_path / "features"))
    plain, found = (run(tmp_path, name, features=each).lines[0] for name, each in (("plain", None), ("kept", kept)))
    of_image = 6 * 4 * (12 * 16 + 4 * 16**2 + 2 * 16 * 64) + 12 * 16 * 4 * 4
    saved = plain["flops_per_token"] - found["flops_per_token"]
    assert saved == pytest.approx(plain["vision/patches_per_sequence"] / 4 * of_image / 3 / 24, rel=1e-5)


ALL_SEE = {"data": {"sources": (RandomImages(sequences=EPOCH * ROWS, text_only=0, held_out=0),)}}


def test_the_tower_runs_for_rows_only_that_lack_an_image(tmp_path):
    """The first two of the first four rows are there."""
    kept = Features(path=str(tmp_path / "features"))
    run(tmp_path, "two", features=kept, steps=1, global_batch_size=2, **ALL_SEE)
    mixed = run(tmp_path, "mixed", features=kept, **ALL_SEE)
    assert mixed.equals(run(tmp_path, "plain", **ALL_SEE))
    assert [sum(calls) for calls in mixed.tower_rows] == [2, 4, 4, 0, 0, 0]
    assert 0 < mixed.hits[0] < 1


def test_a_run_continues_with_features_and_without(tmp_path):
    """They are no part of its state, so that they may come and go."""
    kept = Features(path=str(tmp_path / "features"))
    run(tmp_path, "parts", hooks=[Stop(step=1)])
    run(tmp_path, "parts", hooks=[Stop(step=4)], features=kept)
    assert run(tmp_path, "parts").weights_equal(run(tmp_path, "whole"))


def test_text_needs_no_tower(tmp_path):
    text = {"data": {"sources": (RandomImages(sequences=8, text_only=1, held_out=0),)}, "steps": 2}
    kept = run(tmp_path, "kept", features=Features(path=str(tmp_path / "features")), **text)
    assert kept.equals(run(tmp_path, "plain", **text))
    assert kept.hits == [1, 1]
    assert not any(kept.tower_rows)


def test_compiled_blocks_keep_the_shape_of_their_graph(tmp_path):
    """The tower runs on whole micro-batches, and what eager blocks made is not taken for what compiled ones make."""
    kept = Features(path=str(tmp_path / "features"))
    stages = {"parallel": {"compile": Compile(backend="eager", dynamic=False)}}
    run(tmp_path, "eager", features=kept, steps=1, **ALL_SEE)
    run(tmp_path, "two", features=kept, steps=1, global_batch_size=2, **ALL_SEE, **stages)
    compiled = run(tmp_path, "compiled", features=kept, **ALL_SEE, **stages)
    assert compiled.equals(run(tmp_path, "plain", **ALL_SEE, **stages))
    assert 0 < compiled.hits[0] < 1
    assert compiled.tower_rows == [[ROWS]] * EPOCH + [[]] * EPOCH


def test_a_disk_without_space_is_left_alone(tmp_path):
    kept = run(tmp_path, "kept", features=Features(path=str(tmp_path / "features"), keep_free_gb=1e9))
    assert kept.equals(run(tmp_path, "plain"))
    assert kept.hits == [0] * 2 * EPOCH
    assert all(line["features/unwritten"] > 0 for line in kept.lines)
    assert not list((tmp_path / "features").rglob("*.safetensors"))


class Thaw(TrainingHook):
    def on_step_begin(self, context):
        context.model.vision.encoder.requires_grad_(context.step == 2)


def test_a_tower_that_something_unfreezes_ends_the_run_before_it_changes(tmp_path):
    with pytest.raises(ForgeError, match=naming("plugins.features", "vision.encoder")):
        run(tmp_path, features=Features(path=str(tmp_path / "features")), hooks=[Thaw()])


@frozen(kw_only=True)
class Precise(ViT):
    """A tower that returns float64, whatever the compute dtype is."""

    def build(self, context, taps):
        built = super().build(context, taps)
        built.register_forward_hook(lambda module, inputs, outputs: [output.double() for output in outputs])
        return built


def test_a_tower_that_returns_another_dtype_than_it_computes_in_ends_the_run(tmp_path):
    tower = Precise(dim=16, layers=1, heads=2, patch=2, size=(4, 4))
    seeing = VisionLanguage(language=model_of().language, vision=VisionPart(encoder=tower, images_per_sequence=2))
    with pytest.raises(ForgeError, match=naming("plugins.features", "torch.float64", "torch.float32")):
        run(tmp_path, model=seeing, features=Features(path=str(tmp_path / "features")))
