"""LLaVA-NeXT and LLaVA-OneVision, whose images are tiles that are joined behind the tower."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.vision_language import (
    ADAPTER,
    IMAGE_TOKEN,
    Llava,
    SelectedLayer,
    SelectedTokens,
)
from forge_plugin_weights.architectures.vision_towers import VISION, SiglipVision, Tower
from forge_plugin_weights.composites import VISION as TOWER
from forge_plugin_weights.composites import LanguageTable, VisionTable
from forge_plugin_weights.fields import Fixed, setting, value_of
from forge_plugin_weights.kinds import PIXELS, Config, Field, Flat, InnerTable, Rule, Unsupported
from forge_plugin_weights.pixels import ENCODER, PINPOINTS
from forge_plugin_weights.rules import Same

# In the order of transformers, which takes the first of arrangements that fit an image equally well
NEXT = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
ONEVISION = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
"""Rows and columns of tiles where a configuration does not say them, of 336 and of 384 pixels."""


@frozen
class Pinpoints(Field):
    """`image_grid_pinpoints`: pixels of all tiles together; rows and columns of tiles here."""

    default: Sequence[tuple[int, int]]
    tile: int
    """Side of a tile in pixels of which `default` are multiples."""

    @property
    def keys(self) -> Collection[str]:
        return (PINPOINTS,)

    def read(self, config: Config) -> Flat:
        """Divides by the side of a tile; raises `Unsupported` unless tiles are whole and square."""
        given = config.get(PINPOINTS) or [[self.tile * side for side in tiles] for tiles in self.default]
        # The default of both towers, CLIP and SigLIP
        size = value_of(value_of(config, TOWER, {}), "image_size", 224)
        if not isinstance(size, int) or any(side % size or side < size for pair in given for side in pair):
            raise Unsupported(f"{PINPOINTS} = {given} with {TOWER}.image_size = {size}; Forge has whole square tiles")
        pairs = [[side // size for side in pair] for pair in given]
        # Of equals the first is taken, so that others never are.
        return {f"{ADAPTER}.arrangements": [pair for n, pair in enumerate(pairs) if pair not in pairs[:n]]}

    def write(self, model: Flat) -> Config:
        """Multiplies by the side of a tile, which is the size of the encoder's images."""
        height, width = tile_of(model)
        return {PINPOINTS: [[rows * height, columns * width] for rows, columns in setting(model, ARRANGEMENTS)]}


ARRANGEMENTS = f"{ADAPTER}.arrangements"


def tile_of(model: Flat) -> tuple[int, int]:
    """Returns the height and width of a tile in pixels, which are equal."""
    height, width = model.get(f"{ENCODER}.pixels") or setting(model, f"{ENCODER}.size")
    if height != width:
        raise Unsupported(f"{ENCODER}.size = {[height, width]}, where tiles are squares always")
    return height, width


