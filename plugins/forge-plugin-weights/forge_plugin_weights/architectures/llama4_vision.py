"""Llama 4 with its tower: tiles of one size with a rotary encoding, and joined patches through four matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.llama4 import Llama4Text
from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, Part, Rule, Shapes, Unsupported
from forge_plugin_weights.pixels import ENCODER, Pixels
from forge_plugin_weights.rules import RotaryRows, Same, some_rows

LANGUAGE_TYPE, LANGUAGE_MODEL = "llama4_text", Llama4Text()
BLOCK: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Modules of a block: ours, theirs, but for queries and keys, whose rows are reordered."""
ENDS: Mapping[str, str] = {
    "patch.weight": "patch_embedding.linear.weight",
    "class_token": "class_embedding",
    "pre_norm.{tensor}": "layernorm_pre.{tensor}",
    "norm.{tensor}": "layernorm_post.{tensor}",
}
"""Tensors before and after the blocks, likewise."""
PROJECTOR: Mapping[str, str] = {
    "hidden.0.weight": "vision_model.vision_adapter.mlp.fc1.weight",
    "hidden.1.weight": "vision_model.vision_adapter.mlp.fc2.weight",
    "project.weight": "multi_modal_projector.linear_1.weight",
}


@frozen
class FirstIsLast:
    """A table (1 + P, W) whose first row is the last one there: the position of the class token."""

    ours: str
    theirs: str

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns two parts, the positions of patches and the class token's."""
        if name != self.ours:
            return ()
        shape = shapes[name]
        last = shape[0] - 1
        return [some_rows(name, self.theirs, shape, rows) for rows in ((1, last, 0, 1), (0, 1, last, 1))]


@frozen
class Sides(Field):
    """`image_size` and `patch_size`: a number, or height and width of a square."""

    @property
    def keys(self) -> Collection[str]:
        return ("image_size", "patch_size")

    def read(self, config: Config) -> Flat:
        """Reads squares of whole patches, which the class needs for its encoding and its joined patches."""
        size, patch = (_side(config, key, default) for key, default in (("image_size", 448), ("patch_size", 14)))
        if size % patch:
            raise Unsupported(f"image_size = {size}, which patch_size = {patch} does not divide")
        return {f"{ENCODER}.size": [size, size], f"{ENCODER}.patch": patch}

    def write(self, model: Flat) -> Config:
        """Writes numbers; raises `Unsupported` for images that are no squares of patches."""
        size = list(setting(model, f"{ENCODER}.size"))
        if size[0] != size[1] or model.get(f"{ENCODER}.pixels"):
            raise Unsupported(f"{ENCODER}.size = {size}, where it is a square of whole patches always")
        return {"image_size": size[0], "patch_size": setting(model, f"{ENCODER}.patch")}


def _side(config: Config, key: str, default: int) -> int:
    given = value_of(config, key, default)
    sides = {given} if isinstance(given, int) else {*given}
    if len(sides) != 1:
        raise Unsupported(f"{key} = {given!r}; images and patches are squares")
    return int(sides.pop())


@frozen
class Base(Field):
    """`rope_theta`, or `rope_parameters` with it: the base of the encoding of columns and rows."""

    @property
    def keys(self) -> Collection[str]:
        return ("rope_theta", "rope_parameters")

    def read(self, config: Config) -> Flat:
        """Reads the base, of which the table has precedence; raises `Unsupported` for what the class ignores."""
        table = dict(config.get("rope_parameters") or {})
        theta = table.pop("rope_theta", None) or value_of(config, "rope_theta", 10000.0)
        if (type_ := table.pop("rope_type", table.pop("type", "default"))) != "default" or table:
            raise Unsupported(f"rope_parameters = {config['rope_parameters']}; Forge has rope_theta with {type_!r}")
        return {f"{ENCODER}.rotary_theta": theta}

    def write(self, model: Flat) -> Config:
        """Writes both forms; raises `Unsupported` for 0, since the class has the encoding always."""
        if not (theta := setting(model, f"{ENCODER}.rotary_theta")):
            raise Unsupported(f"{ENCODER}.rotary_theta = {theta}, where there is such an encoding always")
        return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


@frozen
class Widths(Field):
    """Widths of the matrices behind the tower, and the patches along a side that they join.

    The first is applied to joined patches, and has as many columns as the feed-forward part is wide; the second is
    square. So `intermediate_size` and the three widths follow from two numbers.
    """

    @property
    def keys(self) -> Collection[str]:
        return (
            *("pixel_shuffle_ratio", "intermediate_size", "vision_output_dim"),
            *("projector_input_dim", "projector_output_dim"),
        )

    def read(self, config: Config) -> Flat:
        """Reads the patches along a side; raises `Unsupported` for widths with which the class cannot compute."""
        ratio, dim = value_of(config, "pixel_shuffle_ratio", 0.5), value_of(config, "hidden_size", 768)
        if not ratio or 1 / ratio != (factor := round(1 / ratio)):
            raise Unsupported(f"pixel_shuffle_ratio = {ratio!r}, which is not one by a whole number")
        hidden = value_of(config, "intermediate_size", 5632)
        if hidden != factor**2 * dim:
            message = f"intermediate_size = {hidden}, and hidden_size / pixel_shuffle_ratio² = {factor**2 * dim}"
            raise Unsupported(f"{message}; the class has one width for both")
        defaults = {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680}
        widths = {key: value_of(config, key, default) for key, default in defaults.items()}
        if len({*widths.values()}) > 1:
            named = ", ".join(f"{key} = {value}" for key, value in widths.items())
            raise Unsupported(f"{named}; the class needs one width for all of them")
        width = widths["vision_output_dim"]
        return {f"{ENCODER}.hidden": hidden, f"{ADAPTER}.factor": factor, f"{ADAPTER}.hidden": [width, width]}

    def write(self, model: Flat) -> Config:
        """Writes all keys; raises `Unsupported` for widths that they cannot express."""
        factor, widths = setting(model, f"{ADAPTER}.factor"), [*setting(model, f"{ADAPTER}.hidden")]
        hidden, needed = setting(model, f"{ENCODER}.hidden"), factor**2 * setting(model, f"{ENCODER}.dim")
        if hidden != needed:
            raise Unsupported(f"{ENCODER}.hidden = {hidden}, where it is {needed} with {ADAPTER}.factor = {factor}")
        if len(widths) != 2 or widths[0] != widths[1]:
            raise Unsupported(f"{ADAPTER}.hidden = {widths}, where there are two equal widths always")
        keys = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
        return {
            "pixel_shuffle_ratio": 1 / factor,
            "intermediate_size": hidden,
            **dict.fromkeys(keys, widths[0]),
        }

    def resolve(self, model: Flat) -> Flat:
        """Returns the width of a feed-forward part for 0."""
        hidden = f"{ENCODER}.hidden"
        return {hidden: 4 * model[f"{ENCODER}.dim"]} if model.get(hidden) == 0 and f"{ENCODER}.dim" in model else {}


