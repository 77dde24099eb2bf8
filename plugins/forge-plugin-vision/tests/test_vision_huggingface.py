"""Whole models have the logits of `transformers`' with the same weights, and towers see the same pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Siglip2ImageProcessorPil,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from forge_core.contracts.components import TrainingHook
from forge_core.job import LoadSection
from forge_core.parallel.initialise import materialise
from forge_plugin_checkpoints.importing import import_weights
from forge_plugin_transformer import GroupedQueryAttention, RMSNorm, SwiGLU, Transformer
from forge_plugin_transformer.huggingface_names import from_huggingface, to_huggingface
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, MLPAdapter, PixelShuffle, VisionLanguage, VisionPart, ViT
from forge_plugin_vision import huggingface_names as names
from forge_plugin_vision.modules.vision import Normalise
from forge_plugin_vision.testing import RandomImages

PATCH, SIDE, VOCABULARY, PLACEHOLDER = 4, 4, 64, 60
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": PATCH * SIDE,
    "patch_size": PATCH,
}
OURS: dict[str, Any] = {"dim": 24, "hidden": 40, "layers": 3, "heads": 3, "patch": PATCH, "size": (16, 16)}
CLIP: dict[str, Any] = {
    "class_token": True,
    "pre_norm": True,
    "patch_bias": False,
    "activation": "quick_gelu",
    "norm": False,
    "eps": 1e-5,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
LANGUAGE = Transformer(
    vocab_size=VOCABULARY,
    dim=32,
    layers=2,
    attention=GroupedQueryAttention(heads=4, kv_heads=2),
    ffn=SwiGLU(hidden=48),
    norm=RMSNorm(eps=1e-5),
)


def llava(vision: Any, layer: int, strategy: str) -> Any:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=PLACEHOLDER,
            vision_feature_layer=layer, vision_feature_select_strategy=strategy,
        )
    )  # fmt: skip


def shuffled(config: Any, model: Any) -> Any:
    keys = {"scale_factor": 2, "image_token_id": PLACEHOLDER, "tie_word_embeddings": False}
    return model(config(vision_config=TOWER, text_config=LlamaConfig(**TEXT), **keys))


CASES: dict[str, tuple[Callable[[], Any], names.Family, ViT, Any]] = {
    "llava-clip": (
        lambda: llava(CLIPVisionConfig(**TOWER), -2, "default"),
        "llava",
        ViT(**OURS, **CLIP, select_layer=-2),
        MLPAdapter(),
    ),
    "llava-siglip": (
        lambda: llava(SiglipVisionConfig(**TOWER, vision_use_head=False), -2, "full"),
        "llava",
        ViT(**OURS, norm=False, select_layer=-2),
        MLPAdapter(),
    ),
    "idefics3": (
        lambda: shuffled(Idefics3Config, Idefics3ForConditionalGeneration),
        "idefics3",
        ViT(**OURS, position_interpolation="nearest", resample="lanczos"),
        PixelShuffle(factor=2),
    ),
    "smolvlm": (
        lambda: shuffled(SmolVLMConfig, SmolVLMForConditionalGeneration),
        "idefics3",
        ViT(**OURS, resample="lanczos"),
        PixelShuffle(factor=2),
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def pair(case: Any, make_job: Callable[..., Any], build: Callable[..., Any], randomised: Callable[..., Any]) -> Any:
    """pair(precision): their model and ours, with the same random weights."""
    reference, _, encoder, adapter = case

    def make(precision: str) -> Any:
        vision = VisionPart(encoder=encoder, adapter=adapter, images_per_sequence=3, patches_per_sequence=50)
        model = build(
            make_job(model=VisionLanguage(language=LANGUAGE, vision=vision), precision=precision, seq_len=64)
        ).model
        materialise(model, torch.device("cpu"), seed=0)
        theirs = randomised(reference()).to(torch.float64 if precision == "fp64" else torch.float32)
        weights = names.from_huggingface(theirs.state_dict(), from_huggingface)
        own = dict(model.named_parameters())
        assert set(own) <= set(weights)
        for name, parameter in own.items():
            parameter.data.copy_(weights[name])
        return theirs, model.eval().requires_grad_(False)

    return make


def batch_of(positions: int) -> dict[str, Tensor]:
    """Three rows with two, no and one images, of `positions` positions each."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, PLACEHOLDER, (3, 40))
    patches, grids = np.zeros((3, 50, 3 * PATCH**2), np.uint8), np.zeros((3, 3, 3), np.int64)
    for row, starts in ((0, (2, 20)), (2, (0,))):
        for number, start in enumerate(starts):
            ids[row, start : start + positions] = IMAGE
            grids[row, number] = 1, SIDE, SIDE
        filled = len(starts) * SIDE**2
        patches[row, :filled] = generator.integers(0, 256, (filled, patches.shape[2]))
    return {"input_ids": torch.tensor(ids), PATCHES: torch.tensor(patches), GRIDS: torch.tensor(grids)}


