"""Settings of Qwen's parts that cannot work are refused by name when a job is checked."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve, frozen
from qwen_models import LANGUAGE, MODEL, TOWER

from forge_core.contracts.errors import JobError
from forge_core.engine.build import build_bare_model, build_context
from forge_core.plugins.catalog import Catalog
from forge_plugin_transformer import GroupedQueryAttention
from forge_plugin_vision import Joint, LinearAdapter, Merger, MultimodalRope, Perceiver, VisionLanguage
from forge_plugin_vision.testing import RandomImages
from forge_testing import tiny_job
from forge_testing.tiny import job_problems


def changed(**changes: Any) -> VisionLanguage:
    """The model with another encoder, adapter, fusion or rope."""
    vision = evolve(MODEL.vision, **{name: changes[name] for name in ("encoder", "adapter") if name in changes})
    language = LANGUAGE
    if "rope" in changes:
        attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8, rope=changes["rope"])
        language = evolve(LANGUAGE, attention=attention)
    return evolve(MODEL, vision=vision, language=language, fusion=changes.get("fusion", MODEL.fusion))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": evolve(TOWER, heads=3)}, "model.vision.encoder.heads: 3 does not divide dim, which is 16"),
        ({"encoder": evolve(TOWER, heads=8)}, "dim / heads = 2 is no multiple of 4"),
        ({"encoder": evolve(TOWER, window=7)}, "model.vision.encoder.window: 7 is no multiple of patch, which is 2"),
        ({"encoder": evolve(TOWER, window=0)}, "has no meaning without windows"),
        ({"encoder": evolve(TOWER, full_attention=(3,))}, "names blocks that do not exist: there are 3, from 0"),
        ({"fusion": Joint(deepstack=(2, 0))}, "model.fusion.deepstack: .* are not numbers of blocks in ascending"),
        ({"fusion": Joint(deepstack_adapter=Merger())}, "it has no use without deepstack"),
        (
            {"fusion": Joint(deepstack=(0,), deepstack_adapter=LinearAdapter())},
            "model.fusion.deepstack_adapter: it makes 48 features where .* makes 12",
        ),
        (
            {"rope": MultimodalRope(sections=(1, 2, 1), interleaved=True)},
            "model.language.attention.rope.sections: .* more pairs for rows or columns than for frames",
        ),
        (
            {"rope": MultimodalRope(sections=(2, 1, 1), positions_per_second=4.0)},
            'rope.positions_per_second: 4.0 has no meaning with time = "frames"; .* set time = "seconds"',
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str, tmp_path: Any) -> None:
    problems = job_problems(tiny_job(str(tmp_path), model=changed(**changes)))
    assert any(re.search(message, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fusion": Joint(deepstack=(0, 3))}, r"model.fusion.deepstack: \[0, 3\] needs 4 blocks, of which there are 3"),
        (
            {"fusion": Joint(deepstack=(0, 1, 2, 3)), "encoder": evolve(TOWER, layers=4)},
            "needs 4 language layers, of which there are 3",
        ),
        (
            {"rope": MultimodalRope(sections=(1, 1, 1))},
            r"rope.sections: \[1, 1, 1\] has 3 pairs, but heads of 8 have 4",
        ),
        (
            {"adapter": Perceiver(latents=4, heads=2, layers=1), "fusion": Joint()},
            "model.vision.adapter: Perceiver does not make one feature of each 1 x 1 patches",
        ),
    ],
)
def test_what_only_the_built_model_shows_is_refused(changes: dict[str, Any], message: str, tmp_path: Any) -> None:
    catalog = Catalog.installed()
    job = tiny_job(str(tmp_path), catalog, model=changed(**changes))
    with pytest.raises(JobError, match=message):
        build_bare_model(job, build_context(job, catalog, None))


@frozen(kw_only=True)
class Stamped(RandomImages):
    """A source of clips that writes when each of their frames is shown."""

    timestamps: str = "text"


def test_timestamps_between_frames_need_frames_that_stand_apart(tmp_path: Any) -> None:
    for time, refused in (("seconds", True), ("frames", True), ("apart", False)):
        model = changed(rope=MultimodalRope(sections=(2, 1, 1), time=time))
        problems = job_problems(tiny_job(str(tmp_path), model=model, data={"sources": (Stamped(),)}))
        assert any("rope.time: data.sources.0 writes the time between" in each for each in problems) == refused


def test_another_position_encoding_is_left_alone(tmp_path: Any) -> None:
    """Batches of a language model without `mrope` get no coordinates."""
    catalog = Catalog.installed()
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    model = evolve(MODEL, language=evolve(LANGUAGE, attention=attention))
    job = tiny_job(str(tmp_path), catalog, model=model)
    built, _ = build_bare_model(job, build_context(job, catalog, None))
    assert "positions_3d" not in (built.sequence_entries() or ())
