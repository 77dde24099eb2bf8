"""Configurations of published models, key for key, as their publishers spell them.

`published_configs.json` has them by the name of the repository, copied from public code and documentation; where only a
part could be found, the name says "some keys". Lists of factors of LongRoPE, which say nothing about
keys, are shorter to write than the published ones, and of their length.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_models import ids_of, logits, ours, randomised
from test_configs_both_ways import shapes_of
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

from forge_core.cli import main
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.architectures.lfm2 import AdjustedWidth
from forge_plugin_weights.importing import import_folder
from forge_plugin_weights.kinds import ArchitectureComponent
from forge_plugin_weights.tables import architecture_of, load_architecture, read_config, write_config
from forge_testing.refusals import lacks

CONFIGS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
CATALOG = Catalog.installed()
LANGUAGE_MODELS: Mapping[str, str] = {
    **{type_: f"{type_}_text" for type_ in ("gemma3", "gemma3n", "gemma4", "llama4")},
    "mistral3": "ministral3",
}
"""Architectures that read a part of a model, by its `model_type`."""
CLASSES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""By `model_type`, that of the class in `transformers`."""
SMALL: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "block_ff_dim": 48,
    "vocab_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "shared_expert_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_num_experts": 8,
    "moe_layer_end_index": -1,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 6,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "rotary_dim": 16,
    "swa_head_dim": 32,
    "swa_v_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "sliding_window_size": 7,
    "attention_chunk_size": 7,
}
"""Sizes of the models that are built, where a configuration has the key, and it is neither null nor 1."""
LAYERS = 6
LISTS = ("layer_types", "no_rope_layers", "attn_type_list", "hybrid_layer_pattern")
"""Keys with an entry for each layer."""
ALWAYS = ("HuggingFaceTB/SmolLM2-135M", "microsoft/Phi-4-mini-instruct", "moonshotai/Kimi-K2-Instruct")


def architecture(config: Mapping[str, Any]) -> ArchitectureComponent:
    type_ = config["model_type"]
    if type_ in LANGUAGE_MODELS:
        return load_architecture(LANGUAGE_MODELS[type_], CATALOG)
    return architecture_of(config, CATALOG)[1]


