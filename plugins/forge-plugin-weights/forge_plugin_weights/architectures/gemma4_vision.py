"""Gemma 4 with its tower: images of any size, whose positions see each other in layers with a window."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.gemma4 import Gemma4Text
from forge_plugin_weights.architectures.qwen_vl import Room
from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import TEXT, LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, InnerTable, Rule, Unsupported
from forge_plugin_weights.pixels import ENCODER, BudgetPixels
from forge_plugin_weights.rules import Convolution, Same, SplitRows

LANGUAGE_TYPE, LANGUAGE_MODEL = "gemma4_text", Gemma4Text()
BOTH_WAYS = "use_bidirectional_attention"
BIDIRECTIONAL = ("fusion.bidirectional", "fusion.bidirectional_in_windows")
BLOCK: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj.linear",
    "ffn.gate": "mlp.gate_proj.linear",
    "ffn.up": "mlp.up_proj.linear",
    "ffn.down": "mlp.down_proj.linear",
}
"""Modules of a block: ours, theirs; queries, keys and values are one of ours."""


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
BOUNDED: Mapping[str, str] = {
    **{f"qkv.bounds.{number}": f"self_attn.{name}_proj" for number, name in enumerate("qkv")},
    **{f"{ours}.bounds.0": BLOCK[ours].removesuffix(".linear") for ours in ("o", "ffn.gate", "ffn.up", "ffn.down")},
}
"""Matrices that clip, where they do."""


@frozen(kw_only=True)
class SeeingLanguage(LanguageTable):
    """`text_config`: Gemma 4's. Which positions of images see each other is a key of the fusion here."""

    def inner(self, config: Config) -> InnerTable:
        """Returns the table without that key."""
        table = super().inner(config)
        own = {key: value for key, value in table.config.items() if key != BOTH_WAYS}
        return attrs.evolve(table, config=own)

    def read(self, config: Config) -> Flat:
        """Adds whether positions of an image see each other."""
        given = (config.get(TEXT) or {}).get(BOTH_WAYS)
        if given not in (None, "vision"):
            raise Unsupported(f"{TEXT}.{BOTH_WAYS} = {given!r}; Forge has None and 'vision'")
        return {**super().read(config), **dict.fromkeys(BIDIRECTIONAL, given is not None)}

    def write(self, model: Flat) -> Config:
        """Adds that key; raises `Unsupported` where images see themselves in all layers."""
        own = {path: setting(model, path) for path in BIDIRECTIONAL}
        if len({*own.values()}) > 1:
            raise Unsupported(f"{own}, where both are equal always")
        config = super().write(model)
        return {**config, TEXT: {**config[TEXT], BOTH_WAYS: "vision" if own[BIDIRECTIONAL[0]] else None}}


@frozen
class Base(Field):
    """`rope_parameters` of the tower: the base of the encoding of columns and rows."""

    @property
    def keys(self) -> Collection[str]:
        return ("rope_parameters",)

    def read(self, config: Config) -> Flat:
        """Reads the base; `default` is another name of the type in published files."""
        table = dict(config.get("rope_parameters") or {})
        theta, type_ = table.pop("rope_theta", 100.0), table.pop("rope_type", "axial")
        if table or type_ not in ("axial", "default"):
            given = config["rope_parameters"]
            raise Unsupported(f"rope_parameters = {given}; Forge has rope_theta with rope_type axial")
        return {f"{ENCODER}.theta": theta}

    def write(self, model: Flat) -> Config:
        return {"rope_parameters": {"rope_type": "axial", "rope_theta": setting(model, f"{ENCODER}.theta")}}


@frozen
class Heads(Field):
    """`num_attention_heads`, `num_key_value_heads` and `head_dim`: keys have as many heads as queries."""

    @property
    def keys(self) -> Collection[str]:
        return ("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")

    @property
    def written(self) -> Collection[str]:
        """Without the width of a language model's layers, which published files repeat."""
        return ("num_attention_heads", "num_key_value_heads", "head_dim")

    def read(self, config: Config) -> Flat:
        """Reads number and width; raises `Unsupported` for fewer heads of keys."""
        heads, width = value_of(config, "num_attention_heads", 12), value_of(config, "head_dim", 64)
        if (keys := value_of(config, "num_key_value_heads", 12)) != heads:
            raise Unsupported(f"num_key_value_heads = {keys}, and num_attention_heads = {heads}; Forge has equal ones")
        if (other := value_of(config, "global_head_dim", width)) != width:
            raise Unsupported(f"global_head_dim = {other}, and head_dim = {width}; all layers of the tower are alike")
        return {f"{ENCODER}.heads": heads, f"{ENCODER}.head_dim": width}

    def write(self, model: Flat) -> Config:
        heads = setting(model, f"{ENCODER}.heads")
        width = setting(model, f"{ENCODER}.head_dim")
        return {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width}


