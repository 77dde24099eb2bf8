"""The same weights give what transformers' Llama 3.2 Vision gives, behind its own tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_attention_models import Open
from torch import Tensor
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.modeling_mllama import MllamaRotaryEmbedding, MllamaTextRMSNorm
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from forge_plugin_cross_attention.modules.model import FEATURES
from forge_plugin_transformer import GroupedQueryAttention, PlainRope, RMSNorm, SwiGLU, Transformer
from forge_plugin_vision import GRIDS, PATCHES, LinearAdapter, VisionLanguage, VisionPart, ViT

CROSS = [1, 4]
"""Numbers of Mllama's own layers that are cross-attention: those before layers 1 and 3 of the others."""
PARTS = {
    "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o", "mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "cross_attn.q_proj": "attention.q", "cross_attn.k_proj": "attention.k", "cross_attn.v_proj": "attention.v",
    "cross_attn.o_proj": "attention.o", "cross_attn.q_norm": "attention.q_norm",
    "cross_attn.k_norm": "attention.k_norm",
}  # fmt: skip
TILES, TOKENS = 2, 5
"""Tiles of an image at most, and features of a tile."""
IMAGE = 40
"""Mllama's token for an image: the first of the rows that its table has beyond the vocabulary."""


def reference(dtype: torch.dtype) -> MllamaForConditionalGeneration:
    torch.manual_seed(0)
    config = MllamaConfig(
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": TILES, "vision_output_dim": 32,
            "intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        text_config={
            "vocab_size": IMAGE, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": CROSS, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rms_norm_eps": 1e-5,
        },
        image_token_index=IMAGE,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = MllamaForConditionalGeneration(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)  # norms, and the gates, which would be zero
        else:
            parameter.normal_(std=0.2)
    return widened(model) if dtype == torch.float64 else model


class WideNorm(MllamaTextRMSNorm):
    """In the dtype of x, where theirs is always in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class WideRotary(MllamaRotaryEmbedding):
    """In the dtype of x, likewise."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * 1e4 ** -torch.arange(0, 1, 2 / 8, dtype=x.dtype)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def widened(theirs: MllamaForConditionalGeneration) -> MllamaForConditionalGeneration:
    for module in theirs.modules():
        for wide in (WideNorm, WideRotary):
            if type(module) is wide.__base__:
                module.__class__ = wide
    return theirs


def ours_with_weights_of(make_model: Any, theirs: MllamaForConditionalGeneration, precision: str) -> Any:
    sizes = {"heads": 4, "kv_heads": 2}
    model = make_model(
        VisionLanguage(
            language=Transformer(
                vocab_size=IMAGE, dim=32, layers=4, ffn=SwiGLU(hidden=56), norm=RMSNorm(eps=1e-5),
                attention=GroupedQueryAttention(rope=PlainRope(theta=1e4), **sizes),
            ),
            vision=VisionPart(
                encoder=ViT(dim=4, layers=1, heads=1, patch=1, size=(TILES, TOKENS)), adapter=LinearAdapter(),
                images_per_sequence=2,
            ),
            fusion=Open(every=2, sees="together", qk_norm=True, qk_norm_eps=1e-5, ffn=SwiGLU(hidden=56), **sizes),
        ),
        precision=precision,
    ).requires_grad_(False)  # fmt: skip
    parameters = dict(model.named_parameters())
    for name, parameter in theirs.model.language_model.named_parameters():
        if name == "embed_tokens.weight":
            parameters.pop("embedding.weight").copy_(parameter[:IMAGE])
            parameters["markers.table.weight"][0].copy_(parameter[IMAGE])
        else:
            parameters.pop(forge_name(name)).copy_(parameter)
    parameters.pop("head.weight").copy_(theirs.lm_head.weight)
    assert {name.split(".")[0] for name in parameters} == {"vision", "markers"}
    return model


