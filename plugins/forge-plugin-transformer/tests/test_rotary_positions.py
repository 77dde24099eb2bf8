"""Rotary position encoding: frequencies, tables and their application."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_plugin_transformer import LinearRope, Llama3Rope, PlainRope, YarnRope
from forge_plugin_transformer.modules.rotary import rotate

STRETCHED = (
    LinearRope(factor=4.0),
    Llama3Rope(original_max_position_embeddings=512),
    YarnRope(factor=8.0, original_max_position_embeddings=512),
)


def test_frequencies_form_a_geometric_series() -> None:
    assert PlainRope(theta=100.0).frequencies(4) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("rope", STRETCHED, ids=lambda rope: type(rope).__name__)
def test_stretching_divides_the_slowest_pair_by_the_factor(rope: Any) -> None:
    slowest, plain = rope.frequencies(64)[-1], PlainRope().frequencies(64)[-1]
    assert slowest == pytest.approx(plain / rope.factor)


@pytest.mark.parametrize("rope", STRETCHED[1:], ids=lambda rope: type(rope).__name__)
def test_llama3_and_yarn_keep_the_fastest_pair(rope: Any) -> None:
    assert rope.frequencies(64)[0] == 1.0


def test_only_yarn_changes_the_amplitude() -> None:
    assert [rope.amplitude() for rope in STRETCHED] == pytest.approx([1.0, 1.0, 0.1 * math.log(8) + 1])
    assert YarnRope(factor=8.0, original_max_position_embeddings=512, attention_factor=1.5).amplitude() == 1.5


def test_scores_depend_on_distances_only(make_part: Callable[..., Any]) -> None:
    rotary = make_part(PlainRope(), head_dim=8, dtype=torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *rotary(1, torch.tensor([[position]])))

    def score(position_q: int, position_k: int) -> torch.Tensor:
        return (at(q, position_q) * at(k, position_k)).sum()

    torch.testing.assert_close(score(9, 4), score(1005, 1000))
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_given_positions_equal_the_table(make_part: Callable[..., Any]) -> None:
    rotary = make_part(YarnRope(factor=4.0, original_max_position_embeddings=64), head_dim=8)
    for from_table, computed in zip(rotary(20), rotary(2, torch.arange(20).view(2, 10)), strict=True):
        assert torch.equal(from_table.view(2, 10, 1, 8), computed)


def test_a_sequence_longer_than_the_table_extends_it(make_part: Callable[..., Any]) -> None:
    rotary, longer = (make_part(PlainRope(), head_dim=8, seq_len=length) for length in (16, 50))
    assert all(torch.equal(*tables) for tables in zip(rotary(50), longer(50), strict=True))


def test_far_positions_are_exact_to_float32(make_part: Callable[..., Any]) -> None:
    far = 3_000_000
    cos, _ = make_part(PlainRope(theta=5e5), head_dim=64)(1, torch.tensor([[far]]))
    expected = [math.cos(far * frequency) for frequency in PlainRope(theta=5e5).frequencies(64)]
    torch.testing.assert_close(cos[0, 0, 0, :32], torch.tensor(expected), atol=1e-6, rtol=0)


def test_bf16_is_turned_in_float32_and_rounded_once(make_part: Callable[..., Any]) -> None:
    rotary = make_part(PlainRope(), head_dim=8, dtype=torch.bfloat16)
    x = torch.randn(1, 32, 2, 8).bfloat16()
    assert rotary.cos.dtype == torch.float32
    assert torch.equal(rotate(x, *rotary(32)), rotate(x.float(), *rotary(32)).bfloat16())


def test_layers_share_the_memory_of_their_tables(make_model: Callable[..., Any]) -> None:
    first, second = make_model().layers.values()
    assert first.attention.rotary.cos.data_ptr() == second.attention.rotary.cos.data_ptr()


def test_tables_are_no_part_of_the_state(make_model: Callable[..., Any]) -> None:
    model = make_model()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_encodings_have_the_same_key_only_if_their_tables_are_the_same(make_part: Callable[..., Any]) -> None:
    keys = [make_part(rope, head_dim=8, seq_len=512).key for rope in (PlainRope(), PlainRope(), *STRETCHED)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    wide = make_part(PlainRope(), head_dim=8, dtype=torch.float64).key
    assert wide != keys[0]


def test_layers_share_the_tables_of_a_batch(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = make_model(layers=3), []
    for layer in model.layers.values():
        original = layer.attention.rotary.forward
        monkeypatch.setattr(layer.attention.rotary, "forward", lambda *a, f=original: (made.append(a), f(*a))[1])
    batch = {"input_ids": torch.arange(12).view(2, 6), "positions": torch.arange(12).view(2, 6)}
    together = model(batch)
    assert len(made) == 1
    carry = model.embed(batch)
    for layer in model.layers.values():
        carry = layer(carry, batch)
    assert torch.equal(model.finish(carry, batch), together)
    assert len(made) == 4
