"""Published models, from their files and back: logits, bytes, tokens, configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import frozen
from other_programs import PROGRAMS, check_other_programs
from published_models import MODELS, Published, ids_of, logits, ours, wide_logits
from safetensors.torch import load_file

from forge_core.checkpoint.resume import locate
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.architectures.nemotron_h import OnePart
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.importing import COMPUTED, import_folder
from forge_plugin_weights.tables import HARMLESS, architecture_of, read_config

SPELT_OUT = (
    *("max_window_layers", "no_rope_layer_interval", "sliding_window_pattern", "_sliding_window_pattern"),
    "full_attn_idxs",
)
"""Keys that say which layers differ where no list does; the list is written, in their place."""
ADJUSTED = ("intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
"""Keys of LFM2 from which the width of feed-forward parts follows; that width is written, in their place."""


def as_granite_publishes(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the spelling of Granite 4's files, and without keys of parts that the model has not."""
    entries = {"linear_attention": "mamba", "full_attention": "attention"}
    absent = ["time_step_limit"]  # from zero to infinity
    absent += ["rope_parameters"] if config["position_embedding_type"] == "nope" else []
    absent += [] if config["num_local_experts"] else ["intermediate_size"]
    kept = {key: value for key, value in config.items() if key not in absent}
    return {**kept, "layer_types": [entries[entry] for entry in config["layer_types"]]}


