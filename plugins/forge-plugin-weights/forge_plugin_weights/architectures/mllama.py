"""Llama 3.2 Vision: a tower of tiles, and gated cross-attention between the layers of a Llama."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import ACTIVATIONS, OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import (
    LANGUAGE,
    TEXT,
    LanguageTable,
    Renamed,
    VisionTable,
    check_head,
    language_of,
    languages,
    read_table,
)
from forge_plugin_weights.fields import Choice, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.keys_by_layer import ABSENT
from forge_plugin_weights.kinds import TIED, Config, Field, Filler, Flat, InnerTable, Rule, Unsupported
from forge_plugin_weights.pixels import ENCODER, TiledPixels
from forge_plugin_weights.rules import Convolution, Rows, Same
from forge_plugin_weights.tables import all_fields

FUSION = "fusion"
MARKERS = 8
"""Rows of its table of embeddings after the rows of the vocabulary."""
ARRANGEMENTS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
CROSS, DEPTH = "cross_attention_layers", "num_hidden_layers"
BLOCK: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Modules of a block of the tower: ours, theirs."""
ENDS: Mapping[str, str] = {
    "class_token": "class_embedding",
    "before.weight": "pre_tile_positional_embedding.embedding.weight",
    "before.gate.weight": "pre_tile_positional_embedding.gate",
    "after.weight": "post_tile_positional_embedding.embedding.weight",
    "after.gate.weight": "post_tile_positional_embedding.gate",
    "positions.weight": "gated_positional_embedding.embedding",
    "positions.tiles.weight": "gated_positional_embedding.tile_embedding.weight",
    "positions.tiles.gate.weight": "gated_positional_embedding.gate",
    "pre_norm.{tensor}": "layernorm_pre.{tensor}",
    "norm.{tensor}": "layernorm_post.{tensor}",
}
"""Tensors of the tower outside of blocks, likewise."""
CROSS_BLOCK: Mapping[str, str] = {
    **{f"attention.{matrix}.weight": f"cross_attn.{matrix}_proj.weight" for matrix in "qkvo"},
    "attention.q_norm.weight": "cross_attn.q_norm.weight",
    "attention.k_norm.weight": "cross_attn.k_norm.weight",
    "attention_gate.weight": "cross_attn_attn_gate",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
    "ffn_gate.weight": "cross_attn_mlp_gate",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
"""Tensors of a block of cross-attention, likewise."""


@frozen
class Arrangements(Field):
    """`supported_aspect_ratios` (rows and columns of tiles, in spite of the name) and `max_num_tiles`."""

    @property
    def keys(self) -> Collection[str]:
        return ("supported_aspect_ratios", "max_num_tiles")

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` unless `max_num_tiles` is the size of the largest arrangement."""
        pairs = [list(pair) for pair in value_of(config, "supported_aspect_ratios", ARRANGEMENTS)]
        most, named = max(rows * columns for rows, columns in pairs), value_of(config, "max_num_tiles", 4)
        if most != named:
            raise Unsupported(f"max_num_tiles = {named}, and supported_aspect_ratios have up to {most} tiles")
        return {f"{ENCODER}.arrangements": pairs}

    def write(self, model: Flat) -> Config:
        """Writes both keys, the second by the first."""
        pairs = [list(pair) for pair in setting(model, f"{ENCODER}.arrangements")]
        return {"supported_aspect_ratios": pairs, "max_num_tiles": max(rows * columns for rows, columns in pairs)}


@frozen
class Intermediate(Field):
    """`intermediate_layers_indices`, and the width of features that follows from it."""

    @property
    def keys(self) -> Collection[str]:
        return ("intermediate_layers_indices", "vision_output_dim")

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` for a block that is not there or named twice, and for any other width."""
        numbers = list(value_of(config, "intermediate_layers_indices", (3, 7, 15, 23, 30)))
        layers = value_of(config, DEPTH, 32)
        if any(not 0 <= number < layers for number in numbers) or len({*numbers}) < len(numbers):
            raise Unsupported(f"intermediate_layers_indices = {numbers}; Forge takes each of {layers} blocks once")
        width = value_of(config, "hidden_size", 1280) * (1 + len(numbers))
        if (given := value_of(config, "vision_output_dim", 7680)) != width:
            raise Unsupported(f"vision_output_dim = {given}, and the features of these blocks have {width}")
        return {f"{ENCODER}.intermediate": numbers}

    def write(self, model: Flat) -> Config:
        """Writes the blocks, and the width: a hidden state of each, and the last one."""
        numbers = list(setting(model, f"{ENCODER}.intermediate"))
        width = setting(model, f"{ENCODER}.dim") * (1 + len(numbers))
        return {"intermediate_layers_indices": numbers, "vision_output_dim": width}


@frozen
class TowerBlock:
    """A tensor of a block of the tower, whose first `layers` blocks and those behind are two lists there."""

    ours: str
    theirs: str
    prefix: str
    layers: int

    def parts(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Any]:
        """Returns the part in `transformer`, or from block `layers` on in `global_transformer`."""

        def rename(theirs: str) -> str:
            # The name begins with the block's number, which decides on the list.
            number = int(theirs.split(".", maxsplit=1)[0])
            own = theirs.removeprefix(f"{number}.")
            if number < self.layers:
                return f"{self.prefix}transformer.layers.{number}.{own}"
            return f"{self.prefix}global_transformer.layers.{number - self.layers}.{own}"

        rule = Same(f"{ENCODER}.blocks.{{layer}}.{self.ours}", f"{{layer}}.{self.theirs}")
        return Renamed(rule, rename).parts(name, shapes)


def tiled_rules(model: Flat, prefix: str) -> Sequence[Rule]:
    """Returns the names of the tower's tensors; theirs begin with `prefix`."""
    layers = model[f"{ENCODER}.layers"]
    tensors = {f"{ours}.{{tensor}}": f"{theirs}.{{tensor}}" for ours, theirs in BLOCK.items()}
    tensors |= {"attention_gate.weight": "gate_attn", "ffn_gate.weight": "gate_ffn"}
    return (
        Convolution(f"{ENCODER}.patch.weight", f"{prefix}patch_embedding.weight", side=model[f"{ENCODER}.patch"]),
        *(Same(f"{ENCODER}.{ours}", prefix + theirs) for ours, theirs in ENDS.items()),
        *(TowerBlock(ours, theirs, prefix, layers) for ours, theirs in tensors.items()),
    )


@frozen(kw_only=True)
class MllamaVision(Tower):
    """The tower of Llama 3.2 Vision."""

    name = "MllamaVisionModel"
    harmless = OF_EVERY_MODEL
    training_only = ("vision.encoder.gate_start",)
    renames = {
        r"^(model\.)?vision_model\.": "",
        r"^(model\.)?(language_model|multi_modal_projector)\.|^lm_head\.": r"other.\g<0>",
    }

    def fields(self) -> Sequence[Field]:
        """Without the key `norm` of other towers, which this encoder does not have."""
        return (Fixed({"type": f"{VISION}/vision_tower"}), *self.tower())

    def tower(self) -> Sequence[Field]:
        return (
            Fixed({f"{ENCODER}.type": f"{VISION}/tiled_vit"}),
            Key("hidden_size", f"{ENCODER}.dim", 1280),
            Key(DEPTH, f"{ENCODER}.layers", 32),
            Key("num_global_layers", f"{ENCODER}.global_layers", 8),
            Key("attention_heads", f"{ENCODER}.heads", 16, other_names=("num_attention_heads",)),
            Key("intermediate_size", f"{ENCODER}.hidden", 5120, derived=lambda model: 4 * model[f"{ENCODER}.dim"]),
            Key("patch_size", f"{ENCODER}.patch", 14),
            Key("image_size", f"{ENCODER}.tile", 448),
            Key("norm_eps", f"{ENCODER}.eps", 1e-5),
            Choice("hidden_act", ACTIVATIONS, "gelu", f"{ENCODER}.activation"),
            Only("num_channels", 3, "images are red, green and blue"),
            Arrangements(),
            Intermediate(),
            TiledPixels(processor="Mllama", resample=2),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the names of the tower alone, which have no prefix there."""
        return tiled_rules(model, "")

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of this tower is computed."""
        return ()


OF_LANGUAGE: Config = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    DEPTH: 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
}
"""Values of keys that `text_config` may lack."""
CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
UNSAID: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}
"""Keys of a Llama that this language model's table has not, and the value that they have here."""
OF_LLAMA: Mapping[str, str] = {
    "heads": "attention.heads",
    "kv_heads": "attention.kv_heads",
    "head_dim": "attention.head_dim",
    "ffn.hidden": "ffn.hidden",
    "norm.eps": "norm.eps",
    "qk_norm_eps": "norm.eps",
}
"""Keys of the fusion that are equal to keys of the language model."""
FIXED: Flat = {
    "type": "forge-plugin-cross-attention/cross_attention",
    "place": "before",
    "sees": "together",
    "gate": "tanh",
    "qk_norm": True,
    "markers": MARKERS,
    "norm.type": "forge-plugin-transformer/rmsnorm",
    "ffn.type": "forge-plugin-transformer/swiglu",
    "ffn.bias": False,
}
"""Keys of the fusion that no key of theirs specifies."""


