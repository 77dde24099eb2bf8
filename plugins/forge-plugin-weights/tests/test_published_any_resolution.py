"""LLaVA-NeXT and LLaVA-OneVision, from their files and back: logits with images of several shapes, processors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import transformers
from PIL import Image
from published_models import WINDOWS, lifted, ours
from published_vision import PATCH, PLACEHOLDER, REST, SIDE, Seeing, clip, siglip, text, wide
from test_published_vision import check_table, check_tensors, loaded, logits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from forge_core.cli import main
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize.joined import AnyResolutionResizer
from forge_plugin_images.resize.one_size import CropResizer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, VIDEO, Grid
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.tables import HARMLESS, architecture_of, read_config, write_config
from forge_testing.refusals import at, refuses_all

PAIRS = [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]]
CLIP = PLACEHOLDER + 1
"""The token that stands for a video."""
FRAMES = 3


def next_(language: Any, tower: Any, **keys: Any) -> Any:
    pinpoints = [[tower.image_size * side for side in pair] for pair in PAIRS]
    settings = {"image_token_index": PLACEHOLDER, "image_grid_pinpoints": pinpoints, **keys}
    return transformers.LlavaNextConfig(text_config=language, vision_config=tower, **settings)


def onevision(language: Any, tower: Any, **keys: Any) -> Any:
    pinpoints = [[tower.image_size * side for side in pair] for pair in [[1, 1], *PAIRS]]
    settings = {"image_token_index": PLACEHOLDER, "video_token_index": CLIP, "image_grid_pinpoints": pinpoints, **keys}
    return transformers.LlavaOnevisionConfig(text_config=language, vision_config=tower, **settings)


MODELS: Mapping[str, Seeing] = {
    "llava_next": Seeing(
        "LlavaNextForConditionalGeneration",
        lambda: next_(text("Mistral", **WINDOWS), clip()),
        ("encoder.layers.2.", "post_layernorm."),
    ),
    "llava_onevision": Seeing(
        "LlavaOnevisionForConditionalGeneration",
        lambda: onevision(
            text("Qwen2", tie_word_embeddings=True),
            siglip(image_size=REST + PATCH * SIDE, vision_use_head=False),
            vision_aspect_ratio="anyres_max_2",
        ),
        ("post_layernorm.",),
    ),
}
PROCESSORS = {"llava_next": "LlavaNextImageProcessorPil", "llava_onevision": "LlavaOnevisionImageProcessorPil"}
SIZES = [(40, 33), (16, 50), (90, 20), (12, 11)]


@pytest.fixture(scope="module", params=MODELS)
def published(request, tmp_path_factory):
    """A name, the published model, and the run that it was imported to."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = MODELS[request.param].model()
    theirs.save_pretrained(folder / "published", max_shard_size="40KB")
    processor_of(theirs).save_pretrained(folder / "published")
    return request.param, theirs, import_folder(folder / "published", folder / "run", tokenizer=False), folder


def processor_of(theirs: Any) -> Any:
    side = theirs.config.vision_config.image_size
    settings = {"size": {"height": side, "width": side}, "image_grid_pinpoints": theirs.config.image_grid_pinpoints}
    if theirs.config.model_type == "llava_next":
        settings |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    return getattr(transformers, PROCESSORS[theirs.config.model_type])(**settings)


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def prompt(model: Any, shown: Sequence[tuple[Grid, np.ndarray, int]]) -> dict[str, Tensor]:
    """A row of images and videos, given with their patches and ids, and tokens between them."""
    generator, seen = torch.Generator().manual_seed(0), model.vision.image_input
    ids = [torch.randint(0, PLACEHOLDER, (4,), generator=generator)]
    for grid, _, id_ in shown:
        ids += [torch.full((seen.positions(grid),), id_), torch.randint(0, PLACEHOLDER, (3,), generator=generator)]
    patches = torch.from_numpy(np.concatenate([each for _, each, _ in shown]))
    spare = torch.full((7, patches.shape[1]), 99, dtype=torch.uint8)
    grids = torch.tensor([*(grid for grid, _, _ in shown), (0, 0, 0)])
    return {"input_ids": torch.cat(ids)[None], PATCHES: torch.cat([patches, spare])[None], GRIDS: grids[None]}