@frozen(kw_only=True)
class Gemma4Vision(Tower):
    """Gemma 4's tower, with the pooling and the projection behind it, which are an adapter here."""

    name = "Gemma4VisionModel"
    harmless = (*OF_EVERY_MODEL, "default_output_length", "max_position_embeddings")

    def tower(self) -> Sequence[Field]:
        """Returns the keys; the norm before the projection has the tower's epsilon."""
        return (
            Fixed({f"{ENCODER}.type": f"{VISION}/gemma_vit"}),
            Key("hidden_size", f"{ENCODER}.dim", 768),
            Key("num_hidden_layers", f"{ENCODER}.layers", 16),
            Heads(),
            Key("intermediate_size", f"{ENCODER}.hidden", 3072),
            Key("patch_size", f"{ENCODER}.patch", 16),
            Key("position_embedding_size", f"{ENCODER}.positions", 10240),
            Key("rms_norm_eps", (f"{ENCODER}.eps", f"{ADAPTER}.eps"), 1e-6),
            Base(),
            Key("pooling_kernel_size", f"{ADAPTER}.window", 3),
            Key("standardize", f"{ADAPTER}.standardise", False),
            Only("hidden_activation", "gelu_pytorch_tanh", "the encoder gemma_vit has no other"),
            Key("use_clipped_linears", f"{ENCODER}.clipped", False),
            Only("attention_bias", False, "the class has none"),
            Dropout("attention_dropout"),
            BudgetPixels(processor="Gemma4"),
        )


def tower_rules(model: Flat, prefix: str) -> Sequence[Rule]:
    """Returns the names of the tower's tensors, which begin with `prefix` there."""
    layer, there = f"{ENCODER}.blocks.{{layer}}", f"{prefix}encoder.layers.{{layer}}"
    return (
        Convolution(
            f"{ENCODER}.patch.weight",
            f"{prefix}patch_embedder.input_proj.weight",
            side=model[f"{ENCODER}.patch"],
            flat=True,
        ),
        Same(f"{ENCODER}.positions.weight", f"{prefix}patch_embedder.position_embedding_table"),
        SplitRows(f"{layer}.qkv.weight", [f"{there}.self_attn.{name}_proj.linear.weight" for name in "qkv"]),
        *(
            Same(f"{layer}.{ours}.{name}", f"{there}.{theirs}.{name}")
            for ours, theirs in BOUNDED.items()
            for name in BOUNDS
        ),
        *(Same(f"{layer}.{ours}.weight", f"{there}.{theirs}.weight") for ours, theirs in BLOCK.items()),
        Same(f"{ADAPTER}.shift", f"{prefix}std_bias"),
        Same(f"{ADAPTER}.factor", f"{prefix}std_scale"),
    )


TOKENS: Mapping[str, str] = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
}
"""Keys with ids of tokens of images and videos."""
SOUNDS = "audio_config"
OF_SOUNDS = ("audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
SOFT_TOKENS = "vision_soft_tokens_per_image"


@frozen(kw_only=True)
class Gemma4(VisionLanguageModel):
    """Gemma 4: E2B and E4B without their sounds, 26B-A4B, 31B."""

    name = "Gemma4ForConditionalGeneration"
    removable = (SOUNDS,)
    unbounded: ClassVar[Collection[str]] = tuple(f"model.vision_tower.*.{name}" for name in BOUNDS)
    left_out = (*VisionLanguageModel.left_out, *Gemma4Text.left_out, "model.audio_tower.*", "model.embed_audio.*")
    harmless = (*TOKENS, *OF_SOUNDS, SOFT_TOKENS)
    kept = harmless
    marks = TOKENS
    body, tower_names = "model.language_model.", "model.vision_tower."
    towers: ClassVar[Mapping[str, Tower]] = {"gemma4_vision": Gemma4Vision()}

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both tables; sounds are refused."""
        hint = f"--ignore {SOUNDS} leaves them out, --architecture {LANGUAGE_TYPE} takes the language model alone"
        alone = f"sounds are not heard; {hint}"
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint", f"{ADAPTER}.type": f"{VISION}/scaled_pool"}),
            SeeingLanguage(default=LANGUAGE_TYPE, only=LANGUAGE_MODEL, head_keys=("logit_soft_cap",)),
            VisionTable(towers=self.towers),
            Only(SOUNDS, None, alone),
            Room(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of language model, tower and projection."""
        return (
            *language_rules(model, self.body, self.head, (LANGUAGE_TYPE, LANGUAGE_MODEL)),
            *tower_rules(model, self.tower_names),
            Same(f"{ADAPTER}.project.weight", "model.embed_vision.embedding_projection.weight"),
        )

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()
