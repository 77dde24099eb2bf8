"""Vision towers: SigLIP, SigLIP 2 and CLIP, alone or as a part of a larger model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from forge_core.config.load import to_toml
from forge_core.contracts.components import ModelComponent
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.fields import Choice, Dropout, Fixed, Key, Only, Synonym, setting, value_of
from forge_plugin_weights.kinds import OTHER, Config, Field, Filler, Flat, Rule, Unsupported
from forge_plugin_weights.pixels import CLIP_MEAN, CLIP_STD, ENCODER, Pixels
from forge_plugin_weights.rules import Convolution, Same
from forge_plugin_weights.vision_kinds import VisionTowerArchitecture

if TYPE_CHECKING:
    from forge_core.plugins.catalog import Catalog

VISION = "forge-plugin-vision"
TOWER, WHOLE = f"{VISION}/vision_tower", f"{VISION}/vision_language"
"""Types of models."""
ACTIVATIONS: Mapping[Any, Flat] = {
    theirs: {f"{ENCODER}.activation": ours}
    for theirs, ours in (("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu"), ("quick_gelu", "quick_gelu"))
}
BLOCK: Mapping[str, str] = {
    "attention_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "ffn_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Modules of a block: ours, theirs."""
ENDS: Mapping[str, str] = {
    "patch.bias": "embeddings.patch_embedding.bias",
    "class_token": "embeddings.class_embedding",
    "positions.weight": "embeddings.position_embedding.weight",
    "pre_norm.{tensor}": "pre_layrnorm.{tensor}",  # CLIP's spelling
    "norm.{tensor}": "post_layernorm.{tensor}",
}
"""Tensors before and after the blocks, likewise."""


