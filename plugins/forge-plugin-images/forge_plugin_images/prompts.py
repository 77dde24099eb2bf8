"""Prompts with images and videos, whose entries are `patches` (B, P, V), `grids` (B, N, 3) and `grid_seconds` (B, N).

N: images of a prompt, P: patches of a row, V: values of a patch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_core.contracts.components import Unavailable
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.data.reading import collate
from forge_core.plugins.catalog import Catalog
from forge_kit.data.tokenizers import begin_of_text
from forge_kit.tools.commands import parse_component
from forge_plugin_generate import Prompts
from forge_plugin_images.content import MARKS, Kind
from forge_plugin_images.decoding import FileImage
from forge_plugin_images.image_file import BrokenImage, ImageFile
from forge_plugin_images.image_keys import HasImages
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.resize import AutoResize
from forge_plugin_images.rows import Document, Footprint, RowFormat, Tokens
from forge_plugin_images.source import DocumentDataset
from forge_plugin_images.video_kind import NO_CLIPS, Span, VideoComponent, Videos
from forge_plugin_images.visuals import ImageVisual, Visual
from forge_plugin_vision import image_input

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job
    from forge_plugin_images.tile_text import TileTexts
    from forge_plugin_vision import ImageInput


def prompts_with_images(
    texts: Sequence[str],
    files: Sequence[str | ImageFile],
    job: Job,
    tokenizer: Tokenizer,
    *,
    bos: bool = True,
    encode: Callable[[str], list[int]] | None = None,
    videos: Sequence[str | ImageFile] = (),
) -> Prompts:
    """Make prompts of texts, and of images and videos in the order of `<image>` and `<video>` in them.

    A single text without any of them follows them all. Images are resized, and frames of videos chosen, as by the job's
    first source that has such, or as one does by default. Without videos, `<video>` is text.

    Args:
        texts: the texts of the prompts.
        files: the images, in any format that Pillow reads: paths, or where else they are.
        job: the job of the model's training.
        tokenizer: the tokenizer of the model.
        bos: whether prompts begin with the tokenizer's beginning of text, as documents do in training.
        encode: encodes the texts between images, such as chat texts, in which special tokens are spelt out; by default
            the tokenizer's own method.
        videos: the videos, likewise.

    Raises:
        ForgeError: the texts refer to more or fewer images or videos, one cannot be read, a prompt has too many, or
            nothing is installed that reads videos.
        JobError: the source that sets how images are resized is not installed.
    """
    given: Mapping[Kind, Sequence[str | ImageFile]] = {"image": files, "video": videos}
    divided = _divided(texts, {kind: len(own) for kind, own in given.items()})
    seen = image_input(job)
    visuals = _visuals(given, job, seen, tokenizer)
    encode, end, rows = encode or tokenizer.encode, tokenizer.end_of_text, []
    for parts, kinds in divided:
        own = [next(visuals[kind]) for kind in kinds]
        images = kinds.count("image")  # how many a prompt has may decide how each is shown
        own = [visual.among(images) if isinstance(visual, ImageVisual) else visual for visual in own]
        rows.append(_row(parts, own, seen, encode, end))
    begin = begin_of_text(tokenizer) if bos else []
    # Generation needs one token at least: end-of-text stands for an empty prompt.
    prompts = [[*begin, *ids] or [end] for ids, _ in rows]
    return Prompts(prompts, collate([entries for _, entries in rows]))


def _divided(texts: Sequence[str], counts: Mapping[Kind, int]) -> list[tuple[list[str], list[Kind]]]:
    """Returns the parts of each text, and what stands between them; raises `ForgeError` if counts are others."""
    marks = {mark: kind for mark, kind in MARKS.items() if counts[kind] or kind == "image"}
    if len(texts) == 1 and not any(mark in texts[0] for mark in marks):
        texts = ["".join(mark * counts[kind] for mark, kind in marks.items()) + texts[0]]
    for mark, kind in marks.items():
        if (count := sum(text.count(mark) for text in texts)) != counts[kind]:
            message = f"the prompts have {mark} {count} times, and there are {counts[kind]} {kind}s"
            raise ForgeError(f"{message}; write it once for each {kind}, where it stands")
    pattern = re.compile("|".join(map(re.escape, marks)))
    return [(pattern.split(text), [marks[mark] for mark in pattern.findall(text)]) for text in texts]


def _visuals(
    given: Mapping[Kind, Sequence[str | ImageFile]], job: Job, seen: ImageInput, tokenizer: Tokenizer
) -> Mapping[Kind, Iterator[Visual]]:
    """Returns the images and the videos, in order."""
    found = {
        kind: [FileImage(file) if isinstance(file, str) else file for file in files] for kind, files in given.items()
    }
    processor, texts_of_tiles = _processing(job, seen, tokenizer) if found["image"] else (None, None)
    images = [ImageVisual(file, processor, seen, texts_of_tiles) for file in found["image"] if processor is not None]
    source = _videos(job, seen, tokenizer) if found["video"] else None
    # Without a seed, so that the same prompt shows the same frames
    clips = [source.visual(file, Span(), None) for file in found["video"] if source is not None]
    return {"image": iter(images), "video": iter(clips)}


def _videos(job: Job, seen: ImageInput, tokenizer: Tokenizer) -> Videos:
    """Returns what makes visuals of videos: as the first source that has some, or by default."""
    if not seen.format.clips:
        raise ForgeError(NO_CLIPS)
    for source in job.data.sources:
        if isinstance(source, DocumentDataset) and (component := source.video_component()) is not None:
            return component.build(seen, tokenizer)
    usual = VideoComponent.usual_type
    assert usual is not None
    name, _, type_ = usual.partition("/")
    catalog = Catalog.installed()
    if not any(offer.qualified == usual for offer in catalog.offers(VideoComponent.kind)):
        raise ForgeError(f"videos are read by {type_} of {name}, which is not installed; pip install {name}")
    return parse_component({"type": usual}, "video", VideoComponent, catalog).build(seen, tokenizer)


def _processing(job: Job, seen: ImageInput, tokenizer: Tokenizer) -> tuple[ImageProcessor, TileTexts | None]:
    """Returns what makes patches of images, and the texts around them."""
    for number, source in enumerate(job.data.sources):
        if isinstance(source, HasImages):
            return source.processor(seen), source.tile_texts(tokenizer)
        if isinstance(source, Unavailable):  # its keys may set how images are resized
            raise JobError(problem.below(f"data.sources.{number}") for problem in source.error.problems)
    return ImageProcessor(AutoResize().build(seen)), None


def _row(
    texts: Sequence[str],
    visuals: Sequence[Visual],
    seen: ImageInput,
    encode: Callable[[str], list[int]],
    filler: int,
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Returns the ids of a prompt, and its entries `patches` (P, V), `grids` (N, 3) and `grid_seconds` (N,).

    `texts` stand before, between and behind the visuals.
    """
    try:
        # Measured before anything is decoded: too many patches are an error of the user.
        footprints = [visual.measure() for visual in visuals]
        _check_room(footprints, seen)
        patches = [visual.read() for visual in visuals]
    except BrokenImage as error:
        raise ForgeError(str(error)) from error
    parts: list[Tokens | Footprint] = []
    for number, text in enumerate(texts):
        parts += footprints[number - 1 : number] if number else []
        parts.append(Tokens(encode(text)))
    document = Document.of(parts)
    rows = RowFormat(
        length=len(document.ids),
        patches=seen.patches_per_sequence,
        images=seen.images_per_sequence,
        values=seen.format.values,
        filler=filler,
    )
    return document.ids.tolist(), rows.visuals([document], patches)


def _check_room(footprints: Sequence[Footprint], seen: ImageInput) -> None:
    used, count = sum(one.patches for one in footprints), sum(len(one.grids) for one in footprints)
    if used > seen.patches_per_sequence or count > seen.images_per_sequence:
        tiles = "" if count == len(footprints) else f" (in {count} tiles)"
        kinds = "images and videos" if any(grid.frames > 1 for one in footprints for grid in one.grids) else "images"
        has = f"a prompt has {len(footprints)} {kinds}{tiles} with {used} patches"
        most = f"{seen.images_per_sequence} images and {seen.patches_per_sequence} patches at most"
        raise ForgeError(f"{has}, and the model was trained with {most}; use fewer or smaller images")
