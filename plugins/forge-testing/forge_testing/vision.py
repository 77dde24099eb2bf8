"""Random images and a tiny model, for tests of fusions, encoders and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent, ModelComponent
from forge_plugin_vision.adapters import MLPAdapter
from forge_plugin_vision.encoders import ViT
from forge_plugin_vision.kinds import GRIDS, IMAGE, PATCHES, SECONDS, VIDEO, Grid, image_input
from forge_plugin_vision.vision import VisionPart

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset
    from forge_plugin_vision.kinds import ImageFormat, ImageInput


def tiny_vision() -> VisionPart:
    """Returns an encoder of one block for one or two images of 4 x 4 pixels, each four positions."""
    encoder = ViT(dim=16, layers=1, heads=2, patch=2, size=(4, 4))
    return VisionPart(encoder=encoder, adapter=MLPAdapter(hidden=8), images_per_sequence=2)


def tiny_language() -> ModelComponent:
    """Returns a transformer of two layers; needs `forge-plugin-transformer`."""
    from forge_plugin_transformer import GroupedQueryAttention, Transformer

    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True)
    return Transformer(vocab_size=32, dim=16, layers=2, attention=attention)


@frozen(kw_only=True)
class RandomImages(DatasetComponent):
    """Random tokens with random images of random sizes between them, as the job's model wants them.

    A row has as many images as fit, at most `images_per_sequence`; every `text_only`-th has none.
    """

    sequences: int = field(default=64, validator=ge(1))
    """Training sequences."""
    held_out: int = field(default=8, validator=ge(0))
    """Held-out sequences."""
    vocabulary: int = 32
    """Tokens are below this."""
    text_only: int = field(default=3, validator=ge(0))
    """Every so many-th row has no image, the first included; 0: every row has some, 1: none has."""
    image_every: int = field(default=0, validator=ge(0))
    """Only every so many-th row has images, the first included; 0: `text_only` determines it."""
    video_every: int = field(default=0, validator=ge(0))
    """Every so many-th image of a row is a video of two entries of the time axis, half a second apart; 0: none is."""
    has_entries: bool = True
    """Whether rows without images have the entries of images all the same."""

    def has_images(self, number: int) -> bool:
        """Returns whether the row of this number has images."""
        if self.image_every:
            return number % self.image_every == 0
        return not self.text_only or number % self.text_only != 0

    def build(self, context: BuildContext) -> Dataset:
        """Build rows that are functions of their numbers alone; the held-out rows follow the training rows."""
        job = context.job
        held = _Rows(self, image_input(job), job.train.seq_len, self.sequences, self.held_out, None)
        return _Rows(self, image_input(job), job.train.seq_len, 0, self.sequences, held)


class _Rows:
    bytes_per_token = None

    def __init__(
        self, component: RandomImages, form: ImageInput, length: int, start: int, count: int, held_out: Dataset | None
    ) -> None:
        self._component, self._input, self._length, self._start, self._count = component, form, length, start, count
        self.held_out = held_out

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np

        component, number = self._component, self._start + index
        generator = np.random.default_rng(number)
        tokens = generator.integers(0, component.vocabulary, self._length + 1)
        text_only = not component.has_images(number)
        if text_only and not component.has_entries:
            return {"input_ids": tokens[:-1], "labels": tokens[1:]}
        grids = [] if text_only else list(self._grids(generator))
        patches = np.zeros((self._input.patches_per_sequence, self._input.format.values), np.uint8)
        used, position = 0, 1  # a token comes first, so that there is something before an image
        for grid in grids:
            patches[used : used + grid.patches] = generator.integers(0, 256, (grid.patches, patches.shape[1]))
            used += grid.patches
            tokens[position : position + self._input.positions(grid)] = VIDEO if grid.frames > 1 else IMAGE
            position += self._input.positions(grid) + 1  # a token between two images
        entry = np.zeros((self._input.images_per_sequence, 3), np.int64)
        entry[: len(grids)] = np.array(grids).reshape(-1, 3)
        labels = np.where(tokens[1:] < 0, -100, tokens[1:])  # no position learns an image
        seconds = np.where(entry[:, 0] > 1, 0.5, 0).astype(np.float32)
        ids = {"input_ids": tokens[:-1], "labels": labels}
        return {**ids, PATCHES: patches, GRIDS: entry, SECONDS: seconds}

    def _grids(self, generator: np.random.Generator) -> Iterator[Grid]:
        """Yields grids of images, as long as they fit into the row."""
        form, patches, positions = self._input.format, self._input.patches_per_sequence, self._length - 2
        every = self._component.video_every
        for number in range(1, self._input.images_per_sequence + 1):
            grid = self._grid(generator, form)
            if every and number % every == 0:
                grid = Grid(2, *grid.plain[1:])  # a clip's frames have the encoder's size
            patches -= grid.patches
            positions -= self._input.positions(grid) + 1
            if patches < 0 or positions < 0:
                return
            yield grid

    @staticmethod
    def _grid(generator: np.random.Generator, form: ImageFormat) -> Grid:
        if not form.arrangements:
            sides = generator.integers(1, 4, 2)
            rows, columns = form.grid or (int(n) * form.multiple for n in sides)
            return Grid(1, rows, columns)
        rows, columns = map(int, generator.choice(form.arrangements))
        if form.grid is None:
            return Grid(1, rows * form.multiple, columns * form.multiple)
        if not generator.integers(4):
            return Grid(1, *form.grid)
        side = form.grid[0]
        return Grid.of_tiles(rows, columns, (rows * side, columns * side - int(generator.integers(side))))
