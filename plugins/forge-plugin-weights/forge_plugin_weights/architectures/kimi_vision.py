"""Kimi-K2.5 with its tower, MoonViT: images of any size, and a language model like DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from forge_plugin_weights.architectures.qwen_vl import Room, TowerTheta, block_width
from forge_plugin_weights.architectures.vision_language import ADAPTER, VisionLanguageModel
from forge_plugin_weights.architectures.vision_towers import OF_EVERY_MODEL, VISION, WHOLE, Tower
from forge_plugin_weights.composites import VISION as VISION_TABLE
from forge_plugin_weights.composites import LanguageTable, VisionTable, language_rules
from forge_plugin_weights.fields import Derived, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.kinds import Config, Field, Filler, Flat, Part, Rule, Shapes, Unsupported
from forge_plugin_weights.pixels import ENCODER, TopLeftPixels
from forge_plugin_weights.rules import Convolution, Same, match, some_rows, whole

BLOCK: Mapping[str, str] = {
    "attention_norm": "norm0",
    "o": "wo",
    "ffn_norm": "norm1",
    "ffn.up": "mlp.fc0",
    "ffn.down": "mlp.fc1",
}
"""Modules of a block of the tower: ours, theirs, but for queries, keys and values."""
PROJECTOR: Mapping[str, str] = {"norm": "pre_norm", "up": "proj.0", "down": "proj.2"}
"""Modules between tower and language model, likewise."""
TOWER = "vision_tower."


@frozen(kw_only=True)
class FusedAxialRows:
    """Queries, keys and values one below the other on both sides, (3 W, ...), with rotated pairs in another order.

    In a head of E rows of queries or keys, theirs has pairs of neighbours, which turn with the column and the row in
    turns: 4 i and 4 i + 1 with the column at the rate i, 4 i + 2 and 4 i + 3 with the row. Ours has the first rows of
    all pairs of rows, then of all pairs of columns, then the second rows in the same order. Values are the same.
    """

    ours: str
    theirs: str
    heads: int

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns four parts of each head of queries and of keys, and one of all values."""
        groups = match(self.ours, name)
        if groups is None:
            return ()
        theirs, shape = self.theirs.format(**groups), shapes[name]
        total = shape[0] // 3
        width = total // self.heads
        quarter = width // 4
        turned = [
            some_rows(name, theirs, shape, (head + number * quarter, quarter, head + first, 4))
            for head in range(0, 2 * total, width)
            for number, first in enumerate((2, 0, 3, 1))
        ]
        return [*turned, some_rows(name, theirs, shape, (2 * total, total, 2 * total, 1))]


@frozen
class PositionGrid:
    """A table of positions (S², W), which theirs has as (S, S, W)."""

    ours: str
    theirs: str
    side: int

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns one part: the same numbers in the same order."""
        if name != self.ours:
            return ()
        width = shapes[name][1]
        return [
            Part(
                ours=name,
                theirs=self.theirs,
                shape=(self.side, self.side, width),
                of_ours=whole,
                of_theirs=lambda tensor: tensor.view(-1, width),
            )
        ]


@frozen(kw_only=True)
class Square(Field):
    """Two keys, or a pair in one, that are equal: both sides of a table, or of the blocks that become a feature."""

    names: Collection[str]
    ours: str
    default: int
    pair: bool = False
    """Whether it is one key with a pair."""
    other_names: Sequence[str] = ()
    """Names of the keys in the first files."""

    @property
    def keys(self) -> Collection[str]:
        return (*self.names, *self.other_names)

    @property
    def written(self) -> Collection[str]:
        """Without the names of the first files."""
        return self.names

    def read(self, config: Config) -> Flat:
        """Reads the side; raises `Unsupported` for two that differ."""
        given = [name for name in (*self.other_names, *self.names) if config.get(name) is not None]
        sides = [side for name in given for side in (config[name] if self.pair else [config[name]])]
        if len({*sides}) > 1 or (not self.pair and len(given) == 1 and sides[0] != self.default):
            named = ", ".join(f"{name} = {config[name]}" for name in given)
            raise Unsupported(f"{named}; height and width are equal")
        return {self.ours: sides[0] if sides else self.default}

    def write(self, model: Flat) -> Config:
        """Writes both sides; raises `Unsupported` for 0."""
        if not (side := setting(model, self.ours)):
            raise Unsupported(f"{self.ours} = 0, where there is one always")
        return dict.fromkeys(self.names, [side, side] if self.pair else side)


@frozen(kw_only=True)
class KimiVision(Tower):
    """MoonViT (Kimi Team 2026) for images, published with a language model only. Clips see themselves otherwise."""

    name = "Kimi_K25VisionModel"
    harmless = (*OF_EVERY_MODEL, "text_hidden_size", "mm_hidden_size", "init_pos_emb_time")

    def tower(self) -> Sequence[Field]:
        """Returns the keys, by the names of the class or of the first files."""
        fixed = {"type": f"{VISION}/qwen_vit", "norm": "layernorm", "ffn": "gelu", "eps": 1e-5, "frames": 1}
        fixed |= {"patch_bias": True, "last_norm": True, "table_interpolation": "bicubic", "window": 0, "clips": False}
        kept = "the class has no other"
        sides = ("pos_emb_height", "pos_emb_width")
        return (
            Fixed({f"{ENCODER}.{key}": value for key, value in {**fixed, "full_attention": []}.items()}),
            Key("hidden_size", f"{ENCODER}.dim", 1152, other_names=("vt_hidden_size",)),
            Key("num_hidden_layers", f"{ENCODER}.layers", 27, other_names=("vt_num_hidden_layers",)),
            Key("num_attention_heads", f"{ENCODER}.heads", 16, other_names=("vt_num_attention_heads",)),
            Key(
                "intermediate_size",
                f"{ENCODER}.hidden",
                4304,
                derived=lambda model: 4 * model[f"{ENCODER}.dim"],
                other_names=("vt_intermediate_size",),
            ),
            Key("patch_size", f"{ENCODER}.patch", 14),
            Square(names=sides, ours=f"{ENCODER}.table", default=64, other_names=[f"init_{name}" for name in sides]),
            Square(names=("merge_kernel_size",), ours=f"{ADAPTER}.merge", default=2, pair=True),
            Only("pos_emb_time", 4, "positions of frames are missing, since Forge has no clips for this tower"),
            Only("hidden_act", "gelu_pytorch_tanh", "the encoder has no other with these weights"),
            TowerTheta(),
            Only("projector_hidden_act", "gelu", kept, write_it=False),
            Only(
                "projector_ln_eps",
                1e-5,
                "projection_layer_norm_eps, beside vision_config, is the key for it",
                write_it=False,
            ),
            Only("mm_projector_type", "patchmerger", kept, write_it=False),
            Only("merge_type", "sd2_tpool", kept, write_it=False),
            Only("pos_emb_type", "divided_fixed", kept, write_it=False),
            Only("video_attn_type", "spatial_temporal", kept, write_it=False),
            TopLeftPixels(processor="Kimi_K25"),
        )


@frozen
class ProjectionWidth(Field):
    """`projection_hidden_size`, the tower's width, which the norm before the projector has."""

    @property
    def keys(self) -> Collection[str]:
        return ("projection_hidden_size",)

    def read(self, config: Config) -> Flat:
        """Returns no key: raises `Unsupported` for another width, with which the class cannot compute."""
        tower = value_of(config, VISION_TABLE, {})
        width = tower.get("vt_hidden_size") or value_of(tower, "hidden_size", 1152)
        if (given := value_of(config, "projection_hidden_size", width)) != width:
            raise Unsupported(f"projection_hidden_size = {given}, and {VISION_TABLE}.hidden_size = {width}")
        return {}

    def write(self, model: Flat) -> Config:
        return {"projection_hidden_size": setting(model, f"{ENCODER}.dim")}


