"""DeepSeek-V3 as it is published: with a layer of multi-token prediction, as GLM-4.5 too, and in blocks of 8 bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from published_models import MODELS, Published, ids_of, logits, ours
from published_vision import ANY_SIZE
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from forge_core.checkpoint.resume import locate
from forge_core.cli import main
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.files import places_in
from forge_plugin_weights.importing import COMPUTED, import_folder
from forge_plugin_weights.scaled_weights import wide_places
from forge_testing.refusals import lacks

LAYERS = 3
LAST = f"model.layers.{LAYERS}"
BLOCK = [16, 24]
"""Rows and columns of a block: they divide few of the matrices, so that last blocks are partial."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def put(folder: Path, tensors: dict[str, torch.Tensor], **keys: object) -> None:
    """Write tensors to one file, and keys to the configuration."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def extra_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a layer of multi-token prediction, which transformers neither writes nor reads."""
    own = f"model.layers.{LAYERS - 1}."
    layer = {f"{LAST}.{name.removeprefix(own)}": t for name, t in tensors.items() if name.startswith(own)}
    norms = {f"{LAST}.{name}.weight": torch.empty(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    made = {**layer, **norms, f"{LAST}.eh_proj.weight": torch.empty(32, 64)}
    made = {name: torch.randn(tensor.shape) for name, tensor in made.items()}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return made | {f"{LAST}.{name}.weight": tensors[f"{source}.weight"].clone() for name, source in copies.items()}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    MODELS["deepseek_v3"].write(tmp_path / "published")
    return tmp_path / "published"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_multi_token_prediction_comes_in_and_goes_out(tmp_path, name):
    published = tmp_path / "published"
    MODELS[name].write(published)
    tensors = tensors_of(published)
    tensors |= extra_layer(tensors)
    put(published, tensors, num_nextn_predict_layers=1)
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    model = ours(run)
    block = model.mtp.blocks[0]
    assert torch.equal(block.projection.weight, tensors[f"{LAST}.eh_proj.weight"])
    assert torch.equal(block.ffn.experts.up.weight[5], tensors[f"{LAST}.mlp.experts.5.up_proj.weight"])
    out = export_run(run, tmp_path / "out")
    after = tensors_of(out)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensors[name]) for name in tensors)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_copies_in_the_layer_of_multi_token_prediction_must_be_copies(published, tmp_path, capsys):
    tensors = tensors_of(published)
    tensors |= extra_layer(tensors)
    tensors[f"{LAST}.embed_tokens.weight"][3, 4] += 1
    put(published, tensors, num_nextn_predict_layers=1)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, f"{LAST}.embed_tokens.weight", "model.embed_tokens.weight")


