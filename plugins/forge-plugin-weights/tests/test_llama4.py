"""Llama 4: text past a chunk's end, its language model alone, and keys that Forge does not compute."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import MODELS, ids_of, logits, ours
from published_vision import MODELS as SEEING
from published_vision import Seeing, llama4
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers.models.llama4.processing_llama4 import Llama4Processor

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.command import load_trained
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_vision import GRIDS, IMAGE
from forge_plugin_weights.architectures.llama4 import LayersOfExperts
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.kinds import Unsupported
from forge_plugin_weights.tables import load_architecture, read_config, write_config

CATALOG = Catalog.installed()
NAME = "llama4_text"
LLAMA4_TEXT = load_architecture(NAME, CATALOG)
LLAMA4 = load_architecture("llama4", CATALOG)


def test_greedy_tokens_are_those_of_transformers_beyond_the_end_of_a_chunk(tmp_path):
    theirs = MODELS[NAME].write(tmp_path / "published")
    model = ours(import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False))
    prompt = ids_of()[:, :5]  # of a chunk of 7
    # Some tokens have the id of padding, which would be hidden without a mask
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": -1}
    expected = theirs.generate(prompt, do_sample=False, max_new_tokens=20, **options)[:, 5:]
    for use_cache in (True, False):
        rows = generate(model, prompt.tolist(), 20, -1, Sampling(temperature=0), use_cache=use_cache)
        assert rows == expected.tolist()


def test_the_language_model_comes_in_and_goes_out_without_its_vision_tower(tmp_path):
    theirs = SEEING["llama4, experts"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=NAME)
    ids = ids_of() % 56
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1
    assert (logits(ours(run), ids) - expected).abs().max() < 1e-4
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        export_run(run, tmp_path / "out"), output_loading_info=True
    )
    assert not any(loading.values())
    assert type(again) is transformers.Llama4ForCausalLM
    with torch.no_grad():
        assert (again(ids).logits - expected).abs().max() < 1e-5


def config_of(**keys: Any) -> dict[str, Any]:
    return {**json.loads(MODELS[NAME].model().config.to_json_string(use_diff=False)), **keys}


def test_keys_in_the_spelling_of_published_files_mean_the_same():
    plain = read_config(LLAMA4_TEXT, config_of())
    spelt = config_of(attn_temperature_tuning=4, floor_scale=5.0, no_rope_layers=[], moe_layers=None, layer_types=None)
    assert read_config(LLAMA4_TEXT, spelt) == plain


@pytest.mark.parametrize(
    ("layers", "keys", "first", "every"),
    [
        (1, {"interleave_moe_layer_step": 2}, 1, 1),  # there are none
        (3, {"moe_layers": []}, 3, 1),
        (5, {"interleave_moe_layer_step": 2}, 0, 2),
        (5, {"moe_layers": [2, 4]}, 1, 2),
        (5, {"moe_layers": [3]}, 2, 2),
        (5, {"moe_layers": [4]}, 4, 1),
    ],
)
def test_layers_with_experts_are_named_by_two_numbers(layers: int, keys: dict[str, Any], first: int, every: int):
    assert LayersOfExperts().read({"num_hidden_layers": layers, **keys}) == {
        "ffn.first_dense": first,
        "ffn.every": every,
    }


@pytest.mark.parametrize("listed", [[1], [0, 1, 3], [1, 2], [3, 2], [2, 2]])
def test_other_lists_of_layers_with_experts_are_refused(listed: list[int]):
    with pytest.raises(Unsupported, match="moe_layers"):
        LayersOfExperts().read({"num_hidden_layers": 5, "moe_layers": listed})


def test_without_a_size_no_layer_has_chunks():
    attention = read_config(LLAMA4_TEXT, config_of(attention_chunk_size=None, layer_types=None))["attention"]
    assert {kind["mask"]["type"] for kind in attention["kinds"].values()} == {"forge-plugin-transformer/causal"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ({"moe_layers": [0, 3]}, r"moe_layers = \[0, 3\]"),
        ({"floor_scale": 2.5}, "floor_scale = 2.5"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 8}, "sliding_window"),
    ],
)
def test_what_forge_does_not_compute_is_refused_by_key(keys: dict[str, Any], words: str):
    with pytest.raises(JobError, match=words):
        read_config(LLAMA4_TEXT, config_of(**keys))


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("chunked", {"qk_norm_rotated": False}, "qk_norm_rotated = False, where it is True always"),
        ("chunked", {"qk_norm_eps": 0.1}, "qk_norm_eps = 0.1"),
        ("chunked", {"query_growth": 0.5}, "query_growth differs"),
        ("full_nope", {"query_growth_offset": 0}, "query_growth_offset = 0, where it is 1 always"),
        ("full_nope", {"qk_norm": "head"}, "qk_norm differs"),
        ("full_nope", {"mask": {"type": "chunked", "chunk_size": 3}}, "chunk_size differs"),
        ("full_nope", {"mask": {"type": "global_local", "window": 3}}, "mask.type = 'forge-plugin-transformer/global"),
    ],
)
def test_a_model_that_it_cannot_describe_is_not_exported_as_one(kind: str, keys: dict[str, Any], words: str):
    table = json.loads(json.dumps(read_config(LLAMA4_TEXT, config_of())))
    table["attention"]["kinds"][kind] |= keys
    model = parse_component(table, "job.toml", ModelComponent, CATALOG)
    with pytest.raises(JobError, match=words):
        write_config(LLAMA4_TEXT, model, CATALOG)


def test_a_mask_is_refused_by_families_without_one():
    config = json.loads(MODELS["llama"].model().config.to_json_string(use_diff=False))
    table = json.loads(json.dumps(read_config(load_architecture("llama", CATALOG), config)))
    table["attention"]["mask"] = {"type": "chunked", "chunk_size": 4}
    model = parse_component(table, "job.toml", ModelComponent, CATALOG)
    with pytest.raises(JobError, match=r"attention\.mask"):
        write_config(load_architecture("llama", CATALOG), model, CATALOG)


def test_a_prompt_has_the_tiles_and_texts_that_its_processor_writes(tmp_path):
    folder, marks = tmp_path / "published", ["image_start", "image_end", "image", "patch", "tile_x_separator"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"]))
    named = [f"<|{mark}|>" for mark in [*marks, "tile_y_separator"]]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in named])
    patch = tokenizer.token_to_id("<|patch|>")

    def config() -> Any:
        own = llama4()
        own.image_token_index, own.text_config.vocab_size = patch, len(tokenizer.get_vocab())
        return own

    Seeing("Llama4ForConditionalGeneration", config).write(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    settings = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 16, "width": 16}, "max_patches": 4}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "resize_to_max_canvas": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    run = import_folder(folder, tmp_path / "run")
    start = (run / "start.toml").read_text()
    assert 'resize = { type = "canvas_tiles", max_tiles = 4, overview = "last" }\n' in start
    assert read_json(export_run(run, tmp_path / "out") / "preprocessor_config.json") == settings

    trained, files = load_trained(str(run), "cpu"), []
    for number, sides in enumerate(((30, 50), (9, 12), (16, 40))):
        picture = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8)
        Image.fromarray(picture).save(path := tmp_path / f"{number}.png")
        files.append(str(path))
    prompts = prompts_with_images(["<image>a", "b<image>?<image>"], files, trained.job, trained.tokenizer)
    texts = [Llama4Processor._prompt_split_image(None, tiles, 4) for tiles in ((2, 2), (1, 1), (1, 3))]
    expected = [tokenizer.encode(text).ids for text in (f"{texts[0]}a", "b{}?{}".format(*texts[1:]))]
    assert [[patch if id_ == IMAGE else id_ for id_ in ids] for ids in prompts.ids] == expected
    assert prompts.entries[GRIDS].prod(-1).sum(1).tolist() == [5 * 16, 5 * 16]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": 18}, "image_size = 18, which patch_size = 4 does not divide"),
        ({"image_size": [16, 20]}, r"image_size = \[16, 20\]; images and patches are squares"),
        ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio = 0.3"),
        ({"intermediate_size": 40}, "intermediate_size = 40, and hidden_size / pixel_shuffle_ratio² = 96"),
        ({"vision_output_dim": 24}, "projector_input_dim = 20, projector_output_dim = 20, vision_output_dim = 24"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0}}, "rope_parameters = .*yarn"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"norm_eps": 1e-6}, "norm_eps = 1e-06"),
        ({"vision_feature_layer": -2}, "vision_feature_layer = -2"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy = 'full'"),
    ],
)
def test_what_its_tower_cannot_be_is_refused_by_key(changes: dict[str, Any], words: str):
    config = llama4().to_dict()
    with pytest.raises(JobError, match=words):
        read_config(LLAMA4, {**config, "vision_config": {**config["vision_config"], **changes}})


def test_sides_may_be_pairs_and_the_base_of_the_encoding_may_stand_in_a_table():
    config = llama4().to_dict()
    tower = {key: value for key, value in config["vision_config"].items() if key != "rope_parameters"}
    pairs = {"image_size": [16, 16], "patch_size": (4, 4), "rope_theta": 10000.0, "rope_parameters": None}
    assert read_config(LLAMA4, {**config, "vision_config": {**tower, **pairs}}) == read_config(LLAMA4, config)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("encoder", {"rotary_theta": 0.0}, "vision.encoder.rotary_theta = 0.0"),
        ("encoder", {"size": [16, 24]}, r"vision.encoder.size = \[16, 24\], where it is a square"),
        ("encoder", {"hidden": 40}, "vision.encoder.hidden = 40, where it is 96 with vision.adapter.factor = 2"),
        ("encoder", {"qk_norm": True}, "vision.encoder.qk_norm"),
        ("adapter", {"hidden": [20]}, r"vision.adapter.hidden = \[20\]"),
        ("adapter", {"bias": True}, "vision.adapter.bias = True"),
    ],
)
def test_a_tower_that_it_cannot_describe_is_not_exported_as_one(part: str, changes: dict[str, Any], words: str):
    table = json.loads(json.dumps(read_config(LLAMA4, llama4().to_dict())))
    table["vision"][part] |= changes
    with pytest.raises(JobError, match=words):
        write_config(LLAMA4, parse_component(table, "job.toml", ModelComponent, CATALOG), CATALOG)
