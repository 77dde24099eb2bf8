"""Images of a job that starts from a published model are, to the bit, those that the model saw; its files travel."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import ours
from published_vision import MODELS, PATCH, REST, SIDE, TOWERS

from forge_core.checkpoint.resume import locate
from forge_core.cli import main
from forge_core.config.load import parse_job
from forge_core.plugins.catalog import Catalog
from forge_plugin_images import ImageText
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize import CropResize, Resizer
from forge_plugin_images.resize.any_size import FillResizer
from forge_plugin_images.resize.one_size import CropResizer, PadResizer, StretchResizer
from forge_plugin_vision import ImageFormat
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.kinds import PIXELS
from forge_plugin_weights.pixels import image_table
from forge_testing.refusals import lacks

SIDES = {"height": PATCH * SIDE, "width": PATCH * SIDE}
ODD = {"height": PATCH * SIDE + REST, "width": PATCH * SIDE + REST}
CROP: Mapping[str, Any] = {"size": {"shortest_edge": PATCH * SIDE}, "crop_size": SIDES}
CASES: Mapping[str, tuple[str, str, Mapping[str, Any], str]] = {
    "crop": ("llava", "CLIP", CROP, 'type = "crop"'),
    "pad": ("llava", "Llava", {**CROP, "do_pad": True}, 'type = "pad"'),
    "stretch": (
        "llava, siglip",
        "Siglip",
        {"size": ODD, "resample": 2, "image_mean": [0.4, 0.5, 0.6]},
        'type = "stretch"',
    ),
    "fill": (
        "siglip2_vision_model",
        "Siglip2",
        {"patch_size": PATCH, "max_num_patches": 20},
        'type = "fill", max_patches = 20',
    ),
}
"""By the type of `resize`: model, processor, its settings, keys of the table."""
RESIZERS: Mapping[str, Callable[[ImageFormat], Resizer]] = {
    "crop": CropResizer,
    "pad": PadResizer,
    "stretch": StretchResizer,
    "fill": partial(FillResizer, max_patches=20),
}
SHUFFLED = {"max_image_size": {"longest_edge": PATCH * SIDE}, "size": {"longest_edge": 4 * PATCH * SIDE}}


def processor_of(name: str, settings: Mapping[str, Any]) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(**settings)


def written(folder: Path, model: str, processor: Any) -> Path:
    """Write a model and its processor; returns the run folder made of them."""
    {**MODELS, **TOWERS}[model].write(folder / "published")
    processor.save_pretrained(folder / "published")
    return import_folder(folder / "published", folder / "run", tokenizer=False)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def patches_of(pixels: torch.Tensor) -> torch.Tensor:
    """(3, H, W) in the order of our patches."""
    cut = pixels.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
    return cut.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)


@pytest.mark.parametrize("resize", CASES)
@pytest.mark.parametrize("size", [(37, 61), (100, 33), (16, 16), (15, 40)])
def test_pixels_are_those_of_the_published_processor(tmp_path, resize, size):
    model, name, settings, keys = CASES[resize]
    reference = processor_of(name, settings)
    run = written(tmp_path, model, reference)
    [line] = [line for line in (run / "start.toml").read_text().splitlines() if "[[data.sources]]" in line]
    assert line.endswith(f" [[data.sources]]: resize = {{ {keys} }}")

    loaded: Any = ours(run)
    vision: Any = loaded.vision
    normalise = vision.normalise if resize != "fill" else vision["normalise"]
    processor = ImageProcessor(RESIZERS[resize](normalise.form))
    actual = normalise(torch.from_numpy(processor.patches(photo(*size))))
    expected = reference(photo(*size), return_tensors="pt")["pixel_values"][0]
    if resize == "fill":
        expected = expected[: len(actual)].view(-1, PATCH, PATCH, 3).permute(0, 3, 1, 2).flatten(1)
    else:
        expected = patches_of(expected[:, : PATCH * SIDE, : PATCH * SIDE])
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-6


def test_a_prompt_of_the_imported_model_has_its_images_likewise(tmp_path):
    run = written(tmp_path, "llava", processor_of("CLIP", CROP))
    _, manifest = locate(run, "full")
    [source] = parse_job(manifest["job"], "job.toml", Catalog.installed()).data.sources
    assert isinstance(source, ImageText)
    assert source.resize == CropResize()


@pytest.mark.parametrize("splitting", [True, False])
def test_how_images_are_split_is_said_and_a_prompt_has_room_for_it(tmp_path, capsys, splitting):
    run = written(tmp_path, "idefics3", processor_of("Idefics3", {**SHUFFLED, "do_image_splitting": splitting}))
    start = (run / "start.toml").read_text()
    keys = 'overview = "last"' if splitting else "cut = false"
    assert f' [[data.sources]]: resize = {{ type = "split", longest_side = 64, {keys} }}\n' in start
    tile = '"<fake_token_around_image><row_{row}_col_{column}>"'
    assert not lacks(start, "[data.sources.tile_text]", f"tile = {tile}")
    vision = tomllib.loads(start)["model"]["vision"]
    assert vision["encoder"]["resample"] == "lanczos"
    assert vision["images_per_sequence"] == (17 if splitting else 1)
    assert main(["weights", "inspect", str(tmp_path / "published")]) == 0
    shown_by_inspect = capsys.readouterr().out
    assert 'resize = { type = "split"' in shown_by_inspect
    assert "NOT" not in shown_by_inspect


def test_what_images_cannot_have_is_said(tmp_path):
    run = written(tmp_path, "idefics3", processor_of("Idefics3", {**SHUFFLED, "max_image_size": {"longest_edge": 20}}))
    assert not lacks((run / "start.toml").read_text(), "{'longest_edge': 20}", "(16, 16)")


@pytest.mark.parametrize("key", ["do_flip", "resample", "rescale_factor"])
def test_what_forge_does_not_do_to_pixels_is_named(tmp_path, capsys, key):
    MODELS["llava"].write(tmp_path / "published")
    processor_of("CLIP", CROP).save_pretrained(tmp_path / "published")
    path = tmp_path / "published/preprocessor_config.json"
    path.write_text(json.dumps({**read_json(path), key: 0.5}))
    arguments = ["weights", "import", str(tmp_path / "published"), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert key in error
    assert "preprocessor_config.json" in error
    assert not (tmp_path / "run").exists()


def test_an_export_has_the_settings_of_the_processor(tmp_path):
    for number, (model, name, settings) in enumerate(
        (
            ("llava, siglip", "Siglip", {"size": ODD, "resample": 2, "image_mean": [0.4, 0.5, 0.6]}),
            ("siglip2_vision_model", "Siglip2", {"patch_size": PATCH, "max_num_patches": 20}),
            ("smolvlm", "SmolVLM", SHUFFLED),
        )
    ):
        here = tmp_path / str(number)
        run = written(here, model, processor_of(name, settings))
        out = export_run(run, here / "out")
        assert read_json(out / "preprocessor_config.json") == read_json(here / "published/preprocessor_config.json")


def test_without_a_file_the_settings_are_those_of_the_class(tmp_path):
    for name, processor, settings in (
        ("clip_vision_model", "CLIP", CROP),
        ("siglip_vision_model", "Siglip", {"size": SIDES}),
        ("siglip2_vision_model", "Siglip2", {"patch_size": PATCH}),
    ):
        TOWERS[name].write(tmp_path / name)
        run = import_folder(tmp_path / name, tmp_path / f"run-{name}", tokenizer=False)
        assert "data.sources" not in (run / "start.toml").read_text()
        out = export_run(run, tmp_path / f"out-{name}")
        cls = getattr(transformers, f"{processor}ImageProcessorPil")
        image = photo(30, 44)
        expected, actual = (
            each(image, return_tensors="pt")["pixel_values"]
            for each in (processor_of(processor, settings), cls.from_pretrained(out))
        )
        assert torch.equal(expected, actual)


def test_a_longer_side_beyond_the_processors_own_bound_is_that_bound():
    config = {PIXELS: {"max_image_size": {"longest_edge": 16}, "size": {"longest_edge": 5000}}}
    table = image_table(config, {"vision.encoder.size": [16, 16]})
    assert table is not None
    assert table.resize == {"type": "split", "longest_side": 4096, "overview": "last"}
    assert not lacks("\n".join(table.differences), 5000, 4096)