def by_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as version 5 of `transformers` reads and writes it."""
    type_ = CLASSES.get(config["model_type"], config["model_type"])
    written = transformers.AutoConfig.for_model(**{**config, "model_type": type_}).to_dict()
    if type_ == "qwen3_moe":  # which has another name than published files
        written["num_experts"] = written.pop("num_local_experts")
    return written


@pytest.mark.parametrize("name", CONFIGS)
def test_inspect_accepts_it_as_it_is_published(tmp_path, capsys, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    part = LANGUAGE_MODELS.get(CONFIGS[name]["model_type"])
    assert main(["weights", "inspect", str(tmp_path), *(["--architecture", part] if part else [])]) == 0
    assert "NOT" not in capsys.readouterr().out


OLD = {
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "prefix": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "typical_p": 1.0,
    "task_specific_params": None,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "torchscript": False,
    "use_bfloat16": False,
}
"""What `to_dict` of `PretrainedConfig` in transformers 4.57 adds to every model's configuration."""
CODER = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
"""Keys of Qwen3-Coder that its class does not read."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_full_dump_of_version_4_means_the_same(name):
    config = CONFIGS[name]
    plain = read_config(architecture(config), config)
    assert read_config(architecture(config), {**OLD, **config}) == plain
    if config["model_type"] == "qwen3_moe":
        assert read_config(architecture(config), {**config, **CODER}) == plain


@pytest.mark.parametrize(
    ("keys", "model_type"),
    [
        ({"add_cross_attention": True}, "llama"),
        ({"pruned_heads": {"1": [0]}}, "llama"),
        ({"qkv_bias": True}, "qwen3_moe"),
        ({"qkv_bias": 0}, "qwen3_moe"),
        ({"use_qk_norm": False}, "qwen3_moe"),
        ({"use_qk_norm": True}, "llama"),
        ({"shared_expert_intermediate_size": 32}, "qwen3_moe"),
    ],
)
def test_such_a_key_is_refused_where_it_would_mean_something(keys, model_type):
    config = next(config for config in CONFIGS.values() if config["model_type"] == model_type)
    with pytest.raises(JobError, match=rf"{next(iter(keys))}: .* is not known"):
        read_config(architecture(config), {**config, **keys})


@pytest.mark.parametrize("name", CONFIGS)
def test_it_means_what_version_5_makes_of_it(name):
    config = CONFIGS[name]
    model = read_config(architecture(config), config)
    parse_component(model, name, ModelComponent, CATALOG)
    assert model == read_config(architecture(config), by_transformers(config))


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name]["model_type"] not in LANGUAGE_MODELS])
def test_what_is_written_is_to_transformers_what_was_published(name):
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    model = parse_component(read_config(architecture(config), config), name, ModelComponent, CATALOG)
    type_ = CLASSES.get(config["model_type"], config["model_type"])
    written = write_config(architecture({"model_type": type_}), model, CATALOG)
    kept = {key: value for key, value in config.items() if key not in written and key != "auto_map"}
    both = [by_transformers(copy.deepcopy(keys)) for keys in (config, {**kept, **written, "model_type": type_})]
    for side in both:
        rope = side.get("rope_parameters") or {}
        rope.pop("type", None)  # which repeats rope_type
        if not rope.get("mscale_all_dim", 1):  # 0 is as if it were missing
            del rope["mscale_all_dim"]
        if type_ == "lfm2":  # an export has the width that follows from several keys, and the list of layers
            width = AdjustedWidth().read(side)
            for key in (*AdjustedWidth().keys, "full_attn_idxs"):
                side.pop(key, None)
            side |= width
        if type_ == "hunyuan_v1_dense":  # an export has alpha in the base
            frequencies = HunYuanDenseV1RotaryEmbedding(transformers.HunYuanDenseV1Config(**side)).inv_freq
            side["rope_parameters"] = frequencies.tolist()
    before, after = both
    filled = {"head_dim", "n_inner", "use_bidirectional_attention"}  # null is what follows from other keys
    different = {
        key: (value, after.get(key))
        for key, value in before.items()
        if value != after.get(key) and not (key in filled and value is None) and not key.endswith(("dropout", "pdrop"))
    }
    different.pop("auto_map", None)
    assert different == {}


BILLIONS: Mapping[str, str] = {
    "meta-llama/Llama-3.2-1B": "1.24",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "80",
    "google/gemma-4-26B-A4B": "25.2",
    "zai-org/GLM-5": "754",
    "XiaomiMiMo/MiMo-V2-Flash, some keys": "309",
    "LGAI-EXAONE/EXAONE-4.0-32B": "32.0",
    "allenai/OLMoE-1B-7B-0924, some keys": "6.92",
    "ibm-granite/granite-4.0-h-350m, some keys": "0.34",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "31.6",
}
"""Parameters that model cards and the hub state; of GLM-5 with its block of multi-token prediction."""


def test_models_have_as_many_parameters_as_is_published() -> None:
    counts = {}
    for name, stated in BILLIONS.items():
        model = parse_component(read_config(architecture(CONFIGS[name]), CONFIGS[name]), name, ModelComponent, CATALOG)
        count = sum(math.prod(shape) for shape in shapes_of(model).values())
        counts[name] = f"{count / 1e9:.{len(stated.partition('.')[2])}f}"
    assert counts == BILLIONS


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration at a small width and depth, all else as it is published."""
    made = dict(config)
    made |= {key: SMALL[key] for key, value in config.items() if key in SMALL and value not in (None, 1)}
    if "num_hidden_layers" in config:
        ratio = config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])
        heads = {"num_attention_heads": 4, "num_key_value_heads": max(4 // ratio, 1), "num_hidden_layers": LAYERS}
        made |= {key: value for key, value in heads.items() if key in config}
    made |= {key: made[key][:LAYERS] for key in LISTS if key in config}
    if isinstance(config.get("moe_layer_freq"), list):
        made["moe_layer_freq"] = config["moe_layer_freq"][:LAYERS]
    if "num_nextn_predict_layers" in config:  # transformers neither writes nor reads them
        made["num_nextn_predict_layers"] = 0
    if "head_dim" in config:
        made["head_dim"] = 16 if config["model_type"] == "helium" else 32  # where heads have the width of the model
    if "full_attn_idxs" in config:
        made["full_attn_idxs"] = [layer for layer in config["full_attn_idxs"] if layer < LAYERS]
    if "linear_attn_config" in config:  # its layers count from 1
        table = config["linear_attn_config"]
        lists = {key: [n for n in table[key] if n <= LAYERS] for key in ("full_attn_layers", "kda_layers")}
        made["linear_attn_config"] = {**table, **lists, "num_heads": 2, "head_dim": 16}
    if (
        "mamba_n_heads" in config and "shared_intermediate_size" in config
    ):  # whose widths follow from that of the model, and experts may be none
        made |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "shared_intermediate_size": 96}
        made |= {"num_local_experts": config["num_local_experts"], "num_experts_per_tok": config["num_experts_per_tok"]}
        made["layer_types"] = config["layer_types"][-LAYERS:]  # the first ones are all alike
    if "ssm_multipliers" in config:
        made |= {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16, "num_hidden_layers": 2}
    if letters := config.get("hybrid_override_pattern"):  # one layer of each kind, in their order
        kinds = "".join(dict.fromkeys(letters))
        made |= {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds), "mamba_num_heads": 4}
        made |= {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 32}
    if "long_factor" in (made.get("rope_scaling") or {}):  # one for each pair of a head's rotated width
        made["hidden_size"] = config["hidden_size"] // config["num_attention_heads"] * 4
    ids = {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    return {key: value for key, value in {**made, **ids}.items() if key != "quantization_config"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.thorough) for name in CONFIGS]
)
def test_a_small_model_of_it_computes_the_logits_of_transformers(tmp_path, name):
    if (type_ := CONFIGS[name]["model_type"]) in LANGUAGE_MODELS:
        pytest.skip("test_language_models.py computes it")
    config = small(CONFIGS[name])
    reference = transformers.AutoConfig.for_model(**{**config, "model_type": CLASSES.get(type_, type_)})
    theirs = randomised(transformers.AutoModelForCausalLM.from_config(reference, dtype=torch.float32))
    theirs.save_pretrained(tmp_path / "published")
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    model = ours(import_folder(tmp_path / "published", tmp_path / "run", tokenizer=False))
    with torch.no_grad():
        expected = theirs(ids_of()).logits
    assert expected.std() > 1e-3
    assert (logits(model, ids_of()) - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


def test_a_rate_of_dropout_is_read_and_the_user_told(tmp_path, capsys):
    """Granite 3.0 was trained with dropout in attention; the model computes the same without."""
    config = small(CONFIGS["ibm-granite/granite-3.0-2b-instruct"])
    transformers.GraniteForCausalLM(transformers.GraniteConfig(**config)).save_pretrained(tmp_path / "published")
    note = "attention_dropout = 0.1: Forge trains without dropout, and an export has 0"
    assert main(["weights", "inspect", str(tmp_path / "published")]) == 0
    assert note in capsys.readouterr().out
    arguments = ["weights", "import", str(tmp_path / "published"), "--out", str(tmp_path / "run"), "--no-tokenizer"]
    assert main(arguments) == 0
    assert f"note: {note}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "rope_interleaved", True),
        ("Qwen/Qwen2.5-0.5B", "use_mrope", True),
        ("Qwen/Qwen2.5-0.5B", "dual_chunk_attention_config", {"chunk_size": 262144}),
        ("Qwen/Qwen3-30B-A3B", "mlp_only_layers", [3]),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "use_sliding_window", True),
        ("moonshotai/Kimi-K2-Instruct", "scoring_func", "softmax"),
        ("MiniMaxAI/MiniMax-M2", "shared_intermediate_size", 1024),
        ("MiniMaxAI/MiniMax-M2.5", "attn_type_list", [1] * 61 + [0]),
        ("microsoft/Phi-4-mini-instruct", "full_attn_mod", 2),
        ("LiquidAI/LFM2-1.2B", "conv_bias", True),
        ("LiquidAI/LFM2-1.2B", "full_attn_idxs", [2, 16]),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "linear_attn_config", {"gate_lower_bound": -5.0}),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "linear_attn_config", {"full_attn_layers": [], "kda_layers": [1]}),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "mla_use_nope", False),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "mlp_layer_types", ["sparse", "dense"]),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "indexer_rope_interleave", True),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "q_lora_rank", None),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "layer_types", ["full_attention"] * 61),
        ("zai-org/GLM-5", "index_topk_freq", 4),
        ("zai-org/GLM-5", "indexer_types", ["full", "shared"] * 39),
    ],
)
def test_what_forge_does_not_compute_is_named(tmp_path, capsys, name, key, value):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], key: value}))
    assert main(["weights", "inspect", str(tmp_path)]) == 2
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{key} ")]
    assert "NOT" in line


def test_kimi_is_exported_as_the_deepseek_that_it_is(tmp_path, capsys):
    config = small(CONFIGS["moonshotai/Kimi-K2-Instruct"])
    theirs = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**{**config, "model_type": "deepseek_v3"})
    )
    theirs.save_pretrained(tmp_path / "published")
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    run = str(tmp_path / "run")
    assert main(["weights", "import", str(tmp_path / "published"), "--out", run, "--no-tokenizer"]) == 0
    export = ["weights", "export", run, "--out", str(tmp_path / "out")]
    assert main([*export, "--architecture", "kimi_k2"]) == 2
    assert not lacks(capsys.readouterr().err, "kimi_k2", "deepseek_v3")
    assert main(export) == 0
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert type(again) is transformers.DeepseekV3ForCausalLM
