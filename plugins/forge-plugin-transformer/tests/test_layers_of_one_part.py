"""Layers without attention or without a feed-forward part: `none`, and the pattern of feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from forge_core.contracts.errors import JobError
from forge_plugin_transformer import (
    AttentionPattern,
    FFNPattern,
    GroupedQueryAttention,
    MultiTokenPrediction,
    NoAttention,
    NoFFN,
    SquaredReLU,
    Transformer,
)
from forge_testing.refusals import ExpectedProblem, at, naming, refuses_all
from forge_testing.suites import ModelSuite

PATTERNS = """
[model.attention]
type = "pattern"
layers = ["full", "none"]
[model.attention.kinds.full]
type = "gqa"
heads = 4
[model.attention.kinds.none]
type = "none"
[model.ffn]
type = "pattern"
layers = ["none", "dense"]
[model.ffn.kinds.dense]
type = "relu2"
[model.ffn.kinds.none]
type = "none"
"""
FULL, DENSE = GroupedQueryAttention(heads=4, kv_heads=2), SquaredReLU(hidden=24)
APART = {
    "attention": AttentionPattern(layers=("full", "none"), kinds={"full": FULL, "none": NoAttention()}),
    "ffn": FFNPattern(layers=("none", "dense"), kinds={"dense": DENSE, "none": NoFFN()}),
}
"""Each layer has one part: attention, then a feed-forward part."""


class TestLayersOfOnePart(ModelSuite):
    component = Transformer(vocab_size=32, dim=16, layers=2, **APART)
    layouts = ("tp2", "tp2_whole_sequences", "pp2", "cp2", "checkpointing2")


class TestLayersOfOnePartThatPredictFurther(ModelSuite):
    component = Transformer(vocab_size=32, dim=16, layers=2, mtp=MultiTokenPrediction(depth=2), **APART)
    layouts = ("pp2",)


def test_a_layer_of_one_part_has_no_tensor_of_the_other(
    load_model: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    component = load_model(PATTERNS)
    model = make_model(attention=component.attention, ffn=component.ffn, layers=4)
    named = (name.partition("layers.")[2] for name, _ in model.named_parameters())
    names = {name.partition(".")[::2] for name in named if name}
    attention = {f"attention.{matrix}.weight" for matrix in "qkvo"} | {"attention_norm.weight"}
    dense = {"ffn.up.weight", "ffn.down.weight", "ffn_norm.weight"}
    assert names == {(layer, name) for layer in "0123" for name in (dense if int(layer) % 2 else attention)}
    points = model.tap_points()
    assert "layers.0.attn_out" in points
    assert not {"layers.0.mlp_out", "layers.0.resid_mid", "layers.1.attn_out"} & points.keys()


def test_two_layers_of_one_part_are_a_layer_of_two(make_model: Callable[..., Any]) -> None:
    whole = make_model(attention=FULL, ffn=DENSE, layers=2)
    apart = make_model(**APART, layers=4)
    state = {}
    for name, tensor in whole.state_dict().items():
        head, number, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        state[f"{head}.{2 * int(number) + rest.startswith('ffn')}.{rest}" if head else rest] = tensor
    apart.load_state_dict(state)
    batch = {"input_ids": torch.arange(8).view(1, 8)}
    assert torch.equal(apart(batch), whole(batch))
    assert apart.flops(8) == whole.flops(8)
    by_layer = apart.layer_flops(8)
    assert [sum(by_layer[:2]), sum(by_layer[2:])] == whole.layer_flops(8)


def test_initial_matrices_count_the_parts_that_there_are(make_model: Callable[..., Any]) -> None:
    whole = make_model(attention=FULL, ffn=DENSE, layers=2)
    apart = make_model(**APART, layers=4)
    assert apart.layers["0"].attention.o.std == whole.layers["0"].attention.o.std
    assert apart.layers["1"].ffn.down.std == whole.layers["0"].ffn.down.std
    more = make_model(laurel_rank=2, layers=4, **APART).layers["0"]
    assert more.laurel.right.std == apart.layers["0"].attention.o.std


@pytest.mark.parametrize(
    ("keys", "model", "expected"),
    [
        ("", '[model.attention]\ntype = "none"\n[model.ffn]\ntype = "none"\n', at("model.ffn", "layer 0", "neither")),
        (
            "layers = 2",
            PATTERNS.replace('["none", "dense"]', '["dense", "none"]'),
            at("model.ffn", "layer 1", "neither"),
        ),
        (
            "layers = 3\nmtp.depth = 1",
            PATTERNS.replace('["none", "dense"]', '["none", "dense", "dense"]'),
            at("model.ffn", "module 0 of model.mtp", "neither"),
        ),
        ('residual = "parallel"', PATTERNS, at("model.residual", "layer 0", "ffn")),
        (
            "layers = 1",
            PATTERNS.partition("[model.ffn]")[1] + PATTERNS.partition("[model.ffn]")[2],
            at("model.ffn.layers", "2 layers", "has 1"),
        ),
        ("", PATTERNS.replace('"dense"]', '"dense", "none", "none"]'), at("model.ffn", "layer 3", "neither")),
    ],
)
def test_what_no_layer_can_be_is_refused(
    load_model: Callable[..., Any], keys: str, model: str, expected: ExpectedProblem
) -> None:
    with refuses_all(expected):
        load_model(model, keys)


def test_only_layers_can_be_without_a_part(make_model: Callable[..., Any]) -> None:
    context = type("Context", (), {"path": "layers.0.cross_attention.ffn"})()
    with pytest.raises(JobError, match=naming("none", "layers.0.cross_attention.ffn")):
        NoFFN().build(context, dim=8, init=attrs.NOTHING)
