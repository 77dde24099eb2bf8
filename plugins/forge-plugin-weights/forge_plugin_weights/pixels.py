"""What a published model's image processor does, and the keys of a Forge job that do the same.

A folder has the processor's settings in `preprocessor_config.json`, or in `processor_config.json` under
`image_processor`. Mean, standard deviation and resampling are the encoder's here; how an image gets its size is a table
of the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_weights.fields import setting
from forge_plugin_weights.kinds import PIXELS, Config, Field, Flat, Unsupported

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
PROCESSOR_FILES = (PREPROCESSOR, PROCESSOR, VIDEO_PREPROCESSOR)
"""Files of a folder that say how images and videos are processed."""
ENCODER, ADAPTER = "vision.encoder", "vision.adapter"
RESAMPLING: Mapping[int, str] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

PINPOINTS = "image_grid_pinpoints"
"""Heights and widths in pixels of all tiles of an image together, to choose from."""
KNOWN = frozenset(
    (
        *("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad", "do_convert_rgb", "rescale_factor"),
        *("image_mean", "image_std", "resample", "size", "crop_size", "patch_size", "max_num_patches"),
        *("do_image_splitting", "max_image_size", "default_to_square", "pad_size", "max_image_tiles"),
        *("crop_to_patches", "min_patches", "max_patches"),
    )
)
"""Keys that `Pixels` supports."""
HARMLESS = frozenset(
    (
        *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "input_data_format"),
        *("device", "return_tensors", "disable_grouping", "image_seq_length", "_valid_processor_keys", "backend"),
        *("video_sampling", "image_processor_class"),
    )
)


def processor_of(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of a folder's image processor; empty if it has none.

    Raises:
        JobError: a file cannot be read.
    """
    for name, key in ((PREPROCESSOR, None), (PROCESSOR, "image_processor")):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, Mapping):
            raise JobError(f"{path} holds no object")
        settings = content if key is None else content.get(key)
        if isinstance(settings, Mapping) and settings:  # the second file may be without this table
            return settings
    return {}


