"""Gemma 4 with its tower from its files and back: images of several sizes, which see themselves within windows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from published_models import ours, rewrite
from published_vision import BUDGETED, PATCH, PLACEHOLDER, gemma4, wide_logits
from test_published_models import bytes_of, tensors_of
from test_published_vision import check_table, check_tensors, imported, loaded, logits
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from forge_core.contracts.components import ModelComponent
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize.any_size import BudgetResizer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES
from forge_plugin_weights.exporting import export_run, origin_of
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import architecture_of, load_architecture, read_config, write_config
from forge_testing.refusals import at, refuses, refuses_all

WINDOW, MOST = 2, 48
"""Patches along a side of a window of the adapter, and patches of a padded image."""
ROWS: Sequence[Sequence[tuple[int, int]]] = [[(4, 6), (2, 2), (2, 10)], [(8, 6)], []]
"""Rows and columns of patches of the images of each prompt; the last has none."""
CATALOG = Catalog.installed()
GEMMA4 = load_architecture("gemma4", CATALOG)


def batch_of(rows: Sequence[Sequence[tuple[int, int]]] = ROWS, length: int = 34) -> dict[str, Tensor]:
    """Prompts with images, and tokens between them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 56, (len(rows), length), generator=generator)
    patches = torch.zeros(len(rows), 64, 3 * PATCH**2, dtype=torch.uint8)
    grids = torch.zeros(len(rows), 3, 3, dtype=torch.int64)
    for row, images in enumerate(rows):
        place, first = 2, 0
        for number, (down, across) in enumerate(images):
            count = down * across
            ids[row, place : place + count // WINDOW**2] = IMAGE
            place += count // WINDOW**2 + 2
            patches[row, first : first + count] = torch.randint(256, (count, 3 * PATCH**2), generator=generator)
            grids[row, number] = torch.tensor([1, down, across])
            first += count
    return {"input_ids": ids, PATCHES: patches, GRIDS: grids}


def inputs_for(vision: Any, batch: Mapping[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
    """What `transformers` takes for some rows: patches by pixel and channel, from 0 to 1, and their places."""
    ids, pixels, places = batch["input_ids"][rows], [], []
    for patches, grids in zip(vision.normalise(batch[PATCHES][rows]), batch[GRIDS][rows].tolist(), strict=True):
        for _, down, across in (grid for grid in grids if grid[0]):
            count = down * across
            own, patches = patches[:count], patches[count:]
            image = (own / 2 + 0.5).view(count, 3, -1).transpose(1, 2).flatten(1)
            pixels.append(torch.cat([image, image.new_zeros(MOST - count, image.shape[1])]))
            place = torch.arange(MOST)
            columns_and_rows = torch.stack([place % across, place // across], -1)
            places.append(columns_and_rows.where(place[:, None] < count, -1))
    entries = {"input_ids": ids.where(ids >= 0, PLACEHOLDER), "mm_token_type_ids": (ids < 0).long()}
    if not pixels:
        return entries
    return {**entries, "pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


@pytest.mark.parametrize("name", BUDGETED)
@torch.no_grad()
def test_a_model_whose_images_see_themselves_within_windows_comes_in_and_goes_out(tmp_path, name):
    theirs, run = imported(tmp_path, BUDGETED[name])
    ours32, ours64, batch = ours(run), ours(run, "fp64"), batch_of()
    inputs = inputs_for(ours32.vision, batch)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, batch) - expected).abs().max() < 1e-4
    wide = inputs_for(ours64.vision, batch)
    assert (logits(ours64, batch) - wide_logits(theirs, wide)).abs().max() < 1e-9
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(1)}
    assert (theirs(**other).logits - expected)[:2].abs().amax((1, 2)).min() > 1e-2
    causal = {**inputs, "mm_token_type_ids": torch.zeros_like(inputs["mm_token_type_ids"])}
    assert ((theirs(**causal).logits - expected).abs().max() > 1e-2) == ("small" not in name)

    out = export_run(run, tmp_path / "out")
    again = loaded(out, theirs)
    check_tensors(theirs, again, ())
    before, after = tensors_of(tmp_path / "published"), tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[key]) == bytes_of(before[key]) for key in before)
    configs = [read_json(folder / "config.json") for folder in (tmp_path / "published", out)]
    _, architecture = architecture_of(configs[0], CATALOG)
    check_table(*(config["vision_config"] for config in configs), set())
    assert read_config(architecture, configs[1]) == read_config(architecture, configs[0])
    assert torch.equal(again(**inputs).logits, expected)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    for row in (0, 2):  # with images and without
        prompt = inputs_for(ours32.vision, batch, slice(row, row + 1))
        settings["attention_mask"] = torch.ones_like(prompt["input_ids"])
        tokens = again.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :].tolist()
        entries = {key: batch[key][row : row + 1] for key in (PATCHES, GRIDS)}
        ids = batch["input_ids"][row].tolist()
        for use_cache in (True, False):
            said = generate(ours32, [ids], 8, -1, Sampling(temperature=0), entries=entries, use_cache=use_cache)
            assert said == [tokens]


