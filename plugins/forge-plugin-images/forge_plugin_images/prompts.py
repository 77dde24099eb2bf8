"""Prompts with images. N: images of a prompt, P: patches of a row, V: values of a patch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_core.contracts.components import Unavailable
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.data.reading import collate
from forge_kit.tokenizers import begin_of_text
from forge_plugin_images.content import MARK
from forge_plugin_images.decoding import BrokenImage, FileImage, ImageFile
from forge_plugin_images.processing import ImageProcessor
from forge_plugin_images.rows import Document, Footprint, RowFormat, Tokens
from forge_plugin_images.source import ImageDataset, default_policy
from forge_plugin_images.visuals import ImageVisual
from forge_plugin_vision import image_input

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job
    from forge_plugin_images.tile_text import TileTexts
    from forge_plugin_vision import ImageInput


class Prompts(NamedTuple):
    """Prompts for `forge_plugin_generate.generate.generate`."""

    ids: list[list[int]]
    """Tokens, and `IMAGE` at the positions of images."""
    entries: dict[str, Tensor]
    """`patches` (B, P, V), `grids` (B, N, 3) and `grid_seconds` (B, N)."""


def prompts_with_images(
    texts: Sequence[str],
    files: Sequence[str | ImageFile],
    job: Job,
    tokenizer: Tokenizer,
    *,
    bos: bool = True,
    encode: Callable[[str], list[int]] | None = None,
) -> Prompts:
    """Make prompts of texts, and of images in the order of `<image>` in them; a single text without it follows them.

    Images are resized as by the job's first source of images in files, or as such a source does by default.

    Args:
        texts: the texts of the prompts.
        files: the images, in any format that Pillow reads: paths, or where else they are.
        job: the job of the model's training.
        tokenizer: the tokenizer of the model.
        bos: whether prompts begin with the tokenizer's beginning of text, as documents do in training.
        encode: encodes the texts between images, such as those of chats, in which special tokens are spelt out; by
            default the tokenizer's own.

    Raises:
        ForgeError: the texts refer to more or fewer images, an image cannot be read, or a prompt has too many.
        JobError: the source that says how images are resized is not installed.
    """
    if len(texts) == 1 and MARK not in texts[0]:
        texts = [MARK * len(files) + texts[0]]
    marks = sum(text.count(MARK) for text in texts)
    if marks != len(files):
        message = f"the prompts have {MARK} {marks} times, and there are {len(files)} images"
        raise ForgeError(f"{message}; write it once for each image, where it stands")
    seen = image_input(job)
    processor, texts_of_tiles = _processing(job, seen, tokenizer)
    found = [FileImage(file) if isinstance(file, str) else file for file in files]
    images = iter([ImageVisual(file, processor, seen, texts_of_tiles) for file in found])
    counts = [text.count(MARK) for text in texts]
    own = [[next(images).among(count) for _ in range(count)] for count in counts]
    encode, end = encode or tokenizer.encode, tokenizer.end_of_text
    rows = [_row(text, visuals, seen, encode, end) for text, visuals in zip(texts, own, strict=True)]
    begin = begin_of_text(tokenizer) if bos else []
    prompts = [[*begin, *ids] or [tokenizer.end_of_text] for ids, _ in rows]
    return Prompts(prompts, collate([entries for _, entries in rows]))


def _processing(job: Job, seen: ImageInput, tokenizer: Tokenizer) -> tuple[ImageProcessor, TileTexts | None]:
    """Returns what makes patches of images, and the texts around them."""
    for number, source in enumerate(job.data.sources):
        if isinstance(source, ImageDataset):
            return source.processor(seen), source.tile_texts(tokenizer)
        if isinstance(source, Unavailable):  # images may be resized as it says
            raise JobError(problem.below(f"data.sources.{number}") for problem in source.error.problems)
    most = seen.patches_per_sequence // seen.images_per_sequence
    return ImageProcessor(seen.format, default_policy(seen.format), most), None


def _row(
    text: str, visuals: Sequence[ImageVisual], seen: ImageInput, encode: Callable[[str], list[int]], filler: int
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Returns the ids of a prompt, and its entries `patches` (P, V), `grids` (N, 3) and `grid_seconds` (N,)."""
    try:
        footprints = [visual.measure() for visual in visuals]
        _check_room(footprints, seen)
        patches = [visual.read() for visual in visuals]
    except BrokenImage as error:
        raise ForgeError(str(error)) from error
    parts: list[Tokens | Footprint] = []
    for number, part in enumerate(text.split(MARK)):
        parts += footprints[number - 1 : number] if number else []
        parts.append(Tokens(encode(part)))
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
        has = f"a prompt has {len(footprints)} images{tiles} with {used} patches"
        most = f"{seen.images_per_sequence} images and {seen.patches_per_sequence} patches at most"
        raise ForgeError(f"{has}, and the model was trained with {most}; use fewer or smaller images")
