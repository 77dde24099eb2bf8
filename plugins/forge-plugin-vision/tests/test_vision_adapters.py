"""Adapters: arithmetic of the models they are from, for images of any sizes in one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import Idefics3Config, Llama4VisionConfig, LlavaConfig, Mistral3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.llama4.modeling_llama4 import Llama4VisionPixelShuffleMLP
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from transformers.models.molmo2.configuration_molmo2 import Molmo2AdapterConfig
from transformers.models.molmo2.modeling_molmo2 import Molmo2Adapter

from forge_plugin_vision import (
    AttentionPool,
    AveragePool,
    Grid,
    LinearAdapter,
    Merger,
    MLPAdapter,
    Perceiver,
    PixelShuffle,
    ScaledPool,
)
from forge_plugin_vision.modules.images import Images

WIDTH, DIM = 12, 10
ADAPTERS = {
    "linear": LinearAdapter(),
    "mlp": MLPAdapter(activation="silu"),
    "pixel_shuffle": PixelShuffle(factor=2, hidden=(9, 7)),
    "average_pool": AveragePool(window=2),
    "average_pool_ragged": AveragePool(window=3, ragged=True),
    "attention_pool": AttentionPool(window=2, heads=3),
    "attention_pool_ragged": AttentionPool(window=3, heads=3, ragged=True),
    "merger": Merger(norm="layernorm", norm_over="block"),
    "merger_joined": Merger(hidden=7, joined=True, bias=False),
    "scaled_pool": ScaledPool(window=2, standardise=True),
    "perceiver": Perceiver(latents=5, layers=2, heads=2, head_dim=7),
}
SIZES = [[(4, 6), (2, 2), (6, 2)], [], [(4, 4)]]
RAGGED = [[(5, 7), (1, 2), (4, 1)], [], [(3, 3)]]


def sizes_for(adapter: Any) -> Sequence[Sequence[tuple[int, int]]]:
    return SIZES if adapter.multiple > 1 else RAGGED


def images_of(sizes: Sequence[Sequence[tuple[int, int]]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(*size, WIDTH, dtype=torch.float64, generator=generator) for size in row] for row in sizes]


@pytest.fixture(params=ADAPTERS.values(), ids=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make(context: Any, randomised: Callable[..., Any]) -> Callable[..., Any]:
    """make(adapter): the module, with random weights in float64."""
    return lambda adapter: randomised(adapter.build(context, width=WIDTH, dim=DIM))


@pytest.fixture
def positions(packed: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """positions(adapter, module, images of rows): the features of each row's images."""

    def run(adapter: Any, module: Any, rows: Sequence[Sequence[Tensor]], spare: int = 5) -> list[Tensor]:
        most = max(sum(image[..., 0].numel() for image in row) for row in rows)
        patches, grids = packed(rows, most + spare, 3, WIDTH)
        output = module(patches, Images.of(grids, patches.shape[1]))
        assert output.isfinite().all()
        counts = [sum(adapter.positions(Grid(1, *image.shape[:2])) for image in row) for row in rows]
        return [row[:count] for row, count in zip(output, counts, strict=True)]

    return run


def test_packed_images_are_like_images_alone(adapter, make, positions):
    module, rows = make(adapter), images_of(sizes_for(adapter))
    for row, together in zip(rows, positions(adapter, module, rows), strict=True):
        alone = [positions(adapter, module, [[image]], spare=0)[0] for image in row]
        assert len(together) == sum(len(each) for each in alone)
        assert not alone or (together - torch.cat(alone)).abs().max() < 1e-12


def test_what_fills_a_row_contributes_nothing(adapter, make, packed):
    module = make(adapter)
    patches, grids = packed(images_of(sizes_for(adapter)), 60, 4, WIDTH)
    images = Images.of(grids, 60)
    garbage = torch.where(images.valid.unsqueeze(-1), patches, 1e3)
    counts = adapter.positions(Grid(*grids.unbind(-1))).sum(1)
    for row, count in enumerate(counts):
        one, other = (module(each, images)[row, :count] for each in (patches, garbage))
        assert torch.equal(one, other)


