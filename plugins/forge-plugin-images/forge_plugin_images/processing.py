"""From images in files to patches: decoded, resized, and cut.

V: values of a patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field, frozen

from forge_core.contracts.errors import PluginError
from forge_plugin_images.decoding import ImageDecoder, Mode
from forge_plugin_images.patches import patches_of

if TYPE_CHECKING:
    from PIL import Image

    from forge_plugin_images.image_file import ImageFile
    from forge_plugin_images.resize import Resizer
    from forge_plugin_images.resize.kinds import Size
    from forge_plugin_vision import Grid, ImageFormat


@frozen
class ImageProcessor:
    """Turns images into the patches that an encoder takes."""

    resizer: Resizer
    """What gives images their size, by the encoder's format."""
    decoder: ImageDecoder = field(factory=ImageDecoder)
    """What opens images."""

    @property
    def form(self) -> ImageFormat:
        """The encoder's format."""
        return self.resizer.form

    def read(self, file: ImageFile) -> np.ndarray:
        """Returns the patches of an encoded image, (patches, V) uint8; raises `BrokenImage`."""
        return self.patches(self.decoder.decode(file, self._mode))

    def among(self, images: int) -> ImageProcessor:
        """Returns what processes each image of a document that has this many."""
        resizer = self.resizer.among(images)
        return self if resizer is self.resizer else evolve(self, resizer=resizer)

    @property
    def _mode(self) -> Mode:
        return "L" if self.form.channels == 1 else "RGB"

    def grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the grids of an image of this size: one, or one for each tile and the overview."""
        return self.resizer.grids(size)

    def patches(self, image: Image.Image) -> np.ndarray:
        """Returns the patches of an image, one grid after the other: (patches, V) uint8.

        Raises:
            PluginError: they are more or fewer than in `grids`, for which a row has room.
        """
        # Frames of a video are RGB, also for an encoder of grey images
        if image.mode != self._mode:
            image = image.convert(self._mode)
        parts = [patches_of(np.asarray(each), self.form) for each in self.resizer.images(image)]
        patches = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(patches) != (measured := sum(grid.patches for grid in self.grids((image.height, image.width)))):
            message = f"an image of {image.height} x {image.width} pixels has {measured} patches by `grids`"
            raise PluginError(f"{type(self.resizer).__name__}: {message}, and {len(patches)} by `images`")
        return patches

    def key(self) -> list[object]:
        """Returns everything that patches depend on, other than the image."""
        form = self.form
        shape = [form.patch, form.frames, form.channels, form.grid, form.pixels, form.multiple, form.arrangements]
        return [*shape, form.resample, form.mean, *self.resizer.key(), *self.decoder.key()]
