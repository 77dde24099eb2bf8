"""Keys that differ between layers: as versions 4 and 5 of `transformers` write them, and as a user does."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from published_models import EXPERTS

from forge_core.config.load import to_toml
from forge_core.contracts.components import ModelComponent
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_transformer import AttentionBackendComponent
from forge_plugin_weights.exporting import find_form
from forge_plugin_weights.keys_by_layer import of_layers
from forge_plugin_weights.kinds import Unsupported
from forge_plugin_weights.tables import (
    architectures,
    fitting_forms,
    flattened,
    read_config,
    resolved,
    write_config,
)
from forge_testing.catalogs import with_components
from forge_testing.refusals import at, refuses, refuses_all

CATALOG = Catalog.installed()
ARCHITECTURES = architectures(CATALOG)
CLASSES: Mapping[str, str] = {
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
}
FP8: Mapping[str, Any] = {"quant_method": "fp8"}
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma 3 1B": (
        "gemma3_text",
        {
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma 3 4B": ("gemma3_text", {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}),
    "Gemma 2": (
        "gemma2",
        {
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 224,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
    ),
    "OLMo 3": ("olmo3", {"rope_theta": 500000, "rope_scaling": YARN, "sliding_window": 4096, "rms_norm_eps": 1e-6}),
    "OLMo 2": ("olmo2", {"rope_theta": 500000, "rope_scaling": None, "attention_bias": False, "rms_norm_eps": 1e-6}),
    "Granite 3.3": (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "mlp_bias": False,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": (
        "smollm3",
        {
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0, 1, 1],
            "pretraining_tp": 2,
            "max_window_layers": 28,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 6,
        },
    ),
    "SmolLM3 by its interval": ("smollm3", {"no_rope_layer_interval": 3, "rope_theta": 5000000.0}),
    "Mistral 7B v0.1": ("mistral", {"sliding_window": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}),
    "Mistral 7B v0.3": ("mistral", {"sliding_window": None, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5}),
    "Qwen2.5": (
        "qwen2",
        {"sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False, "rope_theta": 1000000.0},
    ),
    "Qwen2 with windows": ("qwen2", {"sliding_window": 512, "max_window_layers": 4, "use_sliding_window": True}),
    "Qwen2-MoE with windows": (
        "qwen2_moe",
        {"sliding_window": 512, "max_window_layers": 4, "use_sliding_window": True},
    ),
}
"""Keys of published files in the spelling of version 4, at a small size."""


def published(type_: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as version 5 writes it."""
    config = getattr(transformers, CLASSES[type_])(**SIZES, **keys).to_dict()
    if type_ == "qwen3_moe":  # published files have the other name
        config["num_experts"] = config.pop("num_local_experts")
    return config


