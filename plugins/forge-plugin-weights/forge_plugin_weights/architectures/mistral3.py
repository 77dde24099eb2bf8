"""Mistral 3 (Mistral Small 3.1 and later, Ministral 3) with Pixtral's tower: images of any size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.qwen_vl import Room, TowerTheta, block_width
from forge_plugin_weights.architectures.vision_language import ADAPTER, Llava
from forge_plugin_weights.architectures.vision_towers import OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import LANGUAGE, LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Choice, Derived, Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, Rule, Unsupported
from forge_plugin_weights.pixels import CLIP_MEAN, CLIP_STD, ENCODER, LONGEST_EDGE, LongestPixels
from forge_plugin_weights.rules import Convolution, Same, SplitRows

THETA, TOWER = "rope_theta", "vision_tower."
BLOCK: Mapping[str, str] = {
    "attention_norm": "attention_norm",
    "o": "attention.o_proj",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.gate_proj",
    "ffn.up": "feed_forward.up_proj",
    "ffn.down": "feed_forward.down_proj",
}
"""Modules of a block of the tower: ours, theirs; queries, keys and values are one of ours."""
PROJECTOR: Mapping[str, str] = {
    "norm": "norm",
    "join": "patch_merger.merging_layer",
    "up": "linear_1",
    "down": "linear_2",
}
"""Modules between tower and language model, likewise."""


@frozen
class PixtralTheta(TowerTheta):
    """The base of the encoding of rows and columns, which files of version 4 have beside `rope_parameters`."""

    @property
    def keys(self) -> Collection[str]:
        return ("rope_parameters", THETA)

    @property
    def written(self) -> Collection[str]:
        return ("rope_parameters",)

    def read(self, config: Config) -> Flat:
        """Reads the table, whose base has precedence; `default` is another name of its type."""
        table = {THETA: value_of(config, THETA, 10000.0), **(config.get("rope_parameters") or {})}
        types = {table.pop(key) for key in ("type", "rope_type") if key in table} - {"default"}
        return super().read({"rope_parameters": {**table, **({"rope_type": types.pop()} if types else {})}})


@frozen
class HeadWidth(Field):
    """`head_dim`, which the class computes and does not read, and `image_size`, which it has no use for."""

    @property
    def keys(self) -> Collection[str]:
        return ("head_dim", "image_size")

    def read(self, config: Config) -> Flat:
        """Returns no key: raises `Unsupported` for a width that the heads do not have."""
        width = value_of(config, "hidden_size", 1024) // value_of(config, "num_attention_heads", 16)
        if (given := value_of(config, "head_dim", width)) != width:
            raise Unsupported(f"head_dim = {given}, where it is hidden_size / num_attention_heads = {width} always")
        return {}

    def write(self, model: Flat) -> Config:
        """Writes both: version 4 has a table of positions for images up to `image_size`."""
        width = setting(model, f"{ENCODER}.dim") // setting(model, f"{ENCODER}.heads")
        return {"head_dim": width, "image_size": LONGEST_EDGE}


@frozen(kw_only=True)
class PixtralVision(Tower):
    """Pixtral's tower (Agrawal et al. 2024), which is published with a language model only."""

    name = "PixtralVisionModel"
    harmless = OF_EVERY_MODEL

    def tower(self) -> Sequence[Field]:
        fixed = {"type": f"{VISION}/qwen_vit", "norm": "rmsnorm", "eps": 1e-5, "frames": 1, "pre_norm": True}
        fixed |= {"rates_in_turns": True, "bias": False, "patch_bias": False, "table": 0, "window": 0}
        return (
            Fixed({f"{ENCODER}.{key}": value for key, value in {**fixed, "full_attention": []}.items()}),
            Key("hidden_size", f"{ENCODER}.dim", 1024),
            Key("num_hidden_layers", f"{ENCODER}.layers", 24),
            Key("num_attention_heads", f"{ENCODER}.heads", 16),
            Key("intermediate_size", f"{ENCODER}.hidden", 4096),
            Key("patch_size", f"{ENCODER}.patch", 16),
            Choice("hidden_act", {"silu": {FFN: "swiglu"}, "gelu": {FFN: "geglu"}}, "gelu"),
            Only("num_channels", 3, "images are red, green and blue"),
            Dropout("attention_dropout"),
            HeadWidth(),
            PixtralTheta(),
            LongestPixels(processor="Pixtral", mean=CLIP_MEAN, std=CLIP_STD),
        )


