"""gpt-oss as it is published: experts in blocks of 4-bit numbers (MXFP4), keys of version 4 of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from published_models import MODELS, ids_of, logits, ours
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forge_core.checkpoint.resume import locate
from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.exporting import export_run
from forge_plugin_weights.files import places_in
from forge_plugin_weights.importing import COMPUTED, import_folder
from forge_plugin_weights.scaled_weights import wide_places
from forge_plugin_weights.tables import architecture_of, read_config
from forge_testing.refusals import at, lacks, refuses_all

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
STACKS = ("gate_up_proj", "down_proj")
NAME = "model.layers.0.mlp.experts.down_proj"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def put(folder: Path, tensors: dict[str, torch.Tensor], **keys: object) -> None:
    """Write tensors to one file, and keys to the configuration."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same names with random numbers of 4 bits in place of stacks, of a size like that of weights."""
    result = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if not name.endswith(STACKS):
            result[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        result[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).byte()
        result[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator).byte()
    return result


def by_hand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Sign, two bits of exponent and one of mantissa, times the power of two of the block; in float64."""
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).double()
    sign, exponent, mantissa = 1 - 2 * (codes // 8), codes % 8 // 2, codes % 2
    value = torch.where(exponent == 0, mantissa / 2, 2 ** (exponent - 1) * (1 + mantissa / 2))
    return (sign * value * 2.0 ** (scales.double().unsqueeze(-1) - 127)).flatten(-2).mT


@pytest.fixture
def published(tmp_path: Path) -> Path:
    MODELS["gpt_oss"].write(tmp_path / "published")
    tensors = packed(tensors_of(tmp_path / "published"))
    put(tmp_path / "published", tensors, quantization_config=MXFP4, dtype=None)
    return tmp_path / "published"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_numbers_of_4_bits_are_those_of_transformers_to_the_bit(published, dtype):
    """Every byte, and exponents of all sizes: too small for the dtype, too large, and the one that is no number."""
    blocks = torch.arange(256).byte().repeat(6).view(2, 16, 3, 16)
    scales = torch.tensor([0, 1, 20, 100, 119, 120, 126, 127, 128, 140, 200, 254]).repeat(8).byte().view(2, 16, 3)
    put(published, {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales})
    config = {"quantization_config": MXFP4, "torch_dtype": dtype}
    [(name, place)] = wide_places(places_in(published), config).items()
    assert name == NAME
    wide, found = getattr(torch, dtype), place.read()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=wide)
    assert found.dtype == wide
    assert found.shape == place.shape == expected.shape
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    exact = by_hand(blocks, scales)
    fits = (exact.abs() < torch.finfo(wide).max) & ((exact == 0) | (exact.abs() > torch.finfo(wide).tiny))
    assert fits.float().mean() > 0.5
    assert torch.equal(found[fits].double(), exact[fits])


def test_a_model_of_4_bits_comes_in_and_goes_out_as_a_wide_one(published, tmp_path):
    """Without a dtype in its configuration it is bfloat16, as the files of OpenAI have none."""
    narrow = tensors_of(published)
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    checkpoint, _ = locate(run, "full")
    index = json.loads((checkpoint / "index.json").read_text())
    files = {name: {chunk["file"] for chunk in entry["chunks"]} for name, entry in index.items()}
    assert files["model.embedding.weight"] == {"model.safetensors"}
    assert files["model.layers.1.ffn.experts.up.weight"] == {COMPUTED}
    out = export_run(run, tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    after = tensors_of(out)
    for name, tensor in after.items():
        if name.endswith(STACKS):
            exact = by_hand(narrow[f"{name}_blocks"], narrow[f"{name}_scales"])
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor.double(), exact)
        else:
            assert torch.equal(tensor, narrow[name])
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    with torch.no_grad():
        assert (logits(ours(run), ids_of()) - theirs.eval()(ids_of()).logits).abs().max() < 1e-4


def test_transformers_reads_the_same_model_from_4_bits(published, tmp_path):
    settings = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        published, quantization_config=settings, dtype=torch.float32
    )
    run = import_folder(published, tmp_path / "run", tokenizer=False)
    with torch.no_grad():
        expected = theirs.eval()(ids_of()).logits
    assert (logits(ours(run), ids_of()) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_forge_generates_the_tokens_of_transformers(tmp_path):
    """Greedily, with a cache, beyond windows and the original length of the position encoding."""
    theirs = MODELS["gpt_oss"].write(tmp_path / "published")
    model = ours(import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False))
    prompt, length = ids_of(length=8), 32
    settings = {"do_sample": False, "max_new_tokens": length - 8, "pad_token_id": 0}
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    tokens, new, cache = prompt, prompt, model.new_cache(2, length)
    while tokens.shape[1] < length:
        positions = torch.arange(tokens.shape[1] - new.shape[1], tokens.shape[1]).expand(2, -1)
        hidden = model.decode({"input_ids": new, "positions": positions}, cache)
        new = model.head.logits(hidden[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    assert torch.equal(tokens, expected)
    assert len(tokens[:, 8:].unique()) > 5


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{NAME}_scales"]


def with_other_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-1]


def with_wide_blocks(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"].float()


def with_other_blocks(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"][..., :8]


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (without_scales, [f"{NAME}_scales"]),
        (with_other_scales, [f"{NAME}_scales", "[4, 31, 2]", "[4, 32, 2]"]),
        (with_wide_blocks, [f"{NAME}_blocks", "torch.float32"]),
        (with_other_blocks, [f"{NAME}_blocks", "[4, 32, 2, 8]", 16]),
    ],
)
def test_damaged_blocks_are_named(published, tmp_path, capsys, damage, facts):
    tensors = tensors_of(published)
    damage(tensors)
    put(published, tensors)
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, *facts)
    assert not (tmp_path / "run").exists()


def test_a_further_key_of_the_quantisation_is_refused_by_name(published, tmp_path, capsys):
    put(published, tensors_of(published), quantization_config={**MXFP4, "bits": 3})
    assert main(["weights", "import", str(published), "--out", str(tmp_path / "run"), "--no-tokenizer"]) == 2
    assert not lacks(capsys.readouterr().err, "bits = 3", "mxfp4")


PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""The configuration of gpt-oss-20b."""


def read(config):
    return read_config(architecture_of(config, Catalog.installed())[1], config)


def test_the_configuration_of_gpt_oss_is_read():
    model = read(PUBLISHED)
    assert model["attention"]["layers"] == ["window", "full"]
    assert {name: kind["window"] for name, kind in model["attention"]["kinds"].items()} == {"window": 128, "full": 0}
    assert all(kind["sinks"] and kind["bias"] for kind in model["attention"]["kinds"].values())
    assert {key: value for key, value in model["ffn"].items() if key.startswith("swiglu")} == {
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "swiglu_offset": 1.0,
    }


def test_keys_that_are_missing_have_the_values_of_transformers():
    """Of gpt-oss-20b's, all but the number of layers and of experts are the defaults."""
    few = {key: PUBLISHED[key] for key in ("model_type", "num_hidden_layers", "num_local_experts")}
    sizes = {key: PUBLISHED[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    again = transformers.GptOssConfig(**{key: value for key, value in few.items() if key != "model_type"}).to_dict()
    assert read({**few, **sizes}) == read(PUBLISHED) == read({k: v for k, v in again.items() if v is not None})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"swiglu_limit": 0}, at("", "swiglu_limit = 0", 0)),
        ({"hidden_act": "gelu"}, at("", "hidden_act = 'gelu'")),
        ({"expert_shape": 3}, at("expert_shape", 3)),
    ],
)
def test_values_that_forge_does_not_compute_are_refused_by_name(keys, expected):
    with refuses_all(expected):
        read(PUBLISHED | keys)
