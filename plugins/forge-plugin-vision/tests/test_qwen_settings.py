"""Settings of Qwen's parts that cannot work are refused by name when a job is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from qwen_models import LANGUAGE, MODEL, TOWER
from torch.utils.flop_counter import FlopCounterMode

from forge_core.contracts.contexts import BuildContext
from forge_core.engine.build import build_bare_model, build_context
from forge_core.plugins.catalog import Catalog
from forge_plugin_transformer import GroupedQueryAttention
from forge_plugin_vision import Grid, Joint, LinearAdapter, Merger, MultimodalRope, Perceiver, VisionLanguage
from forge_plugin_vision.modules.images import Images
from forge_testing import tiny_job
from forge_testing.refusals import ExpectedProblem, at, check_problems, problems_of, refuses_all
from forge_testing.vision import RandomImages


def changed(**changes: Any) -> VisionLanguage:
    """The model with another encoder, adapter, fusion or rope."""
    vision = evolve(MODEL.vision, **{name: changes[name] for name in ("encoder", "adapter") if name in changes})
    language = LANGUAGE
    if "rope" in changes:
        attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8, rope=changes["rope"])
        language = evolve(LANGUAGE, attention=attention)
    return evolve(MODEL, vision=vision, language=language, fusion=changes.get("fusion", MODEL.fusion))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"encoder": evolve(TOWER, heads=3)}, at("model.vision.encoder.heads", 3, 16)),
        ({"encoder": evolve(TOWER, heads=8)}, at("model.vision.encoder.heads", "dim / heads = 2", 4)),
        ({"encoder": evolve(TOWER, window=7)}, at("model.vision.encoder.window", 7, "patch", 2)),
        ({"encoder": evolve(TOWER, std=(0.5, 0.0, 0.5))}, at("model.vision.encoder.std", "[0.5, 0.0, 0.5]", 0)),
        (
            {"encoder": evolve(TOWER, table=0, table_interpolation="bicubic")},
            at("model.vision.encoder.table_interpolation", "'bicubic'", "table"),
        ),
        ({"encoder": evolve(TOWER, window=0)}, at("model.vision.encoder.full_attention", "windows")),
        ({"encoder": evolve(TOWER, full_attention=(3,))}, at("model.vision.encoder.full_attention", 3, 0)),
        ({"fusion": Joint(deepstack=(2, 0))}, at("model.fusion.deepstack", "[2, 0]", "ascending")),
        ({"fusion": Joint(deepstack_adapter=Merger())}, at("model.fusion.deepstack_adapter", "deepstack")),
        (
            {"fusion": Joint(deepstack=(0,), deepstack_adapter=LinearAdapter())},
            at("model.fusion.deepstack_adapter", 48, 12),
        ),
        (
            {"rope": MultimodalRope(sections=(1, 2, 1), interleaved=True)},
            at("model.language.attention.rope.sections", "[1, 2, 1]"),
        ),
        (
            {"rope": MultimodalRope(sections=(2, 1, 1), positions_per_second=4.0)},
            at("model.language.attention.rope.positions_per_second", 4.0, 'time = "frames"', 'time = "seconds"'),
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], expected: ExpectedProblem, tmp_path: Any) -> None:
    check_problems(problems_of(tiny_job(str(tmp_path), model=changed(**changes))), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fusion": Joint(deepstack=(0, 3))}, at("model.fusion.deepstack", "[0, 3]", "4 blocks", 3)),
        (
            {"fusion": Joint(deepstack=(0, 1, 2, 3)), "encoder": evolve(TOWER, layers=4)},
            at("model.fusion.deepstack", "[0, 1, 2, 3]", "4 language layers", 3),
        ),
        (
            {"rope": MultimodalRope(sections=(1, 1, 1))},
            at("model.language.attention.rope.sections", "[1, 1, 1]", "3 pairs", 8, 4),
        ),
        (
            {"adapter": Perceiver(latents=4, heads=2, layers=1), "fusion": Joint()},
            at("model.vision.adapter", "Perceiver", "1 x 1"),
        ),
    ],
)
def test_what_only_the_built_model_shows_is_refused(
    changes: dict[str, Any], expected: ExpectedProblem, tmp_path: Any
) -> None:
    catalog = Catalog.installed()
    job = tiny_job(str(tmp_path), catalog, model=changed(**changes))
    with refuses_all(expected):
        build_bare_model(job, build_context(job, catalog, None))


@frozen(kw_only=True)
class Stamped(RandomImages):
    """A source of clips that writes when each of their frames is shown."""

    timestamps: str = "text"


def test_timestamps_between_frames_need_frames_that_stand_apart(tmp_path: Any) -> None:
    for time, refused in (("seconds", True), ("frames", True), ("apart", False)):
        model = changed(rope=MultimodalRope(sections=(2, 1, 1), time=time))
        problems = problems_of(tiny_job(str(tmp_path), model=model, data={"sources": (Stamped(),)}))
        rope = at("model.language.attention.rope.time", "data.sources.0")
        check_problems(problems, *([rope] if refused else []))


def test_another_position_encoding_is_left_alone(tmp_path: Any) -> None:
    """Batches of a language model without `mrope` get no coordinates."""
    catalog = Catalog.installed()
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    model = evolve(MODEL, language=evolve(LANGUAGE, attention=attention))
    job = tiny_job(str(tmp_path), catalog, model=model)
    built, _ = build_bare_model(job, build_context(job, catalog, None))
    assert "positions_3d" not in (built.sequence_entries() or ())


def test_flops_are_those_of_the_products_and_of_the_pairs_that_see_each_other(context: BuildContext) -> None:
    tower = evolve(TOWER, table=0).build(context, taps=()).float()  # whose interpolation would count as a product
    grids = torch.tensor([[[2, 6, 5]]])
    with FlopCounterMode(display=False) as counter:
        tower(torch.randn(1, 60, 3 * 2 * 2 * 2), Images.of(grids, 60))
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    pairs = {"windows": sum(n**2 for n in (4 * 4, 4 * 1, 2 * 4, 2 * 1)), "frames": (6 * 5) ** 2}
    seen = 2 * (2 * pairs["windows"] + 1 * pairs["frames"])  # of two frames, in two blocks and one
    assert tower.flops(Grid(2, 6, 5)) == pytest.approx(3 * (products + 2 * 2 * seen * 16))