def theirs_of(batch: Mapping[str, Tensor], **entries: Tensor) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    ids = ids.where(ids != IMAGE, PLACEHOLDER).where(ids != VIDEO, CLIP)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **entries}


def in_float64(theirs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    with lifted():
        return wide(theirs)(
            **{key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
        ).logits


@torch.no_grad()
def test_logits_and_tokens_with_images_of_several_shapes_are_those_of_transformers(published):
    _, theirs, run, _ = published
    model, model64 = ours(run), ours(run, "fp64")
    processor = ImageProcessor(AnyResolutionResizer(model.vision.image_input.format))
    images = [photo(*size) for size in SIZES]
    shown = [
        (*processor.grids(size), processor.patches(image), IMAGE) for size, image in zip(SIZES, images, strict=True)
    ]
    assert len({grid.tiles for grid, _, _ in shown}) == 4
    batch = prompt(model, shown)
    given = processor_of(theirs)(images, return_tensors="pt")
    inputs = theirs_of(batch, pixel_values=given["pixel_values"], image_sizes=torch.tensor(SIZES))
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(model, batch) - expected).abs().max() < 1e-4
    blank = {**inputs, "pixel_values": inputs["pixel_values"] * 0.5}
    assert (theirs(**blank).logits - expected).abs().max() > 1e-2

    pixels = exact_pixels(model64, batch, given["pixel_values"].shape)
    assert (logits(model64, batch) - in_float64(theirs, {**inputs, "pixel_values": pixels})).abs().max() < 1e-9
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    tokens = theirs.generate(**inputs, **settings)[0, batch["input_ids"].shape[1] :].tolist()
    entries = {key: batch[key] for key in (PATCHES, GRIDS)}
    assert generate(model, [batch["input_ids"][0].tolist()], 6, -1, Sampling(temperature=0), entries=entries) == [
        tokens
    ]


def exact_pixels(model: Any, batch: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """The batch's tiles in float64, as our tower gets them: (images, tiles, 3, height, width)."""
    tiles = tiles_of(model.vision.normalise(batch[PATCHES][0]), shape[-1])
    pixels, start = torch.zeros(*shape, dtype=torch.float64), 0
    for number, grid in enumerate(batch[GRIDS][0].tolist()[: shape[0]]):
        frames = Grid(*grid).plain.frames
        pixels[number, :frames] = tiles[start : start + frames]
        start += frames
    return pixels


def tiles_of(patches: Tensor, side: int) -> Tensor:
    """(patches, V) to (tiles, 3, side, side), of which whole patches are seen."""
    whole = patches[: len(patches) // SIDE**2 * SIDE**2].view(-1, SIDE, SIDE, 3, PATCH, PATCH)
    pixels = torch.zeros(len(whole), 3, side, side, dtype=patches.dtype)
    pixels[..., : SIDE * PATCH, : SIDE * PATCH] = whole.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return pixels


@pytest.mark.parametrize("published", ["llava_onevision"], indirect=True)
@torch.no_grad()
def test_several_images_in_one_tile_and_a_video_in_one_prompt_are_onevisions(published):
    _, theirs, run, _ = published
    model = ours(run, "fp64")
    form, side = model.vision.image_input.format, theirs.config.vision_config.image_size
    processor = ImageProcessor(AnyResolutionResizer(form, 1)).among(2)
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES * SIDE**2, form.values), np.uint8)
    images = [(*processor.grids(size), processor.patches(photo(*size)), IMAGE) for size in SIZES[:2]]
    batch = prompt(model, [images[0], (Grid(FRAMES, SIDE, SIDE), frames, VIDEO), images[1]])
    tiles = tiles_of(model.vision.normalise(batch[PATCHES][0]), side)
    given = processor_of(theirs)([[photo(*size) for size in SIZES[:2]]], return_tensors="pt")["pixel_values"]
    seen = slice(0, SIDE * PATCH)
    assert (tiles[[0, 1 + FRAMES]] - given[:, 0])[..., seen, seen].abs().max() < 1e-6
    inputs = theirs_of(
        batch,
        pixel_values=tiles[[0, 1 + FRAMES]].unsqueeze(1),
        image_sizes=torch.tensor(SIZES[:2]),
        batch_num_images=torch.tensor([2]),
        pixel_values_videos=tiles[1 : 1 + FRAMES].unsqueeze(0),
    )
    assert (logits(model, batch) - in_float64(theirs, inputs)).abs().max() < 1e-9


def test_it_goes_out_as_it_came_in(published, tmp_path):
    name, theirs, run, folder = published
    out = export_run(run, tmp_path / "out")
    check_tensors(theirs, loaded(out, theirs), tuple(MODELS[name].dropped))
    whole, loading = transformers.AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert type(whole) is type(theirs)
    assert not any(loading.values())
    before, after = (read_json(each / "config.json") for each in (folder / "published", out))
    _, architecture = architecture_of(before, Catalog.installed())
    check_table(before, after, {*architecture.harmless, "vision_use_head"} - {*architecture.kept})
    assert read_config(architecture, after) == read_config(architecture, before)
    assert {*read_json(out / "preprocessor_config.json")} - HARMLESS
    keys = ", max_tiled_images = 1" if name == "llava_onevision" else ""
    line = f'published model\'s with, in each table [[data.sources]]: resize = {{ type = "any_resolution"{keys} }}\n'
    assert line in (run / "start.toml").read_text()


# --- processors ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[[Path], Mapping[str, int]]:
    """tokens(folder): writes a tokenizer with `<image>` and `<video>`, and returns their ids and the vocabulary."""

    def write(folder: Path) -> Mapping[str, int]:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["</s>"]))
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<image>", "<video>")])
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
        return {mark: tokenizer.token_to_id(mark) for mark in ("<image>", "<video>")} | {
            "size": len(tokenizer.get_vocab())
        }

    return write