def updated_processor(settings: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a `preprocessor_config.json`: of a file that was carried over, with the changes."""
    if not known:
        return dict(settings)
    changed = {key: settings[key] for key in ("image_mean", "image_std", "resample") if key in known}
    # Only the encoder's keys may have changed. Sizes and the like are keys of datasets, and stay as they came.
    return {**known, **changed}


@frozen(kw_only=True)
class Pixels(Field):
    """The processing of pixels: the keys of an image processor."""

    processor: str
    """The processor's class, without `ImageProcessor`."""
    mean: Sequence[float] = HALF
    """The default where no file specifies it, as are the next two."""
    std: Sequence[float] = HALF
    resample: int = 3
    written: Mapping[str, Any] = field(factory=dict)
    """Further keys that an export has; `...` stands for the image's side in pixels."""
    known: Collection[str] = ()
    """Further keys that it supports."""

    @property
    def keys(self) -> Collection[str]:
        """The settings of the folder's image processor, which are a separate file there."""
        return (PIXELS,)

    def read(self, config: Config) -> Flat:
        """Reads mean, standard deviation and resampling; raises `Unsupported` for processing that Forge has not."""
        settings: Mapping[str, Any] = config.get(PIXELS) or {}
        if unknown := [key for key in settings if key not in {*KNOWN, *HARMLESS, *self.known}]:
            raise Unsupported(f"{PREPROCESSOR} has {', '.join(unknown)}, which Forge does not know")
        resample = settings.get("resample", self.resample)
        if resample not in RESAMPLING:
            raise Unsupported(f"resample = {resample!r} in {PREPROCESSOR}; Forge has {RESAMPLING}")
        # Rounded, since files have 1 / 255 with more or fewer digits
        if settings.get("do_rescale", True) is not True or round(1 / settings.get("rescale_factor", 1 / 255)) != 255:
            raise Unsupported(f"do_rescale, rescale_factor in {PREPROCESSOR}; Forge divides pixels by 255 always")
        normalised = settings.get("do_normalize", True)
        mean = _channels(settings, "image_mean", self.mean) if normalised else (0.0,) * 3
        std = _channels(settings, "image_std", self.std) if normalised else (1.0,) * 3
        return {
            f"{ENCODER}.mean": list(mean),
            f"{ENCODER}.std": list(std),
            f"{ENCODER}.resample": RESAMPLING[resample],
        }

    def write(self, model: Flat) -> Config:
        """Writes the settings of a processor that does the same, for models that have no file of one."""
        numbers = {name: number for number, name in RESAMPLING.items()}
        return {
            PIXELS: {
                "image_processor_type": f"{self.processor}ImageProcessor",
                "do_convert_rgb": True,
                "do_resize": True,
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": list(setting(model, f"{ENCODER}.mean")),
                "image_std": list(setting(model, f"{ENCODER}.std")),
                "resample": numbers[setting(model, f"{ENCODER}.resample")],
                **self.further(model),
            }
        }

    def further(self, model: Flat) -> Config:
        """Returns the keys that say which sizes images get."""
        # `pixels` are the size of images that whole patches do not fill.
        side = max(model.get(f"{ENCODER}.pixels") or setting(model, f"{ENCODER}.size"))
        return _with_side(self.written, model, side)


@frozen(kw_only=True)
class TiledPixels(Pixels):
    """The processing of pixels for a tower that sees images in tiles."""

    def further(self, model: Flat) -> Config:
        """Returns the side of a tile and the most tiles of an image; the processor requires `do_pad`."""
        side = setting(model, f"{ENCODER}.tile")
        return {"do_pad": True, "size": {"height": side, "width": side}, "max_image_tiles": _most_tiles(model)}


@frozen(kw_only=True)
class AreaPixels(Pixels):
    """The processing of pixels for a tower with images of any size, whose area has bounds (Qwen2-VL and later)."""

    known: Collection[str] = ("temporal_patch_size", "merge_size", "min_pixels", "max_pixels")
    bounds: tuple[int, int]
    """Least and greatest number of pixels of an image that an export has, where no file specifies them."""

    def read(self, config: Config) -> Flat:
        """Reads mean and standard deviation; raises `Unsupported` if sizes differ from those in `vision_config`."""
        settings: Mapping[str, Any] = config.get(PIXELS) or {}
        for key, theirs in SHARED_SIZES.items():
            if key in settings and settings[key] != config.get(theirs, settings[key]):
                raise Unsupported(f"{key} = {settings[key]} in {PREPROCESSOR}, and vision_config has {config[theirs]}")
        model = dict(super().read(config))
        if (resample := model.pop(f"{ENCODER}.resample")) != "bicubic":
            raise Unsupported(f"resample in {PREPROCESSOR} is {resample}; this tower's images are bicubic in Forge")
        return model

    def write(self, model: Flat) -> Config:
        """Adds the resampling, which is bicubic always and no key of this encoder."""
        return super().write({**model, f"{ENCODER}.resample": "bicubic"})

    def further(self, model: Flat) -> Config:
        """Returns the sizes of a patch, and the bounds of an image's area, which the processor calls edges."""
        least, most = self.bounds
        return {
            "patch_size": setting(model, f"{ENCODER}.patch"),
            "temporal_patch_size": setting(model, f"{ENCODER}.frames"),
            "merge_size": setting(model, "vision.adapter.merge"),
            "size": {"shortest_edge": least, "longest_edge": most},
        }


@frozen(kw_only=True)
class LongestPixels(Pixels):
    """The processing of pixels for a tower with images of any size, whose longer side has a bound (Pixtral)."""

    def read(self, config: Config) -> Flat:
        """Reads mean and standard deviation; raises `Unsupported` for a patch that differs from `vision_config`."""
        given = (config.get(PIXELS) or {}).get("patch_size", patch := config.get("patch_size", 16))
        if (given not in (patch, None)) and _sides(given) != (patch, patch):
            raise Unsupported(f"patch_size = {given!r} in {PREPROCESSOR}, and vision_config has {patch}")
        model = dict(super().read(config))
        if (resample := model.pop(f"{ENCODER}.resample")) != "bicubic":
            raise Unsupported(f"resample in {PREPROCESSOR} is {resample}; this tower's images are bicubic in Forge")
        return model

    def write(self, model: Flat) -> Config:
        """Adds the resampling, which is bicubic always and no key of this encoder."""
        return super().write({**model, f"{ENCODER}.resample": "bicubic"})

    def further(self, model: Flat) -> Config:
        """Returns the size of a patch, and the bound that the published models have."""
        side = setting(model, f"{ENCODER}.patch")
        return {"patch_size": {"height": side, "width": side}, "size": {"longest_edge": LONGEST_EDGE}}


@frozen(kw_only=True)
class BudgetPixels(Pixels):
    """The processing of pixels for a tower whose images fill a number of patches (Gemma 4).

    The processor does not normalise: pixels from 0 to 1 become those from -1 to 1 in the model.
    """

    known: Collection[str] = ("max_soft_tokens", "pooling_kernel_size", "image_seq_length")

    def read(self, config: Config) -> Flat:
        """Reads mean and standard deviation behind the model's own; raises `Unsupported` for other sizes of patches."""
        settings: Mapping[str, Any] = config.get(PIXELS) or {}
        for key, default in (("patch_size", 16), ("pooling_kernel_size", 3)):
            if key in settings and settings[key] != (own := config.get(key, default)):
                raise Unsupported(f"{key} = {settings[key]} in {PREPROCESSOR}, and vision_config has {own}")
        model = dict(super().read({**config, PIXELS: {"do_normalize": False, **settings}}))
        if (resample := model.pop(f"{ENCODER}.resample")) != "bicubic":
            raise Unsupported(f"resample in {PREPROCESSOR} is {resample}; this tower's images are bicubic in Forge")
        # 2 ((x - mean) / std - 0.5) = (x - mean - std / 2) / (std / 2)
        halves = [deviation / 2 for deviation in model[f"{ENCODER}.std"]]
        mean = [mean + half for mean, half in zip(model[f"{ENCODER}.mean"], halves, strict=True)]
        return {f"{ENCODER}.mean": mean, f"{ENCODER}.std": halves}

    def write(self, model: Flat) -> Config:
        """Adds the resampling, which is bicubic always and no key of this encoder."""
        halves = setting(model, f"{ENCODER}.std")
        mean = [mean - half for mean, half in zip(setting(model, f"{ENCODER}.mean"), halves, strict=True)]
        std = [2 * half for half in halves]
        own = {f"{ENCODER}.mean": mean, f"{ENCODER}.std": std, f"{ENCODER}.resample": "bicubic"}
        config = super().write({**model, **own})
        plain = mean == [0.0] * 3 and std == [1.0] * 3
        return {PIXELS: {**config[PIXELS], "do_normalize": not plain}}

    def further(self, model: Flat) -> Config:
        """Returns the sizes of patches and windows, and the most features of an image in published models."""
        return {
            "patch_size": setting(model, f"{ENCODER}.patch"),
            "pooling_kernel_size": setting(model, f"{ADAPTER}.window"),
            "max_soft_tokens": SOFT_TOKENS,
        }


@frozen(kw_only=True)
class TopLeftPixels(Pixels):
    """The processing of pixels for a tower whose images stand on black of whole patches (Kimi-K2.5)."""

    known: Collection[str] = ("merge_size", "media_proc_cfg", "auto_map")

    def read(self, config: Config) -> Flat:
        """Reads mean and standard deviation; raises `Unsupported` for other sizes of patches than `vision_config`."""
        settings = top_left_settings(config.get(PIXELS) or {})
        patch, merge = config.get("patch_size") or 14, list(config.get("merge_kernel_size") or (2, 2))
        if (given := settings.get("patch_size") or patch) != patch:
            raise Unsupported(f"patch_size = {given} in {PREPROCESSOR}, and vision_config has {patch}")
        if (given := settings.get("merge_size") or merge[0]) != merge[0]:
            raise Unsupported(
                f"merge_size = {given} in {PREPROCESSOR}, and vision_config has merge_kernel_size = {merge}"
            )
        if not settings.get("do_resize", True):
            raise Unsupported(f"do_resize = false in {PREPROCESSOR}; Forge pads images to whole patches always")
        model = dict(super().read({**config, PIXELS: settings}))
        if (resample := model.pop(f"{ENCODER}.resample")) != "bicubic":
            raise Unsupported(f"resample in {PREPROCESSOR} is {resample}; this tower's images are bicubic in Forge")
        return model

    def write(self, model: Flat) -> Config:
        """Adds the resampling, which is bicubic always and no key of this encoder."""
        return super().write({**model, f"{ENCODER}.resample": "bicubic"})

    def further(self, model: Flat) -> Config:
        """Returns the sizes of patches, and the bounds that the published models have."""
        return {
            "patch_size": setting(model, f"{ENCODER}.patch"),
            "merge_size": setting(model, f"{ADAPTER}.merge"),
            "size": dict.fromkeys(("max_height", "max_width"), MOST_ON_A_SIDE),
            "max_patches": MOST_PATCHES,
        }


def top_left_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of such a processor by the names of `transformers`; files of the first models have others.

    Raises:
        Unsupported: a key in a table of such a file is not known.
    """
    table = settings.get("media_proc_cfg")
    if not table:
        return settings
    if unknown := table.keys() - {*FIRST_NAMES, *OF_CLIPS, "patch_limit_on_one_side", "fixed_output_tokens"}:
        raise Unsupported(
            f"media_proc_cfg in {PREPROCESSOR} has {', '.join(sorted(unknown))}, which Forge does not know"
        )
    if (fixed := table.get("fixed_output_tokens")) is not None:
        raise Unsupported(f"fixed_output_tokens = {fixed} in {PREPROCESSOR}; sizes of images follow from the images")
    side = table.get("patch_limit_on_one_side", MOST_ON_A_SIDE)
    own = {theirs: table[key] for key, theirs in FIRST_NAMES.items() if key in table}
    return {**settings, **own, "size": dict.fromkeys(("max_height", "max_width"), side)}


FIRST_NAMES: Mapping[str, str] = {
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_size",
    "in_patch_limit": "max_patches",
    "image_mean": "image_mean",
    "image_std": "image_std",
}
"""Keys of the table of the first Kimi-K2.5, and their names in `transformers`."""
OF_CLIPS = (
    *("in_patch_limit_each_frame", "in_patch_limit_video", "sample_fps", "max_num_frames_each_video"),
    *("temporal_merge_kernel_size", "timestamp_mode", "config_type"),
)
"""Keys of that table that mean nothing for images."""
MOST_PATCHES, MOST_ON_A_SIDE = 16384, 512
"""Patches of an image of Kimi-K2.5, and along its sides, at most; black around it may add some."""
SOFT_TOKENS = 280
"""Features of an image at most in Gemma 4."""
LONGEST_EDGE = 1540
"""Pixels of the longer side of an image in Mistral Small 3.1 and later."""
SHARED_SIZES: Mapping[str, str] = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
"""Keys of such a processor, and the keys of `vision_config` that mean the same."""


OF_IMAGES = ("image_processor_type", "size", PINPOINTS, "do_pad")
"""Keys of an image processor that a video processor has not, or has another value of."""


def video_processor(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the content of a `video_preprocessor_config.json`.

    Args:
        settings: the keys of the image processor.
        name: the class of the video processor, whose bounds of frames and pixels remain its own.
    """
    # Mean, resampling and patches are the same for images and frames.
    shared = {key: value for key, value in settings.items() if key not in OF_IMAGES}
    size = settings.get("size", {})  # of every frame, or bounds of the area of images
    return {"video_processor_type": name, **shared, **({"size": size} if "height" in size else {})}


def _most_tiles(model: Flat) -> int:
    return max(rows * columns for rows, columns in setting(model, f"{ENCODER}.arrangements"))


def _with_side(keys: Mapping[str, Any], model: Flat, side: int) -> dict[str, Any]:
    """The further keys of an export, with the sizes of a model's images."""
    named = {"patch_size": setting(model, f"{ENCODER}.patch")}
    filled: dict[str, Any] = {}
    for key, value in keys.items():
        inner = _with_side(value, model, side) if isinstance(value, Mapping) else value
        filled[key] = named.get(key, side) if inner is ... else inner
    return filled


def _channels(settings: Mapping[str, Any], key: str, default: Sequence[float]) -> Sequence[float]:
    values = settings.get(key) or default
    values = [values] * 3 if isinstance(values, int | float) else values
    if len(values) != 3:
        raise Unsupported(f"{key} = {values!r} in {PREPROCESSOR}; Forge's images have 3 channels")
    return [float(value) for value in values]


@frozen
class ImageTable:
    """How a job's images become those that the published model saw: tables below each `[[data.sources]]`."""

    resize: Mapping[str, Any]
    """The table `resize`, with its type."""
    differences: Sequence[str] = ()
    """What Forge's images differ in all the same."""
    texts: Mapping[str, str] = field(factory=dict)
    """The table `tile_text`; empty: it has none."""
    images: int = 1
    """Images that one becomes at most."""
    image_token: str = ""
    """The text that the chat template writes for an image, if it is known to write one."""

    def source(self) -> Mapping[str, Any]:
        """Returns a table `[[data.sources]]` with these tables, of which the path is anything."""
        texts = {"tile_text": self.texts} if self.texts else {}
        return {"type": "forge-plugin-images/image_text", "path": "images.jsonl", "resize": self.resize, **texts}

    def lines(self) -> Sequence[str]:
        """Returns what a user has to know, a line each."""
        nearly = "nearly " if self.differences else ""
        table = f"resize = {{ {_settings(self.resize)} }}"
        first = f"Images are {nearly}as the published model's with, in each table [[data.sources]]: {table}"
        texts = [f"and below it [data.sources.tile_text] with {_settings(self.texts)}"] if self.texts else []
        chats = [f'and for chats image_token = "{self.image_token}"'] if self.image_token else []
        return [first, *texts, *chats, *(f"but {difference}" for difference in self.differences)]


def _settings(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())


VIDEOS = "forge-plugin-images/frames"
"""The type of a table `[data.sources.video]`."""


def with_videos(source: Mapping[str, Any], videos: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a table `[[data.sources]]` that shows videos too, by the keys of `VisionLanguageArchitecture.videos`."""
    return {**source, "type": "forge-plugin-images/interleaved", "video": {"type": VIDEOS, **videos}}


def video_line(videos: Mapping[str, Any]) -> str:
    """Returns what a user has to know to show videos likewise."""
    sampling = ", ".join(f"{key} = {json.dumps(value)}" for key, value in videos["sampling"].items())
    keys = [f"{key} = {json.dumps(value)}" for key, value in videos.items() if key != "sampling"]
    settings = ", ".join([*keys, f"sampling = {{ {sampling} }}"])
    return f"Videos are shown as to the published model with, in a table [data.sources.video]: {settings}"


def image_table(config: Config, model: Flat) -> ImageTable | None:
    """Returns the keys of a dataset for a model's images; None if no file specifies how they are processed.

    Args:
        config: with the processor's keys under `PIXELS`.
        model: the keys of `[model]`.

    Raises:
        JobError: a size in that file is of another type than sizes have.
    """
    settings: Mapping[str, Any] = config.get(PIXELS) or {}
    if not settings:
        return None
    try:
        return _image_table(settings, model)
    # The file may hold any type; to check each key's would repeat what the functions below do with it.
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        message = "the keys that give images their size cannot be read"
        raise JobError(f"{PREPROCESSOR}: {message} ({type(error).__name__}: {error})") from error


def _image_table(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    if f"{ENCODER}.arrangements" in model:
        return _tiled(settings, model)
    if f"{ADAPTER}.arrangements" in model:
        return _joined(settings, model)
    if model.get(f"{ENCODER}.last_norm"):
        return _on_black(settings, model)
    if "merge_size" in settings:
        return _by_area(settings, model)
    if model.get(f"{ENCODER}.rotary_theta"):
        return _of_tiles(settings, model)
    if f"{ADAPTER}.standardise" in model:
        return _by_budget(settings, model)
    if f"{ENCODER}.rates_in_turns" in model:
        return _by_longest_side(settings, model)
    # The encoders of the cases above have no size.
    height, width = model.get(f"{ENCODER}.pixels") or model[f"{ENCODER}.size"]
    if model.get("fusion.prefix"):
        return ImageTable({"type": "stretch"}, texts=BEGIN_BEHIND)
    if "max_num_patches" in settings:
        return ImageTable({"type": "fill", "max_patches": settings["max_num_patches"]})
    if "crop_to_patches" in settings:
        return _by_aspect(settings, (height, width))
    if "max_image_size" in settings:
        return _split(settings, (height, width))
    return _of_one_size(settings, (height, width))


def _of_one_size(settings: Mapping[str, Any], sides: tuple[int, int]) -> ImageTable:
    """Of SigLIP, CLIP and LLaVA."""
    height, width = sides
    size = _sides(settings.get("crop_size") if settings.get("do_center_crop") else settings.get("size"))
    differences = []
    if size not in ((height, width), None):
        differences.append(f"they are {size[0]} x {size[1]} there, and {height} x {width} by config.json")
    if not settings.get("do_resize", True):
        differences.append("they are not resized there")
    if settings.get("do_pad"):
        return ImageTable({"type": "pad"}, differences)
    if settings.get("do_center_crop"):
        given = settings.get("size")
        short = given.get("shortest_edge") if isinstance(given, Mapping) else given
        if short != height or height != width:
            differences.append(f"their shorter side becomes {short} before the middle is taken")
        return ImageTable({"type": "crop"}, differences)
    return ImageTable({"type": "stretch"}, differences)


def _joined(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of LLaVA-NeXT and LLaVA-OneVision."""
    side, differences = max(model.get(f"{ENCODER}.pixels") or model[f"{ENCODER}.size"]), []
    given = settings.get("size") or {}
    if _sides(given) not in ((side, side), None) or given.get("shortest_edge", side) != side:
        differences.append(f"their tiles are {given} there, and {side} x {side} by config.json")
    pairs = [[rows * side, columns * side] for rows, columns in model[f"{ADAPTER}.arrangements"]]
    if settings.get(PINPOINTS, pairs) != pairs:
        differences.append(f"{PINPOINTS} are others there than in config.json, by which features are joined")
    # LLaVA-OneVision: its processor cuts an image into tiles only if the prompt has no other.
    several = {"max_tiled_images": 1} if model[f"{ADAPTER}.max_feature_tiles"] else {}
    return ImageTable({"type": "any_resolution", **several}, differences)


def _tiled(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Llama 3.2 Vision."""
    side, most, differences = model[f"{ENCODER}.tile"], settings.get("max_image_tiles", 4), []
    if _sides(settings.get("size")) not in ((side, side), None):
        differences.append(f"their tiles are {settings['size']} there, and {side} x {side} by config.json")
    # In the order of `get_all_supported_aspect_ratios` of transformers: encodings go by the index in this list.
    pairs = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    if [*map(tuple, model[f"{ENCODER}.arrangements"])] != pairs:
        differences.append(f"they have all arrangements of {most} tiles there, which config.json has not")
    return ImageTable({"type": "canvas"}, differences)


def _by_area(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Qwen2.5-VL and Qwen3-VL."""
    area, size = model[f"{ENCODER}.patch"] ** 2, settings.get("size") or {}
    # As `Qwen2VLImageProcessor`: the old names have precedence over `size`, and the numbers are its defaults.
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    room = model["vision.patches_per_sequence"]
    # Rounded inwards, so that both bounds hold
    keys = {"type": "native", "min_patches": -(-least // area), "max_patches": min(most // area, room)}
    differences = []
    if most // area > room:
        message = f"they have up to {most // area} patches there, and a sequence of this model has room for {room}"
        differences.append(f"{message}: raise model.vision.patches_per_sequence and max_patches")
    if least % area or most % area:
        differences.append(f"their area is {least} to {most} pixels there, which are no whole patches")
    return ImageTable(keys, differences)


ROW_TEXT: Mapping[str, str] = {"feature_row": "[IMG_BREAK]", "after": "[IMG_END]"}
"""Texts between the rows of features of Mistral 3, and behind the last one."""
PLACE = "[IMG]"


def _by_longest_side(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Mistral 3."""
    size, differences = settings.get("size") or {"longest_edge": 1024}, []  # the default of its class
    longest = size.get("longest_edge") or max(size.values())
    if "longest_edge" not in size:
        differences.append(f"their sides have the bounds {size} there, and {longest} both here")
    step = model[f"{ENCODER}.patch"] * model[f"{ADAPTER}.merge"]
    patches, room = (-(-longest // step) * model[f"{ADAPTER}.merge"]) ** 2, model["vision.patches_per_sequence"]
    if patches > room:
        message = f"they have up to {patches} patches there, and a sequence of this model has room for {room}"
        differences.append(f"{message}: raise model.vision.patches_per_sequence")
    return ImageTable({"type": "longest", "longest_side": longest}, differences, ROW_TEXT, image_token=PLACE)


def _on_black(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Kimi-K2.5, whose chat template writes the texts around an image."""
    settings, differences = top_left_settings(settings), []
    size, most = settings.get("size") or {}, settings.get("max_patches") or MOST_PATCHES
    room, side = model["vision.patches_per_sequence"], size.get("max_height") or MOST_ON_A_SIDE
    if most > room:
        message = f"they have up to {most} patches there, and a sequence of this model has room for {room}"
        differences.append(f"{message}: raise model.vision.patches_per_sequence and max_patches")
    if rest := side % model[f"{ADAPTER}.merge"]:
        differences.append(f"their sides have up to {side} patches there, and {side - rest} here")
    keys = {"type": "top_left", "max_patches": min(most, room), "max_side": side - rest}
    return ImageTable(keys, differences, {}, 1, "<|media_pad|>")


GEMMA4_TEXT: Mapping[str, str] = {"before": "<|image>", "after": "<image|>"}
"""Texts around an image of Gemma 4, which its processor writes."""


def _by_budget(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Gemma 4."""
    most = settings.get("max_soft_tokens", SOFT_TOKENS) * model[f"{ADAPTER}.window"] ** 2
    differences, room = [], model["vision.patches_per_sequence"]
    if most > room:
        message = f"they have up to {most} patches there, and a sequence of this model has room for {room}"
        differences.append(f"{message}: raise model.vision.patches_per_sequence")
    return ImageTable({"type": "budget", "max_patches": most}, differences, GEMMA4_TEXT, 1, "<|image|>")


LLAMA4_TEXT: Mapping[str, str] = {
    "before": "<|image_start|>",
    "between": "<|tile_x_separator|>",
    "row_end": "<|tile_y_separator|>",
    "overview": "<|image|>",
    "single": "<|image|>",
    "after": "<|image_end|>",
}
"""Texts around an image of Llama 4 and its tiles, which no file specifies: its processor writes them."""


def _of_tiles(settings: Mapping[str, Any], model: Flat) -> ImageTable:
    """Of Llama 4."""
    size, differences = tuple(model[f"{ENCODER}.size"]), []
    if _sides(settings.get("size")) not in (size, None):
        differences.append(f"their tiles are {settings['size']} there, and {size} by config.json")
    if settings.get("resize_to_max_canvas"):
        differences.append("they are enlarged to all of their tiles there (resize_to_max_canvas)")
    if (most := settings.get("max_patches", 16)) < 2:
        differences.append("they keep their shape there, beside black")
        return ImageTable({"type": "stretch"}, differences, LLAMA4_TEXT, 1, "<|image|>")
    keys = {"type": "canvas_tiles", "max_tiles": most, "overview": "last"}
    return ImageTable(keys, differences, LLAMA4_TEXT, most + 1, "<|image|>")  # and the overview


IMG_TEXT: Mapping[str, str] = {"before": "<img>", "after": "</img>"}
"""Texts around the tiles of InternVL."""
IMG_TOKEN = "<IMG_CONTEXT>"
BEGIN_BEHIND: Mapping[str, str] = {"after": "<bos>"}
"""PaliGemma's documents begin with their image, and the beginning of text stands behind it."""
SPLIT_TEXT: Mapping[str, str] = {
    "tile": "<fake_token_around_image><row_{row}_col_{column}>",
    "row_end": "\n",
    "overview": "\n<fake_token_around_image><global-img>",
    "single": "<fake_token_around_image><global-img>",
    "after": "<fake_token_around_image>",
}
"""Texts around the tiles of Idefics3 and SmolVLM, which no file specifies: their processors write them."""


LONGEST_SPLIT = 4096
"""Pixels of the longer side at most, whatever the processor's file has (`MAX_IMAGE_SIZE` of Idefics3)."""


def _split(settings: Mapping[str, Any], size: tuple[int, int]) -> ImageTable:
    """Of Idefics3 and SmolVLM."""
    given = (settings.get("size") or {}).get("longest_edge", 4 * 364)  # of `Idefics3ImageProcessor`
    longest = min(given, LONGEST_SPLIT)
    tile, differences = settings["max_image_size"].get("longest_edge"), []
    if longest != given:
        differences.append(f"they have a longer side of {given} pixels there before it becomes {longest}")
    is_cut = settings.get("do_image_splitting", True)
    keys = {"type": "split", "longest_side": longest, **({"overview": "last"} if is_cut else {"cut": False})}
    if (tile, tile) != size:
        differences.append(f"they are {settings['max_image_size']} there, and {size} by config.json")
    side = -(-(longest + longest % 2) // min(size))  # rounded up to an even number there
    images = side**2 + (side > 1) if is_cut else 1  # and the overview, if it is not the only tile
    return ImageTable(keys, differences, SPLIT_TEXT, images, "<image>")


def _by_aspect(settings: Mapping[str, Any], size: tuple[int, int]) -> ImageTable:
    """Of InternVL, whose processor always cuts images, regardless of `crop_to_patches`."""
    most, differences = settings.get("max_patches", 12), []
    if _sides(settings.get("size")) not in (size, None):
        differences.append(f"their tiles are {settings['size']} there, and {size} by config.json")
    if settings.get("min_patches", 1) != 1:
        differences.append(f"they have at least {settings['min_patches']} tiles there")
    if most < 2:  # one tile, without an overview
        return ImageTable({"type": "stretch"}, differences, IMG_TEXT, image_token=IMG_TOKEN)
    keys = {"type": "aspect", "max_tiles": most, "overview": "last"}
    return ImageTable(keys, differences, IMG_TEXT, most + 1, IMG_TOKEN)  # and the overview


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return size["height"], size["width"]
    return None
