"""Mistral 3 with Pixtral's tower from its files and back: images of several sizes, texts between their rows."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import ours
from published_vision import ANY_SIZE, MISTRAL3, PLACEHOLDER, Seeing, mistral3, text, wide_logits
from test_published_models import bytes_of, tensors_of
from test_published_vision import check_table, check_tensors, imported, loaded, logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_generate.command import load_trained
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize.any_size import LongestResizer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, Grid
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import architecture_of, read_config
from forge_testing.refusals import at, refuses_all

PATCH, MERGE = 4, 2
BREAK, END = 61, 62
ROWS: Sequence[Sequence[tuple[int, int]]] = [[(4, 6), (2, 2), (2, 10)], [(8, 2)], []]
"""Rows and columns of patches of the images of each prompt; the last has none."""


def batch_of(rows: Sequence[Sequence[tuple[int, int]]] = ROWS, length: int = 40) -> dict[str, Tensor]:
    """Prompts with one token behind each row of features, and another one behind the last."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (len(rows), length), generator=generator)
    patches = torch.zeros(len(rows), 64, 3 * PATCH**2, dtype=torch.uint8)
    grids = torch.zeros(len(rows), 3, 3, dtype=torch.int64)
    for row, images in enumerate(rows):
        place, first = 2, 0
        for number, (down, across) in enumerate(images):
            marks = ([IMAGE] * (across // MERGE) + [BREAK]) * (down // MERGE)
            marks[-1] = END
            ids[row, place : place + len(marks)] = torch.tensor(marks)
            place += len(marks) + 2
            count = down * across
            patches[row, first : first + count] = torch.randint(256, (count, 3 * PATCH**2), generator=generator)
            grids[row, number] = torch.tensor([1, down, across])
            first += count
    return {"input_ids": ids, PATCHES: patches, GRIDS: grids}


def inputs_for(vision: Any, batch: Mapping[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
    """What `transformers` takes for some rows, with pixels as our `vision` normalises them, padded to one size."""
    ids, pixels, sizes = batch["input_ids"][rows], [], []
    for patches, grids in zip(vision.normalise(batch[PATCHES][rows]), batch[GRIDS][rows].tolist(), strict=True):
        for _, down, across in (grid for grid in grids if grid[0]):
            own, patches = patches[: down * across], patches[down * across :]
            image = own.view(down, across, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4)
            pixels.append(image.reshape(3, down * PATCH, across * PATCH))
            sizes.append([down * PATCH, across * PATCH])
    entries = {"input_ids": ids.where(ids >= 0, PLACEHOLDER)}
    if not pixels:
        return entries
    most = [max(side) for side in zip(*sizes, strict=True)]
    padded = [F.pad(image, (0, most[1] - image.shape[2], 0, most[0] - image.shape[1]), value=9.0) for image in pixels]
    return {**entries, "pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}


@pytest.mark.parametrize("name", ANY_SIZE)
@torch.no_grad()
def test_a_model_that_sees_images_of_any_size_comes_in_and_goes_out(tmp_path, name):
    theirs, run = imported(tmp_path, ANY_SIZE[name])
    ours32, ours64, batch = ours(run), ours(run, "fp64"), batch_of()
    inputs = inputs_for(ours32.vision, batch)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, batch) - expected).abs().max() < 1e-4
    assert (logits(ours64, batch) - wide_logits(theirs, inputs_for(ours64.vision, batch))).abs().max() < 1e-9
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}  # a factor is without effect behind the first norm
    assert (theirs(**other).logits - expected)[:2].abs().amax((1, 2)).min() > 1e-2
    only_text = batch_of([[]])
    assert (logits(ours64, {"input_ids": only_text["input_ids"]}) - logits(ours64, only_text)).abs().max() < 1e-9

    out = export_run(run, tmp_path / "out")
    again = loaded(out, theirs)
    check_tensors(theirs, again, ())
    before, after = tensors_of(tmp_path / "published"), tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[key]) == bytes_of(before[key]) for key in before)
    configs = [read_json(folder / "config.json") for folder in (tmp_path / "published", out)]
    check_table(*configs, {"tie_word_embeddings"})
    _, architecture = architecture_of(configs[0], Catalog.installed())
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


def test_a_configuration_that_says_nothing_of_the_head_has_one(tmp_path):
    """As of Mistral Small 3.1, whose files have a head, which `transformers` keeps though its class ties by default."""
    theirs = ANY_SIZE["mistral3"].write(tmp_path / "published")
    path = tmp_path / "published/config.json"
    config = {key: value for key, value in read_json(path).items() if key != "tie_word_embeddings"}
    config["text_config"] = {k: value for k, value in config["text_config"].items() if k != "tie_word_embeddings"}
    path.write_text(json.dumps(config))
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    for folder in (tmp_path / "published", export_run(run, tmp_path / "out")):
        again = type(theirs).from_pretrained(folder)
        assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)
        check_tensors(theirs, again, ())


