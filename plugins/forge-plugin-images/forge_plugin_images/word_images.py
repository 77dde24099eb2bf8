"""Drawn words as training sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from PIL import Image, ImageDraw

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import digest_of
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_images.fonts import letter_width, load_font
from forge_plugin_images.patches import grid_of, patches_of
from forge_plugin_images.rows import Document, Footprint, RowFormat, Tokens

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_images.rendered_text import RenderedText
    from forge_plugin_vision import ImageInput

FORMAT = 1
"""Part of the identity: increase it when the same keys draw other images."""


@frozen
class Pen:
    """Draws words as the keys of a `RenderedText` say."""

    keys: RenderedText
    fonts: Sequence[str]
    height: int
    width: int

    def draw(self, word: str, generator: np.random.Generator) -> np.ndarray:
        """Returns (height, width, 3) uint8."""
        keys = self.keys
        image = Image.new("L", (self.width, self.height), _one_of(generator, keys.paper))
        name = self.fonts[_one_of(generator, (0, len(self.fonts) - 1))]
        size, ink = _one_of(generator, keys.text_size), _one_of(generator, keys.ink)
        font = load_font(name, size)
        _, top, _, bottom = map(int, font.getbbox(word, anchor="ls"))
        ascent, descent = font.getmetrics()
        x, baseline = 0, (self.height + ascent - descent) // 2
        if keys.placement == "anywhere":
            x = int(generator.integers(max(1, self.width - self._width_at(word, name, size) + 1)))
            baseline = _one_of(generator, (-top, max(-top, self.height - bottom - keys.jitter)))
        pen, at = ImageDraw.Draw(image), float(x)
        # One letter at a time, since `advance` and `jitter` move each of them separately
        for letter in word:
            right, down = generator.integers(0, keys.jitter + 1, 2).tolist()
            pen.text((round(at) + right, baseline + down), letter, fill=ink, font=font, anchor="ls")
            at += keys.advance or letter_width(name, size, letter)
        return self._coloured(image, generator)

    def _coloured(self, image: Image.Image, generator: np.random.Generator) -> np.ndarray:
        grey: np.ndarray = np.asarray(image, np.float32)
        if self.keys.noise:
            # Before the channels are repeated, so that images stay grey
            grey = grey + generator.normal(0, self.keys.noise, grey.shape)
        return np.repeat(grey.round().clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)

    def key(self) -> list[object]:
        """Returns all that images of a word depend on, but for the word and its number."""
        keys = self.keys
        drawn = [keys.text_size, keys.advance, keys.placement, keys.jitter, keys.noise, keys.ink, keys.paper, keys.seed]
        return [FORMAT, list(self.fonts), self.height, self.width, *drawn]

    def fits(self, word: str) -> bool:
        """Whether a word is within the image in every font, at the greatest size."""
        return max(self._width_at(word, name, self.keys.text_size[1]) for name in self.fonts) <= self.width

    def _width_at(self, word: str, name: str, size: int) -> int:
        widths = [letter_width(name, size, letter) for letter in word]
        # The last letter may be wider than the step to the next one.
        width = self.keys.advance * (len(word) - 1) + widths[-1] if self.keys.advance else sum(widths)
        return int(np.ceil(width)) + self.keys.jitter


class WordImages:
    """See `forge_core.contracts.data.Dataset`. An image, then the characters of the word in it, then end-of-text."""

    def __init__(
        self, pen: Pen, words: Sequence[str], rows: RowFormat, seen: ImageInput, tokenizer: Tokenizer, drawings: int
    ) -> None:
        self._pen, self._words, self._rows, self._form, self._drawings = pen, words, rows, seen.format, drawings
        self._tokenizer = tokenizer
        self._image = Footprint.of_images([grid_of(pen.height, pen.width, seen.format)], seen)
        self.image_positions = self._image.entries
        self.held_out: WordImages | None = None
        self.bytes_per_token: float | None = None

    def __len__(self) -> int:
        return len(self._words) * self._drawings

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        word = self.word(index)
        pixels = self.pixels(index)[:, :, : self._form.channels]  # equal ones
        return self._rows.row([self.document(word)], [patches_of(pixels, self._form)])

    def word(self, index: int) -> str:
        """Returns the word that is drawn."""
        return self._words[range(len(self))[index] % len(self._words)]

    def pixels(self, index: int) -> np.ndarray:
        """Returns the image: (height, width, 3) uint8."""
        # A generator for each row, so that rows may be read in any order and by any worker
        return self._pen.draw(self.word(index), np.random.default_rng([self._pen.keys.seed, index]))

    def document(self, word: str) -> Document:
        """Returns the entries of a row."""
        ids = [*self._tokenizer.encode(word), self._tokenizer.end_of_text]
        begin = Tokens(begin_of_text(self._tokenizer), False)
        return Document.of([begin, self._image, Tokens(ids)])

    def where(self, index: int) -> str:
        """See `HasLocation`."""
        return f"drawing {index // len(self._words)} of the word {self.word(index)!r}"

    def describe(self) -> str:
        """See `HasDescription`."""
        held = f"; held out: {self.held_out.describe()}" if self.held_out is not None else ""
        return f"{len(self._words):,} words, {self._drawings} drawings of each{held}"

    def identity(self) -> str:
        """See `HasIdentity`."""
        return digest_of(self._pen.key(), list(self._words), self._drawings)

    def cost(self, index: int) -> int:
        """Returns the patches of a sequence."""
        return self._image.patches


def word_images(
    keys: RenderedText, context: BuildContext, tokenizer: Tokenizer, seen: ImageInput, size: tuple[int, int]
) -> WordImages:
    """Returns the sequences of training words, along with the sequences of held-out words.

    Raises:
        JobError: letters, words or rows have too little room.
    """
    pens = Pen(keys, keys.fonts, *size), Pen(keys, keys.held_out_fonts or keys.fonts, *size)
    _check_height(keys, pens)
    split = keys.word_split()
    words = [_that_fit(pen, part) for pen, part in zip(pens, split, strict=True)]
    rows = RowFormat(
        length=context.job.train.seq_len,
        patches=seen.patches_per_sequence,
        images=seen.images_per_sequence,
        values=seen.format.values,
        filler=tokenizer.end_of_text,
        keeps_apart=context.job.data.packing.isolates,
    )
    training = WordImages(pens[0], words[0], rows, seen, tokenizer, keys.drawings)
    # Held-out words, too: an evaluation late in the run must not fail on a long one.
    _check_length(training, [*words[0], *words[1]], rows.length)
    if words[1]:
        # One drawing each: more would measure the same words again
        training.held_out = WordImages(pens[1], words[1], rows, seen, tokenizer, 1)
        training.bytes_per_token = _bytes_per_token(words[1], tokenizer)
    return training


def _check_height(keys: RenderedText, pens: Sequence[Pen]) -> None:
    needed = max(sum(load_font(name, keys.text_size[1]).getmetrics()) for pen in pens for name in pen.fonts)
    if needed + keys.jitter > pens[0].height:
        message = f"letters of {keys.text_size[1]} pixels need {needed + keys.jitter} pixels with their jitter"
        raise JobError([Problem("text_size", f"{message}, and images are {pens[0].height} high; draw smaller ones")])


def _that_fit(pen: Pen, words: Sequence[str]) -> list[str]:
    fitting = [word for word in words if pen.fits(word)]
    if words and not fitting:
        message = f"none of {len(words)} words fits into the {pen.width} pixels of an image, such as {words[0]!r}"
        raise JobError([Problem("text_size", f"{message}; draw smaller letters, or take wider images")])
    return fitting


def _check_length(images: WordImages, words: Sequence[str], length: int) -> None:
    longest = max(words, key=lambda word: images.document(word).needs.positions)
    if (needed := images.document(longest).needs.positions) > length:
        parts = f"{images.image_positions} for the image and {needed - images.image_positions} for {longest!r}"
        message = f"a sequence needs {needed} positions, {parts}; train.seq_len is {length}"
        raise JobError([Problem("", f"{message}, which must be at least {needed}")])


def _bytes_per_token(words: Sequence[str], tokenizer: Tokenizer) -> float:
    """Returns bytes of the words for each label, with end-of-text among the labels."""
    labels = sum(len(ids) + 1 for ids in tokenizer.encode_batch(words))
    return sum(len(word.encode()) for word in words) / labels


def _one_of(generator: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(generator.integers(bounds[0], bounds[1] + 1))
