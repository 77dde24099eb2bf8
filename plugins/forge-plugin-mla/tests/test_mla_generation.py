"""Decoding keeps one latent a position, and returns what the whole sequence gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_mla.modules import latent_attention
from forge_plugin_mla.modules.latent_attention import Widths
from forge_plugin_mla.modules.latent_cache import absorbs
from forge_plugin_transformer import GroupedQueryAttention, LongRope, NoRope, PlainRope, YarnRope
from forge_testing.refusals import naming

MakeModel = Callable[..., Any]
HEADS, C, N, P, V = 4, 20, 12, 8, 10
ATTENTION = MultiHeadLatentAttention(
    heads=HEADS, q_lora_rank=14, kv_lora_rank=C, qk_nope_head_dim=N, qk_rope_head_dim=P, v_head_dim=V,
    rope=YarnRope(factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7),
)  # fmt: skip
DEEPSEEK_V3 = Widths(q_latent=1536, kv_latent=512, nope=128, rope=64, value=128)


@pytest.fixture
def model(make_model: MakeModel) -> Any:
    return make_model(ATTENTION)


def decode(model: Any, ids: Tensor, positions: Tensor, chunks: list[int], length: int = 30) -> Tensor:
    """Hidden states of all positions, fed so many at a time."""
    cache = model.new_cache(len(ids), length)
    parts = zip(ids.split(chunks, 1), positions.split(chunks, 1), strict=True)
    return torch.cat([model.decode({"input_ids": i, "positions": p}, cache) for i, p in parts], 1)


@pytest.fixture(params=[True, False], ids=["absorbed", "expanded"])
def one_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every call goes one way, whatever costs less."""
    monkeypatch.setattr(latent_attention, "absorbs", lambda *sizes: request.param)
    return request.param


@pytest.mark.parametrize("chunks", [[24], [1] * 24, [9, 1, 1, 1, 12]], ids=["at once", "one by one", "mixed"])
def test_either_way_equals_the_whole_sequence(one_way: bool, model: Any, ids: Tensor, chunks: list[int]) -> None:
    positions = torch.arange(24).expand(2, -1)
    torch.testing.assert_close(decode(model, ids, positions, chunks), model({"input_ids": ids}), atol=2e-5, rtol=1e-4)


