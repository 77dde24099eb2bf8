"""InternVL: images in tiles, its tower's keys, and what it is refused for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import ours
from published_vision import MODELS, PATCH, SIDE, TOWER, pixels_of, text, wide_logits
from test_published_vision import logits

from forge_core.checkpoint.resume import locate
from forge_core.config.load import parse_job
from forge_core.contracts.components import ModelComponent
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_text import Bytes
from forge_plugin_vision import IMAGE
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.tables import architecture_of, read_config, write_config
from forge_testing.refusals import ExpectedProblem, at, lacks, refuses, refuses_all

TILE = PATCH * SIDE


@torch.no_grad()
def test_a_prompt_has_the_tiles_that_its_processor_makes_and_its_logits(tmp_path: Any) -> None:
    theirs = MODELS["internvl"].write(tmp_path / "published")
    processor = transformers.GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=4)
    processor.save_pretrained(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    start = (run / "start.toml").read_text()
    assert not lacks(start, "[[data.sources]]", 'resize = { type = "aspect", max_tiles = 4, overview = "last" }')
    assert not lacks(start, "[data.sources.tile_text]", 'before = "<img>", after = "</img>"')
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 44, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    _, manifest = locate(run, "full")
    job = parse_job(manifest["job"], "job.toml", Catalog.installed())
    [ids], entries = prompts_with_images(["<image>!"], [str(tmp_path / "a.png")], job, Bytes().build(None, list))
    count = SIDE**2 // 4 * 3  # 1 x 2 tiles and the overview
    assert ids == [*b"<img>", *[IMAGE] * count, *b"</img>!"]
    pixels = torch.as_tensor(np.stack(processor(picture, crop_to_patches=True, max_patches=4)["pixel_values"]))
    tokens = torch.tensor([[7, *[IMAGE] * count, 9, 8]])
    # The processor rounds to float32, so that both models are given our pixels
    model = ours(run, "fp64")
    shown = pixels_of(model.vision, entries)[: len(pixels)]  # behind which is room for more
    assert (shown - pixels).abs().max() < 1e-6
    given = {"input_ids": tokens.where(tokens >= 0, theirs.config.image_token_id), "pixel_values": shown}
    assert (logits(model, {**entries, "input_ids": tokens}) - wide_logits(theirs, given)).abs().max() < 1e-9


def config(**changes: Any) -> dict[str, Any]:
    whole = transformers.InternVLConfig(text_config=text("Qwen2"), vision_config=dict(TOWER)).to_dict()
    tower = {**whole["vision_config"], **changes.pop("vision_config", {})}
    return {**whole, **changes, "vision_config": tower}


def test_sides_may_be_numbers_or_pairs() -> None:
    _, architecture = architecture_of(config(), Catalog.installed())
    numbers = {"image_size": TILE, "patch_size": PATCH}
    assert read_config(architecture, config(vision_config=numbers)) == read_config(architecture, config())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vision_feature_layer": -2}, at("", "vision_feature_layer = -2")),
        ({"downsample_ratio": 0.3}, at("", "downsample_ratio = 0.3")),
        ({"projector_hidden_act": "silu"}, at("", "projector_hidden_act = 'silu'")),
        ({"vision_config": {"layer_scale_init_value": 0}}, at("", "layer_scale_init_value = 0")),
        (
            {"vision_config": {"use_absolute_position_embeddings": False}},
            at("", "use_absolute_position_embeddings = False"),
        ),
        ({"vision_config": {"patch_size": [4, 2]}}, at("", "patch_size = [4, 2]", "squares")),
        ({"vision_config": {"image_size": [16, 8]}}, at("", "image_size = [16, 8]")),
        ({"vision_config": {"image_size": [16, 18]}}, at("", "image_size = [16, 18]", "patch_size = [4, 4]")),
    ],
)
def test_what_it_cannot_be_is_named(changes: dict[str, Any], expected: ExpectedProblem) -> None:
    own = config(**changes)
    _, architecture = architecture_of(own, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, own)


@pytest.mark.parametrize("changes", [{"size": [448, 462]}, {"pixels": [450, 450]}])
def test_images_that_are_no_squares_of_patches_are_not_exported(changes: dict[str, Any]) -> None:
    own, catalog = config(vision_config={"image_size": 448, "patch_size": 14}), Catalog.installed()
    _, architecture = architecture_of(own, catalog)
    table = read_config(architecture, own)
    table["vision"]["encoder"] |= changes
    with refuses("", "vision.encoder.size", "square"):
        write_config(architecture, parse_component(table, "mine", ModelComponent, catalog), catalog)
