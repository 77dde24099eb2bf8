"""Dataset `rendered_text`: words drawn as images, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le, min_len

from forge_core.contracts.components import DatasetComponent, FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import is_checked_elsewhere
from forge_plugin_images.image_file import channel_problems
from forge_plugin_vision import Grid, image_input

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.words import WordSplit
    from forge_plugin_vision import ImageInput

Range = tuple[int, int]
"""Least and greatest value, both included."""
BUILT_IN = "built-in"


def _ascending(_: Any, attribute: attrs.Attribute, value: Range) -> None:
    if value[0] > value[1]:
        raise ValueError(f"{attribute.name!r} must be [least, greatest], got {list(value)}")


@frozen(kw_only=True)
class RenderedText(DatasetComponent):
    """Reading: an image with a word in it, then the word, as many images as one wants.

    Words and letters are redrawn for each sequence, which depends on nothing but its number and these keys. By
    default the images are easy to read: one font and size, each word at the left. Held-out words are never trained on.
    """

    words: FilePath = ""
    """File with one word per line; empty: words that occur at least twice in Python's standard
    library."""
    length: Range = field(default=(3, 10), validator=_ascending)
    """Letters of a word, from and to, for words of the standard library."""
    held_out: int = field(default=256, validator=ge(0))
    """Words that are held out, chosen by a hash of the word."""
    drawings: int = field(default=20, validator=ge(1))
    """Images of each training word in an epoch; a held-out word has one."""
    size: tuple[int, int] = (0, 0)
    """Height and width of an image in pixels; [0, 0]: the encoder's, if it has a fixed size."""
    fonts: tuple[FilePath, ...] = field(default=(BUILT_IN,), validator=min_len(1))
    """Fonts to choose from: `built-in` (Pillow's), a file, or one that matplotlib has, such as `DejaVuSansMono`."""
    held_out_fonts: tuple[FilePath, ...] = ()
    """Fonts of held-out words; empty: `fonts`."""
    text_size: Range = field(default=(14, 14), validator=and_(deep_iterable(gt(0)), _ascending))
    """Size of the letters in pixels, from and to."""
    advance: int = field(default=0, validator=ge(0))
    """Pixels from one letter to the next; 0: as the font has it."""
    placement: Literal["start", "anywhere"] = "start"
    """Where a word stands: at the left, in the middle of the height, or anywhere in the image."""
    jitter: int = field(default=0, validator=ge(0))
    """Pixels by which each letter may be moved to the right and down."""
    noise: float = field(default=0.0, validator=ge(0))
    """Standard deviation of noise added to each pixel, in levels of 255."""
    ink: Range = field(default=(0, 0), validator=and_(deep_iterable(and_(ge(0), le(255))), _ascending))
    """Grey of the letters, from and to: 0 is black."""
    paper: Range = field(default=(255, 255), validator=and_(deep_iterable(and_(ge(0), le(255))), _ascending))
    """Grey around them, from and to: 255 is white."""
    seed: int = field(default=0, validator=ge(0))
    """Seed of the drawings."""

    def documents(self) -> Iterator[str]:
        """Yields the words to train on, which a tokenizer may be trained on too."""
        yield from self.word_split().training

    def build(self, context: BuildContext) -> Dataset:
        """Returns the drawn words.

        Raises:
            JobError: `problems` has one, or no word fits into an image or a row.
        """
        from forge_plugin_images.word_images import word_images

        if context.tokenizer is None:
            raise JobError(NO_TOKENIZER)
        seen = image_input(context.job)
        if problems := list(self._size_problems(seen)):
            raise JobError(problems)
        return word_images(self, context, context.tokenizer, seen, self.image_size(seen))

    def word_split(self) -> WordSplit:
        """Returns the words of both parts; raises `JobError` if there are none."""
        from forge_plugin_images.words import words_of_file, words_of_stdlib

        found = words_of_file(self.words) if self.words else words_of_stdlib(*self.length)
        return found.split(self.held_out)

    def image_size(self, seen: ImageInput) -> tuple[int, int]:
        """Returns height and width of each image, for a model that has `seen` as its input."""
        if self.size != (0, 0) or seen.format.grid is None:
            return self.size
        rows, columns = seen.format.grid
        return rows * seen.format.patch, columns * seen.format.patch

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the tokenizer, the size of images, all fonts at their largest size, and the file of words."""
        if job.data.tokenizer is None:
            yield Problem("", NO_TOKENIZER)
        try:
            yield from self._size_problems(image_input(job))
        except JobError as error:
            yield Problem("", error.problems[0].message)
        yield from self._font_problems()
        if self.words and not is_checked_elsewhere():
            yield from self._word_problems()

    def _size_problems(self, seen: ImageInput) -> Iterator[Problem]:
        form, (height, width) = seen.format, self.image_size(seen)
        step, grid = form.patch * form.multiple, form.grid
        yield from channel_problems(form)
        if height <= 0 or width <= 0 or height % step or width % step:
            message = (
                f"{list(self.size)}: height and width must be multiples of {step} pixels for this encoder and adapter"
            )
            yield Problem("size", f"{message}, such as [{2 * step}, {8 * step}]")
        elif form.arrangements and not grid and (height // step, width // step) not in form.arrangements:
            pairs = [[rows * step, columns * step] for rows, columns in form.arrangements]
            yield Problem("size", f"{list(self.size)}, but the encoder takes images in tiles, of one of {pairs}")
        elif grid and (height, width) != (grid[0] * form.patch, grid[1] * form.patch):
            own = [grid[0] * form.patch, grid[1] * form.patch]
            yield Problem("size", f"{list(self.size)}, but the encoder takes images of {own}; leave size out")
        elif (patches := Grid(1, height // form.patch, width // form.patch).patches) > seen.patches_per_sequence:
            room = f"model.vision.patches_per_sequence = {seen.patches_per_sequence}"
            yield Problem("size", f"an image of {height} x {width} pixels has {patches} patches, and {room}; raise it")

    def _word_problems(self) -> Iterator[Problem]:
        try:
            self.word_split()
        except JobError as error:
            yield from error.problems

    def _font_problems(self) -> Iterator[Problem]:
        from forge_plugin_images.fonts import load_font

        for key in ("fonts", "held_out_fonts"):
            for name in getattr(self, key):
                try:
                    load_font(name, self.text_size[1])
                except JobError as error:
                    yield Problem(key, error.problems[0].message)


NO_TOKENIZER = 'words need a tokenizer; add a table [data.tokenizer], for example with type = "bytes"'
