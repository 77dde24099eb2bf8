"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 from their files and back, with images and videos in one prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from published_models import ours
from published_qwen import MODELS, Seeing, in_blocks, prompts_of, rope
from published_vision import wide_logits
from test_published_models import bytes_of, tensors_of
from test_published_vision import check_table, check_tensors, imported, loaded, logits

from forge_core.checkpoint.resume import locate
from forge_core.config.load import parse_job
from forge_core.plugins.catalog import Catalog
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize import NativeResize
from forge_plugin_images.resize.any_size import NativeResizer
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import architecture_of, load_architecture, read_config, write_config
from forge_testing.refusals import at, refuses, refuses_all

BOUNDS = {
    "qwen2_5_vl": (56 * 56, 28 * 28 * 1280),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), (256 * 256, 4096 * 4096)),
}
"""Pixels of an image by the published files, `shortest_edge` and `longest_edge`, of which `config.json` has none."""

TWICE = "Qwen/Qwen2.5-VL-3B-Instruct, saved by transformers 4.52.4"


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_that_sees_videos_comes_in_and_goes_out(tmp_path, name):
    theirs, run = imported(tmp_path, MODELS[name])
    ours32, ours64 = ours(run), ours(run, "fp64")
    prompts = prompts_of(name.partition(",")[0])
    inputs = prompts.inputs(ours32.vision)
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, prompts.batch) - expected).abs().max() < 1e-4
    assert (logits(ours64, prompts.batch) - wide_logits(theirs, prompts.inputs(ours64.vision))).abs().max() < 1e-9

    again = loaded(export_run(run, tmp_path / "out"), theirs)
    check_tensors(theirs, again, ())
    size = read_json(tmp_path / "out/preprocessor_config.json")["size"]
    assert (size["shortest_edge"], size["longest_edge"]) == BOUNDS[name.partition(",")[0].removesuffix("_moe")]
    before, after = (read_json(tmp_path / folder / "config.json") for folder in ("published", "out"))
    _, architecture = architecture_of(before, Catalog.installed())
    if name != "qwen3_vl_moe":  # whose number of experts has another of its two names
        check_table(before, after, {"tie_word_embeddings"})
    assert read_config(architecture, after) == read_config(architecture, before)
    assert torch.equal(again(**inputs).logits, expected)
    one = slice(0, 1)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    prompt = prompts.inputs(ours32.vision, one)
    settings["attention_mask"] = torch.ones_like(prompt["input_ids"])
    tokens = again.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :].tolist()
    entries = {key: entry[one] for key, entry in prompts.batch.items() if key != "input_ids"}
    ids = prompts.batch["input_ids"][0].tolist()
    for use_cache in (True, False):
        said = generate(ours32, [ids], 8, -1, Sampling(temperature=0), entries=entries, use_cache=use_cache)
        assert said == [tokens]


def test_experts_that_transformers_saved_again_come_in_and_an_export_has_the_published_layout(tmp_path):
    published = MODELS["qwen3_vl_moe"]
    published.write(tmp_path / "published")
    theirs = Seeing(published.name, published.config).write(tmp_path / "saved")
    before, saved = tensors_of(tmp_path / "published"), tensors_of(tmp_path / "saved")
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert all(saved[name].shape == before[name].mT.shape != before[name].shape for name in experts)
    out = export_run(import_folder(tmp_path / "saved", tmp_path / "run", tokenizer=False), tmp_path / "out")
    after = tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[name]) == bytes_of(before[name]) for name in before)
    check_tensors(theirs, loaded(out, theirs), ())


@pytest.mark.parametrize("features", [24, 16, 32], ids=["neither is square", "gate_up is", "down is"])
def test_two_shapes_of_experts_say_how_they_were_saved(features):
    layer, width, experts = "model.language_model.layers.1.mlp.experts", 32, 4
    published = {
        f"{layer}.gate_up_proj": (experts, width, 2 * features),
        f"{layer}.down_proj": (experts, features, width),
    }
    saved = {name: (experts, columns, rows) for name, (_, rows, columns) in published.items()}
    architecture = load_architecture("qwen3_vl_moe", Catalog.installed())
    assert architecture.of_files(published) is architecture
    assert type(architecture.of_files(saved)).__name__ == "Qwen3VLMoESaved"


PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 4 * 64, "max_pixels": 40 * 64, "processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {
        "size": {"shortest_edge": 4 * 64, "longest_edge": 40 * 64},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    },
}
"""Keys of published files, for images of 16 to 160 patches."""
TIMESTAMPS = {"qwen2_5_vl": "positions", "qwen3_vl": "text"}
VIDEOS = {
    "qwen2_5_vl": 'timestamps = "positions", '
    'sampling = { type = "forge-plugin-images/fps", multiple = 2, fps = 2.0, max_frames = 768 }',
    "qwen3_vl": 'timestamps = "text", '
    'timestamp_format = "<{seconds:.1f} seconds><|vision_start|>{frame}<|vision_end|>", '
    'sampling = { type = "forge-plugin-images/uniform", fps = 2.0, max_frames = 768 }',
}
SHARED = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_the_published_processor_and_its_files_travel(tmp_path, name):
    settings, video = {**SHARED, **PROCESSORS[name]}, {"fps": 2, "size": {"shortest_edge": 3, "longest_edge": 5}}
    folder = tmp_path / "published"
    MODELS[name].write(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    run = import_folder(folder, tmp_path / "run", tokenizer=False)
    keys = 'resize = { type = "native", min_patches = 16, max_patches = 160 }'
    start = (run / "start.toml").read_text()
    assert f" [[data.sources]]: {keys}\n" in start
    assert f" [data.sources.video]: {VIDEOS[name]}\n" in start
    [source] = parse_job(locate(run, "full")[1]["job"], "job.toml", Catalog.installed()).data.sources
    assert source.resize == NativeResize(min_patches=16, max_patches=160)
    assert (source.video.timestamps, source.video.sampling.fps) == (TIMESTAMPS[name], 2.0)
    model: Any = ours(run)
    reference = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor = ImageProcessor(NativeResizer(model.vision.normalise.form, 160, 16))
    for size in ((37, 61), (100, 33), (9, 12), (160, 90)):
        photo = Image.fromarray(np.random.default_rng(size).integers(0, 256, (*size, 3), np.uint8))
        expected, [grid] = processor.patches(photo), processor.grids(size)
        theirs = reference(photo, return_tensors="pt")
        assert theirs["image_grid_thw"].tolist() == [list(grid)]
        own = in_blocks(model.vision.normalise(torch.from_numpy(expected)), tuple(grid))
        assert (own - theirs["pixel_values"]).abs().max() < 1e-6

    out = export_run(run, tmp_path / "out")
    written = read_json(out / "preprocessor_config.json")
    assert {key: written[key] for key in settings} == settings
    for key, value in (("patch_size", 8), ("merge_size", 4)):
        (folder / "preprocessor_config.json").write_text(json.dumps({**settings, key: value}))
        with refuses("", f"{key} = {value}", "preprocessor_config.json", "vision_config"):
            import_folder(folder, tmp_path / "other", tokenizer=False)


def test_an_export_says_how_videos_are_processed(tmp_path):
    """By a file that travelled along with the tokenizer, or else by the class, whose patches are the model's."""
    _, run = imported(tmp_path, MODELS["qwen3_vl"])
    written = read_json(export_run(run, tmp_path / "out") / "video_preprocessor_config.json")
    sizes = {key: value for key, value in SHARED.items() if key != "image_processor_type"}
    assert sizes.items() <= written.items()
    assert written["video_processor_type"] == "Qwen3VLVideoProcessor"
    (run / "tokenizer").mkdir()
    for name, content in (
        ("video_preprocessor_config.json", {"fps": 3}),
        ("processor_config.json", {"video_processor": {}}),
    ):
        (run / "tokenizer" / name).write_text(json.dumps(content))
        again = export_run(run, tmp_path / name)
        assert read_json(again / name) == content
        (run / "tokenizer" / name).unlink()
    assert not (again / "video_preprocessor_config.json").exists()


@pytest.mark.parametrize(
    ("name", "table", "changes", "expected"),
    [
        ("qwen2_5_vl", "text_config", {"use_sliding_window": True}, at("", "use_sliding_window", "windows")),
        ("qwen2_5_vl", "text_config", {"head_dim": 16}, at("", "head_dim = 16", "hidden_size", "num_attention_heads")),
        ("qwen2_5_vl", "vision_config", {"window_size": 20}, at("", "window_size = 20", "windows", 8)),
        ("qwen2_5_vl", "preprocessor_config", {"resample": 2}, at("", "resample", "bilinear", "bicubic")),
        (
            "qwen3_vl",
            "vision_config",
            {"rope_parameters": {"rope_type": "linear"}},
            at("", "rope_parameters = {'rope_type': 'linear'}", "axial"),
        ),
        (
            "qwen3_vl",
            "vision_config",
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
            at("", "rope_parameters = {'rope_theta': 10000.0, 'factor': 2.0}", "rope_theta"),
        ),
        (
            "qwen3_vl",
            "text_config",
            rope(mrope_interleaved=False),
            at("", "mrope_interleaved = False"),
        ),
        (
            "qwen3_vl",
            "text_config",
            {"rope_parameters": {"rope_type": "yarn"}},
            at("", "rope_type = 'yarn'"),
        ),
        (
            "qwen3_vl",
            "vision_config",
            {"num_position_embeddings": 24},
            at("", "num_position_embeddings = 24", "square"),
        ),
        (
            "qwen3_vl",
            "vision_config",
            {"deepstack_visual_indexes": [2, 0]},
            at("", "deepstack_visual_indexes = [2, 0]"),
        ),
        ("qwen3_vl", "vision_config", {"hidden_act": "relu"}, at("", "hidden_act = 'relu'")),
    ],
)
def test_what_forge_does_not_compute_is_named(name, table, changes, expected):
    config = MODELS[name].config().to_dict()
    config[table] = {**config.get(table, {}), **changes}
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(expected):
        read_config(architecture, config)


def test_keys_that_versions_4_52_to_4_56_write_twice_may_not_disagree():
    config = json.loads(Path(__file__).with_name("published_vision_configs.json").read_text())[TWICE]
    _, architecture = architecture_of(config, Catalog.installed())
    assert read_config(architecture, {**config, "sliding_window": None})  # no layer has a window
    with refuses_all(at("hidden_size", "3584", "text_config.hidden_size = 2048"), at("rope_theta", "1.0")):
        read_config(architecture, {**config, "hidden_size": 3584, "rope_theta": 1.0})
    with refuses_all(at("novelty", "5")):
        read_config(architecture, {**config, "novelty": 5})


def test_a_rate_that_no_key_can_say_is_not_exported(tmp_path):
    _, run = imported(tmp_path, MODELS["qwen2_5_vl"])
    _, manifest = locate(run, "full")
    text = manifest["job"].replace("positions_per_second = 3.0", "positions_per_second = 2.5")
    assert text != manifest["job"]
    model = parse_job(text, "job.toml", Catalog.installed()).model
    with refuses("", "positions_per_second = 2.5"):
        write_config(architecture_of({"model_type": "qwen2_5_vl"}, Catalog.installed())[1], model, Catalog.installed())


def test_a_checkpoint_without_its_run_is_exported_without_what_only_the_run_has(tmp_path):
    _, run = imported(tmp_path, MODELS["qwen3_vl"])
    alone = shutil.copytree(locate(run, "full")[0], tmp_path / "alone")
    written = read_json(export_run(alone, tmp_path / "out") / "config.json")
    assert written["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert not {"image_token_id", "video_token_id"} & written.keys()  # of the tokenizer in the run folder