def tower_rules(model: Flat) -> Sequence[Rule]:
    """Returns the names of the tensors of tower and projector."""
    layer, there = f"{ENCODER}.blocks.{{layer}}", f"{TOWER}encoder.blocks.{{layer}}"
    embed = f"{TOWER}patch_embed."
    return (
        Convolution(f"{ENCODER}.patch.weight", f"{embed}proj.weight", side=model[f"{ENCODER}.patch"]),
        Same(f"{ENCODER}.patch.bias", f"{embed}proj.bias"),
        PositionGrid(f"{ENCODER}.positions.weight", f"{embed}pos_emb.weight", model[f"{ENCODER}.table"]),
        FusedAxialRows(
            ours=f"{layer}.qkv.{{tensor}}", theirs=f"{there}.wqkv.{{tensor}}", heads=model[f"{ENCODER}.heads"]
        ),
        *(Same(f"{layer}.{ours}.{{tensor}}", f"{there}.{theirs}.{{tensor}}") for ours, theirs in BLOCK.items()),
        Same(f"{ENCODER}.last_norm.{{tensor}}", f"{TOWER}encoder.final_layernorm.{{tensor}}"),
        *(
            Same(f"{ADAPTER}.{ours}.{{tensor}}", f"mm_projector.{theirs}.{{tensor}}")
            for ours, theirs in PROJECTOR.items()
        ),
    )


TOKENS: Mapping[str, str] = {
    "image_token_id": "<|media_pad|>",
    "video_token_id": "<|kimi_k25_video_placeholder|>",
    "vision_start_token_id": "<|media_begin|>",
    "vision_end_token_id": "<|media_end|>",
}
"""Keys with ids of tokens of images and videos."""
FIRST_TOKENS = ("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "ignore_index")
"""Keys of the first files for them."""


@frozen(kw_only=True)
class KimiK25(VisionLanguageModel):
    """Kimi-K2.5 and later, for images."""

    name = "Kimi_K25ForConditionalGeneration"
    harmless = (*TOKENS, *FIRST_TOKENS, "vocab_size")
    kept = (*TOKENS, *FIRST_TOKENS)
    marks = TOKENS
    body, head, tower_names = "language_model.model.", "language_model.", TOWER
    # Names that `transformers` 5 writes where it reads the names of published files.
    renames: ClassVar[Mapping[str, str]] = {
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
        r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
        r"^model\.mm_projector\.": "mm_projector.",
    }
    towers: ClassVar[Mapping[str, Tower]] = {name: KimiVision() for name in ("kimi_k25_vision", "")}

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both tables and of the projector; images may be larger than the bound by their black."""
        merger = {"type": f"{VISION}/merger", "norm": "layernorm", "norm_over": "patch", "joined": False, "bias": True}
        return (
            Fixed({"type": WHOLE, "fusion.type": f"{VISION}/joint"}),
            LanguageTable(default="deepseek_v3"),
            VisionTable(towers=self.towers),
            Fixed({f"{ADAPTER}.{key}": value for key, value in merger.items()}),
            ProjectionWidth(),
            Key("projection_layer_norm_eps", f"{ADAPTER}.eps", 1e-5),
            Derived(f"{ADAPTER}.hidden", block_width),
            Room(18432),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules of language model, tower and projector."""
        return (*language_rules(model, self.body, self.head), *tower_rules(model))

    def fillers(self, model: Flat) -> Sequence[Filler]:
        """None: every block of the tower is computed."""
        return ()