@frozen
class AspectRatio(Field):
    """`vision_aspect_ratio`: `anyres_max_9` shrinks what has more features than 9 tiles."""

    @property
    def keys(self) -> Collection[str]:
        return ("vision_aspect_ratio",)

    def read(self, config: Config) -> Flat:
        """Reads the number behind `anyres_max_`, which counts tiles."""
        given = value_of(config, "vision_aspect_ratio", "anyres_max_9")
        if (match := re.fullmatch(r"anyres_max_([1-9]\d*)", str(given))) is None:
            raise Unsupported(f"vision_aspect_ratio = {given!r}; Forge has anyres_max_1, anyres_max_2, …")
        return {f"{ADAPTER}.max_feature_tiles": int(match[1])}

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` for 0: `LlavaOnevisionModel` has a bound always."""
        if not (most := setting(model, f"{ADAPTER}.max_feature_tiles")):
            raise Unsupported(f"{ADAPTER}.max_feature_tiles = 0, where planes of features have a bound always")
        return {"vision_aspect_ratio": f"anyres_max_{most}"}


@frozen(kw_only=True)
class JoinedTower(VisionTable):
    """`vision_config`, and the processing of pixels, for a tower whose images are tiles of other images."""

    processor: str
    """The image processor's class, without `ImageProcessor`."""

    def inner(self, config: Config) -> InnerTable:
        """Returns the table without the processor's pinpoints, which no field of a tower reads."""
        table = super().inner(config)
        if PIXELS not in table.config:
            return table
        # The processor's value is compared with the one in `config.json` where a job's keys are made (`image_table`).
        pixels = {key: value for key, value in table.config[PIXELS].items() if key != PINPOINTS}
        return attrs.evolve(table, config={**table.config, PIXELS: pixels})

    def write(self, model: Flat) -> Config:
        """Adds to the processor's settings the size of a tile, and the pixels of all tiles together."""
        config, (height, width) = super().write(model), tile_of(model)
        pixels = {**config[PIXELS], "image_processor_type": f"{self.processor}ImageProcessor", "do_pad": True}
        # Tiles have the encoder's size already, so that nothing is cropped of them.
        pixels |= {"do_center_crop": False, "crop_size": None, "size": {"height": height, "width": width}}
        pairs = [[rows * height, columns * width] for rows, columns in setting(model, ARRANGEMENTS)]
        return {**config, PIXELS: {**pixels, PINPOINTS: pairs}}


@frozen(kw_only=True)
class LlavaNext(Llava):
    """LLaVA-NeXT (Liu et al. 2024), also known as LLaVA-1.6."""

    name = "LlavaNextForConditionalGeneration"
    harmless = (*Llava.harmless, "use_image_newline_parameter")
    renames: ClassVar[Mapping[str, str]] = {**Llava.renames, r"^model\.image_newline$": "image_newline"}
    adapter = f"{VISION}/any_resolution"
    projection = f"{ADAPTER}.projection."  # the adapter has a further tensor beside it
    processor = "LlavaNextProcessor"

    def tables(self) -> Sequence[Field]:
        """Returns the tables of any language model, and of a tower whose images are tiles."""
        return LanguageTable(), JoinedTower(towers=self.towers, processor="LlavaNext")

    def chosen(self) -> Sequence[Field]:
        """Adds the arrangements, and fixes the settings of features that LLaVA-OneVision alone has."""
        return (
            *super().chosen(),
            Pinpoints(NEXT, 336),
            Fixed({f"{ADAPTER}.max_feature_tiles": 0, f"{ADAPTER}.frame_pool": 1}),
        )

    def adapter_rules(self) -> Sequence[Rule]:
        """Adds the vector that ends each row of features, which is no part of the projector there."""
        return [*super().adapter_rules(), Same(f"{ADAPTER}.newline", "image_newline")]


@frozen(kw_only=True)
class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision (Li et al. 2024): SigLIP, and any language model; images, several images and videos."""

    name = "LlavaOnevisionForConditionalGeneration"
    harmless = (*LlavaNext.harmless, "video_token_index", "video_token_id")
    kept = ("image_token_index", "image_token_id", "video_token_index", "video_token_id")
    marks: ClassVar[Mapping[str, str]] = {"video_token_index": "<video>"}
    video_processor = "LlavaOnevisionVideoProcessor"
    towers: ClassVar[Mapping[str, Tower]] = {"siglip_vision_model": SiglipVision()}
    processor = "LlavaOnevisionProcessor"

    def tables(self) -> Sequence[Field]:
        """Returns the tables; the language model is a Qwen2 where its table names none."""
        return LanguageTable(default="qwen2"), JoinedTower(towers=self.towers, processor="LlavaOnevision")

    def chosen(self) -> Sequence[Field]:
        """Returns the keys: all patches of the last layer, tiles up to 6 x 6, and frames of videos pooled by 2."""
        return (
            SelectedLayer(-1),
            SelectedTokens("full", "siglip_vision_model"),
            Pinpoints(ONEVISION, 384),
            AspectRatio(),
            Fixed({f"{ADAPTER}.frame_pool": 2}),
        )

    def processor_settings(self, config: Config) -> Mapping[str, Any]:
        """Returns what `LlavaOnevisionProcessor` needs to count the tokens of an image or video."""
        tower = config[TOWER]
        return {
            "processor_class": self.processor,
            "num_image_tokens": (tower["image_size"] // tower["patch_size"]) ** 2,
            "vision_feature_select_strategy": config["vision_feature_select_strategy"],
            "vision_aspect_ratio": config["vision_aspect_ratio"],
            "image_token": IMAGE_TOKEN,
            "video_token": self.marks["video_token_index"],
        }
