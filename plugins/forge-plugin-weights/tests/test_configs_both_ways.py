"""Laws of configurations, for every installed architecture and all values of its keys that are supported."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tomli_w
import transformers
from drawn_configs import ARCHITECTURES, INSTALLED, MANY, configs, keys_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from forge_core.config.load import parse_job, to_toml
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.fields import Choice, Dropout, ExportedAs, Only
from forge_plugin_weights.importing import model_shapes
from forge_plugin_weights.kinds import ArchitectureComponent
from forge_plugin_weights.tables import (
    all_fields,
    fits_any,
    fitting_forms,
    flattened,
    nested,
    read_config,
    resolved,
    write_config,
)
from forge_testing.refusals import at, check_problems

CATALOG = Catalog.installed()
READ_ONLY = [
    type_
    for type_, architecture in ARCHITECTURES.items()
    if any(isinstance(field, ExportedAs) for field in architecture.fields())
]
"""Architectures that an export writes as another."""
WRITTEN = [type_ for type_ in ARCHITECTURES if type_ not in READ_ONLY]
TRANSFORMERS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Types of `transformers`, where they have another name."""
PHASES = [phase for phase in Phase if phase is not Phase.explain]  # which takes minutes
BY_MEANING = {
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"),
    *("rope_local_base_freq", "max_position_embeddings", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "layer_types"),
    "no_rope_layer_interval",
}
"""Keys that say one thing in several spellings: `transformers` is asked whether they mean the same."""
OWN_SPELLINGS: Mapping[str, set[str]] = {
    # An export has the width that follows from several keys, and nothing that adjusts it
    "lfm2": {
        *("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier"),
        *("block_multiple_of", "full_attn_idxs"),
    },
    "lfm2_moe": {"full_attn_idxs"},
    # Of layers without an encoding, of those with one and of chunks, where there are none; the list has precedence
    "llama4_text": {
        *("attn_temperature_tuning", "attn_scale", "floor_scale", "use_qk_norm", "attention_chunk_size"),
        "interleave_moe_layer_step",
    },
    "gemma3n_text": {"intermediate_size"},  # a list is written
    # Of layers with a window, where there is none; of those that share keys, and of inputs, where there are none
    "gemma4_text": {
        *("head_dim", "num_key_value_heads", "use_double_wide_mlp", "vocab_size_per_layer_input", "pad_token_id"),
    },
    "bamba": {"mamba_n_heads", "mamba_d_head", "mamba_expand"},
    "nemotron_h": {"layers_block_type"},  # whose entries have two names each
    # A width has three spellings, a factor on keys is one on scores, and without a norm it stands nowhere
    "falcon_h1": {"mamba_d_head", "mamba_d_ssm", "mamba_expand", "key_multiplier", "mamba_norm_before_gate"},
    # Null is no encoding of positions, and a width follows from others; without experts, both keys mean nothing
    "granitemoehybrid": {
        *("position_embedding_type", "mamba_n_heads", "mamba_d_head", "mamba_expand"),
        *("intermediate_size", "num_experts_per_tok"),
    },
    # A table has precedence over keys, and a list over a number; both are written
    "ernie4_5_moe": {"moe_layer_end_index"},  # -1 is the last one
    **{type_: {"first_k_dense_replace", "mlp_layer_types"} for type_ in ("deepseek_v32", "glm_moe_dsa")},
    "kimi_linear": {
        *("linear_attn_config", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
        *("first_k_dense_replace", "mlp_layer_types"),
    },
}
"""Such keys of one architecture."""


def by_meaning(type_: str) -> set[str]:
    """Keys of an architecture whose values may be others of the same meaning."""
    return BY_MEANING | OWN_SPELLINGS.get(type_, set())


def model_of(type_: str, config: Mapping[str, Any]) -> Any:
    return parse_component(read_config(ARCHITECTURES[type_], config), "config.json", ModelComponent, CATALOG)


def by_transformers(type_: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as version 5 of `transformers` reads and writes it."""
    keys = {**copy.deepcopy(dict(config)), "model_type": TRANSFORMERS.get(type_, type_)}
    return transformers.AutoConfig.for_model(**keys).to_dict()


@pytest.mark.parametrize("type_", ARCHITECTURES)
@settings(max_examples=5 * MANY, phases=PHASES)
@given(data=st.data())
def test_what_is_read_is_written_and_both_are_what_transformers_makes_of_it(type_, data):
    config = data.draw(configs(type_))
    architecture = ARCHITECTURES[type_]
    table = read_config(architecture, config)
    before = by_transformers(type_, config)
    assert read_config(architecture, before) == table
    if type_ in WRITTEN:
        written = write_config(architecture, model_of(type_, config), CATALOG)
        assert read_config(architecture, written) == table
        check_written(type_, config, written)
        kept = {key: config[key] for key in ("max_position_embeddings",) if key in config}
        after = by_transformers(type_, {**kept, **written})
        assert read_config(architecture, after) == table
        check_meaning({*keys_of(type_)} & {*before} & {*written} - by_meaning(type_), before, after)


def check_written(type_: str, config: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """What is written has the values of a configuration, but for keys that have several spellings."""
    architecture = ARCHITECTURES[type_]
    expected = {key: value for key, value in config.items() if key in written and key not in by_meaning(type_)}
    rates = {key for field in architecture.fields() if isinstance(field, Dropout) for key in field.keys}
    null = {key for key, value in expected.items() if value is None}  # stands for what follows from other keys
    expected = {key: 0.0 if key in rates else value for key, value in expected.items() if key not in null}
    for field in architecture.fields():
        if isinstance(field, Choice) and field.theirs in expected:  # which may have two names for one thing
            assert field.options[written[field.theirs]] == field.options[expected.pop(field.theirs)]
    assert {key: written[key] for key in expected} == expected


def check_meaning(keys: set[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Keys that `transformers` makes of two configurations have the same values."""
    for key in keys:
        if before[key] is None:  # it stands for what follows from other keys, or for nothing
            assert after[key] is None or after[key] is False or after[key] > 0
        elif "dropout" not in key and "pdrop" not in key and not isinstance(before[key], str):
            assert after[key] == before[key], key


def other(value: Any) -> Any:
    """A value that an architecture does not support, of the type of one that it does."""
    if isinstance(value, bool):
        return not value
    return [*value, 3] if isinstance(value, list) else value + 1 if isinstance(value, int | float) else "other"


@pytest.mark.parametrize("type_", ARCHITECTURES)
@settings(max_examples=2, phases=[Phase.generate])
@given(data=st.data())
def test_unknown_keys_and_unsupported_values_are_refused_by_name(type_, data):
    config = data.draw(configs(type_))
    architecture = ARCHITECTURES[type_]
    wrong: dict[str, Any] = {"novelty": 3}
    for field in all_fields(architecture):
        if isinstance(field, Only):
            wrong[field.theirs] = other(field.value)
        elif isinstance(field, Choice):
            wrong[field.theirs] = "other"
    for key, value in wrong.items():
        with pytest.raises(JobError, match=key):
            read_config(architecture, {**config, key: value})


CHANGES: Mapping[str, st.SearchStrategy[Any]] = {
    "norm_placement": st.sampled_from(["pre", "post", "both"]),
    "residual": st.sampled_from(["sequential", "parallel"]),
    "residual_scale": st.sampled_from([1.0, 0.22]),
    "learned_positions": st.sampled_from([0, 7]),
    "embedding_scale": st.sampled_from([1.0, 12.0]),
    "logit_scale": st.sampled_from([1.0, 0.125, 1 / 3]),
    "logit_soft_cap": st.sampled_from([0.0, 30.0]),
    "tie_embeddings": st.booleans(),
    "norm.offset": st.sampled_from([0, 1]),
    "norm.eps": st.sampled_from([1e-5, 1e-6]),
    "attention.bias": st.booleans(),
    "attention.output_bias": st.booleans(),
    "attention.kv_heads": st.just(0),
    "attention.head_dim": st.just(0),
    "attention.window": st.sampled_from([0, 6]),
    "attention.scale": st.sampled_from([0.0, 0.0625, 0.3]),
    "attention.soft_cap": st.sampled_from([0.0, 50.0]),
    "attention.sinks": st.booleans(),
    "attention.qk_norm": st.sampled_from([False, True, "head", "all"]),
    "attention.qk_norm_eps": st.sampled_from([1e-5, 1e-6]),
    "attention.qk_norm_offset": st.sampled_from([0, 1]),
    "attention.rope.theta": st.sampled_from([10000.0, 3e6]),
    "attention.rope.partial_rotary_factor": st.sampled_from([1.0, 0.5]),
    "ffn.hidden": st.just(0),
    "ffn.bias": st.booleans(),
    "mtp.depth": st.sampled_from([0, 1]),
}
"""Keys of `[model]`, and values among which are those that a model had by itself."""


@pytest.mark.parametrize("type_", WRITTEN)
@settings(max_examples=5 * MANY, phases=PHASES)
@given(data=st.data())
def test_a_model_that_is_written_is_read_again(type_, data):
    """One that was imported, with a key or two set by hand: it has a published form that keeps them, or is refused."""
    flat = flattened(read_config(ARCHITECTURES[type_], data.draw(configs(type_))))
    for path in data.draw(st.lists(st.sampled_from([*CHANGES]), max_size=2)):
        if path in flat or "." not in path or path.startswith("mtp"):
            flat[path] = data.draw(CHANGES[path])
    try:
        model = parse_component(nested(flat), "job.toml", ModelComponent, CATALOG)
    except JobError:
        return  # it is no model of Forge
    for name, architecture in forms_of(model).items():
        again = model_of(name, write_config(architecture, model, CATALOG))
        one, same = (resolved(architecture, flattened(to_toml(side, CATALOG))) for side in (model, again))
        kept = {path for path in {*one, *same} if not fits_any(path, architecture.training_only)}
        assert {path: one.get(path) for path in kept} == {path: same.get(path) for path in kept}
        if again != model and not any(path.startswith("mtp") for path in one):  # which only DeepSeek's form has
            assert shapes_of(model) == shapes_of(again)


def forms_of(model: ModelComponent) -> Mapping[str, ArchitectureComponent]:
    """The architectures that a model is of; there may be none."""
    try:
        forms = fitting_forms(model, CATALOG, INSTALLED)
    except JobError as error:
        check_problems(error.problems[:1], at("model", *ARCHITECTURES))  # and why the nearest does not fit
        return {}
    return {name: form.architecture for name, form in forms.items()}


def shapes_of(model: ModelComponent) -> Any:
    """The shapes of all parameters by name; None if it cannot be built."""
    table = {
        "job": {"name": "shapes"},
        "train": {"steps": 1, "global_batch_size": 1, "seq_len": 8},
        "model": to_toml(model, CATALOG),
        "data": {"sources": [{"type": "forge_testing:Numbers"}]},
        "optimizer": {"type": "forge_testing:TinyAdamW"},
    }
    job = parse_job(tomli_w.dumps(table), "job.toml", CATALOG)
    try:
        return model_shapes(job, CATALOG)
    except (JobError, ValueError, ZeroDivisionError):  # refused when the job is checked
        return None


def _described(kind: type[ArchitectureComponent] = ArchitectureComponent) -> Iterator[type[ArchitectureComponent]]:
    """Yields all classes of architectures, those that are parts of others too."""
    for each in kind.__subclasses__():
        yield each
        yield from _described(each)


def test_defaults_are_those_of_the_published_classes() -> None:
    compared = []
    # Classes that other tests have defined, or read from files of users, are described too
    own = {each for each in _described() if each.__module__.startswith("forge_plugin_weights.")}
    for architecture in {each for each in own if each.defaults and hasattr(transformers, each.name)}:
        theirs = getattr(transformers, architecture.name).config_class()
        assert architecture.defaults == {key: getattr(theirs, key) for key in architecture.defaults}, architecture
        compared.append(architecture.name)
    assert {"LlamaForCausalLM", "Qwen2_5_VLTextModel"} <= set(compared)