SETTINGS: Mapping[str, Any] = {
    "size": {"longest_edge": 40},
    "patch_size": {"height": PATCH, "width": PATCH},
    "image_mean": [0.4, 0.5, 0.6],
}
SIZES_OF_IMAGES = [(37, 61), (100, 33), (9, 12), (41, 40), (40, 8), (1, 1), (5, 3), (30, 200)]


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def published_processor(**settings: Any) -> PixtralImageProcessorPil:
    """Returns the image processor with squares of patches, by which the processor of prompts calls it."""
    return PixtralImageProcessorPil(**{**settings, "patch_size": {"height": PATCH * MERGE, "width": PATCH * MERGE}})


def test_pixels_are_those_of_the_published_processor_and_its_file_travels(tmp_path):
    folder = tmp_path / "published"
    ANY_SIZE["mistral3"].write(folder)
    PixtralImageProcessorPil(**SETTINGS).save_pretrained(folder)
    run = import_folder(folder, tmp_path / "run", tokenizer=False)
    start = (run / "start.toml").read_text()
    assert ' [[data.sources]]: resize = { type = "longest", longest_side = 40 }\n' in start
    assert ' [data.sources.tile_text] with feature_row = "[IMG_BREAK]", after = "[IMG_END]"\n' in start
    vision: Any = ours(run).vision
    processor, reference = (
        ImageProcessor(LongestResizer(vision.normalise.form, 40)),
        published_processor(**SETTINGS),
    )
    for size in SIZES_OF_IMAGES:
        patches, [grid] = processor.patches(photo(*size)), processor.grids(size)
        theirs = reference(photo(*size), return_tensors="pt")
        assert [side * PATCH for side in grid[1:]] == [*theirs["image_sizes"][0]]
        pixels = theirs["pixel_values"][0].unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
        expected = pixels.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)
        assert (vision.normalise(torch.from_numpy(patches)) - expected).abs().max() < 1e-6
    assert processor.grids((2, 400)) == (Grid(1, 2, 10),)  # of which the published one leaves no row

    out = export_run(run, tmp_path / "out")
    assert read_json(out / "preprocessor_config.json") == read_json(folder / "preprocessor_config.json")
    assert read_json(out / "processor_config.json")["spatial_merge_size"] == MERGE


@pytest.fixture
def texts_of_images(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what the published processor writes for an image of a size, in texts."""
    pil = "transformers.models.pixtral.image_processing_pil_pixtral"
    # The processor's module asks for the other backend, which needs torchvision, of which it uses one function.
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", sys.modules[pil])
    module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    own = SimpleNamespace(patch_size=PATCH, spatial_merge_size=MERGE, **tokens)
    return lambda size: module.PixtralProcessor.replace_image_token(own, {"image_sizes": [size]}, 0)


def test_texts_between_rows_are_those_of_the_published_processor(tmp_path, texts_of_images, capsys):
    folder = tmp_path / "published"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"]))
    marks = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    size, image = len(tokenizer.get_vocab()), tokenizer.token_to_id("[IMG]")
    Seeing(MISTRAL3, lambda: mistral3(text("Mistral", vocab_size=size), image_token_index=image)).write(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    PixtralImageProcessorPil(**SETTINGS).save_pretrained(folder)
    run = import_folder(folder, tmp_path / "run")
    assert read_json(export_run(run, tmp_path / "out") / "config.json")["image_token_index"] == image

    trained = load_trained(str(run), "cpu")
    files = []
    for number, sides in enumerate(((37, 61), (5, 3), (40, 8))):
        photo(*sides).save(path := tmp_path / f"{number}.png")
        files.append(str(path))
    prompts = prompts_with_images(["<image>a<image>", "b<image>?"], files, trained.job, trained.tokenizer)
    reference, expected = published_processor(**SETTINGS), []
    for prompt, numbers in (("{}a{}", (0, 1)), ("b{}?", (2,))):
        sizes = [reference(Image.open(files[number]), return_tensors="pt")["image_sizes"][0] for number in numbers]
        expected.append(tokenizer.encode(prompt.format(*map(texts_of_images, sizes))).ids)
    own = [[image if id_ == IMAGE else id_ for id_ in ids] for ids in prompts.ids]
    assert own == expected
    capsys.readouterr()
    arguments = [*(part for file in files[:2] for part in ("--image", file)), "--max-tokens", "2"]
    assert main(["generate", str(run), "--prompt", "What?", *arguments]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("vision_config", {"head_dim": 16}, at("", "head_dim = 16", "hidden_size", 8)),
        ("vision_config", {"hidden_act": "relu"}, at("", "hidden_act = 'relu'", "'silu'", "'gelu'")),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, at("", "rope_type", "yarn", "axial")),
        ("preprocessor_config", {"patch_size": 8}, at("", "patch_size = 8", "preprocessor_config.json", PATCH)),
        ("preprocessor_config", {"resample": 2}, at("", "resample", "bilinear", "bicubic")),
        ("", {"vision_feature_layer": -2}, at("", "vision_feature_layer = -2")),
        ("", {"vision_feature_layer": [-2, -1]}, at("", "vision_feature_layer = [-2, -1]")),
        ("", {"projector_hidden_act": "silu"}, at("", "projector_hidden_act = 'silu'")),
        ("text_config", {"model_type": "mamba"}, at("", "text_config.model_type = 'mamba'")),
    ],
)
def test_what_forge_does_not_compute_is_named(table, changes, expected):
    config = ANY_SIZE["mistral3"].config().to_dict()
    config |= {table: {**config.get(table, {}), **changes}} if table else changes
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, config)