def model_of(type_: str, config: Mapping[str, Any]) -> Any:
    return parse_component(read_config(ARCHITECTURES[type_], config), "config.json", ModelComponent, CATALOG)


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_version_4_mean_what_version_5_makes_of_them(name):
    type_, keys = PUBLISHED[name]
    experts = {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    more = {**experts, "num_experts_per_tok": 4} if type_ == "qwen2_moe" else {}
    by_4 = read_config(ARCHITECTURES[type_], {**SIZES, **more, **keys})
    assert by_4 == read_config(ARCHITECTURES[type_], published(type_, keys))


@pytest.mark.parametrize("type_", CLASSES)
def test_missing_keys_have_the_values_of_version_5(type_):
    names = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok")
    by_5 = published(type_, {})
    more = {name: by_5[name] for name in names if name in by_5 and type_.endswith("_moe")}
    assert read_config(ARCHITECTURES[type_], {**SIZES, **more}) == read_config(ARCHITECTURES[type_], by_5)


def layered(type_: str, *, types: bool = True, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Configurations of an architecture; `types`: with a list of layers that have a window."""
    layers = {"layer_types": st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=6, max_size=6)}
    return st.tuples(
        st.just(type_),
        st.fixed_dictionaries({"sliding_window": st.integers(1, 99), **(layers if types else {}), **keys}),
    )


FACTORS = st.sampled_from([0.015625, 0.1, 0.22, 0.3, 1.0, 3.0, 7.0, 16.0, 49.0]) | st.floats(0.01, 100)
CAPS = st.none() | FACTORS
SWITCHED: Any = {"use_sliding_window": st.just(True)}
CONFIGS = st.one_of(
    layered("mistral", types=False),
    layered("mixtral", types=False),
    layered("qwen2", **SWITCHED),
    layered("qwen3", **SWITCHED, attention_bias=st.booleans()),
    layered("smollm3", **SWITCHED, no_rope_layers=st.lists(st.integers(0, 1), min_size=6, max_size=6).filter(any)),
    layered("olmo3", rope_theta=FACTORS.filter(lambda theta: theta > 1)),
    layered("gemma2", query_pre_attn_scalar=st.integers(1, 999), attn_logit_softcapping=CAPS),
    layered(
        "gemma3_text",
        query_pre_attn_scalar=st.integers(1, 999),
        final_logit_softcapping=CAPS,
        rope_local_base_freq=st.floats(2, 1e6),
        hidden_activation=st.sampled_from(["gelu_pytorch_tanh", "gelu"]),
    ),
    st.tuples(
        st.just("granite"),
        st.fixed_dictionaries(
            {
                **{f"{name}_multiplier": FACTORS for name in ("embedding", "attention", "residual")},
                "logits_scaling": st.sampled_from([1.0, 3.0, 7.0, 8.0, 16.0, 49.0, 0.3]),
            }
        ),
    ),
)


@given(CONFIGS)
def test_what_is_read_is_written(drawn):
    type_, keys = drawn
    before = published(type_, keys)
    after = write_config(ARCHITECTURES[type_], model_of(type_, before), CATALOG)
    meaningless = {"max_window_layers", "no_rope_layer_interval", "_sliding_window_pattern"}
    for key in {*keys, "layer_types", "rope_parameters"} & {*before} - meaningless:
        if key == "sliding_window" and "sliding_attention" not in before.get("layer_types", ["sliding_attention"]):
            assert after[key] is None
        elif key == "use_sliding_window":
            assert after[key] == bool(after["sliding_window"])
        elif key == "rope_parameters" and "full_attention" in before[key]:
            kinds = set(before["layer_types"])
            assert after[key] == {name: before[key][name] for name in before[key] if name in kinds}
        else:
            assert after.get(key) == before[key]
    assert read_config(ARCHITECTURES[type_], after) == read_config(ARCHITECTURES[type_], before)


JOB = """
type = "transformer"
dim = 32
layers = 4
vocab_size = 64
"""
PATTERN = """
[attention]
type = "pattern"
layers = ["near", "far"]
kinds.near = {{ type = "gqa", heads = 4, {near} }}
kinds.far = {{ type = "gqa", heads = 4, {far} }}
"""


def of_job(keys: str) -> ModelComponent:
    return parse_component(tomllib.loads(JOB + keys), "job.toml", ModelComponent, CATALOG)


def test_a_pattern_with_names_of_ones_own_is_exported():
    normalised = "qk_norm = true, qk_norm_eps = 1e-5"
    model = of_job(PATTERN.format(near=f"window = 8, {normalised}", far=f"kv_heads = 4, head_dim = 8, {normalised}"))
    assert [*fitting_forms(model, CATALOG)] == ["qwen3"]
    config = write_config(ARCHITECTURES["qwen3"], model, CATALOG)
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["sliding_window"] == 8


@pytest.mark.parametrize(
    ("keys", "type_"),
    [
        ("attention.heads = 4", "llama"),
        ("attention = { heads = 4, window = 8 }", "mistral"),
        ("logit_scale = 0.125", "granite"),
        ("attention = { heads = 4, bias = true, output_bias = false }", "qwen2"),
        ('norm_placement = "post"\nattention = { qk_norm = "all", qk_norm_eps = 1e-5 }', "olmo2"),
        (PATTERN.format(near="rope.theta = 5e5", far='rope.type = "none"'), "smollm3"),
    ],
)
def test_a_model_of_several_architectures_is_exported_as_the_plainest(keys, type_):
    assert find_form(of_job(keys), CATALOG)[0] == type_


def test_kinds_that_compute_the_same_are_no_pattern():
    model = of_job(PATTERN.format(near='backend = "math"', far="kv_heads = 4"))
    assert "llama" in fitting_forms(model, CATALOG)


def test_names_of_kinds_say_what_they_are():
    config = published("smollm3", {"sliding_window": 8, "use_sliding_window": True, "no_rope_layer_interval": 3})
    attention = read_config(ARCHITECTURES["smollm3"], config)["attention"]
    assert attention["layers"] == ["full", "full", "window_nope"]
    assert attention["kinds"]["window_nope"]["rope"] == {"type": "forge-plugin-transformer/none"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('norm_placement = "post"', [at("model.norm_placement", "'post'", "LlamaForCausalLM", "'pre'")]),
        ('norm_placement = "both"', [at("model.norm_placement", "'both'")]),
        ('residual = "parallel"', [at("model.residual", "'parallel'")]),
        ("residual_scale = 0.5", [at("model.residual_scale", 0.5)]),
        ("learned_positions = 4096", [at("model.learned_positions", 4096)]),
        ("embedding_scale = 2.0", [at("model.embedding_scale", 2.0)]),
        ("logit_scale = 2.0", [at("model.logit_scale", 2.0)]),
        ("logit_soft_cap = 2.0", [at("model.logit_soft_cap", 2.0)]),
        ("norm.offset = 1", [at("model.norm.offset", 1)]),
        ('ffn.type = "geglu"', [at("", "ffn.type = 'forge-plugin-transformer/geglu'", "hidden_act", "'silu'")]),
        ("attention.window = 8", [at("model.attention.window", 8)]),
        ("attention.scale = 0.5", [at("model.attention.scale", 0.5)]),
        ("attention.soft_cap = 9.0", [at("model.attention.soft_cap", 9.0)]),
        ("attention.sinks = true", [at("model.attention.sinks", True)]),
        ('attention.qk_norm = "all"', [at("model.attention.qk_norm", "'all'")]),
        (
            'attention.rope.type = "none"',
            [at("", "attention.rope.type = 'forge-plugin-transformer/none'", "rope_type")],
        ),
        ("attention.rope.partial_rotary_factor = 0.5", [at("model.attention.rope.partial_rotary_factor", 0.5)]),
        (
            PATTERN.format(near="window = 8", far="window = 0"),
            [at("model.attention.window", 8, 0)],
        ),
        (
            PATTERN.format(near="rope.theta = 5.0", far="window = 0"),
            [at("", "rope_theta", 5.0, 10000.0)],
        ),
        (
            PATTERN.format(near="heads = 2", far="window = 0").replace("heads = 4, heads", "heads"),
            [at("", "num_attention_heads", "2, 4"), at("", "num_key_value_heads", "2, 4"), at("", "head_dim", "16, 8")],
        ),
    ],
)
def test_what_a_llama_has_not_is_refused_by_its_key(keys, expected):
    with refuses_all(*expected):
        write_config(ARCHITECTURES["llama"], of_job(keys), CATALOG)


def test_layers_with_two_windows_are_refused():
    near, far = (f"window = {window}, qk_norm = true, qk_norm_eps = 1e-5" for window in (8, 4))
    with refuses("", "attention.window", 8, 4):
        write_config(ARCHITECTURES["qwen3"], of_job(PATTERN.format(near=near, far=far)), CATALOG)


def windows_and_ropes(config: Mapping[str, Any]) -> list[tuple[int, bool]]:
    """The window of each layer of EXAONE 4, and whether it has an encoding of positions."""
    model = parse_component(read_config(ARCHITECTURES["exaone4"], config), "config.json", ModelComponent, CATALOG)
    layers: Any = ARCHITECTURES["exaone4"]
    flat = resolved(layers, flattened(to_toml(model, CATALOG)))
    return [
        (layer["attention.window"], layer["attention.rope.type"] != "forge-plugin-transformer/none")
        for layer in of_layers(flat)
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window_pattern": "LLLG"}, [(8, True)] * 3 + [(0, False)] + [(8, True), (0, False)]),
        ({"sliding_window_pattern": "LG"}, [(8, True), (0, False)] * 3),
        ({"sliding_window_pattern": 3}, ([(8, True)] * 2 + [(0, False)]) * 2),
        ({"layer_types": ["full_attention"] * 6}, [(0, False)] * 6),
        ({"sliding_window": None}, [(0, True)] * 6),
    ],
)
def test_layers_of_exaone_without_a_window_have_no_positions_beside_layers_with_one(keys, expected):
    config = {**SIZES, "sliding_window": 8, **keys}
    assert windows_and_ropes(config) == expected
    model = parse_component(read_config(ARCHITECTURES["exaone4"], config), "config.json", ModelComponent, CATALOG)
    assert windows_and_ropes(write_config(ARCHITECTURES["exaone4"], model, CATALOG)) == expected


@pytest.mark.parametrize(
    ("window", "rope", "facts"),
    [(8, "none", ["attention.window", "attention.rope"]), (0, "none", ["attention.rope differs between layers"])],
)
def test_positions_that_exaone_does_not_have_so_are_refused(window, rope, facts):
    table = read_config(ARCHITECTURES["exaone4"], {**SIZES, "sliding_window": None})
    attention = table["attention"]
    rope_of_others = {"type": f"forge-plugin-transformer/{rope}"}
    kinds = {"one": {**attention, "window": window}, "other": {**attention, "window": window, "rope": rope_of_others}}
    pattern = {"type": "forge-plugin-transformer/pattern", "layers": ["one", "other"], "kinds": kinds}
    job = {**table, "attention": pattern}
    model = parse_component(job, "job.toml", ModelComponent, CATALOG)
    with refuses("", *facts):
        write_config(ARCHITECTURES["exaone4"], model, CATALOG)


@pytest.mark.parametrize(
    ("heads", "facts"), [({"head_dim": 4}, ["attention.head_dim = 4", "4 heads"]), ({"kinds": True}, ["all layers"])]
)
def test_heads_that_are_not_as_wide_as_heliums_are_refused(heads, facts):
    table = read_config(ARCHITECTURES["helium"], {**SIZES, "head_dim": SIZES["hidden_size"] // 4})
    attention = table["attention"]
    if "kinds" in heads:
        kinds = {"one": attention, "other": {**attention, "head_dim": 4}}
        pattern = {"type": "forge-plugin-transformer/pattern", "layers": ["one", "other"], "kinds": kinds}
        table = {**table, "attention": pattern}
    else:
        table = {**table, "attention": {**attention, **heads}}
    model = parse_component(table, "job.toml", ModelComponent, CATALOG)
    with refuses("", *facts):
        write_config(ARCHITECTURES["helium"], model, CATALOG)


@pytest.mark.parametrize("type_", ARCHITECTURES)
def test_a_model_of_other_keys_altogether_is_refused_and_not_stumbled_over(type_):
    fields = ARCHITECTURES[type_].fields()
    refused = 0
    for field in fields:
        try:
            field.write({"type": "forge-plugin-vision/vision_language", **field.resolve({})})
        except Unsupported:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("type_", "keys", "expected"),
    [
        ("gemma2", {"layer_types": ["chunked_attention"] * 6}, at("", "layer_types", "'chunked_attention'")),
        ("gemma2", {"layer_types": ["full_attention"]}, at("", "layer_types", 1, 6)),
        ("gemma2", {"use_bidirectional_attention": True}, at("", "use_bidirectional_attention = True", "causal")),
        ("gemma2", {"hidden_activation": "silu"}, at("", "hidden_activation = 'silu'")),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 6},
            at("", "'sliding_attention'", "sliding_window", "missing"),
        ),
        ("smollm3", {"no_rope_layers": [1]}, at("", "no_rope_layers", 1, 6)),
        ("olmo3", {"rope_parameters": {"rope_theta": 5.0}}, at("", "rope_parameters", "rope_theta")),
        ("mistral", {"layer_types": ["full_attention"] * 6}, at("layer_types", "'full_attention'", "--ignore")),
        ("llama", {"vocab_size": ...}, at("", "vocab_size")),
        ("llama", {"rope_scaling": "yarn"}, at("", "rope_scaling = 'yarn'")),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "novelty": 1}},
            at("", "rope_type 'linear'", "novelty"),
        ),
        (
            "gpt_neox",
            {"num_key_value_heads": ..., "rotary_pct": 0.5, "partial_rotary_factor": 0.25},
            at("", "rotary_pct = 0.5", "partial_rotary_factor = 0.25"),
        ),
        (
            "qwen2_moe",
            {**EXPERTS, "shared_expert_intermediate_size": 24},
            at("", "shared_expert_intermediate_size = 24", 16),
        ),
        (
            "qwen2_moe",
            {**EXPERTS, "shared_expert_intermediate_size": 24, "moe_intermediate_size": 0},
            at("", "shared_expert_intermediate_size = 24", "ZeroDivisionError"),
        ),
        ("exaone4", {"sliding_window_pattern": "LLXG"}, at("", "sliding_window_pattern = 'LLXG'")),
        ("exaone4", {"sliding_window_pattern": ""}, at("", "sliding_window_pattern = ''")),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, at("", "attention_out_bias", "alone")),
        ("llama", {"quantization_config": "fp8"}, at("", "quantization_config = 'fp8'")),
        ("llama", {"quantization_config": {**FP8, "weight_block_size": 128}}, at("", "weight_block_size = 128")),
        ("llama", {"quantization_config": {**FP8, "weight_block_size": [0, 1]}}, at("", "weight_block_size = [0, 1]")),
        ("llama", {"quantization_config": {**FP8, "weight_block_size": [1, "2"]}}, at("", "weight_block_size", "'2'")),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(type_, keys, expected):
    with refuses_all(expected):
        config = {key: value for key, value in {**SIZES, **keys}.items() if value is not ...}
        read_config(ARCHITECTURES[type_], config)


def test_a_kernel_that_is_a_component_is_no_key_of_the_export():
    @frozen(kw_only=True)
    class Kernel(AttentionBackendComponent):
        """A kernel of a stranger."""

    catalog = with_components(CATALOG, {"attention_backend": {"kernel": Kernel}})
    architecture = ARCHITECTURES["qwen3"]
    table = read_config(architecture, published("qwen3", {}))
    model = parse_component(table, "config.json", ModelComponent, catalog)
    other = evolve(model, attention=evolve(model.attention, backend=Kernel()))
    assert write_config(architecture, other, catalog) == write_config(architecture, model, catalog)
    wide = evolve(model, head_precision="fp32")  # of the logits, in reinforcement learning
    assert write_config(architecture, wide, catalog) == write_config(architecture, model, catalog)
