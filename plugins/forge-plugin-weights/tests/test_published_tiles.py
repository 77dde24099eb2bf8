"""Llama 3.2 Vision, whose images are tiles that attend to each other: from its files and back, and its pixels."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import lifted, ours
from published_vision import MOST_TILES, PATCH, PLACEHOLDER, TILE, TILED, TILED_TOWER, Seeing, tiled_text, wide
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from forge_core.cli import main
from forge_core.contracts.components import ModelComponent
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_huggingface import Auto
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize.joined import CanvasResizer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import architecture_of, fitting_forms, flattened, nested, read_config, write_config
from forge_testing.refusals import at, refuses, refuses_all

SHAPES = ((2, 2), (1, 3), (1, 1))
"""Rows and columns of tiles of the images of a row."""
ARRANGEMENTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]


def imported(tmp_path: Path, name: str, architecture: str = "") -> tuple[Any, Path]:
    theirs = TILED[name].write(tmp_path / "published")
    return theirs, import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=architecture)


def batch_of(shapes: Sequence[tuple[int, int]] = SHAPES, length: int = 14) -> dict[str, Tensor]:
    """Returns a row that begins with an image; the last two stand together."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, PLACEHOLDER, (1, length), generator=generator)
    ids[0, [0, 5, 6][: len(shapes)]] = IMAGE
    sides = [(rows * TILE, columns * TILE) for rows, columns in shapes]
    patches = torch.randint(
        0, 256, (1, sum(rows * columns for rows, columns in sides), 3 * PATCH**2), generator=generator
    )
    grids = torch.tensor([[[1, *each] for each in sides]])
    return {"input_ids": ids, PATCHES: patches.byte(), GRIDS: grids}


def tiles_of(normalised: Tensor, shapes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Returns what their tower takes for the normalised patches (P, V) of a row's images."""
    pixels = torch.zeros(1, len(shapes), MOST_TILES, 3, TILE * PATCH, TILE * PATCH, dtype=normalised.dtype)
    mask, start = torch.zeros(1, len(shapes), MOST_TILES, dtype=torch.int64), 0
    for number, (rows, columns) in enumerate(shapes):
        stop = start + rows * columns * TILE**2
        cut = normalised[start:stop].view(rows, TILE, columns, TILE, 3, PATCH, PATCH)
        tiles = cut.permute(0, 2, 4, 1, 5, 3, 6).reshape(-1, 3, TILE * PATCH, TILE * PATCH)
        pixels[0, number, : len(tiles)], mask[0, number, : len(tiles)], start = tiles, 1, stop
    ids = torch.tensor([[ARRANGEMENTS.index(shape) + 1 for shape in shapes]])
    return {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


def inputs_for(vision: Any, batch: Mapping[str, Tensor], shapes: Sequence[tuple[int, int]] = SHAPES) -> dict[str, Any]:
    """Returns what their model takes for our batch, as their processor makes it."""
    ids = batch["input_ids"].where(batch["input_ids"] >= 0, PLACEHOLDER)
    visible = [get_cross_attention_token_mask(ids[0].tolist(), PLACEHOLDER)]
    tiles = [[rows * columns for rows, columns in shapes]]
    mask = convert_sparse_cross_attention_mask_to_dense(visible, tiles, MOST_TILES, ids.shape[1])
    own = tiles_of(vision.normalise(batch[PATCHES][0]), shapes)
    return {"input_ids": ids, "cross_attention_mask": torch.from_numpy(mask), **own}


def logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits of rows with as many patches as they have; training has a row's room for all."""
    seen = model.vision.image_input
    fitting = attrs.evolve(
        seen, patches_per_sequence=batch[PATCHES].shape[1], images_per_sequence=batch[GRIDS].shape[1]
    )
    model.vision.image_input = model.sight.budget = fitting
    model.sight.features = fitting.encoder.feature_room(fitting.patches_per_sequence)
    return model.head.logits(model(batch))


@torch.no_grad()
def test_a_model_that_sees_tiles_comes_in_and_goes_out(tmp_path):
    theirs, run = imported(tmp_path, "mllama")
    ours32, ours64, batch = ours(run), ours(run, "fp64"), batch_of()
    inputs = inputs_for(ours32.vision, batch)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, batch) - expected).abs().max() < 1e-4
    with lifted():
        wide_logits = wide(theirs)(**inputs_for(ours64.vision, batch)).logits
    assert (logits(ours64, batch) - wide_logits).abs().max() < 1e-9
    blank = {**inputs, "pixel_values": inputs["pixel_values"] * 0.5}
    assert (theirs(**blank).logits - expected).abs().amax(-1).min() > 1e-3
    text = {"input_ids": batch["input_ids"].clamp(min=0)}
    assert (ours32.head.logits(ours32(text)) - theirs(**text).logits).abs().max() < 1e-4

    again, loading = type(theirs).from_pretrained(export_run(run, tmp_path / "out"), output_loading_info=True)
    assert not any(loading.values())
    check_tensors(theirs, again)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(inputs["input_ids"])
    tokens = again.generate(**inputs, **settings)[0, batch["input_ids"].shape[1] :].tolist()
    entries = {key: batch[key] for key in (PATCHES, GRIDS)}
    assert generate(ours32, [batch["input_ids"][0].tolist()], 6, -1, Sampling(temperature=0), entries=entries) == [
        tokens
    ]