def test_an_absent_image_has_no_place(adapter, make, packed):
    module = make(adapter)
    patches, grids = packed(images_of(sizes_for(adapter))[:1], 60, 3, WIDTH)
    gap = torch.cat([grids[:, :1], torch.zeros_like(grids[:, :1]), grids[:, 1:]], 1)
    count = int(adapter.positions(Grid(*grids.unbind(-1))).sum())
    one, other = (module(patches, Images.of(each, 60))[:, :count] for each in (grids, gap))
    assert (one - other).abs().max() < 1e-12


def test_rows_without_images_have_gradients_of_zero(adapter, make, packed):
    module = make(adapter).requires_grad_()
    patches, grids = packed([[], []], 36, 2, WIDTH)
    output = module(patches, Images.of(grids, 36))
    gradients = torch.autograd.grad((output * 0).sum(), module.parameters())
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_rows_in_turn_have_the_gradient_of_the_batch(adapter, make, packed):
    module = make(adapter).requires_grad_()
    patches, grids = packed(images_of(sizes_for(adapter)), 60, 3, WIDTH)
    counts = adapter.positions(Grid(*grids.unbind(-1))).sum(1)

    def gradient(rows: slice) -> Tensor:
        output = module(patches[rows], Images.of(grids[rows], 60))
        learned = torch.arange(output.shape[1]) < counts[rows, None]
        loss = (output * learned.unsqueeze(-1)).square().sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, module.parameters())])

    whole = gradient(slice(0, 3))
    assert (sum(gradient(slice(n, n + 1)) for n in range(3)) - whole).abs().max() < 1e-12 * whole.abs().max()


def test_the_place_of_a_patch_matters(adapter, make, positions):
    module, image = make(adapter), images_of([[(6, 6)]])[0][0]
    exchanged = image.clone()
    exchanged[[0, 3], [1, 4]] = image[[3, 0], [4, 1]]
    one, other = (positions(adapter, module, [[each]])[0] for each in (image, exchanged))
    # Latents see a set of patches, whose places only the encoder tells.
    assert ((one - other).abs().max() > 1e-3) != isinstance(adapter, Perceiver)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    window=st.integers(1, 4),
    of_videos=st.integers(1, 4),
)
def test_ragged_windows_of_any_images_fit(sizes, window, of_videos):
    from forge_plugin_vision.modules.pooling import Windows

    grids = torch.tensor([sizes])
    patches = int(grids.prod(-1).sum())
    index, there = Windows(window, of_videos, ragged=True).members(Images.of(grids, patches))
    adapter = AveragePool(window=window, video_window=of_videos, ragged=True)
    needed = sum(adapter.positions(Grid(*size)) for size in sizes)
    assert index.shape[1] >= needed
    # Each patch is in one window.
    assert sorted(index[there].tolist()) == list(range(patches))


def test_mlp_is_llavas(make, positions, randomised):
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "hidden_size": WIDTH},
        text_config={"model_type": "llama", "hidden_size": DIM, "num_attention_heads": 1},
    )
    theirs, adapter = randomised(LlavaMultiModalProjector(config)), MLPAdapter()
    module, rows = make(adapter), images_of(RAGGED)
    _copy(module, {"up": theirs.linear_1, "down": theirs.linear_2})
    for row, actual in zip(rows, positions(adapter, module, rows), strict=True):
        expected = [theirs(image.flatten(0, 1)) for image in row]
        assert not row or (actual - torch.cat(expected)).abs().max() < 1e-12


@pytest.mark.parametrize("factor", [2, 3])
def test_pixel_shuffle_is_idefics3s(make, positions, randomised, factor):
    config = Idefics3Config(
        vision_config={"hidden_size": WIDTH},
        text_config={"model_type": "llama", "hidden_size": DIM, "num_attention_heads": 1},
    )
    config.scale_factor = factor
    theirs, adapter = randomised(Idefics3Connector(config)), PixelShuffle(factor=factor)
    module, image = make(adapter), images_of([[(6, 6)]])[0][0]
    _copy(module, {"project": theirs.modality_projection.proj})
    expected = theirs(image.flatten(0, 1)[None])[0]
    assert (positions(adapter, module, [[image], [image, image]])[1] - expected.repeat(2, 1)).abs().max() < 1e-12


