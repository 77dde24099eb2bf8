"""Kimi-K2.5 with its tower from its files and back: images of several sizes, which keep them."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import ours
from published_vision import NAVIT, PATCH, PLACEHOLDER, PublishedKimi, kimi, wide_logits
from test_published_models import bytes_of, tensors_of
from test_published_vision import check_table, check_tensors, imported, loaded, logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.command import load_trained
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.resize.any_size import TopLeftResizer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.kinds import PIXELS
from forge_plugin_weights.pixels import image_table
from forge_plugin_weights.tables import flattened, load_architecture, read_config, write_config
from forge_testing.refusals import at, lacks, naming, refuses_all

MERGE = 2
ROWS: Sequence[Sequence[tuple[int, int]]] = [[(4, 6), (2, 2), (2, 14)], [(8, 6)], []]
"""Rows and columns of patches of the images of each prompt; the last has none."""
CATALOG = Catalog.installed()
KIMI = load_architecture("kimi_k25", CATALOG)


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
            ids[row, place : place + count // MERGE**2] = IMAGE
            place += count // MERGE**2 + 2
            patches[row, first : first + count] = torch.randint(256, (count, 3 * PATCH**2), generator=generator)
            grids[row, number] = torch.tensor([1, down, across])
            first += count
    return {"input_ids": ids, PATCHES: patches, GRIDS: grids}


def inputs_for(vision: Any, batch: Mapping[str, Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
    """What `transformers` takes for some rows: all patches of all images, and their grids."""
    ids, grids = batch["input_ids"][rows], batch[GRIDS][rows]
    entries = {"input_ids": ids.where(ids >= 0, PLACEHOLDER)}
    counts = grids.prod(-1).sum(-1).tolist()
    if not sum(counts):
        return entries
    patches = vision.normalise(batch[PATCHES][rows])
    pixels = torch.cat([row[:count] for row, count in zip(patches, counts, strict=True)])
    own = grids.flatten(0, 1)
    return {**entries, "pixel_values": pixels.view(-1, 3, PATCH, PATCH), "image_grid_thw": own[own[:, 0] > 0]}


@torch.no_grad()
def test_kimi_k25_comes_in_and_goes_out(tmp_path):
    theirs, run = imported(tmp_path, NAVIT["kimi_k25, experts"])
    ours32, ours64, batch = ours(run), ours(run, "fp64"), batch_of()
    inputs = inputs_for(ours32.vision, batch)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, batch) - expected).abs().max() < 1e-4
    wide = inputs_for(ours64.vision, batch)
    assert (logits(ours64, batch) - wide_logits(theirs, wide)).abs().max() < 1e-9
    turned = {**inputs, "image_grid_thw": inputs["image_grid_thw"][:, [0, 2, 1]]}  # as many patches, at other places
    assert (theirs(**turned).logits - expected)[:2].abs().amax((1, 2)).min() > 1e-2

    theirs.save_pretrained(tmp_path / "saved")  # by other names
    saved = dict(ours(import_folder(tmp_path / "saved", tmp_path / "same", tokenizer=False)).named_parameters())
    own = dict(ours32.named_parameters())
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.items())

    out = export_run(run, tmp_path / "out")
    again = loaded(out, theirs)
    check_tensors(theirs, again, ())
    before, after = tensors_of(tmp_path / "published"), tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[key]) == bytes_of(before[key]) for key in before)
    configs = [read_json(folder / "config.json") for folder in (tmp_path / "published", out)]
    check_table(*(config["vision_config"] for config in configs), set())
    outside = [{key: value for key, value in each.items() if not key.endswith("_config")} for each in configs]
    check_table(*outside, {"tie_word_embeddings"})
    assert read_config(KIMI, configs[1]) == read_config(KIMI, configs[0])
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


@pytest.fixture
def published_code() -> Any:
    """Functions of the image processor, whose module needs torchvision, which they do not."""
    spec = find_spec("transformers.models.kimi_k25.image_processing_kimi_k25")
    assert spec is not None
    assert spec.origin is not None
    known: dict[str, Any] = {"math": math}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in ("navit_resize", "patchify"):
            exec(compile(ast.unparse(node), spec.origin, "exec"), known)
    return SimpleNamespace(**known)


SETTINGS: Mapping[str, Any] = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "max_patches": 60,
    "size": {"max_height": 12, "max_width": 12},
    "image_mean": [0.4, 0.5, 0.6],
}
FIRST_SETTINGS: Mapping[str, Any] = {
    "auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"},
    "media_proc_cfg": {
        "in_patch_limit": 60,
        "patch_limit_on_one_side": 12,
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.5, 0.5, 0.5],
        "fixed_output_tokens": None,
        "sample_fps": 2.0,
    },
}
SIZES_OF_IMAGES = [(37, 61), (100, 33), (9, 12), (8, 8), (1, 1), (5, 3), (3, 200), (300, 2)]


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def test_pixels_are_those_of_the_published_processor_and_its_file_travels(tmp_path, published_code):
    """But for what Pillow and torchvision round otherwise, the latter of which has no backend with Pillow here."""
    folder = tmp_path / "published"
    NAVIT["kimi_k25, experts"].write(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    run = import_folder(folder, tmp_path / "run", tokenizer=False)
    start = (run / "start.toml").read_text()
    assert ' [[data.sources]]: resize = { type = "top_left", max_patches = 60, max_side = 12 }\n' in start
    assert 'image_token = "<|media_pad|>"\n' in start
    vision: Any = ours(run).vision
    mean, std = np.array([0.4, 0.5, 0.6], np.float32), np.float32(0.5)
    processor = ImageProcessor(TopLeftResizer(vision.normalise.form, 60, 12))
    for size in SIZES_OF_IMAGES:
        patches, [grid] = processor.patches(photo(*size)), processor.grids(size)
        inner, outer = published_code.navit_resize(*size, PATCH, MERGE, 60, 12)
        assert outer == (grid.rows * PATCH, grid.columns * PATCH)
        black = np.zeros((*outer, 3), np.float32)
        black[: inner[0], : inner[1]] = photo(*size).resize(inner[::-1], Image.Resampling.BICUBIC)
        pixels = torch.from_numpy((black / 255 - mean) / std).permute(2, 0, 1)
        expected, down, across = published_code.patchify(None, pixels[None], PATCH)
        assert (down, across) == (grid.rows, grid.columns)
        assert (vision.normalise(torch.from_numpy(patches)) - expected[0].flatten(1)).abs().max() < 1e-6
    out = export_run(run, tmp_path / "out")
    assert read_json(out / "preprocessor_config.json") == SETTINGS
    configs = [{**kimi().to_dict(), PIXELS: settings} for settings in (SETTINGS, FIRST_SETTINGS)]
    model, first = (read_config(KIMI, config) for config in configs)
    assert first == model
    tables = [image_table(config, flattened(model)) for config in configs]
    assert tables[1] == tables[0]
    larger = {**configs[0], PIXELS: {**SETTINGS, "max_patches": 20000, "size": {"max_height": 13, "max_width": 13}}}
    table = image_table(larger, flattened(model))
    assert table is not None
    assert table.resize == {"type": "top_left", "max_patches": 18432, "max_side": 12}
    assert not lacks("; ".join(table.differences), "20000 patches", "room for 18432", "up to 13 patches", "12 here")


def test_the_keys_of_the_first_files_mean_what_those_of_version_5_do():
    config = kimi().to_dict()
    tower = {key: value for key, value in config["vision_config"].items() if key in ("patch_size", "merge_kernel_size")}
    for first, own in (
        *((f"vt_{key}", key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")),
        *(("vt_intermediate_size", "intermediate_size"), ("init_pos_emb_height", "pos_emb_height")),
        *(("init_pos_emb_width", "pos_emb_width"), ("init_pos_emb_time", "pos_emb_time")),
    ):
        tower[first] = config["vision_config"][own]
    further = {"mm_projector_type": "patchmerger", "merge_type": "sd2_tpool", "projector_ln_eps": 1e-5}
    further |= {"mm_hidden_size": 24, "text_hidden_size": 32, "projector_hidden_act": "gelu"}
    text = {**config["text_config"], "model_type": "kimi_k2"}
    outside = {"media_placeholder_token_id": PLACEHOLDER, "use_unified_vision_chunk": True}
    tables = {"vision_config": {**tower, **further}, "text_config": text}
    kept = {key: value for key, value in config.items() if key not in ("projection_hidden_size", "image_token_id")}
    assert read_config(KIMI, {**kept, **tables, **outside}) == read_config(KIMI, config)


def test_prompts_have_the_ids_of_the_published_processor(tmp_path, published_code):
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

    folder, tokenizer = tmp_path / "published", Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"]))
    marks = ["<|media_begin|>", "<|media_pad|>", "<|media_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    pad = tokenizer.token_to_id("<|media_pad|>")
    size = len(tokenizer.get_vocab())
    PublishedKimi("Kimi_K25ForConditionalGeneration", lambda: kimi(vocabulary=size, image_token_id=pad)).write(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    config = read_json(folder / "config.json")
    del config["vision_start_token_id"]  # an export has it of the tokenizer
    (folder / "config.json").write_text(json.dumps(config))
    run = import_folder(folder, tmp_path / "run")
    exported = read_json(export_run(run, tmp_path / "out") / "config.json")
    for key, mark in (("image_token_id", marks[1]), ("vision_start_token_id", marks[0])):
        assert exported[key] == tokenizer.token_to_id(mark)
    trained = load_trained(str(run), "cpu")
    files, texts = [], []
    own = SimpleNamespace(image_token="<|media_pad|>", image_processor=SimpleNamespace(merge_size=MERGE))
    for number, sides in enumerate(((37, 61), (5, 3))):
        photo(*sides).save(path := tmp_path / f"{number}.png")
        files.append(str(path))
        _, outer = published_code.navit_resize(*sides, PATCH, MERGE, 60, 12)
        grid = {"image_grid_thw": torch.tensor([[1, *(side // PATCH for side in outer)]])}
        texts.append(Kimi_K25Processor.replace_image_token(own, grid, 0))
    around = "a{}b{}?"  # a chat template writes the other marks
    prompts = prompts_with_images([around.format("<image>", "<image>")], files, trained.job, trained.tokenizer)
    [ids] = [[pad if id_ == IMAGE else id_ for id_ in ids] for ids in prompts.ids]
    assert ids == tokenizer.encode(around.format(*texts)).ids


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("vision_config", {"pos_emb_width": 4}, at("", "pos_emb_height = 5, pos_emb_width = 4")),
        ("vision_config", {"merge_kernel_size": [2, 1]}, at("", "merge_kernel_size = [2, 1]")),
        ("vision_config", {"hidden_act": "gelu"}, at("", "hidden_act = 'gelu'")),
        ("vision_config", {"pos_emb_time": 8}, at("", "pos_emb_time = 8", "clips")),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, at("", "rope_type", "yarn", "axial")),
        ("vision_config", {"video_attn_type": "spatial"}, at("", "video_attn_type = 'spatial'")),
        ("", {"projection_hidden_size": 32}, at("", "projection_hidden_size = 32", 24)),
        ("preprocessor_config", {"patch_size": 8}, at("", "patch_size = 8", "preprocessor_config.json", PATCH)),
        ("preprocessor_config", {"merge_size": 1}, at("", "merge_size = 1", "preprocessor_config.json", MERGE)),
        ("preprocessor_config", {"do_resize": False}, at("", "do_resize", "preprocessor_config.json")),
        ("preprocessor_config", {"resample": 2}, at("", "resample", "bilinear", "bicubic")),
        ("preprocessor_config", {"media_proc_cfg": {"fixed_output_tokens": 4}}, at("", "fixed_output_tokens = 4")),
        ("preprocessor_config", {"media_proc_cfg": {"novelty": 4}}, at("", "media_proc_cfg", "novelty")),
    ],
)
def test_what_forge_does_not_compute_is_named(table, changes, expected):
    config = kimi().to_dict()
    config |= {table: {**config.get(table, {}), **changes}} if table else changes
    with refuses_all(expected):
        read_config(KIMI, config)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("encoder", {"last_norm": False}, ["vision.encoder.last_norm = False", True]),
        ("encoder", {"table_interpolation": "aligned"}, ["table_interpolation = 'aligned'", "'bicubic'"]),
        ("encoder", {"table": 0, "table_interpolation": "bicubic"}, ["vision.encoder.table = 0"]),
        ("encoder", {"frames": 2}, ["vision.encoder.frames = 2", 1]),
        ("encoder", {"rates_in_turns": True}, ["vision.encoder.rates_in_turns"]),
        ("adapter", {"joined": True}, ["vision.adapter.joined = True", False]),
        ("adapter", {"hidden": 7}, ["vision.adapter.hidden"]),
    ],
)
def test_a_tower_that_no_key_describes_is_not_exported(part, changes, words):
    table = json.loads(json.dumps(read_config(KIMI, kimi().to_dict())))
    table["vision"][part] |= changes
    with pytest.raises(JobError, match=naming(*words)):
        write_config(KIMI, parse_component(table, "job.toml", ModelComponent, CATALOG), CATALOG)
