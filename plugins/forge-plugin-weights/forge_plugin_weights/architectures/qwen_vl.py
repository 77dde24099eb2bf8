"""Qwen2.5-VL and Qwen3-VL, the latter with experts or without: images and videos of any size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isqrt
from typing import Any, ClassVar

from attrs import frozen

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_weights.architectures.dense import (
    ATTENTION,
    ENDS,
    EPS_OF_ALL,
    FFN,
    NORMS,
    QK_NORM,
    Dense,
    all_biases,
    attention_fields,
    dense_fields,
    shape_fields,
    tied_head,
)
from forge_plugin_weights.architectures.experts import BALANCE, dense_layers, router_fields
from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import LANGUAGE, TEXT, LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Converted, Derived, Fixed, Key, Only, Rope, RopeType, setting, value_of
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Filler, Flat, Rule, Shapes, Unsupported
from forge_plugin_weights.layer_fields import FULL
from forge_plugin_weights.pixels import CLIP_MEAN, CLIP_STD, ENCODER, AreaPixels
from forge_plugin_weights.rules import Columns, Convolution, Same, StackedRows, Transposed

GATE_UP = "mlp.experts.gate_up_proj"
"""End of the name of a layer's experts, but for their down projections."""
MROPE = f"{VISION}/mrope"
SECTIONS, TURNS = "mrope_section", "mrope_interleaved"
DEEPSTACK, DEEPSTACK_ADAPTER = "fusion.deepstack", "fusion.deepstack_adapter"
EPS = 1e-6
"""Of all norms of the towers and mergers; no key specifies it."""
TOKENS: Mapping[str, str] = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Keys with the ids of tokens, which published models have beside the tables, and the tokens."""
RATE: Mapping[str, Any] = {"fps": 2.0, "max_frames": 768}
"""Frames of a video, as the published processors choose them."""
TIME_OF_FRAME = "<{seconds:.1f} seconds><|vision_start|>{frame}<|vision_end|>"
"""What Qwen3-VL reads before and around each frame."""
OUTSIDE = frozenset(
    (
        *TOKENS,
        *("vision_token_id", "vision_config", "model_type", "architectures", "tie_word_embeddings"),
        *("torch_dtype", "dtype", "transformers_version", "quantization_config", "preprocessor_config"),
    )
)
"""Keys that stand beside `text_config` where there is one; the first files have all others beside them, too."""


# --- the language model ------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class SpatialRope(Rope):
    """The position encoding of frame, row and column: the text's encoding, and how many pairs turn with each."""

    types: Mapping[str, RopeType] = {"default": RopeType(component=MROPE)}
    sections: tuple[int, int, int]
    """Where the configuration does not say them."""
    interleaved: bool

    def read(self, config: Config) -> Flat:
        """Reads the sections from either form, and the rest as a plain encoding."""
        tables = {key: dict(config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key)}  # copies
        sections, turns = self.sections, self.interleaved
        for table in tables.values():
            sections, turns = table.pop(SECTIONS, sections), table.pop(TURNS, turns)
            # The name of old files for a plain encoding with sections
            for key in ("type", "rope_type"):
                if table.get(key) == "mrope":
                    table[key] = "default"
        if turns != self.interleaved:
            raise Unsupported(f"{TURNS} = {turns!r}, where it is {self.interleaved} always")
        own = {f"{self.path}.sections": list(sections), f"{self.path}.interleaved": self.interleaved}
        return {**super().read({**config, **tables}), **own}

    def write(self, model: Flat) -> Config:
        """Writes a plain encoding in both forms, and the sections in each."""
        if (turns := setting(model, f"{self.path}.interleaved")) != self.interleaved:
            raise Unsupported(f"{self.path}.interleaved = {turns!r}, where it is {self.interleaved} always")
        config = dict(super().write(model))
        own = {SECTIONS: list(setting(model, f"{self.path}.sections")), **({TURNS: True} if self.interleaved else {})}
        # Both forms, since programs know one of them: the first one has the sections there.
        return {
            **config,
            "rope_scaling": {"rope_type": "default", **own},
            "rope_parameters": config["rope_parameters"] | own,
        }