def pixtral_rules(model: Flat) -> Sequence[Rule]:
    """Returns the names of the tower's tensors."""
    layer, there = f"{ENCODER}.blocks.{{layer}}", f"{TOWER}transformer.layers.{{layer}}"
    return (
        Convolution(f"{ENCODER}.patch.weight", f"{TOWER}patch_conv.weight", side=model[f"{ENCODER}.patch"]),
        Same(f"{ENCODER}.pre_norm.weight", f"{TOWER}ln_pre.weight"),
        SplitRows(f"{layer}.qkv.weight", [f"{there}.attention.{name}_proj.weight" for name in "qkv"]),
        *(Same(f"{layer}.{ours}.weight", f"{there}.{theirs}.weight") for ours, theirs in BLOCK.items()),
    )


FFN = f"{ENCODER}.ffn"
TEXT_TABLE = LanguageTable(default="mistral")


@frozen
class OfLanguage(Field):
    """Settings of the projector that no key specifies: the language model has them, too."""

    def read(self, config: Config) -> Flat:
        """Reads the width between the last two matrices, and what is added in the norm."""
        try:
            language = TEXT_TABLE.read(config)
        except Unsupported:
            return {}  # the table reports it
        return {ours: language[theirs] for ours, theirs in SHARED.items()}

    def write(self, model: Flat) -> Config:
        """Writes nothing; raises `Unsupported` for a setting other than the language model's."""
        for ours, theirs in SHARED.items():
            if (value := setting(model, ours)) != (needed := setting(model, theirs)):
                raise Unsupported(f"{ours} = {value}, where it has {theirs} = {needed} always")
        return {}


SHARED: Mapping[str, str] = {f"{ADAPTER}.hidden": f"{LANGUAGE}dim", f"{ADAPTER}.eps": f"{LANGUAGE}norm.eps"}


@frozen(kw_only=True)
class Mistral3(Llava):
    """Mistral Small 3.1 and later, and Ministral 3."""

    name = "Mistral3ForConditionalGeneration"
    harmless = ("image_token_index", "image_token_id", "vocab_size")
    kept = ("image_token_index",)
    renames = {
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    }
    tower_names = TOWER
    towers: ClassVar[Mapping[str, Tower]] = {"pixtral": PixtralVision()}

    def processor_settings(self, config: Config) -> Mapping[str, Any]:
        """Returns what `PixtralProcessor` needs to count the tokens of an image."""
        return {
            "processor_class": "PixtralProcessor",
            "patch_size": config["vision_config"]["patch_size"],
            "spatial_merge_size": config["spatial_merge_size"],
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both tables and of the projector; features are all patches of the last layer."""
        merger = {"type": f"{VISION}/merger", "norm": "rmsnorm", "norm_over": "patch", "joined": True}
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            TEXT_TABLE,
            VisionTable(towers=self.towers),
            Fixed({f"{ADAPTER}.{key}": value for key, value in merger.items()}),
            Key("spatial_merge_size", f"{ADAPTER}.merge", 2),
            Key("multimodal_projector_bias", f"{ADAPTER}.bias", False),
            Derived(f"{ADAPTER}.hidden", block_width),
            OfLanguage(),
            Only("projector_hidden_act", "gelu", "the adapter merger has no other"),
            Only("vision_feature_layer", -1, "features come from the last layer"),
            Room(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of language model, tower and projector."""
        return (
            *language_rules(model, self.body, self.head),
            *pixtral_rules(model),
            *(
                Same(f"{ADAPTER}.{ours}.{{tensor}}", f"multi_modal_projector.{theirs}.{{tensor}}")
                for ours, theirs in PROJECTOR.items()
            ),
        )

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()
