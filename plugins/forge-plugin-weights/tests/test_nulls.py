"""A key that is null: a model is what its class in `transformers` makes of it, or the key is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import published_qwen
import published_vision
import pytest
import torch
import transformers
from published_models import MODELS, ids_of

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.kinds import TIED
from forge_plugin_weights.tables import HARMLESS, all_fields, architectures, read_config, write_config

CATALOG = Catalog.installed()
INSTALLED = architectures(CATALOG)
LANGUAGES = {name: model for name, model in MODELS.items() if "," not in name}
SEEING = {
    name.partition(",")[0]: model
    for models in (
        published_vision.MODELS,
        published_vision.ANY_SIZE,
        published_vision.BUDGETED,
        published_vision.TOWERS,
        published_vision.TILED,
        published_qwen.MODELS,
    )
    for name, model in reversed(models.items())
}
ALWAYS = ("llama", "deepseek_v3", "granitemoe", "ernie4_5", "gpt2", "llama4", "gemma4")
"""One with no flag that is true, with such ones, with a factor, with a width of heads, with other names, and two whole
models; all others are tried in the thorough tests."""
ALIASES = {("gpt_oss", "num_experts"), ("minimax_m2", "num_experts"), ("olmoe", "num_local_experts")}
"""Other names of a key, beside that key: by the null, the class has no number."""
STRICT = ("internvl", "siglip_vision_model", "siglip2_vision_model", "clip_vision_model")
"""Classes that refuse each null."""
WITHOUT_A_MODEL = {("mimo_v2_flash", "rope_scaling")}
"""Keys whose null leaves the class without what its model needs: there is nothing to compare with."""


def cases(names: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in names]


def by_class(type_: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `transformers` makes of a configuration; None if it refuses it."""
    try:
        return transformers.AutoConfig.for_model(**{**copy.deepcopy(dict(config)), "model_type": type_}).to_dict()
    except Exception:  # of the types of dataclasses, and of what follows from a number
        return None


def ours(type_: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What Forge makes of it; None if it refuses it, by the key or one that depends on it."""
    try:
        return read_config(INSTALLED[type_], config)
    except JobError:
        return None


def keys_of(type_: str, config: Mapping[str, Any]) -> Iterator[str]:
    known = [key for field in all_fields(INSTALLED[type_]) for key in field.keys]
    yield from (key for key in dict.fromkeys([*config, *known]) if key not in HARMLESS)


def built(theirs: Any, config: Mapping[str, Any]) -> Any:
    """A model of the class with other keys; None if it cannot be built."""
    notes = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version")
    try:
        own = {key: value for key, value in copy.deepcopy(dict(config)).items() if key not in notes}
        return type(theirs)(type(theirs.config)(**own)).eval()
    except Exception:
        return None


@torch.no_grad()
def same(theirs: Any, null: Mapping[str, Any], back: Mapping[str, Any]) -> bool:
    """Whether both configurations make one model, or the class cannot compute with the null."""
    one, other = built(theirs, null), built(theirs, back)
    if one is None:
        return True
    assert other is not None
    torch.manual_seed(0)
    state = {
        name: tensor + 0.3 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in other.state_dict().items()
    }
    other.load_state_dict(state)
    one.load_state_dict(state)
    try:
        computed = one(ids_of()).logits
    except (TypeError, ValueError, RuntimeError):
        return True
    return bool((computed - other(ids_of()).logits).abs().max() < 1e-5)


@pytest.mark.parametrize("type_", cases(LANGUAGES))
def test_a_null_makes_the_model_that_it_makes_in_the_class(type_: str) -> None:
    theirs = LANGUAGES[type_].model()
    config, compared = theirs.config.to_dict(), 0
    for key in keys_of(type_, config):
        null = {**config, key: None}
        if (type_, key) in ALIASES | WITHOUT_A_MODEL or (own := ours(type_, null)) is None:
            continue
        if (made := by_class(type_, null)) is None:
            continue
        compared += 1
        if made.get(key) is not None:
            assert read_config(INSTALLED[type_], made) == own, key
        elif config.get(key) is not None and hasattr(theirs.config, key):
            model = parse_component(own, "config.json", ModelComponent, CATALOG)
            assert same(theirs, null, {**config, **write_config(INSTALLED[type_], model, CATALOG)}), key
    assert compared


@pytest.mark.parametrize("type_", cases(SEEING))
def test_a_null_beside_or_in_the_table_of_a_tower_means_what_the_class_makes_of_it(type_: str) -> None:
    config, compared = SEEING[type_].config().to_dict(), 0
    for table in (None, "vision_config"):
        if table is not None and table not in config:
            continue
        inner = config if table is None else config[table]
        # A tied head stands in two tables, and which of them holds depends on the version.
        for key in (key for key in inner if key not in HARMLESS | {TIED} and not key.endswith("_config")):
            null = {**inner, key: None} if table is None else {**config, table: {**inner, key: None}}
            own, made = ours(type_, null), by_class(type_, null)
            if own is None or made is None:
                continue
            compared += 1
            assert read_config(INSTALLED[type_], made) == own, key
    assert compared or type_ in STRICT


def test_a_key_that_nobody_knows_and_nobody_has_set_is_as_a_missing_one() -> None:
    config = LANGUAGES["llama"].model().config.to_dict()
    assert ours("llama", {**config, "expert_intermediate_size": None}) == ours("llama", config)
    with pytest.raises(JobError, match="expert_intermediate_size"):
        read_config(INSTALLED["llama"], {**config, "expert_intermediate_size": 8})
