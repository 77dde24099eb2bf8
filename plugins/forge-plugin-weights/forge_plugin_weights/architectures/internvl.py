"""InternVL 2.5, 3 and 3.5 as `transformers` has them: a tower with layer scale, joined patches, any language model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.vision_language import VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import ACTIVATIONS, OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Choice, Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, Part, Rule, Shapes, Unsupported
from forge_plugin_weights.pixels import CLIP_MEAN, CLIP_STD, ENCODER, Pixels
from forge_plugin_weights.rules import Convolution, Same, match, whole

ADAPTER = "vision.adapter"
BLOCK: Mapping[str, str] = {
    "attention_norm.{tensor}": "layernorm_before.{tensor}",
    "q.{tensor}": "attention.q_proj.{tensor}",
    "k.{tensor}": "attention.k_proj.{tensor}",
    "v.{tensor}": "attention.v_proj.{tensor}",
    "o.{tensor}": "attention.projection_layer.{tensor}",
    "q_norm.weight": "attention.q_norm.weight",
    "k_norm.weight": "attention.k_norm.weight",
    "attention_scale.weight": "lambda_1",
    "ffn_norm.{tensor}": "layernorm_after.{tensor}",
    "up.{tensor}": "mlp.fc1.{tensor}",
    "down.{tensor}": "mlp.fc2.{tensor}",
    "ffn_scale.weight": "lambda_2",
}
"""Tensors of a block: ours, theirs."""


@frozen
class Batched:
    """A tensor that has further dimensions of 1 before its own in the published model."""

    ours: str
    theirs: str
    leading: int

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part, a view of theirs without the dimensions of 1."""
        if match(self.ours, name) is None:
            return ()
        own = shapes[name]
        return [
            Part(
                ours=name,
                theirs=self.theirs,
                shape=(1,) * self.leading + own,
                offsets=(0,) * len(own),
                sizes=own,
                torn=True,  # its rows are not theirs, of which there is one
                of_ours=whole,
                of_theirs=lambda tensor: tensor.view(own),
            )
        ]


@frozen
class Sides(Field):
    """`image_size` and `patch_size`: a number, or height and width."""

    @property
    def keys(self) -> Collection[str]:
        return ("image_size", "patch_size")

    def read(self, config: Config) -> Flat:
        """Reads squares only: the merger joins patches as in a square image."""
        size, patch = (
            _pair(value_of(config, key, default)) for key, default in (("image_size", 448), ("patch_size", 14))
        )
        if patch[0] != patch[1]:
            raise Unsupported(f"patch_size = {patch}; patches are squares")
        if any(side % patch[0] for side in size):
            raise Unsupported(f"image_size = {size}, which patch_size = {patch} does not divide")
        if size[0] != size[1]:
            raise Unsupported(f"image_size = {size}; its patches are joined as in a square image")
        return {f"{ENCODER}.size": size, f"{ENCODER}.patch": patch[0]}

    def write(self, model: Flat) -> Config:
        """Writes the patch as a pair, as `InternVLVisionConfig` saves it."""
        size, patch = list(setting(model, f"{ENCODER}.size")), setting(model, f"{ENCODER}.patch")
        if size[0] != size[1] or model.get(f"{ENCODER}.pixels"):
            raise Unsupported(f"{ENCODER}.size = {size}, where it is a square of whole patches always")
        return {"image_size": size, "patch_size": [patch, patch]}


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


@frozen
class ScaleStart(Field):
    """`layer_scale_init_value`, which is above 0: the factors are there always."""

    @property
    def keys(self) -> Collection[str]:
        return ("layer_scale_init_value",)

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for 0, by which Forge builds no factors."""
        start = value_of(config, "layer_scale_init_value", 0.1)
        if start <= 0:
            raise Unsupported(f"layer_scale_init_value = {start!r}; Forge has values above 0, and none for no factors")
        return {f"{ENCODER}.layer_scale": start}

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for 0: the published tower has the factors always."""
        if not (start := setting(model, f"{ENCODER}.layer_scale")):
            raise Unsupported(f"{ENCODER}.layer_scale = {start!r}, where it is above 0 always")
        return {"layer_scale_init_value": start}


@frozen
class JoinedSide(Field):
    """`downsample_ratio`: one by the patches along a side of those that are joined."""

    @property
    def keys(self) -> Collection[str]:
        return ("downsample_ratio",)

    def read(self, config: Config) -> Flat:
        """Reads 0.5 as 2 patches along a side, 4 in all."""
        ratio = value_of(config, "downsample_ratio", 0.5)
        if not ratio or 1 / ratio != round(1 / ratio):
            raise Unsupported(f"downsample_ratio = {ratio!r}, which is not one by a whole number")
        return {f"{ADAPTER}.merge": round(1 / ratio)}

    def write(self, model: Flat) -> Config:
        """Writes one by the patches along a side."""
        return {"downsample_ratio": 1 / setting(model, f"{ADAPTER}.merge")}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width of the joined patches where `hidden` is 0."""
        hidden = model.get(f"{ADAPTER}.hidden")
        joined = model.get(f"{ADAPTER}.merge", 0) ** 2 * model.get(f"{ENCODER}.dim", 0)
        return {f"{ADAPTER}.hidden": joined} if hidden == 0 else {}


@frozen
class ProjectorWidth(Field):
    """The width between the projector's matrices, which no key specifies: the language model's width."""

    def read(self, config: Config) -> Flat:
        return {f"{ADAPTER}.hidden": value_of(config, "text_config", {}).get("hidden_size", 4096)}  # Qwen2's default

    def write(self, model: Flat) -> Config:
        """Writes nothing; raises `Unsupported` for a width other than the language model's."""
        if (hidden := setting(model, f"{ADAPTER}.hidden")) != (needed := setting(model, "language.dim")):
            raise Unsupported(f"{ADAPTER}.hidden = {hidden}, where it has the language model's {needed} always")
        return {}


