"""Tiny published models that see images, as `published_models` has those of texts, and batches with images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen
from published_models import GEMMA, GEMMA4, GEMMA4_SMALL, GROWING, LATENT, LLAMA4, SIZES, WINDOWS, YARN, lifted, rewrite
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from forge_plugin_vision import GRIDS, IMAGE, PATCHES

PATCH, SIDE, PLACEHOLDER = 4, 4, 60
"""Pixels of a patch, patches along a side of an image, the token that stands for an image."""
REST = 3
"""Pixels of a side that no patch has, where images have them."""
TEXT: Mapping[str, Any] = {**SIZES, "num_hidden_layers": 2}
TOWER: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": PATCH * SIDE,
    "patch_size": PATCH,
}
NAFLEX: Mapping[str, Any] = {key: value for key, value in TOWER.items() if key != "image_size"} | {"num_patches": 16}


def text(name: str, **keys: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**TEXT, **keys})


def clip(**keys: Any) -> Any:
    return transformers.CLIPVisionConfig(**{**TOWER, **keys})


def siglip(**keys: Any) -> Any:
    return transformers.SiglipVisionConfig(**{**TOWER, **keys})


def llava(language: Any, tower: Any, **keys: Any) -> Any:
    settings = {"image_token_index": PLACEHOLDER, "image_seq_length": SIDE**2, **keys}
    return transformers.LlavaConfig(text_config=language, vision_config=tower, **settings)


def paligemma(language: Any, **keys: Any) -> Any:
    settings = {"image_token_index": PLACEHOLDER, "projection_dim": language.hidden_size, **keys}
    return transformers.PaliGemmaConfig(text_config=language, vision_config=siglip(vision_use_head=False), **settings)


def internvl(language: Any, **keys: Any) -> Any:
    tower = {**TOWER, "layer_norm_eps": 1e-5, **keys}
    return transformers.InternVLConfig(text_config=language, vision_config=tower, image_token_id=PLACEHOLDER)


def shuffled(name: str, language: Any, **keys: Any) -> Any:
    settings = {"scale_factor": 2, "image_token_id": PLACEHOLDER, **keys}
    return getattr(transformers, f"{name}Config")(text_config=language, vision_config=dict(TOWER), **settings)


def mistral3(language: Any, **keys: Any) -> Any:
    """Pixtral's tower, and features of 2 x 2 patches; `hidden_act` is of the tower."""
    tower = {key: value for key, value in TOWER.items() if key != "image_size"} | {"model_type": "pixtral"}
    tower |= {"hidden_act": keys.pop("hidden_act", "silu"), "image_size": 1540}
    settings = {"image_token_index": PLACEHOLDER, "tie_word_embeddings": False, **keys}
    return transformers.Mistral3Config(text_config=language, vision_config=tower, **settings)


# `Llama4ForConditionalGeneration` reads it of what its language model returns, which lacks it (5.24).
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]


def llama4(**keys: Any) -> Any:
    """Tiles of `SIDE` x `SIDE` patches, of which 2 x 2 are joined; the feed-forward part has their width."""
    width = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 20)
    tower = {**TOWER, "num_hidden_layers": 2, "intermediate_size": 96, **width, **keys}
    tokens = {"image_token_index": PLACEHOLDER, "boi_token_index": 61, "eoi_token_index": 62}
    return transformers.Llama4Config(text_config={**SIZES, **LLAMA4}, vision_config=tower, **tokens)


GEMMA4_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id", "boa_token_id")


def gemma4(*, both_ways: str | None = "vision", language: Mapping[str, Any] | None = None, **keys: Any) -> Any:
    """Windows of 2 x 2 patches; images have more positions than the window of the language model's first layers.

    Args:
        both_ways: which positions see each other.
        language: keys of the language model.
        keys: of the tower.
    """
    tower = {key: value for key, value in TOWER.items() if key != "image_size"}
    tower |= {"num_key_value_heads": 3, "head_dim": 4, "position_embedding_size": 48, "pooling_kernel_size": 2, **keys}
    text_ = {**SIZES, **GEMMA4, "sliding_window": 4, "use_bidirectional_attention": both_ways, **(language or {})}
    # Behind the vocabulary, as its class takes each of them for padding, in what it has generated, too
    tokens = {name: 1000 + number for number, name in enumerate(GEMMA4_TOKENS)} | {"image_token_id": PLACEHOLDER}
    return transformers.Gemma4Config(text_config=text_, vision_config=tower, **tokens)


