"""Sounds as visuals: a spectrogram is an image, or several side by side, whose positions are `SOUND`.

V: values of a patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from forge_plugin_images.patches import grid_of, patches_of
from forge_plugin_images.rows import Footprint, Places
from forge_plugin_images.spectrograms import Spectrogram
from forge_plugin_vision import SOUND, Grid

if TYPE_CHECKING:
    from forge_plugin_images.image_file import ImageFile
    from forge_plugin_vision import ImageInput


@frozen
class SoundVisual:
    """A sound. See `forge_plugin_images.visuals.Visual`."""

    file: ImageFile
    spectrogram: Spectrogram
    seen: ImageInput
    spectra: int
    """Of a piece at most, a multiple of a patch."""

    def measure(self) -> Footprint:
        """Computes the grids from the length in the header of the WAV file."""
        grids = self._grids()
        return Footprint([Places(self.seen.positions(grid), SOUND) for grid in grids], grids)

    def read(self) -> np.ndarray:
        """Computes the spectrograms, repeated for each channel of the encoder."""
        form = self.seen.format
        patches = []
        for grid, levels in zip(self._grids(), self.spectrogram.pieces(self.file, self.spectra), strict=True):
            shown = levels[:, : grid.columns * form.patch, None]  # the last piece may be shorter
            patches.append(patches_of(np.repeat(shown, form.channels, axis=2), form))
        return np.concatenate(patches)

    def check(self) -> None:
        """Computes every piece, and so reads the sound to its end."""
        for _ in self.spectrogram.pieces(self.file, self.spectra):
            pass

    def _grids(self) -> list[Grid]:
        form, spectra = self.seen.format, self.spectrogram.spectra(self.spectrogram.probe(self.file))
        whole, rest = divmod(spectra, self.spectra)
        grids = [grid_of(self.spectrogram.bands, self.spectra, form)] * whole
        if not rest:
            return grids
        step = form.patch * form.multiple
        # Padded to the width of all images, or only to whole patches where the encoder takes any size
        width = self.spectra if form.grid else -(-rest // step) * step
        return [*grids, grid_of(self.spectrogram.bands, width, form)]