def check_tensors(theirs: Any, again: Any) -> None:
    before, after = theirs.state_dict(), again.state_dict()
    assert {*before} == {*after}
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name


@pytest.mark.parametrize("shapes", [SHAPES, ((4, 1),), ((2, 1), (1, 2))])
@torch.no_grad()
def test_a_tower_of_tiles_comes_in_and_goes_out(tmp_path, shapes):
    theirs, run = imported(tmp_path, "mllama_vision_model")
    batch = batch_of(shapes)
    for precision, near in (("fp32", 1e-4), ("fp64", 1e-9)):
        model: Any = ours(run, precision)
        given = tiles_of(model.vision["normalise"](batch[PATCHES][0]), shapes)
        if precision == "fp32":
            expected = theirs(**given).last_hidden_state
        else:
            with lifted():
                expected = wide(theirs)(**given).last_hidden_state
        expected = expected[given["aspect_ratio_mask"].bool()].flatten(0, 1)
        assert expected.std() > 0.1
        features = model.features(batch)[0]
        assert features.shape == expected.shape
        assert (features - expected).abs().max() < near
    again, loading = type(theirs).from_pretrained(export_run(run, tmp_path / "out"), output_loading_info=True)
    assert not any(loading.values())
    check_tensors(theirs, again)


def test_models_and_towers_of_tiles_are_compared_with_images(tmp_path, capsys):
    for name in TILED:
        here = tmp_path / name
        _, run = imported(here, name)
        assert main(["weights", "inspect", str(here / "published")]) == 0
        assert "NOT" not in capsys.readouterr().out
        assert main(["weights", "verify", str(here / "published"), str(run)]) == 0
        assert re.search(r"^tensors: .* 0 with", capsys.readouterr().out, re.MULTILINE)
        out = export_run(run, here / "out", dtype=torch.bfloat16)
        assert main(["weights", "verify", str(run), str(out)]) == 1
        assert "differ" in capsys.readouterr().out


def test_the_tower_of_a_model_is_exported_alone(tmp_path):
    theirs, run = imported(tmp_path, "mllama")
    arguments = ["weights", "export", str(run), "--out", str(tmp_path / "tower")]
    assert main([*arguments, "--architecture", "mllama_vision_model"]) == 0
    tower, loading = transformers.MllamaVisionModel.from_pretrained(tmp_path / "tower", output_loading_info=True)
    assert not any(loading.values())
    check_tensors(theirs.model.vision_model, tower)


def processor() -> Any:
    side = {"height": TILE * PATCH, "width": TILE * PATCH}
    return transformers.MllamaImageProcessorPil(size=side, image_mean=[0.4, 0.5, 0.6], max_image_tiles=MOST_TILES)


