"""Features that are not one a patch keep the contract of fusions, with one curve under every layout."""

from __future__ import annotations

import attrs
import pytest

from forge_plugin_vision import Joint, MLPAdapter, TiledViT, VisionLanguage, VisionPart, ViT
from forge_testing import tiny_job
from forge_testing.refusals import at, check_problems, problems_of, refuses
from forge_testing.suites.vision import VisionModelSuite
from forge_testing.vision import tiny_language


class TestTiledVitAndJoint(VisionModelSuite):
    """Images of one to four tiles of one patch, each with a class token."""

    component = VisionLanguage(
        language=tiny_language(),
        vision=VisionPart(
            encoder=TiledViT(
                dim=16, layers=2, global_layers=1, heads=2, hidden=24, patch=2, tile=2,
                arrangements=((1, 1), (1, 2), (2, 2)), intermediate=(1,), gate_start=0.5,
            ),
            adapter=MLPAdapter(hidden=8),
            images_per_sequence=2,
        ),
        fusion=Joint(),
    )  # fmt: skip
    layouts = ("tp2", "checkpointing2")  # the others: `TestJoint`


MODEL = TestTiledVitAndJoint.component


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"heads": 3}, at("heads", 3, 16)),
        ({"tile": 3}, at("tile", 3, 2)),
        ({"tile": 1}, at("tile", 1, 2)),
        ({"arrangements": ()}, at("arrangements", "pairs")),
        ({"arrangements": ((1, 1), (0, 1))}, at("arrangements", "pairs")),
        ({"arrangements": ((1, 1), (1, -1))}, at("arrangements", "pairs")),
        ({"arrangements": ((1, 2), (1, 2))}, at("arrangements", "twice")),
        ({"intermediate": (0, 2)}, at("intermediate", "[0, 2]", 2)),
        ({"intermediate": (0, 0)}, at("intermediate", "[0, 0]", "twice")),
        ({"intermediate": (-1,)}, at("intermediate", "[-1]", 2)),
        ({"std": (0.5, 0.0, 0.5)}, at("std", "[0.5, 0.0, 0.5]", 0)),
        ({"intermediate": (0, 1), "tile": 4, "heads": 16, "std": (0.5, 0.5, 1e-9)}, None),
    ],
)
def test_keys_of_tiles_that_cannot_be_are_refused_when_the_job_is_checked(tmp_path, keys, expected):
    encoder = attrs.evolve(MODEL.vision.encoder, **keys)
    model = attrs.evolve(MODEL, vision=attrs.evolve(MODEL.vision, encoder=encoder, patches_per_sequence=16))
    wanted = [attrs.evolve(expected, path=f"model.vision.encoder.{expected.path}")] if expected else []
    check_problems(problems_of(tiny_job(str(tmp_path), model=model)), *wanted)


def test_outputs_of_single_blocks_of_a_tower_of_tiles_are_refused(context):
    with refuses(context.path, "`intermediate`"):
        MODEL.vision.encoder.build(context, taps=[0])


def test_images_of_any_size_need_a_number_of_patches(tmp_path):
    encoder = ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 4), position_interpolation="bilinear")
    for patches, expected in ((0, [at("model.vision.patches_per_sequence", 0)]), (1, [])):
        vision = attrs.evolve(MODEL.vision, encoder=encoder, patches_per_sequence=patches)
        job = tiny_job(str(tmp_path), model=attrs.evolve(MODEL, vision=vision))
        check_problems(problems_of(job), *expected)