@frozen(kw_only=True)
class InternVLVision(Tower):
    """InternVL's tower, which is published with it only."""

    name = "InternVLVisionModel"
    harmless = (*OF_EVERY_MODEL, "dropout")

    def tower(self) -> Sequence[Field]:
        norms = {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}
        return (
            Fixed({f"{ENCODER}.type": f"{VISION}/vit"}),
            Key("hidden_size", f"{ENCODER}.dim", 1024),
            Key("num_hidden_layers", f"{ENCODER}.layers", 24),
            Key("num_attention_heads", f"{ENCODER}.heads", 16),
            Key("intermediate_size", f"{ENCODER}.hidden", 4096, derived=lambda model: 4 * model[f"{ENCODER}.dim"]),
            Key("layer_norm_eps", f"{ENCODER}.eps", 1e-6),
            Choice("hidden_act", ACTIVATIONS, "gelu", f"{ENCODER}.activation"),
            Choice(
                "norm_type", {theirs: {f"{ENCODER}.block_norm": own} for theirs, own in norms.items()}, "layer_norm"
            ),
            Key("use_qk_norm", f"{ENCODER}.qk_norm", False),
            Key("attention_bias", f"{ENCODER}.attention_bias", False),
            # `InternVLVisionModel` has an identity in place of the last norm if it pools.
            Choice("use_mean_pooling", {flag: {f"{ENCODER}.norm": not flag} for flag in (True, False)}, True),
            ScaleStart(),
            Sides(),
            Only("num_channels", 3, "images are red, green and blue"),
            Only("use_mask_token", False, "no patch is masked"),
            Only("use_absolute_position_embeddings", True, "positions have a table"),
            *(Dropout(key) for key in ("hidden_dropout_prob", "attention_dropout", "projection_dropout")),
            Fixed({f"{ENCODER}.class_token": True, f"{ENCODER}.pre_norm": False, f"{ENCODER}.patch_bias": True}),
            Fixed({f"{ENCODER}.position_interpolation": "none"}),
            Pixels(
                processor="GotOcr2",
                mean=CLIP_MEAN,
                std=CLIP_STD,
                written={"size": {"height": ..., "width": ...}, "crop_to_patches": False},
            ),
        )


def tower_rules(model: Flat, prefix: str) -> Sequence[Rule]:
    """Returns the names of the tower's tensors, which begin with `prefix` there."""
    patch = f"{prefix}embeddings.patch_embeddings.projection"
    return (
        Convolution(f"{ENCODER}.patch.weight", f"{patch}.weight", side=model[f"{ENCODER}.patch"]),
        Same(f"{ENCODER}.patch.bias", f"{patch}.bias"),
        Batched(f"{ENCODER}.class_token", f"{prefix}embeddings.cls_token", 2),  # (1, 1, W)
        Batched(f"{ENCODER}.positions.weight", f"{prefix}embeddings.position_embeddings", 1),  # (1, 1 + P, W)
        Same(f"{ENCODER}.norm.{{tensor}}", f"{prefix}layernorm.{{tensor}}"),
        *(
            Same(f"{ENCODER}.blocks.{{layer}}.{ours}", f"{prefix}encoder.layer.{{layer}}.{theirs}")
            for ours, theirs in BLOCK.items()
        ),
    )


@frozen(kw_only=True)
class InternVL(VisionLanguageModel):
    """InternVL (Chen et al. 2024; Zhu et al. 2025), in the form of `OpenGVLab/InternVL3-1B-hf` and the like."""

    name = "InternVLForConditionalGeneration"
    harmless = ("image_token_id", "image_seq_length", "vocab_size")
    kept = ("image_token_id", "image_seq_length")
    image_token = "image_token_id"
    body, head, tower_names = "language_model.model.", "language_model.", "vision_tower."
    # Names of the modules of transformers 5; published files have those it renames on loading
    renames = {
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    }
    tower: ClassVar[Tower] = InternVLVision()

    def fields(self) -> Sequence[Field]:
        """Returns the keys; features are all patches of the last layer."""
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            LanguageTable(default="qwen2"),
            VisionTable(towers={"internvl_vision": self.tower}),
            Fixed({f"{ENCODER}.select_layer": -1, f"{ADAPTER}.type": f"{VISION}/merger"}),
            Fixed({f"{ADAPTER}.norm": "layernorm", f"{ADAPTER}.norm_over": "block", f"{ADAPTER}.eps": 1e-5}),
            JoinedSide(),
            ProjectorWidth(),
            Only("projector_hidden_act", "gelu", "the adapter merger has no other"),
            Only("vision_feature_layer", -1, "features come from the last layer"),
            Only("vision_feature_select_strategy", "default", "the class token is no feature"),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """As in the base class, but with the names of InternVL's tower, which differ from CLIP's and SigLIP's."""
        return (
            *language_rules(model, self.body, self.head),
            *tower_rules(model, self.tower_names),
            *self.adapter_rules(),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        """Returns the names of the projector: a norm and two matrices."""
        modules = {"norm": "layer_norm", "up": "linear_1", "down": "linear_2"}
        return [
            Same(f"{ADAPTER}.{ours}.{{tensor}}", f"multi_modal_projector.{theirs}.{{tensor}}")
            for ours, theirs in modules.items()
        ]

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: features come from the last block, so that Forge computes the whole tower."""
        return ()