def own_layers(crossing: Sequence[int], depth: int) -> list[int]:
    """Returns the layers of the language model alone before which a block stands.

    Args:
        crossing: numbers of the blocks among all layers, as `cross_attention_layers` has them.
        depth: all layers.
    """
    crossing = sorted(crossing)
    # So many blocks stand before it, which are no layers of the language model
    own = [number - before for before, number in enumerate(crossing)]
    # Two blocks in a row, or one behind the last layer: here each stands before a layer.
    behind = [number for number in crossing if number + 1 in crossing or not 0 <= number < depth - 1]
    if behind or len({*crossing}) < len(crossing):
        message = f"{TEXT}.{CROSS} = {crossing} of {depth} layers"
        raise Unsupported(f"{message}; Forge has blocks of cross-attention before layers of the other kind, one each")
    return own


@frozen(kw_only=True)
class CrossedLanguage(LanguageTable):
    """`text_config`: a Llama some of whose layers are cross-attention, and so the keys of `fusion` too."""

    @property
    def keys(self) -> Collection[str]:
        """With the id of images, which has to be the first row behind the vocabulary."""
        return (*super().keys, "image_token_index", "image_token_id")

    def inner(self, config: Config) -> InnerTable:
        """Returns the table as a Llama's: without layers of cross-attention, and with the defaults of this class."""
        llama = languages()["llama"]
        table: Config = {**OF_LANGUAGE, **value_of(config, TEXT, {})}
        if not table.get("rope_parameters"):
            table = {"rope_theta": 500000.0, **table}  # the default of `MllamaTextConfig`, not of Llama's
        depth = table[DEPTH] - len(value_of(table, CROSS, CROSS_LAYERS))
        table = {**table, DEPTH: depth, TIED: False}  # transformers ties nothing, regardless of the key
        own = llama.part_of({**config, TEXT: {key: value for key, value in table.items() if key != CROSS}, TIED: False})
        return InnerTable(TEXT, LANGUAGE, llama, all_fields(llama), own, ("dropout", *OF_EVERY_MODEL))

    def read(self, config: Config) -> Flat:
        """Reads a Llama and the fusion from one table, whose layers are numbered together."""
        model = read_table(self.inner(config))
        check_head(model)
        table: Config = {**OF_LANGUAGE, **value_of(config, TEXT, {})}
        crossing = own_layers(value_of(table, CROSS, CROSS_LAYERS), table[DEPTH])
        token = value_of(config, "image_token_index", config.get("image_token_id", model[f"{LANGUAGE}vocab_size"]))
        if token != model[f"{LANGUAGE}vocab_size"]:
            message = f"image_token_index = {token}, where the vocabulary has {model[f'{LANGUAGE}vocab_size']} tokens"
            raise Unsupported(f"{message}; it is the first row behind those, or Forge would take another one's")
        shared = {f"{FUSION}.{ours}": model[LANGUAGE + theirs] for ours, theirs in OF_LLAMA.items()}
        fixed = {f"{FUSION}.{path}": value for path, value in FIXED.items()}
        return {**model, **fixed, **shared, f"{FUSION}.layers": crossing}

    def write(self, model: Flat) -> Config:
        """Writes one table; raises `Unsupported` for a fusion with other sizes than its Llama."""
        own = language_of(model)
        if own.model_type != "llama":
            raise Unsupported(f"its language model is a Llama always, and this one is {own.model_type}")
        check_head(model)
        fixed = {f"{FUSION}.{path}": value for path, value in FIXED.items()}
        shared = {f"{FUSION}.{ours}": own.flat[theirs] for ours, theirs in OF_LLAMA.items()}
        for path, needed in {**fixed, **shared, f"{LANGUAGE}tie_embeddings": False}.items():
            if setting(model, path) != needed:
                raise Unsupported(f"{path} = {model[path]!r}, where it has {needed!r} always")
        config = own.config
        for key, needed in {**UNSAID, "head_dim": config["hidden_size"] // config["num_attention_heads"]}.items():
            if config.pop(key, needed) != needed:
                raise Unsupported(f"{LANGUAGE}* has another {key} than {needed!r}, which it has always")
        # Each block moves the layers behind it by one.
        crossing = [layer + number for number, layer in enumerate(sorted(setting(model, f"{FUSION}.layers")))]
        table = {**config, "model_type": "mllama_text_model", DEPTH: config[DEPTH] + len(crossing), CROSS: crossing}
        return {TEXT: table, "image_token_index": config["vocab_size"]}

    def resolve(self, model: Flat) -> Flat:
        """Names the layers that have a block, in place of `every`, and derives widths from the language model."""
        changed = dict(super().resolve(model))
        known = {**model, **changed}
        if known.get(f"{FUSION}.type") != FIXED["type"]:
            return changed
        heads, depth = known[f"{FUSION}.heads"], known.get(f"{LANGUAGE}layers", 0)
        every = known.get(f"{FUSION}.every") or 4  # the default of the fusion
        layers = known.get(f"{FUSION}.layers") or range(every - 1, depth, every)
        return {
            **changed,
            f"{FUSION}.every": ABSENT,  # `layers` has what it stands for
            f"{FUSION}.layers": sorted(layers),
            f"{FUSION}.kv_heads": known[f"{FUSION}.kv_heads"] or heads,
            f"{FUSION}.head_dim": known[f"{FUSION}.head_dim"] or known.get(f"{LANGUAGE}dim", 0) // heads,
            f"{FUSION}.ffn.hidden": known.get(f"{FUSION}.ffn.hidden") or default_hidden(known.get(f"{LANGUAGE}dim", 0)),
        }


@frozen
class Renumbered:
    """A rule of the language model, whose layers are renumbered, since cross-attention layers are counted too."""

    rule: Rule
    crossing: Sequence[int]
    """Layers before which a block stands."""
    body: str
    head: str

    def parts(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Any]:
        """None for the embedding, which `Mllama.rules` joins with the rows of images."""
        if name == "embedding.weight":  # its rows and the rows of images are one table there
            return ()
        return Renamed(self.rule, self._renamed).parts(name, shapes)

    def _renamed(self, name: str) -> str:
        first, _, rest = name.partition(".")
        if first == "lm_head":
            return f"{self.head}lm_head.{rest}"
        moved = re.sub(r"^layers\.(\d+)", lambda match: f"layers.{self._number(int(match[1]))}", rest)
        return self.body + moved

    def _number(self, layer: int) -> int:
        # A block stands before its layer, which has moved by it as well
        return layer + sum(other <= layer for other in self.crossing)


@frozen(kw_only=True)
class Mllama(VisionLanguageModel):
    """Llama 3.2 Vision (Grattafiori et al. 2024, section 7.2)."""

    name = "MllamaForConditionalGeneration"
    training_only = (*VisionLanguageModel.training_only, "vision.encoder.gate_start", "fusion.gate_start")
    body, head, tower_names = "language_model.model.", "language_model.", "vision_model."
    renames = {
        r"^model\.language_model\.(?!model\.)": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
        r"^model\.(vision_model|multi_modal_projector)\.": r"\1.",
    }

    def placeholders_from(self, config: Config) -> int:
        """Returns the size of the vocabulary: the head has no row for the 8 markers behind it."""
        size: int = value_of(value_of(config, TEXT, {}), "vocab_size", OF_LANGUAGE["vocab_size"])
        return size

    def fields(self) -> Sequence[Field]:
        return (
            Fixed({"type": WHOLE}),
            CrossedLanguage(),
            VisionTable(towers={"mllama_vision_model": MllamaVision()}),
            Fixed({f"{ADAPTER}.type": f"{VISION}/linear", f"{ADAPTER}.bias": True}),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; both kinds of layers are numbered together there, and apart here."""
        own, crossing = language_of(model), sorted(model[f"{FUSION}.layers"])
        numbers = {layer: layer + number for number, layer in enumerate(crossing)}
        blocks = [
            Same(f"layers.{layer}.cross_attention.{ours}", f"{self.body}layers.{number}.{theirs}")
            for layer, number in numbers.items()
            for ours, theirs in CROSS_BLOCK.items()
        ]
        return (
            *(Renumbered(rule, crossing, self.body, self.head) for rule in own.architecture.rules(own.flat)),
            Rows(("embedding.weight", "markers.table.weight"), f"{self.body}embed_tokens.weight"),
            *blocks,
            *tiled_rules(model, self.tower_names),
            Same(f"{ADAPTER}.project.{{tensor}}", "multi_modal_projector.{tensor}"),
        )

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()