@frozen
class NoWindows(Field):
    """`use_sliding_window` and `layer_types`: all layers see the whole sequence, as in all that is published."""

    @property
    def keys(self) -> Collection[str]:
        return ("use_sliding_window", "layer_types")

    def read(self, config: Config) -> Flat:
        """Raises `Unsupported` if a layer has a window."""
        types = config.get("layer_types") or []
        if config.get("use_sliding_window") or any(type_ != FULL for type_ in types):
            raise Unsupported("use_sliding_window or layer_types gives layers windows; Forge has none here")
        return {"attention.window": 0}

    def write(self, model: Flat) -> Config:
        """Writes the switch, by which `layer_types` has full attention in every layer."""
        if window := setting(model, "attention.window"):
            raise Unsupported(f"attention.window = {window!r}, where there is none")
        return {"use_sliding_window": False}


@frozen
class WidthByHeads(Field):
    """The width of a head, which follows from the model's width; `head_dim`, if it is there, must be equal to it."""

    @property
    def keys(self) -> Collection[str]:
        return ("head_dim",)

    @property
    def written(self) -> Collection[str]:
        """Empty: no export has `head_dim`, since `Qwen2_5_VLAttention` ignores it."""
        return ()

    def read(self, config: Config) -> Flat:
        """Divides the width by the heads; raises `Unsupported` for a `head_dim` that differs from that."""
        width = value_of(config, "hidden_size", 8192) // value_of(config, "num_attention_heads", 64)
        if (given := value_of(config, "head_dim", width)) != width:
            raise Unsupported(f"head_dim = {given}, where it is hidden_size / num_attention_heads = {width} always")
        return {"attention.head_dim": width}

    def write(self, model: Flat) -> Config:
        """Writes nothing; raises `Unsupported` for another width of heads."""
        width = setting(model, "dim") // setting(model, "attention.heads")
        if (given := setting(model, "attention.head_dim")) != width:
            raise Unsupported(f"attention.head_dim = {given}, where it is dim / attention.heads = {width} always")
        return {}


@frozen(kw_only=True)
class Qwen25Text(Dense):
    """The language model of Qwen2.5-VL: Qwen2 with another position encoding."""

    name = "Qwen2_5_VLTextModel"
    # The first two have no effect, as `NoWindows` refuses windows.
    harmless = ("sliding_window", "max_window_layers", "vision_token_id")
    training_only = ("attention.rope.positions_per_second",)  # said by the tower's table
    defaults: ClassVar[Config] = {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }

    def fields(self) -> Sequence[Field]:
        """Returns the keys of Qwen2, but for windows, and with heads that divide the width."""
        rope = SpatialRope(theta=1e6, sections=(16, 24, 24), interleaved=False)
        # Without the key `head_dim`, which `WidthByHeads` handles
        heads = [
            each
            for each in attention_fields(kv_heads=8, rope=rope)
            if not (isinstance(each, Key) and each.theirs == "head_dim")
        ]
        return dense_fields(
            heads,
            Derived("attention.head_dim", lambda model: model["dim"] // model["attention.heads"]),
            WidthByHeads(),
            NoWindows(),
            Fixed({"attention.rope.time": "seconds", "attention.bias": True, "attention.output_bias": False}),
            eps=1e-5,
        )


QWEN3_ROPE = SpatialRope(theta=500000.0, sections=(24, 20, 20), interleaved=True)
QWEN3_ATTENTION = Fixed({"attention.rope.time": "apart", "attention.qk_norm": True, "attention.window": 0})


@frozen(kw_only=True)
class Qwen3Text(Dense):
    """The language model of Qwen3-VL: Qwen3 with another position encoding."""

    name = "Qwen3VLTextModel"
    qk_norm = QK_NORM
    defaults: ClassVar[Config] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }

    def fields(self) -> Sequence[Field]:
        attention = attention_fields(head_dim=128, kv_heads=32, rope=QWEN3_ROPE)
        return dense_fields(attention, all_biases(), QWEN3_ATTENTION, eps_of=EPS_OF_ALL)


