"""Datasets `sound_text` and `sound_text_stream`: sounds with texts, seen as spectrograms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.source import DocumentDataset
from forge_plugin_images.stream_dataset import StreamDataset
from forge_plugin_vision import Grid, image_input

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_images.documents import Part
    from forge_plugin_images.records import Record
    from forge_plugin_images.spectrograms import Spectrogram
    from forge_plugin_images.visuals import VisualSource
    from forge_plugin_vision import ImageInput


def _ascending(_: Any, attribute: attrs.Attribute, value: tuple[float, float]) -> None:
    if not value[0] < value[1]:
        raise ValueError(f"{attribute.name!r} must be [lower, upper], the lower value first, not {list(value)}")


@frozen(kw_only=True, slots=False)
class TranscribedSounds(DocumentDataset):
    """Pairs of a sound and a text: a transcript, or a description.

    A sound is a WAV file of any rate. Its logarithmic mel spectrogram is a grey image, which the model's encoder sees
    as any other; a long one is several images side by side. Its positions are `SOUND` (-3), by which `moma` and `mot`
    tell it from images.
    """

    sound: str = "sound"
    """The key of a record with its sound: a path or the bytes."""
    text: str = "text"
    """The key of a record with its text."""
    prompt: str = ""
    """The key of a record with a text between sound and text that is not learned, like a question; empty: none."""
    max_patches: int = field(default=0, validator=ge(0))
    """Patches of an image at most, for encoders of any size: a longer sound is several. 0: the model's for a sequence,
    shared by its images."""
    bands: int = field(default=0, validator=ge(0))
    """Mel bands: the height of the image, a multiple of the encoder's patch. 0: the encoder's height, or 64 where it
    has none."""
    hop: float = field(default=0.01, validator=gt(0.0))
    """Seconds from one spectrum to the next: the width of a pixel."""
    window: float = field(default=0.025, validator=gt(0.0))
    """Seconds that a spectrum is of."""
    frequencies: tuple[float, float] = field(default=(0.0, 8000.0), validator=_ascending)
    """Hertz: where the lowest band begins, and the highest ends."""
    decibels: tuple[float, float] = field(default=(-80.0, 0.0), validator=_ascending)
    """Levels that are black and white; a sine of full scale has 0."""

    def documents(self) -> Iterator[str]:
        """Yields the texts of documents that are not held out."""
        return (record.text(self.text, "text") for record in self.training_records())

    def parts(self, record: Record, visuals: VisualSource, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yields the sound as spectrogram images, the prompt if any, and the text, which alone is learned."""
        from forge_plugin_images.rows import Tokens
        from forge_plugin_images.sound_visuals import SoundVisual

        value, text, seen = record.value(self.sound, "sound"), record.text(self.text, "text"), visuals.seen
        yield SoundVisual(visuals.file(record, value), self.spectrogram(seen), seen, self.spectra(seen))
        if self.prompt and (prompt := record.text(self.prompt, "prompt")):
            yield Tokens(tokenizer.encode(prompt), False)
        yield Tokens(tokenizer.encode(text), True, len(text.encode()))

    def spectrogram(self, seen: ImageInput) -> Spectrogram:
        """Returns how sounds become images, for a model that has `seen` as its input."""
        from forge_plugin_images.spectrograms import Spectrogram

        return Spectrogram(self.height(seen), self.hop, self.window, self.frequencies, self.decibels)

    def height(self, seen: ImageInput) -> int:
        """Returns the mel bands."""
        if self.bands:
            return self.bands
        step = seen.format.patch * seen.format.multiple
        # 64 bands, rounded up to a multiple of what the adapter merges
        return seen.format.grid[0] * seen.format.patch if seen.format.grid else -(-64 // step) * step

    def spectra(self, seen: ImageInput) -> int:
        """Returns the maximum number of spectra of an image: the encoder's width, or as many as patches suffice for."""
        form = seen.format
        if form.grid:
            return form.grid[1] * form.patch
        most = self.max_patches or seen.patches_per_sequence // seen.images_per_sequence
        columns = most // (self.height(seen) // form.patch)
        return columns // form.multiple * form.multiple * form.patch

    def columns(self) -> Mapping[str, str]:
        """Returns `prompt` only if it is set: empty, it names no column."""
        return {"sound": self.sound, "text": self.text} | ({"prompt": self.prompt} if self.prompt else {})

    def layout_key(self) -> list[object]:
        """Includes how spectrograms are made: the processor of images, which has another key, does not see sounds."""
        shown = [self.bands, self.hop, self.window, self.frequencies, self.decibels]
        return ["sound_text", self.sound, self.text, self.prompt, *shown]

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that spectrograms fit the encoder and the fusion."""
        yield from super().problems(job, layout)
        try:
            seen = image_input(job)
        except JobError:
            return  # said already
        yield from self._size_problems(seen)
        # Any grid shows it: a fusion that marks images has fewer positions than features.
        grid = Grid(1, 2 * seen.format.multiple, 2 * seen.format.multiple)
        if seen.positions(grid) != seen.features(grid):
            message = "the fusion marks where an image stands, and has no mark for sounds"
            yield Problem("", f"{message}; take a fusion that gives each feature a position, such as joint")

    def _size_problems(self, seen: ImageInput) -> Iterator[Problem]:
        form, height = seen.format, self.height(seen)
        step = form.patch * form.multiple
        if form.arrangements:
            yield Problem("", "the encoder or adapter takes images in tiles, and no sounds; take another")
        elif form.grid and (form.pixels or height != form.grid[0] * form.patch):
            size = form.pixels or (form.grid[0] * form.patch, form.grid[1] * form.patch)
            hint = "leave it out" if not form.pixels else "take an encoder whose patches cover its images"
            yield Problem("bands", f"{height}, and the encoder takes images of {size[0]} x {size[1]} pixels; {hint}")
        elif form.grid and self.max_patches:
            yield Problem("max_patches", f"{self.max_patches}, but the encoder takes images of one size; leave it out")
        elif self.max_patches > (room := seen.patches_per_sequence):
            message = f"{self.max_patches}, and a sequence has model.vision.patches_per_sequence = {room}"
            yield Problem("max_patches", f"{message}; lower the one or raise the other")
        elif height % step:
            yield Problem("bands", f"{height} is not divisible by {step}, the pixels of a patch of encoder and adapter")
        elif not self.spectra(seen):
            message = f"an image has room for fewer than a column of {height // form.patch} patches"
            yield Problem("max_patches", f"{message}; raise model.vision.patches_per_sequence, or lower bands")


@frozen(kw_only=True)
class SoundText(TranscribedSounds, FileDataset):
    """Pairs of a sound and a text, in files."""


@frozen(kw_only=True)
class SoundTextStream(TranscribedSounds, StreamDataset):
    """Pairs of a sound and a text, read during training from a Hugging Face dataset."""