def test_sounds_are_left_out_where_the_import_says_so(tmp_path):
    folder = tmp_path / "published"
    BUDGETED["gemma4, small"].write(folder)
    sounds = {f"model.{name}.weight": torch.ones(2) for name in ("audio_tower.layers.0", "embed_audio.projection")}
    rewrite(folder, lambda tensors: tensors | sounds)
    config = read_json(folder / "config.json") | {"audio_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    with refuses("", "audio_config", "--ignore audio_config"):
        import_folder(folder, tmp_path / "heard", tokenizer=False)
    run = import_folder(folder, tmp_path / "run", tokenizer=False, ignore=["audio_config"])
    assert {*sounds} <= {*origin_of(run)["left_out"]}
    out = export_run(run, tmp_path / "out")
    assert not read_json(out / "config.json")["audio_config"]
    assert tensors_of(out).keys() == tensors_of(folder).keys() - {*sounds}


SIZES_OF_IMAGES = [(37, 61), (100, 33), (3, 300), (400, 300)]


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def test_pixels_are_those_of_the_published_processor_and_its_file_travels(tmp_path):
    folder, settings = tmp_path / "published", {"patch_size": PATCH, "pooling_kernel_size": WINDOW}
    BUDGETED["gemma4"].write(folder)
    reference = Gemma4ImageProcessorPil(**settings, max_soft_tokens=70)
    reference.save_pretrained(folder)
    run = import_folder(folder, tmp_path / "run", tokenizer=False)
    start = (run / "start.toml").read_text()
    assert 'resize = { type = "budget", max_patches = 280 }\n' in start
    assert ' [data.sources.tile_text] with before = "<|image>", after = "<image|>"\n' in start
    vision: Any = ours(run).vision
    processor = ImageProcessor(BudgetResizer(vision.normalise.form, 280))
    for size in SIZES_OF_IMAGES:
        patches, [grid] = processor.patches(photo(*size)), processor.grids(size)
        theirs = reference(photo(*size), return_tensors="pt")
        count = grid.rows * grid.columns
        assert theirs["num_soft_tokens_per_image"].item() * WINDOW**2 == count
        places = theirs["image_position_ids"][0, :count]
        assert places[-1].tolist() == [grid.columns - 1, grid.rows - 1]
        pixels = theirs["pixel_values"][0, :count].view(count, -1, 3).transpose(1, 2).flatten(1)
        own = vision.normalise(torch.from_numpy(patches))
        assert (own - 2 * (pixels - 0.5)).abs().max() < 1e-6
    out = export_run(run, tmp_path / "out")
    assert read_json(out / "preprocessor_config.json") == read_json(folder / "preprocessor_config.json")


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("", {"audio_config": {"hidden_size": 8}}, at("", "audio_config", "sounds", "--ignore audio_config")),
        ("text_config", {"use_bidirectional_attention": "all"}, at("", "use_bidirectional_attention = 'all'")),
        ("vision_config", {"num_key_value_heads": 1}, at("", "num_key_value_heads = 1", 3)),
        ("vision_config", {"global_head_dim": 8}, at("", "global_head_dim = 8", 4)),
        ("vision_config", {"hidden_activation": "silu"}, at("", "hidden_activation = 'silu'")),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, at("", "rope_parameters", "yarn", "axial")),
        ("preprocessor_config", {"patch_size": 8}, at("", "patch_size = 8", "preprocessor_config.json", PATCH)),
        ("preprocessor_config", {"pooling_kernel_size": 3}, at("", "pooling_kernel_size = 3", WINDOW)),
        ("preprocessor_config", {"resample": 2}, at("", "resample", "bilinear", "bicubic")),
    ],
)
def test_what_forge_does_not_compute_is_named(table, changes, expected):
    config = gemma4().to_dict()
    config |= {table: {**config.get(table, {}), **changes}} if table else changes
    with refuses_all(expected):
        read_config(GEMMA4, config)


def test_a_model_that_it_cannot_describe_is_not_exported_as_one():
    table = read_config(GEMMA4, gemma4().to_dict())
    table["fusion"] |= {"bidirectional_in_windows": False}
    model = parse_component(table, "job.toml", ModelComponent, CATALOG)
    with refuses("", "bidirectional_in_windows", "equal always"):
        write_config(GEMMA4, model, CATALOG)
