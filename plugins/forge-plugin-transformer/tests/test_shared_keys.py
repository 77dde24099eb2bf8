"""Layers that attend to keys of others, and inputs of layers beside the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError, JobError
from forge_plugin_transformer import AltUp, AttentionPattern, GroupedQueryAttention, PerLayerInputs
from forge_testing.refusals import at, naming, refuses_all

MakeModel = Callable[..., Any]
PATTERN = """
[model.attention]
type = "pattern"
layers = ["near", "near", "full"]
[model.attention.kinds.near]
type = "gqa"
window = 8
[model.attention.kinds.full]
type = "gqa"
"""
KINDS = {
    "near": GroupedQueryAttention(heads=4, kv_heads=2, window=3),
    "full": GroupedQueryAttention(heads=4, kv_heads=2),
}


INPUTS = "[model.per_layer_inputs]\ndim = 4\n"
MISTAKES = {
    "no layer left": ("kv_shared_layers = 6", PATTERN, at("model.kv_shared_layers", 6, "lower it")),
    # Layers 0 to 2 of the pattern are near, near, full
    "no such layer": ("kv_shared_layers = 4", PATTERN, at("model.kv_shared_layers", "layer 2", 4)),
    "no keys": (
        "kv_shared_layers = 2", '[model.attention]\ntype = "mla"', at("model.kv_shared_layers", "layer 4", "gqa"),
    ),
    "narrow values": (
        "kv_shared_layers = 2", '[model.attention]\nv_head_dim = 4', at("model.kv_shared_layers", "v_head_dim"),
    ),
    "predictions": ("", f"{INPUTS}[model.mtp]\n", at("model.per_layer_inputs", "model.mtp")),
    "another connection": (
        "laurel_rank = 4",
        '[model.residual_connection]\ntype = "hyper_connections"\n',
        at("model.laurel_rank", "HyperConnections"),
    ),
    "parallel parts": (
        'residual = "parallel"', "[model.altup]\n", at("model.altup", "parallel parts"),
    ),
    "no such stream": ("", "[model.altup]\nactive = 4\n", at("model.altup.active", 4, 4)),
    "no such row": (
        "", f"{INPUTS}vocab_size = 5\npadding_row = 5\n", at("model.per_layer_inputs.padding_row", 5, 5),
    ),
    "predictions of streams": ("", "[model.altup]\n[model.mtp]\n", at("model.altup", "model.mtp")),
    "streams": (
        "",
        f'{INPUTS}[model.residual_connection]\ntype = "hyper_connections"\n',
        at("model.per_layer_inputs", "residual_connection", 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "tables", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_what_has_no_keys_to_share_and_no_place_for_inputs_is_refused(load_model, keys, tables, problem) -> None:
    with refuses_all(problem):
        load_model(tables, f"layers = 6\n{keys}")


def test_a_job_file_has_both(load_model: MakeModel, make_model: MakeModel, ids: Tensor) -> None:
    component = load_model(f"{INPUTS}{PATTERN}", "layers = 6\nkv_shared_layers = 3")
    assert component.per_layer_inputs == PerLayerInputs(dim=4)
    assert component.kv_sources() == {3: 1, 4: 1, 5: 2}


def test_a_layer_attends_to_the_keys_of_the_last_one_of_its_kind(make_model: MakeModel, ids: Tensor) -> None:
    attention = AttentionPattern(layers=("near", "full"), kinds=KINDS)
    model = make_model(layers=6, attention=attention, kv_shared_layers=3)
    names = {name.split(".")[1] for name, _ in model.named_parameters() if ".attention.k." in name}
    assert names == {"0", "1", "2"}
    assert model.kv_sources == {"3": "1", "4": "2", "5": "1"}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in model.layers.items():
        layer.attention.core.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[1:3]}))
    model({"input_ids": ids})
    for own, source in model.kv_sources.items():
        assert all(torch.equal(*pair) for pair in zip(seen[own], seen[source], strict=True))
    model({"input_ids": ids}).sum().backward()
    assert all(parameter.grad is not None for parameter in model.layers.parameters())


def test_ids_beyond_the_table_have_its_first_row(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(per_layer_inputs=PerLayerInputs(dim=4, vocab_size=20))
    x = model.embedding(ids)
    own = model.per_layer_inputs(ids, x)
    assert own.shape == (*ids.shape, 2, 4)
    assert torch.equal(own, model.per_layer_inputs(ids.where(ids < 20, 0), x))
    assert (ids >= 20).any()


def test_a_rank_without_some_layers_has_no_cache_of_shared_keys(make_model: MakeModel) -> None:
    model = make_model(layers=4, kv_shared_layers=2)
    del model.layers["3"]
    with pytest.raises(ForgeError, match=naming("model.kv_shared_layers", "parallel.pp")):
        model.new_cache(1, 8)


def test_an_import_without_such_a_layer_is_refused_when_it_is_built(make_model: MakeModel) -> None:
    attention = AttentionPattern(layers=("near", "near", "full"), kinds=KINDS)
    with pytest.raises(JobError, match=naming("model.kv_shared_layers")):
        make_model(layers=3, attention=attention, kv_shared_layers=1)


def test_flops_are_those_of_the_matrices_that_there_are(make_model: MakeModel) -> None:
    plain, length = make_model(layers=4).flops(8), 8
    keys = 2 * 32 * 16  # matrices of keys and values of a layer
    assert make_model(layers=4, kv_shared_layers=2).flops(length) == plain - 6 * 2 * keys
    inputs = make_model(layers=4, per_layer_inputs=PerLayerInputs(dim=4))
    assert inputs.flops(length) == plain + 6 * (32 * 16 + 4 * 2 * 32 * 4)
    assert inputs.embed_flops(length) == 6 * 32 * 16
    streams = make_model(layers=4, altup=AltUp(inputs=3), laurel_rank=2)
    ends = 2 * 2 * 32 * 32
    layer = 2 * 3 * 32 + 27 + 9 + 32 * 12 + 2 * 32 * 2
    assert streams.flops(length) == plain + 6 * (ends + 4 * layer)
