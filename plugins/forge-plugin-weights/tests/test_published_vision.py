"""Published models that see images, from their files and back: logits, features, bytes, tokens, configurations."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import transformers
from attrs import frozen
from published_models import SIZES, lifted, ours
from published_vision import MODELS, PATCH, SIDE, TOWERS, batch_of, inputs_for, pixels_of, wide, wide_logits
from torch import Tensor

from forge_core import Trainer
from forge_core.cli import main
from forge_core.config.load import parse_job
from forge_core.contracts.components import ModelComponent, TrainingHook
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_vision import GRIDS, PATCHES
from forge_plugin_vision.modules.images import Images
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import import_folder, read_json
from forge_plugin_weights.inspecting import describe_images
from forge_plugin_weights.tables import (
    HARMLESS,
    architecture_of,
    flattened,
    load_architecture,
    nested,
    read_config,
    write_config,
)
from forge_testing.refusals import at, lacks, naming, refuses, refuses_all

FURTHER = (
    *("tie_word_embeddings", "vision_use_head", "layer_types", "max_window_layers"),
    *("pretraining_tp", "projection_dim", "initializer_factor", "output_router_logits", "router_jitter_noise"),
    *("router_aux_loss_coef", "cache_implementation"),
)
"""Keys of inner tables that mean nothing, or are compared by what they mean."""


def imported(tmp_path: Path, model: Any, architecture: str = "") -> tuple[Any, Path]:
    theirs = model.write(tmp_path / "published")
    return theirs, import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, architecture=architecture)


@frozen
class Trip:
    """A published model, the run folder of its import, and what is exported of that."""

    theirs: Any
    published: Path
    run: Path
    out: Path


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trip]:
    """Trips by name, each made once: tests read what it left."""

    @cache
    def of(name: str) -> Trip:
        folder = tmp_path_factory.mktemp("trip")
        theirs, run = imported(folder, {**MODELS, **TOWERS}[name])
        return Trip(theirs, folder / "published", run, export_run(run, folder / "out"))

    return of


def loaded(out: Path, theirs: Any) -> Any:
    """Returns what `transformers` makes of an export, of which it must miss nothing."""
    again, loading = type(theirs).from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    return again


def check_tensors(theirs: Any, again: Any, dropped: tuple[str, ...]) -> None:
    """All tensors are the same to the byte, but for those that nothing is computed with."""
    before, after = theirs.state_dict(), again.state_dict()
    unused = {name for name in before if any(part in name for part in dropped)}
    assert bool(unused) == bool(dropped)
    assert {*before} - unused == {*after} - unused
    for name in {*before} - unused:
        assert before[name].dtype == after[name].dtype
        assert before[name].numpy().tobytes() == after[name].numpy().tobytes(), name


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_that_sees_images_comes_in_and_goes_out(trip, name):
    theirs, run = trip(name).theirs, trip(name).run
    ours32, ours64 = ours(run), ours(run, "fp64")
    batch = batch_of(positions_of(name), images=2, length=48)
    inputs = inputs_for(name, batch, pixels_of(ours32.vision, batch))
    expected = theirs(**inputs).logits
    assert expected.std() > 0.1
    assert (logits(ours32, batch) - expected).abs().max() < 1e-4
    with_wide_pixels = inputs_for(name, batch, pixels_of(ours64.vision, batch))
    assert (logits(ours64, batch) - wide_logits(theirs, with_wide_pixels)).abs().max() < 1e-9
    blank = {**inputs, "pixel_values": inputs["pixel_values"] * 0.5}
    assert (theirs(**blank).logits - expected)[0].abs().max() > 1e-2

    again = loaded(trip(name).out, theirs)
    check_tensors(theirs, again, tuple(MODELS[name].dropped))
    assert torch.equal(again(**inputs).logits, expected)
    prompt = inputs_for(name, batch, pixels_of(ours32.vision, batch), slice(0, 1))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(prompt["input_ids"])  # else the token 0 would be taken for padding
    tokens = again.generate(**prompt, **settings)[0, batch["input_ids"].shape[1] :].tolist()
    entries = {key: batch[key][:1] for key in (PATCHES, GRIDS)}
    greedy = Sampling(temperature=0)
    assert generate(ours32, [batch["input_ids"][0].tolist()], 5, -1, greedy, entries=entries) == [tokens]


def positions_of(name: str) -> int:
    return SIDE**2 // 4 if name.startswith(("idefics3", "smolvlm", "internvl", "llama4")) else SIDE**2


def logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return model.head.logits(model(batch))


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_a_tower_comes_in_and_goes_out(trip, name):
    theirs, run = trip(name).theirs, trip(name).run
    for model, precision, within in ((theirs, "fp32", 1e-4), (theirs, "fp64", 1e-9)):
        encoder = ours(run, precision).vision["encoder"]
        dtype = torch.float64 if precision == "fp64" else torch.float32
        sizes = [(SIDE, SIDE)] if name != "siglip2_vision_model" else [(3, 5), (SIDE, SIDE)]
        for rows, columns in sizes:
            image = torch.randn(3, rows * PATCH, columns * PATCH, dtype=dtype)
            patches = image.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 0, 2, 4).flatten(2)
            features = encoder(
                patches.flatten(0, 1)[None], Images.of(torch.tensor([[[1, rows, columns]]]), rows * columns)
            )
            expected = features_of(model, image, precision == "fp64")
            assert expected.std() > 0.1
            assert (features[0] - expected).abs().max() < within

    again = loaded(trip(name).out, with_no_head(theirs))
    check_tensors(with_no_head(theirs), again, tuple(part for part in TOWERS[name].dropped if part != "head."))


def features_of(model: Any, image: Tensor, in_float64: bool) -> Tensor:
    """Returns the last hidden state of a published tower."""
    if "Siglip2" in type(model).__name__:
        rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
        patches = image.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 2, 4, 0).flatten(2)
        inputs = {
            "pixel_values": patches.flatten(0, 1)[None],
            "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[rows, columns]]),
        }
    else:
        inputs = {"pixel_values": image[None]}
    if not in_float64:
        hidden = model(**inputs).last_hidden_state
    else:
        with lifted():
            hidden = wide(model)(**inputs).last_hidden_state
    return hidden[:, 1:] if "CLIP" in type(model).__name__ else hidden


def with_no_head(theirs: Any) -> Any:
    """Returns the published tower without its pooling head, which Forge does not have."""
    if not hasattr(theirs.config, "vision_use_head"):
        return theirs
    config = type(theirs.config)(**{**theirs.config.to_dict(), "vision_use_head": False})
    model = type(theirs)(config)
    model.load_state_dict({name: t for name, t in theirs.state_dict().items() if not name.startswith("head.")})
    return model


@pytest.mark.parametrize("name", [*MODELS, *TOWERS])
def test_a_configuration_is_written_as_it_was_read(trip, name):
    before, after = (read_json(folder / "config.json") for folder in (trip(name).published, trip(name).out))
    _, architecture = architecture_of(before, Catalog.installed())
    check_table(before, after, {*architecture.harmless, "vision_use_head"} - {*architecture.kept})
    assert read_config(architecture, after) == read_config(architecture, before)


def check_table(before: Mapping[str, Any], after: Mapping[str, Any], meaningless: set[str]) -> None:
    for key, value in before.items():
        if isinstance(value, Mapping) and key.endswith("_config"):
            check_table(value, after[key], {*FURTHER})
        elif key not in HARMLESS | meaningless and value is not None:
            assert after.get(key) == value, key


@pytest.mark.parametrize(
    ("whole", "part", "left_out"),
    [
        ("llava", "llama", "other.vision_tower."),
        ("llava, siglip", "qwen2", "other.vision_tower."),
        ("idefics3", "llama", "other.vision_model."),
        ("llava", "clip_vision_model", "other.language_model."),
        ("llava, siglip", "siglip_vision_model", "other.language_model."),
        ("smolvlm", "siglip_vision_model", "other.model.text_model."),
    ],
)
def test_a_part_of_a_model_comes_in_alone(tmp_path, trip, whole, part, left_out):
    run = import_folder(trip(whole).published, tmp_path / "run", tokenizer=False, architecture=part)
    run_of_all = trip(whole).run
    names = read_json(run / "origin.json")["left_out"]
    assert any(name.startswith(left_out) for name in names)
    everything, alone = (dict(ours(each).named_parameters()) for each in (run_of_all, run))
    is_tower = part.endswith("_vision_model")
    shared = {
        name for name in everything if (name.startswith("vision.encoder.") if is_tower else name[:7] != "vision.")
    }
    assert shared <= {*alone}
    assert is_tower or shared == {*alone}
    assert all(torch.equal(everything[name], alone[name]) for name in shared)


def test_models_and_towers_are_compared_with_images(tmp_path, trip, capsys):
    prompts = tmp_path / "prompts.txt"
    for number, name in enumerate(("llava, siglip", "smolvlm", "siglip2_vision_model", "clip_vision_model")):
        run = trip(name).run
        assert main(["weights", "verify", str(trip(name).published), str(run)]) == 0
        same = capsys.readouterr().out
        assert re.search(r"^tensors: .* 0 with", same, re.MULTILINE)
        prompts.write_text("text")
        assert main(["weights", "verify", str(run), str(run), "--prompts", str(prompts)]) == 2
        assert not lacks(capsys.readouterr().err, "prompts", "image")
        out = export_run(run, tmp_path / str(number), dtype=torch.bfloat16)
        assert main(["weights", "verify", str(run), str(out)]) == 1
        rounded = capsys.readouterr().out
        if name in TOWERS:
            assert re.search(r"^features .* 0 of", same, re.MULTILINE)
            assert re.search(r"^features .* 0\.0\d+ of", rounded, re.MULTILINE)
        else:
            assert re.search(r"^logits: .* 0, ", same, re.MULTILINE)
            assert re.search(r"^layer 1: .* 0\.0\d+", rounded, re.MULTILINE)


def test_the_tower_of_a_trained_model_is_exported_alone(tmp_path, trip, capsys):
    theirs, run = trip("llava").theirs, trip("llava").run
    arguments = ["weights", "export", str(run), "--out"]
    assert main([*arguments, str(tmp_path / "tower"), "--architecture", "clip_vision_model"]) == 0
    tower, loading = transformers.CLIPVisionModel.from_pretrained(tmp_path / "tower", output_loading_info=True)
    assert not any(loading.values())
    pixels = torch.randn(1, 3, SIDE * PATCH, SIDE * PATCH)
    with torch.no_grad():
        chosen = theirs.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2]
        assert torch.equal(tower(pixels).last_hidden_state, chosen)  # the block behind hands it on
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "computed"), "--architecture", "clip_vision_model", "--verify"]) == 2
    assert not lacks(capsys.readouterr().err, "--verify", "CLIPVisionModel")
    assert main([*arguments, str(tmp_path / "siglip"), "--architecture", "siglip_vision_model"]) == 2
    assert not lacks(capsys.readouterr().err, "vision.encoder.norm = False", True)


def test_a_tower_is_not_trained_alone(tmp_path, trip, capsys):
    run = trip("siglip_vision_model").run
    start = tomllib.loads((run / "start.toml").read_text())
    assert start["model"]["type"] == "forge-plugin-vision/vision_language"
    assert start["checkpoint"]["load"] == [{"path": str(run), "include": ["vision.encoder.*"]}]
    job = {
        "job": {"name": "mine", "output": str(tmp_path)},
        "train": {"steps": 1, "global_batch_size": 2, "seq_len": 40},
        "data": {"sources": [{"type": "forge_testing.vision:RandomImages"}]},
        "optimizer": {"type": "adamw"},
    }
    model = {**start["model"], "language": {"vocab_size": 64, "dim": 32, "layers": 1, "attention": {"heads": 4}}}
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps({**start, **job, "model": model}))
    assert main([str(path)]) == 0
    tower = {name: value for name, value in ours(run).named_parameters() if name.startswith("vision.encoder.")}
    first = {**ours_at_start(path)}
    assert tower
    assert all(torch.equal(first[name], value) for name, value in tower.items())

    path.write_text(tomli_w.dumps({**job, "model": {**start["model"], "type": "vision_tower"}}))
    capsys.readouterr()
    assert main(["check", str(path)]) == 2
    assert not lacks(capsys.readouterr().err, "model", "vision tower", 'type = "vision_language"')


def ours_at_start(path: Path) -> Mapping[str, Tensor]:
    """Returns the weights that a job starts from."""
    weights: dict[str, Tensor] = {}

    class First(TrainingHook):
        def on_train_begin(self, context: Any) -> None:
            weights.update({name: t.detach().clone() for name, t in context.model.named_parameters()})

    job = parse_job(path.read_text().replace('"mine"', '"first"'), "job.toml", Catalog.installed())
    Trainer(job, hooks=[First()], echo=lambda text: None).run()
    return weights


HERE = Path(__file__).parent
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
"""How files may hold the weights of any part."""
WHOLE_TOO = ("llama4", "gemma4")
"""Models whose configurations stand among those of language models, which are parts of them."""
LANGUAGE_CONFIGS: Mapping[str, Any] = json.loads((HERE / "published_configs.json").read_text())
CONFIGS: Mapping[str, Any] = {
    **json.loads((HERE / "published_vision_configs.json").read_text()),
    **{name: config for name, config in LANGUAGE_CONFIGS.items() if config["model_type"] in WHOLE_TOO},
}
PARTS = {"siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model", "clip": "clip_vision_model"}
"""Architectures that read a part of a model, by its `model_type`."""
PARTS_TOO: Mapping[str, str] = {
    "Qwen/Qwen3.5-27B": "qwen3_5_text",
    "InternScience/Agents-A1": "qwen3_5_moe_text",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "mllama_vision_model",
}
"""Such ones of models that are read as a whole, too."""
READ = [(name, PARTS.get(config["model_type"], "")) for name, config in CONFIGS.items()] + [*PARTS_TOO.items()]


@pytest.mark.parametrize(("name", "part"), READ)
def test_a_published_configuration_means_what_version_5_makes_of_it(tmp_path, capsys, name, part):
    config, catalog = CONFIGS[name], Catalog.installed()
    architecture = load_architecture(part, catalog) if part else architecture_of(config, catalog)[1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    unheard = [key for key in architecture.removable if config.get(key)]
    options = [*(["--architecture", part] if part else []), *(f"--ignore={key}" for key in unheard)]
    assert main(["weights", "inspect", str(tmp_path), *options]) == 0
    assert "NOT" not in capsys.readouterr().out
    config = {key: value for key, value in config.items() if key not in unheard}
    model = read_config(architecture, config)
    assert read_config(architecture, {**config, "quantization_config": FP8}) == model
    made = transformers.AutoConfig.for_model(**config).to_dict()
    # Version 5 ties these heads by default, but for one that the files have
    if config["model_type"] in ("mistral3", "internvl"):
        made["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    assert model == read_config(architecture, made)
    component = parse_component(model, name, ModelComponent, catalog)
    back = read_config(architecture, write_config(architecture, component, catalog))
    # A language model may be written as another, plainer type, whose table says more.
    assert parse_component(back, name, ModelComponent, catalog) == component
    if not part.endswith("_text") and config["model_type"] != "gemma4":  # which needs a job to find problems
        assert not [problem for problem in encoder_problems(component) if "pixels" in problem or "size" in problem]


def encoder_problems(model: Any) -> list[str]:
    return [str(problem) for problem in model.vision.encoder.problems(None, None)]


def test_models_that_are_not_supported_are_refused_with_what_there_is(tmp_path, capsys):
    for config, reason in (
        (
            {
                "model_type": "pixtral_of_tomorrow",
                "text_config": {"model_type": "gemma2"},
                "vision_config": {"model_type": "siglip_vision_model"},
            },
            "a part of it comes in alone by --architecture gemma2 or siglip_vision_model",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["weights", "inspect", str(tmp_path)]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vision_feature_layer": [-2, -5]}, [at("", "vision_feature_layer = [-2, -5]")]),
        (
            {"vision_feature_select_strategy": "full"},
            [at("", "vision_feature_select_strategy = 'full'", "clip_vision_model")],
        ),
        ({"projector_hidden_act": "mish"}, [at("", "projector_hidden_act = 'mish'", "'gelu'")]),
        ({"text_config": {"model_type": "mamba"}}, [at("", "text_config.model_type = 'mamba'", "deepseek_v3")]),
        (
            {"text_config": {"model_type": "llama", "mlp_dropout": 1}},
            [at("", "text_config.mlp_dropout", 1)],
        ),
        (
            {"vision_config": {"model_type": "dinov2"}},
            [
                at("", "vision_config.model_type = 'dinov2'", "clip_vision_model"),
                at("", "vision_feature_select_strategy = 'default'", "dinov2"),
            ],
        ),
        (
            {"vision_config": {"model_type": "clip_vision_model", "num_channels": 1}},
            [at("", "num_channels = 1")],
        ),
        (
            {"text_config": {"model_type": "gemma2", **SIZES, "final_logit_softcapping": 30.0}},
            [at("", "model.language.logit_soft_cap = 30.0")],
        ),
        (
            {"vision_feature_layer": 0, "vision_config": {"model_type": "clip_vision_model"}},
            [at("", "vision_feature_layer = 0", "vision_config.num_hidden_layers")],
        ),
        (
            {"vision_config": {"model_type": "clip_vision_model", "image_size": "336", "patch_size": 14}},
            [at("", "image_size = '336'", "TypeError")],
        ),
        (
            {"preprocessor_config": {"image_mean": [0.5, 0.5]}},
            [at("", "image_mean = [0.5, 0.5]", "preprocessor_config.json", 3)],
        ),
        ({"preprocessor_config": {"image_std": [0.5] * 4}}, [at("", "image_std = [0.5, 0.5, 0.5, 0.5]", 3)]),
    ],
)
def test_what_forge_does_not_compute_is_named(changes, expected):
    config = {**CONFIGS["llava-hf/llava-1.5-7b-hf"], **changes}
    _, architecture = architecture_of(config, Catalog.installed())
    with refuses_all(*expected):
        read_config(architecture, config)


@pytest.mark.parametrize(
    ("name", "path", "value", "expected"),
    [
        (
            "llava-hf/llava-v1.6-mistral-7b-hf",
            "vision.encoder.size",
            [336, 350],
            [at("", [336, 350], "squares")],  # of the tower and of its pinpoints, named once
        ),
        ("google/siglip2-base-patch16-naflex", "vision.encoder.size", [256, 240], [at("", [256, 240], "square")]),
        ("Qwen/Qwen3-VL-8B-Instruct", "vision.encoder.table", 0, [at("", "vision.encoder.table = 0")]),
        (
            "Qwen/Qwen3-VL-8B-Instruct",
            "fusion.deepstack_adapter.merge",
            4,
            [at("", "fusion.deepstack_adapter.merge = 4", 2)],
        ),
    ],
)
def test_a_tower_that_no_key_describes_is_not_exported(name, path, value, expected):
    config, catalog = CONFIGS[name], Catalog.installed()
    part = PARTS.get(config["model_type"], config["model_type"])
    architecture = load_architecture(part, catalog)
    table = flattened(read_config(architecture, config))
    assert path in table
    component = parse_component(nested({**table, path: value}), name, ModelComponent, catalog)
    with refuses_all(*expected):
        write_config(architecture, component, catalog)


@pytest.mark.parametrize("count", [255, 257])
def test_a_table_of_positions_that_is_no_square_is_refused(count):
    config = CONFIGS["google/siglip2-base-patch16-naflex"]
    config = {**config, "vision_config": {**config["vision_config"], "num_patches": count}}
    with refuses("", f"num_patches = {count}", "square"):
        read_config(load_architecture("siglip2_vision_model", Catalog.installed()), config)


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"merge_size": 2, "min_pixels": "3136"}),
        ("llava-hf/llava-v1.6-mistral-7b-hf", {"size": 336.0}),
    ],
)
def test_sizes_of_images_that_are_none_are_refused(name, pixels):
    config = {**CONFIGS[name], "preprocessor_config": pixels}
    _, architecture = architecture_of(config, Catalog.installed())
    with pytest.raises(JobError, match=naming("preprocessor_config.json")):
        describe_images(architecture, config)


def test_a_model_of_another_kind_is_not_exported_as_one_of_these(tmp_path, trip, capsys):
    arguments = [
        "weights",
        "export",
        str(trip("idefics3").run),
        "--out",
        str(tmp_path / "out"),
        "--architecture",
        "llava",
    ]
    assert main(arguments) == 2
    assert not lacks(capsys.readouterr().err, "vision.encoder.norm = True", False)
    assert not (tmp_path / "out").exists()


def test_a_model_of_ones_own_is_exported_with_the_vocabulary_of_its_tokenizer(tmp_path):
    encoder = {"type": "vit", "dim": 24, "layers": 3, "heads": 3, "hidden": 40, "patch": 4, "size": [16, 16]}
    job = {
        "job": {"name": "mine", "output": str(tmp_path)},
        "train": {"steps": 1, "global_batch_size": 2, "seq_len": 40},
        "model": {
            "type": "vision_language",
            "language": {"dim": 32, "layers": 1, "attention": {"heads": 4}},
            "vision": {"encoder": {**encoder, "norm": False, "select_layer": -2}},
        },
        "data": {
            "tokenizer": {"type": "bytes"},
            "sources": [{"type": "forge_testing.vision:RandomImages"}],
        },
        "optimizer": {"type": "adamw"},
        "hooks": {"export": {}},
    }
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(job))
    assert main([str(path)]) == 0
    out = tmp_path / "mine/exports/step-1"
    assert read_json(out / "config.json")["text_config"]["vocab_size"] == 257
    _, loading = transformers.LlavaForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