def with_pixels(tmp_path: Path, name: str) -> Path:
    TILED[name].write(tmp_path / "published")
    processor().save_pretrained(tmp_path / "published")
    return import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def test_pixels_are_those_of_the_published_processor(tmp_path):
    run = with_pixels(tmp_path, "mllama_vision_model")
    line = '# Images are as the published model\'s with, in each table [[data.sources]]: resize = { type = "canvas" }'
    assert line in (run / "start.toml").read_text().splitlines()
    model: Any = ours(run)
    normalise, seen = model.vision["normalise"], set()
    ours_of = ImageProcessor(CanvasResizer(normalise.form))
    for size in ((8, 8), (5, 3), (7, 30), (40, 11), (16, 15), (100, 90), (9, 17), (15, 8), (8, 13), (24, 7), (6, 24)):
        image = photo(*size)
        theirs = processor()(image, return_tensors="pt")
        [grid] = ours_of.grids(size)
        shape = grid.rows // TILE, grid.columns // TILE
        given = tiles_of(normalise(torch.from_numpy(ours_of.patches(image))), [shape])
        for key, value in given.items():
            assert (value - theirs[key]).abs().max() < 1e-6, (size, key)
        seen.add(shape)
    assert len(seen) > 5


def test_an_export_has_the_settings_of_the_processor(tmp_path):
    run = with_pixels(tmp_path, "mllama")
    out = export_run(run, tmp_path / "out")
    assert read_json(out / "preprocessor_config.json") == read_json(tmp_path / "published/preprocessor_config.json")
    TILED["mllama"].write(tmp_path / "bare")
    bare = export_run(import_folder(tmp_path / "bare", tmp_path / "run2", tokenizer=False), tmp_path / "out2")
    settings = read_json(bare / "preprocessor_config.json")
    again = transformers.MllamaImageProcessorPil(**settings)
    assert (again.size["height"], again.max_image_tiles, again.do_pad) == (TILE * PATCH, MOST_TILES, True)
    assert (list(again.image_mean), int(again.resample)) == ([0.5] * 3, 2)


@pytest.mark.parametrize("name", TILED)
def test_a_configuration_is_written_as_it_was_read(tmp_path, name):
    _, run = imported(tmp_path, name)
    before, after = (
        read_json(folder / "config.json") for folder in (tmp_path / "published", export_run(run, tmp_path / "out"))
    )
    again, first = (transformers.AutoConfig.for_model(**config).to_dict() for config in (after, before))
    for table in ("text_config", "vision_config") if name == "mllama" else ("",):
        own, other = (config[table] if table else config for config in (first, again))
        for key, value in own.items():
            assert key in ("dtype", "torch_dtype", "pad_token_id", "architectures") or other[key] == value, key
    _, architecture = architecture_of(before, Catalog.installed())
    assert read_config(architecture, after) == read_config(architecture, before)


def test_a_tower_of_a_model_comes_in_alone(tmp_path):
    _, run = imported(tmp_path, "mllama", "mllama_vision_model")
    _, run_of_all = imported(tmp_path / "all", "mllama")
    everything, alone = (dict(ours(each).named_parameters()) for each in (run_of_all, run))
    assert alone.keys() == {name for name in everything if name.startswith("vision.encoder.")}
    assert all(torch.equal(everything[name], tensor) for name, tensor in alone.items())
    assert any(name.startswith("other.") for name in read_json(run / "origin.json")["left_out"])