@frozen(kw_only=True)
class Qwen3MoEText(ArchitectureComponent):
    """The language model of Qwen3-VL with experts: Qwen3-MoE with another position encoding."""

    name = "Qwen3VLMoeTextModel"
    harmless = ("output_router_logits", "router_aux_loss_coef", "sliding_window")
    training_only = BALANCE
    defaults: ClassVar[Config] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
    }

    def fields(self) -> Sequence[Field]:
        return (
            *shape_fields(),
            *attention_fields(kv_heads=16, rope=QWEN3_ROPE),
            all_biases(),
            QWEN3_ATTENTION,
            *dense_layers(),
            *router_fields(normalised=True),  # regardless of the next key, which the class ignores
            Only("norm_topk_prob", True, "weights of the chosen experts add up to 1", write_it=False),
            Key("rms_norm_eps", ("norm.eps", "attention.qk_norm_eps"), 1e-6),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; all experts of a layer are two tensors."""
        router = Same("layers.{layer}.ffn.router.weight", "model.layers.{layer}.mlp.gate.weight")
        return (*ENDS, *NORMS, *ATTENTION, *QK_NORM, *FFN, router, *self.experts(), *tied_head(model))

    def experts(self) -> Sequence[Rule]:
        """Returns the rules of experts in published files, whose matrices are transposed."""
        ours, theirs = "layers.{layer}.ffn.experts", "model.layers.{layer}.mlp.experts"
        return (
            Columns([f"{ours}.{name}.weight" for name in ("gate", "up")], f"{theirs}.gate_up_proj"),
            Transposed(f"{ours}.down.weight", f"{theirs}.down_proj"),
        )


@frozen(kw_only=True)
class Qwen3MoETextSaved(Qwen3MoEText):
    """The same, of files that `transformers` 5 has saved, where no matrix of an expert is transposed."""

    def experts(self) -> Sequence[Rule]:
        ours, theirs = "layers.{layer}.ffn.experts", "model.layers.{layer}.mlp.experts"
        return (
            StackedRows([f"{ours}.{name}.weight" for name in ("gate", "up")], f"{theirs}.gate_up_proj"),
            Same(f"{ours}.down.weight", f"{theirs}.down_proj"),
        )


# --- the tower ---------------------------------------------------------------------------------------------------


@frozen
class TowerTheta(Field):
    """`rope_parameters` of the tower: the base of the encoding of rows and columns."""

    @property
    def keys(self) -> Collection[str]:
        return ("rope_parameters",)

    def read(self, config: Config) -> Flat:
        """Reads the base; raises `Unsupported` for any other key or type."""
        table = dict(value_of(config, "rope_parameters", {}))
        theta, type_ = table.pop("rope_theta", 10000.0), table.pop("rope_type", "axial")
        if table or type_ != "axial":
            raise Unsupported(
                f"rope_parameters = {config['rope_parameters']}; Forge has rope_theta with rope_type axial"
            )
        return {f"{ENCODER}.theta": theta}

    def write(self, model: Flat) -> Config:
        return {"rope_parameters": {"rope_type": "axial", "rope_theta": setting(model, f"{ENCODER}.theta")}}


@frozen
class TowerWindows(Field):
    """`window_size` in pixels, and the blocks without windows, `fullatt_block_indexes`.

    A window is a whole number of features wide, or it would be cut elsewhere.
    """

    @property
    def keys(self) -> Collection[str]:
        return ("window_size", "fullatt_block_indexes")

    def read(self, config: Config) -> Flat:
        """Reads both keys; numbers of blocks that the tower does not have are left out."""
        window, depth = value_of(config, "window_size", 112), value_of(config, "depth", 32)
        self._check(window, value_of(config, "patch_size", 14), value_of(config, "spatial_merge_size", 2))
        blocks = [number for number in value_of(config, "fullatt_block_indexes", (7, 15, 23, 31)) if number < depth]
        return {f"{ENCODER}.window": window, f"{ENCODER}.full_attention": blocks}

    def write(self, model: Flat) -> Config:
        """Writes both keys; raises `Unsupported` for a window that cuts a feature."""
        window = setting(model, f"{ENCODER}.window")
        self._check(window, setting(model, f"{ENCODER}.patch"), setting(model, f"{ADAPTER}.merge"))
        return {"window_size": window, "fullatt_block_indexes": list(setting(model, f"{ENCODER}.full_attention"))}

    def _check(self, window: int, patch: int, merge: int) -> None:
        if not window or window % (patch * merge):
            message = f"window_size = {window}, and a feature has {merge} x {merge} patches of {patch} pixels"
            raise Unsupported(f"{message}; windows are a multiple of {patch * merge}")


@frozen
class SquareTable(Field):
    """`num_position_embeddings`, the places of a square table of positions."""

    @property
    def keys(self) -> Collection[str]:
        return ("num_position_embeddings",)

    def read(self, config: Config) -> Flat:
        """Reads the side, which is the root of the number of places."""
        count = value_of(config, "num_position_embeddings", 2304)
        if (side := isqrt(count)) ** 2 != count:
            raise Unsupported(f"num_position_embeddings = {count}, which is no square")
        return {f"{ENCODER}.table": side}

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for 0: the tower of Qwen3-VL has a table always."""
        if not (side := setting(model, f"{ENCODER}.table")):
            raise Unsupported(f"{ENCODER}.table = 0, where there is one always")
        return {"num_position_embeddings": side**2}


@frozen
class DeepStack(Field):
    """`deepstack_visual_indexes`, and the adapters of these blocks, which differ from the first in their norm."""

    @property
    def keys(self) -> Collection[str]:
        return ("deepstack_visual_indexes",)

    def read(self, config: Config) -> Flat:
        """Reads the blocks, and adds the table of their adapters, which normalise squares of patches."""
        blocks = list(value_of(config, "deepstack_visual_indexes", (8, 16, 24)))
        if blocks != sorted({*blocks}):
            raise Unsupported(f"deepstack_visual_indexes = {blocks}; Forge takes blocks in ascending order, each once")
        merge = value_of(config, "spatial_merge_size", 2)
        return {DEEPSTACK: blocks, **(self._adapter(merge) if blocks else {})}

    def write(self, model: Flat) -> Config:
        """Writes the blocks; raises `Unsupported` for other adapters, which no key specifies."""
        blocks = list(setting(model, DEEPSTACK))
        for path, needed in self._adapter(setting(model, f"{ADAPTER}.merge")).items() if blocks else ():
            if setting(model, path) != needed:
                raise Unsupported(f"{path} = {model[path]!r}, where it has {needed!r} always")
        return {"deepstack_visual_indexes": blocks}

    def _adapter(self, merge: int) -> Flat:
        own = {"type": f"{VISION}/merger", "norm": "layernorm", "norm_over": "block", "merge": merge, "eps": EPS}
        return {f"{DEEPSTACK_ADAPTER}.{key}": value for key, value in own.items()}


@frozen
class OutputWidth(Field):
    """`out_hidden_size`, the language model's width."""

    @property
    def keys(self) -> Collection[str]:
        return ("out_hidden_size",)

    def write(self, model: Flat) -> Config:
        """Writes the language model's width; reading takes that from `text_config`."""
        return {"out_hidden_size": setting(model, f"{LANGUAGE}dim")}


def block_width(model: Flat) -> int:
    """Returns the width of a square of patches, which is that between the matrices of a merger."""
    return int(model.get(f"{ADAPTER}.merge", 0)) ** 2 * int(model.get(f"{ENCODER}.dim", 0))


@frozen(kw_only=True)
class QwenVision(Tower):
    """What the towers have in common, with their mergers."""

    harmless: ClassVar[Collection[str]] = (*OF_EVERY_MODEL, "spatial_patch_size")

    def shared(self, *, dim: int, depth: int, hidden: int, patch: int, norm: str, gated: bool) -> Sequence[Field]:
        """Returns the keys that both have; the arguments are defaults, and settings that no key specifies."""
        width = default_hidden if gated else lambda dim: 4 * dim
        fixed = {"type": f"{VISION}/qwen_vit", "norm": norm, "ffn": "swiglu" if gated else "gelu", "eps": EPS}
        merger = {"type": f"{VISION}/merger", "norm": norm, "norm_over": "patch", "eps": EPS}
        return (
            Fixed({f"{ENCODER}.{key}": value for key, value in fixed.items()}),
            Fixed({f"{ADAPTER}.{key}": value for key, value in merger.items()}),
            Key("hidden_size", f"{ENCODER}.dim", dim),
            Key("depth", f"{ENCODER}.layers", depth, other_names=("num_hidden_layers",)),
            Key("num_heads", f"{ENCODER}.heads", 16, other_names=("num_attention_heads",)),
            Key("intermediate_size", f"{ENCODER}.hidden", hidden, derived=lambda model: width(model[f"{ENCODER}.dim"])),
            Key("patch_size", f"{ENCODER}.patch", patch),
            Key("temporal_patch_size", f"{ENCODER}.frames", 2),
            Key("spatial_merge_size", f"{ADAPTER}.merge", 2),
            Only("in_channels", 3, "images are red, green and blue"),
            Only("in_chans", 3, "images are red, green and blue", write_it=False),  # in published files
            Only("hidden_act", "silu" if gated else "gelu_pytorch_tanh", "the tower has no other"),
            Derived(f"{ADAPTER}.hidden", block_width),
            OutputWidth(),
            TowerTheta(),
        )


def whole_rate(rate: float) -> int:
    """Returns the positions of a second as `tokens_per_second` has them."""
    if rate != int(rate):
        raise Unsupported(f"{LANGUAGE}attention.rope.positions_per_second = {rate}, which is a whole number there")
    return int(rate)


@frozen(kw_only=True)
class Qwen25Vision(QwenVision):
    """The tower of Qwen2.5-VL, with windows."""

    name = "Qwen2_5_VisionTransformerPretrainedModel"

    def tower(self) -> Sequence[Field]:
        """Returns the keys; positions of a second are a key of the tower there, and of the language model here."""
        return (
            *self.shared(dim=3584, depth=32, hidden=3420, patch=14, norm="rmsnorm", gated=True),
            Fixed({f"{ENCODER}.patch_bias": False, f"{ENCODER}.table": 0, DEEPSTACK: []}),
            TowerWindows(),
            Converted("tokens_per_second", f"{LANGUAGE}attention.rope.positions_per_second", float, whole_rate, 4),
            AreaPixels(processor="Qwen2VL", mean=CLIP_MEAN, std=CLIP_STD, bounds=(56 * 56, 28 * 28 * 1280)),
        )


@frozen(kw_only=True)
class Qwen3Vision(QwenVision):
    """The tower of Qwen3-VL, with a table of positions and DeepStack."""

    name = "Qwen3VLVisionModel"

    def tower(self) -> Sequence[Field]:
        """Returns the keys; the default table has 48 x 48 places, for images of any size."""
        return (
            *self.shared(dim=1152, depth=27, hidden=4304, patch=16, norm="layernorm", gated=False),
            Fixed({f"{ENCODER}.patch_bias": True, f"{ENCODER}.window": 0, f"{ENCODER}.full_attention": []}),
            SquareTable(),
            *self.deepstack(),
            AreaPixels(processor="Qwen2VL", bounds=(256 * 256, 4096 * 4096)),
        )

    def deepstack(self) -> Sequence[Field]:
        """Returns the keys of features that the first layers of the language model get from further blocks."""
        return DeepStack(), Derived(f"{DEEPSTACK_ADAPTER}.hidden", block_width)


# --- the whole ---------------------------------------------------------------------------------------------------


@frozen
class Room(Field):
    """What a sequence has room for, which a table for images of any size must say: a long video, or some images."""

    patches: int = 16384

    def read(self, config: Config) -> Flat:
        """Returns defaults, which no key of theirs has; a job changes them for its data."""
        return {"vision.images_per_sequence": 16, "vision.patches_per_sequence": self.patches}


@frozen(kw_only=True)
class QwenVL(VisionLanguageModel):
    """What Qwen2.5-VL and Qwen3-VL have in common."""

    harmless = (*TOKENS, "vision_token_id", "vocab_size")
    kept = (*TOKENS, "vision_token_id")
    image_token = "image_token_id"
    marks = {key: token for key, token in TOKENS.items() if key != "image_token_id"}
    family: ClassVar[Any]
    """The name of its table in `forge_plugin_vision.qwen_names`."""
    language: ClassVar[LanguageTable]
    towers: ClassVar[Mapping[str, Tower]]

    def part_of(self, config: Config) -> Config:
        """Puts the keys of the language model, which the first files have outside, into `text_config`.

        Raises:
            JobError: the table is there, and a key outside differs from the one in it.
        """
        outside = {key: value for key, value in config.items() if key in OUTSIDE}
        inner = {key: value for key, value in config.items() if key not in OUTSIDE}
        if TEXT not in config:
            return {**outside, TEXT: inner}
        table = inner.pop(TEXT)
        # Versions 4.52 to 4.56 of transformers write all keys twice, and read the ones of the table.
        unused = set() if table.get("use_sliding_window") else {"sliding_window", "max_window_layers"}
        if disagreeing := [key for key in inner if key in table and key not in unused and inner[key] != table[key]]:
            raise JobError(
                Problem(key, f"{inner[key]!r}, and {TEXT}.{key} = {table[key]!r}; which of them holds is not known")
                for key in disagreeing
            )
        return {**outside, **{key: value for key, value in inner.items() if key not in table}, TEXT: table}

    def fields(self) -> Sequence[Field]:
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            self.language,
            VisionTable(towers=self.towers),
            Room(),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; the names of tower and merger are in `forge_plugin_vision.qwen_names`."""
        # Here, as the plugin is needed for these models only
        from forge_plugin_vision.qwen_names import BLOCK, FAMILIES
        from forge_plugin_vision.qwen_names import ENDS as TOWER_ENDS

        block, merger = FAMILIES[self.family]
        patch, there = TOWER_ENDS["encoder.patch"], self.tower_names
        modules = {"encoder.positions": TOWER_ENDS["encoder.positions"]}
        modules |= {
            f"encoder.blocks.{{layer}}.{ours}": f"blocks.{{layer}}.{t}" for ours, t in {**BLOCK, **block}.items()
        }
        modules |= {f"adapter.{ours}": f"merger.{theirs}" for ours, theirs in merger.items()}
        modules |= {f"deepstack.{{layer}}.{ours}": f"deepstack_merger_list.{{layer}}.{t}" for ours, t in merger.items()}
        sizes = {"side": model[f"{ENCODER}.patch"], "frames": model[f"{ENCODER}.frames"]}
        return (
            *language_rules(model, self.body, self.head, self.language.named),
            Convolution(f"{ENCODER}.patch.weight", f"{there}{patch}.weight", **sizes),
            Same(f"{ENCODER}.patch.bias", f"{there}{patch}.bias"),
            *(Same(f"vision.{ours}.{{tensor}}", f"{there}{theirs}.{{tensor}}") for ours, theirs in modules.items()),
        )

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()


@frozen(kw_only=True)
class Qwen2_5_VL(QwenVL):  # noqa: N801
    """Qwen2.5-VL (Bai et al. 2025)."""

    name = "Qwen2_5_VLForConditionalGeneration"
    family = "qwen2_5_vl"
    video_processor = "Qwen2VLVideoProcessor"
    body, tower_names = "model.", "visual."
    renames = {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."}
    # Nothing reads the ids of tokens that the table of some files has.
    language = LanguageTable(default="qwen2_5_vl_text", only=Qwen25Text(), harmless=(*TOKENS, "vision_token_id"))
    # The second is the name of towers in the first files.
    towers: ClassVar[Mapping[str, Tower]] = {name: Qwen25Vision() for name in ("qwen2_5_vl_vision", "qwen2_5_vl")}

    def videos(self, model: Flat) -> Mapping[str, Any]:
        """Frames at a rate, in groups as large as a patch; their times are in the positions."""
        sampling = {"type": "forge-plugin-images/fps", "multiple": model[f"{ENCODER}.frames"]}
        return {"timestamps": "positions", "sampling": {**sampling, **RATE}}


@frozen(kw_only=True)
class Qwen3VL(QwenVL):
    """Qwen3-VL (Bai et al. 2025)."""

    name = "Qwen3VLForConditionalGeneration"
    family = "qwen3_vl"
    video_processor = "Qwen3VLVideoProcessor"
    body, tower_names = "model.language_model.", "model.visual."
    language = LanguageTable(default="qwen3_vl_text", only=Qwen3Text())
    towers: ClassVar[Mapping[str, Tower]] = {name: Qwen3Vision() for name in ("qwen3_vl_vision", "qwen3_vl")}

    def videos(self, model: Flat) -> Mapping[str, Any]:
        """Frames spread evenly over a video; their times are text before each."""
        sampling = {"type": "forge-plugin-images/uniform", **RATE}
        return {"timestamps": "text", "timestamp_format": TIME_OF_FRAME, "sampling": sampling}


@frozen(kw_only=True)
class Qwen3VLMoE(Qwen3VL):
    """Qwen3-VL with experts."""

    name = "Qwen3VLMoeForConditionalGeneration"
    training_only = (*Qwen3VL.training_only, *(f"{LANGUAGE}{pattern}" for pattern in BALANCE))
    language = LanguageTable(default="qwen3_vl_moe_text", only=Qwen3MoEText())
    towers: ClassVar[Mapping[str, Tower]] = {name: Qwen3Vision() for name in ("qwen3_vl_moe_vision", "qwen3_vl_moe")}

    def of_files(self, shapes: Shapes) -> ArchitectureComponent:
        """Returns another class for files that `transformers` 5 has saved."""
        return Qwen3VLMoESaved() if is_saved_again(shapes) else self


@frozen(kw_only=True)
class Qwen3VLMoESaved(Qwen3VLMoE):
    """The same, of files that `transformers` 5 has saved."""

    language = LanguageTable(default="qwen3_vl_moe_text", only=Qwen3MoETextSaved())


def is_saved_again(shapes: Shapes) -> bool:
    """Whether the experts of files are as `transformers` 5 saves them, by the shapes of a layer's two tensors.

    With experts of I features in a model of width D, published files have (D, 2 I) and (I, D), and the others (2 I, D)
    and (D, I). One of the two tensors may be square, but both tensors together have no shapes of the other layout.
    """
    for name, shape in shapes.items():
        down = shapes.get(name.replace("gate_up_proj", "down_proj")) if name.endswith(GATE_UP) else None
        if down is not None:
            return shape[-2:] == (2 * down[-1], down[-2])
    return False