def forge_name(name: str) -> str:
    if name == "norm.weight":
        return name
    _, number, part = name.split(".", 2)
    own = int(number) - sum(cross < int(number) for cross in CROSS)
    layer = f"layers.{own}.cross_attention" if int(number) in CROSS else f"layers.{own}"
    gates = {"cross_attn_attn_gate": "attention_gate", "cross_attn_mlp_gate": "ffn_gate"}
    return f"{layer}.{gates[part] if part in gates else PARTS[part.removesuffix('.weight')]}.weight"


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns Mllama's: an image of two tiles and one of one, apart in row 0 and together in row 1."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, IMAGE, (2, 12), generator=generator)
    ids[0, 0] = ids[0, 5] = ids[1, 0] = ids[1, 1] = IMAGE
    mask = torch.zeros(2, 12, 2, TILES)
    for row in range(2):
        for image, (start, stop) in enumerate(get_cross_attention_token_mask(ids[row].tolist(), IMAGE)):
            mask[row, start:stop, image, : TILES - image] = 1
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 2, TILES, 3, 8, 8, generator=generator, dtype=dtype),
        "aspect_ratio_ids": torch.tensor([[2, 1], [2, 1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1], [1, 0]], [[1, 1], [1, 0]]]),
        "cross_attention_mask": mask,
    }


def logits(model: Any, theirs: MllamaForConditionalGeneration, given: dict[str, Tensor], **entries: Tensor) -> Tensor:
    """Returns our logits, with the features that their tower and projection make of the existing tiles."""
    tower = {name: given[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    states = theirs.model.multi_modal_projector(theirs.model.vision_model(**tower).last_hidden_state)
    tiles = states.reshape(2, 2 * TILES, TOKENS, -1)
    features = torch.cat([tiles[:, :3], torch.ones_like(tiles[:, :1])], 1).flatten(1, 2)
    grids = torch.tensor([[[1, TILES, TOKENS], [1, 1, TOKENS]]]).expand(2, -1, -1)
    batch = {
        "input_ids": given["input_ids"].where(given["input_ids"] != IMAGE, -1),
        PATCHES: torch.zeros(2, 2 * TILES * TOKENS, 3, dtype=torch.uint8),
        GRIDS: grids,
        FEATURES: features,
        **entries,
    }
    hidden: Tensor = model(batch)
    return model.head.logits(hidden)


@pytest.mark.parametrize(("precision", "dtype", "near"), [("fp32", torch.float32, 1e-4), ("fp64", torch.float64, 1e-9)])
def test_logits_equal_mllama(make_model, precision, dtype, near):
    theirs, given = reference(dtype), inputs(dtype)
    model = ours_with_weights_of(make_model, theirs, precision)
    expected = theirs(**given).logits
    assert expected.std() > 0.1
    assert (logits(model, theirs, given) - expected).abs().max() < near


def test_another_mask_would_not_pass(make_model):
    theirs, given = reference(torch.float64), inputs(torch.float64)
    model = ours_with_weights_of(make_model, theirs, "fp64")
    expected = theirs(**given).logits
    model.sees = "last"
    difference = (logits(model, theirs, given) - expected).abs().amax(-1)
    assert difference[1, 1:].min() > 1e-3  # images that stand together
    assert difference[0].max() < 1e-9


def test_text_before_the_first_image_is_metas(make_model):
    """Meta's code multiplies the attention of such text by zero; transformers lets it see all images."""
    theirs, given = reference(torch.float64), inputs(torch.float64)
    model = ours_with_weights_of(make_model, theirs, "fp64")
    given["input_ids"] = given["input_ids"].roll(2, 1)
    given["cross_attention_mask"] = torch.cat([torch.zeros(2, 2, 2, TILES), given["cross_attention_mask"][:, :-2]], 1)
    assert (logits(model, theirs, given) - theirs(**given).logits).abs().max() > 1e-3
    sees = given["cross_attention_mask"].flatten(2).any(-1, keepdim=True)
    for layer in CROSS:
        attention = theirs.model.language_model.layers[layer].cross_attn
        attention.register_forward_hook(lambda module, _, output: (output[0] * sees, output[1]))
    assert (logits(model, theirs, given) - theirs(**given).logits).abs().max() < 1e-9


def test_without_images_it_is_mllama_without_them(make_model):
    theirs = reference(torch.float64)
    model = ours_with_weights_of(make_model, theirs, "fp64")
    ids = inputs(torch.float64)["input_ids"].clamp(max=IMAGE - 1)
    ours = model.head.logits(model({"input_ids": ids}))
    assert (ours - theirs(input_ids=ids).logits).abs().max() < 1e-9