def test_pixel_shuffle_with_further_matrices_is_llama4s(make, positions, randomised):
    tower = {"intermediate_size": 4 * WIDTH, "projector_input_dim": 7, "projector_output_dim": 7}
    theirs = randomised(Llama4VisionPixelShuffleMLP(Llama4VisionConfig(hidden_size=WIDTH, **tower)))
    adapter = PixelShuffle(factor=2, hidden=(7, 7))
    module, image = make(adapter), images_of([[(6, 6)]])[0][0]
    _copy(module, {"hidden.0": theirs.mlp.fc1, "hidden.1": theirs.mlp.fc2})
    expected = theirs(image.flatten(0, 1)[None])[0] @ module.project.weight.T
    assert (positions(adapter, module, [[image]])[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize("side", [2, 3])
def test_a_merger_that_joins_is_mistral3s(make, positions, randomised, side):
    config = Mistral3Config(
        vision_config={"model_type": "pixtral", "hidden_size": WIDTH, "num_attention_heads": 1, "patch_size": 1},
        text_config={"model_type": "mistral", "hidden_size": DIM, "num_attention_heads": 1, "rms_norm_eps": 1e-3},
        spatial_merge_size=side,
    )
    theirs = randomised(Mistral3MultiModalProjector(config))
    adapter = Merger(merge=side, hidden=DIM, joined=True, bias=False, eps=1e-3)
    module, sizes = make(adapter), [(2 * side, side), (side, 3 * side)]
    [images] = images_of([sizes])
    names = {"norm": theirs.norm, "join": theirs.patch_merger.merging_layer}
    _copy(module, {**names, "up": theirs.linear_1, "down": theirs.linear_2})
    expected = theirs(torch.cat([image.flatten(0, 1) for image in images]), torch.tensor(sizes))
    assert (positions(adapter, module, [images])[0] - expected).abs().max() < 1e-6  # their norm is in float32


@pytest.mark.parametrize(("window", "ragged"), [(2, False), (3, True)])
def test_average_pool_averages_what_is_there(make, positions, window, ragged):
    adapter = AveragePool(window=window, ragged=ragged)
    module, image = make(adapter), images_of([[(4, 8)]])[0][0]
    pooled = F.avg_pool2d(image.permute(2, 0, 1), window, ceil_mode=True, count_include_pad=False)
    expected = module.projection.down(F.gelu(module.projection.up(pooled.flatten(1).T)))
    assert (positions(adapter, module, [[image]])[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("window", "ragged", "size"), [(2, False, (4, 6)), (3, True, (4, 7))])
def test_attention_pool_is_molmo2s(make, positions, randomised, window, ragged, size):
    config = Molmo2AdapterConfig(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, head_dim=4, vision_feature_layer=[-1],
        intermediate_size=4 * DIM, text_hidden_size=DIM, hidden_act="silu", attn_implementation="sdpa",
        attention_dropout=0.0, attention_bias=True, mlp_bias=False,
    )  # fmt: skip
    theirs, adapter = randomised(Molmo2Adapter(config)), AttentionPool(window=window, heads=3, ragged=ragged)
    module, image = make(adapter), images_of([[size]])[0][0]
    pool, project = theirs.image_pooling_2d, theirs.image_projector
    _copy(module, {"q": pool.q_proj, "k": pool.k_proj, "v": pool.v_proj, "o": pool.o_proj})
    _copy(module, {"gate": project.gate_proj, "up": project.up_proj, "down": project.down_proj})
    numbers = F.pad(torch.arange(size[0] * size[1]).view(size), (0, -size[1] % window, 0, -size[0] % window), value=-1)
    index = numbers.unfold(0, window, window).unfold(1, window, window).reshape(-1, window**2)
    expected = theirs(image.flatten(0, 1)[None], index).last_hidden_state
    assert (positions(adapter, module, [[image]])[0] - expected).abs().max() < 1e-9


def test_perceiver_is_openflamingos(make, positions):
    adapter = ADAPTERS["perceiver"]
    module, rows = make(adapter), images_of(RAGGED)
    for row, actual in zip(rows, positions(adapter, module, rows), strict=True):
        expected = [_resampled(module, image.flatten(0, 1)) for image in row]
        assert not row or (actual - torch.cat(expected)).abs().max() < 1e-12


def _resampled(module: Any, x: Tensor) -> Tensor:
    """The formula of PerceiverResampler for one image (n, W)."""
    latents = module.latents
    for block in module.blocks:
        normed = block.latents_norm(latents)
        seen = torch.cat([block.features_norm(x), normed])
        q, k, v = (
            (y @ part.weight.T).unflatten(-1, (block.heads, -1))
            for part, y in ((block.q, normed), (block.k, seen), (block.v, seen))
        )
        weights = (torch.einsum("ihe,jhe->hij", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        latents = latents + torch.einsum("hij,jhe->ihe", weights, v).flatten(1) @ block.o.weight.T
        latents = latents + F.gelu(block.ffn_norm(latents) @ block.up.weight.T) @ block.down.weight.T
    return module.norm(latents) @ module.project.weight.T


@pytest.mark.parametrize(
    "name",
    ["linear", "mlp", "pixel_shuffle", "average_pool", "attention_pool", "perceiver", "merger_joined", "scaled_pool"],
)
def test_flops_are_those_of_the_matrix_products(make, packed, name):
    from forge_plugin_vision.modules.vision import flops_of

    module = make(ADAPTERS[name])
    patches, grids = packed(images_of([[(6, 6)]]), 36, 1, WIDTH)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        module(patches, Images.of(grids, 36))
    assert flops_of(module, Grid(1, 6, 6)) == pytest.approx(3 * counter.get_total_flops())


def _copy(module: Any, theirs: dict[str, Any]) -> None:
    for name, linear in theirs.items():
        module.get_submodule(name).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("pool", [AveragePool, AttentionPool])
@pytest.mark.parametrize("ragged", [False, True])
def test_frames_of_videos_are_pooled_by_windows_of_their_own(pool, ragged, make, packed):
    heads = {"heads": 2} if pool is AttentionPool else {}
    both, images, videos = (
        pool(window=window, video_window=video, ragged=ragged, **heads) for window, video in ((2, 3), (2, 0), (3, 0))
    )
    assert both.multiple == (1 if ragged else 6)
    sides = [(7, 5), (4, 6), (5, 4)] if ragged else [(6, 6), (6, 12), (6, 6)]
    [[still, clip, last]] = images_of([sides])
    frames = [clip, torch.randn(clip.shape, generator=torch.Generator().manual_seed(3), dtype=clip.dtype)]
    patches, grids = packed([[still, *frames, last]], 220, 4, WIDTH)
    grids = torch.tensor([[grids[0, 0].tolist(), [2, *clip.shape[:2]], grids[0, 3].tolist(), [0, 0, 0]]])
    modules = [make(adapter) for adapter in (both, images, videos)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())

    def alone(number: int, image: Tensor) -> Tensor:
        adapter = (both, images, videos)[number]
        own, of_one = packed([[image]], image[..., 0].numel(), 1, WIDTH)
        return modules[number](own, Images.of(of_one, own.shape[1]))[0, : adapter.positions(Grid(1, *image.shape[:2]))]

    expected = torch.cat([alone(1, still), *(alone(2, frame) for frame in frames), alone(1, last)])
    counts = both.positions(Grid(*grids.unbind(-1)))
    assert counts[0].tolist() == [both.positions(Grid(*grid)) for grid in grids[0].tolist()]
    assert modules[0].windows.count(Grid(*grids.double().unbind(-1))).tolist() == counts.tolist()
    assert counts.sum() == len(expected)
    assert (modules[0](patches, Images.of(grids, 220))[0, : len(expected)] - expected).abs().max() < 1e-12