def test_the_defaults_are_those_of_the_published_classes():
    for name, config in (
        ("mllama_vision_model", transformers.MllamaVisionConfig()),
        ("mllama", transformers.MllamaConfig()),
    ):
        catalog, full = Catalog.installed(), config.to_dict()
        _, architecture = architecture_of(full, catalog)
        short = {"model_type": name, **({"text_config": {}, "vision_config": {}} if name == "mllama" else {})}
        assert read_config(architecture, short) == read_config(architecture, full)
        component: Any = parse_component(read_config(architecture, full), name, ModelComponent, catalog)
        assert list(fitting_forms(component, catalog)) == [name]
        old = {"add_cross_attention": False, "bad_words_ids": None, "length_penalty": 1.0, "torchscript": False}
        tables = [key for key in full if key.endswith("_config")]
        whole = {**full, **{key: {**old, **full[key]} for key in tables}} if tables else {**old, **full}
        assert read_config(architecture, whole) == read_config(architecture, full)
        assert not list(component.vision.encoder.problems(None, None))
        assert read_config(architecture, write_config(architecture, component, catalog)) == read_config(
            architecture, full
        )


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("text_config", {"cross_attention_layers": [1, 2]}, at("", "text_config.cross_attention_layers = [1, 2]", 5)),
        ("text_config", {"cross_attention_layers": [4]}, at("", "text_config.cross_attention_layers = [4]", 5)),
        ("text_config", {"hidden_act": "gelu"}, at("", "hidden_act = 'gelu'", "'silu'")),
        ("text_config", {"attention_sink": 1}, at("", "text_config.attention_sink", 1)),
        (
            "vision_config",
            {"vision_output_dim": 48},
            at("", "vision_output_dim = 48"),
        ),
        ("vision_config", {"max_num_tiles": 3}, at("", "max_num_tiles = 3", "supported_aspect_ratios", 4)),
        ("vision_config", {"intermediate_layers_indices": [0, 3]}, at("", "intermediate_layers_indices = [0, 3]", 3)),
        ("", {"image_token_index": 7}, at("", "image_token_index = 7", 60)),
    ],
)
def test_what_forge_does_not_compute_is_named(table, changes, expected):
    config = TILED["mllama"].config().to_dict()
    config = {**config, **({table: {**config[table], **changes}} if table else changes)}
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fusion.sees": "all"}, at("", "fusion.sees = 'all'", "'together'")),
        ({"fusion.markers": 2}, at("", "fusion.markers = 2", 8)),
        ({"fusion.heads": 2}, at("", "fusion.heads = 2", 4)),
        ({"language.attention.head_dim": 16, "fusion.head_dim": 16}, at("", "language.*", "head_dim", 8)),
    ],
)
def test_what_no_key_describes_is_not_exported(changes, expected):
    catalog, config = Catalog.installed(), TILED["mllama"].config().to_dict()
    _, architecture = architecture_of(config, catalog)
    table = flattened(read_config(architecture, config))
    component = parse_component(nested({**table, **changes}), "mine", ModelComponent, catalog)
    with refuses_all(expected):
        write_config(architecture, component, catalog)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{{ eos_token }}{% endfor %}"
)


def test_the_token_that_marks_an_image_has_no_row_in_the_head(tmp_path):
    folder, tokenizer = tmp_path / "published", Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=special))
    size = len(tokenizer.get_vocab())
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True)])
    config = {"text_config": tiled_text(vocab_size=size), "vision_config": dict(TILED_TOWER), "image_token_index": size}
    Seeing("MllamaForConditionalGeneration", lambda: transformers.MllamaConfig(**config)).write(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    run = import_folder(folder, tmp_path / "run")
    table = tomllib.loads((run / "start.toml").read_text())["data"]["tokenizer"]
    assert table["placeholders"] == ["<|image|>"]
    out = export_run(run, tmp_path / "out")
    assert read_json(out / "config.json")["image_token_index"] == size
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again.convert_tokens_to_ids("<|image|>") == size

    own = Auto(**{key: value for key, value in table.items() if key != "type"}).build(None, list)
    assert own.vocab_size == size
    assert max(own.encode("a<|image|>b")) < size
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}
    parts = own.chat_parts([asked], "<|image|>")
    assert [own.decode(part.ids.tolist()) for part in parts] == ["", "Who?"]
    with refuses("", "<|image|>"):
        own.chat_prompt([asked])
    with refuses("placeholders", "'<|image|>'", "'<|begin_of_text|>'"):
        Auto(path=table["path"], placeholders=("<|begin_of_text|>",)).build(None, list)