def pixels_of(patches: Tensor) -> Tensor:
    """(…, P, V) normalised patches to (…, channels, height, width)."""
    grid = patches.unflatten(-1, (3, PATCH, PATCH)).unflatten(-4, (SIDE, SIDE))
    return grid.movedim(-3, -5).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def theirs_for(model: Any, vision: Any, batch: dict[str, Tensor], family: str) -> Any:
    """Their logits and features of images, for our batch."""
    images = pixels_of(vision.normalise(batch[PATCHES])[:, :48].unflatten(1, (3, -1)))  # (B, N, …)
    there = batch[GRIDS].prod(-1) > 0
    pixels = images[there] if family == "llava" else (images * there[..., None, None, None])[:, :2].contiguous()
    ids = torch.where(batch["input_ids"] < 0, PLACEHOLDER, batch["input_ids"])
    features = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    return model(input_ids=ids, pixel_values=pixels).logits, torch.cat(list(features))


# Their language model computes norms and rotary angles in float32, whatever the dtype.
def norm_in_float64(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def angles_in_float64(rope: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    dim = 2 * len(rope.inv_freq)
    theta = rope.config.rope_parameters["rope_theta"]
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = (position_ids.unsqueeze(-1) * frequencies).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(("precision", "within"), [("fp64", 1e-11), ("fp32", 1e-4)])
def test_logits_equal_theirs(pair, case, monkeypatch, precision, within):
    theirs, ours = pair(precision)
    if precision == "fp64":
        monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_float64)
        monkeypatch.setattr(LlamaRotaryEmbedding, "forward", angles_in_float64)
    positions = SIDE**2 // case[3].multiple ** 2
    batch = batch_of(positions)
    expected, image_features = theirs_for(theirs, ours.vision, batch, case[1])
    logits = ours.head.logits(ours(batch))
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < within
    placed = ours.vision(ours.prepare(batch))[batch["input_ids"] < 0]
    assert (placed - image_features.reshape(placed.shape)).abs().max() < within


def test_weights_are_named_both_ways(case, randomised):
    theirs = randomised(case[0]())
    state = theirs.state_dict()
    back = names.to_huggingface(names.from_huggingface(state, from_huggingface), case[1], to_huggingface)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_run_starts_from_the_weights_of_a_tower(make_job, train, catalog, randomised, tmp_path):
    tower = randomised(SiglipVisionModel(SiglipVisionConfig(**TOWER))).float()
    weights = names.from_huggingface({f"vision_model.{name}": tensor for name, tensor in tower.state_dict().items()})
    import_weights(weights, tmp_path / "siglip")
    vision = VisionPart(encoder=ViT(**OURS, select_layer=-2, norm=False), images_per_sequence=1)
    load = LoadSection(path=str(tmp_path / "siglip"), include=["vision.encoder.*"])
    first, data = First(), {"sources": (RandomImages(),), "tokenizer": catalog.load("tokenizer", "bytes")()}
    model, said = VisionLanguage(language=evolve(LANGUAGE, vocab_size=320), vision=vision), list[str]()
    train(make_job(model=model, data=data, seq_len=40, checkpoint={"load": load}), first, echo=said.append)
    assert "another tokenizer" not in said[0], "no weights of the tower belong to tokens"
    loaded = {name: tensor for name, tensor in first.weights.items() if name.startswith("vision.encoder.")}
    assert len(loaded) == 3 + 2 * 16
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.items())


class First(TrainingHook):
    """Keeps the weights that training starts from."""

    def on_train_begin(self, context):
        self.weights = {name: tensor.detach().clone() for name, tensor in context.model.named_parameters()}


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("vision_tower.vision_model.encoder.layers.3.self_attn.out_proj.bias", "vision.encoder.blocks.3.o.bias"),
        ("vision_tower.vision_model.pre_layrnorm.weight", "vision.encoder.pre_norm.weight"),
        ("vision_model.embeddings.class_embedding", "vision.encoder.class_token"),
        ("multi_modal_projector.linear_2.bias", "vision.adapter.down.bias"),
        ("language_model.model.layers.1.mlp.up_proj.weight", "layers.1.ffn.up.weight"),
        ("language_model.model.norm.weight", "norm.weight"),
        ("language_model.lm_head.weight", "head.weight"),
        ("model.text_model.embed_tokens.weight", "embedding.weight"),
        ("model.connector.modality_projection.proj.weight", "vision.adapter.project.weight"),
    ],
)
def test_names_of_published_files_are_known(published, ours):
    assert names.name_from_huggingface(published, from_huggingface) == ours


def test_a_name_without_counterpart_is_refused():
    with pytest.raises(KeyError, match=r"no counterpart for parameter 'encoder\.layers\.0\.mlp\.fc3"):
        names.name_from_huggingface("encoder.layers.0.mlp.fc3.weight")
    with pytest.raises(KeyError, match="without the function `language`"):
        names.name_from_huggingface("lm_head.weight")
    with pytest.raises(KeyError, match="no counterpart"):
        names.name_to_huggingface("vision.encoder.positions_3d.weight", "clip")


@pytest.mark.parametrize(
    ("processor", "encoder"),
    [
        (SiglipImageProcessorPil, ViT(**OURS)),
        (CLIPImageProcessorPil, ViT(**OURS, **CLIP)),
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