def kimi(*, vocabulary: int = SIZES["vocab_size"], **keys: Any) -> Any:
    """A table of 5 x 5 positions, which no image of the tests has, and features of 2 x 2 patches."""
    tower = {key: value for key, value in TOWER.items() if key != "image_size"}
    tower |= {"pos_emb_height": 5, "pos_emb_width": 5}
    text_ = {**SIZES, **LATENT, "num_hidden_layers": 2, "model_type": "deepseek_v3", "rope_parameters": YARN}
    text_ |= {"vocab_size": vocabulary, "pad_token_id": 0, "tie_word_embeddings": False}
    tokens = {name: 1000 + number for number, name in enumerate(KIMI_TOKENS)} | {"image_token_id": PLACEHOLDER}
    settings = {"projection_hidden_size": 24, "projection_layer_norm_eps": 1e-4, "tie_word_embeddings": False, **keys}
    return transformers.Kimi_K25Config(text_config=text_, vision_config=tower, **{**tokens, **settings})


KIMI_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@frozen
class Seeing:
    """A class of `transformers`, and how its configuration is made."""

    name: str
    config: Callable[[], Any]
    dropped: Sequence[str] = ()
    """Parts of names of the tensors that Forge computes nothing with."""

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Returns a model whose parameters, norms and biases too, are random."""
        torch.manual_seed(0)
        model = getattr(transformers, self.name)(self.config()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            for name, buffer in model.named_buffers():
                if name.endswith(("std_bias", "std_scale")):  # Gemma 4's, which its class leaves uninitialised
                    buffer.copy_(torch.rand_like(buffer) + 0.5)
                elif name.endswith(("put_min", "put_max")) and "layers.0." not in name:  # where they stay infinite
                    buffer.copy_((torch.rand_like(buffer) + 0.3) * buffer.sign())
        # Of a model in float32 this would make the complex tables of Llama 4 real numbers, too.
        return model if dtype == torch.float32 else model.to(dtype)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Write the model to a folder, in several files; returns it."""
        model = self.model(dtype)
        model.save_pretrained(folder, max_shard_size="40KB")
        return model


@frozen
class PublishedKimi(Seeing):
    """Kimi-K2.5 by the names of published files, of which version 5 writes some otherwise."""

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        model = super().write(folder, dtype)
        rewrite(folder, lambda tensors: {published_kimi(name): tensor for name, tensor in tensors.items()})
        return model


def published_kimi(name: str) -> str:
    """Returns the published name of a tensor that version 5 has written."""
    for saved, published in (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    ):
        name = published + name[len(saved) :] if name.startswith(saved) else name
    return name