def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of layers in 8 bits, as DeepSeek-V3 has them, with random scales."""
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.ndim < 2 or name.endswith("gate.weight") or ".layers." not in name
        result[name] = tensor if plain else (tensor * 8).to(torch.float8_e4m3fn)
        if not plain:
            shape = [math.ceil(length / size) for length, size in zip(tensor.shape, BLOCK, strict=True)]
            result[f"{name}_scale_inv"] = torch.rand(shape) / 4
    return result


def by_hand(narrow: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each number times the scale of its block, one by one, in float64."""
    wide = torch.empty(narrow.shape, dtype=torch.float64)
    for row in range(narrow.shape[0]):
        for column in range(narrow.shape[1]):
            scale = scales[row // BLOCK[0], column // BLOCK[1]].item()
            wide[row, column] = narrow[row, column].float().item() * scale
    return wide


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_blocks_of_8_bits_are_read_as_wide_ones(published, tmp_path, dtype):
    tensors = quantised(tensors_of(published))
    put(published, tensors, quantization_config=FP8, torch_dtype=dtype, dtype=dtype)
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    after = tensors_of(export_run(run, tmp_path / "out"))
    assert after.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    wide = getattr(torch, dtype)
    for name, tensor in after.items():
        if f"{name}_scale_inv" not in tensors:
            assert torch.equal(tensor, tensors[name])
            continue
        assert tensor.dtype == wide
        expected = by_hand(tensors[name], tensors[f"{name}_scale_inv"])
        torch.testing.assert_close(tensor.double(), expected, rtol=torch.finfo(wide).eps, atol=0)


def test_wide_weights_are_those_of_transformers(published):
    """Whose scales are of equal blocks only."""
    name = "model.layers.0.mlp.up_proj.weight"  # (48, 32)
    narrow, scales = torch.randn(48, 32).to(torch.float8_e4m3fn), torch.rand(3, 2)
    put(published, {name: narrow, f"{name}_scale_inv": scales})
    config = {"quantization_config": {**FP8, "weight_block_size": [16, 16]}, "torch_dtype": "bfloat16"}
    [(_, place)] = wide_places(places_in(published), config).items()
    assert torch.equal(place.read(), Fp8Dequantize(None)._dequantize_one(narrow, scales, torch.bfloat16))


@pytest.mark.parametrize("model", [MODELS["deepseek_v3"], ANY_SIZE["mistral3"]], ids=["texts", "images"])
def test_matrices_with_a_single_scale_are_read_as_transformers_does(tmp_path, model):
    """As files of Devstral 2 and of Ministral 3 with its tower, with numbers by which a server rounds inputs."""
    published = tmp_path / "published"
    model.write(published)
    tensors = quantised(tensors_of(published))
    scales = {name: torch.rand([] if n % 2 else [1]) for n, name in enumerate(tensors) if name.endswith("_scale_inv")}
    inputs = {name.replace("weight_scale_inv", "activation_scale"): torch.rand([]) for name in scales}
    settings = {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None}
    settings |= {"modules_to_not_convert": ["lm_head"]}
    put(published, {**tensors, **scales, **inputs}, quantization_config=settings, dtype="bfloat16")
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    after = tensors_of(export_run(run, tmp_path / "out"))
    assert after.keys() == tensors.keys() - scales.keys()
    for name, tensor in after.items():
        scale = scales.get(f"{name}_scale_inv")
        whole = scale is None or Fp8Dequantize(None)._dequantize_one(tensors[name], scale.view(1, 1), torch.bfloat16)
        assert torch.equal(tensor, tensors[name] if whole is True else whole)


def test_a_model_of_8_bits_computes_as_its_wide_copy(published, tmp_path):
    """From files: only what has to be is computed, and the rest lies where it was."""
    tensors = quantised(tensors_of(published))
    put(published, tensors, quantization_config=FP8, torch_dtype="float32", dtype="float32")
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    checkpoint, _ = locate(run, "full")
    index = json.loads((checkpoint / "index.json").read_text())
    files = {name: {chunk["file"] for chunk in entry["chunks"]} for name, entry in index.items()}
    assert files["model.embedding.weight"] == {"model.safetensors"}
    assert files["model.layers.1.ffn.experts.up.weight"] == {COMPUTED}
    theirs = Published("DeepseekV3", MODELS["deepseek_v3"].keys).model()
    wide = {name: by_hand(tensors[name], tensors[f"{name}_scale_inv"]).float() for name in narrow_names(tensors)}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")} | wide
    put(published, plain, quantization_config=None)
    theirs = type(theirs).from_pretrained(published).eval()
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs(ids_of()).logits).abs().max() < 1e-4


def narrow_names(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["quant_method = 'gptq'"]),
        ({**FP8, "activation_scheme": "none"}, ["activation_scheme = 'none'"]),
        ({**FP8, "weight_block_size": None}, ["weight_scale_inv", "a matrix with a single scale"]),
        ({key: FP8[key] for key in FP8 if key != "weight_block_size"}, ["weight_block_size = 'missing'"]),
        ({"weight_block_size": BLOCK}, ["no quant_method"]),
        ({**FP8, "weight_block_size": [16, 16]}, ["[16, 16]"]),
    ],
)
def test_other_quantisations_are_refused_by_name(published, tmp_path, capsys, settings, facts):
    put(published, quantised(tensors_of(published)), quantization_config=settings)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, *facts)
    assert not (tmp_path / "run").exists()


def test_scales_that_are_missing_are_named(published, tmp_path, capsys):
    tensors = quantised(tensors_of(published))
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del tensors[name]
    put(published, tensors, quantization_config=FP8)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, name)
