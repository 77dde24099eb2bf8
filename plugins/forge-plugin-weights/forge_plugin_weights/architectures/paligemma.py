"""PaliGemma and PaliGemma 2: SigLIP, one matrix, and Gemma or Gemma 2, which sees its prompt in both directions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import VISION, WHOLE, SiglipVision
from forge_plugin_weights.composites import TEXT, LanguageTable, VisionTable, language_of
from forge_plugin_weights.composites import VISION as TOWER
from forge_plugin_weights.fields import Fixed, setting, value_of
from forge_plugin_weights.kinds import PIXELS, ArchitectureComponent, Config, Field, Flat, InnerTable, Rule, Unsupported
from forge_plugin_weights.pixels import ENCODER
from forge_plugin_weights.rules import Same

LANGUAGES = ("gemma", "gemma2")
BOTH_WAYS = "use_bidirectional_attention"
OF_TOWER = ("projection_dim", "projector_hidden_act", "num_image_tokens", "num_positions")
"""Keys of the tower's table that repeat others, or that nothing in `transformers` reads."""


@frozen(kw_only=True)
class PrefixLanguage(LanguageTable):
    """`text_config`: Gemma or Gemma 2. What makes its prompt bidirectional is a key of the fusion."""

    def architecture(self, config: Config) -> ArchitectureComponent:
        """Raises `Unsupported` for any language model but Gemma and Gemma 2."""
        _check(value_of(config, TEXT, {}).get("model_type", self.default))
        return super().architecture(config)

    def inner(self, config: Config) -> InnerTable:
        """Returns the table without the key of bidirectional prompts, which Gemma's fields would refuse."""
        table = super().inner(config)
        own = {key: value for key, value in table.config.items() if key != BOTH_WAYS}
        return attrs.evolve(table, config=own)

    def write(self, model: Flat) -> Config:
        """Adds that key, and the positions of an image."""
        _check(language_of(model).model_type)
        config = super().write(model)
        return {**config, TEXT: {**config[TEXT], BOTH_WAYS: True, "num_image_tokens": _positions(model)}}


def _check(language: str) -> None:
    if language not in LANGUAGES:
        raise Unsupported(f"{TEXT}.model_type = {language!r}; PaliGemma has {' or '.join(LANGUAGES)}")


@frozen(kw_only=True)
class PrefixTower(VisionTable):
    """`vision_config`: SigLIP's. The processor's file specifies how many positions an image has."""

    def write(self, model: Flat) -> Config:
        """Adds the positions of an image to the processor's file, and the projection's width to the table."""
        config = super().write(model)
        further = {"image_seq_length": _positions(model), "processor_class": "PaliGemmaProcessor"}
        tower = {**config[TOWER], "projection_dim": setting(model, "language.dim")}
        return {**config, PIXELS: {**config[PIXELS], **further}, TOWER: tower}


def _positions(model: Flat) -> int:
    """The positions of an image: one a patch."""
    height, width = setting(model, f"{ENCODER}.size")
    side: int = setting(model, f"{ENCODER}.patch")
    return (height // side) * (width // side)


@frozen
class ProjectedWidth(Field):
    """`projection_dim`, which repeats the language model's width."""

    @property
    def keys(self) -> Collection[str]:
        return ("projection_dim",)

    def read(self, config: Config) -> Flat:
        """Returns no key: raises `Unsupported` if the width is not the language model's."""
        width = value_of(config, "projection_dim", 2048)
        needed = value_of(config, TEXT, {}).get("hidden_size")
        if needed is not None and width != needed:
            raise Unsupported(f"projection_dim = {width}, which must be {TEXT}.hidden_size = {needed}")
        return {}

    def write(self, model: Flat) -> Config:
        """Writes the language model's width."""
        return {"projection_dim": setting(model, "language.dim")}


@frozen(kw_only=True)
class PaliGemma(VisionLanguageModel):
    """PaliGemma (Beyer et al. 2024) and PaliGemma 2 (Steiner et al. 2024)."""

    name = "PaliGemmaForConditionalGeneration"
    harmless = (
        *("image_token_index", "image_token_id", "ignore_index"),
        *("hidden_size", "vocab_size", "_vocab_size", "num_hidden_layers"),
    )
    kept = ("image_token_index", "image_token_id", "hidden_size")
    image_token = "image_token_index"
    begins_with_image = True
    left_out = ("vision_tower.vision_model.head.*",)  # SigLIP's pooling head
    body, head, tower_names = "language_model.model.", "language_model.", "vision_tower.vision_model."
    # Names of the modules of transformers 5; published files have those it renames on loading
    renames = {
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^vision_tower\.(?!vision_model\.)": "vision_tower.vision_model.",
    }
    towers: ClassVar[Mapping[str, Any]] = {"siglip_vision_model": SiglipVision()}

    def fields(self) -> Sequence[Field]:
        """Returns the keys; unlike other larger models, this one obeys the bound of its language model's logits."""
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint", "fusion.prefix": True}),
            PrefixLanguage(default="gemma", harmless=("num_image_tokens",), head_keys=("logit_soft_cap",)),
            PrefixTower(towers=self.towers, harmless=OF_TOWER),
            Fixed({f"{ENCODER}.norm": True, f"{ENCODER}.select_layer": -1}),
            Fixed({f"{ADAPTER}.type": f"{VISION}/linear", f"{ADAPTER}.bias": True}),
            ProjectedWidth(),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        return [Same(f"{ADAPTER}.project.{{tensor}}", "multi_modal_projector.linear.{tensor}")]