def keys_of_absent_layers(architecture: Any, config: dict[str, Any]) -> set[str]:
    """Keys of Nemotron-H for kinds of layers that the model has not, which an export has not either."""
    (layers,) = (each for each in architecture.fields() if isinstance(each, OnePart))
    by_kind = {kind: {key for each in fields for key in each.keys} for kind, fields in layers.parts.items()}
    there = set().union(*(by_kind[kind] for kind in config["layers_block_type"]))
    return set().union(*by_kind.values()) - there


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@frozen
class Trip:
    """A published model, the run folder of its import, and what is exported of that."""

    theirs: Any
    published: Path
    run: Path
    out: Path


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trip]:
    @cache
    def of(name: str) -> Trip:
        folder = tmp_path_factory.mktemp("trip")
        theirs = MODELS[name].write(folder / "published")
        run = import_folder(folder / "published", folder / "run", tokenizer=False)
        return Trip(theirs, folder / "published", run, export_run(run, folder / "out"))

    return of


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_in_and_goes_out(trip, name):
    theirs, run, out = trip(name).theirs, trip(name).run, trip(name).out
    ids = ids_of()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1
    assert (logits(ours(run), ids) - expected).abs().max() < 1e-4
    assert (logits(ours(run, "fp64"), ids) - wide_logits(theirs, ids)).abs().max() < 1e-9

    before, after = tensors_of(trip(name).published), tensors_of(out)
    assert after.keys() == before.keys()
    assert all(bytes_of(after[key]) == bytes_of(before[key]) for key in before)
    check_other_programs(name, out, after)
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert type(again) is type(theirs)
    models, prompt = (theirs, again), ids[:, :8]
    first, second = (m.generate(prompt, do_sample=False, max_new_tokens=4, pad_token_id=0) for m in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_is_written_as_it_was_read(trip, name):
    folders = trip(name).published, trip(name).out
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    _, architecture = architecture_of(before, Catalog.installed())
    meaningless = HARMLESS | set(architecture.harmless)
    if name == "qwen3_moe":  # transformers 5 writes another name than published files have
        before["num_experts"] = before.pop("num_local_experts")
    if before["model_type"] == "granitemoehybrid":
        before = as_granite_publishes(before)
    if before["model_type"] == "nemotron_h":
        meaningless |= keys_of_absent_layers(architecture, before)
    if before.get("time_step_limit") == [0.0, {"__float__": "Infinity"}]:
        meaningless |= {"time_step_limit"}  # an export has none without bounds
    compared = {key: value for key, value in before.items() if key not in meaningless and value is not None}
    if not before.get("sliding_window"):
        compared.pop("sliding_window", None)  # 0 is null
    if before.get("rope_parameters", {}).get("rope_type") == "default":
        compared.pop("original_max_position_embeddings", None)  # nothing is stretched
    compared.pop("per_layer_config", None)  # which keys global_… say, as in published files
    for key in SPELT_OUT if "layer_types" in before else ():
        compared.pop(key, None)
    for key in ADJUSTED if "block_auto_adjust_ff_dim" in before else ():
        compared.pop(key, None)
    assert {key: after.get(key) for key in compared} == compared
    assert read_config(architecture, after) == read_config(architecture, before)


def test_other_programs_are_described_for_every_family_of_texts():
    assert {f"{model.name}{model.head}" for model in MODELS.values()} == {*PROGRAMS}
    assert sum(isinstance(each["llama.cpp"], dict) for each in PROGRAMS.values()) > 40


def test_files_in_which_transformers_renamed_dense_layers_come_in_too(tmp_path, trip):
    """Kimi Linear: version 5 writes them under the name of layers with experts."""
    name = "kimi_linear"
    theirs = Published("KimiLinear", MODELS[name].keys).write(tmp_path / "written")
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in tensors_of(tmp_path / "written")
    run = import_folder(tmp_path / "written", tmp_path / "run", tokenizer=False)
    with torch.no_grad():
        expected = theirs(ids_of()).logits
    assert torch.equal(logits(ours(run), ids_of()), logits(ours(trip(name).run), ids_of()))
    assert (logits(ours(run), ids_of()) - expected).abs().max() < 1e-4


def test_files_are_linked_and_their_bytes_used(tmp_path):
    MODELS["mixtral"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    checkpoint, manifest = locate(run, "full")
    files = sorted((tmp_path / "published").glob("*.safetensors"))
    assert len(files) > 3
    assert all((checkpoint / file.name).samefile(file) for file in files)
    assert COMPUTED not in manifest["files"]
    index = json.loads((checkpoint / "index.json").read_text())
    assert len(index["model.layers.0.ffn.experts.up.weight"]["chunks"]) == 4


def test_a_copy_has_files_of_its_own(tmp_path):
    MODELS["qwen3"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False, copy=True)
    checkpoint, _ = locate(run, "full")
    for file in (tmp_path / "published").glob("*.safetensors"):
        assert not (checkpoint / file.name).samefile(file)
        assert (checkpoint / file.name).read_bytes() == file.read_bytes()


def test_half_precision_goes_through_unchanged(tmp_path):
    MODELS["qwen2"].write(tmp_path / "published", torch.bfloat16)
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    before, after = tensors_of(tmp_path / "published"), tensors_of(export_run(run, tmp_path / "out"))
    assert all(torch.equal(after[name], tensor) and tensor.dtype == torch.bfloat16 for name, tensor in before.items())
    narrow = tensors_of(export_run(run, tmp_path / "narrow", dtype=torch.float16))
    assert all(torch.equal(narrow[name], tensor.half()) for name, tensor in before.items())


def test_an_export_is_divided_into_files(tmp_path):
    MODELS["llama"].write(tmp_path / "published")
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    out = export_run(run, tmp_path / "out", shard_bytes=30_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert all(len(load_file(file)) == 1 or file.stat().st_size < 40_000 for file in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(out).values())
    assert set(index["weight_map"].values()) == {file.name for file in files}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters", "both"])
def test_both_spellings_of_the_position_encoding_are_read(tmp_path, spelling):
    theirs = MODELS["llama"].write(tmp_path / "published")
    path = tmp_path / "published/config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if spelling != "rope_parameters":
        config |= {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}
    if spelling != "rope_scaling":
        config["rope_parameters"] = parameters
    path.write_text(json.dumps(config))
    run = import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False)
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4
