"""Vision-language models whose images take the places of tokens: LLaVA, Idefics3 and SmolVLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.vision_towers import (
    VISION,
    WHOLE,
    ClipVision,
    Idefics3Vision,
    SiglipVision,
    Tower,
    tower_fillers,
    tower_rules,
)
from forge_plugin_weights.composites import LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Choice, Derived, Fixed, Key, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, Rule, Unsupported
from forge_plugin_weights.pixels import ENCODER
from forge_plugin_weights.rules import Same
from forge_plugin_weights.vision_kinds import VisionLanguageArchitecture

ADAPTER = "vision.adapter"
IMAGE_TOKEN = "<image>"
"""Stands for an image in texts."""


@frozen
class SelectedLayer(Field):
    """`vision_feature_layer`: whose output the features are, of the blocks and what they are given."""

    default: int = -2

    @property
    def keys(self) -> Collection[str]:
        return ("vision_feature_layer",)

    def read(self, config: Config) -> Flat:
        """Reads one index of a hidden state, counted from the end here."""
        layer = value_of(config, "vision_feature_layer", self.default)
        if not isinstance(layer, int):
            raise Unsupported(f"vision_feature_layer = {layer!r}; features of several layers side by side are missing")
        layers = value_of(config, "vision_config", {}).get("num_hidden_layers")
        if layer >= 0 and layers is None:
            raise Unsupported(f"vision_feature_layer = {layer}, and vision_config.num_hidden_layers is missing")
        # There are `layers` + 1 hidden states: the input of the blocks is the first.
        return {f"{ENCODER}.select_layer": layer if layer < 0 else layer - layers - 1}

    def write(self, model: Flat) -> Config:
        return {"vision_feature_layer": setting(model, f"{ENCODER}.select_layer")}


@frozen
class SelectedTokens(Field):
    """`vision_feature_select_strategy`: whether the first feature, which belongs to a class token, is left out."""

    default: str = "default"
    tower: str = "clip_vision_model"
    """The `model_type` of a tower without one."""

    @property
    def keys(self) -> Collection[str]:
        return ("vision_feature_select_strategy",)

    def read(self, config: Config) -> Flat:
        """Returns no key: raises `Unsupported` unless every patch, and nothing else, has a feature."""
        strategy = value_of(config, "vision_feature_select_strategy", self.default)
        tower = value_of(config, "vision_config", {}).get("model_type", self.tower)
        if strategy != self._needed(tower == "clip_vision_model"):
            hint = "features of patches are all there are: no class token, and no patch left out"
            raise Unsupported(f"vision_feature_select_strategy = {strategy!r} with a {tower}; {hint}")
        return {}

    def write(self, model: Flat) -> Config:
        """Writes `default`, by which transformers drops the first feature, for towers with a class token only."""
        return {"vision_feature_select_strategy": self._needed(setting(model, f"{ENCODER}.class_token"))}

    def _needed(self, has_class_token: bool) -> str:
        return "default" if has_class_token else "full"


@frozen(kw_only=True)
class VisionLanguageModel(VisionLanguageArchitecture):
    """What the architectures of this module have in common."""

    training_only: ClassVar[Collection[str]] = ("vision.images_per_sequence", "vision.patches_per_sequence")
    ignored = ("*rotary_emb.inv_freq", "*.position_ids")
    body: ClassVar[str]
    """What names of the language model begin with."""
    head: ClassVar[str] = ""
    """What stands before `lm_head`."""
    tower_names: ClassVar[str]
    """What names of the tower begin with."""

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of language model, tower and adapter, under the prefixes of the class."""
        return (
            *language_rules(model, self.body, self.head),
            *tower_rules(model, self.tower_names),
            *self.adapter_rules(),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        """Returns the names of the tensors between tower and language model."""
        raise NotImplementedError

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """Returns what lies behind the features in the tower, which `transformers` builds all the same."""
        return tower_fillers(model, self.tower_names)


@frozen(kw_only=True)
class Llava(VisionLanguageModel):
    """LLaVA and LLaVA-1.5 (Liu et al. 2023): a tower of CLIP or SigLIP, two matrices, any language model."""

    name = "LlavaForConditionalGeneration"
    harmless: ClassVar[Collection[str]] = (
        *("image_token_index", "image_token_id", "image_seq_length", "ignore_index", "vocab_size"),
    )
    kept: ClassVar[Collection[str]] = ("image_token_index", "image_token_id", "image_seq_length")
    image_token = "image_token_index"
    left_out = ("vision_tower.vision_model.head.*",)  # SigLIP's pooling head
    body, head, tower_names = "language_model.model.", "language_model.", "vision_tower.vision_model."
    renames: ClassVar[Mapping[str, str]] = {
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^vision_tower\.(?!vision_model\.)": "vision_tower.vision_model.",
    }
    towers: ClassVar[Mapping[str, Tower]] = {"clip_vision_model": ClipVision(), "siglip_vision_model": SiglipVision()}
    adapter: ClassVar[str] = f"{VISION}/mlp"
    projection: ClassVar[str] = f"{ADAPTER}."
    """What names of the adapter's two matrices begin with."""
    processor: ClassVar[str] = "LlavaProcessor"
    """The class of the processor."""

    def tables(self) -> Sequence[Field]:
        """Returns the tables of the language model and of the tower."""
        return LanguageTable(), VisionTable(towers=self.towers)

    def chosen(self) -> Sequence[Field]:
        """Returns the keys that say which of the tower's outputs are features."""
        return SelectedLayer(), SelectedTokens()

    def processor_settings(self, config: Config) -> Mapping[str, Any]:
        """Returns what `LlavaProcessor` needs to count the tokens of an image."""
        tower, strategy = config["vision_config"], config["vision_feature_select_strategy"]
        return {
            "processor_class": self.processor,
            "patch_size": tower["patch_size"],
            "num_additional_image_tokens": int(strategy == "default"),
            "vision_feature_select_strategy": strategy,
            "image_token": IMAGE_TOKEN,
        }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of two tables, of the projector, and of which outputs of the tower are features."""
        activations = {
            theirs: {f"{ADAPTER}.activation": ours}
            for theirs, ours in (
                ("gelu", "gelu"),
                ("gelu_pytorch_tanh", "gelu_tanh"),
                ("quick_gelu", "quick_gelu"),
                ("silu", "silu"),
                ("relu", "relu"),
            )
        }
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            *self.tables(),
            # Features are hidden states, which transformers takes before the last norm.
            Fixed({f"{ENCODER}.norm": False, f"{ADAPTER}.type": self.adapter}),
            # `LlavaMultiModalProjector` has no key for the width between its matrices.
            Derived(f"{ADAPTER}.hidden", lambda model: model.get("language.dim", 0)),
            Choice("projector_hidden_act", activations, "gelu", f"{ADAPTER}.activation"),
            Key("multimodal_projector_bias", f"{ADAPTER}.bias", True),
            *self.chosen(),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        modules = {"up": "linear_1", "down": "linear_2"}
        return [
            Same(f"{self.projection}{ours}.{{tensor}}", f"multi_modal_projector.{theirs}.{{tensor}}")
            for ours, theirs in modules.items()
        ]


OLD_TEXT = (
    *("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "qk_layer_norms"),
    *("use_resampler", "is_llama_config", "rope_interleaved"),
)
"""Keys in the language models' tables of published files, which nothing in `transformers` reads."""


@frozen(kw_only=True)
class Idefics3(VisionLanguageModel):
    """Idefics3 (Laurençon et al. 2024), and the first SmolVLM, which is published as such."""

    name = "Idefics3ForConditionalGeneration"
    harmless = (*("image_token_id", "_pad_token_id", "vocab_size", "use_reentrant_checkpointing", "image_seq_len"),)
    kept = ("image_token_id",)
    image_token = "image_token_id"
    body, tower_names = "model.text_model.", "model.vision_model."
    tower: ClassVar[str] = "idefics3_vision"
    """The `model_type` of its tower."""

    def fields(self) -> Sequence[Field]:
        # Some published files name the whole model here. An export has the first.
        towers = {name: Idefics3Vision() for name in (self.tower, "idefics3", "smolvlm")}
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            LanguageTable(harmless=OLD_TEXT),
            VisionTable(towers=towers),
            Fixed({f"{ENCODER}.norm": True, f"{ENCODER}.select_layer": -1}),
            Fixed({f"{ADAPTER}.type": f"{VISION}/pixel_shuffle", f"{ADAPTER}.bias": False}),
            Key("scale_factor", f"{ADAPTER}.factor", 2),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        return [Same(f"{ADAPTER}.project.weight", "model.connector.modality_projection.proj.weight")]


@frozen(kw_only=True)
class SmolVLM(Idefics3):
    """SmolVLM 2 (Marafioti et al. 2025): Idefics3 under another name."""

    name = "SmolVLMForConditionalGeneration"
    tower = "smolvlm_vision"