@pytest.mark.parametrize("name", ["llava", *MODELS])
def test_an_export_has_a_processor_that_makes_as_many_positions(tmp_path, tokens, name):
    """Of a model without a processor's files: they are written, and `AutoProcessor` loads them."""
    ids = tokens(tmp_path / "published")
    language = text("Llama", vocab_size=ids["size"])
    config = {
        "llava": lambda: transformers.LlavaConfig(
            text_config=language, vision_config=clip(), image_token_index=ids["<image>"]
        ),
        "llava_next": lambda: next_(language, clip(), image_token_index=ids["<image>"]),
        "llava_onevision": lambda: onevision(
            language, siglip(), image_token_index=ids["<image>"], video_token_index=ids["<video>"]
        ),
    }[name]
    class_ = {"llava": "LlavaForConditionalGeneration"}.get(name) or MODELS[name].name
    Seeing(class_, config).write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run")
    out = export_run(run, tmp_path / "out")
    after, form = read_json(out / "config.json"), ours(run).vision.image_input
    assert after["image_token_index"] == ids["<image>"]
    assert after.get("video_token_index", ids["<video>"]) == ids["<video>"]
    processor = processor_from(out, class_.replace("ForConditionalGeneration", "Processor"))
    resizer = (CropResizer if name == "llava" else AnyResolutionResizer)(form.format)
    for size in SIZES:
        [grid] = resizer.grids(size)
        inputs = processor(text="<image>x", images=photo(*size), return_tensors="pt")
        assert int((inputs["input_ids"] == ids["<image>"]).sum()) == form.positions(grid), size
    if name == "llava_onevision":
        videos = {"pixel_values_videos": np.zeros((1, FRAMES, 3, SIDE * PATCH, SIDE * PATCH))}
        assert len(processor.replace_video_token(videos, 0)) == len("<video>") * form.positions(
            Grid(FRAMES, SIDE, SIDE)
        )
        written = read_json(out / "video_preprocessor_config.json")
        assert written["video_processor_type"] == "LlavaOnevisionVideoProcessor"
        assert written["size"] == {"height": SIDE * PATCH, "width": SIDE * PATCH}


def processor_from(folder: Path, name: str) -> Any:
    """The processor of a folder; without torchvision, which video processors need, put together of its parts."""
    if name != "LlavaOnevisionProcessor" or transformers.utils.is_torchvision_available():
        processor = transformers.AutoProcessor.from_pretrained(folder)
        assert type(processor).__name__ == name
        return processor
    settings = {**read_json(folder / "processor_config.json")}
    assert settings.pop("processor_class") == name
    parts = transformers.AutoImageProcessor.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    processor.check_argument_for_proper_class = lambda *_: type(None)
    processor.__init__(*parts, None, **settings)
    return processor


# --- a job that goes on from one -------------------------------------------------------------------------------------