@frozen
class Size(Field):
    """`image_size`, the sides of all images in pixels; what whole patches leave of them is not seen."""

    default: int
    patch: int
    """The default of `patch_size`."""

    @property
    def keys(self) -> Collection[str]:
        return ("image_size",)

    def read(self, config: Config) -> Flat:
        """Reads the pixels, and the size that whole patches of them have."""
        given, patch = value_of(config, "image_size", self.default), value_of(config, "patch_size", self.patch)
        pixels = [given, given] if isinstance(given, int) else list(given)
        size = [side // patch * patch for side in pixels]
        return {f"{ENCODER}.size": size, **({f"{ENCODER}.pixels": pixels} if pixels != size else {})}

    def write(self, model: Flat) -> Config:
        """Writes one number for squares, as the published files have it."""
        height, width = model.get(f"{ENCODER}.pixels") or setting(model, f"{ENCODER}.size")
        return {"image_size": height if height == width else [height, width]}


@frozen
class PatchCount(Field):
    """`num_patches`, the places of a square table of positions, which is resized to the shape of each image."""

    default: int = 256

    @property
    def keys(self) -> Collection[str]:
        return ("num_patches",)

    def read(self, config: Config) -> Flat:
        """Reads the sides in pixels of the square that the table is for."""
        count, patch = value_of(config, "num_patches", self.default), value_of(config, "patch_size", 16)
        if (side := isqrt(count)) ** 2 != count:
            raise Unsupported(f"num_patches = {count}, which is no square; Forge resizes tables of known sides")
        return {f"{ENCODER}.size": [side * patch] * 2}

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for a table that is not square."""
        sides = [side // setting(model, f"{ENCODER}.patch") for side in setting(model, f"{ENCODER}.size")]
        if sides[0] != sides[1]:
            raise Unsupported(f"{ENCODER}.size = {setting(model, f'{ENCODER}.size')}, where it is a square always")
        return {"num_patches": sides[0] * sides[1]}


@frozen
class PoolingHead(Field):
    """`vision_use_head`: the head that makes one vector of an image, which Forge does not have."""

    @property
    def keys(self) -> Collection[str]:
        return ("vision_use_head",)

    def remark(self, config: Config) -> str:
        """Reports that the head's tensors are left out of an import."""
        return "vision_use_head = True: the pooling head is left out" if config.get("vision_use_head") else ""

    def write(self, model: Flat) -> Config:
        """Writes false, so that `transformers` builds no head, for which an export has no tensors."""
        return {"vision_use_head": False}


OF_EVERY_MODEL = (
    *("add_cross_attention", "bad_words_ids", "cross_attention_hidden_size", "decoder_start_token_id", "is_decoder"),
    *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "min_length", "num_beams"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_return_sequences", "output_scores", "prefix", "pruned_heads"),
    *("remove_invalid_values", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class"),
    *("torchscript", "typical_p", "use_bfloat16", "vocab_size", "initializer_factor"),
)
"""Keys that old versions wrote for every model, of texts or not."""


def tower_rules(model: Flat, prefix: str, *, flat_patches: bool = False) -> Sequence[Rule]:
    """Returns the names of a tower's tensors.

    Args:
        model: whose `vision.encoder` it is.
        prefix: of all names of theirs.
        flat_patches: whether the projection of patches is a matrix there, and not a convolution.
    """
    return (
        Convolution(
            f"{ENCODER}.patch.weight",
            f"{prefix}embeddings.patch_embedding.weight",
            side=model[f"{ENCODER}.patch"],
            flat=flat_patches,
        ),
        *(Same(f"{ENCODER}.{ours}", prefix + theirs) for ours, theirs in ENDS.items()),
        *(
            Same(
                f"{ENCODER}.blocks.{{layer}}.{ours}.{{tensor}}", f"{prefix}encoder.layers.{{layer}}.{theirs}.{{tensor}}"
            )
            for ours, theirs in BLOCK.items()
        ),
    )


def tower_fillers(model: Flat, prefix: str) -> Sequence[Filler]:
    """Returns a tower's tensors behind what Forge computes: blocks after `select_layer`, and a norm that it lacks.

    Such a block hands on what it is given: its norms are plain, and its matrices 0.
    """
    width, hidden = model[f"{ENCODER}.dim"], model[f"{ENCODER}.hidden"]
    fillers: list[Filler] = []
    first = model[f"{ENCODER}.layers"] + 1 + model[f"{ENCODER}.select_layer"]  # with -1 there is none
    for layer in range(first, model[f"{ENCODER}.layers"]):
        for theirs in BLOCK.values():
            rows, columns = {"mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden)}.get(theirs, (width, width))
            norm = theirs.startswith("layer_norm")
            here = f"{prefix}encoder.layers.{layer}.{theirs}"
            fillers.append(Filler(f"{here}.weight", (width,) if norm else (rows, columns), float(norm)))  # norms: 1
            fillers.append(Filler(f"{here}.bias", (rows,), 0.0))
    if not model[f"{ENCODER}.norm"]:
        fillers += [
            Filler(f"{prefix}post_layernorm.{tensor}", (width,), v) for tensor, v in (("weight", 1.0), ("bias", 0.0))
        ]
    return fillers


@frozen(kw_only=True)
class Tower(VisionTowerArchitecture):
    """A vision tower alone: the model `vision_tower`."""

    harmless: ClassVar[Collection[str]] = OF_EVERY_MODEL
    left_out = ("vision_model.head.*", f"{OTHER}*")  # the pooling head, and all that is no tower
    ignored = ("*.position_ids",)
    # It leaves blocks out, in whose places an export has fillers.
    training_only = ("vision.encoder.select_layer",)
    # Alone, in a pair with a text tower, or in a larger model, whose tensors outside of the tower are left out.
    renames = {
        r"^(model\.)?(vision_tower|vision_model)\.(vision_model\.)?": "vision_model.",
        r"^(?=embeddings\.|encoder\.|pre_layrnorm\.|post_layernorm\.|head\.)": "vision_model.",
        r"^(?!vision_model\.)": OTHER,
    }
    norm: ClassVar[bool] = True
    """Whether its features, the last hidden state, are normalised."""
    flat_patches: ClassVar[bool] = False

    def tower(self) -> Sequence[Field]:
        """Returns the keys of the encoder but for those that say which of its outputs are the features."""
        raise NotImplementedError

    def fields(self) -> Sequence[Field]:
        """Returns the keys; whether features are normalised is a matter of the class, and no key."""
        return (
            Fixed({"type": TOWER, f"{ENCODER}.norm": self.norm}),
            *self.tower(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the names of the tower alone, which all files have after `renames`."""
        return tower_rules(model, "vision_model.", flat_patches=self.flat_patches)

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """Returns what lies behind the features, which `transformers` builds all the same."""
        return tower_fillers(model, "vision_model.")

    def start_tables(self, model: Mapping[str, Any], load: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes the model one that sees images, since a tower cannot be trained alone, and loads the encoder only."""
        return {
            "model": {**model, "type": WHOLE},
            "checkpoint": {"load": [{**load, "include": [f"{ENCODER}.*"]}]},
        }

    def part_of_model(self, model: ModelComponent, catalog: Catalog) -> ModelComponent:
        """Returns the encoder of a vision-language model as a `vision_tower`, and any other model as it is."""
        table = to_toml(model, catalog)
        if table["type"] != WHOLE:
            return model
        part = {"type": TOWER, "vision": {"encoder": table["vision"]["encoder"]}}
        return parse_component(part, "model", ModelComponent, catalog)

    def has_tensor(self, name: str) -> bool:
        """Whether it is a tensor of the encoder: adapter and language model are not exported."""
        return name.startswith(f"{ENCODER}.")


def encoder_fields(
    *, heads: int, dim: int, hidden: int, layers: int, patch: int, eps: float, activation: str
) -> Sequence[Field]:
    """Returns the keys that all towers have; the arguments are their defaults."""
    return (
        Fixed({f"{ENCODER}.type": f"{VISION}/vit"}),
        Key("hidden_size", f"{ENCODER}.dim", dim),
        Key("num_hidden_layers", f"{ENCODER}.layers", layers),
        Key("num_attention_heads", f"{ENCODER}.heads", heads),
        Key("intermediate_size", f"{ENCODER}.hidden", hidden, derived=lambda model: 4 * model[f"{ENCODER}.dim"]),
        Key("patch_size", f"{ENCODER}.patch", patch),
        Key("layer_norm_eps", f"{ENCODER}.eps", eps),
        Choice("hidden_act", ACTIVATIONS, activation, f"{ENCODER}.activation"),
        Only("num_channels", 3, "images are red, green and blue"),
        Dropout("attention_dropout"),
    )


PLAIN: Flat = {f"{ENCODER}.class_token": False, f"{ENCODER}.pre_norm": False, f"{ENCODER}.patch_bias": True}
ONE_SIZE = "none"


def any_interpolation(*names: str) -> Sequence[Field]:
    """Returns fields by which a tower may resize its table in these ways, none of which matters at its own size."""
    path = f"{ENCODER}.position_interpolation"
    return (*(Synonym(path, name, ONE_SIZE) for name in names), Fixed({path: ONE_SIZE}))


@frozen(kw_only=True)
class SiglipVision(Tower):
    """SigLIP's tower, and SigLIP 2's for images of one size."""

    name = "SiglipVisionModel"

    def tower(self) -> Sequence[Field]:
        """Returns the keys; a tower without a class token, for images of one size."""
        return (
            *encoder_fields(
                heads=12, dim=768, hidden=3072, layers=12, patch=16, eps=1e-6, activation="gelu_pytorch_tanh"
            ),
            Fixed(PLAIN),
            Size(224, 16),
            *any_interpolation("bicubic"),
            PoolingHead(),
            Pixels(processor="Siglip", written={"size": {"height": ..., "width": ...}}),
        )


@frozen(kw_only=True)
class Siglip2Vision(Tower):
    """SigLIP 2's tower for images of any shape (NaFlex)."""

    name = "Siglip2VisionModel"
    flat_patches = True

    def tower(self) -> Sequence[Field]:
        """Returns the keys; the table of positions is resized bilinearly to each image."""
        return (
            *encoder_fields(
                heads=12, dim=768, hidden=3072, layers=12, patch=16, eps=1e-6, activation="gelu_pytorch_tanh"
            ),
            Fixed(PLAIN),
            PatchCount(),
            Fixed({f"{ENCODER}.position_interpolation": "bilinear"}),
            PoolingHead(),
            Pixels(processor="Siglip2", resample=2, written={"patch_size": ..., "max_num_patches": 256}),
        )


@frozen(kw_only=True)
class ClipVision(Tower):
    """CLIP's tower. Its features are those before `post_layernorm`, which it has for the class token alone."""

    name = "CLIPVisionModel"
    harmless = (*OF_EVERY_MODEL, "projection_dim", "dropout")
    norm = False

    def tower(self) -> Sequence[Field]:
        """Returns the keys; its processor resizes the shorter side and takes the middle."""
        return (
            *encoder_fields(heads=12, dim=768, hidden=3072, layers=12, patch=32, eps=1e-5, activation="quick_gelu"),
            Fixed({f"{ENCODER}.class_token": True, f"{ENCODER}.pre_norm": True, f"{ENCODER}.patch_bias": False}),
            Size(224, 32),
            *any_interpolation("bicubic"),
            Pixels(
                processor="CLIP",
                mean=CLIP_MEAN,
                std=CLIP_STD,
                written={
                    "do_center_crop": True,
                    "size": {"shortest_edge": ...},
                    "crop_size": {"height": ..., "width": ...},
                },
            ),
        )


@frozen(kw_only=True)
class Idefics3Vision(Tower):
    """The tower of Idefics3 and SmolVLM, which is published with them only."""

    name = "Idefics3VisionTransformer"
    harmless = (*OF_EVERY_MODEL, "max_image_size", "size", "use_base_siglip")

    def tower(self) -> Sequence[Field]:
        """Returns the keys; without a processor's file, an export has images in one piece."""
        return (
            *encoder_fields(
                heads=16, dim=1152, hidden=3072, layers=12, patch=32, eps=1e-6, activation="gelu_pytorch_tanh"
            ),
            Fixed(PLAIN),
            Size(224, 32),
            *any_interpolation("nearest"),
            Pixels(
                processor="Idefics3",
                resample=1,
                written={
                    "do_image_splitting": False,
                    "do_pad": True,
                    "max_image_size": {"longest_edge": ...},
                    "size": {"longest_edge": ...},
                },
            ),
        )