def test_absorbed_equals_expanded_to_rounding(
    make_model: MakeModel, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(ATTENTION, precision="fp64")
    found = []
    for way in (True, False):
        monkeypatch.setattr(latent_attention, "absorbs", lambda *sizes, way=way: way)
        found.append(decode(model, ids, torch.arange(24).expand(2, -1), [20, 1, 1, 1, 1]))
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


def test_left_padding_is_ignored(one_way: bool, model: Any, ids: Tensor) -> None:
    padding = 6
    padded = torch.cat([ids[:1], torch.cat([ids.new_full((1, padding), 60), ids[1:, :-padding]], 1)])
    positions = torch.stack([torch.arange(24), torch.arange(24) - padding])
    hidden = decode(model, padded, positions, [10, 1, 1, 12])
    torch.testing.assert_close(hidden[0], model({"input_ids": ids[:1]})[0], atol=2e-5, rtol=1e-4)
    alone = model({"input_ids": ids[1:, :-padding]})[0]
    torch.testing.assert_close(hidden[1, padding:], alone, atol=2e-5, rtol=1e-4)
    assert torch.isfinite(hidden).all()


def test_the_way_with_fewer_products_is_taken() -> None:
    """DeepSeek-V3: one new token absorbs, a prompt is expanded, and so are many tokens after a short past."""
    assert absorbs(1, 4096, DEEPSEEK_V3)
    assert not absorbs(4096, 4096, DEEPSEEK_V3)
    assert not absorbs(512, 600, DEEPSEEK_V3)


def test_tokens_after_the_prompt_are_decoded_absorbed(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, chosen = [], latent_attention.absorbs
    monkeypatch.setattr(latent_attention, "absorbs", lambda *a: (kinds.append(chosen(*a)), kinds[-1])[1])
    decode(model, ids, torch.arange(24).expand(2, -1), [22, 1, 1])
    assert kinds == [False] * 2 + [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_is_c_plus_p_numbers_a_position(make_model: MakeModel, ids: Tensor, dtype: torch.dtype) -> None:
    model = make_model(ATTENTION, precision="bf16" if dtype == torch.bfloat16 else "fp32")
    cache, batch, length, place = model.new_cache(2, 30), 2, 30, 8
    model.decode({"input_ids": ids}, cache)
    assert [layer.nbytes for layer in cache.values()] == [batch * length * ((C + P) * dtype.itemsize + place)] * 2


def test_it_is_a_fraction_of_what_keys_and_values_take(make_model: MakeModel, ids: Tensor) -> None:
    """With as many heads, and keys as wide."""
    sizes = []
    for attention in (ATTENTION, GroupedQueryAttention(heads=HEADS, head_dim=N + P)):
        model = make_model(attention)
        cache = model.new_cache(2, 30)
        model.decode({"input_ids": ids}, cache)
        sizes.append(cache["0"].nbytes - 2 * 30 * 8)
    assert sizes[0] / sizes[1] == (C + P) / (2 * HEADS * (N + P))


def test_what_wraps_the_up_projection_counts_in_both_ways(one_way: bool, model: Any, ids: Tensor) -> None:
    """A low-rank adapter, as a forward hook."""
    plain = model({"input_ids": ids})
    for layer in model.layers.values():
        up, low = layer.attention.kv_up, torch.randn(C, 2, generator=torch.Generator().manual_seed(3))
        high = torch.randn(2, up.out_features, generator=torch.Generator().manual_seed(4))
        up.register_forward_hook(lambda module, x, y, low=low, high=high: y + 0.1 * x[0] @ low @ high)
    expected = model({"input_ids": ids})
    assert (expected - plain).abs().max() > 0.1
    found = decode(model, ids, torch.arange(24).expand(2, -1), [20, 1, 1, 1, 1])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_full_cache_says_so(model: Any, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=naming("20 positions", "10 are used", "14 more")):
        decode(model, ids, torch.arange(24).expand(2, -1), [10, 14], length=20)


@pytest.mark.parametrize("interleave", [False, True])
def test_an_encoding_may_rotate_a_part_of_the_part_for_positions(make_model: MakeModel, interleave: bool) -> None:
    """In pairs of neighbours, or of dimensions half the rotated width apart; the other dimensions pass."""
    for share in (0.5, 0.0):
        rope = PlainRope(partial_rotary_factor=share) if share else NoRope()
        attention = make_model(attrs.evolve(ATTENTION, rope=rope, rope_interleave=interleave)).layers["0"].attention
        x = torch.randn(1, 7, 1, P)
        turned, half = attention._turned(x, attention.rotary(7)), int(P * share) // 2
        assert torch.equal(turned[..., 2 * half :], x[..., 2 * half :])
        real, imaginary = (
            x[..., n : 2 * half : 2] if interleave else x[..., n * half : (n + 1) * half] for n in (0, 1)
        )
        angles = torch.arange(7)[:, None, None] * torch.tensor([1e4 ** (-pair / max(half, 1)) for pair in range(half)])
        expected = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
        torch.testing.assert_close(turned[..., : 2 * half], torch.cat([expected.real, expected.imag], -1))


def test_the_cache_is_computed_anew_where_a_sequence_becomes_long(make_model: MakeModel, ids: Tensor) -> None:
    rope = LongRope(
        short_factor=(1.0, 1.1, 1.2, 1.5),
        long_factor=(1.0, 4.0, 9.0, 30.0),
        original_max_position_embeddings=12,
        factor=4.0,
    )
    model = make_model(attrs.evolve(ATTENTION, rope=rope), precision="fp64")
    prompts = [ids[0, :8].tolist(), ids[1, :3].tolist()]
    said = [generate(model, prompts, 12, 0, Sampling(temperature=0), use_cache=cache) for cache in (True, False)]
    assert said[0] == said[1]
    assert min(map(len, said[0])) > 5