def test_a_job_goes_on_from_a_published_model_and_is_exported(published, tmp_path):
    import tomllib

    name, theirs, run, _ = published
    start = tomllib.loads((run / "start.toml").read_text())
    start["model"]["vision"]["images_per_sequence"] = 2
    job = {
        "job": {"name": "tuned", "output": str(tmp_path)},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 320},
        "optimizer": {"type": "adamw", "lr": 0.01},
        "data": {"sources": [{"type": "forge_testing.vision:RandomImages", "vocabulary": 60, "text_only": 0}]},
    }
    (tmp_path / "job.toml").write_text(tomli_w.dumps({**start, **job}))
    assert main([str(tmp_path / "job.toml")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "tuned/metrics.jsonl").read_text().splitlines()]
    assert [line["vision/patches_per_sequence"] > SIDE**2 for line in lines if "loss" in line] == [True] * 2
    assert main(["weights", "export", str(tmp_path / "tuned"), "--out", str(tmp_path / "out")]) == 0
    again = loaded(tmp_path / "out", theirs)
    assert read_json(tmp_path / "out/config.json")["model_type"] == name
    assert (again.model.image_newline - theirs.model.image_newline).abs().max() > 1e-3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llava_next", {"image_grid_pinpoints": [[16, 24]]},
         [at("", "image_grid_pinpoints = [[16, 24]]", "vision_config.image_size = 16", "square")]),
        ("llava_onevision", {"vision_aspect_ratio": "anyres"}, [at("", "vision_aspect_ratio = 'anyres'")]),
        ("llava_onevision", {"vision_config": {"model_type": "clip_vision_model"}},
         [at("", "vision_config.model_type = 'clip_vision_model'", "siglip_vision_model"),
          at("", "vision_feature_select_strategy = 'full'", "clip_vision_model"),
          at("", "image_grid_pinpoints = [[16, 32]]", "vision_config.image_size = 224")]),
        ("llava_next", {"vision_feature_layer": [-2, -5]}, [at("", "vision_feature_layer = [-2, -5]")]),
        ("llava_onevision", {"multimodal_patch_merge_type": "flat"}, [at("multimodal_patch_merge_type", "'flat'")]),
    ],
)  # fmt: skip
def test_what_forge_does_not_compute_is_named(model_type, changes, expected):
    config = json.loads(MODELS[model_type].config().to_json_string(use_diff=False))
    config["vision_config"]["image_size"] = 16
    config = {**config, "image_grid_pinpoints": [[16, 32]], **changes}
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(*expected):
        read_config(architecture, config)


@pytest.mark.parametrize("name", ["LlavaNext", "LlavaOnevision"])
def test_a_config_that_leaves_pinpoints_out_means_those_of_transformers(name):
    """In their order: of two arrangements that fit an image as well, the first is taken."""
    written = getattr(transformers, f"{name}Config")()
    config = json.loads(written.to_json_string(use_diff=False))
    side = written.vision_config.image_size
    del config["image_grid_pinpoints"]
    _, architecture = architecture_of(config, Catalog.installed())
    arrangements = read_config(architecture, config)["vision"]["adapter"]["arrangements"]
    assert [[side * tiles for tiles in pair] for pair in arrangements] == written.image_grid_pinpoints


def test_tiles_that_are_no_squares_are_reported_once():
    config, catalog = MODELS["llava_next"].config().to_dict(), Catalog.installed()
    _, architecture = architecture_of(config, catalog)
    table = read_config(architecture, config)
    side, _ = table["vision"]["encoder"]["size"]
    table["vision"]["encoder"] |= {"size": [side, 2 * side]}
    with pytest.raises(JobError) as refused:
        write_config(architecture, parse_component(table, "mine", ModelComponent, catalog), catalog)
    assert [str(problem) for problem in refused.value.problems if "squares" in str(problem)] == [
        f"vision.encoder.size = {[side, 2 * side]}, where tiles are squares always"
    ]


def test_other_pinpoints_of_the_processor_are_said(tmp_path):
    theirs = MODELS["llava_next"].write(tmp_path / "published")
    reference = processor_of(theirs)
    reference.image_grid_pinpoints = [[16, 16]]
    reference.save_pretrained(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    assert "# but image_grid_pinpoints" in (run / "start.toml").read_text()
