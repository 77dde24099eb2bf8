"""The encoder `vit` has the features of `transformers`' towers with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from tower_weights import load_llama4, load_pixtral, load_published
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    Llama4VisionConfig,
    Llama4VisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    Siglip2ImageProcessorPil,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from forge_plugin_vision import Grid, QwenViT, ViT
from forge_plugin_vision.modules import positions
from forge_plugin_vision.modules.images import Images
from forge_plugin_vision.modules.vision import Normalise

PATCH, SIDE = 4, 5
"""Pixels of a patch; patches along a side of the position table."""
THEIRS: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": PATCH,
    "attn_implementation": "sdpa",  # the other has its softmax in float32
}
OURS: dict[str, Any] = {"dim": 24, "hidden": 40, "layers": 3, "heads": 3, "patch": PATCH, "size": (20, 20)}
CLIP: dict[str, Any] = {
    "class_token": True,
    "pre_norm": True,
    "patch_bias": False,
    "activation": "quick_gelu",
    "norm": False,
    "eps": 1e-5,
}
OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = [[(3, 6), (5, 5), (1, 2)], [], [(7, 2)]]
"""Rows and columns of the images of three rows."""


def pixels(rows: int, columns: int, seed: int) -> Tensor:
    """(channels, height, width)."""
    return torch.randn(
        3, rows * PATCH, columns * PATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def patches_of(image: Tensor) -> Tensor:
    """(h, w, V) with values in the order channel, row, column."""
    return image.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 0, 2, 4).flatten(2)


def images_of(sizes: Sequence[Sequence[tuple[int, int]]]) -> list[list[Tensor]]:
    return [[pixels(*size, seed=10 * row + n) for n, size in enumerate(own)] for row, own in enumerate(sizes)]


@pytest.fixture
def features(packed: Callable[..., Any]) -> Callable[..., Any]:
    """features(tower, images of rows): what it returns for each image, one after the other."""

    def run(tower: Any, rows: Sequence[Sequence[Tensor]], spare: int = 7) -> list[Tensor]:
        cut = [[patches_of(image) for image in row] for row in rows]
        most = max(sum(image[..., 0].numel() for image in row) for row in cut)
        patches, grids = packed(cut, most + spare, 4, 3 * PATCH**2)
        output, *tapped = tower(patches, Images.of(grids, patches.shape[1]))
        assert output.isfinite().all()
        return [_of_images(each, grids) for each in (output, *tapped)]

    return run


def _of_images(output: Tensor, grids: Tensor) -> Tensor:
    sizes = grids.prod(-1).sum(1)
    return torch.cat([row[:size] for row, size in zip(output, sizes, strict=True)])


@pytest.fixture
def pair(context: Any, randomised: Callable[..., Any]) -> Callable[..., Any]:
    """pair(their tower, **keys of ours, taps=…): both with the same random weights."""

    def build(theirs: Any, taps: Sequence[int] = (), **keys: Any) -> Any:
        ours = ViT(**{**OURS, **keys}).build(context, taps=taps).double().eval().requires_grad_(False)
        load_published(ours, randomised(theirs).state_dict(), PATCH)
        return theirs, ours

    return build


def siglip() -> SiglipVisionModel:
    return SiglipVisionModel(SiglipVisionConfig(**THEIRS, image_size=SIDE * PATCH))


def clip() -> CLIPVisionModel:
    return CLIPVisionModel(CLIPVisionConfig(**THEIRS, image_size=SIDE * PATCH))


def siglip2() -> Siglip2VisionModel:
    return Siglip2VisionModel(Siglip2VisionConfig(**THEIRS, num_patches=SIDE**2))


def test_siglip_of_one_size(pair, features):
    theirs, ours = pair(siglip())
    rows = images_of([[(5, 5)] * 3, [], [(5, 5)]])
    expected = theirs(torch.stack(list(chain(*rows)))).last_hidden_state.flatten(0, 1)
    assert expected.std() > 0.1
    assert (features(ours, rows)[0] - expected).abs().max() < 1e-9


def test_llama4_with_its_rotary_encoding_beside_a_class_token(context, randomised, features):
    wide = {**THEIRS, "intermediate_size": 96, "projector_input_dim": 7, "projector_output_dim": 7}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = Llama4VisionConfig(**wide, image_size=SIDE * PATCH, rope_parameters=rope)
    theirs = randomised(Llama4VisionModel(config))
    theirs.vision_adapter = torch.nn.Identity()  # it joins even numbers of patches
    keys = {**OURS, **CLIP, "hidden": 96, "activation": "gelu", "norm": True}
    ours, other = (
        randomised(ViT(**keys, rotary_theta=theta).build(context, taps=()).double()) for theta in (100.0, 10.0)
    )
    for tower in (ours, other):
        tower.rotary.init_buffers(torch.device("cpu"))
        load_llama4(tower, theirs.state_dict(), config.num_attention_heads)
    rows = images_of([[(5, 5)] * 3, [], [(5, 5)]])
    expected = theirs(torch.stack(list(chain(*rows)))).last_hidden_state.flatten(0, 1)
    assert expected.std() > 0.1
    assert (features(ours, rows)[0] - expected).abs().max() < 1e-5  # their encoding is in float32
    assert (features(other, rows)[0] - expected).abs().max() > 1e-3


def test_siglip_with_its_table_resized(pair, features):
    theirs, ours = pair(siglip(), position_interpolation="bicubic")
    rows = images_of(SIZES)
    expected = [theirs(each[None], interpolate_pos_encoding=True).last_hidden_state[0] for row in rows for each in row]
    assert (features(ours, rows)[0] - torch.cat(expected)).abs().max() < 1e-9


def test_clip_of_one_size_with_taps_and_a_selected_layer(pair, features):
    theirs, ours = pair(clip(), taps=[0], select_layer=-2, **CLIP)
    rows = images_of([[(5, 5)] * 2, [], [(5, 5)]])
    hidden = theirs(torch.stack(list(chain(*rows))), output_hidden_states=True).hidden_states
    assert len(ours.blocks) == 2
    for actual, layer in zip(features(ours, rows), (-2, 1), strict=True):
        assert (actual - hidden[layer][:, 1:].flatten(0, 1)).abs().max() < 1e-9


def test_clip_with_its_table_resized(pair, features):
    theirs, ours = pair(clip(), taps=[1], position_interpolation="bicubic", **CLIP)
    rows = images_of(SIZES)
    outputs = [
        theirs(each[None], interpolate_pos_encoding=True, output_hidden_states=True) for row in rows for each in row
    ]
    for actual, layer in zip(features(ours, rows), (-1, 2), strict=True):
        expected = torch.cat([output.hidden_states[layer][0, 1:] for output in outputs])
        assert (actual - expected).abs().max() < 1e-9


def test_siglip2_naflex_of_several_sizes_in_one_row(pair, features):
    theirs, ours = pair(siglip2(), position_interpolation="bilinear")
    rows = images_of(SIZES)
    images = list(chain(*rows))
    shapes = torch.tensor([[each.shape[1] // PATCH, each.shape[2] // PATCH] for each in images])
    inputs, mask = torch.zeros(len(images), 30, 3 * PATCH**2, dtype=torch.float64), torch.zeros(len(images), 30)
    for number, image in enumerate(images):
        # Their order of a patch's values is row, column, channel.
        own = patches_of(image).unflatten(-1, (3, PATCH, PATCH)).permute(0, 1, 3, 4, 2).flatten(2).flatten(0, 1)
        inputs[number, : len(own)], mask[number, : len(own)] = own, 1
    output = theirs(inputs, mask.long(), shapes).last_hidden_state
    expected = torch.cat([row[: int(own.sum())] for row, own in zip(output, mask, strict=True)])
    assert (features(ours, rows)[0] - expected).abs().max() < 1e-6  # they resize the table in float32


def test_siglip2_of_one_size(pair, features):
    theirs, ours = pair(siglip2())
    rows = images_of([[(5, 5)] * 2, [(5, 5)]])
    own = [patches_of(image).unflatten(-1, (3, PATCH, PATCH)).permute(0, 1, 3, 4, 2) for image in list(chain(*rows))]
    inputs = torch.stack(own).flatten(3).flatten(1, 2)
    expected = theirs(inputs, torch.ones(3, 25).long(), torch.full((3, 2), 5)).last_hidden_state
    assert (features(ours, rows)[0] - expected.flatten(0, 1)).abs().max() < 1e-6  # they resize the table in float32


def test_the_tower_of_idefics3_takes_the_nearest_positions(pair, features):
    config = Idefics3VisionConfig(**THEIRS, image_size=SIDE * PATCH)
    theirs, ours = pair(Idefics3VisionTransformer(config), position_interpolation="nearest")
    rows = images_of([[(5, 5), (3, 4)], [(4, 7)]])
    expected = torch.cat([theirs(each[None]).last_hidden_state[0] for row in rows for each in row])
    assert (features(ours, rows)[0] - expected).abs().max() < 1e-9


@pytest.mark.parametrize(("ffn", "activation"), [("swiglu", "silu"), ("geglu", "gelu")])
def test_pixtral_of_several_sizes_in_one_row(context, randomised, features, ffn, activation):
    theirs = randomised(PixtralVisionModel(PixtralVisionConfig(**THEIRS, hidden_act=activation)))
    keys = {key: value for key, value in OURS.items() if key != "size"}
    pixtral = {"frames": 1, "bias": False, "pre_norm": True, "rates_in_turns": True, "eps": 1e-5}
    ours = randomised(QwenViT(**keys, ffn=ffn, **pixtral).build(context, taps=()))
    ours.rotary.init_buffers(torch.device("cpu"))
    load_pixtral(ours, theirs.state_dict())
    rows = images_of([[(3, 6), (5, 5), (1, 2)], [(7, 2)]])
    expected = torch.cat([theirs(each[None]).last_hidden_state[0] for row in rows for each in row])
    assert (features(ours, rows)[0] - expected).abs().max() < 1e-4  # their norms and encoding are in float32


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 7), (12, 3)])
def test_tables_are_resized_as_torch_does(mode, size):
    table = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = F.interpolate(table.permute(2, 0, 1)[None], size, mode=mode, antialias=mode == "bilinear")[0]
    coefficients = (
        getattr(positions, mode)(torch.arange(own).double(), torch.full((own,), own).double(), entries)
        for own, entries in zip(size, table.shape, strict=False)
    )
    ours = torch.einsum("rt,cu,tuw->wrc", *coefficients, table)
    assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_a_table_of_its_own_size_stays_to_the_bit(mode):
    place = torch.arange(27, dtype=torch.float32)
    assert torch.equal(getattr(positions, mode)(place, torch.full_like(place, 27), 27), torch.eye(27))


@pytest.mark.parametrize("keys", [{}, CLIP], ids=["siglip", "clip"])
def test_packed_images_are_like_images_alone(context, randomised, features, keys):
    tower = randomised(ViT(**{**OURS, **keys}, position_interpolation="bilinear").build(context, taps=()))
    rows = images_of(SIZES)
    alone = [features(tower, [[image]], spare=0)[0] for row in rows for image in row]
    assert (features(tower, rows)[0] - torch.cat(alone)).abs().max() < 1e-12


@pytest.mark.parametrize("keys", [{}, CLIP], ids=["siglip", "clip"])
def test_masks_and_segments_agree(context, randomised, features, monkeypatch, keys):
    tower = randomised(ViT(**{**OURS, **keys}, position_interpolation="bilinear").build(context, taps=()))
    by_segments = features(tower, images_of(SIZES))[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (features(tower, images_of(SIZES))[0] - by_segments).abs().max() < 1e-12


def test_one_size_and_any_size_agree(context, randomised, features):
    rows = images_of([[(5, 5)] * 2, [(5, 5)]])
    one, any_size = (
        randomised(ViT(**OURS, **CLIP, position_interpolation=mode).build(context, taps=()))
        for mode in ("none", "bilinear")
    )
    assert (features(one, rows)[0] - features(any_size, rows)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["none", "bilinear", "bicubic", "nearest"])
def test_the_place_of_a_patch_matters(context, randomised, packed, mode):
    tower = randomised(ViT(**OURS, position_interpolation=mode).build(context, taps=()))
    image = patches_of(pixels(5, 5, 0))
    patches, grids = packed([[image]], 25, 1, 3 * PATCH**2)
    exchanged = patches.clone()
    exchanged[:, [3, 17]] = patches[:, [17, 3]]
    images = Images.of(grids, 25)
    (one,), (other,) = tower(patches, images), tower(exchanged, images)
    assert (one[:, 3] - other[:, 17]).abs().max() > 1e-3


def test_frames_do_not_see_each_other(context, randomised):
    tower = randomised(ViT(**OURS, position_interpolation="bilinear").build(context, taps=()))
    image = torch.randn(1, 24, 3 * PATCH**2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    frames = tower(image, Images.of(torch.tensor([[[2, 3, 4]]]), 24))[0]
    images = tower(image, Images.of(torch.tensor([[[1, 3, 4], [1, 3, 4]]]), 24))[0]
    assert torch.equal(frames, images)


def test_rows_in_turn_have_the_gradient_of_the_batch(context, randomised, packed):
    tower = randomised(ViT(**OURS, position_interpolation="bilinear").build(context, taps=())).requires_grad_()
    patches, grids = packed([[patches_of(i) for i in row] for row in images_of(SIZES)], 50, 3, 3 * PATCH**2)

    def gradient(rows: slice) -> Tensor:
        images = Images.of(grids[rows], 50)
        output = tower(patches[rows], images)[0] * images.valid.unsqueeze(-1)
        return torch.cat([g.flatten() for g in torch.autograd.grad(output.square().sum(), tower.parameters())])

    whole = gradient(slice(0, 3))
    assert (sum(gradient(slice(n, n + 1)) for n in range(3)) - whole).abs().max() < 1e-9 * whole.abs().max()


@pytest.mark.parametrize("keys", [{}, CLIP], ids=["siglip", "clip"])
def test_flops_are_those_of_the_matrix_products(context, randomised, packed, keys):
    tower = randomised(ViT(**{**OURS, **keys}).build(context, taps=()))
    patches, grids = packed([[patches_of(pixels(5, 5, 0))] * 2], 50, 2, 3 * PATCH**2)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        tower(patches, Images.of(grids, 50))
    assert 2 * tower.flops(Grid(1, 5, 5)) == pytest.approx(3 * counter.get_total_flops())


@pytest.mark.parametrize(
    ("processor", "encoder"),
    [
        (SiglipImageProcessorPil, ViT(**OURS)),
        (CLIPImageProcessorPil, ViT(**OURS, **CLIP, mean=OPENAI_MEAN, std=OPENAI_STD)),
        (Siglip2ImageProcessorPil, ViT(**OURS, position_interpolation="bilinear")),
    ],
)
def test_towers_see_the_pixels_of_the_image_processor(processor, encoder):
    image = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
    cut = image.reshape(3, PATCH, 5, PATCH, 3).transpose(0, 2, 4, 1, 3).reshape(15, -1)
    normalise = Normalise(encoder.image_format(), torch.float32)
    normalise.init_buffers(torch.device("cpu"))
    actual = normalise(torch.tensor(cut))
    options: dict[str, Any] = {"do_resize": False, "do_center_crop": False}
    if processor is Siglip2ImageProcessorPil:
        options = {"patch_size": PATCH, "max_num_patches": 15}
        expected = processor(**options)(image, return_tensors="pt")["pixel_values"][0]
        expected = expected.unflatten(-1, (PATCH, PATCH, 3)).permute(0, 3, 1, 2).flatten(1)
    else:
        pixels = processor(**options)(image, return_tensors="pt")["pixel_values"][0]
        expected = pixels.unflatten(2, (5, PATCH)).unflatten(1, (3, PATCH)).permute(1, 3, 0, 2, 4).flatten(2)
        expected = expected.flatten(0, 1)
    assert (actual - expected).abs().max() < 1e-6