@frozen(kw_only=True)
class Llama4Vision(Tower):
    """Llama 4's tower, which is published with a language model only."""

    name = "Llama4VisionModel"
    harmless = OF_EVERY_MODEL

    def tower(self) -> Sequence[Field]:
        """Returns the keys; the class computes with its own activation and epsilon, whatever its keys are."""
        fixed = {"type": f"{VISION}/vit", "class_token": True, "pre_norm": True, "patch_bias": False, "norm": True}
        fixed |= {"activation": "gelu", "eps": 1e-5, "position_interpolation": "none", "select_layer": -1}
        return (
            Fixed({f"{ENCODER}.{key}": value for key, value in fixed.items()}),
            Key("hidden_size", f"{ENCODER}.dim", 768),
            Key("num_hidden_layers", f"{ENCODER}.layers", 34),
            Key("num_attention_heads", f"{ENCODER}.heads", 16),
            Sides(),
            Base(),
            Widths(),
            Only("hidden_act", "gelu", "the class has no other"),
            Only("norm_eps", 1e-5, "the class has no other"),
            Only("num_channels", 3, "images are red, green and blue"),
            Only("multi_modal_projector_bias", False, "the class has none"),
            Only("vision_feature_layer", -1, "features come from the last layer"),
            Only("vision_feature_select_strategy", "default", "the class token is no feature"),
            Dropout("attention_dropout"),
            Dropout("projector_dropout"),
            Pixels(
                processor="Llama4",
                resample=2,
                known=("resize_to_max_canvas",),
                written={"size": {"height": ..., "width": ...}, "max_patches": 16, "resize_to_max_canvas": False},
            ),
        )


def tower_rules(model: Flat, prefix: str) -> Sequence[Rule]:
    """Returns the names of the tower's tensors, which begin with `prefix` there."""
    layer, there = f"{ENCODER}.blocks.{{layer}}", f"{prefix}model.layers.{{layer}}"
    width = model[f"{ENCODER}.dim"] // model[f"{ENCODER}.heads"]
    return (
        *(Same(f"{ENCODER}.{ours}", f"{prefix}{theirs}") for ours, theirs in ENDS.items()),
        FirstIsLast(f"{ENCODER}.positions.weight", f"{prefix}positional_embedding_vlm"),
        *(
            RotaryRows(
                f"{layer}.{name}.{{tensor}}", f"{there}.self_attn.{name}_proj.{{tensor}}", width=width, rotated=width
            )
            for name in "qk"
        ),
        *(Same(f"{layer}.{ours}.{{tensor}}", f"{there}.{theirs}.{{tensor}}") for ours, theirs in BLOCK.items()),
    )


TOKENS: Mapping[str, str] = {
    "image_token_index": "<|patch|>",
    "boi_token_index": "<|image_start|>",
    "eoi_token_index": "<|image_end|>",
}
"""Keys with ids of tokens. `<|image|>` stands for an image in a prompt, and for its overview in what becomes of it."""


@frozen(kw_only=True)
class Llama4(VisionLanguageModel):
    """Llama 4 Scout and Maverick."""

    name = "Llama4ForConditionalGeneration"
    harmless = (*TOKENS,)
    kept = (*TOKENS,)
    marks = TOKENS
    body, head, tower_names = "language_model.model.", "language_model.", "vision_model."
    towers: ClassVar[Mapping[str, Tower]] = {"llama4_vision_model": Llama4Vision()}

    def processor_settings(self, config: Config) -> Mapping[str, Any]:
        """Returns what `Llama4Processor` needs to count the tokens of an image."""
        tower = config["vision_config"]
        return {
            "processor_class": "Llama4Processor",
            "patch_size": tower["patch_size"],
            "pixel_shuffle_ratio": tower["pixel_shuffle_ratio"],
        }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both tables; features are all patches of the last layer."""
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            LanguageTable(default=LANGUAGE_TYPE, only=LANGUAGE_MODEL),
            Fixed({f"{ADAPTER}.type": f"{VISION}/pixel_shuffle", f"{ADAPTER}.bias": False}),
            VisionTable(towers=self.towers),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of language model, tower and projector."""
        return (
            *language_rules(model, self.body, self.head, (LANGUAGE_TYPE, LANGUAGE_MODEL)),
            *tower_rules(model, self.tower_names),
            *(Same(f"{ADAPTER}.{ours}", theirs) for ours, theirs in PROJECTOR.items()),
        )

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()