LLAVA, TAIL = "LlavaForConditionalGeneration", ("encoder.layers.2.", "post_layernorm.")
MODELS: Mapping[str, Seeing] = {
    "llava": Seeing(LLAVA, lambda: llava(text("Llama"), clip()), TAIL),
    "llava, siglip": Seeing(
        LLAVA,
        lambda: llava(
            text("Qwen2", tie_word_embeddings=True),
            siglip(image_size=REST + PATCH * SIDE),
            vision_feature_select_strategy="full",
            projector_hidden_act="gelu_pytorch_tanh",
        ),
        (*TAIL, "vision_tower.head."),
    ),
    "llava, last layer": Seeing(
        LLAVA,
        lambda: llava(
            text("Gemma2", **{**GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": None}),
            clip(),
            vision_feature_layer=-1,
        ),
        ("post_layernorm.",),
    ),
    "llava, window": Seeing(
        LLAVA, lambda: llava(text("Mistral", **WINDOWS), clip(), multimodal_projector_bias=False), TAIL
    ),
    "llava, experts": Seeing(
        LLAVA, lambda: llava(text("Mixtral", num_local_experts=4, num_experts_per_tok=2), clip()), TAIL
    ),
    "paligemma": Seeing(
        "PaliGemmaForConditionalGeneration", lambda: paligemma(text("Gemma", head_dim=16, num_key_value_heads=1))
    ),
    "paligemma, gemma2": Seeing(
        "PaliGemmaForConditionalGeneration",
        lambda: paligemma(text("Gemma2", **{**GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": 2.0})),
    ),
    "internvl": Seeing("InternVLForConditionalGeneration", lambda: internvl(text("Qwen2"), attention_bias=True)),
    "internvl, large": Seeing(
        "InternVLForConditionalGeneration",
        lambda: internvl(text("Qwen3", head_dim=8), norm_type="rms_norm", use_qk_norm=True, use_mean_pooling=False),
    ),
    "llama4, experts": Seeing("Llama4ForConditionalGeneration", llama4),
    "idefics3": Seeing("Idefics3ForConditionalGeneration", lambda: shuffled("Idefics3", text("Llama"))),
    "smolvlm": Seeing(
        "SmolVLMForConditionalGeneration",
        lambda: shuffled("SmolVLM", text("Llama", tie_word_embeddings=True), tie_word_embeddings=True),
    ),
}
MISTRAL3 = "Mistral3ForConditionalGeneration"
ANY_SIZE: Mapping[str, Seeing] = {
    "mistral3": Seeing(MISTRAL3, lambda: mistral3(text("Mistral", head_dim=16))),
    "mistral3, ministral3": Seeing(
        MISTRAL3,
        lambda: mistral3(
            text("Ministral3", head_dim=16, rope_parameters=GROWING, rms_norm_eps=1e-4, tie_word_embeddings=True),
            hidden_act="gelu",
            multimodal_projector_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}
"""Models whose images have any size."""
BUDGETED: Mapping[str, Seeing] = {
    "gemma4": Seeing("Gemma4ForConditionalGeneration", lambda: gemma4(standardize=True)),
    "gemma4, small": Seeing(
        "Gemma4ForConditionalGeneration",
        lambda: gemma4(both_ways=None, language={**GEMMA4_SMALL, "pad_token_id": 3}, use_clipped_linears=True),
    ),
}
"""Models whose images fill a number of patches."""
NAVIT: Mapping[str, Seeing] = {"kimi_k25, experts": PublishedKimi("Kimi_K25ForConditionalGeneration", kimi)}
"""Models whose images keep their size."""
HEAD = ("head.",)
TOWERS: Mapping[str, Seeing] = {
    "siglip_vision_model": Seeing("SiglipVisionModel", siglip, HEAD),
    "siglip2_vision_model": Seeing("Siglip2VisionModel", lambda: transformers.Siglip2VisionConfig(**NAFLEX), HEAD),
    "clip_vision_model": Seeing("CLIPVisionModel", clip, ("post_layernorm.",)),
}

TILE, MOST_TILES = 2, 4
"""Patches along a side of a tile, and tiles of an image at most."""
TILED_TOWER: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 3,
    "image_size": PATCH * TILE,
    "patch_size": PATCH,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 72,
}


def tiled_text(**keys: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    crossing = {"num_hidden_layers": 5, "cross_attention_layers": [0, 3], "rope_parameters": rope}
    return {**SIZES, "vocab_size": PLACEHOLDER, "pad_token_id": 0, **crossing, **keys}


TILED: Mapping[str, Seeing] = {
    "mllama": Seeing(
        "MllamaForConditionalGeneration",
        lambda: transformers.MllamaConfig(
            text_config=tiled_text(), vision_config=dict(TILED_TOWER), image_token_index=PLACEHOLDER
        ),
    ),
    "mllama_vision_model": Seeing("MllamaVisionModel", lambda: transformers.MllamaVisionConfig(**TILED_TOWER)),
}


def wide(published: Any) -> Any:
    """Returns a model all of which is computed in float64, its tables of positions too, within `lifted`."""
    model = type(published)(published.config).double()
    model.set_experts_implementation("eager")
    model.load_state_dict(published.state_dict())
    return model.eval()


def batch_of(positions: int, images: int = 1, length: int = 40) -> dict[str, Tensor]:
    """Returns two rows, the first of which has images, of `positions` positions each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, PLACEHOLDER, (2, length), generator=generator)
    patches = torch.zeros(2, images * SIDE**2, 3 * PATCH**2, dtype=torch.uint8)
    grids = torch.zeros(2, images, 3, dtype=torch.int64)
    for number in range(images):
        start = 2 + number * (positions + 1)
        ids[0, start : start + positions] = IMAGE
        grids[0, number] = torch.tensor([1, SIDE, SIDE])
    patches[0] = torch.randint(0, 256, patches[0].shape, generator=generator, dtype=torch.uint8)
    labels = ids.roll(-1, 1).where(torch.arange(length) >= length - 10, -100)
    return {"input_ids": ids, "labels": labels, PATCHES: patches, GRIDS: grids}


def pixels_of(vision: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the images of the first row as the tower sees them: (images, channels, height, width)."""
    patches = vision.normalise(batch[PATCHES][0]).view(-1, SIDE, SIDE, 3, PATCH, PATCH)
    pixels = patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, SIDE * PATCH, SIDE * PATCH)
    rest = (vision.normalise.form.pixels or (SIDE * PATCH,))[0] - SIDE * PATCH
    return F.pad(pixels, (0, rest, 0, rest), value=0.7)


def inputs_for(name: str, batch: Mapping[str, Tensor], pixels: Tensor, rows: slice = slice(None)) -> dict[str, Tensor]:
    """Returns what `transformers` takes for our batch; for some of its rows, as prompts."""
    ids = batch["input_ids"][rows]
    placed = {"input_ids": ids.where(ids >= 0, PLACEHOLDER), "pixel_values": pixels}
    if name.startswith("paligemma"):  # the suffix, whose first token is a label of the prefix
        suffix = F.pad(batch["labels"][rows, :-1] >= 0, (1, 0)).cumsum(1) > 0
        return {**placed, "token_type_ids": suffix.long() if rows == slice(None) else torch.zeros_like(ids)}
    if name.startswith(("llava", "internvl", "llama4")):
        return placed
    images = torch.stack([pixels, torch.zeros_like(pixels)])[rows]  # an image of zeros is none
    return {"input_ids": ids.where(ids >= 0, PLACEHOLDER), "pixel_values": images}


@torch.no_grad()
def wide_logits(published: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits of a published model, all of it computed in float64."""
    with lifted():
        return wide(published)(**inputs).logits
